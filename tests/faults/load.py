"""Steady traffic of small chats through a gateway, every request noted: what clients see of a fault."""

from __future__ import annotations

import asyncio
import statistics
import time
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Self

import aiohttp
import orjson

from examples.local.client import Client
from tests.real.harness import EnvoyProcess

SYSTEM = "You keep a diary of the weather on a small island. Write short entries. " * 4


@dataclass(frozen=True)
class Seen:
    """One request as its client saw it; times in seconds of time.monotonic()."""

    request_id: str
    began: float
    ended: float
    error: str
    """"" = answered with 200 and complete; else the status, or the kind of exception."""

    @property
    def took(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True)
class Figures:
    """What clients saw from one moment on. Milliseconds; `failed` without those that `excused` counts."""

    requests: int
    failed: int
    excused: int
    usual: float
    median: float
    worst: float
    errors: tuple[str, ...]


class Load:
    """`clients` conversations at a time against `url`, every second answer streamed, until the context ends.

    The context begins when `warm` requests are answered, and ends when all that is under way is.
    """

    def __init__(self, url: str, *, clients: int = 4, warm: int = 16, timeout: float = 30.0, turns: int = 3) -> None:
        self.seen: list[Seen] = []
        self._url, self._clients, self._warm, self._timeout, self._turns = url, clients, warm, timeout, turns
        self._ended, self._going = asyncio.Event(), asyncio.Event()
        self._going.set()
        self._open = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._mark = time.monotonic()

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._talk(number)) for number in range(self._clients)]
        await self.more(self._warm)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()

    async def end(self) -> None:
        """No more requests; returns when those under way have ended."""
        self._ended.set()
        self._going.set()
        await asyncio.gather(*self._tasks)

    async def more(self, count: int, *, within: float = 60.0) -> None:
        """Until `count` more requests have ended."""
        async with asyncio.timeout(within):
            goal = len(self.seen) + count
            while len(self.seen) < goal:  # noqa: ASYNC110 - clients end in any order
                await asyncio.sleep(0.01)

    async def pause(self) -> None:
        """No new requests until `go`; returns when those under way have ended."""
        self._going.clear()
        while self._open:  # noqa: ASYNC110 - clients end in any order
            await asyncio.sleep(0.01)

    def go(self) -> None:
        self._going.set()

    async def lasting(self, seconds: float) -> None:
        """Traffic goes on for so long. The length of a fault, not a wait for something."""
        await asyncio.sleep(seconds)

    def mark(self) -> float:
        """The fault begins now: `figures` are about what ends from here on."""
        self._mark = time.monotonic()
        return self._mark

    def figures(
        self, envoy: EnvoyProcess | None = None, dead: Collection[str] = (), *, until: float | None = None
    ) -> Figures:
        """Excused failures: whose upstream (by Envoy's access log) was one of `dead` ("ip:port"); that began before
        `until`."""
        before = [one.took for one in self.seen if one.ended < self._mark and not one.error]
        rows = [one for one in self.seen if one.ended >= self._mark]
        bad = [one for one in rows if one.error]
        logged = {row["request_id"]: row for row in envoy.access_log()} if envoy is not None and dead and bad else {}
        excused = [
            one
            for one in bad
            if (until is not None and one.began < until)
            or (logged.get(one.request_id) or {}).get("upstream") in set(dead)
        ]
        took = [one.took for one in rows if not one.error]
        return Figures(
            requests=len(rows),
            failed=len(bad) - len(excused),
            excused=len(excused),
            usual=statistics.median(before) * 1000 if before else 0.0,
            median=statistics.median(took) * 1000 if took else 0.0,
            worst=max(took, default=0.0) * 1000,
            errors=tuple(sorted({one.error for one in bad})),
        )

    async def _talk(self, number: int) -> None:
        async with Client(self._url, timeout=self._timeout) as client:
            count = 0
            while not self._ended.is_set():
                count += 1
                messages = [{"role": "system", "content": f"{uuid.uuid4()} {SYSTEM}"}]
                for turn in range(self._turns):
                    messages.append({"role": "user", "content": f"How was day {turn}?"})
                    await self._going.wait()
                    self._open += 1
                    text = await self._ask(client, messages, stream=bool((count + turn) % 2))
                    messages.append({"role": "assistant", "content": text})
                    if self._ended.is_set():
                        break

    async def _ask(self, client: Client, messages: Sequence[dict[str, str]], *, stream: bool) -> str:
        request_id, began, error, text = str(uuid.uuid4()), time.monotonic(), "", "Nothing."
        body = {"model": "demo", "messages": list(messages), "max_tokens": 4}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            answer = await client.raw("/v1/chat/completions", orjson.dumps(body), headers={"x-request-id": request_id})
            error = "" if answer.status == 200 else str(answer.status)
            text = answer.text or text
        except (aiohttp.ClientError, EOFError, TimeoutError, OSError) as problem:
            error = type(problem).__name__
            await asyncio.sleep(0.05)  # a client that hammers a closed port would only measure itself
        self._open -= 1
        self.seen.append(Seen(request_id, began, time.monotonic(), error))
        await asyncio.sleep(0.02)  # clients think a little, and leave some of the cores to the others
        return text
