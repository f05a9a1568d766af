"""Which connection do frames belong to? The state of one SUB socket's connection, told by its monitor. Sans-IO.

libzmq reconnects silently and leaves frames of the broken connection in the queue, in front of those of the new one.
The transport reads a batch of frames first and the monitor after it, then asks `judge`. The monitor hears of a
handshake before the first frame of that connection can be read, so

    no new handshake known after the batch    every frame of it came over the old connection: keep
    loss known, queue found empty since       the old connection has nothing left: what comes is the new one's: keep
    loss and new handshake in one look        either may be: throw away until the queue was found empty in a read that
                                              began after the news; what was lost is a gap, or in the replay

                 handshake                 lost                   queue empty
    NEW -------------------------> UP ----------------> FALLING --------------> DOWN
         connected, then frames    ^ ^                     | handshake            | handshake
                                   | |                     v                      |
                                   | +---------------- PURGING                    |
                                   |   queue empty:                               |
                                   |   disconnected, reconnected                  |
                                   +----------------------------------------------+
                                       reconnected, then frames

With `bind` several peers may be connected: the connection is lost when the last one is; a further peer purges.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from kvindex.durations import Durations


class Event(Enum):
    """What the socket monitor tells, reduced to what matters here."""

    CONNECTING = auto()
    """A first or new try runs (libzmq goes on by itself)."""
    RETRYING = auto()
    """A try failed or a connection was lost; the next one is scheduled."""
    ACCEPTED = auto()
    HANDSHAKE = auto()
    DISCONNECTED = auto()


class Told(Enum):
    """What StreamSync is to hear."""

    CONNECTED = auto()
    DISCONNECTED = auto()
    RECONNECTED = auto()


class Verdict(NamedTuple):
    """before: told ahead of the frames; keep: deliver the frames or throw them away; after: told behind them;
    again: read once more without waiting for the descriptor."""

    before: tuple[Told, ...] = ()
    keep: bool = True
    after: tuple[Told, ...] = ()
    again: bool = False


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """The connection below a stream, for status and metrics. Counters since the stream was followed.

    connect_retries   failed tries; faults   internal errors after which the stream was rebuilt
    applying          seconds that each message took, pauses of the time budget included
    """

    connected: bool = False
    connections: int = 0
    disconnections: int = 0
    connect_retries: int = 0
    faults: int = 0
    error: str | None = None
    applying: Durations = field(default_factory=Durations, compare=False)


class Link:
    """One socket's connection. `event` for each monitor message in order, then `judge` for the batch read before."""

    def __init__(self, *, bind: bool = False) -> None:
        self._bind = bind
        self._met = False  # a handshake has succeeded before
        self._told_up = False
        self._before: tuple[Told, ...] = ()
        self.replaced()

    def replaced(self) -> None:
        """The socket is a new one with an empty queue; what sync has heard so far stays true."""
        self._peers: set[int] = set()
        self._empty = True  # nothing of an earlier connection is left in the queue
        self._falling = False
        self._purging = False
        self._news = False  # a boundary was announced after the batch under judgement was read
        self.up = False
        self.retries = 0
        """Failed tries since the last handshake."""
        self.lost = False
        """Disconnected, and libzmq has not said that it tries again: stays True when it has given up."""

    def event(self, event: Event, value: int = 0) -> None:
        """`value`: the connection's descriptor for ACCEPTED and DISCONNECTED, as libzmq gives it."""
        if event is Event.HANDSHAKE:
            self.up, self.retries, self.lost = True, 0, False
            if self._empty:
                self._empty = False
                self._before += self._tell_up()
            else:
                self._purging = self._news = True
        elif event is Event.DISCONNECTED:
            self._peers.discard(value)
            if self._bind and self._peers:
                return
            self.lost = not self._bind
            if self.up:
                self.up = False
                self._falling = self._news = True
        elif event is Event.RETRYING:
            self.retries += 1
            self.lost = False
        elif event is Event.CONNECTING:
            self.lost = False
        elif event is Event.ACCEPTED:
            self._peers.add(value)

    def judge(self, drained: bool) -> Verdict:
        """About the batch read before the latest events; `drained`: the queue was empty at its end."""
        before, self._before = self._before, ()
        news, self._news = self._news, False
        keep = not self._purging
        if not drained or news:
            return Verdict(before, keep, (), True)
        after: tuple[Told, ...] = ()
        if self._purging or self._falling:
            after = self._tell_up() if self.up else self._tell_down()
            self._purging = self._falling = False
            self._empty = not self.up
        return Verdict(before, keep, after, False)

    def _tell_down(self) -> tuple[Told, ...]:
        told_up, self._told_up = self._told_up, False
        return (Told.DISCONNECTED,) if told_up else ()

    def _tell_up(self) -> tuple[Told, ...]:
        """A connection is up; the one before, if sync believes in it, is gone."""
        met, self._met = self._met, True
        down = self._tell_down()
        self._told_up = True
        return (*down, Told.RECONNECTED) if met else (Told.CONNECTED,)
