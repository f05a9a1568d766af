"""Load shedding: only when everything that could serve is known to be saturated."""

from __future__ import annotations

import json
import math

import pytest

from extproc.scorers import Load
from extproc.shedding import Shedding, priority_of

IDLE, FULL, LONG, NEAR = Load(0), Load(0, usage=0.8), Load(5), Load(4, usage=0.79)

ROWS = [  # loads, refused (defaults: queue 5, usage .8)
    ([FULL, LONG], True),
    ([FULL, LONG, IDLE], False),
    ([FULL, NEAR], False),
    ([FULL, None], False),  # a missing report is never saturation
    ([None], False),
    ([], False),
    ([Load(50, usage=1.0)], True),
]


@pytest.mark.parametrize(("loads", "refused"), ROWS, ids=str)
def test_when(loads: list[Load | None], refused: bool) -> None:
    refusal = Shedding().refuse(loads)
    assert (refusal is not None) == refused


def test_thresholds_and_priorities() -> None:
    assert Shedding(queue_threshold=50, usage_threshold=1.0).refuse([FULL, LONG]) is None
    spare = Shedding(spare_priority=10)
    assert [spare.refuse([FULL], priority) is None for priority in (-1, 9, 10, 11)] == [False, False, True, True]
    assert [priority_of(text) for text in (None, "", "7", "-3", "x", "9" * 400)] == [0, 0, 7, -3, 0, 2**31]


def test_answer() -> None:
    refusal = Shedding(retry_after=7).refuse([Load(9), Load(20)])
    assert refusal is not None
    assert (refusal.status, refusal.details) == (429, "kvcar_saturated:1.80")
    assert dict(refusal.headers)["retry-after"] == "7"
    error = json.loads(refusal.body)["error"]
    assert error["type"] == "rate_limit_error"
    assert dict(refusal.headers)["x-kvcar-dropped-reason"] == "rejected-saturated"
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"queue_threshold": 0}, "queue_threshold: 0 is not allowed, expected a number above 0"),
        ({"usage_threshold": 1.5}, "usage_threshold: 1.5 is not allowed, expected a number above 0, at most 1"),
        ({"queue_threshold": math.nan}, "queue_threshold: nan"),
        ({"retry_after": -1}, "retry_after: -1"),
    ],
)
def test_bad_options(options: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Shedding(**options)  # type: ignore[arg-type]
