"""Discovery against a real etcd: what engines write there, and what etcd itself may do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvindex.discovery.base import FleetFeed
from kvindex.discovery.etcd import EtcdSource
from kvindex.discovery.etcd_client import UNAUTHENTICATED, EtcdClient, EtcdError, EtcdOptions
from kvindex.discovery.xllm_registry import LeaseRule, PortRule, Registry
from kvindex.fleet import Fleet, FleetChange
from tests.real.etcd_peer import EtcdProcess, registration, wire

pytestmark = pytest.mark.real

ONE, TWO = "10.1.0.1:8000", "10.1.0.2:8000"
TLS = Path(__file__).parent.parent / "extproc" / "tls"
NEAR = PortRule(1, 2)
"""Engines of tests have ephemeral ports, to which 30,000 cannot be added."""
STAYS = LeaseRule(retry=0.02)
LIMIT = 20
QUICK = LeaseRule(retry=0.02, interval=0.1, silence=0.3, forget=0.4)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    options = ("--experimental-watch-progress-notify-interval", "200ms")
    with EtcdProcess(tmp_path_factory.mktemp("etcd"), options=options) as process:
        process.wait_ready()
        yield process


@pytest.fixture
def space(request: pytest.FixtureRequest) -> str:
    """A namespace of the test's own."""
    return request.node.name.translate(str.maketrans("[] ", "---"))


