"""StreamSync: a stream's frames in, a view that is right or says that it is not. Sans-IO: no socket, thread or clock.

    transport --connected, disconnected, reconnected, live--> classify --RULES[recovery][state][input]--> action
              --attempt_started, reply, attempt_failed-------->    |                                        |
              --timer, resync, retire------------------------->    +--> view.apply / clear / shadow / swap <-+
    transport <--StartReplay, CancelReplay-------------------------------------------------------------------+

Rule: `synchronized` means that the view credits a subset of what the engine holds, built from a gap-free run of
frames, or from a snapshot and a gap-free run; `complete` means that it is the whole of it. This file says what an input
is; states.py what is done about it, as a table; machine.py how; feed.py what one message does to a view.

    last     sequence of the last frame applied, None = no run. 0 is a number like any other
    digest   of that frame's payload: shows whether a publisher that answers from `last` is the same process
    seen     last sequence on the live channel of this connection; it only grows, unless the engine was restarted. A
             snapshot that, with the live frames that follow it, ends below `seen` or `last` is dismissed
    lost     a message that came damaged keeps its number and its place (Frame.lost): what would apply it goes by the
             rules of damage, what brings it otherwise (a replay, a snapshot above it) covers it; an attempt that
             does not has failed
    attempt  one replay or snapshot request with a number and a socket of its own; replies to another one are dropped
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

from xxhash import xxh3_64_intdigest

from kvindex.adoption import Adoption, Unusable
from kvindex.errors import CapacityExceeded, DecodeError
from kvindex.events import BlocksMapped
from kvindex.feed import Frame, Lost, View
from kvindex.machine import Machine
from kvindex.states import (
    NO_BLOCKS,
    Action,
    CancelReplay,
    Input,
    Recovery,
    StartReplay,
    State,
    StreamStatus,
    SyncLimits,
)
from kvindex.transfer import Header

__all__ = [
    "Action",
    "CancelReplay",
    "Input",
    "Recovery",
    "StartReplay",
    "State",
    "StreamStatus",
    "StreamSync",
    "SyncLimits",
    "View",
]

END_MARKER = 2**64 - 1
KEPT = (Input.FIRST, Input.NEXT, Input.LATE, Input.DUPLICATE)
"""What a live message may be while a peer's view is on its way; anything else ends that."""

WHY = {
    State.EMPTY: "no event received yet",
    State.FETCH: "waiting for the engine's answer to the replay request",
    State.BACKOFF: "waiting for the next attempt",
    State.OFFLINE: "connection lost",
    State.RETIRED: "instance gone or replaced",
}
"""What a status says of a state without hits when nothing went wrong."""


