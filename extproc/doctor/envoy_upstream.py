"""Checks of what is behind Envoy's routes: the engines' cluster, kvcar's own cluster, limits, and the counters."""

from __future__ import annotations

from collections.abc import Iterator

from extproc.doctor.check import Check, Found, Skip
from extproc.doctor.context import Context
from extproc.doctor.engines import of
from extproc.doctor.envoy_choice import ORIGINAL_DST, is_fallback, upstreams
from extproc.doctor.envoy_view import EnvoyView, Json, Way, number, seconds
from extproc.doctor.finding import Finding, error, note, warning

DEFAULT_BUFFER = 1 << 20
"""Envoy's per_connection_buffer_limit_bytes when nobody sets it."""
SHORT_ANSWER = 300.0
"""Seconds: a route time-out below it cuts long answers, which may stream for minutes."""
NEEDS = ("envoy",)


async def endpoints(context: Context) -> Found:
    """Envoy skips a named host that it does not know, silently."""
    view = await context.envoy()
    names = [name for name in upstreams(view) if view.clusters.get(name, {}).get("type") != ORIGINAL_DST]
    if not names:
        raise Skip("an ORIGINAL_DST cluster has no members")
    # where a route in front of it dials whatever kvcar names, the members serve the undecided alone
    dialled = all(is_fallback(view, way) for way in view.scored if set(way.clusters) & set(names))
    known = {host.address: host for name in names for host in view.hosts.get(name, ())}
    found: list[Finding] = []
    configured: set[str] = set()
    for pool in context.pools:
        for one in await context.instances(pool):
            configured.add(one.address)
            if one.address not in known and not dialled:
                found.append(
                    error(
                        "envoy.unknown_instance",
                        of(pool, one),
                        f"Envoy does not know {one.address}: whenever kvcar chooses it, the choice is ignored silently",
                        cause="no cluster that prompts go to has this member; addresses are compared as ip:port",
                        evidence=(f"cluster {', '.join(names)}: {', '.join(sorted(known)) or 'no members'}",),
                        remedy="give the cluster and kvcar the same members, written as the same ip:port",
                    )
                )
            elif one.address in known and known[one.address].problems:
                found.append(
                    warning(
                        "envoy.unhealthy_instance",
                        of(pool, one),
                        f"Envoy holds {one.address} for unhealthy; kvcar's choice of it is obeyed all the same",
                        cause="its health check fails, or outlier detection has ejected it",
                        evidence=(", ".join(known[one.address].problems),),
                        remedy="look at the engine, and at the health check's path",
                    )
                )
    strangers = sorted(known.keys() - configured)
    if strangers and context.options.pool is None:
        found.append(
            warning(
                "envoy.unknown_member",
                f"cluster {', '.join(names)}",
                f"Envoy has members that kvcar never chooses: {', '.join(strangers[:8])}",
                cause="they are not among the instances of any pool; only requests without a decision reach them",
                evidence=(f"{len(strangers)} of {len(known)} members",),
                remedy="add them to a pool's instances, or take them out of the cluster",
            )
        )
    return Found(tuple(found), f"{len(configured)} instances are members")


async def processor(context: Context) -> Found:
    """kvcar's own cluster: HTTP/2, health-checked, healthy."""
    view = await context.envoy()
    found: list[Finding] = []
    names = view.processors()
    if not names:
        raise Skip("no ext_proc filter")
    for name in names:
        found.extend(_processor(view, name))
    return Found(tuple(found), f"cluster {', '.join(names)}")


