"""Events that are handed over instead of published (`POST /events`): one rank's view, and what its reports say.

A push has no connection and no sequence, but an answer: whoever sent it knows which events were not taken over. So a
refused event costs nothing else, unless it said that blocks are gone: then what the rank holds is in doubt and dropped.

`event_id` rises within one sender. The same number with the same event is a repetition and changes nothing; a number
at or below one that came before, with another event, is a new sender's (D5): what the old one brought is dropped.
Senders leave numbers out (other ranks, other pools), so a gap shows nothing.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest

from kvindex.dialects import Dialect
from kvindex.dialects.objects import Objects
from kvindex.dialects.pushed import PushedEvent
from kvindex.errors import CapacityExceeded
from kvindex.events import AllBlocksCleared, BlockRemoved, BlockStored, Outcome, Pooled, Skipped
from kvindex.index import StreamView
from kvindex.states import Recovery, State, StreamStatus

REMEMBERED: Final = 4096
"""Numbers of past events that are known again."""


class PushResult(NamedTuple):
    """applied: events taken over or known already; errors: what is wrong with each of the others, or with the body."""

    applied: int
    errors: tuple[str, ...]


class PushFeed:
    """In the place of StreamSync for a rank whose events are pushed. The driver's thread; `status` from any."""

    def __init__(self, view: StreamView, dialect: Dialect, max_objects: int) -> None:
        self.view = view
        self.dialect = dialect
        self.state = State.EMPTY
        self._objects = Objects(max_objects)
        self._last: int | None = None
        self._past: dict[int, int] = {}
        self._at: float | None = None
        self._error: str | None = None
        self._events: dict[type, int] = {BlockStored: 0, BlockRemoved: 0, AllBlocksCleared: 0}
        self._skipped: dict[str, int] = {}
        self._batches = self._duplicates = self._restarts = self._damaged = self._rebuilds = 0

    def apply(self, pushed: PushedEvent, now: float) -> str | None:
        """Take over one event; the reason if it is not. Never raises."""
        number, event = pushed.event_id, pushed.event
        if isinstance(event, Skipped):
            self._count(event.reason)
            return self._doubt(event) if pushed.takes_away or event.tainted else f"{event.reason}: {event.detail}"
        if number is not None:
            digest = xxh3_64_intdigest(repr(pushed).encode("utf-8", "surrogatepass"))
            if self._past.get(number) == digest:
                self._duplicates += 1
                return None
            if self._last is not None and number <= self._last:
                self._restarts += 1
                self.clear()
            self._last = number
            self._past[number] = digest
            if len(self._past) > REMEMBERED:
                del self._past[next(iter(self._past))]
        self._at = now
        self._batches += 1
        self.state = State.LIVE
        self.view.visible = True
        self._error = None
        return self._take(pushed)

    def _take(self, pushed: PushedEvent) -> str | None:
        wrong = None
        event = pushed.event
        try:
            for one in self._objects.resolve([event]):
                if isinstance(one, Skipped):
                    self._count(one.reason)
                    if one.lost and isinstance(event, Pooled) and event.stored is None:
                        return self._doubt(one)
                    wrong = f"{one.reason}: {one.detail}" if one.lost else wrong
                    continue
                outcome = self.view.apply(one)
                self._events[type(one)] += 1
                if outcome not in (Outcome.OK, Outcome.UNKNOWN_PARENT):
                    self._count(str(outcome))
                    wrong = _why(outcome, one, self.view.block_size)
        except CapacityExceeded as error:
            self.clear()
            wrong = f"{error}; all blocks of the rank are dropped"
        self._error = wrong
        return wrong

    def _doubt(self, what: Skipped) -> str:
        """Blocks are gone, or never counted, and it is not said which: nothing the rank holds is certain."""
        self._damaged += 1
        self.clear()
        return f"{what.reason}: {what.detail}; all blocks of the rank are dropped, send them again"

    def clear(self) -> None:
        """The sender is gone or in doubt: nothing of it counts any more."""
        self.view.visible = False
        self.view.clear()
        self._objects.clear()
        self._past.clear()
        self._last = None
        self._rebuilds += 1
        self.state = State.EMPTY

    def retire(self) -> None:
        self.state = State.RETIRED
        if not self.view.closed:
            self.view.visible = False

    @property
    def status(self) -> StreamStatus:
        """Synchronized from the first event on: what is credited is what was pushed. Never complete."""
        view = self.view
        return StreamStatus(
            state=self.state,
            recovery=Recovery.NONE,
            synchronized=self.state is State.LIVE,
            sequence=self._last,
            error=self._error or ("no event was pushed yet" if self.state is State.EMPTY else None),
            last_event_at=self._at,
            blocks=view.blocks,
            known=view.known,
            unanchored=view.unanchored,
            remembered=view.remembered,
            batches=self._batches,
            restarts=self._restarts,
            rebuilds=self._rebuilds,
            duplicates=self._duplicates,
            damaged=self._damaged,
            events=MappingProxyType({kind.__name__: count for kind, count in self._events.copy().items()}),
            skipped=MappingProxyType(self._skipped.copy()),
        )

    def _count(self, reason: str) -> None:
        self._skipped[reason] = self._skipped.get(reason, 0) + 1


def _why(outcome: Outcome, event: object, size: int | None) -> str:
    if outcome is Outcome.BLOCK_SIZE and isinstance(event, BlockStored):
        return f"block_size: {event.block_size}, configured is {size}"
    return f"{outcome}: not taken over"
