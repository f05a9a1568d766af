"""Envoy configuration for kvcar, from envoy-data-plane's typed classes: `kvcar envoy-config`.

The design: ext_proc sees the buffered body and answers with dynamic metadata envoy.lb / x-gateway-destination-endpoint.
The override_host policy of the engines' cluster obeys it, walks the ordered list on retries and falls back to
LEAST_REQUEST when there is no decision. Clients cannot write metadata, and their copies of the routing headers are
removed before anything reads them.

`bootstrap()` is a complete configuration; `PARTS` are the pieces to merge into an Envoy that already exists.
Importing this module costs about a second (envoy-data-plane), so the command line imports it only when asked for it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

from betterproto2 import Message
from envoy_data_plane.envoy.config.accesslog import v3 as accesslog
from envoy_data_plane.envoy.config.bootstrap import v3 as bootstrap_v3
from envoy_data_plane.envoy.config.cluster import v3 as cluster
from envoy_data_plane.envoy.config.common.mutation_rules import v3 as mutation_rules
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.endpoint import v3 as endpoint
from envoy_data_plane.envoy.config.listener import v3 as listener
from envoy_data_plane.envoy.config.route import v3 as route
from envoy_data_plane.envoy.extensions.access_loggers.file import v3 as file_log
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc
from envoy_data_plane.envoy.extensions.filters.http.router import v3 as router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation import v3 as early_mutation
from envoy_data_plane.envoy.extensions.load_balancing_policies.least_request import v3 as least_request
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host import v3 as override_host
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts import v3 as previous_hosts
from envoy_data_plane.envoy.extensions.upstreams.http import v3 as upstream_http
from envoy_data_plane.envoy.type.matcher import v3 as matcher
from envoy_data_plane.envoy.type.metadata import v3 as metadata
from envoy_data_plane.envoy.type.v3 import Percent
from envoy_data_plane.google.protobuf import Any as Packed
from envoy_data_plane.google.protobuf import Struct

from extproc.config import Config, pair_headers
from extproc.envoy_yaml import COMMENTS, PLACES, dump, plain
from extproc.openai import PATHS, Endpoint

METADATA_NAMESPACE = "envoy.lb"
DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
EXT_PROC_FILTER = "envoy.filters.http.ext_proc"
EXT_PROC_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"

# Headers that steer an engine, a rank or a prefill peer. Stripped from every client request: with fail-open a client's
# own copy would otherwise survive an outage of kvcar.
ROUTING_HEADERS = (
    DESTINATION,
    "x-data-parallel-rank",
    "x-data-parallel-host-port",
    "x-prefiller-host-port",
    "x-encoder-hosts-ports",
    "x-kv-cache-source-host-port",
)
# What kvcar may write; the second kind belongs to its own error replies, which the same rule filters.
_WRITABLE = ("x-gateway-.*", "x-data-parallel-rank", "x-prefiller-host-port", "x-kvcar-.*")
_REPLY_HEADERS = ("content-type", "retry-after")


# Tokenizing reads no cache, so it need not be routed by one.
CACHED_PATHS = tuple(path for path, endpoint in PATHS.items() if endpoint is not Endpoint.TOKENIZE)


class BodyMode(StrEnum):
    """How Envoy hands over the request body."""

    BUFFERED = "buffered"
    FULL_DUPLEX = "full-duplex"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvoyOptions:
    """What may differ from one installation to the next. Addresses are "ip:port", "[ip6]:port" or "name:port".

    engines             the pool's members; the same "ip:port" that kvcar's configuration gives its instances
    engines_file        watched EDS file instead of `engines` (relative to Envoy's working directory)
    ext_proc            one kvcar or several: a failed stream is tried on another one
    admin               Envoy's admin address, None = no admin listener
    max_body_bytes      larger bodies get 413; keep kvcar's own receive limit above it
    paths               request paths that go through kvcar, each also behind every one of `path_prefixes`
    observe_usage       True: answers stream through kvcar too, so that it can read the engine's own cached_tokens
    message_timeout     seconds kvcar may take over one message
    fail_open           True: without kvcar requests are served by the fallback policy; False: they fail with 500
    written_headers     what kvcar writes beyond the usual names (a renamed rank or prefill header)
    stripped_headers    removed from every client request, together with the two above
    max_requests        circuit breaker of both clusters, requests in flight
    access_log          path, None = no access log

    Raises ValueError naming the option and the value.
    """

    engines: tuple[str, ...] = ()
    engines_file: str | None = None
    listen: str = "127.0.0.1:10000"
    admin: str | None = "127.0.0.1:9901"
    ext_proc: tuple[str, ...] = ("127.0.0.1:9002",)
    body_mode: BodyMode = BodyMode.BUFFERED
    paths: tuple[str, ...] = CACHED_PATHS
    path_prefixes: tuple[str, ...] = ()
    observe_usage: bool = False
    max_body_bytes: int = 32 << 20
    message_timeout: float = 2.0
    max_message_timeout: float = 10.0
    fail_open: bool = True
    destination_header: str = DESTINATION
    written_headers: tuple[str, ...] = ()
    stripped_headers: tuple[str, ...] = ROUTING_HEADERS
    engine_health_path: str = "/health"
    max_requests: int = 100_000
    stream_idle_timeout: float = 600.0
    access_log: str | None = "/dev/stdout"

    def __post_init__(self) -> None:
        if bool(self.engines) == (self.engines_file is not None):
            raise ValueError("engines: give engine addresses, or an engines file, and not both")
        if not self.ext_proc:
            raise ValueError("ext_proc: at least one address is needed")
        for option in ("listen", "admin", "ext_proc", "engines"):
            value = getattr(self, option)
            for address in value if isinstance(value, tuple) else (value,):
                if address is not None:
                    split_address(address, option=option)
        for option, headers in (
            ("destination_header", (self.destination_header,)),
            ("written_headers", self.written_headers),
            ("stripped_headers", self.stripped_headers),
        ):
            for header in headers:
                if not re.fullmatch(r"[a-z0-9_.-]+", header):
                    raise ValueError(
                        f"{option}: {header!r} is no header name (lower-case letters, digits, '-', '_', '.')"
                    )
        for option in ("max_body_bytes", "message_timeout", "max_requests", "stream_idle_timeout"):
            if getattr(self, option) <= 0:
                raise ValueError(f"{option}: {getattr(self, option)!r} must be above 0")
        if self.max_message_timeout < self.message_timeout:
            raise ValueError(f"max_message_timeout: {self.max_message_timeout!r} is below message_timeout")
        if not self.engine_health_path.startswith("/"):
            raise ValueError(f"engine_health_path: {self.engine_health_path!r} must start with '/'")


def options_for(config: Config, *, pool: str | None = None, **overrides: Any) -> EnvoyOptions:
    """The options that go with kvcar's own configuration; `overrides` are EnvoyOptions fields.

    `pool` names the pool whose instances Envoy gets; it may be left out when there is one. Envoy needs a cluster and a
    route for each pool: in one cluster the fallback would hand a request to an engine of another model.
    Raises ValueError.
    """
    pools = {item.name: item for item in config.pools}
    if pool is None and len(pools) > 1:
        raise ValueError(f"pool: several are configured, name one of {', '.join(pools)}")
    if pool is not None and pool not in pools:
        raise ValueError(f"pool: {pool!r} is not configured, only {', '.join(pools)}")
    chosen = pools[pool] if pool is not None else config.pools[0]
    host, port = split_address(config.listen.address)
    local = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    headers = config.headers
    values: dict[str, Any] = {
        "ext_proc": (f"{local}:{port}",),
        "max_body_bytes": config.limits.max_body_bytes,
        "message_timeout": max(2.0, 2 * config.limits.decide_timeout_ms / 1000),
        "destination_header": headers.destination,
        "written_headers": tuple(dict.fromkeys((headers.rank, headers.prefill, *pair_headers(config)))),
        "paths": tuple(dict.fromkeys((*CACHED_PATHS, *config.paths.rewrites))),
        "path_prefixes": config.paths.bases,
        "observe_usage": config.listen.observe_usage,
    }
    if chosen.endpoints_file is not None and overrides.get("engines_file") is None:
        values["engines_file"] = chosen.endpoints_file.path
    elif overrides.get("engines_file") is None:
        values["engines"] = tuple(item.address for item in chosen.instances)
    values["max_message_timeout"] = max(10.0, overrides.get("message_timeout", values["message_timeout"]))
    return EnvoyOptions(**(values | overrides))


def split_address(address: str, *, option: str = "address") -> tuple[str, int]:
    """("host", port) of "host:port"; brackets around an IPv6 host are taken off. Raises ValueError."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.%]+)\]|([^\[\]:/\s]+)):([0-9]{1,5})", address)
    if not found or not 0 <= int(found[3]) <= 65535:
        raise ValueError(f"{option}: {address!r} is not host:port (IPv6 as [::1]:8000)")
    return found[1] or found[2], int(found[3])


