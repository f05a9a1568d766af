"""The state machine of a stream as data: states, inputs, and the one action each pair has (D4 to D6, D11).

`TABLE` is what runs: sync.py looks every input up in it, and `markdown()` draws the picture of the README from it. A
cell is an action of StreamSync (its docstring says what it does), `-` = no effect (counted where it means something).
Three words a/b/c are for recovery none, history and snapshot. RETIRED answers every input with `-`.

    EMPTY    subscribed, nothing applied                                             no hits
    FETCH    an attempt runs (or waits for its turn), live frames are buffered       no hits
    LIVE     every frame since the start of the run, or since the snapshot, applied  hits
    RESYNC   LIVE, and a fresh snapshot is on its way (snapshot only)                hits of the old view
    BACKOFF  an attempt failed, the next one waits; live frames are not kept         no hits
    OFFLINE  the connection is lost; what history recovery can continue is kept      no hits
    RETIRED  instance gone or replaced                                               not listed

When the attempts of history recovery are used up, or it has nothing to fetch, the stream goes on by the rules of `none`
until its next frame makes it LIVE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from kvindex.walk import TierBlocks


class _Word(StrEnum):
    """Keys of the table: hashed as the text they are, in C (Enum's own hash is a Python function)."""

    __hash__ = str.__hash__


class Recovery(_Word):
    """What the replay endpoint answers; NONE = there is none."""

    NONE = "none"
    HISTORY = "history"
    SNAPSHOT = "snapshot"


class State(_Word):
    EMPTY = "empty"
    FETCH = "fetch"
    LIVE = "live"
    RESYNC = "resync"
    BACKOFF = "backoff"
    OFFLINE = "offline"
    RETIRED = "retired"


class Input(_Word):
    """What can happen. Frames are classified first: by the last applied sequence and the last one seen live."""

    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    RECONNECTED = "reconnected"
    # live frames
    FIRST = "first"  # nothing applied yet
    NEXT = "next"  # last + 1
    AHEAD = "ahead"  # above last + 1: a gap
    LATE = "late"  # new on the live channel, but a replay or snapshot brought it already
    DUPLICATE = "duplicate"  # the last one seen, once more
    BEHIND = "behind"  # not above the last one seen: the engine was restarted
    DAMAGED = "damaged"  # found when it was to be applied: message lost, or the effect of one of its events
    LOST = "lost"  # the same, but there is no place where it could be waited for: its number is unknown
    RESTORE = "restore"  # snapshot recovery only: cleared, then the whole content
    # found while a frame was applied
    UNKNOWN_PARENT = "unknown parent"
    CAPACITY = "capacity"
    # the attempt
    STARTED = "attempt started"
    REPLY = "reply"
    END = "end marker"
    FAILED = "attempt failed"
    TIMEOUT = "attempt timed out"
    OVERFLOW = "buffer full"
    # time and people
    RETRY = "back-off over"
    REFRESH = "resync due"
    RESYNC = "resync wanted"


NO_BLOCKS = TierBlocks(0, 0, 0)


@dataclass(frozen=True, slots=True)
class StartReplay:
    """Open a socket of its own, ask from sequence `start`, then say `attempt_started`. May wait for its turn before."""

    attempt: int
    start: int


@dataclass(frozen=True, slots=True)
class CancelReplay:
    """The attempt is over, for whatever reason: close its socket, or take it out of the queue."""

    attempt: int


Action = StartReplay | CancelReplay


@dataclass(frozen=True, slots=True)
class SyncLimits:
    """Bounds, times in seconds.

    max_buffered_bytes  frames (and what they were decoded to), and a snapshot, while an attempt runs
    replay_timeout      from attempt_started (history: or the last message that brought something, twelve times at
                        most) to the end marker; None = 5 for history, 2 for snapshot
    resync_interval     between snapshots: finds a tail that was lost silently
    attempts            failed attempts of history recovery until the stream goes on without (one that brought something
                        counts a quarter); and recoveries in a row, none of which lasted `settle`, until they are spaced
    backoff_initial     doubled by each failure up to backoff_max
    """

    max_message_bytes: int = 8 << 20
    max_buffered_bytes: int = 16 << 20
    replay_timeout: float | None = None
    resync_interval: float = 30.0
    attempts: int = 3
    backoff_initial: float = 1.0
    backoff_max: float = 30.0
    settle: float = 5.0


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """What is to be said about a stream. Immutable; counters since the stream began.

    error            why it is not synchronized, or what needs attention although it is; None = all is well
    last_event_at    `now` of the last frame applied; timestamp = the engine's own time of it, seconds since the epoch
    known            engine hashes with a copy; unanchored and remembered are those without a place, and without tokens
    batches          messages applied; their events by type in `events`
    gaps, missed     jumps of the live sequence, and the messages they left out
    restarts         times the publisher was found to be a new process
    replays          attempts begun; replay_failures of them failed
    rebuilds         times the view was dropped or replaced; resyncs = snapshots asked for beside a view that serves
    duplicates       frames received twice; late = frames a replay had brought before
    damaged          messages lost, or with an event whose effect is lost
    foreign          messages of another topic
    skipped          what was not taken over, by reason
    """

    state: State = State.EMPTY
    recovery: Recovery = Recovery.NONE
    synchronized: bool = False
    complete: bool = False
    sequence: int | None = None
    error: str | None = None
    last_event_at: float | None = None
    timestamp: float | None = None
    blocks: TierBlocks = NO_BLOCKS
    known: int = 0
    unanchored: int = 0
    remembered: int = 0
    buffered_bytes: int = 0
    batches: int = 0
    gaps: int = 0
    missed: int = 0
    restarts: int = 0
    replays: int = 0
    replay_failures: int = 0
    rebuilds: int = 0
    resyncs: int = 0
    duplicates: int = 0
    late: int = 0
    damaged: int = 0
    foreign: int = 0
    events: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    skipped: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))


