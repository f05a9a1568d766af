"""Pools: what they hold counts for their members, whoever explains the hashes, in whatever order.

The random test compares with a model that is written from D1; `KVCAR_SEEDS=N` runs N seeds instead of 20.
"""

from __future__ import annotations

import os
import random

import pytest

from kvindex import content as content_module
from kvindex.errors import CapacityExceeded, KVIndexError
from kvindex.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, Tier
from kvindex.index import PrefixIndex, StreamView, TierBlocks, Walk
from kvindex.pools import PoolView, open_pool
from tests.kvindex.index_model import (
    Chain,
    EventMaker,
    StreamModel,
    chain_keys,
    copied,
    plain_keys,
    stored,
    walk_blocks,
)

SEEDS = int(os.environ.get("KVCAR_SEEDS", "20"))
H, S = Tier.HOST, Tier.DISK


class Stage:
    """Two members and a pool of one index, all visible."""

    def __init__(self, *, walk: Walk = Walk.CASCADE, **bounds: int) -> None:
        self.index = PrefixIndex(block_size=4)
        self.a, self.b = (self.member(name, walk) for name in "ab")
        self.pool = open_pool(self.index, name="pool", **bounds)
        self.pool.visible = True
        self.serve(self.a, self.b)

    def member(self, name: str, walk: Walk = Walk.CASCADE) -> StreamView:
        view = self.index.open(walk=walk, name=name)
        view.visible = True
        return view

    def serve(self, *members: StreamView) -> None:
        self.pool.serve(members)
        for member in members:
            member.explain_to((self.pool,))

    def hits(self, *blocks: int) -> dict[str, tuple[int, ...]]:
        self.index.check()
        keys = plain_keys(*blocks)
        found = self.index.find(keys)
        exposure = self.index._exposure
        assert found == self.index._answer(exposure, exposure.credit(self.index._rows.careful_runs(keys)))
        return {view.name: tuple(hits) for view, hits in found.items()}


ORDERS = [["explain", "pool"], ["pool", "explain"], ["explain", "evict", "pool"], ["pool", "explain", "evict"],
          ["explain", "pool", "restart"], ["pool", "explain", "close", "join"]]  # fmt: skip


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_whatever_comes_first(order: list[str]) -> None:
    """The copy counts for the member that explained it and for the other one, on the pool's tier."""
    stage = Stage()
    for step in order:
        if step == "explain":
            stage.a.apply(stored([10, 11], [1, 2]))
        elif step == "evict":
            stage.a.apply(BlockRemoved([10, 11]))
        elif step == "pool":
            stage.pool.apply(copied([10, 11]))
        elif step == "restart":
            stage.a.clear()
        elif step == "close":
            stage.serve(stage.b)
            stage.a.close()
        else:
            stage.a = stage.member("a")
            stage.serve(stage.a, stage.b)
    on_device = order[-1] in ("explain", "pool") and "evict" not in order
    assert stage.hits(1, 2) == {"a": (2, 0, 0) if on_device else (0, 2, 0), "b": (0, 2, 0)}
    stage.pool.apply(BlockRemoved([11], H))
    assert stage.hits(1, 2)["b"] == (0, 1, 0)
    stage.pool.apply(BlockRemoved([10], H))
    assert "b" not in stage.hits(1, 2)


WALKS = {
    # member's and pool's residency of blocks 1, 2, 3, ... -> cascade, interleaved
    "continues the member's prefix": ("DD..", "HHHH", (2, 2, 0), (2, 2, 0)),
    "a hole of the member": ("D.D", "HHH", (1, 2, 0), (2, 1, 0)),
    "from the first block on": ("...", ".HH", None, None),
    "behind device blocks": ("DD.", ".HH", (2, 1, 0), (2, 1, 0)),
    "both hold host copies": ("HH.", "..H", (0, 3, 0), (0, 3, 0)),
    "disk of the pool": ("D..", ".HS", (1, 1, 1), (1, 1, 1)),
    "two tiers of the pool": ("...", "BBS", (0, 2, 1), (0, 2, 1)),
    "the pool alone": (".", "S", (0, 0, 1), (0, 0, 1)),
}


