"""Bounds what a storm can log: the first lines of a kind pass, the rest of the period becomes one line with a count.

    10:00:00 WARNING extproc.pool: instance a gets no requests for 5 s, ...: requests end with 503      (5 of these)
    10:00:10 WARNING extproc.pool: 4311 more lines like this in 10 s: instance a gets no requests for 5 s, ...

A kind is logger, level and message template, and the name the arguments begin with where they do, so that one engine's
noise does not hide another's first line. Warnings and errors are bounded like everything else; DEBUG is not, for who
switches it on wants all of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable

ALWAYS = {"always": True}
"""`extra=` of lines that are a record of who did what: none of them is left out."""

OTHERS = "others"
"""The kind of whatever comes while `max_kinds` are being counted."""

SHOWN = 300
"""Characters kept of an example of what was left out."""


class _Kind:
    """One kind in one period."""

    __slots__ = ("began", "example", "left_out", "level", "logger", "passed")

    def __init__(self, began: float, record: logging.LogRecord) -> None:
        self.began = began
        self.logger = record.name
        self.level = record.levelno
        self.passed = 0
        self.left_out = 0
        self.example = ""


def kind_of(record: logging.LogRecord) -> tuple[Hashable, ...]:
    """What a line has in common with those like it."""
    args = record.args
    first = args[0] if isinstance(args, tuple) and args else None
    return record.name, record.levelno, str(record.msg), first[:100] if isinstance(first, str) else None


class LogLimits(logging.Filter):
    """A filter of one handler, which also gets the summaries. At most max_kinds * (burst + 1) lines a period.

    burst      lines of a kind that pass in a period
    period     seconds; begins with the first line of a kind
    max_kinds  kinds counted at a time; more of them share one

    Summaries come from a thread that lives only while something is being left out, and from `flush`. Cost of a line:
    about 1 us.
    """

    def __init__(
        self,
        handler: logging.Handler,
        *,
        burst: int = 5,
        period: float = 10.0,
        max_kinds: int = 500,
        clock: Callable[[], float] = time.monotonic,
        timer: bool = True,
    ) -> None:
        """timer  False: nobody but the caller calls `flush`"""
        super().__init__()
        self._handler = handler
        self._burst = burst
        self._period = period
        self._max_kinds = max_kinds
        self._clock = clock
        self._kinds: dict[tuple[Hashable, ...], _Kind] = {}
        self._lock = threading.Lock()
        self._timer = timer
        self._waiting = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line passes."""
        if record.levelno < logging.INFO or getattr(record, "always", False):
            return True
        now = self._clock()
        key = kind_of(record)
        with self._lock:
            kind = self._kinds.get(key)
            if kind is not None and now - kind.began >= self._period:
                over = self._kinds.pop(key)
                kind = None
            else:
                over = None
            if kind is None:
                kind, key = self._new(key, record, now)
            passes = kind.passed < self._burst
            if passes:
                kind.passed += 1
            else:
                if not kind.left_out:
                    kind.example = _text(record)
                kind.left_out += 1
            wait = self._timer and not passes and not self._waiting
            self._waiting = self._waiting or wait
        if over is not None:
            self._tell(over)
        if wait:
            self._wait()
        return passes

    def _new(
        self, key: tuple[Hashable, ...], record: logging.LogRecord, now: float
    ) -> tuple[_Kind, tuple[Hashable, ...]]:
        """Begins a period. Under the lock."""
        if len(self._kinds) >= self._max_kinds:
            self._forget(now)
        if len(self._kinds) >= self._max_kinds:
            key = (OTHERS,)
        return self._kinds.setdefault(key, _Kind(now, record)), key

    def _forget(self, now: float) -> None:
        """Drops kinds of which nothing was left out and whose period is over. Under the lock."""
        for key in [key for key, kind in self._kinds.items() if not kind.left_out and self._over(kind, now)]:
            del self._kinds[key]

    def _over(self, kind: _Kind, now: float) -> bool:
        return now - kind.began >= self._period

    def flush(self, *, all_of_them: bool = False) -> bool:
        """Tells what was left out in periods that are over (`all_of_them`: or not). Returns whether more is to come."""
        now = self._clock()
        with self._lock:
            due = [key for key, kind in self._kinds.items() if kind.left_out and (all_of_them or self._over(kind, now))]
            kinds = [self._kinds.pop(key) for key in due]
            more = any(kind.left_out for kind in self._kinds.values())
            self._waiting = self._waiting and more
        for kind in kinds:
            self._tell(kind)
        return more

    def _wait(self) -> None:
        try:
            threading.Thread(target=self._run, name="kvcar-log-limits", daemon=True).start()
        except RuntimeError:  # the interpreter is ending: `flush` is called at exit
            self._waiting = False

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(self._period)
            if not self.flush():
                return

    def _tell(self, kind: _Kind) -> None:
        """Past this filter, straight to the handler. Nothing was left out: nothing to tell."""
        if not kind.left_out:
            return
        record = logging.LogRecord(
            kind.logger, kind.level, "", 0, "%d more lines like this in %.0f s: %s",
            (kind.left_out, self._period, kind.example), None,
        )  # fmt: skip
        record.left_out = kind.left_out
        self._handler.acquire()
        try:
            self._handler.emit(record)
        finally:
            self._handler.release()


def _text(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()[:SHOWN]
    except Exception:  # arguments that do not fit the template: logging itself says so when such a line is written
        return str(record.msg)[:SHOWN]
