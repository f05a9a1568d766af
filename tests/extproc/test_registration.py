"""The conductors' API over HTTP: statuses and answers of both forms; pools of `kvcar serve`. No ZMQ behind it."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from extproc import conductor
from extproc.admin.query import Queries
from extproc.admin.registration import Registrations
from extproc.admin.server import guarded
from extproc.conductor import ConductorOptions, OpenHomes
from extproc.pools import Pools
from extproc.registrar import PoolHomes, Registrar
from extproc.registry import Registry
from kvindex.directory import Directory
from kvindex.discovery.base import FleetFeed
from kvindex.discovery.registered import Registered
from kvindex.fleet import Fleet, PoolPublisher, StreamEndpoint
from kvindex.hashing import pack_tokens
from kvindex.networks import Networks
from kvindex.rolling import local_hashes, rolled
from tests.extproc.pool_model import Driver, engine, make_pool

Client = TestClient[web.Request, web.Application]
Open = Callable[..., Awaitable[tuple[Client, Registrar]]]
DOCS = (Path(__file__).parents[2] / "docs" / "conductor.md").read_text("utf-8")
MODEL = "qwen3-8b"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def open_homes(**options: Any) -> OpenHomes:
    def make(block_size: int | None) -> Directory:
        return Directory(Driver(), block_size=block_size)

    return OpenHomes(make, ConductorOptions(**options))


@pytest.fixture
async def opened() -> AsyncIterator[Open]:
    clients: list[Client] = []

    async def make(
        homes: Any = None, *, form: str = "motor", token: str | None = None, clock: Clock | None = None
    ) -> tuple[Client, Registrar]:
        registrar = Registrar(Registry(form=form), homes or open_homes())
        routes = Registrations(registrar, clock=clock or Clock()).routes(with_query=True)
        server = TestServer(guarded(routes, token=token))
        await server.start_server(auto_decompress=False)
        clients.append(TestClient(server))
        await clients[-1].start_server()
        return clients[-1], registrar

    yield make
    for client in clients:
        await client.close()


async def ask(client: Client, path: str, body: Any = None, **more: Any) -> tuple[int, Any]:
    if body is None:
        answer = await client.get(path, **more)
    else:
        answer = await client.post(path, data=body if isinstance(body, bytes) else json.dumps(body).encode(), **more)
    return answer.status, await answer.json(content_type=None)


E1 = {"instance_id": "e1", "type": "vLLM", "modelname": MODEL, "block_size": 4, "dp_rank": 0,
      "endpoint": "tcp://10.0.0.1:5557"}  # fmt: skip
E2 = {**E1, "instance_id": "e2", "endpoint": "tcp://10.0.0.2:5557"}
PUSHING = {**E1, "instance_id": "e3", "endpoint": ""}
OK, NEW = {"status": "ok"}, {"status": "registered successfully", "instance_id": "e1"}
UNKNOWN = "no indexer for model=x tenant=default"
GONE = "instance_id=e9 tenant=default is not registered"


@pytest.mark.parametrize(
    ("path", "body", "motor", "mooncake"),
    [
        ("/register", E1, (201, OK), (200, NEW)),
        ("/register", {**E1, "medium_endpoints": {"npu": "tcp://10.0.0.1:5557"}}, (201, OK), (400, None)),
        ("/register", {**E1, "endpoint": "tcp://10.0.0.1:6000"}, (201, OK), (400, None)),
        ("/register", {**E1, "dp_rank": 1, "block_size": 8}, (409, None), (400, None)),
        ("/register", {**E1, "instance_id": None}, (422, None), (400, None)),
        ("/register", b"{", (400, None), (400, None)),
        ("/register", b"[]", (422, None), (400, None)),
        ("/register", json.dumps({**E1, "x": "y" * 70_000}).encode(), (413, None), (413, None)),
        ("/unregister", {"instance_id": "e1", "dp_rank": 0}, (200, OK),
         (200, {"status": "unregistered successfully", "removed_instances": ["e1|default|0"]})),
        ("/unregister", {"instance_id": "e1", "modelname": MODEL, "type": "vLLM", "block_size": 4}, (200, OK),
         (200, {"status": "unregistered successfully", "removed_instances": ["e1|default|0"]})),
        ("/unregister", {"instance_id": "e9"}, (404, {"error": GONE}),
         (404, {"error": GONE, "reason": "not_registered"})),
        ("/unregister", {"instance_id": "e1", "dp_rank": "0"}, (422, None), (400, None)),
        ("/query", {"model": "x", "token_ids": []}, (404, {"error": UNKNOWN}), (404, {"error": UNKNOWN})),
        ("/query", {"model": MODEL, "token_ids": [1, 2, 3, 4], "block_size": 4},
         (200, {"default": {"e1": {"longest_matched": 0, "DP": {"0": {
             "matched_tokens": 0, "npu_blocks": 0, "cpu_blocks": 0, "disk_blocks": 0}}}}}),
         (200, {"default": {"e1": {"longest_matched": 0, "GPU": 0, "CPU": 0, "DISK": 0, "DP": {"0": 0}}}})),
        ("/query", {"model": MODEL, "token_ids": "x"}, (422, None), (400, None)),
        ("/query_by_hash", {"model": MODEL, "block_hashes": [1]}, (200, None), (200, None)),
        ("/query_by_hash", {"model": MODEL, "seq_hashes": [2**64]}, (422, None), (400, None)),
        ("/query_by_hash", {"model": MODEL, "seq_hashes": [1], "block_hashes": [1]}, (422, None), (400, None)),
        ("/query_by_hash", {"model": MODEL}, (422, None), (400, None)),
        ("/query_by_hash", {"model": "x", "block_hash": []}, (404, None), (404, None)),
        ("/events", {"instance_id": "e9", "events": []}, (404, {"error": GONE}),
         (404, {"error": GONE, "reason": "not_registered"})),
        ("/events", {"instance_id": "e1", "events": 5}, (422, None), (400, None)),
        ("/events", {"events": []}, (422, None), (400, None)),
    ],
    ids=str,
)  # fmt: skip
async def test_statuses(path: str, body: Any, motor: Any, mooncake: Any, opened: Open) -> None:
    for form, expected in (("motor", motor), ("mooncake", mooncake)):
        client, _ = await opened(form=form)
        await ask(client, "/register", E1)
        status, answer = await ask(client, path, body)
        assert (status, form) == (expected[0], form), answer
        if expected[1] is not None:
            assert answer == expected[1]
        elif status >= 400:
            assert answer["error"]


async def test_lists(opened: Open) -> None:
    client, _ = await opened()
    for body in (E1, {**E1, "dp_rank": 1, "endpoint": "tcp://10.0.0.1:5558"}, {**E2, "tenant_id": "t"}):
        assert await ask(client, "/register", body) == (201, OK)
    _, found = await ask(client, "/workers")
    assert [(one["instance_id"], one["tenant_id"], sorted(one["endpoints"])) for one in found["workers"]] == [
        ("e1", "default", ["0", "1"]), ("e2", "t", ["0"]),
    ]  # fmt: skip
    assert found["indexer"] == [
        {"model_name": MODEL, "tenant_id": "default", "worker_count": 1, "total_blocks": 0},
        {"model_name": MODEL, "tenant_id": "t", "worker_count": 1, "total_blocks": 0},
    ]
    _, found = await ask(client, "/workers?tenant_id=t")
    assert (len(found["workers"]), len(found["indexer"])) == (1, 1)
    assert (await ask(client, "/workers?model_name=x"))[1] == {"workers": [], "indexer": []}
    _, found = await ask(client, "/services")
    assert found["count"] == 3
    told = [tuple(one[key] for key in ("InstanceID", "DPRank", "Endpoint")) for one in found["services"]]
    assert sorted(told) == [
        ("e1", 0, "tcp://10.0.0.1:5557"), ("e1", 1, "tcp://10.0.0.1:5558"), ("e2", 0, "tcp://10.0.0.2:5557")
    ]  # fmt: skip
    assert (await client.get("/health")).status == 200
    assert await (await client.get("/health")).text() == "OK"
    assert (await client.get("/register")).status == 405


TOKENS = list(range(1, 14))
LOCAL = local_hashes(pack_tokens(TOKENS), 4)


def pushed(*events: Any, **more: Any) -> dict[str, Any]:
    return {"instance_id": "e3", "block_size": 4, "events": list(events), **more}


BY_HASH = {"event_id": 1, "data": {"type": "stored", "parent_hash": None, "blocks": [
    {"block_hash": 100 + place, "tokens_hash": one} for place, one in enumerate(LOCAL[:2])]}}  # fmt: skip
BY_TOKENS = {"event_id": 2, "type": "stored", "block_hashes": [100, 101, 102], "token_ids": TOKENS[:12]}


@pytest.mark.parametrize(("event", "blocks"), [(BY_HASH, 2), (BY_TOKENS, 3)], ids=["hashes", "tokens"])
async def test_pushed_events_and_look_ups_by_hash(event: Any, blocks: int, opened: Open) -> None:
    client, _ = await opened()
    await ask(client, "/register", PUSHING)
    assert await ask(client, "/events", pushed(event)) == (200, {"status": "ok", "events_applied": 1})
    for path, body in (
        ("/query", {"token_ids": TOKENS}),
        ("/query_by_hash", {"block_hashes": LOCAL}),
        ("/query_by_hash", {"seq_hashes": rolled(LOCAL)}),
        ("/query_by_hash", {"block_hash": rolled(LOCAL), "instance_id": "e3", "block_size": 4}),
    ):
        status, found = await ask(client, path, {"model": MODEL, **body})
        assert (status, found["default"]["e3"]["longest_matched"]) == (200, 4 * blocks), path
    status, found = await ask(client, "/events", pushed({"event_id": 7, "block_hashes": [100]}, event))
    assert (status, found["status"], found["events_applied"], len(found["errors"])) == (500, "partial", 1, 1)
    assert (await ask(client, "/events", pushed(shutdown=True)))[0] == 200
    _, found = await ask(client, "/query", {"model": MODEL, "token_ids": TOKENS})
    assert found["default"]["e3"]["longest_matched"] == 0


async def test_events_of_an_engine_with_endpoints(opened: Open) -> None:
    client, _ = await opened()
    await ask(client, "/register", E1)
    status, found = await ask(client, "/events", pushed(BY_TOKENS, instance_id="e1"))
    assert (status, found["events_applied"]) == (500, 0)
    assert "register it without" in found["errors"][0]


async def test_message_pack(opened: Open) -> None:
    for content_type in ("application/msgpack", "application/x-msgpack"):
        client, _ = await opened(form="mooncake")
        for path, body, expected in (
            ("/register", {**PUSHING, "instance_id": "e1"}, NEW),
            ("/events", {**pushed(BY_TOKENS), "instance_id": "e1"}, {"status": "ok", "events_applied": 1}),
            ("/query_by_hash", {"model": MODEL, "seq_hashes": rolled(LOCAL)},
             {"default": {"e1": {"longest_matched": 12, "GPU": 12, "CPU": 12, "DISK": 12, "DP": {"0": 12}}}}),
            ("/unregister", {"instance_id": "e9"}, {"error": GONE, "reason": "not_registered"}),
        ):  # fmt: skip
            answer = await client.post(path, data=msgpack.packb(body), headers={"Content-Type": content_type})
            assert answer.content_type == content_type
            assert msgpack.unpackb(await answer.read()) == expected
        answer = await client.post("/register", data=b"\xc1", headers={"Content-Type": content_type})
        assert answer.status == 400


async def test_only_registered_ranks_are_answered(opened: Open) -> None:
    client, _ = await opened()
    await ask(client, "/register", {**E1, "dp_rank": 2})
    _, found = await ask(client, "/query", {"model": MODEL, "token_ids": TOKENS})
    assert list(found["default"]["e1"]["DP"]) == ["2"]


async def test_token_and_models(opened: Open) -> None:
    client, _ = await opened(open_homes(models=("other",)), token="a-long-secret")
    assert (await client.get("/health")).status == 200
    assert (await ask(client, "/register", E1))[0] == 401
    status, found = await ask(client, "/register", E1, headers={"X-Internal-Token": "a-long-secret"})
    assert (status, "--model other" in found["error"]) == (404, True)


AT = {"endpoint": "tcp://{}:5557", "replay_endpoint": "tcp://{}:5558", "address": "{}:80"}
"""What a registration makes kvcar connect to."""


@pytest.mark.parametrize("field", [*AT, "medium_endpoints"])
@pytest.mark.parametrize(
    ("host", "options", "status"),
    [
        ("169.254.169.254", {}, 403),
        ("127.0.0.1", {}, 201),
        ("127.0.0.1", {"host": "0.0.0.0"}, 403),
        ("127.0.0.1", {"host": "0.0.0.0", "networks": ("127.0.0.0/8", "10.0.0.0/8")}, 201),
        ("11.0.0.1", {"networks": ("10.0.0.0/8",)}, 403),
    ],
)
async def test_places_where_nobody_may_be(field: str, host: str, options: Any, status: int, opened: Open) -> None:
    """Refused whole: no index is made, nothing is followed."""
    client, registrar = await opened(open_homes(**options))
    given = {"medium_endpoints": {"disk": AT["endpoint"].format(host)}} if field not in AT else {
        field: AT[field].format(host)
    }  # fmt: skip
    found, answer = await ask(client, "/register", {**E1, **given})
    assert (found, len(registrar.registry)) == (status, int(status == 201))
    if status == 403:
        assert host in answer["error"]
        assert "`networks`" in answer["error"]
        assert registrar.homes.find(MODEL, "default") is None
    store = {**E1, "instance_id": "s", "type": "Mooncake", "endpoint": AT["endpoint"].format(host)}
    assert (await ask(client, "/register", {**store, "endpoint": f"tcp://{host}:6000"}))[0] == status


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoint": "tcp://169.254.169.254:1"},
        {"block_size": 8},
        {"endpoint": "tcp://10.0.0.1:5557", "dp_rank": 4095, "dp_size": 1},
    ],
    ids=str,
)
async def test_what_is_refused_makes_no_index_and_takes_no_place(
    wrong: Any, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conductor, "MAX_CONTEXTS", 1)
    client, registrar = await opened(open_homes(block_size=4))
    assert (await ask(client, "/register", E1))[0] == 201
    await ask(client, "/unregister", {"instance_id": "e1"})
    kept = registrar.homes.find(MODEL, "default")
    assert (await ask(client, "/register", {**E1, "modelname": "another", **wrong}))[0] >= 400
    assert list(registrar.homes.held()) == [kept]
    assert await ask(client, "/query", {"model": MODEL, "token_ids": []}) == (200, {"default": {}})


async def test_an_index_outlives_its_workers_but_not_their_block_size(opened: Open) -> None:
    client, registrar = await opened()
    await ask(client, "/register", PUSHING)
    await ask(client, "/events", pushed(BY_TOKENS))
    assert (await ask(client, "/unregister", {"instance_id": "e3"}))[0] == 200
    assert await ask(client, "/query", {"model": MODEL, "token_ids": TOKENS}) == (200, {"default": {}})
    assert (await ask(client, "/register", {**E1, "block_size": 16}))[0] == 201
    home = registrar.homes.find(MODEL, "default")
    assert home is not None
    assert home.directory.block_size == 16
    assert (await ask(client, "/register", E2))[0] == 409


async def test_bound_of_indexes(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place of a model that everybody has left is given away."""
    monkeypatch.setattr(conductor, "MAX_CONTEXTS", 2)
    client, registrar = await opened()
    for model, expected in (("a", 201), ("b", 201), ("c", 503)):
        assert (await ask(client, "/register", {**E1, "modelname": model}))[0] == expected
    await ask(client, "/unregister", {"instance_id": "e1", "modelname": "a"})
    assert (await ask(client, "/register", {**E1, "modelname": "c"}))[0] == 201
    assert [home.model for home in registrar.homes.held()] == ["b", "c"]


