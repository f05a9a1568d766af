"""The discovery seam: a source finds instances and tells them to a `Notify`; several may feed one fleet.

A source is one file with one class. It never raises for what it finds out there: bad news are told with `problem`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from kvindex.errors import ConfigurationError
from kvindex.fleet import Fleet, Instance
from kvindex.networks import Networks

log = logging.getLogger(__name__)


class Notify(Protocol):
    """Where a source reports to, in the thread that writes the fleet."""

    def upsert(self, instance: Instance) -> None: ...
    def remove(self, name: str, *, incarnation: str | None = None) -> None: ...
    def replace(self, instances: Iterable[Instance]) -> None:
        """These are all of this source's instances: others of it are removed."""
        ...

    def ready(self) -> None:
        """The first full picture is in. Later calls do nothing."""
        ...

    def problem(self, text: str | None) -> None:
        """What is wrong with the source now, None = nothing; what was found before stays."""
        ...

    def admit(self, instance: Instance) -> None:
        """Raises ConfigurationError for an instance that `upsert` would refuse because of where it is."""
        ...


class Source(Protocol):
    """`run` until cancelled."""

    async def run(self, notify: Notify) -> None: ...


class FleetFeed:
    """A source's way into a fleet: owns the names it brought, so that sources do not take each other's away.

    An instance that is invalid, belongs to another source or is where none may be is refused: logged once, listed in
    `refused`, never raised.

    networks  where its instances may be, None = anywhere: what an operator wrote
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        name: str,
        on_ready: Callable[[], None] | None = None,
        networks: Networks | None = None,
    ) -> None:
        self.name = name
        self.is_ready = False
        self.error: str | None = None
        self.refused: dict[str, str] = {}
        self.names: set[str] = set()
        """The instances of the fleet that came from here."""
        self._fleet = fleet
        self._waiting: dict[str, Instance] = {}
        self._on_ready = on_ready
        self._networks = networks

    def admit(self, instance: Instance) -> None:
        if self._networks is not None:
            self._networks.admit(instance)

    def restrict(self, networks: Networks | None) -> None:
        """From now on; those of its instances that are elsewhere leave the fleet, those that are not any more come."""
        self._networks = networks
        for instance in [one for name in self.names if (one := self._fleet.get(name)) is not None]:
            try:
                self.admit(instance)
            except ConfigurationError:
                self.remove(instance.name)
                self._waiting[instance.name] = instance
        self.retry()

    def upsert(self, instance: Instance) -> None:
        name = instance.name
        try:
            if name not in self.names and self._fleet.get(name) is not None:
                raise ConfigurationError(f"instance {name!r} is already known from another source")
            self.admit(instance)
            self._fleet.upsert(instance)
        except ConfigurationError as error:
            if self.refused.get(name) != str(error):
                log.error("discovery %s: %s", self.name, error)
            self.refused[name] = str(error)
            self._waiting[name] = instance
            return
        self.names.add(name)
        self.refused.pop(name, None)
        self._waiting.pop(name, None)

    def remove(self, name: str, *, incarnation: str | None = None) -> None:
        self.refused.pop(name, None)
        self._waiting.pop(name, None)
        if name in self.names and self._fleet.remove(name, incarnation=incarnation) is not None:
            self.names.discard(name)

    def replace(self, instances: Iterable[Instance]) -> None:
        found = list(instances)
        names = {instance.name for instance in found}
        for name in sorted((self.names | set(self.refused)) - names):
            self.remove(name)
        for instance in found:
            self.upsert(instance)

    def retry(self) -> None:
        """Offers what was refused again: a name may have become free."""
        for instance in list(self._waiting.values()):
            self.upsert(instance)

    def ready(self) -> None:
        if not self.is_ready:
            self.is_ready = True
            if self._on_ready is not None:
                self._on_ready()

    def problem(self, text: str | None) -> None:
        if text is not None and text != self.error:
            log.warning("discovery %s: %s", self.name, text)
        self.error = text
