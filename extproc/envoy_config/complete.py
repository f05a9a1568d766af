"""A complete configuration: listener, access log, clusters."""

from __future__ import annotations

from collections.abc import Mapping

from envoy_data_plane.envoy.config.accesslog import v3 as accesslog
from envoy_data_plane.envoy.config.bootstrap import v3 as bootstrap_v3
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.listener import v3 as listener
from envoy_data_plane.envoy.config.route import v3 as route
from envoy_data_plane.envoy.extensions.access_loggers.file import v3 as file_log
from envoy_data_plane.envoy.extensions.filters.http.router import v3 as router
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm
from envoy_data_plane.google.protobuf import Any as Packed
from envoy_data_plane.google.protobuf import Struct

from extproc.envoy_config.clusters import METADATA_NAMESPACE, SERVED, address, clusters, seconds
from extproc.envoy_config.filters import EXT_PROC_FILTER, early_header_mutation, http_filters
from extproc.envoy_config.options import DESTINATION, EnvoyOptions
from extproc.envoy_config.routes import routes

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
    """The client side, HTTP/1.1 and HTTP/2."""
    manager = hcm.HttpConnectionManager(
        stat_prefix="openai",
        stream_idle_timeout=seconds(options.stream_idle_timeout),
        http2_protocol_options=core.Http2ProtocolOptions(max_concurrent_streams=1024),
        early_header_mutation_extensions=[early_header_mutation(options)],
        route_config=route.RouteConfiguration(
            name="r", virtual_hosts=[route.VirtualHost(name="v", domains=["*"], routes=routes(options))]
        ),
        http_filters=[
            *http_filters(options),
            hcm.HttpFilter(name="envoy.filters.http.router", typed_config=Packed.pack(router.Router())),
        ],
        access_log=[access_log(options.access_log)] if options.access_log else [],
    )
    network_filter = listener.Filter(
        name="envoy.filters.network.http_connection_manager", typed_config=Packed.pack(manager)
    )
    return listener.Listener(
        name="openai", address=address(options.listen), filter_chains=[listener.FilterChain(filters=[network_filter])]
    )


def bootstrap(options: EnvoyOptions) -> bootstrap_v3.Bootstrap:
    """A complete Envoy configuration, typed."""
    return bootstrap_v3.Bootstrap(
        node=core.Node(id="kvcar", cluster="kvcar"),
        admin=bootstrap_v3.Admin(address=address(options.admin)) if options.admin else None,
        static_resources=bootstrap_v3.BootstrapStaticResources(
            listeners=[openai_listener(options)], clusters=clusters(options)
        ),
    )
