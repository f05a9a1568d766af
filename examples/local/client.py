"""A small OpenAI client that measures: the answer, the engine's own count of cached tokens, the time to first text."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back.

    ttft, duration   seconds from sending to the first content (SSE) or the whole body (JSON), and to the end
    cached_tokens    the engine's own count, prompt_tokens likewise; 0 when it reported none
    """

    request_id: str
    status: int
    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft: float
    duration: float
    body: bytes = b""


class Client:
    """Requests to one base URL. Use it as an async context manager."""

    def __init__(self, base_url: str, *, model: str = "demo", timeout: float = 30.0) -> None:
        self.base_url = base_url
        self.model = model
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(timeout=self._timeout, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def chat(
        self, messages: Sequence[Message], *, stream: bool = False, max_tokens: int = 32, **extra: Any
    ) -> Answer:
        """One chat completion. Raises aiohttp.ClientError when the connection breaks."""
        body: dict[str, Any] = {"model": self.model, "messages": list(messages), "max_tokens": max_tokens, **extra}
        return await self.send("/v1/chat/completions", body, stream=stream)

    async def complete(
        self, prompt: str | list[int], *, stream: bool = False, max_tokens: int = 16, **extra: Any
    ) -> Answer:
        """One text completion."""
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, **extra}
        return await self.send("/v1/completions", body, stream=stream)

    async def send(
        self, path: str, body: dict[str, Any], *, stream: bool, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """A JSON request; `stream` asks for SSE with usage."""
        if stream:
            body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        return await self.raw(path, orjson.dumps(body), headers=headers)

    async def raw(self, path: str, body: bytes, *, headers: Mapping[str, str] | None = None) -> Answer:
        """Any bytes to any path; whatever comes back is read to its end."""
        request_id = str(uuid.uuid4())
        sent = {"content-type": "application/json", "x-request-id": request_id, **(headers or {})}
        started = time.perf_counter()
        assert self._session is not None, "use the client as an async context manager"
        async with self._session.post(self.base_url + path, data=body, headers=sent) as response:
            if not response.content_type.startswith("text/event-stream"):
                data = await response.read()
                elapsed = time.perf_counter() - started
                reply = _json(data) if response.status == 200 else {}
                text = "".join(_text(choice) for choice in reply.get("choices", []))
                return _answer(request_id, response.status, text, reply.get("usage"), elapsed, elapsed, data)
            text, usage, first = "", None, None
            async for event in sse(response):
                for choice in event.get("choices", []):
                    if part := _text(choice):
                        first = first or time.perf_counter() - started
                        text += part
                usage = event.get("usage") or usage
            elapsed = time.perf_counter() - started
            return _answer(request_id, response.status, text, usage, first or elapsed, elapsed, b"")


async def sse(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of a stream; the closing [DONE] is checked and left out. Raises EOFError without it."""
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        yield _json(data)
    raise EOFError("the stream ended without [DONE]")


def _json(data: bytes) -> dict[str, Any]:
    result: dict[str, Any] = orjson.loads(data)
    return result


def _text(choice: dict[str, Any]) -> str:
    """The text of a choice in any of its four forms: chat or completion, whole or streamed."""
    part = choice.get("message") or choice.get("delta") or choice
    return part.get("content") or part.get("text") or ""


def _answer(
    request_id: str, status: int, text: str, usage: dict[str, Any] | None, ttft: float, duration: float, body: bytes
) -> Answer:
    usage = usage or {}
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        request_id=request_id,
        status=status,
        text=text,
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=details.get("cached_tokens") or 0,
        completion_tokens=usage.get("completion_tokens", 0),
        ttft=ttft,
        duration=duration,
        body=body,
    )
