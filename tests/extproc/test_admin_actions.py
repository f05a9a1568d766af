"""Pools, configuration, actions and the description of the admin port, over pools without sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from click.testing import CliRunner

from examples.local.stack import TOKENIZER
from extproc.admin.actions import Actions
from extproc.admin.pages import Pages
from extproc.admin.query import Queries
from extproc.admin.server import AdminServer, make_app, tls_context
from extproc.assembly import check_files
from extproc.cli import main
from extproc.commands.query import _url
from extproc.config import Config, ConfigError, parse
from extproc.metrics import Metrics
from extproc.overrides import Overrides
from kvindex.directory import Stream
from kvindex.fleet import InstanceState
from tests.extproc.pool_model import Driver, engine, make_pool
from tests.extproc.test_admin_query import DOCS
from tests.extproc.test_server_life import TLS

CONFIG = f"""
admin: {{token: a-long-secret}}
pools:
- name: qwen
  models: [qwen3-8b]
  adapters: [ada]
  tokenizer: {TOKENIZER}
  scorer: {{name: car, lambda: 0.75}}
  max_model_len: 4096
"""
Client = TestClient[web.Request, web.Application]


class Source:
    """A kvcar of one pool with two engines, the second of two ranks."""

    def __init__(self) -> None:
        self.config: Config = parse(CONFIG)
        self.overrides = Overrides()
        pool = make_pool(engine("engine-a"), engine("engine-b", ranks=2), overrides=self.overrides)
        self.pools = [pool]

    def readiness(self) -> tuple[bool, Mapping[str, Any]]:
        return True, {"pools": {}}

    def status(self) -> Mapping[str, Any]:
        return {"pools": []}

    def streams(self) -> list[Mapping[str, Any]]:
        return []

    def decisions(self, *_: Any) -> list[Any]:
        return []

    def metrics(self, accept: str) -> tuple[bytes, str]:
        return Metrics("1").render(accept)


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
async def client(source: Source) -> AsyncIterator[Client]:
    async with TestClient(TestServer(make_app(source))) as http:
        yield http


async def act(client: Client, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    answer = await client.post(path, json=body, headers=headers)
    return answer.status, await answer.json()


async def test_a_drained_instance_gets_nothing_new_and_stays_so(client: Client, source: Source) -> None:
    pool, fleet = source.pools[0], source.pools[0]._fleet
    status, told = await act(client, "/instances/drain", {"instance": "engine-a"})
    assert (status, told) == (200, {"instance": "engine-a", "changed": True, "state": "draining", "in_flight": 0})
    assert [str(one.state) for one in pool.instances] == ["draining", "active"]
    followed = {stream.instance for stream in pool.directory.status()}
    assert followed == {"engine-a", "engine-b"}, "its streams are kept"
    for again in (engine("engine-a", model="other"), engine("engine-a", incarnation="restarted")):
        fleet.upsert(again)  # discovery refreshes it, then finds it restarted
        assert str(pool.by_name["engine-a"].state) == "draining"
    fleet.upsert(engine("engine-a", state=InstanceState.SUSPECT))
    assert str(pool.by_name["engine-a"].state) == "suspect", "one that does not answer is no better for being drained"
    fleet.upsert(engine("engine-a"))
    assert (await act(client, "/instances/drain", {"instance": "engine-a"}))[1]["changed"] is False
    assert (await act(client, "/instances/undrain", {"instance": "engine-a"}))[1]["state"] == "active"
    assert str(pool.by_name["engine-a"].state) == "active"
    assert source.overrides.drained == frozenset()


async def test_a_drained_instance_that_left_can_be_let_go(client: Client, source: Source) -> None:
    await act(client, "/instances/drain", {"instance": "engine-a"})
    source.pools[0]._fleet.remove("engine-a")
    told = (await act(client, "/instances/undrain", {"instance": "engine-a"}))[1]
    assert (told["changed"], told["state"]) == (True, "gone")
    assert (await act(client, "/instances/undrain", {"instance": "engine-a"}))[0] == 404


@pytest.mark.parametrize(
    ("action", "body", "status", "streams"),
    [
        ("resync", {"instance": "engine-b"}, 200, ["engine-b/0", "engine-b/1"]),
        ("resync", {"instance": "engine-b", "dp_rank": 1}, 200, ["engine-b/1"]),
        ("rebuild", {"instance": "engine-a", "dp_rank": 0}, 200, ["engine-a/0"]),
        ("rebuild", {"instance": "engine-a", "dp_rank": 1}, 404, []),
        ("rebuild", {"instance": "engine-z"}, 404, []),
        ("resync", {}, 400, []),
        ("resync", {"instance": 5}, 400, []),
        ("resync", {"instance": "engine-b", "dp_rank": "1"}, 400, []),
        ("resync", {"instance": "engine-b", "dp_rank": True}, 400, []),
        ("resync", {"instance": "engine-b", "dp_rank": -1}, 400, []),
        ("resync", {"instance": "engine-b", "rank": 1}, 400, []),  # a slip must not mean "all of them"
        ("resync", ["engine-b"], 400, []),
    ],
)
async def test_streams(
    client: Client, monkeypatch: pytest.MonkeyPatch, action: str, body: Any, status: int, streams: list[str]
) -> None:
    asked: list[str] = []

    def ask(_driver: Driver, stream: Stream) -> None:
        asked.append(stream.name)

    monkeypatch.setattr(Driver, action, ask)
    got, told = await act(client, f"/streams/{action}", body)
    assert (got, asked) == (status, streams)
    assert told == {"instance": body["instance"], "streams": len(streams)} if status == 200 else "error" in told


@pytest.fixture
def quiet() -> Iterator[logging.Logger]:
    """The root logger at level info, restored afterwards."""
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.INFO)
    yield root
    root.setLevel(before)


async def test_log_level(client: Client, quiet: logging.Logger) -> None:
    assert await act(client, "/log-level", {"level": "debug"}) == (200, {"level": "debug", "before": "info"})
    assert quiet.level == logging.DEBUG
    assert await (await client.get("/log-level")).json() == {"level": "debug"}
    assert (await act(client, "/log-level", {"level": "loud"}))[0] == 400


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, whose level is put back."""
    root = logging.getLogger()
    before = root.level
    yield root
    root.setLevel(before)


