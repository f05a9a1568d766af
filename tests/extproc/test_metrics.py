"""The metrics themselves: names and labels, what is shown of a stream, and that series end with what they are about."""

from __future__ import annotations

import re
import struct
import time
from typing import Any

import msgpack
import pytest
from prometheus_client.parser import text_string_to_metric_families

from extproc.aibrix_metrics import PREFIX, add_aibrix
from extproc.metrics import Metrics
from extproc.observe import add_families, add_reload, add_transport, forget_gone
from extproc.pool import Pool
from extproc.reasons import Reason
from kvindex.durations import BOUNDS, Durations
from kvindex.transport import EventTransport
from tests.extproc.pool_model import engine, make_pool

LABELS = {
    "pool", "engine", "dp_rank", "tier", "reason", "outcome", "scorer", "kind", "stage", "where", "state", "version",
    "le", "generation", "role",
}  # fmt: skip
POD = {"pod_key"}
AIBRIX = {
    "connections_total": POD, "disconnections_total": POD, "reconnect_attempts_total": POD,
    "events_received_total": {*POD, "event_type"}, "events_processed_total": {*POD, "event_type"},
    "event_processing_duration_seconds": POD, "missed_events_total": POD, "replay_requests_total": POD,
    "replay_success_total": POD, "replay_failures_total": POD, "errors_total": {*POD, "error_type"},
    "connection_status": POD, "last_sequence_id": POD,
}  # fmt: skip
"""The 13 metrics of AIBrix's pkg/cache/kvcache/metrics.go and their labels."""


def message(sequence: int, timestamp: float, *hashes: int) -> list[bytes]:
    event = ["BlockStored", list(hashes), None, [7] * 4 * len(hashes), 4, None, "GPU"]
    return [b"", struct.pack(">Q", sequence), msgpack.packb([timestamp, [event], 0])]


def live(pool: Pool, name: str, sequence: int, *, timestamp: float = 1000.0, now: float | None = None) -> None:
    stream = pool.directory._streams[(name, 0)]
    assert stream.sync is not None
    stream.sync.live(message(sequence, timestamp, sequence + 1), time.monotonic() if now is None else now)


def samples(metrics: Metrics) -> dict[str, float]:
    """By full name with labels."""
    found = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def everything(*pools: Pool) -> Metrics:
    metrics = Metrics("1")
    add_families(metrics, pools)
    add_transport(metrics, EventTransport())
    add_reload(metrics, lambda: None)
    return metrics


def test_labels_are_of_one_list_and_nothing_is_created() -> None:
    metrics = everything(make_pool(engine("engine-a")))
    metrics.decisions.labels("qwen", "car", "engine-a").inc()
    text = metrics.render()[0].decode()
    assert "_created" not in text
    assert "_created" not in metrics.render("application/openmetrics-text")[0].decode()
    assert set(re.findall(r'[{,](\w+)="', text)) <= LABELS


def test_counters_are_there_before_they_count() -> None:
    shown = samples(everything(make_pool(engine("engine-a"))))
    for reason in Reason:
        assert shown[f"kvcar_unscored_total{{reason={reason}}}"] == 0
    for outcome in ("scored", "unscored", "shed"):
        assert shown[f"kvcar_requests_total{{outcome={outcome},pool=qwen}}"] == 0
    assert shown["kvcar_config_reload_failures_total"] == 0
    assert shown["kvcar_config_last_reload_successful"] == 1


@pytest.mark.parametrize(
    ("timestamp", "lag"), [(1000.0, 2.5), (1002.5, 0.0), (1010.0, -7.5), (0.0, None)], ids=str
)  # the engine's clock may be ahead; a publisher without times has no lag
def test_lag_is_from_the_engines_time_to_the_application(timestamp: float, lag: float | None) -> None:
    pool = make_pool(engine("engine-a"))
    metrics = Metrics("1")
    # applied at 1002.5 of the wall clock; scraped whenever
    applied = time.monotonic() - 4.0
    add_families(metrics, [pool], clock=lambda: 1002.5 + time.monotonic() - applied)
    live(pool, "engine-a", 0, timestamp=timestamp, now=applied)
    found = samples(metrics).get("kvcar_stream_lag_seconds{dp_rank=0,engine=engine-a,pool=qwen}")
    assert found == (None if lag is None else pytest.approx(lag, abs=0.05))


