"""xLLM's registry by tables: values, keys, ports, and the states of an instance whose key is gone. No etcd, no clock.

A story is words: `+a` a registers, `+a2` as another process, `-a` its key is deleted, `-a1` the delete names process 1,
`yes` / `no` answers to open questions, a number is seconds that pass. Outcome: each instance with its state.
"""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from kvindex.discovery.xllm_registry import PortRule, Question, Registry, key_range, namespace_prefix, parse
from kvindex.errors import ConfigurationError


def value(port: int = 8000, **changes: Any) -> bytes:
    fields = {
        "name": f"10.0.0.1:{port}",
        "rpc_address": f"10.0.0.1:{port + 1}",
        "type": 0,
        "incarnation_id": "i1",
        "register_ts_ms": 7,
        "dp_size": 1,
        "kv_split_size": 1,
        "backend_type": "xllm",
        "cluster_ids": [1],
        "addrs": ["10.0.0.1:1"],
        "ports": [1],
        "ttft_profiling_data": [[10, 1.5]],
        "tpot_profiling_data": [],
    }
    return json.dumps({key: item for key, item in (fields | changes).items() if item is not ...}).encode()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"name": "10.0.0.1:8000", "address": "10.0.0.1:8000", "role": "default", "dp_size": 1}),
        ({"type": 1}, {"role": "prefill"}),
        ({"type": 2}, {"role": "decode", "followed": False}),
        ({"type": 3}, {"role": "mix", "acting": "", "followed": True}),
        ({"type": 3, "current_type": 2}, {"role": "mix", "acting": "decode", "followed": False}),
        ({"type": 1, "current_type": 2}, {"role": "prefill", "acting": ""}),
        ({"dp_size": 4}, {"dp_size": 4}),
        ({"dp_size": 0}, {"dp_size": 1}),
        ({"dp_size": ...}, {"dp_size": 1}),
        ({"incarnation_id": ...}, {"incarnation": "registered 7"}),
        ({"incarnation_id": "", "register_ts_ms": 2**64 - 1}, {"incarnation": f"registered {2**64 - 1}"}),
        ({"incarnation_id": ..., "register_ts_ms": ...}, {"incarnation": ""}),
        ({"name": "[2001:db8::1]:8000"}, {"address": "[2001:db8::1]:8000"}),
        ({"something": "new"}, {"incarnation": "i1"}),
    ],
)
def test_values(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    instance = parse(value(**changes), pool="p", model="m").instance
    assert {key: getattr(instance, key) for key in expected} == expected
    assert (instance.pool, instance.model, instance.events) == ("p", "m", ())


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (b"", "no JSON"),
        (b"\xff{}", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "no JSON object"),
        (value(name=...), "name is missing"),
        (value(name=5), "name is 5"),
        (value(name="engine:8000"), "IP address"),
        (value(name="10.0.0.1"), "no port"),
        (value(name="0.0.0.0:8000"), "wildcard"),
        (value(rpc_address=...), "rpc_address is missing"),
        (value(type=...), "type is missing"),
        (value(type=4), "type is 4"),
        (value(type=True), "type is True"),
        (value(type="PREFILL"), "type is 'PREFILL'"),
        (value(dp_size=-1), "dp_size is -1"),
        (value(dp_size=10**6), "dp_size"),
        (value(incarnation_id=3), "incarnation_id is 3"),
        (value(register_ts_ms=2**64), "register_ts_ms"),
        (value(backend_type=None), "backend_type"),
    ],
)
def test_bad_values_name_the_field(given: bytes, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        parse(given)


@pytest.mark.parametrize(
    ("namespace", "prefix"), [("", ""), ("/", ""), ("///", ""), ("foo", "/foo/"), ("/a/b/", "/a/b/"), ("a/b", "/a/b/")]
)
def test_namespaces(namespace: str, prefix: str) -> None:
    assert namespace_prefix(namespace) == prefix
    start, end = key_range(namespace)
    for role in ("DEFAULT", "PREFILL", "DECODE", "MIX"):
        assert start <= f"{prefix}XLLM:{role}:10.0.0.1:8000".encode() < end
    for other in ("XLLM:CACHE:x", "XLLM:SERVICE:MASTER", "YLLM:DEFAULT:x"):
        assert not start <= f"{prefix}{other}".encode() < end


def key(port: int = 8000, role: str = "DEFAULT", prefix: str = "") -> bytes:
    return f"{prefix}XLLM:{role}:10.0.0.1:{port}".encode()


@pytest.mark.parametrize(
    "other",
    [
        b"XLLM:LOADMETRICS:10.0.0.1:8000",
        b"XLLM:SERVICE:MASTER",
        b"/foo/XLLM:DEFAULT:10.0.0.1:8000",
        b"XLLM:OTHER:10.0.0.1:8000",
    ],
)
def test_other_keys_are_ignored(other: bytes) -> None:
    registry = Registry()
    registry.put(other, b"\xff")
    assert (registry.version, registry.refused) == (0, {})
    assert registry.assignment().instances == ()


STORIES = [
    ("+a", "a active"),
    ("+a -a", "a active"),  # until it was asked
    ("+a -a yes", "a lease_lost"),
    ("+a -a no", "a active"),
    ("+a -a no .05", "a active"),
    ("+a -a no .1 no", "a suspect"),
    ("+a -a no .1 yes", "a lease_lost"),
    ("+a -a yes 1 yes 1 yes 1 yes 1 yes 60 yes", "a lease_lost"),
    ("+a -a yes 1 no 1 no .9", "a lease_lost"),
    ("+a -a yes 1 no 1 no 1 no", "a suspect"),
    ("+a -a yes 1 no .1 no 1 yes 1 no 1 no", "a lease_lost"),
    ("+a -a no .1 no 1 yes", "a lease_lost"),  # it answers again
    ("+a -a no .1 no 14.9 no", "a suspect"),
    ("+a -a no .1 no 15 no", ""),
    ("+a -a no .1 no 15 +a", "a active"),
    ("+a -a no .1 no +a", "a active"),  # registered again
    ("+a -a yes +a 60", "a active"),
    ("+a -a +a no no no", "a active"),  # answers to what was asked before count no more
    ("+a -a +a2 no .1 no", "a active"),
    ("+a +a2 -a1 no .1 no", "a active"),  # the delete is of the process before
    ("+a +a2 -a2 no .1 no", "a suspect"),
    ("+a +b -a no .1 no", "a suspect b active"),
    ("+a -a -a no .1 no", "a suspect"),
]
PORTS = {"a": 8000, "b": 9000}


@pytest.mark.parametrize(("words", "expected"), STORIES, ids=[words for words, _ in STORIES])
def test_life_of_a_registration(words: str, expected: str) -> None:
    registry, now, open_questions = Registry(), 100.0, list[Question]()
    for word in words.split():
        if word[0] == "+":
            registry.put(key(PORTS[word[1]]), value(PORTS[word[1]], incarnation_id=f"i{word[2:] or 1}"))
        elif word[0] == "-":
            previous = value(PORTS[word[1]], incarnation_id=f"i{word[2:]}") if word[2:] else None
            registry.deleted(key(PORTS[word[1]]), previous, now)
            open_questions += registry.due(now)
        elif word in ("yes", "no"):
            asked, open_questions = open_questions, []
            for question in asked:
                (registry.answered if word == "yes" else registry.silent)(question, now)
            open_questions += registry.due(now)
        else:
            now += float(word)
            open_questions += registry.due(now)
    names = {f"10.0.0.1:{port}": name for name, port in PORTS.items()}
    states = {names[one.name]: one.state.value for one in registry.assignment().instances}
    assert " ".join(f"{name} {state}" for name, state in sorted(states.items())) == expected


def test_questions_come_when_they_are_due() -> None:
    registry = Registry()
    registry.put(key(), value())
    assert registry.next_due() is None
    registry.deleted(key(), None, 100.0)
    assert registry.next_due() == 100.0
    (question,) = registry.due(100.0)
    assert question == ("10.0.0.1:8000", "10.0.0.1:8000", "i1")
    assert registry.due(100.0) == [], "one question at a time"
    assert registry.next_due() is None
    registry.silent(question, 101.0)
    assert registry.next_due() == 101.1
    (question,) = registry.due(101.1)
    registry.silent(question, 102.0)
    assert registry.next_due() == 103.0
    registry.due(103.0)
    assert registry.next_due() == 117.0, "15 s after it became suspect"
    registry.forget_questions()
    assert len(registry.due(104.0)) == 1, "whoever asked before has ended"


# -- what the fleet sees


def events(registry: Registry) -> dict[str, list[str]]:
    return {one.name.partition(":")[2]: [stream.events for stream in one.events] for one in registry.assignment()[0]}


def test_ports_by_the_rule() -> None:
    registry = Registry(ports=PortRule(10000, 30000, "xllm-kv"), pool="p", dialect="xllm")
    registry.put(key(), value(dp_size=2))
    (instance,) = registry.assignment().instances
    assert [(one.events, one.replay, one.topic, one.dialect) for one in instance.events] == [
        ("tcp://10.0.0.1:18000", "tcp://10.0.0.1:38000", "xllm-kv", "xllm"),
        ("tcp://10.0.0.1:18001", "tcp://10.0.0.1:38001", "xllm-kv", "xllm"),
    ]


def test_clash_and_overflow_are_left_out_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    with caplog.at_level(logging.ERROR):
        registry.put(key(8000), value(8000, dp_size=2))
        registry.put(key(8001), value(8001))
        registry.put(key(40000), value(40000))
        registry.put(key(9000), value(9000))
        for _ in range(3):
            assert set(events(registry)) == {"9000"}
    assert set(registry.assignment().excluded) == {"10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.1:40000"}
    assert len(caplog.records) == 3
    registry.put(key(8001, "DECODE"), value(8001, type=2))
    assert events(registry) == {"8000": ["tcp://10.0.0.1:18000", "tcp://10.0.0.1:18001"], "9000": ANY, "8001": []}


ANY = ["tcp://10.0.0.1:19000"]


def test_other_backends_have_no_events() -> None:
    registry = Registry()
    registry.put(key(), value(backend_type="vllm"))
    registry.put(key(9000), value(9000, backend_type=...))
    assert events(registry) == {"8000": [], "9000": ANY}


def test_a_suspect_instance_frees_its_ports() -> None:
    registry = Registry()
    registry.put(key(8000), value(8000, dp_size=2))
    registry.deleted(key(8000), None, 0.0)
    for now in (0.0, 1.0):
        for question in registry.due(now):
            registry.silent(question, now)
    registry.put(key(8001), value(8001))
    assert events(registry) == {"8000": [], "8001": ["tcp://10.0.0.1:18001"]}


@pytest.mark.parametrize("order", ["delete first", "delete last"])
def test_a_role_changes_with_its_key(order: str) -> None:
    """The same process moves from MIX to DECODE and back; the old key's end is not its end."""
    registry = Registry()
    registry.put(key(role="MIX"), value(type=3))
    assert registry.assignment().instances[0].followed
    for before, after, kind in (("MIX", "DECODE", 2), ("DECODE", "MIX", 3)):
        if order == "delete first":
            registry.deleted(key(role=before), None, 0.0)
        registry.put(key(role=after), value(type=kind))
        registry.deleted(key(role=before), value(type=0), 0.0)
        (instance,) = registry.assignment().instances
        assert (instance.role, instance.state.value) == (after.lower(), "active")
        assert registry.due(10.0) == []
    assert instance.followed


def test_a_list_replaces_what_was_known() -> None:
    registry = Registry()
    registry.listed([(key(8000), value(8000)), (key(9000), value(9000)), (key(9001), b"x")], 0.0)
    assert set(events(registry)) == {"8000", "9000"}
    assert list(registry.refused) == ["XLLM:DEFAULT:10.0.0.1:9001"]
    before = registry.version
    registry.listed([(key(8000), value(8000)), (key(9000), value(9000)), (key(9001), b"x")], 0.0)
    assert registry.version == before, "nothing is new"
    registry.listed([(key(9000), value(9000))], 1.0)
    assert [question.name for question in registry.due(1.0)] == ["10.0.0.1:8000"]
    assert registry.refused == {}


def test_a_bad_value_keeps_what_was_known(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    registry.put(key(), value())
    with caplog.at_level(logging.ERROR):
        registry.put(key(), b"oops")
        registry.put(key(), b"oops")
    assert set(events(registry)) == {"8000"}
    assert len(caplog.records) == 1
    registry.put(key(), value())
    assert registry.refused == {}


def test_a_key_that_names_another_instance() -> None:
    registry = Registry()
    registry.put(key(), value(8000))
    registry.put(key(), value(9000))
    assert set(events(registry)) == {"9000"}
