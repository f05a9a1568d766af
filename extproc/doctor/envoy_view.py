"""Envoy as its admin port tells it (/config_dump, /clusters, /stats, /server_info), reduced to the ways of a prompt.

A way is: listener -> route that a path takes -> the ext_proc filter as that route sees it -> upstream clusters. Checks
walk over ways, so that what one route overrides is judged for that route.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from extproc.config import Config
from extproc.doctor.http import Http

Json = Mapping[str, Any]
EXT_PROC = "envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor"
MANAGER = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
SESSION = "envoy.extensions.filters.http.stateful_session.v3.StatefulSession"
NAMESPACE = "envoy.lb"
DESTINATION = "x-gateway-destination-endpoint"
CONDITIONS = ("headers", "query_parameters", "runtime_fraction", "dynamic_metadata", "filter_state", "cookies")
"""What a route may ask for beside the path: without it the next route that matches is taken."""
STATS = r"ext_proc|cluster\..*\.(upstream_rq_pending_overflow|upstream_rq_active_overflow|membership_.*)$"


def typed(holder: Any, kind: str) -> bool:
    """Whether a typed_config is of this message type."""
    return isinstance(holder, Mapping) and str(holder.get("@type", "")).endswith("/" + kind)


@dataclass(frozen=True, slots=True)
class Host:
    address: str
    hostname: str
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Way:
    """
    listener, path, route   names for the reader
    rule                    the route entry; host = its virtual host
    filter                  the ext_proc filter's settings as this route sees them; None = it does not run here
    clusters                where the route leads; () = a redirect, a direct response, or told by a header
    manager, socket         the connection manager's and the listener's settings
    session                 the stateful_session filter's settings as this route sees them; None = it does not run here
    decided                 the route is taken only once kvcar's metadata is there
    """

    listener: str
    path: str
    route: str
    rule: Json
    host: Json
    filter: Json | None
    clusters: tuple[str, ...]
    manager: Json
    socket: Json
    session: Json | None = None
    decided: bool = False

    @property
    def name(self) -> str:
        return f"listener {self.listener}, route {self.route}"


@dataclass(frozen=True, slots=True)
class EnvoyView:
    """
    filters    (listener, name, settings) of every ext_proc filter that asks kvcar; `foreign`: of those that ask others
    ways       one for every path with prompts and every route that it may take
    clusters   by name, as configured; hosts: their members as they are now
    """

    version: str = ""
    filters: tuple[tuple[str, str, Json], ...] = ()
    foreign: tuple[tuple[str, str, Json], ...] = ()
    listeners: tuple[str, ...] = ()
    ways: tuple[Way, ...] = ()
    clusters: Mapping[str, Json] = field(default_factory=dict)
    hosts: Mapping[str, tuple[Host, ...]] = field(default_factory=dict)
    stats: Mapping[str, int] = field(default_factory=dict)

    @property
    def scored(self) -> list[Way]:
        """Ways on which kvcar is asked."""
        return [way for way in self.ways if way.filter is not None]

    def upstreams(self) -> list[str]:
        """Names of the clusters that scored ways lead to."""
        return list(dict.fromkeys(name for way in self.scored for name in way.clusters))

    def processors(self) -> list[str]:
        """Names of the clusters that the filters ask, as the routes of prompts see them."""
        seen = [way.filter for way in self.scored] or [settings for _, _, settings in self.filters]
        return list(dict.fromkeys(name for settings in seen if settings is not None and (name := asked(settings))))


def asked(settings: Json) -> str:
    """Cluster of the gRPC service of an ext_proc filter, "" for a Google gRPC client or an HTTP service."""
    return str(settings.get("grpc_service", {}).get("envoy_grpc", {}).get("cluster_name", ""))


async def read_view(http: Http, base: str, config: Config) -> EnvoyView | str:
    """What Envoy at this admin URL says, or why nothing is known."""
    paths = ("/config_dump?include_eds", "/clusters?format=json", f"/stats?format=json&filter={STATS}", "/server_info")
    dump, clusters, stats, info = await asyncio.gather(*(http.get(base + path) for path in paths))
    for answer in (dump, clusters):
        if not answer.ok:
            return str(answer)
    found = dump.json()
    if not isinstance(found, dict) or not isinstance(found.get("configs"), list):
        return f"{dump.url}: the answer is no configuration dump: is it Envoy's admin port?"
    return view_of(found, clusters.json() or {}, stats.json() or {}, info.json() or {}, config)


def view_of(dump: Json, clusters: Json, stats: Json, info: Json, config: Config) -> EnvoyView:
    """The view of the four pages. `config` tells which filter is kvcar's and which paths carry prompts."""
    parts: dict[str, Json] = {str(one.get("@type", "")).rpartition(".")[2]: one for one in dump["configs"]}
    defined = {one["name"]: one for one in _clusters(parts.get("ClustersConfigDump", {}))}
    routes = {one.get("name", ""): one for one in _route_configs(parts.get("RoutesConfigDump", {}))}
    hosts = {row["name"]: _hosts(row) for row in clusters.get("cluster_statuses", ())}
    chains = list(_chains(parts.get("ListenersConfigDump", {})))
    filters = [(socket, one) for socket, manager in chains for one in _filters(manager)]
    named = [(str(socket.get("name", "")), one["name"], one["typed_config"]) for socket, one in filters]
    taken = [
        (way, running)
        for socket, manager in chains
        for path in prompt_paths(config)
        for way, running in _ways(socket, manager, routes, path)
    ]
    # A filter may be anybody's in the listener and ours on a route, as Istio attaches the picker of an InferencePool.
    own = {(listener, name) for listener, name, settings in named if _asks_us(settings, hosts, config)}
    own |= {
        (way.listener, name)
        for way, running in taken
        for name, settings in running
        if _asks_us(settings, hosts, config)
    }
    own = own or {(listener, name) for listener, name, _ in named}
    mine = [one for one in named if one[:2] in own]
    ways = [
        replace(way, filter=next((settings for name, settings in running if (way.listener, name) in own), None))
        for way, running in taken
    ]
    return EnvoyView(
        version=str(info.get("version", "")),
        filters=tuple(mine),
        foreign=tuple(one for one in named if one not in mine),
        listeners=tuple(str(socket.get("name", "")) for socket, _ in chains),
        ways=tuple(ways),
        clusters=defined,
        hosts=hosts,
        stats={row["name"]: row["value"] for row in stats.get("stats", ()) if isinstance(row.get("value"), int)},
    )


