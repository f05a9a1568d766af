"""The last decisions, kept in memory for `/decisions`: cheap to add, turned into text only when somebody asks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from extproc.decision import Decision
from extproc.logs import trace_id
from extproc.openai import Endpoint

SHOWN = 200
"""Characters kept of what a client may choose freely (path, request id, model): the ring's memory is bounded."""


def shown(text: str) -> str:
    """At most SHOWN characters, without what JSON or a terminal cannot carry."""
    return text[:SHOWN].encode("utf-8", "replace").decode()


@dataclass(slots=True)
class Record:
    """One request. Times in seconds; `at` is wall clock. Holds no text and no token ids of the request."""

    at: float
    request_id: str
    path: str
    pool: str = ""
    model: str = ""
    reason: str | None = None
    detail: str = ""
    decision: Decision | None = None
    scorer: str = ""
    tokenize_seconds: float = 0.0
    match_seconds: float = 0.0
    score_seconds: float = 0.0
    total_seconds: float = 0.0
    status: int | None = None
    served: str | None = None
    cached_tokens: int | None = None
    endpoint: Endpoint | None = None
    traceparent: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        decision = self.decision
        return {
            "at": round(self.at, 3),
            "request_id": self.request_id,
            "trace_id": trace_id(self.traceparent),
            "path": self.path,
            "pool": self.pool,
            "model": self.model,
            "scorer": self.scorer,
            "reason": self.reason,
            "detail": self.detail,
            "status": self.status,
            "served": self.served,
            "cached_tokens": self.cached_tokens,
            "tokenize_ms": round(self.tokenize_seconds * 1000, 3),
            "total_ms": round(self.total_seconds * 1000, 3),
            "decision": decision.explain() if decision is not None else None,
        }


class DecisionLog:
    """A ring of the last `size` records. One thread."""

    def __init__(self, size: int = 1000) -> None:
        self._ring: deque[Record] = deque(maxlen=size)
        self.added = 0
        """Records ever added: the newest has this number, the first had 1."""

    def add(self, record: Record) -> None:
        self._ring.append(record)
        self.added += 1

    def at(self, number: int) -> Record | None:
        """The record of a number, None when it is not remembered (any more). O(size)."""
        back = self.added - number
        return self._ring[-1 - back] if 0 <= back < len(self._ring) else None

    def numbered(self, limit: int) -> Iterator[tuple[int, Record]]:
        """(number, record), newest first, at most `limit`."""
        for back, record in zip(range(limit), reversed(self._ring), strict=False):
            yield self.added - back, record

    def latest(
        self, limit: int = 100, *, pool: str | None = None, reason: str | None = None, request_id: str | None = None
    ) -> Iterator[Record]:
        """Newest first, at most `limit` that fit every filter given."""
        for record in reversed(self._ring):
            if limit <= 0:
                return
            if (
                (pool in (None, record.pool))
                and (reason in (None, record.reason))
                and (request_id in (None, record.request_id))
            ):
                limit -= 1
                yield record
