"""What was routed but is not (or never) announced: hits by our own word, beside the index and never inside it.

Speculation   events lag the decision, so siblings that arrive together see no hits and are spread. A routed prompt
              counts as a pending prefix of its instance for a short time, until events confirm it.

    confirmed prefix of the index  | pending blocks right behind it |        reported as: hits, of them speculative
    --------- c blocks ------------|--------- p blocks -------------|

Approximate   engines without events: per instance an LRU of what was sent there, sized like its cache. Every hit is
              speculative.

Both are read and written in one thread (the event loop). Keys are content keys, so adapter and salt are in them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from extproc.decision import Hits

NOTHING = (0, 0, 0)


class Slot(NamedTuple):
    """One rank of one process; a restarted instance has another incarnation and so no pending blocks."""

    instance: str
    incarnation: object
    rank: int


def slot_of(instance: Any, rank: int = 0) -> Slot:
    return Slot(instance.name, instance.incarnation, rank)


class Speculation:
    """Pending prefixes, bounded in time and number.

    ttl         seconds a routed block is believed in
    max_blocks  bound over all instances; the oldest go first
    """

    def __init__(self, *, ttl: float = 2.0, max_blocks: int = 200_000):
        if ttl <= 0 or max_blocks < 1:
            raise ValueError(f"ttl {ttl!r} and max_blocks {max_blocks!r} have to be above 0")
        self._ttl = ttl
        self._max = max_blocks
        self._pending: OrderedDict[tuple[Slot, Hashable], float] = OrderedDict()

    def __len__(self) -> int:
        """Pending blocks, for status pages; the index's counts never include them."""
        return len(self._pending)

    def add(self, instance: Any, rank: int | None, keys: Iterable[Hashable], now: float) -> None:
        """A prompt with these content keys was sent there. O(keys)."""
        slot, until, pending = slot_of(instance, rank or 0), now + self._ttl, self._pending
        for key in keys:
            pending[slot, key] = until
            pending.move_to_end((slot, key))
        self._expire(now)

    def over(self, match: Hits | None, keys: Sequence[Hashable], now: float) -> Overlay:
        """The match with pending blocks counted as device blocks behind the confirmed ones."""
        self._expire(now)
        return Overlay(self, match, keys)

    def behind(self, slot: Slot, keys: Sequence[Hashable], confirmed: int) -> int:
        """Pending blocks right behind `confirmed` ones; the confirmed ones are pending no more (events took over)."""
        pending = self._pending
        if not pending:
            return 0
        for key in keys[:confirmed]:
            pending.pop((slot, key), None)
        count = 0
        for key in keys[confirmed:]:
            if (slot, key) not in pending:
                break
            count += 1
        return count

    def settle(self, instance: Any, rank: int, keys: Iterable[Hashable]) -> None:
        """Events told of these blocks, stored or removed: from now on the index has the word."""
        slot = slot_of(instance, rank)
        for key in keys:
            self._pending.pop((slot, key), None)

    def clear(self, instance: str, rank: int | None = None) -> None:
        """Cleared, dropped or removed: nothing is pending there any more. O(pending)."""
        gone = [at for at in self._pending if at[0].instance == instance and rank in (None, at[0].rank)]
        for at in gone:
            del self._pending[at]

    def _expire(self, now: float) -> None:
        pending = self._pending
        while pending:
            at, until = next(iter(pending.items()))
            if until > now and len(pending) <= self._max:
                break
            del pending[at]


