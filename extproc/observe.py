"""What the pools show of themselves: metric families read at scrape time, and streams as plain data for JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from extproc.metrics import Family, Metrics, Sample
from extproc.pool import Pool
from kvindex.directory import StreamReport
from kvindex.events import Tier

STREAM = ("pool", "instance", "dp_rank")
INSTANCE = ("pool", "instance")
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
    ("gaps", "Missing sequence numbers noticed."),
    ("restarts", "Engine restarts noticed."),
    ("replays", "Replays and snapshots asked for."),
    ("replay_failures", "Replays and snapshots that failed."),
    ("duplicates", "Messages received twice."),
    ("rebuilds", "Times the view was dropped and built anew."),
)
IN_FLIGHT: tuple[tuple[str, str, str], ...] = (
    ("requests", "requests", "Requests sent and not finished."),
    ("waiting_requests", "waiting_requests", "Of those, without a response yet."),
    ("uncached_tokens", "uncached_tokens", "Uncached prompt tokens of the waiting ones."),
)

TOKENIZER: tuple[tuple[str, str, str, bool], ...] = (
    ("prompts", "prompts", "Requests turned into tokens.", True),
    ("short_prompts", "short_prompts", "Of these, shorter than one block: scored with no hit.", True),
    ("known_pieces", "known_pieces", "Pieces of text found in the segment cache.", True),
    ("shared_pieces", "shared_pieces", "Pieces of text waited for while another request had them encoded.", True),
    ("new_pieces", "new_pieces", "Pieces of text encoded.", True),
    ("encoded_bytes", "encoded_bytes", "Bytes of text encoded.", True),
    ("late", "late", "Encodings that came after their request's time budget.", True),
    ("failed", "failed", "Texts that the tokenizer could not encode.", True),
    ("verified", "verified", "Prompts whose pieces were compared with a whole encode.", True),
    ("mismatches", "mismatches", "Of these, different: incremental tokenization is off from then on.", True),
    ("segment_cache_bytes", "cache_bytes", "Size of the segment cache.", False),
    ("chain_cache_bytes", "chain_bytes", "Size of the chain cache.", False),
)

REMOTE: tuple[tuple[str, str], ...] = (
    ("asked", "Questions sent to engines."),
    ("known", "Prompts whose ids were known from an earlier answer."),
    ("failed", "Questions that an engine failed to answer: it is not asked for a while."),
)


def add_families(metrics: Metrics, pools: Sequence[Pool]) -> None:
    """Registers every family whose values live in the pools."""

    reports: list[tuple[tuple[str, ...], StreamReport]] = []

    def take_reports() -> None:
        reports[:] = (
            ((pool.name, report.instance, str(report.dp_rank)), report)
            for pool in pools
            for report in pool.directory.status()
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

    def in_flight(field: str) -> Reading:
        return lambda: (
            Sample((pool.name, one.name), getattr(pool.inflight.of_instance(one.name), field))
            for pool in pools
            for one in pool.instances
        )

    def tokenizer(field: str) -> Reading:
        return lambda: (Sample((pool.name,), getattr(pool.prompter.refresh_stats(), field)) for pool in pools)

    def remote(field: str) -> Reading:
        return lambda: (
            Sample((pool.name,), getattr(pool.prompter.remote, field)) for pool in pools if pool.prompter.remote
        )

    for name, text in REMOTE:
        metrics.add(Family(f"kvcar_remote_tokenizer_{name}", text, ("pool",), remote(name), counter=True))
    for name, field, text, counter in TOKENIZER:
        metrics.add(Family(f"kvcar_tokenizer_{name}", text, ("pool",), tokenizer(field), counter=counter))
    for name, text, value in GAUGES:
        metrics.add(Family(f"kvcar_stream_{name}", text, STREAM, over(value)))
    for name, text in COUNTERS:
        metrics.add(Family(f"kvcar_stream_{name}", text, STREAM, counted(name), counter=True))
    metrics.add(Family("kvcar_stream_blocks", "Resident blocks by tier.", (*STREAM, "tier"), blocks))
    metrics.add(
        Family(
            "kvcar_stream_events_skipped",
            "Events not taken over, by reason.",
            (*STREAM, "reason"),
            skipped,
            counter=True,
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
    metrics.add(
        Family(
            "kvcar_instances",
            "Instances known.",
            ("pool",),
            lambda: (Sample((pool.name,), len(pool.instances)) for pool in pools),
        )
    )


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
