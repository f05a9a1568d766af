"""The endpoint-picker protocol of the Gateway API Inference Extension (proposal 004), rule by rule, over real gRPC.

A rule has a row for each body mode: `full duplex` is what such gateways send, `buffered` what an annotation of some
makes of it. Everything is real but the gateway and the engines' sockets.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import orjson
import pytest

from extproc import wire
from extproc.decider import PoolDecider
from extproc.decisions import DecisionLog
from extproc.endpoint_picker import EndpointPicker, subset
from extproc.messages import HttpRequest, Outcome
from extproc.metrics import Metrics
from extproc.pool import Pool
from extproc.server import ExtProcServer, ServerOptions
from extproc.session_rules import SessionOptions
from extproc.shedding import Shedding
from kvindex.fleet import InstanceState
from tests.extproc.gateway_model import (
    BUFFERED,
    DESTINATION,
    DUPLEX,
    Exchange,
    chat,
    request_body,
    request_headers,
    request_trailers,
    response_headers,
)
from tests.extproc.grpc_peer import Stream, until
from tests.extproc.pool_model import engine, make_pool
from tests.extproc.test_server_life import check

A, B, C = (f"10.0.0.{number}:8000" for number in (1, 2, 3))
HINT = "envoy.lb.subset_hint"
KEY = "x-gateway-destination-endpoint-subset"
COMPLETIONS = (":path", "/v1/completions")
BODY = orjson.dumps({"model": "qwen3-8b", "prompt": list(range(100, 121))})
MODES = {"buffered": (BUFFERED, 0), "full duplex": (DUPLEX, DUPLEX)}


def ready() -> Pool:
    return make_pool(*(engine(f"engine-{letter}") for letter in "abc"))


def one_draining() -> Pool:
    return make_pool(engine("engine-a", state=InstanceState.DRAINING), engine("engine-b"))


def none_ready() -> Pool:
    return make_pool(engine("engine-a", state=InstanceState.DRAINING))


def empty() -> Pool:
    return make_pool()


def saturated() -> Pool:
    """Every engine has one request waiting, and one is one too many."""
    pool = make_pool(engine("engine-a"), shedding=Shedding(queue_threshold=1, retry_after=7))
    pool.inflight.charge("engine-a", 100, 100, 0.0)
    return pool


def pairs() -> Pool:
    return make_pool(engine("engine-a", role="prefill"), engine("engine-b", role="decode"))


class Slow(PoolDecider):
    async def decide(self, request: HttpRequest) -> Outcome:
        raise TimeoutError("a decider that fails")


@dataclass(frozen=True)
class Rule:
    """What the gateway sends, and what the picker has to answer: addresses of which the destination is made (all of
    them, in any order), or a status."""

    text: str
    expect: frozenset[str] | int
    pool: Any = ready
    hint: Any = None
    metadata: dict[str, Any] | None = None
    body: bytes | None = BODY
    method: str = "POST"
    path: str = "/v1/completions"
    headers: tuple[tuple[str, str], ...] = ()
    reason: str | None = None
    decider: type[PoolDecider] = PoolDecider


def some(*addresses: str) -> frozenset[str]:
    return frozenset(addresses)


RULES = [
    Rule("no subset: the whole pool, in order of preference", some(A, B, C)),
    Rule("subset: only from it", some(B, C), hint=[C, B]),
    Rule("subset with members that are not in the pool", some(B), hint=[B, "10.9.9.9:1"]),
    Rule("subset as a comma list, as header_to_metadata writes it", some(A, B), hint=f"{A}, {B}"),
    Rule("subset entry without port: every port of it", some(B), hint=["10.0.0.2"]),
    Rule("subset is present and empty: 503", 503, hint=[], reason="no_candidate"),
    Rule("subset is an empty string: 503", 503, hint="", reason="no_candidate"),
    Rule("no member of the subset is in the pool: 503", 503, hint=["10.9.9.9:1"], reason="no_candidate"),
    Rule("no member of the subset is ready: 503", 503, pool=one_draining, hint=[A], reason="no_candidate"),
    Rule("the namespace without the key: the whole pool", some(A, B, C), metadata={HINT: {"another": [A]}}),
    Rule("the key in another namespace: the whole pool", some(A, B, C), metadata={"envoy.lb": {KEY: [A]}}),
    Rule("the key as a client's header: the whole pool", some(A, B, C), headers=((KEY, A),)),
    Rule("only what is ready", some(B), pool=one_draining),
    Rule("no ready endpoint: 503", 503, pool=none_ready, reason="no_candidate"),
    Rule("an empty pool: 503", 503, pool=empty, reason="no_candidate"),
    Rule("shed: 429", 429, pool=saturated, reason="shed"),
    Rule("no body: decided by the headers", some(A, B, C), body=None, reason="no_body"),
    Rule("GET", some(A, B, C), body=None, method="GET", path="/v1/models", reason="no_body"),
    Rule("no body: the subset holds", some(C), body=None, hint=[C], reason="no_body"),
    Rule("no body, nobody ready: 503", 503, pool=none_ready, body=None, reason="no_body"),
    Rule("another path", some(B), body=b"audio", path="/v1/audio/speech", hint=[B], reason="path"),
    Rule("compressed", some(A, B, C), body=b"\x1f\x8b", headers=(("content-encoding", "gzip"),), reason="encoding"),
    Rule("no JSON: the engine says so", some(A, B, C), body=b"{", reason="bad_json"),
    Rule("a model that nobody serves: the engine says so", some(A, B, C), body=b'{"model": "x"}', reason="model"),
    Rule("too large to look at, announced", some(B), body=BODY + b" " * 5000, hint=[B], reason="too_large",
         headers=(("content-length", str(len(BODY) + 5000)),)),
    Rule("too large to look at, unannounced", some(A, B, C), body=BODY + b" " * 5000, reason="too_large"),
    Rule("pairs: what cannot be scored goes to a decode instance", some(B), pool=pairs, body=None, reason="no_body"),
    Rule("the decision failed: an endpoint all the same", some(A, B, C), decider=Slow, reason="internal"),
    Rule("a client's own choice does not count", some(B), hint=[B], headers=((DESTINATION, A),)),
    Rule("nor one without a body", some(B), body=None, hint=[B], headers=((DESTINATION, A),), reason="no_body"),
]  # fmt: skip


@dataclass
class Picker:
    server: ExtProcServer
    pool: Pool
    metrics: Metrics
    channel: Any

    @contextlib.asynccontextmanager
    async def stream(self, headers: tuple[tuple[str, str], ...] = ()) -> AsyncIterator[Stream]:
        call = self.channel.stream_stream(wire.METHOD)()
        try:
            yield Stream(call, Exchange(headers=dict(headers)))
        finally:
            call.cancel()

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"kvcar_{name}_total", labels) or 0.0

    async def quiet(self) -> None:
        await until(lambda: self.server.sessions == 0)


@contextlib.asynccontextmanager
async def serving(
    pool: Pool, kind: type[PoolDecider] = PoolDecider, *, endpoint_picker: bool = True
) -> AsyncIterator[Picker]:
    metrics = Metrics("test")
    decider = kind([pool], metrics, DecisionLog(), picker=EndpointPicker() if endpoint_picker else None)
    options = SessionOptions(max_body_bytes=4096, endpoint_picker=endpoint_picker)
    server = ExtProcServer(decider, ServerOptions("127.0.0.1:0"), options)
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", [("grpc.use_local_subchannel_pool", 1)])
    try:
        yield Picker(server, pool, metrics, channel)
    finally:
        await channel.close()
        await server.stop(0)


async def send_request(stream: Stream, rule: Rule, mode: str) -> None:
    """Headers and body as Envoy sends them, with the replies that Envoy would wait for before it goes on."""
    metadata = rule.metadata or (None if rule.hint is None else {HINT: {KEY: rule.hint}})
    headers = ((":method", rule.method), (":path", rule.path), *rule.headers)
    stream.exchange.headers = dict(headers)
    first = request_headers(headers, end=rule.body is None, modes=MODES[mode], metadata=metadata)
    if mode == "buffered":
        await stream.ask(first)
        if rule.body is not None and stream.exchange.immediate is None:
            await stream.ask(request_body(rule.body, metadata=metadata))
        return
    await stream.send(first)
    if rule.body is not None:
        half = len(rule.body) // 2
        await stream.send(request_body(rule.body[:half], end=False, metadata=metadata))
        await stream.send(request_body(rule.body[half:], metadata=metadata))
    while await stream.read() is not None:
        exchange = stream.exchange
        if exchange.immediate is not None or rule.body is None or exchange.body_ended:
            break


async def check_rule(stream: Stream, rule: Rule, mode: str) -> None:
    """Sends the request and holds every reply against the rule."""
    await send_request(stream, rule, mode)
    exchange = stream.exchange
    if isinstance(rule.expect, int):
        assert exchange.immediate is not None
        assert exchange.immediate.status is not None
        assert int(exchange.immediate.status.code) == rule.expect
        error = orjson.loads(exchange.immediate.body)["error"]
        assert error["code"] == rule.expect
        assert await stream.read() is None, "nothing follows an immediate response"
        assert exchange.metadata.get("kvcar", {}).get("reason") is None
        return
    assert exchange.immediate is None
    told = exchange.metadata["envoy.lb"][DESTINATION]
    assert exchange.destination == told, "header and metadata say the same"
    listed = told.split(",")
    assert len(listed) == len(set(listed))
    assert set(listed) == rule.expect
    if mode == "full duplex":
        assert exchange.decision_in == "request_headers"
        assert exchange.body == (rule.body or b"")
        assert exchange.body_ended == (rule.body is not None)
    await stream.ask(response_headers(served_metadata=listed[0], end=True))
    assert exchange.metadata.get("kvcar", {}).get("reason") == rule.reason


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", RULES, ids=[rule.text for rule in RULES])
async def test_rule(rule: Rule, mode: str) -> None:
    pool = rule.pool()
    before = pool.inflight.total()
    async with serving(pool, rule.decider) as picker:
        async with picker.stream() as stream:
            await check_rule(stream, rule, mode)
        await picker.quiet()
        assert pool.inflight.total() == before, "nothing is left charged"
        if rule.reason not in (None, "shed"):
            assert picker.counted("unscored", reason=rule.reason) == 1
        if rule.expect == 503:
            assert sum(picker.counted("requests", pool=name, outcome="refused") for name in ("", "qwen")) == 1


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.expect == 503 or rule.body is None])
async def test_switched_off_nothing_is_refused_and_nothing_unscored_is_named(rule: Rule) -> None:
    async with serving(rule.pool(), endpoint_picker=False) as picker, picker.stream() as stream:
        await send_request(stream, rule, "buffered")
        assert (stream.exchange.immediate, stream.exchange.destination) == (None, None)
        assert "envoy.lb" not in stream.exchange.metadata


async def test_trailers_end_the_body_too() -> None:
    async with serving(ready()) as picker, picker.stream() as stream:
        await stream.send(request_headers((*chat()[:1], COMPLETIONS), modes=MODES["full duplex"]))
        await stream.send(request_body(BODY, end=False))
        await stream.send(request_trailers())
        kinds = [await stream.read() for _ in range(3)]
        assert kinds == ["request_headers", "request_body", "request_trailers"]
        assert stream.exchange.destination
        assert not stream.exchange.body_ended, "the trailers end it"


async def test_over_the_limit_before_the_end() -> None:
    """What was held goes out with the decision, the rest follows as it comes, and the body ends once."""
    async with serving(ready()) as picker, picker.stream() as stream:
        await stream.send(request_headers((*chat()[:1], COMPLETIONS), modes=MODES["full duplex"]))
        for part in (b"a" * 4000, b"b" * 4000):
            await stream.send(request_body(part, end=False))
        assert [await stream.read() for _ in range(2)] == ["request_headers", "request_body"]
        assert stream.exchange.destination
        assert not stream.exchange.body_ended
        assert await stream.ask(request_body(b"c")) == "request_body"
        assert stream.exchange.body == b"a" * 4000 + b"b" * 4000 + b"c"
        assert stream.exchange.body_ended == 1


async def test_a_large_body_goes_back_in_parts() -> None:
    """Envoy takes no part above 64 KiB; the extension's own pickers send at most 62,000 bytes."""
    body = orjson.dumps({"model": "nobody", "prompt": "x" * 200_000})
    metrics = Metrics("test")
    server = ExtProcServer(
        PoolDecider([ready()], metrics, DecisionLog(), picker=EndpointPicker()),
        ServerOptions("127.0.0.1:0"),
        SessionOptions(endpoint_picker=True),
    )
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", [("grpc.use_local_subchannel_pool", 1)])
    stream = Stream(channel.stream_stream(wire.METHOD)(), Exchange())
    await stream.send(request_headers((*chat()[:1], COMPLETIONS), modes=MODES["full duplex"]))
    await stream.send(request_body(body))
    while not stream.exchange.body_ended:
        assert await stream.read() is not None
    assert stream.exchange.body == body
    assert 0 < stream.exchange.largest_chunk <= 62_000
    await channel.close()
    await server.stop(0)


