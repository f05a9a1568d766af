"""`kvcar query` against a running kvcar and an emulated engine: the answer is the engine's own truth."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from examples.emulator.process import EmulatorProcess
from examples.local.processes import KvcarProcess, free_port, wait_for
from examples.local.stack import kvcar_config
from extproc.cli import main
from tests.real.harness import echo_upstream

pytestmark = pytest.mark.real
TOKEN = "a-secret-of-the-admin-port"
MESSAGES = [
    {"role": "system", "content": "You know every river of Europe. " * 12},
    {"role": "user", "content": "Seine?"},
]


@pytest.fixture(scope="module")
def engine() -> Iterator[EmulatorProcess]:
    with EmulatorProcess(name="engine-a", block_size=16, blocks=256, decode_rate=2000) as process:
        yield process


@pytest.fixture(scope="module")
def kvcar(engine: EmulatorProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvcarProcess]:
    config = kvcar_config([engine], ext_proc="127.0.0.1:0")
    config["admin"] = {"address": f"127.0.0.1:{free_port()}", "token": TOKEN}
    config["pools"][0]["load"] = {"source": "heartbeat"}
    with KvcarProcess(config, tmp_path_factory.mktemp("query")) as process:
        process.wait_ready()
        yield process


def query(kvcar: KvcarProcess, *arguments: str, config: Path | None = None) -> Result:
    return CliRunner().invoke(main, ["query", "-c", str(config or kvcar.config_path), *arguments])


def post(kvcar: KvcarProcess, path: str, body: Any) -> Any:
    headers = {"X-Internal-Token": TOKEN}
    request = urllib.request.Request(f"http://{kvcar.admin}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.loads(answer.read())


def test_a_request_is_answered_as_the_engine_would(
    engine: EmulatorProcess, kvcar: KvcarProcess, tmp_path: Path
) -> None:
    body = {"model": "demo", "messages": MESSAGES, "max_tokens": 1}
    request = tmp_path / "request.json"
    request.write_text(json.dumps(body))
    usage = engine.call("/v1/chat/completions", body)["usage"]
    ids = engine.call("/tokenize", {"messages": MESSAGES})["tokens"]
    expected = engine.lookup(ids)[0]["gpu_blocks"] * 16
    assert expected > 16

    def answer() -> Any:
        found = json.loads(query(kvcar, "--request", str(request), "--json").output)
        return found if found["matches"][0]["device_hit_tokens"] else None

    found = wait_for(answer, "the hit of the prompt just served")
    assert (found["pool"], found["tokens"], found["block_size"]) == ("demo", usage["prompt_tokens"], 16)
    assert found["matches"][0]["device_hit_tokens"] == expected
    assert found["instances"][0]["address"] == engine.address
    by_ids = json.loads(query(kvcar, "--tokens", ",".join(map(str, ids)), "--json").output)
    assert by_ids["matches"][0]["reusable_prefix_tokens"] == expected
    told = post(kvcar, "/query", {"model": "demo", "block_size": 16, "token_ids": ids})
    assert told["default"]["engine-a"]["longest_matched"] == len(ids) // 16 * 16
    shown = query(kvcar, "--request", str(request))
    assert shown.exit_code == 0
    assert f"tokens: {usage['prompt_tokens']}" in shown.output
    (line,) = [line for line in shown.output.splitlines() if line.startswith("engine-a")]
    assert line.split()[1:5] == ["0", str(expected), str(expected), "0"]
    assert "river" not in shown.output
    status = query(kvcar)
    assert "synchronized" in status.output
    assert "disk" in status.output
    # a file whose first model the running kvcar does not serve, and one of two pools: what there is all the same
    edited = yaml.safe_load(kvcar.config_path.read_text())
    (pool,) = edited["pools"]
    second = {**pool, "name": "b", "models": ["b"], "instances": []}
    for number, pools in enumerate(([{**pool, "models": ["other"]}], [pool, second])):
        path = tmp_path / f"edited-{number}.yaml"
        path.write_text(yaml.safe_dump({**edited, "pools": pools}))
        for arguments in ((), ("--tokens", ",".join(map(str, ids)))):
            found = query(kvcar, *arguments, "--json", config=path)
            assert found.exit_code == 0, found.output
            assert set(json.loads(found.output)) == {"matches"}
    unnamed = tmp_path / "unnamed.json"
    unnamed.write_text(json.dumps({"messages": MESSAGES}))
    assert json.loads(query(kvcar, "--request", str(unnamed), "--json").output)["model"] == "demo"
    other = query(kvcar, "--request", str(request), "--model", "no-such-model")
    assert (other.exit_code, "no pool serves 'no-such-model'" in other.output) == (1, True)


def test_a_heartbeat_is_the_load_of_the_instance(kvcar: KvcarProcess) -> None:
    load = {"waiting_requests_num": "2", "gpu_cache_usage_perc": 0.25}
    assert post(kvcar, "/v1/internal/heartbeat", {"name": "engine-a", "load_metrics": load}) == {"ok": True}
    with pytest.raises(urllib.error.HTTPError, match="409"):
        post(kvcar, "/v1/internal/heartbeat", {"name": "engine-b", "load_metrics": load})
    request = urllib.request.Request(f"http://{kvcar.admin}/status", headers={"X-Internal-Token": TOKEN})
    with urllib.request.urlopen(request, timeout=10) as answer:
        (told,) = json.loads(answer.read())["pools"][0]["instances"]
    assert (told["load"]["waiting"], told["load"]["usage"]) == (2.0, 0.25)


def test_mistakes_are_told(kvcar: KvcarProcess, tmp_path: Path) -> None:
    config = yaml.safe_load(kvcar.config_path.read_text())
    wrong, open_port = tmp_path / "wrong.yaml", tmp_path / "open.yaml"
    wrong.write_text(yaml.safe_dump(config | {"admin": {"address": kvcar.admin, "token": "another-token"}}))
    open_port.write_text(yaml.safe_dump(config | {"admin": {"address": "127.0.0.1:0"}}))
    body = tmp_path / "body.json"
    body.write_text("[1]")
    nested = tmp_path / "nested.json"
    nested.write_text("[" * 100_000 + "]" * 100_000)
    gone = f"127.0.0.1:{free_port()}"
    with echo_upstream() as stranger:
        rows = [
            (("--tokens", "1,x"), None, 2, "'x' is no token id"),
            (("--tokens", ""), None, 2, "no token ids are given"),
            (("--tokens", "9" * 5000), None, 2, "5000 digits"),
            (("--request", str(nested)), None, 2, "nested too deeply"),
            (("--admin", kvcar.ext_proc), None, 1, "is it kvcar's admin port?"),
            (("--admin", "a b:9003"), None, 2, "is no address"),
            (("--request", str(body)), None, 2, "no object"),
            (("--request", str(body), "--tokens", "1"), None, 2, "give one"),
            ((), open_port, 2, "--admin"),
            ((), tmp_path / "none.yaml", 2, "none.yaml"),
            ((), wrong, 1, "401 invalid internal token"),
            (("--tokens", "4294967296"), None, 1, "400 a token id"),
            (("--admin", gone), None, 1, "does kvcar run?"),
            (("--admin", stranger.address), None, 1, "is it kvcar's admin port?"),
        ]
        for arguments, path, code, words in rows:
            result = query(kvcar, *arguments, config=path)
            assert (result.exit_code, words in result.output) == (code, True), (arguments, result.output)
