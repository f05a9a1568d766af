"""Dicts that may become large: cut by the low bits of their keys, and emptied in slices.

One C call on a large dict holds the GIL all along: a resize at 262,144 entries takes 13 ms (0.3 at 8,192), `clear` 8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeVar

from kvindex.events import EngineHash

WHOLE: Final = 2_048
"""Entries that a dict of `Parts` keeps uncut: cutting them takes about 0.3 ms, once."""

_SMALL: Final = 1_024  # entries of a dict that is dropped whole, in 0.1 ms
_PACED: Final = 64

V = TypeVar("V")


def low_byte(hash_: EngineHash) -> int:
    """Lowest byte of an int, last byte of bytes."""
    if isinstance(hash_, int):
        return hash_ & 255
    return hash_[-1] if hash_ else 0


def regrouped(parts: list[dict[EngineHash, int]], mask: int, pace: Callable[[], None]) -> list[dict[EngineHash, int]]:
    """The same entries by the low bits of their hashes, in mask + 1 dicts. O(entries), paced."""
    made: list[dict[EngineHash, int]] = [{} for _ in range(mask + 1)]
    for part in parts:
        for index, (hash_, value) in enumerate(part.items()):
            made[low_byte(hash_) & mask][hash_] = value
            if index % _PACED == 0:
                pace()
    return made


def drain(table: dict[Any, Any], pace: Callable[[], None]) -> None:
    """Empty a dict, with `pace` every 64 entries of a large one."""
    while len(table) > _SMALL:
        for _ in range(min(_PACED, len(table))):
            table.popitem()
        pace()
    table.clear()


class Parts(Generic[V]):
    """The few dict operations that the index needs, on 256 dicts once there are many entries. O(1), 0.1 to 0.2 us."""

    __slots__ = ("_count", "parts")

    def __init__(self) -> None:
        self.parts: list[dict[EngineHash, V]] = [{}]
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: EngineHash) -> bool:
        return key in self._part(key)

    def __getitem__(self, key: EngineHash) -> V:
        return self._part(key)[key]

    def __setitem__(self, key: EngineHash, value: V) -> None:
        part = self._part(key)
        before = len(part)
        part[key] = value
        self._count += len(part) - before
        if len(part) > WHOLE and len(self.parts) == 1:
            self.parts = [{} for _ in range(256)]
            for key, value in part.items():
                self.parts[low_byte(key)][key] = value

    def get(self, key: EngineHash, default: Any = None) -> Any:
        return self._part(key).get(key, default)

    def pop(self, key: EngineHash) -> V:
        """Raises KeyError."""
        value = self._part(key).pop(key)
        self._count -= 1
        if not self._count:
            self.parts = [{}]  # an emptied dict keeps its table
        return value

    def items(self) -> Iterator[tuple[EngineHash, V]]:
        for part in self.parts:
            yield from part.items()

    def __iter__(self) -> Iterator[EngineHash]:
        for part in self.parts:
            yield from part

    def drain(self, pace: Callable[[], None]) -> None:
        """Forget everything, in slices."""
        for part in self.parts:
            drain(part, pace)
            pace()
        self.parts, self._count = [{}], 0

    def _part(self, key: EngineHash) -> dict[EngineHash, V]:
        parts = self.parts
        return parts[low_byte(key)] if len(parts) > 1 else parts[0]