# ---------------------------------------------------------------- small pieces


def _seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


def _address(text: str) -> core.Address:
    host, port = split_address(text)
    return core.Address(socket_address=core.SocketAddress(address=host, port_value=port))


def _assignment(name: str, addresses: tuple[str, ...]) -> endpoint.ClusterLoadAssignment:
    members = [endpoint.LbEndpoint(endpoint=endpoint.Endpoint(address=_address(text))) for text in addresses]
    return endpoint.ClusterLoadAssignment(
        cluster_name=name, endpoints=[endpoint.LocalityLbEndpoints(lb_endpoints=members)]
    )


def _discovery(addresses: tuple[str, ...]) -> cluster.ClusterDiscoveryType:
    for text in addresses:
        try:
            ipaddress.ip_address(split_address(text)[0])
        except ValueError:
            return cluster.ClusterDiscoveryType.STRICT_DNS
    return cluster.ClusterDiscoveryType.STATIC


def _key(name: str) -> metadata.MetadataKey:
    return metadata.MetadataKey(key=METADATA_NAMESPACE, path=[metadata.MetadataKeyPathSegment(key=name)])


def _policy(name: str, config: Message) -> cluster.LoadBalancingPolicy:
    extension = core.TypedExtensionConfig(
        name=f"envoy.load_balancing_policies.{name}", typed_config=Packed.pack(config)
    )
    return cluster.LoadBalancingPolicy(policies=[cluster.LoadBalancingPolicyPolicy(typed_extension_config=extension)])


