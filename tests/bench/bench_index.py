"""What the index costs, in one run, beside a plain dict of sets and Dynamo's RadixTree (Rust, through its binding).

    .venv/bin/python -m tests.bench.bench_index [--large]

Ratios are ours / peer, below 1 is faster or smaller than the peer. Trust ratios, not absolute times. `run()` returns
the same rows for a report: {"name", "ours", "unit", "peer", "peer_value", "ratio", "goal", "aim"}.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
from rich.console import Console
from rich.table import Table

from kvindex.dialects import DIALECTS, DialectOptions
from kvindex.events import AllBlocksCleared, BlockRemoved, BlockStored, Tier
from kvindex.hashing import content_keys, pack_tokens
from kvindex.index import PrefixIndex, StreamView, Walk

try:
    from dynamo._core import RadixTree, compute_block_hash_for_seq
except ImportError:  # the bench extra is not installed
    RadixTree = compute_block_hash_for_seq = None

BLOCK = 16
EVENT = 16  # blocks a stored event
LONG = 2048
BURST = 1  # events in a row; with more of them the machine's own ups and downs decide
BUDGET = 0.5  # ms, of a slice
FILL = 64  # blocks of a filler chain, the first FILL_SHARED of them common to all streams
FILL_SHARED = 16
clock = time.perf_counter


def times(*contests: tuple[Callable[[Any], Any], list[Any]], rounds: int = 1, burst: int = 1) -> list[float]:
    """Time of one call of each contestant, in us: lower quartile, turn by turn: a busy machine treats all alike.

    burst   calls a turn. With one, each call starts with the caches the other contestant left
    """
    taken: list[list[float]] = [[] for _ in contests]
    for _ in range(rounds):
        for number in range(0, max(len(inputs) for _, inputs in contests), burst):
            for (work, inputs), mine in zip(contests, taken, strict=True):
                for one in inputs[number : number + burst]:
                    start = clock()
                    work(one)
                    mine.append(clock() - start)
    return [sorted(mine)[len(mine) // 4] * 1e6 if mine else 0.0 for mine in taken]


class Chains:
    """The blocks of every stream: some long chains that the queries ask for, and many short ones around them.

    Engine hashes are random 64-bit ints, the same on every stream for the same block, as real engines have them.
    """

    def __init__(self, pairs: int, streams: int, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        self.streams = streams
        self.long = max(2, min(40, pairs // 2 // (LONG * streams)))
        self.fillers = max(1, (pairs - self.long * LONG * streams) // (FILL * streams))
        self.queries = [self._chain(LONG) for _ in range(self.long)]
        self.shared = self._chain(FILL_SHARED)

    def _chain(self, blocks: int) -> list[tuple[list[int], int]]:
        """(tokens, engine hash) a block."""
        rng = self.rng
        return [([rng.randrange(150_000) for _ in range(BLOCK)], rng.getrandbits(63)) for _ in range(blocks)]

    def events(self) -> Iterator[tuple[int, int | None, list[tuple[list[int], int]]]]:
        """(stream, parent, blocks), streams and chains taking turns as in a running fleet."""
        filler = 0
        for start in range(0, LONG, EVENT):
            for stream in range(self.streams):
                for number, chain in enumerate(self.queries):
                    # one chain in two is held by half of its length: on every stream, so a half hit is a half hit
                    if number % 2 and start >= LONG // 2:
                        continue
                    yield stream, chain[start - 1][1] if start else None, chain[start : start + EVENT]
            while filler < self.fillers * (start + EVENT) // LONG:
                filler += 1
                for stream in range(self.streams):
                    yield stream, None, self.shared
                    own = self._chain(FILL - FILL_SHARED)
                    parent = self.shared[-1][1]
                    for begin in range(0, len(own), EVENT):
                        yield stream, parent, own[begin : begin + EVENT]
                        parent = own[begin + EVENT - 1][1]


def stored(parent: int | None, blocks: list[tuple[list[int], int]]) -> BlockStored:
    tokens = pack_tokens(token for block, _ in blocks for token in block)
    return BlockStored([hash_ for _, hash_ in blocks], parent, tokens, BLOCK)


def keys_of(chain: list[tuple[list[int], int]]) -> list[bytes]:
    return content_keys(pack_tokens(token for block, _ in chain for token in block), BLOCK)


def local_hashes(chain: list[tuple[list[int], int]]) -> list[int]:
    return compute_block_hash_for_seq([token for block, _ in chain for token in block], BLOCK)


def dynamo_stored(number: int, parent: int | None, blocks: list[tuple[list[int], int]]) -> bytes:
    data = {"parent_hash": parent, "blocks": [
        {"block_hash": hash_, "tokens_hash": local}
        for (_, hash_), local in zip(blocks, local_hashes(blocks), strict=True)
    ]}  # fmt: skip
    return json.dumps({"event_id": number, "data": {"stored": data}, "dp_rank": 0}).encode()


class DictOfSets:
    """The obvious index: content key -> streams; copies, tiers and engine hashes left out."""

    def __init__(self) -> None:
        self.holders: dict[bytes, set[int]] = {}

    def store(self, stream: int, keys: list[bytes]) -> None:
        for key in keys:
            self.holders.setdefault(key, set()).add(stream)

    def find(self, keys: list[bytes]) -> dict[int, int]:
        found: dict[int, int] = {}
        alive: set[int] | None = None
        for position, key in enumerate(keys):
            holders = self.holders.get(key)
            if holders is None:
                break
            left = holders if alive is None else alive & holders
            if alive is not None and len(left) != len(alive):
                found.update(dict.fromkeys(alive - left, position))
            alive = left
            if not alive:
                break
        else:
            position = len(keys)
        found.update(dict.fromkeys(alive or (), position))
        return found


def build(chains: Chains, *, peer: bool, baseline: bool) -> tuple[PrefixIndex, list[StreamView], Any, DictOfSets]:
    index = PrefixIndex(block_size=BLOCK)
    views = [index.open(walk=Walk.CASCADE, max_blocks=10**9, name=str(number)) for number in range(chains.streams)]
    for view in views:
        view.visible = True
    tree = RadixTree() if peer and RadixTree else None
    plain = DictOfSets()
    last: dict[int, bytes] = {}
    for number, (stream, parent, blocks) in enumerate(chains.events()):
        event = stored(parent, blocks)
        views[stream].apply(event)
        if tree is not None:
            tree.apply_event(stream, dynamo_stored(number, parent, blocks))
        if baseline:
            keys = content_keys(event.tokens, BLOCK, parent=last[parent] if parent is not None else None)
            plain.store(stream, keys)
            last[blocks[-1][1]] = keys[-1]
    return index, views, tree, plain


def bench_find(pairs: int, stream_counts: tuple[int, ...]) -> list[dict[str, Any]]:
    rows = []
    for streams in stream_counts:
        chains = Chains(pairs, streams)
        index, _, tree, plain = build(chains, peer=True, baseline=True)

        def find_theirs(hashes: list[int], tree: Any = tree) -> Any:
            return tree.find_matches(hashes).scores

        unknown = Chains(0, 1, seed=99)
        full, half = chains.queries[::2], chains.queries[1::2]
        rounds = max(10, 60 // len(full))
        for blocks in (256, LONG):
            # a chain is known to half of it: in the odd chains that is LONG // 2, for 256 blocks take what follows too
            cases = {"zero": [chain[:blocks] for chain in unknown.queries], "full": [chain[:blocks] for chain in full]}
            if blocks == LONG:
                cases["half"] = half
            else:
                cases["half"] = [chain[:128] + unknown.queries[0][:128] for chain in full]
            for name in ("zero", "half", "full"):
                keys = [keys_of(chain) for chain in cases[name]]
                hashes = [local_hashes(chain) for chain in cases[name]] if tree is not None else []
                answer = index.find(keys[0])
                expected = {"zero": 0, "half": blocks // 2, "full": blocks}[name]
                assert len(answer) == (streams if expected else 0), (name, len(answer))
                assert all(sum(one) == expected for one in answer.values()), name
                contests = [(index.find, keys)]
                if tree is not None:
                    scores = find_theirs(hashes[0])
                    assert sorted(scores.values()) == [expected] * (streams if expected else 0), "the peer disagrees"
                    contests.append((find_theirs, hashes))
                ours, *peers = times(*contests, rounds=rounds)
                peer = peers[0] if peers else None
                (simple,) = times((plain.find, keys[:4]), rounds=2)
                goal = {"zero": (0.1, None), "half": (None, None), "full": (1.8 if blocks == 256 else 3.0, 1.0)}[name]
                label = f"find, {name}, {blocks} blocks, {streams} streams"
                rows.append(row(label, ours, "us", "RadixTree", peer, *goal))
                rows.append(row(label, ours, "us", "dict of sets", simple, None, None))
        del index, tree, plain, find_theirs
        gc.collect()
    return rows


def bench_scattered() -> list[dict[str, Any]]:
    """A chain whose blocks were stored one by one, other streams between them: no two rows are neighbours."""
    index = PrefixIndex(block_size=BLOCK)
    views = [index.open(walk=Walk.CASCADE, name=str(number)) for number in range(3)]
    chain, *others = (Chains(0, 1, seed=seed).queries[0] for seed in range(3))
    views[0].visible = True
    parent = None
    neat = PrefixIndex(block_size=BLOCK)
    view = neat.open(walk=Walk.CASCADE)
    view.visible = True
    view.apply(stored(None, chain))
    for number, block in enumerate(chain):
        views[0].apply(stored(parent, [block]))
        parent = block[1]
        for stream, other in enumerate(others):
            views[stream + 1].apply(stored(other[number - 1][1] if number else None, [other[number]]))
    keys = keys_of(chain)
    scattered, ordered = times((index.find, [keys]), (neat.find, [keys]), rounds=200)
    return [row(f"find, full, {LONG} scattered blocks, 1 stream", scattered, "us", "same, stored in one go", ordered)]


def bench_events(pairs: int) -> list[dict[str, Any]]:
    """Stored and removed events on a loaded index: alone, and all-in with the vLLM dialect's decoding."""
    chains = Chains(pairs, 32, seed=3)
    _index, views, tree, _ = build(chains, peer=True, baseline=False)
    fresh = Chains(0, 1, seed=4)
    rng = fresh.rng
    rows = []
    for size in (1, EVENT, 64):
        count = 4096 // size
        sets = []
        for _ in range(4):  # ours, all-in, peer, and once more for warming up
            sets.append([fresh._chain(size) for _ in range(count)])
        events = [stored(None, blocks) for blocks in sets[0]]
        dialect = DIALECTS["vllm"](DialectOptions())
        payloads = [
            msgpack.packb([1.0, [["BlockStored", [hash_ for _, hash_ in blocks], None,
                                  [token for block, _ in blocks for token in block], BLOCK, None, "GPU", None, None, 0,
                                  "full_attention", None]], 0])
            for blocks in sets[1]
        ]  # fmt: skip
        view = views[rng.randrange(len(views))]

        def all_in(payload: bytes, view: StreamView = view, dialect: Any = dialect) -> None:
            for event in dialect.decode(payload).events:
                view.apply(event)

        def decoded(payload: bytes, dialect: Any = dialect) -> list[Any]:
            return list(dialect.decode(payload).events)

        def peer_all_in(payload: bytes) -> None:
            """The same message for the peer: its binding takes JSON with hashes that are made already."""
            _, ((_, hashes, parent, tokens, size, *_),), _ = msgpack.unpackb(payload)
            locals_ = compute_block_hash_for_seq(tokens, size)
            blocks = [{"block_hash": h, "tokens_hash": t} for h, t in zip(hashes, locals_, strict=True)]
            event = {"event_id": 1, "data": {"stored": {"parent_hash": parent, "blocks": blocks}}, "dp_rank": 0}
            tree.apply_event(0, json.dumps(event).encode())

        def floor(payload: bytes) -> None:
            """What CPython's fastest means need for the numbers alone: no check, no index."""
            _, ((_, _, _, tokens, size, *_),), _ = msgpack.unpackb(payload)
            content_keys(pack_tokens(tokens), size)

        for blocks in sets[3][:20]:
            view.apply(stored(None, blocks))
        messages = []
        if tree is not None:
            messages = [dynamo_stored(10**6 + number, None, blocks) for number, blocks in enumerate(sets[2])]
        alone, decode, least, whole, peer, peer_whole = (
            one / size
            for one in times(
                (view.apply, events),
                (decoded, payloads),
                (floor, payloads),
                (all_in, payloads),
                (lambda message: tree.apply_event(0, message), messages),
                (peer_all_in, payloads if tree is not None else []),
                burst=BURST,
            )
        )
        goal = (1.0, 0.5) if size == EVENT else (None, None)
        label = f"{size}-block event, a block"
        rows.append(row(f"stored all-in (decode, hash, index), {label}", whole, "us", "RadixTree", peer, *goal))
        rows.append(
            row(f"stored all-in, the peer's as well, {label}", whole, "us", "decode, hash, RadixTree", peer_whole)
        )
        rows.append(row(f"stored, unpackb, array and XXH3 alone (floor), {label}", least, "us", "RadixTree", peer))
        rows.append(row(f"stored, hash and index only, {label}", alone, "us", "RadixTree", peer))
        rows.append(row(f"stored, decode only, {label}", decode, "us", "RadixTree", peer))
        removals = [BlockRemoved([hash_ for _, hash_ in reversed(blocks)]) for blocks in sets[0]]
        messages = []
        if tree is not None:
            messages = [
                json.dumps({"event_id": 1, "data": {"removed": {"block_hashes": [h for _, h in reversed(blocks)]}},
                            "dp_rank": 0}).encode()
                for blocks in sets[2]
            ]  # fmt: skip
        gone, peer = (
            one / size
            for one in times(
                (view.apply, removals), (lambda message: tree.apply_event(0, message), messages), burst=BURST
            )
        )
        rows.append(row(f"removed, {label}", gone, "us", "RadixTree", peer))
    copies = [BlockStored([hash_ for _, hash_ in blocks], None, b"", 0, Tier.HOST) for blocks in sets[3]]
    for blocks in sets[3]:
        view.apply(stored(None, blocks))
    elsewhere = views[(views.index(view) + 1) % len(views)]
    again = [stored(None, blocks) for blocks in sets[3]]
    for name, target, events in (
        ("token-less host copy", view, copies),
        ("stored again", view, again),
        ("stored, held by another stream", elsewhere, again),
    ):
        rows.append(row(f"{name}, 64-block event, a block", times((target.apply, events))[0] / 64, "us"))
    return rows