@pytest.mark.parametrize("name", WALKS)
@pytest.mark.parametrize("walk", list(Walk))
def test_walk(name: str, walk: Walk) -> None:
    """As if the pool's rows were the member's."""
    own, shared, cascade, interleaved = WALKS[name]
    stage = Stage(walk=walk)
    length = max(len(own), len(shared))
    everything = range(1, length + 1)
    stage.b.apply(stored(everything, everything))  # the one who explains
    stage.b.visible = False
    tiers = {"D": [Tier.DEVICE], "H": [H], "S": [S], "B": [H, S], ".": []}
    for number, letter in enumerate(own, 1):
        for tier in tiers[letter]:
            stage.a.apply(stored([number], [number], number - 1 or None, tier))
    # a member's block stored without its parent is un-anchored; the pool knows it all the same
    for number, letter in enumerate(shared, 1):
        for tier in tiers[letter]:
            stage.pool.apply(copied([number], tier))
    found = stage.hits(*everything)
    if "hole" in name:  # its third block is un-anchored: it counts by the pool's copy
        assert found == {"a": (1, 2, 0)}
    else:
        blocks = cascade if walk is Walk.CASCADE else interleaved
        assert found == ({"a": blocks} if blocks else {})


def test_nothing_counts_while_it_is_hidden() -> None:
    stage = Stage()
    stage.a.apply(stored([1], [1]))
    stage.pool.apply(copied([1]))
    stage.pool.visible = False
    assert stage.hits(1) == {"a": (1, 0, 0)}
    stage.pool.visible = True
    assert stage.hits(1)["b"] == (0, 1, 0)
    stage.b.visible = False
    assert "b" not in stage.hits(1)
    stage.pool.serve([stage.a])
    stage.b.visible = True
    assert "b" not in stage.hits(1)


def test_cleared_pools_forget_what_they_hold_and_keep_what_was_explained() -> None:
    stage = Stage()
    stage.a.apply(stored([1, 2], [1, 2]))
    stage.a.clear()
    stage.pool.apply(copied([1, 2, 99]))
    assert (stage.pool.blocks, stage.pool.remembered) == ((0, 2, 0), 1)
    for clear in (stage.pool.clear, lambda: stage.pool.apply(AllBlocksCleared((Tier.DEVICE,)))):
        clear()
        assert stage.hits(1) == {}
        assert (stage.pool.blocks, stage.pool.remembered, stage.pool.explanations) == ((0, 0, 0), 0, 2)
        stage.pool.apply(copied([1, 2], S))
        assert stage.hits(1, 2) == {"a": (0, 0, 2), "b": (0, 0, 2)}


def test_a_sweep_shows_nothing_half_done() -> None:
    """While the pool is cleared none of it counts, while a member is cleared all of the pool does."""
    seen: list[tuple[dict[str, TierBlocks], ...]] = []
    index = PrefixIndex(block_size=4, pace=lambda: seen.append(look()))
    views = {name: index.open(walk=Walk.CASCADE, name=name) for name in "ab"}
    pool = open_pool(index)
    prompt = list(range(300))
    keys = plain_keys(*prompt)

    def look() -> tuple[dict[str, TierBlocks], ...]:
        return tuple({view.name: blocks for view, blocks in index.find(some).items()} for some in (keys, keys[:1]))

    for view in (*views.values(), pool):
        view.visible = True
    pool.serve(views.values())
    views["a"].explain_to((pool,))
    views["a"].apply(stored(prompt, prompt))
    views["a"].apply(stored(prompt, prompt, tier=H))
    pool.apply(copied(prompt))
    seen.clear()
    views["a"].clear()
    assert len(seen) > 3
    assert all(found == ({"a": (0, 300, 0), "b": (0, 300, 0)}, {"a": (0, 1, 0), "b": (0, 1, 0)}) for found in seen)
    seen.clear()
    pool.clear()
    assert len(seen) > 3
    assert all(found == ({}, {}) for found in seen)
    index.check()


def test_late_pools_are_told_everything() -> None:
    index = PrefixIndex(block_size=4)
    view = index.open(walk=Walk.CASCADE, name="a")
    view.visible = True
    view.apply(stored(range(300), range(300)))
    view.apply(BlockRemoved(list(range(300, 310))))
    view.apply(stored([400], [7], 999))  # un-anchored
    pool = open_pool(index)
    pool.visible = True
    pool.serve([view])
    view.explain_to((pool,))
    assert pool.explanations == 300
    pool.apply(copied([400]))
    view.apply(stored([999], [6]))  # its parent: both are explained now
    view.clear()
    pool.apply(copied([999]))
    assert index.find(plain_keys(6, 7)) == {view: (0, 2, 0)}
    index.check()


def test_snapshots_explain_too() -> None:
    stage = Stage()
    stage.pool.apply(copied([5]))
    shadow = stage.a.shadow()
    shadow.apply(stored([5], [5]))
    assert stage.hits(5) == {"a": (0, 1, 0), "b": (0, 1, 0)}
    stage.a.swap(shadow)
    stage.a.apply(stored([6], [6], 5))
    stage.pool.apply(copied([6]))
    assert stage.hits(5, 6) == {"a": (2, 0, 0), "b": (0, 2, 0)}
    with pytest.raises(KVIndexError, match="no snapshots"):
        stage.pool.shadow()