class Watched:
    """A fleet fed by one source, and what happened to it."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.feed = FleetFeed(self.fleet, name="etcd")
        self.changes: list[FleetChange] = []
        self.fleet.listen(self.changes.append)

    def states(self) -> dict[str, str]:
        return {name: one.state.value for name, one in self.fleet.snapshot().items()}

    def incarnation(self, name: str) -> str | None:
        found = self.fleet.get(name)
        return found and found.incarnation

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        try:
            async with asyncio.timeout(LIMIT):
                while not condition():  # noqa: ASYNC110 - the fleet tells by calls, not by an event
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"not within {LIMIT} s: {what}; {self.states()}, {self.feed.error}") from None


@contextlib.asynccontextmanager
async def following(
    *endpoints: str, namespace: str, leases: LeaseRule = QUICK, ports: PortRule | None = None, **more: Any
) -> AsyncIterator[Watched]:
    options = EtcdOptions(endpoints, **{"timeout": 1.0, "check_every": 0.1, **more})
    registry = Registry(pool="p", namespace=namespace, leases=leases, ports=ports)
    source = EtcdSource(options, registry, namespace=namespace, retry=0.05, retry_max=0.2)
    watched = Watched()
    task = asyncio.create_task(source.run(watched.feed))
    try:
        yield watched
    finally:
        assert not task.done(), task.exception()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def engine(status: int = 200, more: Any = None) -> AsyncIterator[str]:
    """ip:port of something that answers GET /health, and with `more` what is posted to /v3/."""
    app = web.Application()
    if more is not None:
        app.router.add_post("/v3/{path:.*}", more)
    app.router.add_get("/health", lambda _: asyncio.sleep(0, web.Response(status=status)))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield "127.0.0.1:{1}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()


async def test_join_refresh_replace_resize_and_leave(etcd: EtcdProcess, space: str) -> None:
    first = f"/{space}/XLLM:DEFAULT:{ONE}"
    etcd.put(first, registration(ONE))
    etcd.put(f"/{space}/XLLM:LOADMETRICS:{ONE}", "{}")
    async with following(etcd.url, namespace=space) as seen:
        await seen.until(lambda: seen.feed.is_ready, "the list")
        assert seen.states() == {ONE: "active"}
        etcd.put(f"/{space}/XLLM:PREFILL:{TWO}", registration(TWO, kind=1))
        await seen.until(lambda: TWO in seen.states(), "a join")
        assert seen.fleet.snapshot()[TWO].role == "prefill"
        etcd.put(first, registration(ONE, register_ts_ms=99))
        etcd.put(first, registration(ONE, incarnation="i2"))
        await seen.until(lambda: seen.incarnation(ONE) == "i2", "another process at the same address")
        etcd.put(first, registration(ONE, incarnation="i2", dp_size=2))
        await seen.until(lambda: len(seen.fleet.snapshot()[ONE].events) == 2, "two ranks")
        etcd.delete(first)
        await seen.until(lambda: seen.states() == {TWO: "active"}, "a leave")
        kinds = [str(change.kind) for change in seen.changes if ONE in str(change)]
        assert kinds[:3] == ["joined", "replaced", "replaced"], "a refreshed registration is no change"
        assert seen.feed.error is None


async def test_role_of_a_mix_instance(etcd: EtcdProcess, space: str) -> None:
    mix, decode = f"/{space}/XLLM:MIX:{ONE}", f"/{space}/XLLM:DECODE:{ONE}"
    etcd.put(mix, registration(ONE, kind=3))
    async with following(etcd.url, namespace=space) as seen:
        await seen.until(seen.states, "the list")
        assert seen.fleet.snapshot()[ONE].followed
        etcd.move(mix, decode, registration(ONE, kind=2))
        await seen.until(lambda: not seen.fleet.snapshot()[ONE].followed, "it decodes now")
        etcd.move(decode, mix, registration(ONE, kind=3))
        await seen.until(lambda: seen.fleet.snapshot()[ONE].followed, "it computes prompts again")
        assert seen.states() == {ONE: "active"}


async def test_clashes_are_left_out_and_said(etcd: EtcdProcess, space: str, caplog: pytest.LogCaptureFixture) -> None:
    neighbour = "10.1.0.1:8001"
    etcd.put(f"/{space}/XLLM:DEFAULT:{ONE}", registration(ONE, dp_size=2))
    with caplog.at_level(logging.ERROR):
        async with following(etcd.url, namespace=space) as seen:
            await seen.until(seen.states, "the list")
            etcd.put(f"/{space}/XLLM:DEFAULT:{neighbour}", registration(neighbour))
            etcd.put(f"/{space}/XLLM:DEFAULT:{TWO}", registration(TWO))
            etcd.put(f"/{space}/XLLM:DEFAULT:10.1.0.3:40000", registration("10.1.0.3:40000"))
            etcd.put(f"/{space}/XLLM:DEFAULT:bad", "nonsense")
            await seen.until(lambda: seen.feed.error and "nonsense" not in seen.feed.error, "what is wrong")
            await seen.until(lambda: seen.states() == {TWO: "active"}, "those concerned are left out")
            await seen.until(lambda: "no JSON" in str(seen.feed.error), "the bad value")
            for said in (ONE, neighbour, "18001", "40000", "XLLM:DEFAULT:bad"):
                assert said in str(seen.feed.error)
            assert len({record.getMessage() for record in caplog.records if "left out" in record.getMessage()}) == 3
            etcd.delete(f"/{space}/XLLM:DEFAULT:{neighbour}")
            await seen.until(lambda: ONE in seen.states(), "the clash is over")


async def test_a_lost_lease_is_not_the_end(etcd: EtcdProcess, space: str) -> None:
    """LEASE_LOST while it answers; SUSPECT and gone when it does not; back with its registration."""
    async with contextlib.AsyncExitStack() as stack, following(etcd.url, namespace=space, ports=NEAR) as seen:
        address = await stack.enter_async_context(engine())
        key = f"/{space}/XLLM:DEFAULT:{address}"
        etcd.put(key, registration(address), lease=etcd.lease(1))
        await seen.until(lambda: seen.states() == {address: "active"}, "it is there")
        await seen.until(lambda: seen.states() == {address: "lease_lost"}, "its lease expires")
        etcd.put(key, registration(address))
        await seen.until(lambda: seen.states() == {address: "active"}, "it registers again")
        etcd.delete(key)
        await seen.until(lambda: seen.states() == {address: "lease_lost"}, "its key is deleted")
        before = len(seen.changes)
        await stack.aclose()
        await seen.until(lambda: not seen.states(), "it does not answer any more")
        states = [change.after and change.after.state.value for change in seen.changes[before:]]
        assert states == ["suspect", None]


async def test_an_engine_that_is_not_well_is_suspect(etcd: EtcdProcess, space: str) -> None:
    async with engine(503) as address, following(etcd.url, namespace=space, leases=STAYS, ports=NEAR) as seen:
        etcd.put(f"/{space}/XLLM:DEFAULT:{address}", registration(address))
        await seen.until(lambda: seen.states() == {address: "active"}, "it is there")
        etcd.delete(f"/{space}/XLLM:DEFAULT:{address}")
        await seen.until(lambda: seen.states() == {address: "suspect"}, "503 is no answer")


@pytest.mark.parametrize("compacted", [False, True], ids=["resumed", "compacted"])
async def test_partition(etcd: EtcdProcess, space: str, compacted: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is lost while etcd cannot be reached, and what happened meanwhile is caught up with."""
    etcd.put(f"/{space}/XLLM:DEFAULT:{ONE}", registration(ONE))
    caplog.set_level(logging.INFO, "kvindex.discovery.etcd")
    async with wire(etcd.url) as cable, following(cable.url, namespace=space) as seen:
        await seen.until(lambda: seen.states() == {ONE: "active"}, "the list")
        cable.cut()
        await seen.until(lambda: seen.feed.error, "the loss is said")
        assert "stays" in str(seen.feed.error)
        etcd.put(f"/{space}/XLLM:DEFAULT:{TWO}", registration(TWO))
        etcd.delete(f"/{space}/XLLM:DEFAULT:{ONE}")
        if compacted:
            etcd.compact()
        assert seen.states() == {ONE: "active"}
        cable.mend()
        await seen.until(lambda: seen.states() == {TWO: "active"}, "what happened meanwhile")
        await seen.until(lambda: seen.feed.error is None, "all is well")
    assert ("listing again" in caplog.text) == compacted


