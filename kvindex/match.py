"""What a look-up found, instance by instance and rank by rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from kvindex.fleet import Instance
from kvindex.index import StreamView, TierBlocks

NO_BLOCKS = TierBlocks(0, 0, 0)


class Ranks(NamedTuple):
    """The views of one instance, dp_rank by dp_rank; None = no stream of that rank is open."""

    incarnation: str
    views: tuple[StreamView | None, ...]


class Match:
    """What each instance of the pool holds of one prompt, in blocks. Immutable; every answer is a look-up or two.

    An instance may be named or given as `Instance`: then its incarnation must be the one whose events were followed,
    else nothing is credited (a restarted process has none of the old one's blocks).
    """

    __slots__ = ("_found", "_table")

    def __init__(self, table: Mapping[str, Ranks], found: Mapping[StreamView, TierBlocks]) -> None:
        self._table = table
        self._found = found

    def __bool__(self) -> bool:
        """True when any stream holds at least the first block."""
        return bool(self._found)

    def rank(self, instance: Instance | str, dp_rank: int) -> TierBlocks:
        """Blocks of one rank; zeros when it has none, is unknown or not synchronized."""
        hits = self.hits(instance)
        return hits[dp_rank] if 0 <= dp_rank < len(hits) else NO_BLOCKS

    def hits(self, instance: Instance | str) -> tuple[TierBlocks, ...]:
        """Blocks rank by rank, `dp_size` entries; () for an instance whose streams are not followed."""
        ranks = self._ranks(instance)
        if ranks is None:
            return ()
        get = self._found.get
        return tuple(NO_BLOCKS if view is None else get(view, NO_BLOCKS) for view in ranks.views)

    def minimum(self, instance: Instance | str) -> TierBlocks:
        """Blocks of the rank that holds least (D13 `dp: min`): a missing or unsynchronized rank makes it zeros."""
        ranks = self._ranks(instance)
        return NO_BLOCKS if ranks is None else self._lowest(ranks.views)

    def _lowest(self, views: tuple[StreamView | None, ...]) -> TierBlocks:
        get: Callable[[StreamView | None, TierBlocks], TierBlocks] = self._found.get  # type: ignore[assignment]
        if len(views) == 1:
            return get(views[0], NO_BLOCKS)
        return min((get(view, NO_BLOCKS) for view in views), key=_order, default=NO_BLOCKS)

    @property
    def best(self) -> tuple[str, TierBlocks] | None:
        """The instance with the most blocks (by `minimum`) and those blocks, None when nobody has any. O(instances)."""
        if not self._found:
            return None
        best: tuple[str, TierBlocks] | None = None
        most = (0, 0, 0)
        for name, ranks in self._table.items():
            blocks = self._lowest(ranks.views)
            if blocks is not NO_BLOCKS and (order := _order(blocks)) > most:
                best, most = (name, blocks), order
        return best

    def _ranks(self, instance: Instance | str) -> Ranks | None:
        if instance.__class__ is str:
            return self._table.get(instance)
        ranks = self._table.get(instance.name)  # type: ignore[union-attr]
        if ranks is not None and ranks.incarnation != instance.incarnation:  # type: ignore[union-attr]
            return None
        return ranks


def _order(blocks: TierBlocks) -> tuple[int, int, int]:
    return (blocks[0] + blocks[1] + blocks[2], blocks[0], blocks[1])
