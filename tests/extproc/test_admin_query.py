"""The query APIs and the heartbeat of the admin port, through aiohttp's test client and pools without sockets."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.admin import bodies
from extproc.admin.conductor import mooncake, motor
from extproc.admin.query import Queries
from extproc.admin.server import make_app
from extproc.loads.heartbeat import Heartbeats
from extproc.openai import parse_body
from extproc.pool import Pool
from kvindex.walk import TierBlocks
from tests.extproc.pool_model import engine, make_pool, prompter, store

DOCS = (Path(__file__).parents[2] / "docs" / "admin-api.md").read_text("utf-8")
VECTORS = json.loads((Path(__file__).parents[1] / "data" / "vectors.json").read_text("utf-8"))
QUERY, CONDUCTOR, BEAT = "/v1/internal/kv-cache/query", "/query", "/v1/internal/heartbeat"
XLLM_FIELDS = [
    "instance_name", "dp_rank", "synchronized", "sequence", "device_hit_tokens", "host_only_hit_tokens",
    "reusable_prefix_tokens", "device_blocks", "host_blocks", "error",
]  # fmt: skip
Client = TestClient[web.Request, web.Application]


def app(*pools: Pool, token: str | None = None, **options: Any) -> web.Application:
    return make_app(None, token=token, more=Queries(pools, **options).routes())  # type: ignore[arg-type]


async def opened(application: web.Application) -> Client:
    server = TestServer(application)
    await server.start_server(auto_decompress=False)  # as AdminServer has it
    client: Client = TestClient(server)
    await client.start_server()
    return client


@pytest.fixture
async def open_client() -> AsyncIterator[Callable[..., Awaitable[Client]]]:
    clients: list[Client] = []

    async def make(*pools: Pool, **options: Any) -> Client:
        clients.append(await opened(app(*pools, **options)))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


async def ask(client: Client, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await client.post(path, data=data, headers=headers)
    return answer.status, await answer.json()


IDS = list(range(1, 13))


def documented_pool(**options: Any) -> Pool:
    """The state that the examples of docs/admin-api.md show."""
    pool = make_pool(engine("engine-a"), engine("engine-b", ranks=2), **options)
    store(pool, "engine-a", IDS[:8])
    store(pool, "engine-a", IDS, medium="CPU", skip=2)
    body = {"model": "qwen3-8b", "messages": [{"role": "user", "content": "Which river flows through Paris?"}]}
    parsed = parse_body("/v1/chat/completions", {}, json.dumps(body).encode())
    prompt = asyncio.run(prompter(("qwen3-8b",)).prompt_of(parsed))  # type: ignore[arg-type]
    store(pool, "engine-b", prompt.ids)  # type: ignore[union-attr]
    return pool


EXAMPLES = re.findall(r"^\$ curl -s 127\.0\.0\.1:9003(\S+) -d ('.*')\n((?:(?!\$ |```).*\n)+)", DOCS, re.MULTILINE)


@pytest.fixture(scope="module")
def documented() -> dict[str, Pool]:
    return {form: documented_pool(loads=Heartbeats()) for form in ("motor", "mooncake")}


@pytest.mark.parametrize(("path", "body", "answer"), EXAMPLES, ids=range(len(EXAMPLES)))
async def test_examples_of_the_page(
    path: str, body: str, answer: str, documented: dict[str, Pool], open_client: Callable[..., Awaitable[Client]]
) -> None:
    form = "mooncake" if '"GPU"' in answer else "motor"
    client = await open_client(documented[form], form=form)
    status, _, text = answer.partition(" ") if answer[:3].isdigit() else ("200", "", answer)
    assert await ask(client, path, shlex.split(body)[0].encode()) == (int(status), json.loads(text))


def test_the_page_has_examples_of_every_path() -> None:
    assert {path for path, *_ in EXAMPLES} == {QUERY, CONDUCTOR, BEAT}
    for name in XLLM_FIELDS:
        assert f"`{name}`" in DOCS


# -- the answer forms, as tables


@pytest.mark.parametrize("row", VECTORS["motor_exclusive_tiers"], ids=lambda row: str(row["ends"]))
def test_motor_form(row: dict[str, Any]) -> None:
    ranks = [TierBlocks(0, 0, 0), TierBlocks(row["npu"], row["cpu"], row["disk"])]
    answer = motor(dict(enumerate(ranks)), 128)
    assert answer["longest_matched"] == row["matched_blocks"] * 128
    told = {"npu_blocks": row["npu"], "cpu_blocks": row["cpu"], "disk_blocks": row["disk"]}
    assert answer["DP"]["1"] == {"matched_tokens": row["matched_blocks"] * 128, **told}
    assert answer["DP"]["0"] == {"matched_tokens": 0, "npu_blocks": 0, "cpu_blocks": 0, "disk_blocks": 0}


@pytest.mark.parametrize("row", VECTORS["mooncake_boundaries_bs16"], ids=lambda row: str(row["expect"]))
async def test_mooncake_form(row: dict[str, Any], open_client: Callable[..., Awaitable[Client]]) -> None:
    """Through the index: blocks resident at these places of one prompt."""
    pool = make_pool(engine("engine-a"), engine("engine-b"), block_size=16)
    ids = list(range(16 * row["n"]))
    # the chain has to be known before its single blocks are: it is stored on a stream of its own
    store(pool, "engine-b", ids)
    for medium in ("gpu", "cpu", "disk"):
        for place in row[medium]:
            store(pool, "engine-a", ids[: 16 * (place + 1)], medium=medium, skip=place)
    client = await open_client(pool, form="mooncake")
    _, answer = await ask(client, CONDUCTOR, {"model": "qwen3-8b", "token_ids": ids})
    told = answer["default"]["engine-a"]
    assert {name: told[name.upper()] for name in row["expect"]} == row["expect"]
    assert told["longest_matched"] == row["expect"]["disk"]
    assert told["DP"] == {"0": row["expect"]["gpu"]}


def test_mooncake_form_takes_the_farthest_rank_of_each_tier() -> None:
    ranks = [TierBlocks(1, 4, 0), TierBlocks(3, 0, 1), TierBlocks(0, 0, 0)]
    assert mooncake(dict(enumerate(ranks)), 16) == {
        "longest_matched": 80, "GPU": 48, "CPU": 80, "DISK": 80, "DP": {"0": 16, "1": 48, "2": 0}
    }  # fmt: skip
    assert mooncake({}, 16) == {"longest_matched": 0, "GPU": 0, "CPU": 0, "DISK": 0, "DP": {}}
    assert motor({}, 16) == {"longest_matched": 0, "DP": {}}


# -- xLLM's query


async def test_status_only_and_several_pools(open_client: Callable[..., Awaitable[Client]]) -> None:
    first = make_pool(engine("engine-a"))
    second = make_pool(
        engine("engine-b", pool="tiny", dialect="xllm"), name="tiny", models=("tiny-1",), block_size=None
    )
    store(first, "engine-a", IDS)
    client = await open_client(first, second)
    _, status = await ask(client, QUERY, {"token_ids": []})
    assert [row["instance_name"] for row in status["matches"]] == ["engine-a", "engine-b"]
    assert [list(row) for row in status["matches"]] == [XLLM_FIELDS] * 2
    assert [(row["reusable_prefix_tokens"], row["device_blocks"]) for row in status["matches"]] == [(0, 3), (0, 0)]
    store(second, "engine-b", IDS)
    _, both = await ask(client, QUERY, {"token_ids": IDS})
    assert [row["reusable_prefix_tokens"] for row in both["matches"]] == [8, 12], "xLLM reads the last token from cache"
    _, one = await ask(client, QUERY, {"token_ids": IDS, "model": "tiny-1"})
    assert (one["pool"], one["tokens"], [row["reusable_prefix_tokens"] for row in one["matches"]]) == ("tiny", 12, [12])
    _, none = await ask(client, QUERY, {"token_ids": [], "model": "tiny-1"})
    assert (none["pool"], none["tokens"], none["matches"][0]["device_blocks"]) == ("tiny", None, 3)
    assert (await ask(client, QUERY, {"prompt": "Once"}))[0] == 400, "two pools: the model has to be named"


async def test_adapters_and_salts_are_apart(open_client: Callable[..., Awaitable[Client]]) -> None:
    pool = make_pool(engine("engine-a"), engine("engine-b"), engine("engine-c"))
    store(pool, "engine-a", IDS)
    store(pool, "engine-b", IDS, lora="ada")
    store(pool, "engine-c", IDS, salt="s")
    client = await open_client(pool)
    rows: list[tuple[dict[str, Any], list[int]]] = [
        ({}, [8, 0, 0]),
        ({"model": "qwen3-8b"}, [8, 0, 0]),
        ({"model": "ada"}, [0, 8, 0]),
        ({"model": "qwen3-8b", "cache_salt": "s"}, [0, 0, 8]),
        ({"model": "qwen3-8b", "prompt": IDS, "cache_salt": "s", "token_ids": None}, [0, 0, 8]),
    ]
    for more, hits in rows:
        status, answer = await ask(client, QUERY, {"token_ids": IDS, **more})
        assert status == 200, answer
        assert [row["device_hit_tokens"] for row in answer["matches"]] == hits, more
    looks: list[tuple[dict[str, Any], list[int]]] = [
        ({}, [12, 0, 0]),
        ({"lora_name": "ada"}, [0, 12, 0]),
        ({"cache_salt": "s"}, [0, 0, 12]),
        ({"lora_id": 3}, [0, 0, 0]),
        ({"lora_name": None, "cache_salt": "", "tenant_id": "default", "block_size": 0, "unknown": 1}, [12, 0, 0]),
    ]
    for more, expected in looks:
        _, answer = await ask(client, CONDUCTOR, {"model": "qwen3-8b", "token_ids": IDS, **more})
        assert [row["longest_matched"] for row in answer["default"].values()] == expected, more


async def test_requests_that_pass_unscored_say_why(open_client: Callable[..., Awaitable[Client]]) -> None:
    pool = make_pool(engine("engine-a"))
    client = await open_client(pool)
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    body = {"model": "qwen3-8b", "messages": [{"role": "user", "content": image}]}
    status, answer = await ask(client, QUERY, body)
    assert (status, answer["reason"], answer["tokens"]) == (200, "multimodal", None)
    assert answer["matches"][0]["reusable_prefix_tokens"] == 0
    status, answer = await ask(client, QUERY, {"prompt": "Once upon", "prompt_logprobs": 1})
    assert (status, answer["reason"], answer["reads_cache"]) == (200, None, False)


async def test_unsynchronized_streams_have_no_hits(open_client: Callable[..., Awaitable[Client]]) -> None:
    pool = make_pool(engine("engine-a"), engine("engine-b", events=()))
    store(pool, "engine-a", IDS)
    sync = pool.directory._streams[("engine-a", 0)].sync
    assert sync is not None
    sync.disconnected(2.0)
    client = await open_client(pool)
    _, answer = await ask(client, QUERY, {"token_ids": IDS})
    (row,) = answer["matches"]
    assert (row["synchronized"], row["device_hit_tokens"], row["error"]) == (False, 0, "connection lost")
    _, answer = await ask(client, CONDUCTOR, {"model": "qwen3-8b", "token_ids": IDS})
    assert [row["longest_matched"] for row in answer["default"].values()] == [0, 0], "who is there stays in the answer"


# -- mistakes

BAD: list[tuple[str, Any, int, str]] = [
    (QUERY, b"", 400, "no JSON"),
    (QUERY, b"{", 400, "no JSON"),
    (QUERY, b"\xff", 400, "no JSON"),
    (QUERY, b"[" * 200_000, 400, "no JSON"),
    (QUERY, [1, 2], 400, "object"),
    (QUERY, {}, 400, "token_ids is missing"),
    (QUERY, {"token_ids": None}, 400, "list"),
    (QUERY, {"token_ids": "1"}, 400, "list"),
    (QUERY, {"token_ids": {"1": 2}}, 400, "list"),
    (QUERY, {"token_ids": [1, "2"]}, 400, "whole numbers"),
    (QUERY, {"token_ids": [1, True]}, 400, "whole numbers"),
    (QUERY, {"token_ids": [1.0]}, 400, "whole numbers"),
    (QUERY, {"token_ids": [[1]]}, 400, "whole numbers"),
    (QUERY, {"token_ids": [-1]}, 400, "4294967295"),
    (QUERY, {"token_ids": [1 << 32]}, 400, "4294967295"),
    (QUERY, {"token_ids": [1 << 70]}, 400, "token_ids must"),
    (QUERY, b'{"token_ids": [NaN]}', 400, "whole numbers"),
    (QUERY, {"token_ids": [1], "model": 3}, 400, "model"),
    (QUERY, {"token_ids": [1], "model": "other"}, 400, "no pool"),
    (QUERY, {"token_ids": [], "model": "other"}, 400, "no pool"),
    (QUERY, {"model": "qwen3-8b"}, 400, "token_ids is missing"),
    (QUERY, {"model": "\ud800", "prompt": "x"}, 400, "no pool"),
    (QUERY, {"model": "qwen3-8b", "messages": "hello"}, 400, "bad_request"),
    (QUERY, {"model": "qwen3-8b", "messages": []}, 400, "bad_request"),
    (QUERY, {"model": "qwen3-8b", "prompt": ""}, 400, "bad_request"),
    (QUERY, {"model": "qwen3-8b", "prompt": "x", "path": 3}, 400, "path"),
    (QUERY, {"model": "qwen3-8b", "prompt": "x", "path": "/nowhere"}, 400, "path"),
    (CONDUCTOR, b"{", 400, "no JSON"),
    (CONDUCTOR, [], 422, "object"),
    (CONDUCTOR, {"token_ids": [1]}, 422, "model"),
    (CONDUCTOR, {"model": 1, "token_ids": [1]}, 422, "model"),
    (CONDUCTOR, {"model": "qwen3-8b"}, 422, "token_ids"),
    (CONDUCTOR, {"model": "qwen3-8b", "token_ids": [None]}, 422, "whole numbers"),
    (CONDUCTOR, {"model": "qwen3-8b", "token_ids": [], "block_size": "4"}, 422, "block_size"),
    (CONDUCTOR, {"model": "qwen3-8b", "token_ids": [], "block_size": True}, 422, "block_size"),
    (CONDUCTOR, {"model": "qwen3-8b", "token_ids": [], "lora_id": 1 << 80}, 422, "lora_id"),
    (CONDUCTOR, {"model": "qwen3-8b", "token_ids": [], "lora_name": []}, 422, "lora_name"),
    (CONDUCTOR, {"model": "qwen3-8b", "token_ids": [], "instance_id": [1]}, 422, "instance_id"),
    (CONDUCTOR, {"model": "other", "token_ids": [1]}, 404, "no indexer for model=other tenant=default"),
    (CONDUCTOR, {"model": "qwen3-8b", "token_ids": [1], "tenant_id": "t"}, 404, "model=qwen3-8b tenant=t"),
    (CONDUCTOR, {"model": "qwen3-8b", "token_ids": [1], "block_size": 16}, 404, "blocks of 4"),
    (CONDUCTOR, {"model": "\ud800", "token_ids": [1]}, 404, "no indexer"),
    (BEAT, b"no json", 400, "invalid heartbeat json"),
    (BEAT, {"name": "engine-a", "load_metrics": {"waiting_requests_num": -1}}, 400, "invalid heartbeat json"),
    (BEAT, {"name": ""}, 400, "missing instance name"),
    (BEAT, {"name": "x"}, 409, "instance not registered or stale incarnation"),
]


async def test_mistakes(open_client: Callable[..., Awaitable[Client]]) -> None:
    client = await open_client(make_pool(engine("engine-a"), loads=Heartbeats()))
    for path, body, status, words in BAD:
        found, answer = await ask(client, path, body)
        assert (found, words in answer["error"]) == (status, True), (path, body, found, answer)
    for path in (QUERY, CONDUCTOR, BEAT):
        assert (await client.get(path)).status == 405
        for encoding in ("gzip", "deflate"):
            status, answer = await ask(client, path, b"no such thing", **{"Content-Encoding": encoding})
            assert status == (400 if path == BEAT else 415), answer
    mooncake_client = await open_client(make_pool(engine("engine-a")), form="mooncake")
    assert (await ask(mooncake_client, CONDUCTOR, {"model": 3}))[0] == 400, "422 is Motor's"


async def test_token_readiness_and_size(open_client: Callable[..., Awaitable[Client]]) -> None:
    pool = make_pool(engine("engine-a"))
    guarded = await open_client(pool, token="long-secret")
    for path in (QUERY, CONDUCTOR, BEAT):
        for headers in ({}, {"X-Internal-Token": "long-secre"}, {"X-Internal-Token": "long-secret2"}):
            assert await ask(guarded, path, {}, **headers) == (401, {"error": "invalid internal token"})
    for headers in ({"X-Internal-Token": "long-secret"}, {"Authorization": "Bearer long-secret"}):
        assert (await ask(guarded, QUERY, {"token_ids": []}, **headers))[0] == 200
    starting = await open_client(pool, ready=lambda: False)
    for path in (QUERY, CONDUCTOR):
        assert (await ask(starting, path, {"token_ids": []}))[0] == 503
    small = app(pool)
    small._client_max_size = 1000
    client = await opened(small)
    try:
        for path in (QUERY, CONDUCTOR, BEAT):
            status, answer = await ask(client, path, b" " * 1001)
            assert (status, "error" in answer) == (413, True)
    finally:
        await client.close()


async def test_large_bodies_are_worked_on_beside_the_loop(
    open_client: Callable[..., Awaitable[Client]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(engine("engine-a"))
    ids = list(range(2000))
    monkeypatch.setattr(bodies, "LARGE", 4000)
    store(pool, "engine-a", ids)
    client = await open_client(pool)
    seen: list[str] = []
    to_thread = asyncio.to_thread

    async def counted(work: Any, *arguments: Any) -> Any:
        seen.append(getattr(work, "__name__", "?"))
        return await to_thread(work, *arguments)

    monkeypatch.setattr(asyncio, "to_thread", counted)
    assert (await ask(client, QUERY, {"token_ids": ids}))[1]["matches"][0]["device_hit_tokens"] == 1996
    assert seen == ["load", "_tokens", "match"]
    seen.clear()
    status, answer = await ask(client, CONDUCTOR, {"model": "qwen3-8b", "token_ids": ids})
    assert (status, answer["default"]["engine-a"]["longest_matched"]) == (200, 2000)
    assert seen == ["load", "parse", "answer"]
    seen.clear()
    assert (await ask(client, QUERY, {"token_ids": ids[:20]}))[0] == 200
    assert seen == []


async def test_message_pack(open_client: Callable[..., Awaitable[Client]]) -> None:
    client = await open_client(two_engines(), form="mooncake")
    packed = b"".join(one.to_bytes(4, "little") for one in IDS)
    for content_type in ("application/msgpack", "application/x-msgpack"):
        for ids in (IDS, packed):
            data = msgpack.packb({"model": "qwen3-8b", "token_ids": ids, "instance_id": ["engine-a"]})
            answer = await client.post(CONDUCTOR, data=data, headers={"Content-Type": content_type})
            assert (answer.status, answer.content_type) == (200, content_type)
            found = msgpack.unpackb(await answer.read())
            assert found["default"]["engine-a"]["DP"] == {"0": 8}
        for bad, status in ((b"\xc1", 400), (msgpack.packb([1]), 400), (b"", 400), (b"\x81\x01\x02", 400)):
            answer = await client.post(CONDUCTOR, data=bad, headers={"Content-Type": content_type})
            assert answer.status == status, bad


def two_engines() -> Pool:
    pool = make_pool(engine("engine-a"), engine("engine-b"))
    store(pool, "engine-a", IDS[:8])
    return pool


# -- heartbeats


async def test_heartbeats_reach_the_pool_of_the_instance(open_client: Callable[..., Awaitable[Client]]) -> None:
    loads = Heartbeats()
    pushed = make_pool(engine("engine-a", incarnation="static"), engine("engine-b", incarnation="x1"), loads=loads)
    unnamed = make_pool(engine("engine-e", incarnation="registered 7", pool="old"), name="old", models=("old-1",))
    other = make_pool(engine("engine-c", pool="tiny"), name="tiny", models=("tiny-1",))
    client = await open_client(other, pushed, unnamed, clock=lambda: 5.0)
    load = {"waiting_requests_num": "3", "gpu_cache_usage_perc": 0.5}
    for name, incarnation, status in [
        ("engine-a", "whatever", 200),
        ("engine-b", "x1", 200),
        ("engine-b", "x0", 409),
        ("engine-c", "", 200),
        ("engine-d", "", 409),
        ("engine-e", "", 200),  # it names no incarnation; the registry made one of the time
    ]:
        found, answer = await ask(client, BEAT, {"name": name, "incarnationId": incarnation, "loadMetrics": load})
        assert found == status, answer
        assert answer == {"ok": True} or answer["error"] == "instance not registered or stale incarnation"
    for name in ("engine-a", "engine-b"):
        told = loads.get(name, 6.0)
        assert told is not None
        assert (told.waiting, told.usage, told.at) == (3, 0.5, 5.0)
    assert set(loads.reports.status) == {"engine-a", "engine-b"}


# -- whatever comes, no answer is ours to blame

_text = st.text(max_size=8) | st.sampled_from(["qwen3-8b", "ada", "engine-a", "default", "user"])
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_text, inner, max_size=4),
    max_leaves=12,
)
_keys = st.sampled_from(
    "token_ids model messages prompt input path cache_salt tenant_id block_size lora_name lora_id instance_id name "
    "incarnation_id load_metrics loadMetrics latency_metrics tools waiting_requests_num gpu_cache_usage_perc "
    "recent_max_ttft chat_template_kwargs".split()
)
_ids = st.lists(st.integers(0, 2**32), max_size=20)
_message = st.fixed_dictionaries({"role": _text, "content": _json})
_bodies = st.dictionaries(_keys, _json | _ids | st.lists(_message, max_size=3), max_size=6) | _json


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Callable[[str, bytes, bool], int]]:
    """Sends a body, plain or as MessagePack; the status. One server for all examples."""
    with asyncio.Runner() as runner:
        client = runner.run(opened(app(make_pool(engine("engine-a"), loads=Heartbeats()))))

        async def send(path: str, data: bytes, packed: bool) -> int:
            headers = {"Content-Type": "application/msgpack"} if packed else {}
            answer = await client.post(path, data=data, headers=headers)
            await answer.read()
            return answer.status

        yield lambda *sent: runner.run(send(*sent))
        runner.run(client.close())


ALLOWED = (200, 400, 404, 409, 422)
_paths = st.sampled_from([QUERY, CONDUCTOR, BEAT])


@settings(max_examples=300, deadline=None)
@given(path=_paths, body=_bodies, packed=st.booleans())
def test_no_body_is_a_500(fuzzed: Callable[[str, bytes, bool], int], path: str, body: Any, packed: bool) -> None:
    try:
        data = msgpack.packb(body) if packed else json.dumps(body).encode()
    except (OverflowError, ValueError):
        return
    assert fuzzed(path, data, packed) in ALLOWED


@settings(max_examples=200, deadline=None)
@given(path=_paths, data=st.binary(max_size=60), packed=st.booleans())
def test_no_bytes_are_a_500(fuzzed: Callable[[str, bytes, bool], int], path: str, data: bytes, packed: bool) -> None:
    assert fuzzed(path, data, packed) in ALLOWED
