"""`load_gated` of MindIE Motor: only the N least loaded may be chosen; among them the longest match, then least load.

N is `load_gate_topn`, 0 = 2. Candidates tied with the N-th on load are in name order there, as the gate needs exactly
N; equal ones inside the gate rotate as everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import Candidate, Cost, Parameter, Request
from .motor import TIER_WEIGHTS, load_tokens, matched_tokens


class LoadGated:
    PARAMETERS = (Parameter("load_gate_topn", 0, 0, integer=True), *TIER_WEIGHTS)

    def __init__(self, *, load_gate_topn: int = 0, w_npu: float = 1.0, w_cpu: float = 1.0, w_disk: float = 0.0):
        self.topn = load_gate_topn if load_gate_topn > 0 else 2
        self.weights = (w_npu, w_cpu, w_disk)

    def costs(self, request: Request, candidates: Sequence[Candidate]) -> list[Cost | None]:
        loads = [load_tokens(c, request.role) for c in candidates]
        order = sorted(range(len(candidates)), key=lambda i: loads[i])
        costs: list[Cost | None] = [None] * len(candidates)
        for i in order[: self.topn]:
            costs[i] = (-matched_tokens(candidates[i], request, self.weights), loads[i])
        return costs