async def test_a_shared_store(opened: Open) -> None:
    """Type Mooncake is no worker that could serve: its copies count for the engines."""
    client, registrar = await opened()
    store = {"instance_id": "store", "type": "Mooncake", "modelname": MODEL, "endpoint": "tcp://10.0.0.9:5557"}
    for body in (E1, store):
        assert (await ask(client, "/register", body))[0] == 201
    home = registrar.homes.find(MODEL, "default")
    assert home is not None
    assert [one.instance for one in (*home.directory.status(), *home.directory.pool_status())] == ["e1", "store"]
    _, found = await ask(client, "/query", {"model": MODEL, "token_ids": TOKENS})
    assert list(found["default"]) == ["e1"]
    assert (await ask(client, "/register", {**E2, "endpoint": "tcp://10.0.0.9:5557"}))[0] == 409
    configured = PoolPublisher("theirs", StreamEndpoint(0, "tcp://10.0.0.8:5557", medium="cpu"))
    home.directory.set_publishers([configured], source="configuration")
    for clash in (
        {**store, "instance_id": "s2", "endpoint": "tcp://10.0.0.8:5557"},
        {**store, "instance_id": "theirs"},
    ):
        assert (await ask(client, "/register", clash))[0] == 409
    assert (await ask(client, "/register", {**store, "endpoint": "tcp://10.0.0.8:5557"}))[0] == 409
    assert [one.endpoint for one in registrar.registry] == [E1["endpoint"], store["endpoint"]]
    home.directory.set_publishers([], source="configuration")
    assert (await ask(client, "/register", store))[0] == 201
    assert len(registrar.registry) == 2
    assert (await ask(client, "/unregister", {"instance_id": "store"}))[0] == 200
    assert [one.instance for one in (*home.directory.status(), *home.directory.pool_status())] == ["e1"]
    assert registrar._told == {}, "contexts come and go: nothing of them is kept"


