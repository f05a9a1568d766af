"""Clients that are many, large, slow or gone."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace

import aiohttp
import pytest

from examples.local.client import sse
from tests.faults.conftest import FaultStack
from tests.faults.load import Load
from tests.faults.page import Recorder
from tests.faults.test_kvcar import in_flight
from tests.real.harness import EnvoyProcess, wait_for

STREAMS = 1300


def body(*, stream: bool, tokens: int, prompt: str | list[int] = "Once upon a time", **extra: object) -> bytes:
    return json.dumps(
        {"model": "demo", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": stream, **extra}
    ).encode()


async def idle(stack: FaultStack) -> float:
    """Seconds until nothing is in flight any more: in kvcar's status and metrics, and in the engines."""
    began = time.monotonic()

    def quiet() -> bool:
        counted = sum(
            value for name, value in stack.kvcar.metrics().items() if name.startswith("kvcar_inflight_requests")
        )
        return not counted and not in_flight(stack.kvcar) and not any(map(busy, stack.engines))

    await asyncio.to_thread(wait_for, quiet, "nothing in flight")
    return time.monotonic() - began


def busy(engine: object) -> int:
    (rank,) = engine.call("/emulator/state?blocks=0")["ranks"]  # type: ignore[attr-defined]
    return int(rank["waiting"] + rank["running"])


@pytest.mark.faults
@pytest.mark.timeout(240)
async def test_many_streams(stack: FaultStack, record: Recorder) -> None:
    """All open at once: the engines compute nothing until every one of them waits there."""
    opened = asyncio.Semaphore(64)  # connections made at a time, not requests

    async def one(session: aiohttp.ClientSession, number: int) -> str:
        data = body(stream=True, tokens=4, prompt=f"Number {number} of many stories.")
        headers = {"content-type": "application/json"}
        try:
            async with opened:
                response = await session.post(f"{stack.url}/v1/completions", data=data, headers=headers)
            async with response:
                if response.status != 200:
                    return str(response.status)
                events = [event async for event in sse(response)]
                return "" if events else "empty"
        except (aiohttp.ClientError, EOFError, TimeoutError) as error:
            return type(error).__name__

    for engine in stack.engines:
        engine.control(hang=True)
    timeout = aiohttp.ClientTimeout(total=120)
    began = time.monotonic()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        tasks = [asyncio.create_task(one(session, number)) for number in range(STREAMS)]
        await asyncio.to_thread(
            wait_for, lambda: sum(map(busy, stack.engines)) == STREAMS, "all at the engines", timeout=90
        )
        opened_in = time.monotonic() - began
        # What was too late for its budget in such a storm has passed undecided.
        decided = in_flight(stack.kvcar)
        for engine in stack.engines:
            engine.control(hang=False)
        results = await asyncio.gather(*tasks)
    took = await idle(stack)
    bad = [result for result in results if result]
    async with Load(stack.url) as load:
        load.mark()
        await load.more(20)
        await load.end()
    figures = load.figures()
    record.add(
        "Envoy and clients", f"{STREAMS:,} streams open at once",
        replace(figures, requests=STREAMS, failed=len(bad), usual=0, median=0, worst=0),
        saw=f"answers; all were open after {opened_in:.1f} s, {decided:,} of them decided by kvcar",
        recovered="nothing in flight", seconds=took,
    )  # fmt: skip
    assert not bad, bad[:5]
    assert figures.failed == 0


