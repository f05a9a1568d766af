"""Fewest waiting requests of the load report; a candidate without a report has no cost."""

from __future__ import annotations

from collections.abc import Sequence

from .base import Candidate, Cost, Request


class LeastWaiting:
    PARAMETERS = ()

    def costs(self, request: Request, candidates: Sequence[Candidate]) -> list[Cost | None]:
        return [None if c.load is None else (c.load.waiting,) for c in candidates]