def test_apply_time_is_a_sum_and_a_count() -> None:
    pool = make_pool(engine("engine-a"))
    applying = pool.directory._streams[("engine-a", 0)].link.applying
    for seconds in (0.001, 0.002):
        applying.add(seconds)
    shown = samples(everything(pool))
    label = "{dp_rank=0,engine=engine-a,pool=qwen}"
    assert shown[f"kvcar_stream_apply_seconds_sum{label}"] == pytest.approx(0.003)
    assert shown[f"kvcar_stream_apply_seconds_count{label}"] == 2


@pytest.mark.parametrize(
    ("seconds", "place"), [(0.0, 0), (10e-6, 0), (10.1e-6, 1), (0.164, 15), (0.1638, 14), (9.0, 15)]
)
def test_durations(seconds: float, place: int) -> None:
    durations = Durations()
    durations.add(seconds)
    assert durations.counts.index(1) == place
    assert len(durations.counts) == len(BOUNDS) + 1


def test_instances_by_state() -> None:
    shown = samples(everything(make_pool(engine("engine-a"), engine("engine-b"))))
    assert [shown[f"kvcar_instances{{pool=qwen,state={state}}}"] for state in ("active", "draining")] == [2, 0]


def test_series_end_with_their_instance_and_pool() -> None:
    pool = make_pool(engine("engine-a"), engine("engine-b", ranks=2))
    pools = [pool]
    metrics = Metrics("1")
    add_families(metrics, pools)
    forget_gone(metrics, pool._fleet)
    for name in ("engine-a", "engine-b/0", "engine-b/1"):
        metrics.scored("qwen", "car", name, prompt=10, available=5, chosen=5, spread=0.3)
    metrics.prediction_drift.labels("qwen").set(0.5)
    live(pool, "engine-b", 0)
    assert len([name for name in samples(metrics) if "engine=engine-b" in name]) > 20
    pool._fleet.remove("engine-b")
    assert not [name for name in samples(metrics) if "engine-b" in name]
    metrics.scored("qwen", "car", "engine-b/0", prompt=10, available=5, chosen=5, spread=None)  # back, counted anew
    assert samples(metrics)["kvcar_decisions_total{engine=engine-b/0,pool=qwen,scorer=car}"] == 1
    assert "kvcar_decisions_total{engine=engine-a,pool=qwen,scorer=car}" in samples(metrics)
    pool._fleet.upsert(engine("engine-a", ranks=2))  # other ranks, other labels
    assert "kvcar_decisions_total{engine=engine-a,pool=qwen,scorer=car}" not in samples(metrics), (
        "it has other ranks now"
    )
    pools.clear()
    assert not [name for name in samples(metrics) if "pool=qwen" in name]


def test_aibrix_names_and_labels() -> None:
    pool = make_pool(engine("engine-a"), engine("engine-b", ranks=2))
    for sequence in (0, 1, 5):
        live(pool, "engine-a", sequence)
    pool.directory._streams[("engine-a", 0)].link.applying.add(0.003)
    metrics = Metrics("1")
    add_aibrix(metrics, [pool])
    text = metrics.render()[0].decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(PREFIX):
                name = re.sub("_(bucket|sum|count)$", "", sample.name).removeprefix(PREFIX)
                found.setdefault(name, set()).update(set(sample.labels) - {"le"})
    assert found == AIBRIX
    shown: dict[str, Any] = samples(metrics)
    keys = {name.partition("pod_key=")[2].rstrip("}") for name in shown if "connection_status" in name}
    assert keys == {"engine-a", "engine-b/0", "engine-b/1"}
    assert shown[PREFIX + "missed_events_total{pod_key=engine-a}"] == 3
    assert shown[PREFIX + "last_sequence_id{pod_key=engine-a}"] == 5
    assert shown[PREFIX + "last_sequence_id{pod_key=engine-b/0}"] == -1
    assert shown[PREFIX + "events_processed_total{event_type=BlockStored,pod_key=engine-a}"] == 3
    buckets = [name for name in shown if "duration_seconds_bucket" in name and "engine-a" in name]
    assert len(buckets) == 16
    assert shown[PREFIX + "event_processing_duration_seconds_bucket{le=0.00256,pod_key=engine-a}"] == 0
    assert shown[PREFIX + "event_processing_duration_seconds_bucket{le=0.00512,pod_key=engine-a}"] == 1


def test_aibrix_series_end_with_the_stream() -> None:
    pool = make_pool(engine("engine-a"), engine("engine-b"))
    metrics = Metrics("1")
    add_aibrix(metrics, [pool])
    assert [name for name in samples(metrics) if "engine-b" in name]
    pool._fleet.remove("engine-b")
    assert not [name for name in samples(metrics) if "engine-b" in name]
