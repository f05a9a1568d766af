"""The lab: a trace of real requests through the real scorers, router and in-flight counts, against modelled engines.

    trace --arrival--> Router.route --> Engine queue --prefill--> first byte --decode--> end
                          ^  hits: the engine's own cache        `---- InFlight: charge, first_byte, close

Engine model: prefill first come first served, uncached tokens / prefill_rate + overhead each; an LRU cache of `blocks`
trace blocks. Everything else is off by default: decode time, a host tier, events that come only after the prefill,
speculative insertion, scraped instead of own loads, noise. Deterministic: the same arguments give the same figures.
"""

from __future__ import annotations

import gzip
import heapq
import json
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from extproc.decision import LoadSource, Side, Ticket
from extproc.loads.inflight import InFlight
from extproc.router import Router
from extproc.scorers import Candidate, Cost, Load, Request, Scorer, build
from extproc.simulate_page import page
from extproc.speculative import Speculation

__all__ = [
    "POLICIES",
    "Model",
    "Result",
    "TraceError",
    "TraceRequest",
    "as_json",
    "page",
    "parse_policy",
    "read_trace",
    "simulate",
]

POLICIES = ("round_robin", "least_request", "least_waiting", "car", "unified", "load_gated", "prefix_match", "ttft")


class TraceError(ValueError):
    """A trace that cannot be read; the message names file, line and what is wrong."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """at: arrival in seconds; tokens, output: prompt and answer length; blocks: ids of the prompt's blocks."""

    at: float
    tokens: int
    output: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """How the engines behave and what the router sees of them.

    engines         number of engines
    blocks          device cache of an engine, in trace blocks
    prefill_rate    tokens per second; `rates`, when given, one per engine instead
    overhead        seconds added to every prefill
    block_size      tokens of a trace block
    decode_seconds  per answer token, during which the request counts as in flight
    host_blocks     second LRU tier that takes what the device evicts; host_cost: share of prefill time its tokens cost
    events          "arrival": a prompt is in the cache, and seen there, from the decision on; "prefill": when its
                    prefill ends
    speculative     what was routed counts as a hit for speculative_ttl seconds (see extproc.speculative); of use with
                    events "prefill"
    report_interval seconds between load reports; 0 = our own in-flight counts
    own_delta       add requests sent since the report to its waiting (Router)
    jitter          relative standard deviation of prefill times
    speed           the trace is played that much faster
    ties            "turn": equal costs by a running number (as the published table did); "router": the router's own
    """

    engines: int = 8
    blocks: int = 2000
    prefill_rate: float = 8000.0
    rates: tuple[float, ...] = ()
    overhead: float = 0.010
    block_size: int = 512
    decode_seconds: float = 0.0
    host_blocks: int = 0
    host_cost: float = 0.2
    events: str = "arrival"
    speculative: bool = False
    speculative_ttl: float = 2.0
    report_interval: float = 0.0
    own_delta: bool = False
    jitter: float = 0.0
    speed: float = 1.0
    ties: str = "turn"

    def check(self) -> None:
        """Raises ValueError that names the field, the value and what is allowed."""
        least = {"engines": 1, "blocks": 1, "prefill_rate": 1e-9, "block_size": 1, "speed": 1e-9}
        for name, value in asdict(self).items():
            if isinstance(value, int | float) and value < least.get(name, 0):
                raise ValueError(f"{name}: {value!r} is not allowed, expected at least {least.get(name, 0)}")
        for name, words in (("events", ("arrival", "prefill")), ("ties", ("turn", "router"))):
            if getattr(self, name) not in words:
                raise ValueError(f"{name}: {getattr(self, name)!r} is not allowed, expected one of {', '.join(words)}")
        if self.rates and len(self.rates) != self.engines:
            raise ValueError(f"rates: {len(self.rates)} given for {self.engines} engines")


@dataclass(frozen=True, slots=True)
class Result:
    """One policy's outcome. Times in seconds; imbalance: busiest engine's prefill time over the mean.

    series  (start of the interval, mean TTFT, hit ratio) over the trace, for plots
    """

    policy: str
    hit_ratio: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    imbalance: float
    series: tuple[tuple[float, float, float], ...] = field(default=(), repr=False)

    def as_dict(self) -> dict[str, Any]:
        """The documented keys of `--json`."""
        names = [one.name for one in fields(self) if one.name != "series"]
        return {name: getattr(self, name) for name in names}


