"""Fewest requests in flight: our own count, or with `counts: report` running + waiting of the load report."""

from __future__ import annotations

from collections.abc import Sequence

from .base import Candidate, Cost, Parameter, Request

COUNTS = Parameter("counts", "own", choices=("own", "report"))


def request_count(candidate: Candidate, reported: bool) -> float | None:
    """Requests in flight, None when they should come from a report and there is none."""
    if not reported:
        return candidate.requests
    load = candidate.load
    return None if load is None else load.waiting + (load.running or 0.0)


class LeastRequest:
    PARAMETERS = (COUNTS,)

    def __init__(self, *, counts: str = "own"):
        self.reported = counts == "report"

    def costs(self, request: Request, candidates: Sequence[Candidate]) -> list[Cost | None]:
        counts = [request_count(c, self.reported) for c in candidates]
        return [None if count is None else (count,) for count in counts]