def _breakers(max_requests: int, *, max_retries: int | None = None) -> cluster.CircuitBreakers:
    return cluster.CircuitBreakers(
        thresholds=[
            cluster.CircuitBreakersThresholds(
                max_connections=max_requests,
                max_pending_requests=max_requests,
                max_requests=max_requests,
                max_retries=max_retries,
            )
        ]
    )


def _health_check(
    interval: float,
    *,
    http: core.HealthCheckHttpHealthCheck | None = None,
    grpc: core.HealthCheckGrpcHealthCheck | None = None,
) -> core.HealthCheck:
    return core.HealthCheck(
        timeout=_seconds(1),
        interval=_seconds(interval),
        no_traffic_interval=_seconds(interval),
        unhealthy_threshold=2,
        healthy_threshold=1,
        http_health_check=http,
        grpc_health_check=grpc,
    )


# ---------------------------------------------------------------- clusters


def engines_cluster(options: EnvoyOptions) -> cluster.Cluster:
    """The pool: override_host obeys kvcar's metadata, LEAST_REQUEST serves whatever kvcar did not decide."""
    policy = override_host.OverrideHost(
        override_host_sources=[override_host.OverrideHostOverrideHostSource(metadata=_key(DESTINATION))],
        selected_host_key=_key(SERVED),
        fallback_policy=_policy("least_request", least_request.LeastRequest()),
    )
    result = cluster.Cluster(
        name="engines",
        connect_timeout=_seconds(0.5),
        circuit_breakers=_breakers(options.max_requests, max_retries=100),
        health_checks=[
            _health_check(2, http=core.HealthCheckHttpHealthCheck(path=options.engine_health_path)),
        ],
        load_balancing_policy=_policy("override_host", policy),
    )
    if options.engines_file is None:
        result.type = _discovery(options.engines)
        result.load_assignment = _assignment("engines", options.engines)
        return result
    folder = options.engines_file.rpartition("/")[0]
    source = core.PathConfigSource(
        path=options.engines_file, watched_directory=core.WatchedDirectory(path=folder or ".")
    )
    result.type = cluster.ClusterDiscoveryType.EDS
    result.ignore_health_on_host_removal = True
    result.eds_cluster_config = cluster.ClusterEdsClusterConfig(
        eds_config=core.ConfigSource(resource_api_version=core.ApiVersion.V3, path_config_source=source)
    )
    return result


