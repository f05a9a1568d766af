"""Everything the page shows, in one bounded answer: `GET /v1/internal/overview?since=TICK`.

Built on `/status`, so page and API cannot differ. No prompts: records hold none. O(instances x ranks), a few ms at 128.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from extproc.dashboard.history import History, LoadPoint, Totals
from extproc.dashboard.remedies import UNSCORED, Remedy, remedy_of
from extproc.decision import Decision, instance_of
from extproc.decisions import DecisionLog, Record
from extproc.metrics import Metrics
from extproc.pool import Pool

if TYPE_CHECKING:
    from prometheus_client import Counter, Histogram
    from prometheus_client.samples import Sample

MAX_ROWS = 512
"""Instances, and streams, in one answer; `left_off` tells how many more there are."""
MAX_DECISIONS = 60
MAX_TROUBLES = 5
TIERS = ("device", "host", "disk")


class Source(Protocol):
    """What the dashboard reads; `extproc.app.App` is one."""

    @property
    def pools(self) -> Sequence[Pool]: ...
    @property
    def decision_log(self) -> DecisionLog: ...
    @property
    def metrics_registry(self) -> Metrics: ...
    @property
    def started(self) -> float: ...
    @property
    def ready(self) -> bool: ...
    def status(self) -> Mapping[str, Any]: ...


def overview(source: Source, history: History, since: int) -> dict[str, Any]:
    """`since`: the tick of the answer before, -1 = none; only what is newer comes of the history."""
    status = source.status()
    pools = {pool.name: pool for pool in source.pools}
    used: dict[str, Remedy] = {}
    streams, instances = [], []
    chosen = _chosen(source.metrics_registry.decisions)
    for pool in status["pools"]:
        for stream in pool["streams"]:
            problem = remedy_of(stream)
            if problem is not None:
                used[problem.key] = problem
            streams.append({"pool": pool["name"], **stream, "problem": problem.key if problem is not None else None})
        by_instance: dict[str, list[Mapping[str, Any]]] = {}
        for stream in pool["streams"]:
            by_instance.setdefault(stream["instance"], []).append(stream)
        for one in pool["instances"]:
            mine = by_instance.get(one["name"], [])
            own = pools[pool["name"]].inflight.of_instance(one["name"])
            instances.append(
                {
                    "pool": pool["name"],
                    **one,
                    "waiting_own": own.waiting_requests,
                    "uncached_own": round(own.uncached_tokens),
                    "streams": len(mine),
                    "synchronized": sum(stream["synchronized"] for stream in mine),
                    "blocks": {tier: sum((stream["blocks"] or {}).get(tier, 0) for stream in mine) for tier in TIERS},
                    "chosen": chosen.get((pool["name"], one["name"]), 0),
                }
            )
    log = source.decision_log
    return {
        "now": round(time.time(), 3),
        "started": round(source.started, 3),
        "version": status["version"],
        "uptime_seconds": status["uptime_seconds"],
        "ready": source.ready,
        "reload_error": status["reload_error"],
        "troubles": _troubles(status),
        "pools": [_pool(pool, pools[pool["name"]]) for pool in status["pools"]],
        "instances": instances[:MAX_ROWS],
        "streams": streams[:MAX_ROWS],
        "left_off": {"instances": max(0, len(instances) - MAX_ROWS), "streams": max(0, len(streams) - MAX_ROWS)},
        "remedies": {key: {"title": row.title, "remedy": row.remedy} for key, row in used.items()},
        "unscored": _unscored(source.metrics_registry.unscored),
        "decisions": [decision_row(number, record) for number, record in log.numbered(MAX_DECISIONS)],
        "decisions_seen": log.added,
        "history": history.since(since),
    }


def _troubles(status: Mapping[str, Any]) -> list[dict[str, str]]:
    """What goes wrong beside streams: sources of instances, files written for Envoy."""
    found = [(f"discovery {one['name']}", one["error"]) for one in status["discovery"]]
    for one in status["discovery"]:
        found += [(f"discovery {one['name']}, instance {name}", why) for name, why in one["refused"].items()]
    found += [(f"endpoints file {one['path']}", one["error"]) for one in status["endpoints_files"]]
    return [{"where": where, "error": str(error)} for where, error in found if error][:MAX_TROUBLES]


def _pool(pool: Mapping[str, Any], known: Pool) -> dict[str, Any]:
    return {
        **{key: value for key, value in pool.items() if key not in ("instances", "streams")},
        "scorers": list(known.routers),
        "instances": len(pool["instances"]),
        "streams": len(pool["streams"]),
        "synchronized": sum(stream["synchronized"] for stream in pool["streams"]),
    }


def decision_row(number: int, record: Record) -> dict[str, Any]:
    """A line of the list; candidates come with `GET /v1/internal/decision?number=`."""
    decision = record.decision
    first = decision.chosen if decision is not None else None
    return {
        "number": number,
        "at": round(record.at, 3),
        "request_id": record.request_id,
        "path": record.path,
        "pool": record.pool,
        "model": record.model,
        "scorer": record.scorer,
        "reason": record.reason,
        "detail": record.detail,
        "status": record.status,
        "served": record.served,
        "chosen": instance_of(first) if first is not None else None,
        "decode": instance_of(decision.decode) if decision is not None and decision.decode is not None else None,
        "prompt_tokens": decision.request.tokens if decision is not None else None,
        "hit_tokens": decision.hit_tokens if decision is not None else None,
        "available": decision.best_available_hit if decision is not None else None,
        "cached_tokens": record.cached_tokens,
        "elsewhere": _elsewhere(record, decision),
        "total_ms": round(record.total_seconds * 1000, 2),
    }


def _elsewhere(record: Record, decision: Decision | None) -> bool:
    """Another host served it than the one named first."""
    return bool(record.served and decision and decision.destinations and decision.destinations[0] != record.served)


def _samples(metric: Counter | Histogram, ending: str) -> Iterable[Sample]:
    return (sample for family in metric.collect() for sample in family.samples if sample.name.endswith(ending))


def _chosen(decisions: Counter) -> dict[tuple[str, str], int]:
    """Requests by (pool, instance); a rank's count for its instance (`dp: target` names ranks "name/rank")."""
    out: dict[tuple[str, str], int] = {}
    for sample in _samples(decisions, "_total"):
        name, slash, rank = sample.labels["engine"].rpartition("/")
        instance = name if slash and rank.isdigit() else sample.labels["engine"]
        for key in {(sample.labels["pool"], instance), (sample.labels["pool"], sample.labels["engine"])}:
            out[key] = out.get(key, 0) + int(sample.value)
    return out


