"""The clusters: engines, and kvcar itself."""

from __future__ import annotations

from datetime import timedelta

from betterproto2 import Message
from envoy_data_plane.envoy.config.cluster import v3 as cluster
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.config.endpoint import v3 as endpoint
from envoy_data_plane.envoy.extensions.load_balancing_policies.least_request import v3 as least_request
from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host import v3 as override_host
from envoy_data_plane.envoy.extensions.transport_sockets.tls import v3 as tls
from envoy_data_plane.envoy.extensions.upstreams.http import v3 as upstream_http
from envoy_data_plane.envoy.type.matcher import v3 as matcher
from envoy_data_plane.envoy.type.metadata import v3 as metadata
from envoy_data_plane.envoy.type.v3 import CodecClientType, Percent
from envoy_data_plane.google.protobuf import Any as Packed

from extproc.envoy_config.options import DESTINATION, ClientTls, EnvoyOptions, Http, Routing, is_ip, split_address

METADATA_NAMESPACE = "envoy.lb"
SERVED = "x-gateway-destination-endpoint-served"
EXT_PROC_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"

ENGINES = "engines"
DIRECT = "engines_direct"
EXT_PROC = "extproc"

_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"


def seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


def address(text: str) -> core.Address:
    host, port = split_address(text)
    return core.Address(socket_address=core.SocketAddress(address=host, port_value=port))


def destination_key(name: str = DESTINATION) -> metadata.MetadataKey:
    """Where kvcar's decision stands in the request's metadata, which no client can write."""
    return metadata.MetadataKey(key=METADATA_NAMESPACE, path=[metadata.MetadataKeyPathSegment(key=name)])


def clusters(options: EnvoyOptions) -> list[cluster.Cluster]:
    """All of a configuration."""
    direct = [direct_cluster(options)] if options.routing is Routing.ORIGINAL_DST else []
    return [engines_cluster(options), *direct, ext_proc_cluster(options)]


def engines_cluster(options: EnvoyOptions) -> cluster.Cluster:
    """The pool's members. With override_host the policy obeys kvcar's metadata; LEAST_REQUEST serves what it did not
    decide, and is the whole policy where something else obeys."""
    http2 = options.engine_protocol is Http.HTTP2
    check = core.HealthCheckHttpHealthCheck(path=options.engine_health_path)
    if http2:
        check.codec_client_type = CodecClientType.HTTP2
    result = cluster.Cluster(
        name=ENGINES,
        connect_timeout=seconds(0.5),
        circuit_breakers=_breakers(options.max_requests, max_retries=100),
        health_checks=[_health_check(2, http=check)],
        typed_extension_protocol_options=_http2(core.Http2ProtocolOptions()) if http2 else {},
    )
    fallback = least_request.LeastRequest()
    if options.routing is Routing.OVERRIDE_HOST:
        policy = override_host.OverrideHost(
            override_host_sources=[override_host.OverrideHostOverrideHostSource(metadata=destination_key())],
            selected_host_key=destination_key(SERVED),
            fallback_policy=_policy("least_request", fallback),
        )
        result.load_balancing_policy = _policy("override_host", policy)
    else:
        result.load_balancing_policy = _policy("least_request", fallback)
    if options.engines_file is None:
        if not options.engines:
            raise ValueError(
                "engines: the pool has no instances with an address, so where does Envoy find its engines? Give the "
                "pool instances or an endpoints_file, or name the file (--engines-file)"
            )
        result.type = _discovery(options.engines)
        result.load_assignment = _assignment(ENGINES, options.engines)
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


def direct_cluster(options: EnvoyOptions) -> cluster.Cluster:
    """ORIGINAL_DST: dials the address in kvcar's metadata. Not in a header: a header is the client's to write."""
    return cluster.Cluster(
        name=DIRECT,
        type=cluster.ClusterDiscoveryType.ORIGINAL_DST,
        connect_timeout=seconds(0.5),
        circuit_breakers=_breakers(options.max_requests, max_retries=100),
        lb_policy=cluster.ClusterLbPolicy.CLUSTER_PROVIDED,
        original_dst_lb_config=cluster.ClusterOriginalDstLbConfig(metadata_key=destination_key()),
        typed_extension_protocol_options=_http2(core.Http2ProtocolOptions())
        if options.engine_protocol is Http.HTTP2
        else {},
    )


