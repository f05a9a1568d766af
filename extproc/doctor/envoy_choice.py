"""How Envoy turns kvcar's decision into a host, cluster by cluster, and checks of what each way of doing so needs.

    override-host     a policy of the cluster reads metadata or a header; members only, a list, a fallback
    original-dst      the cluster dials what metadata or a header names, member or not; one address, no fallback
    stateful-session  a filter reads one address in base64 from a header and pins the member; the policy is the fallback

Gateways attach the picker of an InferencePool (Gateway API Inference Extension) in the first two ways. docs/envoy.md
compares the ways; `kvcar envoy-config --routing` writes each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from extproc.config import Config
from extproc.doctor.check import Check, Found, Skip
from extproc.doctor.context import Context
from extproc.doctor.envoy_view import (
    DESTINATION,
    EXT_PROC,
    NAMESPACE,
    SESSION,
    EnvoyView,
    Json,
    Way,
    is_destination,
    typed,
)
from extproc.doctor.finding import Finding, error, note, warning

NEEDS = ("envoy",)
ORIGINAL_DST = "ORIGINAL_DST"
ORIGINAL_DST_HEADER = "x-envoy-original-dst-host"
OVERRIDE_HOST = "envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost"
HEADER_MUTATION = "envoy.extensions.filters.http.header_mutation.v3.HeaderMutation"
HEADER_SESSION = "envoy.extensions.http.stateful_session.header.v3.HeaderBasedSessionState"


class Kind(StrEnum):
    """As `kvcar envoy-config --routing` calls them; NONE: nothing there reads a decision."""

    OVERRIDE_HOST = "override-host"
    ORIGINAL_DST = "original-dst"
    STATEFUL_SESSION = "stateful-session"
    NONE = "its own policy"


@dataclass(frozen=True, slots=True)
class Choice:
    """
    metadata   kvcar's metadata is read
    headers    request headers that are read, lower case
    seen       for evidence: what is configured
    """

    kind: Kind
    metadata: bool = False
    headers: tuple[str, ...] = ()
    seen: str = ""

    def obeys(self, config: Config) -> bool:
        """Whether it reads what kvcar writes."""
        own = config.headers.stateful_session if self.kind is Kind.STATEFUL_SESSION else config.headers.destination
        return self.metadata or (own is not None and own.lower() in self.headers)


def choice(view: EnvoyView, way: Way, name: str) -> Choice:
    """How a host of this cluster is chosen for requests on this way."""
    cluster = view.clusters.get(name, {})
    if cluster.get("type") == ORIGINAL_DST:
        return _original_dst(cluster)
    if sources := override_sources(cluster):
        headers = tuple(source["header"].lower() for source in sources if source.get("header"))
        places = [source.get("metadata", {}) for source in sources]
        ours = any(is_destination(place.get("key"), place.get("path", ())) for place in places)
        return Choice(Kind.OVERRIDE_HOST, ours, headers, f"override_host_sources {sources}")
    if way.session is not None:
        state = way.session.get("session_state", {}).get("typed_config", {})
        header = str(state.get("name", "")).lower() if typed(state, HEADER_SESSION) else ""
        seen = f"stateful_session reads {f'header {header}' if header else state.get('@type', 'nothing')}"
        return Choice(Kind.STATEFUL_SESSION, headers=(header,) if header else (), seen=seen)
    return Choice(Kind.NONE, seen=f"lb_policy {cluster.get('lb_policy', 'default')}")


def _original_dst(cluster: Json) -> Choice:
    given = cluster.get("original_dst_lb_config", {})
    place = given.get("metadata_key", {})
    header = str(given.get("http_header_name") or ORIGINAL_DST_HEADER).lower() if given.get("use_http_header") else ""
    ours = is_destination(place.get("key"), place.get("path", ()))
    return Choice(
        Kind.ORIGINAL_DST, ours, (header,) if header else (), f"original_dst_lb_config {dict(given) or 'missing'}"
    )


def override_sources(cluster: Json) -> list[Json]:
    """Sources of the override_host policy, [] without one."""
    for one in cluster.get("load_balancing_policy", {}).get("policies", ()):
        settings = one.get("typed_extension_config", {}).get("typed_config", {})
        if typed(settings, OVERRIDE_HOST):
            return list(settings.get("override_host_sources", ()))
    return []


def choices(view: EnvoyView, way: Way) -> list[tuple[str, Choice]]:
    """(cluster, choice) for every cluster that exists where this way leads."""
    return [(name, choice(view, way, name)) for name in way.clusters if name in view.clusters]


def read_headers(view: EnvoyView, way: Way) -> set[str]:
    """Request headers that choose a host on this way."""
    return {header for _, one in choices(view, way) for header in one.headers}


def reads_metadata(view: EnvoyView, way: Way) -> bool:
    """Whether the decision has to arrive as metadata here: nothing that obeys makes do with a header."""
    return way.decided or any(one.metadata or one.kind is Kind.NONE for _, one in choices(view, way))


def is_fallback(view: EnvoyView, way: Way) -> bool:
    """Whether a route in front takes the requests that kvcar has decided; this one gets what is left."""
    before = view.ways[: view.ways.index(way)]
    return any(one.decided and (one.listener, one.path) == (way.listener, way.path) for one in before)


def upstreams(view: EnvoyView) -> list[str]:
    """Clusters of prompts that kvcar is asked about. Raises Skip when there is none."""
    names = view.upstreams()
    if not names:
        raise Skip("no way of prompts leads to a cluster")
    return names


def _each(view: EnvoyView) -> Iterator[tuple[Way, str, Choice]]:
    """Every cluster of every scored way, equal ones once, fallbacks left out."""
    seen = set()
    for way in view.scored:
        if is_fallback(view, way):
            continue
        for name, one in choices(view, way):
            if (way.listener, way.route, name) not in seen:
                seen.add((way.listener, way.route, name))
                yield way, name, one


# ---------------------------------------------------------------- checks


async def obeyed(context: Context) -> Found:
    """Only what reads kvcar's metadata or header turns a decision into a host."""
    view = await context.envoy()
    upstreams(view)
    found, kinds = [], []
    for _, name, one in _each(view):
        kinds.append(f"{one.kind} by {'metadata' if one.metadata else 'header'}, cluster {name}")
        if not one.obeys(context.config):
            found.append(_not_obeyed(context.config, name, one))
    return Found(tuple(found), "; ".join(dict.fromkeys(kinds)))