async def test_expiry(opened: Open) -> None:
    clock = Clock()
    client, registrar = await opened(open_homes(expire_after=10.0), clock=clock)
    for body in (E1, E2):
        await ask(client, "/register", body)
    clock.now = 8.0
    await ask(client, "/register", E2)
    registrar.tick(11.0)
    _, found = await ask(client, "/query", {"model": MODEL, "token_ids": TOKENS})
    assert list(found["default"]) == ["e2"]


# -- the pools of `kvcar serve`


class Serve:
    """Pools with and without `discovery: [{type: http}]`, whose sources run."""

    def __init__(self, *taking: str) -> None:
        self.qwen = make_pool(engine("engine-a"), name="qwen", models=(MODEL, "alias"))
        self.llama = make_pool(name="llama", models=("llama",))
        self.pools = Pools((self.qwen, self.llama))
        self.sources = [Registered(name) for name in taking]
        self.homes = PoolHomes(self.pools, lambda: self.sources)
        self._tasks: list[asyncio.Task[None]] = []

    def fleet(self, name: str) -> Fleet:
        return next(pool for pool in self.pools if pool.name == name)._fleet

    async def start(self) -> None:
        for source in self.sources:
            feed = FleetFeed(self.fleet(source.pool), name=source.pool, networks=Networks(("10.0.0.0/8",)))
            self._tasks.append(asyncio.create_task(source.run(feed)))
        await asyncio.sleep(0)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        self._tasks.clear()