def _processor(view: EnvoyView, name: str) -> Iterator[Finding]:
    cluster, hosts = view.clusters.get(name), view.hosts.get(name, ())
    where = f"cluster {name}"
    if cluster is None:
        yield error(
            "envoy.processor_missing",
            where,
            "the ext_proc filter asks a cluster that does not exist",
            cause="grpc_service.envoy_grpc.cluster_name names no cluster of /config_dump",
            evidence=(f"clusters: {', '.join(sorted(view.clusters))}",),
            remedy="`kvcar envoy-config -c FILE --part clusters` prints it",
        )
        return
    if not _http2(cluster):
        yield error(
            "envoy.processor_http1",
            where,
            "Envoy speaks HTTP/1 to kvcar, which is a gRPC server: every call fails",
            cause="the cluster has no http2_protocol_options",
            remedy="typed_extension_protocol_options with explicit_http_config: {http2_protocol_options: {}}",
        )
    if hosts and all(one.problems for one in hosts):
        yield error(
            "envoy.processor_down",
            where,
            "Envoy holds kvcar for unhealthy, so it does not ask it",
            cause="kvcar is not running, still loading, draining, not reachable, or only one of the two speaks TLS",
            evidence=tuple(f"{one.address}: {', '.join(one.problems)}" for one in hosts[:4]),
            remedy="look at kvcar's /readyz, and at listen.address as seen from Envoy's host",
        )
    if not hosts:
        yield error(
            "envoy.processor_empty",
            where,
            "kvcar's cluster has no members",
            cause="its name cannot be resolved, or its discovery brought nothing",
            remedy="name kvcar's ip:port in the cluster",
        )
    if not cluster.get("health_checks"):
        yield warning(
            "envoy.processor_unchecked",
            where,
            "nothing tells Envoy that kvcar hangs or drains: such requests wait for message_timeout, each",
            cause="the cluster has no health_checks",
            remedy="health_checks with grpc_health_check {service_name: envoy.service.ext_proc.v3.ExternalProcessor}",
        )


def _http2(cluster: Json) -> bool:
    if "http2_protocol_options" in cluster:
        return True
    options = cluster.get("typed_extension_protocol_options", {})
    http = options.get("envoy.extensions.upstreams.http.v3.HttpProtocolOptions", {})
    return "http2_protocol_options" in http.get("explicit_http_config", {}) or "auto_config" in http


async def health_checks(context: Context) -> Found:
    view = await context.envoy()
    return Found(
        tuple(
            note(
                "envoy.engines_unchecked",
                f"cluster {name}",
                "requests without a decision may be balanced to an engine that is down",
                cause="the cluster has neither health_checks nor outlier_detection",
                remedy="health_checks with http_health_check {path: /health}",
            )
            for name in upstreams(view)
            if (cluster := view.clusters.get(name)) is not None
            and not cluster.get("health_checks")
            and not cluster.get("outlier_detection")
            and cluster.get("type") != ORIGINAL_DST
        )
    )


async def body_limit(context: Context) -> Found:
    """What Envoy buffers per request against what kvcar reads."""
    view, wanted = await context.envoy(), context.config.limits.max_body_bytes
    found: dict[str, Finding] = {}
    least = None
    for way in view.scored:
        if (way.filter or {}).get("processing_mode", {}).get("request_body_mode") == "FULL_DUPLEX_STREAMED":
            continue
        limit, source = buffer_limit(way)
        least = limit if least is None else min(least, limit)
        if limit < wanted:
            found[f"{way.listener} {way.route}"] = warning(
                "envoy.body_limit",
                way.name,
                f"clients get 413 for bodies over {_bytes(limit)}, though kvcar reads up to {_bytes(wanted)}",
                cause=f"the buffer limit is that of {source}",
                evidence=(f"{source}: {limit}", f"limits.max_body_bytes: {wanted}"),
                remedy=f"request_body_buffer_limit: {wanted} on the route, or a smaller limits.max_body_bytes",
            )
    if least is None:
        raise Skip("no way of prompts buffers bodies")
    return Found(tuple(found.values()), _bytes(least))


def buffer_limit(way: Way) -> tuple[int, str]:
    """Bytes that Envoy buffers of a request on this way, and where that is set."""
    for holder, name in ((way.rule, "the route"), (way.host, "the virtual host")):
        value = holder.get("request_body_buffer_limit", holder.get("per_request_buffer_limit_bytes"))
        if value is not None:
            return number(value, DEFAULT_BUFFER), f"request_body_buffer_limit of {name}"
    value = way.socket.get("per_connection_buffer_limit_bytes")
    source = "per_connection_buffer_limit_bytes of the listener"
    return number(value, DEFAULT_BUFFER), source if value is not None else f"{source} (Envoy's default)"


def _bytes(count: int) -> str:
    return f"{count / (1 << 20):.4g} MiB" if count >= 1 << 20 else f"{count / 1024:.4g} KiB"


