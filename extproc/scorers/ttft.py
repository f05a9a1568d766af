"""Estimated time to first token: what is still to be computed there, plus this request's own part, over the rate.

    uncached = max(0, prompt tokens - (w_dev * device + w_host * host + w_disk * disk))
    queued   = outstanding uncached tokens there - min(those of the oldest, rate * seconds it has been the oldest)
    cost [s] = (queued + weight * uncached) / rate
    weight   = 1 + (own_weight - 1) * share of candidates with a queue

Outstanding: of our requests there without a first response byte; the oldest is being computed meanwhile (at the learnt
rate where there is one: a configured one may be far off). A miss on a
busy pool also delays those behind it and evicts what they would have hit, so it is charged for more than its own time;
with own_weight 1, or an idle pool, the cost is the plain estimate.

Rate: `prefill_rates` by instance, else `prefill_rate`, else what was learnt of it, else the median of the known ones,
else 1 (the cost is then in tokens). Learnt rates within rate_tolerance of the median are taken as the median: those of
equal engines differ by chance, and without ties an idle pool would send everything to the one that looks fastest.

Needs no load report; sees our own traffic only.
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


class Ttft:
    PARAMETERS = (
        Parameter("prefill_rate", None, 1e-9, optional=True),
        Parameter("prefill_rates", {}, parse=parse_rates),
        Parameter("rate_tolerance", 0.25, 0, 1),
        Parameter("own_weight", 2.0, 0, 100),
        Parameter("w_dev", 1.0, 0, 1),
        Parameter("w_host", 0.5, 0, 1),
        Parameter("w_disk", 0.0, 0, 1),
    )

    def __init__(
        self,
        *,
        prefill_rate: float | None = None,
        prefill_rates: Mapping[str, float] | None = None,
        rate_tolerance: float = 0.25,
        own_weight: float = 2.0,
        w_dev: float = 1.0,
        w_host: float = 0.5,
        w_disk: float = 0.0,
    ):
        self.prefill_rate = prefill_rate
        self.prefill_rates = prefill_rates or {}
        self.tolerance = rate_tolerance
        self.own_weight = own_weight
        self.weights: Weights = (w_dev, w_host, w_disk)

    def costs(self, request: Request, candidates: Sequence[Candidate]) -> list[Cost | None]:
        configured = self._configured(candidates)
        rates = self._rates(candidates, configured)
        busy = sum(c.uncached_tokens > 0 for c in candidates)
        weight = 1.0 + (self.own_weight - 1.0) * busy / max(1, len(candidates))
        costs: list[Cost | None] = []
        for c, given, rate in zip(candidates, configured, rates, strict=True):
            queued = c.uncached_tokens
            if c.busy_seconds:
                queued -= min(c.head_tokens, (c.prefill_rate or given or 0.0) * c.busy_seconds)
            uncached = request.tokens - hit_tokens(c, request.tokens, self.weights)
            costs.append(((queued + weight * uncached) / rate,))
        return costs

    def _configured(self, candidates: Sequence[Candidate]) -> list[float | None]:
        if not self.prefill_rates:
            return [self.prefill_rate] * len(candidates)
        names = [c.name if c.rank is None else c.name.rpartition("/")[0] for c in candidates]
        return [self.prefill_rates.get(name, self.prefill_rate) for name in names]

    def _rates(self, candidates: Sequence[Candidate], configured: Sequence[float | None]) -> list[float]:
        known = [given or c.prefill_rate for given, c in zip(configured, candidates, strict=True)]
        usual = median([rate for rate in known if rate] or [1.0])
        spread = self.tolerance * usual
        rates = []
        for given, rate in zip(configured, known, strict=True):
            near = rate is None or (given is None and abs(rate - usual) <= spread)
            rates.append(usual if near or rate is None else rate)
        return rates
