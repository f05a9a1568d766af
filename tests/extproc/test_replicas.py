"""Replicas: which streams are in need, and what a giver that misbehaves does to the asker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from examples.local.processes import free_port
from extproc.admin import snapshot
from extproc.admin.server import make_app
from extproc.replicas import PATH, Giver, Replicas, needs
from kvindex.directory import StreamReport
from kvindex.link import LinkStatus
from kvindex.sync import StreamStatus
from tests.extproc.pool_model import engine, make_pool
from tests.extproc.test_admin import Source

UP = LinkStatus(connected=True, connections=1)


def report(
    state: str = "live", *, synchronized: bool = True, complete: bool = False, link: LinkStatus = UP
) -> StreamReport:
    return StreamReport(
        "engine-a", 0, "1", "tcp://10.0.0.1:5557", None, "vllm", state, synchronized, complete,
        status=StreamStatus(known=5), link=link,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (report(), True),
        (report("empty", synchronized=False), True),
        (report(complete=True), False),
        (report("fetch", synchronized=False), False),
        (report("backoff", synchronized=False), False),
        (report(link=LinkStatus()), False),
        (report("skipped", synchronized=False), False),
    ],
)
def test_who_is_in_need(given: StreamReport, wanted: bool) -> None:
    assert needs(given) is wanted


@asynccontextmanager
async def peer(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], port: int | None = None
) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_get(PATH, handler)
    server = TestServer(app, port=port)
    await server.start_server()
    try:
        yield str(server.make_url("")).rstrip("/")
    finally:
        await server.close()


async def answer_with(status: int, body: bytes) -> tuple[str, int]:
    """Why nothing was taken over from a peer that answers so, and how often it was asked."""
    asked: list[Any] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        asked.append(dict(request.query))
        return web.Response(status=status, body=body)

    pool = make_pool(engine("engine-a"))
    (stream,) = pool.directory._streams.values()
    stream.open()
    stream.link = UP
    async with peer(handler) as url:
        replicas = Replicas([url])
        await replicas.warm([pool])
        await replicas.warm([pool])
        await replicas.close()
    assert all(one == {"pool": "qwen", "instance": "engine-a", "dp_rank": "0", "known": "0"} for one in asked)
    return replicas.refused["qwen", "engine-a", 0], len(asked)


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (200, b"garbage", "version"),
        (200, b"", "not a snapshot"),
        (409, b"not now", "409 not now"),
        (500, b"", "500"),
    ],
)
async def test_what_a_peer_gives_is_refused_with_a_reason_and_not_asked_for_again_at_once(
    status: int, body: bytes, reason: str
) -> None:
    told, asked = await answer_with(status, body)
    assert reason in told
    assert asked == 1


async def test_no_peer_there(caplog: pytest.LogCaptureFixture) -> None:
    """Told once a peer, not once a stream and round; and when it is there again."""
    caplog.set_level(logging.INFO)
    pool = make_pool(engine("engine-a"), engine("engine-b"))
    for stream in pool.directory._streams.values():
        stream.open()
        stream.link = UP
    port = free_port()
    away = f"http://127.0.0.1:{port}"
    replicas = Replicas([away, "http://no-such-host.invalid:9003"], timeout=2.0)
    for _ in range(3):
        replicas._next.clear()
        await replicas.warm([pool])
    told = [record.getMessage() for record in caplog.records]
    name = "http://no-such-host.invalid:9003"
    assert len(told) == 2, told
    assert any(one.startswith(f"peer {away} does not answer: ClientConnectorError: ") for one in told), told
    assert any(one.startswith(f"peer {name} does not answer: gaierror: ") for one in told), told
    assert away in replicas.refused["qwen", "engine-a", 0]
    replicas._silent.add(("address", "http://10.9.9.9:9003"))  # of a pod that was replaced
    caplog.clear()

    async def refusing(_: web.Request) -> web.StreamResponse:
        return web.Response(status=404)

    async with peer(refusing, port) as url:
        assert url == away
        replicas._next.clear()
        await replicas.warm([pool])
    await replicas.close()
    assert replicas._silent == {("name", name)}
    assert [record.getMessage() for record in caplog.records if record.name == "extproc.replicas"] == [
        f"peer {away} is there again"
    ]


async def test_a_silent_peer_is_waited_for_once_a_round() -> None:
    asked, done = [], asyncio.Event()

    async def silent(request: web.Request) -> web.StreamResponse:
        asked.append(request.query["instance"])
        await done.wait()
        return web.Response()

    pool = make_pool(engine("engine-a"), engine("engine-b"))
    for stream in pool.directory._streams.values():
        stream.open()
        stream.link = UP
    async with peer(silent) as url:
        replicas = Replicas([url], timeout=0.2)
        await replicas.warm([pool])
        await replicas.close()
        done.set()
    assert asked == ["engine-a"]
    assert replicas.refused["qwen", "engine-b", 0] == "no peer is known or answers"


async def test_the_token_does_not_follow_a_redirect() -> None:
    asked = []

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        return web.Response(body=b"")

    async def handler(request: web.Request) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect(f"{other}/stolen")

    pool = make_pool(engine("engine-a"))
    (stream,) = pool.directory._streams.values()
    stream.open()
    stream.link = UP
    app = web.Application()
    app.router.add_get("/stolen", elsewhere)
    server = TestServer(app)
    await server.start_server()
    other = str(server.make_url("")).rstrip("/")
    async with peer(handler) as url:
        replicas = Replicas([url], token="a-secret-token")
        await replicas.warm([pool])
        await replicas.close()
    await server.close()
    assert asked == []
    assert "307" in replicas.refused["qwen", "engine-a", 0]


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("", 400),
        ("?pool=qwen", 400),
        ("?pool=qwen&instance=engine-a&dp_rank=x", 400),
        ("?pool=other&instance=engine-a", 404),
        ("?pool=qwen&instance=engine-z", 404),
        ("?pool=qwen&instance=engine-a&dp_rank=7", 404),
        ("?pool=qwen&instance=engine-a", 409),
    ],
)
async def test_giver_answers(query: str, status: int) -> None:
    pool = make_pool(engine("engine-a"))
    server = TestServer(make_app(Source(), more=snapshot.routes(Giver([pool]))))
    await server.start_server()
    try:
        async with aiohttp.ClientSession() as http, http.get(server.make_url(PATH + query)) as answer:
            assert answer.status == status, await answer.text()
    finally:
        await server.close()