def ext_proc_cluster(options: EnvoyOptions) -> cluster.Cluster:
    """kvcar itself: HTTP/2, its own gRPC health check, no panic routing.

    Unless told otherwise Envoy's workers may learn of a change of health a second late, with others of that second
    (update_merge_window): a kvcar that is back would wait that long besides its check. A few hosts need no merging.
    """
    result = cluster.Cluster(
        name=EXT_PROC,
        type=_discovery(options.ext_proc),
        connect_timeout=seconds(0.25),
        circuit_breakers=_breakers(options.max_requests, max_retries=100),
        common_lb_config=cluster.ClusterCommonLbConfig(
            healthy_panic_threshold=Percent(value=0), update_merge_window=seconds(0)
        ),
        health_checks=[_health_check(1, grpc=core.HealthCheckGrpcHealthCheck(service_name=EXT_PROC_SERVICE))],
        typed_extension_protocol_options=_http2(
            core.Http2ProtocolOptions(
                connection_keepalive=core.KeepaliveSettings(interval=seconds(30), timeout=seconds(5))
            )
        ),
        load_assignment=_assignment(EXT_PROC, options.ext_proc),
    )
    if options.ext_proc_tls is not None:
        result.transport_socket = _tls(options.ext_proc_tls, options.ext_proc)
    return result


def _tls(given: ClientTls, addresses: tuple[str, ...]) -> core.TransportSocket:
    """Checks kvcar's certificate: signed by the CA, and for one of the names. Without names any certificate of that CA
    would do."""
    hosts = [given.name] if given.name is not None else list(dict.fromkeys(split_address(one)[0] for one in addresses))
    kinds = tls.SubjectAltNameMatcherSanType
    names = [
        tls.SubjectAltNameMatcher(
            san_type=kinds.IP_ADDRESS if is_ip(host) else kinds.DNS,
            matcher=matcher.StringMatcher(exact=host),
        )
        for host in hosts
    ]
    own = []
    if given.cert is not None and given.key is not None:
        own = [
            tls.TlsCertificate(
                certificate_chain=core.DataSource(filename=given.cert), private_key=core.DataSource(filename=given.key)
            )
        ]
    context = tls.UpstreamTlsContext(
        sni="" if is_ip(hosts[0]) else hosts[0],
        common_tls_context=tls.CommonTlsContext(
            alpn_protocols=["h2"],
            tls_certificates=own,
            validation_context=tls.CertificateValidationContext(
                trusted_ca=core.DataSource(filename=given.ca), match_typed_subject_alt_names=names
            ),
        ),
    )
    return core.TransportSocket(name="envoy.transport_sockets.tls", typed_config=Packed.pack(context))


def _http2(options: core.Http2ProtocolOptions) -> dict[str, Packed]:
    protocol = upstream_http.HttpProtocolOptions(
        explicit_http_config=upstream_http.HttpProtocolOptionsExplicitHttpConfig(http2_protocol_options=options)
    )
    return {_HTTP_OPTIONS: Packed.pack(protocol)}


def _assignment(name: str, addresses: tuple[str, ...]) -> endpoint.ClusterLoadAssignment:
    members = [endpoint.LbEndpoint(endpoint=endpoint.Endpoint(address=address(text))) for text in addresses]
    return endpoint.ClusterLoadAssignment(
        cluster_name=name, endpoints=[endpoint.LocalityLbEndpoints(lb_endpoints=members)]
    )


def _discovery(addresses: tuple[str, ...]) -> cluster.ClusterDiscoveryType:
    static = all(is_ip(split_address(text)[0]) for text in addresses)
    return cluster.ClusterDiscoveryType.STATIC if static else cluster.ClusterDiscoveryType.STRICT_DNS


def _policy(name: str, config: Message) -> cluster.LoadBalancingPolicy:
    extension = core.TypedExtensionConfig(
        name=f"envoy.load_balancing_policies.{name}", typed_config=Packed.pack(config)
    )
    return cluster.LoadBalancingPolicy(policies=[cluster.LoadBalancingPolicyPolicy(typed_extension_config=extension)])


def _breakers(max_requests: int, *, max_retries: int) -> cluster.CircuitBreakers:
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
        timeout=seconds(1),
        interval=seconds(interval),
        no_traffic_interval=seconds(interval),
        unhealthy_threshold=2,
        healthy_threshold=1,
        http_health_check=http,
        grpc_health_check=grpc,
    )
