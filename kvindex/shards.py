"""Dicts keyed by engine hash that may become large: cut by the hash's low bits, and emptied in slices.

One C call on a large dict holds the GIL all along: a resize at 262,144 entries takes 13 ms (0.3 at 8,192), `clear` 8.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable
from typing import Any, Final, cast

from kvindex.events import EngineHash

CUT: Final = {mask: bytes(byte & mask for byte in range(256)) for mask in (1, 3, 7, 15, 31, 63, 127, 255)}
"""`bytes.translate` tables: lowest bytes -> shard numbers, for so many shards less one."""

_LOW_BYTE: Final = slice(0 if sys.byteorder == "little" else 7, None, 8)
_SMALL: Final = 4_096  # entries of a dict that is dropped whole, in about 0.1 ms
_PACED: Final = 64


def low_byte(hash_: EngineHash) -> int:
    """Lowest byte of an int, last byte of bytes."""
    if isinstance(hash_, int):
        return hash_ & 255
    return hash_[-1] if hash_ else 0


def low_bytes(hashes: list[EngineHash]) -> bytes:
    """Of several, about 30 ns each where all are ints of 64 bits."""
    try:
        return array("Q", cast(list[int], hashes)).tobytes()[_LOW_BYTE]
    except (TypeError, OverflowError):
        return bytes(map(low_byte, hashes))


def drain(table: dict[Any, Any], pace: Callable[[], None]) -> None:
    """Empty a dict, with `pace` every 64 entries of a large one."""
    while len(table) > _SMALL:
        for _ in range(min(_PACED, len(table))):
            table.popitem()
        pace()
    table.clear()