class Overlay:
    """Hits of one prompt: the index's plus pending ones, also for an instance without any stream.

    Each instance is looked up once: the router asks for its hits first, then for the speculative part of them.
    """

    __slots__ = ("_found", "_keys", "_match", "_owner")

    def __init__(self, owner: Speculation, match: Hits | None, keys: Sequence[Hashable]):
        self._owner, self._match, self._keys = owner, match, keys
        self._found: dict[tuple[str, object], tuple[list[tuple[int, int, int]], list[int]]] = {}

    def hits(self, instance: Any, /) -> Sequence[Sequence[int]]:
        return self._look_up(instance)[0]

    def speculative(self, instance: Any, /) -> Sequence[int]:
        """Rank by rank the blocks of `hits` that no event has confirmed."""
        return self._look_up(instance)[1]

    def _look_up(self, instance: Any) -> tuple[list[tuple[int, int, int]], list[int]]:
        found = self._found.get((instance.name, instance.incarnation))
        if found is None:
            rows, counts = [], []
            confirmed = self._match.hits(instance) if self._match is not None else ()
            for rank, (device, host, disk) in enumerate(confirmed or (NOTHING,) * instance.dp_size):
                pending = self._owner.behind(slot_of(instance, rank), self._keys, device + host + disk)
                rows.append((device + pending, host, disk))
                counts.append(pending)
            found = self._found[instance.name, instance.incarnation] = rows, counts
        return found


class Approximate:
    """What each engine probably has, from what was sent to it; for engines without events.

    ttl       seconds after which a block is forgotten
    capacity  blocks an engine keeps
    """

    def __init__(self, *, ttl: float = 120.0, capacity: int = 31_250):
        if ttl <= 0 or capacity < 1:
            raise ValueError(f"ttl {ttl!r} and capacity {capacity!r} have to be above 0")
        self._ttl = ttl
        self._capacity = capacity
        self._sent: dict[Slot, OrderedDict[Hashable, float]] = {}

    def add(self, instance: Any, rank: int | None, keys: Iterable[Hashable], now: float) -> None:
        """A prompt with these content keys was sent there. O(keys)."""
        sent = self._sent.setdefault(slot_of(instance, rank or 0), OrderedDict())
        for key in keys:
            sent[key] = now
            sent.move_to_end(key)
        while sent and (len(sent) > self._capacity or next(iter(sent.values())) + self._ttl <= now):
            sent.popitem(last=False)

    def over(self, match: Hits | None, keys: Sequence[Hashable], now: float) -> Guess:
        """Hits for these keys; `match` is not read, so that both classes are used alike."""
        return Guess(self._sent, keys, now - self._ttl)

    def clear(self, instance: str) -> None:
        """It may have been restarted: nothing is believed of it. O(instances)."""
        for slot in [slot for slot in self._sent if slot.instance == instance]:
            del self._sent[slot]

    def retain(self, instances: Iterable[Any]) -> None:
        """Forgets every process that is not among these."""
        keep = {(one.name, one.incarnation) for one in instances}
        for slot in [slot for slot in self._sent if (slot.instance, slot.incarnation) not in keep]:
            del self._sent[slot]

    def blocks(self) -> dict[str, int]:
        """Blocks by instance, for status pages, which have to call them approximate."""
        out: dict[str, int] = {}
        for slot, sent in self._sent.items():
            out[slot.instance] = out.get(slot.instance, 0) + len(sent)
        return out


class Guess:
    """Approximate hits of one prompt."""

    __slots__ = ("_after", "_found", "_keys", "_sent")

    def __init__(self, sent: Mapping[Slot, Mapping[Hashable, float]], keys: Sequence[Hashable], after: float):
        self._sent, self._keys, self._after = sent, keys, after
        self._found: dict[tuple[str, object], list[int]] = {}

    def hits(self, instance: Any, /) -> Sequence[Sequence[int]]:
        return [(count, 0, 0) for count in self.speculative(instance)]

    def speculative(self, instance: Any, /) -> Sequence[int]:
        of = instance.name, instance.incarnation
        found = self._found.get(of)
        if found is None:
            found = [self._run(self._sent.get(slot_of(instance, rank))) for rank in range(instance.dp_size)]
            self._found[of] = found
        return found

    def _run(self, sent: Mapping[Hashable, float] | None) -> int:
        count = 0
        for key in self._keys if sent is not None else ():
            assert sent is not None
            at = sent.get(key)
            if at is None or at <= self._after:
                break
            count += 1
        return count
