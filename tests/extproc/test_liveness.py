"""Who answers: a table of histories, the trial of a half-open instance, and random histories."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from extproc.liveness import Liveness


@dataclass(frozen=True)
class One:
    name: str
    incarnation: str = "1"


def fresh(**options: float) -> Liveness:
    liveness = Liveness(**options)  # type: ignore[arg-type]
    liveness.retain([One("a"), One("b")])
    return liveness


# (seconds, what happened to "a") ..., the moment of asking, whether it is out then
HISTORIES: list[tuple[str, list[tuple[float, str]], float, bool]] = [
    ("never heard of", [], 0, False),
    ("one failure", [(0, "failed")], 1, False),
    ("two failures", [(0, "failed"), (1, "failed")], 2, True),
    ("an answer between", [(0, "failed"), (1, "answered"), (2, "failed")], 3, False),
    ("refusals of an engine that answers others", [(0, "answered"), (0.3, "failed"), (0.6, "failed")], 0.7, False),
    ("time is up", [(0, "failed"), (1, "failed")], 6.5, False),
    ("late failures of the same time do not prolong it", [(0, "failed"), (1, "failed"), (5, "failed")], 6.5, False),
    ("an answer ends it", [(0, "failed"), (1, "failed"), (2, "answered")], 2, False),
    ("a trial is under way", [(0, "failed"), (1, "failed"), (7, "picked")], 8, True),
    ("the trial got lost", [(0, "failed"), (1, "failed"), (7, "picked")], 17.5, False),
    ("the trial failed: out for twice as long", [(0, "failed"), (1, "failed"), (7, "picked"), (8, "failed")], 17, True),
    ("and then half open", [(0, "failed"), (1, "failed"), (7, "picked"), (8, "failed")], 18.5, False),
    ("the trial was answered", [(0, "failed"), (1, "failed"), (7, "picked"), (8, "answered")], 8, False),
    ("two silent polls", [(0, "silent"), (1, "silent")], 2, False),
    ("three silent polls", [(0, "silent"), (1, "silent"), (2, "silent")], 3, True),
    ("it answers requests, if not polls", [(0, "silent"), (1, "silent"), (1, "answered"), (2, "silent")], 3, False),
    (
        "a good poll ends what polls began",
        [(0, "silent"), (1, "silent"), (2, "silent"), (3, "told")],
        3,
        False,
    ),
    ("and not what requests began", [(0, "failed"), (1, "failed"), (2, "told")], 3, True),
]


@pytest.mark.parametrize(("name", "history", "now", "out"), HISTORIES, ids=[row[0] for row in HISTORIES])
def test_histories(name: str, history: list[tuple[float, str]], now: float, out: bool) -> None:
    liveness = fresh()
    for at, what in history:
        happen(liveness, "a", at, what)
    assert liveness.out(now).keys() == ({"a"} if out else set())
    assert (liveness.seconds_out("a", now) > 0) <= out
    assert not liveness.half_open(now) & liveness.out(now).keys()
    if out:
        assert liveness.next_change is not None
        later = liveness.next_change + 0.001
        assert liveness.out(later) == {}, "it gets another chance by time alone"
        assert liveness.half_open(later) == {"a"}


def happen(liveness: Liveness, name: str, at: float, what: str) -> bool:
    if what == "failed":
        return liveness.failed(name, at, "refused")
    if what == "answered":
        return liveness.answered(name, at)
    if what == "picked":
        return liveness.picked(name, at)
    return liveness.polled(name, at, "TimeoutError" if what == "silent" else "")


def test_time_out_doubles_up_to_the_maximum() -> None:
    liveness = fresh(failures=1, out_seconds=5, max_out_seconds=12)
    now, lengths = 0.0, []
    for _ in range(4):
        assert liveness.failed("a", now, "refused")
        assert liveness.next_change is not None
        liveness.out(now)
        lengths.append(liveness.next_change - now)
        now = liveness.next_change
    assert lengths == [5, 10, 12, 12]


def test_another_process_has_no_past_and_a_gone_one_is_forgotten() -> None:
    liveness = fresh(failures=1)
    liveness.failed("a", 0, "refused")
    liveness.failed("b", 0, "refused")
    liveness.retain([One("a", "2"), One("b")])
    assert liveness.out(1).keys() == {"b"}
    liveness.retain([One("a", "2")])
    assert liveness.out(1) == {}
    assert liveness.next_change is None
    assert not liveness.failed("b", 1, "refused")


def test_random_histories() -> None:
    """Nobody is out without a failure since the last answer; nobody is out for ever; calls say when `out` changes."""
    for seed in range(300):
        rng = random.Random(seed)
        liveness = fresh(failures=rng.randint(1, 3), scrape_failures=rng.randint(1, 3))
        now, bad = 0.0, dict.fromkeys("ab", False)
        for _ in range(60):
            now += rng.choice([0.01, 0.5, 3, 20])
            name = rng.choice("ab")
            what = rng.choice(["failed", "failed", "answered", "picked", "silent", "told"])
            before = liveness.out(now).keys()
            told = happen(liveness, name, now, what)
            after = liveness.out(now).keys()
            assert told or before == after, (seed, what)
            bad[name] = what in ("failed", "silent") or (bad[name] and what != "answered")
            assert all(bad[one] for one in after), seed
        for _ in range(5):
            if liveness.next_change is None:
                break
            now = liveness.next_change + 0.001
            liveness.out(now)
        assert liveness.out(now + 100) == {}
