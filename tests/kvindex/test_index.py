"""PrefixIndex: rules as tables, bounds, shadows, memory. See also test_index_random and test_index_threads."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import pytest

from kvindex import content as content_module
from kvindex import shards as shards_module
from kvindex.errors import CapacityExceeded, KVIndexError
from kvindex.events import AllBlocksCleared, BlockRemoved, BlockStored, Skipped, Tier
from kvindex.hashing import content_keys, pack_tokens
from kvindex.index import Outcome, PrefixIndex, StreamView, TierBlocks, Walk
from tests.kvindex.index_model import copied, plain, plain_keys, stored, walk_blocks

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "vectors.json").read_text())
LETTERS = {"D": Tier.DEVICE, "H": Tier.HOST, "S": Tier.DISK}
D, H, S = Tier


def opened(index: PrefixIndex | None = None, **options: object) -> tuple[PrefixIndex, StreamView]:
    index = index or PrefixIndex(block_size=4)
    view = index.open(**{"walk": Walk.CASCADE, "name": "engine/0"} | options)  # type: ignore[arg-type]
    view.visible = True
    return index, view


def found(index: PrefixIndex, view: StreamView, *blocks: int) -> tuple[int, int, int]:
    index.check()
    return tuple(index.find(plain_keys(*blocks)).get(view, TierBlocks(0, 0, 0)))  # type: ignore[return-value]


# ---- D12: walks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("walk", Walk)
@pytest.mark.parametrize("row", VECTORS["tier_walk"], ids=lambda row: "".join(row["residency"]) or "none")
def test_tier_walk(row: dict, walk: Walk) -> None:
    index, view = opened(walk=walk)
    other = opened(index, walk=Walk.CASCADE, name="other")[1]
    blocks = range(len(row["residency"]))
    other.apply(stored(blocks, blocks))  # holds all: the walk may not stop for it, nor count it
    for number in blocks:
        view.apply(stored([number], [number], number - 1 if number else None, group=9))
    for number, letters in enumerate(row["residency"]):
        for letter in letters.replace("-", ""):
            view.apply(copied([number], LETTERS[letter]))
    view.apply(BlockRemoved(list(blocks), D, 9))
    assert found(index, view, *blocks) == tuple(row[walk])
    assert found(index, other, *blocks) == (len(blocks), 0, 0)
    residency = [{LETTERS[letter] for letter in letters if letter != "-"} for letters in row["residency"]]
    assert walk_blocks(walk, residency) == tuple(row[walk]), "the model is wrong"


@pytest.mark.parametrize("row", VECTORS["mooncake_boundaries_bs16"])
def test_mooncake_boundaries(row: dict) -> None:
    index, view = opened(PrefixIndex(block_size=16))
    blocks = range(row["n"])
    view.apply(stored(blocks, blocks, group=1, size=16))
    for medium, tier in (("gpu", D), ("cpu", H), ("disk", S)):
        view.apply(copied(row[medium], tier))
    view.apply(BlockRemoved(list(blocks), D, 1))
    device, host, disk = index.find(plain_keys(*blocks, size=16))[view]
    tokens = {"gpu": device * 16, "cpu": (device + host) * 16, "disk": (device + host + disk) * 16}
    assert tokens == row["expect"]


def test_streams_are_answered_each_for_itself() -> None:
    """Many streams in different situations at once, in more slots than a machine word has bits."""
    index = PrefixIndex(block_size=4, max_streams=200)
    blocks = range(40)
    expected = {}
    for number in range(150):
        view = opened(index, walk=Walk.CASCADE if number % 2 else Walk.INTERLEAVED, name=str(number))[1]
        view.apply(stored(blocks, blocks, group=1))
        residency: list[set[Tier]] = []
        for block in blocks:
            tiers = {tier for tier in Tier if (number * 7 + block * (tier + 1)) % (number % 9 + 2) != 1}
            residency.append(tiers)
            for tier in tiers:
                view.apply(copied([block], tier))
        view.apply(BlockRemoved(list(blocks), D, 1))
        blocks_there = walk_blocks(view.walk, residency)
        if any(blocks_there):
            expected[view] = blocks_there
    index.check()
    assert len({tuple(blocks) for blocks in expected.values()}) > 15
    assert index.find(plain_keys(*blocks)) == expected


# ---- D2, D3: copies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", VECTORS["copies"], ids=lambda row: row["steps"])
@pytest.mark.parametrize("tier", Tier)
def test_copies(row: dict, tier: Tier) -> None:
    index, view = opened()
    for step, resident in zip(row["steps"], row["resident"], strict=True):
        view.apply(stored([7], [1], tier=tier) if step == "S" else BlockRemoved([7], tier))
        assert sum(found(index, view, 1)) == resident
        assert view.known == resident


COPIES = [
    # name, events, expected prefix of block 1
    ("a tier at a time", [stored([7], [1]), stored([7], [1], tier=H)], (1, 0, 0)),
    ("removed on the device, host stays", [stored([7], [1]), stored([7], [1], tier=H), BlockRemoved([7])], (0, 1, 0)),
    ("removed on the other tier only", [stored([7], [1]), BlockRemoved([7], H)], (1, 0, 0)),
    ("removed in the other group only", [stored([7], [1], group=1), BlockRemoved([7], D, 0)], (1, 0, 0)),
    ("any group's copy will do", [stored([7], [1], group=1), stored([7], [1], group=2), BlockRemoved([7], D, 1)],
     (1, 0, 0)),
    ("both groups gone", [stored([7], [1], group=1), stored([7], [1], group=2), BlockRemoved([7], D, 1),
                          BlockRemoved([7], D, 2)], (0, 0, 0)),
    ("twice in one event", [stored([7, 7], [1, 2]), BlockRemoved([7])], (1, 0, 0)),
    ("removed twice in one event", [stored([7], [1]), BlockRemoved([7, 7]), stored([7], [1])], (1, 0, 0)),
    ("unknown hashes are passed over", [stored([7], [1]), BlockRemoved([5, 7, 6]), stored([7], [1])], (1, 0, 0)),
    ("reused adds no copy", [stored([7], [1]), stored([7], [1], adds_copy=False), BlockRemoved([7])], (0, 0, 0)),
    ("reused and unknown", [stored([7], [1], adds_copy=False)], (0, 0, 0)),
    ("two hashes, one content", [stored([7], [1]), stored([8], [1]), BlockRemoved([7])], (1, 0, 0)),
    ("two hashes on two tiers", [stored([7], [1]), stored([8], [1], tier=H), BlockRemoved([7], H)], (1, 0, 0)),
    ("two hashes on two tiers, first gone", [stored([7], [1]), stored([8], [1], tier=H), BlockRemoved([7])], (0, 1, 0)),
    ("cleared device", [stored([7], [1]), copied([7], H), AllBlocksCleared()], (0, 1, 0)),
    ("cleared everywhere", [stored([7], [1]), copied([7], H), AllBlocksCleared(tuple(Tier))], (0, 0, 0)),
    ("cleared, counts too", [stored([7], [1]), stored([7], [1]), AllBlocksCleared(), stored([7], [1]),
                             BlockRemoved([7])], (0, 0, 0)),
    ("cleared host", [stored([7], [1]), copied([7], H), AllBlocksCleared((H,)), BlockRemoved([7])], (0, 0, 0)),
    ("cleared with hashes of one content", [stored([7], [1]), stored([8], [1]), copied([8], H), AllBlocksCleared()],
     (0, 1, 0)),
    ("cleared with hashes of one content, no more copies", [stored([7], [1]), stored([8], [1]), stored([5], [2]),
                                                            copied([5], H), AllBlocksCleared()], (0, 0, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("events", "expected"), [row[1:] for row in COPIES], ids=[row[0] for row in COPIES])
def test_copies_by_tier_group_and_hash(events: list, expected: tuple[int, int, int]) -> None:
    index, view = opened()
    for event in events:
        assert view.apply(event) is Outcome.OK
        index.check()
    assert found(index, view, 1) == expected


def test_copies_saturate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_module, "DIGIT_BITS", 2)
    monkeypatch.setattr(content_module, "_DIGIT", 3)
    index, view = opened()
    for _ in range(9):
        view.apply(stored([7], [1]))
        view.apply(copied([7], H))
    assert found(index, view, 1) == (1, 0, 0)
    for left in (1, 1, 0):
        view.apply(BlockRemoved([7]))
        assert found(index, view, 1) == (left, not left, 0)


# ---- keys and parents ------------------------------------------------------------------------------------------------

PARENTS = [
    # name, (event, outcome) in order, expected for blocks 1 2 3 4
    ("one event", [(stored([1, 2, 3, 4], [1, 2, 3, 4]), "ok")], (4, 0, 0)),
    ("one by one", [(stored([1], [1]), "ok"), (stored([2], [2], 1), "ok"), (stored([3], [3], 2), "ok")], (3, 0, 0)),
    ("unknown parent is no root", [(stored([2, 3], [2, 3], 1), "unknown_parent")], (0, 0, 0)),
    ("credited with its parent", [(stored([2, 3], [2, 3], 1), "unknown_parent"), (stored([1], [1]), "ok")], (3, 0, 0)),
    ("children first, in any order", [(stored([4], [4], 3), "unknown_parent"), (stored([2], [2], 1), "unknown_parent"),
                                      (stored([3], [3], 2), "unknown_parent"), (stored([1], [1]), "ok")], (4, 0, 0)),
    ("on its own tier", [(stored([2], [2], 1, H), "unknown_parent"), (stored([1], [1]), "ok")], (1, 1, 0)),
    ("gone before its parent came", [(stored([2], [2], 1), "unknown_parent"), (BlockRemoved([2]), "ok"),
                                     (stored([1], [1]), "ok")], (1, 0, 0)),
    ("middle gone before its parent came", [(stored([2, 3], [2, 3], 1), "unknown_parent"), (BlockRemoved([2]), "ok"),
                                            (stored([1], [1]), "ok"), (stored([2], [2], 1), "ok")], (3, 0, 0)),
    ("stored twice while un-anchored", [(stored([2], [2], 1), "unknown_parent"),
                                        (stored([2], [2], 1), "unknown_parent"), (stored([1], [1]), "ok"),
                                        (BlockRemoved([2]), "ok")], (2, 0, 0)),
    ("its own parent", [(stored([1], [1], 1), "unknown_parent")], (0, 0, 0)),
    ("its own parent, then rooted", [(stored([1], [1], 1), "unknown_parent"), (stored([1], [1]), "ok")], (1, 0, 0)),
    ("a circle", [(stored([1], [1], 2), "unknown_parent"), (stored([2], [2], 1), "unknown_parent")], (0, 0, 0)),
    ("a hole", [(stored([1, 2, 3, 4], [1, 2, 3, 4]), "ok"), (BlockRemoved([2]), "ok")], (1, 0, 0)),
    ("a hole filled", [(stored([1, 2, 3, 4], [1, 2, 3, 4]), "ok"), (BlockRemoved([2]), "ok"),
                       (stored([2], [2], 1), "ok")], (4, 0, 0)),
    ("child of a removed parent waits", [(stored([1, 2], [1, 2]), "ok"), (BlockRemoved([1]), "ok"),
                                         (stored([9], [3], 1), "unknown_parent"), (stored([3], [3], 2), "ok"),
                                         (stored([1], [1]), "ok")], (3, 0, 0)),
    ("known hash in the middle of an unknown chain", [(stored([1, 2], [1, 2]), "ok"), (BlockRemoved([1]), "ok"),
                                                      (stored([1, 2, 3], [1, 2, 3], 99), "unknown_parent"),
                                                      (stored([5], [1]), "ok")], (3, 0, 0)),
    ("after a clear the parent is unknown", [(stored([1, 2], [1, 2]), "ok"), (AllBlocksCleared(), "ok"),
                                             (stored([3], [3], 2), "unknown_parent")], (0, 0, 0)),
    ("after a clear, host copies are parents", [(stored([1, 2], [1, 2]), "ok"), (copied([1, 2]), "ok"),
                                                (AllBlocksCleared(), "ok"), (stored([3], [3], 2, H), "ok")], (0, 3, 0)),
    ("token-less, known", [(stored([1, 2], [1, 2]), "ok"), (copied([1, 2]), "ok"), (BlockRemoved([1, 2]), "ok")],
     (0, 2, 0)),
    ("token-less, unknown", [(copied([1]), "ok")], (0, 0, 0)),
    ("token-less, tokens later", [(copied([1, 2]), "ok"), (stored([1, 2], [1, 2]), "ok"), (BlockRemoved([1, 2]), "ok")],
     (0, 2, 0)),
    ("token-less, tokens later, reused", [(copied([1, 2]), "ok"), (stored([1, 2], [1, 2], adds_copy=False), "ok")],
     (0, 2, 0)),
    ("token-less, removed, tokens later", [(copied([1]), "ok"), (BlockRemoved([1], H), "ok"), (stored([1], [1]), "ok"),
                                           (BlockRemoved([1]), "ok")], (0, 0, 0)),
    ("token-less, then un-anchored", [(copied([2]), "ok"), (stored([2], [2], 1), "unknown_parent"),
                                      (stored([1], [1]), "ok"), (BlockRemoved([2]), "ok")], (1, 1, 0)),
    ("token-less parent is not known", [(copied([1]), "ok"), (stored([2], [2], 1), "unknown_parent"),
                                        (stored([1], [1]), "ok")], (2, 0, 0)),
    ("un-anchored, copied token-less", [(stored([2], [2], 1), "unknown_parent"), (copied([2]), "ok"),
                                        (stored([1], [1]), "ok"), (BlockRemoved([2]), "ok")], (1, 1, 0)),
    ("another parent later is not believed", [(stored([1, 2], [1, 2]), "ok"), (stored([2], [2], None), "ok"),
                                              (BlockRemoved([2]), "ok")], (2, 0, 0)),
    ("no hashes", [(stored([], []), "ok"), (BlockRemoved([]), "ok"), (AllBlocksCleared(()), "ok")], (0, 0, 0)),
    ("skipped", [(Skipped("medium", "tape"), "skipped")], (0, 0, 0)),
]  # fmt: skip


@pytest.mark.parametrize(("events", "expected"), [row[1:] for row in PARENTS], ids=[row[0] for row in PARENTS])
def test_parents(events: list, expected: tuple[int, int, int]) -> None:
    index, view = opened()
    for event, outcome in events:
        assert view.apply(event) == outcome
        index.check()
    assert found(index, view, 1, 2, 3, 4) == expected


def test_blocks_are_kept_by_key() -> None:
    """Removing block 1 of 4 shows 1 block, storing it again shows 4."""
    index, view = opened()
    view.apply(stored([10, 11, 12, 13], [0, 1, 2, 3]))
    view.apply(BlockRemoved([11]))
    assert found(index, view, 0, 1, 2, 3) == (1, 0, 0)
    assert view.blocks == (3, 0, 0)
    view.apply(stored([11], [1], 10))
    assert found(index, view, 0, 1, 2, 3) == (4, 0, 0)


def test_mapping_is_kept_when_an_offload_event_lacks_the_salt() -> None:
    """A known hash keeps its salted key, and its children chain on that key."""
    index, view = opened()
    salt = b"Xs1:s"
    view.apply(BlockStored([1, 2], None, plain(1, 2), 4, D, extras=(salt, b"")))
    view.apply(stored([1], [1], None, H))
    view.apply(stored([2, 3], [2, 3], 1, H))
    salted = content_keys(plain(1, 2, 3), 4, extras=[salt])
    assert index.find(salted) == {view: (2, 1, 0)}
    assert found(index, view, 1, 2, 3) == (0, 0, 0), "plain text may not match"
    view.apply(AllBlocksCleared())
    assert index.find(salted) == {view: (0, 3, 0)}


def test_the_salt_of_an_unanchored_block_is_kept() -> None:
    """The device event tells the salt, the offload event of the same block does not, in either order."""
    salt = b"Xs1:s"
    for events in (
        [BlockStored([2], 1, plain(2), 4, D, extras=(salt,)), stored([2], [2], 1, H)],
        [stored([2], [2], 1, H), BlockStored([2], 1, plain(2), 4, D, extras=(salt,))],
    ):
        index, view = opened()
        for event in events:
            assert view.apply(event) is Outcome.UNKNOWN_PARENT
        view.apply(stored([1], [1]))
        index.check()
        assert index.find(content_keys(plain(1, 2), 4, extras=[b"", salt])) == {view: (2, 0, 0)}
        assert found(index, view, 1, 2) == (1, 0, 0)


def test_adapters_and_plain_text_do_not_meet() -> None:
    index, view = opened()
    view.apply(BlockStored([1, 2], None, plain(1, 2), 4, root=b"Ls3:ada"))
    assert found(index, view, 1, 2) == (0, 0, 0)
    assert index.find(content_keys(plain(1, 2), 4, root=b"Ls3:ada")) == {view: (2, 0, 0)}
    view.apply(BlockStored([3], 2, plain(3), 4, root=b"Ls3:ada"))
    assert index.find(content_keys(plain(1, 2, 3), 4, root=b"Ls3:ada")) == {view: (3, 0, 0)}


HASHES = [[0, 1, 2], [-9, 2**64 - 9, -(2**63)], [2**200, 2**200 + 256, 5], [b"", b"\x01", b"x" * 32], [5, b"\x05", 261]]


@pytest.mark.parametrize("hashes", HASHES, ids=repr)
def test_hash_forms(hashes: list) -> None:
    """Opaque, never shortened: hashes that agree in their low bits are different blocks."""
    index, view = opened()
    assert view.apply(stored(hashes, [1, 2, 3])) is Outcome.OK
    assert found(index, view, 1, 2, 3) == (3, 0, 0)
    view.apply(BlockRemoved(hashes[2:]))
    view.apply(stored(hashes[2:], [4], hashes[1]))
    assert found(index, view, 1, 2, 4) == (3, 0, 0)
    assert not view.knows(2**64 - 10)
    assert all(view.knows(hash_) for hash_ in hashes)


def test_a_chain_through_blocks_that_only_others_hold() -> None:
    """A reused announcement of blocks this stream has no copy of still leads to the right row behind them."""
    index, one = opened()
    two = opened(index, name="two")[1]
    one.apply(stored([1, 2, 3], [1, 2, 3]))
    two.apply(copied([9]))
    two.apply(stored([7, 8, 9], [1, 2, 3], adds_copy=False))
    assert found(index, one, 1, 2, 3) == (3, 0, 0)
    assert index.blocks == 3
    two.apply(stored([7, 8], [1, 2]))
    assert found(index, two, 1, 2, 3) == (2, 1, 0)


def test_branches_and_holes_stay_within_reach() -> None:
    """Second children, children of removed parents, and both, over several streams."""
    index, one = opened()
    two = opened(index, name="two")[1]
    one.apply(stored([1, 2, 3], [1, 2, 3]))
    one.apply(stored([4, 5], [4, 5], 1))
    two.apply(stored([14, 15], [1, 4]))
    one.apply(BlockRemoved([1, 2]))
    two.apply(BlockRemoved([14]))
    assert index.find(plain_keys(1, 4)) == {}
    two.apply(stored([14], [1]))
    assert index.find(plain_keys(1, 4, 5)) == {two: (2, 0, 0)}
    one.apply(stored([1], [1]))
    assert index.find(plain_keys(1, 4, 5)) == {one: (3, 0, 0), two: (2, 0, 0)}
    assert found(index, one, 1, 2, 3) == (1, 0, 0)
    one.apply(stored([2], [2], 1))
    assert found(index, one, 1, 2, 3) == (3, 0, 0)
    one.clear()
    assert index.find(plain_keys(1, 4, 5)) == {two: (2, 0, 0)}
    index.check()


def test_same_hash_means_nothing_across_streams() -> None:
    index, one = opened()
    two = opened(index, name="two")[1]
    one.apply(stored([1, 2], [1, 2]))
    two.apply(stored([1, 2], [3, 4]))
    two.apply(BlockRemoved([2]))
    assert index.find(plain_keys(1, 2)) == {one: (2, 0, 0)}
    assert index.find(plain_keys(3, 4)) == {two: (1, 0, 0)}
    two.apply(stored([8, 9], [1, 2]))
    assert index.find(plain_keys(1, 2, 5)) == {one: (2, 0, 0), two: (2, 0, 0)}
    assert index.blocks == 3


# ---- D10: block size ------------------------------------------------------------------------------------------------


def test_block_size_is_adopted_once() -> None:
    index, view = opened(PrefixIndex())
    assert view.apply(copied([9])) is Outcome.OK
    assert index.block_size is None
    assert view.apply(BlockStored([1], None, plain(1), 8)) is Outcome.TOKEN_COUNT
    assert index.block_size is None, "an event that does not fit decides nothing"
    assert view.apply(stored([1], [1], size=8)) is Outcome.OK
    assert index.block_size == view.block_size == 8
    assert view.apply(stored([2], [2], 1, size=4)) is Outcome.BLOCK_SIZE
    assert index.find(content_keys(plain(1, size=8) + plain(2), 8)) == {view: (1, 0, 0)}
    assert view.known == 2


@pytest.mark.parametrize(
    ("size", "count", "outcome"),
    [(4, 4, "ok"), (4, 3, "token_count"), (4, 5, "token_count"), (8, 4, "block_size"), (0, 4, "block_size"),
     (-4, 4, "block_size")],
)  # fmt: skip
def test_events_that_do_not_fit(size: int, count: int, outcome: str) -> None:
    _, view = opened()
    assert view.apply(BlockStored([1], None, pack_tokens([1] * count), size)) == outcome
    assert view.known == (outcome == "ok")
    with pytest.raises(ValueError, match="block_size"):
        PrefixIndex(block_size=0)


# ---- bounds ---------------------------------------------------------------------------------------------------------


def test_max_streams() -> None:
    index = PrefixIndex(block_size=4, max_streams=2)
    opened(index)
    view = opened(index)[1]
    view.shadow()
    with pytest.raises(CapacityExceeded, match=r"engine/0: 2 streams are open, the bound is max_streams=2"):
        opened(index)
    view.close()
    opened(index)
    index.check()


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([stored(range(5), range(5))], "5 blocks known (0 of them without a key), over the bound max_blocks=4"),
        ([stored(range(4), range(4)), copied([9])], "5 blocks known (0 of them"),
        ([copied([1, 2, 3, 4, 5])], "5 blocks known (4 of them"),
        ([stored([1, 2], [1, 2]), copied([5, 6]), stored([3], [3], 2)], "5 blocks known (2 of them"),
        ([stored([2, 3, 4], [2, 3, 4], 1)], "3 blocks wait for an unknown parent, over the bound max_unanchored=2"),
        ([copied([7], H, 1), copied([7], H, 2), copied([7], H, 3)], "over the bound max_places=2"),
    ],
)
def test_bounds(events: list, message: str) -> None:
    index, view = opened(max_blocks=4, max_unanchored=2, max_places=2)
    for event in events[:-1]:
        view.apply(event)
    with pytest.raises(CapacityExceeded) as caught:
        view.apply(events[-1])
    assert message in str(caught.value)
    assert "engine/0" in str(caught.value)
    index.check()
    view.clear()
    assert (view.known, view.unanchored, view.remembered, view.blocks) == (0, 0, 0, (0, 0, 0))
    assert view.apply(stored(range(4), range(4))) is Outcome.OK
    assert found(index, view, 0, 1, 2, 3) == (4, 0, 0)


def test_a_full_stream_still_takes_copies_and_removals() -> None:
    index, view = opened(max_blocks=2)
    view.apply(stored([1, 2], [1, 2]))
    view.apply(stored([1, 2], [1, 2], tier=H))
    view.apply(copied([2], S))
    view.apply(BlockRemoved([2, 1]))
    assert found(index, view, 1, 2) == (0, 2, 0)
    assert view.known == 2
    assert view.blocks == (0, 2, 1)


def test_figures() -> None:
    index, view = opened()
    view.apply(stored([1, 2], [1, 2]))
    view.apply(copied([2, 9]))
    view.apply(stored([4, 5], [4, 5], 3))
    index.check()
    assert view.blocks == (2, 1, 0)
    assert (view.known, view.unanchored, view.remembered) == (5, 2, 1)


# ---- visibility, shadow, swap, close --------------------------------------------------------------------------------


def test_visible() -> None:
    index = PrefixIndex(block_size=4)
    view = index.open(walk=Walk.CASCADE)
    view.apply(stored([1], [1]))
    assert view.visible is False
    assert index.find(plain_keys(1)) == {}
    view.visible = True
    assert index.find(plain_keys(1)) == {view: (1, 0, 0)}
    view.visible = False
    assert index.find(plain_keys(1)) == {}
    index.check()


def test_swap() -> None:
    index, view = opened()
    view.apply(stored([1, 2, 3], [1, 2, 3]))
    view.apply(copied([50]))
    shadow = view.shadow()
    shadow.apply(stored([7, 8], [1, 9]))
    assert found(index, view, 1, 2, 3) == (3, 0, 0)
    assert found(index, shadow, 1, 9) == (0, 0, 0)
    view.apply(stored([4], [4], 3))  # the old content is still fed
    assert found(index, view, 1, 2, 3, 4) == (4, 0, 0)
    view.swap(shadow)
    assert found(index, view, 1, 2, 3, 4) == (1, 0, 0)
    assert found(index, view, 1, 9) == (2, 0, 0)
    assert shadow.closed
    assert (view.known, view.remembered, index.blocks) == (2, 0, 2)
    assert view.apply(stored([5], [5], 8)) is Outcome.OK
    assert found(index, view, 1, 9, 5) == (3, 0, 0)


def test_shadow_rules() -> None:
    index, view = opened()
    first = view.shadow()
    first.apply(stored([1], [1]))
    second = view.shadow()
    assert first.closed
    assert index.blocks == 0
    with pytest.raises(KVIndexError, match="not its shadow"):
        view.swap(first)
    with pytest.raises(KVIndexError, match="cannot be shown"):
        second.visible = True
    with pytest.raises(KVIndexError, match="no shadow"):
        second.shadow()
    second.close()
    index.check()
    third = view.shadow()
    third.apply(stored([1], [1]))
    view.close()
    view.close()
    assert third.closed
    assert (index.blocks, index.find(plain_keys(1))) == (0, {})
    for misuse in (view.clear, view.shadow, lambda: view.apply(copied([1])), lambda: setattr(view, "visible", True)):
        with pytest.raises(KVIndexError, match="closed"):
            misuse()
    index.check()


def test_slots_are_used_again() -> None:
    """Masks stay as short as the number of streams allows, whatever comes and goes."""
    index, keeper = opened()
    keeper.apply(stored([1], [1]))
    for _ in range(20):
        view = opened(index)[1]
        view.apply(stored([1], [1]))
        shadow = view.shadow()
        shadow.apply(stored([1, 2], [1, 2]))
        view.swap(shadow)
        assert index.find(plain_keys(1, 2)) == {keeper: (1, 0, 0), view: (2, 0, 0)}
        view.close()
    index.check()
    assert len(index._slots) == 3


# ---- memory and pacing ----------------------------------------------------------------------------------------------


def footprint(index: PrefixIndex) -> int:
    """Bytes of every container of the index."""
    rows = index._rows
    tables: list = [rows.keys, rows.masks, rows.after, rows.free, *rows.spare, rows._interned, *rows.heads]
    for view in index._views:
        content = view._content
        tables += [
            *content.shards,
            *content.odd,
            *content.unanchored.blocks.parts,
            *content.unanchored._children.parts,
            *content._shared.parts,
        ]
    return sum(map(sys.getsizeof, tables))


def test_memory_returns_after_churn() -> None:
    """Store and evict below one shared prefix, with copies, un-anchored and token-less blocks: flat once warm."""
    index, view = opened()
    other = opened(index, name="other")[1]
    for stream in (view, other):
        stream.apply(stored([1, 2], [1, 2]))
    sizes = []
    for turn in range(60):
        first = 1000 + turn * 100
        hashes = list(range(first, first + 40))
        view.apply(stored(hashes, hashes, 2))
        view.apply(stored(hashes[:5], hashes[:5], 2))
        view.apply(copied(hashes[10:30]))
        view.apply(copied(range(first + 50, first + 60)))
        view.apply(stored(range(first + 60, first + 70), range(10), first + 99))
        other.apply(stored([-hash_ for hash_ in hashes[:20]], hashes[:20], 2))
        assert index.find(plain_keys(1, 2, *hashes)) == {view: (42, 0, 0), other: (22, 0, 0)}
        view.apply(BlockRemoved([*hashes[::-1], *hashes[:5], *range(first + 60, first + 70)]))
        view.apply(BlockRemoved([*hashes[10:30], *range(first + 50, first + 60)], H))
        other.apply(BlockRemoved([-hash_ for hash_ in hashes[:20]]))
        assert (view.known, other.known, index.blocks) == (2, 2, 2)
        sizes.append(footprint(index))
    index.check()
    assert max(sizes[40:]) <= 1.02 * max(sizes[20:40])


def test_close_gives_memory_back() -> None:
    index, view = opened()
    empty = footprint(index)
    view.apply(stored(range(20_000), range(20_000)))
    view.apply(copied(range(0, 20_000, 2)))
    view.apply(stored(range(30_000, 32_000), range(2_000), 99_999))
    view.clear()
    index.check()
    columns = index._rows
    left = sum(map(sys.getsizeof, (columns.keys, columns.masks, columns.after, columns.free, *columns.spare)))
    assert footprint(index) - left < empty + 4096


def test_no_garbage_collected_object_a_block() -> None:
    """Not even for copies, shared contents, un-anchored and remembered blocks, once the collector has run. What may be
    tracked are the parts of a cut dict, 256 of each of the three."""
    _index, view = opened()
    gc.collect()
    before = len(gc.get_objects())
    hashes = range(3_000)
    view.apply(stored(hashes, hashes))
    view.apply(copied(hashes))
    view.apply(stored([hash_ + 2**40 for hash_ in hashes], hashes))
    view.apply(stored([hash_ + 2**41 for hash_ in hashes], hashes, 77_777))
    for hash_ in range(1_000):
        view.apply(stored([hash_ + 2**43], [1], 88_888 + hash_ % 300))
    view.apply(copied([hash_ + 2**42 for hash_ in hashes]))
    gc.collect()
    gc.collect()
    assert len(gc.get_objects()) - before < 3 * 256 + 200 < 3_000


@pytest.mark.parametrize(
    "what", ["clear", "cleared device", "close", "swap", "store", "remove", "token-less", "anchor"]
)
def test_long_loops_are_paced(what: str) -> None:
    """`pace` is called at least every 64 blocks, and the index answers while it is."""
    answers: list[dict] = []
    calls = 0

    def pace() -> None:
        nonlocal calls
        calls += 1
        if calls % 50 == 1:
            answers.append(index.find(query))

    count = 10_000
    hashes = list(range(count))
    query = plain_keys(*range(200))
    index, view = opened(PrefixIndex(block_size=4, pace=pace))
    if what == "anchor":
        view.apply(stored(hashes[1:], hashes[1:], 0))
    elif what not in ("store", "token-less"):
        view.apply(stored(hashes, hashes))
        view.apply(copied(hashes[:3]))
    shadow = view.shadow()
    shadow.apply(stored([7], [0]))
    calls, answers = 0, []
    if what == "clear":
        view.clear()
    elif what == "cleared device":
        view.apply(AllBlocksCleared())
    elif what == "close":
        view.close()
    elif what == "swap":
        view.swap(shadow)
    elif what == "store":
        view.apply(stored(hashes, hashes))
    elif what == "remove":
        view.apply(BlockRemoved(hashes[::-1]))
    elif what == "token-less":
        view.apply(copied(hashes))
    else:
        view.apply(stored([0], [0]))
    assert calls >= count // 64 - 1
    seen = [tuple(answer.get(view, (0, 0, 0))) for answer in answers]
    allowed = {
        "clear": {(0, 0, 0)},
        "cleared device": {(0, 3, 0)},
        "close": {(0, 0, 0)},
        "swap": {(1, 0, 0)},
        "store": {(64, 0, 0), (200, 0, 0)},
        "token-less": {(0, 0, 0)},
    }.get(what)
    assert allowed is None or set(seen) == allowed
    if what in ("remove", "anchor"):
        assert sorted(seen, reverse=what == "remove") == seen
    index.check()


def test_a_dict_with_one_crowded_shard_is_swept_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "_SMALL", 100)
    calls: list[int] = []
    index, view = opened(PrefixIndex(block_size=4, pace=lambda: calls.append(1)))
    hashes = [number << 8 for number in range(2_000)]
    view.apply(stored(hashes, range(2_000)))
    view.apply(copied(hashes))
    view.apply(stored([number << 8 | 1 for number in range(500)], range(500), 99))
    before = len(calls)
    view.clear()
    assert len(calls) - before > 2 * 2_000 // 64
    index.check()
    assert index.blocks == 0


def test_find_takes_any_sequence_and_strange_keys() -> None:
    index, view = opened()
    view.apply(stored([1, 2], [1, 2]))
    keys = plain_keys(1, 2)
    assert index.find(tuple(keys)) == {view: (2, 0, 0)}
    assert index.find([]) == {}
    assert index.find([b"short"]) == {}
    assert index.find([*keys, b"x" * 16]) == {view: (2, 0, 0)}
    assert index.find(keys[1:]) == {}, "a prefix starts at the first block"
