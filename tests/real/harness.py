"""Real peers for tests: Envoy, kvcar and engine emulators on free ports, every one a context manager.

The processes themselves live in examples/local (the demo uses them too); here is what only tests need.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from examples.emulator.process import EmulatorProcess
from examples.local.client import Answer, Client
from examples.local.processes import (
    EnvoyProcess,
    KvcarProcess,
    NotReady,
    Process,
    envoy_binary,
    free_port,
    http_get,
    wait_for,
)
from examples.local.routed import Routed, routed
from examples.local.stack import TOKENIZER, Stack, kvcar_config

__all__ = [
    "TOKENIZER",
    "Answer",
    "Client",
    "EchoUpstream",
    "EmulatorProcess",
    "EnvoyProcess",
    "KvcarProcess",
    "NotReady",
    "Process",
    "Routed",
    "Stack",
    "echo_upstream",
    "envoy_binary",
    "free_port",
    "http_get",
    "kvcar_config",
    "routed",
    "shared_blocks",
    "wait_for",
]


def shared_blocks(one: Sequence[int], other: Sequence[int], block_size: int) -> int:
    """Full blocks of the common prefix of two token lists."""
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return length // block_size


@dataclass
class EchoUpstream:
    """A stand-in engine that answers with what it received."""

    address: str
    requests: list[dict[str, Any]]


@contextlib.contextmanager
def echo_upstream(*, status: int = 200) -> Iterator[EchoUpstream]:
    """An HTTP server on a free port: 200 on /health, `status` elsewhere; keeps path and headers of each request."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # an answer is one packet: the body of one would wait 40 ms for the headers' acknowledgement

        def do_GET(self) -> None:
            self._reply(200, b"ok")

        def do_POST(self) -> None:
            body = self._chunks() if "transfer-encoding" in self.headers else self._rest()
            headers = {name.lower(): value for name, value in self.headers.items()}
            requests.append({"path": self.path, "headers": headers, "bytes": len(body)})
            self._reply(status, json.dumps({"served_by": self.server.server_address[1]}).encode())

        def _rest(self) -> bytes:
            return self.rfile.read(int(self.headers.get("content-length", 0)))

        def _chunks(self) -> bytes:
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _reply(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield EchoUpstream(f"127.0.0.1:{server.server_address[1]}", requests)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
