"""Directory: pool publishers, streams per medium, and pushed events; from messages to matches."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from kvindex import exchange
from kvindex.directory import NO_BLOCKS, Directory
from kvindex.errors import ConfigurationError, DecodeError
from kvindex.fleet import PUSHED, Instance, PoolPublisher, StreamEndpoint, check_instances
from kvindex.pushes import PushResult
from tests.kvindex.test_directory import FakeDriver, engine, feed, keys

POOL = StreamEndpoint(0, "tcp://10.0.9.9:5560", dialect="mooncake", medium="cpu")
MASTER = PoolPublisher("master", POOL)


class Site:
    """Engines e-1 and e-2 and a Mooncake master that numbers its messages from 1."""

    def __init__(self, *publishers: PoolPublisher, instances: tuple[Instance, ...] | None = None) -> None:
        self.driver = FakeDriver()
        self.directory = Directory(self.driver, block_size=4)
        self.directory.set_publishers(publishers or (MASTER,))
        self.instances = instances or (engine("e-1"), engine("e-2"))
        self.directory.update(self.instances)
        self.next: dict[Any, int] = {}

    def say(self, *events: dict[str, Any], key: Any = ("master", 0, ""), skip: int = 0) -> None:
        stream = self.directory._pools[key]
        number = self.next.get(key, 1) + skip
        self.next[key] = number + 1
        assert stream.sync is not None
        stream.sync.live([b"", struct.pack(">Q", number), msgpack.packb([1700000000000, list(events), 7])], 1.0)

    def hits(self, blocks: int) -> dict[str, tuple[int, ...]]:
        self.directory.index.check()
        match = self.directory.match(keys(blocks))
        return {
            name: tuple(match.minimum(name)) for name in ("e-1", "e-2", "master") if match.minimum(name) != NO_BLOCKS
        }


def pooled(*hashes: int, kind: str = "stored", medium: str | None = "cpu") -> list[dict[str, Any]]:
    """As the master sends them: one object an event."""
    return [
        {"event_id": 1, "event_type": kind, "seq_hashes": [one], "medium": medium, "object_key": f"k{one}",
         "backend_id": "10.0.9.1", "tenant_id": "default", "parent_hash": None, "token_ids": None}
        for one in hashes
    ]  # fmt: skip


def test_a_publisher_counts_for_every_engine() -> None:
    site = Site()
    feed(site.directory, "e-1", 0, 3)
    assert site.hits(3) == {"e-1": (3, 0, 0)}
    site.say(*pooled(1, 2), *pooled(3, medium="disk"))
    feed(site.directory, "e-2", 0, 1)
    assert site.hits(3) == {"e-1": (3, 0, 0), "e-2": (1, 1, 1)}
    site.say(*pooled(1, 2))  # a refresh, no second copy
    site.say(*pooled(2, kind="removed"))
    assert site.hits(3) == {"e-1": (3, 0, 0), "e-2": (1, 0, 0)}
    assert site.directory.match(keys(3)).best == ("e-1", (3, 0, 0))


def test_nothing_of_an_engine_without_its_own_stream_or_of_a_pool_out_of_step() -> None:
    """D13: a rank that is not synchronized is zero. A gap drops what the pool holds, until it says so again."""
    site = Site()
    feed(site.directory, "e-1", 0, 2)
    site.say(*pooled(1, 2))
    assert site.hits(2) == {"e-1": (2, 0, 0)}  # e-2 has not said anything yet
    feed(site.directory, "e-2", 0, 1, first=5)
    assert site.hits(2)["e-2"] == (0, 2, 0)
    site.say(*pooled(2), skip=3)
    assert "e-2" not in site.hits(2)
    site.say(*pooled(1))
    assert site.hits(2)["e-2"] == (0, 2, 0)
    stream = site.directory._pools[("master", 0, "")]
    assert stream.sync is not None
    stream.sync.disconnected(2.0)
    assert "e-2" not in site.hits(2)


def test_members() -> None:
    site = Site(replace(MASTER, members=("e-1", "e-9")))
    for name in ("e-1", "e-2"):
        feed(site.directory, name, 0, 1)
    feed(site.directory, "e-2", 0, 1, first=1)  # explained by who is no member: of no use
    site.say(*pooled(1, 2))
    assert site.hits(2) == {"e-1": (1, 0, 0), "e-2": (2, 0, 0)}
    site.driver.taken()
    site.directory.set_publishers([MASTER])
    assert site.driver.taken() == [], "the stream goes on"
    assert site.hits(2)["e-1"] == (1, 1, 0)
    site.directory.set_publishers([replace(MASTER, members=("e-2",))])
    assert site.hits(2)["e-1"] == (1, 0, 0)


def test_identity() -> None:
    """An engine that restarts takes its own blocks along, not the pool's. Another endpoint is another pool."""
    site = Site()
    feed(site.directory, "e-1", 0, 2)
    site.say(*pooled(1, 2))
    old = site.instances[0]
    site.directory.update([replace(old, incarnation="new"), site.instances[1], engine("e-3")])
    assert site.hits(2) == {}
    feed(site.directory, "e-1", 0, 1, first=7)
    assert site.hits(2) == {"e-1": (0, 2, 0)}
    feed(site.directory, "e-3", 0, 1, first=7)
    assert tuple(site.directory.match(keys(2)).minimum("e-3")) == (0, 2, 0)
    site.driver.taken()
    site.directory.set_publishers([PoolPublisher("master", replace(POOL, events="tcp://10.0.9.9:5561"))])
    assert site.driver.taken() == ["unfollow pool master", "follow pool master"]
    assert site.hits(2) == {}
    site.directory.close()
    assert site.directory.index.blocks == 0
    site.directory.index.check()


