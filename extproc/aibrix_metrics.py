"""AIBrix's 13 `aibrix_kvcache_zmq_*` metrics over our streams, for dashboards made for it (`admin.aibrix_metrics`).

Names, labels and buckets are those of AIBrix's pkg/cache/kvcache/metrics.go. `pod_key` is the instance's name, with
`/rank` for one of several ranks. Everything is read at scrape time, so a stream's series end with the stream.

What counts differs where AIBrix's client does not do what ours does: an event that cannot be used costs no connection
here, it is an error of type `handle_event`; a message that is no batch is one of type `decode`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from extproc.metrics import Family, Kind, Metrics, Sample
from extproc.pool import Pool
from kvindex.directory import StreamReport
from kvindex.states import State, StreamStatus

PREFIX = "aibrix_kvcache_zmq_"
POD = ("pod_key",)
NOTHING = StreamStatus()
ASKING = frozenset({str(State.FETCH), str(State.RESYNC)})

Value = Callable[[StreamReport, StreamStatus], float]

BY_POD: tuple[tuple[str, Kind, str, Value], ...] = (
    ("connections", "counter", "ZMQ connections established.", lambda report, _: report.link.connections),
    ("disconnections", "counter", "ZMQ connections lost.", lambda report, _: report.link.disconnections),
    ("reconnect_attempts", "counter", "Tries to connect again.", lambda report, _: report.link.connect_retries),
    ("missed_events", "counter", "Messages missed.", lambda _, status: status.missed),
    ("replay_requests", "counter", "Replays asked for.", lambda _, status: status.replays),
    (
        "replay_success",
        "counter",
        "Replays that ended well.",
        lambda report, status: max(0, status.replays - status.replay_failures - (report.state in ASKING)),
    ),
    ("replay_failures", "counter", "Replays that failed.", lambda _, status: status.replay_failures),
    ("connection_status", "gauge", "1 while connected.", lambda report, _: report.link.connected),
    (
        "last_sequence_id",
        "gauge",
        "Sequence number of the last message applied, -1 before the first.",
        lambda report, _: -1 if report.sequence is None else report.sequence,
    ),
)

ERRORS: tuple[tuple[str, Value], ...] = (
    ("consume_events", lambda report, _: report.link.faults),
    ("reconnect", lambda report, _: report.link.connect_retries),
    ("decode", lambda _, status: status.damaged),
    ("handle_event", lambda _, status: sum(status.skipped.values())),
)


def add_aibrix(metrics: Metrics, pools: Sequence[Pool]) -> None:
    """Registers the 13 metrics. `pools` is read anew at each scrape."""
    reports: list[tuple[str, StreamReport]] = []

    def take() -> None:
        reports.clear()
        for pool in pools:
            ranks = {name: one.dp_size for name, one in pool.by_name.items()}
            for report in pool.directory.status():
                several = ranks.get(report.instance, 1) > 1
                reports.append((f"{report.instance}/{report.dp_rank}" if several else report.instance, report))

    def by_pod(value: Value) -> Callable[[], Iterator[Sample]]:
        return lambda: (Sample((key,), value(report, report.status or NOTHING)) for key, report in reports)

    def by_type() -> Iterator[Sample]:
        for key, report in reports:
            for kind, count in (report.status or NOTHING).events.items():
                yield Sample((key, kind), count)

    def errors() -> Iterator[Sample]:
        for key, report in reports:
            for kind, value in ERRORS:
                yield Sample((key, kind), value(report, report.status or NOTHING))

    metrics.before(take)
    for name, kind, text, value in BY_POD:
        metrics.add(Family(PREFIX + name, text, POD, by_pod(value), kind))
    for name, text in (("events_received", "Events received."), ("events_processed", "Events applied.")):
        metrics.add(Family(PREFIX + name, text, (*POD, "event_type"), by_type, "counter"))
    metrics.add(Family(PREFIX + "errors", "Errors by type.", (*POD, "error_type"), errors, "counter"))
    metrics.add(
        Family(
            PREFIX + "event_processing_duration_seconds",
            "Time to apply one message.",
            POD,
            lambda: (Sample((key,), report.link.applying) for key, report in reports),
            "histogram",
        )
    )