TABLE = """
input             | EMPTY               | FETCH     | LIVE                  | RESYNC   | BACKOFF | OFFLINE
connected         | -/ask/ask           | -         | -                     | -        | -       | empty/ask/ask
disconnected      | suspend             | suspend   | suspend               | suspend  | suspend | -
reconnected       | -/ask/ask           | ask       | empty/ask/ask         | ask      | ask     | empty/ask/ask
first             | begin/fetch/fetch   | buffer    | begin/restart/fetch   | fetch    | -       | -
next              | begin/fetch/fetch   | buffer    | apply                 | both     | -       | -
ahead             | begin/fetch/fetch   | buffer    | begin/fetch/fetch     | hide     | -       | -
late              | begin/fetch/fetch   | buffer    | -                     | buffer   | -       | -
duplicate         | -                   | -         | -                     | -        | -       | -
behind            | begin/restart/fetch | restart   | begin/restart/restart | restart  | forget  | -
damaged           | -/ask/ask           | -/fail/fail | empty/mend/ask      | hide     | -       | -
lost              | -/ask/ask           | -/fail/fail | empty/mend/ask      | fail     | -       | -
restore           | restore             | restore   | restore               | restore  | restore | -
unknown parent    | -                   | -         | -/-/ask               | hide     | -       | -
capacity          | -                   | -         | empty/shed/shed       | shed     | -       | -
attempt started   | -                   | arm       | -                     | arm      | -       | -
reply             | -                   | -/take/hold | -                   | hold     | -       | -
end marker        | -                   | -/merge/install | -               | install  | -       | -
attempt failed    | -                   | fail      | -                     | abandon  | -       | -
attempt timed out | -                   | fail      | -                     | abandon  | -       | -
buffer full       | -                   | fail      | -                     | abandon  | -       | -
back-off over     | -                   | -         | -                     | -        | ask     | -
resync due        | -                   | -         | -/-/refresh           | -        | -       | -
resync wanted     | -/ask/ask           | -         | empty/restart/refresh | -        | ask     | -
"""

Rules = Mapping[Recovery, Mapping[State, Mapping[Input, str]]]


def parse(table: str = TABLE) -> Rules:
    """Recovery -> state -> input -> action. Raises ValueError unless every pair has exactly one answer."""
    head, *lines = [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]
    states = [State[name] for name in head[1:]]
    rules: dict[Recovery, dict[State, dict[Input, str]]] = {
        recovery: {state: {} for state in (*states, State.RETIRED)} for recovery in Recovery
    }
    for name, *cells in lines:
        entry = Input(name)
        for state, cell in zip(states, cells, strict=True):
            words = cell.split("/")
            for recovery, word in zip(Recovery, words * 3 if len(words) == 1 else words, strict=True):
                if entry in rules[recovery][state]:
                    raise ValueError(f"{entry} stands twice")
                rules[recovery][state][entry] = word
        for recovery in Recovery:
            rules[recovery][State.RETIRED][entry] = "-"
    for recovery, by_state in rules.items():
        for state in State:
            if missing := set(Input) - set(by_state.get(state, ())):
                raise ValueError(f"{recovery}, {state}: no answer to {sorted(missing)}")
    return MappingProxyType(rules)


RULES = parse()


def markdown(table: str = TABLE) -> str:
    """The table as Markdown, for the README."""
    head, *lines = [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
