"""Real Envoy, kvcar and three emulated engines: which engine serves, and that the predicted hit is the real one.

Every expected number comes from the engine's own tokens (its /render endpoint) and from counting blocks here, never
from kvcar.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from examples.local.workload import workload
from tests.real.harness import Answer, Client, Routed, Stack, http_get, routed, shared_blocks

pytestmark = pytest.mark.real

BLOCK = 16
SYSTEM = "You are the assistant of a library. Answer briefly and name the shelf. " * 8


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with Client(stack.url) as client:
        yield client


def chat(text: str, *more: str, system: str = SYSTEM) -> list[dict[str, str]]:
    """System prompt, then user and assistant in turns."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": part} for i, part in enumerate((text, *more))]
    return [{"role": "system", "content": system}, *turns]


def tokens(stack: Stack, messages: list[dict[str, str]]) -> list[int]:
    """The prompt as an engine sees it."""
    result: list[int] = stack.engines[0].call("/v1/chat/completions/render", {"model": "demo", "messages": messages})[
        "token_ids"
    ]
    return result


def generated(answer: Answer) -> list[int]:
    """Ids of the answer's tokens; the request must have asked for `return_token_ids`."""
    ids: list[int] = json.loads(answer.body)["choices"][0]["token_ids"]
    return ids


async def ask(stack: Stack, client: Client, messages: list[dict[str, str]], **extra: Any) -> Routed:
    result = routed(stack, await client.chat(messages, **extra))
    assert result.answer.status == 200
    assert result.chosen[0] == result.served
    assert result.predicted == result.cached
    return result


