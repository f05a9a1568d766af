"""Prefix match with a load gate, as AIBrix's prefix-cache router.

count   requests in flight: our own, or running + waiting of the report
gate    max(count) - min(count) > abs_threshold: only candidates with the least count may match
match   at least one block; by percent of the prompt's blocks (whole per cent) descending, then count ascending;
        allowed is count <= mean + factor * sample standard deviation, over all candidates
none    fewest requests
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .base import Candidate, Cost, Parameter, Request
from .least_request import COUNTS, request_count


def imbalanced(counts: Sequence[float], abs_threshold: float) -> bool:
    """True when the busiest has more than `abs_threshold` requests more than the least busy."""
    return bool(counts) and max(counts) - min(counts) > abs_threshold


class PrefixMatch:
    PARAMETERS = (
        Parameter("abs_threshold", 8, integer=True),
        Parameter("factor", 1.0, aliases=("standard_deviation_factor",)),
        COUNTS,
    )

    def __init__(self, *, abs_threshold: int = 8, factor: float = 1.0, counts: str = "own"):
        self.abs_threshold = abs_threshold
        self.factor = factor
        self.reported = counts == "report"

    def costs(self, request: Request, candidates: Sequence[Candidate]) -> list[Cost | None]:
        counts = [request_count(c, self.reported) for c in candidates]
        known = [count for count in counts if count is not None]
        if not known:
            return [None] * len(counts)
        mean = sum(known) / len(known)
        deviation = math.sqrt(sum((n - mean) ** 2 for n in known) / (len(known) - 1)) if len(known) > 1 else 0.0
        bound = mean + self.factor * deviation
        if imbalanced(known, self.abs_threshold):
            bound = min(bound, *known)
        blocks = request.tokens // request.block_size if request.block_size > 0 else 0
        costs: list[Cost | None] = []
        for c, count in zip(candidates, counts, strict=True):
            if count is None:
                costs.append(None)
                continue
            matched = (c.device + c.host + c.disk) // request.block_size if blocks else 0
            if matched and count <= bound:
                costs.append((0, -(matched * 100 // blocks), count))
            else:
                costs.append((1, count, 0))
        return costs
