"""One request as the client, kvcar and the engine saw it, put together by its x-request-id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from examples.local.client import Answer
from examples.local.stack import Stack


@dataclass(frozen=True)
class Routed:
    """One request as three witnesses saw it: the client, kvcar (through Envoy's access log), and the engine.

    chosen      kvcar's ordered list, by engine name; empty = unscored
    served      the engine that answered
    predicted   kvcar's hit in tokens on the first of `chosen`, None = unscored
    cached      the engine's own cached_tokens
    """

    answer: Answer
    chosen: tuple[str, ...]
    served: str
    predicted: int | None
    cached: int
    attempts: int
    entry: dict[str, Any]


def routed(stack: Stack, answer: Answer) -> Routed:
    """What became of a finished request. Waits for Envoy's log, and until kvcar knows what the request left behind.

    Blocks; raises NotReady.
    """
    entry = stack.envoy.logged(answer.request_id)
    facts = entry["kvcar"] or {}
    predicted = facts.get("hit_tokens")
    upstream = entry["upstream"] or ""
    if stack.kvcar.running:
        stack.settle([engine for engine in stack.engines if engine.address == upstream])
    return Routed(
        answer=answer,
        chosen=tuple(stack.name_of(part) for part in (entry["chosen"] or "").split(",") if part),
        served=stack.name_of(upstream),
        predicted=None if predicted is None else round(predicted),
        cached=answer.cached_tokens,
        attempts=entry["attempts"],
        entry=entry,
    )
