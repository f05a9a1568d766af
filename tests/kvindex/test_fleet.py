"""Fleet: endpoint rules, identity rules, listeners. The rules are those of the xLLM service."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from kvindex.endpoints import HostPort, check_address, check_endpoint, needs_ipv6, parse_host_port
from kvindex.errors import ConfigurationError
from kvindex.fleet import (
    ChangeKind,
    Fleet,
    FleetChange,
    Instance,
    InstanceState,
    StreamEndpoint,
    check_instances,
    same_process,
)

PROCESS = Instance(
    "engine-1",
    "10.0.0.1:8000",
    incarnation="a",
    events=(StreamEndpoint(0, "tcp://10.0.0.1:5557", "tcp://10.0.0.1:6667"),),
)


@pytest.mark.parametrize(
    ("value", "bind", "words"),
    [
        ("tcp://10.0.0.1:5557", False, None),
        ("tcp://engine-0.pool.svc.cluster.local:5557", False, None),
        ("tcp://[2001:db8::1]:5557", False, None),
        ("tcp://[fe80::1%eth0]:5557", False, None),
        ("ipc:///run/kv.sock", False, None),
        ("tcp://*:5557", True, None),
        ("tcp://0.0.0.0:5557", True, None),
        ("tcp://[::]:5557", True, None),
        ("tcp://*:5557", False, "write the engine's host"),
        ("tcp://0.0.0.0:5557", False, "0.0.0.0"),
        ("tcp://[::]:5557", False, "write the engine's host"),
        ("tcp://2001:db8::1:5557", False, "brackets"),
        ("tcp://[10.0.0.1]:5557", False, "no IPv6"),
        ("tcp://10.0.0.300:5557", False, "no IPv4"),
        ("tcp://bad host:5557", False, "no host name"),
        ("tcp://host", False, "host:port"),
        ("tcp://host:0", False, "1..65535"),
        ("tcp://host:70000", False, "1..65535"),
        ("tcp://host:*", False, "1..65535"),
        ("tcp://host:５５５７", False, "1..65535"),
        ("host:5557", False, "tcp://host:port"),
        ("http://host:5557", False, "'http'"),
        ("inproc://kv", False, "'inproc'"),
        ("ipc://", False, "'ipc'"),
        ("", False, "tcp://host:port"),
        (None, False, "tcp://host:port"),
    ],
)
def test_endpoint(value: str, bind: bool, words: str | None) -> None:
    """Allowed, or an error that names the value and the remedy."""
    if words is None:
        assert check_endpoint(value, bind=bind) == value
        return
    with pytest.raises(ConfigurationError) as caught:
        check_endpoint(value, bind=bind, what="events")
    assert words in str(caught.value)
    assert repr(value) in str(caught.value)
    assert str(caught.value).startswith("events")


@pytest.mark.parametrize(
    ("value", "literal", "words"),
    [
        ("10.0.0.1:8000", True, None),
        ("[2001:db8::1]:8000", True, None),
        ("engine:8000", False, None),
        ("engine:8000", True, "IP address"),
        ("0.0.0.0:8000", False, "wildcard"),
        ("[::]:8000", False, "wildcard"),
        ("10.0.0.1", False, "port"),
        (8000, False, "host:port"),
    ],
)
def test_address(value: str, literal: bool, words: str | None) -> None:
    if words is None:
        assert str(check_address(value, literal=literal)) == value
    else:
        with pytest.raises(ConfigurationError, match=words):
            check_address(value, literal=literal)


def test_host_port_puts_ipv6_back_into_brackets() -> None:
    assert parse_host_port("[::1]:80") == HostPort("::1", 80)
    assert str(HostPort("::1", 80)) == "[::1]:80"


@pytest.mark.parametrize(
    ("endpoint", "family"),
    [
        ("tcp://10.0.0.1:1", False),
        ("tcp://[::1]:1", True),
        ("tcp://[fe80::1%eth0]:1", True),
        ("tcp://name:1", None),
        ("tcp://*:1", None),
        ("ipc:///x", False),
    ],
)
def test_address_family(endpoint: str, family: bool | None) -> None:
    assert needs_ipv6(endpoint) is family


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"events": ()}, None),
        ({"dp_size": 2, "events": (StreamEndpoint(0, "tcp://h:1"), StreamEndpoint(1, "tcp://h:2"))}, None),
        ({"events": (StreamEndpoint(0, "tcp://*:1", bind=True),)}, None),
        ({"name": ""}, "needs a name"),
        ({"address": "engine"}, "port"),
        ({"role": "router"}, "'router'"),
        ({"role": "mix", "acting": "default"}, "acting"),
        ({"dp_size": 0}, "dp_size 0"),
        ({"dp_size": True}, "dp_size True"),
        ({"dp_size": 10**6}, "dp_size"),
        ({"events": (StreamEndpoint(1, "tcp://h:1"),)}, "rank 1 with dp_size 1"),
        ({"dp_size": 2, "events": (StreamEndpoint(0, "tcp://h:1"), StreamEndpoint(0, "tcp://h:2"))}, "two streams"),
        ({"dp_size": 2, "events": (StreamEndpoint(0, "tcp://h:1"), StreamEndpoint(1, "tcp://h:1"))}, "used twice"),
        ({"events": (StreamEndpoint(-1, "tcp://h:1"),)}, "dp_rank -1"),
        ({"events": (StreamEndpoint(0, "tcp://h:1", "tcp://h:1"),)}, "two sockets"),
        ({"events": (StreamEndpoint(0, "tcp://h:1", "tcp://*:2"),)}, "replay endpoint 'tcp://[*]:2'"),
        ({"events": (StreamEndpoint(0, "tcp://h:1", recovery="all"),)}, "'all'"),
        ({"events": (StreamEndpoint(0, "tcp://h:1", recovery="history"),)}, "needs a replay"),
        ({"events": (StreamEndpoint(0, "tcp://h:1", recovery="none"),)}, None),
    ],
)
def test_instance_check(changes: dict[str, object], words: str | None) -> None:
    instance = replace(PROCESS, **changes)  # type: ignore[arg-type]
    if words is None:
        instance.check()
    else:
        with pytest.raises(ConfigurationError, match=words):
            instance.check()


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (Instance("engine-2", "10.0.0.2:8000"), None),
        (Instance("engine-1", "10.0.0.2:8000"), "twice"),
        (Instance("engine-2", "10.0.0.1:8000"), "'engine-1' and 'engine-2' both have '10.0.0.1:8000'"),
        (Instance("engine-2", "10.0.0.2:8000", events=(StreamEndpoint(0, "tcp://10.0.0.1:6667"),)), "both have 'tcp"),
    ],
)
def test_hand_written_list(second: Instance, words: str | None) -> None:
    if words is None:
        check_instances([PROCESS, second])
    else:
        with pytest.raises(ConfigurationError, match=words):
            check_instances([PROCESS, second])


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"state": InstanceState.LEASE_LOST}, True),
        ({"state": InstanceState.DRAINING, "model": "m"}, True),
        ({"role": "prefill"}, True),
        ({"incarnation": "b"}, False),
        ({"address": "10.0.0.1:8001"}, False),
        ({"dp_size": 2}, False),
        ({"events": ()}, False),
        ({"address": ""}, False),
    ],
)
def test_identity(changes: dict[str, object], kept: bool) -> None:
    """Same incarnation, address, dp_size and endpoints: a refresh. Anything else: another process."""
    other = replace(PROCESS, **changes)  # type: ignore[arg-type]
    assert same_process(PROCESS, other) is kept
    fleet = Fleet()
    fleet.upsert(PROCESS)
    change = fleet.upsert(other)
    assert change == FleetChange(ChangeKind.REFRESHED if kept else ChangeKind.REPLACED, PROCESS, other)


@pytest.mark.parametrize(
    ("role", "acting", "state", "followed"),
    [
        ("default", "", InstanceState.ACTIVE, True),
        ("prefill", "", InstanceState.ACTIVE, True),
        ("decode", "", InstanceState.ACTIVE, False),
        ("mix", "", InstanceState.ACTIVE, True),
        ("mix", "prefill", InstanceState.ACTIVE, True),
        ("mix", "decode", InstanceState.ACTIVE, False),
        ("default", "", InstanceState.LEASE_LOST, True),
        ("default", "", InstanceState.DRAINING, True),
        ("default", "", InstanceState.SUSPECT, False),
    ],
)
def test_followed(role: str, acting: str, state: InstanceState, followed: bool) -> None:
    assert replace(PROCESS, role=role, acting=acting, state=state).followed is followed


def test_snapshot_never_changes_and_shows_the_latest() -> None:
    fleet = Fleet()
    empty = fleet.snapshot()
    fleet.upsert(PROCESS)
    one = fleet.snapshot()
    fleet.remove("engine-1")
    assert (dict(empty), dict(one), dict(fleet.snapshot())) == ({}, {"engine-1": PROCESS}, {})
    with pytest.raises(TypeError):
        one["x"] = PROCESS  # type: ignore[index]


def test_same_again_is_no_change() -> None:
    fleet = Fleet()
    seen: list[FleetChange] = []
    fleet.listen(seen.append)
    fleet.upsert(PROCESS)
    assert fleet.upsert(replace(PROCESS)) is None
    assert len(seen) == 1


@pytest.mark.parametrize(("incarnation", "removed"), [(None, True), ("a", True), ("old", False), ("", False)])
def test_remove_of_another_incarnation_is_late_news(incarnation: str | None, removed: bool) -> None:
    fleet = Fleet()
    fleet.upsert(PROCESS)
    assert (fleet.remove("engine-1", incarnation=incarnation) is not None) is removed
    assert ("engine-1" in fleet.snapshot()) is not removed
    assert fleet.remove("nobody") is None


def test_who_has_taken_the_snapshot_hears_later_changes_alone() -> None:
    fleet = Fleet()
    fleet.upsert(PROCESS)
    seen: list[FleetChange] = []
    fleet.listen(seen.append, present=False)
    assert seen == []
    fleet.remove("engine-1")
    assert [change.kind for change in seen] == [ChangeKind.LEFT]


def test_listener_hears_present_then_later_until_stopped(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    fleet.upsert(PROCESS)

    def broken(_: FleetChange) -> None:
        raise RuntimeError("listener bug")

    seen: list[tuple[str, bool]] = []
    with caplog.at_level(logging.CRITICAL):
        fleet.listen(broken)
        stop = fleet.listen(lambda change: seen.append((change.kind, "engine-2" in fleet.snapshot())))
        fleet.upsert(replace(PROCESS, name="engine-2"))
        fleet.remove("engine-2")
        stop()
        fleet.remove("engine-1")
    assert seen == [("joined", False), ("joined", True), ("left", False)]


def test_bad_instance_is_refused_and_changes_nothing() -> None:
    fleet = Fleet()
    with pytest.raises(ConfigurationError, match="engine-9"):
        fleet.upsert(Instance("engine-9", "0.0.0.0:1"))
    assert not fleet.snapshot()
