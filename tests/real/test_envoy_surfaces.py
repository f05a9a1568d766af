"""Every way in which `kvcar envoy-config` can attach kvcar, in a real Envoy: the decision is obeyed, and a client's own
routing headers never steer, whether kvcar decides, does not decide or is not there.

The options multiply to 2,304 configurations. SURFACES has ten of them, in which every two values of two options meet.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator, Mapping
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
from tests.real.harness import EchoUpstream, EnvoyProcess, echo_upstream, free_port, http_get, wait_for
from tests.real.test_ext_proc_modes import Engine, gone

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


class Http2Only(EnvoyProcess):
    """Engines that speak HTTP/2 and nothing else: a plain Envoy, one listener in front of each."""

    def __init__(self, engines: list[EchoUpstream], folder: Path) -> None:
        super().__init__(options_of(engines, folder, 1, access_log=None), folder, name="http2")
        local = {"socket_address": {"address": "127.0.0.1", "port_value": 0}}
        types = "type.googleapis.com/envoy.extensions.filters"
        listeners, clusters = [], []
        for number, engine in enumerate(engines):
            host, _, port = engine.address.rpartition(":")
            member = {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}
            loads = {"cluster_name": f"e{number}", "endpoints": [{"lb_endpoints": [member]}]}
            clusters.append({"name": f"e{number}", "type": "STATIC", "load_assignment": loads})
            route = {"match": {"prefix": "/"}, "route": {"cluster": f"e{number}"}}
            manager = {
                "@type": f"{types}.network.http_connection_manager.v3.HttpConnectionManager",
                "stat_prefix": "http2",
                "codec_type": "HTTP2",
                "route_config": {"virtual_hosts": [{"name": "v", "domains": ["*"], "routes": [route]}]},
                "http_filters": [{"name": "router", "typed_config": {"@type": f"{types}.http.router.v3.Router"}}],
            }
            chain = {"filters": [{"name": "envoy.http_connection_manager", "typed_config": manager}]}
            listeners.append({"name": f"l{number}", "address": local, "filter_chains": [chain]})
        static = {"listeners": listeners, "clusters": clusters}
        self.config_path.write_text(yaml.safe_dump({"admin": {"address": local}, "static_resources": static}))

    def addresses(self) -> list[str]:
        """In the order of the engines."""
        rows = json.loads(http_get(f"http://{self.admin}/listeners?format=json")[1])["listener_statuses"]
        ports = {row["name"]: row["local_address"]["socket_address"]["port_value"] for row in rows}
        return [f"127.0.0.1:{ports[name]}" for name in sorted(ports)]


@pytest.fixture(scope="module")
def http2_engines(
    engines: list[EchoUpstream], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[EchoUpstream]]:
    """The same engines behind HTTP/2: other addresses, the same lists of requests."""
    with Http2Only(engines, tmp_path_factory.mktemp("http2")) as front:
        front.wait_ready()
        pairs = zip(front.addresses(), engines, strict=True)
        yield [EchoUpstream(address, engine.requests) for address, engine in pairs]


@pytest.fixture(scope="module")
def outsider() -> Iterator[EchoUpstream]:
    """A server that Envoy could reach and that is no engine."""
    with echo_upstream() as server:
        yield server


class Decider:
    choice: tuple[str, ...] = ()
    asked = 0

    async def decide(self, request: HttpRequest) -> Outcome:
        self.asked += 1
        return Outcome(self.choice, metadata={"pool": "p"})

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
    dialled: Mapping[int, str]
    """What Envoy calls the engine that says that it served, by its port."""

    async def post(self, headers: dict[str, str]) -> tuple[str, dict[str, str]]:
        """(address that served, the response's headers)."""
        async with self.http.post(CHAT, data=b'{"model": "m"}', headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            served = json.loads(await answer.text())["served_by"]
            return self.dialled[served], {name.lower(): value for name, value in answer.headers.items()}


def options_of(engines: list[EchoUpstream], folder: Path, port: int, /, **changes: Any) -> EnvoyOptions:
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
    /,
    *,
    away: int = 0,
    endpoint_picker: bool = False,
    envoy: type[EnvoyProcess] = EnvoyProcess,
    ports: list[EchoUpstream] | None = None,
    **changes: Any,
) -> AsyncIterator[Surface]:
    """Envoy with kvcar's server behind it, and `away` kvcar addresses where nobody listens. `ports`: the engines under
    the ports that they name themselves by."""
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
            steers = frozenset({*ROUTING_HEADERS, session or DESTINATION})
            named = [int(one.address.rpartition(":")[2]) for one in ports or engines]
            dialled = dict(zip(named, (one.address for one in engines), strict=True))
            yield Surface(process, server, decider, http, steers, dialled)
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


OPTIONS: dict[str, tuple[str, ...]] = {
    "routing": tuple(Routing),
    "kvcar speaks": ("plain", "tls", "mutual tls"),
    "body mode": tuple(BodyMode),
    "kvcar": ("one", "two, one away"),
    "engines speak": tuple(Http),
    "members": ("static", "file"),
    "access log": ("log", "no log"),
    "part": ("whole", "fragments"),
    "answers": ("unseen", "observed"),
    "without kvcar": ("open", "closed"),
}
SURFACES = """
override-host    | plain      | buffered    | one           | http1 | static | log    | whole     | unseen   | open
override-host    | plain      | buffered    | one           | http2 | file   | no log | fragments | observed | closed
override-host    | tls        | buffered    | two, one away | http1 | static | log    | whole     | unseen   | open
override-host    | mutual tls | full-duplex | two, one away | http1 | static | no log | fragments | observed | closed
original-dst     | plain      | full-duplex | two, one away | http2 | file   | log    | whole     | unseen   | closed
original-dst     | tls        | full-duplex | one           | http1 | file   | no log | fragments | observed | open
original-dst     | mutual tls | buffered    | one           | http2 | static | log    | whole     | unseen   | open
stateful-session | plain      | full-duplex | two, one away | http1 | static | no log | fragments | unseen   | open
stateful-session | tls        | buffered    | one           | http2 | static | no log | whole     | observed | closed
stateful-session | mutual tls | buffered    | two, one away | http1 | file   | log    | fragments | observed | closed
"""
ROWS = [dict(zip(OPTIONS, map(str.strip, line.split("|")), strict=True)) for line in SURFACES.strip().splitlines()]


def test_every_two_options_meet() -> None:
    for one, other in itertools.combinations(OPTIONS, 2):
        met = {(row[one], row[other]) for row in ROWS}
        assert met == set(itertools.product(OPTIONS[one], OPTIONS[other])), (one, other)


def write_members(engines: list[EchoUpstream], path: Path) -> str:
    """An EDS file."""
    rows = []
    for engine in engines:
        host, _, port = engine.address.rpartition(":")
        rows.append({"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}})
    kind = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
    resource = {"@type": kind, "cluster_name": "engines", "endpoints": [{"lb_endpoints": rows}]}
    path.write_text(json.dumps({"resources": [resource]}))
    return str(path)


def changes_of(row: Mapping[str, str], engines: list[EchoUpstream], folder: Path) -> dict[str, Any]:
    """A row as options of `envoy-config`."""
    changes: dict[str, Any] = {
        "routing": Routing(row["routing"]),
        "ext_proc_tls": {"plain": None, "tls": CLIENT_TLS, "mutual tls": MUTUAL}[row["kvcar speaks"]],
        "body_mode": BodyMode(row["body mode"]),
        "engine_protocol": Http(row["engines speak"]),
        "observe_usage": row["answers"] == "observed",
        "fail_open": row["without kvcar"] == "open",
    }
    if row["members"] == "file":
        changes |= {"engines": (), "engines_file": write_members(engines, folder / "engines.json")}
    if row["access log"] == "no log":
        changes["access_log"] = None
    return changes


@pytest.mark.parametrize("row", ROWS, ids=[", ".join(row.values()) for row in ROWS])
async def test_kvcar_steers_and_a_client_never_does(
    row: dict[str, str],
    engines: list[EchoUpstream],
    http2_engines: list[EchoUpstream],
    outsider: EchoUpstream,
    tmp_path: Path,
) -> None:
    known = engines
    engines = http2_engines if row["engines speak"] == Http.HTTP2 else engines
    async with running(
        engines,
        tmp_path,
        away=row["kvcar"] != "one",
        envoy=Merged if row["part"] == "fragments" else EnvoyProcess,
        ports=known,
        **changes_of(row, engines, tmp_path),
    ) as surface:
        for turn in range(6):
            chosen = engines[turn % 3].address
            surface.decider.choice = (chosen,)
            served, headers = await surface.post(steering(engines[(turn + 1) % 3].address))
            assert served == chosen
            assert not set(headers) & surface.steering, "no engine's address goes to clients"
            seen = engines[turn % 3].requests[-1]["headers"]
            assert {seen[one] for one in ROUTING_HEADERS if one in seen} == {chosen}
        if row["kvcar"] != "one":  # nor do many at once, each of which may meet the one that is away
            surface.decider.choice = (engines[0].address,)
            assert {served for served, _ in await asyncio.gather(*(surface.post({}) for _ in range(40)))} == {
                engines[0].address
            }
        surface.decider.choice = ()
        await check_no_steering(surface, engines, outsider)
        await check_other_paths(surface)
        await check_access_log(row, surface, engines[0].address)

        await surface.server.stop(0)
        await asyncio.to_thread(wait_for, lambda: gone(surface.envoy), "Envoy to lose kvcar")
        duplex, closed = row["body mode"] == BodyMode.FULL_DUPLEX, row["without kvcar"] == "closed"
        if duplex or closed:
            # Full duplex: a request that finds out about the outage fails; once the health check has, it passes.
            before = [len(engine.requests) for engine in engines]
            async with surface.http.post(CHAT, data=b"{}", headers=steering(outsider.address)) as answer:
                assert answer.status == 500
            assert [len(engine.requests) for engine in engines] == before
        if not closed:
            if duplex:
                await asyncio.to_thread(surface.envoy.wait_healthy, "extproc", 0)
            await check_no_steering(surface, engines, outsider)


async def check_other_paths(surface: Surface) -> None:
    """Where no prompts are, kvcar is not asked, and nothing is in the way."""
    asked = surface.decider.asked
    async with surface.http.get("/v1/models") as answer:
        assert answer.status in (200, 404)  # 404: the other Envoy's own routes
    assert surface.decider.asked == asked


async def check_access_log(row: Mapping[str, str], surface: Surface, first: str) -> None:
    """The decision, who served, kvcar's own facts and what it cost; of the first request, which went to `first`."""
    entries = await asyncio.to_thread(surface.envoy.access_log)
    if row["access log"] == "no log":
        assert entries == []
        return
    entry = entries[0]
    told = {name: entry[name] for name in ("chosen", "upstream", "served", "code", "attempts", "path")}
    served = first if row["routing"] == Routing.OVERRIDE_HOST else None
    assert told == {"chosen": first, "upstream": first, "served": served, "code": 200, "attempts": 1, "path": CHAT}
    assert entry["kvcar"]["pool"] == "p"
    assert int(entry["ep_hdr_us"]) > 0


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
        manager["access_log"] = pieces.get("access_log", [])
        listener["address"] = data["admin"] = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}}
        listener["address"] = listener["address"]["address"]
        if options.engines_file is not None:
            data["node"] = {"id": "edge", "cluster": "edge"}  # as the comment at the file says
        self.config_path.write_text(yaml.safe_dump(data))