async def test_pools_take_registrations(opened: Open) -> None:
    serve = Serve("qwen")
    await serve.start()
    client, registrar = await opened(serve.homes)
    routed = {**E2, "modelname": "alias", "address": "10.0.0.2:8000"}
    rows = [
        (E1, 201, ""),
        (routed, 201, ""),
        (E1, 201, ""),
        ({**E1, "instance_id": "engine-a"}, 409, "known from the configuration"),
        ({**E1, "modelname": "llama"}, 404, "discovery: [{type: http}]"),
        ({**E1, "modelname": "unknown"}, 404, "discovery: [{type: http}]"),
        ({**E1, "tenant_id": "t"}, 404, "one tenant"),
        ({**E1, "instance_id": "e4", "block_size": 8, "endpoint": "tcp://10.0.0.4:1"}, 409, "blocks of 4"),
        ({**E1, "instance_id": "e5", "endpoint": "tcp://10.0.0.5:1", "address": "11.0.0.1:80"}, 403, "`networks`"),
    ]
    for body, expected, words in rows:
        status, found = await ask(client, "/register", body)
        assert (status, words in found.get("error", "")) == (expected, True), found
    assert {one.name: one.address for one in serve.qwen.instances} == {
        "engine-a": "10.0.0.1:8000", "e1": "", "e2": "10.0.0.2:8000"
    }  # fmt: skip
    _, found = await ask(client, "/query", {"model": MODEL, "token_ids": TOKENS})
    assert sorted(found["default"]) == ["e1", "e2", "engine-a"]
    assert (await ask(client, "/unregister", {"instance_id": "e2", "modelname": MODEL}))[0] == 200
    assert (await ask(client, "/unregister", {"instance_id": "engine-a"}))[0] == 404
    assert [one.name for one in serve.qwen.instances] == ["engine-a", "e1"]
    assert len(registrar.registry) == 1
    await serve.stop()


