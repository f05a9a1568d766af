"""Rules of sync.py broken one at a time: the rows of test_sync.py must notice, and mostly the random traces too.

A check that cannot fail proves nothing. The traces (where marked, with faults that bring it out) see what credits too
much or never comes to rest; what only costs hits, or is made good by another rule later, is for the rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvindex import machine, states
from kvindex.states import Input, Recovery, State
from kvindex.sync import StreamSync
from tests.kvindex.engine_model import Faults, World
from tests.kvindex.test_sync import ROWS, Trace
from tests.kvindex.test_sync_random import faults

Patch = pytest.MonkeyPatch
MOST_SEEDS = 100


def cell(recovery: Recovery, state: State, entry: Input, action: str) -> Callable[[Patch], None]:
    return lambda patch: patch.setitem(states.RULES[recovery][state], entry, action)  # type: ignore[arg-type]


def attribute(name: str, value: Any) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(StreamSync, name, value)


def action(word: str, wrong: Callable[[Any, float, Any], Any]) -> Callable[[Patch], None]:
    return lambda patch: patch.setitem(machine.ACTIONS, word, wrong)


def apply_at_watermark(self: Any, now: float, frame: Any) -> Any:
    """Buffered frames at and below the watermark are applied too."""
    right = self._attempt.snapshot
    if right is not None and self._buffer:
        self._attempt.snapshot = right._replace(sequence=min(right.sequence, self._buffer[0].sequence - 1))
    return StreamSync._install(self, now, frame)


def no_contiguity(self: Any, now: float, frame: Any) -> Any:
    """Replies are taken without looking at their numbers."""
    if self.last is not None and not self._attempt.untouched:
        self.last = frame.sequence - 1
    return StreamSync._take(self, now, frame)


def no_digest(self: Any, now: float, frame: Any) -> Any:
    """A reply that begins with `last` is taken for continuity whatever its bytes."""
    if frame.sequence == self.last:
        self._digest = frame.digest
    return StreamSync._take(self, now, frame)


def merge_with_holes(self: Any, now: float, frame: Any) -> Any:
    """Buffered frames follow the history whatever their numbers."""
    if self.last is not None:
        for place, held in enumerate(one for one in self._buffer if one.sequence > self.last):
            assert place >= 0
            self._buffer = [
                one._replace(sequence=self.last + 1 + place) if one is held else one for one in self._buffer
            ]
    return StreamSync._merge(self, now, frame)


def holes(patch: Patch) -> None:
    """Both rules that find them."""
    patch.setitem(machine.ACTIONS, "merge", merge_with_holes)
    patch.setattr(StreamSync, "_beyond", lambda self, end: False)


def forget_lost(patch: Patch) -> None:
    """A message that came damaged while an attempt runs leaves no trace."""

    def keep(self: Any, now: float, frame: Any) -> Any:
        return [] if frame.lost or frame.payload == b"" else StreamSync._keep(self, now, frame)

    patch.setitem(machine.ACTIONS, "buffer", keep)
    patch.setattr(StreamSync, "_beyond", lambda self, end: False)
    patch.setattr(StreamSync, "_behind", lambda self, end: False)


def any_attempt(self: Any, attempt: int) -> bool:
    return self._attempt is not None


def silently(self: Any, now: float, frame: Any) -> Any:
    """A gap, taken as the next message."""
    return StreamSync._apply(self, now, frame)


MUTANTS: dict[str, tuple[Recovery, bool | Faults, Callable[[Patch], None]]] = {
    "none: a gap is applied": (Recovery.NONE, True, cell(Recovery.NONE, State.LIVE, Input.AHEAD, "apply")),
    "none: a restart is applied": (Recovery.NONE, False, cell(Recovery.NONE, State.LIVE, Input.BEHIND, "apply")),
    "none: a double is applied": (Recovery.NONE, True, cell(Recovery.NONE, State.LIVE, Input.DUPLICATE, "apply")),
    "none: damage is passed over": (Recovery.NONE, True, cell(Recovery.NONE, State.LIVE, Input.DAMAGED, "-")),
    "none: a reconnect keeps the view": (
        Recovery.NONE,
        False,
        cell(Recovery.NONE, State.LIVE, Input.DISCONNECTED, "-"),
    ),
    "none: every first message is the whole": (
        Recovery.NONE,
        True,
        lambda patch: patch.setattr("kvindex.dialects.base.Decoder.first_sequence", property(lambda _: Anything())),
    ),
    "history: a gap is applied": (Recovery.HISTORY, True, cell(Recovery.HISTORY, State.LIVE, Input.AHEAD, "apply")),
    "history: damage is passed over": (Recovery.HISTORY, False, cell(Recovery.HISTORY, State.LIVE, Input.DAMAGED, "-")),
    "history: the view shows while it is fetched": (Recovery.HISTORY, True, attribute("_void", lambda self: None)),
    "history: contiguity of replies is not checked": (
        Recovery.HISTORY,
        Faults(hole=0.6, lose=0.2),
        action("take", no_contiguity),
    ),
    "history: the digest at `last` is not compared": (Recovery.HISTORY, True, action("take", no_digest)),
    "history: contiguity of the buffer is not checked": (Recovery.HISTORY, True, holes),
    "history: a restart during the fetch is buffered": (
        Recovery.HISTORY,
        False,
        cell(Recovery.HISTORY, State.FETCH, Input.BEHIND, "buffer"),
    ),
    "history: replies of an abandoned attempt count": (
        Recovery.HISTORY,
        Faults(stray=0.7, truncate=0.5, restart=0.05, lose=0.2),
        attribute("_current", any_attempt),
    ),
    "history: a reconnect keeps the view": (
        Recovery.HISTORY,
        False,
        cell(Recovery.HISTORY, State.LIVE, Input.DISCONNECTED, "-"),
    ),
    "history: a loss during the fetch is forgotten": (
        Recovery.HISTORY,
        Faults(damage=0.4, truncate=0.2),
        forget_lost,
    ),
    "history: a loss without a number is passed over": (
        Recovery.HISTORY,
        Faults(damage=0.4, truncate=0.2),
        cell(Recovery.HISTORY, State.FETCH, Input.LOST, "-"),
    ),
    "snapshot: a loss during the fetch is forgotten": (Recovery.SNAPSHOT, Faults(damage=0.4), forget_lost),
    "snapshot: a loss without a number is passed over": (
        Recovery.SNAPSHOT,
        Faults(damage=0.4),
        cell(Recovery.SNAPSHOT, State.FETCH, Input.LOST, "-"),
    ),
    "snapshot: messages up to the watermark are applied": (
        Recovery.SNAPSHOT,
        True,
        action("install", apply_at_watermark),
    ),
    "snapshot: a gap is applied": (Recovery.SNAPSHOT, True, cell(Recovery.SNAPSHOT, State.LIVE, Input.AHEAD, "apply")),
    "snapshot: a late message is applied": (
        Recovery.SNAPSHOT,
        True,
        cell(Recovery.SNAPSHOT, State.LIVE, Input.LATE, "apply"),
    ),
    "snapshot: the resynced view lacks what came meanwhile": (
        Recovery.SNAPSHOT,
        False,
        cell(Recovery.SNAPSHOT, State.RESYNC, Input.NEXT, "apply"),
    ),
    "snapshot: a gap during a resync keeps the old view": (
        Recovery.SNAPSHOT,
        False,
        cell(Recovery.SNAPSHOT, State.RESYNC, Input.AHEAD, "both"),
    ),
    "snapshot: a failed attempt is the last": (
        Recovery.SNAPSHOT,
        False,
        cell(Recovery.SNAPSHOT, State.BACKOFF, Input.RETRY, "-"),
    ),
    "snapshot: an older snapshot moves the view back": (
        Recovery.SNAPSHOT,
        Faults(stale=0.5, operator=0.1),
        attribute("_behind", lambda self, end: self._seen is not None and end < self._seen),
    ),
    "snapshot: an older snapshot passes over what came": (
        Recovery.SNAPSHOT,
        Faults(stale=0.5, refuse=0.3),
        attribute("_behind", lambda self, end: self.last is not None and end < self.last),
    ),
    "snapshot: the whole content in one message is added": (
        Recovery.SNAPSHOT,
        False,
        lambda patch: patch.setattr("kvindex.feed.Feed.restores", lambda self, batch: (False, batch)),
    ),
}


class Anything(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


def rows_notice(recovery: Recovery) -> bool:
    for kind, words, expected in ROWS:
        if kind == recovery:
            trace = Trace(kind)
            try:
                if trace.play(words).outcome() != expected:
                    return True
            except AssertionError:
                return True
    return False


def traces_notice(recovery: Recovery, given: Faults | None) -> bool:
    for seed in range(MOST_SEEDS):
        dice = random.Random(f"{recovery}{seed}")
        world = World(seed, recovery)
        world.faults = given or faults(dice)
        try:
            for _ in range(70):
                world.step()
            world.heal()
            world.index.check()
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("name", MUTANTS)
def test_somebody_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recovery, by_traces, patch = MUTANTS[name]
    patch(monkeypatch)
    assert rows_notice(recovery), f"no row of test_sync.py notices that {name}"
    if by_traces:
        assert traces_notice(recovery, None if by_traces is True else by_traces), f"no random trace notices that {name}"


def test_nobody_complains_without_a_mutant() -> None:
    assert not any(rows_notice(recovery) for recovery in Recovery)


def test_readme_lists_them() -> None:
    text = (Path(__file__).parent.parent.parent / "kvindex" / "README.md").read_text(encoding="utf-8")
    for name in MUTANTS:
        assert name.partition(": ")[2] in text, f"kvindex/README.md does not list: {name}"
