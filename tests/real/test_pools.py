"""A pool publisher, its member engines and a sender of pushed events over real sockets and the transport's thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from kvindex.directory import Directory
from kvindex.fleet import PUSHED, Instance, PoolPublisher, StreamEndpoint
from kvindex.hashing import content_keys, pack_tokens
from kvindex.sync import SyncLimits
from kvindex.transport import EventTransport, TransportOptions
from tests.real.publisher import BLOCK, Publisher, chain, removed, until

pytestmark = pytest.mark.real


@pytest.fixture
def transport() -> Iterator[EventTransport]:
    made = EventTransport(TransportOptions(reconnect_initial=0.02, reconnect_max=0.1)).start()
    yield made
    assert made.stop()


class Site:
    """Two engines and a master of the emulated kind: numbers from 1, no replay."""

    def __init__(self, transport: EventTransport) -> None:
        self.engines = [Publisher(), Publisher()]
        self.master = Publisher(replay=None, first=1)
        self.directory = Directory(transport, block_size=BLOCK, limits=SyncLimits(backoff_initial=0.05))
        pool = StreamEndpoint(0, self.master.endpoint, dialect="mooncake", medium="cpu")
        self.directory.set_publishers([PoolPublisher("master", pool)])
        self.instances = [
            Instance(f"e-{number}", "", events=(StreamEndpoint(0, one.endpoint, one.replay, dialect="vllm"),))
            for number, one in enumerate(self.engines)
        ]
        self.directory.update(self.instances)
        self.until(lambda: self.master.subscribers, "the master has its subscriber")
        self.until(lambda: all(one.subscribers for one in self.engines), "engines have theirs")

    def until(self, condition: Any, what: str) -> None:
        until(condition, *self.engines, self.master, what=what)

    def say(self, kind: str, *hashes: int) -> None:
        events = [
            {"event_id": one, "event_type": kind, "seq_hashes": [one], "medium": "cpu", "object_key": f"object-{one}"}
            for one in hashes
        ]
        self.master.publish_raw(msgpack.packb([int(time.time() * 1000), events, 0]))

    def hits(self, blocks: int) -> list[tuple[int, ...]]:
        match = self.directory.match(content_keys(pack_tokens(range(blocks * BLOCK)), BLOCK))
        return [tuple(match.minimum(one.name)) for one in self.instances]

    def close(self) -> None:
        self.directory.close()
        for one in (*self.engines, self.master):
            one.close()


def test_a_master_and_its_engines(transport: EventTransport) -> None:
    site = Site(transport)
    try:
        site.say("stored", 1, 2, 3)  # nobody has explained them yet
        site.engines[0].publish(chain(0, 3))
        site.engines[1].publish(chain(0, 1, prompt=5))
        site.until(lambda: site.hits(3) == [(3, 0, 0), (0, 3, 0)], "the pool's copies count for the other engine")
        site.engines[0].publish(removed([1, 2, 3]))
        site.until(lambda: site.hits(3) == [(0, 3, 0), (0, 3, 0)], "and for the first one once it evicts")
        site.say("removed", 3)
        site.until(lambda: site.hits(3) == [(0, 2, 0), (0, 2, 0)], "the pool evicts")

        site.master.publish_raw(b"\xc1", lose=True)  # a number is missing
        site.say("stored", 3)
        site.until(lambda: site.hits(3) == [(0, 0, 0), (0, 0, 0)], "a gap drops what the pool holds")
        site.say("stored", 1, 2)
        site.until(lambda: site.hits(3) == [(0, 3, 0), (0, 3, 0)], "explanations have outlived block and gap")

        connections = site.directory.pool_status()[0].link.connections
        site.master.drop_connections()
        site.until(lambda: site.hits(3) == [(0, 0, 0), (0, 0, 0)], "out of step: nothing counts")
        site.until(
            lambda: site.master.subscribers and site.directory.pool_status()[0].link.connections > connections,
            "connected again",
        )
        site.say("stored", 1)
        site.until(lambda: site.hits(3) == [(0, 1, 0), (0, 1, 0)], "and again in step")
    finally:
        site.close()


def test_pushes_from_several_threads(transport: EventTransport) -> None:
    """Each sender's events are taken over in its order; answers come from the transport's thread."""
    directory = Directory(transport, block_size=BLOCK)
    events = tuple(StreamEndpoint(rank, PUSHED) for rank in range(4))
    directory.update([Instance("p", "", dp_size=4, events=events)])
    answers: list[Any] = []

    def send(rank: int) -> None:
        for block in range(50):
            body = {"event_id": block, "dp_rank": rank, "event_type": "stored", "seq_hashes": [block + 1]}
            body |= {"parent_hash": block or None, "token_ids": list(range(block * BLOCK, (block + 1) * BLOCK))}
            done = directory.push({"instance_id": "p", "block_size": BLOCK, "events": [body]})
            answers.append(done.result(10))

    senders = [threading.Thread(target=send, args=(rank,)) for rank in range(4)]
    for one in senders:
        one.start()
    for one in senders:
        one.join(20)
    assert answers == [(1, ())] * 200
    match = directory.match(content_keys(pack_tokens(range(50 * BLOCK)), BLOCK))
    assert match.hits("p") == ((50, 0, 0),) * 4
    assert directory.push({"instance_id": "p", "events": [], "shutdown": True}).result(10) == (0, ())
    assert not directory.match(content_keys(pack_tokens(range(50 * BLOCK)), BLOCK))
    assert transport.sockets == 0
    directory.close()
    assert transport.flush()
    assert directory.index.blocks == 0
