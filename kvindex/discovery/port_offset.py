"""Where an engine's event ports are, when a rule says so. Pure: no socket, no name is resolved.

    xLLM     event port = HTTP port + 10000 + dp_rank, replay port = HTTP port + 30000 + dp_rank
    pattern  tcp://*:5557 as the engine was given it: `*` -> the instance's host, port + dp_rank  (vLLM, SGLang, Motor)

Over both: a port over 65535, or an endpoint that two instances or ranks share, leaves the instances concerned out;
events are never mixed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from kvindex.endpoints import HostPort, check_address, from_pattern
from kvindex.errors import ConfigurationError
from kvindex.fleet import Instance, StreamEndpoint, endpoints_of

log = logging.getLogger(__name__)

EVENT_PORT_OFFSET = 10_000
REPLAY_PORT_OFFSET = 30_000

NPU, CPU, DISK = "npu", "cpu", "disk"
MEDIA = {"npu": NPU, "xpu": NPU, "gpu": NPU, "cpu": CPU, "disk": DISK}
"""Motor's keys of `medium_endpoints`."""


def offset_endpoints(
    address: str,
    dp_size: int = 1,
    *,
    event_offset: int = EVENT_PORT_OFFSET,
    replay_offset: int | None = REPLAY_PORT_OFFSET,
    topic: str = "",
    dialect: str = "xllm",
    recovery: str | None = None,
) -> tuple[StreamEndpoint, ...]:
    """xLLM's rule for one instance at `address` (host:port of its HTTP server), rank by rank.

    replay_offset None = no replay endpoints. Raises ConfigurationError when a port would be over 65535.
    """
    base = check_address(address)

    def endpoint(offset: int, rank: int) -> str:
        port = base.port + offset + rank
        if not 1 <= port <= 65535:
            raise ConfigurationError(
                f"{address}: port {base.port} + {offset} + rank {rank} = {port} is not in 1..65535: lower the HTTP port"
                " or the offset"
            )
        return f"tcp://{HostPort(base.host, port)}"

    return tuple(
        StreamEndpoint(
            rank,
            endpoint(event_offset, rank),
            None if replay_offset is None else endpoint(replay_offset, rank),
            topic,
            dialect,
            recovery,
        )
        for rank in range(max(1, dp_size))
    )


def pattern_endpoints(
    host: str,
    dp_size: int = 1,
    *,
    events: str,
    replay: str | None = None,
    topic: str = "",
    dialect: str = "auto",
    recovery: str | None = None,
    bind: bool = False,
) -> tuple[StreamEndpoint, ...]:
    """The engine's own settings (`tcp://*:5557`, or with a host) for one instance on `host`, rank by rank.

    bind: `events` is what we listen on, so its `*` stays. Raises ConfigurationError.
    """
    return tuple(
        StreamEndpoint(
            rank,
            from_pattern(events, "*" if bind else host, rank, bind=bind, what="events endpoint"),
            None if replay is None else from_pattern(replay, host, rank, what="replay endpoint"),
            topic,
            dialect,
            recovery,
            bind,
        )
        for rank in range(max(1, dp_size))
    )


def medium_endpoints(patterns: Mapping[str, str], host: str, dp_rank: int = 0) -> dict[str, str]:
    """Motor's `medium_endpoints` of one rank: medium (npu, cpu, disk) -> endpoint; one endpoint may serve two media.

    Takes Motor's keys too (`npu_endpoint`, `cpu_endpoint`, `disk_endpoint`; empty = absent; `endpoint` = the old
    fallback for npu). Raises ConfigurationError for an unknown medium.
    """
    found: dict[str, str] = {}
    for key, pattern in patterns.items():
        word = key.removesuffix("_endpoint").lower()
        if not pattern or word in ("endpoint", "pool", "replay"):
            continue
        medium = MEDIA.get(word)
        if medium is None:
            raise ConfigurationError(f"medium {key!r} is unknown: write one of {', '.join(sorted(MEDIA))}")
        found[medium] = from_pattern(pattern, host, dp_rank, what=key)
    if NPU not in found and patterns.get("endpoint"):
        found[NPU] = from_pattern(patterns["endpoint"], host, dp_rank, what="endpoint")
    return found


class Assignment(NamedTuple):
    """Instances with their endpoints filled in, and the reason for each one left out."""

    instances: tuple[Instance, ...]
    excluded: Mapping[str, str]


def assign_offsets(
    instances: Iterable[Instance],
    *,
    event_offset: int = EVENT_PORT_OFFSET,
    replay_offset: int | None = REPLAY_PORT_OFFSET,
    topic: str = "",
    dialect: str = "xllm",
    recovery: str | None = None,
    logged: Mapping[str, str] = MappingProxyType({}),
) -> Assignment:
    """xLLM's rule for a whole fleet, in the given order. Never raises; what is left out is logged as an error, unless
    `logged` (the `excluded` of the time before) has it already."""
    excluded: dict[str, str] = {}
    filled: list[Instance] = []
    owners: dict[str, list[str]] = {}
    for instance in instances:
        try:
            endpoints = offset_endpoints(
                instance.address,
                instance.dp_size,
                event_offset=event_offset,
                replay_offset=replay_offset,
                topic=topic,
                dialect=dialect,
                recovery=recovery,
            )
        except ConfigurationError as error:
            excluded[instance.name] = str(error)
            continue
        filled.append(replace(instance, events=endpoints))
        for stream in endpoints:
            for endpoint in endpoints_of(stream):
                owners.setdefault(endpoint, []).append(instance.name)
    for endpoint, names in owners.items():
        if len(names) > 1:
            for name in names:
                others = [other for other in names if other != name]
                shared = f"shared with {', '.join(sorted(set(others)))}" if others else "used by two of its ranks"
                excluded.setdefault(name, f"endpoint {endpoint} is {shared}")
    for name, reason in excluded.items():
        if logged.get(name) != reason:
            log.error("instance %s is left out: %s", name, reason)
    return Assignment(tuple(one for one in filled if one.name not in excluded), excluded)
