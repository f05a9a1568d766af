"""Routing options through real Envoy, kvcar and engines: speculation, pairs, ranks, shedding, stale loads."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.real.harness import Answer, Client, Stack, wait_for

pytestmark = pytest.mark.real

SYSTEM = "You answer questions about railways in one sentence and name the platform, please. " * 12


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


async def burst(stack: Stack, count: int, **options: Any) -> list[Answer]:
    async with Client(stack.url) as client:
        return await asyncio.gather(
            *(client.chat(chat(f"Question {number}?"), max_tokens=1, **options) for number in range(count))
        )


def engines_of(stack: Stack, answers: list[Answer]) -> Counter[str]:
    return Counter(stack.name_of(stack.envoy.logged(answer.request_id)["upstream"]) for answer in answers)


@pytest.mark.parametrize("speculation", [False, True], ids=["without", "with"])
async def test_burst_of_one_prefix(speculation: bool, tmp_path: Path) -> None:
    """64 cold requests of one prefix at once: spread evenly without speculation, together on one engine with it."""
    pool: dict[str, Any] = {"scorer": {"name": "car", "lambda": 1.0}}
    if speculation:
        pool["speculation"] = {"ttl_ms": 20_000}
    options = {"prefill_rate": 2000, "max_seqs": 64}
    with Stack(tmp_path, engine_options=options, config={"pool": pool}) as stack:
        # The first steps of a prefill take a while, so that the burst is decided before any event comes back.
        for engine in stack.engines:
            engine.control(freeze_events=True)
        answers = await burst(stack, 64)
        assert {answer.status for answer in answers} == {200}
        counts = engines_of(stack, answers)
        if speculation:
            assert max(counts.values()) == 64, counts
        else:
            assert max(counts.values()) <= 32, counts
            assert len(counts) == 3


async def test_pair_is_told_to_the_decode_engine(tmp_path: Path) -> None:
    roles = {"engine-0": {"role": "prefill"}, "engine-1": {"role": "decode"}, "engine-2": {"role": "decode"}}
    pairs = {"decode_header": "x-my-decode"}
    envoy = {"written_headers": ("x-my-decode",)}
    with Stack(tmp_path, config={"instance": roles, "pool": {"pairs": pairs}}, envoy=envoy) as stack:
        answers = await burst(stack, 4)
        assert {answer.status for answer in answers} == {200}
        assert set(engines_of(stack, answers)) == {"engine-1", "engine-2"}
        for engine in stack.engines[1:]:
            for row in engine.call("/emulator/requests")["requests"]:
                assert row["headers"]["x-prefiller-host-port"] == stack.engines[0].address
                assert row["headers"]["x-my-decode"] == engine.address


async def test_rank_is_told_and_honoured(tmp_path: Path) -> None:
    ranks = {f"engine-{number}": {"dp_size": 2} for number in range(2)}
    config = {"pool": {"dp": "target"}, "instance": ranks}
    with Stack(tmp_path, engines=2, engine_options={"dp": 2}, config=config) as stack:
        async with Client(stack.url) as client:
            for number in range(3):
                for _ in range(2):
                    answer = await client.chat(chat(f"{number} " * 40), max_tokens=1)
                    assert answer.status == 200
                    stack.settle()
                assert answer.cached_tokens > 0, "the second time the very rank that has it"
        served = [row for engine in stack.engines for row in engine.call("/emulator/requests")["requests"]]
        assert len(served) == 6
        for row in served:
            assert row["headers"]["x-data-parallel-rank"] == str(row["rank"])


async def test_shedding_answers_429_and_recovers(tmp_path: Path) -> None:
    config = {"pool": {"shedding": {"queue_threshold": 1, "retry_after_s": 7}}}
    with Stack(tmp_path, engine_options={"prefill_rate": 500}, config=config) as stack:
        answers = await burst(stack, 24)
        assert {answer.status for answer in answers} == {200, 429}
        refused = next(answer for answer in answers if answer.status == 429)
        assert b"rate_limit" in refused.body
        entry = stack.envoy.logged(refused.request_id)
        assert entry["details"].startswith("kvcar_saturated")
        (answer,) = await burst(stack, 1)
        assert answer.status == 200


async def test_stale_load_leaves_car_without_an_error(tmp_path: Path) -> None:
    load = {"source": "prometheus", "interval_ms": 100, "stale_after_ms": 600}
    with Stack(tmp_path, config={"pool": {"load": load}}) as stack:

        def fresh() -> set[str]:
            rows = stack.kvcar.get("/status")["pools"][0]["instances"]
            return {row["name"] for row in rows if row["load"] is not None}

        wait_for(lambda: len(fresh()) == 3, "a report of every engine")
        stack.engines[0].freeze()
        try:
            wait_for(lambda: fresh() == {"engine-1", "engine-2"}, "the frozen engine's report to be too old")
            answers = await burst(stack, 12)
            assert {answer.status for answer in answers} == {200}
            assert set(engines_of(stack, answers)) == {"engine-1", "engine-2"}
        finally:
            stack.engines[0].cont()
        wait_for(lambda: len(fresh()) == 3, "the engine's report to be back")