def prompt_paths(config: Config) -> list[str]:
    """Where chats arrive by this configuration."""
    chat = "/v1/chat/completions"
    bases = (base.rstrip("/") + chat for base in config.paths.bases)
    return [chat, "/v1/completions", *bases, *config.paths.rewrites]


def _clusters(part: Json) -> Iterator[Json]:
    for key in ("static_clusters", "dynamic_active_clusters"):
        for row in part.get(key, ()):
            if isinstance(row.get("cluster"), Mapping):
                yield row["cluster"]


def _route_configs(part: Json) -> Iterator[Json]:
    for key in ("static_route_configs", "dynamic_route_configs"):
        for row in part.get(key, ()):
            if isinstance(row.get("route_config"), Mapping):
                yield row["route_config"]


def _chains(part: Json) -> Iterator[tuple[Json, Json]]:
    """Every (listener, connection manager)."""
    listeners = [row["listener"] for row in part.get("static_listeners", ()) if "listener" in row]
    for row in part.get("dynamic_listeners", ()):
        state = row.get("active_state", {})
        if "listener" in state:
            listeners.append({"name": row.get("name", ""), **state["listener"]})
    for listener in listeners:
        chains = [*listener.get("filter_chains", ()), listener.get("default_filter_chain") or {}]
        for chain in chains:
            for one in chain.get("filters", ()):
                if typed(one.get("typed_config"), MANAGER):
                    yield listener, one["typed_config"]


def _filters(manager: Json) -> Iterator[Json]:
    for one in manager.get("http_filters", ()):
        if typed(one.get("typed_config"), EXT_PROC):
            yield one


def _asks_us(settings: Json, hosts: Mapping[str, tuple[Host, ...]], config: Config) -> bool:
    """By port: the host differs between here and there when networks are between."""
    port = config.listen.address.rpartition(":")[2]
    return port == "0" or any(one.address.endswith(f":{port}") for one in hosts.get(asked(settings), ()))


