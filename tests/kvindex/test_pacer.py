"""The event thread's rests, and the precedence of requests over it."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvindex.pacer import Pacer


class Thread:
    """An event thread in a time of its own: every step of work takes 0.1 s."""

    def __init__(self, budget: float, rest: float, patience: float = 2.0) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self.while_asleep: Callable[[], None] = lambda: None
        self.pacer = Pacer(budget, rest, patience, clock=lambda: self.now, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        self.while_asleep()

    def work(self, steps: int) -> None:
        for _ in range(steps):
            self.now += 0.1
            self.pacer()


def test_rests_after_each_budget_of_work() -> None:
    thread = Thread(0.5, 0.1)
    thread.work(100)
    assert thread.slept == [0.1] * thread.pacer.rests
    assert 17 <= thread.pacer.rests <= 20
    thread.now += 0.45
    thread.pacer.rested()
    thread.now += 0.4
    thread.pacer()
    assert 17 <= thread.pacer.rests <= 20, "waiting for something else was a rest too"


async def test_gives_way_at_its_next_step_while_a_request_is_at_work() -> None:
    thread = Thread(0.5, 0.1)

    async def request() -> None:
        thread.work(1)
        assert thread.slept == [1.0, 1.0], "it has slept out its patience, though its budget was not used up"

    await thread.pacer.ahead(request())


async def test_goes_on_once_the_request_is_done() -> None:
    thread = Thread(0.5, 0.1)

    async def request() -> None:
        thread.while_asleep = lambda: setattr(thread.pacer, "requested", False)  # the request ends in the first sleep
        thread.work(1)
        assert thread.slept == [1.0]

    await thread.pacer.ahead(request())


async def test_is_never_starved() -> None:
    """However many requests come, it works for its budget after its patience: in a time without an interpreter lock,
    where it never waits for its turn, that is a third."""
    thread = Thread(1.0, 0.1)

    async def requests() -> None:
        thread.work(200)

    await thread.pacer.ahead(requests())
    assert 0.3 <= 20.0 / thread.now <= 0.4
    assert thread.slept == [1.0] * thread.pacer.rests


async def test_a_request_that_waits_is_not_at_work() -> None:
    thread = Thread(0.5, 0.1)
    may, waits = asyncio.Event(), asyncio.Event()

    async def request() -> str:
        waits.set()
        await may.wait()
        return "answer"

    running = asyncio.ensure_future(_task(thread.pacer, request()))
    await waits.wait()
    await asyncio.sleep(0)
    thread.work(4)
    assert thread.slept == []
    may.set()
    assert await running == "answer"
    thread.work(1)
    assert thread.slept == [0.1], "only its own rest"


@pytest.mark.parametrize("catches", [False, True])
async def test_a_cancellation_reaches_the_request(catches: bool) -> None:
    thread = Thread(0.5, 0.1)
    seen: list[str] = []

    async def request() -> str:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            seen.append("cancelled")
            if not catches:
                raise
            await asyncio.sleep(0)
        return "caught"

    running = asyncio.ensure_future(_task(thread.pacer, request()))
    await asyncio.sleep(0)
    running.cancel()
    if catches:
        assert await running == "caught"
    else:
        with pytest.raises(asyncio.CancelledError):
            await running
    assert seen == ["cancelled"]
    thread.work(4)
    assert thread.slept == []


async def test_a_cancelled_request_is_freed_at_once() -> None:
    """Envoy ends exchanges that way: a cycle would keep each one's body until the collector comes."""
    pacer = Pacer()

    async def request() -> None:
        await asyncio.sleep(3600)

    gc.collect()
    gc.disable()
    try:
        works = []
        for _ in range(10):
            work = request()
            works.append(weakref.ref(work))
            running = asyncio.ensure_future(_task(pacer, work))
            del work
            await asyncio.sleep(0)
            running.cancel()
            await asyncio.wait([running])
            del running
        await asyncio.sleep(0)
        assert [work() for work in works] == [None] * 10
    finally:
        gc.enable()


async def test_an_error_of_the_request_ends_its_precedence() -> None:
    thread = Thread(0.5, 0.1)

    async def request() -> None:
        await asyncio.sleep(0)
        raise ValueError("of the request")

    with pytest.raises(ValueError, match="of the request"):
        await thread.pacer.ahead(request())
    thread.work(4)
    assert thread.slept == []


async def test_deadlines_and_groups_work_inside() -> None:
    pacer = Pacer()

    async def request() -> int:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.sleep(3600)
        first, second = await asyncio.gather(asyncio.sleep(0, 1), asyncio.to_thread(threading.get_ident))
        assert second != threading.get_ident()
        return first

    assert await pacer.ahead(request()) == 1


async def _task(pacer: Pacer, work: Coroutine[Any, Any, str]) -> str:
    return await pacer.ahead(work)
