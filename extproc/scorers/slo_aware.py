"""SLO_AWARE of the xLLM service: predicted times against targets. Not cache-aware, no load reports.

    ttft(n)           = a0 + a1*n + a2*n^2               fitted to the profile's [(tokens, ms)]
    tpot(batch, total)= b0 + b1*batch + b2*total         fitted to [(mean tokens, batch, ms)], total = batch*(mean-1)
    backlog(p)        = sum of ttft(n) over our requests there without a first response byte
    est(d)            = int(tpot(requests + 1, tokens + n))

Decode: the first in name order with est <= target_tpot, else the smallest est. Prefill: the smallest backlog; but a
backlog above target_ttft moves the prefill to the decode instance of smallest est, if decoding goes elsewhere, that est
is below target_tpot*(D-1)/D and its own backlog is smaller. Equal ones rotate. Roles are read, never flipped.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import Candidate, Cost, Parameter, Request, Role
from .profiles import Profile, parse_profiles


class SloAware:
    PARAMETERS = (
        Parameter("target_ttft_ms", 1000.0, 0),
        Parameter("target_tpot_ms", 50.0, 0),
        Parameter("profiles", {}, parse=parse_profiles),
    )

    def __init__(
        self,
        *,
        target_ttft_ms: float = 1000.0,
        target_tpot_ms: float = 50.0,
        profiles: dict[str, Profile] | None = None,
    ):
        self.target_ttft = target_ttft_ms
        self.target_tpot = target_tpot_ms
        self.profiles = profiles or {}

    def costs(self, request: Request, candidates: Sequence[Candidate]) -> list[Cost | None]:
        if request.role is Role.DECODE:
            return self._decode(request, candidates)
        return [(self.backlog(c) if request.tokens else 0.0,) for c in candidates]

    def pair(
        self, request: Request, prefill: Sequence[Candidate], decode: Sequence[Candidate]
    ) -> tuple[list[Cost | None], list[Cost | None]]:
        """Costs of `[*prefill, *decode]` for the prefill, and of `decode` for the decode."""
        first: list[Cost | None] = [(self.backlog(c) if request.tokens else 0.0,) for c in prefill]
        first += [None] * len(decode)
        second = self._decode(request, decode)
        if not prefill or not decode or not request.tokens:
            return first, second
        least = min(self.backlog(c) for c in prefill)
        estimates = [self.estimate(request, c) for c in decode]
        lowest = min(estimates)
        taken = estimates[min(range(len(decode)), key=lambda i: second[i] or ())]
        spare = self.target_tpot * (len(decode) - 1) / len(decode)
        if least > self.target_ttft and taken > lowest and lowest < spare:
            for i, c in enumerate(decode):
                if estimates[i] == lowest and self.backlog(c) < least:
                    first[len(prefill) + i] = (-1.0,)
        return first, second

    def backlog(self, candidate: Candidate) -> float:
        """Milliseconds of prefill that our requests there still need."""
        a0, a1, a2 = self._profile(candidate).ttft
        return a0 * candidate.waiting_requests + a1 * candidate.waiting_prompt_tokens + a2 * candidate.waiting_squares

    def estimate(self, request: Request, candidate: Candidate) -> int:
        """Milliseconds a token of decoding there would take with this request added."""
        b0, b1, b2 = self._profile(candidate).tpot
        return int(b0 + b1 * (candidate.requests + 1) + b2 * (candidate.prompt_tokens + request.tokens))

    def _profile(self, candidate: Candidate) -> Profile:
        return self.profiles.get(candidate.name) or self.profiles.get("*") or Profile()

    def _decode(self, request: Request, candidates: Sequence[Candidate]) -> list[Cost | None]:
        if not request.tokens:
            return [(0.0,)] * len(candidates)
        estimates = [self.estimate(request, c) for c in candidates]
        order = sorted(range(len(candidates)), key=lambda i: candidates[i].name)
        place = {i: n for n, i in enumerate(order, 1)}
        first = next((estimates[i] for i in order if estimates[i] <= self.target_tpot), None)
        return [
            (1.0, float(e)) if e > self.target_tpot else (0.0, 0.0 if e == first else float(place[i]))
            for i, e in enumerate(estimates)
        ]
