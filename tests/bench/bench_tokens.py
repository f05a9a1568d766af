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

from extproc.openai import Body, parse_body
from extproc.prompt import Options, Prompt, Prompter
from extproc.prompt.prompter import templates_of
from extproc.prompt.tokenizer import load
from tests.bench.rows import Row, log, row, told

WORDS = (
    "the quick brown fox jumps over a lazy dog while seventeen engineers measure latency of caches and routers "
    "because every token counts; (x + y) * 42 == z, see https://example.org/a?b=c or 你好 世界 naïve façade 🙂"
)
PATH = "/v1/chat/completions"
PEER = "apply_chat_template"


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
) -> list[Row]:
    """Turn 20 with turn 19 known, and turn 20 again."""
    log.info("tokens: %s of %d tokens, %d rounds", make.__name__.replace("_", " "), tokens, rounds)
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
    bounds = [(1 / 8, 1 / 20), (1 / 20, 1 / 50)] if tokens >= 32_000 else [(), ()]
    rows = []
    for what, values, bound in zip(("turn 20", "exact repeat"), (warm, exact), bounds, strict=True):
        name = f"tokens: {what} of a chat of {round(count, -3) // 1000}k tokens, {kind}"
        rows.append(row(name, 1000 * statistics.median(values), "CPU ms", PEER, usual, *bound))
    return rows


async def misses(setup: Setup, tokens: int, rounds: int) -> list[Row]:
    """A prompt of which nothing is known."""
    log.info("tokens: a miss of %d tokens, %d rounds", tokens, rounds)
    clock = time.process_time
    taken: list[tuple[float, float]] = []
    for number in range(rounds):
        body = encoded(even_turns(random.Random(number), tokens))
        prompter = setup.prompter()
        start = clock()
        ids = setup.plain(body)
        between = clock()
        prompt = await ours(prompter, body)
        taken.append((clock() - between, between - start))
        assert prompt.ids == ids
    mine, usual = (1000 * statistics.median(values) for values in zip(*taken, strict=True))
    return [row(f"tokens: miss of {tokens // 1000}k tokens", mine, "CPU ms", PEER, usual)]


async def beside_a_long_one(setup: Setup, tokens: int, seconds: float) -> list[Row]:
    """Short new requests alone, and while 128k-token prompts are encoded one after another."""
    log.info("tokens: short requests beside prompts of %d tokens", tokens)
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

    async def long() -> None:
        end = time.perf_counter() + seconds
        for body in bodies:
            await ours(prompter, body)
            if time.perf_counter() > end:
                break

    task = asyncio.create_task(long())
    beside = await short(prompter, lambda: not task.done())
    await task
    name = f"tokens: short request beside prompts of {tokens // 1000}k tokens, "
    parts = {"p50": 0.5, "p99": 0.99}
    return [row(name + what, share(beside, part), "ms", "alone", share(alone, part)) for what, part in parts.items()]


async def memory(setup: Setup) -> Row:
    """What the caches hold against their bounds, and what the process grew by, after ten times what fits."""
    import tracemalloc

    log.info("tokens: memory of the caches")
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
    name = "tokens: memory of caches of 6 MiB after 1 M tokens"
    return row(name, grown / 2**20, "MiB", "as accounted", held / 2**20, 1.5, 1.1)


def run(family: str = "qwen3", *, rounds: int = 10, seconds: float = 4.0) -> list[Row]:
    from tests.tokenizers import tokenizer_dir

    setup = Setup(tokenizer_dir(family))

    async def rows() -> list[Row]:
        return [
            *await late_turns(setup, even_turns, 4_000, rounds),
            *await late_turns(setup, even_turns, 32_000, rounds),
            *await late_turns(setup, long_context, 32_000, rounds),
            *await misses(setup, 128_000, 3),
            *await beside_a_long_one(setup, 128_000, seconds),
            await memory(setup),
        ]

    return asyncio.run(rows())


if __name__ == "__main__":
    for one in run(*sys.argv[1:]):
        print(told(one), flush=True)
