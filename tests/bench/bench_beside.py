"""Requests while KV events come in: latency at 50k, 200k, 1 M offered blocks/s and during 8 MiB snapshots.

    python -m tests.bench.bench_beside [--rounds N]

In this process: the event loop takes a late turn of a 4k-token chat from body to scores (parse, template, tokens,
keys, look-up) every 10 ms, the transport's thread follows a publisher in a process of its own, which gets only idle
cores as it stands for other machines. Latency counts from the moment a request was due, so that a wake-up that comes
late counts, and a request that comes late makes no queue. Kinds of load take turns; the p99 is that of the median
round.

The limit of the machine stands beside it: the same events followed by another process, with an interpreter of its own,
so that only the cores, their caches and the memory are shared.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice

import uvloop

from examples.local.processes import wait_for
from examples.local.stack import TOKENIZER
from extproc.openai import Body, parse_body
from extproc.prompt import Options, Prompt, Prompter
from extproc.prompt.prompter import templates_of
from extproc.prompt.tokenizer import load
from kvindex import Directory, EventTransport, Instance, StreamEndpoint
from kvindex.fleet import Instance as Fleeted
from kvindex.pacer import SWITCH_INTERVAL
from tests.bench.bench_extproc import ROOT
from tests.bench.chats import BLOCK, MODEL, PATH, Chats, stored
from tests.bench.publish_events import EVENT
from tests.bench.rows import Row, log, row, told
from tests.real.publisher import Publisher

RATE = 100.0  # at most
LOADS: dict[str, list[str]] = {
    "no events": [],
    "50k blocks/s": ["50000"],
    "200k blocks/s": ["200000"],
    "1 M blocks/s offered": ["1000000"],
    "50k blocks/s and an 8 MiB snapshot a second": ["50000", "--snapshots", "1"],
}
ELSEWHERE = ", followed by another process"
LOADS |= {f"{name}{ELSEWHERE}": LOADS[name] for name in list(LOADS) if "200k" in name or "snapshot" in name}


class Requests:
    """A prompter and a directory as the server has them, with the conversations stored by one engine."""

    def __init__(self, transport: EventTransport) -> None:
        self.chats = Chats(24, 4096)
        options = Options(tokenizer=str(TOKENIZER), models=(MODEL,), timeout=60.0, verify_every=0)
        loaded = load(str(TOKENIZER))
        self.prompter = Prompter(options, loaded, templates_of(options, loaded))
        self.directory = Directory(transport, block_size=BLOCK)
        self.pacer = transport.pace

    async def one(self, body: bytes) -> tuple[str, tuple[int, ...]]:
        parsed = parse_body(PATH, {}, body)
        assert isinstance(parsed, Body)
        prompt = await self.prompter.prompt_of(parsed)
        assert isinstance(prompt, Prompt)
        name, blocks = self.directory.match(self.prompter.keys(prompt, BLOCK)).best
        return name, tuple(blocks)

    async def paced(self, seconds: float) -> list[float]:
        self.chats.begin_again()  # else the last kind of load would meet the longest prompts
        bodies = list(islice(self.chats.stream(), int(seconds * RATE)))
        taken = []
        for body in bodies:
            due = time.perf_counter() + 1 / RATE
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            _, blocks = await self.pacer.ahead(self.one(body))
            taken.append(time.perf_counter() - due)
            assert sum(blocks) > 200, "the prompt is not known: this would not be a late turn"
        return taken


def followed(*endpoints: str) -> list[Fleeted]:
    return [
        Instance(f"engine-{number}", f"10.0.0.{number + 1}:8000", events=(StreamEndpoint(0, one, dialect="vllm"),))
        for number, one in enumerate(endpoints)
    ]


def applied(directory: Directory) -> Iterator[int]:
    for report in directory.status():
        status = report.status
        yield sum(status.events.values()) if status else 0


def run(rounds: int = 3, seconds: float = 3.0) -> list[Row]:
    seen: dict[str, list[list[float]]] = {name: [] for name in LOADS}
    rates: dict[str, list[float]] = {name: [] for name in LOADS}
    sys.setswitchinterval(SWITCH_INTERVAL)
    with EventTransport() as transport, Publisher(replay=None) as publisher:
        requests = Requests(transport)
        requests.directory.update(followed(publisher.endpoint))
        wait_for(lambda: publisher.serve() or publisher.subscribers, "the first subscription")
        rng = random.Random(5)
        for ids in requests.chats.tokens:
            publisher.publish(stored(ids, rng))
        wait_for(lambda: next(applied(requests.directory)) >= len(requests.chats.tokens), "the conversations")
        for body in requests.chats.bodies():
            uvloop.run(requests.one(body))
        gc.collect()
        gc.freeze()
        for number in range(rounds):
            for name, load_ in LOADS.items():
                log.info("beside: requests beside %s, round %d of %d", name, number + 1, rounds)
                with _publishing(requests.directory, publisher.endpoint, load_, elsewhere=name.endswith(ELSEWHERE)):
                    before, started = sum(applied(requests.directory)), time.perf_counter()
                    seen[name].append(uvloop.run(requests.paced(seconds)))
                    done, passed = sum(applied(requests.directory)) - before, time.perf_counter() - started
                    rates[name].append(done * EVENT / passed)
                requests.directory.update(followed(publisher.endpoint))
        gc.unfreeze()
    rows = []
    quiet = "no events"
    for part, label in ((0.5, "p50"), (0.99, "p99")):
        base = _at(seen[quiet], part)
        for name in LOADS:
            if name != quiet:
                mine = _at(seen[name], part)
                bounds = (1.5, 1.1) if part == 0.99 and f"{name}{ELSEWHERE}" in LOADS else ()
                rows.append(row(f"request {label} beside {name}", mine, "ms", quiet, base, *bounds))
    for name, load_ in LOADS.items():
        if len(load_) == 1 and not name.endswith(ELSEWHERE):
            offered, taken = float(load_[0]), statistics.median(rates[name])
            rows.append(row(f"blocks/s beside requests, {name}", offered, "offered", "applied", taken))
    return rows


class _publishing:
    """A publisher at a rate, followed until its events arrive; by another process when told so."""

    def __init__(self, directory: Directory, base: str, arguments: list[str], *, elsewhere: bool) -> None:
        self._directory, self._base, self._arguments, self._elsewhere = directory, base, arguments, elsewhere
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> None:
        if not self._arguments:
            return
        endpoint = self._start("publish_events", *self._arguments, "--idle")
        if self._elsewhere:
            self._start("bench_beside", "--follow", endpoint)
        else:
            self._directory.update(followed(self._base, endpoint))
            wait_for(lambda: sum(list(applied(self._directory))[1:]) > 0, "the first events")

    def _start(self, module: str, *arguments: str) -> str:
        """Its first line."""
        command = [sys.executable, "-m", f"tests.bench.{module}", *arguments]
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._processes.append(process)
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


def _at(rounds: list[list[float]], part: float) -> float:
    return 1e3 * statistics.median(sorted(one)[min(len(one) - 1, int(part * len(one)))] for one in rounds)


def follow(endpoint: str) -> None:
    """Says so with the first event, and ends with its input."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    with EventTransport() as transport:
        directory = Directory(transport, block_size=BLOCK)
        directory.update(followed(endpoint))
        wait_for(lambda: sum(applied(directory)) > 0, "the first events")
        print("follows", flush=True)
        sys.stdin.read()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--follow", metavar="ENDPOINT", help="be the other process")
    given = arguments.parse_args()
    if given.follow:
        follow(given.follow)
        return
    for one in run(given.rounds):
        print(told(one), flush=True)


if __name__ == "__main__":
    main()