FORMS: list[tuple[EngineHash, EngineHash]] = [
    (7, 7),
    (-9, 2**64 - 9),  # SGLang's signed hashes
    (b"\1" * 24 + b"\0" * 7 + b"\5", 5),  # vLLM's digests: the pool has the last 8 bytes
    (b"\1" * 32, b"\1" * 32),
]


@pytest.mark.parametrize(("engine", "pool"), FORMS, ids=repr)
def test_forms_of_hashes(engine: EngineHash, pool: EngineHash) -> None:
    stage = Stage()
    stage.a.apply(stored([engine], [1]))
    stage.pool.apply(copied([pool]))
    assert stage.hits(1)["b"] == (0, 1, 0)
    stage.pool.apply(BlockRemoved([pool], H))
    assert "b" not in stage.hits(1)


def test_device_copies_of_a_pool_are_host_memory() -> None:
    stage = Stage()
    stage.b.apply(stored([1], [1]))
    stage.pool.apply(copied([1], Tier.DEVICE))
    assert stage.hits(1) == {"a": (0, 1, 0), "b": (1, 0, 0)}
    stage.pool.apply(BlockRemoved([1], Tier.DEVICE))
    assert stage.hits(1) == {"b": (1, 0, 0)}


def test_pools_that_tell_tokens() -> None:
    """A store that publishes as its engine does, whose blocks stand on blocks that only the engine has announced."""
    stage = Stage()
    stage.pool.apply(stored([2], [2], 1, H))
    assert stage.hits(1, 2) == {}
    stage.a.apply(stored([1], [1]))
    assert stage.hits(1, 2) == {"a": (1, 1, 0)}
    stage.pool.apply(stored([3], [3], 2, S))
    assert stage.hits(1, 2, 3) == {"a": (1, 1, 1)}


def test_a_hash_explained_in_two_ways_stands_for_nothing() -> None:
    stage = Stage()
    stage.pool.apply(copied([1]))
    stage.a.apply(stored([1], [1]))
    stage.b.apply(stored([1], [2]))
    assert (stage.hits(1), stage.hits(2)) == ({"a": (1, 0, 0)}, {"b": (1, 0, 0)})
    assert stage.pool.disputed == 1


def test_a_pool_with_all_its_places_taken_is_no_fault_of_its_members() -> None:
    stage = Stage(max_places=3)
    for group in range(2):
        stage.pool.apply(BlockStored([100 + group], None, b"", 4, H, group))
    with pytest.raises(CapacityExceeded):
        stage.pool.apply(BlockStored([110], None, b"", 4, H, 7))
    stage.a.apply(stored([1, 2], [1, 2]))
    assert stage.hits(1, 2) == {"a": (2, 0, 0)}
    assert stage.pool.explanations == 2


def test_bounds() -> None:
    """Old explanations and old unexplained hashes go first; a member's stream never suffers."""
    stage = Stage(max_blocks=4, max_unanchored=3)
    stage.a.apply(stored(range(1, 7), range(1, 7)))
    assert stage.pool.explanations == 4
    stage.a.apply(stored(range(1, 7), range(1, 7), tier=H))  # the oldest two again
    assert stage.pool.explanations == 4
    stage.a.clear()
    for number in range(100):
        stage.pool.apply(copied([1000 + number]))
        assert stage.pool.remembered <= 3
    assert len(stage.pool._unexplained) < 100
    stage.a.apply(stored([1099], [9]))
    stage.a.clear()
    assert stage.hits(9) == {"a": (0, 1, 0), "b": (0, 1, 0)}
    stage.pool.apply(BlockRemoved([1050], H))  # forgotten long ago
    for start in range(0, 600, 3):
        stage.a.apply(stored([5000 + start], [start % 50]))
    assert stage.pool.explanations <= 4
    assert len(stage.pool._explained) < 200


class PoolModel:
    def __init__(self) -> None:
        self.explained: dict[int, Chain] = {}
        self.copies: dict[tuple[Tier, int, int], int] = {}

    def learn(self, hash_: EngineHash, chain: Chain) -> None:
        name = low(hash_)
        if self.meaning(name) not in (None, chain):
            self.explained.pop(name, None)
            self.copies = {place: count for place, count in self.copies.items() if place[2] != name}
            return
        self.explained[name] = chain

    def meaning(self, name: int) -> Chain | None:
        return self.explained.get(name)

    def apply(self, event: BlockStored | BlockRemoved) -> None:
        tier = H if event.tier is Tier.DEVICE else event.tier
        for name in map(low, event.hashes):
            place = (tier, event.group, name)
            count = self.copies.get(place, 0) + (1 if isinstance(event, BlockStored) else -1)
            self.copies[place] = max(0, count)

    def tiers(self, chain: Chain) -> set[Tier]:
        return {tier for (tier, _, name), count in self.copies.items() if count and self.meaning(name) == chain}


