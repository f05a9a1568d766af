"""What an operator wants, whatever discovery says: instances to drain. Pure; laid over the fleet, not written into it.

    fleet: what discovery says --+
                                 +--> Overrides.over(instance) --> Pool: who may be chosen
    POST /instances/drain -------+

Discovery replaces an instance whenever it refreshes it, so a wish that was kept in the fleet would be lost with the
next refresh. Here it lasts until it is taken back, over a restart of the engine too, or until this process ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvindex.fleet import Instance, InstanceState

CHOSEN = frozenset({InstanceState.ACTIVE, InstanceState.LEASE_LOST})
"""States that get new requests: only these can be drained, one that does not answer stays what it is."""


class Overrides:
    """Names of drained instances. One thread: the event loop of admin port, discovery and decisions."""

    def __init__(self) -> None:
        self._drained: frozenset[str] = frozenset()
        self._listeners: tuple[Callable[[str], None], ...] = ()

    @property
    def drained(self) -> frozenset[str]:
        return self._drained

    def drain(self, name: str) -> bool:
        """No new requests for it; its streams are kept. False when it was so already."""
        return self._set(name, self._drained | {name})

    def undrain(self, name: str) -> bool:
        """What discovery says of it counts again. False when it was so already."""
        return self._set(name, self._drained - {name})

    def over(self, instance: Instance) -> Instance:
        """The instance as the operator wants it seen; the same object where he wants nothing."""
        if instance.name in self._drained and instance.state in CHOSEN:
            return replace(instance, state=InstanceState.DRAINING)
        return instance

    def listen(self, listener: Callable[[str], None]) -> Callable[[], None]:
        """Calls `listener` with the name of each instance whose wish changed. Returns the way to stop."""
        self._listeners = (*self._listeners, listener)

        def stop() -> None:
            self._listeners = tuple(one for one in self._listeners if one is not listener)

        return stop

    def _set(self, name: str, drained: frozenset[str]) -> bool:
        changed = drained != self._drained
        self._drained = drained
        if changed:
            for listener in self._listeners:
                listener(name)
        return changed
