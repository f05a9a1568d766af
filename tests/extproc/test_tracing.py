"""Spans: what they say as a table, whose children they are, real collectors over both protocols, and failing ones."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import orjson
import pytest
import yaml
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from examples.local.stack import TOKENIZER
from extproc import tracing, wire
from extproc.app import App
from extproc.config import ConfigError, TracingConfig, parse
from extproc.decider import PoolDecider
from extproc.decisions import DecisionLog, Record
from extproc.messages import HttpRequest
from extproc.metrics import Metrics
from extproc.openai import Endpoint
from extproc.pool import Pool
from extproc.tracing import Tracing, attributes
from tests.extproc.gateway_model import Exchange, chat, request_body, request_headers, response_headers
from tests.extproc.grpc_peer import Stream, until
from tests.extproc.pool_model import engine, make_pool, store

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
IDS = list(range(100, 121))
SECRET, PROMPT = "Bearer s3cret-key", "an unmistakable sentence of the client"


def settings(**given: Any) -> TracingConfig:
    return TracingConfig(endpoint=given.pop("endpoint", "http://127.0.0.1:1"), **given)


class Bench:
    """A decider that traces into memory, with a clock that goes on by 1 ms whenever it is read."""

    def __init__(self, pool: Pool | None = None, **given: Any) -> None:
        self.now = 100.0
        self.exporter = InMemorySpanExporter()
        self.tracing = Tracing(settings(**given), self.exporter)
        pool = pool or make_pool(engine("engine-a"), engine("engine-b"))
        self.decider = PoolDecider([pool], Metrics("test"), DecisionLog(), tracing=self.tracing, clock=self.clock)

    def clock(self) -> float:
        self.now += 0.001
        return self.now

    def ask(self, body: Any = None, path: str = "/v1/completions", **headers: str) -> list[ReadableSpan]:
        """The spans of one request, parents first."""
        data = orjson.dumps({"model": "qwen3-8b", "prompt": IDS} if body is None else body)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        outcome = asyncio.run(self.decider.decide(HttpRequest("POST", path, given, data)))
        if outcome.ticket is not None:
            outcome.ticket.on_response_headers(200, outcome.destinations[0])
            outcome.ticket.on_usage(16, 21)
            outcome.ticket.close()
        self.tracing.flush()
        spans = sorted(self.exporter.get_finished_spans(), key=lambda span: (span.start_time, span.parent is not None))
        self.exporter.clear()
        return [one for one in spans if one.name == "kvcar.decide"] + [
            one for one in spans if one.name != "kvcar.decide"
        ]


@pytest.fixture
def bench() -> Any:
    found = Bench()
    yield found
    found.tracing.close()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, {}),
        ({"endpoint": Endpoint.CHAT, "model": "m"}, {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}),
        ({"endpoint": Endpoint.MESSAGES}, {"gen_ai.operation.name": "chat"}),
        ({"endpoint": Endpoint.COMPLETIONS}, {"gen_ai.operation.name": "text_completion"}),
        ({"endpoint": Endpoint.EMBEDDINGS}, {"gen_ai.operation.name": "embeddings"}),
        ({"endpoint": Endpoint.TOKENIZE}, {}),
        ({"pool": "p", "status": 200}, {"kvcar.pool": "p", "http.response.status_code": 200}),
        ({"detail": PROMPT, "reason": "bad_request"}, {"kvcar.reason": "bad_request"}),
        ({"cached_tokens": 0}, {"gen_ai.usage.cache_read.input_tokens": 0}),
    ],
)  # fmt: skip
def test_attributes(given: dict[str, Any], says: dict[str, Any]) -> None:
    assert attributes(Record(0.0, "", "/", **given)) == says


def test_a_scored_request(bench: Bench) -> None:
    pool = make_pool(engine("engine-a"), engine("engine-b"))
    store(pool, "engine-b", IDS)
    bench.decider.pools.use([pool])
    root, *children = bench.ask(traceparent=PARENT, x_request_id="r-1")
    assert f"{root.context.trace_id:032x}" == TRACE
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == SPAN
    assert root.attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "qwen3-8b",
        "gen_ai.usage.input_tokens": 21,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "http.response.status_code": 200,
        "kvcar.request_id": "r-1",
        "kvcar.pool": "qwen",
        "kvcar.scorer": "car",
        "kvcar.instance": "engine-b",
        "kvcar.served": "10.0.0.2:8000",
        "kvcar.hit_tokens": 20,
        "kvcar.best_available_hit": 20,
        "kvcar.speculative_tokens": 0,
    }
    assert [one.name for one in children] == ["kvcar.tokenize", "kvcar.match", "kvcar.score"]
    assert all(one.parent is not None and one.parent.span_id == root.context.span_id for one in children)
    times = [edge for one in children for edge in (one.start_time or 0, one.end_time or 0)]
    assert times == sorted(times)
    assert [end - start for start, end in zip(times[::2], times[1::2], strict=True)] == pytest.approx([1e6] * 3, abs=9)
    assert root.start_time == times[0]
    assert (root.end_time or 0) > (children[-1].end_time or 0)


@pytest.mark.parametrize(
    ("traceparent", "ratio", "spans", "same_trace"),
    [
        (PARENT, 1.0, 4, True),
        (PARENT, 0.0, 4, True),  # the caller samples: the ratio has no say
        (PARENT[:-1] + "0", 1.0, 0, False),
        ("", 1.0, 4, False),
        ("", 0.0, 0, False),
        ("00-" + "0" * 32 + f"-{SPAN}-01", 1.0, 4, False),
        (f"00-{TRACE}-{SPAN}", 1.0, 4, False),
        (f"ff-{TRACE}-{SPAN}-01", 1.0, 4, False),
        (f"01-{TRACE}-{SPAN}-01-more", 1.0, 4, True),  # a later version: what is known of it holds
        (f"{PARENT}, {PARENT}", 1.0, 4, False),
        ("x" * 100_000, 1.0, 4, False),
        ("\udcff", 1.0, 4, False),
    ],
)
def test_the_caller_decides(traceparent: str, ratio: float, spans: int, same_trace: bool) -> None:
    bench = Bench(sample_ratio=ratio)
    found = bench.ask(**({"traceparent": traceparent} if traceparent else {}))
    bench.tracing.close()
    assert len(found) == spans
    if found:
        assert (f"{found[0].context.trace_id:032x}" == TRACE) is same_trace
        assert (found[0].parent is not None) is same_trace


def test_unscored_requests(bench: Bench) -> None:
    (root,) = bench.ask({"model": "other", "prompt": PROMPT})
    assert dict(root.attributes or {})["kvcar.reason"] == "model"
    assert root.status.status_code is StatusCode.UNSET
    root, tokenize = bench.ask({"model": "qwen3-8b", "prompt": [PROMPT, "b"]})
    assert (dict(root.attributes or {})["kvcar.reason"], tokenize.name) == ("batch", "kvcar.tokenize")
    assert PROMPT not in f"{root.to_json()}{tokenize.to_json()}"


def test_a_decision_that_is_broken_off_is_an_error(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_: object) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(bench.decider.pools[0], "tokens", never)

    async def cancelled() -> None:
        data = orjson.dumps({"model": "qwen3-8b", "prompt": IDS})
        task = asyncio.create_task(bench.decider.decide(HttpRequest("POST", "/v1/completions", {}, data)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    bench.tracing.flush()
    (span,) = bench.exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert dict(span.attributes or {})["error.type"] == "cancelled"


def test_what_goes_wrong_in_the_library_stays_there(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ValueError(PROMPT)

    monkeypatch.setattr(tracing, "attributes", fail)
    for _ in range(3):
        assert bench.ask() == []
    assert [line for line in caplog.messages if "span" in line] == ["tracing: a span could not be made: ValueError"]


class Flaky(SpanExporter):
    """Fails in turn in all ways."""

    def __init__(self) -> None:
        self.results: list[Any] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        logging.getLogger("opentelemetry.exporter").error("Failed to export: %s", "connection refused")
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result  # type: ignore[no-any-return]


def test_a_failing_collector_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    exporter = Flaky()
    good, bad = SpanExportResult.SUCCESS, SpanExportResult.FAILURE
    exporter.results = [good, bad, ValueError("no"), bad, good, good]
    told = tracing._Told(exporter, "http://127.0.0.1:1")
    caplog.set_level(logging.INFO)
    for _ in range(6):
        told.export([None, None])  # type: ignore[list-item]
    told.forget()
    assert caplog.messages == [
        "tracing: http://127.0.0.1:1 takes no spans, they are lost: Failed to export: connection refused",
        "tracing: http://127.0.0.1:1 takes spans again, at least 6 were lost",
    ]


def test_off_costs_nothing_not_even_the_import() -> None:
    code = "import sys, extproc.app, extproc.cli; print([n for n in sys.modules if n.startswith('opentelemetry')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_without_the_extra_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from extproc import assembly

    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "extproc.tracing")
    with pytest.raises(ConfigError, match=r"pip install 'kvcar\[otel\]'"):
        assembly.check_files(configuration(endpoint="http://127.0.0.1:1"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"endpoint": "collector:4317"}, "tracing.endpoint: must be a URL"),
        ({"sample_ratio": 1.5}, "tracing.sample_ratio: must be less than or equal to 1"),
        ({"protocol": "udp"}, "tracing.protocol"),
        ({"headers": {"x-key": 5551234}}, "tracing.headers.x-key: must be a valid string"),
        ({"headers": {"x-key": "s3cret\n"}}, "tracing.headers.x-key: the value of a header must be printable ASCII"),
        ({"headers": {"X-Key": "s3cret"}}, "must be a lower-case header name"),
    ],
)
def test_bad_configuration(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration(**{"endpoint": "http://127.0.0.1:4318"} | given)
    assert words in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert "5551234" not in str(caught.value)


# --- real collectors --------------------------------------------------------------------------------------------------


def configuration(**given: Any) -> Any:
    pool: dict[str, Any] = {"name": "qwen", "models": ["qwen3-8b"], "tokenizer": str(TOKENIZER)}
    pool["instances"] = [{"name": "engine-a", "address": "127.0.0.2:8000"}]
    listen = {"address": "127.0.0.1:0", "drain_wait_ms": 0}
    tree = {"listen": listen, "admin": {"address": "127.0.0.1:0"}, "tracing": given, "pools": [pool]}
    return parse(yaml.safe_dump(tree))


class Collector:
    """What arrived, and the headers it came with."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.headers: dict[str, str] = {}
        self.raw = b""

    def take(self, data: bytes, headers: dict[str, str]) -> bytes:
        self.raw += data
        self.headers = headers
        for part in ExportTraceServiceRequest.FromString(data).resource_spans:
            self.resources.append({one.key: one.value.string_value for one in part.resource.attributes})
            self.spans += [span for scope in part.scope_spans for span in scope.spans]
        return ExportTraceServiceResponse().SerializeToString()


