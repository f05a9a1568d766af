"""Two workers behind a real Envoy: traffic to both, one admin port, a worker killed under load, reload, drain."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.real.harness import TOKENIZER, Answer, Client, Stack, http_get, routed, wait_for

pytestmark = pytest.mark.real

SYSTEM = "You keep a diary of the weather on a small island. Write short entries. " * 8


def chat(topic: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": f"{topic}. {SYSTEM}"}, {"role": "user", "content": "How was the day?"}]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = {"block_size": 16, "prefill_rate": 40_000, "decode_rate": 200, "max_model_len": 32_768}
    config = {"listen": {"drain_wait_ms": 1200, "drain_grace_ms": 10_000}, "reload": {"watch": False}}
    folder = tmp_path_factory.mktemp("workers")
    with Stack(folder, engine_options=options, config=config, workers=2, scorer="least_request") as stack:
        yield stack


def workers(stack: Stack) -> list[dict[str, Any]]:
    return list(stack.kvcar.get("/status")["workers"])


def post(stack: Stack, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async def send() -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"http://{stack.kvcar.admin}{path}", json=body) as answer,
        ):
            return answer.status, await answer.json()

    return asyncio.run(send())


def total(stack: Stack, name: str, **labels: str) -> float:
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        value
        for key, value in stack.kvcar.metrics().items()
        if key.partition("{")[0] == name and all(one in key for one in wanted)
    )


async def load(stack: Stack, prompts: list[list[dict[str, str]]], concurrency: int = 8, **extra: Any) -> list[Answer]:
    left, answers = list(prompts), []

    async def worker(client: Client) -> None:
        while left:
            answers.append(await client.chat(left.pop(), **extra))

    async with Client(stack.url) as client:
        await asyncio.gather(*(worker(client) for _ in range(concurrency)))
    return answers


def test_both_serve_and_the_admin_port_speaks_for_both(stack: Stack) -> None:
    before, sent = total(stack, "kvcar_requests_total"), 0
    decisions: list[dict[str, Any]] = []

    def both() -> bool:
        """More until both have had some: on a busy machine one may fail Envoy's health checks for a moment."""
        nonlocal sent
        answers = asyncio.run(load(stack, [chat(f"Both {sent + number}") for number in range(20)], max_tokens=4))
        sent += len(answers)
        assert {answer.status for answer in answers} == {200}
        asked = {answer.request_id for answer in answers}
        rows = stack.kvcar.get("/decisions?limit=1000")["decisions"]
        decisions.extend(row for row in rows if row["request_id"] in asked)
        decisions.sort(key=lambda row: -row["at"])
        assert rows == sorted(rows, key=lambda row: -row["at"])
        return {row["worker"] for row in decisions} == {0, 1}

    wait_for(both, "requests at both workers", timeout=30.0)
    assert total(stack, "kvcar_requests_total") - before == len(decisions)
    assert len(decisions) > sent / 2, "on a busy machine Envoy may not wait for some"
    # each row is also found by its request, whoever decided
    for row in (decisions[0], decisions[-1]):
        found = stack.kvcar.get(f"/decisions?request_id={row['request_id']}")["decisions"]
        assert [one["worker"] for one in found] == [row["worker"]]

    # the dashboard is of both
    page = stack.kvcar.get("/v1/internal/overview")
    assert page["decisions_seen"] >= len(decisions)
    assert {row["worker"] for row in page["decisions"]} == {0, 1}
    for row in page["decisions"][:4]:
        one = stack.kvcar.get(f"/v1/internal/decision?number={row['number']}")
        assert (one["request_id"], one["worker"]) == (row["request_id"], row["worker"])
    assert http_get(f"http://{stack.kvcar.admin}/v1/internal/overview?since=x")[0] == 400
    assert http_get(f"http://{stack.kvcar.admin}/v1/internal/decision?number=999999")[0] == 404

    # one prefix, known to both workers whichever has routed it
    async def turns() -> list[Any]:
        async with Client(stack.url) as client:
            rows = []
            for _ in range(6):
                answer = await client.chat(chat("Both 7"), max_tokens=2)
                rows.append(await asyncio.to_thread(routed, stack, answer))
            return rows

    stack.settle()
    for row in asyncio.run(turns()):
        assert row.predicted in (0, row.cached), "least_request chooses anybody; what it predicts is so"
    stack.settle()
    rows = stack.kvcar.get("/streams")["streams"]
    assert len(rows) == 3
    assert all(row["synchronized"] for row in rows)
    ready = stack.kvcar.get("/readyz")
    assert (ready["ready"], ready["degraded"], ready["workers"]) == (True, False, {"total": 2, "ready": 2})
    assert total(stack, "kvcar_events_streams") == 3


