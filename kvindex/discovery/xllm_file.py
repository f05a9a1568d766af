"""The xLLM service's JSON file of KV event streams, as it is. Pure: text in, what it says out.

    {"streams": [{"instance_name", "dp_rank", "block_size", "endpoint", "replay_endpoint", "topic", "hash_seed"}, ...]}
    {"discovery": {"event_port_offset", "replay_port_offset", "block_size", "topic", "hash_seed"}}      either, not both
    max_streams, max_blocks_per_stream, max_message_bytes, max_buffered_bytes, replay_timeout_ms, resync_interval_ms

What is refused there is refused here: a missing endpoint, a wildcard, an instance's rank or an endpoint twice, both
ways at once. Unknown keys are ignored and listed. `discovery.refresh_interval_ms` has no use here: etcd is watched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvindex.discovery.port_offset import EVENT_PORT_OFFSET, REPLAY_PORT_OFFSET
from kvindex.discovery.xllm_registry import PortRule
from kvindex.endpoints import check_address, check_endpoint
from kvindex.errors import ConfigurationError
from kvindex.fleet import MAX_DP_SIZE, Instance, StreamEndpoint

LIMITS = {
    "max_streams": (1, 128),
    "max_blocks_per_stream": (1, 2**31),
    "max_message_bytes": (1, 2**31),
    "max_buffered_bytes": (1, 2**33),
    "replay_timeout_ms": (1, 3_600_000),
    "resync_interval_ms": (1, 86_400_000),
}
"""Key -> smallest and largest value."""
DISCOVERY = {
    "event_port_offset": (1, 65535),
    "replay_port_offset": (1, 65535),
    "refresh_interval_ms": (50, 60_000),
    "block_size": (1, 65536),
    "hash_seed": (0, 2**64 - 1),
}
STREAM = {"dp_rank": (0, MAX_DP_SIZE - 1), "block_size": (1, 65536), "hash_seed": (0, 2**64 - 1)}
TEXTS = ("instance_name", "endpoint", "replay_endpoint", "topic")
BLOCK_SIZE, HASH_SEED = 128, 1024


@dataclass(frozen=True, slots=True)
class XllmFile:
    """What one file says.

    instances  of `streams`, each with the ranks that are listed; () with `discovery`
    ports      of `discovery`: where the events of registered instances are; None with `streams`
    limits     those of LIMITS that are given, by their names in the file
    ignored    keys that mean nothing to us
    """

    instances: tuple[Instance, ...]
    ports: PortRule | None
    block_size: int
    hash_seed: int
    limits: Mapping[str, int]
    ignored: tuple[str, ...] = ()


def parse(
    text: str | bytes,
    *,
    pool: str = "",
    model: str = "",
    dialect: str = "xllm",
    recovery: str | None = None,
    addresses: Mapping[str, str] | None = None,
) -> XllmFile:
    """Raises ConfigurationError that names the key and the remedy.

    addresses  instance_name -> ip:port of its HTTP server, for names that are no address themselves
    """
    try:
        root = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"no JSON: {error}") from None
    if not isinstance(root, dict):
        raise ConfigurationError("no JSON object: write {...} with `streams` or `discovery`")
    ignored: list[str] = []
    limits = _numbers(root, LIMITS, "", ignored, others=("streams", "discovery"))
    if root.get("streams") and root.get("discovery") is not None:
        raise ConfigurationError("`streams` and `discovery` exclude each other: leave one out")
    if root.get("discovery") is not None:
        given = root["discovery"]
        if not isinstance(given, dict):
            raise ConfigurationError(f"discovery is {given!r}: write an object")
        numbers = _numbers(given, DISCOVERY, "discovery.", ignored, others=("topic",))
        rule = PortRule(
            numbers.get("event_port_offset", EVENT_PORT_OFFSET),
            numbers.get("replay_port_offset", REPLAY_PORT_OFFSET),
            _text(given, "topic", "discovery."),
        )
        size, seed = numbers.get("block_size", BLOCK_SIZE), numbers.get("hash_seed", HASH_SEED)
        return XllmFile((), rule, size, seed, limits, tuple(ignored))
    streams = root.get("streams")
    if not isinstance(streams, list) or not streams:
        raise ConfigurationError("no streams: write `streams`: [{...}] or `discovery`: {...}")
    return _static(streams, limits, ignored, pool, model, dialect, recovery, addresses or {})


def _static(
    streams: list[Any],
    limits: Mapping[str, int],
    ignored: list[str],
    pool: str,
    model: str,
    dialect: str,
    recovery: str | None,
    addresses: Mapping[str, str],
) -> XllmFile:
    ranks: dict[str, dict[int, StreamEndpoint]] = {}
    owners: dict[str, str] = {}
    common: dict[str, tuple[int, str]] = {}
    for number, given in enumerate(streams):
        where = f"streams[{number}]"
        if not isinstance(given, dict):
            raise ConfigurationError(f"{where} is {given!r}: write an object")
        numbers = _numbers(given, STREAM, where + ".", ignored, others=TEXTS)
        for key, default in (("block_size", BLOCK_SIZE), ("hash_seed", HASH_SEED)):
            value = numbers.get(key, default)
            first, place = common.setdefault(key, (value, where))
            if first != value:
                raise ConfigurationError(f"{where}.{key} is {value}, that of {place} {first}: a pool has one for all")
        name, rank = _text(given, "instance_name", where + ".", required=True), numbers.get("dp_rank", 0)
        found = []
        for key in ("endpoint", "replay_endpoint"):
            endpoint = check_endpoint(_text(given, key, where + ".", required=True), what=f"{where}.{key}")
            other = owners.setdefault(endpoint, f"{where}.{key}")
            if other != f"{where}.{key}":
                raise ConfigurationError(f"{where}.{key} {endpoint!r} is that of {other}: each stream has its own")
            found.append(endpoint)
        if rank in ranks.setdefault(name, {}):
            raise ConfigurationError(f"{where}: rank {rank} of instance {name!r} is listed twice")
        topic = _text(given, "topic", where + ".")
        ranks[name][rank] = StreamEndpoint(rank, found[0], found[1], topic, dialect, recovery)
    instances = []
    for name, by_rank in ranks.items():
        address = addresses.get(name, name)
        try:
            check_address(address, literal=True)
        except ConfigurationError as error:
            raise ConfigurationError(
                f"instance_name {name!r} is not where Envoy finds it ({error}): name its ip:port under `addresses`"
            ) from None
        instance = Instance(
            name=name,
            address=address,
            pool=pool,
            model=model,
            dp_size=max(by_rank) + 1,
            incarnation="static",
            events=tuple(by_rank[rank] for rank in sorted(by_rank)),
        )
        instance.check()
        instances.append(instance)
    return XllmFile(tuple(instances), None, common["block_size"][0], common["hash_seed"][0], limits, tuple(ignored))


def _numbers(
    given: Mapping[str, Any],
    known: Mapping[str, tuple[int, int]],
    where: str,
    ignored: list[str],
    others: tuple[str, ...],
) -> dict[str, int]:
    """The numbers that are given, each within its range."""
    found = {}
    for key, value in given.items():
        if key in known:
            least, most = known[key]
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise ConfigurationError(f"{where}{key} is {value!r}: write a whole number of {least} to {most}")
            found[key] = value
        elif key not in others:
            ignored.append(where + key)
    return found


def _text(given: Mapping[str, Any], key: str, where: str, *, required: bool = False) -> str:
    value = given.get(key, "")
    if not isinstance(value, str):
        raise ConfigurationError(f"{where}{key} is {value!r}: write a text")
    if required and not value:
        raise ConfigurationError(f"{where}{key} is missing")
    return value
