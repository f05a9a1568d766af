"""Load shedding, off by default: refuse a request when every engine is saturated, never because data is missing.

saturation(i) = max(waiting / queue_threshold, usage / usage_threshold)
shed          = every candidate has a valid fresh report, and the least saturation is at least 1
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from extproc.messages import Immediate, refusal
from extproc.scorers.base import Load


@dataclass(frozen=True, slots=True)
class Shedding:
    """When to refuse.

    queue_threshold   waiting requests that make an engine saturated
    usage_threshold   KV cache usage that makes it saturated, 0..1
    spare_priority    requests of at least this priority are never refused; None = all can be
    retry_after       seconds told to the client

    Raises ValueError that names the field, the value and what is allowed.
    """

    queue_threshold: float = 5.0
    usage_threshold: float = 0.8
    spare_priority: int | None = None
    retry_after: int = 1

    def __post_init__(self) -> None:
        for name, value, high in (
            ("queue_threshold", self.queue_threshold, math.inf),
            ("usage_threshold", self.usage_threshold, 1.0),
            ("retry_after", self.retry_after, math.inf),
        ):
            if not (0 < value <= high and math.isfinite(value)):
                limit = f", at most {high:g}" if math.isfinite(high) else ""
                raise ValueError(f"{name}: {value!r} is not allowed, expected a number above 0{limit}")

    def saturation(self, load: Load) -> float:
        """1 or more: saturated."""
        return max(load.waiting / self.queue_threshold, load.usage / self.usage_threshold)

    def refuse(self, loads: Iterable[Load | None], priority: int = 0) -> Immediate | None:
        """The answer to give instead of a decision, None = serve it. `loads`: of every candidate, None = no report."""
        if self.spare_priority is not None and priority >= self.spare_priority:
            return None
        least = math.inf
        for load in loads:
            if load is None:
                return None
            least = min(least, self.saturation(load))
        if least < 1 or math.isinf(least):
            return None
        return refusal(
            429,
            f"All engines are saturated, retry after {self.retry_after} s.",
            kind="rate_limit_error",
            details=f"kvcar_saturated:{least:.2f}",
            retry_after=self.retry_after,
            headers=(("x-kvcar-dropped-reason", "rejected-saturated"),),
        )


def priority_of(value: str | None) -> int:
    """The priority in a header; 0 when it is missing or no integer (a client's typing error refuses nobody)."""
    try:
        return max(-(2**31), min(2**31, int(value or "0")))
    except ValueError:
        return 0
