"""The front over a worker that dies while it answers, or answers with something else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

from extproc.workers.front import Front

HALF = b"HTTP/1.1 200 OK\r\n%s\r\n\r\n%shalf of it"


class Crew:
    """One worker, at a socket."""

    total = 1

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    def sessions(self) -> dict[int, aiohttp.ClientSession]:
        return {0: self._session}

    def rows(self) -> list[dict[str, Any]]:
        return []


@pytest.mark.parametrize("head", [(b"Content-Length: 100", b""), (b"Transfer-Encoding: chunked", b"64\r\n")])
async def test_half_an_answer_is_seen_to_be_one(head: tuple[bytes, bytes], tmp_path: Path) -> None:
    """A page that is passed on as it comes breaks off; one that is read first is an error of its own."""

    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HALF % head)
        writer.close()

    path = str(tmp_path / "0")
    async with (
        await asyncio.start_unix_server(die, path),
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session,
        TestClient(TestServer(Front(Crew(session), token=None).app())) as client,
        asyncio.timeout(20),
    ):
        with pytest.raises(aiohttp.ClientError):
            await (await client.get("/v1/internal/snapshot")).read()
        assert (await client.get("/status")).status == 503


async def test_a_page_that_is_none_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    pages = iter((b"# TYPE kvcar_requests counter\nkvcar_requests_total 3.0\n", b'{"error": "x"} {', b"\xff\xfe"))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        page = next(pages)
        writer.write(b"HTTP/1.1 500 No\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(page), page))
        writer.close()

    path = str(tmp_path / "0")
    async with (
        await asyncio.start_unix_server(answer, path),
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session,
        TestClient(TestServer(Front(Crew(session), token=None).app())) as client,
        asyncio.timeout(20),
    ):
        for _ in range(3):
            metrics = await client.get("/metrics")
            assert metrics.status == 200
            assert "kvcar_requests_total 3.0" in await metrics.text()