def test_sources_of_publishers_do_not_disturb_each_other() -> None:
    site = Site()
    other = PoolPublisher("other", replace(POOL, events="tcp://10.0.9.8:5560"))
    site.directory.set_publishers([other], source="registrations")
    assert [report.instance for report in site.directory.pool_status()] == ["master", "other"]
    with pytest.raises(ConfigurationError, match="'master' is listed twice"):
        site.directory.set_publishers([MASTER], source="registrations")
    with pytest.raises(ConfigurationError, match=r"both have 'tcp://10\.0\.9\.9:5560'"):
        site.directory.set_publishers([replace(other, endpoint=POOL)], source="registrations")
    site.directory.set_publishers([])
    assert [report.instance for report in site.directory.pool_status()] == ["other"]


BAD_PUBLISHERS = {
    "name": (PoolPublisher("", POOL), "needs a name"),
    "medium": (PoolPublisher("p", replace(POOL, medium="gpu")), "'gpu' is none of cpu, disk"),
    "no medium": (PoolPublisher("p", replace(POOL, medium="")), "none of cpu, disk"),
    "snapshot": (PoolPublisher("p", replace(POOL, recovery="snapshot", replay="tcp://10.0.0.1:1")), "no snapshot"),
    "pushed": (PoolPublisher("p", replace(POOL, events=PUSHED)), "cannot be pushed"),
    "endpoint": (PoolPublisher("p", replace(POOL, events="tcp://*:1")), "what the engine binds"),
}


@pytest.mark.parametrize("name", BAD_PUBLISHERS)
def test_bad_publishers(name: str) -> None:
    publisher, words = BAD_PUBLISHERS[name]
    with pytest.raises(ConfigurationError, match=words):
        publisher.check()


def test_an_endpoint_that_a_publisher_has_is_no_engines() -> None:
    site = Site(PoolPublisher("master", replace(POOL, events="tcp://10.0.0.2:5557")))
    errors = {report.instance: report.error for report in site.directory.status() if report.state == "skipped"}
    assert errors == {"e-2": "endpoint tcp://10.0.0.2:5557 is also claimed by publisher master"}


def test_engines_that_connect_need_a_port_each() -> None:
    events = (StreamEndpoint(0, "tcp://*:5557", topic="kv@a", bind=True),)
    both = [engine("e-1", events=events), engine("e-2", events=(replace(events[0], topic="kv@b"),))]
    with pytest.raises(ConfigurationError, match="bind a port for each"):
        check_instances(both)
    site = Site(instances=tuple(both))
    assert all("bind a port for each" in str(report.error) for report in site.directory.status())


def media(name: str = "e-1", **more: Any) -> Instance:
    """A YuanRong engine: two ranks, each with a stream of its own, one of its host memory, one of its disk."""
    events = tuple(
        StreamEndpoint(rank, f"tcp://10.0.0.1:{port + rank}", medium=medium, dialect="auto")
        for rank in (0, 1)
        for medium, port in (("", 5557), ("cpu", 5657), ("disk", 5757))
    )
    return Instance(name, "10.0.0.1:8000", dp_size=2, events=events, **more)


