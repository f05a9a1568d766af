"""A real Envoy that traces: its spans and kvcar's are one tree, with and without a client that traces."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.app import App
from extproc.envoy_config import EnvoyOptions
from tests.extproc.grpc_peer import until
from tests.extproc.test_tracing import PARENT, SPAN, TRACE, Collector, configuration, over_http
from tests.real.harness import Client, EnvoyProcess, echo_upstream

pytestmark = pytest.mark.real

BODY = b'{"model": "qwen3-8b", "messages": [{"role": "user", "content": "hi"}]}'


def traced(config: Path, collector: str) -> None:
    """Adds Envoy's own OpenTelemetry tracer to a written configuration."""
    tree: dict[str, Any] = yaml.safe_load(config.read_text("utf-8"))
    host, _, port = collector.removeprefix("http://").rpartition(":")
    address = {"socket_address": {"address": host, "port_value": int(port)}}
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": address}}]}]
    resources = tree["static_resources"]
    resources["clusters"].append(
        {"name": "collector", "load_assignment": {"cluster_name": "collector", "endpoints": endpoints}}
    )
    manager = resources["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    uri = {"uri": f"{collector}/v1/traces", "cluster": "collector", "timeout": "2s"}
    manager["tracing"] = {
        "provider": {
            "name": "envoy.tracers.opentelemetry",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.config.trace.v3.OpenTelemetryConfig",
                "service_name": "envoy",
                "http_service": {"http_uri": uri},
            },
        }
    }
    tree["layered_runtime"] = {
        "layers": [{"name": "often", "static_layer": {"tracing": {"opentelemetry": {"flush_interval_ms": 50}}}}]
    }
    config.write_text(yaml.safe_dump(tree), "utf-8")


@pytest.mark.parametrize("headers", [{}, {"traceparent": PARENT}], ids=["envoy begins", "client begins"])
async def test_one_tree(headers: dict[str, str], tmp_path: Path) -> None:
    collector = Collector()
    with echo_upstream() as engine:
        async with over_http(collector) as endpoint:
            app = App(configuration(endpoint=endpoint))
            try:
                ext_proc = (await app.start())["ext_proc"]
                options = EnvoyOptions(
                    listen="127.0.0.1:0", admin="127.0.0.1:0", ext_proc=(ext_proc,), engines=(engine.address,),
                    access_log=str(tmp_path / "access.log"),
                )  # fmt: skip
                envoy = EnvoyProcess(options, tmp_path)
                traced(envoy.config_path, endpoint)
                await asyncio.to_thread(envoy.start)
                try:
                    await asyncio.to_thread(envoy.wait_ready)
                    async with Client(f"http://{envoy.address}") as client:
                        answer = await client.raw("/v1/chat/completions", BODY, headers=headers)
                        assert answer.status == 200
                    await until(lambda: any("ExternalProcessor" in span.name for span in collector.spans))
                finally:
                    await asyncio.to_thread(envoy.stop)
            finally:
                await app.stop()
    spans = {span.span_id: span for span in collector.spans}
    (decide,) = (span for span in spans.values() if span.name == "kvcar.decide")
    call = spans[decide.parent_span_id]
    assert "ExternalProcessor" in call.name
    ingress = spans[call.parent_span_id]
    assert ingress.parent_span_id.hex() == (SPAN if headers else "")
    assert {span.trace_id for span in (decide, call, ingress)} == {decide.trace_id}
    if headers:
        assert decide.trace_id.hex() == TRACE
