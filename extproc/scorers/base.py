"""The scorer seam: candidates in, a cost for each out. A scorer is pure but for its own bookkeeping; it does no I/O.

A new scorer is one file with a class, one line in `scorers/__init__.py`, one table of cases in tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

Cost = tuple[float, ...]
"""Compared lexicographically, lowest wins; parts that differ by at most 1e-9 are equal."""

Weights = tuple[float, float, float]
"""What a token is worth on the device, host and disk tier, 0..1."""


class Role(StrEnum):
    """What an instance does. MIX is resolved to its current role before candidates are made."""

    DEFAULT = "default"
    PREFILL = "prefill"
    DECODE = "decode"
    MIX = "mix"


class Load(NamedTuple):
    """One valid, fresh load report of an instance.

    waiting      requests queued in the engine (finite, >= 0)
    running      requests being computed, None = not reported
    usage        fraction of the KV cache in use, 0..1
    at           when it was taken (monotonic seconds), None = unknown
    """

    waiting: float
    running: float | None = None
    usage: float = 0.0
    at: float | None = None


@dataclass(slots=True)  # not frozen: one per candidate and request, and freezing makes creation six times slower
class Candidate:
    """An instance (or one of its ranks) that may be chosen for one request. Not to be changed once made.

    name       unique in a decision: the instance's name, with `dp: target` "name/rank"
    address    "ip:port" that Envoy knows
    rank       data-parallel rank to name in the rank header, None = none
    device, host, disk   tokens of the reusable prefix, each block counted once, 0 when unknown
    speculative   tokens of `device` that no event has confirmed (routed there a moment ago)
    load       None = no valid, fresh report
    requests   our own requests in flight there; waiting_requests those without a first response byte;
               prompt_tokens of requests in flight; waiting_*: of requests without a first byte; `_squares` their
               sum of squares; uncached_tokens outstanding: of requests without a first byte
    head_tokens, busy_seconds   uncached tokens of the oldest request without a first byte, and for how long it has
               been the oldest
    prefill_rate  learnt, tokens per second, None = unknown
    """

    name: str
    address: str = ""
    rank: int | None = None
    device: int = 0
    host: int = 0
    disk: int = 0
    load: Load | None = None
    requests: int = 0
    waiting_requests: int = 0
    prompt_tokens: int = 0
    waiting_prompt_tokens: int = 0
    uncached_tokens: float = 0
    prefill_rate: float | None = None
    waiting_squares: int = 0
    head_tokens: float = 0
    busy_seconds: float = 0.0
    speculative: int = 0


@dataclass(slots=True, frozen=True)
class Request:
    """What a scorer may know about the request.

    tokens       prompt length
    block_size   tokens a block
    role         the role being filled
    session      opaque session key of the client, None = none
    now          monotonic seconds, for scorers that forget by time
    """

    tokens: int
    block_size: int
    role: Role = Role.DEFAULT
    session: str | None = None
    now: float = 0.0


class Scorer(Protocol):
    """Gives every candidate a cost, None for one that must not be chosen. Same order and length as `candidates`.

    `costs` changes nothing: it may be asked without a decision following (query API, explanation). A scorer may also
    have, and the router asks once for each of them:

    weights                         `Weights`, for hit tokens that are charged or compared; default (1, 0.5, 0)
    picked(request, candidate)      called when the decision is made (pointers, bindings)
    pair(request, prefill, decode)  costs of a prefill/decode pair that must be chosen together, instead of `costs`
    """

    def costs(self, request: Request, candidates: Sequence[Candidate]) -> list[Cost | None]: ...


@dataclass(slots=True, frozen=True)
class Parameter:
    """One parameter of a scorer: its range is inclusive, `choices` is for words; `aliases` are other systems' names.

    `parse` replaces all checks for a structured value: it returns the value or raises ValueError.
    """

    name: str
    default: Any
    low: float = -math.inf
    high: float = math.inf
    integer: bool = False
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    optional: bool = False
    parse: Callable[[object], Any] | None = None

    def allowed(self) -> str:
        """The range in words, as error messages and documentation say it."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        kind = "an integer" if self.integer else "a number"
        none = ", or null" if self.optional else ""
        if math.isinf(self.low) and math.isinf(self.high):
            return kind + none
        if math.isinf(self.high):
            return f"{kind} of at least {self.low:g}{none}"
        return f"{kind} from {self.low:g} to {self.high:g}{none}"

    def check(self, value: object) -> Any:
        """The value, a number as int or float. Raises ValueError naming parameter, value and allowed range."""
        if self.parse is not None:
            return self.parse(value)
        if self.choices:
            good = isinstance(value, str) and value in self.choices
        elif value is None:
            good = self.optional
        else:
            good = (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and self.low <= value <= self.high
                and (not self.integer or value == int(value))
                and math.isfinite(value)
            )
        if not good:
            raise ValueError(f"{self.name}: {value!r} is not allowed, expected {self.allowed()}")
        if self.choices or value is None:
            return value
        assert isinstance(value, int | float)
        return int(value) if self.integer else float(value)


def check_parameters(what: str, parameters: Sequence[Parameter], given: Mapping[str, object]) -> dict[str, Any]:
    """Every parameter by its own name with the given or the default value.

    Raises ValueError for an unknown name, the same parameter given twice, or a value out of range.
    """
    known = {alias: parameter for parameter in parameters for alias in (parameter.name, *parameter.aliases)}
    values = {parameter.name: parameter.default for parameter in parameters}
    seen: set[str] = set()
    for name, value in given.items():
        parameter = known.get(name)
        if parameter is None:
            names = ", ".join(p.name for p in parameters) or "none"
            raise ValueError(f"{what} has no parameter {name!r}; it takes: {names}")
        if parameter.name in seen:
            raise ValueError(f"{what}: {parameter.name} is given twice (also as {name})")
        seen.add(parameter.name)
        try:
            values[parameter.name] = parameter.check(value)
        except ValueError as error:
            raise ValueError(f"{what}: {error}") from None
    return values


def hit_tokens(candidate: Candidate, tokens: int, weights: Weights) -> float:
    """Weighted tokens of the match, never above the prompt's."""
    hit = candidate.device * weights[0] + candidate.host * weights[1] + candidate.disk * weights[2]
    return min(hit, tokens)
