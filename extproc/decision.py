"""The outcome of routing, and the small shapes the router reads: instances, hits, loads, our own requests.

Only shapes: whoever fits may be passed (kvindex.fleet.Instance, kvindex.directory.Match, extproc.loads.*).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from extproc.scorers.base import Candidate, Cost, Load, Request, Role


class InstanceLike(Protocol):
    """What the router reads of an instance; `kvindex.fleet.Instance` is one."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def current_role(self) -> str: ...
    @property
    def dp_size(self) -> int: ...
    @property
    def state(self) -> str: ...


class Hits(Protocol):
    """Who holds how much of the prompt; `kvindex.directory.Match` is one."""

    def hits(self, instance: Any, /) -> Sequence[Sequence[int]]:
        """Rank by rank the blocks (device, host, disk) of the contiguous reusable prefix, each block counted once.

        `instance` is the object the router was given. Zeros for a rank that is missing or unsynchronized; () for an
        instance that is unknown or of another incarnation than discovery says.

        Hits with a method `speculative(instance)` say with it, rank by rank, how many of the device blocks no event
        has confirmed.
        """
        ...


class LoadSource(Protocol):
    def get(self, name: str, now: float, rank: int | None = None) -> Load | None:
        """The valid, fresh load of an instance, or of one of its ranks; None when there is none. O(1), no I/O."""
        ...


class CountersLike(Protocol):
    """Our own requests at one candidate; the fields of `Candidate` of the same names."""

    requests: int
    waiting_requests: int
    prompt_tokens: int
    waiting_prompt_tokens: int
    waiting_squares: int
    uncached_tokens: float
    busy_since: float | None
    head_tokens: float
    rate: float | None


class ChargeLike(Protocol):
    def moved(self, address: str, now: float = 0.0) -> None: ...
    def first_byte(self, now: float | None = None, *, learn: bool = True) -> None: ...
    def close(self, now: float | None = None) -> None: ...


class OwnRequests(Protocol):
    """Our own requests in flight; `extproc.loads.inflight.InFlight` is one."""

    @property
    def find(self) -> Callable[[str], CountersLike | None]: ...
    def sent_since(self, candidate: str, at: float) -> int: ...
    def charge(
        self,
        instance: str,
        prompt_tokens: int,
        uncached_tokens: float,
        now: float = 0.0,
        *,
        rank: int | None = None,
        prefill_only: bool = False,
    ) -> ChargeLike: ...


@dataclass(frozen=True, slots=True)
class Profile:
    """How a prefill/decode pair is told to the engines.

    destination     which of the two Envoy sends the request to
    prefill_header  names the prefill side, None = not told; likewise decode_header
    value           what the headers carry: "address" or "name" of the instance
    """

    destination: Role
    prefill_header: str | None = None
    decode_header: str | None = None
    value: str = "address"


PROFILES: dict[str, Profile] = {
    "llm-d": Profile(Role.DECODE, prefill_header="x-prefiller-host-port"),
    "xllm": Profile(Role.PREFILL, "x-prefill-name", "x-decode-name", value="name"),
    "plain": Profile(Role.PREFILL, "x-prefill-host-port", "x-decode-host-port"),
}
"""llm-d: its sidecar at the decode instance pulls from the named prefiller. xllm: the prefill instance gets it; xLLM
reads the pair from `routing` in the body, so a shim has to copy these headers there. plain: everything else."""


@dataclass(slots=True)
class Side:
    """One role's choice.

    ordered   scored candidates, best first; costs of the same order
    tied      how many of them are equal to the best
    excluded  who was not scored and why: state, role, excluded, no_load, no_cost
    """

    ordered: list[Candidate] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    tied: int = 0
    excluded: dict[str, str] = field(default_factory=dict)

    @property
    def first(self) -> Candidate | None:
        return self.ordered[0] if self.ordered else None

    def why_empty(self) -> str:
        """For the person on call: how many instances were out for which cause."""
        causes: dict[str, int] = {}
        for cause in self.excluded.values():
            causes[cause] = causes.get(cause, 0) + 1
        return ", ".join(f"{cause}: {n}" for cause, n in sorted(causes.items())) or "the pool has no instance"

    def explain(self) -> list[dict[str, Any]]:
        return [
            {
                "name": c.name,
                "address": c.address,
                "cost": list(cost),
                "device_tokens": c.device,
                "host_tokens": c.host,
                "disk_tokens": c.disk,
                "speculative_tokens": c.speculative,
                "waiting": c.load.waiting if c.load else None,
                "running": c.load.running if c.load else None,
                "usage": c.load.usage if c.load else None,
                "requests": c.requests,
                "uncached_tokens": c.uncached_tokens,
            }
            for c, cost in zip(self.ordered, self.costs, strict=True)
        ]


