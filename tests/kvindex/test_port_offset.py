"""Port rules of xLLM and of `tcp://*:port` patterns, static discovery and the fleet feed."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kvindex.discovery.base import FleetFeed
from kvindex.discovery.port_offset import assign_offsets, medium_endpoints, offset_endpoints, pattern_endpoints
from kvindex.discovery.static import StaticSource
from kvindex.errors import ConfigurationError
from kvindex.fleet import Fleet, Instance, StreamEndpoint


def test_xllm_example() -> None:
    """127.0.0.1:8000 with DP 2 -> 18000/18001, 38000/38001."""
    assert [(one.dp_rank, one.events, one.replay) for one in offset_endpoints("127.0.0.1:8000", 2)] == [
        (0, "tcp://127.0.0.1:18000", "tcp://127.0.0.1:38000"),
        (1, "tcp://127.0.0.1:18001", "tcp://127.0.0.1:38001"),
    ]


@pytest.mark.parametrize(
    ("address", "dp_size", "offsets", "expected"),
    [
        ("[2001:db8::1]:8000", 1, (10000, 30000), ("tcp://[2001:db8::1]:18000", "tcp://[2001:db8::1]:38000")),
        ("h:8000", 0, (10000, 30000), ("tcp://h:18000", "tcp://h:38000")),
        ("h:8000", 1, (1, None), ("tcp://h:8001", None)),
        ("h:35535", 1, (10000, 30000), ("tcp://h:45535", "tcp://h:65535")),
        ("h:35536", 1, (10000, 30000), "65536"),
        ("h:35535", 2, (10000, 30000), "rank 1"),
        ("h:8000", 1, (-8000, None), "1..65535"),
        ("nowhere", 1, (10000, 30000), "no port"),
    ],
)
def test_offsets(
    address: str, dp_size: int, offsets: tuple[int, int | None], expected: tuple[str, str | None] | str
) -> None:
    def compute() -> StreamEndpoint:
        return offset_endpoints(address, dp_size, event_offset=offsets[0], replay_offset=offsets[1])[0]

    if isinstance(expected, str):
        with pytest.raises(ConfigurationError, match=expected):
            compute()
    else:
        assert (compute().events, compute().replay) == expected


def instance(name: str, address: str, dp_size: int = 1) -> Instance:
    return Instance(name, address, dp_size=dp_size)


@pytest.mark.parametrize(
    ("fleet", "excluded"),
    [
        ([instance("a", "h:8000", 2), instance("b", "h:8002")], set()),
        ([instance("a", "h:8000", 2), instance("b", "h:8001"), instance("c", "h:9000")], {"a", "b"}),
        ([instance("a", "h:8000", 2), instance("b", "other:8001")], set()),
        ([instance("a", "h:28000"), instance("b", "h:8000")], {"a", "b"}),  # event port of a = replay port of b
        ([instance("a", "h:40000"), instance("b", "h:8000")], {"a"}),
        ([instance("a", "h:0"), instance("b", "h:8000")], {"a"}),
    ],
)
def test_clash_and_overflow_leave_the_concerned_out(
    fleet: list[Instance], excluded: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        result = assign_offsets(fleet, topic="xllm-kv")
    assert set(result.excluded) == excluded
    assert [one.name for one in result.instances] == [one.name for one in fleet if one.name not in excluded]
    assert all(len(one.events) == one.dp_size for one in result.instances)
    assert {record.args[0] for record in caplog.records} == excluded  # type: ignore[index]
    for one in result.instances:
        one.check()


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        ({"events": "tcp://*:5557"}, [("tcp://10.0.0.1:5557", None), ("tcp://10.0.0.1:5558", None)]),
        (
            {"events": "tcp://0.0.0.0:5557", "replay": "tcp://*:6667"},
            [("tcp://10.0.0.1:5557", "tcp://10.0.0.1:6667"), ("tcp://10.0.0.1:5558", "tcp://10.0.0.1:6668")],
        ),
        ({"events": "tcp://other:5557"}, [("tcp://other:5557", None), ("tcp://other:5558", None)]),
        ({"events": "tcp://*:5557", "bind": True}, [("tcp://*:5557", None), ("tcp://*:5558", None)]),
        ({"events": "tcp://*:65535"}, "over 65535"),
        ({"events": "ipc:///kv"}, "ipc"),
        ({"events": "tcp://*"}, "events endpoint"),
    ],
)
def test_pattern(keywords: dict[str, str], expected: list[tuple[str, str | None]] | str) -> None:
    def compute() -> tuple[StreamEndpoint, ...]:
        return pattern_endpoints("10.0.0.1", 2, **keywords)  # type: ignore[arg-type]

    if isinstance(expected, str):
        with pytest.raises(ConfigurationError, match=expected):
            compute()
    else:
        assert [(one.events, one.replay) for one in compute()] == expected


def test_pattern_on_ipv6_gets_brackets() -> None:
    assert pattern_endpoints("2001:db8::1", events="tcp://*:5557")[0].events == "tcp://[2001:db8::1]:5557"


@pytest.mark.parametrize(
    ("patterns", "rank", "expected"),
    [
        ({"npu_endpoint": "tcp://*:50090"}, 1, {"npu": "tcp://h:50091"}),
        ({"npu": "tcp://*:50090", "cpu": "tcp://*:50100"}, 0, {"npu": "tcp://h:50090", "cpu": "tcp://h:50100"}),
        ({"xpu": "tcp://*:1", "disk": "tcp://*:2"}, 0, {"npu": "tcp://h:1", "disk": "tcp://h:2"}),
        ({"npu_endpoint": "", "endpoint": "tcp://*:5557"}, 2, {"npu": "tcp://h:5559"}),
        ({"npu_endpoint": "tcp://*:1", "endpoint": "tcp://*:9"}, 0, {"npu": "tcp://h:1"}),
        ({"cpu_endpoint": "", "pool_endpoint": "tcp://p:1", "replay_endpoint": "tcp://*:6667"}, 0, {}),
        ({"tape": "tcp://*:1"}, 0, "tape"),
    ],
)
def test_motor_medium_endpoints(patterns: dict[str, str], rank: int, expected: dict[str, str] | str) -> None:
    if isinstance(expected, str):
        with pytest.raises(ConfigurationError, match=expected):
            medium_endpoints(patterns, "h", rank)
    else:
        assert medium_endpoints(patterns, "h", rank) == expected


async def test_static_source_tells_all_then_waits() -> None:
    fleet, ready = Fleet(), asyncio.Event()
    feed = FleetFeed(fleet, name="static", on_ready=ready.set)
    source = StaticSource([instance("a", "10.0.0.1:1"), instance("b", "10.0.0.2:1")])
    task = asyncio.create_task(source.run(feed))
    await asyncio.wait_for(ready.wait(), 5)
    assert list(fleet.snapshot()) == ["a", "b"]
    assert feed.is_ready
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_static_source_refuses_duplicates() -> None:
    with pytest.raises(ConfigurationError, match="twice"):
        StaticSource([instance("a", "10.0.0.1:1"), instance("a", "10.0.0.2:1")])


def test_sources_do_not_take_each_others_instances(caplog: pytest.LogCaptureFixture) -> None:
    fleet = Fleet()
    one, two = FleetFeed(fleet, name="one"), FleetFeed(fleet, name="two")
    with caplog.at_level(logging.CRITICAL):
        one.upsert(instance("a", "10.0.0.1:1"))
        two.upsert(instance("a", "10.0.0.9:1"))
        assert "another source" in two.refused["a"]
        two.remove("a")
        two.upsert(instance("bad", "10.0.0.9"))
    assert fleet.snapshot()["a"].address == "10.0.0.1:1"
    assert set(two.refused) == {"bad"}
    two.replace([instance("b", "10.0.0.2:1")])
    one.replace([])
    assert list(fleet.snapshot()) == ["b"]
    assert not two.refused
    one.problem("unreachable")
    assert one.error == "unreachable"
