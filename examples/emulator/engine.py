"""The scheduler of one data-parallel rank, step by step, as vLLM's V1 scheduler does it. No I/O; `now` is an argument.

    add(request) -> waiting --admitted--> running --finished--> gone
                      ^  \\_ loading (host copies on their way to the GPU) _/
                      \\--- preempted (no block left) ---/

One step: every running request gets its next tokens (one when decoding, the rest of the prompt when prefilling, within
the token budget), then waiting ones are admitted first come first served. Blocks are taken, evicted and given their
hashes while the step is planned (`schedule`); tokens come out, and the step's events may be published, when it is done
(`finish`). The time between the two is the step's duration:

    prefill   overhead + uncached prompt tokens of the step / prefill_rate
    decode    1 / decode_rate, whatever the number of requests
    step      the larger of the two

A prefix hit never reaches the last token: it ends at block (n - 1) // block_size.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .hashing import block_hash
from .pool import Block, BlockPool, Content, HostTier
from .wire import KVEvent

Batch = list[KVEvent]


@dataclass(frozen=True)
class EngineConfig:
    """Sizes in blocks and tokens, rates in tokens per second, times in seconds."""

    root: bytes
    block_size: int = 16
    blocks: int = 4096
    host_blocks: int = 0
    host_self_describing: bool = True
    max_seqs: int = 256
    max_batched_tokens: int = 2048
    prefill_rate: float = 8000.0
    prefill_overhead: float = 0.005
    decode_rate: float = 200.0
    load_rate: float = 80000.0
    prefix_caching: bool = True
    empty_first: bool = True
    seed: int = 0


@dataclass(eq=False)
class Request:
    """One sequence to generate.

    prompt       token ids
    answer       the tokens the "model" will produce; ends = natural end of the answer
    max_tokens   generation limit
    salt, lora   cache_salt; adapter (id, name)
    session      session id for the events
    read_cache   False: prompt_logprobs was asked for, the prefix cache is not read
    report_full  announce prefix-hit blocks again (kv_cache_report_mode=full)
    """

    prompt: list[int]
    answer: Iterator[int]
    max_tokens: int
    eos: int | None = None
    salt: str | None = None
    lora: tuple[int, str] | None = None
    session: str | None = None
    read_cache: bool = True
    report_full: bool = False

    tokens: list[int] = field(init=False)
    contents: list[Content] = field(init=False, default_factory=list)
    blocks: list[Block] = field(init=False, default_factory=list)
    computed: int = field(init=False, default=0)
    stored: int = field(init=False, default=0)
    offloaded: int = field(init=False, default=0)
    cached_tokens: int | None = field(init=False, default=None)
    host_tokens: int = field(init=False, default=0)
    loading: tuple[bytes, ...] = field(init=False, default=())
    ready_at: float = field(init=False, default=0.0)
    started: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.prompt)


class Step(NamedTuple):
    """A planned step: how many tokens of which request it computes, and how long it takes (seconds)."""

    work: list[tuple[Request, int]]
    duration: float


class Token(NamedTuple):
    """One token came out; `finish` is None, "stop" or "length"."""

    request: Request
    token: int
    finish: str | None


class Outcome(NamedTuple):
    """What a step gave: event batches to publish in this order, then tokens to deliver."""

    batches: list[Batch]
    tokens: list[Token]


@dataclass
class Counters:
    """Totals since start, by vLLM's metric names."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    external_prefix_cache_queries: int = 0
    external_prefix_cache_hits: int = 0
    preemptions: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})


