"""Recognises arrays, maps and RFC 1527 maps event by event, and both replay framings.

What the wire does not tell stays at vLLM's rules: clears, walk, recovery. xLLM and pools must be named.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvindex.dialects.base import Decoder, DialectOptions
from kvindex.dialects.mooncake import Rfc1527, is_rfc
from kvindex.dialects.objects import Objects
from kvindex.events import Event


class Auto(Decoder):
    name = "auto"

    def __init__(self, options: DialectOptions | None = None) -> None:
        super().__init__(options)
        self._rfc = Rfc1527(self, self.options)

    def objects(self) -> Objects:
        return Objects(self.options.max_objects)

    def events(self, raw: Iterable[Any]) -> list[Event]:
        found: list[Event] = []
        event = self.event
        for one in raw:
            if is_rfc(one):
                found.append(self._rfc.event(one))
            else:
                found.append(event(one))
        return found
