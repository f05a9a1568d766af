"""What the pools show of themselves: metric families read at scrape time, and streams as plain data for JSON."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from extproc.metrics import Family, Kind, Metrics, Sample
from extproc.pool import Pool
from extproc.scorers.base import Load
from kvindex.directory import StreamReport
from kvindex.events import Tier
from kvindex.fleet import Fleet, FleetChange, InstanceState
from kvindex.transport import EventTransport

# the label of an instance is `engine`: `instance` is Prometheus's own, of the process it scrapes
STREAM = ("pool", "engine", "dp_rank")
INSTANCE = ("pool", "engine")
Reading = Callable[[], Iterable[Sample]]

GAUGES: tuple[tuple[str, str, Callable[[StreamReport], float]], ...] = (
    ("connected", "1 while the events connection is up.", lambda report: report.link.connected),
    ("synchronized", "1 while hits of this stream count.", lambda report: report.synchronized),
    ("complete", "1 while the view is the engine's whole truth.", lambda report: report.complete),
    (
        "sequence",
        "Sequence number of the last applied message, -1 before the first.",
        lambda report: -1 if report.sequence is None else report.sequence,
    ),
)
COUNTERS: tuple[tuple[str, str], ...] = (
    ("batches", "Messages applied."),
    ("gaps", "Jumps of the sequence noticed."),
    ("missed", "Messages that the jumps left out."),
    ("restarts", "Engine restarts noticed."),
    ("replays", "Replays and snapshots asked for."),
    ("replay_failures", "Replays and snapshots that failed."),
    ("duplicates", "Messages received twice."),
    ("rebuilds", "Times the view was dropped and built anew."),
    ("damaged", "Messages that could not be applied, or with an event that could not."),
)
LINK: tuple[tuple[str, str], ...] = (
    ("connections", "Connections made."),
    ("disconnections", "Connections lost."),
    ("connect_retries", "Tries to connect that failed."),
    ("faults", "Internal errors after which the stream was built anew."),
)
IN_FLIGHT: tuple[tuple[str, str, str], ...] = (
    ("requests", "requests", "Requests sent and not finished."),
    ("waiting_requests", "waiting_requests", "Of those, without a response yet."),
    ("uncached_tokens", "uncached_tokens", "Uncached prompt tokens of the waiting ones."),
)

LOAD: tuple[tuple[str, str, Callable[[Load], float]], ...] = (
    ("waiting_requests", "Requests waiting at the instance as scorers see it; none without a fresh report.",
     lambda load: load.waiting),
    ("cache_usage_ratio", "Share of its KV cache in use, likewise.", lambda load: load.usage),
)  # fmt: skip

TOKENIZER: tuple[tuple[str, str, str, Kind], ...] = (
    ("prompts", "prompts", "Requests turned into tokens.", "counter"),
    ("short_prompts", "short_prompts", "Of these, shorter than one block: scored with no hit.", "counter"),
    ("known_pieces", "known_pieces", "Pieces of text found in the segment cache.", "counter"),
    ("shared_pieces", "shared_pieces", "Pieces of text waited for while another request had them encoded.", "counter"),
    ("new_pieces", "new_pieces", "Pieces of text encoded.", "counter"),
    ("encoded_bytes", "encoded_bytes", "Bytes of text encoded.", "counter"),
    ("late", "late", "Encodings that came after their request's time budget.", "counter"),
    ("failed", "failed", "Texts that the tokenizer could not encode.", "counter"),
    ("verified", "verified", "Prompts whose pieces were compared with a whole encode.", "counter"),
    ("mismatches", "mismatches", "Of these, different: incremental tokenization is off from then on.", "counter"),
    ("segment_cache_bytes", "cache_bytes", "Size of the segment cache.", "gauge"),
    ("chain_cache_bytes", "chain_bytes", "Size of the chain cache.", "gauge"),
)

REMOTE: tuple[tuple[str, str], ...] = (
    ("asked", "Questions sent to engines."),
    ("known", "Prompts whose ids were known from an earlier answer."),
    ("failed", "Questions that an engine failed to answer: it is not asked for a while."),
)


LAG = (
    "From the engine's own time of the last message to the moment it was applied; clocks of two machines are compared. "
    "A replayed message is as old as it is."
)


def add_families(metrics: Metrics, pools: Sequence[Pool], *, clock: Callable[[], float] = time.time) -> None:
    """Registers every family whose values live in the pools. `pools` is read anew at each scrape."""

    reports: list[tuple[tuple[str, ...], StreamReport]] = []

    known: set[str] = set()

    def take_reports() -> None:
        names = {pool.name for pool in pools}
        for name in names - known:
            metrics.add_pool(name)
        for name in known - names:
            metrics.forget_pool(name)
        known.clear()
        known.update(names)
        reports[:] = (
            ((pool.name, report.instance, str(report.dp_rank)), report)
            for pool in pools
            for report in (*pool.directory.status(), *pool.directory.pool_status())
        )

    metrics.before(take_reports)

    def over(value: Callable[[StreamReport], float]) -> Reading:
        return lambda: (Sample(labels, value(report)) for labels, report in reports)

    def counted(name: str) -> Reading:
        return lambda: (
            Sample(labels, getattr(report.status, name)) for labels, report in reports if report.status is not None
        )

    def blocks() -> Iterator[Sample]:
        for labels, report in reports:
            if report.status is not None:
                for tier in Tier:
                    yield Sample((*labels, tier.name.lower()), report.status.blocks[tier])

    def skipped() -> Iterator[Sample]:
        for labels, report in reports:
            if report.status is not None:
                for reason, count in report.status.skipped.items():
                    yield Sample((*labels, reason), count)

    def link(name: str) -> Reading:
        return lambda: (Sample(labels, getattr(report.link, name)) for labels, report in reports)

    def lag() -> Iterator[Sample]:
        now = clock()
        for labels, report in reports:
            told = report.status.timestamp if report.status is not None else None
            if told and report.event_age is not None:
                yield Sample(labels, now - report.event_age - told)

    def in_flight(field: str) -> Reading:
        return lambda: (
            Sample((pool.name, one.name), getattr(pool.inflight.of_instance(one.name), field))
            for pool in pools
            for one in pool.instances
        )

    def instances() -> Iterator[Sample]:
        for pool in pools:
            states = Counter(one.state for one in pool.instances)
            for state in InstanceState:
                yield Sample((pool.name, str(state)), states[state])

    def load(of: Callable[[Load], float]) -> Reading:
        def read() -> Iterator[Sample]:
            now = time.monotonic()
            for pool in pools:
                for one in pool.instances:
                    found = pool.loads.get(one.name, now)
                    if found is not None:
                        yield Sample((pool.name, one.name), of(found))

        return read

    def tokenizer(field: str) -> Reading:
        return lambda: (Sample((pool.name,), getattr(pool.prompter.refresh_stats(), field)) for pool in pools)

    def remote(field: str) -> Reading:
        return lambda: (
            Sample((pool.name,), getattr(pool.prompter.remote, field)) for pool in pools if pool.prompter.remote
        )

    for name, text in REMOTE:
        metrics.add(Family(f"kvcar_remote_tokenizer_{name}", text, ("pool",), remote(name), "counter"))
    for name, field, text, kind in TOKENIZER:
        metrics.add(Family(f"kvcar_tokenizer_{name}", text, ("pool",), tokenizer(field), kind))
    metrics.add(
        Family(
            "kvcar_tokenizer_loaded",
            "1 while a tokenizer is loaded here; 0 without remote_tokenizer: all but token ids passes unscored.",
            ("pool",),
            lambda: (Sample((pool.name,), pool.tokenizer_loaded) for pool in pools),
        )
    )
    for name, text, value in GAUGES:
        metrics.add(Family(f"kvcar_stream_{name}", text, STREAM, over(value)))
    for name, text in COUNTERS:
        metrics.add(Family(f"kvcar_stream_{name}", text, STREAM, counted(name), kind="counter"))
    for name, text in LINK:
        metrics.add(Family(f"kvcar_stream_{name}", text, STREAM, link(name), kind="counter"))
    metrics.add(Family("kvcar_stream_lag_seconds", LAG, STREAM, lag))
    metrics.add(
        Family(
            "kvcar_stream_event_age_seconds",
            "Time since the last message was applied; an engine without new blocks sends none.",
            STREAM,
            lambda: (Sample(labels, report.event_age) for labels, report in reports if report.event_age is not None),
        )
    )
    metrics.add(
        Family(
            "kvcar_stream_apply_seconds",
            "Time to apply one message, pauses of the time budget included.",
            STREAM,
            lambda: (Sample(labels, report.link.applying) for labels, report in reports),
            "summary",
        )
    )
    metrics.add(Family("kvcar_stream_blocks", "Resident blocks by tier.", (*STREAM, "tier"), blocks))
    metrics.add(
        Family(
            "kvcar_stream_events_skipped",
            "Events not taken over, by reason.",
            (*STREAM, "reason"),
            skipped,
            kind="counter",
        )
    )
    for name, field, text in IN_FLIGHT:
        metrics.add(Family(f"kvcar_inflight_{name}", text, INSTANCE, in_flight(field)))
    metrics.add(
        Family(
            "kvcar_speculative_blocks",
            "Blocks counted by our own word: pending ones, or all of them in approximate mode.",
            ("pool",),
            lambda: (Sample((pool.name,), pool.speculative_blocks) for pool in pools),
        )
    )
    metrics.add(Family("kvcar_instances", "Instances known, by state.", ("pool", "state"), instances))
    metrics.add(
        Family(
            "kvcar_role_unreachable",
            "1 while no instance of the role has answered since requests to it failed: all stay candidates.",
            ("pool", "role"),
            lambda: (
                Sample((pool.name, role), not answers) for pool in pools for role, answers in pool.answering.items()
            ),
        )
    )
    for name, text, of in LOAD:
        metrics.add(Family(f"kvcar_instance_{name}", text, INSTANCE, load(of)))


def _only(value: Callable[[], float]) -> list[Sample]:
    return [Sample((), value())]


def add_transport(metrics: Metrics, transport: EventTransport) -> None:
    """Registers what belongs to the thread of all streams."""
    read: tuple[tuple[str, str, Kind, Callable[[], float]], ...] = (
        ("faults", "Internal errors of the event thread, which goes on.", "counter", lambda: transport.faults),
        ("streams", "Streams followed.", "gauge", lambda: transport.streams),
        ("sockets", "ZMQ sockets open.", "gauge", lambda: transport.sockets),
        ("replays_running", "Replays and snapshots under way.", "gauge", lambda: transport.replays[0]),
        ("replays_waiting", "Replays and snapshots waiting for their turn.", "gauge", lambda: transport.replays[1]),
    )
    for name, text, kind, value in read:
        metrics.add(Family(f"kvcar_events_{name}", text, (), partial(_only, value), kind))


def add_reload(metrics: Metrics, error: Callable[[], str | None]) -> None:
    """Registers whether the configuration file is the one in effect; `error`: why the latest was refused, or None."""
    metrics.add(
        Family(
            "kvcar_config_last_reload_successful",
            "0 while the configuration file was refused and the one before is in effect.",
            (),
            partial(_only, lambda: error() is None),
        )
    )


def forget_gone(metrics: Metrics, fleet: Fleet) -> None:
    """From now on the series of an instance that leaves go with it."""

    def changed(change: FleetChange) -> None:
        before, after = change.before, change.after
        if before is not None and (after is None or (after.pool, after.dp_size) != (before.pool, before.dp_size)):
            metrics.forget(before.pool, before.name, before.dp_size)

    fleet.listen(changed)


def stream_dict(report: StreamReport) -> dict[str, Any]:
    """One stream for JSON."""
    status = report.status
    return {
        "instance": report.instance,
        "dp_rank": report.dp_rank,
        "endpoint": report.endpoint,
        "replay": report.replay,
        "dialect": report.dialect,
        "state": str(report.state),
        "connected": report.link.connected,
        "synchronized": report.synchronized,
        "complete": report.complete,
        "sequence": report.sequence,
        "error": report.error or report.link.error,
        "event_age_seconds": round(report.event_age, 3) if report.event_age is not None else None,
        "blocks": status.blocks._asdict() if status is not None else None,
    }
