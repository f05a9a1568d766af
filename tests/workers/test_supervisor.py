"""The supervisor over stand-ins for workers: first start, restarts with back-off, draining in turn, the admin port."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc.config import Config, ConfigError, parse
from extproc.workers import front, supervisor
from extproc.workers.place import StartFailed, admin_socket
from extproc.workers.supervisor import Supervisor

STAND_IN = """
import json, os, pathlib, signal, sys, time
number, folder = sys.argv[sys.argv.index("--number") + 1], pathlib.Path(os.environ["STAND_IN"])
starts = folder / f"starts-{number}"
starts.write_text(str(int(starts.read_text()) + 1 if starts.exists() else 1))
if (folder / f"broken-{number}").exists():
    sys.exit(7)
def end(*_):
    time.sleep(0.3 if (folder / f"slow-{number}").exists() else 0)
    (folder / f"ended-{number}").write_text(str(time.monotonic_ns()))
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print(json.dumps({"ext_proc": sys.argv[sys.argv.index("--address") + 1]}), flush=True)
while True:
    signal.pause()
"""


def config(*, drain_wait_ms: int = 0, admin: str = "127.0.0.1:0", listen: str = "127.0.0.1:0") -> Config:
    return parse(
        f"listen: {{address: '{listen}', workers: 2, drain_wait_ms: {drain_wait_ms}, drain_grace_ms: 5000}}\n"
        f"admin: {{address: '{admin}'}}\n"
        "pools: [{name: p, models: [m], tokenizer: t, instances: [{name: a, address: '10.0.0.1:1'}]}]\n"
    )


class Running:
    """A supervisor that runs in the background, and what it announced."""

    def __init__(self, folder: Path, **options: Any) -> None:
        script = folder / "stand_in.py"
        script.write_text(STAND_IN)
        self.folder = folder
        self.supervisor = Supervisor(config(**options), folder / "kvcar.yaml", (sys.executable, "-S", str(script)))
        self.announced: dict[str, Any] = {}
        self.task = asyncio.create_task(self.supervisor.run(self.announced.update))

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                if self.task.done():
                    self.task.result()
                await asyncio.sleep(0.005)

    def row(self, number: int) -> dict[str, Any]:
        return self.supervisor.rows()[number]

    def starts(self, number: int) -> int:
        return int((self.folder / f"starts-{number}").read_text())

    async def stop(self) -> None:
        self.supervisor.request_stop()
        await self.task


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.01)
    monkeypatch.setenv("STAND_IN", str(tmp_path))


async def test_a_first_start_that_fails_ends_all(tmp_path: Path) -> None:
    (tmp_path / "broken-1").touch()
    running = Running(tmp_path)
    with pytest.raises(StartFailed) as failed:
        await asyncio.wait_for(running.task, 20)
    assert failed.value.status == 7
    assert not running.announced
    assert running.row(0)["pid"] is None
    assert running.starts(1) == 1, "no second try: it would fail as the first did"
    assert not running.supervisor.directory.exists()


async def test_a_dead_worker_starts_again_with_back_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    running = Running(tmp_path)
    await running.until(lambda: running.announced)
    assert [row["state"] for row in running.supervisor.rows()] == ["running", "running"]
    assert os.stat(running.supervisor.directory).st_mode & 0o777 == 0o700
    other = running.row(0)["pid"]
    for restarts in (1, 2):
        os.kill(running.row(1)["pid"], signal.SIGKILL)
        await running.until(lambda: running.row(1)["restarts"] == restarts and running.row(1)["state"] == "running")  # noqa: B023
        assert running.row(1)["last_exit_status"] == -signal.SIGKILL
    assert running.row(0) == {**running.row(0), "pid": other, "restarts": 0}

    # one that cannot start any more is tried again and again, the other goes on
    (tmp_path / "broken-1").touch()
    os.kill(running.row(1)["pid"], signal.SIGKILL)
    await running.until(lambda: running.row(1)["restarts"] >= 5 and running.row(1)["last_exit_status"] == 7)
    assert running.row(1)["last_exit_status"] == 7
    assert list(running.supervisor.sessions()) == [0]
    told = [record.message.rpartition("again in ")[2] for record in caplog.records if "starts again" in record.message]
    assert told[:5] == ["0.01 s", "0.02 s", "0.04 s", "0.08 s", "0.16 s"]
    (tmp_path / "broken-1").unlink()
    await running.until(lambda: running.row(1)["state"] == "running")
    assert list(running.supervisor.sessions()) == [0, 1], "those that run longest first"
    await running.stop()
    assert [row["state"] for row in running.supervisor.rows()] == ["stopped", "stopped"]


async def test_one_drains_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "slow-0").touch()
    running = Running(tmp_path, drain_wait_ms=5000)
    await running.until(lambda: running.announced)
    await running.stop()
    ended = [int((tmp_path / f"ended-{number}").read_text()) for number in range(2)]
    assert ended[0] < ended[1]


async def test_stopped_while_it_starts(tmp_path: Path) -> None:
    running = Running(tmp_path)
    await running.until(lambda: all(row["pid"] for row in running.supervisor.rows()))
    await running.stop()
    assert [row["pid"] for row in running.supervisor.rows()] == [None, None]


async def test_the_admin_port_while_no_worker_answers(tmp_path: Path) -> None:
    """The stand-ins have no admin socket."""
    running = Running(tmp_path)
    await running.until(lambda: running.announced)
    answers = {}
    async with aiohttp.ClientSession(f"http://{running.announced['admin']}") as session:
        for path in ("/healthz", "/readyz", "/metrics", "/status", "/config", "/"):
            async with session.get(path) as answer:
                answers[path] = (answer.status, await answer.text())
        async with session.post("/instances/drain", json={"instance": "a"}) as answer:
            assert answer.status == 503
    assert answers["/healthz"] == (200, "ok\n")
    assert answers["/readyz"][0] == 503
    assert json.loads(answers["/readyz"][1])["workers"] == {"total": 2, "ready": 0}
    assert 'kvcar_worker_up{worker="0"} 1.0' in answers["/metrics"][1]
    for path in ("/status", "/config", "/"):
        assert answers[path] == (503, '{"error":"no worker answers"}\n')
    await running.stop()


async def test_a_taken_admin_port(tmp_path: Path) -> None:
    first = Running(tmp_path)
    await first.until(lambda: first.announced)
    second = Running(tmp_path, admin=first.announced["admin"])
    with pytest.raises(ConfigError, match="cannot listen on"):
        await second.task
    await first.stop()


async def test_a_taken_port_of_the_second_worker(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        running = Running(tmp_path, listen=f"127.0.0.1:{port - 1}")
        with pytest.raises(ConfigError, match=f"127.0.0.1:({port}|{port - 1}): Address already in use"):
            await running.task
    assert not (tmp_path / "starts-0").exists(), "nothing was started"


async def test_a_worker_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "QUICK", aiohttp.ClientTimeout(total=0.2))
    running = Running(tmp_path)
    await running.until(lambda: running.announced)
    accepted = []
    hanging = await asyncio.start_unix_server(
        lambda *streams: accepted.append(streams), admin_socket(running.supervisor.directory, 0)
    )
    async with aiohttp.ClientSession(f"http://{running.announced['admin']}") as session:
        for path, status in (("/readyz", 503), ("/metrics", 200)):
            async with asyncio.timeout(10), session.get(path) as answer:
                assert answer.status == status
    assert len(accepted) >= 2
    hanging.close()
    await running.stop()
