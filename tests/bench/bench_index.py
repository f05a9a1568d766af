"""What the index costs beside Dynamo's RadixTree (Rust, through its Python binding), in one run.

    python -m tests.bench.bench_index [--large] [--only PART]

1 M (stream, block) pairs; with --large 10 M (3 GB, 12 minutes). Every time is the lower quartile of calls that take
turns with the peer's, so a busy machine treats both alike. It is what a caller waits: the tree answers from a thread of
its own, and waking up an idle core for it can be most of that (40 of 55 us an event on one machine). The rows
"one core" are without it: there both threads have the same core, and the time of a call is the work of both.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgpack

from kvindex.dialects import DIALECTS, DialectOptions
from kvindex.events import AllBlocksCleared, BlockRemoved, BlockStored, Tier
from kvindex.hashing import content_keys, pack_tokens
from kvindex.index import PrefixIndex, StreamView, Walk
from tests.bench.rows import Row, log, row, told

RadixTree: Any = None
compute_block_hash_for_seq: Any = None
with contextlib.suppress(ImportError):  # the bench extra is not installed
    from dynamo._core import RadixTree, compute_block_hash_for_seq

PEER = "RadixTree"
BLOCK = 16
EVENT = 16  # blocks a stored event
LONG = 2048
FILL, SHARED = 64, 16
"""Blocks of a chain that no query asks for, and how many of them all such chains have in common."""
STREAMS = (4, 32, 128)
BUDGET = 0.5  # ms, of a slice
clock = time.perf_counter


def times(*contests: tuple[Callable[[Any], Any], list[Any]], rounds: int = 1) -> list[float]:
    """Time of one call of each contestant, in us: lower quartile, turn by turn. 0 of one without inputs."""
    taken: list[list[float]] = [[] for _ in contests]
    for _ in range(rounds):
        for number in range(max(len(inputs) for _, inputs in contests)):
            for (work, inputs), mine in zip(contests, taken, strict=True):
                if number < len(inputs):
                    start = clock()
                    work(inputs[number])
                    mine.append(clock() - start)
    return [sorted(mine)[len(mine) // 4] * 1e6 if mine else 0.0 for mine in taken]


class Chain(NamedTuple):
    """Consecutive blocks: token ids as packed uint32, and engine hashes, random 63-bit ints as real engines have."""

    tokens: bytes
    hashes: list[Any]

    def part(self, start: int, stop: int) -> Chain:
        return Chain(self.tokens[4 * BLOCK * start : 4 * BLOCK * stop], self.hashes[start:stop])

    def ids(self) -> list[int]:
        return array("I", self.tokens).tolist()

    def keys(self) -> list[bytes]:
        return content_keys(self.tokens, BLOCK)

    def locals(self) -> list[int]:
        """The peer's hashes of the tokens alone; without the peer []."""
        return compute_block_hash_for_seq(self.ids(), BLOCK) if RadixTree else []


def chain(rng: random.Random, blocks: int) -> Chain:
    tokens = array("I", (rng.randrange(150_000) for _ in range(blocks * BLOCK)))
    return Chain(tokens.tobytes(), [rng.getrandbits(63) for _ in range(blocks)])


def random_chain(rng: random.Random, blocks: int) -> Chain:
    """Tokens that nobody has to understand: quickly made."""
    return Chain(rng.randbytes(4 * BLOCK * blocks), [rng.getrandbits(63) for _ in range(blocks)])


def stored(parent: int | None, blocks: Chain) -> BlockStored:
    return BlockStored(blocks.hashes, parent, blocks.tokens, BLOCK)


def removed(blocks: Chain) -> BlockRemoved:
    return BlockRemoved(blocks.hashes[::-1])


def theirs_stored(parent: int | None, hashes: list[int], locals_: list[int]) -> bytes:
    blocks = [{"block_hash": h, "tokens_hash": t} for h, t in zip(hashes, locals_, strict=True)]
    event = {"event_id": 1, "data": {"stored": {"parent_hash": parent, "blocks": blocks}}, "dp_rank": 0}
    return json.dumps(event).encode()


