"""The fleet and the configuration change under a running kvcar and a real Envoy."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.real.harness import Client, Stack, wait_for

pytestmark = pytest.mark.real

LIVENESS = {"failures": 2, "out_ms": 600, "max_out_ms": 600}


def chat(topic: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{topic}. " + "You keep a diary of the weather on an island. " * 8}]


def rewrite(stack: Stack, change: Any) -> None:
    """As an editor or a deployment does it: written beside, then renamed."""
    path = stack.kvcar.config_path
    config = yaml.safe_load(path.read_text("utf-8"))
    change(config)
    beside = path.with_suffix(".new")
    beside.write_text(config if isinstance(config, str) else yaml.safe_dump(config), encoding="utf-8")
    os.replace(beside, path)


def connections(stack: Stack) -> dict[str, float]:
    return {
        name.partition('engine="')[2].partition('"')[0]: value
        for name, value in stack.kvcar.metrics().items()
        if name.startswith("kvcar_stream_batches")
    }


async def test_configuration_reloads_without_losing_streams(tmp_path: Path) -> None:
    with Stack(tmp_path, config={"reload": {"watch": False}}) as stack:
        last: dict[str, Any] = {}

        def without_last(config: dict[str, Any]) -> None:
            last.update(config["pools"][0]["instances"].pop())

        async with Client(stack.url) as client:
            for number in range(6):
                assert (await client.chat(chat(f"Topic {number}"), max_tokens=2)).status == 200
            stack.settle()
            before = connections(stack)
            assert sum(before.values()) > 0

            # An instance leaves and a scorer changes: the others' streams have not noticed.
            rewrite(stack, without_last)
            rewrite(stack, lambda config: config["pools"][0].update(scorer={"name": "car", "lambda": 0.9}))
            os.kill(stack.kvcar.pid, signal.SIGHUP)
            wait_for(lambda: len(stack.kvcar.get("/streams")["streams"]) == 2, "two streams", timeout=10)
            after = connections(stack)
            assert {name: after[name] for name in after} == {name: before[name] for name in after}
            assert all(row["synchronized"] or row["sequence"] is None for row in stack.kvcar.get("/streams")["streams"])
            asked = [await client.chat(chat(f"Again {number}"), max_tokens=2) for number in range(6)]
            chosen = {stack.envoy.logged(answer.request_id)["chosen"] for answer in asked}
            assert last["address"] not in chosen
            assert len(chosen - {None}) >= 1

            # A mistake is refused with its place; everything goes on as it was.
            rewrite(stack, lambda config: config["pools"][0].update(scorer="no-such-scorer"))
            os.kill(stack.kvcar.pid, signal.SIGHUP)
            wait_for(lambda: stack.kvcar.get("/status")["reload_error"], "the refusal", timeout=10)
            assert "no-such-scorer" in stack.kvcar.get("/status")["reload_error"]
            assert "pools[0].scorer" in stack.kvcar.log()
            assert stack.kvcar.metrics()["kvcar_config_reload_failures_total"] == 1
            assert (await client.chat(chat("Meanwhile"), max_tokens=2)).status == 200

            # Mended, with the instance back: it is followed again and gets what it held before.
            rewrite(stack, lambda config: config["pools"][0].update(scorer="car"))
            rewrite(stack, lambda config: config["pools"][0]["instances"].append(last))
            os.kill(stack.kvcar.pid, signal.SIGHUP)
            wait_for(lambda: len(stack.kvcar.get("/streams")["streams"]) == 3, "three streams", timeout=10)
            assert stack.kvcar.get("/status")["reload_error"] is None
            stack.settle()


async def test_configuration_is_watched(tmp_path: Path) -> None:
    with Stack(tmp_path, engines=2, config={"reload": {"interval_ms": 50}}) as stack:
        rewrite(stack, lambda config: config["pools"][0]["instances"].pop())
        wait_for(lambda: len(stack.kvcar.get("/streams")["streams"]) == 1, "one stream", timeout=10)


async def test_a_dead_engine_leaves_the_candidates_and_comes_back(tmp_path: Path) -> None:
    """Its own conversations would be sent there for ever: the prefix is still in the view of a stream that is lost
    late, or in no view at all and the idle engine is the least loaded."""
    with Stack(tmp_path, config={"pool": {"liveness": LIVENESS, "scorer": "least_request"}}) as stack:
        victim = stack.engines[1]

        def state() -> str:
            rows = stack.kvcar.get("/status")["pools"][0]["instances"]
            return str(next(row["state"] for row in rows if row["name"] == victim.name))

        async with Client(stack.url) as client:
            victim.kill()
            tries = 0
            while state() != "unreachable":
                answers = await asyncio.gather(*(client.chat(chat(f"{tries} {n}"), max_tokens=1) for n in range(6)))
                assert {answer.status for answer in answers} == {200}, "Envoy goes on to the next name"
                tries += 1
                assert tries < 20, stack.kvcar.log()
            victim.stop()
            await asyncio.to_thread(victim.start)
            await asyncio.to_thread(stack.envoy.wait_healthy, "engines", 3)
            tries = 0
            while state() != "active":
                assert (await client.chat(chat(f"Back {tries}"), max_tokens=1)).status == 200
                tries += 1
                assert tries < 200, stack.kvcar.log()
                await asyncio.sleep(0.05)  # the time it stays out passes
            assert f"instance {victim.name} answers again" in stack.kvcar.log()


async def test_an_engine_that_says_503_itself_is_no_dead_one(tmp_path: Path) -> None:
    """Its queue is full, and no other one takes the request. Envoy's response flags tell that from a dead engine."""
    with Stack(tmp_path, engines=1, config={"pool": {"liveness": {**LIVENESS, "failures": 1}}}) as stack:
        async with Client(stack.url) as client:
            engine = stack.engines[0]
            await asyncio.to_thread(engine.control, fail_requests=1000, fail_status=503)
            assert [(await client.chat(chat("Full"), max_tokens=1)).status for _ in range(3)] == [503] * 3
            assert "gets no requests for" not in stack.kvcar.log()
            engine.kill()
            deadline = time.monotonic() + 20
            while f"{engine.name} gets no requests for" not in stack.kvcar.log():  # a second after its last answer
                assert (await client.chat(chat("Dead"), max_tokens=1)).status == 503
                assert time.monotonic() < deadline, stack.kvcar.log()
                await asyncio.sleep(0.1)
