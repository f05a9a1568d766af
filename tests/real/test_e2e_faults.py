"""Processes die under a real Envoy: what clients see meanwhile, and that routing is right again afterwards."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from examples.local.client import sse
from tests.real.harness import Answer, Client, NotReady, Routed, Stack, routed, wait_for

pytestmark = pytest.mark.real

SYSTEM = "You keep a diary of the weather on a small island. Write short entries. " * 8
ANSWER = 300
"""Tokens of a streamed answer: 1.5 s at the decode rate of the stack, time enough to break something meanwhile."""


def chat(topic: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": f"{topic}. {SYSTEM}"}, {"role": "user", "content": "How was the day?"}]


async def turn(stack: Stack, client: Client, messages: list[dict[str, str]], **extra: Any) -> Routed:
    """One turn; the conversation goes on with the answer and a next question."""
    answer = await client.chat(messages, max_tokens=8, **extra)
    assert answer.status == 200
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And the day after?"}]
    return await asyncio.to_thread(routed, stack, answer)


class Streaming:
    """A streamed answer that is being read: `started` after its first text, `tokens` when it is complete."""

    def __init__(self, client: Client, messages: list[dict[str, str]]) -> None:
        self.started = asyncio.Event()
        self.finished = False
        self.task = asyncio.create_task(self._read(client, messages))

    async def _read(self, client: Client, messages: list[dict[str, str]]) -> int:
        body = {
            "model": "demo", "messages": messages, "max_tokens": ANSWER, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        tokens = 0
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{client.base_url}/v1/chat/completions", json=body) as response,
        ):
            assert response.status == 200
            # Raises EOFError unless the stream ends as it should.
            async for event in sse(response):
                if event["choices"]:
                    self.started.set()
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        self.finished = True
        return tokens


async def test_kvcar_killed_mid_stream_and_started_again(stack: Stack) -> None:
    async with Client(stack.url) as client:
        messages = chat("Killed")
        home = await turn(stack, client, messages)
        running = Streaming(client, chat("Stream"))
        await running.started.wait()
        stack.kvcar.kill()
        assert not running.finished, "the kill came too late to show anything"

        # Envoy serves without a decision, the running stream is not cut.
        during = [await client.chat(chat(f"During {number}"), max_tokens=4) for number in range(4)]
        assert [answer.status for answer in during] == [200] * 4
        assert [stack.envoy.logged(answer.request_id)["chosen"] for answer in during] == [None] * 4
        assert await running.task == ANSWER

        # The new process has missed everything: it gets it back from the engines' replay.
        stack.kvcar.start()
        await asyncio.to_thread(stack.kvcar.wait_ready)
        await asyncio.to_thread(stack.wait_routing)
        for row in stack.kvcar.get("/streams")["streams"]:
            assert row["complete"] or row["sequence"] is None, row
        again = await turn(stack, client, messages)
        assert (again.served, again.predicted) == (home.served, again.cached)
        assert again.cached > home.answer.prompt_tokens - 16
        # So does what the fallback served meanwhile, wherever that was.
        for number, answer in enumerate(during):
            messages = chat(f"During {number}")
            before = stack.name_of(stack.envoy.logged(answer.request_id)["upstream"])
            result = await turn(stack, client, messages)
            assert (result.served, result.predicted) == (before, result.cached)


async def test_engine_killed_is_retried_elsewhere_and_forgotten_when_back(stack: Stack) -> None:
    async with Client(stack.url) as client:
        messages = chat("Moving")
        asked = list(messages)
        first = await turn(stack, client, messages)
        victim = next(engine for engine in stack.engines if engine.name == first.served)
        victim.kill()

        # Cold conversations rotate over all engines, so some of them name the dead one first.
        rows = [await turn(stack, client, chat(f"Cold {number}")) for number in range(6)]
        assert victim.name in {row.chosen[0] for row in rows}
        for row in rows:
            dead = row.chosen.index(victim.name)
            assert (row.served, row.attempts) == ((row.chosen[1], 2) if dead == 0 else (row.chosen[0], 1))
        # The conversation of the dead engine goes on elsewhere, and is warm there from the next turn on.
        moved = await turn(stack, client, messages)
        assert moved.served != victim.name
        warm = await turn(stack, client, messages)
        assert (warm.served, warm.predicted) == (moved.served, warm.cached)
        assert warm.cached > 0

        victim.start()
        await asyncio.to_thread(wait_for, lambda: blocks(stack, victim.name) == 0, "an empty view of the new engine")
        await asyncio.to_thread(stack.settle)
        await asyncio.to_thread(stack.envoy.wait_healthy, "engines", 3)
        answer = await client.chat(asked, max_tokens=4)
        await asyncio.to_thread(routed, stack, answer)
        decision = stack.kvcar.get(f"/decisions?request_id={answer.request_id}")["decisions"][0]["decision"]
        hits = {row["name"]: row["device_tokens"] for row in decision["candidates"]}
        assert hits[victim.name] == 0
        assert hits[moved.served] == answer.cached_tokens > 0


def blocks(stack: Stack, engine: str) -> int:
    rows = [row for row in stack.kvcar.get("/streams")["streams"] if row["instance"] == engine]
    return sum(rows[0]["blocks"].values()) if rows[0]["connected"] else -1


async def test_sigterm_drains_without_a_failed_request(stack: Stack) -> None:
    async with Client(stack.url) as client:
        running = Streaming(client, chat("Drain"))
        await running.started.wait()
        stack.kvcar.signal(signal.SIGTERM)
        answers: list[Answer] = []
        while stack.kvcar.running:
            answers.append(await client.chat(chat(f"While draining {len(answers)}"), max_tokens=10))
        assert stack.kvcar.wait(timeout=1) == 0
        answers.append(await client.chat(chat("After"), max_tokens=2))
        assert {answer.status for answer in answers} == {200}
        assert await running.task == ANSWER
        entries = [stack.envoy.logged(answer.request_id) for answer in answers]
        # One of them may be too late for its budget on a busy machine, not all.
        assert any(entry["chosen"] for entry in entries[:-1]), f"it still decides while gateways notice: {entries}"
        assert entries[-1]["chosen"] is None
        assert {entry["flags"] for entry in entries} == {"-"}


def test_failed_start_leaves_no_process_and_shows_the_log(tmp_path: Path) -> None:
    """The harness itself: a kvcar that cannot start is reported with its own words, and the rest is taken down."""
    stack = Stack(tmp_path, engines=1, config={"no_such_key": 1})
    with pytest.raises(NotReady, match="no_such_key"):
        stack.__enter__()
    assert not any(process.running for process in (*stack.engines, stack.kvcar, stack.envoy))
