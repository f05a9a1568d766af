"""What several workers answer on the admin port, as the answer of one. Pure: their JSON in, one JSON out.

Every worker sees the same fleet and follows the same streams; each has its own requests. So requests add up, and of
what all of them watch the worst is shown: a stream counts as synchronized when it is so everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Json = dict[str, Any]
Row = Mapping[str, Any]


def readiness(answers: Sequence[Row], total: int, *, was_ready: bool) -> tuple[bool, Json]:
    """Whether traffic may come, and what /readyz says. `answers`: of the workers that could be asked.

    Ready for the first time when all are. From then on while one is: Envoy asks each port by itself how it is, and a
    whole kvcar taken out for the restart of one worker would be a worse outage than the restart. `degraded` tells.
    """
    ready = sum(bool(one["ready"]) for one in answers)
    names = list(dict.fromkeys(name for one in answers for name in one["pools"]))
    pools = {}
    for name in names:
        found = [one["pools"][name] for one in answers if name in one["pools"]]
        pools[name] = {
            "tokenizer": all(one["tokenizer"] for one in found),
            "streams": max(one["streams"] for one in found),
            "synchronized": min(one["synchronized"] for one in found),
        }
    serves = ready == total or (was_ready and ready > 0)
    return serves, {
        "ready": serves,
        "degraded": ready < total,
        "workers": {"total": total, "ready": ready},
        "pools": pools,
    }


def streams(lists: Sequence[Sequence[Row]]) -> list[Json]:
    """One row a stream: the one of the worker that sees it worst."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for rows in lists:
        for row in rows:
            found.setdefault((row.get("pool"), row["instance"], row["dp_rank"], row["endpoint"]), []).append(row)
    worst = (min(rows, key=_health) for rows in found.values())
    return [dict(row) for row in worst]


def _health(stream: Row) -> tuple[Any, ...]:
    return (
        stream["connected"],
        stream["synchronized"],
        stream["complete"],
        not stream["error"],
        -1 if stream["sequence"] is None else stream["sequence"],
    )


def decisions(lists: Mapping[int, Sequence[Row]], limit: int) -> list[Json]:
    """The latest of all, newest first, each with its worker. `lists` by worker, each newest first."""
    rows = [{**row, "worker": worker} for worker, found in lists.items() for row in found]
    return sorted(rows, key=lambda row: row["at"], reverse=True)[:limit]


def status(answers: Sequence[Row], workers: Sequence[Json]) -> Json:
    """/status of all, with `workers`: what the supervisor knows of each."""
    first = answers[0]
    names = list(dict.fromkeys(pool["name"] for one in answers for pool in one["pools"]))
    return {
        **first,
        "uptime_seconds": max(one["uptime_seconds"] for one in answers),
        "serving": all(one["serving"] for one in answers),
        "reload_error": next((one["reload_error"] for one in answers if one["reload_error"]), None),
        "pools": [_pool([pool for one in answers for pool in one["pools"] if pool["name"] == name]) for name in names],
        "workers": list(workers),
    }


def _pool(found: Sequence[Row]) -> Json:
    instances: dict[str, list[Row]] = {}
    for pool in found:
        for one in pool["instances"]:
            instances.setdefault(one["name"], []).append(one)
    return {
        **pool_facts(found),
        "instances": [{**rows[0], **instance_facts(rows)} for rows in instances.values()],
        "streams": streams([pool["streams"] for pool in found]),
    }


def pool_facts(found: Sequence[Row]) -> Json:
    """Without its instances and streams."""
    return {
        **found[0],
        "tokenizer_loaded": all(pool["tokenizer_loaded"] for pool in found),
        "speculative_blocks": sum(pool["speculative_blocks"] for pool in found),
        "self_verification": _verification([pool["self_verification"] for pool in found]),
    }


def instance_facts(rows: Sequence[Row]) -> Json:
    return {
        # one worker may have found out by itself that it does not answer
        "state": next((row["state"] for row in rows if row["state"] != "active"), "active"),
        "in_flight": sum(row["in_flight"] for row in rows),
    }


def _verification(found: Sequence[Row]) -> Json:
    """The worst worker's verdict, everybody's counts."""
    worst = dict(max(found, key=lambda one: (one["state"] == "drift", abs(one["difference"]), one["samples"])))
    for name, value in worst.items():
        if isinstance(value, int) and not isinstance(value, bool):
            worst[name] = sum(one[name] for one in found)
    return worst


def action(answers: Sequence[Row]) -> Json:
    """What an action did in all workers."""
    merged = dict(answers[0])
    for name, how in _ACTION.items():
        if name in merged:
            merged[name] = how([one[name] for one in answers if name in one])
    return merged


_ACTION: dict[str, Callable[[list[Any]], Any]] = {"in_flight": sum, "changed": any, "events_applied": max}
