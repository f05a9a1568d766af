"""The dashboard of several workers as of one: requests add up, what all watch is shown at its worst, moments agree."""

from __future__ import annotations

from typing import Any

from extproc.dashboard.history import History, LoadPoint, Totals
from extproc.workers.overview import decision_of, overview

VERIFICATION = {"state": "ok", "samples": 1, "difference": 0.0}


def answer(worker: int, **more: Any) -> dict[str, Any]:
    pool = {"name": "p", "tokenizer_loaded": True, "speculative_blocks": 1, "self_verification": VERIFICATION,
            "instances": 1, "streams": 1, "synchronized": 1 - worker}  # fmt: skip
    instance = {"pool": "p", "name": "a", "state": "active", "in_flight": 2, "waiting_own": 1, "uncached_own": 10,
                "chosen": 5 + worker, "streams": 1, "synchronized": 1 - worker,
                "blocks": {"device": 7 - worker, "host": 0, "disk": 0}}  # fmt: skip
    stream = {"pool": "p", "instance": "a", "dp_rank": 0, "endpoint": "tcp://1", "connected": True,
              "synchronized": not worker, "complete": True, "error": None, "sequence": 7,
              "problem": "gap" if worker else None}  # fmt: skip
    return {
        "now": 100.0 + worker, "started": 10.0 + worker, "version": "1", "uptime_seconds": 90.0 - worker,
        "ready": not worker,
        "reload_error": None, "troubles": [], "pools": [pool], "instances": [instance], "streams": [stream],
        "left_off": {"instances": 0, "streams": 0}, "remedies": {"gap": {"title": "t"}} if worker else {},
        "unscored": [{"reason": "timeout", "count": 1 + worker, "remedy": "r"}],
        "decisions": [{"number": number, "at": 50.0 + number + worker / 2} for number in (3, 2)],
        "decisions_seen": 4, "history": History(0.0).since(), **more,
    }  # fmt: skip


def merged(*answers: dict[str, Any], since: int = -1) -> dict[str, Any]:
    return overview(dict(enumerate(answers)), 2, since)


def test_requests_add_up_and_the_worst_is_shown() -> None:
    page = merged(answer(0), answer(1))
    (instance,) = page["instances"]
    assert (instance["in_flight"], instance["waiting_own"], instance["chosen"]) == (4, 2, 11)
    assert (instance["synchronized"], instance["blocks"]["device"]) == (0, 6)
    assert [one["problem"] for one in page["streams"]] == ["gap"]
    assert set(page["remedies"]) == {"gap"}
    assert (page["pools"][0]["synchronized"], page["pools"][0]["speculative_blocks"]) == (0, 2)
    assert page["unscored"] == [{"reason": "timeout", "count": 3, "remedy": "r"}]
    assert (page["ready"], page["started"], page["decisions_seen"]) == (True, 10.0, 8)


def test_a_decision_is_found_again_at_its_worker() -> None:
    rows = merged(answer(0), answer(1))["decisions"]
    assert [(row["at"], row["worker"], decision_of(row["number"], 2)) for row in rows] == [
        (53.5, 1, (1, 3)),
        (53.0, 0, (0, 3)),
    ]


def history(ticks: dict[int, int], waiting: float | None = None) -> History:
    """Requests scored until each tick."""
    out = History(0.0, step=2.0, keep=100, group=5)
    for tick, scored in ticks.items():
        out.add(2.0 * tick, {"p": Totals(scored=scored)}, {"a": LoadPoint(1, waiting)})
    return out


def scored(*histories: History, since: int = -1) -> tuple[dict[int, float], int]:
    page = merged(*(answer(n, history=one.since(-1)) for n, one in enumerate(histories)), since=since)["history"]
    return {int(row[0]): row[1] for row in page["totals"].get("p", [])}, page["tick"]


def test_counts_of_the_same_moment_add_up() -> None:
    assert scored(history({7: 1, 8: 2}), history({7: 10, 8: 20})) == ({7: 11, 8: 22}, 8)


def test_a_tick_left_out_has_the_counts_before() -> None:
    assert scored(history({6: 1, 8: 3}), history({6: 10, 7: 20, 8: 30})) == ({6: 11, 7: 21, 8: 33}, 8)


def test_what_one_has_not_reached_comes_next_time() -> None:
    ahead, behind = history({7: 1, 8: 2}), history({7: 10})
    assert scored(ahead, behind) == ({7: 11}, 7)
    behind.add(16.0, {"p": Totals(scored=20)}, {})
    assert scored(ahead, behind, since=7) == ({8: 22}, 8)
    assert scored(ahead, history({7: 10}), since=8) == ({}, 8), "never back: the page would show it twice"


def test_one_that_started_later_had_nothing() -> None:
    assert scored(history({6: 5, 7: 6}), history({7: 1})) == ({6: 5, 7: 7}, 7)


def test_loads_by_group() -> None:
    both = [answer(n, history=one.since(-1)) for n, one in enumerate((history({10: 0}, 3.0), history({10: 0}, 4.0)))]
    assert merged(*both)["history"]["loads"] == {"a": [[2, 2.0, 4.0]]}
