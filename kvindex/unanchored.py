"""Blocks of one stream whose tokens are known but whose parent's content key is not: kept until it is.

    blocks     hash -> (parent hash, tokens, extras)
    _children  parent hash -> the hashes that wait for it (one hash, a dict of several, or Parts of many)

Only the parent's key is missing, so a whole subtree may wait: each block for its own parent, in any order of arrival.
Dicts, tuples and keys of plain values: the garbage collector tracks none of them for long. No dict becomes large.
"""

from __future__ import annotations

from collections.abc import Callable

from kvindex.events import EngineHash
from kvindex.shards import WHOLE, Parts

Block = tuple[EngineHash, bytes, bytes]
"""(parent, packed tokens, canonical extras)"""


class Unanchored:
    """Every operation O(1), but for `children` (O(children))."""

    __slots__ = ("_children", "blocks")

    def __init__(self) -> None:
        self.blocks: Parts[Block] = Parts()
        self._children: Parts[EngineHash | dict[EngineHash, None] | Parts[None]] = Parts()

    def __len__(self) -> int:
        return len(self.blocks)

    def __contains__(self, hash_: EngineHash) -> bool:
        return hash_ in self.blocks

    def __bool__(self) -> bool:
        return bool(self.blocks)

    def put(self, hash_: EngineHash, block: Block) -> None:
        """Add a block, or tell more of one: a later announcement wins, unless only the earlier one has extras.

        Device events tell the extras of a block, offload events of the same block do not.
        """
        old = self.blocks.get(hash_)
        if old is not None:
            if old[2] and not block[2]:
                return
            self.drop(hash_)
        self.blocks[hash_] = block
        parent = block[0]
        others = self._children.get(parent)
        if others is None:
            self._children[parent] = hash_
        elif isinstance(others, (dict, Parts)):
            others[hash_] = None
            if len(others) == WHOLE and isinstance(others, dict):
                many: Parts[None] = Parts()
                for one in others:
                    many[one] = None
                self._children[parent] = many
        else:
            self._children[parent] = {others: None, hash_: None}

    def drop(self, hash_: EngineHash) -> None:
        """Forget a block that is here."""
        parent = self.blocks.pop(hash_)[0]
        children = self._children[parent]
        if isinstance(children, (dict, Parts)) and len(children) > 1:
            children.pop(hash_)
        else:
            self._children.pop(parent)

    def awaits(self, parent: EngineHash) -> bool:
        """Does any block wait for this parent?"""
        return parent in self._children

    def children(self, parent: EngineHash) -> list[EngineHash]:
        """The blocks that wait for this parent."""
        children = self._children.get(parent)
        if children is None:
            return []
        return list(children) if isinstance(children, (dict, Parts)) else [children]

    def drain(self, pace: Callable[[], None]) -> None:
        """Forget everything, in slices."""
        self.blocks.drain(pace)
        for _, children in self._children.items():
            if isinstance(children, Parts):
                children.drain(pace)
        self._children.drain(pace)

    def check(self) -> None:
        """Assert that both dicts say the same. O(blocks)."""
        waiting: dict[EngineHash, set[EngineHash]] = {}
        for hash_, (parent, _, _) in self.blocks.items():
            waiting.setdefault(parent, set()).add(hash_)
        assert waiting == {parent: set(self.children(parent)) for parent, _ in self._children.items()}