@pytest.mark.parametrize("mode", ["buffered", pytest.param("full duplex", marks=pytest.mark.faults)])
async def test_large_bodies(stack: FaultStack, record: Recorder, mode: str) -> None:
    """16 MiB, of which the prompt is little; and 16 MiB of token ids, which the engine refuses in its own words."""
    envoy = stack.gateway(mode)
    padded = body(stream=False, tokens=2, user="x" * (16 << 20))
    ids = body(stream=False, tokens=2, prompt=[1000 + number % 5000 for number in range((16 << 20) // 6)])
    statuses: list[int] = []

    async def send(session: aiohttp.ClientSession, data: bytes) -> int:
        headers = {"content-type": "application/json"}
        async with session.post(f"http://{envoy.address}/v1/completions", data=data, headers=headers) as response:
            await response.read()
            return response.status

    async with Load(f"http://{envoy.address}") as load, aiohttp.ClientSession() as session:
        load.mark()
        for _ in range(2):
            statuses += await asyncio.gather(*(send(session, padded) for _ in range(3)))
        refused = await send(session, ids)
        await load.more(10)
        await load.end()
    took = await idle(stack)
    figures = load.figures(envoy)
    record.add(
        "Envoy and clients", f"16 MiB a body, three at a time, {mode} bodies (figures: the small requests beside them)",
        figures, saw="answers; 16 MiB of token ids get the engine's own 400", recovered="nothing in flight",
        seconds=took,
    )  # fmt: skip
    assert set(statuses) == {200}
    assert refused == 400
    assert figures.failed == 0, figures


class Raw:
    """A client that speaks bytes."""

    def __init__(self, envoy: EnvoyProcess) -> None:
        host, _, port = envoy.address.rpartition(":")
        self._where = host, int(port)

    async def __aenter__(self) -> Raw:
        self.reader, self.writer = await asyncio.open_connection(*self._where)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def leave(self) -> None:
        """With RST, as a process that dies with unread data."""
        self.writer.transport.abort()


def head(length: int) -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % length
    )


@pytest.mark.faults
async def test_slow_bodies(stack: FaultStack, record: Recorder) -> None:
    """200 clients that send a byte now and then."""
    data = body(stream=False, tokens=2)
    async with Load(stack.url) as load:
        load.mark()
        slow = [await Raw(stack.envoy).__aenter__() for _ in range(200)]
        for client in slow:
            await client.send(head(len(data)))
        for position in range(20):
            for client in slow:
                await client.send(data[position : position + 1])
            await load.more(4)
        # Half of them leave, the others finish after all and are answered.
        for client in slow[:100]:
            await client.leave()
        answers = []
        for client in slow[100:]:
            await client.send(data[20:])
        for client in slow[100:]:
            answers.append(await client.reader.readline())
            await client.__aexit__()
        await load.end()
    took = await idle(stack)
    figures = load.figures(stack.envoy)
    record.add(
        "Envoy and clients", "200 bodies sent byte by byte (figures: the requests beside them)", figures,
        saw="the others' answers as before; a slow body is answered when it is complete", recovered="nothing in flight",
        seconds=took,
    )  # fmt: skip
    assert set(answers) == {b"HTTP/1.1 200 OK\r\n"}
    assert figures.failed == 0, figures


PHASES = ("connected", "half of the headers", "headers", "half of the body", "body", "queued", "mid-stream", "answered")


@pytest.mark.parametrize("mode", ["buffered", "full duplex"])
async def test_clients_that_leave(stack: FaultStack, record: Recorder, mode: str) -> None:
    """At every phase of a request, several each; afterwards nothing is in flight anywhere."""
    envoy = stack.gateway(mode)
    data = body(stream=True, tokens=400)
    short = body(stream=False, tokens=1)

    async def leave(phase: str) -> None:
        async with Raw(envoy) as client:
            whole = head(len(data))
            if phase == "half of the headers":
                await client.send(whole[: len(whole) // 2])
            elif phase == "headers":
                await client.send(whole)
            elif phase == "half of the body":
                await client.send(whole + data[: len(data) // 2])
            elif phase == "body":
                await client.send(whole + data)
            elif phase in ("queued", "mid-stream"):
                await client.send(whole + data)
                async with asyncio.timeout(20):
                    await client.reader.readuntil(b"\r\n\r\n")  # the headers come before the prefill
                    if phase == "mid-stream":
                        await client.reader.readuntil(b"data: ")
            elif phase == "answered":
                await client.send(head(len(short)) + short)
                async with asyncio.timeout(20):
                    await client.reader.readuntil(b"\r\n\r\n")
            await client.leave()

    async with Load(f"http://{envoy.address}") as load:
        load.mark()
        for phase in PHASES:
            await asyncio.gather(*(leave(phase) for _ in range(8)))
            await load.more(2)
        await load.end()
    took = await idle(stack)
    figures = load.figures(envoy)
    record.add(
        "Envoy and clients",
        f"clients leave at each of {len(PHASES)} phases, {mode} bodies (figures: the requests beside them)",
        figures, saw="answers", recovered="nothing in flight in kvcar or any engine", seconds=took,
    )  # fmt: skip
    assert figures.failed == 0, figures