def _not_obeyed(config: Config, name: str, one: Choice) -> Finding:
    causes = {
        Kind.OVERRIDE_HOST: "the override_host policy reads neither kvcar's metadata nor its header",
        Kind.ORIGINAL_DST: "the ORIGINAL_DST cluster reads neither kvcar's metadata nor its header",
        Kind.STATEFUL_SESSION: "the stateful_session filter reads another header than kvcar writes "
        f"(headers.stateful_session: {config.headers.stateful_session or 'not set'})",
        Kind.NONE: "the cluster has no override_host policy, is no ORIGINAL_DST, and no stateful_session filter runs",
    }
    remedy = f"`kvcar envoy-config -c FILE --part clusters` prints the policy; source: metadata {NAMESPACE} / "
    if one.kind is Kind.STATEFUL_SESSION:
        header = one.headers[0] if one.headers else "x-kvcar-host"
        remedy = f"headers: {{stateful_session: {header}}} here, and the same name in the filter"
    else:
        remedy += DESTINATION
    return error(
        "envoy.not_obeyed",
        f"cluster {name}",
        "Envoy does not obey kvcar: it picks hosts by its own policy",
        cause=causes[one.kind],
        evidence=(one.seen,),
        remedy=remedy,
    )


async def original_dst(context: Context) -> Found:
    """What dials any address needs: a source that clients cannot write, one address, a way for the undecided."""
    view = await context.envoy()
    upstreams(view)
    found: dict[str, Finding] = {}
    for way, name, one in _each(view):
        if one.kind is Kind.ORIGINAL_DST:
            for finding in _original_dst_needs(context, way, name, one):
                found[finding.id + finding.subject] = finding
    return Found(tuple(found.values()))


def _original_dst_needs(context: Context, way: Way, name: str, one: Choice) -> Iterator[Finding]:
    where = f"cluster {name}"
    make, source = (warning, "the header") if one.headers else (note, "the metadata")
    yield make(
        "envoy.original_dst",
        where,
        f"an ORIGINAL_DST cluster dials whatever {source} names, member or not",
        cause="charts of several gateways use it; a header that is not removed early reaches any address"
        if one.headers
        else "the address comes from metadata, which no client can write; who may register instances can aim Envoy",
        evidence=(one.seen,),
        remedy="a cluster with override_host, as `kvcar envoy-config -c FILE --part clusters` prints it"
        + (f"; or metadata_key {NAMESPACE} / {DESTINATION} in place of the header" if one.headers else ""),
    )
    lists = [f"{pool.name}: {pool.max_endpoints}" for pool in context.pools if pool.max_endpoints != 1]
    if lists:
        yield error(
            "envoy.one_address",
            where,
            "an ORIGINAL_DST cluster takes one address, kvcar sends a list: every decided request gets 503",
            cause="max_endpoints is above 1",
            evidence=(f"max_endpoints of pool {', '.join(lists)}",),
            remedy="max_endpoints: 1",
        )
    if not way.decided:
        picker = context.config.listen.endpoint_picker
        make = note if picker else warning
        yield make(
            "envoy.no_fallback",
            way.name,
            "while kvcar is away every request here gets 503"
            if picker
            else "what kvcar does not decide, and every request while it is away, gets 503",
            cause="an ORIGINAL_DST cluster has no members to balance over, and no other route takes the undecided",
            evidence=(f"route to cluster {name}, without a condition on {NAMESPACE} / {DESTINATION}",),
            remedy="a second route behind one that asks for the metadata, as `kvcar envoy-config --routing "
            "original-dst` writes them"
            + ("" if picker else "; as a picker of an InferencePool: listen.endpoint_picker: true"),
        )
    elif (way.filter or {}).get("route_cache_action") != "CLEAR":
        yield error(
            "envoy.route_cache",
            way.name,
            "the route for decided requests is never taken: the route is chosen before kvcar answers",
            cause="the ext_proc filter does not have Envoy choose the route again",
            evidence=(f"route_cache_action {(way.filter or {}).get('route_cache_action', 'DEFAULT')}",),
            remedy="route_cache_action: CLEAR in the ext_proc filter",
        )


