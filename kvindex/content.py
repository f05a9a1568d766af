"""What one stream holds: engine hashes, their copies, and blocks whose place in a prompt is not known yet.

    shards[n][hash]  row of the block's content key; 0 = no key yet. One entry a known hash. As many shards as keep each
                     of them small (shards.py), 1 to 256
    odd[n][hash]     copies, only where they are not exactly one at `home`: 32 bits per place, packed in one int
    copied           entries of `odd`: none as long as nothing is offloaded
    places           group*4 + tier -> a small number, the place; `home` is the first place on DEVICE, `home_unit` one
                     copy there
    shared           row*4 + tier -> holders above one, where several hashes of the stream have one content key
    unanchored       blocks whose tokens are known and whose parent's key is not (unanchored.py)

A hash is known while it has a copy anywhere. With a row it is *mapped*; without one it is *un-anchored* (its tokens
are known, its parent's key is not) or *remembered* (its tokens are not known). All of them count against `max_blocks`.
A mapping once made is kept while the hash is known, whatever later events say: offload events repeat a hash without its
extra keys. Blocks are kept by key, not under their parent, so a child keeps its row when the parent goes; a child
stored after that is un-anchored until the parent comes back.

Writer thread only; readers see nothing of this but the mask bits in `Rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, cast

from kvindex.errors import CapacityExceeded
from kvindex.events import BlockRemoved, BlocksMapped, BlockStored, EngineHash, Outcome, Tier
from kvindex.hashing import content_key, content_keys
from kvindex.rows import BUCKET, Buckets, Rows
from kvindex.shards import Parts, drain, low_byte, regrouped
from kvindex.unanchored import Unanchored

_CHUNK: Final = 64  # blocks between two calls of `pace`
_SPLIT: Final = 2_048  # known hashes of a shard, about: a resize takes 0.1 ms then
DIGIT_BITS: Final = 32
_DIGIT: Final = (1 << DIGIT_BITS) - 1


class Content:
    """One slot of the masks and everything behind it.

    Costs (bench_index, quiet machine): `store` 2 to 3 us a new block, hashing included, `remove` 1.3 to 1.5 us, both
    O(blocks); `clear` and `sweep` O(known hashes), about 1 us each, with `pace` every 64.
    """

    __slots__ = (
        "_bits", "_digits", "_home", "_mask", "_pace", "_rows", "_seed", "_shared", "_tiers", "anchored", "copied",
        "counts", "home_unit", "known", "max_blocks", "max_places", "max_unanchored", "name", "odd", "places", "shards",
        "slot", "unanchored", "unmapped",
    )  # fmt: skip

    def __init__(
        self,
        rows: Rows,
        slot: int,
        *,
        seed: int,
        pace: Callable[[], None],
        name: str,
        max_blocks: int,
        max_unanchored: int,
        max_places: int,
    ) -> None:
        self._rows = rows
        self._seed = seed
        self._pace = pace
        self.name = name
        self.slot = slot
        self.max_blocks = max_blocks
        self.max_unanchored = max_unanchored
        self.max_places = max_places
        self._bits = tuple(1 << 3 * slot + tier for tier in Tier)
        self.anchored: list[EngineHash] | None = None  # hashes mapped after they were announced, where anybody asks
        self.unanchored = Unanchored()
        self._shared: Parts[int] = Parts()
        self._reset()

    def _reset(self) -> None:
        self.shards: list[dict[EngineHash, int]] = [{}]
        self.odd: list[dict[EngineHash, int]] = [{}]
        self.copied = 0
        self._mask = 0
        self.places: dict[int, int] = {}
        self._tiers: list[Tier] = []
        self._digits = [0, 0, 0]
        self._home = -1
        self.home_unit = 0
        self.counts = [0, 0, 0]
        self.known = 0
        self.unmapped = 0

    @property
    def remembered(self) -> int:
        """Known hashes whose tokens are not known."""
        return self.unmapped - len(self.unanchored)

    def knows(self, hash_: EngineHash) -> bool:
        """Has the hash a copy here?"""
        return hash_ in self.shards[self._number(hash_)]

    def rows_of(self, hashes: list[EngineHash]) -> list[tuple[EngineHash, int]]:
        """Each with its block's row, 0 where it has none."""
        shards = self.shards
        return [
            (hash_, shards[number].get(hash_, 0)) for hash_, number in zip(hashes, self._numbers(hashes), strict=True)
        ]

    # ---- shards -------------------------------------------------------------------------------------------------

    def _number(self, hash_: EngineHash) -> int:
        """Shard of an engine hash."""
        return low_byte(hash_) & self._mask if self._mask else 0

    def _numbers(self, hashes: list[EngineHash]) -> Sequence[int]:
        """Shards of several, about 30 ns each where all are ints."""
        mask = self._mask
        if not mask:
            return bytes(len(hashes))
        try:
            return [hash_ & mask for hash_ in cast(list[int], hashes)]
        except TypeError:
            return [low_byte(hash_) & mask for hash_ in hashes]

    def _grow(self) -> None:
        """Four times as many shards when they become large: no more than are needed, as each costs cache lines."""
        while self.known > _SPLIT * (self._mask + 1) and self._mask < 255:
            self._regroup(4 * self._mask + 3)

    def _regroup(self, mask: int) -> None:
        for name in ("shards", "odd"):
            whole = getattr(self, name)
            setattr(self, name, regrouped(whole, mask, self._pace))
            while whole:  # one table after the other goes
                whole.pop()
                self._pace()
        self._mask = mask

    # ---- events -------------------------------------------------------------------------------------------------

    def store(self, event: BlockStored) -> Outcome:
        """Take over a stored event whose block size and token count are right. Raises CapacityExceeded."""
        hashes, parent, tokens, size, tier, group, root, extras, adds = event
        place = self._place(tier, group) if adds else -1
        if not tokens:
            return self._store_tokenless(hashes, place)
        if self.known > _SPLIT:
            self._grow()
        rows = self._rows
        row = 0
        previous: bytes | None = root
        if parent is not None:
            row = self.shards[self._number(parent)].get(parent, 0)
            previous = rows.keys[row]  # None for row 0
        plain = place == self._home and adds
        outcome = Outcome.OK
        step = 4 * size
        count = len(hashes)
        if count == 1 and plain and previous is not None:
            hash_ = hashes[0]
            number = self._number(hash_)
            if hash_ not in self.shards[number] and self.known < self.max_blocks:
                # a block of generated tokens, the most frequent event of all
                block = extras[0] + tokens if extras else tokens
                self.shards[number][hash_] = row = rows.claim(content_key(previous, block, self._seed), row)
                self.known += 1
                self._gain(row, 0)
                if self.unanchored:
                    self._anchor(hashes)
                return outcome
        for start in range(0, count, _CHUNK):
            part, these, more = hashes, tokens, extras
            if count > _CHUNK:
                end = start + _CHUNK
                part, these = hashes[start:end], tokens[start * step : end * step]
                more = extras and extras[start:end]
                if start:
                    self._pace()
                    self._grow()
            if plain and previous is not None and self.known + len(part) <= self.max_blocks:
                keys = content_keys(these, size, extras=more, parent=previous, seed=self._seed)
                last = self._store_new(part, keys, row)
                if last:
                    row, previous, parent = last, keys[-1], part[-1]
                    if self.unanchored:
                        self._anchor(part)
                    continue
            row, previous, lost = self._store_each(part, these, step, more, parent, row, previous, place)
            parent = part[-1]
            if lost:
                outcome = Outcome.UNKNOWN_PARENT
        return outcome

    def _store_new(self, hashes: list[EngineHash], keys: list[bytes], row: int) -> int:
        """Blocks whose hashes are all unknown, one copy each at home, following `row`: the last one's row.

        0 and no change when a hash is known already or comes twice.
        """
        rows = self._rows
        count = len(hashes)
        fresh = rows.next_free(count)
        shards = self.shards
        mask = self._mask
        ints = cast(list[int], hashes)
        try:
            # look-ups written out are quicker than a chain of `map`
            got = [shards[hash_ & mask].setdefault(hash_, row) for hash_, row in zip(ints, fresh, strict=True)]
        except TypeError:  # bytes
            got = [shards[self._number(hash_)].setdefault(hash_, row) for hash_, row in zip(hashes, fresh, strict=True)]
        if got != fresh:
            for hash_, row in zip(hashes, fresh, strict=True):
                if shards[self._number(hash_)].get(hash_) == row:
                    del shards[self._number(hash_)][hash_]
            return 0
        self.known += count
        if rows.append_chain(keys, row, fresh, self._bits[0]):
            self.counts[0] += count
            return fresh[-1]
        present = rows.claim_chain(keys, row)
        if present is None:
            for hash_, key in zip(hashes, keys, strict=True):
                row = shards[self._number(hash_)][hash_] = rows.claim(key, row)
                self._gain(row, 0)
            return row
        for hash_, number, row in zip(hashes, self._numbers(hashes), present, strict=True):
            shards[number][hash_] = row
        masks, bit = rows.masks, self._bits[0]
        first = present[0]
        found = masks[first : first + count]
        if found.count(found[0]) == count and not found[0] & bit:
            masks[first : first + count] = [rows.intern(found[0] | bit)] * count
            self.counts[0] += count
        else:
            for row in present:
                self._gain(row, 0)
        return row

    def _store_each(
        self,
        hashes: list[EngineHash],
        tokens: bytes,
        step: int,
        extras: Sequence[bytes] | None,
        parent: EngineHash | None,
        row: int,
        previous: bytes | None,
        place: int,
    ) -> tuple[int, bytes | None, bool]:
        """Any blocks, one by one, known or not: the last one's row and key (None = un-anchored), and: was any such?"""
        rows = self._rows
        lost = False
        given = len(extras) if extras else 0
        start = 0
        if place >= 0:
            start = self._copy(hashes, place)
            if start:
                parent = hashes[start - 1]
                row = self.shards[self._number(parent)][parent]
                previous = rows.keys[row]
        for index in range(start, len(hashes)):
            hash_ = hashes[index]
            number = self._number(hash_)
            mapped = self.shards[number].get(hash_)
            if mapped:
                if place >= 0:
                    self._add(hash_, number, mapped, place)
                row, previous, parent = mapped, rows.keys[mapped], hash_
                continue
            if mapped is None and place >= 0 and self.known >= self.max_blocks:
                raise self._full(1)
            block = tokens[index * step : index * step + step]
            extra = extras[index] if extras and index < given else b""
            if previous is not None:
                previous = content_key(previous + extra, block, self._seed)
                if mapped is None and place < 0:
                    row = rows.seek(previous, row)
                else:
                    row = rows.claim(previous, row)
                    if mapped is not None:
                        self._map(hash_, number, row)
                    if place >= 0:
                        self._add(hash_, number, row, place)
                    if self.unanchored:
                        self._anchor([hash_])
            else:
                assert parent is not None
                lost = True
                if mapped is None and place < 0:
                    parent = hash_
                    continue
                if len(self.unanchored) >= self.max_unanchored and hash_ not in self.unanchored:
                    raise CapacityExceeded(
                        f"stream {self.name}: {len(self.unanchored) + 1} blocks wait for an unknown parent, "
                        f"over the bound max_unanchored={self.max_unanchored}"
                    )
                self.unanchored.put(hash_, (parent, block, extra))
                if place >= 0:
                    self._add(hash_, number, 0, place)
            parent = hash_
        return row, previous, lost

    def _store_tokenless(self, hashes: list[EngineHash], place: int) -> Outcome:
        if place >= 0:
            for start in range(0, len(hashes), _CHUNK):
                if start:
                    self._pace()
                self._grow()
                part = hashes[start : start + _CHUNK]
                for hash_ in part[self._copy(part, place) :]:
                    number = self._number(hash_)
                    self._add(hash_, number, self.shards[number].get(hash_, 0), place)
        return Outcome.OK

    def _copy(self, hashes: list[EngineHash], place: int) -> int:
        """One copy more of each mapped hash, up to the first that is not mapped: how many that were."""
        shards, odd, masks, unit = self.shards, self.odd, self._rows.masks, self.home_unit
        tier = self._tiers[place]
        bit = self._bits[tier]
        both = self._rows.intern(unit + (1 << DIGIT_BITS * place))
        gains = not unit & self._digits[tier]
        last = last_new = 0
        for index, (hash_, number) in enumerate(zip(hashes, self._numbers(hashes), strict=True)):
            row = shards[number].get(hash_)
            if not row:
                return index
            if hash_ in odd[number]:
                self._add(hash_, number, row, place)
                continue
            odd[number][hash_] = both
            self.copied += 1
            if gains:
                mask = masks[row]
                if mask & bit:
                    self._gain(row, tier)
                    continue
                if mask is not last:
                    last, last_new = mask, self._rows.intern(mask | bit)
                masks[row] = last_new
                self.counts[tier] += 1
        return len(hashes)

    def store_mapped(self, part: BlocksMapped, unlisted: list[dict[bytes, int]]) -> None:
        """Blocks with their keys. A hash that is known already stays as it is. Raises CapacityExceeded.

        unlisted   of the rows (`Rows.unlisted`), kept up to date: a key that is there must not get a second row
        """
        hashes, keys, copies = part
        rows = self._rows
        self._grow()
        units = [(self._place(tier, group), count) for tier, group, count in copies]
        room = self.known + len(hashes) <= self.max_blocks
        if keys and room and units == [(self._home, 1)] and not any(key in unlisted[key[0]] for key in keys):
            before = rows.epoch
            last = self._store_new(hashes, keys, 0)
            if last:
                if rows.epoch != before:  # new rows, all but the first reached through the one before
                    for hash_, key in zip(hashes[1:], keys[1:], strict=True):
                        if key not in rows.listed(key):
                            unlisted[key[0]][key] = self.shards[self._number(hash_)][hash_]
                return
        packed = rows.intern(sum(count << DIGIT_BITS * place for place, count in units))
        row = 0
        for index, hash_ in enumerate(hashes):
            number = self._number(hash_)
            if hash_ in self.shards[number]:
                row = self.shards[number][hash_]
                continue
            if self.known >= self.max_blocks:
                raise self._full(1)
            if keys:
                key = keys[index]
                row = unlisted[key[0]].get(key, 0) or rows.claim(key, row)
                if key not in rows.listed(key):
                    unlisted[key[0]][key] = row
            self._set(hash_, number, row, 0, packed)
            if row:
                for tier in range(3):
                    if packed & self._digits[tier]:
                        self._gain(row, tier)

    def remove(self, event: BlockRemoved) -> Outcome:
        """One copy less of each hash; hashes without a copy there are passed over."""
        hashes, shards = event.hashes, self.shards
        place = self.places.get(event.group * 4 + event.tier, -1)
        if place < 0:
            return Outcome.OK
        for start in range(0, len(hashes), _CHUNK):
            if start:
                self._pace()
            part = hashes if len(hashes) <= _CHUNK else hashes[start : start + _CHUNK]
            numbers = self._numbers(part)
            if place == self._home and self._remove_last(part, numbers):
                continue
            for hash_, number in zip(part, numbers, strict=True):
                row = shards[number].get(hash_)
                if row is not None:
                    self._take(hash_, number, row, place)
        if self._mask and self.known <= _SPLIT // 4:
            self._regroup(0)  # emptied dicts keep their tables
        return Outcome.OK

    def _remove_last(self, hashes: list[EngineHash], numbers: Sequence[int]) -> bool:
        """Remove hashes that have but one copy, at home. False and no change when one of them has others, or none."""
        if self._shared or self.unmapped:
            return False
        rows, odd, shards, bit = self._rows, self.odd, self.shards, self._bits[0]
        if self.copied and [True for number, hash_ in zip(numbers, hashes, strict=True) if hash_ in odd[number]]:
            return False
        gone = [row for number, hash_ in zip(numbers, hashes, strict=True) if (row := shards[number].pop(hash_, 0))]
        self.known -= len(gone)
        self.counts[0] -= len(gone)
        rows.leave(gone, bit)
        return True

    def clear(self, tiers: Sequence[Tier]) -> None:
        """Every copy on these tiers goes. Readers must have been told before (see index.py), as it takes a while."""
        if all(tier in tiers or not self._digits[tier] for tier in Tier):
            self.sweep()
            return
        gone = 0
        lost: dict[int, Buckets] = {tier: {} for tier in set(tiers)}
        for tier in lost:
            gone |= self._digits[tier]
        for number, shard in enumerate(self.shards):
            odd = self.odd[number]
            kept: dict[EngineHash, int] = {}
            while shard:
                for _ in range(min(_CHUNK, len(shard))):
                    hash_, row = shard.popitem()
                    copies = odd.get(hash_, self.home_unit)
                    left = copies & ~gone
                    if left:
                        kept[hash_] = row
                        if left == copies:
                            continue
                    self._set(hash_, number, row, copies, left)
                    for tier, buckets in lost.items():
                        if row and copies & self._digits[tier] and self._is_last(row, tier):
                            buckets.setdefault(row >> BUCKET, []).append(row)
                self._pace()
            self.shards[number] = kept
        for tier, buckets in lost.items():
            self._rows.sweep(buckets, self._bits[tier], self._pace)
            self.counts[tier] = 0

    def sweep(self) -> None:
        """Everything goes. Readers must have been told before, as it takes a while."""
        pace = self._pace
        buckets: Buckets = {}
        for number, shard in enumerate(self.shards):
            # taken out one by one: dropping a large dict whole frees all its keys in one call
            while shard:
                for _ in range(min(_CHUNK, len(shard))):
                    row = shard.popitem()[1]
                    buckets.setdefault(row >> BUCKET, []).append(row)
                pace()
            shard = self.shards[number] = {}  # its table goes now, not all tables together
            drain(self.odd[number], pace)
            self.odd[number] = {}
        self._rows.sweep(buckets, self._bits[0] | self._bits[1] | self._bits[2], pace)
        self.unanchored.drain(pace)
        self._shared.drain(pace)
        self._reset()

    # ---- copies -------------------------------------------------------------------------------------------------

    def _place(self, tier: Tier, group: int) -> int:
        """Number of (tier, group), a new one if need be."""
        name = group * 4 + tier
        place = self.places.get(name, -1)
        if place < 0:
            place = len(self.places)
            if place >= self.max_places:
                raise CapacityExceeded(
                    f"stream {self.name}: tier {tier.name}, group {group} would be (tier, group) number {place + 1}, "
                    f"over the bound max_places={self.max_places}"
                )
            self.places[name] = place
            self._tiers.append(tier)
            self._digits[tier] |= _DIGIT << DIGIT_BITS * place
            if tier == Tier.DEVICE and self._home < 0:
                self._home, self.home_unit = place, 1 << DIGIT_BITS * place
        return place

    def _add(self, hash_: EngineHash, number: int, row: int, place: int) -> None:
        """One copy more; `row` is the hash's (0 = none yet). A count stops at 2**32 - 1."""
        tier = self._tiers[place]
        copies = 0
        if hash_ in self.shards[number]:
            copies = self.odd[number].get(hash_, self.home_unit)
            if copies >> DIGIT_BITS * place & _DIGIT == _DIGIT:
                return
        elif self.known >= self.max_blocks:
            raise self._full(1)
        self._set(hash_, number, row, copies, copies + (1 << DIGIT_BITS * place))
        if row and not copies & self._digits[tier]:
            self._gain(row, tier)

    def _take(self, hash_: EngineHash, number: int, row: int, place: int) -> None:
        """One copy less of a known hash, if it has one there."""
        copies = self.odd[number].get(hash_, self.home_unit)
        if copies >> DIGIT_BITS * place & _DIGIT:
            tier = self._tiers[place]
            left = copies - (1 << DIGIT_BITS * place)
            self._set(hash_, number, row, copies, left)
            if row and not left & self._digits[tier]:
                self._lose(row, tier)

    def _set(self, hash_: EngineHash, number: int, row: int, old: int, new: int) -> None:
        """Copies of a hash go from `old` to `new` (0 = not known): both dicts and the counters, not the row's bits."""
        if not old:
            self.shards[number][hash_] = row
            self.known += 1
            if not row:
                self.unmapped += 1
        elif not new:
            self.shards[number].pop(hash_, None)
            self.known -= 1
            if not row:
                self.unmapped -= 1
                if hash_ in self.unanchored:
                    self.unanchored.drop(hash_)
        odd = self.odd[number]
        self.copied -= len(odd)
        if new and new != self.home_unit:
            odd[hash_] = self._rows.intern(new)
        else:
            odd.pop(hash_, None)
        self.copied += len(odd)

    def _map(self, hash_: EngineHash, number: int, row: int) -> None:
        """A known hash without a row gets one: its copies count from now on."""
        if hash_ in self.unanchored:
            self.unanchored.drop(hash_)
        self.shards[number][hash_] = row
        self.unmapped -= 1
        if self.anchored is not None:
            self.anchored.append(hash_)
        copies = self.odd[number].get(hash_, self.home_unit)
        for tier in range(3):
            if copies & self._digits[tier]:
                self._gain(row, tier)

    def _gain(self, row: int, tier: int) -> None:
        """One hash more holds the row on this tier."""
        masks = self._rows.masks
        mask = masks[row]
        bit = self._bits[tier]
        if mask & bit:
            name = row * 4 + tier
            self._shared[name] = self._shared.get(name, 0) + 1
        else:
            masks[row] = self._rows.intern(mask | bit)
            self.counts[tier] += 1

    def _is_last(self, row: int, tier: int) -> bool:
        """One hash less holds the row on this tier: was it the only one?"""
        name = row * 4 + tier
        more = self._shared.get(name, 0)
        if more > 1:
            self._shared[name] = more - 1
        elif more:
            self._shared.pop(name)
        return not more

    def _lose(self, row: int, tier: int) -> None:
        """One hash less holds the row on this tier."""
        if self._is_last(row, tier):
            self.counts[tier] -= 1
            mask = self._rows.masks[row] ^ self._bits[tier]
            if mask:
                self._rows.masks[row] = self._rows.intern(mask)
            else:
                self._rows.release(row)

    # ---- anchoring ----------------------------------------------------------------------------------------------

    def _anchor(self, hashes: list[EngineHash]) -> None:
        """These hashes were mapped: their un-anchored children get their keys, and so on down. O(blocks anchored)."""
        rows, unanchored = self._rows, self.unanchored
        ready = [hash_ for hash_ in hashes if unanchored.awaits(hash_)]
        steps = 0
        while ready:
            parent = ready.pop()
            row = self.shards[self._number(parent)][parent]
            key = rows.keys[row]
            assert key is not None
            for child in unanchored.children(parent):
                _, block, extra = unanchored.blocks[child]
                self._map(child, self._number(child), rows.claim(content_key(key + extra, block, self._seed), row))
                if unanchored.awaits(child):
                    ready.append(child)
                steps += 1
                if steps % _CHUNK == 0:
                    self._pace()

    def _full(self, more: int) -> CapacityExceeded:
        return CapacityExceeded(
            f"stream {self.name}: {self.known + more} blocks known ({self.unmapped} of them without a key), "
            f"over the bound max_blocks={self.max_blocks}"
        )