class Engine:
    """One rank: pool, host tier, queues."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.counters = Counters()
        self._random = random.Random(config.seed)
        self._events: Batch = []
        self._fresh()

    def _fresh(self) -> None:
        config = self.config
        self._events.clear()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.pool = BlockPool(config.blocks, config.block_size, self._events.append, empty_first=config.empty_first)
        self.host = HostTier(
            config.host_blocks, config.block_size, self._events.append, self_describing=config.host_self_describing
        )

    # -- inputs -------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if prompt and answer could never fit into the pool."""
        longest = len(request.prompt) + request.max_tokens
        if longest > self.pool.usable * self.config.block_size:
            raise ValueError(f"{longest} tokens do not fit into {self.pool.usable} blocks")
        self._extend(request)
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """The client is gone: drop the request wherever it is. Its full blocks stay cached."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        else:
            return
        self.counters.finished["abort"] += 1
        self._let_go(request)

    def reset_prefix_cache(self, *, running: bool = False, external: bool = False) -> bool:
        """POST /reset_prefix_cache: the Cleared event leaves with the next step. False while requests hold blocks.

        running   preempt the running requests first
        external  empty the host tier too, without any event
        """
        if running:
            for request in [*self.running, *(r for r in self.waiting if r.blocks)]:
                self._preempt(request)
        done = self.pool.reset()
        if done and external:
            self.host.clear()
        return done

    def restart(self) -> list[Request]:
        """As if the process had been started anew: everything empty, no event. Returns the requests that were lost."""
        lost = [*self.running, *self.waiting]
        self.counters = Counters()
        self._fresh()
        return lost

    # -- steps --------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Step | None:
        """Plan the next step; None when there is nothing to compute at `now` (see `next_ready`)."""
        work: list[tuple[Request, int]] = []
        budget = self._schedule_running(work)
        if budget is not None:
            self._admit(work, budget, now)
        if not work:
            return None
        return Step(work, self._duration(work))

    @property
    def next_ready(self) -> float | None:
        """When the next load from the host tier is done; None without any."""
        return min((request.ready_at for request in self.waiting if request.loading), default=None)

    def take_events(self) -> Batch:
        """Events not published yet (evictions for a load from the host tier, for which no step runs)."""
        batch = list(self._events)
        self._events.clear()
        return batch

    def finish(self, step: Step) -> Outcome:
        """The step is done: sample tokens, free finished requests, offload."""
        tokens: list[Token] = []
        done: list[Request] = []
        for request, count in step.work:
            if request not in self.running:
                continue
            if not request.started:
                request.started = True
                self.counters.prompt_tokens += len(request.prompt)
            request.computed += count
            if request.computed < len(request.tokens):
                continue
            token = self._sample(request)
            tokens.append(token)
            if token.finish:
                done.append(request)
        batches: list[Batch] = []
        offloads = self._prepare_offloads([request for request, _ in step.work if request in self.running])
        if self._events:
            batches.append(self.take_events())
        for contents in offloads:
            self.host.store(contents, self._random.sample(contents, len(contents)))
        if self._events:
            batches.append(self.take_events())
        for request in done:
            self.running.remove(request)
            self._let_go(request)
        return Outcome(batches, tokens)

    # -- parts --------------------------------------------------------------------------------------------------

    def _schedule_running(self, work: list[tuple[Request, int]]) -> int | None:
        """Work for the running requests. Returns the tokens left in the budget, None if a request was preempted."""
        config = self.config
        budget = config.max_batched_tokens
        preempted = False
        position = 0
        while position < len(self.running) and budget > 0:
            request = self.running[position]
            count = min(len(request.tokens) - request.computed, budget)
            need = -(-(request.computed + count) // config.block_size) - len(request.blocks)
            while need > self.pool.free:
                if self._reclaim(request):
                    continue
                victim = self.running[-1]
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            if request not in self.running:
                break
            request.blocks += self.pool.allocate(max(0, need))
            self._store(request, request.computed + count)
            work.append((request, count))
            budget -= count
            position += 1
        return None if preempted else budget

    def _admit(self, work: list[tuple[Request, int]], budget: int, now: float) -> None:
        config = self.config
        for request in self.waiting:
            if request.loading and now >= request.ready_at:
                self._loaded(request)
        for request in sorted(self.waiting, key=lambda request: not request.blocks):
            if budget <= 0 or len(self.running) >= config.max_seqs:
                return
            if not request.blocks and not self._take_prefix(request, now):
                return
            if request.loading:
                continue
            count = min(len(request.tokens) - request.computed, budget)
            need = -(-(request.computed + count) // config.block_size) - len(request.blocks)
            while need > self.pool.free:
                if self.running or not self._reclaim(request):
                    return
            if request.report_full and request.blocks:
                request.stored = 0
            request.blocks += self.pool.allocate(max(0, need))
            self._store(request, request.computed + count)
            self.waiting.remove(request)
            self.running.append(request)
            work.append((request, count))
            budget -= count

    def _reclaim(self, request: Request) -> bool:
        """Take the blocks back from the last waiting request that holds some (loaded or loading), not from this one."""
        for other in reversed(self.waiting):
            if other is not request and other.blocks:
                self._let_go(other)
                return True
        return False

    def _take_prefix(self, request: Request, now: float) -> bool:
        """Look the prompt up in both tiers and take what is there. False: too few free blocks, try again later."""
        config = self.config
        size = config.block_size
        limit = (len(request.tokens) - 1) // size if config.prefix_caching and request.read_cache else 0
        digests = [content.digest for content in request.contents[:limit]]
        device = self.pool.find(digests)
        host = digests[len(device) : len(device) + self.host.find(digests[len(device) :])]
        usable_now = self.pool.free - sum(block.users == 0 for block in device)
        rest = min(len(request.tokens) - len(device) * size, config.max_batched_tokens)
        wanted = len(host) if host else -(-(len(device) * size + rest) // size) - len(device)
        if wanted > usable_now:
            return False
        self.pool.touch(device)
        request.blocks = list(device)
        request.computed = len(device) * size
        request.stored = len(device)
        self._count_lookup(request, len(device) * size, len(host) * size)
        if host:
            request.blocks += self.pool.allocate(len(host))
            request.loading = tuple(host)
            request.ready_at = now + len(host) * size / config.load_rate
            self.host.pin(host)
        return True

    def _loaded(self, request: Request) -> None:
        self.host.unpin(request.loading)
        request.computed += len(request.loading) * self.config.block_size
        request.loading = ()
        self._store(request, request.computed)

    def _count_lookup(self, request: Request, device: int, host: int) -> None:
        if request.cached_tokens is not None:
            return
        request.cached_tokens, request.host_tokens = device + host, host
        if not (self.config.prefix_caching and request.read_cache):
            return
        counters = self.counters
        counters.prefix_cache_queries += len(request.prompt)
        counters.prefix_cache_hits += device
        if self.host.capacity:
            counters.external_prefix_cache_queries += len(request.prompt) - device
            counters.external_prefix_cache_hits += host

    def _store(self, request: Request, upto: int) -> None:
        """Give the full blocks below token `upto` their hashes."""
        full = min(upto, len(request.tokens)) // self.config.block_size
        if not self.config.prefix_caching or full <= request.stored:
            return
        self.pool.store(
            request.blocks[request.stored : full], request.contents[request.stored : full], session=request.session
        )
        request.stored = full

    def _extend(self, request: Request) -> None:
        """Hash the blocks that have become full."""
        size = self.config.block_size
        while (len(request.contents) + 1) * size <= len(request.tokens):
            index = len(request.contents)
            parent = request.contents[-1].digest if request.contents else None
            tokens = tuple(request.tokens[index * size : (index + 1) * size])
            tagged: list[list[str]] = []
            plain: list[str] = []
            if request.lora:
                tagged.append(["lora", request.lora[1], request.lora[1]])
                plain.append(request.lora[1])
            if request.salt and index == 0:
                tagged.append(["cache_salt", request.salt])
                plain.append(request.salt)
            digest = block_hash(parent or self.config.root, tokens, tagged or None)
            request.contents.append(Content(digest, parent, tokens, tuple(plain) or None, request.lora))

    def _sample(self, request: Request) -> Token:
        token = next(request.answer)
        request.tokens.append(token)
        self._extend(request)
        self.counters.generation_tokens += 1
        finish = None
        if token == request.eos:
            finish = "stop"
        elif request.generated >= request.max_tokens:
            finish = "length"
        if finish:
            self.counters.finished[finish] += 1
        return Token(request, token, finish)

    def _prepare_offloads(self, requests: list[Request]) -> list[list[Content]]:
        """Room in the host tier for full blocks computed since the last step; evictions are emitted here."""
        if not self.host.capacity:
            return []
        result = []
        for request in requests:
            full = request.computed // self.config.block_size
            fresh = self.host.prepare(request.contents[request.offloaded : full])
            request.offloaded = max(full, request.offloaded)
            if fresh:
                result.append(fresh)
        return result

    def _preempt(self, request: Request) -> None:
        if request in self.running:
            self.running.remove(request)
            self.waiting.appendleft(request)
        self.counters.preemptions += 1
        self._let_go(request)

    def _let_go(self, request: Request) -> None:
        if request.loading:
            self.host.unpin(request.loading)
            request.loading = ()
        self.pool.release(request.blocks[::-1])
        request.blocks = []
        request.computed = request.stored = 0

    def _duration(self, work: list[tuple[Request, int]]) -> float:
        config = self.config
        prefill = sum(count for request, count in work if request.computed < len(request.prompt))
        decode = any(request.computed >= len(request.prompt) for request, _ in work)
        return max(
            config.prefill_overhead + prefill / config.prefill_rate if prefill else 0.0,
            1.0 / config.decode_rate if decode else 0.0,
        )
