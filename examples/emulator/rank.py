"""One data-parallel rank at work: runs its engine in real time, publishes its events, hands out its tokens.

Events of a step are published before its tokens are delivered, so a client that has its answer can be sure that the
blocks of its prompt were announced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from .engine import Engine, Request
from .faults import Faults
from .publisher import Publisher

MAX_LAG = 0.1
"""Seconds that the engine may be behind its own timing before it stops catching up (a busy machine)."""

Item = tuple[int, int | None, str | None]
"""(index of the sequence, token, finish reason); token None = the engine lost the request."""


class Rank:
    """Engine, sockets and the outputs of running requests."""

    def __init__(self, engine: Engine, publisher: Publisher, faults: Faults) -> None:
        self.engine = engine
        self.publisher = publisher
        self.faults = faults
        self.wake = asyncio.Event()
        self._outputs: dict[Request, tuple[int, asyncio.Queue[Item]]] = {}

    @property
    def pressure(self) -> int:
        """vLLM's load-balancing score: a waiting request counts four running ones."""
        return 4 * len(self.engine.waiting) + len(self.engine.running)

    def submit(self, requests: Iterable[Request], output: asyncio.Queue[Item]) -> None:
        """Queue the sequences of one HTTP request; index = position. Raises ValueError if one can never fit."""
        added: list[Request] = []
        try:
            for index, request in enumerate(requests):
                self.engine.add(request)
                added.append(request)
                self._outputs[request] = index, output
        except ValueError:
            self.abort(added)
            raise
        self.wake.set()

    def abort(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if self._outputs.pop(request, None) is not None:
                self.engine.abort(request)

    def restart(self) -> None:
        """Everything is forgotten, silently; the clients of running requests lose their connection."""
        for request in self.engine.restart():
            index, output = self._outputs.pop(request)
            output.put_nowait((index, None, None))
        self.publisher.restart()

    async def run(self) -> None:
        """Step after step, for ever."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            step = None if self.faults.hang else self.engine.schedule(loop.time())
            if step is None:
                await self._idle(loop)
                due = loop.time()
                continue
            due = max(due, loop.time() - MAX_LAG) + step.duration
            await asyncio.sleep(max(0.0, due - loop.time()))
            outcome = self.engine.finish(step)
            for batch in outcome.batches:
                self.publisher.publish(batch)
            for request, token, finish in outcome.tokens:
                entry = self._outputs.pop(request, None) if finish else self._outputs.get(request)
                if entry is not None:
                    entry[1].put_nowait((entry[0], token, finish))

    async def _idle(self, loop: asyncio.AbstractEventLoop) -> None:
        """Until there is something to do. Evictions for a load from the host tier leave on their own."""
        self.wake.clear()
        timeout = None
        if not self.faults.hang and (self.engine.waiting or self.engine.running):
            if events := self.engine.take_events():
                self.publisher.publish(events)
            ready = self.engine.next_ready
            timeout = None if ready is None else max(0.0, ready - loop.time())
        try:
            await asyncio.wait_for(self.wake.wait(), timeout)
        except TimeoutError:
            pass
