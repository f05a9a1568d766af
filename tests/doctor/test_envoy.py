"""Broken Envoys: what a real Envoy says of itself, changed in one place, and real ones that are wrong in many."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.local.processes import EnvoyProcess, free_port, http_get
from extproc.config import Config, parse
from extproc.doctor import DoctorOptions, Severity
from extproc.doctor.context import Context
from extproc.doctor.envoy_choice import CHECKS as CHOICE
from extproc.doctor.envoy_filter import CHECKS as FILTER
from extproc.doctor.envoy_upstream import CHECKS as UPSTREAM
from extproc.doctor.envoy_view import STATS, EnvoyView, matches, view_of
from extproc.doctor.finding import Outcome
from extproc.doctor.runner import run_check
from extproc.envoy_config import EnvoyOptions, options_for

pytestmark = pytest.mark.real
ENGINES = ("127.0.0.1:18001", "127.0.0.1:18002")
Json = dict[str, Any]


def configured(*, pool: Json | None = None, **more: Any) -> Config:
    instances = [{"name": f"e{number}", "address": address} for number, address in enumerate(ENGINES)]
    pool = {"name": "p", "models": ["m"], "tokenizer": "/models/m", "instances": instances, **(pool or {})}
    return parse(yaml.safe_dump({"listen": {"address": "127.0.0.1:19002"}, "pools": [pool], **more}))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Json:
    """The four pages of a healthy Envoy. Its peers are not there; the pages are made to say that they are."""
    folder = tmp_path_factory.mktemp("envoy")
    options = options_for(configured(), listen="127.0.0.1:0", admin="127.0.0.1:0", access_log=None)
    with EnvoyProcess(options, folder) as envoy:
        envoy.wait_ready()
        return all_healthy(pages_of(envoy))


def all_healthy(pages: Json) -> Json:
    """The pages, and the peers are there."""
    for row in pages["clusters"]["cluster_statuses"]:
        for host in row.get("host_statuses", ()):
            host["health_status"] = {"eds_health_status": "HEALTHY"}
    return pages


def pages_of(envoy: EnvoyProcess) -> Json:
    paths = {
        "dump": "/config_dump?include_eds",
        "clusters": "/clusters?format=json",
        "stats": f"/stats?format=json&filter={STATS}",
        "info": "/server_info",
    }
    return {name: json.loads(http_get(f"http://{envoy.admin}{path}")[1]) for name, path in paths.items()}


class Looked(Context):
    """A context whose Envoy is these pages."""

    def __init__(self, config: Config, pages: Json) -> None:
        super().__init__(config, DoctorOptions(envoy_admin="http://envoy"))
        self._view = view_of(pages["dump"], pages["clusters"], pages["stats"], pages["info"], config)

    async def envoy_or_error(self) -> EnvoyView | str:
        return self._view


def found_in(config: Config, pages: Json) -> list[Outcome]:
    async def look() -> list[Outcome]:
        context = Looked(config, pages)
        try:
            return [await run_check(check, context) for check in (*FILTER, *CHOICE, *UPSTREAM)]
        finally:
            await context.close()

    return asyncio.run(look())


def ids(outcomes: list[Outcome], least: Severity) -> set[str]:
    return {one.id for item in outcomes for one in item.findings if one.severity >= least}


# ---------------------------------------------------------------- changes of one place


def listeners(pages: Json) -> Json:
    found: Json = next(one for one in pages["dump"]["configs"] if one["@type"].endswith(".ListenersConfigDump"))
    return found


def socket(pages: Json) -> Json:
    found: Json = listeners(pages)["static_listeners"][0]["listener"]
    return found


def manager(pages: Json) -> Json:
    found: Json = socket(pages)["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def ext_proc(pages: Json) -> Json:
    found: Json = manager(pages)["http_filters"][0]["typed_config"]
    return found


def rules(pages: Json) -> list[Json]:
    found: list[Json] = manager(pages)["route_config"]["virtual_hosts"][0]["routes"]
    return found


def cluster(pages: Json, name: str) -> Json:
    part = next(one for one in pages["dump"]["configs"] if one["@type"].endswith(".ClustersConfigDump"))
    found: Json = next(one["cluster"] for one in part["static_clusters"] if one["cluster"]["name"] == name)
    return found


def hosts(pages: Json, name: str) -> list[Json]:
    rows = pages["clusters"]["cluster_statuses"]
    found: list[Json] = next(row for row in rows if row["name"] == name)["host_statuses"]
    return found


def counted(pages: Json, **values: int) -> None:
    for row in pages["stats"]["stats"]:
        for name, value in values.items():
            if row["name"].endswith(f".ext_proc.kvcar.{name}"):
                row["value"] = value


def off(pages: Json, *, route: int = 0) -> None:
    settings = {"@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"}
    rules(pages)[route]["typed_per_filter_config"] = {"envoy.filters.http.ext_proc": {**settings, "disabled": True}}


def override(pages: Json, **overrides: Any) -> None:
    settings = {"@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"}
    rules(pages)[0]["typed_per_filter_config"] = {"envoy.filters.http.ext_proc": {**settings, "overrides": overrides}}


def header_source(pages: Json) -> None:
    policy = cluster(pages, "engines")["load_balancing_policy"]["policies"][0]["typed_extension_config"]
    policy["typed_config"]["override_host_sources"] = [{"header": "x-gateway-destination-endpoint"}]
    manager(pages).pop("early_header_mutation_extensions")


def through_rds(pages: Json) -> None:
    """The same routes, as a control plane delivers them."""
    table = manager(pages).pop("route_config")
    manager(pages)["rds"] = {"route_config_name": table["name"]}
    dump = pages["dump"]["configs"]
    part = next(one for one in dump if one["@type"].endswith(".RoutesConfigDump"))
    part["dynamic_route_configs"] = [{"route_config": table}]
    part.pop("static_route_configs", None)
    table["virtual_hosts"][0]["routes"][0]["route"].pop("timeout")
    row = listeners(pages).pop("static_listeners")[0]
    listeners(pages)["dynamic_listeners"] = [{"name": "openai", "active_state": row}]


def second(pages: Json) -> None:
    """Another endpoint picker beside kvcar's filter."""
    other = copy.deepcopy(manager(pages)["http_filters"][0])
    other["name"] = "other"
    other["typed_config"]["grpc_service"]["envoy_grpc"]["cluster_name"] = "elsewhere"
    manager(pages)["http_filters"].insert(1, other)


