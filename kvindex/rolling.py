"""Blocks by the hashes that conductors use: of their tokens alone, without adapter or salt.

    local[i] = XXH3-64(tokens of block i as u32 LE, seed 1337)                   MindIE Motor; `tokens_hash` of a push
    seq[0] = local[0], seq[i] = XXH3-64(seq[i-1] u64 LE || local[i] u64 LE)      rolling, RFC 1527 (Mooncake)

A block that was announced with its tokens is found by its content key; `RollingNames` tells it for a rolling hash. One
that was pushed with the hash of its tokens alone has no such key: it is kept under a chain of its own, in which the
hash stands for the tokens (`stand_in`, root `HASHED`), so parents, copies and tiers are as for any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from typing import Final

from xxhash import xxh3_64_intdigest

from kvindex.events import BlockStored
from kvindex.hashing import content_keys

ROLLING_SEED: Final = 1337
HASHED: Final = b"H"
"""Namespace of blocks of which only a hash is known; `hashing.root_bytes` gives no such."""
_PAIR = Struct("<QQ").pack


def local_hashes(tokens: bytes, block_size: int) -> list[int]:
    """Of the whole blocks of packed tokens. O(blocks), about 0.1 us each."""
    step = 4 * block_size
    return [
        xxh3_64_intdigest(tokens[start : start + step], ROLLING_SEED)
        for start in range(0, len(tokens) // step * step, step)
    ]


def rolled(local: Iterable[int], parent: int | None = None) -> list[int]:
    """Rolling hashes of a run of blocks; `parent`: that of the block before, None = the first one starts the prompt."""
    found: list[int] = []
    for one in local:
        parent = one if parent is None else xxh3_64_intdigest(_PAIR(parent, one), ROLLING_SEED)
        found.append(parent)
    return found


def stand_in(local: Iterable[int], block_size: int) -> bytes:
    """What stands for the tokens of blocks of which only the local hash is known; b"" for blocks of one token, which
    have no room for it."""
    if block_size < 2:
        return b""
    rest = bytes(4 * block_size - 8)
    return b"".join(one.to_bytes(8, "little") + rest for one in local)


def hashed_keys(local: Iterable[int], block_size: int, seed: int) -> list[bytes]:
    """Content keys of blocks that were pushed with these local hashes alone."""
    return content_keys(stand_in(local, block_size), block_size, root=HASHED, seed=seed)


class RollingNames:
    """Rolling hash -> content key, of plain blocks and of those pushed by hash. One writer thread, any readers.

    keys         row -> key, as the index has them now. A name of a block that is gone is dropped when names are more
                 than twice the `block_count` of the index
    has_hashed   whether a block was ever pushed by its hash alone
    """

    def __init__(
        self,
        seed: int,
        *,
        keys: Sequence[bytes | None],
        block_count: Callable[[], int],
        pace: Callable[[], None],
        spare: int = 65_536,
    ) -> None:
        self.has_hashed = False
        self._seed = seed
        self._keys = keys
        self._block_count = block_count
        self._pace = pace
        self._spare = spare
        self._names: dict[bytes, int] = {}
        self._rows: dict[bytes, int] = {}
        self._plain: dict[int, bytes] = {}
        self._hashed: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._names)

    def learn(self, event: BlockStored, parent_row: int, rows: Sequence[int]) -> None:
        """A stored event with tokens, or what stands for them: the rows of the block before and of its own, 0 = none.

        Blocks after one that has no name get none: of an adapter, salted, or told before the block they follow.
        O(blocks), 0.7 us each.
        """
        hashed = event.root == HASHED
        if event.root and not hashed:
            return
        before: int | None = None
        parent_key: bytes | None = None
        if event.parent is not None:
            parent_key = self._keys[parent_row]
            before = None if parent_key is None else self._names.get(parent_key)
            if before is None:
                return
        size = event.block_size
        if hashed:
            self.has_hashed = True
            step = 4 * size
            local = [int.from_bytes(event.tokens[at : at + 8], "little") for at in range(0, len(event.tokens), step)]
        else:
            local = local_hashes(event.tokens, size)
        keys = content_keys(event.tokens, size, root=event.root, parent=parent_key, seed=self._seed)
        table = self._hashed if hashed else self._plain
        for key, name, row in zip(keys, rolled(local, before), rows, strict=True):
            if self._keys[row] != key:  # salted, or known as another block
                return
            self._names[key] = name
            self._rows[key] = row
            table[name] = key
        if len(self._names) > 2 * self._block_count() + self._spare:
            self._forget()

    def chains(self, names: Sequence[int]) -> list[list[bytes]]:
        """Content keys of the blocks with these rolling hashes, as far as they are known. Any thread."""
        found: list[list[bytes]] = []
        for table in (self._plain, self._hashed):
            keys: list[bytes] = []
            for name in names:
                key = table.get(name)
                if key is None:
                    break
                keys.append(key)
            found.append(keys)
        return found

    def _forget(self) -> None:
        for count, (key, row) in enumerate(list(self._rows.items())):
            if self._keys[row] != key:
                del self._rows[key]
                name = self._names.pop(key)
                for table in (self._plain, self._hashed):
                    if table.get(name) == key:
                        del table[name]
            if count % 64 == 0:
                self._pace()