def ext_proc_cluster(options: EnvoyOptions) -> cluster.Cluster:
    """kvcar itself: HTTP/2, its own gRPC health check, no panic routing."""
    protocol = upstream_http.HttpProtocolOptions(
        explicit_http_config=upstream_http.HttpProtocolOptionsExplicitHttpConfig(
            http2_protocol_options=core.Http2ProtocolOptions(
                connection_keepalive=core.KeepaliveSettings(interval=_seconds(30), timeout=_seconds(5))
            )
        )
    )
    return cluster.Cluster(
        name="extproc",
        type=_discovery(options.ext_proc),
        connect_timeout=_seconds(0.25),
        circuit_breakers=_breakers(options.max_requests),
        common_lb_config=cluster.ClusterCommonLbConfig(healthy_panic_threshold=Percent(value=0)),
        health_checks=[_health_check(1, grpc=core.HealthCheckGrpcHealthCheck(service_name=EXT_PROC_SERVICE))],
        typed_extension_protocol_options={
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": Packed.pack(protocol)
        },
        load_assignment=_assignment("extproc", options.ext_proc),
    )


# ---------------------------------------------------------------- filter, routes, listener


def ext_proc_filter(options: EnvoyOptions) -> hcm.HttpFilter:
    """The HTTP filter; place it before envoy.filters.http.router."""
    send, body = ext_proc.ProcessingModeHeaderSendMode, ext_proc.ProcessingModeBodySendMode
    mode = ext_proc.ProcessingMode(
        request_header_mode=send.SEND,
        request_body_mode=body.BUFFERED,
        response_header_mode=send.SEND,
        response_trailer_mode=send.SEND,
    )
    if options.observe_usage:
        mode.response_body_mode = body.STREAMED
    writable: tuple[str, ...] = _WRITABLE
    for header in (options.destination_header, *options.written_headers):
        if not re.fullmatch("|".join(writable), header):
            writable = (*writable, re.escape(header))
    if options.body_mode is BodyMode.FULL_DUPLEX:
        mode.request_body_mode = mode.response_body_mode = body.FULL_DUPLEX_STREAMED
        mode.request_trailer_mode = send.SEND
        # The echoed body comes with its own length.
        writable = (*writable, "content-length")
    namespaces = ext_proc.MetadataOptionsMetadataNamespaces
    config = ext_proc.ExternalProcessor(
        stat_prefix="kvcar",
        failure_mode_allow=options.fail_open,
        message_timeout=_seconds(options.message_timeout),
        max_message_timeout=_seconds(options.max_message_timeout),
        grpc_service=core.GrpcService(
            envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name="extproc"),
            retry_policy=core.RetryPolicy(retry_on="unavailable,connect-failure,refused-stream,reset", num_retries=1),
        ),
        processing_mode=mode,
        response_attributes=["upstream.address", "response.code", "response.flags"],
        metadata_options=ext_proc.MetadataOptions(
            receiving_namespaces=namespaces(untyped=[METADATA_NAMESPACE, "kvcar"]),
            forwarding_namespaces=namespaces(untyped=[METADATA_NAMESPACE, "envoy.lb.subset_hint"]),
        ),
        forward_rules=ext_proc.HeaderForwardingRules(
            disallowed_headers=matcher.ListStringMatcher(
                patterns=[matcher.StringMatcher(exact=name) for name in ("authorization", "cookie", "x-api-key")]
            )
        ),
        mutation_rules=mutation_rules.HeaderMutationRules(
            disallow_all=True, allow_expression=matcher.RegexMatcher(regex="|".join((*writable, *_REPLY_HEADERS)))
        ),
    )
    return hcm.HttpFilter(name=EXT_PROC_FILTER, typed_config=Packed.pack(config))