async def test_second_turn_goes_to_the_first_engine_with_exactly_its_blocks(stack: Stack, client: Client) -> None:
    messages = chat("Where do I find books about bridges?", system="Turn by turn. " + SYSTEM)
    computed: list[int] = []
    served = set()
    for turn in range(4):
        prompt = tokens(stack, messages)
        # The engine holds what it computed: the earlier prompt and all of its answer but the last sampled token.
        expected = min(shared_blocks(prompt, computed, BLOCK), (len(prompt) - 1) // BLOCK) * BLOCK
        result = await ask(stack, client, messages, max_tokens=20 + turn, return_token_ids=True)
        assert result.predicted == expected
        assert result.answer.prompt_tokens == len(prompt)
        served.add(result.served)
        computed = prompt + generated(result.answer)[:-1]
        messages += [
            {"role": "assistant", "content": result.answer.text},
            {"role": "user", "content": f"And what else, number {turn}?"},
        ]
    assert len(served) == 1
    assert expected > 0


async def test_second_conversation_counts_exactly_the_shared_system_prompt(stack: Stack, client: Client) -> None:
    first = chat("Who wrote the oldest book here?", system="Shared prompt. " + SYSTEM)
    second = chat("Is there a reading room?", system="Shared prompt. " + SYSTEM)
    shared = shared_blocks(tokens(stack, first), tokens(stack, second), BLOCK) * BLOCK
    one = await ask(stack, client, first, stream=True)
    other = await ask(stack, client, second, stream=True)
    assert (one.predicted, other.predicted) == (0, shared)
    assert other.served == one.served
    assert 0 < shared < other.answer.prompt_tokens - BLOCK


async def test_exact_repeat_stops_before_the_last_token(stack: Stack, client: Client) -> None:
    """An engine always computes the last prompt token, so a prompt of whole blocks hits one block less."""
    length = 10 * BLOCK
    prompt = tokens(stack, chat("x " * 400, system="Repeat. " + SYSTEM))[:length]
    first = routed(stack, await client.complete(prompt))
    again = routed(stack, await client.complete(prompt))
    longer = routed(stack, await client.complete([*prompt, 7]))
    assert [row.predicted for row in (first, again, longer)] == [0, length - BLOCK, length]
    assert [row.cached for row in (first, again, longer)] == [0, length - BLOCK, length]


async def test_completions_of_text_are_predicted(stack: Stack, client: Client) -> None:
    text = "Once upon a time there was a router that knew where everything was kept. " * 6
    first = routed(stack, await client.complete(text))
    again = routed(stack, await client.complete(text + "The end.", stream=True))
    assert again.served == first.served
    assert 0 < (again.predicted or 0) == again.cached


async def test_overlapping_conversations_are_predicted_token_by_token(stack: Stack, client: Client) -> None:
    """Applications run at the same time, each with a system prompt of its own; every request must agree."""
    applications = workload(applications=4, conversations=2, turns=3, system_words=150, document_words=20, seed=3)

    async def run(application: Any) -> list[Routed]:
        rows = []
        for number, conversation in enumerate(application):
            answer = await client.chat(conversation.ask(), stream=number % 3 != 2, max_tokens=24)
            rows.append(await asyncio.to_thread(routed, stack, answer))
            conversation.answered(answer.text)
        return rows

    rows = [row for found in await asyncio.gather(*map(run, applications)) for row in found]
    assert len(rows) == 4 * 2 * 3
    assert [(row.predicted, row.chosen[0]) for row in rows] == [(row.cached, row.served) for row in rows]
    # How many hits there are depends on who happened to queue where; that they are seen does not.
    assert sum(row.cached for row in rows) > 0
    assert len({row.served for row in rows}) > 1


async def test_client_cannot_steer(stack: Stack, client: Client) -> None:
    """Neither to an address outside the pool (Envoy's own admin port) nor to another engine of the pool."""
    messages = chat("Where is the exit?", system="Steering. " + SYSTEM)
    home = (await ask(stack, client, messages)).served
    other = next(engine for engine in stack.engines if engine.name != home)
    for target in (stack.envoy.admin, stack.kvcar.admin, other.address):
        for extra in ({}, {"x-gateway-destination-endpoint-served": target, "x-envoy-original-dst-host": target}):
            headers = {"x-gateway-destination-endpoint": target, **extra}
            body = {"model": "demo", "messages": messages, "max_tokens": 4}
            answer = await client.send("/v1/chat/completions", body, stream=False, headers=headers)
            result = routed(stack, answer)
            assert (answer.status, result.served, result.chosen[0]) == (200, home, home)


DEEP = b'{"model": "demo", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}"
BAD_BODIES: dict[str, tuple[str, bytes, str]] = {
    "not JSON": ("/v1/chat/completions", b"{not json", "bad_json"),
    "empty": ("/v1/chat/completions", b"", "no_body"),
    "not an object": ("/v1/chat/completions", b"[1, 2]", "bad_request"),
    "no messages": ("/v1/chat/completions", b'{"model": "demo"}', "bad_request"),
    "empty list": ("/v1/chat/completions", b'{"model": "demo", "messages": []}', "bad_request"),
    "messages of numbers": ("/v1/chat/completions", b'{"model": "demo", "messages": [1]}', "bad_request"),
    "no prompt": ("/v1/completions", b'{"model": "demo"}', "bad_request"),
    "empty prompt list": ("/v1/completions", b'{"model": "demo", "prompt": []}', "bad_request"),
    "unknown model": (
        "/v1/chat/completions",
        b'{"model": "nobody", "messages": [{"role": "user", "content": "x"}]}',
        "model",
    ),
    "deeply nested": ("/v1/chat/completions", DEEP, "bad_json"),
    "8 MiB": (
        "/v1/completions",
        json.dumps({"model": "demo", "prompt": "x", "user": "y" * (8 << 20)}).encode(),
        "too_large",
    ),
    "half a surrogate": ("/v1/completions", b'{"model": "demo", "prompt": "\\ud800"}', ""),
}


def comparable(body: bytes) -> dict[str, Any]:
    """An engine's answer without what differs from one request to the next."""
    return {key: value for key, value in json.loads(body).items() if key not in ("id", "created")}


@pytest.mark.parametrize("case", BAD_BODIES)
async def test_bad_bodies_pass_as_without_kvcar(stack: Stack, client: Client, case: str) -> None:
    path, body, reason = BAD_BODIES[case]
    before = stack.kvcar.metrics()
    through = await client.raw(path, body)
    async with Client(stack.engines[0].url) as direct:
        alone = await direct.raw(path, body)
    assert (through.status, comparable(through.body)) == (alone.status, comparable(alone.body))
    entry = stack.envoy.logged(through.request_id)
    assert (entry["chosen"], entry["attempts"], entry["details"]) == (None, 1, "via_upstream")
    after = stack.kvcar.metrics()
    grown = {name: after[name] - before.get(name, 0) for name in after if name.startswith("kvcar_unscored_total")}
    counted = {name.split('"')[1]: grown[name] for name in grown if grown[name]}
    assert sum(counted.values()) == 1
    if reason:
        assert counted == {reason: 1}


async def test_body_over_envoys_limit_is_refused_there(stack: Stack, client: Client) -> None:
    answer = await client.raw("/v1/chat/completions", b" " * (5 << 20))
    assert answer.status == 400
    answer = await client.raw("/v1/chat/completions", b" " * (33 << 20))
    assert answer.status == 413


async def test_other_paths_reach_an_engine(stack: Stack) -> None:
    status, body = http_get(f"{stack.url}/v1/models")
    assert (status, json.loads(body)["data"][0]["id"]) == (200, "demo")
