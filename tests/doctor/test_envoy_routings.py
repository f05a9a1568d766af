"""Ways of attaching kvcar other than the default, each as a real Envoy tells it: a healthy one is silent, and what
breaks it is found. The configurations are those of `kvcar envoy-config`, or of the shape that gateways write."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from extproc.doctor import Severity
from extproc.envoy_config import DESTINATION, SESSION_HEADER, BodyMode, Routing, options_for
from tests.doctor.test_envoy import (
    Changed,
    Json,
    all_healthy,
    cluster,
    configured,
    ext_proc,
    found_in,
    hosts,
    ids,
    listeners,
    manager,
    pages_of,
    rules,
)

pytestmark = pytest.mark.real
TYPES = "type.googleapis.com/envoy"
PICKER = {"address": "127.0.0.1:19002", "endpoint_picker": True}


@dataclass(frozen=True)
class Way:
    """kvcar's configuration, what `envoy-config` is asked for, and what a gateway does to it. `notes`: of a healthy
    one."""

    config: Json = field(default_factory=dict)
    options: Json = field(default_factory=dict)
    change: Callable[[Json], None] = lambda _: None
    pages: Callable[[Json], None] = lambda _: None
    found: frozenset[str] = frozenset()
    notes: frozenset[str] = frozenset()


def hcm(resources: Json) -> Json:
    found: Json = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def override_sources(resources: Json, *sources: Json) -> None:
    policy = resources["clusters"][0]["load_balancing_policy"]["policies"][0]["typed_extension_config"]
    policy["typed_config"]["override_host_sources"] = list(sources)


HEADER_SOURCE = {"header": DESTINATION}
METADATA_SOURCE = {"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}}


def istio(resources: Json) -> None:
    """A filter that stands idle in the listener and asks nobody; routes to an InferencePool make it ask its picker."""
    base = hcm(resources)["http_filters"][0]
    del base["disabled"]
    settings = base["typed_config"]
    asks = copy.deepcopy({key: settings[key] for key in ("grpc_service", "processing_mode")})
    settings["grpc_service"] = {"envoy_grpc": {"cluster_name": "nobody"}}
    skip = ("request_header_mode", "response_header_mode", "request_trailer_mode", "response_trailer_mode")
    settings["processing_mode"] = dict.fromkeys(skip, "SKIP")
    resources["clusters"].append({"name": "nobody", "type": "STATIC", "connect_timeout": "1s"})
    (name,) = rule = hcm(resources)["route_config"]["virtual_hosts"][0]["routes"][0]["typed_per_filter_config"]
    rule[name]["overrides"] = asks
    override_sources(resources, HEADER_SOURCE, METADATA_SOURCE)


NAME = "envoy.filters.http.ext_proc/envoyextensionpolicy/llm/kvcar/extproc/0"


def envoy_gateway(resources: Json) -> None:
    """Header source, a filter per policy that routes switch on, and metadata for the access log alone."""
    base = hcm(resources)["http_filters"][0]
    base["name"] = NAME
    base["typed_config"]["metadata_options"] = {"receiving_namespaces": {"untyped": ["kvcar"]}}
    rule = hcm(resources)["route_config"]["virtual_hosts"][0]["routes"][0]
    rule["typed_per_filter_config"] = {NAME: {"@type": f"{TYPES}.config.route.v3.FilterConfig", "config": {}}}
    override_sources(resources, HEADER_SOURCE)


def by_control_plane(pages: Json) -> None:
    """The same, delivered: routes by RDS, listener and clusters dynamic."""
    table = manager(pages).pop("route_config")
    manager(pages)["rds"] = {"route_config_name": table["name"]}
    parts = {one["@type"].rpartition(".")[2]: one for one in pages["dump"]["configs"]}
    parts["RoutesConfigDump"].update(static_route_configs=[], dynamic_route_configs=[{"route_config": table}])
    row = listeners(pages).pop("static_listeners")[0]
    listeners(pages)["dynamic_listeners"] = [{"name": "openai", "active_state": row}]
    parts["ClustersConfigDump"]["dynamic_active_clusters"] = parts["ClustersConfigDump"].pop("static_clusters")


def dials_the_header(resources: Json) -> None:
    """As charts of llm-d and earlier Envoy AI Gateways attach a picker."""
    engines = resources["clusters"][0]
    for key in ("load_balancing_policy", "load_assignment", "health_checks"):
        del engines[key]
    engines |= {
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
    }
    retry = hcm(resources)["route_config"]["virtual_hosts"][0]["routes"][0]["route"]["retry_policy"]
    del retry["retry_host_predicate"], retry["host_selection_retry_max_attempts"]


ONE = {"max_endpoints": 1}
SESSION = {"stateful_session": SESSION_HEADER}
DUPLEX = {"body_mode": BodyMode.FULL_DUPLEX}
WAYS: dict[str, Way] = {
    "original-dst": Way({"pool": ONE}, {"routing": Routing.ORIGINAL_DST}, notes=frozenset({"envoy.original_dst"})),
    "stateful-session": Way({"pool": ONE, "headers": SESSION}, {"routing": Routing.STATEFUL_SESSION}),
    "full duplex": Way({"listen": PICKER}, DUPLEX),
    "istio": Way({"listen": PICKER}, DUPLEX, istio),
    "envoy gateway": Way(change=envoy_gateway, pages=by_control_plane),
    "dials the header": Way(
        {"listen": PICKER, "pool": ONE},
        DUPLEX,
        dials_the_header,
        found=frozenset({"envoy.original_dst"}),
        notes=frozenset({"envoy.no_fallback"}),
    ),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Json]:
    """Pages of a real Envoy for each way, made when first asked for."""
    made: dict[str, Json] = {}

    def of(name: str) -> Json:
        if name not in made:
            way = WAYS[name]
            options = options_for(
                configured(**way.config), listen="127.0.0.1:0", admin="127.0.0.1:0", access_log=None, **way.options
            )
            with Changed(options, tmp_path_factory.mktemp("envoy"), way.change) as envoy:
                envoy.wait_ready()
                made[name] = all_healthy(pages_of(envoy))
        return copy.deepcopy(made[name])

    return of


@dataclass(frozen=True)
class Row:
    """One change of a healthy way. `found`, `notes`: ids beyond those of the healthy one, exactly; `gone`: ids that the
    change takes away. `errors`: which of them are errors, where that is the point."""

    way: str
    name: str
    change: Callable[[Json], object]
    found: set[str] = field(default_factory=set)
    notes: set[str] = field(default_factory=set)
    errors: set[str] | None = None
    config: Json = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)


def swap(pages: Json) -> None:
    filters = manager(pages)["http_filters"]
    filters[0], filters[2] = filters[2], filters[0]


def session(pages: Json) -> Json:
    found: Json = manager(pages)["http_filters"][2]["typed_config"]
    return found


def unstripped(*names: str) -> Callable[[Json], None]:
    """The early mutation forgets these headers."""

    def change(pages: Json) -> None:
        mutations = manager(pages)["early_header_mutation_extensions"][0]["typed_config"]["mutations"]
        mutations[:] = [one for one in mutations if one["remove"] not in names]

    return change


def overrides(pages: Json) -> Json:
    (found,) = rules(pages)[0]["typed_per_filter_config"].values()
    changed: Json = found["overrides"]
    return changed


def nothing(_: Json) -> None: ...


ROWS = [
    *(Row(way, "healthy", nothing) for way in WAYS),
    Row("original-dst", "a header instead", lambda p: cluster(p, "engines_direct").update(
        original_dst_lb_config={"use_http_header": True, "http_header_name": DESTINATION}),
        {"envoy.original_dst"}, gone={"envoy.original_dst"}),
    # the condition on metadata keeps clients out while kvcar is there, and the route is not taken while it is away
    Row("original-dst", "a header that clients may send", lambda p: (unstripped(DESTINATION)(p), cluster(
        p, "engines_direct").update(original_dst_lb_config={"use_http_header": True, "http_header_name": DESTINATION})),
        {"envoy.original_dst", "envoy.client_headers"}, errors=set(), gone={"envoy.original_dst"}),
    Row("original-dst", "another metadata key", lambda p: cluster(p, "engines_direct")["original_dst_lb_config"].update(
        metadata_key={"key": "envoy.lb", "path": [{"key": "x"}]}), {"envoy.not_obeyed"}),
    Row("original-dst", "the connection's own destination", lambda p: cluster(p, "engines_direct").pop(
        "original_dst_lb_config"), {"envoy.not_obeyed"}),
    Row("original-dst", "route not chosen again", lambda p: ext_proc(p).pop("route_cache_action"),
        {"envoy.route_cache"}, errors={"envoy.route_cache"}),
    Row("original-dst", "no route for the undecided", lambda p: (rules(p)[0]["match"].pop("dynamic_metadata"),
        rules(p).pop(1)), {"envoy.no_fallback"}),
    Row("original-dst", "a list", nothing, {"envoy.one_address"}, config={"pool": {"max_endpoints": 3}},
        errors={"envoy.one_address"}),
    Row("original-dst", "metadata not received", lambda p: ext_proc(p)["metadata_options"].pop("receiving_namespaces"),
        {"envoy.metadata"}),
    Row("original-dst", "members are not needed", lambda p: hosts(p, "engines").pop()),
    Row("original-dst", "decided route without condition", lambda p: rules(p)[0]["match"].pop("dynamic_metadata"),
        {"envoy.no_fallback"}),
    Row("stateful-session", "not set here", nothing, {"envoy.not_obeyed"}, config={"headers": {}}),
    Row("stateful-session", "another header", lambda p: session(p)["session_state"]["typed_config"].update(name="x-h"),
        {"envoy.not_obeyed", "envoy.client_headers", "envoy.session_leak"}),
    Row("stateful-session", "a cookie", lambda p: session(p).update(session_state={"typed_config": {"@type":
        f"{TYPES}.extensions.http.stateful_session.cookie.v3.CookieBasedSessionState"}}), {"envoy.not_obeyed"}),
    Row("stateful-session", "off on the route", lambda p: rules(p)[0]["typed_per_filter_config"].update(
        {"envoy.filters.http.stateful_session": {"@type": f"{TYPES}.extensions.filters.http.stateful_session.v3."
        "StatefulSessionPerRoute", "disabled": True}}), {"envoy.not_obeyed"}),
    Row("stateful-session", "filter gone", lambda p: manager(p)["http_filters"].pop(2), {"envoy.not_obeyed"}),
    Row("stateful-session", "before ext_proc", swap, {"envoy.session_order", "envoy.session_leak"},
        errors={"envoy.session_order"}),
    Row("stateful-session", "tells addresses", lambda p: manager(p)["http_filters"].pop(1), {"envoy.session_leak"}),
    Row("stateful-session", "strict", lambda p: session(p).update(strict=True), {"envoy.session_strict"}),
    Row("stateful-session", "clients may send it", unstripped(SESSION_HEADER), {"envoy.client_headers"},
        errors={"envoy.client_headers"}),
    Row("stateful-session", "kvcar may not set it", lambda p: ext_proc(p)["mutation_rules"].update(
        allow_expression={"regex": "x-gateway-.*|x-data-parallel-rank"}), {"envoy.mutation_rules"},
        errors={"envoy.mutation_rules"}),
    Row("stateful-session", "no health check", lambda p: cluster(p, "engines").pop("health_checks"),
        notes={"envoy.engines_unchecked"}),
    Row("stateful-session", "instance unknown", lambda p: hosts(p, "engines").pop(), {"envoy.unknown_instance"}),
    Row("full duplex", "no message time-out", lambda p: ext_proc(p).update(message_timeout="0.2s")),
    Row("full duplex", "no buffer", lambda p: rules(p)[0].pop("request_body_buffer_limit")),
    Row("full duplex", "fails closed", lambda p: ext_proc(p).pop("failure_mode_allow"), {"envoy.fail_closed"}),
    Row("full duplex", "no subset", lambda p: ext_proc(p)["metadata_options"]["forwarding_namespaces"].update(
        untyped=["envoy.lb"]), notes={"envoy.subset_hint"}),
    Row("istio", "asks another picker", lambda p: overrides(p)["grpc_service"]["envoy_grpc"].update(
        cluster_name="nobody"), {"envoy.processor_empty", "envoy.processor_http1", "envoy.processor_unchecked"}),
    Row("istio", "picker down", lambda p: hosts(p, "extproc")[0].update(
        health_status={"failed_active_health_check": True}), {"envoy.processor_down"}),
    Row("istio", "picker's cluster missing", lambda p: overrides(p)["grpc_service"]["envoy_grpc"].update(
        cluster_name="gone"), {"envoy.processor_missing"}),
    Row("istio", "clients may send it", unstripped(DESTINATION), {"envoy.client_headers"},
        errors={"envoy.client_headers"}),
    Row("istio", "header alone needs no metadata", lambda p: (ext_proc(p)["metadata_options"].pop(
        "receiving_namespaces"), override_in(p).pop())),
    Row("envoy gateway", "off", lambda p: rules(p)[0].pop("typed_per_filter_config"), {"envoy.filter_off"}),
    Row("envoy gateway", "clients may send it", unstripped(DESTINATION), {"envoy.client_headers"},
        errors={"envoy.client_headers"}),
    Row("envoy gateway", "another header", lambda p: override_in(p)[0].update(header="x-other"),
        {"envoy.not_obeyed", "envoy.client_headers"}),
    Row("dials the header", "clients may send it", unstripped(DESTINATION), {"envoy.client_headers"},
        errors={"envoy.client_headers"}),
    Row("dials the header", "no picker", nothing, {"envoy.no_fallback"}, gone={"envoy.no_fallback"},
        config={"listen": {"address": "127.0.0.1:19002"}}),
    Row("dials the header", "Envoy's own header", lambda p: cluster(p, "engines").update(
        original_dst_lb_config={"use_http_header": True}), {"envoy.not_obeyed", "envoy.client_headers"}),
]  # fmt: skip


def override_in(pages: Json) -> list[Json]:
    policy = cluster(pages, "engines")["load_balancing_policy"]["policies"][0]["typed_extension_config"]
    found: list[Json] = policy["typed_config"]["override_host_sources"]
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.way}: {row.name}".replace(" ", "-"))
def test_found_and_nothing_else(row: Row, pages: Callable[[str], Json]) -> None:
    way, changed = WAYS[row.way], pages(row.way)
    row.change(changed)
    way.pages(changed)
    config: dict[str, Any] = {**way.config, **row.config}
    outcomes = found_in(configured(**config), changed)
    above, noted = ids(outcomes, Severity.WARNING), ids(outcomes, Severity.NOTE)
    findings = [one for item in outcomes for one in item.findings] or [item.skipped for item in outcomes]
    expected = ((way.found - row.gone) | row.found, (way.notes - row.gone) | row.notes)
    assert (above, noted - above) == expected, findings
    if row.errors is not None:
        assert ids(outcomes, Severity.ERROR) == row.errors, findings
    for one in (one for item in outcomes for one in item.findings):
        assert one.subject
        assert one.severity < Severity.WARNING or one.remedy
