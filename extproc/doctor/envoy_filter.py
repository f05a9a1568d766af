"""Checks of Envoy's ext_proc filter: is it there, does it see the body, does Envoy take its answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from extproc.doctor.check import Check, Found, Skip
from extproc.doctor.context import Context
from extproc.doctor.envoy_choice import read_headers, reads_metadata
from extproc.doctor.envoy_view import NAMESPACE, EnvoyView, Json, Way, asked, seconds
from extproc.doctor.finding import Finding, error, note, warning

FULL_DUPLEX = "FULL_DUPLEX_STREAMED"
GENERATE = "take the filter from `kvcar envoy-config -c FILE --part filter`; envoy/README.md says why each setting"


async def reachable(context: Context) -> Found:
    view = await context.envoy_or_error()
    if isinstance(view, str):
        return Found(
            (
                error(
                    "envoy.unreachable",
                    "Envoy",
                    "Envoy's admin port does not answer, so nothing about Envoy is known",
                    cause="Envoy is not running, has no admin listener, or the address is another one",
                    evidence=(view,),
                    remedy="give --envoy-admin the address of `admin:` in Envoy's bootstrap, such as 127.0.0.1:9901",
                ),
            )
        )
    return Found(detail=f"Envoy {view.version.partition('/')[2].partition('/')[0] or view.version or '?'}")


async def filter_present(context: Context) -> Found:
    view = await context.envoy()
    if not view.filters:
        return Found(
            (
                error(
                    "envoy.no_filter",
                    f"listeners {', '.join(view.listeners) or 'none'}",
                    "no listener has an ext_proc filter: Envoy never asks kvcar, and balances as before",
                    cause="the HTTP filter was not added, or to another Envoy",
                    evidence=("no typed_config of type ExternalProcessor in /config_dump",),
                    remedy=GENERATE,
                ),
            )
        )
    return Found(
        tuple(_present(view, context)), detail=", ".join(f"{name} in {where}" for where, name, _ in view.filters)
    )


def _present(view: EnvoyView, context: Context) -> Iterator[Finding]:
    if view.ways and not view.scored:
        yield error(
            "envoy.filter_off",
            ", ".join(dict.fromkeys(way.name for way in view.ways)),
            "the ext_proc filter is switched off on every route that prompts take, so kvcar is never asked",
            cause="ExtProcPerRoute.disabled or `disabled: true` on route, virtual host or filter",
            evidence=tuple(f"{way.path} -> {way.name}" for way in view.ways[:4]),
            remedy="switch it on for these paths; `kvcar envoy-config -c FILE --part routes` shows routes that do",
        )
    for path in dict.fromkeys(way.path for way in view.ways):
        ways = [way for way in view.ways if way.path == path]
        if view.scored and not any(way.filter is not None for way in ways):
            yield warning(
                "envoy.path_off",
                ways[0].name,
                f"requests to {path} pass by kvcar: the filter is switched off on their route",
                cause="a route in front of the one with the filter takes this path",
                evidence=(f"route match {dict(ways[0].rule.get('match', {}))}",),
                remedy="let the routes with the filter come first, or widen their match",
            )
    if not view.ways:
        yield error(
            "envoy.no_route",
            f"listeners {', '.join(view.listeners)}",
            "no route takes /v1/chat/completions",
            cause="the routes match other paths, or come from a source that /config_dump does not show",
            remedy="`kvcar envoy-config -c FILE --part routes`; where clients use a prefix, configure paths.bases",
        )
    processors = view.processors()
    port = context.config.listen.address.rpartition(":")[2]
    for name in processors:
        hosts = view.hosts.get(name, ())
        if port != "0" and hosts and not any(one.address.endswith(f":{port}") for one in hosts):
            yield warning(
                "envoy.other_processor",
                f"cluster {name}",
                "the ext_proc filter asks another server than this configuration's kvcar",
                cause="listen.address and the cluster's endpoints name different ports",
                evidence=(
                    f"listen.address {context.config.listen.address}",
                    f"cluster {name}: {', '.join(one.address for one in hosts)}",
                ),
                remedy="make both the same, unless a proxy or a port mapping is between them",
            )


def each(view: EnvoyView) -> list[tuple[Way, Json]]:
    """(way, settings) of the filter as every scored way sees it, equal ones once."""
    found: dict[str, tuple[Way, Json]] = {}
    for way in view.scored:
        assert way.filter is not None
        found.setdefault(f"{way.listener} {way.filter!r}", (way, way.filter))
    if not found:
        raise Skip("no ext_proc filter runs on a way of prompts")
    return list(found.values())


def metadata(_context: Context, view: EnvoyView, way: Way, settings: Json) -> Iterator[Finding]:
    """Envoy takes metadata only of namespaces that it is told to receive."""
    received = settings.get("metadata_options", {}).get("receiving_namespaces", {}).get("untyped", [])
    alike = (one for one in view.scored if one.filter == settings)
    if NAMESPACE not in received and any(reads_metadata(view, one) for one in alike):
        yield error(
            "envoy.metadata",
            way.name,
            "Envoy drops kvcar's decision: its metadata namespace is not received, and nothing says so",
            cause=f"metadata_options.receiving_namespaces.untyped lacks {NAMESPACE}",
            evidence=(f"receiving_namespaces.untyped: {received}",),
            remedy=f"metadata_options: {{receiving_namespaces: {{untyped: [{NAMESPACE}, kvcar]}}}}",
        )


def body_mode(context: Context, _view: EnvoyView, way: Way, settings: Json) -> Iterator[Finding]:
    """Only a mode that holds the request until the answer is there can route by the body."""
    mode = settings.get("processing_mode", {})
    body, seen = mode.get("request_body_mode", "NONE"), (f"processing_mode {dict(mode)}",)
    if body == "NONE":
        yield error(
            "envoy.body_mode",
            way.name,
            "Envoy does not send request bodies, so every request passes unscored (no_body)",
            cause="processing_mode.request_body_mode is NONE, its default",
            evidence=seen,
            remedy="request_body_mode: BUFFERED",
        )
    elif body in ("STREAMED", "BUFFERED_PARTIAL"):
        yield error(
            "envoy.body_mode",
            way.name,
            f"with request_body_mode {body} decisions are lost for slow or large bodies, without an error",
            cause="STREAMED routes the request before the body is complete; BUFFERED_PARTIAL hands over a part",
            evidence=seen,
            remedy="request_body_mode: BUFFERED",
        )
    if mode.get("request_header_mode") == "SKIP":
        yield error(
            "envoy.header_mode",
            way.name,
            "Envoy does not send request headers, so kvcar cannot tell the path",
            cause="request_header_mode SKIP",
            evidence=seen,
            remedy="request_header_mode: SEND",
        )
    if mode.get("response_header_mode") == "SKIP":
        yield warning(
            "envoy.response_mode",
            way.name,
            "kvcar learns neither who served a request nor when its prefill was done: loads are wrong",
            cause="response_header_mode SKIP",
            evidence=seen,
            remedy="response_header_mode: SEND and response_trailer_mode: SEND",
        )
    if context.config.listen.observe_usage and mode.get("response_body_mode", "NONE") == "NONE":
        yield warning(
            "envoy.usage_not_seen",
            way.name,
            "listen.observe_usage is on, but Envoy does not send answers: delivered hits stay unknown",
            cause="response_body_mode NONE",
            evidence=seen,
            remedy="response_body_mode: STREAMED, or switch listen.observe_usage off",
        )


def failure_mode(_context: Context, _view: EnvoyView, way: Way, settings: Json) -> Iterator[Finding]:
    if not settings.get("failure_mode_allow"):
        yield warning(
            "envoy.fail_closed",
            way.name,
            "while kvcar is away, clients get 500 instead of an answer that is balanced without it",
            cause="failure_mode_allow is off, its default",
            evidence=("failure_mode_allow: False",),
            remedy="failure_mode_allow: true; for an InferencePool endpointPickerRef.failureMode: FailOpen. In full "
            "duplex it works once Envoy's health check has noticed that kvcar is away",
        )


def message_timeout(context: Context, _view: EnvoyView, way: Way, settings: Json) -> Iterator[Finding]:
    """Envoy's limit for one message must be above kvcar's own, or Envoy gives up on answers that are on their way. In
    full duplex it applies none."""
    own = context.config.limits.decide_timeout_ms / 1000
    given = seconds(settings.get("message_timeout"), 0.2)
    if given <= own and settings.get("processing_mode", {}).get("request_body_mode") != FULL_DUPLEX:
        default = " (Envoy's default)" if settings.get("message_timeout") is None else ""
        yield warning(
            "envoy.message_timeout",
            way.name,
            f"Envoy gives up after {given:g} s{default}, while kvcar may take {own:g} s: such requests go "
            "unrouted, or fail with 504 when failing closed",
            cause="message_timeout is not above limits.decide_timeout_ms",
            evidence=(f"message_timeout {given:g} s", f"limits.decide_timeout_ms {own * 1000:g}"),
            remedy=f"message_timeout: {max(2.0, 2 * own):g}s",
        )


def mutations(context: Context, view: EnvoyView, way: Way, settings: Json) -> Iterator[Finding]:
    """kvcar sets and removes headers; rules that do not let it are obeyed silently."""
    names = context.config.headers
    rules = settings.get("mutation_rules", {})
    written = [name for name in (names.destination, names.rank, names.stateful_session) if name]
    refused = [name for name in written if not _writable(rules, name)]
    lost = [name for name in refused if name in read_headers(view, way)]
    if refused:
        make = error if lost else warning
        yield make(
            "envoy.mutation_rules",
            way.name,
            f"Envoy refuses headers that kvcar sets: {', '.join(refused)}"
            + (f"; it chooses hosts by {', '.join(lost)}, so decisions are lost" if lost else ""),
            cause="mutation_rules do not allow these names (refusals count in rejected_header_mutations)",
            evidence=(f"mutation_rules {dict(rules)}",),
            remedy="add the names to mutation_rules.allow_expression",
        )


def _writable(rules: Json, name: str) -> bool:
    def said(key: str) -> bool:
        try:
            return re.fullmatch(rules.get(key, {}).get("regex", "(?!)"), name) is not None
        except re.error:
            return False

    if said("disallow_expression"):
        return False
    return not rules.get("disallow_all") or said("allow_expression")


async def client_headers(context: Context) -> Found:
    """A client's own copy of a routing header must not survive: with fail-open nobody else removes it."""
    view, names = await context.envoy(), context.config.headers
    found: dict[str, Finding] = {}
    for way in view.scored:
        # a decided request carries what kvcar wrote
        read = set() if way.decided else read_headers(view, way)
        kept = sorted({names.destination, names.rank, names.prefill, *read} - stripped(way))
        if not kept:
            continue
        obeyed = sorted(read & set(kept))
        make = error if obeyed else warning
        found[f"{way.listener} {kept} {obeyed}"] = make(
            "envoy.client_headers",
            f"listener {way.listener}",
            f"clients can choose the engine themselves: Envoy obeys their own {', '.join(obeyed)}"
            if obeyed
            else "while kvcar is away, clients' own routing headers reach the engines",
            cause="no early_header_mutation removes: " + ", ".join(kept),
            evidence=(f"early_header_mutation_extensions remove {sorted(stripped(way)) or 'nothing'}",),
            remedy="`kvcar envoy-config -c FILE --part listener` prints the mutation to add",
        )
    return Found(tuple(found.values()), "removed before anything reads them")


