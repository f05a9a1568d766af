"""Through a real Envoy: server CPU of a whole scored request (4k-token chat, late turn) against a no-op ext_proc.

    python -m tests.bench.bench_envoy [--rounds N]

Two Envoys in front of the same three emulated engines, one asks kvcar, the other a no-op ext_proc server; the same
requests go through both in alternating rounds, and the median round counts.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from examples.local.client import Client
from examples.local.processes import EnvoyProcess
from examples.local.stack import Stack
from extproc.envoy_config import EnvoyOptions, as_dict
from tests.bench.bench_extproc import Server
from tests.bench.rows import Row, log, row, told

CONVERSATIONS = 16
WORDS = (
    "the train leaves from platform seven and the ticket costs less when it is bought early so please check the hours "
    "of the office before you travel and ask for a seat near the window if there is one left on that day "
).split()
PROMPT_TOKENS = 4096
TOKENS_PER_WORD = 1.75  # of the demo tokenizer, numbers included
CONCURRENCY = 4


class Chats:
    """Conversations of about 4k tokens; every turn adds a question and an answer to each."""

    def __init__(self, turns: int = 20) -> None:
        self._number = 0
        self.messages: list[list[dict[str, str]]] = [
            [{"role": "system", "content": f"You are assistant {number}. " + " ".join(WORDS)}]
            for number in range(CONVERSATIONS)
        ]
        words_per_turn = int(PROMPT_TOKENS / TOKENS_PER_WORD / (2 * turns))
        for _ in range(turns):
            self._speak(words_per_turn)

    def _speak(self, words: int) -> None:
        for chat in self.messages:
            for role in ("user", "assistant"):
                self._number += 1
                text = " ".join(WORDS[(self._number + i) % len(WORDS)] for i in range(words))
                chat.append({"role": role, "content": f"{self._number}: {text}"})

    def turn(self) -> list[list[dict[str, str]]]:
        """The next turn of every conversation."""
        self._speak(30)
        return [chat[:-1] for chat in self.messages]


async def send(url: str, prompts: Sequence[list[dict[str, str]]]) -> int:
    """All prompts, CONCURRENCY at a time; returns the mean prompt length in tokens."""
    queue = list(prompts)
    lengths: list[int] = []
    async with Client(url) as client:

        async def worker() -> None:
            while queue:
                answer = await client.chat(queue.pop(), max_tokens=1)
                assert answer.status == 200, answer.body[:200]
                lengths.append(answer.prompt_tokens)

        await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
    return round(statistics.mean(lengths))


def without_health_check(options: EnvoyOptions) -> str:
    """The no-op server answers no health checks."""
    config = as_dict(options)
    for cluster in config["static_resources"]["clusters"]:
        if cluster["name"] == "extproc":
            del cluster["health_checks"]
    return yaml.safe_dump(config)


def run(rounds: int = 8) -> list[Row]:
    log.info("envoy: %d rounds of %d late turns through two Envoys", rounds + 2, CONVERSATIONS)
    engine = {"blocks": 20_000, "prefill_rate": 10_000_000, "prefill_overhead": 0.0, "decode_rate": 100_000}
    with (
        tempfile.TemporaryDirectory() as name,
        Server("no-op", "tests.bench.noop_extproc") as noop,
        Stack(Path(name), engine_options=engine) as stack,
    ):
        options = EnvoyOptions(
            engines=tuple(one.address for one in stack.engines),
            ext_proc=(f"127.0.0.1:{noop.port}",),
            listen="127.0.0.1:0",
            admin="127.0.0.1:0",
            access_log=None,
        )
        plain = EnvoyProcess(options, Path(name), name="envoy-noop")
        plain.config_path.write_text(without_health_check(options), encoding="utf-8")
        with plain:
            plain.wait_ready()
            chats = Chats()
            length = 0
            used: dict[str, list[float]] = {"kvcar": [], "no-op": []}
            sides = [("kvcar", stack.url, stack.kvcar.pid), ("no-op", f"http://{plain.address}", noop.pid)]
            for turn in range(rounds + 2):
                prompts = chats.turn()
                for side, url, pid in sides:
                    before = Server.cpu_of(pid)
                    length = asyncio.run(send(url, prompts))
                    if turn >= 2:
                        used[side].append((Server.cpu_of(pid) - before) / len(prompts) * 1e6)
            metrics = stack.kvcar.metrics()
        hits = sum(
            value for key, value in metrics.items() if key.startswith("kvcar_hit_tokens_total") and "chosen" in key
        )
        assert hits > 0, "the requests found no cache: this would not be a late turn"
    ours, peer = statistics.median(used["kvcar"]), statistics.median(used["no-op"])
    title = f"server CPU a scored request through Envoy ({length / 1000:.1f}k tokens, late turn)"
    return [row(title, ours, "us", "no-op ext_proc", peer, goal=3.0, aim=1.5)]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=8)
    for one in run(arguments.parse_args().rounds):
        print(told(one))


if __name__ == "__main__":
    main()
