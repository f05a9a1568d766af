"""Instances that tell of themselves: whoever receives the registrations calls `upsert` and `remove`."""

from __future__ import annotations

import asyncio

from kvindex.discovery.base import Notify
from kvindex.fleet import Instance


class Registered:
    """The source of one pool. Starts empty and is ready at once: nobody knows who will come."""

    def __init__(self, pool: str) -> None:
        self.pool = pool
        self._notify: Notify | None = None

    async def run(self, notify: Notify) -> None:
        self._notify = notify
        notify.ready()
        try:
            await asyncio.Event().wait()
        finally:
            self._notify = None

    def upsert(self, instance: Instance) -> None:
        """In the event loop. Nothing happens while the source does not run."""
        if self._notify is not None:
            self._notify.upsert(instance)

    def remove(self, name: str, *, incarnation: str | None = None) -> None:
        if self._notify is not None:
            self._notify.remove(name, incarnation=incarnation)
