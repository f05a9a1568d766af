"""The whole chain, real Envoy included: nothing is found when all is well; then it is broken link by link."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from examples.local.processes import wait_for
from extproc.config import load
from extproc.doctor import DoctorOptions, Report, Severity, examine
from tests.doctor.support import ids, told
from tests.real.harness import Stack

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = {"block_size": 16, "prefill_rate": 40_000, "decode_rate": 2000, "max_model_len": 8192}
    observed = {"listen": {"observe_usage": True}}
    folder = tmp_path_factory.mktemp("chain")
    with Stack(folder, engine_options=options, config=observed, envoy={"observe_usage": True}) as stack:
        yield stack


def examined(stack: Stack, **options: Any) -> Report:
    values: dict[str, Any] = {
        "envoy_admin": f"http://{stack.envoy.admin}",
        "gateway": stack.url,
        "admin": f"http://{stack.kvcar.admin}",
        "timeout": 5.0,
        "check_timeout": 30.0,
        **options,
    }
    return asyncio.run(examine(load(stack.kvcar.config_path), DoctorOptions(**values)))


def chat(stack: Stack, text: str) -> dict[str, Any]:
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    request = urllib.request.Request(
        f"{stack.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def generated(stack: Stack) -> int:
    return sum(len(engine.call("/emulator/requests")["requests"]) for engine in stack.engines)


def test_a_healthy_chain_has_no_findings(chain: Stack) -> None:
    before = generated(chain)
    quiet = examined(chain, listen=0.3)
    assert generated(chain) == before, "nothing is generated without --live"
    assert not ids(quiet), told(quiet)
    assert ids(quiet, Severity.NOTE) == {"events.idle"}  # nobody has asked anything yet
    probed = examined(chain, live=True)
    assert not ids(probed, Severity.NOTE), told(probed)
    # a handful of requests: nothing can be said of kvcar's own comparison yet
    assert {one.skipped for one in probed.outcomes if one.skipped} <= {"too few answers so far"}
    assert generated(chain) == before + 6 + 2, "three instances probed twice, and two requests through the gateway"


def test_a_healthy_chain_verifies_itself(chain: Stack) -> None:
    for number in range(24):
        text = f"Question {number % 8}: which of these rivers is the longest, and where does it end? " * 4
        chat(chain, text)
        chain.settle()

    def settled() -> Any:
        (pool,) = chain.kvcar.get("/status")["pools"]
        found = pool["self_verification"]
        return found if found["samples"] + found["excused"] >= 24 else None

    found = wait_for(settled, "24 observed answers")
    assert found["state"] != "drift", found
    assert found["over"] == found["under"] == found["prompt_token_mismatch"] == 0, found


def test_without_kvcar(chain: Stack) -> None:
    """Requests are served all the same, and doctor says what is missing at which link."""
    chain.kvcar.kill()
    chain.envoy.wait_healthy("extproc", 0)
    try:
        report = examined(chain, live=True, max_probes=2, listen=0.5)
    finally:
        chain.repair()
    assert {"kvcar.not_running", "envoy.processor_down", "gateway.not_asked"} == ids(report), told(report)
    assert report.exit_status == 2
