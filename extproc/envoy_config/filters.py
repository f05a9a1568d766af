"""The HTTP filters, and what happens to client requests before any filter."""

from __future__ import annotations

import re

from betterproto2 import Message
from envoy_data_plane.envoy.config.common.mutation_rules import v3 as mutation_rules
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc
from envoy_data_plane.envoy.extensions.filters.http.header_mutation import v3 as header_mutation
from envoy_data_plane.envoy.extensions.filters.http.stateful_session import v3 as stateful_session
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager import v3 as hcm
from envoy_data_plane.envoy.extensions.http.early_header_mutation.header_mutation import v3 as early_mutation
from envoy_data_plane.envoy.extensions.http.stateful_session.header import v3 as session_header
from envoy_data_plane.envoy.type.matcher import v3 as matcher
from envoy_data_plane.google.protobuf import Any as Packed

from extproc.envoy_config.clusters import EXT_PROC, METADATA_NAMESPACE, seconds
from extproc.envoy_config.options import BodyMode, EnvoyOptions, Routing

EXT_PROC_FILTER = "envoy.filters.http.ext_proc"

# What kvcar may write; the second kind belongs to its own error replies, which the same rule filters.
_WRITABLE = ("x-gateway-.*", "x-data-parallel-rank", "x-prefiller-host-port", "x-kvcar-.*")
CREDENTIALS = ("authorization", "proxy-authorization", "cookie", "set-cookie", "x-api-key", "api-key")
"""Headers of requests and answers that are not shown to kvcar."""
_REPLY_HEADERS = ("content-type", "retry-after")


def http_filters(options: EnvoyOptions) -> list[hcm.HttpFilter]:
    """kvcar's filters in their order; all before envoy.filters.http.router."""
    return [ext_proc_filter(options), *(session_filters(options) if _sessions(options) else ())]


def ext_proc_filter(options: EnvoyOptions) -> hcm.HttpFilter:
    """Off where a route does not switch it on."""
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
    for header in options.own_headers:
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
        message_timeout=seconds(options.message_timeout),
        max_message_timeout=seconds(options.max_message_timeout),
        grpc_service=core.GrpcService(
            envoy_grpc=core.GrpcServiceEnvoyGrpc(cluster_name=EXT_PROC),
            retry_policy=core.RetryPolicy(
                retry_on="unavailable,connect-failure,refused-stream,reset",
                num_retries=1,
                # Envoy's default waits up to 1 s: measured at requests that meet a kvcar which has just gone
                retry_back_off=core.BackoffStrategy(base_interval=seconds(0.005), max_interval=seconds(0.05)),
            ),
        ),
        processing_mode=mode,
        response_attributes=["upstream.address", "response.code", "response.flags"],
        metadata_options=ext_proc.MetadataOptions(
            receiving_namespaces=namespaces(untyped=[METADATA_NAMESPACE, "kvcar"]),
            forwarding_namespaces=namespaces(untyped=[METADATA_NAMESPACE, "envoy.lb.subset_hint"]),
        ),
        forward_rules=ext_proc.HeaderForwardingRules(
            disallowed_headers=matcher.ListStringMatcher(
                patterns=[matcher.StringMatcher(exact=name) for name in CREDENTIALS]
            )
        ),
        mutation_rules=mutation_rules.HeaderMutationRules(
            disallow_all=True, allow_expression=matcher.RegexMatcher(regex="|".join((*writable, *_REPLY_HEADERS)))
        ),
    )
    if options.routing is Routing.ORIGINAL_DST:
        # The route depends on the decision; Envoy itself is told to look again, so that kvcar need not know.
        config.route_cache_action = ext_proc.ExternalProcessorRouteCacheAction.CLEAR
    return hcm.HttpFilter(name=EXT_PROC_FILTER, disabled=True, typed_config=Packed.pack(config))


def _sessions(options: EnvoyOptions) -> bool:
    return options.routing is Routing.STATEFUL_SESSION


def session_filters(options: EnvoyOptions) -> list[hcm.HttpFilter]:
    """stateful_session reads the chosen host from a header, and writes the host that served into the response when it
    is another one. The response passes the filters in reverse: the one before takes the address out again."""
    remove = mutation_rules.HeaderMutation(remove=options.session_header)
    clean = header_mutation.HeaderMutation(mutations=header_mutation.Mutations(response_mutations=[remove]))
    state = core.TypedExtensionConfig(
        name="envoy.http.stateful_session.header",
        typed_config=Packed.pack(session_header.HeaderBasedSessionState(name=options.session_header)),
    )
    return [
        _filter("envoy.filters.http.header_mutation", clean),
        _filter("envoy.filters.http.stateful_session", stateful_session.StatefulSession(session_state=state)),
    ]


def _filter(name: str, config: Message) -> hcm.HttpFilter:
    return hcm.HttpFilter(name=name, typed_config=Packed.pack(config))


def early_header_mutation(options: EnvoyOptions) -> core.TypedExtensionConfig:
    """Removes the routing headers from client requests before any filter or route reads them."""
    headers = dict.fromkeys((options.destination_header, *options.stripped_headers, *options.own_headers))
    config = early_mutation.HeaderMutation(mutations=[mutation_rules.HeaderMutation(remove=name) for name in headers])
    return core.TypedExtensionConfig(
        name="envoy.http.early_header_mutation.header_mutation", typed_config=Packed.pack(config)
    )
