"""The time budget of the event thread: work a little, sleep a little, so that requests get the interpreter."""

from __future__ import annotations

import time
from collections.abc import Callable

SWITCH_INTERVAL = 0.001
"""Seconds for `sys.setswitchinterval`: how long a request keeps the interpreter while the event thread waits for it.

The default of 5 ms would also be how long other threads hold up each request; at 0.5 ms the event thread cuts into each
of them (p99 beside 200k blocks/s 1.9 of alone, here 1.4 to 1.7).
"""


class Pacer:
    """Calling it sleeps `rest` seconds once `budget` seconds have passed since the last rest. About 0.1 us otherwise.

    One for all event work of a process, called in its one event thread. Measured with 150 requests/s
    beside 1 M blocks/s: p99 2 ms, without any rests 7 to 11 ms; `sleep(0)` does not help.
    """

    __slots__ = ("_budget", "_clock", "_rest", "_sleep", "_until", "rests")

    def __init__(
        self,
        budget: float = 0.0005,
        rest: float = 0.0001,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._budget, self._rest, self._clock, self._sleep = budget, rest, clock, sleep
        self._until = clock() + budget
        self.rests = 0

    def __call__(self) -> None:
        if self._clock() >= self._until:
            self._sleep(self._rest)
            self.rests += 1
            self._until = self._clock() + self._budget

    def rested(self) -> None:
        """The thread has just waited for something else."""
        self._until = self._clock() + self._budget
