"""How long things take: a histogram without a lock. One thread adds, any thread reads."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS = tuple(10e-6 * 2**power for power in range(15))
"""Upper bounds in seconds, 10 us to 164 ms doubling: those of AIBrix's event_processing_duration_seconds."""


class Durations:
    """counts[i] durations of at most BOUNDS[i] seconds and above the bound before; the last one is for longer ones."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """About 0.3 us."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds
