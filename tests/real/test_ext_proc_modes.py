"""The ext_proc server behind a real Envoy, in both body modes: what the engine gets, what the ticket is told."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from aiohttp import web
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc import wire
from extproc.envoy_config import BodyMode, EnvoyOptions
from extproc.messages import HttpRequest, Outcome, refusal
from extproc.server import ExtProcServer, ServerOptions
from extproc.session_rules import SessionOptions
from tests.extproc.gateway_model import DESTINATION
from tests.extproc.grpc_peer import DEADLINE, until
from tests.extproc.session_driver import Recorder
from tests.real.harness import EnvoyProcess, wait_for

pytestmark = pytest.mark.real
CHAT = "/v1/chat/completions"
MODES = [BodyMode.BUFFERED, BodyMode.FULL_DUPLEX]


class Engine:
    """Answers with what it got; on "stream" in the body one SSE event, then waits until let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/health", self._health)
        app.router.add_route("*", "/{tail:.*}", self._serve)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        self.address = f"127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]

    async def stop(self) -> None:
        self.go.set()
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if body == b"stream":
            answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await answer.prepare(request)
            await answer.write(b"data: 1\n\n")
            await self.go.wait()
            await answer.write(
                b'data: {"usage": {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}}\n\n'
            )
            return answer
        got = {"served_by": self.address, "headers": dict(request.headers), "body": hashlib.sha256(body).hexdigest()}
        return web.json_response(got)


class Decider:
    """Names `choice`; keeps the tickets."""

    def __init__(self) -> None:
        self.choice: tuple[str, ...] = ()
        self.tickets: list[Recorder] = []
        self.gate: asyncio.Event | None = None
        self.shed = False
        self.asked = 0
        self.cancelled = 0

    async def decide(self, request: HttpRequest) -> Outcome:
        self.asked += 1
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if self.shed:
            return Outcome(immediate=refusal(429, "full", kind="rate_limit_error", details="kvcar_shed", retry_after=3))
        self.tickets.append(Recorder())
        return Outcome(self.choice, metadata={"model": "m"}, ticket=self.tickets[-1])


class Gateway:
    def __init__(self, envoy: EnvoyProcess, server: ExtProcServer, decider: Decider, engines: list[Engine]) -> None:
        self.envoy, self.server, self.decider, self.engines = envoy, server, decider, engines
        self.http = aiohttp.ClientSession(f"http://{envoy.address}", timeout=aiohttp.ClientTimeout(DEADLINE))

    async def post(self, body: Any, path: str = CHAT, **headers: str) -> dict[str, Any]:
        async with self.http.post(path, data=body, headers={"content-type": "application/json", **headers}) as answer:
            assert answer.status == 200
            got: dict[str, Any] = await answer.json()
            return got

    async def quiet(self) -> None:
        await until(lambda: self.server.sessions == 0)
        assert [ticket.calls.count(("close",)) for ticket in self.decider.tickets] == [1] * len(self.decider.tickets)


@contextlib.asynccontextmanager
async def gateway(mode: BodyMode, folder: Path, **session: Any) -> AsyncIterator[Gateway]:
    async with contextlib.AsyncExitStack() as stack:
        engines = [Engine(), Engine(), Engine()]
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        decider = Decider()
        server = ExtProcServer(
            decider, ServerOptions("127.0.0.1:0", decide_timeout=1.0), SessionOptions(**session), Recorder()
        )
        await server.start()
        stack.push_async_callback(server.stop, 0)
        options = EnvoyOptions(
            engines=tuple(engine.address for engine in engines),
            listen="127.0.0.1:0",
            admin="127.0.0.1:0",
            ext_proc=(f"127.0.0.1:{server.port}",),
            body_mode=mode,
            access_log=str(folder / "access.log"),
        )
        envoy = EnvoyProcess(options, folder)
        await asyncio.to_thread(envoy.__enter__)
        stack.push_async_callback(asyncio.to_thread, envoy.__exit__, None, None, None)
        await asyncio.to_thread(envoy.wait_ready)
        await asyncio.to_thread(envoy.wait_healthy, "engines", 3)
        await asyncio.to_thread(envoy.wait_healthy, "extproc", 1)
        ready = Gateway(envoy, server, decider, engines)
        stack.push_async_callback(ready.http.close)
        yield ready


