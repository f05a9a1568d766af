"""Taking over a peer's view of the same engine: for what the engine itself does not tell a late joiner.

    begin() ---- live frames are kept, and applied as ever ----> adopt(snapshot): a new view of the snapshot and the
      |                                                          kept frames above it, swapped in; or why not
      +-- connection lost, gap, restart, attempt, bound: void

Rule: a snapshot is taken only if it and what was seen live are provably of one run of one publisher. Peer and stream
must share a message (its digest), unless nothing was seen yet. From the snapshot's last message on, no message may be
missing. Then the view is a subset of the engine's content exactly when the peer's was.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvindex.dialects.objects import Objects
from kvindex.events import BlocksMapped
from kvindex.feed import Feed, Frame, Lost
from kvindex.states import State
from kvindex.transfer import Header

OVERHEAD = 256
"""Counted for each kept frame on top of its bytes."""


class Unusable(Exception):
    """The snapshot cannot be taken over; the message says why."""


class Adoption:
    """One try. `last`, `digest`: the last applied message when it began, None = none was. A snapshot that shares a
    message with this one and the kept ones is at least as new as it."""

    def __init__(self, last: int | None, digest: int, attempts: int, max_bytes: int) -> None:
        self.void: str | None = None
        """Why it has come to nothing."""
        self._attempts = attempts
        self._digests = {} if last is None else {last: digest}
        self._frames: list[Frame] = []
        self._room = max_bytes

    def frame(self, frame: Frame) -> None:
        """A new live message, in order."""
        if self.void is None:
            self._room -= OVERHEAD + len(frame.payload)
            if self._room < 0:
                self.void = "too much came while the snapshot was on its way"
                self._frames = []
                return
            self._frames.append(frame.kept())
            self._digests[frame.sequence] = frame.digest

    def build(
        self, header: Header, events: Iterable[BlocksMapped], view: Any, feed: Feed, *, state: State, attempts: int
    ) -> tuple[Any, Objects | None, Frame | None]:
        """A shadow of `view` with the snapshot and what followed, its objects, and the last message that followed
        (None = none did).

        Raises Unusable; then no shadow is left. CapacityExceeded as any write.
        """
        if self.void is not None:
            raise Unusable(self.void)
        if attempts != self._attempts or state not in (State.EMPTY, State.LIVE):
            raise Unusable("the stream recovers by itself meanwhile")
        self._same_run(header)
        shadow, objects = view.shadow(), feed.dialect.objects()
        if objects is not None:
            objects.adopt()
        try:
            shadow.fill(events)
            newest: Frame | None = None
            at = header.sequence
            for frame in self._frames:
                if frame.sequence <= header.sequence:
                    continue
                if frame.sequence != at + 1:
                    raise Unusable(f"it ends at {header.sequence}, message {frame.sequence} follows {at}")
                try:
                    feed.apply(shadow, frame, objects)
                except Lost as error:
                    raise Unusable(f"message {frame.sequence}: {error}") from None
                newest, at = frame, frame.sequence
        except BaseException:
            shadow.close()
            raise
        return shadow, objects, newest

    def _same_run(self, header: Header) -> None:
        recent = dict(header.recent)
        shared = self._digests.keys() & recent.keys()
        if any(self._digests[at] != recent[at] for at in shared):
            raise Unusable("its messages are others: the peer followed another process of this engine")
        if not shared and self._digests:
            raise Unusable("no message was seen by both, so that nothing shows that they followed the same process")
