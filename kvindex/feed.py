"""Feed: one message's payload into a view. Decodes, refuses what is not this stream's, counts, keeps the warnings.

A message is lost (`Lost`) when it is no batch, is of another rank, or holds an event whose effect is lost (D11). That
is found before anything is applied, except in a large message, whose events are decoded one by one: then
`Lost.tainted` says that the view holds a part of it. It says so, too, where the event shows that earlier ones were
taken wrongly.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, Protocol

from kvindex.dialects import Dialect
from kvindex.dialects.objects import Objects
from kvindex.errors import DecodeError
from kvindex.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Event, Skipped
from kvindex.index import Outcome


class View(Protocol):
    """The write side of a stream as recovery uses it; `kvindex.index.StreamView` is one, a client may pass its own.

    `shadow` returns an empty sibling to build a snapshot in, `swap` takes over its content in one step; both are used
    by snapshot recovery alone. Optional attributes: `block_size`, `known`, `closed`, and the figures of StreamStatus.
    """

    visible: bool

    def apply(self, event: Event) -> Outcome: ...
    def clear(self) -> None: ...
    def shadow(self) -> Any: ...
    def swap(self, shadow: Any) -> None: ...


class Lost(Exception):
    """A message, or the effect of one of its events, is lost. `tainted`: part of it was applied."""

    def __init__(self, why: str, *, tainted: bool = False) -> None:
        super().__init__(why)
        self.tainted = tainted


class Frame(NamedTuple):
    """One numbered message. `batch` is there when it was decoded already (its lazy events can be read once).

    lost   why it cannot be applied, where that is known: it keeps its place in the run, without its payload
    """

    sequence: int
    payload: bytes
    digest: int
    batch: Batch | None = None
    lost: str | None = None

    def kept(self) -> Frame:
        """The form for a buffer: lazy events are left to a second decoding."""
        if self.batch is None or isinstance(self.batch.events, list):
            return self
        return self._replace(batch=None)


class Feed:
    """objects  what the view holds of a pool, None where the dialect has no objects: lives and dies with the content
    events   applied, by type; skipped   not taken over, by reason; warnings   what needs attention, by topic"""

    def __init__(self, dialect: Dialect, dp_rank: int) -> None:
        self.dialect = dialect
        self.dp_rank = dp_rank
        self.objects = dialect.objects()
        self.events: dict[type, int] = {BlockStored: 0, BlockRemoved: 0, AllBlocksCleared: 0}
        self.skipped: dict[str, int] = {}
        self.warnings: dict[str, str] = {}
        self.timestamp: float | None = None

    def open(self, payload: bytes) -> Batch:
        """Raises Lost."""
        try:
            batch = self.dialect.decode(payload)
        except DecodeError as error:
            raise Lost(str(error)) from None
        if batch.dp_rank is not None and batch.dp_rank != self.dp_rank:
            raise Lost(f"it is of data-parallel rank {batch.dp_rank}, this stream of rank {self.dp_rank}")
        return batch

    def apply(self, view: View, frame: Frame, objects: Objects | None) -> bool:
        """Apply one message's events in order. True when a parent was unknown. Raises Lost, CapacityExceeded.

        objects   those of `view`: of the main one `self.objects`, of a shadow `dialect.objects()` from its beginning
        """
        if frame.lost is not None:
            raise Lost(frame.lost)
        batch = frame.batch or self.open(frame.payload)
        events = batch.events
        whole = isinstance(events, list)
        if whole:
            for event in events:
                if isinstance(event, Skipped) and event.lost:
                    self._skip(view, event)
                    raise Lost(f"{event.reason} event: {event.detail}", tainted=event.tainted)
        if objects is not None:
            events = objects.resolve(events)
        unknown = False
        counts, apply = self.events, view.apply
        try:
            for event in events:
                kind = event.__class__
                if isinstance(event, Skipped):
                    self._skip(view, event)
                    if event.lost:
                        raise Lost(f"{event.reason} event: {event.detail}", tainted=True)
                    continue
                counts[kind] += 1
                outcome = apply(event)
                if outcome is not Outcome.OK:
                    unknown |= self._outcome(view, outcome, event)
        except DecodeError as error:
            raise Lost(str(error), tainted=True) from None
        self.timestamp = batch.timestamp
        return unknown

    def restores(self, batch: Batch) -> tuple[bool, Batch]:
        """Is it AllBlocksCleared, then Stored: the whole content at its sequence? xLLM publishes a full
        restore so. And the batch, still to be read.

        Raises Lost.
        """
        events = iter(batch.events)
        try:
            head = list(itertools.islice(events, 2))
        except DecodeError as error:
            raise Lost(str(error)) from None
        if not isinstance(batch.events, list):
            batch = batch._replace(events=itertools.chain(head, events))
        return len(head) == 2 and isinstance(head[0], AllBlocksCleared) and isinstance(head[1], BlockStored), batch

    def count(self, reason: str) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def _skip(self, view: View, event: Any) -> None:
        self.count(event.reason)
        if event.reason == "block_size":
            self.warnings["block_size"] = f"{event.detail}, configured is {_size(view)}: its blocks are not indexed"

    def _outcome(self, view: View, outcome: Outcome, event: Event) -> bool:
        if outcome is Outcome.UNKNOWN_PARENT:
            return True
        self.count(str(outcome))
        if outcome is Outcome.BLOCK_SIZE and isinstance(event, BlockStored):
            self.warnings["block_size"] = (
                f"events have block_size {event.block_size}, configured is {_size(view)}: their blocks are not indexed"
            )
        return False


def _size(view: View) -> int | None:
    return getattr(view, "block_size", None)
