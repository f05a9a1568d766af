"""Every metric of the process, in one place. Names: `kvcar_*`, base units, bounded label sets.

Counters of the request path are plain attributes of one `Metrics` object. What already lives elsewhere (streams,
in-flight counts, caches) is read at scrape time, so that nothing is counted twice. docs/metrics.md lists every name (a
test compares).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

STAGES = ("tokenize", "match", "score", "total")
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


_RATIOS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


@dataclass(slots=True, frozen=True)
class Sample:
    """One value of a family read at scrape time: label values in the family's label order."""

    labels: tuple[str, ...]
    value: float


@dataclass(slots=True, frozen=True)
class Family:
    """A metric whose values live elsewhere; `read` is called at each scrape, in the event loop."""

    name: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[], Iterable[Sample]]
    counter: bool = False


class _Reader(Collector):
    def __init__(self) -> None:
        self.families: list[Family] = []
        self.prepare: list[Callable[[], None]] = []

    def collect(self) -> Iterator[Metric]:
        for prepare in self.prepare:
            prepare()
        for family in self.families:
            kind = CounterMetricFamily if family.counter else GaugeMetricFamily
            metric = kind(family.name, family.help, labels=family.labels)
            for sample in family.read():
                metric.add_metric(sample.labels, sample.value)
            yield metric

    def describe(self) -> Iterator[Metric]:
        return iter(())


class Metrics:
    """The registry and the counters of the request path."""

    def __init__(self, version: str) -> None:
        self.registry = CollectorRegistry()
        self._reader = _Reader()
        self.registry.register(self._reader)
        ProcessCollector(registry=self.registry)
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
            ["pool", "scorer", "instance"],
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
            "Faults of ours (decider, ticket, encode) or of a peer's bytes (malformed, unknown).",
            ["where"],
            registry=self.registry,
        )
        self.stage = {stage: self.seconds.labels(stage) for stage in STAGES}

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
