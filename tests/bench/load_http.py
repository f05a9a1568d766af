"""HTTP load: closed (so many at a time, as fast as answers come) and paced (at a rate, whatever the answers do).

wrk cannot pace and wants a Lua script for bodies that change; the load is small next to what is measured (server CPU
is read per process), so one aiohttp client does both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import aiohttp
import uvloop

CLOSED = 4
"""Requests at a time of the closed load."""


def closed(url: str, bodies: list[bytes]) -> list[float]:
    """Latencies in seconds, in the order of completion. Raises AssertionError for a status other than 200."""
    taken: list[float] = []

    async def run() -> None:
        left = iter(bodies)
        async with _session() as session:
            await asyncio.gather(*(worker(session, left) for _ in range(CLOSED)))

    async def worker(session: aiohttp.ClientSession, left: Iterator[bytes]) -> None:
        for body in left:
            taken.append(await _one(session, url, body, time.perf_counter()))

    uvloop.run(run())
    return taken


def paced(url: str, bodies: list[bytes], rate: float) -> list[float]:
    """The same at `rate` requests/s; latency counts from the moment a request was due, so that a stall shows."""

    async def run() -> list[float]:
        async with _session() as session:
            start = time.perf_counter() + 0.05
            tasks = []
            for number, body in enumerate(bodies):
                due = start + number / rate
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                tasks.append(asyncio.create_task(_one(session, url, body, due)))
            return list(await asyncio.gather(*tasks))

    return uvloop.run(run())


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), headers={"content-type": "application/json"}, auto_decompress=False
    )


async def _one(session: aiohttp.ClientSession, url: str, body: bytes, start: float) -> float:
    async with session.post(url, data=body) as response:
        data = await response.read()
        assert response.status == 200, (url, response.status, data[:300])
    return time.perf_counter() - start
