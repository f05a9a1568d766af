"""Switches that make the emulated engine misbehave, set by flags at start or by POST /emulator/control at run time.

Counters go down by one each time they act; booleans and times stay until they are set again. `restart` acts once.

    drop             n batches get their number and are replayable, but are not sent live (high-water-mark loss)
    lose             n batches get their number and are neither sent nor replayable
    gap              n sequence numbers are skipped at once (nothing was lost, but nobody can know)
    dup              n batches are sent twice
    garbage          n batches are sent live with an undecodable payload; a replay gives the good one
    garbage_ring     n batches are undecodable live and in the replay
    freeze_events    batches are held back and replays unanswered until false; then everything is sent, in order
    mute_replay      replay requests get no answer
    truncate_replay  n replay answers stop half-way, without end marker
    hole_replay      n replay answers lack one message in the middle, with end marker
    delay_ms         every request waits this long before it is queued
    fail_requests    n requests are answered `fail_status` (500)
    hang             the engine computes nothing (health and metrics still answer)
    not_ready        /health answers 503
    clock_behind_ms  event timestamps are so far in the past
    no_cached_tokens usage lacks prompt_tokens_details (vLLM without --enable-prompt-tokens-details)
    no_token_api     the render paths and /tokenize answer 404
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

ACTIONS = {"restart": bool}
"""Control keys that act once instead of setting a field."""


@dataclass
class Faults:
    """Current switches; field names are the control keys."""

    drop: int = 0
    lose: int = 0
    gap: int = 0
    dup: int = 0
    garbage: int = 0
    garbage_ring: int = 0
    freeze_events: bool = False
    mute_replay: bool = False
    truncate_replay: int = 0
    hole_replay: int = 0
    delay_ms: int = 0
    fail_requests: int = 0
    fail_status: int = 500
    hang: bool = False
    not_ready: bool = False
    clock_behind_ms: int = 0
    no_cached_tokens: bool = False
    no_token_api: bool = False

    def take(self, name: str) -> bool:
        """True if counter `name` is above zero, which it then goes down by one."""
        value: int = getattr(self, name)
        if value <= 0:
            return False
        setattr(self, name, value - 1)
        return True

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_control(body: Any) -> dict[str, int | bool]:
    """The body of POST /emulator/control, checked. Raises ValueError naming the key and what is allowed."""
    if not isinstance(body, dict):
        raise ValueError("expected a JSON object")
    kinds: dict[str, type] = {field.name: type(field.default) for field in fields(Faults)} | ACTIONS
    for key, value in body.items():
        if key not in kinds:
            raise ValueError(f"unknown key {key!r}; known: {', '.join(kinds)}")
        if kinds[key] is bool and not isinstance(value, bool):
            raise ValueError(f"{key}: {value!r} is no boolean")
        if kinds[key] is int and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ValueError(f"{key}: {value!r} is no count")
    return dict(body)
