"""The columns all streams share: one row a content key, and the lookup that readers run beside the writer.

    keys[row]        the content key, None while the row is free
    masks[row]       int: who holds the block; bit 3*slot + tier
    after[row]       row of the block stored first after this one, as far as keys[] still says so
    heads            content key -> row, for every block that `after` of its parent does not lead to: first blocks of
                     prompts, second children, blocks whose parent is gone. One dict, or 256 by the key's first byte
    free             rows to hand out, next one last; older ones are put by in `spare`, lists of 4,096
    row 0            belongs to no block: keys[0] None, masks[0] 0

A block is looked up from its parent's row: `after` if the key there is right, else `heads`. So a plain chain costs one
dict entry, not one a block. A row is in use exactly while its mask is not zero: the mask is also the reference count.
When a row is released, the child its `after` leads to moves into `heads`; a slot of `after` is given to another child
only when the row it names is free. So whatever is in use stays within reach of its parent's key, holes or not.

Equal masks are mostly the same int object (`intern`), which lets `runs` find their boundaries by identity. Blocks of
one event take neighbouring rows where they can, and freed rows are handed out again in an order that keeps it so:
`runs` then compares whole stretches of keys in one list comparison, and walks block by block elsewhere.

No object of a block is tracked by the garbage collector, and none outlives its block: one that did would keep the
memory around it from going back to the system (so `free` holds numbers, not objects). Nothing here holds the GIL long:
a dict of a million keys resizes in 50 ms, one of 8,192 in 0.3 ms, so a dict that outgrows that is split; the columns
grow by realloc. Columns keep the length of their peak (28 bytes a row), everything a key needs beyond that is given
back when the key goes.

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
  misled: key object k, then mask, then keys[row] `is` k. A key object enters the columns once (every stored key is
  a new bytes object) and the reader holds a reference to k, so identity proves that the row was k's all along.
* Half-done writes are harmless: rows found through `after` or `heads` are always checked against keys[row], whose key
  is written last; a row whose mask is not written yet has mask 0 (nobody); rows are never taken away from the columns.
  A mask read is a whole int: it was true at the moment it was read. A look-up that misses because a row on the way was
  re-keyed leaves something out, and `epoch` tells.

What a mask bit stands for is the index's part: see index.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from itertools import chain, groupby
from typing import Final

_SPLIT: Final = 2_048  # entries of `heads` that stay in one dict: cutting them takes 0.3 ms, once
_PARTS: Final = 256
_FIRST_STRETCH: Final = 16
_LONGEST_STRETCH: Final = 512
_STREAK: Final = 6  # neighbouring rows in a row before stretches are tried again
BUCKET: Final = 11  # swept rows are sorted 2**11 at a time, about 0.2 ms
_GROWTH: Final = 256
_SPARE: Final = 4_096
_INTERNED: Final = 4_096  # dropped whole
_PACED: Final = 64

Run = tuple[int, int]
"""(mask, number of consecutive blocks that have it)"""
Buckets = dict[int, list[int]]
"""Rows to sweep, by `row >> BUCKET`"""


class Rows:
    """The shared columns. Everything but `lookup`, `runs` and `careful_runs` belongs to the writer thread."""

    __slots__ = ("_interned", "_pace", "after", "epoch", "free", "heads", "keys", "masks", "spare")

    def __init__(self, pace: Callable[[], None] = lambda: None) -> None:
        self._pace = pace
        self.heads: list[dict[bytes, int]] = [{}]
        self.keys: list[bytes | None] = [None]
        self.masks: list[int] = [0]
        self.after: list[int] = [0]
        self.free = array("I")
        self.spare: list[array[int]] = []
        self.epoch = 0
        self._interned: dict[int, int] = {}

    @property
    def in_use(self) -> int:
        """Distinct content keys held."""
        return len(self.keys) - 1 - len(self.free) - _SPARE * len(self.spare)

    # ---- writer -------------------------------------------------------------------------------------------------

    def intern(self, mask: int) -> int:
        """The one int object for this value, as a rule (the table starts anew when it is full). O(1)."""
        known = self._interned.get(mask)
        if known is None:
            if len(self._interned) >= _INTERNED:
                self._interned = {}
            self._interned[mask] = known = mask
        return known

    def next_free(self, count: int) -> list[int]:
        """The rows that will be handed out next, in that order; they stay in `free`. Amortized O(count)."""
        free = self.free
        lack = count - len(free)
        while lack > 0 and self.spare:
            free[:0] = self.spare.pop()
            lack -= _SPARE
        if lack > 0:
            lack = max(lack, _GROWTH)
            first = len(self.keys)
            # `realloc` may copy a column: 0.3 ms at 262,144 rows, and all three come to it at once
            self.masks.extend([0] * lack)
            self._pace()
            self.after.extend([0] * lack)
            self._pace()
            self.keys.extend([None] * lack)
            self._pace()
            free[:0] = array("I", range(first + lack - 1, first - 1, -1))
        return free[: -count - 1 : -1].tolist()

    def seek(self, key: bytes, parent: int) -> int:
        """The key's row, 0 for none; `parent` as for `claim`. O(1)."""
        child = self.after[parent]
        return child if self.keys[child] == key else self._head(key).get(key, 0)

    def claim(self, key: bytes, parent: int) -> int:
        """The key's row, a new one with mask 0 if it has none; the caller must set a bit at once. O(1).

        parent   row of the block before; 0 = it has none, or there is no block before
        """
        column, after = self.keys, self.after
        child = after[parent]
        if column[child] == key:
            return child
        row = self._head(key).get(key)
        if row is None:
            if not self.free:
                self.next_free(1)
            row = self.free.pop()
            self.epoch += 1
            after[row] = 0
            if parent and column[child] is None:
                after[parent] = row
            else:
                self._add_head(key, row)
            column[row] = key
        return row

    def listed(self, key: bytes) -> dict[bytes, int]:
        """The part of `heads` that has the key, if any has. To be read only."""
        return self._head(key)

    def unlisted(self) -> list[dict[bytes, int]]:
        """Rows by key, in parts by the key's first byte, for every key that only `after` of its parent leads to.

        For a writer who does not know parents. O(rows), paced.
        """
        found: list[dict[bytes, int]] = [{} for _ in range(_PARTS)]
        for row, key in enumerate(self.keys):
            if key is not None and key not in self._head(key):
                found[key[0]][key] = row
            if row % _PACED == 0:
                self._pace()
        return found

    def parents(self) -> bytearray:
        """For each row how many rows in use lead to it by `after`: 0, 1 or 2 (more). O(rows), paced.

        A row that is not in `heads` and has one such row is that one's child; `after` alone may be out of date.
        """
        counts = bytearray(len(self.keys))
        for row, child in enumerate(self.after):
            if child and self.keys[row] is not None and counts[child] < 2:
                counts[child] += 1
            if row % _PACED == 0:
                self._pace()
        return counts

    def _head(self, key: bytes) -> dict[bytes, int]:
        """The part of `heads` that has the key, if any has."""
        heads = self.heads
        return heads[key[0] & len(heads) - 1]

    def _add_head(self, key: bytes, row: int) -> None:
        part = self._head(key)
        part[key] = row
        if len(part) > _SPLIT and len(self.heads) == 1:
            heads: list[dict[bytes, int]] = [{} for _ in range(_PARTS)]
            for key, row in part.items():
                heads[key[0]][key] = row
            self.heads = heads

    def claim_chain(self, keys: list[bytes], parent: int) -> list[int] | None:
        """Rows of consecutive blocks, if all have neighbouring rows already; else None. O(blocks), in C."""
        child = self.seek(keys[0], parent)
        count = len(keys)
        if not child or self.keys[child : child + count] != keys:
            return None
        rows = [child, *self.after[child : child + count - 1]]
        return rows if rows == list(range(child, child + count)) else None

    def append_chain(self, keys: list[bytes], parent: int, rows: list[int], bit: int) -> bool:
        """Put consecutive blocks into `rows` (as `next_free` gave them), held by `bit`, if all are new; else nothing.

        O(blocks), 0.15 us each.
        """
        column, masks, after, heads = self.keys, self.masks, self.after, self.heads
        child = after[parent]
        if column[child] == keys[0]:
            return False
        if len(heads) == 1:
            if not heads[0].keys().isdisjoint(keys):
                return False
        elif [True for key in keys if key in heads[key[0]]]:
            return False
        count = len(rows)
        self.epoch += 1
        del self.free[-count:]
        first = rows[0]
        if rows[-1] - first == count - 1 and rows == sorted(rows):  # free rows are distinct: neighbours
            after[first : first + count] = [*rows[1:], 0]
            masks[first : first + count] = [bit] * count
            column[first : first + count] = keys
        else:
            for key, row, following in zip(keys, rows, [*rows[1:], 0], strict=True):
                after[row] = following
                masks[row] = bit
                column[row] = key
        if parent and column[child] is None:
            after[parent] = first
        else:
            self._add_head(keys[0], first)
        return True

    def leave(self, rows: list[int], bits: int) -> None:
        """Clear `bits` in these rows; each has one of them. Rows nobody holds then are freed. O(rows)."""
        masks, keep = self.masks, ~bits
        sole = last = last_new = 0
        for row in rows:
            mask = masks[row]
            if mask is not last:
                last, last_new = mask, self.intern(mask & keep)
            masks[row] = last_new
            sole += not last_new
        if sole == len(rows):
            self._release(rows)
        elif sole:
            self._release([row for row in rows if not masks[row]])

    def release(self, row: int) -> None:
        """Free a row: its key goes, the row may be handed out again. O(1)."""
        self.masks[row] = 0
        self._release([row])

    def _release(self, rows: list[int]) -> None:
        """Free rows whose masks are 0 already, the last one to be handed out first."""
        column, after, heads = self.keys, self.after, self.heads
        cut = len(heads) - 1
        for row in rows:
            key = column[row]
            assert key is not None
            column[row] = None
            part = heads[key[0] & cut]
            if key in part:
                del part[key]
                if not part:
                    heads[key[0] & cut] = {}  # an emptied dict keeps its table
        free = self.free
        free.extend(rows)
        while len(free) > 2 * _SPARE:
            self.spare.append(free[:_SPARE])
            del free[:_SPARE]
        for row in rows:
            child = after[row]
            orphan = column[child]
            if orphan is not None:
                self._add_head(orphan, child)
            after[row] = 0  # not before: a reader on its way finds the child either way

    def sweep(self, buckets: Buckets, bits: int, pace: Callable[[], None]) -> None:
        """Clear `bits` in many rows (a row may come twice), and empty `buckets`.

        Highest row first: a chain goes from its end, through memory in order, and what is released is handed out again
        lowest first, so that the next chains lie in neighbouring rows. O(rows), `pace` every 64.
        """
        masks = self.masks
        keep = ~bits
        last = last_new = 0
        for bucket in sorted(buckets, reverse=True):
            rows = buckets.pop(bucket)
            rows.sort(reverse=True)
            for start in range(0, len(rows), _PACED):
                gone = []
                for row in rows[start : start + _PACED]:
                    mask = masks[row]
                    if not mask & bits:
                        continue
                    if mask is not last:
                        last, last_new = mask, self.intern(mask & keep)
                    masks[row] = last_new
                    if not last_new:
                        gone.append(row)
                if gone:
                    self._release(gone)
                pace()

    # ---- readers ------------------------------------------------------------------------------------------------

    def lookup(self, key: bytes) -> int:
        """The row of a first block (or of another one in `heads`), 0 for none. O(1)."""
        row = self._head(key).get(key, 0)
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
            # keys[position] was seen at `row`
            if stretch:
                # compare what follows with the rows that follow
                wanted = keys[position : position + stretch]
                here = column[row : row + len(wanted)]
                whole = here == wanted
                if not whole:
                    del here[_common(here, wanted) :]
                    if not here:
                        return
                    stretch = _FIRST_STRETCH if len(here) >= _STREAK else 0
                length = len(here)
                found = masks[row : row + length]
                row += length - 1
                position += length
            else:
                # scattered rows: one block at a time, until neighbours come again
                whole = False
                found = [masks[row]]
                streak = 0
                for key in keys[position + 1 : position + _LONGEST_STRETCH]:
                    following = after[row]
                    if column[following] != key:
                        following = self.lookup(key)
                        if not following:
                            break
                    if following - row == 1:
                        streak += 1
                        if streak == _STREAK:
                            stretch = _FIRST_STRETCH
                            break
                    else:
                        streak = 0
                    row = following
                    found.append(masks[row])
                length = len(found)
                position += length
            if found.count(found[0]) == length:
                yield found[0], length
            else:
                for mask, same in groupby(found):
                    yield mask, len(list(same))
            if position >= count:
                return
            key = keys[position]
            following = after[row]
            if column[following] != key:
                following = self.lookup(key)
            elif whole and following - row == 1:
                stretch = min(2 * stretch, _LONGEST_STRETCH)
            row = following

    def careful_runs(self, keys: list[bytes]) -> Iterator[Run]:
        """As `runs`, and true whatever the writer does meanwhile: a block re-keyed under the reader ends the chain.

        O(blocks), about 250 ns a block.
        """
        column, masks, after = self.keys, self.masks, self.after
        row = 0
        for wanted in keys:
            row = after[row]
            key = column[row]
            if key != wanted:
                row = self._head(wanted).get(wanted, 0)
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
        column = self.keys
        assert len(column) == len(self.masks) == len(self.after), "columns differ in length"
        assert column[0] is None, "row 0 has a key"
        assert self.masks[0] == self.after[0] == 0, "row 0 has holders or a child"
        handed_back = [*self.free, *chain.from_iterable(self.spare)]
        free = set(handed_back)
        assert len(free) == len(handed_back), "a row is free twice"
        assert 0 not in free, "row 0 is free"
        assert len(self.heads) in (1, _PARTS)
        within_reach = {self.after[row] for row in range(1, len(column)) if row not in free}
        for part in self.heads:
            for key, row in part.items():
                assert self._head(key) is part, "key in the wrong part"
                assert column[row] == key, "dict and column disagree"
                within_reach.add(row)
        for row in range(1, len(column)):
            assert 0 <= self.after[row] < len(column), "hint out of range"
            if row in free:
                assert column[row] is None, f"free row {row} has a key"
                assert self.masks[row] == 0, f"free row {row} has holders"
            else:
                assert column[row] is not None, f"row {row} is lost"
                assert self.masks[row], f"row {row} is kept for nobody"
                assert row in within_reach, f"row {row} is out of reach"
        used = [key for key in column if key is not None]
        assert len(set(used)) == len(used) == self.in_use, "a key has two rows"


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
