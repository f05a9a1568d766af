"""What the words of the table do: the state of one stream, and an action for each word (states.py).

Each action takes `now` and the frame that brought it up, if any, and returns what the transport is to do. Everything is
said about a stream by `_error` (cleared when it goes live) and the feed's warnings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvindex.adoption import Adoption
from kvindex.dialects import Dialect
from kvindex.dialects.objects import Objects
from kvindex.errors import CapacityExceeded
from kvindex.feed import Feed, Frame, Lost, View
from kvindex.states import RULES, Action, CancelReplay, Input, Recovery, StartReplay, State, SyncLimits

FRAME_OVERHEAD = 256
"""Counted for each buffered frame on top of its bytes."""
RECENT = 64
"""(sequence, digest) of the last messages, to show to a replica whose view may be built on this one."""
REMEMBERED = 4096
"""Frames of a replay whose digest is kept, to know them again when they come late on the live channel."""

_COUNTERS = (
    "batches", "gaps", "missed", "restarts", "replays", "replay_failures", "rebuilds", "resyncs", "duplicates", "late",
    "damaged", "foreign",
)  # fmt: skip


@dataclass(slots=True)
class _Attempt:
    """follows     asked from `last`, whose digest has to be shown first
    untouched   no reply that counts yet; broken = a frame of it was damaged
    advanced    it brought something new, last time at `advanced_at`: a long history gets more time, `extensions` times
    """

    number: int
    follows: bool
    deadline: float | None = None
    extensions: int = 12
    untouched: bool = True
    advanced: bool = False
    advanced_at: float = float("-inf")
    broken: bool = False
    snapshot: Frame | None = None


class Machine:
    """The part of StreamSync below its inputs. `view`, `dialect`, ...: see there."""

    def __init__(
        self,
        *,
        view: View,
        dialect: Dialect,
        recovery: Recovery,
        dp_rank: int,
        topic: bytes | None,
        limits: SyncLimits | None = None,
    ) -> None:
        self.view = view
        self.dialect = dialect
        self.recovery = Recovery(recovery)
        self.dp_rank = dp_rank
        self.topic = topic
        self.limits = limits or SyncLimits()
        self.state = State.EMPTY
        self.last: int | None = None
        self.complete = False
        self._mode = self.recovery  # whose rules hold: NONE while history recovery has given up
        self._settling = False  # in `_settle`, which keeps that mode to its end
        self._filled = False  # the view was written to since it was empty
        self._feed = Feed(dialect, dp_rank)
        self._timeout = self.limits.replay_timeout or (2.0 if self.recovery is Recovery.SNAPSHOT else 5.0)
        self._digest = 0
        self._seen: int | None = None
        self._seen_digest = 0
        self._owed: int | None = None  # last sequence that came damaged, until an attempt or a new run covers it
        self._unbroken = True  # the connection over which `last` came, or was shown again, still stands
        self._replayed: dict[int, int] = {}
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT)
        self._attempt: _Attempt | None = None
        self._adoption: Adoption | None = None
        self._attempts = 0
        self._tries = 0.0
        self._buffer: list[Frame] = []
        self._buffered = 0
        self._retry_at: float | None = None
        self._refresh_at: float | None = None
        self._live_since = 0.0
        self._short = 0
        self._error: str | None = None
        self._last_event_at: float | None = None
        self._counts = dict.fromkeys(_COUNTERS, 0)

    @property
    def synchronized(self) -> bool:
        return self.state is State.LIVE or self.state is State.RESYNC

    def _do(self, kind: Input, now: float, frame: Frame | None = None) -> list[Action]:
        action = RULES[self._mode][self.state][kind]
        return [] if action == "-" else ACTIONS[action](self, now, frame)

    def _lost(self, why: str, now: float) -> list[Action]:
        self._counts["damaged"] += 1
        self._error = why
        return self._do(Input.LOST, now)

    def _failed(self, now: float, why: str) -> list[Action]:
        self._error = f"{self._what}: {why}"
        return self._do(Input.FAILED, now)

    @property
    def _what(self) -> str:
        return "snapshot" if self.recovery is Recovery.SNAPSHOT else "replay"

    # -- actions: the words of the table

    def _apply(self, now: float, frame: Frame | None) -> list[Action]:
        """Apply the frame."""
        assert frame is not None
        wrong = self._consume(now, frame)
        return [] if wrong is None else self._do(wrong, now)

    def _both(self, now: float, frame: Frame | None) -> list[Action]:
        """Apply it to the old view and keep it for the new one."""
        assert frame is not None
        wrong = self._consume(now, frame)
        actions = self._keep(now, frame)
        return actions if wrong is None else actions + self._do(wrong, now)

    def _begin(self, now: float, frame: Frame | None) -> list[Action]:
        """Drop all and start a new run with this frame; complete when it is the publisher's first."""
        assert frame is not None
        if self.last is not None and frame.sequence <= self.last:
            self.dialect.reset()
        self._void()
        self.state = State.LIVE
        wrong = self._consume(now, frame)
        if wrong is not None and wrong is not Input.UNKNOWN_PARENT:
            return self._do(wrong, now)
        self.complete = frame.sequence == self.dialect.first_sequence
        self._go_live(now)
        return []

    def _empty(self, now: float, frame: Frame | None) -> list[Action]:
        """Drop all and wait for the next frame."""
        actions = self._cancel()
        self._void()
        self._forget_buffer()
        self.state = State.EMPTY
        return actions

    def _suspend(self, now: float, frame: Frame | None) -> list[Action]:
        """Connection lost: no hits until continuity is shown; without recovery everything goes at once."""
        actions = self._cancel()
        self.view.visible = False
        self._forget_buffer()
        self._seen = self._owed = None
        self._unbroken = False
        self._error = "connection lost"
        self._mode = self.recovery
        if self.recovery is Recovery.NONE:
            self._void()
        self.state = State.OFFLINE
        return actions

    def _ask(self, now: float, frame: Frame | None) -> list[Action]:
        """New attempt: history from `last` (inclusive) when content is kept, else from 0; or a snapshot."""
        actions = self._cancel()
        self._forget_buffer()
        served = self.synchronized
        self.view.visible = False
        self._mode = self.recovery
        if self.recovery is Recovery.SNAPSHOT:
            self.last = None
            if served and self._flapping(now):
                return actions + self._back_off(now)
        elif self.last is None:
            self._void()
        return actions + self._start()

    def _fetch(self, now: float, frame: Frame | None) -> list[Action]:
        """`ask`, and keep this frame."""
        assert frame is not None
        return self._ask(now, None) + self._keep(now, frame)

    def _restart(self, now: float, frame: Frame | None) -> list[Action]:
        """The engine is a new process, or all is to be fetched again: drop all, ask from the start, keep the frame."""
        self.dialect.reset()
        self._void()
        actions = self._ask(now, None)
        return actions if frame is None else actions + self._keep(now, frame)

    def _mend(self, now: float, frame: Frame | None) -> list[Action]:
        """A message is lost: ask for it. When that happens again and again, go on as without recovery."""
        return self._settle(now) if self._flapping(now) else self._ask(now, None)

    def _hide(self, now: float, frame: Frame | None) -> list[Action]:
        """The old view is wrong: no hits; the running attempt goes on, and keeps this frame."""
        self.view.visible = False
        self.state = State.FETCH
        return [] if frame is None else self._keep(now, frame)

    def _forget(self, now: float, frame: Frame | None) -> list[Action]:
        """Restarted meanwhile: what was kept for continuity is void."""
        self.dialect.reset()
        self._void()
        return []

    def _shed(self, now: float, frame: Frame | None) -> list[Action]:
        """Over a bound of the stream: drop all, try again later."""
        actions = self._cancel()
        self._void()
        self._tries += 1
        return actions + self._back_off(now)

    def _refresh(self, now: float, frame: Frame | None) -> list[Action]:
        """Ask for a fresh snapshot while the old view serves."""
        self._counts["resyncs"] += 1
        self._forget_buffer()
        actions = self._start()
        self.state = State.RESYNC
        return actions

    def _keep(self, now: float, frame: Frame | None) -> list[Action]:
        """Buffer the frame until the attempt ends."""
        assert frame is not None
        if self._attempt is None:
            return []
        frame = frame.kept()
        self._buffer.append(frame)
        # Decoded events take a few times the room of their bytes.
        self._buffered += FRAME_OVERHEAD + len(frame.payload) * (1 if frame.batch is None else 4)
        return self._bounded(now)

    def _bounded(self, now: float) -> list[Action]:
        if self._buffered <= self.limits.max_buffered_bytes:
            return []
        self._error = f"{self._what}: over max_buffered_bytes {self.limits.max_buffered_bytes} while it ran"
        return self._do(Input.OVERFLOW, now)

    def _restore(self, now: float, frame: Frame | None) -> list[Action]:
        """Cleared and stored in one batch: the view becomes that content, whatever was before; ends an attempt."""
        assert frame is not None
        shadow, objects = self.view.shadow(), self.dialect.objects()
        try:
            self._feed.apply(shadow, frame, objects)
        except (Lost, CapacityExceeded) as error:
            shadow.close()
            return self._lost(f"message {frame.sequence}: {error}", now)
        return self._swap(now, shadow, objects, frame)

    def _arm(self, now: float, frame: Frame | None) -> list[Action]:
        """The request is out: its time-out runs."""
        assert self._attempt is not None
        self._attempt.deadline = now + self._timeout
        return []

    def _take(self, now: float, frame: Frame | None) -> list[Action]:
        """A frame of the history: check that it continues what is there, and apply it."""
        attempt, last = self._attempt, self.last
        assert frame is not None
        assert attempt is not None
        sequence = frame.sequence
        if attempt.untouched and attempt.follows and last is not None:
            if sequence < last:
                return []  # a publisher that answers with all it has: `last` is yet to come
            attempt.untouched = False
            if sequence == last:
                if frame.digest != self._digest:
                    return self._renewed(now)
                self._unbroken = True
                return []
            # `last` has left the ring. Over an unbroken connection last + 1 must continue it; else nothing shows that.
            if sequence != last + 1 or not self._unbroken:
                self._void()
        elif last is None:
            attempt.untouched = False
        elif sequence <= last:
            if self._replayed.get(sequence) == frame.digest:
                return []
            return self._failed(now, f"it goes back from {last} to {sequence}")
        elif sequence != last + 1:
            return self._failed(now, f"it has a hole, {sequence} after {last}")
        if self.last is None:
            self.complete = sequence == self.dialect.first_sequence and not attempt.broken
        wrong = self._consume(now, frame)
        if wrong is Input.DAMAGED:
            # The damage that was seen live, or one that was not: what follows is a new run, incomplete.
            attempt.broken = True
            self._void()
            return []
        if wrong is Input.CAPACITY:
            return self._failed(now, self._error or "")
        attempt.advanced, attempt.advanced_at = True, now
        self._replayed[sequence] = frame.digest
        if len(self._replayed) > REMEMBERED:
            del self._replayed[next(iter(self._replayed))]
        return []

    def _merge(self, now: float, frame: Frame | None) -> list[Action]:
        """End of the history: what was buffered follows, then LIVE. No history at all: as without recovery."""
        attempt = self._attempt
        assert attempt is not None
        if attempt.untouched and attempt.follows:
            return self._renewed(now)
        if self.last is None:
            return self._settle(now)
        for held in self._buffer:
            if held.sequence <= self.last:
                continue
            if held.sequence != self.last + 1:
                return self._failed(now, f"it ends at {self.last}, message {held.sequence} is the next")
            if self._consume(now, held) in (Input.DAMAGED, Input.CAPACITY):
                return self._failed(now, self._error or "")
            if self.last is None:  # pragma: no cover - for the type checker
                break
        if self._beyond(self.last):
            return self._failed(now, f"it ends at {self.last}, and message {self._owed} is lost")
        actions = self._cancel()
        self._forget_buffer()
        self._go_live(now)
        return actions

    def _hold(self, now: float, frame: Frame | None) -> list[Action]:
        """Keep the snapshot until its end marker."""
        assert frame is not None
        assert self._attempt is not None
        if self._attempt.snapshot is not None:
            return self._failed(now, "a second message before the end marker; does the endpoint replay history?")
        self._attempt.snapshot = frame
        self._buffered += len(frame.payload)
        return self._bounded(now)

    def _install(self, now: float, frame: Frame | None) -> list[Action]:
        """End of the snapshot: build it aside, let the buffered frames above its watermark follow, swap it in."""
        assert self._attempt is not None
        newest = self._attempt.snapshot
        if newest is None:
            return self._failed(now, "end marker without content")
        shadow, objects = self.view.shadow(), self.dialect.objects()
        try:
            self._feed.apply(shadow, newest, objects)
            for held in self._buffer:
                if held.sequence <= newest.sequence:
                    continue
                if held.sequence != newest.sequence + 1:
                    raise Lost(f"it ends at {newest.sequence}, message {held.sequence} is the next")
                if self._feed.apply(shadow, held, objects):
                    raise Lost(f"message {held.sequence} names a parent that is not in it")
                newest = held
            if self._behind(newest.sequence):
                newer = max(one for one in (self.last, self._seen) if one is not None)
                raise Lost(f"it ends at {newest.sequence}, below message {newer}, which came before it")
        except (Lost, CapacityExceeded) as error:
            shadow.close()
            return self._failed(now, str(error))
        return self._swap(now, shadow, objects, newest)

    def _fail(self, now: float, frame: Frame | None) -> list[Action]:
        """The attempt failed: wait and try again, or, with history and often enough, go on without."""
        attempt = self._attempt
        actions = self._cancel()
        self._counts["replay_failures"] += 1
        # A ROUTER drops what its peer's queue has no room for: each attempt brings a part, which is kept.
        self._tries += 0.25 if attempt is not None and attempt.advanced else 1
        if self.recovery is Recovery.HISTORY and self._tries >= self.limits.attempts:
            self._feed.warnings["replay"] = f"{self._error}; going on without replay, incomplete"
            return actions + self._settle(now)
        self._forget_buffer()
        return actions + self._back_off(now)

    def _abandon(self, now: float, frame: Frame | None) -> list[Action]:
        """A resync failed: the old view goes on, next try at the next interval."""
        actions = self._cancel()
        self._counts["replay_failures"] += 1
        self._forget_buffer()
        self._feed.warnings["replay"] = f"resync failed, {self._error}"
        self._error = None
        self.state = State.LIVE
        self._refresh_at = now + self.limits.resync_interval
        return actions

    # -- what the actions share

    def _consume(self, now: float, frame: Frame) -> Input | None:
        """Apply a frame to the view and move on to it. Returns what went wrong, for the table: `last` is the last
        undamaged frame then, None when the view holds a part of the damaged one."""
        self._filled = True
        try:
            unknown = self._feed.apply(self.view, frame, self._feed.objects)
        except Lost as error:
            if frame.lost is None:  # else counted as it came
                self._counts["damaged"] += 1
            self._error = f"message {frame.sequence}: {error}"
            self._owed = frame.sequence
            if error.tainted:
                self.last = None
            return Input.DAMAGED
        except CapacityExceeded as error:
            self._error = str(error)
            self.last = None
            return Input.CAPACITY
        self._arrived(now, frame)
        if not unknown:
            return None
        if self.recovery is Recovery.SNAPSHOT:
            self._error = f"message {frame.sequence} names a parent that was never announced"
        return Input.UNKNOWN_PARENT

    def _beyond(self, end: int | None) -> bool:
        """Did a message above `end` come damaged? Only what brings it covers it."""
        return self._owed is not None and end is not None and end < self._owed

    def _behind(self, end: int) -> bool:
        """Is a snapshot that ends there older than what was applied, or has come over this connection? Going back to it
        would take away what is newer, and a message between the two could not be asked for."""
        return any(one is not None and end < one for one in (self.last, self._seen))

    def _arrived(self, now: float, frame: Frame) -> None:
        self.last, self._digest = frame.sequence, frame.digest
        self._recent.append((frame.sequence, frame.digest))
        self._last_event_at = now
        self._counts["batches"] += 1

    def _void(self) -> None:
        """Drop all content; readers see none of it from the first moment."""
        self.view.visible = False
        if self._filled:
            self._filled = False
            self._counts["rebuilds"] += 1
            self.view.clear()
            if self._feed.objects is not None:
                self._feed.objects.clear()
        self.last = None
        self.complete = False
        self._unbroken = True
        self._replayed.clear()
        self._recent.clear()
        self._feed.warnings.pop("block_size", None)

    def _go_live(self, now: float) -> None:
        self.state = State.LIVE
        self._error = self._owed = None
        self._feed.warnings.pop("topic", None)
        self._live_since = now
        if not self._settling:
            if self._mode is not Recovery.NONE:
                self._tries = 0.0
                self._feed.warnings.pop("replay", None)
            self._mode = self.recovery
        if self.recovery is Recovery.SNAPSHOT:
            self._refresh_at = now + self.limits.resync_interval
        self.view.visible = True

    def _swap(self, now: float, shadow: Any, objects: Objects | None, newest: Frame) -> list[Action]:
        actions = self._cancel()
        self._counts["rebuilds"] += 1
        self._filled = True
        self.view.swap(shadow)
        self._feed.objects = objects
        self._forget_buffer()
        self._arrived(now, newest)
        self.complete = True
        self._go_live(now)
        return actions

    def _renewed(self, now: float) -> list[Action]:
        """The publisher does not know our last frame: it is another process, and what was buffered is its."""
        self._counts["restarts"] += 1
        held, size = self._buffer, self._buffered
        actions = self._restart(now, None)
        self._buffer, self._buffered = held, size
        self._owed = None
        self._error = "engine restarted: it does not know the last message that was applied"
        return actions

    def _settle(self, now: float) -> list[Action]:
        """History recovery has nothing (more) to give: by the rules of `none`, beginning with what was buffered."""
        held = self._buffer
        actions = self._cancel()
        self._forget_buffer()
        self._void()
        self._tries = 0.0
        self._mode = Recovery.NONE
        self.state = State.EMPTY
        self._settling = True
        for frame in held:
            if self.last is None:
                self._do(Input.FIRST, now, frame)
            elif frame.sequence > self.last:
                self._do(Input.NEXT if frame.sequence == self.last + 1 else Input.AHEAD, now, frame)
        self._settling = False
        if self.state is State.LIVE:
            self._mode = self.recovery
        return actions

    def _start(self) -> list[Action]:
        self._attempts += 1
        self._counts["replays"] += 1
        follows = self.recovery is Recovery.HISTORY and self.last is not None
        self._attempt = _Attempt(self._attempts, follows)
        self.state = State.FETCH
        return [StartReplay(self._attempts, self.last if follows and self.last is not None else 0)]

    def _cancel(self) -> list[Action]:
        attempt, self._attempt = self._attempt, None
        return [] if attempt is None else [CancelReplay(attempt.number)]

    def _forget_buffer(self) -> None:
        self._buffer, self._buffered = [], 0

    def _back_off(self, now: float) -> list[Action]:
        limits = self.limits
        self.view.visible = False
        self.state = State.BACKOFF
        doublings = min(max(self._tries - 1, 0), 30)
        self._retry_at = now + min(limits.backoff_initial * 2**doublings, limits.backoff_max)
        return []

    def _flapping(self, now: float) -> bool:
        """Did LIVE end soon after it began, many times in a row? Then recovery does not help and only costs."""
        self._short = self._short + 1 if now - self._live_since < self.limits.settle else 0
        if self._short <= self.limits.attempts:
            return False
        self._tries = float(self._short - self.limits.attempts)
        return True


ACTIONS: dict[str, Callable[[Machine, float, Frame | None], list[Action]]] = {
    "apply": Machine._apply,
    "both": Machine._both,
    "begin": Machine._begin,
    "empty": Machine._empty,
    "suspend": Machine._suspend,
    "ask": Machine._ask,
    "fetch": Machine._fetch,
    "restart": Machine._restart,
    "mend": Machine._mend,
    "hide": Machine._hide,
    "forget": Machine._forget,
    "shed": Machine._shed,
    "refresh": Machine._refresh,
    "buffer": Machine._keep,
    "restore": Machine._restore,
    "arm": Machine._arm,
    "take": Machine._take,
    "merge": Machine._merge,
    "hold": Machine._hold,
    "install": Machine._install,
    "fail": Machine._fail,
    "abandon": Machine._abandon,
}
"""Word of the table -> action."""