def test_streams_per_medium() -> None:
    """Several streams of one rank: one match. What one rank's store holds is not the other's."""
    instance = media()
    instance.check()
    site = Site(instances=(instance, engine("e-2")))
    directory = site.directory
    directory.set_publishers([])
    for rank in (0, 1):
        feed(directory, "e-1", rank, 1)
    feed(directory, "e-2", 0, 3)
    feed(directory, "e-1", 0, 2, first=1)
    feed(directory, "e-1", 0, 1, first=9)
    key = ("e-1", 0, "cpu")
    event = ["BlockRemoved", [2, 3]]
    stream = directory._streams[("e-1", 0)]
    assert stream.sync is not None
    stream.sync.live([b"", struct.pack(">Q", 3), msgpack.packb([0.0, [event], 0])], 1.0)
    assert directory.match(keys(3)).hits("e-1") == ((1, 0, 0), (1, 0, 0))
    vllm = {"type": "BlockStored", "block_hashes": [2], "token_ids": [], "block_size": 0, "parent_block_hash": None}
    site.next[key] = 0
    cpu = directory._pools[key].sync
    assert cpu is not None
    cpu.live([b"", struct.pack(">Q", 0), msgpack.packb([0.0, [vllm], 0])], 1.0)  # the port's medium
    disk = directory._pools[("e-1", 0, "disk")].sync
    assert disk is not None
    disk.live([b"", struct.pack(">Q", 0), msgpack.packb([0.0, [{"event_type": "stored", "seq_hashes": [3]}], 0])], 1.0)
    assert directory.match(keys(3)).hits("e-1") == ((1, 1, 1), (1, 0, 0))
    assert [(one.instance, one.dp_rank) for one in directory.pool_status()] == [
        ("e-1:cpu", 0), ("e-1:cpu", 1), ("e-1:disk", 0), ("e-1:disk", 1)]  # fmt: skip
    assert [(one.instance, one.dp_rank) for one in directory.status()] == [("e-1", 0), ("e-1", 1), ("e-2", 0)]
    assert directory.rebuild("e-1", 0) == 3


def test_an_instance_has_one_stream_a_rank_and_medium() -> None:
    one = media()
    with pytest.raises(ConfigurationError, match="two streams of rank 0, medium cpu"):
        replace(one, events=(*one.events, replace(one.events[1], events="tcp://10.0.0.1:1"))).check()


# -- pushed


class Pushing:
    def __init__(self, ranks: int = 2) -> None:
        events = tuple(StreamEndpoint(rank, PUSHED, dialect="mooncake") for rank in range(ranks))
        instance = Instance("e-1", "10.0.0.1:8000", dp_size=ranks, events=events)
        instance.check()
        self.directory = Directory(FakeDriver(), block_size=4)
        self.directory.update([instance, engine("e-2")])

    def push(self, *events: Any, **more: Any) -> PushResult:
        body = {"instance_id": "e-1", "block_size": 4, "events": list(events), **more}
        done = self.directory.push(json.loads(json.dumps(body)))
        return done.result(0)

    def hits(self, blocks: int = 3) -> tuple[tuple[int, ...], ...]:
        self.directory.index.check()
        return tuple(map(tuple, self.directory.match(keys(blocks)).hits("e-1")))


def stored(number: int, blocks: int, first: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "event_id": number,
        "event_type": "stored",
        "seq_hashes": [1 + first + block for block in range(blocks)],
        "parent_hash": first or None,
        "token_ids": list(range(first * 4, (first + blocks) * 4)),
        **more,
    }


def test_pushed_events_reach_matches() -> None:
    site = Pushing()
    assert site.push(stored(1, 2), stored(2, 1, 2, medium="cpu"), stored(1, 3, dp_rank=1)) == (3, ())
    assert site.hits() == ((2, 1, 0), (3, 0, 0))
    assert site.push({"event_id": 3, "type": "removed", "block_hashes": [2]}) == (1, ())
    assert site.hits() == ((1, 0, 0), (3, 0, 0))
    report = site.directory.status()[0]
    assert (report.state, report.synchronized, report.complete, report.sequence) == ("live", True, False, 3)


def test_repeated_and_restarted_senders() -> None:
    site = Pushing(1)
    site.push(stored(1, 2), stored(2, 1, 2))
    assert site.push(stored(2, 1, 2), stored(1, 2)) == (2, ())
    assert site.push({"event_id": 3, "type": "removed", "block_hashes": [3]}) == (1, ())
    assert site.hits() == ((2, 0, 0),), "a repetition added no copy"
    assert site.push(stored(1, 1)) == (1, ())
    assert site.hits() == ((1, 0, 0),), "the same number with another event: a new sender"
    status = site.directory.status()[0].status
    assert status is not None
    assert (status.duplicates, status.restarts) == (2, 1)


