"""kvcar dies, hangs, is slow, or has no memory: no request fails, and routing is right again afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.faults.conftest import FaultStack
from tests.faults.load import Load
from tests.faults.page import Recorder
from tests.real.harness import EnvoyProcess, KvcarProcess, wait_for

CLOSED = {
    "buffered": "",
    # failure_mode_allow does not help where Envoy has handed the body on already
    "full duplex": "in this mode Envoy cannot go on without kvcar: 500 until its health checks have failed, then ",
}
WAITING = {
    "buffered": "requests wait for message_timeout (2 s) until two health checks have failed, then ",
    "full duplex": "in this mode Envoy has no message timeout: what kvcar had in hand waits until its client gives up; "
    "after two failed health checks ",
}


async def left_out(envoy: EnvoyProcess) -> float:
    """When Envoy's health checks have failed."""
    await asyncio.to_thread(envoy.wait_healthy, "extproc", 0)
    return time.monotonic()


def decided(envoy: EnvoyProcess, since: int) -> bool:
    """One of the requests after the first `since` of the access log was routed by kvcar."""
    return any(row["chosen"] for row in envoy.access_log()[since:])


async def routed_again(stack: FaultStack, envoy: EnvoyProcess) -> float:
    """Seconds until Envoy's health checks pass and kvcar decides requests of the running load."""
    began = time.monotonic()
    await asyncio.to_thread(envoy.wait_healthy, "extproc", 1)
    since = len(envoy.access_log())
    await asyncio.to_thread(wait_for, lambda: decided(envoy, since), "a decision", timeout=30)
    return time.monotonic() - began


@pytest.mark.faults
@pytest.mark.parametrize("mode", ["buffered", "full duplex"])
async def test_killed(stack: FaultStack, record: Recorder, mode: str) -> None:
    envoy = stack.gateway(mode)
    async with Load(f"http://{envoy.address}") as load:
        load.mark()
        stack.kvcar.kill()
        noticed = await left_out(envoy)
        await load.more(60)
        stack.kvcar.start()
        began = time.monotonic()
        await asyncio.to_thread(stack.kvcar.wait_ready)
        await routed_again(stack, envoy)
        took = time.monotonic() - began
        await load.end()
    figures = load.figures(until=noticed if mode == "full duplex" else None)
    await asyncio.to_thread(stack.settle)
    record.add(
        "kvcar", f"kvcar killed (SIGKILL), {mode} bodies", figures, saw=CLOSED[mode] + "answers of Envoy's own choice",
        recovered="process started again: decisions with a full view, from the engines' replay", seconds=took,
    )  # fmt: skip
    assert figures.failed == 0, figures
    for row in stack.kvcar.get("/streams")["streams"]:
        assert row["complete"] or row["sequence"] is None, row


@pytest.mark.parametrize("mode", ["buffered", "full duplex"])
@pytest.mark.faults
async def test_stopped(stack: FaultStack, record: Recorder, mode: str) -> None:
    envoy = stack.gateway(mode)
    async with Load(f"http://{envoy.address}") as load:
        load.mark()
        stack.kvcar.signal(signal.SIGSTOP)
        try:
            noticed = await left_out(envoy)
            await load.more(60)
        finally:
            stack.kvcar.signal(signal.SIGCONT)
        took = await routed_again(stack, envoy)
        await load.end()
    figures = load.figures(until=noticed if mode == "full duplex" else None)
    record.add(
        "kvcar", f"kvcar hangs (SIGSTOP), {mode} bodies", figures,
        saw=WAITING[mode] + "answers of Envoy's own choice",
        recovered="SIGCONT: decisions again", seconds=took,
    )  # fmt: skip
    assert figures.failed == 0, figures
    await asyncio.to_thread(stack.settle)


@pytest.mark.faults
async def test_slow(stack: FaultStack, record: Recorder) -> None:
    """Stopped four fifths of the time."""
    envoy = stack.envoy
    async with Load(stack.url) as load:
        load.mark()
        finish = time.monotonic() + 5
        try:
            while time.monotonic() < finish:
                stack.kvcar.signal(signal.SIGSTOP)
                await asyncio.sleep(0.2)
                stack.kvcar.signal(signal.SIGCONT)
                await asyncio.sleep(0.05)
        finally:
            stack.kvcar.signal(signal.SIGCONT)
        took = await routed_again(stack, envoy)
        await load.end()
    figures = load.figures(envoy)
    record.add(
        "kvcar", "kvcar slow (stopped for 200 of each 250 ms)", figures, saw="answers, later by the pauses",
        recovered="pauses end: decisions in time", seconds=took,
    )  # fmt: skip
    assert figures.failed == 0, figures


def resident(pid: int) -> int:
    """Bytes of address space."""
    return int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")