def test_a_burst_spreads_over_the_engines(stack: Stack) -> None:
    """Long answers, all at once: what is in flight must be level, though neither worker sees all of them itself."""

    async def burst() -> dict[str, int]:
        async with Client(stack.url) as client:
            running = [
                asyncio.create_task(client.chat(chat(f"Burst {number}"), max_tokens=400, ignore_eos=True, stream=True))
                for number in range(30)
            ]
            levels: dict[str, int] = {}

            def level() -> bool:
                (pool,) = stack.kvcar.get("/status")["pools"]
                levels.update({one["name"]: one["in_flight"] for one in pool["instances"]})
                return sum(levels.values()) == 30

            await asyncio.to_thread(wait_for, level, "all 30 requests in flight")
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            return dict(levels)

    levels = asyncio.run(burst())
    assert max(levels.values()) - min(levels.values()) <= 4, levels
    wait_for(lambda: total(stack, "kvcar_inflight_requests") == 0, "nothing in flight")


def test_actions_reach_all_and_a_worker_that_starts_again(stack: Stack) -> None:
    assert post(stack, "/instances/drain", {"instance": "engine-1"})[1]["state"] == "draining"
    answers = asyncio.run(load(stack, [chat(f"Drained {number}") for number in range(12)], max_tokens=2))
    chosen = {stack.envoy.logged(answer.request_id)["chosen"].split(",")[0] for answer in answers}
    assert stack.engines[1].address not in chosen
    assert post(stack, "/instances/drain", {"instance": "nobody"})[0] == 404
    assert http_get(f"http://{stack.kvcar.admin}/decisions?limit=x")[0] == 400
    assert http_get(f"http://{stack.kvcar.admin}/nothing/here")[0] == 404
    assert b"<html" in http_get(f"http://{stack.kvcar.admin}/")[1]

    counted = total(stack, "kvcar_requests_total", outcome="scored")
    victim = workers(stack)[1]
    signal_pid(victim["pid"], signal.SIGKILL)

    def back() -> bool:
        row = workers(stack)[1]
        return bool(row["state"] == "running" and row["pid"] != victim["pid"])

    wait_for(back, "worker 1 to run again", timeout=40.0)
    wait_for(lambda: not stack.kvcar.get("/readyz")["degraded"], "both ready", timeout=30.0)
    stack.wait_routing()
    assert total(stack, "kvcar_requests_total", outcome="scored") == counted, "what the dead one had counted stays"
    assert total(stack, "kvcar_worker_restarts_total", worker="1") == 1
    later: set[str] = set()

    def both() -> bool:
        """As in the first test: Envoy may leave one out for a moment."""
        answers = asyncio.run(load(stack, [chat(f"Still drained {number}") for number in range(12)], max_tokens=2))
        later.update((stack.envoy.logged(answer.request_id)["chosen"] or "").split(",")[0] for answer in answers)
        rows = stack.kvcar.get("/decisions?limit=12")["decisions"]
        return {row["worker"] for row in rows} == {0, 1}

    wait_for(both, "requests at both workers", timeout=30.0)
    assert stack.engines[1].address not in later
    assert post(stack, "/instances/undrain", {"instance": "engine-1"}) == (
        200,
        {"instance": "engine-1", "changed": True, "state": "active", "in_flight": 0},
    )


def signal_pid(pid: int, number: int) -> None:
    os.kill(pid, number)


