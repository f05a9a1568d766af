"""A pool of host memory or disk that many engines share: its copies count for each of its members (D1).

    engine-1 --stored (hash, tokens)--> its view --learn (hash, row)---+
    engine-2 --stored (hash, tokens)--> its view --learn---------------+--> PoolView: hash -> row, copies on host, disk
    pool     --stored (hash), removed (hash)---------------------------+        |
                                                                                v
    find: masks of the members, completed with the pool's bits <----------- members

A pool's events name blocks by hashes that its member engines computed. So the pool's own content keeps what the members
explain (the last `max_blocks` hashes, whoever still has the block) next to what the pool says it holds; which of the
two comes first does not matter. In the content an explanation is a copy on the device tier: a pool has none of its own
there, and nobody is credited with it. A hash nobody explained is remembered, the last `max_unexplained` of them.

What the pool holds is dropped when its stream loses its run; explanations stay, as they are no less true. They outlive
the engine process that gave them: a hash stands for the block's content. If one is ever explained in two ways it
stands for nothing, and is forgotten.

Hashes are compared by their low 64 bits (of bytes the last eight, big endian), the form in which pools publish them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import ClassVar

from kvindex.content import Content
from kvindex.errors import KVIndexError
from kvindex.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, Event, Outcome, Tier
from kvindex.index import PrefixIndex, StreamView
from kvindex.walk import TierBlocks, Walk

_LOW = (1 << 64) - 1
_OWN = (Tier.HOST, Tier.DISK)


def open_pool(
    index: PrefixIndex, *, max_blocks: int = 262_144, max_unanchored: int = 65_536, max_places: int = 64, name: str = ""
) -> PoolView:
    """A new, empty, invisible pool of the index. Not counted against its `max_streams`. O(1).

    max_blocks      hashes explained at once, and hashes held by the pool at once
    max_unanchored  bounds both the hashes nobody explained, and blocks with tokens whose parent is unknown
    """
    view = PoolView(index, Walk.CASCADE, name, 2 * max_blocks, max_unanchored, max_places)
    index._views.append(view)
    return view


class PoolContent(Content):
    """Content whose device tier is what the members explained. Writer thread."""

    __slots__ = ()

    def _reset(self) -> None:
        super()._reset()
        self._place(Tier.DEVICE, 0)  # before the pool's own groups take all places: members must not fail for that

    def explained(self, hash_: int, as_row: int | None = None) -> bool:
        """Has it a copy on the device tier, which means: an explanation (as this row)?"""
        number = self._number(hash_)
        row = self.shards[number].get(hash_)
        if row is None or as_row not in (None, row):
            return False
        return bool(self.odd[number].get(hash_, self.home_unit) & self._digits[Tier.DEVICE])

    def unexplained(self, hash_: int) -> bool:
        """Is it known without tokens?"""
        return self.shards[self._number(hash_)].get(hash_) == 0 and hash_ not in self.unanchored

    def explain(self, hash_: int, row: int) -> bool:
        """The hash is the block of this row; True when that takes one more place. O(1)."""
        number = self._number(hash_)
        known = self.shards[number].get(hash_)
        if known and known != row:
            self.forget(hash_)
            return False
        if known is not None and self.explained(hash_):
            return False
        if known == 0:
            self._map(hash_, number, row)
        self._grow()
        self._add(hash_, self._number(hash_), row, self._place(Tier.DEVICE, 0))
        if not known and self.unanchored:
            self._anchor([hash_])
        return True

    def forget(self, hash_: int) -> None:
        """Every copy of it goes, its explanation included. O(1)."""
        number = self._number(hash_)
        row = self.shards[number].get(hash_)
        if row is None:
            return
        copies = self.odd[number].get(hash_, self.home_unit)
        self._set(hash_, number, row, copies, 0)
        for tier in Tier:
            if row and copies & self._digits[tier]:
                self._lose(row, tier)


class PoolView(StreamView):
    """The write handle of a pool's stream: a StreamView whose copies count for `members`, never for itself.

    It has no shadow: a pool's stream is not recovered from a snapshot.
    """

    __slots__ = ("_explained", "_members", "_unexplained", "disputed")

    is_pool: ClassVar[bool] = True
    content_type: ClassVar[type[Content]] = PoolContent
    _content: PoolContent

    def __init__(
        self, index: PrefixIndex, walk: Walk, name: str, max_blocks: int, max_unanchored: int, max_places: int
    ) -> None:
        super().__init__(index, walk, name, max_blocks, max_unanchored, max_places)
        self._members: tuple[StreamView, ...] = ()
        self._explained: deque[int] = deque()  # oldest first; all that are explained, and some that were
        self._unexplained: deque[int] = deque()
        self.disputed = 0
        """Hashes that were explained in two ways."""

    @property
    def members(self) -> tuple[StreamView, ...]:
        return self._members

    def serve(self, members: Iterable[StreamView]) -> None:
        """Its copies count for these streams, as far as they are visible, and they explain its hashes. O(streams)."""
        self._usable()
        wanted = tuple(members)
        if wanted != self._members:
            self._members = wanted
            self._expose(0)

    @property
    def blocks(self) -> TierBlocks:
        """Blocks of the pool that can be credited, on each tier."""
        _, host, disk = self._content.counts
        return TierBlocks(0, host, disk)

    @property
    def explanations(self) -> int:
        """Hashes whose blocks are known from the members, held by the pool or not."""
        return self._content.counts[0]

    def learn(self, known: Iterable[tuple[EngineHash, int]]) -> None:
        """Pairs of a member's engine hash and its block's row (0 = none). About 3 us each."""
        if self.closed:
            return
        content, explained = self._content, self._explained
        bound = content.max_blocks // 2
        for hash_, row in known:
            if not row:
                continue
            name = _name(hash_)
            if content.explained(name, row):
                continue
            before = content.known
            while explained and (content.counts[0] >= bound or before >= content.max_blocks):
                content.remove(BlockRemoved([explained.popleft()], Tier.DEVICE))
                before = content.known
            if before >= content.max_blocks and not content.unexplained(name):
                continue
            if content.explain(name, row):
                explained.append(name)
            elif content.known < before:
                self.disputed += 1
        if len(explained) > 2 * content.counts[0] + 64:
            self._explained = deque(name for name in dict.fromkeys(explained) if content.explained(name))

    def apply(self, event: Event) -> Outcome:
        """As for a stream. Copies said to be on a device count as host memory: no member's device is meant."""
        if isinstance(event, BlockStored):
            parent = None if event.parent is None else _name(event.parent)
            event = event._replace(hashes=_names(event.hashes), parent=parent, tier=_tier(event.tier))
            outcome = super().apply(event)
            if not event.tokens and event.adds_copy:
                self._bound(event.hashes)
            return outcome
        if isinstance(event, BlockRemoved):
            event = BlockRemoved(_names(event.hashes), _tier(event.tier), event.group)
        elif isinstance(event, AllBlocksCleared):
            event = AllBlocksCleared(_OWN)
        return super().apply(event)

    def clear(self) -> None:
        """Drop what the pool holds; what the members explained stays. O(known hashes), paced."""
        self._usable()
        self._clear(_OWN)

    def _clear(self, tiers: Sequence[Tier]) -> None:
        content = self._content
        self._unexplained.clear()
        if content.unmapped or content.counts[Tier.HOST] or content.counts[Tier.DISK]:
            super()._clear(tiers)

    def shadow(self) -> StreamView:
        raise KVIndexError(f"pool {self.name}: a pool has no snapshots")

    def _bound(self, hashes: list[EngineHash]) -> None:
        """Keep the hashes nobody explained within their bound, the oldest go first."""
        content, queue = self._content, self._unexplained
        queue.extend(name for name in hashes if isinstance(name, int) and content.unexplained(name))
        while content.remembered > content.max_unanchored and queue:
            name = queue.popleft()
            if content.unexplained(name):
                content.forget(name)
        if len(queue) > 2 * content.remembered + 64:
            self._unexplained = deque(name for name in dict.fromkeys(queue) if content.unexplained(name))


def _name(hash_: EngineHash) -> int:
    return int.from_bytes(hash_[-8:], "big") if isinstance(hash_, bytes) else hash_ & _LOW


def _names(hashes: list[EngineHash]) -> list[EngineHash]:
    return [_name(one) for one in hashes]


def _tier(tier: Tier) -> Tier:
    return Tier.HOST if tier is Tier.DEVICE else tier