def low(hash_: EngineHash) -> int:
    return int.from_bytes(hash_[-8:], "big") if isinstance(hash_, bytes) else hash_ % 2**64


def test_against_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    credited = 0
    for seed in range(SEEDS):
        with monkeypatch.context() as patch:
            if seed % 2:
                patch.setattr(content_module, "_CHUNK", 2)
                patch.setattr(content_module, "_SPLIT", 4)
            try:
                credited += trace(random.Random(seed))
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error
    assert credited > 10 * SEEDS, "hardly any copy of a pool ever counted: the traces show nothing"


def trace(rng: random.Random) -> int:
    """Returns how often a member was credited with more than it holds itself."""
    index = PrefixIndex(block_size=2)
    maker = EventMaker(rng)
    members: list[tuple[StreamView, StreamModel]] = []
    pools: list[tuple[PoolView, PoolModel, list[StreamView]]] = []
    credited = 0

    def join() -> None:
        walk = rng.choice(list(Walk))
        view = index.open(walk=walk, name=f"m{len(members)}")
        view.visible = rng.random() < 0.9
        members.append((view, StreamModel(walk)))
        serve()

    def serve() -> None:
        """Any members of any pool: who is new to one tells it everything."""
        for view, model in members:
            before = view._pupils
            now = tuple(pool for pool, _, served in pools if view in served)
            view.explain_to(now)
            for pool, pool_model, _ in pools:
                if pool in now and pool not in before:
                    for hash_, chain in model.content.items():
                        pool_model.learn(hash_, chain)
        for pool, _, served in pools:
            pool.serve(served)

    def feed(view: StreamView, model: StreamModel) -> None:
        event = maker.event()
        before = set(model.content)
        assert view.apply(event) == model.apply(event)
        if isinstance(event, BlockStored) and event.tokens:
            new = [hash_ for hash_ in model.content if hash_ not in before]
            for _, pool_model, served in pools:
                if view in served:
                    for hash_ in dict.fromkeys([*event.hashes, *new]):
                        if hash_ in model.content:
                            pool_model.learn(hash_, model.content[hash_])

    for _ in range(2):
        join()
    for _ in range(rng.choice((1, 2))):
        pools.append((open_pool(index), PoolModel(), [view for view, _ in members if rng.random() < 0.8]))
        pools[-1][0].visible = True
        serve()
    for step in range(150):
        roll = rng.random()
        if roll < 0.5:
            feed(*rng.choice(members))
        elif roll < 0.85:
            pool, pool_model, _ = rng.choice(pools)
            hashes = maker.hashes(maker.chain())
            some = hashes[rng.randrange(len(hashes)) :] if rng.random() < 0.5 else hashes
            group, tier = rng.randrange(2), rng.choice((H, H, S, Tier.DEVICE))
            event = copied(some, tier, group) if rng.random() < 0.6 else BlockRemoved(some, tier, group)
            pool.apply(event)
            pool_model.apply(event)
        elif roll < 0.88:
            pool, pool_model, _ = rng.choice(pools)
            pool.clear()
            pool_model.copies.clear()
        elif roll < 0.91:
            pool = rng.choice(pools)[0]
            pool.visible = not pool.visible
        elif roll < 0.94 and len(members) < 4:
            join()
            for _, _, served in pools:
                if rng.random() < 0.7:
                    served.append(members[-1][0])
            serve()
        elif roll < 0.97:
            view, model = rng.choice(members)
            view.clear()
            model.reset()
        elif len(members) > 1:
            view, _ = members.pop(rng.randrange(len(members)))
            for _, _, served in pools:
                if view in served:
                    served.remove(view)
            serve()
            view.close()
        if step % 10 == 0:
            index.check()
        for _ in range(3):
            chain = maker.chain()
            expected = {}
            for view, model in members:
                held = model.residency(chain)
                for pool, pool_model, served in pools:
                    if pool.visible and view in served:
                        for depth, tiers in enumerate(held):
                            tiers = tiers | pool_model.tiers((chain[0], chain[1][: depth + 1]))
                            held[depth] = tiers
                blocks = walk_blocks(model.walk, held)
                if view.visible and any(blocks):
                    expected[view] = blocks
                    credited += blocks != model.match(chain)
            keys = chain_keys(chain, 2)
            assert index.find(keys) == expected, (step, chain)
    for view, _ in members:
        view.close()
    for pool, _, _ in pools:
        pool.close()
    index.check()
    assert index.blocks == 0
    return credited
