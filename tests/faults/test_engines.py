"""Engines die, hang, refuse and break off: only what they were serving is lost, and nothing goes to them for long."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from tests.faults.conftest import FaultStack
from tests.faults.load import Load
from tests.faults.page import Recorder
from tests.faults.test_kvcar import in_flight
from tests.real.harness import EmulatorProcess, wait_for


def state(stack: FaultStack, name: str) -> str:
    rows = stack.kvcar.get("/status")["pools"][0]["instances"]
    return str(next(row["state"] for row in rows if row["name"] == name))


def served_since(stack: FaultStack, since: int, address: str) -> bool:
    return any(row["upstream"] == address for row in stack.envoy.access_log()[since:])


async def serving_again(stack: FaultStack, victim: EmulatorProcess) -> float:
    """Seconds until a request of the running load is answered by it."""
    began, since = time.monotonic(), len(stack.envoy.access_log())
    await asyncio.to_thread(
        wait_for, lambda: served_since(stack, since, victim.address), f"answers by {victim.name}", timeout=60
    )
    return time.monotonic() - began


@pytest.mark.faults
async def test_killed(stack: FaultStack, record: Recorder) -> None:
    victim = stack.engines[0]
    async with Load(stack.url) as load:
        load.mark()
        victim.kill()
        await load.more(60)
        await asyncio.to_thread(victim.start)  # in a thread: the load runs in this one
        took = await serving_again(stack, victim)
        await load.end()
    figures = load.figures(stack.envoy, {victim.address})
    record.add(
        "Engines", "an engine killed (SIGKILL)", figures,
        saw="what it was serving broke off (503, or a cut stream); all else went to the next engine of the list",
        recovered="started again, empty: it serves and is followed", seconds=took,
    )  # fmt: skip
    assert figures.failed == 0, figures
    await asyncio.to_thread(stack.settle)
    assert in_flight(stack.kvcar) == 0


@pytest.mark.faults
async def test_refuses_connections(stack: FaultStack, record: Recorder) -> None:
    """Gone before the traffic comes: nothing was running there, so nothing may fail."""
    victim = stack.engines[1]
    async with Load(stack.url) as load:
        await load.pause()
        await asyncio.to_thread(victim.stop)
        load.mark()
        load.go()
        await load.more(60)
        await asyncio.to_thread(wait_for, lambda: state(stack, victim.name) == "unreachable", "it is left out")
        await asyncio.to_thread(victim.start)  # in a thread: the load runs in this one
        took = await serving_again(stack, victim)
        await load.end()
    figures = load.figures()
    record.add(
        "Engines", "an engine refuses connections", figures,
        saw="answers by the next engine of the list, after a retry",
        recovered="it accepts again: it serves", seconds=took,
    )  # fmt: skip
    assert figures.failed == 0, figures
    await asyncio.to_thread(stack.settle)


@pytest.mark.faults
async def test_hangs(stack: FaultStack, record: Recorder) -> None:
    victim = stack.engines[2]
    async with Load(stack.url, clients=6) as load:
        load.mark()
        victim.freeze()
        try:
            await asyncio.to_thread(
                wait_for, lambda: state(stack, victim.name) == "unreachable", "it is left out", timeout=20
            )
            # The clients of before may all be waiting there by now.
            async with Load(stack.url, clients=3, warm=0) as others:
                others.mark()
                await others.more(40)
        finally:
            victim.cont()
        took = await serving_again(stack, victim)
        await load.end()
    figures, late = load.figures(), others.figures()
    figures = replace(figures, requests=figures.requests + late.requests, failed=figures.failed + late.failed)
    record.add(
        "Engines", "an engine hangs (SIGSTOP)", figures,
        saw="its own requests wait; new ones avoid it after three missed polls of its metrics",
        recovered="SIGCONT: its requests are answered, it serves", seconds=took,
    )  # fmt: skip
    assert figures.failed == 0, figures
    await asyncio.to_thread(stack.settle)
    assert in_flight(stack.kvcar) == 0


@pytest.mark.faults
async def test_computes_nothing(stack: FaultStack, record: Recorder) -> None:
    """The worst kind: health and metrics answer, requests do not."""
    victim = stack.engines[0]
    async with Load(stack.url, clients=8) as load:
        load.mark()
        victim.control(hang=True)
        await asyncio.to_thread(wait_for, lambda: in_flight(stack.kvcar, victim.name), "somebody waits there")
        since = len(load.seen)
        await asyncio.to_thread(
            wait_for,
            lambda: len(load.seen) > since + 40 or in_flight(stack.kvcar, victim.name) == 8,
            "traffic, or none",
        )
        victim.control(hang=False)
        took = await serving_again(stack, victim)
        await load.end()
    figures = load.figures(stack.envoy)
    record.add(
        "Engines", "an engine computes nothing, its health and metrics answer", figures,
        saw="its own requests wait; its queue drives new ones away", recovered="it computes: its requests are answered",
        seconds=took,
    )  # fmt: skip
    assert figures.failed == 0, figures
    await asyncio.to_thread(stack.settle)


async def test_breaks_off_mid_stream(stack: FaultStack, record: Recorder) -> None:
    """The process stays, its requests and its cache do not: a worker that crashed and was replaced."""
    victim = stack.engines[1]
    async with Load(stack.url, clients=6) as load:
        load.mark()
        for _ in range(5):
            victim.control(restart=True)
            await load.more(8)
        took = await serving_again(stack, victim)
        await load.end()
    figures = load.figures(stack.envoy, {victim.address})
    record.add(
        "Engines", "an engine resets its connections mid-stream and loses its cache, five times", figures,
        saw="what it was serving broke off", recovered="at once: it serves, and its old cache is forgotten",
        seconds=took,
    )  # fmt: skip
    assert figures.failed == 0, figures
    await asyncio.to_thread(stack.settle)
    truth = victim.state()["ranks"][0]["gpu_blocks"]
    rows = {row["instance"]: row for row in stack.kvcar.get("/streams")["streams"]}
    assert rows[victim.name]["blocks"]["device"] == truth
    assert in_flight(stack.kvcar) == 0
