"""Several workers' answers as one: readiness, streams, decisions, status, actions; metrics; ports."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from extproc.config import ConfigError, parse
from extproc.metrics import Metrics
from extproc.observe import add_families, add_reload, add_transport
from extproc.workers import merge
from extproc.workers.families import RULES, Pages, render, rule_of, worker_families
from extproc.workers.front import Memory
from extproc.workers.place import addresses
from kvindex.transport import EventTransport

POOL = {"tokenizer": True, "streams": 2, "synchronized": 2}


@pytest.mark.parametrize(
    ("ready", "total", "before", "expected", "degraded"),
    [
        ([True, True], 2, False, True, False),
        ([True, False], 2, False, False, True),  # not before all have been ready
        ([True], 2, False, False, True),  # one has not even started
        ([], 2, False, False, True),
        ([True, False], 2, True, True, True),  # later one is enough
        ([True], 2, True, True, True),
        ([False], 2, True, False, True),
        ([], 2, True, False, True),
    ],
)
def test_readiness(ready: list[bool], total: int, before: bool, expected: bool, degraded: bool) -> None:
    answers = [{"ready": one, "pools": {"qwen": POOL}} for one in ready]
    serves, page = merge.readiness(answers, total, was_ready=before)
    assert (serves, page["ready"], page["degraded"]) == (expected, expected, degraded)
    assert page["workers"] == {"total": total, "ready": sum(ready)}


def test_readiness_shows_the_worst_of_a_pool() -> None:
    worse = {"tokenizer": False, "streams": 2, "synchronized": 1}
    _, page = merge.readiness(
        [{"ready": True, "pools": {"qwen": POOL}}, {"ready": True, "pools": {"qwen": worse}}], 2, was_ready=False
    )
    assert page["pools"] == {"qwen": worse}


def stream(**more: Any) -> dict[str, Any]:
    return {
        "pool": "qwen", "instance": "a", "dp_rank": 0, "endpoint": "tcp://1", "connected": True, "synchronized": True,
        "complete": True, "error": "", "sequence": 7, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    "worse",
    [
        stream(sequence=6),
        stream(sequence=None),
        stream(complete=False),
        stream(synchronized=False, complete=True),
        stream(connected=False, synchronized=True),
        stream(error="a gap"),
    ],
)
def test_a_stream_is_as_bad_as_where_it_is_worst(worse: dict[str, Any]) -> None:
    other = stream(dp_rank=1)
    for lists in ([[stream(), other], [worse, other]], [[worse, other], [stream(), other]]):
        assert merge.streams(lists) == [worse, other]


def test_a_stream_that_one_worker_does_not_have_yet_is_there() -> None:
    assert merge.streams([[], [stream()]]) == [stream()]


def test_decisions_by_time_with_their_worker() -> None:
    found = merge.decisions({0: [{"at": 5.0}, {"at": 1.0}], 2: [{"at": 4.0}, {"at": 3.0}]}, 3)
    assert found == [{"at": 5.0, "worker": 0}, {"at": 4.0, "worker": 2}, {"at": 3.0, "worker": 2}]


def status(in_flight: int, **more: Any) -> dict[str, Any]:
    checked = {
        "state": "ok",
        "samples": 10,
        "equal": 9,
        "over": 1,
        "difference": 0.01,
        "likely_cause": "",
        "remedy": "",
    }
    pool = {
        "name": "qwen", "tokenizer_loaded": True, "speculative_blocks": 3,
        "self_verification": {**checked, **more.pop("checked", {})},
        "instances": [{"name": "a", "state": more.pop("state", "active"), "in_flight": in_flight, "load": None}],
        "streams": [stream()],
    }  # fmt: skip
    return {"version": "1", "uptime_seconds": 5.0, "serving": True, "reload_error": None, "pools": [pool], **more}


def test_status_adds_requests_up_and_shows_the_worst() -> None:
    drift = {"state": "drift", "difference": 0.2, "likely_cause": "salt", "over": 6}
    found = merge.status(
        [status(2), status(3, state="unreachable", reload_error="line 3", uptime_seconds=9.0, checked=drift)],
        [{"worker": 0}, {"worker": 1}],
    )
    (pool,) = found["pools"]
    assert pool["instances"] == [{"name": "a", "state": "unreachable", "in_flight": 5, "load": None}]
    assert pool["speculative_blocks"] == 6
    assert pool["streams"] == [stream()]
    checked = pool["self_verification"]
    assert (checked["state"], checked["likely_cause"], checked["difference"]) == ("drift", "salt", 0.2)
    assert (checked["samples"], checked["equal"], checked["over"]) == (20, 18, 7)
    assert (found["reload_error"], found["uptime_seconds"], found["workers"]) == (
        "line 3",
        9.0,
        [{"worker": 0}, {"worker": 1}],
    )


def test_a_drained_instance_has_the_requests_of_all() -> None:
    one = {"instance": "a", "changed": False, "state": "draining", "in_flight": 2}
    assert merge.action([one, {**one, "changed": True, "in_flight": 5}]) == {**one, "changed": True, "in_flight": 7}


# -- metrics


def page(requests: float, **gauges: float) -> str:
    lines = [
        "# TYPE kvcar_requests_total counter", f'kvcar_requests_total{{pool="q",outcome="scored"}} {requests}',
        "# TYPE kvcar_decision_seconds histogram",
        f'kvcar_decision_seconds_bucket{{le="0.1",stage="total"}} {requests}',
        f'kvcar_decision_seconds_bucket{{le="+Inf",stage="total"}} {requests}',
        f'kvcar_decision_seconds_count{{stage="total"}} {requests}',
        f'kvcar_decision_seconds_sum{{stage="total"}} {requests / 100}',
        "# TYPE kvcar_stream_batches_total counter", f"kvcar_stream_batches_total {requests * 10}",
        "# TYPE process_open_fds gauge", f"process_open_fds {requests}",
    ]  # fmt: skip
    for name, value in gauges.items():
        lines += [f"# TYPE {name} gauge", f"{name} {value}"]
    return "\n".join(lines) + "\n"


def values(pages: Pages) -> dict[str, float]:
    text = render(pages.merged())[0].decode()
    return {
        sample.name + "".join(f" {key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counters_and_histograms_add_up_and_streams_do_not() -> None:
    pages = Pages()
    pages.put(0, page(3))
    pages.put(1, page(4))
    found = values(pages)
    assert found["kvcar_requests_total outcome=scored pool=q"] == 7
    assert found["kvcar_decision_seconds_bucket le=+Inf stage=total"] == 7
    assert found["kvcar_decision_seconds_sum stage=total"] == pytest.approx(0.07)
    assert found["kvcar_stream_batches_total"] == 40
    assert (found["process_open_fds worker=0"], found["process_open_fds worker=1"]) == (3, 4)


GAUGES = [  # name, of worker 0, of worker 1, of both
    ("kvcar_inflight_requests", 2, 3, 5),
    ("kvcar_stream_synchronized", 1, 0, 0),
    ("kvcar_stream_sequence", 8, 7, 7),
    ("kvcar_stream_event_age_seconds", 1, 2, 2),
    ("kvcar_tokenizer_loaded", 1, 0, 0),
    ("kvcar_tokenizer_segment_cache_bytes", 10, 20, 30),
    ("kvcar_hit_prediction_drift_ratio", -0.3, 0.2, -0.3),
    ("kvcar_config_last_reload_successful", 0, 1, 0),
    ("kvcar_instances", 4, 4, 4),
    ("kvcar_build_info", 1, 1, 1),
    ("somebody_elses", 1, 2, 2),
]


@pytest.mark.parametrize(("name", "one", "other", "both"), GAUGES)
def test_gauges_by_their_kind(name: str, one: float, other: float, both: float) -> None:
    pages = Pages()
    pages.put(0, page(1, **{name: one}))
    pages.put(1, page(1, **{name: other}))
    assert values(pages)[name] == both


def test_what_a_dead_worker_had_counted_stays() -> None:
    """A sum that falls would look like a reset: rate() would count everything again."""
    name = "kvcar_requests_total outcome=scored pool=q"
    pages = Pages()
    for _ in range(2):  # twice: what was kept is kept on
        pages.put(0, page(3, kvcar_inflight_requests=2))
        pages.put(1, page(40))
        before = values(pages)[name]
        pages.end(0)
        found = values(pages)
        assert found[name] == before
        assert "kvcar_inflight_requests" not in found, "requests in flight died with it"
        assert found["kvcar_stream_batches_total"] == 400
        pages.put(0, page(0))
        assert values(pages)[name] == before


def test_every_gauge_of_ours_has_a_rule_of_its_own() -> None:
    metrics = Metrics("test")
    add_families(metrics, [])
    add_transport(metrics, EventTransport())
    add_reload(metrics, lambda: None)
    for family in metrics.registry.collect():
        if family.type == "gauge":
            named = rule_of(family.name, "gauge") == rule_of(family.name, "counter")  # their defaults differ
            assert named, f"{family.name}: say in RULES of extproc/workers/families.py how it is merged"


def test_a_real_page_comes_through_unchanged() -> None:
    metrics = Metrics("test")
    metrics.requests.labels("q", "scored").inc(3)
    metrics.hit("q", "chosen", 50, 100)
    text = metrics.render()[0].decode()
    pages = Pages()
    pages.put(0, text)
    again = render([family for family in pages.merged() if family.name.startswith("kvcar_")])[0].decode()
    assert sorted(again.splitlines()) == sorted(line for line in text.splitlines() if "kvcar_" in line)
    openmetrics, kind = render(pages.merged(), "application/openmetrics-text")
    assert kind.startswith("application/openmetrics-text")
    assert openmetrics.endswith(b"# EOF\n")


def test_the_workers_themselves() -> None:
    text = render(worker_families([("0", "running", 0), ("1", "waiting", 2)]))[0].decode()
    assert 'kvcar_worker_up{worker="0"} 1.0' in text
    assert 'kvcar_worker_up{worker="1"} 0.0' in text
    assert 'kvcar_worker_restarts_total{worker="1"} 2.0' in text


def test_rules_are_all_reached() -> None:
    """A row behind a wider one would be dead."""
    for number, (pattern, _) in enumerate(RULES):
        example = pattern.replace("*", "x")
        assert next(row for row in RULES if rule_matches(row[0], example)) is RULES[number], pattern


def rule_matches(pattern: str, name: str) -> bool:
    return name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1]))


# -- what a worker that starts later is told

DRAIN, UNDRAIN, LEVEL, REGISTER, UNREGISTER = (
    "/instances/drain", "/instances/undrain", "/log-level", "/register", "/unregister",
)  # fmt: skip
REMEMBERED: list[tuple[list[tuple[str, Any]], list[tuple[str, Any]]]] = [
    ([(DRAIN, {"instance": "a"})], [(DRAIN, {"instance": "a"})]),
    ([(DRAIN, {"instance": "a"}), (UNDRAIN, {"instance": "a"})], []),
    ([(DRAIN, {"instance": "a"}), (UNDRAIN, {"instance": "b"})], [(DRAIN, {"instance": "a"})]),
    ([(LEVEL, {"level": "debug"}), (LEVEL, {"level": "error"})], [(LEVEL, {"level": "error"})]),
    ([("/streams/resync", {"instance": "a"}), ("/events", {"instance_id": "a"}), (DRAIN, None)], []),
    (
        [(REGISTER, {"instance_id": "a", "dp_rank": rank}) for rank in (0, 1)]
        + [(UNREGISTER, {"instance_id": "a", "dp_rank": 0})],
        [(REGISTER, {"instance_id": "a", "dp_rank": 1})],
    ),
    ([(REGISTER, {"instance_id": "a", "dp_rank": 1}), (UNREGISTER, {"instance_id": "a"})], []),
    ([(REGISTER, {"instance_id": "a"}), (UNREGISTER, {"instance_id": "b"})], [(REGISTER, {"instance_id": "a"})]),
]


@pytest.mark.parametrize(("done", "told"), REMEMBERED)
def test_memory(done: list[tuple[str, Any]], told: list[tuple[str, Any]]) -> None:
    memory = Memory()
    for path, fields in done:
        memory.note(path, "application/json", repr(fields).encode(), fields)
    assert list(memory) == [(path, "application/json", repr(fields).encode()) for path, fields in told]


# -- ports

MINIMAL = "pools: [{name: p, models: [m], tokenizer: t, instances: [{name: a, address: '10.0.0.1:1'}]}]\n"


@pytest.mark.parametrize(
    ("listen", "admin", "expected"),
    [
        ("127.0.0.1:9002", "127.0.0.1:9010", "127.0.0.1:9002 127.0.0.1:9003 127.0.0.1:9004"),
        ("[::1]:9002", "127.0.0.1:9003", "[::1]:9002 [::1]:9003 [::1]:9004"),
        ("127.0.0.1:0", "127.0.0.1:0", "127.0.0.1:0 127.0.0.1:0 127.0.0.1:0"),
        ("127.0.0.1:9002", "127.0.0.1:9003", "give admin.address another port"),
        ("0.0.0.0:9002", "127.0.0.1:9004", "give admin.address another port"),
        ("127.0.0.1:65534", "127.0.0.1:9003", "none over 65535"),
    ],
)
def test_addresses(listen: str, admin: str, expected: str) -> None:
    config = parse(f"listen: {{address: '{listen}', workers: 3}}\nadmin: {{address: '{admin}'}}\n{MINIMAL}")
    if " 1" in expected or " [" in expected:
        assert addresses(config) == tuple(expected.split())
    else:
        with pytest.raises(ConfigError, match=expected):
            addresses(config)


def test_one_worker_is_the_address_itself() -> None:
    assert addresses(parse(MINIMAL)) == ("127.0.0.1:9002",)