def bench_slices(blocks: int = 262_144) -> list[dict[str, Any]]:
    """Longest CPU time of the thread between two calls of `pace`: how long the GIL may be held."""
    gaps: list[float] = []
    cpu = time.thread_time
    last = cpu()

    def pace() -> None:
        nonlocal last
        now = cpu()
        gaps.append(now - last)
        last = cpu()

    rng = random.Random(6)
    chain = [rng.getrandbits(63) for _ in range(blocks)]
    events = []
    tokens = os.urandom(4 * BLOCK * 1024)
    for start in range(0, blocks, 1024):
        parent = chain[start - 1] if start else None
        events.append(BlockStored(chain[start : start + 1024], parent, tokens, BLOCK))
    index = PrefixIndex(block_size=BLOCK, pace=pace)
    rows = []
    gc.collect()
    gc.freeze()  # as a server does after its start: the events above are not what is measured

    def measure(name: str, work: Callable[[], object]) -> None:
        nonlocal last
        gaps.clear()
        start = last = cpu()
        work()
        took = cpu() - start
        pace()
        gaps.sort()
        rows.append(row(f"{name} {blocks:,} blocks, longest slice", gaps[-1] * 1e3, "ms", "budget", BUDGET, 2.0, 1.0))
        rows.append(row(f"{name} {blocks:,} blocks, p99.9 slice", gaps[int(len(gaps) * 0.999)] * 1e3, "ms",
                        "budget", BUDGET, 1.0))  # fmt: skip
        rows.append(row(f"{name} {blocks:,} blocks, whole", took * 1e3, "ms"))

    def fill(view: StreamView) -> None:
        for event in events:
            view.apply(event)
            pace()

    view = index.open(walk=Walk.CASCADE, max_blocks=blocks)
    view.visible = True
    measure("store", lambda: fill(view))
    shadow = view.shadow()
    measure("build in a shadow", lambda: fill(shadow))
    measure("swap", lambda: view.swap(shadow))
    measure("clear", view.clear)
    fill(view)
    view.apply(BlockStored(chain[:1], None, b"", 0, Tier.HOST))
    measure("clear the device tier of", lambda: view.apply(AllBlocksCleared()))
    view.clear()
    fill(view)
    measure("close", view.close)
    gc.unfreeze()
    return rows