async def slow(body: bytes, parts: int) -> AsyncIterator[bytes]:
    """The body in parts with the loop free between them: a fast client hides a decision that comes too late."""
    step = -(-len(body) // parts)
    for start in range(0, len(body), step):
        await asyncio.sleep(0.05)
        yield body[start : start + step]


@pytest.mark.parametrize("mode", MODES)
async def test_every_kind_of_request(mode: BodyMode, tmp_path: Path) -> None:
    """One gateway a mode, since starting Envoy is what takes the time."""
    large = random.Random(2).randbytes(8 << 20)
    async with gateway(mode, tmp_path, max_body_bytes=9 << 20) as it:
        decider = it.decider
        for turn in range(6):
            engine = it.engines[turn % 3]
            decider.choice = (engine.address,)
            body = (b'{"messages": []}', large[:100_000], large)[turn // 2]
            sent = slow(body, 4) if turn % 2 else body
            got = await it.post(sent, **{DESTINATION: it.envoy.admin, "x-data-parallel-rank": "9"})
            assert got["served_by"] == engine.address
            assert got["body"] == hashlib.sha256(body).hexdigest()
            headers = {name.lower(): value for name, value in got["headers"].items()}
            assert headers.get(DESTINATION, engine.address) == engine.address
            assert "x-data-parallel-rank" not in headers
        await it.quiet()
        for turn, ticket in enumerate(decider.tickets):
            assert ticket.calls[0] == ("headers", 200, it.engines[turn % 3].address)
            assert [call[0] for call in ticket.calls] == ["headers", "first_byte", "close"]

        decider.choice = ()
        await it.post(b"{}", **{DESTINATION: it.envoy.admin})
        over = large + large[: 2 << 20]
        got = await it.post(slow(over, 8) if mode is BodyMode.FULL_DUPLEX else over)
        assert got["body"] == hashlib.sha256(over).hexdigest()
        assert it.server._observer.reasons == ["too_large"]  # type: ignore[attr-defined]
        assert (await it.http.get("/v1/models")).status == 200
        assert (await it.http.post(CHAT)).status == 200, "a POST without body"
        await it.quiet()
        assert it.server._observer.faults == []  # type: ignore[attr-defined]

        decider.shed = True
        async with it.http.post(CHAT, data=b"{}") as answer:
            assert (answer.status, answer.headers["retry-after"]) == (429, "3")
            assert (await answer.json())["error"]["code"] == 429
        stats = await asyncio.to_thread(
            it.envoy.stats, "ext_proc.kvcar.(spurious|rejected|message_timeouts|streams_failed)"
        )
        assert {name: value for name, value in stats.items() if value} == {}


@pytest.mark.parametrize("mode", MODES)
async def test_streamed_answer_and_clients_that_leave(mode: BodyMode, tmp_path: Path) -> None:
    async with gateway(mode, tmp_path, observe_usage=True) as it:
        it.decider.choice = (it.engines[0].address,)
        async with it.http.post(CHAT, data=b"stream") as answer:
            assert await answer.content.readline() == b"data: 1\n"
            ticket = it.decider.tickets[0]
            # An unobserved stream has headers before its prefill: only its end says that the prefill is over.
            told = ("first_byte",) if mode is BodyMode.FULL_DUPLEX else ticket.calls[0]
            await until(lambda: told in ticket.calls)
            assert (("first_byte",) in ticket.calls) == (mode is BodyMode.FULL_DUPLEX)
            assert it.server.sessions == 1, "the exchange lasts as long as the answer"
            assert ("close",) not in ticket.calls
            it.engines[0].go.set()
            assert b"usage" in await answer.content.read()
        await it.quiet()
        assert (("usage", 4, 7) in ticket.calls) == (mode is BodyMode.FULL_DUPLEX)

        it.engines[0].go.clear()
        async with it.http.post(CHAT, data=b"stream") as answer:
            await answer.content.readline()
            answer.close()
        await it.quiet()

        it.decider.gate = asyncio.Event()
        before = it.decider.asked
        asking = asyncio.ensure_future(it.post(b"{}"))
        await until(lambda: it.decider.asked > before)
        asking.cancel()
        await it.quiet()
        assert it.decider.cancelled == 1

        await it.post(b"{}")
        assert it.server._observer.reasons == ["timeout"]  # type: ignore[attr-defined]
        await it.quiet()


# ---------------------------------------------------------------- docs/envoy.md, "what happens when kvcar fails"


def gone(envoy: EnvoyProcess) -> bool:
    """Whether Envoy has no connection to kvcar: a stopped gRPC server lets go of some a little later, silently."""
    name = "cluster.extproc.upstream_cx_active"
    return envoy.stats(f"^{name}$")[name] == 0


class Faulty:
    """A kvcar that passes its health check and fails every request, in the way of `fault`."""

    def __init__(self) -> None:
        self.fault = "error"

    async def start(self) -> int:
        self.server = grpc.aio.server()
        checks = health.aio.HealthServicer()
        await checks.set(wire.SERVICE, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(checks, self.server)
        process = grpc.stream_stream_rpc_method_handler(self._process)
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(wire.SERVICE, {"Process": process}),)
        )
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        return int(port)

    async def _process(self, messages: AsyncIterator[bytes], context: Any) -> None:
        if self.fault == "hang":
            await asyncio.Event().wait()
        await context.abort(grpc.StatusCode.INTERNAL, "a fault")


MESSAGE_TIMEOUT = 0.5
WAITS = 0
"""No answer comes."""
# What a client gets: (mode, fails open) -> fault -> status.
FAULTS: dict[tuple[BodyMode, bool], dict[str, int]] = {
    (BodyMode.BUFFERED, True): {"error": 200, "hang": 200, "down": 200, "noticed": 200},
    (BodyMode.BUFFERED, False): {"error": 500, "hang": 504, "down": 500, "noticed": 500},
    (BodyMode.FULL_DUPLEX, True): {"error": 500, "hang": WAITS, "down": 500, "noticed": 200},
    (BodyMode.FULL_DUPLEX, False): {"error": 500, "hang": WAITS, "down": 500, "noticed": 500},
}


@pytest.mark.parametrize(("mode", "fail_open"), FAULTS)
async def test_what_clients_get_when_kvcar_fails(mode: BodyMode, fail_open: bool, tmp_path: Path) -> None:
    """`down`: before Envoy's health check has noticed it; `noticed`: after."""
    async with contextlib.AsyncExitStack() as stack:
        engine, faulty = Engine(), Faulty()
        await engine.start()
        stack.push_async_callback(engine.stop)
        port = await faulty.start()
        stack.push_async_callback(faulty.server.stop, 0)
        options = EnvoyOptions(
            engines=(engine.address,),
            listen="127.0.0.1:0",
            admin="127.0.0.1:0",
            ext_proc=(f"127.0.0.1:{port}",),
            body_mode=mode,
            fail_open=fail_open,
            message_timeout=MESSAGE_TIMEOUT,
            access_log=None,
        )
        envoy = EnvoyProcess(options, tmp_path)
        await asyncio.to_thread(envoy.__enter__)
        stack.push_async_callback(asyncio.to_thread, envoy.__exit__, None, None, None)
        await asyncio.to_thread(envoy.wait_ready)
        await asyncio.to_thread(envoy.wait_healthy, "engines", 1)
        await asyncio.to_thread(envoy.wait_healthy, "extproc", 1)
        for fault, expected in FAULTS[mode, fail_open].items():
            faulty.fault = fault
            if fault == "down":
                await faulty.server.stop(0)
                await asyncio.to_thread(wait_for, lambda: gone(envoy), "Envoy to lose kvcar")
            if fault == "noticed":
                await asyncio.to_thread(envoy.wait_healthy, "extproc", 0)
            # A hang is one that outlasts several time-outs; every other answer comes before the deadline.
            limit = aiohttp.ClientTimeout(3 * MESSAGE_TIMEOUT if expected == WAITS else DEADLINE)
            async with aiohttp.ClientSession(f"http://{envoy.address}", timeout=limit) as http:
                try:
                    async with http.post(CHAT, data=b"{}") as answer:
                        status = answer.status
                except TimeoutError:
                    status = WAITS
            assert status == expected, fault


@pytest.mark.parametrize("mode", MODES)
async def test_draining_takes_no_new_requests_and_ends_none(mode: BodyMode, tmp_path: Path) -> None:
    async with gateway(mode, tmp_path) as it:
        it.decider.choice = (it.engines[0].address,)
        async with it.http.post(CHAT, data=b"stream") as answer:
            assert await answer.content.readline() == b"data: 1\n"
            await it.server.drain(0)
            await asyncio.to_thread(it.envoy.wait_healthy, "extproc", 0)
            asked = it.decider.asked
            await it.post(b"{}")
            assert it.decider.asked == asked, "the fallback serves"
            it.engines[0].go.set()
            assert b"usage" in await answer.content.read()
        await it.quiet()
