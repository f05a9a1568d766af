"""The wall clock jumps; everything that has a time limit uses the monotonic one."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from tests.faults.conftest import CONFIG, ENGINE
from tests.faults.load import Load
from tests.faults.page import Recorder
from tests.faults.test_kvcar import in_flight
from tests.real.harness import Stack, wait_for

SHIFTED = """
import time
real, real_ns = time.time, time.time_ns
def offset():
    try:
        with open({path!r}) as file:
            return int(file.read() or 0)
    except OSError:
        return 0
time.time = lambda: real() + offset()
time.time_ns = lambda: real_ns() + offset() * 10**9
"""
"""What every module finds as the wall clock. libfaketime would do it for C too, but fails absolute sleeps
on the monotonic clock (EINVAL) when its offset changes, and Linux has no namespace for the wall clock."""


@pytest.mark.faults
async def test_clock_jumps(tmp_path: Path, record: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A day ahead, then a week back, under load."""
    monkeypatch.setenv("KVCAR_TESTS_EXEC", "1")  # a fork would not read sitecustomize
    offset = tmp_path / "offset"
    offset.write_text("0", encoding="ascii")
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "sitecustomize.py").write_text(SHIFTED.format(path=str(offset)), encoding="utf-8")
    stack = Stack(tmp_path, engine_options=ENGINE, config=CONFIG)
    with stack:
        stack.kvcar.kill()
        stack.kvcar.env["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "python"), os.environ.get("PYTHONPATH", "")])
        stack.kvcar.start()
        await asyncio.to_thread(stack.kvcar.wait_ready)
        await asyncio.to_thread(stack.wait_routing)

        def shifted(low: float, high: float) -> bool:
            (latest,) = stack.kvcar.get("/decisions?limit=1")["decisions"]
            return bool(low < latest["at"] - time.time() < high)

        since = len(stack.envoy.access_log())
        async with Load(stack.url) as load:
            load.mark()
            for text, low, high in (("86400", 80_000, 90_000), ("-604800", -610_000, -600_000)):
                offset.write_text(text, encoding="ascii")
                await asyncio.to_thread(
                    wait_for, lambda low=low, high=high: shifted(low, high), "kvcar sees the changed clock"
                )
                await load.lasting(3)
            offset.write_text("0", encoding="ascii")
            began = time.monotonic()
            await asyncio.to_thread(wait_for, lambda: shifted(-60, 60), "the clock is right again")
            took = time.monotonic() - began
            await load.end()
        figures = load.figures(stack.envoy)
        undecided = sum(not row["chosen"] for row in stack.envoy.access_log()[since:])
        await asyncio.to_thread(stack.settle)
        record.add(
            "Disk and clock", "kvcar's wall clock jumps a day ahead, then a week back", figures,
            saw=f"answers; {undecided} without a decision", recovered="nothing had to; times in logs are right again",
            seconds=took,
        )  # fmt: skip
        assert figures.failed == 0, figures
        assert undecided <= figures.requests / 20
        assert in_flight(stack.kvcar) == 0
        stack.kvcar.kill()
