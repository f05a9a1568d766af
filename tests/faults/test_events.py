"""KV events stop while HTTP works: requests go on, and views are the engines' truth again afterwards."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.faults.conftest import FaultStack
from tests.faults.load import Load
from tests.faults.page import Recorder


async def views_are_true(stack: FaultStack) -> float:
    """Seconds until kvcar has applied all that the engines have published; then its blocks are theirs."""
    began = time.monotonic()
    await asyncio.to_thread(stack.settle)
    took = time.monotonic() - began
    rows = {row["instance"]: row for row in stack.kvcar.get("/streams")["streams"]}
    for engine in stack.engines:
        assert rows[engine.name]["blocks"]["device"] == engine.state()["ranks"][0]["gpu_blocks"]
    return took


@pytest.mark.parametrize(("count", "reset", "seconds"), [
    pytest.param(1, False, 2, id="one"),
    pytest.param(1, True, 8, id="one, connections lost", marks=pytest.mark.faults),
    pytest.param(3, False, 8, id="all", marks=pytest.mark.faults),
    pytest.param(3, True, 2, id="all, connections lost"),
])  # fmt: skip
async def test_partition(stack: FaultStack, record: Recorder, count: int, reset: bool, seconds: float) -> None:
    relays = [relay for engine in stack.engines[:count] for relay in engine.relays]  # type: ignore[attr-defined]
    async with Load(stack.url) as load:
        load.mark()
        for relay in relays:
            relay.stall()
            if reset:
                relay.reset()
        await load.lasting(seconds)
        await load.end()
    figures = load.figures(stack.envoy)
    for relay in relays:
        relay.go()
    took = await views_are_true(stack)
    who = "one engine" if count == 1 else "all engines"
    how = "and its connections are lost" if reset else "connections stay open"
    record.add(
        "Events and network", f"no KV events from {who} for {seconds} s, {how}", figures,
        saw="answers; cache hits there count as before until the loss is noticed" if not reset else
        "answers; that cache counts as unknown", recovered="views equal the engines' caches", seconds=took,
    )  # fmt: skip
    assert figures.failed == 0, figures