async def test_a_source_that_is_made_anew_is_told_of_everybody(opened: Open) -> None:
    """As a reload does it: same feed, other source."""
    serve = Serve("qwen")
    client, registrar = await opened(serve.homes)
    await ask(client, "/register", E1)  # before the source runs
    assert [one.name for one in serve.qwen.instances] == ["engine-a"]
    await serve.start()
    assert [one.name for one in serve.qwen.instances] == ["engine-a", "e1"]
    await serve.stop()
    serve.sources = [Registered("qwen")]
    registrar.tick(1.0)
    assert list(serve.sources[0].instances) == ["e1"]
    await ask(client, "/unregister", {"instance_id": "e1"})
    assert not serve.sources[0].instances


async def test_where_nobody_may_register(opened: Open) -> None:
    client, _ = await opened(Serve().homes)
    for path, body in (("/register", E1), ("/unregister", E1), ("/workers", None), ("/services", None)):
        status, found = await ask(client, path, body)
        assert (status, "discovery: [{type: http}]" in found["error"]) == (404, True)
    status, found = await ask(client, "/query_by_hash", {"model": MODEL, "block_hashes": [1]})
    assert (status, "remembers hashes" in found["error"]) == (404, True)
    assert (await ask(client, "/query", {"model": MODEL, "token_ids": [1]}))[0] == 200


def test_every_route_is_described() -> None:
    """The two that both have are there once in `kvcar serve`."""
    routes = Registrations(Registrar(Registry(), open_homes())).routes()
    paths = [one.path for one in (*routes, *Queries([]).routes())]
    assert len(paths) == len(set(paths))
    for one in routes:
        assert f"`{one.method} {one.path}`" in DOCS, one.path


# -- the page


EXAMPLES = re.findall(r"^\$ curl -s 127\.0\.0\.1:13333(\S+)(?: -d ('.*'))?\n((?:(?!\$ |```).*\n)+)", DOCS, re.MULTILINE)


async def test_examples_of_the_page(opened: Open) -> None:
    """In their order, from a fresh conductor on."""
    client, _ = await opened()
    assert len(EXAMPLES) > 8
    for path, body, answer in EXAMPLES:
        status, _, text = answer.partition(" ") if re.match(r"\d{3} ", answer) else ("200", "", answer)
        data = shlex.split(body)[0].encode() if body else None
        if path == "/health":
            assert await (await client.get(path)).text() == text.strip()
        else:
            assert await ask(client, path, data) == (int(status), json.loads(text)), path
