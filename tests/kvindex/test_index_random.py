"""Random events of several engines against the plain-dict model: answers, figures, bounds, invariants.

`KVCAR_SEEDS=N` runs N seeds instead of 60.
"""

from __future__ import annotations

import os
import random

import pytest

from kvindex import content as content_module
from kvindex import rows as rows_module
from kvindex import shards as shards_module
from kvindex import unanchored as unanchored_module
from kvindex.errors import CapacityExceeded
from kvindex.index import PrefixIndex, StreamView, TierBlocks, Walk
from kvindex.walk import credit
from tests.kvindex.index_model import EventMaker, Full, StreamModel, chain_keys

SEEDS = int(os.environ.get("KVCAR_SEEDS", "60"))


@pytest.fixture(autouse=True)
def _small_inside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the seeds with tiny inner sizes, so that every path is taken with little data."""
    if request.node.callspec.params["seed"] % 2:
        for name, value in (("_FIRST_STRETCH", 2), ("_LONGEST_STRETCH", 4), ("_STREAK", 2), ("BUCKET", 1),
                            ("_GROWTH", 1), ("_INTERNED", 3), ("_SPLIT", 2), ("_SPARE", 2)):  # fmt: skip
            monkeypatch.setattr(rows_module, name, value)
        for name, value in (("_CHUNK", 2), ("BUCKET", 1), ("_SPLIT", 4)):
            monkeypatch.setattr(content_module, name, value)
        monkeypatch.setattr(shards_module, "_SMALL", 3)
        for module in (shards_module, unanchored_module):
            monkeypatch.setattr(module, "WHOLE", 2)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_against_the_model(seed: int) -> None:
    rng = random.Random(seed)
    index = PrefixIndex(block_size=2, max_streams=5)
    streams: list[tuple[StreamView, StreamModel]] = []
    makers = EventMaker(rng)  # engines of one pool serve the same prompts
    overflows = 0

    def open_one() -> None:
        walk = rng.choice(list(Walk))
        bounds = rng.choice(((10**6, 10**6), (10**6, 2), (9, 10**6), (30, 5)))
        view = index.open(walk=walk, max_blocks=bounds[0], max_unanchored=bounds[1], name=f"s{len(streams)}")
        view.visible = rng.random() < 0.9
        streams.append((view, StreamModel(walk, *bounds)))

    def feed(view: StreamView, model: StreamModel) -> None:
        nonlocal overflows
        event = makers.event()
        try:
            expected = model.apply(event)
        except Full:
            overflows += 1
            with pytest.raises(CapacityExceeded):
                view.apply(event)
            index.check()
            view.clear()
            model.reset()
        else:
            assert view.apply(event) == expected, event

    while len(streams) < 3:
        open_one()
    for step in range(120):
        number = rng.randrange(len(streams))
        view, model = streams[number]
        kind = rng.random()
        if kind < 0.94:
            feed(view, model)
        elif kind < 0.95:
            view.clear()
            model.reset()
        elif kind < 0.97:
            shadow = view.shadow()
            fresh = StreamModel(model.walk, model.max_blocks, model.max_unanchored)
            for _ in range(rng.randrange(6)):
                feed(shadow, fresh)
            if rng.random() < 0.7:
                view.swap(shadow)
                streams[number] = (view, fresh)
            elif rng.random() < 0.5:
                shadow.close()
        elif kind < 0.98:
            view.visible = not view.visible
        elif len(streams) < 5:
            open_one()
        else:
            view.close()
            del streams[number]
        if step % 10 == 0:
            index.check()
        for _ in range(3):
            chain = makers.chain()
            matches = {view: model.match(chain) for view, model in streams if view.visible}
            expected = {view: blocks for view, blocks in matches.items() if any(blocks)}
            keys = chain_keys(chain, 2)
            assert index.find(keys) == expected, (step, chain)
            assert careful(index, keys) == expected
        for view, model in streams:
            assert view.blocks == model.blocks()
            assert view.known == len(model.known())
            assert view.unanchored == len(model.pending)
            assert view.remembered == len(model.known() - model.content.keys() - model.pending.keys())
    index.check()
    for view, _ in streams:
        view.close()
    index.check()
    assert index.blocks == 0


def careful(index: PrefixIndex, keys: list[bytes]) -> dict[StreamView, TierBlocks]:
    """The answer by the path that only a disturbed reader takes."""
    shown = index._exposure
    return index._answer(shown, credit(index._rows.careful_runs(keys), shown.interleaved, shown.cascade, shown.blind))
