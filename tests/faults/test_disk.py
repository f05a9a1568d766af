"""No room on the disk for what kvcar writes: the trace log, the endpoints file, its own log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.local.stack import kvcar_config
from extproc.envoy_config import EnvoyOptions
from tests.faults.conftest import ENGINE
from tests.faults.load import Load
from tests.faults.page import Recorder
from tests.real.harness import EmulatorProcess, EnvoyProcess, KvcarProcess, free_port, wait_for

Full = tuple[Path, Callable[[int], None], Callable[[int], None]]
"""The folder that kvcar writes to, what fills its disk, what frees it; both take kvcar's pid."""


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Full]:
    """A file system of 1 MiB."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here (needs root): {mounted.stderr.strip()}")
    filler = folder / "filler"

    def fill(_pid: int) -> None:
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(b"x" * 4096):
                pass

    try:
        yield folder, fill, lambda _pid: filler.unlink()
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def file_size_limit(folder: Path) -> Iterator[Full]:
    """RLIMIT_FSIZE of 0: each write that would grow a file fails, which needs no root."""
    folder.mkdir()
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    yield (
        folder,
        lambda pid: resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY)) and None,
        lambda pid: resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited) and None,
    )


@pytest.mark.parametrize("disk", [
    pytest.param(small_disk, id="full file system", marks=pytest.mark.faults),
    pytest.param(file_size_limit, id="quota"),
])  # fmt: skip
async def test_no_room(
    tmp_path: Path, record: Recorder, disk: Callable[[Path], contextlib.AbstractContextManager[Full]]
) -> None:
    """The fleet changes meanwhile: Envoy keeps the endpoints it has, and has the new ones once there is room."""
    with contextlib.ExitStack() as exits:
        folder, fill, free = exits.enter_context(disk(tmp_path / "disk"))
        engines = [EmulatorProcess(name=f"engine-{number}", **ENGINE) for number in range(3)]
        for engine in engines:
            exits.callback(engine.stop)
            engine.start(wait=False)
        for engine in engines:
            engine.wait_ready()
        fleet, endpoints, trace = tmp_path / "fleet.json", folder / "engines.yaml", folder / "trace.jsonl"
        ext_proc = f"127.0.0.1:{free_port()}"
        config = kvcar_config(
            engines, ext_proc=ext_proc,
            pool={
                "discovery": [{"type": "file", "path": str(fleet), "interval_ms": 50}],
                "endpoints_file": {"path": str(endpoints)},
            },
            trace={"path": str(trace)},
        )  # fmt: skip
        (pool,) = config["pools"]
        rows = pool.pop("instances")

        def tell(count: int) -> None:
            beside = fleet.with_suffix(".new")
            beside.write_text(json.dumps({"instances": rows[:count]}), encoding="utf-8")
            beside.replace(fleet)

        tell(2)
        kvcar = KvcarProcess(config, tmp_path)
        # Its own log is on that disk, too.
        kvcar.folder = folder
        exits.callback(kvcar.kill)
        kvcar.start()
        await asyncio.to_thread(kvcar.wait_ready)
        await asyncio.to_thread(wait_for, endpoints.exists, "the endpoints file")
        envoy = EnvoyProcess(
            EnvoyOptions(
                engines_file=str(endpoints), ext_proc=(ext_proc,), listen="127.0.0.1:0", admin="127.0.0.1:0",
                access_log=str(tmp_path / "access.log"),
            ),
            tmp_path,
        )  # fmt: skip
        exits.callback(envoy.stop)
        envoy.start()
        await asyncio.to_thread(envoy.wait_ready)
        await asyncio.to_thread(envoy.wait_healthy, "extproc", 1)
        await asyncio.to_thread(envoy.wait_healthy, "engines", 2)

        async with Load(f"http://{envoy.address}") as load:
            await asyncio.to_thread(wait_for, lambda: traced(trace), "a trace")
            before = endpoints.read_bytes()
            load.mark()
            fill(kvcar.pid)
            tell(3)
            await asyncio.to_thread(
                wait_for, lambda: kvcar.get("/status")["endpoints_files"][0]["error"], "the error is told"
            )
            await load.more(40)
            assert endpoints.read_bytes() == before
            free(kvcar.pid)
            began = time.monotonic()
            await asyncio.to_thread(envoy.wait_healthy, "engines", 3)
            took = time.monotonic() - began
            lines = traced(trace)
            await asyncio.to_thread(wait_for, lambda: traced(trace) > lines, "the trace goes on", timeout=40)
            await load.end()
        figures = load.figures(envoy)
        kind = "file system full" if disk is small_disk else "quota used up (RLIMIT_FSIZE)"
        record.add(
            "Disk and clock", f"no room for trace, log and endpoints file: {kind}", figures,
            saw="answers; Envoy keeps the endpoints it has, /status tells the error",
            recovered="room again: the new engine is in Envoy, the trace goes on", seconds=took,
        )  # fmt: skip
        assert figures.failed == 0, figures
        assert kvcar.running
        assert not kvcar.get("/status")["endpoints_files"][0]["error"]
        assert [name for name in os.listdir(folder) if name.endswith(".new")] == []
        kvcar.signal(15)
        assert await asyncio.to_thread(lambda: kvcar.wait(timeout=10)) == 0
        assert not {line for line in trace.read_text("utf-8").splitlines() if not parses(line)}, "whole lines only"


def traced(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def parses(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True