async def session(context: Context) -> Found:
    """What the stateful_session filter needs around it."""
    view = await context.envoy()
    upstreams(view)
    found: dict[str, Finding] = {}
    for way, _, one in _each(view):
        if one.kind is Kind.STATEFUL_SESSION:
            for finding in _session_needs(way, one):
                found[finding.id + finding.subject] = finding
    return Found(tuple(found.values()))


def _session_needs(way: Way, one: Choice) -> Iterator[Finding]:
    where = f"listener {way.listener}"
    filters = [item.get("typed_config", {}) for item in way.manager.get("http_filters", ())]
    pinning = next((place for place, item in enumerate(filters) if typed(item, SESSION)), len(filters))
    if not any(typed(item, EXT_PROC) for item in filters[:pinning]):
        yield error(
            "envoy.session_order",
            where,
            "the stateful_session filter reads its header before kvcar has set it",
            cause="it stands before the ext_proc filter",
            remedy="ext_proc first, then header_mutation, then stateful_session",
        )
    removed = {
        str(mutation.get("remove", "")).lower()
        for item in filters[:pinning]
        if typed(item, HEADER_MUTATION)
        for mutation in item.get("mutations", {}).get("response_mutations", ())
    }
    if not removed.issuperset(one.headers):
        yield warning(
            "envoy.session_leak",
            where,
            "clients are told engines' addresses: the filter writes the host that served into the response",
            cause="no header_mutation filter in front of it takes the header out again (a route's "
            "response_headers_to_remove comes too early)",
            evidence=(one.seen,),
            remedy="`kvcar envoy-config -c FILE --routing stateful-session --part filter` has it",
        )
    if (way.session or {}).get("strict"):
        yield warning(
            "envoy.session_strict",
            where,
            "when the chosen engine fails its health check the request gets 503 instead of another engine",
            cause="the stateful_session filter is strict",
            remedy="strict: false",
        )


async def served(context: Context) -> Found:
    """After a retry or a fallback the load belongs to the engine that answered."""
    view = await context.envoy()
    found: dict[str, Finding] = {}
    for way in view.scored:
        settings = way.filter or {}
        spaces = settings.get("metadata_options", {}).get("forwarding_namespaces", {}).get("untyped", ())
        subset = context.config.listen.endpoint_picker and f"{NAMESPACE}.subset_hint" not in spaces
        if "upstream.address" not in settings.get("response_attributes", ()) and NAMESPACE not in spaces:
            found[f"served {way.listener}"] = warning(
                "envoy.served_unknown",
                f"listener {way.listener}",
                "kvcar is not told who served: after a retry the load stays booked on the wrong engine",
                cause="the filter sends neither the attribute upstream.address nor the namespace envoy.lb",
                evidence=(f"forwarding_namespaces.untyped: {list(spaces)}",),
                remedy="response_attributes: [upstream.address], or forwarding_namespaces: "
                f"{{untyped: [{NAMESPACE}]}} where the gateway sets {DESTINATION}-served",
            )
        if subset:
            found[f"subset {way.listener}"] = note(
                "envoy.subset_hint",
                f"listener {way.listener}",
                "a gateway's subset does not reach the endpoint picker, so it picks from the whole pool",
                cause=f"forwarding_namespaces.untyped lacks {NAMESPACE}.subset_hint",
                evidence=(f"forwarding_namespaces.untyped: {list(spaces)}",),
                remedy=f"forwarding_namespaces: {{untyped: [{NAMESPACE}, {NAMESPACE}.subset_hint]}}, if it sets one",
            )
    if not view.scored:
        raise Skip("no ext_proc filter runs on a way of prompts")
    return Found(tuple(found.values()), "who served is told")


CHECKS = (
    Check("envoy.obeyed", "Envoy", "the engines' cluster obeys kvcar", NEEDS, obeyed),
    Check("envoy.original_dst", "Envoy", "what dials any address is fenced in", NEEDS, original_dst),
    Check("envoy.session", "Envoy", "the session filter is set up", NEEDS, session),
    Check("envoy.served", "Envoy", "kvcar learns who served", NEEDS, served),
)
