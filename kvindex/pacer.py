"""Who gets the interpreter: the event thread works a little and sleeps a little, and lets requests go ahead."""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

SWITCH_INTERVAL = 0.0005
"""Seconds for `sys.setswitchinterval`: how long a request that comes in waits for the event thread at most.

The default of 5 ms would be how long each of them waits. The event thread cuts in as often, but gives way.
"""

T = TypeVar("T")


class Pacer:
    """Calling it sleeps when others should have the interpreter. About 0.1 us otherwise.

    `budget` seconds after its last rest the thread sleeps for `rest` seconds. While a request is at work (`ahead`) it
    sleeps on, `patience` seconds at most; then it works for `budget` seconds all the same, waits for the interpreter
    included, so that events are never starved: beside requests without a pause they still get about a tenth of it.

    One for all event work of a process, called in its one event thread. Measured with 100 requests/s of 2 ms beside
    200k blocks/s: p99 1.35 to 1.43 of alone, without precedence 1.3 to 1.65 and 2 % fewer blocks applied, without any
    rests above 3; `sleep(0)` does not help. See docs/performance.md.
    """

    __slots__ = ("_budget", "_clock", "_granted", "_patience", "_rest", "_sleep", "_until", "requested", "rests")

    def __init__(
        self,
        budget: float = 0.001,
        rest: float = 0.0001,
        patience: float = 0.002,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._budget, self._rest, self._patience, self._clock, self._sleep = budget, rest, patience, clock, sleep
        self._until = clock() + budget
        self._granted = 0.0  # until then the thread works though a request is at work
        self.requested = False  # a request is at work: only `ahead` sets it
        self.rests = 0

    def __call__(self) -> None:
        now = self._clock()
        if self.requested and now >= self._granted:
            limit = now + self._patience
            while self.requested and now < limit:
                self._sleep(self._patience / 2)
                self.rests += 1
                now = self._clock()
            self._until = self._granted = now + self._budget
        elif now >= self._until:
            self._sleep(self._rest)
            self.rests += 1
            self._until = self._clock() + self._budget

    def rested(self) -> None:
        """The thread has just waited for something else."""
        self._until = self._clock() + self._budget

    @types.coroutine
    def ahead(self, work: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Awaits `work`, a request's, with precedence over the event thread wherever a step of it runs.

        For coroutines of one event loop. Nothing but an attribute is set, about 0.5 us a step.
        """
        step, given = work.send, None
        while True:
            self.requested = True
            try:
                waiting = step(given)
            except StopIteration as ended:
                return ended.value  # type: ignore[no-any-return]
            finally:
                self.requested, given = False, None  # an error told holds this frame: left here it would be a cycle
            try:
                step, given = work.send, (yield waiting)
            except BaseException as error:  # a cancellation, mostly: the work is told
                step, given = work.throw, error