async def test_a_silent_connection_is_noticed(etcd: EtcdProcess, space: str) -> None:
    """Packets that vanish: no error, no end. The next endpoint takes over from the same revision."""
    etcd.put(f"/{space}/XLLM:DEFAULT:{ONE}", registration(ONE))
    async with contextlib.AsyncExitStack() as stack:
        one, two = [await stack.enter_async_context(wire(etcd.url)) for _ in range(2)]
        seen = await stack.enter_async_context(following(one.url, two.url, namespace=space, timeout=0.3))
        await seen.until(lambda: seen.states() == {ONE: "active"}, "the list")
        assert not two.connections
        one.freeze()
        etcd.put(f"/{space}/XLLM:DEFAULT:{TWO}", registration(TWO))
        await seen.until(lambda: TWO in seen.states(), "the other endpoint is asked")
        await seen.until(lambda: seen.feed.error is None, "all is well")


async def test_etcd_freezes_and_restarts(tmp_path: Path) -> None:
    with EtcdProcess(tmp_path) as etcd:
        etcd.wait_ready()
        etcd.put(f"XLLM:DEFAULT:{ONE}", registration(ONE))
        async with following(etcd.url, namespace="", timeout=0.5) as seen:
            await seen.until(lambda: seen.states() == {ONE: "active"}, "the list")
            os.kill(etcd.pid, signal.SIGSTOP)
            await seen.until(lambda: seen.feed.error, "it hangs")
            os.kill(etcd.pid, signal.SIGCONT)
            await seen.until(lambda: seen.feed.error is None, "it goes on")
            etcd.kill()
            await seen.until(lambda: seen.feed.error, "it is gone")
            etcd.start()
            await asyncio.to_thread(etcd.wait_ready)
            etcd.put(f"XLLM:DEFAULT:{TWO}", registration(TWO))
            await seen.until(lambda: seen.states() == {ONE: "active", TWO: "active"}, "it is back")
            etcd.kill()
            # Its data is lost: another cluster under the same address, with lower revisions.
            (tmp_path / "etcd").rename(tmp_path / "lost")
            etcd.start()
            await asyncio.to_thread(etcd.wait_ready)
            etcd.put(f"XLLM:DEFAULT:{TWO}", registration(TWO, incarnation="i2"))
            await seen.until(lambda: seen.states() == {TWO: "active"}, "what the new one has")
            await seen.until(lambda: seen.incarnation(TWO) == "i2", "what the new one has")


async def test_not_there_at_the_start(tmp_path: Path) -> None:
    etcd = EtcdProcess(tmp_path)
    async with following(etcd.url, namespace="") as seen:
        await seen.until(lambda: seen.feed.error, "nobody is there")
        assert not seen.feed.is_ready
        with etcd:
            await asyncio.to_thread(etcd.wait_ready)
            await seen.until(lambda: seen.feed.is_ready, "it came")
            await seen.until(lambda: seen.feed.error is None, "all is well")


LISTED = b'{"header":{"cluster_id":"1","revision":"5"}}'


