"""A source at work on a fleet of its own, for the tests of sources."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from kvindex.discovery.base import FleetFeed, Source
from kvindex.fleet import Fleet, FleetChange, Instance


class Running:
    """`feed` and `fleet` as the source left them, `changes` and `problems` as they came."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.feed = _Feed(self.fleet, name="test")
        self.changes: list[FleetChange] = []
        self.fleet.listen(self.changes.append)
        self.task: asyncio.Task[None] | None = None

    @property
    def instances(self) -> dict[str, Instance]:
        return dict(self.fleet.snapshot())

    @property
    def addresses(self) -> dict[str, str]:
        return {name: one.address for name, one in self.fleet.snapshot().items()}

    async def until(self, condition: Callable[[], bool], *, seconds: float = 15.0) -> None:
        """Waits for the condition; fails when the source ends, or the deadline passes."""
        async with asyncio.timeout(seconds):
            while not condition():
                assert self.task is None or not self.task.done(), self.task
                await asyncio.sleep(0.005)


class _Feed(FleetFeed):
    def __init__(self, fleet: Fleet, *, name: str) -> None:
        super().__init__(fleet, name=name)
        self.problems: list[str | None] = []

    def problem(self, text: str | None) -> None:
        super().problem(text)
        self.problems.append(text)


@asynccontextmanager
async def running(source: Source) -> AsyncIterator[Running]:
    """The source runs inside the block, and has to be still running at its end."""
    found = Running()
    found.task = asyncio.create_task(source.run(found.feed))
    try:
        yield found
        assert not found.task.done(), found.task
    finally:
        found.task.cancel()
        with suppress(asyncio.CancelledError):
            await found.task
