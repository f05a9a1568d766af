"""What operators do every day, under load: no request may fail."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from tests.faults.conftest import ENGINE, FaultStack
from tests.faults.load import Load
from tests.faults.page import Recorder
from tests.faults.test_kvcar import in_flight
from tests.real.harness import Stack, wait_for


@pytest.mark.faults
@pytest.mark.timeout(240)
async def test_rolling_restart(tmp_path: Path, record: Recorder) -> None:
    """Two kvcar, one after the other: SIGTERM, drained, started, ready, then the other one."""
    config = {"listen": {"drain_wait_ms": 2500, "drain_grace_ms": 10_000}}
    with Stack(tmp_path, replicas=2, engine_options=ENGINE, config=config) as stack:
        async with Load(stack.url) as load:
            load.mark()
            began = time.monotonic()
            for replica in stack.replicas:
                replica.signal(signal.SIGTERM)
                assert await asyncio.to_thread(replica.wait, timeout=30) == 0
                replica.start()
                await asyncio.to_thread(replica.wait_ready)
                await asyncio.to_thread(stack.envoy.wait_healthy, "extproc", 2)
            took = (time.monotonic() - began) / 2
            await load.end()
        figures = load.figures(stack.envoy)
        marked = [row for row in stack.envoy.access_log() if row["path"] == "/v1/chat/completions"][-figures.requests :]
        unrouted = sum(not row["chosen"] for row in marked)
        record.add(
            "Operations", "two kvcar restarted in turn", figures,
            saw=f"answers; {unrouted} without a decision", recovered="one restart, drain included", seconds=took,
        )  # fmt: skip
        assert figures.failed == 0, figures
        assert unrouted < figures.requests / 10
        await asyncio.to_thread(stack.settle)
        for replica in stack.replicas:
            replica.kill()


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


async def test_configuration_read_again_and_again(stack: FaultStack, record: Recorder) -> None:
    """SIGHUP once a second, each time with another scorer, and once with a broken file."""
    kvcar = stack.kvcar
    original = kvcar.config_path.read_text("utf-8")
    tasks = threads(kvcar.pid)
    reloads = kvcar.metrics()["kvcar_config_reloads_total"]
    since = len(stack.envoy.access_log())
    try:
        async with Load(stack.url) as load:
            load.mark()
            for number in range(6):
                scorer = ("least_request", "car")[number % 2]
                broken = number == 3
                text = original.replace("scorer: car", f"scorer: {scorer}")
                kvcar.config_path.write_text("pools: 7" if broken else text, encoding="utf-8")
                kvcar.signal(signal.SIGHUP)
                await load.lasting(1)
            kvcar.config_path.write_text(original, encoding="utf-8")
            began = time.monotonic()
            kvcar.signal(signal.SIGHUP)
            wanted = [{"name": "demo", "scorer": "car"}]

            def applied() -> bool:
                status = kvcar.get("/status")
                pools = [{"name": one["name"], "scorer": one["scorer"]} for one in status["pools"]]
                return status["reload_error"] is None and pools == wanted

            await asyncio.to_thread(wait_for, applied, "the last configuration")
            took = time.monotonic() - began
            await load.end()
    finally:
        kvcar.config_path.write_text(original, encoding="utf-8")
    figures = load.figures(stack.envoy)
    marked = stack.envoy.access_log()[since:]
    record.add(
        "Operations", "the configuration read again each second, once a broken one", figures,
        saw=f"answers; {sum(not row['chosen'] for row in marked)} without a decision",
        recovered="the last file in effect", seconds=took,
    )  # fmt: skip
    assert figures.failed == 0, figures
    assert kvcar.metrics()["kvcar_config_reloads_total"] > reloads + 4
    assert kvcar.metrics()["kvcar_config_reload_failures_total"] >= 1
    assert threads(kvcar.pid) <= tasks + 6
    await asyncio.to_thread(stack.settle)
    assert in_flight(kvcar) == 0