def theirs_removed(blocks: Chain) -> bytes:
    return json.dumps(
        {"event_id": 1, "data": {"removed": {"block_hashes": blocks.hashes[::-1]}}, "dp_rank": 0}
    ).encode()


class Fleet:
    """`pairs` (stream, block) pairs: long chains, held by all streams, that queries ask for, and short ones around."""

    def __init__(self, pairs: int, streams: int, seed: int = 1) -> None:
        self._rng = random.Random(seed)
        self.streams = streams
        self.long = [chain(self._rng, LONG) for _ in range(max(2, min(40, pairs // 2 // (LONG * streams))))]
        held = len(self.long) * LONG * streams * 3 // 4  # of one in two every stream has the first half
        self._fillers = max(0, pairs - held) // (FILL * streams)
        self._shared = chain(self._rng, SHARED)

    def events(self) -> Iterator[tuple[int, int | None, Chain, list[int]]]:
        """(stream, parent, blocks, the peer's hashes), streams and chains taking turns as in a running fleet."""
        locals_ = [one.locals() for one in self.long]
        shared = self._shared.locals()
        filler = 0
        for start in range(0, LONG, EVENT):
            for number, one in enumerate(self.long):
                if number % 2 and start >= LONG // 2:
                    continue
                blocks, parent = one.part(start, start + EVENT), one.hashes[start - 1] if start else None
                for stream in range(self.streams):
                    yield stream, parent, blocks, locals_[number][start : start + EVENT]
            while filler < self._fillers * (start + EVENT) // LONG:
                filler += 1
                for stream in range(self.streams):
                    yield stream, None, self._shared, shared
                    yield stream, self._shared.hashes[-1], *self._own()

    def _own(self) -> tuple[Chain, list[int]]:
        """Blocks of one stream alone; what the peer makes of their tokens does not matter."""
        own = random_chain(self._rng, FILL - SHARED)
        return own, [self._rng.getrandbits(63) for _ in own.hashes]

    def build(self, *, peer: bool = True) -> tuple[PrefixIndex, list[StreamView], Any]:
        """Both indexes, filled; the peer's is None where it is not installed or not wanted."""
        index = PrefixIndex(block_size=BLOCK)
        views = [index.open(walk=Walk.CASCADE, max_blocks=10**9, name=str(number)) for number in range(self.streams)]
        for view in views:
            view.visible = True
        tree = RadixTree() if peer and RadixTree else None
        for stream, parent, blocks, locals_ in self.events():
            views[stream].apply(stored(parent, blocks))
            if tree is not None:
                tree.apply_event(stream, theirs_stored(parent, blocks.hashes, locals_))
        return index, views, tree


# --- look-ups ---


def bench_find(pairs: int) -> list[Row]:
    rows = []
    for streams in STREAMS:
        log.info("index: look-ups among %s pairs of %d streams", f"{pairs:,}", streams)
        rows += _find(Fleet(pairs, streams))
        gc.collect()
    return rows + bench_growth(pairs)


def bench_growth(pairs: int) -> list[Row]:
    """The same chain in two indexes, one ten times the other."""
    log.info("index: growth with blocks")
    sizes = (pairs, pairs // 10)
    fleets = [Fleet(size, 32) for size in sizes]
    indexes = [fleet.build(peer=False)[0] for fleet in fleets]
    contests = [(one.find, [fleet.long[0].keys()]) for one, fleet in zip(indexes, fleets, strict=True)]
    large, small = times(*contests, rounds=60)
    name = f"growth with blocks: find, full, {LONG} blocks, 32 streams, {sizes[0]:,} pairs"
    return [row(name, large, "us", f"{sizes[1]:,} pairs", small)]


def _find(fleet: Fleet) -> list[Row]:
    index, _, tree = fleet.build()

    def theirs(hashes: list[int]) -> Any:
        return tree.find_matches(hashes).scores

    rng = random.Random(99)
    unknown = [chain(rng, LONG) for _ in range(2)]
    full = fleet.long[::2]
    rows = []
    for blocks in (256, LONG):
        whole = [one.part(0, blocks) for one in full]
        cases = {
            "zero": [one.part(0, blocks) for one in unknown],
            "half": [_half(one, unknown[0]) for one in whole] if blocks < LONG else fleet.long[1::2],
            "full": whole,
        }
        for name, chains in cases.items():
            keys = [one.keys() for one in chains]
            hashes = [one.locals() for one in chains] if tree is not None else []
            expected = {"zero": 0, "half": blocks // 2, "full": blocks}[name]
            for found in [[sum(one) for one in index.find(keys[0]).values()]] + [
                list(theirs(one).values()) for one in hashes[:1]
            ]:
                assert found == [expected] * (fleet.streams if expected else 0), (name, blocks, found)
            ours, peer = times((index.find, keys), (theirs, hashes), rounds=max(10, 60 // len(keys)))
            goal = {"zero": (0.1, None), "half": (None, None), "full": (1.8 if blocks < LONG else 3.0, 1.0)}[name]
            rows.append(row(f"find, {name}, {blocks} blocks, {fleet.streams} streams", ours, "us", PEER, peer, *goal))
    return rows


def _half(known: Chain, unknown: Chain) -> Chain:
    half = len(known.hashes) // 2
    first, rest = known.part(0, half), unknown.part(0, half)
    return Chain(first.tokens + rest.tokens, first.hashes + rest.hashes)


def bench_scattered() -> list[Row]:
    """A chain whose blocks were stored one by one, other streams' between them: no two rows are neighbours."""
    log.info("index: scattered rows, and a writer that never rests")
    index, neat = PrefixIndex(block_size=BLOCK), PrefixIndex(block_size=BLOCK)
    views = [index.open(walk=Walk.CASCADE, name=str(number)) for number in range(3)]
    asked, *others = (chain(random.Random(seed), LONG) for seed in range(3))
    view = neat.open(walk=Walk.CASCADE)
    views[0].visible = view.visible = True
    view.apply(stored(None, asked))
    for number in range(LONG):
        for one, which in zip((asked, *others), views, strict=True):
            which.apply(stored(one.hashes[number - 1] if number else None, one.part(number, number + 1)))
    keys = asked.keys()
    scattered, ordered = times((index.find, [keys]), (neat.find, [keys]), rounds=200)
    return [row(f"find, full, {LONG} scattered blocks, 1 stream", scattered, "us", "stored in one go", ordered)]


def bench_beside_writer() -> list[Row]:
    """find while another thread stores and removes: restarts must be rare."""
    index = PrefixIndex(block_size=BLOCK)
    steady, churn = (index.open(walk=Walk.CASCADE, name=name) for name in ("steady", "churn"))
    steady.visible = churn.visible = True
    rng = random.Random(11)
    asked = chain(rng, LONG)
    steady.apply(stored(None, asked))
    keys = asked.keys()
    (alone,) = times((index.find, [keys]), rounds=300)
    pairs = [(stored(None, one), removed(one)) for one in (chain(rng, EVENT) for _ in range(64))]
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


# --- events ---


def message(*chains: Chain) -> bytes:
    """vLLM's batch of a stored event each."""
    fields = (None, "GPU", None, None, 0, "full_attention", None)
    events = [["BlockStored", one.hashes, None, one.ids(), BLOCK, *fields] for one in chains]
    return bytes(msgpack.packb([1.0, events, 0]))


def bench_events(pairs: int) -> list[Row]:
    """Stored and removed events on a loaded index: apply alone, and all-in with the vLLM dialect's decoding."""
    log.info("index: stored and removed events on %s pairs", f"{pairs:,}")
    _index, views, tree = Fleet(pairs, 32, seed=3).build()
    rng = random.Random(4)
    rows = []
    for size in (1, EVENT, 64):
        rows += _events(rng, views[rng.randrange(32)], tree, size)
    again = [chain(rng, 64) for _ in range(64)]
    for name, view, make in (
        ("new", views[0], stored), ("again", views[0], stored), ("held by another stream", views[1], stored),
    ):  # fmt: skip
        (cost,) = times((view.apply, [make(None, one) for one in again]))
        if name == "new":
            new = cost
        else:
            rows.append(row(f"stored, {name}, 64-block event, a block", cost / 64, "us", "new blocks", new / 64))
    copies = [BlockStored(one.hashes, None, b"", 0, Tier.HOST) for one in again]
    rows.append(row("host copy without tokens, 64-block event, a block", times((views[0].apply, copies))[0] / 64, "us",
                    "new blocks", new / 64))  # fmt: skip
    large = message(*(chain(rng, EVENT) for _ in range(6000)))
    decode, unpack = times((_decoded, [large]), (msgpack.unpackb, [large]), rounds=5)
    name = f"decoding a message of {len(large) / 2**20:.0f} MiB, event by event"
    return [*rows, row(name, decode / 1e3, "ms", "msgpack.unpackb alone", unpack / 1e3)]


def _decoded(payload: bytes) -> None:
    for _ in DIALECT.decode(payload).events:
        pass


DIALECT = DIALECTS["vllm"](DialectOptions())


def _events(rng: random.Random, view: StreamView, tree: Any, size: int) -> list[Row]:
    """Each contestant has blocks of its own, all new to the index."""
    ours, wholes, theirs = ([chain(rng, size) for _ in range(4096 // size)] for _ in range(3))
    payloads = [message(one) for one in wholes]

    def whole(payload: bytes) -> None:
        for event in DIALECT.decode(payload).events:
            view.apply(event)

    def their_whole(payload: bytes) -> None:
        """The same message for the peer: its binding takes JSON with hashes that are made already."""
        _, ((_, hashes, parent, tokens, block, *_),), _ = msgpack.unpackb(payload)
        tree.apply_event(0, theirs_stored(parent, hashes, compute_block_hash_for_seq(tokens, block)))

    def floor(payload: bytes) -> None:
        """What CPython's fastest means need for the numbers alone: no check, no index."""
        _, ((_, _, _, tokens, block, *_),), _ = msgpack.unpackb(payload)
        content_keys(pack_tokens(tokens), block)

    def apply_theirs(event: bytes) -> None:
        tree.apply_event(0, event)

    for _ in range(20):
        view.apply(stored(None, chain(rng, size)))
    events = [theirs_stored(None, one.hashes, one.locals()) for one in theirs] if tree is not None else []
    alone, decode, unpack, least, all_in, peer, peer_whole = (
        one / size
        for one in times(
            (view.apply, [stored(None, one) for one in ours]),
            (_decoded, payloads),
            (msgpack.unpackb, payloads),
            (floor, payloads),
            (whole, payloads),
            (apply_theirs, events),
            (their_whole, payloads if tree is not None else []),
        )
    )
    removals = [theirs_removed(one) for one in theirs] if tree is not None else []
    gone, peer_gone = (
        one / size for one in times((view.apply, [removed(one) for one in ours]), (apply_theirs, removals))
    )
    goal = (1.0, 0.5) if size == EVENT else ()
    label = f"{size}-block event, a block"
    return [
        row(f"stored all-in (decode, hash, index), {label}", all_in, "us", PEER, peer, *goal),
        row(f"stored all-in, the peer's as well, {label}", all_in, "us", "decode, hash, RadixTree", peer_whole),
        row(f"stored, unpackb, array and XXH3 alone (floor), {label}", least, "us", PEER, peer),
        row(f"stored, hash and index only, {label}", alone, "us", PEER, peer),
        row(f"decoding, {label}", decode, "us", "msgpack.unpackb alone", unpack),
        row(f"removed, {label}", gone, "us", PEER, peer_gone),
    ]


def bench_one_core(pairs: int) -> list[Row]:
    """Look-ups and events with one core for our thread and the tree's: whose work is less."""
    log.info("index: one core for both, %s pairs of 32 streams", f"{pairs:,}")
    with one_core():
        rows = _find(Fleet(pairs, 32, seed=5))
        _index, views, tree = Fleet(pairs, 32, seed=6).build()
        rows += _events(random.Random(7), views[0], tree, EVENT)
    beside = (one for one in rows if PEER in one["peer"])
    return [{**one, "name": f"one core: {one['name']}", "goal": None, "aim": None} for one in beside]


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """This thread, and those it makes meanwhile, have one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def bench_slices(blocks: int = 262_144) -> list[Row]:
    """A whole stream stored, cleared, exchanged: CPU, and the longest time of the thread between two calls of `pace`,
    which is how long the interpreter lock may be held."""
    log.info("index: store, snapshot, clear and close of a stream of %s blocks", f"{blocks:,}")
    gaps: list[float] = []
    cpu = time.thread_time
    last = cpu()

    def pace() -> None:
        nonlocal last
        now = cpu()
        gaps.append(now - last)
        last = cpu()

    rng = random.Random(6)
    parts = [random_chain(rng, 1024) for _ in range(blocks // 1024)]
    parents = [None, *(one.hashes[-1] for one in parts)]
    events = [stored(parent, one) for parent, one in zip(parents, parts, strict=False)]
    index = PrefixIndex(block_size=BLOCK, pace=pace)
    rows = []
    taken: dict[str, float] = {}
    gc.collect()
    gc.freeze()  # as a server does after its start: the events above are not what is measured

    def measure(name: str, work: Callable[[], object]) -> None:
        nonlocal last
        gaps.clear()
        start = last = cpu()
        work()
        taken[name] = (cpu() - start) * 1e3
        pace()
        rows.append(row(f"{name}, {blocks:,} blocks, longest slice", max(gaps) * 1e3, "ms", "budget", BUDGET, 2.0, 1.0))

    def fill(view: StreamView) -> None:
        for event in events:
            view.apply(event)
            pace()

    view = index.open(walk=Walk.CASCADE, max_blocks=blocks)
    view.visible = True
    measure("store", lambda: fill(view))
    shadow = view.shadow()
    measure("snapshot, building beside", lambda: fill(shadow))
    measure("snapshot, swap", lambda: view.swap(shadow))
    measure("clear", view.clear)
    fill(view)
    view.apply(BlockStored(parts[0].hashes[:1], None, b"", 0, Tier.HOST))
    measure("clear of the device tier alone", lambda: view.apply(AllBlocksCleared()))
    view.clear()
    fill(view)
    measure("close", view.close)
    gc.unfreeze()
    taken["snapshot, build and swap"] = taken["snapshot, building beside"] + taken["snapshot, swap"]
    for name, (how, theirs) in _whole_stream(parents, parts).items():
        rows.append(row(f"{name}, {blocks:,} blocks", taken[name], "ms", f"{PEER}: {how}", theirs))
    return rows


def _whole_stream(parents: Sequence[int | None], parts: list[Chain]) -> dict[str, tuple[str, float]]:
    """Name -> what the peer does for it, CPU ms; it has no snapshot, so clear and store again."""
    if not RadixTree:
        return {}
    tree = RadixTree()
    rng = random.Random(7)
    events = [
        theirs_stored(parent, one.hashes, [rng.getrandbits(63) for _ in one.hashes])
        for parent, one in zip(parents, parts, strict=False)
    ]

    def fill() -> None:
        for event in events:
            tree.apply_event(0, event)

    def took(work: Callable[[], object]) -> float:
        start = time.process_time()  # the tree has a thread of its own
        work()
        assert tree.find_matches([1]).scores == {}, "an answer: what was asked before is done"
        return (time.process_time() - start) * 1e3

    store, clear, again = took(fill), took(lambda: tree.clear_all_blocks(0)), took(fill)
    close = took(lambda: tree.remove_worker(0))
    return {
        "store": ("store", store), "snapshot, build and swap": ("clear, store", clear + again),
        "clear": ("clear", clear), "close": ("remove_worker", close),
    }  # fmt: skip


# --- hashing, memory ---


def bench_hash() -> list[Row]:
    log.info("index: hashing")
    rows = []
    for size, goal in ((16, 1.8), (128, 1.1)):
        rng = random.Random(size)
        prompts = [[rng.randrange(150_000) for _ in range(32_768)] for _ in range(4)]

        def ours(tokens: list[int], size: int = size) -> None:
            content_keys(pack_tokens(tokens), size)

        def theirs(tokens: list[int], size: int = size) -> None:
            compute_block_hash_for_seq(tokens, size)

        mine, peer = times((ours, prompts), (theirs, prompts if RadixTree else []), rounds=10)
        name = f"pack and chain 32k tokens, block {size}"
        rows.append(row(name, mine, "us", "Dynamo block hash", peer, goal, 1.0))
    return rows


def bench_gc(pairs: int = 2_000_000) -> list[Row]:
    """The index made, gc.freeze(), then filled: as a server does it."""
    log.info("index: garbage collection with %s pairs", f"{pairs:,}")
    index = PrefixIndex(block_size=BLOCK)
    views = [index.open(walk=Walk.CASCADE, max_blocks=10**9) for _ in range(8)]
    gc.collect()
    gc.freeze()
    empty = _longest(gc.collect)
    rng = random.Random(8)
    for number in range(pairs // 64 // 8):
        for view in views:
            view.apply(stored(None, random_chain(rng, 64)))
            if number % 4 == 0:
                view.apply(stored(1, random_chain(rng, 1)))
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
            hashes: list[Any] = [rng.getrandbits(63) for _ in range(FILL)]
            total += FILL
            if tree is None:
                views[stream].apply(BlockStored(hashes, None, tokens, BLOCK))
            else:
                locals_ = [int.from_bytes(tokens[n * 64 : n * 64 + 7]) for n in range(FILL)]
                tree.apply_event(stream, theirs_stored(None, hashes, locals_))
    gc.collect()
    return (rss() - before) / total


def bench_memory(pairs: int) -> list[Row]:
    log.info("index: memory of %s pairs", f"{pairs:,}")
    figures = {}
    for kind in ("ours", "peer"):
        if kind == "peer" and RadixTree is None:
            continue
        command = [sys.executable, "-m", "tests.bench.bench_index", "--memory", kind, str(pairs)]
        figures[kind] = float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return [
        row(f"memory a (stream, block), {pairs:,} pairs", figures["ours"], "B", PEER, figures.get("peer"), 5.5, 1.0)
    ]


PARTS: dict[str, Callable[[int], list[Row]]] = {
    "hash": lambda _: bench_hash(),
    "find": bench_find,
    "scattered": lambda _: bench_scattered(),
    "beside_writer": lambda _: bench_beside_writer(),
    "events": lambda pairs: bench_events(pairs // 4),
    "one_core": lambda pairs: bench_one_core(pairs // 4),
    "slices": lambda _: bench_slices(),
    "gc": lambda _: bench_gc(),
    "memory": bench_memory,
}


def run(*, large: bool = False, only: str | None = None) -> list[Row]:
    pairs = 10_000_000 if large else 1_000_000
    return [found for name, part in PARTS.items() if only in (None, name) for found in part(pairs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="10 M pairs")
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--memory", nargs=2, metavar=("KIND", "PAIRS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.memory:
        print(memory(given.memory[0], int(given.memory[1]), 8))
        return
    for one in run(large=given.large, only=given.only):
        print(told(one), flush=True)


if __name__ == "__main__":
    main()