def bench_gc(pairs: int) -> list[dict[str, Any]]:
    """The index made, gc.freeze(), then filled: as a server does it."""
    index = PrefixIndex(block_size=BLOCK)
    views = [index.open(walk=Walk.CASCADE, max_blocks=10**9) for _ in range(8)]
    gc.collect()
    gc.freeze()
    empty = _longest(gc.collect)
    rng = random.Random(8)
    for number in range(pairs // 64 // 8):
        for view in views:
            view.apply(BlockStored([rng.getrandbits(63) for _ in range(64)], None, os.urandom(64 * 4 * BLOCK), BLOCK))
            if number % 4 == 0:
                view.apply(BlockStored([rng.getrandbits(63)], 1, os.urandom(4 * BLOCK), BLOCK))
    total = sum(view.known for view in views)
    full = _longest(gc.collect)
    gc.unfreeze()
    return [row(f"full collection with {total:,} pairs, longest of 5", full, "ms", "empty index", empty)]


def _longest(work: Callable[[], object]) -> float:
    """CPU ms of the longest of five calls."""
    taken = []
    for _ in range(5):
        start = time.thread_time()
        work()
        taken.append(time.thread_time() - start)
    return max(taken) * 1e3


def bench_beside_writer() -> list[dict[str, Any]]:
    """find while another thread stores and removes: restarts must be rare."""
    index = PrefixIndex(block_size=BLOCK)
    steady, churn = (index.open(walk=Walk.CASCADE, name=name) for name in ("steady", "churn"))
    steady.visible = churn.visible = True
    chain = Chains(0, 1, seed=11).queries[0]
    steady.apply(stored(None, chain))
    keys = keys_of(chain)
    (alone,) = times((index.find, [keys]), rounds=300)
    fresh = Chains(0, 1, seed=12)
    sets = [fresh._chain(EVENT) for _ in range(64)]
    pairs = [(stored(None, one), BlockRemoved([hash_ for _, hash_ in reversed(one)])) for one in sets]
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for store, remove in pairs:
                churn.apply(store)
                churn.apply(remove)
            time.sleep(0.0001)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        (beside,) = times((index.find, [keys]), rounds=300)
    finally:
        stop.set()
        thread.join()
    return [row(f"find, full, {LONG} blocks, beside a writer that never rests", beside, "us", "alone", alone)]


def bench_hash() -> list[dict[str, Any]]:
    rows = []
    for size in (16, 128):
        rng = random.Random(size)
        prompts = [[rng.randrange(150_000) for _ in range(32_768)] for _ in range(4)]
        ours, peer = times(
            (lambda tokens, size=size: content_keys(pack_tokens(tokens), size), prompts),
            (lambda tokens, size=size: compute_block_hash_for_seq(tokens, size), prompts if RadixTree else []),
            rounds=10,
        )
        rows.append(row(f"pack and chain 32k tokens, block {size}", ours, "us", "Dynamo block hash", peer,
                        1.8 if size == 16 else 1.1, 1.0))  # fmt: skip
    return rows


def rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(kind: str, pairs: int, streams: int) -> float:
    """Bytes a (stream, block) of a structure built in this process: chains mostly its stream's own."""
    rng = random.Random(21)
    gc.collect()
    count = pairs // streams // FILL
    tree = RadixTree() if kind == "peer" else None
    index = PrefixIndex(block_size=BLOCK)
    views = [index.open(walk=Walk.CASCADE, max_blocks=10**9) for _ in range(streams)]
    before = rss()
    total = 0
    for number in range(count):
        shared = os.urandom(4 * BLOCK * FILL)  # one prompt in four is held by all streams
        for stream in range(streams):
            tokens = shared if number % 4 == 0 else os.urandom(4 * BLOCK * FILL)
            hashes = [rng.getrandbits(63) for _ in range(FILL)]
            total += FILL
            if tree is None:
                views[stream].apply(BlockStored(hashes, None, tokens, BLOCK))
            else:
                locals_ = [int.from_bytes(tokens[n * 64 : n * 64 + 7]) for n in range(FILL)]
                blocks = [{"block_hash": h, "tokens_hash": t} for h, t in zip(hashes, locals_, strict=True)]
                event = {"event_id": number, "data": {"stored": {"parent_hash": None, "blocks": blocks}}, "dp_rank": 0}
                tree.apply_event(stream, json.dumps(event).encode())
    gc.collect()
    return (rss() - before) / total


def bench_memory(pairs: int) -> list[dict[str, Any]]:
    figures = {}
    for kind in ("ours", "peer"):
        if kind == "peer" and RadixTree is None:
            continue
        command = [sys.executable, "-m", "tests.bench.bench_index", "--memory", kind, str(pairs)]
        figures[kind] = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    label = f"memory a (stream, block), {pairs:,} pairs"
    return [row(label, figures["ours"], "B", "RadixTree", figures.get("peer"), 5.5, 1.0)]


def row(
    name: str,
    ours: float,
    unit: str,
    peer: str | None = None,
    peer_value: float | None = None,
    goal: float | None = None,
    aim: float | None = None,
) -> dict[str, Any]:
    return {
        "name": name, "ours": ours, "unit": unit, "peer": peer, "peer_value": peer_value,
        "ratio": ours / peer_value if peer_value else None, "goal": goal, "aim": aim,
    }  # fmt: skip


def run(*, large: bool = False) -> list[dict[str, Any]]:
    """Every measurement, about a minute (some ten with `large`): 100,000 pairs, or 1 M, for the peer is slow to fill;
    1 M, or 10 M, for memory and the garbage collector."""
    pairs = 1_000_000 if large else 100_000
    rows = bench_hash()
    rows += bench_find(pairs, (4, 32, 128))
    rows += bench_scattered()
    rows += bench_beside_writer()
    rows += bench_events(pairs // 2)
    rows += bench_slices()
    rows += bench_gc(20 * pairs)
    rows += bench_memory(10 * pairs)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--large", action="store_true", help="ten times as many (stream, block) pairs: 10 M for memory and GC (4 GB)"
    )
    parser.add_argument("--only", help="one part: hash, find, scattered, beside_writer, events, slices, gc, memory")
    parser.add_argument("--memory", nargs=2, metavar=("KIND", "PAIRS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        print(memory(arguments.memory[0], int(arguments.memory[1]), 8))
        return
    if arguments.only:
        part = globals()[f"bench_{arguments.only}"]
        pairs = 1_000_000 if arguments.large else 100_000
        extra = {"find": (pairs, (4, 32, 128)), "events": (pairs // 2,), "gc": (20 * pairs,), "memory": (10 * pairs,)}
        rows = part(*extra.get(arguments.only, ()))
    else:
        rows = run(large=arguments.large)
    table = Table("what", "ours", "against", "theirs", "ratio", "goal", "aim", box=None)
    for one in rows:
        ours, peer, ratio, goal, aim = (
            "" if one[key] is None else f"{one[key]:.2f}" for key in ("ours", "peer_value", "ratio", "goal", "aim")
        )
        style = "" if not one["goal"] or not one["ratio"] else "green" if one["ratio"] <= one["goal"] else "red"
        table.add_row(one["name"], f"{ours} {one['unit']}", one["peer"] or "", peer, ratio, goal, aim, style=style)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
