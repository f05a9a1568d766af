"""Each bound of a stream, gone over by one of two: that one says why, the other one goes on as if nothing had been."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest

from kvindex.dialects import DIALECTS, DialectOptions
from kvindex.hashing import content_keys, pack_tokens
from kvindex.index import PrefixIndex
from kvindex.sync import Recovery, StreamSync, SyncLimits

SIZE = 2


def stored(first: int, count: int, parent: int | None = None, medium: str = "GPU", group: int = 0) -> list[Any]:
    """Blocks `first`, `first`+1, ...: their hashes are their numbers, their tokens too."""
    blocks = range(first, first + count)
    tokens = [token for block in blocks for token in (block, block)]
    return ["BlockStored", list(blocks), parent, tokens, SIZE, None, medium, None, None, group, "full_attention"]


def copies(first: int, count: int, medium: str = "CPU", group: int = 0) -> list[Any]:
    return ["BlockStored", list(range(first, first + count)), None, [], 0, None, medium, None, None, group]


@dataclass
class Stream:
    """One engine's stream in an index that others share."""

    index: PrefixIndex
    name: str
    recovery: str = "none"
    limits: SyncLimits = field(default_factory=SyncLimits)
    bounds: dict[str, int] = field(default_factory=dict)
    sequence: int = -1

    def __post_init__(self) -> None:
        dialect = DIALECTS["vllm"](DialectOptions())
        self.view = self.index.open(walk=dialect.walk, name=self.name, **self.bounds)
        self.sync = StreamSync(
            view=self.view,
            dialect=dialect,
            recovery=Recovery(self.recovery),
            dp_rank=0,
            topic=b"t",
            limits=self.limits,
        )
        self.sync.connected(0.0)

    def send(self, *events: list[Any]) -> None:
        self.sequence += 1
        self.sync.live([b"t", self.sequence.to_bytes(8, "big"), msgpack.packb([1.0, list(events)])], 0.0)

    def hits(self, *blocks: int) -> int:
        keys = content_keys(pack_tokens([token for block in blocks for token in (block, block)]), SIZE)
        return sum(self.index.find(keys).get(self.view, (0, 0, 0)))


FULL = "over the bound max_blocks=4"
CASES = [
    ({"max_blocks": 4}, {}, [stored(10, 5)], ["stream greedy: 5 blocks known", FULL]),
    ({"max_blocks": 4}, {}, [stored(10, 3), copies(20, 2)], ["stream greedy: 5 blocks known", FULL]),
    ({"max_blocks": 4}, {}, [copies(20, 5)], ["5 blocks known (2 of them without a key)", FULL]),
    ({"max_unanchored": 2}, {}, [stored(10, 3, 9)], ["3 blocks wait for an unknown parent", "bound max_unanchored=2"]),
    ({"max_places": 2}, {}, [stored(10, 1), copies(10, 1), copies(10, 1, "disk")], ["tier DISK", "bound max_places=2"]),
    ({"max_places": 2}, {}, [copies(10, 1, group=number) for number in range(3)], ["group 1", "bound max_places=2"]),
    ({}, {"max_message_bytes": 200}, [stored(10, 200)], ["bytes are over max_message_bytes 200"]),
]


@pytest.mark.parametrize(("bounds", "limits", "events", "reason"), CASES)
def test_over_a_bound_of_the_stream(bounds: dict, limits: dict, events: list, reason: list[str]) -> None:
    index = PrefixIndex(block_size=SIZE)
    modest = Stream(index, "modest", limits=SyncLimits(**limits), bounds=bounds)
    greedy = Stream(index, "greedy", limits=SyncLimits(**limits), bounds=bounds)
    for stream in (modest, greedy):
        stream.send(stored(1, 2))
    assert (modest.hits(1, 2), greedy.hits(1, 2)) == (2, 2)
    greedy.send(*events)
    index.check()
    assert (modest.hits(1, 2), greedy.hits(1, 2)) == (2, 0)
    assert modest.sync.status.synchronized
    status = greedy.sync.status
    assert not status.synchronized
    assert status.known == 0, "what it held is given back"
    for part in reason:
        assert part in str(status.error)
    greedy.send(stored(1, 2))
    modest.send(stored(3, 1, 2))
    index.check()
    assert (modest.hits(1, 2, 3), greedy.hits(1, 2, 3)) == (3, 2), "and it starts anew"


def test_over_the_buffer() -> None:
    """While an attempt runs, frames are kept; over the bound they go, and that stream alone waits for another one."""
    index = PrefixIndex(block_size=SIZE)
    limits = SyncLimits(max_buffered_bytes=4_000)
    modest, greedy = (Stream(index, name, "history", limits) for name in ("modest", "greedy"))
    modest.send(stored(1, 2))
    for number in range(20):
        greedy.send(stored(10 * number, 10))
        assert greedy.sync.status.buffered_bytes <= 4_000
    assert "over max_buffered_bytes 4000" in str(greedy.sync.status.error)
    assert greedy.sync.status.state == "backoff"
    assert modest.sync.status.state == "fetch"
    assert modest.sync.status.buffered_bytes > 0
    index.check()


def test_endless_churn_of_one_stream_stays_within_its_bounds() -> None:
    """Whatever comes, a stream is at its bounds at most: it is emptied each time it goes over."""
    index = PrefixIndex(block_size=SIZE)
    greedy = Stream(index, "greedy", bounds={"max_blocks": 100, "max_unanchored": 20})
    shed = 0
    for number in range(400):
        first = 1_000 * number
        greedy.send(stored(first, 7), stored(first + 100, 2, first + 99), copies(first + 200, 3))
        assert greedy.view.known <= 100
        assert greedy.view.unanchored <= 20
        shed += not greedy.sync.status.synchronized
    assert shed > 20
    index.check()