@dataclass(slots=True)
class Decision:
    """What was decided for one request, and everything needed to say why.

    destinations        "ip:port", best first, at most max_endpoints; empty = unscored, see `reason`
    headers             (name, value) to set beside the destination: rank, prefill/decode
    chosen              the candidate whose cache and prefill queue are used (with P/D: the prefill one)
    decode              the decode candidate of a pair, None = chosen serves alone
    rank                rank to name to the first destination (`dp: target`), None = none
    hit_tokens          tokens of the chosen one's prefix on any tier: what the engine should report as cached
    speculative_tokens  of these, tokens that no event has confirmed
    uncached_tokens     prompt tokens minus weighted hits: what is charged to it
    best_available_hit  highest hit_tokens over all eligible instances, also those without a load report
    reason              None, "no_candidate" or "scorer_error"; `detail` says it in words
    main, second        the choice of prefill (or only) and of decode candidates
    """

    request: Request
    destinations: tuple[str, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    chosen: Candidate | None = None
    decode: Candidate | None = None
    rank: int | None = None
    hit_tokens: int = 0
    speculative_tokens: int = 0
    uncached_tokens: float = 0.0
    best_available_hit: int = 0
    reason: str | None = None
    detail: str = ""
    main: Side = field(default_factory=Side)
    second: Side | None = None

    @property
    def candidates(self) -> list[Candidate]:
        """Scored candidates, best first."""
        return self.main.ordered

    @property
    def costs(self) -> dict[str, Cost]:
        """Cost by candidate name."""
        return {c.name: cost for c, cost in zip(self.main.ordered, self.main.costs, strict=True)}

    @property
    def excluded(self) -> dict[str, str]:
        """Why an instance was not scored, by candidate name."""
        return self.main.excluded

    def charge(self, own: OwnRequests, now: float) -> Ticket:
        """Counts the request where it goes. The ticket has to be closed when the exchange is over."""
        chosen, decode, prompt = self.chosen, self.decode, self.request.tokens
        if chosen is None:
            return Ticket(())
        name = instance_of(chosen)
        if decode is None:
            return Ticket((own.charge(name, prompt, self.uncached_tokens, now, rank=chosen.rank),))
        first = own.charge(name, prompt, self.uncached_tokens, now, rank=chosen.rank, prefill_only=True)
        second = own.charge(instance_of(decode), prompt, 0, now, rank=decode.rank)
        return Ticket((second, first) if self.destinations[0] == decode.address else (first, second))

    def explain(self) -> dict[str, Any]:
        """The decision as plain data for JSON: candidates with hits, load and cost, ties, choice, reason."""
        out: dict[str, Any] = {
            "prompt_tokens": self.request.tokens,
            "block_size": self.request.block_size,
            "destinations": list(self.destinations),
            "headers": dict(self.headers),
            "chosen": self.chosen.name if self.chosen else None,
            "rank": self.rank,
            "hit_tokens": self.hit_tokens,
            "speculative_tokens": self.speculative_tokens,
            "uncached_tokens": self.uncached_tokens,
            "best_available_hit": self.best_available_hit,
            "reason": self.reason,
            "detail": self.detail,
            "candidates": self.main.explain(),
            "tied": [c.name for c in self.main.ordered[: self.main.tied]] if self.main.tied > 1 else [],
            "excluded": dict(self.main.excluded),
        }
        if self.second is not None:
            out["decode"] = self.decode.name if self.decode else None
            out["decode_candidates"] = self.second.explain()
            out["decode_excluded"] = dict(self.second.excluded)
        return out


class Ticket:
    """All charges of one decision, first that of the host Envoy sends to. Late, repeated, missing calls do no harm."""

    __slots__ = ("charges",)

    def __init__(self, charges: Iterable[ChargeLike]):
        self.charges = tuple(charges)

    def moved(self, address: str, now: float = 0.0) -> None:
        """Envoy served it from this host; the same as was chosen changes nothing."""
        for charge in self.charges[:1]:
            charge.moved(address, now)

    def first_byte(self, now: float | None = None, *, learn: bool = True) -> None:
        """The response began; `learn` off for an answer that needed no prefill (an error)."""
        for charge in self.charges:
            charge.first_byte(now, learn=learn)

    def close(self, now: float | None = None) -> None:
        for charge in self.charges:
            charge.close(now)


def instance_of(candidate: Candidate) -> str:
    """Name of the instance that a candidate is, or is a rank of."""
    return candidate.name if candidate.rank is None else candidate.name.rpartition("/")[0]
