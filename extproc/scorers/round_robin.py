"""The next candidate in name order after the one picked last; one pointer per role, which joins and leaves keep."""

from __future__ import annotations

from collections.abc import Sequence

from .base import Candidate, Cost, Request, Role


class RoundRobin:
    PARAMETERS = ()

    def __init__(self) -> None:
        self._last: dict[Role, str] = {}

    def costs(self, request: Request, candidates: Sequence[Candidate]) -> list[Cost | None]:
        last = self._last.get(request.role, "")
        turn = {name: i for i, name in enumerate(sorted((c.name for c in candidates), key=lambda n: (n <= last, n)))}
        return [(float(turn[c.name]),) for c in candidates]

    def picked(self, request: Request, candidate: Candidate) -> None:
        self._last[request.role] = candidate.name