@dataclass
class Row:
    """One change. `found`: ids above a note, exactly; `notes`: ids among the notes, exactly."""

    name: str
    change: Callable[[Json], object]
    found: set[str] = field(default_factory=set)
    notes: set[str] = field(default_factory=set)
    config: Json = field(default_factory=dict)


def nothing(_pages: Json) -> None:
    pass


ROWS = [
    Row("healthy", nothing),
    Row("no filter", lambda p: manager(p)["http_filters"].pop(0), {"envoy.no_filter"}),
    Row("off on the route", off, {"envoy.filter_off"}),
    Row("off for one path", lambda p: rules(p)[0]["match"].update(safe_regex={"regex": "/v1/chat/completions"}),
        {"envoy.path_off"}),
    Row("no route", lambda p: rules(p).clear(), {"envoy.no_route"}),
    Row("other processor", lambda p: [h["address"]["socket_address"].update(port_value=1) for h in hosts(p, "extproc")],
        {"envoy.other_processor"}),
    Row("no metadata", lambda p: ext_proc(p).pop("metadata_options"), {"envoy.metadata"}),
    Row("other metadata", lambda p: ext_proc(p)["metadata_options"]["receiving_namespaces"].update(untyped=["kvcar"]),
        {"envoy.metadata"}),
    Row("route overrides metadata", lambda p: override(p, metadata_options={}), {"envoy.metadata"}),
    Row("no body", lambda p: ext_proc(p)["processing_mode"].pop("request_body_mode"), {"envoy.body_mode"}),
    Row("streamed", lambda p: ext_proc(p)["processing_mode"].update(request_body_mode="STREAMED"), {"envoy.body_mode"}),
    Row("partial", lambda p: ext_proc(p)["processing_mode"].update(request_body_mode="BUFFERED_PARTIAL"),
        {"envoy.body_mode"}),
    Row("full duplex", lambda p: ext_proc(p)["processing_mode"].update(request_body_mode="FULL_DUPLEX_STREAMED")),
    Row("no headers", lambda p: ext_proc(p)["processing_mode"].update(request_header_mode="SKIP"),
        {"envoy.header_mode"}),
    Row("no response", lambda p: ext_proc(p)["processing_mode"].update(response_header_mode="SKIP"),
        {"envoy.response_mode"}),
    Row("usage not seen", nothing, {"envoy.usage_not_seen"}, config={"listen": {"address": "127.0.0.1:19002",
        "observe_usage": True}}),
    Row("fail closed", lambda p: ext_proc(p).pop("failure_mode_allow"), {"envoy.fail_closed"}),
    Row("default time-out", lambda p: ext_proc(p).pop("message_timeout"), {"envoy.message_timeout"}),
    Row("kvcar takes longer", nothing, {"envoy.message_timeout"}, config={"limits": {"decide_timeout_ms": 5000}}),
    Row("no mutations", lambda p: ext_proc(p)["mutation_rules"].pop("allow_expression"), {"envoy.mutation_rules"}),
    Row("default mutations", lambda p: ext_proc(p).pop("mutation_rules")),
    Row("spoofable", lambda p: manager(p).pop("early_header_mutation_extensions"), {"envoy.client_headers"}),
    Row("renamed header", nothing, {"envoy.client_headers", "envoy.mutation_rules"},
        config={"headers": {"rank": "x-r"}}),
    Row("header source", header_source, {"envoy.client_headers"}),
    Row("second picker", second, notes={"envoy.other_filter"}),
    Row("no override_host", lambda p: cluster(p, "engines").pop("load_balancing_policy"), {"envoy.not_obeyed"}),
    Row("other metadata key", lambda p: cluster(p, "engines")["load_balancing_policy"]["policies"][0][
        "typed_extension_config"]["typed_config"]["override_host_sources"][0]["metadata"].update(key="lb"),
        {"envoy.not_obeyed"}),
    Row("original destination of nothing", lambda p: cluster(p, "engines").update(type="ORIGINAL_DST"),
        {"envoy.not_obeyed", "envoy.one_address", "envoy.no_fallback"}, {"envoy.original_dst"}),
    Row("who served is not told", lambda p: (ext_proc(p).pop("response_attributes"), ext_proc(p)["metadata_options"]
        .pop("forwarding_namespaces")), {"envoy.served_unknown"}),
    Row("instance unknown", lambda p: hosts(p, "engines").pop(), {"envoy.unknown_instance"}),
    Row("member unknown", lambda p: hosts(p, "engines").append({"address": {"socket_address": {"address": "127.0.0.1",
        "port_value": 3}}}), {"envoy.unknown_member"}),
    Row("member down", lambda p: hosts(p, "engines")[0].update(health_status={"failed_active_health_check": True}),
        {"envoy.unhealthy_instance"}),
    Row("no cluster", lambda p: ext_proc(p)["grpc_service"]["envoy_grpc"].update(cluster_name="none"),
        {"envoy.processor_missing"}),
    Row("HTTP/1", lambda p: cluster(p, "extproc").pop("typed_extension_protocol_options"), {"envoy.processor_http1"}),
    Row("kvcar down", lambda p: hosts(p, "extproc")[0].update(health_status={"failed_active_health_check": True}),
        {"envoy.processor_down"}),
    Row("kvcar nowhere", lambda p: hosts(p, "extproc").clear(), {"envoy.processor_empty"}),
    Row("kvcar unchecked", lambda p: cluster(p, "extproc").pop("health_checks"), {"envoy.processor_unchecked"}),
    Row("engines unchecked", lambda p: cluster(p, "engines").pop("health_checks"), notes={"envoy.engines_unchecked"}),
    Row("default buffer", lambda p: rules(p)[0].pop("request_body_buffer_limit"), {"envoy.body_limit"}),
    Row("listener's buffer", lambda p: (rules(p)[0].pop("request_body_buffer_limit"),
        socket(p).update(per_connection_buffer_limit_bytes=1 << 26))),
    Row("larger bodies here", nothing, {"envoy.body_limit"}, config={"limits": {"max_body_bytes": 1 << 27}}),
    Row("route time-out", lambda p: rules(p)[0]["route"].update(timeout="30s"), {"envoy.route_timeout"}),
    Row("no retries", lambda p: rules(p)[0]["route"].pop("retry_policy"), {"envoy.no_retries"}),
    Row("by a control plane", through_rds, {"envoy.route_timeout"}),
    Row("a few failures", lambda p: counted(p, streams_started=100, streams_failed=2),
        notes={"envoy.stats.streams_failed"}),
    Row("many failures", lambda p: counted(p, streams_started=100, streams_failed=50, message_timeouts=50,
        failure_mode_allowed=50, rejected_header_mutations=50), {"envoy.stats.streams_failed",
        "envoy.stats.message_timeouts", "envoy.stats.failure_mode_allowed", "envoy.stats.rejected_header_mutations"}),
    Row("rare failures", lambda p: counted(p, streams_started=100_000, message_timeouts=50),
        notes={"envoy.stats.message_timeouts"}),
    Row("overflow", lambda p: p["stats"]["stats"].append({"name": "cluster.engines.upstream_rq_pending_overflow",
        "value": 3}), {"envoy.overflow"}),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name.replace(" ", "-"))