def test_a_worker_killed_under_load_costs_no_request(stack: Stack) -> None:
    async def run() -> list[Answer]:
        victim = workers_now[0]
        running = asyncio.create_task(load(stack, [chat(f"Kill {n}") for n in range(120)], max_tokens=20))
        await asyncio.to_thread(wait_for, lambda: total(stack, "kvcar_inflight_requests") >= 4, "load")
        signal_pid(victim["pid"], signal.SIGKILL)
        return await running

    workers_now = workers(stack)
    answers = asyncio.run(run())
    assert Counter(answer.status for answer in answers) == {200: 120}
    wait_for(lambda: not stack.kvcar.get("/readyz")["degraded"], "both ready again", timeout=40.0)
    assert [row["pid"] for row in workers(stack)][1] == workers_now[1]["pid"]
    assert workers(stack)[0]["pid"] != workers_now[0]["pid"]
    stack.wait_routing()


def test_sighup_reaches_both(stack: Stack) -> None:
    path = stack.kvcar.config_path
    config = yaml.safe_load(path.read_text())
    config["pools"][0]["models"].append("second-name")
    path.write_text(yaml.safe_dump(config))
    reloads = total(stack, "kvcar_config_reloads_total")
    stack.kvcar.signal(signal.SIGHUP)
    wait_for(lambda: total(stack, "kvcar_config_reloads_total") > reloads, "a reload")

    async def ask() -> list[int]:
        async with Client(stack.url) as client:
            body = {"model": "second-name", "messages": chat("Reload"), "max_tokens": 1}
            return [(await client.send("/v1/chat/completions", body, stream=False)).status for _ in range(8)]

    def known_to_both() -> bool:
        asyncio.run(ask())
        rows = stack.kvcar.get("/decisions?limit=8")["decisions"]
        return {(row["worker"], row["reason"]) for row in rows} == {(0, None), (1, None)}

    wait_for(known_to_both, "the new name in both workers", interval=0.1)


def test_sigterm_drains_one_after_the_other(stack: Stack) -> None:
    """The last one with the stack: nothing runs afterwards."""

    async def run() -> tuple[list[Answer], Answer]:
        async with Client(stack.url) as client:
            long = asyncio.create_task(client.chat(chat("Long"), max_tokens=300, ignore_eos=True, stream=True))
            await asyncio.to_thread(wait_for, lambda: total(stack, "kvcar_inflight_requests") == 1, "the long one")
            stack.kvcar.signal(signal.SIGTERM)
            answers: list[Answer] = []
            while stack.kvcar.running:
                answers.append(await client.chat(chat(f"Meanwhile {len(answers)}"), max_tokens=4))
            return answers, await long

    answers, long = asyncio.run(run())
    assert stack.kvcar.wait(timeout=5) == 0
    assert {answer.status for answer in answers} == {200}
    assert long.status == 200
    log = stack.kvcar.log_path.read_text("utf-8")
    first, second = log.index("extproc.app[0]: draining"), log.index("extproc.app[1]: draining")
    assert first < second


def test_a_worker_ends_with_its_supervisor(tmp_path: Path) -> None:
    """Also with one that was killed: the end of its input is what a worker sees of it."""
    instance = {"name": "a", "address": "127.0.0.1:1", "events": "tcp://127.0.0.1:1"}
    config = {
        "listen": {"drain_wait_ms": 0},
        "pools": [
            {"name": "p", "models": ["m"], "tokenizer": str(TOKENIZER), "block_size": 16, "instances": [instance]}
        ],
    }
    path = tmp_path / "kvcar.yaml"
    path.write_text(yaml.safe_dump(config))
    place = ["--number", "0", "--count", "2", "--address", "127.0.0.1:0", "--directory", str(tmp_path)]
    command = [sys.executable, "-m", "extproc.workers", "--config", str(path), *place]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdin is not None
        assert b"ext_proc" in worker.stdout.readline()
        assert worker.poll() is None
        worker.stdin.close()
        assert worker.wait(30) == 0
