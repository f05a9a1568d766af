"""The objects of a pool that a view holds: turns what is said of objects into what happens to blocks (RFC 1527, 7).

A pool names whole objects. `stored` for an object that is there is a refresh, not a second copy; `removed` follows the
object, not the 64-bit hash, which two objects may share; `cleared` drops the objects of that backend and tenant. This
memory belongs to a view's content, not to a decoder: it is dropped with the content, and a shadow has one of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvindex.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, Event, Pooled, Skipped, Tier

EVERY_TIER = tuple(Tier)


class _Held(NamedTuple):
    tier: Tier
    group: int
    hashes: tuple[EngineHash, ...]


class Objects:
    """At most `limit` of them. Cost: two look-ups an event; about 250 bytes an object."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._owners: dict[tuple[str, str], dict[int, _Held]] = {}
        self._count = 0
        self._loose = False  # blocks were stored that belong to no object

    def clear(self) -> None:
        self._owners.clear()
        self._count = 0
        self._loose = False

    @property
    def count(self) -> int:
        """Objects held."""
        return self._count

    def adopt(self) -> None:
        """Blocks were taken over that belong to no object."""
        self._loose = True

    def resolve(self, events: Iterable[Event]) -> Iterator[Event]:
        """To be read as the events are applied. Raises what `events` raises."""
        for event in events:
            kind = event.__class__
            if isinstance(event, Pooled):
                yield from self._pooled(event)
                continue
            if kind is BlockStored:
                self._loose = True
            elif isinstance(event, AllBlocksCleared):
                self._forget(event.tiers)
            yield event

    def _pooled(self, event: Pooled) -> Iterable[Event]:
        if event.object_key is None:
            return self._cleared(event.owner)
        if event.stored is not None:
            return self._stored(event, event.stored)
        return self._removed(event)

    def _stored(self, event: Pooled, stored: BlockStored) -> Iterable[Event]:
        owned = self._owners.get(event.owner, {})
        number = _number(event, stored.tier)
        new = _Held(stored.tier, stored.group, tuple(stored.hashes))
        old = owned.get(number)
        if old == new:
            return (stored._replace(adds_copy=False),)
        if old is None and self._count >= self._limit:
            return (Skipped("capacity", f"more than max_objects {self._limit} objects", True),)
        owned[number] = new
        self._owners[event.owner] = owned
        if old is not None:
            return (_gone(old), stored)
        self._count += 1
        return (stored,)

    def _removed(self, event: Pooled) -> Iterable[Event]:
        """Without a medium: its copies on every tier. Blocks that belong to no object may be meant by their hashes."""
        owned = self._owners.get(event.owner, {})
        tiers = EVERY_TIER if event.tier is None else (event.tier,)
        found = [held for tier in tiers if (held := owned.pop(_number(event, tier), None)) is not None]
        if found:
            self._count -= len(found)
            if not owned:
                del self._owners[event.owner]
            return [_gone(held) for held in found]
        if event.hashes and self._loose:
            return [BlockRemoved(event.hashes, tier, event.group) for tier in tiers]
        # An object that was never announced holds nothing here, unless what was announced had no object.
        unsaid = event.hashes is None or (self._loose and not event.hashes)
        return (Skipped("unknown_object", "removed object was not announced", unsaid),)

    def _cleared(self, owner: tuple[str, str]) -> Iterable[Event]:
        """All copies of that owner; of the whole stream where objects cannot be told apart."""
        if self._loose or not self._owners:
            self.clear()
            return (AllBlocksCleared(EVERY_TIER),)
        gone = self._owners.pop(owner, {})
        self._count -= len(gone)
        places: dict[tuple[Tier, int], list[EngineHash]] = {}
        for held in gone.values():
            places.setdefault((held.tier, held.group), []).extend(held.hashes)
        return [BlockRemoved(hashes, tier, group) for (tier, group), hashes in sorted(places.items())]

    def _forget(self, tiers: tuple[Tier, ...]) -> None:
        if set(tiers) == set(Tier):
            self.clear()
            return
        for owner, owned in list(self._owners.items()):
            kept = {number: held for number, held in owned.items() if held.tier not in tiers}
            self._count -= len(owned) - len(kept)
            self._owners[owner] = kept
            if not kept:
                del self._owners[owner]


def _gone(held: _Held) -> BlockRemoved:
    return BlockRemoved(list(held.hashes), held.tier, held.group)


def _number(event: Pooled, tier: Tier) -> int:
    return xxh3_64_intdigest((event.object_key or "").encode("utf-8", "surrogatepass"), int(tier))