def test_found_and_nothing_else(row: Row, pages: Json) -> None:
    changed = copy.deepcopy(pages)
    row.change(changed)
    outcomes = found_in(configured(**row.config), changed)
    above, noted = ids(outcomes, Severity.WARNING), ids(outcomes, Severity.NOTE)
    findings = [one for item in outcomes for one in item.findings] or [item.skipped for item in outcomes]
    assert (above, noted - above) == (row.found, row.notes), findings
    for one in (one for item in outcomes for one in item.findings):
        assert one.subject
        assert one.severity < Severity.WARNING or one.remedy


def test_a_spoofable_header_source_is_an_error(pages: Json) -> None:
    changed = copy.deepcopy(pages)
    header_source(changed)
    outcomes = found_in(configured(), changed)
    assert ids(outcomes, Severity.ERROR) == {"envoy.client_headers"}


@pytest.mark.parametrize(
    ("match", "path", "taken"),
    [
        ({"prefix": "/v1"}, "/v1/chat", True),
        ({"prefix": "/v2"}, "/v1/chat", False),
        ({"path": "/v1/chat"}, "/v1/chat", True),
        ({"path": "/v1"}, "/v1/chat", False),
        ({"path_separated_prefix": "/v1"}, "/v1/chat", True),
        ({"path_separated_prefix": "/v"}, "/v1/chat", False),
        ({"safe_regex": {"regex": "/v[0-9]/.*"}}, "/v1/chat", True),
        ({"safe_regex": {"regex": "/v1"}}, "/v1/chat", False),
        ({"safe_regex": {"regex": "("}}, "/v1/chat", False),
        ({"connect_matcher": {}}, "/v1/chat", False),
    ],
)
def test_matches(match: Json, path: str, taken: bool) -> None:
    assert matches(match, path) is taken


