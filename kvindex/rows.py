"""The columns all streams share: one row a content key, and the lookup that readers run beside the writer.

    shards[key[0]]   dict: content key -> row            256 of them, so that no resize takes long (see below)
    keys[row]        the content key, None while the row is free
    masks[row]       int: who holds the block; bit 3*slot + tier
    after[row]       row of a block stored after this one: a hint only, checked against keys[] before use
    free             rows to hand out, next one last
    row 0            belongs to no block: keys[0] None, masks[0] 0

A row is in use exactly while its mask is not zero, so the mask is also the reference count. Equal masks are mostly the
same int object (`intern`), which lets `runs` find their boundaries by identity. Blocks of one event take neighbouring
rows where they can, and freed rows are handed out again in an order that keeps it so: `runs` then compares whole
stretches of keys in one list comparison, and walks block by block (through `after`, else through the dict) elsewhere.

No object of a block is tracked by the garbage collector. Nothing here holds the GIL long: a dict of a million keys
resizes in 50 ms, a shard of it in 0.1 ms; the columns grow by realloc. Columns keep the length of their peak (24 bytes
a row), everything a key needs beyond that is given back when the key goes.

Readers and the writer, without a lock
--------------------------------------
One writer thread; CPython's GIL makes each single list or dict access atomic and keeps program order. A reader must
never credit a block with the mask of another one. That could happen only if a row is freed and given to another key
between the reader's look at keys[row] and at masks[row]:

* The writer adds one to `epoch` after the last release and before it writes the first key of rows it took from `free`.
  A reader that saw the key, and after reading all masks finds `epoch` as it was, had no row re-keyed under it. Proof:
  the row held the key when the reader looked, so its release came later, so the raise of `epoch` before its next key
  came later too, and earlier than that key.
* If `epoch` moved, the reader starts again. After a few such starts it walks with `careful_runs`, which cannot be
  disturbed: key object k, then mask, then keys[row] `is` k. A key object enters the columns once (every stored key is
  a new bytes object) and the reader holds a reference to k, so identity proves that the row was k's all along.
* Half-done writes are harmless: a key in the dict whose row is not written yet fails the comparison with keys[row]; a
  row whose mask is not written yet has mask 0 (nobody); hints and dict entries are always checked against keys[row];
  rows are never taken away from the columns. A mask read is a whole int: it was true at the moment it was read.

What a mask bit stands for is the index's part: see index.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Final

SHARDS: Final = 256
_FIRST_STRETCH: Final = 16
_LONGEST_STRETCH: Final = 512
_STREAK: Final = 6  # neighbouring rows in a row before stretches are tried again
_SORT_BUCKET: Final = 11  # freed rows are sorted 2**11 at a time, about 0.2 ms
_GROWTH: Final = 256
_INTERNED: Final = 65_536

Run = tuple[int, int]
"""(mask, number of consecutive blocks that have it)"""


class Rows:
    """The shared columns. Everything but `lookup`, `runs` and `careful_runs` belongs to the writer thread."""

    __slots__ = ("after", "epoch", "free", "interned", "keys", "masks", "shards", "swept")

    def __init__(self) -> None:
        self.shards: list[dict[bytes, int]] = [{} for _ in range(SHARDS)]
        self.keys: list[bytes | None] = [None]
        self.masks: list[int] = [0]
        self.after: list[int] = [0]
        self.free: list[int] = []
        self.epoch = 0
        self.interned: dict[int, int] = {}
        self.swept: dict[int, list[int]] | None = None

    @property
    def in_use(self) -> int:
        """Distinct content keys held."""
        return len(self.keys) - 1 - len(self.free)

    # ---- writer -------------------------------------------------------------------------------------------------

    def intern(self, mask: int) -> int:
        """The one int object for this value, as a rule (the table starts anew when it is full). O(1)."""
        known = self.interned.get(mask)
        if known is None:
            if len(self.interned) >= _INTERNED:
                self.interned = {}
            self.interned[mask] = known = mask
        return known

    def reserve(self, count: int) -> None:
        """Make sure that `free` has that many rows. Amortized O(1) a row."""
        lack = count - len(self.free)
        if lack > 0:
            lack = max(lack, _GROWTH)
            first = len(self.keys)
            self.masks.extend([0] * lack)
            self.after.extend([0] * lack)
            self.keys.extend([None] * lack)
            self.free[:0] = range(first + lack - 1, first - 1, -1)

    def claim(self, key: bytes) -> int:
        """The key's row, a new one with mask 0 if it has none; the caller must set a bit at once. O(1)."""
        shard = self.shards[key[0]]
        row = shard.get(key)
        if row is None:
            if not self.free:
                self.reserve(1)
            row = self.free.pop()
            self.epoch += 1
            self.keys[row] = key
            shard[key] = row
        return row

    def release(self, row: int) -> None:
        """Free a row: its key goes, the row may be handed out again. O(1)."""
        key = self.keys[row]
        assert key is not None
        self.keys[row] = None
        self.masks[row] = 0
        shard = self.shards[key[0]]
        del shard[key]
        if not shard:
            self.shards[key[0]] = {}  # an emptied dict keeps its table
        if self.swept is None:
            self.free.append(row)
        else:
            self.swept.setdefault(row >> _SORT_BUCKET, []).append(row)

    def begin_sweep(self) -> None:
        """From here on, released rows are put aside until `end_sweep`."""
        self.swept = {}

    def drop_bits(self, rows: list[int], bits: int, pace: Callable[[], None]) -> None:
        """Clear `bits` in these rows, releasing those that nobody holds then; a row may come twice.

        O(rows), `pace` every 64.
        """
        masks = self.masks
        keep = ~bits
        last = last_new = 0
        for start in range(0, len(rows), 64):
            for row in rows[start : start + 64]:
                mask = masks[row]
                if not mask & bits:
                    continue
                if mask is not last:
                    last, last_new = mask, self.intern(mask & keep)
                if last_new:
                    masks[row] = last_new
                else:
                    self.release(row)
            pace()

    def end_sweep(self, pace: Callable[[], None]) -> None:
        """Hand swept rows out again, lowest first, so that the next chains lie in neighbouring rows.

        O(rows), `pace` after every 2,048.
        """
        swept = self.swept or {}
        self.swept = None
        for bucket in sorted(swept, reverse=True):
            rows = swept.pop(bucket)
            rows.sort(reverse=True)
            self.free.extend(rows)
            pace()

    # ---- readers ------------------------------------------------------------------------------------------------

    def lookup(self, key: bytes) -> int:
        """The row that holds the key now, 0 for none. O(1)."""
        row = self.shards[key[0]].get(key, 0)
        return row if self.keys[row] == key else 0

    def runs(self, keys: list[bytes]) -> Iterator[Run]:
        """Masks of the chain from its first block until the first block nobody holds, as runs.

        True only if `epoch` is the same before the first and after the last run. O(blocks): about 25 ns a block where
        rows are neighbours, 100 ns elsewhere.
        """
        column, masks, after = self.keys, self.masks, self.after
        count = len(keys)
        row = self.lookup(keys[0]) if count else 0
        position = 0
        stretch = _FIRST_STRETCH
        while row:
            if stretch:
                # keys[position] was seen at `row`: compare what follows with the rows that follow
                wanted = keys[position : position + stretch]
                here = column[row : row + len(wanted)]
                if here == wanted:
                    stretch = min(2 * stretch, _LONGEST_STRETCH)
                else:
                    del here[_common(here, wanted) :]
                    stretch = _FIRST_STRETCH if len(here) >= _STREAK else 0
                    if not here:
                        return
                length = len(here)
                found = masks[row : row + length]
                row += length - 1
                position += length
            else:
                # scattered rows: one block at a time, until neighbours come again
                found = [masks[row]]
                position += 1
                streak = 0
                while position < count:
                    key = keys[position]
                    following = after[row]
                    if column[following] != key:
                        following = self.lookup(key)
                        if not following:
                            break
                    if following == row + 1:
                        streak += 1
                        if streak == _STREAK:
                            stretch = _FIRST_STRETCH
                            break
                    else:
                        streak = 0
                    row = following
                    found.append(masks[row])
                    position += 1
                    if len(found) == _LONGEST_STRETCH:
                        break
            length = len(found)
            if found.count(found[0]) == length:
                yield found[0], length
            else:
                for mask, same in groupby(found):
                    yield mask, len(list(same))
            if position >= count:
                return
            key = keys[position]
            following = after[row]
            row = following if column[following] == key else self.lookup(key)

    def careful_runs(self, keys: list[bytes]) -> Iterator[Run]:
        """As `runs`, and true whatever the writer does meanwhile: a block re-keyed under the reader ends the chain.

        O(blocks), about 250 ns a block.
        """
        column, masks = self.keys, self.masks
        for wanted in keys:
            row = self.shards[wanted[0]].get(wanted, 0)
            key = column[row]
            if key != wanted:
                return
            mask = masks[row]
            if column[row] is not key:
                return
            yield mask, 1

    # ---- proof --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert every invariant of the columns. O(rows)."""
        assert len(self.keys) == len(self.masks) == len(self.after), "columns differ in length"
        assert self.keys[0] is None, "row 0 has a key"
        assert self.masks[0] == 0, "row 0 has holders"
        assert len(self.shards) == SHARDS
        assert self.swept is None, "a sweep was left unfinished"
        free = set(self.free)
        assert len(free) == len(self.free), "a row is free twice"
        assert 0 not in free, "row 0 is free"
        held = 0
        for number, shard in enumerate(self.shards):
            for key, row in shard.items():
                assert key[0] == number, "key in the wrong shard"
                assert self.keys[row] is key, "dict and column disagree"
                assert self.masks[row], f"row {row} is kept for nobody"
                assert row not in free, f"row {row} is in use and free"
                held += 1
        assert held == self.in_use, f"{held} keys, {self.in_use} rows in use"
        for row in free:
            assert self.keys[row] is None, f"free row {row} has a key"
            assert self.masks[row] == 0, f"free row {row} has holders"
        assert all(0 <= row < len(self.keys) for row in self.after), "hint out of range"


def _common(left: list[bytes | None], right: list[bytes]) -> int:
    """Length of the common beginning, for lists known to differ. O(n) comparisons, most of them in C."""
    low, high = 0, min(len(left), len(right))
    while high - low > 4:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    while low < high and left[low] == right[low]:
        low += 1
    return low