async def test_every_action_is_logged_with_who(
    client: Client, caplog: pytest.LogCaptureFixture, root: logging.Logger
) -> None:
    root.setLevel("ERROR")  # such lines come all the same
    for path, body in (
        ("/instances/drain", {"instance": "engine-a"}),
        ("/streams/rebuild", {"instance": "engine-b", "dp_rank": 1}),
        ("/instances/drain", {"instance": "engine-z\nINFO state=active"}),
        ("/log-level", {"level": "verbose"}),
    ):
        await act(client, path, body)
    lines = [(one.levelname, one.getMessage()) for one in caplog.records if one.name == "extproc.admin.actions"]
    assert lines == [
        ("INFO", "admin action /instances/drain instance=engine-a from 127.0.0.1: "
                 "changed=true state=draining in_flight=0"),
        ("INFO", "admin action /streams/rebuild instance=engine-b dp_rank=1 from 127.0.0.1: streams=1"),
        ("WARNING", r'admin action /instances/drain instance="engine-z\nINFO state=active" from 127.0.0.1 refused: '
                    r"instance 'engine-z\nINFO state=active' is not known: GET /status names them"),
        ("WARNING", "admin action /log-level from 127.0.0.1 refused: "
                    'level must be one of debug, info, warning, error, not "verbose"'),
    ]  # fmt: skip


async def test_the_level_changes_and_says_from_what(
    client: Client, caplog: pytest.LogCaptureFixture, root: logging.Logger
) -> None:
    root.setLevel("WARNING")
    await act(client, "/log-level", {"level": "error"})
    assert caplog.messages == ["admin action /log-level level=error from 127.0.0.1: before=warning"]