async def test_the_served_endpoint_is_heard() -> None:
    """After a retry the gateway serves from the second; the load follows it."""
    pool = ready()
    async with serving(pool) as picker:
        async with picker.stream() as stream:
            await send_request(stream, Rule("", some(A, B, C)), "full duplex")
            first, second = stream.exchange.metadata["envoy.lb"][DESTINATION].split(",")[:2]
            assert await stream.ask(response_headers(served_metadata=second)) == "response_headers"
            names = {one.address: one.name for one in pool.instances}
            assert pool.inflight.of_instance(names[second]).requests == 1
            assert pool.inflight.of_instance(names[first]).requests == 0
        await picker.quiet()


async def test_unscored_requests_are_spread() -> None:
    """Bodyless requests that stay open go to the least busy, in turn."""
    async with serving(ready()) as picker, contextlib.AsyncExitStack() as open_streams:
        named = []
        for _ in range(6):
            stream = await open_streams.enter_async_context(picker.stream())
            await send_request(stream, Rule("", some(), body=None), "buffered")
            named.append(stream.exchange.metadata["envoy.lb"][DESTINATION].split(",")[0])
        assert sorted(named) == sorted([A, B, C] * 2)


HEALTH = {
    "liveness": ("SERVING", "SERVING"),
    "readiness": ("SERVING", "NOT_SERVING"),
    "envoy.service.ext_proc.v3.ExternalProcessor": ("SERVING", "NOT_SERVING"),
    "": ("SERVING", "NOT_SERVING"),
    "unknown.Service": ("NOT_FOUND", "NOT_FOUND"),
}


