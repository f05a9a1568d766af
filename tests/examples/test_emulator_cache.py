"""The emulated engine's scheduler and cache: hand-computed tables, then random traces against a model of its events."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest

from examples.emulator.engine import Engine, EngineConfig, Request
from examples.emulator.hashing import block_hash, root_hash
from examples.emulator.pool import Content, HostTier
from examples.emulator.wire import Cleared, Removed, Stored

ROOT = root_hash("test")


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(**{"root": ROOT, "block_size": 4, "blocks": 7, **changes})


def request(tokens: list[int], max_tokens: int = 1, **changes: Any) -> Request:
    return Request(prompt=tokens, answer=itertools.count(90_000), max_tokens=max_tokens, **changes)


def drain(engine: Engine, *requests: Request, now: float = 0.0) -> list[list[Any]]:
    """Add requests and run until idle; the batches in order."""
    for item in requests:
        engine.add(item)
    batches: list[list[Any]] = []
    for _ in range(10_000):
        if not (engine.waiting or engine.running):
            break
        step = engine.schedule(now)
        if step is None:
            batches.append(engine.take_events())
            assert engine.next_ready is not None, "the engine is stuck"
            now = engine.next_ready
        else:
            batches += engine.finish(step).batches
    else:
        pytest.fail("the engine does not come to an end")
    return [batch for batch in batches if batch]


def names(batches: list[list[Any]]) -> list[list[str]]:
    """Events as short text: `+GPU 10,14` = Stored with the first token of each block, `-GPU 10` = Removed."""
    known: dict[Any, int] = NAMED
    rows = []
    for batch in batches:
        row = []
        for event in batch:
            if isinstance(event, Cleared):
                row.append("clear")
                continue
            if isinstance(event, Stored):
                for index, digest in enumerate(event.block_hashes):
                    known[digest] = event.token_ids[index * event.block_size]
            sign = "+" if isinstance(event, Stored) else "-"
            row.append(f"{sign}{event.medium} " + ",".join(str(known[digest]) for digest in event.block_hashes))
        rows.append(row)
    return rows


NAMED: dict[Any, int] = {}


def run(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


# 6 usable blocks of 4 tokens, one prompt at a time, one token generated. The comment is the free queue afterwards, by
# hand: next to be taken first, `_` = block without content, a number = first token of a cached block.
TABLE = [
    # prompt, cached tokens, batches
    (run(100, 9), 0, [["+GPU 100,104"]]),  # _ _ _ _ 104 100
    (run(100, 9), 8, []),  # both blocks hit, nothing new: _ _ _ _ 104 100
    (run(100, 8), 4, [["+GPU 104"]]),  # exactly two blocks: the second is computed and kept twice: _ _ _ 104 104 100
    (run(200, 9), 0, [["+GPU 200,204"]]),  # _ 104 104 100 204 200
    (run(300, 13), 0, [["-GPU 104", "-GPU 104", "-GPU 100", "+GPU 300,304,308"]]),  # _ 204 200 308 304 300
    (run(200, 5), 4, []),  # a hit makes 200 the latest: _ 204 308 304 300 200
    (run(100, 9), 0, [["-GPU 204", "-GPU 308", "+GPU 100,104"]]),  # _ 304 300 200 104 100
    (run(200, 9), 4, [["-GPU 304", "+GPU 204"]]),  # _ 300 104 100 204 200
]


def test_table() -> None:
    engine = Engine(config())
    for number, (prompt, cached, expected) in enumerate(TABLE):
        item = request(prompt)
        batches = drain(engine, item)
        assert (item.cached_tokens, names(batches)) == (cached, expected), f"row {number}"
        engine.pool.check()


@pytest.mark.parametrize(
    ("tokens", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (24, 20)], ids=str
)
def test_the_last_token_is_always_computed(tokens: int, hit: int) -> None:
    engine = Engine(config(blocks=32))
    drain(engine, request(run(1, tokens)))
    again = request(run(1, tokens))
    drain(engine, again)
    assert again.cached_tokens == hit == (tokens - 1) // 4 * 4


def test_decode_blocks_are_stored_one_by_one_and_hit_in_the_next_turn() -> None:
    engine = Engine(config(blocks=32))
    first = request(run(1, 6), max_tokens=8)
    batches = names(drain(engine, first))
    # 6 + 8 tokens, the last one sampled but never computed: 13 computed, three full blocks
    assert batches == [["+GPU 1"], ["+GPU 5"], ["+GPU 90002"]]
    second = request([*first.tokens, 7, 7])
    drain(engine, second)
    assert second.cached_tokens == 12


def test_chunked_prefill_stores_chunk_by_chunk() -> None:
    engine = Engine(config(blocks=32, max_batched_tokens=8))
    assert names(drain(engine, request(run(1, 18)))) == [["+GPU 1,5"], ["+GPU 9,13"]]


def test_blocks_in_use_are_never_evicted() -> None:
    engine = Engine(config())
    holder = request(run(1, 9), max_tokens=11)  # five blocks in the end
    engine.add(holder)
    step = engine.schedule(0.0)
    assert step is not None
    engine.finish(step)
    other = request(run(50, 13))  # four blocks: does not fit beside three
    engine.add(other)
    while holder in engine.running:
        step = engine.schedule(0.0)
        assert step is not None
        assert other in engine.waiting
        events = [event for batch in engine.finish(step).batches for event in batch]
        assert not any(isinstance(event, Removed) for event in events)
    drain(engine)
    assert other.generated == 1


def test_a_request_that_can_never_fit_is_refused() -> None:
    engine = Engine(config())
    with pytest.raises(ValueError, match="do not fit"):
        engine.add(request(run(1, 20), max_tokens=5))
    engine.add(request(run(1, 20), max_tokens=4))


def test_preemption_gives_the_blocks_of_the_youngest_back() -> None:
    engine = Engine(config())
    old, young = request(run(1, 8), max_tokens=12), request(run(50, 8), max_tokens=12)
    drain(engine, old, young)
    assert engine.counters.preemptions > 0
    assert (old.generated, young.generated) == (12, 12)
    assert young.tokens[8:] == [90_000 + n for n in range(12)], "a preempted request goes on where it was"
    engine.pool.check()


def test_a_step_that_preempts_admits_nobody() -> None:
    engine = Engine(config())
    for start in (1, 50):
        engine.add(request(run(start, 8), max_tokens=12))
    while not engine.counters.preemptions:
        step = engine.schedule(0.0)
        assert step is not None
        engine.finish(step)
    (victim,) = engine.waiting
    assert [item for item, _ in step.work] == engine.running
    assert victim.blocks == []
    drain(engine)


def test_the_oldest_copy_of_a_block_is_the_one_that_hits() -> None:
    engine = Engine(config(blocks=32))
    drain(engine, request(run(1, 8)))
    (old,) = engine.pool.find([block_hash(ROOT, run(1, 4))])
    parent = old.content.digest if old.content else b""
    (before,) = engine.pool.find([block_hash(parent, run(5, 4))])
    drain(engine, request(run(1, 8)))
    assert [copies for _, copies in engine.pool.resident()] == [1, 2]
    assert engine.pool.find([block_hash(parent, run(5, 4))]) == [before]


def test_host_tier_order_and_pins() -> None:
    events: list[Any] = []
    tier = HostTier(4, 1, events.append)
    a, b, c, d, e, f = (Content(bytes([n]) * 32, None, (n,)) for n in range(6))
    assert tier.prepare([a, b]) == [a, b]
    assert tier.prepare([b, c]) == [c], "b is on its way already"
    tier.store([a, b], [b, a])
    tier.store([c], [c])
    assert tier.resident() == [b, a, c], "a run is taken in tail first"
    tier.pin([a.digest, b.digest])
    assert tier.resident() == [c, b, a], "and used tail first"
    assert tier.prepare([d, e]) == [d, e]
    assert events[-1] == Removed([c.digest], medium="CPU", group_idx=0)
    tier.store([d, e], [d, e])
    assert tier.prepare([c, f]) == [c, f]
    assert events[-1].block_hashes == [e.digest, d.digest], "pinned blocks stay, older as they are"
    tier.store([c, f], [c, f])
    assert tier.prepare([Content(bytes([n]) * 32, None, (n,)) for n in (7, 8, 9)]) == [], "three do not fit beside two"
    assert tier.resident() == [b, a, f, c]
    tier.unpin([a.digest, b.digest])
    assert tier.prepare([d]) == [d]
    assert events[-1].block_hashes == [b.digest]


def test_salt_and_adapter_have_their_own_blocks_and_extra_keys() -> None:
    engine = Engine(config(blocks=64))
    variants: list[dict[str, Any]] = [
        {},
        {"salt": "s"},
        {"lora": (1, "ada")},
        {"lora": (1, "ada"), "salt": "s"},
        {"lora": (2, "adb")},
    ]
    expected = [
        [None, None],
        [["s"], None],
        [["ada"], ["ada"]],
        [["ada", "s"], ["ada"]],
        [["adb"], ["adb"]],
    ]
    for variant, keys in zip(variants, expected, strict=True):
        first, again = request(run(1, 9), **variant), request(run(1, 9), **variant)
        ((event,),) = drain(engine, first)
        assert event.extra_keys == keys
        assert (event.lora_id, event.lora_name) == variant.get("lora", (None, None))
        assert drain(engine, again) == []
        assert (first.cached_tokens, again.cached_tokens) == (0, 8)


def test_prompt_logprobs_do_not_read_the_cache() -> None:
    engine = Engine(config(blocks=64))
    drain(engine, request(run(1, 9)))
    item = request(run(1, 9), read_cache=False)
    assert names(drain(engine, item)) == [["+GPU 1,5"]]
    assert item.cached_tokens == 0


def test_reset_is_published_with_the_next_step_and_refused_while_running() -> None:
    engine = Engine(config(blocks=64, host_blocks=64))
    drain(engine, request(run(1, 9)))
    assert engine.reset_prefix_cache()
    assert engine.schedule(0.0) is None
    assert names(drain(engine, request(run(300, 2)))) == [["clear"]]

    running = request(run(1, 9), max_tokens=20)
    engine.add(running)
    assert engine.schedule(0.0) is None, "blocks come back from the host tier first"
    assert engine.reset_prefix_cache() is False
    assert engine.reset_prefix_cache(running=True, external=True)
    drain(engine)
    assert running.generated == 20
    again = request(run(1, 9))
    assert engine.host.find([block_hash(ROOT, run(1, 4))]) == 1, "the preempted request was computed anew"
    drain(engine, again)
    assert again.cached_tokens == 8


def test_host_tier_copies_evicts_and_loads_back() -> None:
    engine = Engine(config(blocks=5, host_blocks=6, load_rate=100.0))
    batches = names(drain(engine, request(run(100, 9))))
    assert batches[0] == ["+GPU 100,104"]
    assert sorted(batches[1]) == ["+CPU 100", "+CPU 104"]

    batches = names(drain(engine, request(run(200, 13))))
    assert batches[0] == ["-GPU 104", "-GPU 100", "+GPU 200,204,208"]
    assert sorted(batches[1]) == ["+CPU 200", "+CPU 204", "+CPU 208"]

    back = request(run(100, 13))
    engine.add(back)
    assert engine.schedule(5.0) is None
    assert engine.next_ready == pytest.approx(5.08), "8 tokens at 100 tokens/s"
    assert names([engine.take_events()]) == [["-GPU 208"]]
    assert engine.schedule(5.0) is None
    step = engine.schedule(5.1)
    assert step is not None
    outcome = engine.finish(step)
    # loaded blocks, room for the rest, the computed block; the host tier is full then
    assert names(outcome.batches[:1]) == [["+GPU 100,104", "-GPU 204", "-GPU 200", "+GPU 108"]]
    assert names(outcome.batches[1:]) == [["+CPU 108"]]
    assert (back.cached_tokens, back.host_tokens) == (8, 8)
    assert len(engine.host) == 6

    batches = names(drain(engine, request(run(300, 5))))
    assert batches[0] == ["-GPU 108", "+GPU 300", "-CPU 208"], "the blocks of the load were used since"
    assert batches[1] == ["+CPU 300"]


def test_host_placeholders_have_no_tokens() -> None:
    engine = Engine(config(blocks=32, host_blocks=8, host_self_describing=False))
    _, batch = drain(engine, request(run(1, 9), salt="s"))
    assert [(event.token_ids, event.block_size, event.parent_block_hash, event.extra_keys) for event in batch] == [
        ([], 0, None, None)
    ] * 2


def test_durations() -> None:
    engine = Engine(config(blocks=64, prefill_rate=100.0, prefill_overhead=0.5, decode_rate=10.0))
    item = request(run(1, 20), max_tokens=2)
    engine.add(item)
    step = engine.schedule(0.0)
    assert step is not None
    assert step.duration == pytest.approx(0.5 + 20 / 100)
    engine.finish(step)
    step = engine.schedule(0.0)
    assert step is not None
    assert step.duration == pytest.approx(1 / 10)
    engine.finish(step)
    again = request(run(1, 20))
    engine.add(again)
    step = engine.schedule(0.0)
    assert step is not None
    assert step.duration == pytest.approx(0.5 + 4 / 100), "16 of 20 tokens are cached"


def test_abort_keeps_full_blocks_and_frees_the_request() -> None:
    engine = Engine(config(blocks=64))
    item, waiting = request(run(1, 9), max_tokens=20), request(run(50, 9))
    engine.add(item)
    step = engine.schedule(0.0)
    assert step is not None
    engine.add(waiting)
    engine.abort(item)
    engine.abort(waiting)
    assert engine.finish(step).tokens == []
    engine.abort(item)
    engine.pool.check()
    assert engine.pool.usage == 0.0
    assert len(engine.pool.resident()) == 2
    assert engine.counters.finished["abort"] == 2


class Mirror:
    """What a perfect reader of the events knows: copies per tier, and that every event is well formed."""

    def __init__(self) -> None:
        self.copies: dict[str, Counter[Any]] = {"GPU": Counter(), "CPU": Counter()}
        self.content: dict[Any, tuple[Any, tuple[int, ...]]] = {}

    def apply(self, event: Any) -> None:
        if isinstance(event, Cleared):
            self.copies["GPU"].clear()
            return
        held = self.copies[event.medium]
        if isinstance(event, Removed):
            for digest in event.block_hashes:
                assert held[digest] > 0, "removed what was not there"
                held[digest] -= 1
            return
        size = event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        parent = event.parent_block_hash
        for index, digest in enumerate(event.block_hashes):
            tokens = tuple(event.token_ids[index * size : (index + 1) * size])
            if event.medium == "GPU":
                keys = event.extra_keys[index] or []
                tagged = [["lora", k, k] if k == event.lora_name else ["cache_salt", k] for k in keys]
                assert digest == block_hash(parent or ROOT, tokens, tagged or None)
                self.content[digest] = parent, tokens
            assert self.content[digest] == (parent, tokens)
            held[digest] += 1
            parent = digest

    def hit(self, digests: list[bytes]) -> int:
        count = 0
        for tier in ("GPU", "CPU"):
            while count < len(digests) and self.copies[tier][digests[count]] > 0:
                count += 1
        return count


def digests_of(item: Request, size: int) -> list[bytes]:
    """Hashes of the blocks that a prompt may hit, computed apart from the engine."""
    result: list[bytes] = []
    parent = ROOT
    for index in range((len(item.prompt) - 1) // size):
        tagged = [["lora", item.lora[1], item.lora[1]]] if item.lora else []
        tagged += [["cache_salt", item.salt]] if item.salt and index == 0 else []
        parent = block_hash(parent, item.prompt[index * size : (index + 1) * size], tagged or None)
        result.append(parent)
    return result


@pytest.mark.parametrize("seed", range(14))
def test_random_traces(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([2, 4, 16])
    blocks = rng.choice([8, 20, 60])
    engine = Engine(
        config(
            block_size=size,
            blocks=blocks,
            host_blocks=rng.choice([0, 0, blocks // 2, 3 * blocks]),
            max_seqs=rng.choice([1, 3, 64]),
            max_batched_tokens=rng.choice([size, 5 * size + 1, 4096]),
            empty_first=rng.random() < 0.8,
            seed=seed,
        )
    )
    mirror = Mirror()
    roots = [[rng.randrange(1000) for _ in range(blocks * size)] for _ in range(4)]
    capacity = engine.pool.usable * size
    live: list[Request] = []
    now = 0.0
    for _ in range(200):
        now += rng.random()
        idle = not (engine.waiting or engine.running)
        draw = rng.random()
        item: Request | None = None
        if draw < 0.5:
            base = rng.choice(roots)[: rng.randrange(1, capacity - 1)]
            tail = [rng.randrange(1000) for _ in range(rng.randrange(3))]
            prompt = (base + tail)[: capacity - 2]
            item = request(
                prompt,
                rng.randint(1, capacity - len(prompt)) if rng.random() < 0.2 else rng.randint(1, 2),
                salt=rng.choice([None, None, None, "s"]),
                lora=rng.choice([None, None, None, (1, "ada")]),
            )
            engine.add(item)
            live.append(item)
        elif draw < 0.55 and live:
            engine.abort(live.pop(rng.randrange(len(live))))
        elif draw < 0.58:
            external = rng.random() < 0.3
            if engine.reset_prefix_cache(running=rng.random() < 0.5, external=external) and external:
                mirror.copies["CPU"].clear()
        predicted = mirror.hit(digests_of(item, size)) if item and idle and not engine._events else None
        step = engine.schedule(now)
        if item is not None and predicted is not None:
            assert item.cached_tokens == predicted * size
        batches = engine.finish(step).batches if step else [engine.take_events()]
        for event in itertools.chain.from_iterable(batches):
            mirror.apply(event)
        engine.pool.check()
        gpu = {content.digest: copies for content, copies in engine.pool.resident()}
        assert gpu == {digest: copies for digest, copies in mirror.copies["GPU"].items() if copies}
        host = {content.digest for content in engine.host.resident()}
        assert host == {digest for digest, copies in mirror.copies["CPU"].items() if copies}
        assert len(host) <= engine.host.capacity
        live = [entry for entry in live if entry in engine.running or entry in engine.waiting]
    for event in itertools.chain.from_iterable(drain(engine, now=now + 1e6)):
        mirror.apply(event)
    engine.pool.check()
    assert engine.pool.usage == 0.0, "every block is free once nothing runs"
