"""Reads the engine's own token counts from the end of a response body, in bounded memory.

Only a tail of the body is kept. vLLM writes `usage` after `choices`, in JSON and in the last SSE chunk before [DONE],
so the tail holds it unless what follows (log probabilities) is larger than the bound; then nothing is found.
"""

from __future__ import annotations

import json
from typing import NamedTuple

_DECODER = json.JSONDecoder()
_KEY = b'"usage"'
_TRIES = 64  # keys looked at, from the end: chunks may carry "usage": null
_OBJECT_BYTES = 4_096  # a usage object is some 200 bytes


class Usage(NamedTuple):
    """cached_tokens is None when the engine does not report it (vLLM without --enable-prompt-tokens-details)."""

    cached_tokens: int | None
    prompt_tokens: int | None


class UsageReader:
    """Feed it the body in any cut; usage() then looks once. Keeps between limit and 2 * limit bytes."""

    __slots__ = ("_limit", "_tail")

    def __init__(self, limit: int = 65_536) -> None:
        self._limit = limit
        self._tail = bytearray()

    def feed(self, chunk: bytes) -> None:
        """Amortised O(len(chunk)), whatever the cut."""
        tail = self._tail
        if len(chunk) >= self._limit:
            tail[:] = chunk[-self._limit :]
            return
        tail += chunk
        if len(tail) > 2 * self._limit:
            del tail[: -self._limit]

    def usage(self) -> Usage | None:
        """The last usage object in the tail, None if there is none. Never raises. O(limit)."""
        tail = bytes(self._tail)
        end = len(tail)
        for _ in range(_TRIES):
            at = tail.rfind(_KEY, 0, end)
            if at < 0:
                break
            end = at
            if tail[at - 1 : at] == b"\\":  # inside a JSON string: generated text that speaks of usage
                continue
            found = _object_after(tail[at + len(_KEY) : at + _OBJECT_BYTES])
            if found is not None:
                return found
        return None


def _object_after(data: bytes) -> Usage | None:
    text = data.decode("utf-8", "replace").lstrip()
    if not text.startswith(":"):
        return None
    try:
        value, _ = _DECODER.raw_decode(text[1:].lstrip())
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None  # null in every SSE chunk but the last
    details = value.get("prompt_tokens_details")
    return Usage(
        cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, dict) else None,
        prompt_tokens=_count(value.get("prompt_tokens")),
    )


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
