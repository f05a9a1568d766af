"""The endpoint picker as it runs: configuration, App, gRPC, decision. Every rule of the protocol that needs no fault of
our own once more, with pools made by configuration and admin port instead of by the test."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import grpc
import pytest
import yaml

from examples.local.stack import TOKENIZER
from extproc import wire
from extproc.app import App
from extproc.config import parse
from tests.extproc.gateway_model import DESTINATION, Exchange, response_headers
from tests.extproc.grpc_peer import Stream, until
from tests.extproc.test_endpoint_picker import (
    BODY,
    DUPLEX,
    HEALTH,
    MODES,
    RULES,
    A,
    B,
    C,
    PoolDecider,
    Rule,
    check_rule,
    empty,
    none_ready,
    one_draining,
    pairs,
    ready,
    saturated,
    send_request,
    some,
)
from tests.extproc.test_server_life import check

Json = dict[str, Any]


def instances(**roles: str) -> list[Json]:
    addresses = dict(zip("abc", (A, B, C), strict=True))
    return [{"name": f"engine-{key}", "address": addresses[key], "role": role} for key, role in roles.items()]


POOLS: dict[Callable[[], Any], Json] = {
    ready: {"instances": instances(a="default", b="default", c="default")},
    one_draining: {"instances": instances(a="default", b="default")},
    none_ready: {"instances": instances(a="default")},
    empty: {"instances": []},
    saturated: {
        "instances": instances(a="default"),
        "shedding": {"queue_threshold": 1, "retry_after_s": 7},
        "load": {"source": "inflight"},
    },
    pairs: {"instances": instances(a="prefill", b="decode")},
}
DRAINED = (one_draining, none_ready)


class Running:
    def __init__(self, app: App, ports: Json, channel: Any) -> None:
        self.app = app
        self.admin = f"http://{ports['admin']}"
        self.channel = channel

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[Stream]:
        call = self.channel.stream_stream(wire.METHOD)()
        try:
            yield Stream(call, Exchange())
        finally:
            call.cancel()

    async def drain(self, name: str) -> None:
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{self.admin}/instances/drain", json={"instance": name}) as answer,
        ):
            assert answer.status == 200, await answer.text()

    async def idle(self) -> None:
        await until(lambda: not any(pool.inflight.total() for pool in self.app.pools))


@contextlib.asynccontextmanager
async def running(pool: Json) -> AsyncIterator[Running]:
    whole = {"name": "qwen", "models": ["qwen3-8b"], "tokenizer": str(TOKENIZER), "block_size": 4, **pool}
    tree = {
        "listen": {"address": "127.0.0.1:0", "endpoint_picker": True, "drain_wait_ms": 0, "drain_grace_ms": 0},
        "admin": {"address": "127.0.0.1:0"},
        "limits": {"max_body_bytes": 4096},
        "pools": [whole],
    }
    app = App(parse(yaml.safe_dump(tree)))
    ports = await app.start()
    channel = grpc.aio.insecure_channel(ports["ext_proc"], [("grpc.use_local_subchannel_pool", 1)])
    try:
        await until(lambda: app.ready)
        yield Running(app, ports, channel)
    finally:
        await channel.close()
        await app.stop()


async def test_exchanges_go_ahead_of_the_thread_of_this_app() -> None:
    async with running(next(iter(POOLS.values()))) as it:
        assert it.app._server.pacer is it.app.transport.pace


@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: pool.__name__)
async def test_every_rule(pool: Callable[[], Any]) -> None:
    rules = [rule for rule in RULES if rule.pool is pool and rule.decider is PoolDecider]
    assert rules
    async with running(POOLS[pool]) as it, contextlib.AsyncExitStack() as open_streams:
        if pool in DRAINED:
            await it.drain("engine-a")
        if pool is saturated:  # by a request that waits for its first byte
            waiting = await open_streams.enter_async_context(it.stream())
            await send_request(waiting, Rule("", some(A)), "full duplex")
            assert waiting.exchange.destination == A
        for rule in rules:
            for mode in MODES:
                async with it.stream() as stream:
                    try:
                        await check_rule(stream, rule, mode)
                    except AssertionError as error:
                        raise AssertionError(f"{rule.text}, {mode}: {error}") from error
        await open_streams.aclose()
        await it.idle()


def test_no_rule_is_left_out() -> None:
    assert {rule.pool for rule in RULES} == set(POOLS)


async def test_served_endpoint_and_health() -> None:
    """After a retry the load is counted where the gateway says that it went; then kvcar drains."""
    async with running(POOLS[ready]) as it:
        async with it.stream() as stream:
            await send_request(stream, Rule("", some(A, B, C), body=BODY), "full duplex")
            first, second = stream.exchange.metadata["envoy.lb"][DESTINATION].split(",")[:2]
            await stream.ask(response_headers(served_metadata=second, modes=(DUPLEX, DUPLEX)))
            (pool,) = it.app.pools
            names = {one.address: one.name for one in pool.instances}
            assert pool.inflight.of_instance(names[second]).requests == 1
            assert pool.inflight.of_instance(names[first]).requests == 0
        await it.idle()
        for name, (says, _) in HEALTH.items():
            assert await check(it.channel, name) == says, name
        assert it.app._server is not None
        await it.app._server.drain(0)
        for name, (_, says) in HEALTH.items():
            assert await check(it.channel, name) == says, name
