"""Token ids from an engine, for models whose tokenizer or renderer cannot be loaded here.

Asks PATH/render (vLLM with --enable-scale-out: exact for every endpoint) or /tokenize (chats and texts; it knows no
truncation, no reasoning effort and no documents, so requests with those are not asked for). Answers are kept by a
digest of the request in an LRU bounded by bytes; the same request arriving many times at once is asked once. An engine
that fails is left alone for a while, and the requests pass unscored meanwhile: none waits longer than its budget. What
a client can bring about with a request (media, several prompts, a very long answer) is no failure of the engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

import orjson
from xxhash import xxh3_128_digest

from extproc.openai import Body, Endpoint
from kvindex.hashing import pack_tokens

log = logging.getLogger(__name__)

ENTRY_BYTES = 300
DENIED = (401, 403)  # kvcar sends no key: a setting of the engine, not the client's fault
DENIED_REST = 60.0  # seconds: nothing changes before somebody changes a setting
NO_VERDICT = (404, 405, 408, 429, *DENIED)  # 4xx that say nothing about the request
RENDER = {
    Endpoint.CHAT: "/v1/chat/completions/render",
    Endpoint.COMPLETIONS: "/v1/completions/render",
    Endpoint.RESPONSES: "/v1/responses/render",
    Endpoint.MESSAGES: "/v1/messages/render",
}
TOKENIZE_FIELDS = frozenset(
    ("model", "prompt", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens",
     "chat_template_kwargs")
)  # fmt: skip
TOKENIZE_LACKS = ("truncate_prompt_tokens", "reasoning_effort", "documents", "chat_template")

Post = Callable[[str, bytes, float], Awaitable[tuple[int, bytes]]]


class RemoteError(Exception):
    """No ids: the engine refused, failed, was too slow or gave no single prompt of text. `refused`: it answered that
    the request is bad."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class RemoteTokenizer:
    """Owned by one event loop."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        api: Literal["render", "tokenize"] = "render",
        max_bytes: int = 32 << 20,
        max_answer: int = 32 << 20,
        rest: float = 5.0,
        post: Post | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        urls        bases of engines of the model ("http://10.0.0.1:8000"), asked in turn
        max_answer  bytes of one answer, longer ones are dropped (about 7 a token)
        rest        seconds for which an engine that failed is not asked (a minute where it wants a key)
        post        (url, body, timeout) -> (status, body); None = aiohttp
        """
        self.max_bytes = max_bytes
        self.bytes = 0
        self.asked = 0
        self.failed = 0
        self.known = 0
        self.use(urls)
        self._api = api
        self._max_answer = max_answer
        self._rest = rest
        self._post = post or self._by_aiohttp
        self._clock = clock
        self._resting: dict[str, float] = {}
        self._turn = 0
        self._cache: OrderedDict[bytes, bytes] = OrderedDict()
        self._pending: dict[bytes, asyncio.Task[bytes]] = {}
        self._session: Any = None

    def use(self, urls: Sequence[str]) -> None:
        """The engines to ask from now on."""
        self._urls = [url.rstrip("/") for url in urls]

    async def ids(self, body: Body, budget: float) -> bytes:
        """Packed ids of the prompt. Raises RemoteError within `budget` seconds."""
        path, fields = self._question(body)
        question = _encoded(fields)
        key = xxh3_128_digest(path.encode() + question)
        found = self._cache.get(key)
        if found is not None:
            self._cache.move_to_end(key)
            self.known += 1
            return found
        task = self._pending.get(key)
        if task is None:
            task = asyncio.create_task(self._ask(path, question, budget))
            self._pending[key] = task
            task.add_done_callback(lambda done: self._answered(key, done))
        try:
            return await asyncio.wait_for(asyncio.shield(task), budget)
        except TimeoutError:
            raise RemoteError("too slow") from None

    def _question(self, body: Body) -> tuple[str, dict[str, Any]]:
        fields = body.fields
        if self._api == "render":
            path = RENDER.get(body.endpoint)
            if path is None:
                raise RemoteError(f"no render path for {body.endpoint}")
            return path, {key: value for key, value in fields.items() if key not in ("stream", "stream_options")}
        if body.endpoint not in (Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.TOKENIZE):
            raise RemoteError(f"/tokenize does not know {body.endpoint}")
        if any(fields.get(key) is not None for key in TOKENIZE_LACKS):
            raise RemoteError("/tokenize lacks a field of the request")
        return "/tokenize", {key: value for key, value in fields.items() if key in TOKENIZE_FIELDS}

    async def _ask(self, path: str, question: bytes, budget: float) -> bytes:
        now = self._clock()
        awake = [url for url in self._urls if self._resting.get(url, now) <= now]
        if not awake:
            raise RemoteError("every engine rests after a failure")
        self._turn += 1
        url = awake[self._turn % len(awake)]
        self.asked += 1
        try:
            status, answer = await self._post(url + path, question, budget)
        except (OSError, TimeoutError) as error:
            self._failure(url, type(error).__name__, self._rest)
            raise RemoteError(type(error).__name__) from None
        if status in DENIED:
            reason = f"HTTP {status}: kvcar sends no key; let {path} through without one (engine's API key, or a proxy)"
            self._failure(url, reason, max(DENIED_REST, self._rest))
            raise RemoteError(f"HTTP {status}")
        if 400 <= status < 500 and status not in NO_VERDICT:
            raise RemoteError(f"HTTP {status}", refused=True)
        try:
            if status != 200:
                raise ValueError(f"HTTP {status}")
            return pack_tokens(_ids(orjson.loads(answer)))
        except (ValueError, TypeError, OverflowError) as error:
            reason = str(error) if status != 200 else "answer without ids"
            self._failure(url, reason, self._rest)
            raise RemoteError(reason) from None

    def _failure(self, url: str, reason: str, rest: float) -> None:
        """Logged once a rest, however many questions were under way."""
        self.failed += 1
        now = self._clock()
        if self._resting.get(url, now) <= now:
            log.warning("tokenizing by %s failed (%s); not asked for %s s", url, reason, rest)
        self._resting[url] = max(now + rest, self._resting.get(url, now))

    def _answered(self, key: bytes, done: asyncio.Task[bytes]) -> None:
        del self._pending[key]
        if done.cancelled() or done.exception() is not None:
            return
        tokens = done.result()
        self._cache[key] = tokens
        self.bytes += ENTRY_BYTES + len(tokens)
        while self.bytes > self.max_bytes:
            self.bytes -= ENTRY_BYTES + len(self._cache.popitem(last=False)[1])

    async def _by_aiohttp(self, url: str, body: bytes, timeout: float) -> tuple[int, bytes]:  # noqa: ASYNC109
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(auto_decompress=False)
        limit = aiohttp.ClientTimeout(total=timeout)
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        posted = self._session.post(url, data=body, headers=headers, timeout=limit, allow_redirects=False)
        answer = bytearray()
        try:
            async with posted as response:
                async for chunk in response.content.iter_any():
                    answer += chunk
                    if len(answer) > self._max_answer:
                        raise RemoteError(f"answer over {self._max_answer} bytes")
                return response.status, bytes(answer)
        except aiohttp.ClientError as error:
            raise OSError(type(error).__name__) from None

    async def close(self) -> None:
        for task in list(self._pending.values()):
            task.cancel()
        if self._session is not None:
            await self._session.close()


def _encoded(fields: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(fields)
    except TypeError:  # integers beyond 64 bits, lone surrogates
        return json.dumps(fields).encode()


def _ids(answer: Any) -> list[int]:
    """The ids of an answer. Raises RemoteError for a valid answer without one prompt's ids, ValueError for others."""
    if isinstance(answer, list):
        if len(answer) != 1:
            raise RemoteError("not one prompt")
        answer = answer[0]
    if not isinstance(answer, dict):
        raise ValueError("no object")
    if answer.get("features"):
        raise RemoteError("media")
    ids = answer.get("token_ids", answer.get("tokens"))
    if not isinstance(ids, list):
        raise ValueError("no ids")
    if not ids:
        raise RemoteError("empty prompt")
    return ids
