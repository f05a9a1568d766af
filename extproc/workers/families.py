"""The metrics of several workers as those of one. Pure: pages in the text form in, families out.

counters, histograms     summed; those of a worker that died stay in the sum, else `rate` would see a reset
what all workers watch   streams and the fleet: each sees the same, so the sum would be wrong; the largest counter, the
                         worst gauge
each process's own       labelled `worker`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Literal

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families

Rule = Literal["sum", "max", "min", "far", "worker"]

RULES: tuple[tuple[str, Rule], ...] = (
    ("process_*", "worker"),
    ("python_gc_*", "worker"),
    ("python_info", "max"),
    ("kvcar_build_info", "max"),
    ("kvcar_config_last_reload_successful", "min"),
    ("kvcar_config_*", "max"),  # every worker reads the file
    ("kvcar_tokenizer_loaded", "min"),
    ("kvcar_tokenizer_*", "sum"),
    ("kvcar_remote_tokenizer_*", "sum"),
    ("kvcar_inflight_*", "sum"),
    ("kvcar_speculative_blocks", "sum"),
    ("kvcar_hit_prediction_drift_ratio", "far"),
    ("kvcar_stream_connected", "min"),
    ("kvcar_stream_synchronized", "min"),
    ("kvcar_stream_complete", "min"),
    ("kvcar_stream_sequence", "min"),
    ("kvcar_stream_blocks", "min"),
    ("kvcar_stream_*", "max"),
    ("kvcar_events_streams", "max"),
    ("kvcar_events_*", "sum"),
    ("kvcar_instance*", "max"),
    ("kvcar_role_unreachable", "max"),  # each knows what its own requests met
    ("aibrix_kvcache_zmq_connection_status", "min"),
    ("aibrix_kvcache_zmq_last_sequence_id", "min"),
    ("aibrix_*", "max"),
)
"""First match counts. What no row names: counters and histograms are summed, of gauges the largest is shown."""

_MERGE: Mapping[Rule, Callable[[float, float], float]] = {
    "sum": lambda one, other: one + other,
    "max": max,
    "min": min,
    "far": lambda one, other: max(one, other, key=abs),
}

Key = tuple[str, tuple[tuple[str, str], ...]]
"""Sample name, labels."""


def rule_of(name: str, kind: str) -> Rule:
    """`name` as the registry has it, without `_total`."""
    for pattern, rule in RULES:
        if fnmatchcase(name, pattern):
            return rule
    return "max" if kind in ("gauge", "info", "unknown") else "sum"


class Pages:
    """The latest page of each worker, and what those that died had counted."""

    def __init__(self) -> None:
        self._pages: dict[int, list[Metric]] = {}
        self._ended: dict[str, dict[Key, float]] = {}

    def put(self, worker: int, page: str) -> None:
        """Takes a worker's page. Raises ValueError when it is none."""
        self._pages[worker] = list(text_string_to_metric_families(page))

    def end(self, worker: int) -> None:
        """The process is gone: what it had counted, as far as it was seen, is kept."""
        for family in self._pages.pop(worker, ()):
            if family.type in ("counter", "histogram", "summary") and rule_of(family.name, family.type) == "sum":
                kept = self._ended.setdefault(family.name, {})
                for sample in family.samples:
                    key = (sample.name, tuple(sorted(sample.labels.items())))
                    kept[key] = kept.get(key, 0.0) + sample.value

    def merged(self, more: Iterable[tuple[str, list[Metric]]] = ()) -> list[Metric]:
        """One family of each name. `more`: pages of other processes by their `worker` label, for that rule only."""
        families: dict[str, Metric] = {}
        values: dict[str, dict[Key, float]] = {}
        pages = [*((str(worker), page) for worker, page in sorted(self._pages.items())), *more]
        for number, (worker, page) in enumerate(pages):
            for family in page:
                rule = rule_of(family.name, family.type)
                if number >= len(self._pages) and rule != "worker":
                    continue
                if family.name not in families:
                    families[family.name] = Metric(family.name, family.documentation, family.type)
                    values[family.name] = dict(self._ended.get(family.name, ()))
                into = values[family.name]
                for sample in family.samples:
                    labels = {**sample.labels, "worker": worker} if rule == "worker" else sample.labels
                    key = (sample.name, tuple(sorted(labels.items())))
                    into[key] = _MERGE[rule](into[key], sample.value) if key in into else sample.value
        for name, family in families.items():
            for (sample_name, pairs), value in values[name].items():
                family.add_sample(sample_name, dict(pairs), value)
        return list(families.values())


class _Registry(CollectorRegistry):
    """What an encoder asks: families made elsewhere."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def render(families: Iterable[Metric], accept: str = "") -> tuple[bytes, str]:
    """The exposition and its content type, in the form that the Accept header asks for."""
    encoder, content_type = choose_encoder(accept)
    return encoder(_Registry(families)), content_type


def process_page() -> list[Metric]:
    """This process's own families."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    return list(registry.collect())


def worker_families(workers: Iterable[tuple[str, str, int]]) -> list[Metric]:
    """Of (number, state, restarts) each."""
    up = GaugeMetricFamily("kvcar_worker_up", "1 while the worker runs and has started.", labels=["worker"])
    restarts = CounterMetricFamily("kvcar_worker_restarts", "Times a worker was started again.", labels=["worker"])
    for number, state, count in workers:
        up.add_metric([number], state == "running")
        restarts.add_metric([number], count)
    return [up, restarts]
