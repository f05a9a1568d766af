"""The scorer seam: candidates in, a cost for each out. A scorer is pure but for its own bookkeeping; it does no I/O.

A new scorer is one file with a class, one line in `scorers/__init__.py`, one table of cases in tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

Cost = tuple[float, ...]
"""Compared lexicographically, lowest wins; parts that differ by at most 1e-9 are equal."""


class Role(StrEnum):
    """What an instance does. MIX is resolved to its current role before candidates are made."""

    DEFAULT = "default"
    PREFILL = "prefill"
    DECODE = "decode"
    MIX = "mix"


@dataclass(slots=True, frozen=True)
class Load:
    """One valid, fresh load report of an instance.

    waiting      requests queued in the engine (finite, >= 0)
    running      requests being computed, None = not reported
    usage        fraction of the KV cache in use, 0..1
    """

    waiting: float
    running: float | None = None
    usage: float = 0.0


@dataclass(slots=True, frozen=True)
class Candidate:
    """An instance (or one of its ranks) that may be chosen for one request.

    name       unique in a decision: the instance's name, with `dp: target` "name/rank"
    address    "ip:port" that Envoy knows
    rank       data-parallel rank to name in the rank header, None = none
    device, host, disk   tokens of the reusable prefix, each block counted once, 0 when unknown
    load       None = no valid, fresh report
    requests   our own requests in flight there; waiting_requests those without a first response byte;
               prompt_tokens of requests in flight; uncached_tokens outstanding: of requests without a first byte
    prefill_rate  tokens per second, None = unknown
    """

    name: str
    address: str
    rank: int | None = None
    device: int = 0
    host: int = 0
    disk: int = 0
    load: Load | None = None
    requests: int = 0
    waiting_requests: int = 0
    prompt_tokens: int = 0
    waiting_prompt_tokens: int = 0
    uncached_tokens: int = 0
    prefill_rate: float | None = None


@dataclass(slots=True, frozen=True)
class Request:
    """What a scorer may know about the request: prompt length in tokens, block size, the role being filled."""

    tokens: int
    block_size: int
    role: Role = Role.DEFAULT


class Scorer(Protocol):
    """Gives every candidate a cost, None for one that must not be chosen. Same order and length as `candidates`."""

    def costs(self, request: Request, candidates: Sequence[Candidate]) -> list[Cost | None]: ...
