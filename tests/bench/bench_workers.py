"""What more workers cost and bring: event CPU of a directory, memory of one, requests a second through a real Envoy.

    python -m tests.bench.bench_workers [--events-only]

Events: the engine's own messages decoded, hashed and applied (what every worker does) against the same blocks handed
over ready-made, as a follower process could do it. Requests: the same load with 1 and 2 workers; on two cores Envoy,
the engines and the clients share them with the workers, so requests a second cannot double there. CPU a request of
all kvcar processes tells what another worker brings on a core of its own. `run()` returns rows as bench_index's.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack

from examples.local.stack import Stack
from kvindex.dialects import DIALECTS, DialectOptions
from kvindex.events import BlocksMapped, Tier
from kvindex.hashing import content_keys, pack_tokens
from kvindex.index import PrefixIndex, Walk
from tests.bench.bench_envoy import Chats, send
from tests.bench.bench_extproc import Server
from tests.bench.bench_index import BLOCK, memory, row

EVENT = 16
COPIES = ((Tier.DEVICE, 0, 1),)


def _chains(count: int) -> Iterator[list[tuple[list[int], int]]]:
    rng = random.Random(5)
    for _ in range(count):
        yield [([rng.randrange(150_000) for _ in range(BLOCK)], rng.getrandbits(63)) for _ in range(EVENT)]


def bench_events(events: int = 6000) -> list[dict[str, Any]]:
    """CPU a stored block on each side of the choice."""
    full, ready = [], []
    for chain in _chains(events):
        tokens = [token for block, _ in chain for token in block]
        hashes = [hash_ for _, hash_ in chain]
        fields = ["BlockStored", hashes, None, tokens, BLOCK, None, "GPU", None, None, 0, "full_attention", None]
        full.append(msgpack.packb([1.0, [fields], 0]))
        ready.append((hashes, content_keys(pack_tokens(tokens), BLOCK)))
    blocks = events * EVENT
    dialect = DIALECTS["vllm"](DialectOptions())
    cpu = time.process_time

    gc.collect()
    gc.freeze()  # as a server does after its start
    index = PrefixIndex(block_size=BLOCK)
    view = index.open(walk=Walk.CASCADE, max_blocks=10**9)
    started = cpu()
    for payload in full:
        for event in dialect.decode(payload).events:
            view.apply(event)
    whole = (cpu() - started) / blocks * 1e6

    started = cpu()
    deltas = [msgpack.packb([hashes, b"".join(keys), COPIES]) for hashes, keys in ready]
    pack = (cpu() - started) / blocks * 1e6

    def parts() -> Iterator[BlocksMapped]:
        for delta in deltas:
            hashes, joined, copies = msgpack.unpackb(delta)
            keys = [joined[at : at + 16] for at in range(0, len(joined), 16)]
            yield BlocksMapped(hashes, keys, tuple((Tier(tier), group, count) for tier, group, count in copies))

    del index, view
    gc.collect()
    index = PrefixIndex(block_size=BLOCK)
    view = index.open(walk=Walk.CASCADE, max_blocks=10**9)
    started = cpu()
    view.fill(parts())
    delta_cost = (cpu() - started) / blocks * 1e6
    gc.unfreeze()
    rows = [
        row("event CPU a stored block, engine's own message", whole, "us", "ready-made delta", delta_cost),
        row("follower's packing of a delta, a block", pack, "us", "ready-made delta", delta_cost),
    ]
    for workers in (2, 4, 8):
        fed = whole + pack + workers * delta_cost
        rows.append(row(f"all processes, {workers} workers, a block", workers * whole, "us", "one follower", fed))
    return rows


def kvcar_cpu(stack: Stack) -> float:
    """Seconds of all its processes; the supervisor's is in it."""
    status = stack.kvcar.get("/status")
    return sum(Server.cpu_of(pid) for pid in {stack.kvcar.pid, *(row["pid"] for row in status.get("workers", ()))})


def bench_requests(rounds: int = 6) -> list[dict[str, Any]]:
    """Late turns of 4k-token chats through Envoy, alternating between one kvcar of 1 and one of 2 workers."""
    engine = {"blocks": 20_000, "prefill_rate": 10_000_000, "prefill_overhead": 0.0, "decode_rate": 100_000}
    cpu: dict[int, list[float]] = {1: [], 2: []}
    rate: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as running:
        stacks = {
            count: running.enter_context(Stack(Path(name) / str(count), engine_options=engine, workers=count))
            for count in (1, 2)
        }
        chats = Chats()
        for turn in range(rounds + 2):
            prompts = chats.turn()
            for count, stack in stacks.items():
                before, started = kvcar_cpu(stack), time.monotonic()
                asyncio.run(send(stack.url, prompts))
                if turn >= 2:
                    rate[count].append(len(prompts) / (time.monotonic() - started))
                    cpu[count].append((kvcar_cpu(stack) - before) / len(prompts) * 1e6)
        counts = Counter(row["worker"] for row in stacks[2].kvcar.get("/decisions?limit=100")["decisions"])
    one, two = statistics.median(cpu[1]), statistics.median(cpu[2])
    share = min(counts.values()) / sum(counts.values())
    return [
        row("kvcar CPU a request, 2 workers", two, "us", "1 worker", one),
        row("requests/s a core of kvcar, 2 workers", 1e6 / two, "", "1 worker", 1e6 / one),
        row(
            "requests/s on this machine, 2 workers",
            statistics.median(rate[2]),
            "",
            "1 worker",
            statistics.median(rate[1]),
        ),
        row("smaller share of requests, 2 workers", share, "", "half", 0.5),
    ]


def run() -> list[dict[str, Any]]:
    """About a minute and a half."""
    return [*bench_events(), *bench_requests()]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--events-only", action="store_true")
    given = arguments.parse_args()
    for one in bench_events() if given.events_only else run():
        against = f"{one['peer']} {one['peer_value']:.2f}"
        print(f"{one['name']:50} {one['ours']:8.2f} {one['unit']:2} against {against}: x{one['ratio']:.2f}", flush=True)
    print(f"memory of each worker's directory: {memory('ours', 1_000_000, 32):.0f} B a (stream, block)")


if __name__ == "__main__":
    main()
