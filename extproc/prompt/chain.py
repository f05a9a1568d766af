"""Content keys of prompts made of known pieces, remembered piece by piece.

A node stands for "this piece after that node": the keys that become complete inside the piece, the tokens left over
and the last key. A chat that grew by a turn then hashes only the new turn. A plain LRU bounded by bytes; only the
event loop uses it, so there is no lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from typing import Protocol

from kvindex.hashing import DEFAULT_SEED, PLAIN, content_keys

NODE_BYTES = 320  # object, slots, dict entry and key, lists
KEY_BYTES = 57  # a bytes object of 16 and its place in a list


class Piece(Protocol):
    """Tokens with an identity: the same serial always has the same tokens."""

    @property
    def serial(self) -> int: ...
    @property
    def tokens(self) -> bytes: ...


class _Node:
    __slots__ = ("digest", "keys", "serial", "size", "tail")

    def __init__(self, serial: int, keys: list[bytes], tail: bytes, digest: bytes | None) -> None:
        self.serial = serial
        self.keys = keys
        self.tail = tail
        self.digest = digest  # last key so far, None before the first block is full
        self.size = NODE_BYTES + KEY_BYTES * len(keys) + len(tail)


class ChainCache:
    def __init__(self, max_bytes: int = 64 << 20) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self._nodes: OrderedDict[tuple[object, int], _Node] = OrderedDict()
        self._serials = count()

    def __len__(self) -> int:
        return len(self._nodes)

    def keys(
        self,
        pieces: Sequence[Piece],
        block_size: int,
        *,
        seed: int = DEFAULT_SEED,
        root: bytes = PLAIN,
        first_extras: bytes = PLAIN,
        limit: int | None = None,
    ) -> list[bytes]:
        """Content keys of the whole blocks of the pieces' tokens, first block first.

        first_extras  canonical extras of block 0 (a cache salt)
        O(pieces + new blocks), about 0.3 us a known piece and 0.15 us a new block.
        """
        step = 4 * block_size
        before: object = (block_size, seed, root, first_extras)
        digest: bytes | None = None
        tail = b""
        result: list[bytes] = []
        path: list[tuple[object, int]] = []
        nodes = self._nodes
        for piece in pieces:
            place = (before, piece.serial)
            node = nodes.get(place)
            if node is None:
                self.misses += 1
                waiting = tail + piece.tokens
                if digest is None:
                    keys = content_keys(waiting, block_size, root=root, extras=[first_extras], seed=seed)
                else:
                    keys = content_keys(waiting, block_size, parent=digest, seed=seed)
                node = _Node(next(self._serials), keys, waiting[len(keys) * step :], keys[-1] if keys else digest)
                nodes[place] = node
                self.bytes += node.size
            else:
                self.hits += 1
            result += node.keys
            path.append(place)
            before, digest, tail = node.serial, node.digest, node.tail
        # The beginning of a prompt is worth most and must go last: without it the rest cannot be reached.
        for place in reversed(path):
            nodes.move_to_end(place)
        while self.bytes > self.max_bytes:
            self.bytes -= nodes.popitem(last=False)[1].size
        return result if limit is None else result[:limit]

    def clear(self) -> None:
        self._nodes.clear()
        self.bytes = 0

    def check(self) -> None:
        """Asserts that the accounts are right and within the bound."""
        assert self.bytes == sum(node.size for node in self._nodes.values())
        assert self.bytes <= self.max_bytes
