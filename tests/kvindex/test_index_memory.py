"""Memory under churn, and how much is done between two calls of `pace`.

Counted: times would only say how busy the machine is.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kvindex.content import Content
from kvindex.events import AllBlocksCleared, BlockRemoved, BlockStored, Tier
from kvindex.index import PrefixIndex, StreamView, Walk
from tests.kvindex.index_model import copied

SIZE = 4
LARGEST_DICT = 8_192
"""A resize or a drop of such a dict takes 0.3 ms."""


def dicts(index: PrefixIndex) -> Iterator[dict[Any, Any]]:
    """Every dict that grows with the blocks."""
    yield index._rows._interned
    yield from index._rows.heads
    contents = [view._content for view in index._views]
    contents += [view._shadow._content for view in index._views if view._shadow is not None]
    for content in contents:
        yield from content.shards
        yield from content.odd
        yield from content._shared.parts
        yield from content.unanchored.blocks.parts
        yield from content.unanchored._children.parts
        for _, children in content.unanchored._children.items():
            if not isinstance(children, (int, bytes, dict)):
                yield from children.parts
            elif isinstance(children, dict):
                yield children


def footprint(index: PrefixIndex) -> int:
    """Bytes of the containers, without the objects in them."""
    rows = index._rows
    columns: list[Any] = [rows.keys, rows.masks, rows.after, rows.free, *rows.spare]
    return sum(map(sys.getsizeof, [*columns, *dicts(index)]))


def held(index: PrefixIndex, contents: list[Content]) -> int:
    """Entries of all dicts, and rows in use."""
    entries = index.blocks + sum(map(len, index._rows.heads))
    for content in contents:
        entries += sum(map(len, content.shards)) + sum(map(len, content.odd))
        for parts in (content._shared, content.unanchored.blocks, content.unanchored._children):
            entries += sum(map(len, parts.parts))
    return entries


def blocks(rng: random.Random, count: int, parent: int | None = None, tier: Tier = Tier.DEVICE) -> BlockStored:
    """A chain of new blocks; 48 bits, for the low ones must be random."""
    return BlockStored([rng.getrandbits(48) for _ in range(count)], parent, rng.randbytes(4 * SIZE * count), SIZE, tier)


def fill(view: StreamView, rng: random.Random, count: int) -> list[BlockStored]:
    """All that a stream can hold, `count` of each: chains, single first blocks, copies, one content under two hashes,
    blocks that wait, many of them for one parent, and remembered ones."""
    events = [blocks(rng, 64) for _ in range(count // 64)]
    singles = [blocks(rng, 1) for _ in range(count)]
    again = [event._replace(hashes=[rng.getrandbits(48) for _ in event.hashes]) for event in events]
    waiting = [blocks(rng, 64, rng.getrandbits(48)) for _ in range(count // 64)]
    siblings = [blocks(rng, 1, 7) for _ in range(count)]
    told = [*events, *singles, *again, *waiting, *siblings]
    told += [copied(event.hashes) for event in (*events, *waiting)]
    told += [copied([rng.getrandbits(48) for _ in range(64)]) for _ in range(count // 64)]
    for event in told:
        view.apply(event)
    return told


@pytest.mark.parametrize("what", ["fill", "clear", "cleared device", "close", "swap", "remove", "anchor"])
def test_little_is_done_between_two_paces(what: str) -> None:
    """No dict is large, and at most 1,100 entries come or go between two calls of `pace` (1,024 are dropped whole)."""
    rng = random.Random(5)
    most = last = calls = 0
    contents: list[Content] = []

    def pace() -> None:
        nonlocal most, last, calls
        if contents:
            now = held(index, contents)
            most, last, calls = max(most, abs(now - last)), now, calls + 1

    index = PrefixIndex(block_size=SIZE, pace=pace)
    view = index.open(walk=Walk.CASCADE)
    view.visible = True
    told = fill(view, rng, 3_200)
    assert max(map(len, dicts(index))) <= LARGEST_DICT
    shadow = view.shadow()
    shadow.apply(blocks(rng, 100))
    contents += [view._content, shadow._content]
    last = held(index, contents)
    if what == "fill":
        for event in told:
            shadow.apply(event)
            pace()
    elif what == "clear":
        view.clear()
    elif what == "cleared device":
        view.apply(AllBlocksCleared())
    elif what == "close":
        view.close()
    elif what == "swap":
        view.swap(shadow)
    elif what == "remove":
        view.apply(BlockRemoved([hash_ for event in told for hash_ in event.hashes][::-1]))
    else:
        view.apply(BlockStored([7], None, rng.randbytes(4 * SIZE), SIZE))
    pace()
    assert calls > 40
    assert most <= 1_100


CHURN = 300_000


def churn(index: PrefixIndex, views: list[StreamView], rng: random.Random, operations: int) -> int:
    """Store and evict chains below one shared prefix, leaves first or parents first, with host copies, children that
    come before their parents or whose parents never come, and removals of what is not there: how many blocks."""
    done = 0
    prefix = blocks(random.Random(1), 8)
    for view in views:
        if not view.known:
            view.apply(prefix)
    while done < operations:
        for view in views:
            chain = blocks(rng, 64, prefix.hashes[-1])
            orphan = blocks(rng, 8, rng.getrandbits(48))
            late = blocks(rng, 8, chain.hashes[-1])
            for event in (late, chain, orphan, copied(chain.hashes[:16]), copied([rng.getrandbits(48)])):
                view.apply(event)
                done += len(event.hashes)
            unknown = BlockRemoved([rng.getrandbits(48)], Tier.HOST)
            order = chain.hashes if rng.random() < 0.5 else chain.hashes[::-1]
            remembered = event.hashes
            for gone in (
                BlockRemoved([*order, *late.hashes, *orphan.hashes]),
                BlockRemoved([*chain.hashes[:16], *remembered], Tier.HOST),
                unknown,
            ):
                view.apply(gone)
                done += len(gone.hashes)
            assert view.known == len(prefix.hashes)
    return done


def test_churn_below_a_shared_prefix_is_flat() -> None:
    index = PrefixIndex(block_size=SIZE)
    views = [index.open(walk=Walk.CASCADE, name=str(number)) for number in range(3)]
    rng = random.Random(2)
    sizes = []
    for _ in range(8):
        churn(index, views, rng, CHURN // 8)
        assert held(index, [view._content for view in views]) == 8 + 1 + 3 * 8, "rows, one first block, known hashes"
        sizes.append(footprint(index))
    assert max(sizes[4:]) <= max(sizes[:4])
    index.check()


def test_everything_removed_is_everything_given_back() -> None:
    """By events alone, nothing cleared. What stays are the columns: 28 bytes for each row of the peak."""
    index = PrefixIndex(block_size=SIZE)
    view = index.open(walk=Walk.CASCADE)
    empty = footprint(index)
    told = fill(view, random.Random(3), 6_400)
    for tier in Tier:
        for _ in range(2):
            for event in told:
                view.apply(BlockRemoved(event.hashes, tier))
    index.check()
    assert (view.known, view.unanchored, view.remembered, index.blocks) == (0, 0, 0, 0)
    assert footprint(index) - empty < 32 * len(index._rows.keys) + 256 * 1_024


RSS = """
import gc, os, random, sys
from kvindex.events import BlockRemoved
from kvindex.index import PrefixIndex, Walk
from tests.kvindex.test_index_memory import blocks, churn

def rss():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

rng = random.Random(4)
index = PrefixIndex(block_size=4)
views = [index.open(walk=Walk.CASCADE) for _ in range(2)]
churn(index, views, rng, 60_000)
warm = rss()
churn(index, views, rng, 200_000)
after = rss()
filled = []
for _ in range(100_000 // 64):
    event = blocks(rng, 64)
    views[0].apply(event)
    filled.append(event.hashes)
peak = rss()
for hashes in filled:
    views[0].apply(BlockRemoved(hashes[::-1]))
filled.clear()
del event, hashes
print(warm, after, peak, rss())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resident_memory_of_a_process() -> None:
    """Flat under churn, and given back to the system after a peak."""
    done = subprocess.run([sys.executable, "-c", RSS], check=True, capture_output=True, text=True, timeout=120)
    warm, churned, peak, back = map(int, done.stdout.split())
    assert churned - warm < 4 << 20
    assert peak - churned > 12 << 20, "it measures nothing"
    assert back - churned < 0.7 * (peak - churned), "what malloc keeps for the next dicts is the rest"