@pytest.mark.parametrize(
    ("listed", "watched", "listens"),
    [
        (None, None, False),
        (b"<html>", b"", False),
        (b"[]", b"", False),
        (b"{}", b"", False),
        (b'{"header":{"cluster_id":"1","revision":"x"}}', b"", False),
        (b'{"header":{"cluster_id":"1","revision":"1"},"kvs":[{"key":"!"}]}', b"", False),
        (LISTED, b"", True),
        (LISTED, b"<html>\n", True),
        (LISTED, b"[]\n", True),
        (LISTED, b'{"error":"no"}\n', True),
        (LISTED, b'{"error":{"message":"no","grpc_code":7}}\n', True),
        (LISTED, b'{"result":{"header":{"cluster_id":"1","revision":"5"},"canceled":true}}\n', True),
        (LISTED, b'{"result":{"header":{"cluster_id":"1","revision":"5"},"events":["x"]}}\n', True),
    ],
)
async def test_something_that_is_no_etcd(listed: bytes | None, watched: bytes, listens: bool) -> None:
    """Whatever it answers is told; the source goes on asking."""
    asked = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal asked
        asked += request.path.endswith("range")
        if listed is None:
            raise web.HTTPNotFound
        return web.Response(body=watched if request.path.endswith("watch") else listed)

    async with engine(more=answer) as address, following(f"http://{address}", namespace="") as seen:
        await seen.until(lambda: asked >= (1 if listens else 3), "it is asked again")
        await seen.until(lambda: "stays" in str(seen.feed.error), "what is wrong")
        assert seen.feed.is_ready == listens


async def test_password_and_expired_token(tmp_path: Path) -> None:
    with EtcdProcess(tmp_path, options=("--auth-token-ttl", "1")) as etcd:
        etcd.wait_ready()
        etcd.put(f"XLLM:DEFAULT:{ONE}", registration(ONE))
        etcd.require_password("secret")
        async with following(etcd.url, namespace="", username="root", password="wrong") as seen:
            await seen.until(lambda: "invalid user ID or password" in str(seen.feed.error), "the refusal")
            assert "wrong" not in str(seen.feed.error)
        async with following(etcd.url, namespace="") as seen:
            await seen.until(lambda: "user name is empty" in str(seen.feed.error), "the refusal")
        async with following(etcd.url, namespace="", username="root", password="secret") as seen:
            await seen.until(lambda: seen.states() == {ONE: "active"}, "the list")
            etcd.delete(f"XLLM:DEFAULT:{ONE}")
            await seen.until(lambda: not seen.states(), "the watch")
        options = EtcdOptions((etcd.url,), username="root", password="secret")
        async with aiohttp.ClientSession() as session:
            client = EtcdClient(session, etcd.url, options)
            client._token = "expired.1"
            assert (await client.list(b"a", b"b")).pairs == []
            stranger = EtcdClient(session, etcd.url, EtcdOptions((etcd.url,)))
            stranger._token = "expired.1"
            with pytest.raises(EtcdError):
                await stranger.list(b"a", b"b")
    assert UNAUTHENTICATED == 16


async def test_tls_with_client_certificates(tmp_path: Path) -> None:
    server = ("--cert-file", str(TLS / "server.pem"), "--key-file", str(TLS / "server.key"))
    mutual = (*server, "--client-cert-auth", "--trusted-ca-file", str(TLS / "ca.pem"))
    ours = {"ca": str(TLS / "ca.pem"), "cert": str(TLS / "client.pem"), "key": str(TLS / "client.key")}
    with EtcdProcess(tmp_path, tls=mutual) as etcd:
        etcd.wait_ready()
        etcd.put(f"XLLM:DEFAULT:{ONE}", registration(ONE))
        async with following(etcd.url, namespace="", **ours) as seen:
            await seen.until(lambda: seen.states() == {ONE: "active"}, "the list")
            etcd.put(f"XLLM:DEFAULT:{TWO}", registration(TWO))
            await seen.until(lambda: TWO in seen.states(), "the watch")
        async with following(etcd.url, namespace="", ca=ours["ca"]) as seen:
            await seen.until(lambda: seen.feed.error, "no certificate, no answer")
            assert not seen.feed.is_ready
        async with following(etcd.url, namespace="") as seen:
            await seen.until(lambda: "certificate" in str(seen.feed.error).lower(), "whom to trust is not known")
