"""The admin port of a running kvcar: schemathesis against its description, and TLS."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from examples.emulator.process import EmulatorProcess
from examples.local.processes import KvcarProcess, http_get, wait_for
from examples.local.stack import kvcar_config
from extproc.app import App
from extproc.config import parse

pytestmark = pytest.mark.real
TOKEN = "a-secret-of-the-admin-port"
HEADERS = {"X-Internal-Token": TOKEN}


@pytest.fixture(scope="module")
def engine() -> Iterator[EmulatorProcess]:
    with EmulatorProcess(name="engine-a", block_size=16, blocks=256, decode_rate=2000) as process:
        yield process


@pytest.fixture(scope="module")
def kvcar(engine: EmulatorProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvcarProcess]:
    config = kvcar_config([engine], ext_proc="127.0.0.1:0")
    config["admin"] = {"address": "127.0.0.1:0", "token": TOKEN, "aibrix_metrics": True}
    with KvcarProcess(config, tmp_path_factory.mktemp("admin")) as process:
        process.wait_ready()
        yield process


def call(kvcar: KvcarProcess, path: str, body: Any = None, **headers: str) -> Any:
    data = None if body is None else json.dumps(body).encode()
    given = {**HEADERS, "Content-Type": "application/json", **headers}
    with urllib.request.urlopen(
        urllib.request.Request(f"http://{kvcar.admin}{path}", data, given), timeout=10
    ) as answer:
        return json.loads(answer.read())


def test_answers_are_as_described_and_never_500(kvcar: KvcarProcess) -> None:
    """Every operation, with requests as described and with wrong ones."""
    schema = schemathesis.openapi.from_url(f"http://{kvcar.admin}/openapi.json", headers=HEADERS)
    operations = [found.ok() for found in schema.get_all_operations()]
    assert {"/pools", "/streams/resync", "/query"} <= {operation.path for operation in operations}
    for operation in operations:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

            @settings(max_examples=4, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
                      suppress_health_check=list(HealthCheck))  # fmt: skip
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: schemathesis.Case) -> None:
                # a model or an instance of that name need not exist
                case.call_and_validate(headers=HEADERS, excluded_checks=[positive_data_acceptance])

            try:
                ask()
            except Unsatisfiable:
                assert operation.body is None or not operation.body, "there is no wrong body?"


def test_actions_of_an_operator(engine: EmulatorProcess, kvcar: KvcarProcess) -> None:
    wait_for(lambda: call(kvcar, "/streams")["streams"][0]["connected"], "the connection to the engine")
    drained = call(kvcar, "/instances/drain", {"instance": "engine-a"})
    assert (drained["state"], drained["changed"]) == ("draining", True)
    assert call(kvcar, "/pools")["pools"][0]["instances"][0]["state"] == "draining"
    assert call(kvcar, "/instances/undrain", {"instance": "engine-a"})["state"] == "active"
    connections = 'kvcar_stream_connections_total{dp_rank="0",engine="engine-a",pool="demo"}'
    before = kvcar.metrics()[connections]
    assert call(kvcar, "/streams/rebuild", {"instance": "engine-a", "dp_rank": 0})["streams"] == 1
    wait_for(lambda: kvcar.metrics().get(connections, 0) > before, "a new connection")
    assert call(kvcar, "/log-level", {"level": "error"})["level"] == "error"
    assert call(kvcar, "/log-level")["level"] == "error"
    call(kvcar, "/log-level", {"level": "info"})
    assert "admin action /instances/drain instance=engine-a from 127.0.0.1" in kvcar.log(lines=10_000)


def test_secrets_are_masked(kvcar: KvcarProcess) -> None:
    shown = json.dumps(call(kvcar, "/config"))
    assert TOKEN not in shown
    assert '"token": "***"' in shown


def test_pages_of_others_cannot_act(kvcar: KvcarProcess) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        call(kvcar, "/instances/drain", {"instance": "engine-a"}, Origin="https://evil.example")
    assert refused.value.code == 403


async def test_every_route_of_a_running_kvcar_is_described(engine: EmulatorProcess) -> None:
    config = kvcar_config([engine], ext_proc="127.0.0.1:0")
    config["admin"] = {"address": "127.0.0.1:0"}
    app = App(parse(yaml.safe_dump(config)))
    try:
        address = (await app.start())["admin"]
        assert app._admin is not None
        routes = app._admin._runner.app.router.routes()
        served = {(one.method, one.resource.canonical) for one in routes if one.resource and one.method != "HEAD"}
        _, body = await asyncio.to_thread(http_get, f"http://{address}/openapi.json")
        paths = json.loads(body)["paths"]
        assert served == {(method.upper(), path) for path, methods in paths.items() for method in methods}
    finally:
        await app.stop()
