"""OpenTelemetry spans of decisions; imported only where `tracing` is configured. Needs kvcar[otel].

    kvcar.decide        child of the caller's span (W3C traceparent), or the root of a trace of its own
      kvcar.tokenize    body to token ids
      kvcar.match       token ids to what the instances hold
      kvcar.score       the choice

Spans are made when the request has ended (those of unscored ones with the decision), with the times that the decider
took: none of the work is on the way of a scored request, and they carry what the engine delivered. A thread of the SDK
sends them in batches. Attributes: gen_ai.* by the semantic conventions, kvcar.* our own; never a text of the request.
docs/tracing-and-logs.md has the table.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from extproc import __version__
from extproc.decider import CANCELLED
from extproc.openai import Endpoint
from extproc.reasons import Reason

if TYPE_CHECKING:
    from extproc.config import TracingConfig
    from extproc.decisions import Record

log = logging.getLogger(__name__)

SEND_TIMEOUT = 5.0
"""Seconds that one batch may take, further attempts included."""

CLOSE_TIMEOUT = 5.0
"""Seconds that the last batch may hold up the end of the process."""

OPERATIONS = {
    Endpoint.CHAT: "chat",
    Endpoint.RESPONSES: "chat",
    Endpoint.MESSAGES: "chat",
    Endpoint.COMPLETIONS: "text_completion",
    Endpoint.GENERATE: "text_completion",
    Endpoint.EMBEDDINGS: "embeddings",
}
"""gen_ai.operation.name of an endpoint; /tokenize is none."""

FAILURES = frozenset({CANCELLED, Reason.INTERNAL, Reason.TIMEOUT})
"""Reasons that make a span an error; the others are a request's own nature."""

Value = str | int


def attributes(record: Record) -> dict[str, Value]:
    """What the span of a decision says. Pure."""
    found: dict[str, Value | None] = {
        "gen_ai.operation.name": OPERATIONS.get(record.endpoint) if record.endpoint is not None else None,
        "gen_ai.request.model": record.model,
        "kvcar.request_id": record.request_id,
        "kvcar.pool": record.pool,
        "kvcar.scorer": record.scorer,
        "kvcar.reason": str(record.reason) if record.reason else None,
        "kvcar.served": record.served,
        "http.response.status_code": record.status,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
    }
    decision = record.decision
    if decision is not None:
        found["gen_ai.usage.input_tokens"] = decision.request.tokens
        found["kvcar.best_available_hit"] = decision.best_available_hit
        if decision.chosen is not None:
            found["kvcar.instance"] = decision.chosen.name
            found["kvcar.hit_tokens"] = decision.hit_tokens
            found["kvcar.speculative_tokens"] = decision.speculative_tokens
    return {name: value for name, value in found.items() if value is not None and value != ""}


def stages(record: Record) -> list[tuple[str, float]]:
    """(name, seconds) of the stages that were finished, in order. Pure."""
    done = [("kvcar.tokenize", record.tokenize_seconds)] if record.tokenize_seconds else []
    if record.scorer:
        done += [("kvcar.match", record.match_seconds), ("kvcar.score", record.score_seconds)]
    return done


class Tracing:
    """Turns records into spans. `add` may be called on the event loop: no I/O, about 0.25 ms of CPU a sampled request.

    A request that its caller does not sample costs a tenth of that.
    """

    def __init__(self, config: TracingConfig, exporter: SpanExporter | None = None) -> None:
        """`exporter` replaces the configured one."""
        self._exporter = _Told(exporter or _exporter(config), config.endpoint)
        self._processor = BatchSpanProcessor(self._exporter)
        provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sample_ratio)),
            resource=Resource.create({"service.name": config.service_name, "service.version": __version__}),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("kvcar", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._failed = False

    def add(self, record: Record) -> None:
        """The spans of one request, whose record is complete. Never raises."""
        try:
            self._add(record)
        except Exception as error:
            if not self._failed:  # the text could quote the request, and the next one fails as well
                log.error("tracing: a span could not be made: %s", type(error).__name__)
            self._failed = True

    def _add(self, record: Record) -> None:
        carrier = {"traceparent": record.traceparent} if record.traceparent else {}
        at = int(record.at * 1e9)
        span = self._tracer.start_span("kvcar.decide", self._propagator.extract(carrier), start_time=at)
        if not span.is_recording():  # the caller, or the ratio, wants none
            return
        span.set_attributes(attributes(record))
        if record.reason in FAILURES:
            span.set_attribute("error.type", str(record.reason))
            span.set_status(Status(StatusCode.ERROR))
        self._children(span, record, at)
        span.end(at + int(record.total_seconds * 1e9))

    def _children(self, span: Span, record: Record, at: int) -> None:
        inside = set_span_in_context(span)
        for name, seconds in stages(record):
            child = self._tracer.start_span(name, inside, start_time=at)
            at += int(seconds * 1e9)
            child.end(at)

    def flush(self) -> bool:
        """Sends what waits. Blocking."""
        return self._processor.force_flush()

    def close(self) -> None:
        """Sends what waits, within CLOSE_TIMEOUT. Blocking."""
        last = threading.Thread(target=self._processor.shutdown, name="kvcar-tracing-end", daemon=True)
        last.start()
        last.join(CLOSE_TIMEOUT)
        self._exporter.forget()


def _exporter(config: TracingConfig) -> SpanExporter:
    """The exporter of the protocol. What the configuration leaves open, the OTEL_EXPORTER_OTLP_* variables say."""
    headers = {name: value.get_secret_value() for name, value in config.headers.items()} or None
    if config.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(endpoint=config.endpoint, headers=headers, timeout=SEND_TIMEOUT)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

    bare = urlsplit(config.endpoint).path in ("", "/")
    endpoint = config.endpoint.rstrip("/") + "/v1/traces" if bare else config.endpoint
    return Http(endpoint=endpoint, headers=headers, timeout=SEND_TIMEOUT)


class _Why(logging.Handler):
    """Keeps the SDK's last complaint instead of writing all of them: it has several a batch."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()[:300]


class _Told(SpanExporter):
    """Says once that spans cannot be sent, with the reason, and once that they can again."""

    def __init__(self, inner: SpanExporter, endpoint: str) -> None:
        self._inner = inner
        self._endpoint = endpoint
        self._lost = 0
        self._why = _Why()
        self._sdk = logging.getLogger("opentelemetry")
        self._sdk.addHandler(self._why)
        self._propagated, self._sdk.propagate = self._sdk.propagate, False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._inner.export(spans)
        except Exception as error:
            self._why.text, result = type(error).__name__, SpanExportResult.FAILURE
        if result is not SpanExportResult.SUCCESS:
            if not self._lost:
                log.warning("tracing: %s takes no spans, they are lost: %s", self._endpoint, self._why.text)
            self._lost += len(spans)
        elif self._lost:
            log.warning("tracing: %s takes spans again, at least %d were lost", self._endpoint, self._lost)
            self._lost = 0
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)

    def forget(self) -> None:
        """The SDK's lines go where they went before."""
        self._sdk.removeHandler(self._why)
        self._sdk.propagate = self._propagated