class StreamSync(Machine):
    """One stream. All methods belong to one thread, but `status` may be read from any. None raises on what peers send.

    view   a `kvindex.index.StreamView`, or any object with its write methods (a client that wants the events for
           itself). It belongs to the caller, who closes it after `retire`.
    """

    # -- outputs

    @property
    def next_timer(self) -> float | None:
        """When `timer` has to be called, in the time of `now`; None = not needed."""
        if self._attempt is not None:
            return self._attempt.deadline
        if self.state is State.BACKOFF:
            return self._retry_at
        return self._refresh_at if self.state is State.LIVE else None

    @property
    def status(self) -> StreamStatus:
        """Made at each look, from any thread; takes no lock, so its figures may be one frame apart. About 5 us."""
        view: Any = self.view
        feed = self._feed
        synchronized = self.synchronized
        return StreamStatus(
            state=self.state,
            recovery=self.recovery,
            synchronized=synchronized,
            complete=self.complete and synchronized,
            sequence=self.last,
            error=self._error or next(iter(feed.warnings.copy().values()), None) or WHY.get(self.state),
            last_event_at=self._last_event_at,
            timestamp=feed.timestamp,
            blocks=getattr(view, "blocks", NO_BLOCKS),
            known=getattr(view, "known", 0),
            unanchored=getattr(view, "unanchored", 0),
            remembered=getattr(view, "remembered", 0),
            buffered_bytes=self._buffered,
            events=MappingProxyType({kind.__name__: count for kind, count in feed.events.copy().items()}),
            skipped=MappingProxyType(feed.skipped.copy()),
            **self._counts,
        )

    # -- inputs

    def connected(self, now: float) -> list[Action]:
        """The subscription is up for the first time."""
        return self._do(Input.CONNECTED, now)

    def disconnected(self, now: float) -> list[Action]:
        """The connection is lost; every frame that came over it was delivered."""
        self._adoption = None
        return self._do(Input.DISCONNECTED, now)

    def reconnected(self, now: float) -> list[Action]:
        """Up again: frames from here on come over a new connection."""
        self._seen = self._owed = self._adoption = None
        self._unbroken = False
        return self._do(Input.RECONNECTED, now)

    def live(self, frames: list[bytes], now: float) -> list[Action]:
        """One message of the subscription, as received."""
        if self.state is State.RETIRED or self.state is State.OFFLINE:
            return []
        if frames and frames[0] != self.topic and self.topic is not None:
            return self._foreign(frames[0])
        if len(frames) != 3:
            return self._lost(f"message has {len(frames)} frames, not 3", now)
        _, head, payload = frames
        if len(head) != 8:
            return self._lost(f"sequence has {len(head)} bytes, not 8", now)
        sequence = int.from_bytes(head, "big")
        if sequence == END_MARKER:
            self._feed.count("end_marker")
            return []
        lost = self._too_large(payload) if len(payload) > self.limits.max_message_bytes else None
        digest = xxh3_64_intdigest(payload)
        kind = self._classify(sequence, digest)
        batch = None
        if self._mode is Recovery.SNAPSHOT and kind is not Input.DUPLICATE and lost is None:
            try:
                restores, batch = self._feed.restores(self._feed.open(payload))
                kind = Input.RESTORE if restores else kind
            except Lost as error:
                lost = str(error)
        if kind is not Input.NEXT:
            self._observe(kind, sequence)
        self._seen, self._seen_digest = sequence, digest
        if lost is not None:
            self._counts["damaged"] += 1
            if kind is not Input.DUPLICATE:
                self._owed = sequence
            payload = b""
        elif kind is Input.BEHIND:
            self._owed = None
        frame = Frame(sequence, payload, digest, batch, lost)
        adoption = self._adoption
        if adoption is not None:
            if lost is not None or kind not in KEPT:
                adoption.void = adoption.void or "a message was lost, or the engine was restarted, meanwhile"
            elif kind is not Input.DUPLICATE:
                adoption.frame(frame)
        return self._do(kind, now, frame)

    def attempt_started(self, attempt: int, now: float) -> list[Action]:
        """The request went out: the time-out runs from here."""
        return self._do(Input.STARTED, now) if self._current(attempt) else []

    def reply(self, attempt: int, frames: list[bytes], now: float) -> list[Action]:
        """One message of the attempt's socket, as received."""
        if not self._current(attempt):
            self._feed.count("late_reply")
            return []
        try:
            parts = self.dialect.split_reply(frames)
        except DecodeError as error:
            return self._failed(now, str(error))
        if parts is None:
            return self._do(Input.END, now)
        sequence, payload = parts
        if len(payload) > self.limits.max_message_bytes:
            return self._failed(now, f"message {sequence}: {self._too_large(payload)}")
        return self._do(Input.REPLY, now, Frame(sequence, payload, xxh3_64_intdigest(payload)))

    def attempt_failed(self, attempt: int, reason: str, now: float) -> list[Action]:
        """Its socket could not be opened, or broke."""
        return self._failed(now, reason) if self._current(attempt) else []

    def timer(self, now: float) -> list[Action]:
        """To be called at `next_timer`; at any other time it does nothing."""
        due = self.next_timer
        if due is None or now < due:
            return []
        attempt = self._attempt
        if attempt is not None:
            if attempt.extensions and attempt.advanced_at + self._timeout > now:
                attempt.extensions -= 1
                attempt.deadline = attempt.advanced_at + self._timeout
                return []
            self._error = f"{self._what}: no end marker within {self._timeout:g} s"
            return self._do(Input.TIMEOUT, now)
        return self._do(Input.RETRY if self.state is State.BACKOFF else Input.REFRESH, now)

    def resync(self, now: float) -> list[Action]:
        """Operator's request: a fresh snapshot or history now; without recovery everything is dropped."""
        return self._do(Input.RESYNC, now)

    # -- a peer's view

    def begin_adoption(self) -> str | None:
        """From now on live messages are kept for `adopt`. Returns why that cannot be, None = it can."""
        if self.recovery is Recovery.SNAPSHOT:
            return "this stream's publisher gives the whole content itself"
        if self._pooled:
            return "this stream is a pool's"
        if self.state not in (State.EMPTY, State.LIVE):
            return f"the stream is in state {self.state}"
        if self.complete and self.synchronized:
            return "the stream knows all there is"
        self._adoption = Adoption(self.last, self._digest, self._attempts, self.limits.max_buffered_bytes)
        return None

    def adopt(self, header: Header, events: Iterable[BlocksMapped], now: float) -> str | None:
        """A peer's content of this very process becomes the view. Returns why not, None = done. Ends the adoption.

        O(blocks of both views), paced; readers see the old view until the new one is whole.
        """
        adoption, self._adoption = self._adoption, None
        if adoption is None:
            return "the connection was lost meanwhile"
        try:
            shadow, objects, newest = adoption.build(
                header, events, self.view, self._feed, state=self.state, attempts=self._attempts
            )
        except (Unusable, CapacityExceeded) as error:
            return str(error)
        for sequence, digest in header.recent:
            self._recent.append((sequence, digest))
            self._replayed[sequence] = digest
        last = dict(header.recent).get(header.sequence, 0)
        self._swap(now, shadow, objects, newest or Frame(header.sequence, b"", last))
        self.complete = header.complete
        return None

    def content(self) -> tuple[int, bool, tuple[tuple[int, int], ...]] | None:
        """(sequence, complete, recent) of the view as it is, None while it is not synchronized."""
        if not self.synchronized or self.last is None or self._pooled:
            return None
        return self.last, self.complete, tuple(self._recent)

    @property
    def _pooled(self) -> bool:
        """Are there objects of a pool, which do not travel?"""
        objects = self._feed.objects
        return objects is not None and objects.count > 0

    def retire(self) -> list[Action]:
        """The instance is gone or replaced: no input has an effect from here on. The caller closes the view."""
        actions = self._cancel()
        if not getattr(self.view, "closed", False):
            self.view.visible = False
        self._forget_buffer()
        self._replayed.clear()
        self.state = State.RETIRED
        return actions

    # -- what is it?

    def _classify(self, sequence: int, digest: int) -> Input:
        seen, last = self._seen, self.last
        if seen is not None and sequence <= seen:
            return Input.DUPLICATE if sequence == seen and digest == self._seen_digest else Input.BEHIND
        if last is None:
            return Input.FIRST
        if sequence > last:
            return Input.NEXT if sequence == last + 1 else Input.AHEAD
        if sequence == last and digest == self._digest:
            return Input.DUPLICATE
        # Not newer than what was applied, yet new on this connection: a replay or snapshot was faster, or the engine
        # was restarted. A replay's digests tell; a snapshot has none, and the next message above it will.
        if self._mode is Recovery.SNAPSHOT or self._replayed.get(sequence) == digest:
            return Input.LATE
        return Input.BEHIND

    def _observe(self, kind: Input, sequence: int) -> None:
        counts, last = self._counts, self.last
        if kind is Input.DUPLICATE:
            counts["duplicates"] += 1
        elif kind is Input.LATE:
            counts["late"] += 1
        elif kind is Input.BEHIND:
            counts["restarts"] += 1
            self._error = f"engine restarted: message {sequence} after {last if self._seen is None else self._seen}"
        elif kind is Input.AHEAD and last is not None and self.synchronized:
            counts["gaps"] += 1
            counts["missed"] += sequence - last - 1
            self._error = f"gap: message {sequence} after {last}"

    def _foreign(self, topic: bytes) -> list[Action]:
        self._counts["foreign"] += 1
        if self.last is None:
            self._feed.warnings["topic"] = (
                f"messages with topic {_text(topic)} are ignored, the configured topic is {_text(self.topic or b'')}"
            )
        return []

    def _too_large(self, payload: bytes) -> str:
        return f"{len(payload)} bytes are over max_message_bytes {self.limits.max_message_bytes}"

    def _current(self, attempt: int) -> bool:
        return self._attempt is not None and self._attempt.number == attempt


def _text(topic: bytes) -> str:
    return repr(topic[:64].decode("utf-8", "replace"))