def stripped(way: Way) -> set[str]:
    """Headers removed from requests before the ext_proc filter or the load balancer reads them."""
    names: set[str] = set()
    for one in way.manager.get("early_header_mutation_extensions", ()):
        names.update(m["remove"] for m in one.get("typed_config", {}).get("mutations", ()) if "remove" in m)
    for one in way.manager.get("http_filters", ()):
        settings = one.get("typed_config", {})
        if settings.get("@type", "").endswith(".ExternalProcessor"):
            break
        for mutation in settings.get("mutations", {}).get("request_mutations", ()):
            names.add(mutation.get("remove", ""))
    return {name.lower() for name in names if name}


async def foreign(context: Context) -> Found:
    """Other ext_proc filters may set the same metadata: the last one wins."""
    view = await context.envoy()
    return Found(
        tuple(
            note(
                "envoy.other_filter",
                f"listener {listener}",
                f"another ext_proc filter runs beside kvcar's: {name} asks cluster {asked(settings) or '?'}",
                cause="two endpoint pickers would overwrite each other's decision",
                remedy="only if it also picks endpoints: keep one of the two",
            )
            for listener, name, settings in view.foreign
        )
    )


Judge = Callable[[Context, EnvoyView, Way, Json], Iterator[Finding]]


def _judged(id: str, title: str, judge: Judge) -> Check:
    """A check of the filter's settings as every scored way sees them."""

    async def run(context: Context) -> Found:
        view = await context.envoy()
        return Found(tuple(one for way, settings in each(view) for one in judge(context, view, way, settings)))

    return Check(id, "Envoy", title, ("envoy",), run)


CHECKS = (
    Check("envoy.reachable", "Envoy", "Envoy's admin port answers", ("envoy",), reachable),
    Check("envoy.filter", "Envoy", "prompts go through the ext_proc filter", ("envoy",), filter_present),
    _judged("envoy.metadata", "kvcar's metadata is received where it is needed", metadata),
    _judged("envoy.body_mode", "bodies are handed over whole", body_mode),
    _judged("envoy.failure_mode", "requests are served without kvcar", failure_mode),
    _judged("envoy.message_timeout", "message_timeout leaves kvcar its time", message_timeout),
    _judged("envoy.mutation_rules", "mutation rules let kvcar write", mutations),
    Check("envoy.client_headers", "Envoy", "clients' routing headers are removed", ("envoy",), client_headers),
    Check("envoy.other_filters", "Envoy", "no second endpoint picker", ("envoy",), foreign),
)
