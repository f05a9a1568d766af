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


Point = list[float | None]
"""[group, mean in flight, mean waiting or None]"""


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
        self._totals: deque[tuple[int, Mapping[str, list[float]]]] = deque(maxlen=keep)
        self._loads: deque[tuple[int, dict[str, Point]]] = deque(maxlen=max(1, keep // group))
        self._open: dict[str, list[float]] = {}

    def add(self, now: float, totals: Mapping[str, Totals], loads: Mapping[str, LoadPoint]) -> None:
        """Takes one sample; a second one within a tick is left out. O(pools + instances)."""
        tick = int((now - self._began) / self.step)
        if tick <= self.tick:
            return
        self.tick = tick
        self._totals.append((tick, {name: _row(tick, one) for name, one in totals.items()}))
        number = tick // self.group
        if not self._loads or self._loads[-1][0] != number:
            self._loads.append((number, {}))
            self._open = {}
        points = self._loads[-1][1]
        for name, (in_flight, waiting) in loads.items():
            sums = self._open.setdefault(name, [0.0, 0.0, 0.0, 0.0])
            sums[0] += 1
            sums[1] += in_flight
            if waiting is not None:
                sums[2] += 1
                sums[3] += waiting
            n, flight, m, waits = sums
            points[name] = [number, round(flight / n, 2), round(waits / m, 2) if m else None]

    def since(self, tick: int = -1) -> dict[str, Any]:
        """What came after `tick`, as plain data; a group that was not complete then comes again. O(answer).

        totals  pool -> [[tick, scored, unscored, n, sum, n, sum, n, sum]], hit ratios in the order of `Totals`
        loads   instance -> [[group, mean in flight, mean waiting or null]]
        """
        totals: dict[str, list[list[float]]] = {}
        for at, rows in self._totals:
            if at > tick:
                for name, row in rows.items():
                    totals.setdefault(name, []).append(row)
        loads: dict[str, list[Point]] = {}
        for number, points in self._loads:
            if (number + 1) * self.group > tick:
                for name, point in points.items():
                    loads.setdefault(name, []).append(point)
        return {"step": self.step, "group": self.group, "tick": self.tick, "totals": totals, "loads": loads}


def _row(tick: int, one: Totals) -> list[float]:
    values = (tick, one.scored, one.unscored, *one.available, *one.chosen, *one.delivered)
    return [round(value, 4) for value in values]
