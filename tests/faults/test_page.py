"""The page is made of the recorded rows, the latest of each fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.load import Figures
from tests.faults.page import GROUPS, SOAK_ROWS, Recorder, main, page, soak_part

FIGURES = Figures(requests=90, failed=0, excused=2, usual=50.04, median=60.0, worst=700.0, errors=("503",))
HELD = {"resident": 3 << 20, "threads": 20, "descriptors": 60, "sockets": 21, "series": 356}
SOAK_FIGURES = {
    "seconds": 1800.0, "requests": 100_000, "aborted": 7, "done": {"join": 2_000, "gap": 3}, "views": 6, "complete": 5,
    "held": [{**HELD, "seconds": 60.0 * number} for number in range(2, 31)],
}  # fmt: skip


def test_rows_become_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows"
    monkeypatch.setenv("KVCAR_FAULTS", str(path))
    for group in GROUPS:
        Recorder().add(group, f"a fault of {group}", FIGURES, saw="answers", recovered="all of it", seconds=1.26)
    text = page([json.loads(line) for line in path.read_text("utf-8").splitlines()], date="2026-01-02")
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == [*GROUPS, "Soak"]
    assert "| a fault of kvcar | answers | 90 | 2 | 0 | 50, 60, 700 ms | 1.3 s | all of it |" in text


def test_without_a_file_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVCAR_FAULTS", raising=False)
    Recorder().add("kvcar", "a fault", FIGURES, saw="answers", recovered="", seconds=None)


def test_the_page_shows_the_latest_run_of_a_fault_and_the_soak_if_there_is_one(tmp_path: Path) -> None:
    rows, soak, target = tmp_path / "rows", tmp_path / "soak", tmp_path / "page.md"
    row = {
        "group": "kvcar", "fault": "kvcar killed", "saw": "answers", "recovered": "all", "requests": 90, "failed": 0,
        "excused": 2, "usual": 50.0, "median": 60.0, "worst": 700.0, "seconds": 1.2,
    }  # fmt: skip
    rows.write_text("".join(json.dumps({**row, "seconds": seconds}) + "\n" for seconds in (9.0, 3.0)), "utf-8")
    main([str(rows), str(soak), str(target)])
    alone = target.read_text("utf-8")
    assert "| 3.0 s | all |" in alone
    assert "9.0 s" not in alone
    assert "The last run" not in alone
    soak.write_text(json.dumps(SOAK_FIGURES), "utf-8")
    main([str(rows), str(soak), str(target)])
    assert target.read_text("utf-8") == alone + soak_part(SOAK_FIGURES)


@pytest.mark.parametrize(
    ("complete", "told"),
    [(6, "all 6 views of kvcar were complete and equal"), (5, "5 of 6 views of kvcar were complete and equal")],
)
def test_soak_tells_how_many_views_were_complete(complete: int, told: str) -> None:
    text = soak_part({**SOAK_FIGURES, "complete": complete})
    assert told in text
    assert ("might lack blocks" in text) == (complete < 6)


def test_soak_is_shown_from_its_first_to_its_last_measurement() -> None:
    text = soak_part(SOAK_FIGURES)
    assert "30 minutes: 100,000 requests, none failed, besides 7 aborted" in text
    assert "3 x gap, 2,000 x join" in text
    rows = [line for line in text.splitlines() if " min |" in line]
    assert rows[0] == "| 2 min | 3.0 MiB | 20 | 60 | 21 | 356 |"
    assert rows[-1].startswith("| 30 min |")
    assert len(rows) <= SOAK_ROWS + 1