def routes(options: EnvoyOptions) -> list[route.Route]:
    """Requests with prompts go through kvcar; every other path has the filter switched off and kvcar never sees it."""
    retry = route.RetryPolicy(
        retry_on="connect-failure,refused-stream,retriable-status-codes",
        retriable_status_codes=[503],
        num_retries=2,
        retry_back_off=route.RetryPolicyRetryBackOff(base_interval=_seconds(0.005), max_interval=_seconds(0.05)),
        retry_host_predicate=[
            route.RetryPolicyRetryHostPredicate(
                name="envoy.retry_host_predicates.previous_hosts",
                typed_config=Packed.pack(previous_hosts.PreviousHostsPredicate()),
            )
        ],
        host_selection_retry_max_attempts=5,
    )
    scored = [
        route.Route(
            match=route.RouteMatch(safe_regex=matcher.RegexMatcher(regex=regex)),
            request_body_buffer_limit=options.max_body_bytes,
            route=route.RouteAction(cluster="engines", timeout=_seconds(0), retry_policy=retry),
        )
        for regex in _path_regexes(options)
    ]
    others = route.Route(
        match=route.RouteMatch(prefix="/"),
        route=route.RouteAction(cluster="engines", timeout=_seconds(30)),
        typed_per_filter_config={EXT_PROC_FILTER: Packed.pack(ext_proc.ExtProcPerRoute(disabled=True))},
    )
    return [*scored, others]


def _path_regexes(options: EnvoyOptions) -> list[str]:
    """Each matches whole paths; together every handled one, also behind every prefix.

    Envoy takes RE2 programs up to size 100: what paths share is written once, and a prefix has expressions of its own.
    """

    def any_of(texts: Iterable[str]) -> str:
        # re.escape writes a backslash before a hyphen, which outside a class needs none
        return "(" + "|".join(re.escape(text).replace("\\-", "-") for text in texts) + ")"

    below = [path.removeprefix("/v1/") for path in options.paths if path.startswith("/v1/")]
    others = [path for path in options.paths if not path.startswith("/v1/")]
    parts = [f"/v1/{any_of(below)}"] * bool(below) + [any_of(others)] * bool(others)
    prefixes = (re.escape(prefix.rstrip("/")).replace("\\-", "-") for prefix in options.path_prefixes)
    return ["|".join(parts), *(f"{prefix}{part}" for prefix in prefixes for part in parts)]


def early_header_mutation(options: EnvoyOptions) -> core.TypedExtensionConfig:
    """Removes the routing headers from client requests before any filter or route reads them."""
    headers = dict.fromkeys((options.destination_header, *options.stripped_headers, *options.written_headers))
    config = early_mutation.HeaderMutation(mutations=[mutation_rules.HeaderMutation(remove=name) for name in headers])
    return core.TypedExtensionConfig(
        name="envoy.http.early_header_mutation.header_mutation", typed_config=Packed.pack(config)
    )


ACCESS_LOG_FIELDS: Mapping[str, str] = {
    "ts": "%START_TIME%",
    "path": "%REQ(:PATH)%",
    "request_id": "%REQ(X-REQUEST-ID)%",
    "code": "%RESPONSE_CODE%",
    "flags": "%RESPONSE_FLAGS%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    "upstream": "%UPSTREAM_HOST%",
    "chosen": f"%DYNAMIC_METADATA({METADATA_NAMESPACE}:{DESTINATION})%",
    "served": f"%DYNAMIC_METADATA({METADATA_NAMESPACE}:{SERVED})%",
    "kvcar": "%DYNAMIC_METADATA(kvcar)%",
    "ep_hdr_us": f"%FILTER_STATE({EXT_PROC_FILTER}:FIELD:request_header_latency_us)%",
    "ep_body_us": f"%FILTER_STATE({EXT_PROC_FILTER}:FIELD:request_body_total_latency_us)%",
    "ep": f"%FILTER_STATE({EXT_PROC_FILTER}:PLAIN)%",
    "dur": "%DURATION%",
}


def access_log(path: str) -> accesslog.AccessLog:
    """One JSON line a request: what was asked for, what served, kvcar's own facts and its latency."""
    config = file_log.FileAccessLog(
        path=path,
        log_format=core.SubstitutionFormatString(json_format=Struct.from_dict(dict(ACCESS_LOG_FIELDS))),
    )
    return accesslog.AccessLog(name="envoy.access_loggers.file", typed_config=Packed.pack(config))


