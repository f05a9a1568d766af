"""Every metric of the process, in one place. Names: `kvcar_*`, base units, bounded label sets.

Counters of the request path are plain attributes of one `Metrics` object. What already lives elsewhere (streams,
in-flight counts, caches) is read at scrape time, so that nothing is counted twice. docs/metrics.md lists every name (a
test compares).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from extproc.reasons import Reason
from kvindex.durations import BOUNDS, Durations

FAULTS = ("decider", "ticket", "server", "malformed", "unknown")
STAGES = ("tokenize", "match", "score", "total")
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


_RATIOS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
_COSTS = (0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 100.0, 1000.0)
OUTCOMES = ("scored", "unscored", "shed")
KINDS = ("available", "chosen")
Kind = Literal["gauge", "counter", "summary", "histogram"]


@dataclass(slots=True, frozen=True)
class Sample:
    """One value of a family read at scrape time: label values in the family's label order.

    value  a number; of summaries and histograms the durations
    """

    labels: tuple[str, ...]
    value: float | Durations


@dataclass(slots=True, frozen=True)
class Family:
    """A metric whose values live elsewhere; `read` is called at each scrape, in the event loop."""

    name: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[], Iterable[Sample]]
    kind: Kind = "gauge"


class _Reader(Collector):
    def __init__(self) -> None:
        self.families: list[Family] = []
        self.prepare: list[Callable[[], None]] = []

    def collect(self) -> Iterator[Metric]:
        for prepare in self.prepare:
            prepare()
        for family in self.families:
            metric = _FAMILIES[family.kind](family.name, family.help, labels=family.labels)
            for sample in family.read():
                value = sample.value
                if not isinstance(value, Durations):
                    metric.add_metric(sample.labels, value)
                elif family.kind == "summary":
                    metric.add_metric(sample.labels, count_value=sum(value.counts), sum_value=value.seconds)
                else:
                    metric.add_metric(sample.labels, _buckets(value), value.seconds)
            yield metric

    def describe(self) -> Iterator[Metric]:
        return iter(())


_FAMILIES: dict[Kind, Any] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "summary": SummaryMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _buckets(value: Durations) -> list[tuple[str, int]]:
    bounds = [*map(floatToGoString, BOUNDS), "+Inf"]
    return list(zip(bounds, accumulate(value.counts), strict=True))


class Metrics:
    """The registry and the counters of the request path."""

    def __init__(self, version: str) -> None:
        # a second series for each counter, which nobody asks for: Prometheus knows when a counter began
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._reader = _Reader()
        self.registry.register(self._reader)
        ProcessCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        Gauge("kvcar_build_info", "Constant 1, labelled with the version.", ["version"], registry=self.registry).labels(
            version
        ).set(1)
        self.requests = Counter(
            "kvcar_requests",
            "Proxied requests seen, by pool ('' = no pool could be told) and whether a choice was made.",
            ["pool", "outcome"],
            registry=self.registry,
        )
        self.unscored = Counter(
            "kvcar_unscored",
            "Requests passed on without a choice, by reason (docs/unscored.md).",
            ["reason"],
            registry=self.registry,
        )
        self.decisions = Counter(
            "kvcar_decisions",
            "Choices made, by pool, scorer and the instance chosen first.",
            ["pool", "scorer", "engine"],
            registry=self.registry,
        )
        self.prompt_tokens = Counter(
            "kvcar_prompt_tokens", "Prompt tokens of scored requests.", ["pool"], registry=self.registry
        )
        self.hit_tokens = Counter(
            "kvcar_hit_tokens",
            "Cached prefix tokens of scored requests: available = best candidate, chosen = the instance chosen, "
            "delivered = the engine's own cached_tokens where the answer is observed.",
            ["pool", "kind"],
            registry=self.registry,
        )
        self.hit_ratio = Histogram(
            "kvcar_hit_ratio",
            "Cached prefix tokens of a scored request as a share of its prompt, by kind as in kvcar_hit_tokens.",
            ["pool", "kind"],
            buckets=_RATIOS,
            registry=self.registry,
        )
        self.cost_spread = Histogram(
            "kvcar_decision_cost_spread",
            "Cost of the worst candidate minus that of the best, in the scorer's own unit: 0 = all the same.",
            ["pool", "scorer"],
            buckets=_COSTS,
            registry=self.registry,
        )
        self.prediction_drift = Gauge(
            "kvcar_hit_prediction_drift_ratio",
            "Mean difference between predicted and engine-reported cached tokens as a share of the prompt, of the "
            "latest observed answers.",
            ["pool"],
            registry=self.registry,
        )
        self.reloads = Counter(
            "kvcar_config_reloads", "Configurations taken over while running.", registry=self.registry
        )
        self.reload_failures = Counter(
            "kvcar_config_reload_failures",
            "Configurations refused while running: the one before stays in effect.",
            registry=self.registry,
        )
        self.seconds = Histogram(
            "kvcar_decision_seconds", "Time per request by stage.", ["stage"], buckets=_SECONDS, registry=self.registry
        )
        self.failover = Counter(
            "kvcar_served_elsewhere",
            "Answers from another instance than the one chosen first (retry or fallback).",
            ["pool"],
            registry=self.registry,
        )
        self.faults = Counter(
            "kvcar_faults",
            "Faults of ours (decider, ticket, server) or of a peer's bytes (malformed, unknown).",
            ["where"],
            registry=self.registry,
        )
        self.stage = {stage: self.seconds.labels(stage) for stage in STAGES}
        self._scored: dict[tuple[str, str, str], tuple[Any, ...]] = {}
        for reason in Reason:  # there from the start, so that a rate sees the first one
            self.unscored.labels(reason)
        for where in FAULTS:
            self.faults.labels(where)

    def add_pool(self, name: str) -> None:
        """Its counters are there from the start, at 0, so that a rate sees the first request."""
        for outcome in OUTCOMES:
            self.requests.labels(name, outcome)
        self.prompt_tokens.labels(name)
        self.failover.labels(name)

    def scored(
        self, pool: str, scorer: str, engine: str, *, prompt: int, available: int, chosen: int, spread: float | None
    ) -> None:
        """One choice: its tokens, and what the worst candidate would have cost more (None = there was no other)."""
        series = self._scored.get((pool, scorer, engine))
        if series is None:
            series = self._scored[pool, scorer, engine] = (
                self.requests.labels(pool, "scored"),
                self.decisions.labels(pool, scorer, engine),
                self.prompt_tokens.labels(pool),
                *(family.labels(pool, kind) for kind in KINDS for family in (self.hit_tokens, self.hit_ratio)),
            )
        requests, decisions, tokens, available_tokens, available_ratio, chosen_tokens, chosen_ratio = series
        requests.inc()
        decisions.inc()
        tokens.inc(prompt)
        available_tokens.inc(available)
        chosen_tokens.inc(chosen)
        if prompt > 0:
            available_ratio.observe(available / prompt)
            chosen_ratio.observe(chosen / prompt)
        if spread is not None:
            self.cost_spread.labels(pool, scorer).observe(spread)

    def forget(self, pool: str, instance: str, dp_size: int = 1) -> None:
        """An instance has left: its series, and those of its ranks, go with it, so that labels do not pile up."""
        for name in (instance, *(f"{instance}/{rank}" for rank in range(dp_size))):
            self.decisions.remove_by_labels({"pool": pool, "engine": name})
        self._scored.clear()

    def forget_pool(self, pool: str) -> None:
        """A pool is no longer configured: its series go."""
        families = (self.requests, self.decisions, self.prompt_tokens, self.hit_tokens, self.hit_ratio,
                    self.cost_spread, self.failover, self.prediction_drift)  # fmt: skip
        for family in families:
            family.remove_by_labels({"pool": pool})
        self._scored.clear()

    def hit(self, pool: str, kind: str, tokens: int, prompt: int) -> None:
        """One request's cached tokens of a kind: available, chosen, delivered."""
        self.hit_tokens.labels(pool, kind).inc(tokens)
        if prompt > 0:
            self.hit_ratio.labels(pool, kind).observe(tokens / prompt)

    def before(self, prepare: Callable[[], None]) -> None:
        """Calls it once at each scrape, before any family is read: what several families share is looked up there."""
        self._reader.prepare.append(prepare)

    def add(self, family: Family) -> None:
        """Registers a family read at scrape time."""
        self._reader.families.append(family)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The exposition and its content type, in the form that the Accept header asks for."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type
