"""The generated configuration in a real Envoy, without kvcar: what clients get then, what engines must never see."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from extproc.envoy_config import ROUTING_HEADERS, EnvoyOptions
from tests.real.harness import Client, EchoUpstream, EnvoyProcess, echo_upstream, free_port, wait_for

pytestmark = pytest.mark.real

BODY = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "hi"}]}).encode()
COMPLETIONS = "/v1/chat/completions"


@pytest.fixture(scope="module")
def engines() -> Iterator[list[EchoUpstream]]:
    with echo_upstream() as one, echo_upstream() as two:
        yield [one, two]


def options(folder: Path, **changes: object) -> EnvoyOptions:
    values: dict[str, object] = {
        "listen": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "ext_proc": (f"127.0.0.1:{free_port()}",),
        "access_log": str(folder / "access.log"),
    }
    return EnvoyOptions(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def envoy(engines: list[EchoUpstream], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvoyProcess]:
    folder = tmp_path_factory.mktemp("envoy")
    with EnvoyProcess(options(folder, engines=tuple(engine.address for engine in engines)), folder) as process:
        process.wait_ready()
        process.wait_healthy("engines", 2)
        yield process


@pytest.fixture
async def client(envoy: EnvoyProcess) -> Iterator[Client]:
    async with Client(f"http://{envoy.address}") as client:
        yield client


async def test_without_kvcar_the_fallback_serves(envoy: EnvoyProcess, client: Client) -> None:
    answers = [await client.raw(COMPLETIONS, BODY) for _ in range(6)]
    assert [answer.status for answer in answers] == [200] * 6
    entry = envoy.logged(answers[-1].request_id)
    assert (entry["chosen"], entry["attempts"], entry["code"]) == (None, 1, 200)
    assert envoy.stats("failure_mode_allowed")["http.openai.ext_proc.kvcar.failure_mode_allowed"] >= 6


async def test_routing_headers_of_clients_never_arrive(
    engines: list[EchoUpstream], envoy: EnvoyProcess, client: Client
) -> None:
    """Also not on the paths that kvcar never sees; ordinary headers do arrive."""
    sent = dict.fromkeys(ROUTING_HEADERS, envoy.admin) | {"x-mine": "1", "authorization": "Bearer secret"}
    before = [len(engine.requests) for engine in engines]
    for path in (COMPLETIONS, "/v1/completions", "/v1/embeddings"):
        answer = await client.raw(path, BODY, headers=sent)
        assert answer.status == 200
        assert json.loads(answer.body)["served_by"] in [int(engine.address.split(":")[1]) for engine in engines]
    seen = [request for engine, count in zip(engines, before, strict=True) for request in engine.requests[count:]]
    assert len(seen) == 3
    for request in seen:
        assert not set(ROUTING_HEADERS) & set(request["headers"])
        assert request["headers"]["x-mine"] == "1"
        assert request["headers"]["authorization"] == "Bearer secret"


async def test_other_paths_never_ask_kvcar(envoy: EnvoyProcess, client: Client) -> None:
    counter = "http.openai.ext_proc.kvcar.failure_mode_allowed"
    before = envoy.stats(counter)[counter]
    for path in ("/v1/models", "/tokenize", "/v1/completions/", "/v1/chat/completions/render", "//v1/completions"):
        assert (await client.raw(path, BODY)).status == 200
    assert envoy.stats(counter)[counter] == before
    await client.raw("/v1/completions?x=1", BODY)
    assert envoy.stats(counter)[counter] == before + 1


async def test_request_id_of_the_client_is_kept(envoy: EnvoyProcess, client: Client) -> None:
    """What joins a client's view with the access log and kvcar's decisions."""
    answer = await client.raw(COMPLETIONS, BODY)
    assert envoy.logged(answer.request_id)["path"] == COMPLETIONS


async def test_fail_closed_refuses_without_kvcar(engines: list[EchoUpstream], tmp_path: Path) -> None:
    chosen = options(tmp_path, engines=(engines[0].address,), fail_open=False)
    with EnvoyProcess(chosen, tmp_path) as envoy:
        envoy.wait_ready()
        async with Client(f"http://{envoy.address}") as client:
            assert (await client.raw(COMPLETIONS, BODY)).status == 500
            assert (await client.raw("/v1/rerank", BODY)).status == 200


async def test_engines_file_is_followed(engines: list[EchoUpstream], tmp_path: Path) -> None:
    """An engine that leaves the file is gone at once, without a restart of Envoy."""
    folder = tmp_path / "eds"
    folder.mkdir()

    def write(*members: EchoUpstream) -> None:
        rows = [
            {"endpoint": {"address": {"socket_address": dict(zip(("address", "port_value"), split(e), strict=True))}}}
            for e in members
        ]
        resource = {
            "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
            "cluster_name": "engines",
            "endpoints": [{"lb_endpoints": rows}],
        }
        (folder / "new").write_text(json.dumps({"resources": [resource]}))
        (folder / "new").rename(folder / "engines.json")

    def split(engine: EchoUpstream) -> tuple[str, int]:
        host, _, port = engine.address.rpartition(":")
        return host, int(port)

    write(*engines)
    with EnvoyProcess(options(tmp_path, engines_file=str(folder / "engines.json")), tmp_path) as envoy:
        envoy.wait_ready()
        envoy.wait_healthy("engines", 2)
        write(engines[1])
        wait_for(
            lambda: envoy.stats("engines.membership_total") == {"cluster.engines.membership_total": 1},
            "one engine left",
        )
        async with Client(f"http://{envoy.address}") as client:
            answers = [await client.raw("/v1/embeddings", BODY) for _ in range(4)]
        assert {json.loads(answer.body)["served_by"] for answer in answers} == {split(engines[1])[1]}