def openai_listener(options: EnvoyOptions) -> listener.Listener:
    """The client side."""
    manager = hcm.HttpConnectionManager(
        stat_prefix="openai",
        stream_idle_timeout=_seconds(options.stream_idle_timeout),
        http2_protocol_options=core.Http2ProtocolOptions(max_concurrent_streams=1024),
        early_header_mutation_extensions=[early_header_mutation(options)],
        route_config=route.RouteConfiguration(
            name="r", virtual_hosts=[route.VirtualHost(name="v", domains=["*"], routes=routes(options))]
        ),
        http_filters=[
            ext_proc_filter(options),
            hcm.HttpFilter(name="envoy.filters.http.router", typed_config=Packed.pack(router.Router())),
        ],
        access_log=[access_log(options.access_log)] if options.access_log else [],
    )
    network_filter = listener.Filter(
        name="envoy.filters.network.http_connection_manager", typed_config=Packed.pack(manager)
    )
    return listener.Listener(
        name="openai", address=_address(options.listen), filter_chains=[listener.FilterChain(filters=[network_filter])]
    )


def bootstrap(options: EnvoyOptions) -> bootstrap_v3.Bootstrap:
    """A complete Envoy configuration, typed."""
    return bootstrap_v3.Bootstrap(
        node=core.Node(id="kvcar", cluster="kvcar"),
        admin=bootstrap_v3.Admin(address=_address(options.admin)) if options.admin else None,
        static_resources=bootstrap_v3.BootstrapStaticResources(
            listeners=[openai_listener(options)],
            clusters=[engines_cluster(options), ext_proc_cluster(options)],
        ),
    )


# ---------------------------------------------------------------- as YAML


class Part(StrEnum):
    """What to write: everything, all fragments, or one of them."""

    BOOTSTRAP = "bootstrap"
    FRAGMENT = "fragment"
    FILTER = "filter"
    CLUSTERS = "clusters"
    ROUTES = "routes"
    LISTENER = "listener"


_FRAGMENTS: Mapping[Part, Callable[[EnvoyOptions], dict[str, Any]]] = {
    Part.CLUSTERS: lambda options: {"clusters": plain([engines_cluster(options), ext_proc_cluster(options)])},
    Part.LISTENER: lambda options: {
        "early_header_mutation_extensions": plain([early_header_mutation(options)]),
    },
    Part.FILTER: lambda options: {"http_filters": plain([ext_proc_filter(options)])},
    Part.ROUTES: lambda options: {"routes": plain(routes(options))},
}


def as_dict(options: EnvoyOptions, part: Part = Part.BOOTSTRAP) -> dict[str, Any]:
    """The configuration as plain data in proto-JSON form with snake_case names, the form Envoy's documentation uses."""
    if part is Part.BOOTSTRAP:
        data: dict[str, Any] = plain(bootstrap(options))
        return data
    if part is Part.FRAGMENT:
        return {key: value for build in _FRAGMENTS.values() for key, value in build(options).items()}
    return _FRAGMENTS[part](options)


def render(options: EnvoyOptions, part: Part = Part.BOOTSTRAP) -> str:
    """The configuration as commented YAML. Costs a few ms."""
    if part is Part.BOOTSTRAP:
        return _TITLE + dump(as_dict(options, part), COMMENTS)
    return _FRAGMENT_TITLE + dump(as_dict(options, part), {**COMMENTS, **PLACES})


_TITLE = """\
# Envoy in front of LLM engines, with kvcar choosing the engine. Written by `kvcar envoy-config`; Envoy 1.40.
# kvcar (ext_proc) reads the request body and answers with dynamic metadata envoy.lb / x-gateway-destination-endpoint,
# "ip:port[,ip:port...]" best first. The engines' cluster obeys it; without a decision LEAST_REQUEST serves the request.
"""

_FRAGMENT_TITLE = """\
# Pieces for an Envoy that exists already. Written by `kvcar envoy-config`; Envoy 1.40.
# Merge each list into the place its comment names; envoy/README.md walks through it.
"""
