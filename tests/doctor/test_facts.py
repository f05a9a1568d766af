"""Facts read from pages and streams that no emulated engine brings about."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import yaml
import zmq
import zmq.asyncio
from aiohttp import web

from extproc.admin.server import AdminServer, tls_context
from extproc.config import parse as parse_config
from extproc.doctor import DoctorOptions, engine_page, events
from extproc.doctor.check import Found, Skip
from extproc.doctor.context import Context
from extproc.doctor.engines import models as engine_models
from extproc.doctor.events import Stream, anchored, decoded, ports, replay
from extproc.doctor.finding import Finding
from extproc.doctor.listen import Heard, Listener, StreamFacts
from extproc.doctor.live import gateway_answers
from extproc.doctor.ports import Port
from extproc.doctor.tokens import ids_of
from kvindex.directory import StreamReport
from kvindex.fleet import PUSHED, Instance, StreamEndpoint
from kvindex.index import TierBlocks
from kvindex.link import LinkStatus
from kvindex.sync import StreamStatus

PAGE = """
# HELP vllm:cache_config_info Information
vllm:cache_config_info{block_size="32",hash_block_size="16",enable_prefix_caching="False",engine="0"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 10.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 5e3
vllm:lora_requests_info{running_lora_adapters="a, b",waiting_lora_adapters=""} 1.0
vllm:engine_sleep_state{engine="1",sleep_state="discard_all"} 1.0
vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1.0
vllm:broken{engine="0"} x
other_metric 3
"""


def test_a_page() -> None:
    page = engine_page.parse(PAGE)
    assert (page.kind, page.block_sizes(), page.prefix_caching, page.sleeping) == ("vllm", (16, 32), False, True)
    assert page.ranks == {0, 1}
    assert page.prompt_tokens == {0: 10.0, 1: 5000.0}
    assert page.adapters == {"a", "b"}
    assert engine_page.parse("nothing of ours") == engine_page.EnginePage()


def stream(status: StreamStatus, **endpoint: Any) -> Stream:
    instance = {"name": "e", "address": "127.0.0.1:1"}
    config = parse_config(
        yaml.safe_dump({"pools": [{"name": "p", "models": ["m"], "tokenizer": "/m", "instances": [instance]}]})
    )
    followed = StreamEndpoint(0, "tcp://127.0.0.1:2", **endpoint)
    one = Instance("e", "127.0.0.1:1", events=(followed,))
    report = StreamReport("e", 0, "", followed.events, followed.replay, "auto", "live", status=status,
                          link=LinkStatus(connected=True))  # fmt: skip
    facts = StreamFacts(one, followed, Port("open"), Port("open"), report, Heard())
    return Stream(Context(config, DoctorOptions()), config.pools[0], facts, None, None)


@pytest.mark.parametrize(
    ("judge", "status", "found"),
    [
        (decoded, {}, []),
        (decoded, {"skipped": {"attention_kind": 4}}, []),
        (decoded, {"skipped": {"unknown_tag": 4}}, ["WARNING events.skipped"]),
        (decoded, {"skipped": {"block_size": 4}}, ["ERROR events.block_size"]),
        (anchored, {"known": 100}, []),
        (anchored, {"known": 100, "unanchored": 50}, ["NOTE events.unanchored"]),
        (anchored, {"known": 100, "unanchored": 51}, ["WARNING events.unanchored"]),
        (replay, {"replays": 1, "synchronized": True, "complete": True}, []),
        (replay, {"replays": 1, "synchronized": True}, ["NOTE events.incomplete"]),
        (replay, {"replays": 2, "replay_failures": 1}, []),
        (replay, {"replays": 2, "replay_failures": 2}, ["WARNING events.replay_silent"]),
    ],
)
async def test_streams(judge: Any, status: dict[str, Any], found: list[str]) -> None:
    one = stream(StreamStatus(blocks=TierBlocks(1, 0, 0), **status), replay="tcp://127.0.0.1:3")
    assert [f"{item.severity.name} {item.id}" async for item in judge(one)] == found


async def asked(app: web.Application, options: DoctorOptions, judge: Any) -> tuple[list[str], str]:
    """(ids found, detail) of a check of an engine that is this application."""
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    pool = {
        "name": "p",
        "models": ["m"],
        "tokenizer": "/m",
        "instances": [{"name": "e", "address": f"127.0.0.1:{port}"}],
    }
    context = Context(parse_config(yaml.safe_dump({"pools": [pool]})), options)
    try:
        found = await judge(context)
        return [f"{one.severity.name} {one.id}" for one in found.findings], found.detail
    finally:
        await context.close()
        await runner.cleanup()


@pytest.mark.parametrize(
    ("key", "found"),
    [(None, ["WARNING engine.api_key"]), ("wrong", ["WARNING engine.api_key"]), ("secret", [])],
)
async def test_an_engine_with_an_api_key(key: str | None, found: list[str]) -> None:
    """As vLLM guards it: /v1 wants the key, /health does not."""

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    async def models(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer secret":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"data": [{"id": "m"}]})

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)
    assert (await asked(app, DoctorOptions(api_key=key), engine_models))[0] == found
    assert "secret" not in repr(DoctorOptions(api_key="secret"))


async def test_the_key_goes_to_token_apis_and_gateways() -> None:
    seen: list[tuple[str, str | None]] = []

    async def anything(request: web.Request) -> web.Response:
        seen.append((request.path, request.headers.get("Authorization")))
        return web.json_response({"token_ids": [1, 2]})

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", anything)
    options = DoctorOptions(api_key="secret")

    async def ask(context: Context) -> Found:
        (instance,) = await context.instances(context.pools[0])
        assert (await ids_of(context, instance, {}, "chat"))[1] == [1, 2]
        context.options = dataclasses.replace(options, gateway=f"http://{instance.address}")
        return await gateway_answers(context)

    assert (await asked(app, options, ask))[0] == []
    assert seen == [("/v1/chat/completions/render", "Bearer secret"), ("/v1/models", "Bearer secret")]


async def test_streams_of_one_rank_are_told_apart_by_their_medium() -> None:
    """A store beside the engine publishes on a port of its own: what comes there is not the engine's."""
    publishing = zmq.asyncio.Context()
    own, store = (publishing.socket(zmq.PUB) for _ in range(2))
    ports = {name: one.bind_to_random_port("tcp://127.0.0.1") for name, one in {"own": own, "cpu": store}.items()}
    streams = (
        StreamEndpoint(0, f"tcp://127.0.0.1:{ports['own']}"),
        StreamEndpoint(0, f"tcp://127.0.0.1:{ports['cpu']}", medium="cpu"),
    )
    config = parse_config(yaml.safe_dump({"pools": [{"name": "p", "models": ["m"], "tokenizer": "/m"}]}))
    instance = Instance("e", "127.0.0.1:1", events=streams)
    listener = Listener(config, config.pools[0], [instance], timeout=2.0, listen=3.0)
    payload = msgpack.packb([0.0, [["BlockStored", [1], None, [1, 2, 3, 4], 4, None]], 0])
    try:
        await listener.start()

        def came() -> bool:
            store.send_multipart([b"", struct.pack(">Q", 0), payload])
            return bool(listener.facts()[1].heard.messages)

        assert await listener.until(came, 20.0)
        engine, beside = listener.facts()
        assert (engine.name, beside.name) == ("e", "e cpu store")
        assert (engine.heard.messages, engine.report.endpoint) == (0, streams[0].events)
        assert beside.report.endpoint == streams[1].events
    finally:
        await listener.close()
        publishing.destroy(0)


async def test_a_stream_that_is_pushed_has_no_port() -> None:
    """Over HTTP, to the running kvcar: nothing here can be looked at, and nothing is found."""
    one = stream(StreamStatus(blocks=TierBlocks(0, 0, 0)), medium="")
    facts = dataclasses.replace(
        one.facts,
        endpoint=StreamEndpoint(0, PUSHED),
        port=Port("unknown"),
        report=dataclasses.replace(one.facts.report, link=LinkStatus(connected=False)),
    )
    assert [item async for item in ports(dataclasses.replace(one, facts=facts))] == []


@pytest.mark.parametrize("client", [None, "client"])
async def test_an_admin_port_with_tls_is_asked_by_https(client: str | None) -> None:
    """With the certificate that the configuration names, whoever signed it, and a client's where one is asked for."""

    async def page(request: web.Request) -> web.Response:
        return web.json_response({"token": request.headers["X-Internal-Token"]})

    app = web.Application()
    app.router.add_get("/status", page)
    tls = Path(__file__).parents[1] / "extproc" / "tls"
    files = {"cert": str(tls / "server.pem"), "key": str(tls / "server.key")}
    files |= {"client_ca": str(tls / "ca.pem")} if client else {}
    server = AdminServer(app, "127.0.0.1", 0, tls=tls_context(files["cert"], files["key"], files.get("client_ca")))
    admin = {"address": f"127.0.0.1:{await server.start()}", "tls": files, "token": "a-long-secret"}
    pool = {"name": "p", "models": ["m"], "tokenizer": "/m"}
    config = parse_config(yaml.safe_dump({"admin": admin, "pools": [pool]}))
    options = DoctorOptions(cert=str(tls / "client.pem"), key=str(tls / "client.key")) if client else DoctorOptions()
    context, bare = Context(config, options), Context(config, DoctorOptions())
    try:
        answer = await context.kvcar("/status")
        assert answer.json() == {"token": "a-long-secret"}, answer
        without = await bare.kvcar("/status")
        assert without.ok is (client is None)
        assert client is None or "--cert" in without.error
    finally:
        await context.close()
        await bare.close()
        await server.stop()


@pytest.mark.parametrize(
    ("usable", "told"), [((False, False), None), ((True, False), "1 of 2 streams"), ((True, True), "2 streams")]
)
async def test_only_what_was_judged_is_ok(
    usable: tuple[bool, ...], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def streams(_: Any) -> list[Any]:
        return [SimpleNamespace(facts=SimpleNamespace(usable=one)) for one in usable]

    async def nothing(_: Stream) -> AsyncIterator[Finding]:
        for finding in ():
            yield finding

    monkeypatch.setattr(events, "streams", streams)
    check: Any = events._check(nothing)
    if told is None:
        with pytest.raises(Skip, match="no publisher listens"):
            await check(None)
    else:
        assert await check(None) == Found((), told)
