"""Estimated time to first token: our outstanding uncached tokens there plus this request's, over the prefill rate.

    uncached = max(0, prompt tokens - (w_dev * device + w_host * host + w_disk * disk))
    queued   = outstanding uncached tokens there - min(those of the oldest, rate * seconds it has been the oldest)
    cost [s] = queued / rate + own_weight * uncached / rate

Outstanding: of our requests there without a first response byte; the oldest is being computed meanwhile. Rate:
`prefill_rates` by instance, else `prefill_rate`, else what was learnt of it, else the median of the known ones, else 1
(the cost is then in tokens). Needs no load report; sees our own traffic only.

own_weight above 1 charges cache misses for more than their own time: each also evicts what others would have hit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from .base import Candidate, Cost, Parameter, Request, Weights, hit_tokens


def parse_rates(value: object) -> dict[str, float]:
    """`{instance: tokens per second}`. Raises ValueError."""
    if not isinstance(value, Mapping):
        raise ValueError(f"prefill_rates: {value!r} is not allowed, expected a mapping of instance to tokens/s")
    return {str(name): Parameter(f"prefill_rates.{name}", None, 1e-9).check(rate) for name, rate in value.items()}


def instance_name(candidate: Candidate) -> str:
    return candidate.name if candidate.rank is None else candidate.name.rpartition("/")[0]


class Ttft:
    PARAMETERS = (
        Parameter("prefill_rate", None, 1e-9, optional=True),
        Parameter("prefill_rates", {}, parse=parse_rates),
        Parameter("own_weight", 1.0, 0, 100),
        Parameter("w_dev", 1.0, 0, 1),
        Parameter("w_host", 0.5, 0, 1),
        Parameter("w_disk", 0.0, 0, 1),
    )

    def __init__(
        self,
        *,
        prefill_rate: float | None = None,
        prefill_rates: Mapping[str, float] | None = None,
        own_weight: float = 1.0,
        w_dev: float = 1.0,
        w_host: float = 0.5,
        w_disk: float = 0.0,
    ):
        self.prefill_rate = prefill_rate
        self.prefill_rates = prefill_rates or {}
        self.own_weight = own_weight
        self.weights: Weights = (w_dev, w_host, w_disk)

    def costs(self, request: Request, candidates: Sequence[Candidate]) -> list[Cost | None]:
        rates = [self._rate(c) for c in candidates]
        usual = median([rate for rate in rates if rate] or [1.0])
        costs: list[Cost | None] = []
        for c, rate in zip(candidates, rates, strict=True):
            uncached = request.tokens - hit_tokens(c, request.tokens, self.weights)
            queued = c.uncached_tokens
            if rate and c.busy_seconds:
                queued -= min(c.head_tokens, rate * c.busy_seconds)
            costs.append(((queued + self.own_weight * uncached) / (rate or usual),))
        return costs

    def _rate(self, candidate: Candidate) -> float | None:
        if self.prefill_rates:
            rate = self.prefill_rates.get(instance_name(candidate))
            if rate is not None:
                return rate
        return self.prefill_rate if self.prefill_rate is not None else candidate.prefill_rate