REFUSED = {
    # what is pushed after three good blocks -> words of the error, blocks left
    "no type": ({"event_id": 9, "block_hashes": [1]}, "event 0 (event_id 9): malformed", 3),
    "bad hashes": ({"event_id": 9, "type": "stored", "block_hashes": [1.5]}, "malformed", 3),
    "a removal that says not what": ({"event_id": 9, "type": "removed"}, "all blocks of the rank are dropped", 0),
    "an unknown object": (
        {"event_id": 9, "type": "removed", "object_key": "o"},
        "not announced; all blocks of the rank are dropped",
        0,
    ),
    "a text without end": (
        {"event_id": 9, "type": "stored", "block_hashes": ["0x" + "f" * 6000]},
        "6002 characters",
        3,
    ),
    "block size": ({**stored(9, 1, 7), "block_size": 2, "token_ids": [1, 2]}, "block_size: 2, configured is 4", 3),
    "medium": (stored(9, 1, 7, medium="tape"), "unknown medium", 3),
    "rank": (stored(9, 1, 7, dp_rank=5), "rank 5 is not registered", 3),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """The answer tells; what is beside it is taken over."""
    event, words, left = REFUSED[name]
    site = Pushing(1)
    site.push(stored(1, 3))
    applied, errors = site.push(event, stored(10, 1, 3))
    assert applied == 1
    assert len(errors) == 1
    assert words in errors[0]
    assert site.hits(3) == ((left, 0, 0),)
    assert site.directory.index._views[0].knows(4)


def test_shutdown_and_restart() -> None:
    site = Pushing()
    assert site.push(stored(1, 3), stored(1, 3, dp_rank=1), shutdown=True) == (2, ())
    assert site.hits() == ((0, 0, 0), (0, 0, 0))
    assert site.directory.index.blocks == 0
    assert site.push(stored(1, 1)) == (1, ())
    assert site.hits() == ((1, 0, 0), (0, 0, 0))
    assert site.directory.rebuild("e-1") == 2
    assert site.hits() == ((0, 0, 0), (0, 0, 0))


def test_who_may_push() -> None:
    site = Pushing()
    applied, (error,) = site.push(stored(1, 1), instance_id="e-2")
    assert applied == 0
    assert "'e-2' takes no pushed events" in error
    with pytest.raises(DecodeError):
        site.directory.push({"events": []}).result(0)


def test_a_push_waits_for_the_driver() -> None:
    driver = FakeDriver(opening=False)
    done: Future[PushResult] = Directory(driver).push({"instance_id": "e-1"})
    assert not done.done()


def test_a_push_that_nobody_waits_for_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time-out cancels the future; the driver's thread must not stumble over it."""
    site = Pushing(1)
    posted: list[Callable[[], None]] = []
    monkeypatch.setattr(site.directory._driver, "post", posted.append)
    done = site.directory.push({"instance_id": "e-1", "block_size": 4, "events": [stored(1, 2)]})
    asked = exchange.begin(site.directory, "e-2", 0)
    assert done.cancel()
    assert asked.cancel()
    for work in posted:
        work()
    assert site.hits() == ((0, 0, 0),)


def test_ranks_that_are_published_while_an_update_is_at_work() -> None:
    site = Pushing(2)
    streams = [site.directory._streams["e-1", rank] for rank in range(2)]
    for first, second in ((1, 2), (2, 1)):
        streams[0].instance = replace(streams[0].instance, dp_size=first)
        streams[1].instance = replace(streams[1].instance, dp_size=second)
        site.directory.publish()
        assert len(site.directory.match(keys(1)).hits("e-1")) == 2


def test_pushed_instances_are_members_of_pools() -> None:
    site = Pushing(1)
    site.directory.set_publishers([MASTER])
    site.push(stored(1, 1))
    feed(site.directory, "e-2", 0, 2)
    pool = site.directory._pools[("master", 0, "")].sync
    assert pool is not None
    pool.live([b"", struct.pack(">Q", 1), msgpack.packb([1, pooled(1, 2), 0])], 1.0)  # type: ignore[union-attr]
    assert site.hits(2) == ((1, 1, 0),)