def _unscored(counter: Counter) -> list[dict[str, Any]]:
    rows = [
        {
            "reason": sample.labels["reason"],
            "count": int(sample.value),
            "remedy": UNSCORED.get(sample.labels["reason"], ""),
        }
        for sample in _samples(counter, "_total")
        if sample.value
    ]
    return sorted(rows, key=lambda row: (-row["count"], row["reason"]))


def totals(pools: Sequence[Pool], metrics: Metrics) -> dict[str, Totals]:
    """By pool; "" = requests of which no pool could be told."""
    counts: dict[tuple[str, str], float] = {}
    for sample in _samples(metrics.requests, "_total"):
        counts[sample.labels["pool"], sample.labels["outcome"]] = sample.value
    hits: dict[tuple[str, str, str], float] = {}
    for ending in ("_count", "_sum"):
        for sample in _samples(metrics.hit_ratio, ending):
            hits[sample.labels["pool"], sample.labels["kind"], ending] = sample.value

    def hit(pool: str, kind: str) -> tuple[float, float]:
        return hits.get((pool, kind, "_count"), 0.0), hits.get((pool, kind, "_sum"), 0.0)

    return {
        name: Totals(
            counts.get((name, "scored"), 0.0),
            counts.get((name, "unscored"), 0.0),
            hit(name, "available"),
            hit(name, "chosen"),
            hit(name, "delivered"),
        )
        for name in ("", *(pool.name for pool in pools))
    }


def loads(pools: Sequence[Pool], now: float) -> dict[str, LoadPoint]:
    """Every instance's load at this moment, at most MAX_ROWS of them."""
    out: dict[str, LoadPoint] = {}
    for pool in pools:
        for one in pool.instances[: MAX_ROWS - len(out)]:
            load = pool.loads.get(one.name, now)
            out[one.name] = LoadPoint(pool.inflight.of_instance(one.name).requests, load.waiting if load else None)
    return out
