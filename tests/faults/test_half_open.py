"""An engine's host vanishes from the network without a word: packets are dropped, connections stay open for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.emulator.process import EmulatorProcess
from tests.faults.conftest import CONFIG, ENGINE
from tests.faults.load import Figures, Load
from tests.faults.network import FAR, Cable, Side, two_networks
from tests.faults.page import Recorder
from tests.real.harness import Stack, wait_for


class FarEngine(EmulatorProcess):
    """An engine behind the cable."""

    def __init__(self, far: Side, **options: Any) -> None:
        super().__init__(host=FAR, **options)
        self._far = far

    def start(self, *, wait: bool = True) -> FarEngine:
        begin: Callable[[], object] = super().start
        self._far(lambda: begin(wait=False))  # type: ignore[call-arg]
        if wait:
            self.wait_ready()
        return self


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_half_open(tmp_path: Path, record: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCAR_TESTS_EXEC", "1")  # a fork would be in the network of whoever forked it
    with two_networks() as (near, cable):
        near(lambda: asyncio.run(cut_and_mend(tmp_path, record, cable)))


async def cut_and_mend(folder: Path, record: Recorder, cable: Cable) -> None:
    stack = Stack(folder, config=CONFIG, engine_options=ENGINE)
    victim = FarEngine(cable.far, name="engine-0", **ENGINE)
    stack.engines[0] = victim

    def stream() -> dict[str, Any]:
        return next(row for row in stack.kvcar.get("/streams")["streams"] if row["instance"] == "engine-0")

    with stack:
        async with Load(stack.url, timeout=8.0) as load:
            cut_at = load.mark()
            cable.cut()
            await asyncio.to_thread(
                wait_for, lambda: not stream()["connected"], "the events connection is given up", timeout=120
            )
            noticed = time.monotonic() - cut_at
            failed_late = [one for one in load.seen if one.error and one.began > cut_at + 10]
            cable.mend()
            began = time.monotonic()
            await asyncio.to_thread(wait_for, lambda: stream()["connected"], "connected again", timeout=60)
            since = len(stack.envoy.access_log())
            await asyncio.to_thread(
                wait_for,
                lambda: any(row["upstream"] == victim.address for row in stack.envoy.access_log()[since:]),
                "it serves again",
                timeout=90,
            )
            took = time.monotonic() - began
            await load.end()
        figures: Figures = load.figures(stack.envoy, {victim.address})
        record.add(
            "Events and network", "half-open TCP: all packets of one engine's host dropped", figures,
            saw="what went there in the first seconds waits until its client gives up; then it is left out. "
            f"The events connection is given up after {noticed:.0f} s",
            recovered="it serves, its stream is followed", seconds=took,
        )  # fmt: skip
        assert figures.failed == 0, figures
        assert len(failed_late) <= 3, failed_late
        await asyncio.to_thread(stack.settle)
        stack.kvcar.kill()
