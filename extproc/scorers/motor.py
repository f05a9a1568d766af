"""What MindIE Motor's `unified` and `load_gated` share: matched tokens and load in token units.

    matched = min(round((device * w_npu + host * w_cpu + disk * w_disk) blocks * block_size), prompt tokens)
    load    = active_tokens + share * active_kv      share .3 for prefill, .15 for a mixed role, 0 for decode

active_tokens: prompt tokens of our requests whose prefill is not finished, as seen from here: without a first
response byte. active_kv: prompt tokens of all our requests in flight. A decode instance holds its request to the end,
so its active_tokens are those of all requests in flight.
"""

from __future__ import annotations

from .base import Candidate, Parameter, Request, Role

TIER_WEIGHTS = (Parameter("w_npu", 1.0, 0), Parameter("w_cpu", 1.0, 0), Parameter("w_disk", 0.0, 0))

_KV_SHARE = {Role.PREFILL: 0.3, Role.DEFAULT: 0.15, Role.MIX: 0.15}


def matched_tokens(candidate: Candidate, request: Request, weights: tuple[float, float, float]) -> int:
    """Weighted tokens of the match, rounded, at most the prompt's."""
    effective = candidate.device * weights[0] + candidate.host * weights[1] + candidate.disk * weights[2]
    return min(round(effective), request.tokens)


def load_tokens(candidate: Candidate, role: Role) -> float:
    """Load of a candidate in the role it is asked for, in tokens."""
    if role is Role.DECODE:
        return candidate.prompt_tokens
    return candidate.waiting_prompt_tokens + _KV_SHARE[role] * candidate.prompt_tokens
