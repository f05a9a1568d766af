"""Engines that answer every request at once with the same reply: what is measured in front of them is the router alone.

    python -m tests.bench.static_engines COUNT MODEL ROOT TOKENS.json

Prints the ports on its first line, one engine a port, and serves until SIGTERM or the end of its input. Besides chats
they answer what routers ask before they use an engine (health, models, server info), and with TOKENS, {number of the
conversation: token ids}, the rendered prompt that vllm-router's kv_aware policy asks an engine for at each request.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

import uvloop

from tests.bench.noop_extproc import until_stopped

CHAT, RENDER = b"/v1/chat/completions", b"/v1/chat/completions/render"
CONVERSATION = re.compile(rb"You are assistant (\d+)\.")
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


def _reply(status: bytes, body: object) -> bytes:
    data = json.dumps(body).encode()
    return b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (status, len(data), data)


def replies(model: str, root: str) -> tuple[bytes, dict[bytes, bytes]]:
    """(the answer to a POST, the answers to GETs by path)."""
    chat = {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 4096, "completion_tokens": 1, "total_tokens": 4097},
    }
    models = {"object": "list", "data": [{"id": model, "object": "model", "root": root, "max_model_len": 1 << 20}]}
    info = {"model_path": root, "model_id": model, "tokenizer_path": root, "served_model_name": model}
    asked = {b"/v1/models": models, b"/health": {}, b"/version": {"version": "0.23.0"}}
    asked |= dict.fromkeys((b"/get_server_info", b"/server_info", b"/get_model_info", b"/model_info"), info)
    return _reply(b"200 OK", chat), {path: _reply(b"200 OK", body) for path, body in asked.items()}


class Engine(asyncio.Protocol):
    """HTTP/1.1 with a content length, requests one after another on a connection."""

    def __init__(self, chat: bytes, asked: dict[bytes, bytes], rendered: dict[bytes, bytes]) -> None:
        self._chat, self._asked, self._prompts = chat, asked, rendered
        self._missing = _reply(b"404 Not Found", {})
        self._data = bytearray()
        self._need = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        held = self._data
        held += data
        while len(held) >= self._need:
            end = held.find(b"\r\n\r\n")
            if end < 0:
                return
            found = LENGTH.search(held, 0, end)
            self._need = end + 4 + (int(found[1]) if found else 0)
            if len(held) < self._need:
                return
            method, path, *_ = *bytes(held[: held.index(b"\r")]).split(b" "), b""
            if method not in (b"GET", b"POST"):
                self._transport.close()  # a router that tries whether this is gRPC
                return
            path = path.partition(b"?")[0]
            answer = self._chat if path == CHAT else self._asked.get(path, self._missing)
            if path == RENDER:
                answer = self._rendered(bytes(held[end + 4 : end + 600]))
            self._transport.write(answer)  # type: ignore[attr-defined]
            del held[: self._need]
            self._need = 0

    def _rendered(self, start: bytes) -> bytes:
        found = CONVERSATION.search(start)
        return self._prompts.get(found[1], self._missing) if found else self._missing


async def serve(count: int, model: str, root: str, tokens: dict[str, list[int]]) -> None:
    loop = asyncio.get_running_loop()
    chat, asked = replies(model, root)
    prompts = {
        number.encode(): _reply(b"200 OK", {"request_id": number, "model": model, "token_ids": ids})
        for number, ids in tokens.items()
    }
    servers = [await loop.create_server(lambda: Engine(chat, asked, prompts), "127.0.0.1", 0) for _ in range(count)]
    print(*(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await until_stopped()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(Path(sys.argv[4]).read_text())))
