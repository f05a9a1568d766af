"""A real Prometheus: its promtool on rules, their unit tests and the exposition; a scrape and a query."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.emulator.process import EmulatorProcess
from examples.local.processes import KvcarProcess, Process, free_port, http_get, wait_for
from examples.local.stack import kvcar_config

pytestmark = pytest.mark.real
DEPLOY = Path(__file__).parents[2] / "deploy" / "prometheus"


@functools.cache
def installed(name: str) -> str:
    """Path of `prometheus` or `promtool`; on Debian, as root, its package is installed when it is missing."""
    if shutil.which(name) is None and shutil.which("apt-get") and os.geteuid() == 0:
        wait = ["-o", "DPkg::Lock::Timeout=120"]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "-y", "--no-install-recommends", "prometheus"]):
            subprocess.run(["apt-get", "-qq", *wait, *command], env=environment, capture_output=True, check=False)
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: install Debian's package prometheus")
    return found


def promtool(*arguments: str, data: bytes | None = None) -> str:
    done = subprocess.run([installed("promtool"), *arguments], input=data, capture_output=True, check=False, cwd=DEPLOY)
    text = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, text
    return text


def test_rules() -> None:
    assert "SUCCESS" in promtool("check", "rules", "alerts.yaml")
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yaml")


def test_a_broken_rule_is_found(tmp_path: Path) -> None:
    (tmp_path / "alerts.yaml").write_text(
        (DEPLOY / "alerts.yaml").read_text().replace("kvcar_tokenizer_loaded == 0", "1")
    )
    shutil.copy(DEPLOY / "alerts_test.yaml", tmp_path)
    command = [installed("promtool"), "test", "rules", str(tmp_path / "alerts_test.yaml")]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


@pytest.fixture(scope="module")
def engine() -> Iterator[EmulatorProcess]:
    with EmulatorProcess(name="engine-a", block_size=16, blocks=256, decode_rate=2000) as process:
        yield process


@pytest.fixture(scope="module")
def kvcar(engine: EmulatorProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvcarProcess]:
    config = kvcar_config([engine], ext_proc="127.0.0.1:0")
    config["admin"] = {"address": "127.0.0.1:0", "token": "a-secret-of-the-admin-port", "aibrix_metrics": True}
    with KvcarProcess(config, tmp_path_factory.mktemp("prometheus")) as process:
        process.wait_ready()
        yield process


def test_the_exposition_is_clean(kvcar: KvcarProcess) -> None:
    """Naming and help as promtool wants them, process metrics and AIBrix's names included."""
    _, body = http_get(f"http://{kvcar.admin}/metrics")
    assert b"kvcar_stream_connected" in body
    promtool("check", "metrics", data=body)


def test_prometheus_scrapes_and_answers(kvcar: KvcarProcess, tmp_path: Path) -> None:
    (tmp_path / "prometheus.yml").write_text(
        json.dumps({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(DEPLOY / "alerts.yaml")],
            "scrape_configs": [{"job_name": "kvcar", "static_configs": [{"targets": [kvcar.admin]}]}],
        })
    )  # fmt: skip
    address = f"127.0.0.1:{free_port()}"
    command = [
        installed("prometheus"), f"--config.file={tmp_path / 'prometheus.yml'}", f"--web.listen-address={address}",
        f"--storage.tsdb.path={tmp_path / 'data'}", "--log.level=warn",
    ]  # fmt: skip

    def ask(path: str, **parameters: str) -> Any:
        status, body = http_get(f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}")
        return json.loads(body)["data"] if status == 200 else None

    with Process("prometheus", command, tmp_path):

        def engines() -> Any:
            try:
                found = ask("query", query='kvcar_stream_connected{job="kvcar"} == 1')
            except OSError:  # it starts
                return None
            return {(row["metric"]["engine"], row["metric"]["instance"]) for row in found["result"]} if found else None

        assert wait_for(engines, "the first scrape", timeout=60.0) == {("engine-a", kvcar.admin)}
        rules = ask("rules")["groups"][0]["rules"]
        assert len(rules) > 10
        assert {rule["health"] for rule in wait_for(lambda: _evaluated(ask), "the rules' first evaluation")} == {"ok"}
        assert ask("query", query='up{job="kvcar"}')["result"][0]["value"][1] == "1"
        types = ask("metadata", metric="kvcar_decision_seconds")
        assert types["kvcar_decision_seconds"][0]["type"] == "histogram"


def _evaluated(ask: Any) -> Any:
    rules = ask("rules")["groups"][0]["rules"]
    return rules if all(rule["health"] != "unknown" for rule in rules) else None
