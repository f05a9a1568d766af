"""A real etcd on free ports, what xLLM's engines write into it, and a wire that can be cut. For tests."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.real.harness import Process, free_port


def etcd_binary() -> str:
    """The path of etcd; Debian's package is installed when it is missing and we may. Skips the test otherwise."""
    if not shutil.which("etcd") and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
        for words in ("update", "install -y --no-install-recommends -o DPkg::Lock::Timeout=100 etcd-server"):
            command = ["apt-get", *words.split()]
            subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return shutil.which("etcd") or pytest.skip("needs etcd: apt-get install etcd-server")


def text(key: str | bytes) -> str:
    return base64.b64encode(key.encode() if isinstance(key, str) else key).decode()


class EtcdProcess(Process):
    """One member. Its data survives `kill` and `start`; `url` stays the same."""

    def __init__(self, folder: Path, *, tls: tuple[str, ...] = (), options: tuple[str, ...] = ()) -> None:
        scheme = "https" if tls else "http"
        self.url = f"{scheme}://127.0.0.1:{free_port()}"
        self.plain = f"http://127.0.0.1:{free_port()}" if tls else self.url  # for the helpers below
        peer = f"http://127.0.0.1:{free_port()}"
        urls = self.url if self.plain == self.url else f"{self.url},{self.plain}"
        command = [
            etcd_binary(), "--data-dir", str(folder / "etcd"),
            "--listen-client-urls", urls, "--advertise-client-urls", urls,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
            "--heartbeat-interval", "20", "--election-timeout", "200", *tls, *options,
        ]  # fmt: skip
        super().__init__("etcd", command, folder)
        self._token: str | None = None

    def wait_ready(self) -> None:
        def served() -> bool:
            try:
                return bool(self.call("maintenance/status", {}))
            except (OSError, ValueError):
                return False

        self._wait_for(served, "an answer")

    def call(self, path: str, body: dict[str, Any]) -> Any:
        headers = {} if self._token is None else {"Authorization": self._token}
        request = urllib.request.Request(f"{self.plain}/v3/{path}", json.dumps(body).encode(), headers, method="POST")
        with urllib.request.urlopen(request, timeout=5) as response:
            return json.load(response)

    def put(self, key: str, value: str | bytes, *, lease: str | None = None) -> None:
        self.call("kv/put", {"key": text(key), "value": text(value), **({"lease": lease} if lease else {})})

    def delete(self, key: str) -> None:
        self.call("kv/deleterange", {"key": text(key)})

    def move(self, before: str, after: str, value: str) -> None:
        """Delete and put in one transaction."""
        operations = [
            {"request_delete_range": {"key": text(before)}},
            {"request_put": {"key": text(after), "value": text(value)}},
        ]
        self.call("kv/txn", {"success": operations})

    def lease(self, seconds: int) -> str:
        return str(self.call("lease/grant", {"TTL": str(seconds)})["ID"])

    def compact(self) -> None:
        revision = self.call("kv/range", {"key": text("x")})["header"]["revision"]
        self.call("kv/compaction", {"revision": revision, "physical": True})

    def require_password(self, password: str) -> None:
        """Authentication on; the helpers here go on as root."""
        self.call("auth/user/add", {"name": "root", "password": password})
        self.call("auth/role/add", {"name": "root"})
        self.call("auth/user/grant", {"user": "root", "role": "root"})
        self.call("auth/enable", {})
        self._token = self.call("auth/authenticate", {"name": "root", "password": password})["token"]


def registration(address: str, *, kind: int = 0, incarnation: str = "i1", dp_size: int = 1, **more: Any) -> str:
    """What an xLLM engine writes of itself."""
    fields = {"name": address, "rpc_address": address, "type": kind, "incarnation_id": incarnation, "dp_size": dp_size}
    return json.dumps({"register_ts_ms": 1, "backend_type": "xllm", **fields, **more})


class Wire:
    """A TCP forwarder: `cut` breaks all connections and refuses new ones until `mend`; `freeze` passes nothing on."""

    def __init__(self) -> None:
        self.connections = 0
        self.whole = True
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.url = ""

    def cut(self) -> None:
        self.whole = False
        for writer in self._writers:
            writer.transport.abort()

    def mend(self) -> None:
        self.whole = True
        self._flowing.set()

    def freeze(self) -> None:
        self._flowing.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        if not self.whole:
            writer.transport.abort()
            return
        self.connections += 1
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
        self._writers |= {writer, there_writer}
        with contextlib.suppress(OSError):
            await asyncio.gather(self._copy(reader, there_writer), self._copy(there_reader, writer))
        self._writers -= {writer, there_writer}

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def wire(to: str) -> AsyncIterator[Wire]:
    """A wire to `to` (http://host:port); connect to its `url`."""
    made, port = Wire(), int(to.rpartition(":")[2])
    server = await asyncio.start_server(lambda reader, writer: made._serve(reader, writer, port), "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
        made.mend()
        made.cut()