@asynccontextmanager
async def over_http(collector: Collector) -> AsyncIterator[str]:
    async def traces(request: web.Request) -> web.Response:
        data = collector.take(await request.read(), {name.lower(): value for name, value in request.headers.items()})
        return web.Response(body=data, content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", traces)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@asynccontextmanager
async def over_grpc(collector: Collector) -> AsyncIterator[str]:
    async def export(data: bytes, context: Any) -> bytes:
        return collector.take(data, dict(context.invocation_metadata()))

    server = grpc.aio.server()
    handlers = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"http://127.0.0.1:{port}"
    await server.stop(0)


async def exchange(port: str, **call: str) -> None:
    """One chat through ext_proc. `call`: metadata of the gRPC call."""
    async with grpc.aio.insecure_channel(port, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        headers = chat(("traceparent", PARENT), ("x-request-id", "r-7"), ("authorization", SECRET))
        stream = Stream(
            channel.stream_stream(wire.METHOD)(metadata=tuple(call.items())), Exchange(headers=dict(headers))
        )
        await stream.ask(request_headers(headers, modes=(2, 0)))
        body = {"model": "qwen3-8b", "messages": [{"role": "user", "content": PROMPT}]}
        await stream.ask(request_body(orjson.dumps(body)))
        assert stream.exchange.headers["x-gateway-destination-endpoint"] == "127.0.0.2:8000"
        await stream.ask(response_headers(200, served="127.0.0.2:8000", end=True))
        await stream.call.done_writing()
        assert await stream.read() is None


@pytest.mark.parametrize(("protocol", "serve"), [("http", over_http), ("grpc", over_grpc)])
async def test_a_collector_gets_the_spans_of_a_request(protocol: str, serve: Callable[[Collector], Any]) -> None:
    collector = Collector()
    async with serve(collector) as endpoint:
        given = {"endpoint": endpoint, "protocol": protocol, "headers": {"x-team": "s3cret"}, "service_name": "gw"}
        app = App(configuration(**given))
        try:
            addresses = await app.start()
            await exchange(addresses["ext_proc"])
        finally:
            await app.stop()  # sends what waits
        await until(lambda: len(collector.spans) == 4)
    by_name = {span.name: span for span in collector.spans}
    root = by_name.pop("kvcar.decide")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, SPAN)
    assert by_name.keys() == {"kvcar.tokenize", "kvcar.match", "kvcar.score"}
    assert {span.parent_span_id for span in by_name.values()} == {root.span_id}
    assert {span.trace_id.hex() for span in by_name.values()} == {TRACE}
    said = {one.key: one.value for one in root.attributes}
    assert said["gen_ai.operation.name"].string_value == "chat"
    assert said["gen_ai.usage.input_tokens"].int_value > 5
    assert said["kvcar.instance"].string_value == "engine-a"
    assert said["kvcar.request_id"].string_value == "r-7"
    assert said["http.response.status_code"].int_value == 200
    assert collector.resources[0]["service.name"] == "gw"
    assert collector.headers["x-team"] == "s3cret"
    assert b"unmistakable" not in collector.raw
    assert b"s3cret-key" not in collector.raw


async def test_the_gateways_own_span_is_the_nearer_parent() -> None:
    collector = Collector()
    async with over_http(collector) as endpoint:
        app = App(configuration(endpoint=endpoint))
        try:
            addresses = await app.start()
            await exchange(addresses["ext_proc"], traceparent=f"00-{TRACE}-{'5' * 16}-01")
        finally:
            await app.stop()
    roots = [span for span in collector.spans if span.name == "kvcar.decide"]
    assert [span.parent_span_id.hex() for span in roots] == ["5" * 16]


async def test_a_collector_that_is_away_costs_no_request_and_no_second_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "SEND_TIMEOUT", 0.2)
    app = App(configuration(endpoint="http://127.0.0.1:1"))
    try:
        addresses = await app.start()
        for _ in range(2):
            await exchange(addresses["ext_proc"])
            await asyncio.to_thread(app._tracing.flush)  # type: ignore[union-attr]
    finally:
        await app.stop()
    lines = [line for line in caplog.messages if "tracing" in line or "xport" in line]
    assert len(lines) == 1
    assert lines[0].startswith("tracing: http://127.0.0.1:1 takes no spans")
    assert logging.getLogger("opentelemetry").propagate
