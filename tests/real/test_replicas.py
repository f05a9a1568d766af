"""Two kvcar behind one Envoy."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.real.harness import Client, KvcarProcess, Stack, wait_for

pytestmark = pytest.mark.real

BURST = 36
"""Requests at once, far more than arrive between two looks at an engine's metrics."""


def prompt(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Number {number}. " + f"What of {number * 7}? " * 30}]


@asynccontextmanager
async def busy(stack: Stack) -> AsyncIterator[None]:
    """Two requests each run at the first two engines, unknown to kvcar but from the engines' own metrics."""
    async with AsyncExitStack() as exits:
        for engine in stack.engines[:2]:
            client = await exits.enter_async_context(Client(f"http://{engine.address}"))
            for number in range(2):
                task = asyncio.create_task(client.chat(prompt(1000 + number), max_tokens=2000, ignore_eos=True))
                exits.callback(task.cancel)
        yield


@pytest.mark.parametrize("own_delta", [False, True], ids=["without own_delta", "with own_delta"])
async def test_two_replicas_do_not_herd(own_delta: bool, tmp_path: Path) -> None:
    """The engine that looks idlest to both gets everything until the next poll, unless each adds what it has sent."""
    pool: dict[str, Any] = {
        "scorer": "least_waiting",
        "load": {"source": "prometheus", "interval_ms": 3000, "stale_after_ms": 60_000, "own_delta": own_delta},
    }
    options = {"max_seqs": 1, "prefill_rate": 4000}
    with Stack(tmp_path, config={"pool": pool}, engine_options=options, replicas=2) as stack:
        async with busy(stack), Client(stack.url) as client:

            def seen() -> bool:
                waiting = [
                    {
                        row["name"]: (row["load"] or {}).get("waiting")
                        for row in replica.get("/status")["pools"][0]["instances"]
                    }
                    for replica in stack.replicas
                ]
                return all(one == {"engine-0": 1, "engine-1": 1, "engine-2": 0} for one in waiting)

            await asyncio.to_thread(wait_for, seen, "both replicas see the load", timeout=20)
            answers = await asyncio.gather(*(client.chat(prompt(number), max_tokens=1) for number in range(BURST)))
        assert {answer.status for answer in answers} == {200}
        logged = [stack.envoy.logged(answer.request_id) for answer in answers]
        counts = Counter(stack.name_of(row["chosen"].split(",")[0]) for row in logged)
        shares = [len(replica.get("/decisions?limit=1000")["decisions"]) for replica in stack.replicas]
        assert min(shares) > BURST / 4, "both replicas decide"
        if own_delta:
            assert max(counts.values()) <= BURST / 2, counts
        else:
            assert counts["engine-2"] >= BURST * 0.9, counts


def best_hits(replica: KvcarProcess, talks: list[list[dict[str, str]]]) -> float:
    """Share of the prompts' tokens that the replica knows some engine to hold."""
    hit = total = 0
    for messages in talks:
        body = json.dumps({"model": "demo", "messages": messages}).encode()
        request = urllib.request.Request(
            f"http://{replica.admin}/v1/internal/kv-cache/query", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            found = json.load(answer)
        hit += max(row["device_hit_tokens"] for row in found["instances"])
        total += found["tokens"]
    return hit / total


async def test_a_replica_that_starts_takes_over_what_another_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engines without replay, as vLLM is by default: without a peer, a kvcar that starts knows nothing for long."""
    options = {"no_replay": True, "prefill_rate": 50_000}
    with Stack(tmp_path, engine_options=options, replicas=2, share=True) as stack:
        first, second = stack.replicas
        async with Client(stack.url) as client:
            talks = [prompt(number) for number in range(20)]
            for messages in talks:
                assert (await client.chat(messages, max_tokens=2)).status == 200
            await asyncio.to_thread(stack.settle)
            before = await asyncio.to_thread(best_hits, first, talks)
            assert before > 0.8

            # Traffic goes on all the time; the other replica decides while this one is away.
            ended, during = asyncio.Event(), []

            async def go_on() -> None:
                while not ended.is_set():
                    during.append((await client.chat(talks[len(during) % len(talks)], max_tokens=2)).status)

            async def restart(config: str) -> float:
                await asyncio.to_thread(second.stop)
                second.config_path.write_text(config, encoding="utf-8")
                await asyncio.to_thread(second.start)
                await asyncio.to_thread(second.wait_ready)
                await asyncio.to_thread(second.wait_serving)
                await asyncio.to_thread(stack.envoy.wait_healthy, "extproc", 2)
                return await asyncio.to_thread(best_hits, second, talks)

            traffic = asyncio.create_task(go_on())
            text = second.config_path.read_text("utf-8")
            without = await restart(text.partition("replicas:")[0])
            with_peer = await restart(text)
            if with_peer != before:  # a busy machine: its start waited as long as it may, peers are asked on
                await asyncio.to_thread(
                    wait_for, lambda: best_hits(second, talks) == before, "the peer's views", timeout=20
                )
                with_peer = before
            ended.set()
            await traffic
            with capsys.disabled():
                print(f"\na replica just started knows {without:.0%} alone, {with_peer:.0%} with a peer ({before:.0%})")
            assert set(during) == {200}
            assert without < before / 2  # prompts that all engines hold store nothing new, so nothing is told again
            assert with_peer == before
            # What was taken over goes on being right: both see the same after more requests.
            for number in range(20, 30):
                assert (await client.chat(prompt(number), max_tokens=2)).status == 200
            await asyncio.to_thread(stack.settle)
            views = [
                {row["instance"]: (row["blocks"], row["complete"]) for row in replica.get("/streams")["streams"]}
                for replica in stack.replicas
            ]
            assert views[0] == views[1]
