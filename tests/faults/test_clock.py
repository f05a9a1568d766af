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

PLACES = (Path(os.environ.get("KVCAR_FAKETIME", "-")), *Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
LIBRARY = next((path for path in PLACES if path.exists()), None)


@pytest.mark.faults
@pytest.mark.skipif(LIBRARY is None, reason="libfaketime is not installed (Debian: libfaketime)")
async def test_clock_jumps(tmp_path: Path, record: Recorder) -> None:
    """A day ahead, then a week back, under load."""
    offset = tmp_path / "offset"
    offset.write_text("+0", encoding="ascii")
    stack = Stack(tmp_path, engine_options=ENGINE, config=CONFIG)
    environment = {
        "LD_PRELOAD": str(LIBRARY), "FAKETIME_TIMESTAMP_FILE": str(offset), "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }  # fmt: skip
    with stack:
        stack.kvcar.kill()
        stack.kvcar.env |= environment
        stack.kvcar.start()
        await asyncio.to_thread(stack.kvcar.wait_ready)
        await asyncio.to_thread(stack.wait_routing)

        def shifted(low: float, high: float) -> bool:
            (latest,) = stack.kvcar.get("/decisions?limit=1")["decisions"]
            return low < latest["time"] - time.time() < high

        since = len(stack.envoy.access_log())
        async with Load(stack.url) as load:
            load.mark()
            for text, low, high in (("+1d", 80_000, 90_000), ("-7d", -610_000, -600_000)):
                offset.write_text(text, encoding="ascii")
                await load.more(40)
                assert shifted(low, high), "kvcar sees the changed clock"
            offset.write_text("+0", encoding="ascii")
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