# ---------------------------------------------------------------- real ones


class Changed(EnvoyProcess):
    """An Envoy whose configuration is changed before it starts."""

    def __init__(self, options: EnvoyOptions, folder: Path, change: Callable[[Json], None]) -> None:
        super().__init__(options, folder)
        config = yaml.safe_load(self.config_path.read_text("utf-8"))
        change(config["static_resources"])
        self.config_path.write_text(yaml.safe_dump(config), "utf-8")


def spoil(resources: Json) -> None:
    """As somebody writes it who has read nothing but the API reference."""
    hcm = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    hcm.pop("early_header_mutation_extensions")
    settings = hcm["http_filters"][0]["typed_config"]
    for key in ("metadata_options", "failure_mode_allow", "message_timeout", "max_message_timeout"):
        settings.pop(key)
    settings["processing_mode"] = {"request_body_mode": "STREAMED"}
    settings["mutation_rules"].pop("allow_expression")
    (rule,) = hcm["route_config"]["virtual_hosts"][0]["routes"][:1]
    rule.pop("request_body_buffer_limit")
    rule["route"] = {"cluster": "engines"}
    engines, kvcar = resources["clusters"]
    engines.pop("load_balancing_policy")
    engines.pop("health_checks")
    kvcar.pop("health_checks")


def test_a_real_envoy_with_many_mistakes(tmp_path: Path) -> None:
    options = options_for(configured(), listen="127.0.0.1:0", admin="127.0.0.1:0", access_log=None)
    with Changed(options, tmp_path, spoil) as envoy:
        envoy.wait_ready()
        outcomes = found_in(configured(), pages_of(envoy))
    assert ids(outcomes, Severity.NOTE) == {
        "envoy.metadata", "envoy.body_mode", "envoy.fail_closed", "envoy.message_timeout", "envoy.mutation_rules",
        "envoy.client_headers", "envoy.not_obeyed", "envoy.processor_unchecked", "envoy.engines_unchecked",
        "envoy.body_limit", "envoy.route_timeout", "envoy.no_retries",
    }  # fmt: skip


def test_no_envoy() -> None:
    async def look() -> Outcome:
        context = Context(configured(), DoctorOptions(envoy_admin=f"http://127.0.0.1:{free_port()}", timeout=2.0))
        try:
            return await run_check(FILTER[0], context)
        finally:
            await context.close()

    (finding,) = asyncio.run(look()).findings
    assert finding.id == "envoy.unreachable"
    assert finding.evidence