def read_trace(path: str | Path) -> list[TraceRequest]:
    """A Mooncake trace: JSON lines with timestamp (ms), input_length, output_length, hash_ids; plain or .gz.

    Raises TraceError with the line, OSError when the file cannot be read.
    """
    path = Path(path)
    out: list[TraceRequest] = []
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                request = TraceRequest(
                    row["timestamp"] / 1000,
                    int(row["input_length"]),
                    int(row.get("output_length", 0)),
                    tuple(row["hash_ids"]),
                )
                if request.tokens < 0 or request.output < 0:
                    raise ValueError("negative length")
            except (KeyError, TypeError, ValueError) as error:
                what = f"{type(error).__name__}: {error}"
                raise TraceError(f"{path.name}, line {number}: not a request of a Mooncake trace ({what})") from None
            out.append(request)
    out.sort(key=lambda request: request.at)
    return out


def block_size_of(path: str | Path) -> int:
    """Tokens a block of a trace: what kvcar's own log says in each line, else the 512 of Mooncake's traces."""
    path = Path(path)
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        try:
            size = json.loads(next(lines, "{}")).get("block_size")
        except (ValueError, AttributeError):
            size = None  # read_trace says what is wrong with the line
    return size if isinstance(size, int) and size > 0 else 512


def parse_policy(text: str) -> Scorer:
    """`name` or `name:parameter=value:parameter=value` as a scorer. Raises ValueError."""
    name, *pairs = text.split(":")
    parameters: dict[str, object] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"policy {text!r}: expected name:parameter=value, got {pair!r}")
        try:
            parameters[key] = json.loads(value)
        except ValueError:
            parameters[key] = value
    return build(name, **parameters)


