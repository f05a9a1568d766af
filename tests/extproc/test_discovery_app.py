"""Every source by way of the configuration and `App`: what is found becomes a candidate and is followed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from examples.local.stack import TOKENIZER
from extproc.app import App
from extproc.config import ConfigError, parse
from extproc.discovery_config import DnsDiscovery, KubernetesDiscovery
from extproc.instances import PoolFacts
from extproc.instances_file import parse_instances
from extproc.messages import HttpRequest
from kvindex.errors import ConfigurationError
from tests.kvindex.dns_server import dns_server
from tests.kvindex.kube_api import KubeApi, kubeconfig, serving
from tests.kvindex.test_kubernetes_rules import endpoint, piece, pod

FACTS = PoolFacts("qwen", "qwen3-8b", "vllm")
BODY = orjson.dumps({"model": "qwen3-8b", "prompt": list(range(100, 121))})


def config(**source: Any) -> Any:
    pool = {"name": "qwen", "models": ["qwen3-8b"], "tokenizer": str(TOKENIZER), "discovery": [source]}
    tree = {"listen": {"address": "127.0.0.1:0", "drain_wait_ms": 0}, "admin": {"address": "127.0.0.1:0"}}
    return parse(yaml.safe_dump({**tree, "pools": [pool]}))


@asynccontextmanager
async def serve(**source: Any) -> AsyncIterator[App]:
    app = App(config(**source))
    await app.start()
    try:
        yield app
    finally:
        await app.stop()


async def chosen(app: App, address: str, name: str) -> None:
    """Waits until the address is a candidate; its stream is followed then."""
    async with asyncio.timeout(20):
        while True:
            outcome = await app.decider.decide(HttpRequest("POST", "/v1/completions", {}, BODY))
            if outcome.ticket is not None:
                outcome.ticket.close()
            if address in outcome.destinations:
                break
            await asyncio.sleep(0.005)
    assert name in {report.instance for report in app.pools[0].directory.status()}


async def test_kubernetes_pods(tmp_path: Path) -> None:
    async with serving(KubeApi()) as api:
        api.put("pods", pod("a", ip="127.0.0.2"))
        path = tmp_path / "kubeconfig"
        path.write_text(kubeconfig(api.url))
        async with serve(type="kubernetes", kubeconfig=str(path)) as app:
            await chosen(app, "127.0.0.2:8000", "llm/a")
            api.put("pods", pod("b", ip="127.0.0.3"))
            await chosen(app, "127.0.0.3:8000", "llm/b")
    assert api.requests[0][1]["labelSelector"] == "model.aibrix.ai/name=qwen3-8b"


async def test_kubernetes_service(tmp_path: Path) -> None:
    async with serving(KubeApi()) as api:
        api.put("endpointslices", piece(endpoint("127.0.0.2", "a")))
        path = tmp_path / "kubeconfig"
        path.write_text(kubeconfig(api.url))
        async with serve(type="kubernetes", kubeconfig=str(path), service="engines", port="http") as app:
            await chosen(app, "127.0.0.2:8000", "llm/a")


async def test_dns() -> None:
    async with dns_server() as server:
        server.zone["engines.test", "A"] = (0, ["127.0.0.2"])
        options = {"nameservers": ["127.0.0.1"], "nameserver_port": server.port, "min_interval_ms": 10}
        async with serve(type="dns", name="engines.test", **options) as app:
            await chosen(app, "127.0.0.2:8000", "127.0.0.2:8000")


async def test_file(tmp_path: Path) -> None:
    path = tmp_path / "engines.json"
    async with serve(type="file", path=str(path), interval_ms=10) as app:
        instance = {"name": "a", "address": "127.0.0.2:8000", "events": "tcp://127.0.0.2:5557"}
        path.write_text(json.dumps({"instances": [instance]}))
        await chosen(app, "127.0.0.2:8000", "a")
        path.write_text("instances:\n- {name: a, adress: 127.0.0.2}\n")
        async with asyncio.timeout(20):
            while not (problem := app.sources.status()[-1]["error"]):  # noqa: ASYNC110 - the page has no event
                await asyncio.sleep(0.005)
        assert problem.startswith(f"{path}: ")
        assert "line:2: instances[0].adress: unknown key" in problem
        await chosen(app, "127.0.0.2:8000", "a")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"type": "kubernetes", "service": "a", "selector": "b"}, "exclude each other"),
        ({"type": "kubernetes", "namespaces": ["*", "x"]}, '"*" stands for all'),
        ({"type": "kubernetes", "port": 0}, "port of 1 to 65535, or the name of a port"),
        ({"type": "kubernetes", "port": "8000"}, "port of 1 to 65535, or the name of a port"),
        ({"type": "kubernetes", "roles": {"P": "prefil"}}, "'prefil'"),
        ({"type": "kubernetes", "labels": {"rol": "x"}}, "discovery[0].labels.rol: unknown key"),
        ({"type": "dns"}, "discovery[0].name: this key is required"),
        ({"type": "dns", "name": "x", "nameservers": ["ns1"]}, "'ns1' does not appear to be an IPv4 or IPv6 address"),
        ({"type": "dns", "name": "x", "min_interval_ms": 70_000}, "min_interval_ms is above max_interval_ms"),
        ({"type": "dns", "name": "x", "record": "mx"}, "'srv'"),
        ({"type": "file"}, "discovery[0].path: this key is required"),
    ],
)
def test_options_that_cannot_be(source: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**source)
    assert words in str(caught.value)
    assert "pools[0].discovery[0]" in str(caught.value)
    assert f".{source['type']}" not in str(caught.value)


def test_model_that_no_label_can_hold_needs_a_selector() -> None:
    facts = PoolFacts("qwen", "Qwen/Qwen3-8B")
    with pytest.raises(ConfigurationError, match="write `selector`"):
        KubernetesDiscovery(type="kubernetes").check(facts)
    KubernetesDiscovery(type="kubernetes", selector="app=qwen").check(facts)
    KubernetesDiscovery(type="kubernetes", service="qwen").check(facts)
    DnsDiscovery(type="dns", name="qwen").check(facts)


@pytest.mark.parametrize("text", ["instances: []", '{"instances": []}'])
def test_file_without_instances(text: str) -> None:
    assert parse_instances(text, FACTS) == []


def test_file_says_all_an_instance_has() -> None:
    text = """
    instances:
    - {name: a, address: "10.0.0.1:8000", role: prefill, dp_size: 2, events: "tcp://10.0.0.1:5557",
       metrics: "http://10.0.0.1:9100/metrics"}
    """
    (found,) = parse_instances(text, FACTS)
    assert (found.name, found.pool, found.model, found.role) == ("a", "qwen", "qwen3-8b", "prefill")
    assert [one.events for one in found.events] == ["tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"]
    assert {one.dialect for one in found.events} == {"vllm"}
    assert found.metrics == "http://10.0.0.1:9100/metrics"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "at least the key 'instances'"),
        ("instances: [{name: a}]", "instances[0].address: this key is required"),
        ("instances: [{name: a, address: 10.0.0.1}, {}]", "instances[1].name: this key is required"),
        ("instances: [{name: a", "not valid YAML"),
        ("instances: {}", "must be a list"),
    ],
)
def test_file_that_is_wrong(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_instances(text, FACTS)
    assert words in str(caught.value)
