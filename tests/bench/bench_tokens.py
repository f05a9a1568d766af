"""Tokens of a request: late turns of long chats against apply_chat_template, short requests beside a very long one.

    python -m tests.bench.bench_tokens [family]

CPU milliseconds of the process where two paths are compared, so that neighbours on the machine hit neither; wall-clock
milliseconds where requests wait for each other. Ours includes parsing the body and the content keys of blocks of 16.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

from extproc.openai import Body, parse_body
from extproc.prompt import Options, Prompt, Prompter
from extproc.prompt.prompter import templates_of
from extproc.prompt.tokenizer import load

WORDS = (
    "the quick brown fox jumps over a lazy dog while seventeen engineers measure latency of caches and routers "
    "because every token counts; (x + y) * 42 == z, see https://example.org/a?b=c or 你好 世界 naïve façade 🙂"
)
PATH = "/v1/chat/completions"


def text(rng: random.Random, tokens: int) -> str:
    words = WORDS.split(" ")
    return " ".join(rng.choice(words) for _ in range(int(tokens / 1.55)))


Messages = list[dict[str, str]]


def even_turns(rng: random.Random, tokens: int) -> Messages:
    """20 turns of equal length: the last answer and the last question are a twentieth of all."""
    return _chat(rng, tokens // 10, int(tokens * 0.9 / 39))


def long_context(rng: random.Random, tokens: int) -> Messages:
    """20 short turns about a long document."""
    return _chat(rng, tokens - 39 * 115, 115)


def _chat(rng: random.Random, system: int, each: int) -> Messages:
    messages = [{"role": "system", "content": text(rng, system)}]
    for turn in range(39):
        messages.append({"role": "assistant" if turn % 2 else "user", "content": text(rng, each)})
    return messages


def encoded(messages: list[dict[str, str]]) -> bytes:
    return json.dumps({"model": "m", "messages": messages}, ensure_ascii=False).encode()


def share(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return 1000 * ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def row(name: str, unit: str, ours: float, peer: str, value: float, **targets: float) -> dict[str, Any]:
    ratio = ours / value
    return {
        "name": f"tokens: {name}", "ours": ours, "unit": unit, "peer": peer, "peer_value": value, "ratio": ratio,
        "goal": targets.get("goal"), "aim": targets.get("aim"),
    }  # fmt: skip


class Setup:
    def __init__(self, directory: str) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        self.loaded = load(directory)
        self.options = Options(tokenizer=directory, models=("m",), timeout=60.0, verify_every=0)
        self.templates = templates_of(self.options, self.loaded)
        self.executor = ThreadPoolExecutor(2)

    def prompter(self) -> Prompter:
        return Prompter(self.options, self.loaded, self.templates, executor=self.executor)

    def plain(self, body: bytes) -> list[int]:
        """The usual path: json, then apply_chat_template with tokenization."""
        messages = json.loads(body)["messages"]
        ids: list[int] = self.tokenizer.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        return ids


async def ours(prompter: Prompter, body: bytes) -> Prompt:
    parsed = parse_body(PATH, {}, body)
    assert isinstance(parsed, Body)
    prompt = await prompter.prompt_of(parsed)
    assert isinstance(prompt, Prompt), prompt
    prompter.keys(prompt, 16)
    return prompt


async def late_turns(
    setup: Setup, make: Callable[[random.Random, int], Messages], tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Turn 20 with turn 19 known, and turn 20 again."""
    plain: list[float] = []
    warm: list[float] = []
    exact: list[float] = []
    count = 0
    clock = time.process_time
    for number in range(rounds):
        messages = make(random.Random(number), tokens)
        prompter = setup.prompter()
        await ours(prompter, encoded(messages[:-2]))
        body = encoded(messages)
        times = [clock()]
        ids = setup.plain(body)
        times.append(clock())
        prompt = await ours(prompter, body)
        times.append(clock())
        await ours(prompter, body)
        times.append(clock())
        assert prompt.ids == ids
        count = prompt.count
        for values, taken in zip((plain, warm, exact), (b - a for a, b in pairwise(times)), strict=True):
            values.append(taken)
    usual = 1000 * statistics.median(plain)
    kind = make.__name__.replace("_", " ")
    targets = [{"goal": 1 / 8, "aim": 1 / 20}, {"goal": 1 / 20, "aim": 1 / 50}] if tokens >= 32_000 else [{}, {}]
    rows = []
    for what, values, target in zip(("turn 20", "exact repeat"), (warm, exact), targets, strict=True):
        name = f"{what} of a chat of {round(count, -3) // 1000}k tokens, {kind}"
        rows.append(row(name, "CPU ms", 1000 * statistics.median(values), "apply_chat_template", usual, **target))
    return rows