async def test_health_services() -> None:
    """Name by name: while serving, and while draining."""
    async with serving(ready()) as picker:
        for name, (serving_says, _) in HEALTH.items():
            assert await check(picker.channel, name) == serving_says, name
        await picker.server.drain(0)
        for name, (_, draining_says) in HEALTH.items():
            assert await check(picker.channel, name) == draining_says, name


SUBSETS: list[tuple[Any, frozenset[str] | None]] = [
    (None, None),
    (5.0, None),
    ([], some()),
    ("", some()),
    (" , ", some()),
    ([A, 3, None, " "], some(A)),
    (f"{A},{B}", some(A, B)),
    (["10.0.0.1"], some("10.0.0.1", A)),
    (["[::1]"], some("[::1]", "[::1]:8000")),
    (["::1"], some("::1", "[::1]:8000")),
    (["[::1]:8000"], some("[::1]:8000")),
    (["10.0.0.1:9"], some("10.0.0.1:9")),
]


@pytest.mark.parametrize(("given", "expected"), SUBSETS)
def test_subset(given: Any, expected: frozenset[str] | None) -> None:
    @dataclass
    class One:
        address: str

    known: list[Any] = [One(A), One("[::1]:8000")]
    assert subset({} if given is None else {HINT: {KEY: given}}, known) == expected
