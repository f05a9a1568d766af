"""Envoy restarts: what went through it is lost with it, and kvcar counts nothing of that any more."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from tests.faults.conftest import FaultStack
from tests.faults.load import Load
from tests.faults.page import Recorder
from tests.faults.test_kvcar import decided
from tests.faults.test_traffic import idle
from tests.real.harness import wait_for


@pytest.mark.faults
async def test_envoy_killed(stack: FaultStack, record: Recorder) -> None:
    async with Load(stack.url) as load:
        load.mark()
        killed = time.monotonic()
        stack.envoy.kill()
        await idle(stack)
        stack.envoy.start()
        await asyncio.to_thread(stack.envoy.wait_ready)
        began, since = time.monotonic(), len(stack.envoy.access_log())
        await asyncio.to_thread(wait_for, lambda: decided(stack.envoy, since), "a decision")
        up = time.monotonic()
        await load.more(20)
        await load.end()
    away = [one for one in load.seen if one.error and one.ended >= killed]
    late = [one for one in away if one.began > up]
    figures = load.figures()
    figures = replace(figures, failed=len(late), excused=len(away) - len(late))
    record.add(
        "Envoy and clients", "Envoy killed and started again", figures,
        saw="refused connections while there was none; kvcar's count of requests in flight returned to zero at once",
        recovered="from ready to the first decision", seconds=up - began,
    )  # fmt: skip
    assert not late, late
    await idle(stack)
