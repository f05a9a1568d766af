"""Ends Python code that takes too long, in whatever thread it runs: for templates, which are somebody else's code.

    within(seconds, work) --claim--> _running --watchdog, every TICK: late and not ended? raises TooSlow there

It raises again at each look until the work has ended: the exception may arrive in a destructor, where Python drops it.
A claim is two flags and no lock, since an exception that arrives between taking a lock and the block behind it would
leave it taken: the work sets `ended`, then waits while the watchdog is `raising`, then takes back what has not arrived;
the watchdog sets `raising`, then looks at `ended`. So the exception never hits what runs after the work. Only bytecode
is ended; one long call into C is waited for, and one that keeps the interpreter lock stops the watchdog as well.
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

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)
# The same function once more: it takes NULL to clear, which py_object has no way to say.
_clear_in = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)


class TooSlow(BaseException):
    """The work was ended. No Exception, so that nothing in it takes it for one of its own."""


class _Claim:
    __slots__ = ("deadline", "ended", "raising")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.ended = self.raising = False


_running: dict[int, _Claim] = {}
_watchdog: threading.Thread | None = None
_starting = threading.Lock()


def within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns or raises; TooSlow when it takes longer than `seconds` and TICK. Any thread, not nested;
    costs 2 to 3 us."""
    _watch()
    me = threading.get_ident()
    claim = _running[me] = _Claim(time.monotonic() + seconds)
    try:
        return work()
    finally:
        claim.ended = True  # first, and no call: nothing can arrive before it
        try:
            while claim.raising:
                time.sleep(0.001)  # the watchdog needs the interpreter to raise it; should it arrive here, that is true
        finally:
            _clear_in(me, None)
            _running.pop(me, None)


def _watch() -> None:
    global _watchdog
    if _watchdog is not None and _watchdog.is_alive():
        return
    with _starting:  # one only: a second would clear `raising` of the first; nothing is claimed yet, so nothing arrives
        if _watchdog is None or not _watchdog.is_alive():  # not yet, or in a process that was forked from one with it
            _watchdog = threading.Thread(target=_look, name="kvcar-deadlines", daemon=True)
            _watchdog.start()


def _look() -> None:
    while True:
        time.sleep(TICK)
        now = time.monotonic()
        for thread, claim in list(_running.items()):
            if claim.deadline > now:
                continue
            claim.raising = True
            if not claim.ended:
                _raise_in(thread, TooSlow)
            claim.raising = False