def _hosts(row: Json) -> tuple[Host, ...]:
    found = []
    for one in row.get("host_statuses", ()):
        socket = one.get("address", {}).get("socket_address", {})
        address = str(socket.get("address", ""))
        address = f"[{address}]" if ":" in address else address
        status = one.get("health_status", {})
        problems = [key for key, value in status.items() if key != "eds_health_status" and value is True]
        if status.get("eds_health_status", "HEALTHY") not in ("HEALTHY", "UNKNOWN"):
            problems.append(f"EDS says {status['eds_health_status']}")
        found.append(Host(f"{address}:{socket.get('port_value', '')}", str(one.get("hostname", "")), tuple(problems)))
    return tuple(found)


# ---------------------------------------------------------------- routes


def _ways(
    socket: Json, manager: Json, routes: Mapping[str, Json], path: str
) -> Iterator[tuple[Way, list[tuple[str, Json]]]]:
    """Every route that the path may take, and the ext_proc filters (name, settings) that run there."""
    table = manager.get("route_config") or routes.get(manager.get("rds", {}).get("route_config_name", ""), {})
    sessions = [one for one in manager.get("http_filters", ()) if typed(one.get("typed_config"), SESSION)]
    for host in table.get("virtual_hosts", ()):
        for number, rule in enumerate(host.get("routes", ())):
            match = rule.get("match", {})
            if not matches(match, path):
                continue
            action, levels = rule.get("route", {}), (table, host, rule)
            weighted = [one.get("name", "") for one in action.get("weighted_clusters", {}).get("clusters", ())]
            running = ((one["name"], _effective(one, levels)) for one in _filters(manager))
            way = Way(
                str(socket.get("name", "")),
                path,
                str(rule.get("name") or f"{host.get('name', '')}[{number}]"),
                rule,
                host,
                None,
                tuple(name for name in [action.get("cluster", ""), *weighted] if name),
                manager,
                socket,
                next((settings for one in sessions if (settings := _effective(one, levels)) is not None), None),
                any(
                    is_destination(one.get("filter"), one.get("path", ())) for one in match.get("dynamic_metadata", ())
                ),
            )
            yield way, [(name, settings) for name, settings in running if settings is not None and _asks(settings)]
            if not any(match.get(key) for key in CONDITIONS):
                break  # nothing behind it is reached


def _asks(settings: Json) -> bool:
    """Whether a filter in this mode asks at all before the request leaves; Istio's stands idle where no pool is."""
    mode = settings.get("processing_mode", {})
    return not (mode.get("request_header_mode") == "SKIP" and mode.get("request_body_mode", "NONE") == "NONE")


def is_destination(namespace: Any, path: Sequence[Json]) -> bool:
    """Whether a place in the metadata is where kvcar's decision stands."""
    return namespace == NAMESPACE and [step.get("key") for step in path] == [DESTINATION]


def matches(match: Json, path: str) -> bool:
    """Whether a path takes a route; conditions on headers are left out. RE2 and Python agree on such expressions."""
    if "prefix" in match:
        return path.startswith(match["prefix"])
    if "path" in match:
        return bool(path == match["path"])
    if "path_separated_prefix" in match:
        prefix = match["path_separated_prefix"]
        return path == prefix or path.startswith(prefix + "/")
    if "safe_regex" in match:
        try:
            return re.fullmatch(match["safe_regex"].get("regex", ""), path) is not None
        except re.error:
            return False
    return False


def _effective(running: Json, levels: Sequence[Json]) -> Json | None:
    """The filter's settings with what route table, virtual host and route override; None when it is switched off."""
    settings: Json | None = None if running.get("disabled") else running["typed_config"]
    for level in levels:
        override = level.get("typed_per_filter_config", {}).get(running["name"])
        if not isinstance(override, Mapping):
            continue
        if "config" in override or str(override.get("@type", "")).endswith("FilterConfig"):
            settings = None if override.get("disabled") else running["typed_config"]
            override = override.get("config", {})
        if override.get("disabled"):
            settings = None
            continue
        changes = override.get("overrides", override.get("stateful_session"))
        if isinstance(changes, Mapping):
            settings = {**(settings or running["typed_config"]), **changes}
    return settings


# ---------------------------------------------------------------- values in proto-JSON form


def seconds(value: Any, default: float) -> float:
    """A duration such as "0.200s"."""
    try:
        return float(str(value).removesuffix("s")) if value is not None else default
    except ValueError:
        return default


def number(value: Any, default: int) -> int:
    """A number; 64-bit ones are texts."""
    try:
        return int(value) if value is not None else default
    except (TypeError, ValueError):
        return default