async def test_bodies_and_origins_of_actions(source: Source) -> None:
    async with TestClient(TestServer(make_app(source))) as http:
        path, good = "/instances/drain", b'{"instance": "engine-a"}'
        for data, headers, status in (
            (good, {"Content-Type": "text/plain"}, 415),
            (good, {"Content-Type": "application/json", "Origin": "https://evil.example"}, 403),
            (good, {"Content-Type": "application/json", "Host": "evil.example"}, 403),
            (b"{", {"Content-Type": "application/json"}, 400),
            (b"[" * 50_000, {"Content-Type": "application/json"}, 400),
            (b'{"instance": "' + b"x" * (64 << 10) + b'"}', {"Content-Type": "application/json"}, 400),
        ):
            answer = await http.post(path, data=data, headers=headers)
            assert (answer.status, set(await answer.json())) == (status, {"error"})
        assert source.overrides.drained == frozenset()
    async with TestClient(TestServer(make_app(source, token="a-long-secret"))) as http:
        assert (await act(http, path, {"instance": "engine-a"}))[0] == 401
        assert (await act(http, path, {"instance": "engine-a"}, **{"X-Internal-Token": "a-long-secret"}))[0] == 200


@pytest.mark.parametrize(
    "path",
    ["/instances/%64rain", "/instances%2Fdrain", "/./instances/drain", "/x/../instances/drain", "//instances/drain",
     "/instances/drain/", "/instances/drain?a=/healthz"],
)  # fmt: skip
@pytest.mark.parametrize("token", [None, "a-long-secret"])
async def test_the_guard_reads_the_route_and_not_the_spelling(source: Source, path: str, token: str | None) -> None:
    """A client library would tidy the path up."""
    body = b'{"instance": "engine-a"}'
    async with TestServer(make_app(source, token=token)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(f"POST {path} HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        status = int((await reader.readline()).split()[1])
        writer.close()
    assert status in ((401,) if token else (404, 415)), "no JSON content type, no token"
    assert source.overrides.drained == frozenset()


def test_files_of_admin_tls_are_checked() -> None:
    config = parse(CONFIG.replace("admin: {", "admin: {tls: {cert: /nowhere.pem, key: /nowhere.key}, "))
    with pytest.raises(ConfigError, match=r"admin\.tls\.cert: '/nowhere\.pem' is no readable file"):
        check_files(config)


async def test_pools(client: Client) -> None:
    (pool,) = (await (await client.get("/pools")).json())["pools"]
    assert pool["models"] == ["qwen3-8b", "ada"]
    assert pool["scorer"] == {"name": "car", "parameters": {"lambda": 0.75}}
    assert (pool["block_size"], pool["hash_seed"]) == (4, 1024)
    assert pool["tokenizer"]["loaded"] is True
    assert pool["limits"]["max_model_len"] == 4096
    assert [one["name"] for one in pool["instances"]] == ["engine-a", "engine-b"]


async def test_a_pool_that_no_file_describes(client: Client, source: Source) -> None:
    """Between a reload and the next request."""
    source.config = parse(CONFIG.replace("name: qwen", "name: other"))
    (pool,) = (await (await client.get("/pools")).json())["pools"]
    assert (pool["name"], pool["scorer"]["name"]) == ("qwen", "car")


async def test_configuration_without_secrets(client: Client) -> None:
    answer = await client.get("/config")
    text = await answer.text()
    assert "a-long-secret" not in text
    assert (await answer.json())["config"]["admin"]["token"] == "***"
    assert (await answer.json())["config"]["pools"][0]["scorer"]["lambda"] == 0.75


async def test_index_makes_room(source: Source) -> None:
    async def page(_request: web.Request) -> web.StreamResponse:
        return web.Response(text="a page")

    async with TestClient(TestServer(make_app(source))) as http:
        assert "GET /streams" in await (await http.get("/")).json()
    async with TestClient(TestServer(make_app(source, more=[web.get("/", page)]))) as http:
        assert await (await http.get("/")).text() == "a page"


async def test_the_description_and_the_routes_are_the_same(source: Source) -> None:
    app = make_app(source, token="a-long-secret", more=Queries(source.pools).routes())
    routes = {(route.method.lower(), route.resource.canonical) for route in app.router.routes() if route.resource}
    async with TestClient(TestServer(app)) as http:
        told = await (await http.get("/openapi.json", headers={"X-Internal-Token": "a-long-secret"})).json()
    described = {(method, path) for path, methods in told["paths"].items() for method in methods}
    assert {route for route in routes if route[0] != "head"} == described
    assert told["openapi"] == "3.1.0"
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            assert ("401" in operation["responses"]) == (path not in ("/healthz", "/readyz", "/metrics")), path
            assert ("requestBody" in operation) == (method == "post"), path
    used = {word for word in str(told).split("'") if word.startswith("#/components/schemas/")}
    assert {word.rpartition("/")[2] for word in used} <= set(told["components"]["schemas"])


def test_every_endpoint_is_on_the_page(source: Source) -> None:
    for one in [*Pages(source).endpoints(), *Actions(source).endpoints(), *Queries(source.pools).routes()]:
        assert f"`{one.method} {one.path}`" in DOCS, f"docs/admin-api.md: {one.method} {one.path}"


EXAMPLES = re.findall(r"^\$ curl -s 127\.0\.0\.1:9003(\S+) --json ('.*')\n(.*)$", DOCS, re.MULTILINE)


@pytest.mark.usefixtures("quiet")
async def test_examples_of_the_page(client: Client) -> None:
    assert len(EXAMPLES) >= 7
    for path, body, answer in EXAMPLES:
        status, _, text = answer.partition(" ") if answer[:3].isdigit() else ("200", "", answer)
        assert await act(client, path, json.loads(body.strip("'"))) == (int(status), json.loads(text))


@pytest.mark.parametrize("mutual", [False, True])
async def test_tls(source: Source, mutual: bool) -> None:
    context = tls_context(str(TLS / "server.pem"), str(TLS / "server.key"), str(TLS / "ca.pem") if mutual else None)
    server = AdminServer(make_app(source), "127.0.0.1", 0, tls=context)
    port = await server.start()
    try:
        trust = ssl.create_default_context(cafile=str(TLS / "ca.pem"))
        async with aiohttp.ClientSession() as http:
            if mutual:
                with pytest.raises((aiohttp.ClientError, OSError)):
                    async with http.get(f"https://127.0.0.1:{port}/healthz", ssl=trust) as answer:
                        await answer.read()
                trust.load_cert_chain(TLS / "client.pem", TLS / "client.key")
            async with http.get(f"https://127.0.0.1:{port}/healthz", ssl=trust) as answer:
                assert await answer.text() == "ok\n"
            with pytest.raises(aiohttp.ClientError):
                async with http.get(f"http://127.0.0.1:{port}/healthz") as answer:
                    await answer.read()
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("mutual", "arguments", "works"),
    [(False, [], True), (True, [], False), (True, ["--cert", TLS / "client.pem", "--key", TLS / "client.key"], True)],
)
async def test_the_query_command_over_tls(
    source: Source, tmp_path: Path, mutual: bool, arguments: list[Any], works: bool
) -> None:
    files = {"cert": str(TLS / "server.pem"), "key": str(TLS / "server.key")}
    if mutual:
        files["client_ca"] = str(TLS / "ca.pem")
    app = make_app(source, more=Queries(source.pools).routes())
    server = AdminServer(app, "127.0.0.1", 0, tls=tls_context(files["cert"], files["key"], files.get("client_ca")))
    address = f"127.0.0.1:{await server.start()}"
    config = tmp_path / "kvcar.yaml"
    config.write_text(CONFIG.replace("admin: {token: a-long-secret}", "admin: " + json.dumps({"tls": files})))
    command = ["query", "-c", str(config), "--admin", address, *map(str, arguments)]
    try:
        done = await asyncio.to_thread(CliRunner().invoke, main, command)
    finally:
        await server.stop()
    assert (done.exit_code, "engine-b" in done.output) == ((0, True) if works else (1, False)), done.output


@pytest.mark.parametrize("address", ["0.0.0.0:9003", "http://127.0.0.1:9003", "http://127.0.0.1:9003/"])
def test_the_query_command_takes_an_address_or_a_url(address: str) -> None:
    assert _url(address, "http") == "http://127.0.0.1:9003/v1/internal/kv-cache/query"


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "127.0.0.1:0", "127.0.0.1:²", "127.0.0.1:٣", "127.0.0.1:99999", ":9003", "127.0.0.1:" + "9" * 5000],
)
def test_the_query_command_refuses_what_is_no_address(address: str) -> None:
    with pytest.raises(SystemExit) as ended:
        _url(address, "http")
    assert ended.value.code == 2
