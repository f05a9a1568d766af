"""The load seam: who says how busy an instance is. Sources are read in memory on the request path, never fetched there.

`Reports` keeps what instances report (scraped or pushed): one load a rank, with age. A report that is not valid, or
older than `stale_after`, is no report: the instance is then no candidate of a scorer that needs one. Silence is never
idleness, and never saturation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from extproc.decision import LoadSource
from extproc.scorers.base import Load

__all__ = ["InvalidReport", "LoadSource", "ReportStatus", "Reports", "combine", "valid_load"]


class InvalidReport(ValueError):
    """A load report that must not be used; the message names the field and the value."""


def valid_load(
    waiting: float, running: float | None = None, usage: float | None = 0.0, at: float | None = None
) -> Load:
    """A `Load` of reported numbers; usage above 1 becomes 1.

    Raises InvalidReport for NaN, infinities and negative numbers.
    """
    usage = 0.0 if usage is None else usage
    for field_name, value in (("waiting", waiting), ("running", running), ("usage", usage)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise InvalidReport(f"{field_name} is {value!r}, expected a finite number of at least 0")
    return Load(float(waiting), None if running is None else float(running), min(1.0, float(usage)), at)


@dataclass(slots=True)
class ReportStatus:
    """What is known of one instance's reports: for status pages.

    loads    by rank (None = the instance as a whole); empty after an invalid report
    at       when the last valid one was taken, None = never
    error    why the last one could not be used, "" = it could
    clamped  usages above 1 so far
    """

    loads: dict[int | None, Load] = field(default_factory=dict)
    whole: Load | None = None
    at: float | None = None
    error: str = ""
    received: int = 0
    failed: int = 0
    clamped: int = 0


class Reports:
    """The latest report of every instance. Written and read in one thread.

    stale_after  seconds after which a report counts no more
    """

    def __init__(self, *, stale_after: float = 2.0):
        self.stale_after = stale_after
        self.status: dict[str, ReportStatus] = {}

    def put(
        self,
        name: str,
        loads: Mapping[int | None, Load],
        now: float,
        *,
        clamped: int = 0,
    ) -> None:
        """Takes over one valid report, `loads` by rank (key None = no ranks told). Empty = `fail`."""
        status = self.status.setdefault(name, ReportStatus())
        status.received += 1
        if not loads:
            self.fail(name, "the report names no load")
            return
        status.loads = {rank: load._replace(at=now) for rank, load in loads.items()}
        status.whole = combine(status.loads.values())
        status.at = now
        status.error = ""
        status.clamped += clamped

    def fail(self, name: str, error: str, *, invalid: bool = True) -> None:
        """Records that no usable report came. `invalid`: one came and must not be used, so the old one goes at once;
        otherwise (time-out, connection refused) the old one ages on."""
        status = self.status.setdefault(name, ReportStatus())
        status.failed += 1
        status.error = error
        if invalid:
            status.loads, status.whole = {}, None

    def get(self, name: str, now: float, rank: int | None = None) -> Load | None:
        status = self.status.get(name)
        if status is None or status.at is None or now - status.at > self.stale_after:
            return None
        if rank is None:
            return status.whole
        return status.loads.get(rank) or (status.whole if None in status.loads else None)

    def retain(self, names: Iterable[str]) -> None:
        """Forgets every instance that is not named."""
        keep = set(names)
        for name in [name for name in self.status if name not in keep]:
            del self.status[name]


def combine(loads: Iterable[Load]) -> Load:
    """Load of an instance from its ranks: waiting and running summed, usage the highest."""
    parts = list(loads)
    running = [load.running for load in parts if load.running is not None]
    return Load(
        sum(load.waiting for load in parts),
        sum(running) if running else None,
        max(load.usage for load in parts),
        min((load.at for load in parts if load.at is not None), default=None),
    )
