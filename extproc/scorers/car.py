"""CAR of the xLLM service: cache hit against queue length, both as ratios.

    prefill, default   cost = lambda * (1 - hit) + (1 - lambda) * waiting / max(waiting)
                       hit  = clamp((device + w_host * host + w_disk * disk) / prompt tokens, 0..1)
    decode             cost = usage + waiting / max(waiting)          hits never count

The queue term is 0 when no candidate has anything waiting. A candidate without a load report has no cost.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import Candidate, Cost, Parameter, Request, Role, Weights


class Car:
    PARAMETERS = (
        Parameter("lambda", 0.5, 0, 1, aliases=("car_prefill_lambda",)),
        Parameter("w_host", 0.5, 0, 1, aliases=("car_host_hit_weight",)),
        Parameter("w_disk", 0.0, 0, 1),
    )

    def __init__(self, *, w_host: float = 0.5, w_disk: float = 0.0, **named: float):
        self.lam = named.pop("lambda", 0.5)
        if named:
            raise TypeError(f"unknown parameters: {', '.join(named)}")
        self.weights: Weights = (1.0, w_host, w_disk)

    def costs(self, request: Request, candidates: Sequence[Candidate]) -> list[Cost | None]:
        longest = max((c.load.waiting for c in candidates if c.load is not None), default=0.0)
        scale = 1.0 / longest if longest > 0 else 0.0
        decode = request.role is Role.DECODE
        lam, (_, w_host, w_disk), tokens = self.lam, self.weights, request.tokens
        costs: list[Cost | None] = []
        for c in candidates:
            load = c.load
            if load is None:
                costs.append(None)
                continue
            queue = load.waiting * scale
            if decode:
                costs.append((load.usage + queue,))
                continue
            hit = (c.device + w_host * c.host + w_disk * c.disk) / tokens if tokens > 0 else 0.0
            costs.append((lam * (1.0 - min(1.0, max(0.0, hit))) + (1.0 - lam) * queue,))
        return costs
