"""Instances that tell of themselves: whoever receives the registrations calls `upsert` and `remove`."""

from __future__ import annotations

import asyncio

from kvindex.discovery.base import Notify
from kvindex.fleet import Instance


class Registered:
    """The source of one pool. Starts empty and is ready at once: nobody knows who will come.

    dialect, recovery  of the pool: "auto" and None leave it to the registration
    expire_after       seconds after which a registration that is not repeated is to be removed, None = never
    """

    def __init__(
        self, pool: str, *, dialect: str = "auto", recovery: str | None = None, expire_after: float | None = None
    ) -> None:
        self.pool = pool
        self.dialect = dialect
        self.recovery = recovery
        self.expire_after = expire_after
        self.instances: dict[str, Instance] = {}
        self._notify: Notify | None = None

    async def run(self, notify: Notify) -> None:
        """What came before it ran is told first. Nothing is removed at the start: after a reload it takes over the
        instances of the source before it, which are announced to it again."""
        self._notify = notify
        for instance in self.instances.values():
            notify.upsert(instance)
        notify.ready()
        try:
            await asyncio.Event().wait()
        finally:
            self._notify = None

    def admit(self, instance: Instance) -> None:
        """Raises ConfigurationError for a place where no instance of this source may be."""
        if self._notify is not None:
            self._notify.admit(instance)

    def upsert(self, instance: Instance) -> None:
        """In the event loop."""
        self.instances[instance.name] = instance
        if self._notify is not None:
            self._notify.upsert(instance)

    def remove(self, name: str, *, incarnation: str | None = None) -> None:
        self.instances.pop(name, None)
        if self._notify is not None:
            self._notify.remove(name, incarnation=incarnation)