async def large(envoy: EnvoyProcess, count: int) -> list[int]:
    """Bodies of 4 MiB, all at once; their statuses."""
    body = b'{"model": "demo", "prompt": [1, 2, 3], "max_tokens": 1, "user": "' + b"x" * (4 << 20) + b'"}'

    async def one(session: aiohttp.ClientSession) -> int:
        headers = {"content-type": "application/json"}
        async with session.post(f"http://{envoy.address}/v1/completions", data=body, headers=headers) as answer:
            await answer.read()
            return answer.status

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        return list(await asyncio.gather(*(one(session) for _ in range(count))))


@pytest.mark.faults
async def test_address_space(stack: FaultStack, record: Recorder) -> None:
    """RLIMIT_AS at what the process has: allocations fail. It may live on or die; clients must not notice."""
    envoy = stack.envoy
    async with Load(stack.url) as load:
        load.mark()
        bound = resident(stack.kvcar.pid) + (8 << 20)
        resource.prlimit(stack.kvcar.pid, resource.RLIMIT_AS, (bound, resource.RLIM_INFINITY))
        statuses = await large(envoy, 24)
        await load.more(40)
        alive = stack.kvcar.running
        began = time.monotonic()
        if alive:
            unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
            resource.prlimit(stack.kvcar.pid, resource.RLIMIT_AS, unlimited)
        else:
            stack.kvcar.start()
            await asyncio.to_thread(stack.kvcar.wait_ready)
        await routed_again(stack, envoy)
        took = time.monotonic() - began
        await load.end()
    figures = load.figures(envoy)
    record.add(
        "kvcar", "no more memory for kvcar (RLIMIT_AS) under 24 bodies of 4 MiB at once", figures,
        saw=f"answers; kvcar {'lived on' if alive else 'ended'}",
        recovered="limit lifted: decisions" if alive else "process started again: decisions", seconds=took,
    )  # fmt: skip
    assert set(statuses) == {200}
    assert figures.failed == 0, figures
    await asyncio.to_thread(stack.settle)


@contextlib.contextmanager
def memory_group(name: str) -> Iterator[tuple[Path, str, str]]:
    """A memory cgroup (v1 or v2), the names of its files for the limit and the usage; skips where none can be made."""
    places = [
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
    ]
    for root, limit, usage in places:
        group = Path(root) / name
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / limit).exists():
                yield group, limit, usage
                return
        finally:
            remove_group(group)
    pytest.skip("no memory cgroup can be made here (needs root and a writable /sys/fs/cgroup)")


def remove_group(group: Path) -> None:
    """Whoever is still in it goes back to where it came from."""
    for pid in (group / "cgroup.procs").read_text("ascii").split():
        with contextlib.suppress(ProcessLookupError):
            (group.parent / "cgroup.procs").write_text(pid, encoding="ascii")
    with contextlib.suppress(OSError):
        group.rmdir()


@pytest.mark.faults
async def test_killed_for_its_memory(stack: FaultStack, record: Recorder) -> None:
    """A container's limit: the kernel kills what exceeds it."""
    envoy = stack.envoy
    with memory_group(f"kvcar-{os.getpid()}") as (group, limit, usage):
        command = stack.kvcar.command
        stack.kvcar.kill()
        stack.kvcar.command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$0" "$@"', *command]
        stack.kvcar.start()
        stack.kvcar.command = command
        await asyncio.to_thread(stack.kvcar.wait_ready)
        await asyncio.to_thread(stack.wait_routing)
        async with Load(stack.url) as load:
            load.mark()
            room = int((group / usage).read_text("ascii")) + (16 << 20)
            (group / limit).write_text(str(room), encoding="ascii")
            statuses = await large(envoy, 24)
            await asyncio.to_thread(wait_for, lambda: not stack.kvcar.running, "the kernel kills kvcar", timeout=20)
            assert stack.kvcar.wait(timeout=1) == -signal.SIGKILL
            await load.more(40)
            began = time.monotonic()
            stack.kvcar.start()
            await asyncio.to_thread(stack.kvcar.wait_ready)
            await routed_again(stack, envoy)
            took = time.monotonic() - began
            await load.end()
    figures = load.figures(envoy)
    record.add(
        "kvcar", "kvcar killed for its memory (cgroup limit) under 24 bodies of 4 MiB at once", figures,
        saw="answers of Envoy's own choice", recovered="process started again: decisions", seconds=took,
    )  # fmt: skip
    assert set(statuses) == {200}
    assert figures.failed == 0, figures
    await asyncio.to_thread(stack.settle)


def in_flight(kvcar: KvcarProcess, engine: str | None = None) -> int:
    """Requests that kvcar counts, at one engine or at all."""
    rows = [row for pool in kvcar.get("/status")["pools"] for row in pool["instances"]]
    return sum(row["in_flight"] for row in rows if engine in (None, row["name"]))