def simulate(
    trace: str | Path | Sequence[TraceRequest],
    engines: int = 8,
    blocks: int = 2000,
    prefill_rate: float = 8000.0,
    policies: str | Iterable[str] = POLICIES,
    seed: int = 0,
    *,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> list[Result]:
    """Plays a trace once for every policy (`parse_policy`, or a comma-separated list of them).

    options   further fields of `Model`
    progress  called now and then with policy, requests done, requests in all

    Raises ValueError for a bad option or policy, TraceError for a bad trace.
    """
    model = Model(engines=engines, blocks=blocks, prefill_rate=prefill_rate, **options)
    model.check()
    names = policies.split(",") if isinstance(policies, str) else list(policies)
    scorers = [(name.strip(), parse_policy(name.strip())) for name in names]
    requests = read_trace(trace) if isinstance(trace, str | Path) else list(trace)
    if not requests:
        raise TraceError("the trace has no request")
    return [_Run(name, scorer, model, seed).play(requests, progress) for name, scorer in scorers]


def as_json(trace: str, results: Iterable[Result]) -> dict[str, Any]:
    """What `--json` prints."""
    return {"trace": trace, "policies": [result.as_dict() for result in results]}


@dataclass(slots=True)
class _Job:
    request: TraceRequest
    at: float
    ticket: Ticket
    uncached: float = 0.0
    placed: bool = False


class _Engine:
    """One engine: an instance for the router, a FIFO queue, a cache of two LRU tiers."""

    current_role = "default"
    dp_size = 1
    state = "active"
    incarnation = ""

    def __init__(self, index: int, model: Model):
        self.name = f"e{index:03d}"
        self.address = f"10.0.{index // 250}.{index % 250}:8000"
        self.rate = model.rates[index] if model.rates else model.prefill_rate
        self.model = model
        self.queue: deque[_Job] = deque()
        self.current: _Job | None = None
        self.busy = 0.0
        self.device: OrderedDict[int, None] = OrderedDict()
        self.host: OrderedDict[int, None] = OrderedDict()

    def match(self, blocks: Sequence[int]) -> tuple[int, int, int]:
        """Blocks of the contiguous prefix by tier, each for its highest."""
        device, host = self.device, self.host
        on_device = on_host = 0
        for block in blocks:
            if block in device:
                on_device += 1
            elif host and block in host:
                on_host += 1
            else:
                break
        return on_device, on_host, 0

    def place(self, job: _Job) -> tuple[int, int]:
        """Takes what the cache has of a job and puts its blocks there; hit tokens by tier."""
        size, tokens = self.model.block_size, job.request.tokens
        device, host, _ = self.match(job.request.blocks)
        on_device = min(tokens, device * size)
        on_host = min(tokens - on_device, host * size)
        job.uncached = tokens - on_device - on_host * (1 - self.model.host_cost)
        job.placed = True
        if self.model.events == "arrival":
            self.insert(job.request.blocks)
        return on_device, on_host

    def insert(self, blocks: Sequence[int]) -> None:
        device, host, model = self.device, self.host, self.model
        for block in blocks:
            device[block] = None
            device.move_to_end(block)
        while len(device) > model.blocks:
            evicted, _ = device.popitem(last=False)
            if model.host_blocks:
                host[evicted] = None
                host.move_to_end(evicted)
        while len(host) > model.host_blocks:
            host.popitem(last=False)


class _Hits:
    """The engines' own caches as the router's hits."""

    __slots__ = ("blocks",)

    def __init__(self, blocks: Sequence[int]):
        self.blocks = blocks

    def hits(self, instance: _Engine, /) -> Sequence[Sequence[int]]:
        return (instance.match(self.blocks),)


class _TurnRouter(Router):
    """Among equal costs takes the one at (decision number mod ties), in name order."""

    turn = 0

    def _arrange(self, candidates: Sequence[Candidate], costs: Sequence[Cost | None], side: Side) -> None:
        super()._arrange(candidates, costs, side)
        tied = side.tied
        equal = sorted(zip(side.ordered[:tied], side.costs[:tied], strict=True), key=lambda pair: pair[0].name)
        start = self.turn % max(1, tied)
        equal = equal[start:] + equal[:start]
        side.ordered[:tied] = [candidate for candidate, _ in equal]
        side.costs[:tied] = [cost for _, cost in equal]
        self.turn += 1


class _Scraped:
    """Loads as they were at the last report time."""

    def __init__(self, inflight: InFlight):
        self.inflight = inflight
        self.seen: dict[str, Load] = {}

    def report(self, engines: Iterable[_Engine], now: float) -> None:
        self.seen = {one.name: self.inflight.get(one.name, now)._replace(at=now) for one in engines}

    def get(self, name: str, now: float, rank: int | None = None) -> Load | None:
        return self.seen.get(name)


class _Run:
    """One policy over one trace."""

    def __init__(self, policy: str, scorer: Scorer, model: Model, seed: int):
        self.policy = policy
        self.model = model
        self.random = random.Random(seed)
        self.engines = tuple(_Engine(index, model) for index in range(model.engines))
        self.by_name = {engine.name: engine for engine in self.engines}
        self.inflight = InFlight()
        scraped = model.report_interval > 0
        own_delta = scraped and model.own_delta
        self.router = (_TurnRouter if model.ties == "turn" else Router)(scorer, max_endpoints=1, own_delta=own_delta)
        self.speculation = Speculation(ttl=model.speculative_ttl) if model.speculative else None
        self.scraped = _Scraped(self.inflight)
        self.loads: LoadSource = self.scraped if scraped else self.inflight
        self.events: list[tuple[float, int, _Engine | None, _Job | None]] = []
        self.number = 0
        self.ttfts: list[tuple[float, float]] = []
        self.hits: list[tuple[float, float, int]] = []

    def play(self, trace: Sequence[TraceRequest], progress: Callable[[str, int, int], None] | None) -> Result:
        model = self.model
        if model.report_interval > 0:
            self.post(trace[0].at / model.speed, None, None)
        for done, request in enumerate(trace):
            now = request.at / model.speed
            self.advance(now)
            self.arrive(request, now)
            if progress is not None and done % 500 == 0:
                progress(self.policy, done, len(trace))
        self.advance(None)
        if progress is not None:
            progress(self.policy, len(trace), len(trace))
        return self.result()

    def arrive(self, request: TraceRequest, now: float) -> None:
        asked = Request(request.tokens, self.model.block_size, now=now)
        hits = _Hits(request.blocks)
        seen = self.speculation.over(hits, request.blocks, now) if self.speculation is not None else hits
        decision = self.router.route(asked, self.engines, seen, self.loads, self.inflight, now)
        assert decision.chosen is not None, decision.detail
        engine = self.by_name[decision.chosen.name]
        if self.speculation is not None:
            self.speculation.add(engine, None, request.blocks, now)
        job = _Job(request, now, decision.charge(self.inflight, now))
        if self.model.events == "arrival":
            self.place(engine, job)
        engine.queue.append(job)
        if engine.current is None:
            self.start(engine, now)

    def place(self, engine: _Engine, job: _Job) -> None:
        on_device, on_host = engine.place(job)
        self.hits.append((job.at, on_device + on_host, job.request.tokens))

    def start(self, engine: _Engine, now: float) -> None:
        """The next job's prefill."""
        job = engine.current = engine.queue.popleft()
        if not job.placed:
            self.place(engine, job)
        seconds = job.uncached / engine.rate + self.model.overhead
        if self.model.jitter:
            seconds *= max(0.0, self.random.gauss(1.0, self.model.jitter))
        engine.busy += seconds
        self.post(now + seconds, engine, job)

    def post(self, at: float, engine: _Engine | None, job: _Job | None) -> None:
        self.number += 1
        heapq.heappush(self.events, (at, self.number, engine, job))

    def advance(self, until: float | None) -> None:
        """Everything that happens up to `until` (None = to the end)."""
        events, model = self.events, self.model
        while events and (until is None or events[0][0] <= until):
            now, _, engine, job = heapq.heappop(events)
            if job is None:
                self.scraped.report(self.engines, now)
                if until is not None:
                    self.post(now + model.report_interval, None, None)
            elif engine is None:
                job.ticket.close(now)
            else:
                self.finish(engine, job, now)

    def finish(self, engine: _Engine, job: _Job, now: float) -> None:
        """A prefill is done."""
        job.ticket.first_byte(now)
        self.ttfts.append((job.at, now - job.at))
        if self.model.events == "prefill":
            engine.insert(job.request.blocks)
            if self.speculation is not None:
                self.speculation.settle(engine, 0, job.request.blocks)
        decode = self.model.decode_seconds * job.request.output
        if decode:
            self.post(now + decode, None, job)
        else:
            job.ticket.close(now)
        engine.current = None
        if engine.queue:
            self.start(engine, now)

    def result(self) -> Result:
        times = sorted(seconds for _, seconds in self.ttfts)
        count = len(times)
        busy = [engine.busy for engine in self.engines]
        mean_busy = sum(busy) / len(busy)
        tokens = sum(n for _, _, n in self.hits)
        p50, p90, p99 = (times[min(count - 1, int(count * part))] for part in (0.5, 0.9, 0.99))
        return Result(
            policy=self.policy,
            hit_ratio=sum(hit for _, hit, _ in self.hits) / tokens if tokens else 0.0,
            ttft_mean_s=sum(times) / count,
            ttft_p50_s=p50,
            ttft_p90_s=p90,
            ttft_p99_s=p99,
            imbalance=max(busy) / mean_busy if mean_busy else 1.0,
            series=tuple(self.series()),
        )

    def series(self, intervals: int = 60) -> Iterator[tuple[float, float, float]]:
        """Mean TTFT and hit ratio of the requests that arrived in each interval; empty intervals are left out."""
        first = min(at for at, _ in self.ttfts)
        width = max((max(at for at, _ in self.ttfts) - first) / intervals, 1e-9)
        sums = [[0.0, 0.0, 0.0, 0.0] for _ in range(intervals)]  # requests, seconds, hit tokens, tokens

        def interval(at: float) -> list[float]:
            return sums[min(intervals - 1, int((at - first) / width))]

        for at, seconds in self.ttfts:
            bin_ = interval(at)
            bin_[0] += 1
            bin_[1] += seconds
        for at, hit, tokens in self.hits:
            bin_ = interval(at)
            bin_[2] += hit
            bin_[3] += tokens
        for i, (requests, ttft, hit, prompt) in enumerate(sums):
            if requests:
                yield first + i * width, ttft / requests, hit / prompt if prompt else 0.0