async def routes(context: Context) -> Found:
    """Time-outs that cut answers, and the retries that walk down kvcar's list."""
    view = await context.envoy()
    found: dict[str, Finding] = {}
    for way in view.scored:
        action = way.rule.get("route", {})
        limit = seconds(action.get("timeout"), 15.0)
        if 0 < limit < SHORT_ANSWER:
            default = " (Envoy's default)" if action.get("timeout") is None else ""
            found[f"timeout {way.route}"] = warning(
                "envoy.route_timeout",
                way.name,
                f"answers that take longer than {limit:g} s{default} are cut",
                cause="the route's timeout counts to the end of the answer, and streamed answers are long",
                evidence=(f"timeout {limit:g} s",),
                remedy="timeout: 0s on the route, and stream_idle_timeout above the longest prefill",
            )
        policy = action.get("retry_policy") or way.host.get("retry_policy") or {}
        on = str(policy.get("retry_on", ""))
        several = any(pool.max_endpoints > 1 for pool in context.pools)
        if several and not any(word in on for word in ("connect-failure", "5xx", "gateway-error", "reset")):
            found[f"retry {way.route}"] = warning(
                "envoy.no_retries",
                way.name,
                "when the chosen engine is down the request fails: kvcar's second and third choice are never tried",
                cause="the route has no retry_policy for failed connections",
                evidence=(f"retry_on: {on!r}",),
                remedy="retry_policy: {retry_on: 'connect-failure,refused-stream', num_retries: 2}",
            )
    if not view.scored:
        raise Skip("no ext_proc filter runs on a way of prompts")
    return Found(tuple(found.values()), "long answers are not cut; failed connections go to the next choice")


async def counters(context: Context) -> Found:
    """What Envoy has counted since its start: rates, not single events, are findings."""
    stats = (await context.envoy()).stats
    sums: dict[str, int] = {}
    for name, value in stats.items():
        if ".ext_proc." in name:
            key = name.rpartition(".")[2]
            sums[key] = sums.get(key, 0) + value
    started = sums.get("streams_started", 0)
    found = [one for one in (_rate(name, sums.get(name, 0), started) for name in RATES) if one is not None]
    full = {name: value for name, value in stats.items() if name.endswith("_overflow") and value}
    if full:
        found.append(
            warning(
                "envoy.overflow",
                ", ".join(sorted({name.split(".")[1] for name in full})),
                "a circuit breaker refused requests",
                cause="the default of 1024 requests in flight is small for held streams",
                evidence=tuple(f"{name} {value}" for name, value in sorted(full.items())[:4]),
                remedy="raise circuit_breakers of the cluster, as `kvcar envoy-config` does",
            )
        )
    return Found(tuple(found), f"{started} requests asked about")


RATES: dict[str, tuple[str, str, str]] = {
    "streams_failed": (
        "Envoy's calls to kvcar fail",
        "kvcar is down, unreachable, speaks TLS where Envoy does not, or was restarted",
        "look at kvcar's log and at the health of its cluster",
    ),
    "message_timeouts": (
        "kvcar answers too late for Envoy",
        "tokenization takes longer than message_timeout, or the machine is overloaded",
        "raise message_timeout above limits.decide_timeout_ms; look at kvcar_decision_seconds",
    ),
    "failure_mode_allowed": (
        "requests passed without kvcar because it failed",
        "kvcar was down or too slow",
        "look at kvcar's log, at streams_failed and message_timeouts",
    ),
    "rejected_header_mutations": (
        "Envoy refused headers that kvcar set",
        "mutation_rules do not allow them",
        "add the names to mutation_rules.allow_expression",
    ),
}
ENOUGH, SHARE = 5, 0.01
"""A warning: at least so many, and more than this share of the requests. Fewer are a restart or two: a note."""


def _rate(name: str, count: int, started: int) -> Finding | None:
    if not count:
        return None
    what, cause, remedy = RATES[name]
    make = warning if count >= ENOUGH and count > SHARE * max(started, 1) else note
    # a stream that could not be opened is failed and not started
    evidence = (f"{name} {count} of {max(started, count)} streams since Envoy's start, however long ago",)
    return make("envoy.stats." + name, "ext_proc filter", what, cause=cause, evidence=evidence, remedy=remedy)


CHECKS = (
    Check("envoy.endpoints", "Envoy", "cluster members and instances are the same", NEEDS, endpoints),
    Check("envoy.processor", "Envoy", "Envoy reaches kvcar", NEEDS, processor),
    Check("envoy.health_checks", "Envoy", "engines are health-checked", NEEDS, health_checks),
    Check("envoy.body_limit", "Envoy", "body limits fit", NEEDS, body_limit),
    Check("envoy.routes", "Envoy", "time-outs and retries fit", NEEDS, routes),
    Check("envoy.stats", "Envoy", "Envoy's counters show no failures", NEEDS, counters),
)
