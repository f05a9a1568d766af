"""Session affinity around any scorer: requests of one session key go to the instance that has the session.

    prefer   the bound candidate wins ties and near-ties: cost - best <= session_slack * (worst - best)
    pin      the bound candidate wins whenever it is a candidate
    hash     rendezvous hash of key and address picks the candidate; keeps no state, equal on all replicas

A session is bound to what was picked last, forgotten `session_ttl` seconds after its last request, and the oldest go
when there are more than `max_sessions`. A key that is an address ("ip:port", plain or base64) binds only to a current
candidate.
"""

from __future__ import annotations

import base64
import binascii
from collections import OrderedDict
from collections.abc import Sequence

from .base import Candidate, Cost, Parameter, Request, Role, Scorer

PARAMETERS = (
    Parameter("mode", "prefer", choices=("prefer", "pin", "hash")),
    Parameter("session_slack", 0.05, 0, 1),
    Parameter("session_ttl", 300.0, 0),
    Parameter("max_sessions", 100_000, 1, integer=True),
)


def rendezvous(key: str, address: str) -> int:
    """FNV-1a 64 over the key, a zero byte and the address; the candidate with the highest value has the key."""
    digest = 0xCBF29CE484222325
    for byte in key.encode() + b"\0" + address.encode():
        digest = ((digest ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return digest


def _address(key: str) -> str:
    try:
        return base64.b64decode(key, validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        return key


class SessionAffinity:
    def __init__(
        self,
        inner: Scorer,
        *,
        mode: str = "prefer",
        session_slack: float = 0.05,
        session_ttl: float = 300.0,
        max_sessions: int = 100_000,
    ):
        self.inner, self.mode, self.slack, self.ttl, self.bound = inner, mode, session_slack, session_ttl, max_sessions
        self.weights = getattr(inner, "weights", (1.0, 0.5, 0.0))
        self._inner_picked = getattr(inner, "picked", None)
        if hasattr(inner, "pair"):
            self.pair = inner.pair  # pairs are chosen together, without regard to sessions
        self._sessions: OrderedDict[tuple[Role, str], tuple[str, float]] = OrderedDict()

    def costs(self, request: Request, candidates: Sequence[Candidate]) -> list[Cost | None]:
        costs = self.inner.costs(request, candidates)
        rated = [i for i, cost in enumerate(costs) if cost is not None]
        home = self._home(request, [candidates[i] for i in rated])
        if home is None:
            return costs
        index = next(i for i in rated if candidates[i] is home)
        known = [cost for cost in costs if cost is not None]
        best, worst, own = min(known)[0], max(known)[0], (costs[index] or (0.0,))[0]
        if self.mode == "prefer" and own - best > self.slack * (worst - best) + 1e-9:
            return costs
        return [cost and ((0.0 if i == index else 1.0), *cost) for i, cost in enumerate(costs)]

    def picked(self, request: Request, candidate: Candidate) -> None:
        if self._inner_picked is not None:
            self._inner_picked(request, candidate)
        if request.session and self.mode != "hash":
            key = (request.role, request.session)
            self._sessions[key] = (candidate.name, request.now)
            self._sessions.move_to_end(key)
            while len(self._sessions) > self.bound or next(iter(self._sessions.values()))[1] < request.now - self.ttl:
                self._sessions.popitem(last=False)

    def _home(self, request: Request, candidates: Sequence[Candidate]) -> Candidate | None:
        key = request.session
        if not key or not candidates:
            return None
        if self.mode == "hash":
            return max(candidates, key=lambda c: rendezvous(key, c.address))
        name, at = self._sessions.get((request.role, key), ("", 0.0))
        if name and request.now - at <= self.ttl:
            return next((c for c in candidates if c.name == name), None)
        address = _address(key)
        return next((c for c in candidates if c.address == address), None)
