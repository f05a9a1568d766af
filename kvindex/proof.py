"""The invariants of a stream's content, asserted: for tests, and for who doubts."""

from __future__ import annotations

from kvindex.content import DIGIT_BITS, Content
from kvindex.events import Tier


def prove(content: Content, bits: dict[int, int]) -> None:
    """Assert every invariant of the stream, and add to `bits` what its rows' masks must have. O(known hashes)."""
    holders: dict[int, int] = {}
    known = unmapped = 0
    assert len(content.shards) == len(content.odd) == content._mask + 1
    assert content.copied == sum(map(len, content.odd)), "the count of odd ones is off"
    for number in range(len(content.shards)):
        assert content.odd[number].keys() <= content.shards[number].keys(), "copies of an unknown hash"
        assert content.home_unit not in content.odd[number].values(), "one copy at home is written down"
        for hash_, row in content.shards[number].items():
            assert content._number(hash_) == number, "hash in the wrong shard"
            copies = content.odd[number].get(hash_, content.home_unit)
            assert 0 < copies < 1 << DIGIT_BITS * len(content.places), f"{hash_!r} has copies {copies:#x}"
            known += 1
            if row:
                assert content._rows.keys[row] is not None, f"{hash_!r} is mapped to the free row {row}"
                assert hash_ not in content.unanchored, f"{hash_!r} is mapped and un-anchored"
                assert not content.unanchored.awaits(hash_), f"{hash_!r} is mapped and waited for"
                for tier in Tier:
                    if copies & content._digits[tier]:
                        holders[row * 4 + tier] = holders.get(row * 4 + tier, 0) + 1
            else:
                unmapped += 1
    assert (known, unmapped) == (content.known, content.unmapped), "counters are off"
    assert known <= content.max_blocks, "over max_blocks"
    assert len(content.unanchored) <= content.max_unanchored, "over max_unanchored"
    shared = {name: count - 1 for name, count in holders.items() if count > 1}
    assert dict(content._shared.items()) == shared, "shared rows are off"
    for tier in Tier:
        assert content.counts[tier] == sum(name & 3 == tier for name in holders), f"{tier.name} count is off"
    for name in holders:
        bits[name >> 2] = bits.get(name >> 2, 0) | content._bits[name & 3]
    content.unanchored.check()
    for hash_ in content.unanchored.blocks:
        assert content.shards[content._number(hash_)].get(hash_) == 0, f"un-anchored {hash_!r} is not known as such"
    assert len(content.places) == len(content._tiers) <= content.max_places
    assert (content._home < 0) == (Tier.DEVICE not in content._tiers)
