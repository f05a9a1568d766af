"""kvindex: who holds which KV prefix, on which tier. Usable alone; README.md has the module map and two examples.

Directory   one pool of engines: match(content keys) -> blocks per instance and rank
subscribe   one engine, a handler of your own for each event
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvindex.errors import CapacityExceeded, ConfigurationError, DecodeError, KVIndexError, UnknownParent
from kvindex.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Event, Skipped, Tier
from kvindex.hashing import content_keys, extras_bytes, pack_tokens, root_bytes

if TYPE_CHECKING:
    from kvindex.client import Reset, Subscription, subscribe
    from kvindex.directory import Directory, Match, StreamReport
    from kvindex.fleet import PUSHED, Fleet, FleetChange, Instance, InstanceState, PoolPublisher, StreamEndpoint
    from kvindex.index import PrefixIndex, StreamView, TierBlocks, Walk
    from kvindex.options import TransportOptions
    from kvindex.pushes import PushResult
    from kvindex.sync import Recovery, StreamStatus, StreamSync, SyncLimits
    from kvindex.transport import EventTransport

# Loaded when first asked for: the core does not pay for zmq, and modules of the package may import each other freely.
_HOMES = {
    "client": ("Reset", "Subscription", "subscribe"),
    "directory": ("Directory", "Match", "StreamReport"),
    "fleet": ("PUSHED", "Fleet", "FleetChange", "Instance", "InstanceState", "PoolPublisher", "StreamEndpoint"),
    "index": ("PrefixIndex", "StreamView", "TierBlocks", "Walk"),
    "options": ("TransportOptions",),
    "pushes": ("PushResult",),
    "sync": ("Recovery", "StreamStatus", "StreamSync", "SyncLimits"),
    "transport": ("EventTransport",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "PUSHED",
    "AllBlocksCleared",
    "Batch",
    "BlockRemoved",
    "BlockStored",
    "CapacityExceeded",
    "ConfigurationError",
    "DecodeError",
    "Directory",
    "Event",
    "EventTransport",
    "Fleet",
    "FleetChange",
    "Instance",
    "InstanceState",
    "KVIndexError",
    "Match",
    "PoolPublisher",
    "PrefixIndex",
    "PushResult",
    "Recovery",
    "Reset",
    "Skipped",
    "StreamEndpoint",
    "StreamReport",
    "StreamStatus",
    "StreamSync",
    "StreamView",
    "Subscription",
    "SyncLimits",
    "Tier",
    "TierBlocks",
    "TransportOptions",
    "UnknownParent",
    "Walk",
    "content_keys",
    "extras_bytes",
    "pack_tokens",
    "root_bytes",
    "subscribe",
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'kvindex' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(f"kvindex.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