async def beside_a_long_one(setup: Setup, tokens: int, seconds: float) -> list[dict[str, Any]]:
    """Short new requests alone, and while 128k-token prompts are encoded one after another."""
    rng = random.Random(1)

    bodies = iter([encoded(even_turns(rng, tokens)) for _ in range(20)])

    async def short(prompter: Prompter, busy: Callable[[], bool]) -> list[float]:
        taken = []
        while busy():
            body = encoded([{"role": "user", "content": text(rng, 200)}])
            start = time.perf_counter()
            await ours(prompter, body)
            taken.append(time.perf_counter() - start)
            await asyncio.sleep(0.005)
        return taken

    prompter = setup.prompter()
    end = time.perf_counter() + seconds
    alone = await short(prompter, lambda: time.perf_counter() < end)
    running = [0, 0]

    async def long() -> None:
        end = time.perf_counter() + seconds
        for body in bodies:
            running[1] = (await ours(prompter, body)).count
            running[0] += 1
            if time.perf_counter() > end:
                break

    task = asyncio.create_task(long())
    beside = await short(prompter, lambda: not task.done())
    await task
    name = f"short request beside prompts of {running[1] // 1000}k tokens, "
    return [
        row(name + "p50", "ms", share(beside, 0.5), "alone", share(alone, 0.5)),
        row(name + "p99", "ms", share(beside, 0.99), "alone", share(alone, 0.99)),
    ]


async def memory(setup: Setup) -> dict[str, Any]:
    """What the caches hold against their bounds, and what the process grew by, after ten times what fits."""
    import tracemalloc

    options = Options(
        tokenizer="", models=("m",), timeout=60.0, segment_bytes=4 << 20, chain_bytes=2 << 20, verify_every=0
    )
    prompter = Prompter(options, setup.loaded, setup.templates, executor=setup.executor)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(60):
        await ours(prompter, encoded(even_turns(random.Random(number), 16_000)))
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    stats = prompter.refresh_stats()
    held = stats.cache_bytes + stats.chain_bytes
    name = "memory of caches of 6 MiB after 1 M tokens"
    return row(name, "MiB", grown / 2**20, "as accounted", held / 2**20, goal=1.5, aim=1.1)


def run(family: str = "qwen3", *, rounds: int = 12, seconds: float = 4.0) -> list[dict[str, Any]]:
    from tests.tokenizers import tokenizer_dir

    setup = Setup(tokenizer_dir(family))

    async def rows() -> list[dict[str, Any]]:
        return [
            *await late_turns(setup, even_turns, 4_000, rounds),
            *await late_turns(setup, even_turns, 32_000, rounds),
            *await late_turns(setup, long_context, 32_000, rounds),
            *await beside_a_long_one(setup, 128_000, seconds),
            await memory(setup),
        ]

    return asyncio.run(rows())


if __name__ == "__main__":
    for one in run(*sys.argv[1:]):
        print(f"{one['name']:78} {one['ours']:8.2f} {one['unit']:7} {one['peer']} {one['peer_value']:.2f}: "
              f"x{one['ratio']:.3f} = 1 / {1 / one['ratio']:.1f}")  # fmt: skip
