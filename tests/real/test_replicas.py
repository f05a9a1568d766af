"""Two kvcar behind one Envoy."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.real.harness import Client, Stack, wait_for

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
