"""The last minutes in memory, at two grains: totals of pools tick by tick, loads of instances in groups of ticks.

A tick is `step` seconds, counted from the start; a late sampler leaves ticks out and shifts nothing. Pure: it is told
the time. Memory: 450 ticks of 8 numbers a pool, 90 groups of 4 numbers an instance (128 instances: 1.5 MB).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple


class Totals(NamedTuple):
    """Counters of one pool since the start; `available`, `chosen`, `delivered`: (requests, sum of their hit ratios)."""

    scored: float = 0.0
    unscored: float = 0.0
    available: tuple[float, float] = (0.0, 0.0)
    chosen: tuple[float, float] = (0.0, 0.0)
    delivered: tuple[float, float] = (0.0, 0.0)


class LoadPoint(NamedTuple):
    """One instance at one tick; `waiting` None = no valid report."""

    in_flight: float
    waiting: float | None


class History:
    """One writer and its readers in one thread.

    began  monotonic seconds of tick 0
    step   seconds a tick
    keep   ticks remembered; `group` of them make one point of an instance's line
    """

    def __init__(self, began: float, *, step: float = 2.0, keep: int = 450, group: int = 5) -> None:
        self.step = step
        self.group = group
        self.tick = -1
        self._began = began
        self._totals: deque[tuple[int, Mapping[str, Totals]]] = deque(maxlen=keep)
        self._loads: deque[tuple[int, dict[str, list[float]]]] = deque(maxlen=max(1, keep // group))

    def add(self, now: float, totals: Mapping[str, Totals], loads: Mapping[str, LoadPoint]) -> None:
        """Takes one sample; a second one within a tick is left out. O(pools + instances)."""
        tick = int((now - self._began) / self.step)
        if tick <= self.tick:
            return
        self.tick = tick
        self._totals.append((tick, dict(totals)))
        number = tick // self.group
        if not self._loads or self._loads[-1][0] != number:
            self._loads.append((number, {}))
        sums = self._loads[-1][1]
        for name, (in_flight, waiting) in loads.items():
            entry = sums.setdefault(name, [0.0, 0.0, 0.0, 0.0])
            entry[0] += 1
            entry[1] += in_flight
            if waiting is not None:
                entry[2] += 1
                entry[3] += waiting

    def since(self, tick: int = -1) -> dict[str, Any]:
        """What came after `tick`, as plain data; a group that was not complete then comes again.

        totals  pool -> [[tick, scored, unscored, n, sum, n, sum, n, sum]], hit ratios in the order of `Totals`
        loads   instance -> [[group, mean in flight, mean waiting or null]]
        """
        totals: dict[str, list[list[float]]] = {}
        for at, pools in self._totals:
            if at > tick:
                for name, one in pools.items():
                    row = [at, one.scored, one.unscored, *one.available, *one.chosen, *one.delivered]
                    totals.setdefault(name, []).append([round(value, 4) for value in row])
        loads: dict[str, list[list[float | None]]] = {}
        for number, sums in self._loads:
            if (number + 1) * self.group > tick:
                for name, (n, in_flight, m, waiting) in sums.items():
                    point = [number, round(in_flight / n, 2), round(waiting / m, 2) if m else None]
                    loads.setdefault(name, []).append(point)
        return {"step": self.step, "group": self.group, "tick": self.tick, "totals": totals, "loads": loads}
