"""The judgement of the benchmarks, without running any: goals, the regression guard, the report."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.bench import check
from tests.bench.goals import GOALS, reached
from tests.bench.report import make, markdown


def row(name: str, ratio: float | None, peer: str = "RadixTree", ours: float = 1.0) -> dict[str, Any]:
    return {"name": name, "ours": ours, "unit": "us", "peer": peer, "peer_value": 1.0, "ratio": ratio}


FIND = "find, full, 256 blocks, {} streams"
GC = "full collection with 2,000,000 pairs"
STORED = "stored all-in (decode, hash, index), 16-block event, a block"


@pytest.mark.parametrize(
    ("rows", "goal", "ratio", "ok"),
    [
        (
            [row(FIND.format(4), 1.2), row(FIND.format(128), 1.5)],
            "find, full hit of 256",
            1.5,
            True,
        ),  # the worst counts
        ([row(FIND.format(4), 1.9)], "find, full hit of 256", 1.9, False),
        ([row(FIND.format(4), 9.0, "dict of sets")], "find, full hit of 256", None, None),  # another peer's row
        ([], "find, full hit of 256", None, None),
        ([row(GC, 400.0, "empty index", ours=4.0)], "longest GC pause", 4.0, True),  # a bound in ms
        ([row(STORED, 1.0)], "stored event", 1.0, True),
    ],
)
def test_goal(rows: list[dict[str, Any]], goal: str, ratio: float | None, ok: bool | None) -> None:
    (found,) = [one for one in reached(GOALS, rows) if one["goal"].startswith(goal)]
    assert (found["ratio"], found["ok"]) == (ratio, ok)
    assert ("explained" in found) == (ratio is not None and ratio > found["aim"])


def test_missed_goal_names_its_limit() -> None:
    rows = [row(STORED, 1.4), row("stored, unpackb, array and XXH3 alone (floor), 16-block event, a block", 0.63)]
    (found,) = [one for one in reached(GOALS, rows) if one["goal"].startswith("stored event")]
    assert "0.63" in found["explained"]


@pytest.mark.parametrize(
    ("now", "then", "worse"),
    [
        ([1.0, 1.05, 1.1], {"ratio": 1.0, "spread": 1.0}, False),
        ([1.2, 1.2, 1.2], {"ratio": 1.0, "spread": 1.0}, True),
        ([1.2, 1.2, 1.2], {"ratio": 1.0, "spread": 1.25}, False),  # the reference itself was as far apart
        ([1.0, 1.2, 1.3], {"ratio": 1.0, "spread": 1.0}, False),  # so are today's runs
        ([0.5, 0.5, 0.5], {"ratio": 1.0, "spread": 1.0}, False),
        ([2.0], {"ratio": 1.0, "spread": 1.3}, True),
    ],
)
def test_worse_than_noise(now: list[float], then: dict[str, float], worse: bool) -> None:
    assert [one.row for one in check.compare({"a": now, "new": [9.0]}, {"a": then, "gone": then})] == ["a"] * worse


def test_what_never_got_above_zero_has_no_ratio() -> None:
    assert check.summary({"a": [0.0, 1.0], "b": [2.0, 4.0, 3.0]}) == {"b": {"ratio": 3.0, "spread": 2.0}}


def test_committed_reference() -> None:
    reference = json.loads(check.REFERENCE.read_text(encoding="utf-8"))
    assert reference
    assert all(one["ratio"] > 0 and one["spread"] >= 1 for one in reference.values())


def test_report_tells_every_goal() -> None:
    report = make([{"bench": "bench_index", **row(FIND.format(4), 5.0)}])
    assert [set(one) >= {"goal", "ratio", "reach", "aim", "ok"} for one in report["goals"]] == [True] * len(GOALS)
    text = markdown(report, ["bench/goals.svg"])
    assert all(goal.name in text for goal in GOALS)
    assert GOALS[2].why in text
    assert "bench/goals.svg" in text
