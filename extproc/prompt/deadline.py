"""Ends Python code that takes too long, in whatever thread it runs: for templates, which are somebody else's code.

    within(seconds, work) --claim--> _running --watchdog, every TICK: late? takes the claim, then raises TooSlow there

A claim is a list of one deadline, and whoever pops it wins: the work that has ended, or the watchdog. So the exception
never hits what runs after the work. Only bytecode is ended; one long call into C is waited for.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
TICK = 0.2
"""Seconds between two looks: what a limit may be overrun by."""
DELIVERY = 1.0
"""Seconds after which an exception that is under way has been swallowed by something in between."""

_running: dict[int, list[float]] = {}
_watchdog: threading.Thread | None = None


class TooSlow(BaseException):
    """The work was ended. No Exception, so that nothing in it takes it for one of its own."""


def within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns or raises; TooSlow when it takes longer than `seconds` and TICK. Any thread; costs 1 us."""
    _watch()
    me, claim = threading.get_ident(), [time.monotonic() + seconds]
    _running[me] = claim
    try:
        try:
            result = work()
        except TooSlow:
            raise
        except BaseException:
            _settle(claim)
            raise
        _settle(claim)
        return result
    finally:
        _running.pop(me, None)


def _settle(claim: list[float]) -> None:
    """Nothing is raised here any more once this has returned."""
    try:
        claim.pop()
    except IndexError:  # the watchdog was first: its exception is under way
        end = time.monotonic() + DELIVERY
        while time.monotonic() < end:
            time.sleep(0.001)  # the watchdog needs the interpreter to raise it


def _watch() -> None:
    global _watchdog
    if _watchdog is None or not _watchdog.is_alive():  # not yet, or in a process that was forked from one with it
        _watchdog = threading.Thread(target=_look, name="kvcar-deadlines", daemon=True)
        _watchdog.start()


def _look() -> None:
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    while True:
        time.sleep(TICK)
        now = time.monotonic()
        for thread, claim in list(_running.items()):
            try:
                if claim[0] > now:
                    continue
                claim.pop()
            except IndexError:  # it has ended
                continue
            raise_in(ctypes.c_ulong(thread), ctypes.py_object(TooSlow))
