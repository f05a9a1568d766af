"""Every way in which `kvcar envoy-config` can attach kvcar, in a real Envoy: the decision is obeyed, and a client's own
routing headers never steer, whether kvcar decides, does not decide or is not there."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from extproc.endpoint_picker import NO_ENDPOINT
from extproc.envoy_config import (
    DESTINATION,
    ROUTING_HEADERS,
    SESSION_HEADER,
    BodyMode,
    ClientTls,
    EnvoyOptions,
    Http,
    Part,
    Routing,
    as_dict,
)
from extproc.messages import HttpRequest, Outcome
from extproc.reasons import Reason
from extproc.server import ExtProcServer, ServerOptions, TlsOptions
from extproc.session_rules import SessionOptions
from tests.extproc.grpc_peer import DEADLINE
from tests.real.harness import EchoUpstream, EnvoyProcess, echo_upstream, free_port
from tests.real.test_ext_proc_modes import Engine

pytestmark = pytest.mark.real

TLS = Path(__file__).parents[1] / "extproc/tls"
CHAT = "/v1/chat/completions"
CLIENT_TLS = ClientTls(ca=f"{TLS}/ca.pem")
MUTUAL = ClientTls(ca=f"{TLS}/ca.pem", cert=f"{TLS}/client.pem", key=f"{TLS}/client.key")
ANSWERS = 9
"""Undecided requests of one look: that LEAST_REQUEST sends all of them to one of three has a chance below 0.1 %."""


@pytest.fixture(scope="module")
def engines() -> Iterator[list[EchoUpstream]]:
    with echo_upstream() as one, echo_upstream() as two, echo_upstream() as three:
        yield [one, two, three]


@pytest.fixture(scope="module")
def outsider() -> Iterator[EchoUpstream]:
    """A server that Envoy could reach and that is no engine."""
    with echo_upstream() as server:
        yield server


class Decider:
    choice: tuple[str, ...] = ()

    async def decide(self, request: HttpRequest) -> Outcome:
        return Outcome(self.choice)

    def pick(self, request: HttpRequest, reason: Reason) -> Outcome:
        return Outcome(self.choice, reason=reason) if self.choice else Outcome(immediate=NO_ENDPOINT)


@dataclass
class Surface:
    envoy: EnvoyProcess
    server: ExtProcServer
    decider: Decider
    http: aiohttp.ClientSession
    steering: frozenset[str]
    """Headers that mean something here."""

    async def post(self, headers: dict[str, str]) -> tuple[str, dict[str, str]]:
        """(address that served, the response's headers)."""
        async with self.http.post(CHAT, data=b'{"model": "m"}', headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            served = json.loads(await answer.text())["served_by"]
            return f"127.0.0.1:{served}", {name.lower(): value for name, value in answer.headers.items()}


def options_of(engines: list[EchoUpstream], folder: Path, port: int, **changes: Any) -> EnvoyOptions:
    values: dict[str, Any] = {
        "engines": tuple(engine.address for engine in engines),
        "listen": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "ext_proc": (f"127.0.0.1:{port}",),
        "access_log": str(folder / "access.log"),
    }
    return EnvoyOptions(**(values | changes))


@contextlib.asynccontextmanager
async def running(
    engines: list[EchoUpstream],
    folder: Path,
    *,
    away: int = 0,
    endpoint_picker: bool = False,
    envoy: type[EnvoyProcess] = EnvoyProcess,
    **changes: Any,
) -> AsyncIterator[Surface]:
    """Envoy with kvcar's server behind it, and `away` kvcar addresses where nobody listens."""
    tls = changes.get("ext_proc_tls")
    files = TlsOptions(f"{TLS}/server.pem", f"{TLS}/server.key", f"{TLS}/ca.pem" if tls and tls.cert else None)
    session = SESSION_HEADER if changes.get("routing") is Routing.STATEFUL_SESSION else None
    decider = Decider()
    server = ExtProcServer(
        decider,
        ServerOptions("127.0.0.1:0", tls=files if tls else None),
        SessionOptions(session_header=session, endpoint_picker=endpoint_picker),
    )
    await server.start()
    options = options_of(engines, folder, server.port, **changes)
    if away:
        options = replace(options, ext_proc=(*(f"127.0.0.1:{free_port()}" for _ in range(away)), *options.ext_proc))
    process = envoy(options, folder)
    try:
        await asyncio.to_thread(process.__enter__)
        await asyncio.to_thread(process.wait_ready)
        await asyncio.to_thread(process.wait_healthy, "engines", len(engines))
        await asyncio.to_thread(process.wait_healthy, "extproc", 1)
        timeout = aiohttp.ClientTimeout(DEADLINE)
        async with aiohttp.ClientSession(f"http://{process.address}", timeout=timeout) as http:
            yield Surface(process, server, decider, http, frozenset({*ROUTING_HEADERS, session or DESTINATION}))
    finally:
        await asyncio.to_thread(process.__exit__, None, None, None)
        await server.stop(0)


def steering(address: str) -> dict[str, str]:
    """All the headers that a client could try, naming one address."""
    return {**dict.fromkeys(ROUTING_HEADERS, address), SESSION_HEADER: b64encode(address.encode()).decode()}


async def check_no_steering(surface: Surface, engines: list[EchoUpstream], outsider: EchoUpstream) -> None:
    """Whatever a client names, a member or not, the fallback balances and no engine sees a header of the client."""
    addresses = {engine.address for engine in engines}
    for named in (engines[0].address, outsider.address, str(surface.envoy.admin)):
        before = [len(engine.requests) for engine in engines]
        answers = [await surface.post(steering(named)) for _ in range(ANSWERS)]
        served = {address for address, _ in answers}
        assert not any(set(headers) & surface.steering for _, headers in answers), "no address goes to clients"
        assert served <= addresses
        assert len(served) > 1, f"all {ANSWERS} went to {served}"
        seen = [one for engine, count in zip(engines, before, strict=True) for one in engine.requests[count:]]
        assert len(seen) == ANSWERS
        for request in seen:
            assert not set(request["headers"]) & surface.steering
    assert outsider.requests == []


SURFACES: dict[str, dict[str, Any]] = {
    "override-host": {},
    "override-host, full duplex": {"body_mode": BodyMode.FULL_DUPLEX},
    "original-dst": {"routing": Routing.ORIGINAL_DST},
    "original-dst, full duplex": {"routing": Routing.ORIGINAL_DST, "body_mode": BodyMode.FULL_DUPLEX},
    "stateful-session": {"routing": Routing.STATEFUL_SESSION},
    "stateful-session, full duplex": {"routing": Routing.STATEFUL_SESSION, "body_mode": BodyMode.FULL_DUPLEX},
    "tls": {"ext_proc_tls": CLIENT_TLS},
    "mutual tls": {"ext_proc_tls": MUTUAL},
}


@pytest.mark.parametrize("name", SURFACES)
async def test_kvcar_steers_and_a_client_never_does(
    name: str, engines: list[EchoUpstream], outsider: EchoUpstream, tmp_path: Path
) -> None:
    async with running(engines, tmp_path, **SURFACES[name]) as surface:
        for turn in range(6):
            chosen = engines[turn % 3].address
            surface.decider.choice = (chosen,)
            served, headers = await surface.post(steering(engines[(turn + 1) % 3].address))
            assert served == chosen
            assert not set(headers) & surface.steering, "no engine's address goes to clients"
            seen = engines[turn % 3].requests[-1]["headers"]
            assert {seen[one] for one in ROUTING_HEADERS if one in seen} == {chosen}
        surface.decider.choice = ()
        await check_no_steering(surface, engines, outsider)
        entry = (await asyncio.to_thread(surface.envoy.access_log))[0]
        assert (entry["chosen"], entry["upstream"], entry["code"]) == (engines[0].address, engines[0].address, 200)

        await surface.server.stop(0)
        if SURFACES[name].get("body_mode") is BodyMode.FULL_DUPLEX:
            # In this mode a request that finds out about the outage fails; once the health check has, it passes.
            await asyncio.to_thread(surface.envoy.wait_healthy, "extproc", 0)
        await check_no_steering(surface, engines, outsider)


async def test_a_certificate_for_another_name_is_refused(engines: list[EchoUpstream], tmp_path: Path) -> None:
    """Fail closed shows it: kvcar is there, its certificate is of the right CA, and Envoy does not talk to it."""
    server = ExtProcServer(
        Decider(),
        ServerOptions("127.0.0.1:0", tls=TlsOptions(f"{TLS}/server.pem", f"{TLS}/server.key")),
    )
    await server.start()
    wrong = ClientTls(ca=f"{TLS}/ca.pem", name="another.example")
    options = options_of(engines, tmp_path, server.port, ext_proc_tls=wrong, fail_open=False)
    with EnvoyProcess(options, tmp_path) as envoy:
        await asyncio.to_thread(envoy.wait_ready)
        await asyncio.to_thread(envoy.wait_healthy, "engines", len(engines))
        async with aiohttp.ClientSession(f"http://{envoy.address}") as http, http.post(CHAT, data=b"{}") as answer:
            assert answer.status == 500
        stats = await asyncio.to_thread(envoy.stats, "cluster.extproc.ssl.fail_verify_san")
        assert stats["cluster.extproc.ssl.fail_verify_san"] > 0
    await server.stop(0)


async def test_two_kvcar_one_away(engines: list[EchoUpstream], tmp_path: Path) -> None:
    """No request fails although Envoy may not fail open: the retry of the gRPC stream finds the other one."""
    async with running(engines, tmp_path, away=1, fail_open=False) as surface:
        for turn in range(12):
            surface.decider.choice = (engines[turn % 3].address,)
            assert (await surface.post({}))[0] == engines[turn % 3].address


async def test_http2_from_clients_and_to_engines(engines: list[EchoUpstream], tmp_path: Path) -> None:
    """An Envoy whose engines speak HTTP/2, in front of one that therefore has an HTTP/2 client."""
    async with running(engines, tmp_path) as surface:
        surface.decider.choice = (engines[1].address,)
        folder = tmp_path / "outer"
        folder.mkdir()
        outer = EnvoyOptions(
            engines=(surface.envoy.address,),
            engine_protocol=Http.HTTP2,
            listen="127.0.0.1:0",
            admin="127.0.0.1:0",
            ext_proc=(f"127.0.0.1:{free_port()}",),
            access_log=None,
        )
        with EnvoyProcess(outer, folder) as envoy:
            await asyncio.to_thread(envoy.wait_ready)
            await asyncio.to_thread(envoy.wait_healthy, "engines", 1)
            async with aiohttp.ClientSession(f"http://{envoy.address}") as http:
                for _ in range(6):
                    async with http.post(CHAT, data=b"{}") as answer:
                        assert answer.status == 200
                        served = json.loads(await answer.text())["served_by"]
                        assert f"127.0.0.1:{served}" == engines[1].address
            counted = await asyncio.to_thread(envoy.stats, "cluster.engines.upstream_cx_http2_total")
            assert counted["cluster.engines.upstream_cx_http2_total"] > 0
        counted = await asyncio.to_thread(surface.envoy.stats, "http.openai.downstream_cx_http2_total")
        assert counted["http.openai.downstream_cx_http2_total"] > 0


@pytest.mark.parametrize("mode", list(BodyMode))
async def test_endpoint_picker(mode: BodyMode, tmp_path: Path) -> None:
    """What cannot be scored is decided by its headers; a body that follows them arrives all the same."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [Engine(), Engine(), Engine()]
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        surface = await stack.enter_async_context(
            running(engines, tmp_path, endpoint_picker=True, body_mode=mode)  # type: ignore[arg-type]
        )
        for turn in range(6):
            chosen = engines[turn % 3].address
            surface.decider.choice = (chosen,)
            body, headers = (b"", {}) if turn % 2 else (b"z" * 100_000, {"content-encoding": "x-unknown"})
            async with surface.http.post(CHAT, data=body or None, headers=headers) as answer:
                assert answer.status == 200
                got = await answer.json()
            assert got["served_by"] == chosen
            assert got["body"] == hashlib.sha256(body).hexdigest()
            assert got["headers"][DESTINATION] == chosen, "the body's reply leaves the header alone"
        surface.decider.choice = ()
        async with surface.http.post(CHAT) as answer:
            assert answer.status == 503
            assert (await answer.json())["error"]["type"] == "service_unavailable"


@pytest.mark.parametrize("mode", list(BodyMode))
async def test_kvcar_leaves_during_a_streamed_answer(mode: BodyMode, tmp_path: Path) -> None:
    """Buffered, the answer completes without kvcar; in full duplex it passes through kvcar and is cut."""
    async with contextlib.AsyncExitStack() as stack:
        engine = Engine()
        await engine.start()
        stack.push_async_callback(engine.stop)
        surface = await stack.enter_async_context(
            running([engine], tmp_path, body_mode=mode)  # type: ignore[list-item]
        )
        async with surface.http.post(CHAT, data=b"stream") as answer:
            assert await answer.content.readline() == b"data: 1\n"
            await surface.server.stop(0)
            engine.go.set()
            if mode is BodyMode.BUFFERED:
                assert b"usage" in await answer.content.read()
            else:
                with pytest.raises(aiohttp.ClientPayloadError):
                    await answer.content.read()


class Merged(EnvoyProcess):
    """An Envoy that somebody else configured, with the fragments in their places."""

    def __init__(self, options: EnvoyOptions, folder: Path) -> None:
        super().__init__(options, folder)
        pieces = as_dict(options, Part.FRAGMENT)
        data = yaml.safe_load((Path(__file__).parents[1] / "extproc/existing_envoy.yaml").read_text())
        listener = data["static_resources"]["listeners"][0]
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        data["static_resources"]["clusters"] += pieces["clusters"]
        manager["early_header_mutation_extensions"] = pieces["early_header_mutation_extensions"]
        manager["http_filters"][-1:-1] = pieces["http_filters"]
        manager["route_config"]["virtual_hosts"][0]["routes"][:0] = pieces["routes"]
        manager["access_log"] = as_dict(options)["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0][
            "typed_config"
        ]["access_log"]
        listener["address"] = data["admin"] = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}}
        listener["address"] = listener["address"]["address"]
        self.config_path.write_text(yaml.safe_dump(data))


@pytest.mark.parametrize("routing", list(Routing))
async def test_fragments_in_somebody_elses_envoy(
    routing: Routing, engines: list[EchoUpstream], outsider: EchoUpstream, tmp_path: Path
) -> None:
    async with running(engines, tmp_path, envoy=Merged, routing=routing) as surface:
        for engine in (*engines, *engines):
            surface.decider.choice = (engine.address,)
            assert (await surface.post(steering(outsider.address)))[0] == engine.address
        surface.decider.choice = ()
        await check_no_steering(surface, engines, outsider)
