"""History, remedies and documents of the dashboard: no server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from extproc.dashboard.history import History, LoadPoint, Totals
from extproc.dashboard.pages import FILES
from extproc.dashboard.remedies import STREAMS, UNSCORED, remedy_of
from extproc.reasons import Reason

DOCS = Path(__file__).parents[2] / "docs"


def filled(*times: float, keep: int = 450) -> History:
    history = History(100.0, step=2.0, keep=keep, group=5)
    for number, now in enumerate(times):
        history.add(100.0 + now, {"p": Totals(scored=number)}, {"a": LoadPoint(number, None if number % 2 else number)})
    return history


def test_history_counts_ticks_from_the_start() -> None:
    told = filled(0, 2.1, 3.9, 4.0, 60).since()
    # 3.9 is in the tick of 2.1; the gap before 60 stays one
    assert [row[:2] for row in told["totals"]["p"]] == [[0, 0], [1, 1], [2, 3], [30, 4]]
    assert told["tick"] == 30
    # groups of five ticks: mean in flight, mean of the reports that were valid
    assert told["loads"]["a"] == [[0, (0 + 1 + 3) / 3 // 0.01 / 100, 0.0], [6, 4.0, 4.0]]


def test_history_tells_what_is_new_and_open_groups_again() -> None:
    history = filled(*range(0, 24, 2))
    told = history.since(8)
    assert [row[0] for row in told["totals"]["p"]] == [9, 10, 11]
    assert [point[0] for point in told["loads"]["a"]] == [1, 2]
    assert history.since(11)["totals"] == {}
    assert [point[0] for point in history.since(11)["loads"]["a"]] == [2]


def test_history_is_bounded() -> None:
    told = filled(*range(0, 400, 2), keep=20).since()
    assert [row[0] for row in told["totals"]["p"]] == list(range(180, 200))
    assert [point[0] for point in told["loads"]["a"]] == [36, 37, 38, 39]


def stream(state: str, error: str | None, *, synchronized: bool = False, complete: bool = False) -> dict[str, Any]:
    return {"state": state, "error": error, "synchronized": synchronized, "complete": complete}


@pytest.mark.parametrize(
    ("state", "error", "key"),
    [
        ("skipped", "endpoint tcp://10.0.0.1:5557 is also claimed by b", "claimed"),
        ("skipped", "max_streams 128 reached: 128 in use, 2 more needed", "max_streams"),
        ("missing", "no events endpoint for rank 1 of 2: the instance's minimum is 0", "rank"),
        ("empty", "no event received yet", "empty"),
        ("waiting", None, "empty"),
        ("empty", "cannot connect to tcp://10.0.0.1:5557, trying again", "connect"),
        ("offline", "connection lost", "connect"),
        ("offline", "connection to tcp://10.0.0.1:5557 lost, trying again", "connect"),
        ("fetch", "waiting for the engine's answer to the replay request", "fetch"),
        ("fetch", "gap: message 9 after 4", "gap"),
        ("fetch", "engine restarted: message 0 after 17", "restarted"),
        ("backoff", "replay: no end marker within 5 s", "replay"),
        ("backoff", "snapshot: over max_buffered_bytes 16777216 while it ran", "buffer"),
        ("live", "replay: no end marker within 5 s; going on without replay, incomplete", "replay"),
        ("live", "messages with topic 'kv' are ignored, the configured topic is 'kv-events'", "topic"),
        ("live", "events have block_size 32, configured is 16: their blocks are not indexed", "block_size"),
        ("empty", "message 7: stream a/0: 300000 blocks known (0 of them without a key), over the bound max_blocks=9",
         "capacity"),
        ("empty", "message 7: it is of data-parallel rank 1, this stream of rank 0", "wrong_rank"),
        ("empty", "message 3 names a parent that was never announced", "parent"),
        ("empty", "message 3: not a list", "damaged"),
        ("fault", "internal error, the stream is rebuilt: KeyError: 1", "fault"),
        ("retired", "instance gone or replaced", "other"),
    ],
)  # fmt: skip
def test_remedy(state: str, error: str | None, key: str) -> None:
    found = remedy_of(stream(state, error, synchronized=state == "live"))
    assert found is not None
    assert found.key == key


def test_remedy_of_healthy_streams() -> None:
    assert remedy_of(stream("live", None, synchronized=True, complete=True)) is None
    incomplete = remedy_of(stream("live", None, synchronized=True))
    assert incomplete is not None
    assert incomplete.key == "incomplete"


def test_remedies_of_the_page_are_those_of_the_documents() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| [^|]* \| ([^|]*) \|$", (DOCS / "unscored.md").read_text("utf-8"), re.MULTILINE)
    assert {name: text.replace("`", "") for name, text in rows} == {str(key): text for key, text in UNSCORED.items()}
    assert set(UNSCORED) == set(Reason)
    page = (DOCS / "dashboard.md").read_text("utf-8")
    assert set(re.findall(r"^\| `([a-z_]+)` \|", page, re.MULTILINE)) == {row.key for row in STREAMS}


def test_the_page_loads_nothing_from_elsewhere() -> None:
    for path, file in FILES.items():
        text = file.body.decode()
        allowed = {"http://www.w3.org/2000/svg"}
        assert set(re.findall(r"https?://[^\s'\"`)<]+", text)) <= allowed, path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|@import", text), path
        assert not re.search(r"<script(?![^>]*src=)|<[^>]*\s(?:style|on\w+)=", text), path
