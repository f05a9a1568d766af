"""What a second worker costs: CPU of a request through a real Envoy, CPU of events, memory; and of the other design.

    python -m tests.bench.bench_workers [--rounds N]

`kvcar serve` with one and with two workers, the same engines, events and late turns of 4k-token chats, in turns; all
processes of each count. On two cores Envoy, the client and the workers share what there is, so requests a second cannot
grow there: CPU a request tells what another worker brings on a core of its own.

The other design: one process follows the engines and hands ready-made changes to the workers. Its best case is taken:
decoding and hashing once, a change packed once, and in each worker nothing but the index.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgpack

from examples.local.processes import KvcarProcess
from kvindex.index import PrefixIndex, StreamView, Walk
from tests.bench.bench_extproc import Server
from tests.bench.bench_index import BLOCK, DIALECT, EVENT, chain, message, stored
from tests.bench.bench_peers import ENGINES, caught_up, engines, envoy, kvcar, publish, served
from tests.bench.chats import PATH, Chats
from tests.bench.load_http import closed
from tests.bench.publish_events import Batch
from tests.bench.rows import Row, log, row, told
from tests.real.publisher import Publisher

WORKERS = (1, 2)
TOKENS = 4096
BLOCKS = 240_000
"""(stream, block) pairs that are published for the cost of events and of memory."""


class Side:
    """One kvcar with its workers behind its own Envoy."""

    def __init__(self, kvcar: KvcarProcess, url: str) -> None:
        self.kvcar, self.url = kvcar, url
        rows = kvcar.get("/status").get("workers", ())
        self.pids = {kvcar.pid, *(one["pid"] for one in rows)}
        self.cpu_us: list[float] = []

    def cpu(self) -> float:
        """Seconds of all its processes; the supervisor's is in it."""
        return sum(Server.cpu_of(pid) for pid in self.pids)

    def memory(self) -> int:
        """Bytes; what processes share counts once."""
        return sum(_pss(pid) for pid in self.pids)


def _pss(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


@contextlib.contextmanager
def sides(chats: Chats, folder: Path) -> Iterator[tuple[dict[int, Side], list[Publisher]]]:
    with contextlib.ExitStack() as stack:
        addresses, publishers = stack.enter_context(engines(chats, folder))
        found = {}
        for workers in WORKERS:
            ours = stack.enter_context(kvcar(folder, addresses, publishers, workers))
            ours.wait_ready()
            ports = [one["ext_proc"] for one in ours.get("/status").get("workers", ())] or [ours.ext_proc]
            way = stack.enter_context(envoy(folder, f"envoy-{workers}", addresses, ports, checks=True))
            way.wait_ready()
            way.wait_healthy("engines", ENGINES)
            way.wait_healthy("extproc", workers)
            found[workers] = Side(ours, f"http://{way.address}{PATH}")
        publish(chats, publishers, [one.kvcar for one in found.values()], listening=sum(WORKERS))
        yield found, publishers


def bench_processes(rounds: int) -> list[Row]:
    log.info("workers: kvcar with %s workers", " and ".join(map(str, WORKERS)))
    chats = Chats(48, TOKENS)
    with tempfile.TemporaryDirectory() as name, sides(chats, Path(name)) as (found, publishers):
        start = {count: side.memory() for count, side in found.items()}
        first, turns = chats.bodies(), chats.stream()
        for side in found.values():
            closed(side.url, first)
        for turn in range(rounds):
            log.info("workers: requests, round %d of %d", turn + 1, rounds)
            bodies = list(islice(turns, len(first)))
            for side in found.values():
                before = side.cpu()
                closed(side.url, bodies)
                side.cpu_us.append((side.cpu() - before) / len(bodies) * 1e6)
        decided = Counter(one["worker"] for one in found[2].kvcar.get("/decisions?limit=200")["decisions"])
        held = {count: side.memory() for count, side in found.items()}
        log.info("workers: %d blocks of events", BLOCKS)
        batches = [Batch(BLOCKS // ENGINES, 8, seed) for seed in range(ENGINES)]
        used = {count: side.cpu() for count, side in found.items()}
        for batch, publisher in zip(batches, publishers, strict=True):
            for payload in batch.payloads:
                publisher.publish_raw(payload)
        for side in found.values():
            served(publishers, lambda side=side: caught_up(side.kvcar, publishers), "the events")
        blocks = sum(batch.blocks for batch in batches)
        events = {count: (side.cpu() - used[count]) / blocks * 1e6 for count, side in found.items()}
        grown = {count: (side.memory() - held[count]) / blocks for count, side in found.items()}
    requests = {count: statistics.median(side.cpu_us) for count, side in found.items()}
    most = max(decided.values()) / sum(decided.values())
    figures = [("CPU a request", requests, "us"), ("CPU of events, a block", events, "us"),
               ("memory at start", {count: value / 2**20 for count, value in start.items()}, "MiB"),
               ("memory a (stream, block)", grown, "B")]  # fmt: skip
    return [
        *(row(f"2 workers, {name}", values[2], unit, "1 worker", values[1]) for name, values, unit in figures),
        row("2 workers, larger share of the requests", most, "", "half", 0.5),
    ]


def bench_designs(events: int = 6000) -> list[Row]:
    """CPU of all processes a stored block, engine's own messages in each worker against one follower, at its best."""
    log.info("workers: each follows the engines, against one that follows for all")
    rng = random.Random(5)
    chains = [chain(rng, EVENT) for _ in range(events)]
    payloads = [message(one) for one in chains]
    ready = [stored(None, one) for one in chains]
    changes = [(one.hashes, b"".join(one.keys())) for one in chains]
    blocks = events * EVENT
    gc.collect()
    gc.freeze()  # as a server does after its start

    def whole(view: StreamView) -> None:
        for payload in payloads:
            for event in DIALECT.decode(payload).events:
                view.apply(event)

    def index(view: StreamView) -> None:
        for event in ready:
            view.apply(event)

    def cost(work: Any) -> float:
        """us a block: the least of three."""
        taken = []
        for _ in range(3):
            view = PrefixIndex(block_size=BLOCK).open(walk=Walk.CASCADE, max_blocks=10**9)
            started = time.process_time()
            work(view)
            taken.append(time.process_time() - started)
        return min(taken) / blocks * 1e6

    all_of_it, alone = cost(whole), cost(index)
    pack = cost(lambda _: [msgpack.unpackb(msgpack.packb(one)) for one in changes])
    gc.unfreeze()
    name = "each worker follows, CPU of all a stored block"
    return [
        row(f"{name}, {workers} workers", workers * all_of_it, "us", "one follower", all_of_it + pack + workers * alone)
        for workers in (2, 4, 8)
    ]


def run(rounds: int = 6) -> list[Row]:
    return [*bench_processes(rounds), *bench_designs()]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=6)
    for one in run(arguments.parse_args().rounds):
        print(told(one), flush=True)


if __name__ == "__main__":
    main()
