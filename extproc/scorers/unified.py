"""`unified` of MindIE Motor: tokens still to be computed plus the load, lowest wins.

    prefill = max(0, prompt tokens - overlap_credit * matched)
    cost    = prefill_load_scale * prefill + load_weight * load       matched, load: see motor.py

`load: uncached` takes our outstanding uncached tokens as the load instead of Motor's prompt tokens: on traces with
hits it is the better signal (README, "Which scorer").
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import Candidate, Cost, Parameter, Request, Role
from .motor import TIER_WEIGHTS, load_tokens, matched_tokens


class Unified:
    PARAMETERS = (
        Parameter("load_weight", 1.0, 0),
        Parameter("overlap_credit", 1.0, 0),
        Parameter("prefill_load_scale", 1.0, 0),
        *TIER_WEIGHTS,
        Parameter("load", "prompt", choices=("prompt", "uncached")),
    )

    def __init__(
        self,
        *,
        load_weight: float = 1.0,
        overlap_credit: float = 1.0,
        prefill_load_scale: float = 1.0,
        w_npu: float = 1.0,
        w_cpu: float = 1.0,
        w_disk: float = 0.0,
        load: str = "prompt",
    ):
        self.load_weight = load_weight
        self.overlap_credit = overlap_credit
        self.prefill_load_scale = prefill_load_scale
        self.weights = (w_npu, w_cpu, w_disk)
        self.uncached = load == "uncached"

    def costs(self, request: Request, candidates: Sequence[Candidate]) -> list[Cost | None]:
        return [(self.prefill(request, c) + self.load_weight * self.load(request, c),) for c in candidates]

    def prefill(self, request: Request, candidate: Candidate) -> float:
        matched = self.overlap_credit * matched_tokens(candidate, request, self.weights)
        return self.prefill_load_scale * max(0.0, request.tokens - matched)

    def load(self, request: Request, candidate: Candidate) -> float:
        if self.uncached and request.role is not Role.DECODE:
            return candidate.uncached_tokens
        return load_tokens(candidate, request.role)
