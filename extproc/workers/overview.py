"""What the dashboard shows of several workers, as of one. Pure: their overviews in, one out.

History counts ticks on the machine's clock, so a tick is the same moment in each. A worker that left one out had the
counts of the tick before; a tick that one has not reached yet comes with the next answer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from extproc.workers import merge
from extproc.workers.merge import Json, Row

LOOK_BACK = 10
"""Ticks before the asked one that each worker is asked for as well: the counts of one that left some out."""

Totals = list[float]
"""[tick, counts ...]"""


def overview(answers: Mapping[int, Row], total: int, since: int) -> Json:
    """`answers` by worker, the one that runs longest first; `since` as the page asked."""
    found = list(answers.values())
    return {
        **found[0],
        "now": max(one["now"] for one in found),
        "started": min(one["started"] for one in found),
        "uptime_seconds": max(one["uptime_seconds"] for one in found),
        "ready": any(one["ready"] for one in found),
        "reload_error": next((one["reload_error"] for one in found if one["reload_error"]), None),
        "pools": _groups(found, "pools", ("name",), _pool),
        "instances": _groups(found, "instances", ("pool", "name"), _instance),
        "streams": merge.streams([one["streams"] for one in found]),
        "left_off": {key: max(one["left_off"][key] for one in found) for key in ("instances", "streams")},
        "remedies": {key: value for one in found for key, value in one["remedies"].items()},
        "unscored": sorted(
            _groups(found, "unscored", ("reason",), lambda rows: {**rows[0], "count": sum(r["count"] for r in rows)}),
            key=lambda row: (-row["count"], row["reason"]),
        ),
        "decisions": merge.decisions(
            {
                worker: [{**row, "number": row["number"] * total + worker} for row in one["decisions"]]
                for worker, one in answers.items()
            },
            max(len(one["decisions"]) for one in found),
        ),
        "decisions_seen": sum(one["decisions_seen"] for one in found),
        "history": _history([one["history"] for one in found], since),
    }


def decision_of(number: int, total: int) -> tuple[int, int]:
    """(worker, its own number) of a decision in the list."""
    return number % total, number // total


def _groups(
    found: Sequence[Row], part: str, keys: tuple[str, ...], join: Callable[[Sequence[Row]], Json]
) -> list[Json]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for one in found:
        for row in one[part]:
            groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return [join(rows) for rows in groups.values()]


def _pool(rows: Sequence[Row]) -> Json:
    return {
        **merge.pool_facts(rows),
        "instances": max(row["instances"] for row in rows),
        "streams": max(row["streams"] for row in rows),
        "synchronized": min(row["synchronized"] for row in rows),
    }


def _instance(rows: Sequence[Row]) -> Json:
    """Requests of all; of what all watch the worst."""
    out = {**rows[0], **merge.instance_facts(rows)}
    out |= {key: sum(row[key] for row in rows) for key in ("waiting_own", "uncached_own", "chosen")}
    return out | {
        "streams": max(row["streams"] for row in rows),
        "synchronized": min(row["synchronized"] for row in rows),
        "blocks": {tier: min(row["blocks"][tier] for row in rows) for tier in rows[0]["blocks"]},
    }


def _history(found: Sequence[Row], since: int) -> Json:
    tick = max(since, min(one["tick"] for one in found))
    group = found[0]["group"]
    totals, loads = {}, {}
    for name in dict.fromkeys(name for one in found for name in one["totals"]):
        totals[name] = _added([one["totals"].get(name, []) for one in found], since, tick)
    for name in dict.fromkeys(name for one in found for name in one["loads"]):
        points: dict[int, list[Any]] = {}
        for one in found:
            for number, in_flight, waiting in one["loads"].get(name, []):
                if (number + 1) * group > since and number * group <= tick:
                    points.setdefault(number, []).append((in_flight, waiting))
        loads[name] = [[number, *_point(values)] for number, values in sorted(points.items())]
    return {
        "step": found[0]["step"], "group": group, "tick": tick,
        "totals": {name: rows for name, rows in totals.items() if rows},
        "loads": {name: rows for name, rows in loads.items() if rows},
    }  # fmt: skip


def _added(lists: Sequence[Sequence[Totals]], since: int, tick: int) -> list[Totals]:
    """Counts of all workers at each tick; none of one that had not started."""
    ticks = sorted({row[0] for rows in lists for row in rows if since < row[0] <= tick})
    out = []
    for at in ticks:
        places = ((rows, bisect_right(rows, at, key=itemgetter(0))) for rows in lists)
        last = [rows[place - 1][1:] for rows, place in places if place]
        out.append([at, *(round(sum(values), 4) for values in zip(*last, strict=True))])
    return out


def _point(values: Sequence[tuple[float, float | None]]) -> tuple[float, float | None]:
    """Requests in flight of all; what the engine says of itself is the same for each, but for when it was asked."""
    waiting = [one for _, one in values if one is not None]
    return round(sum(one for one, _ in values), 2), max(waiting, default=None)
