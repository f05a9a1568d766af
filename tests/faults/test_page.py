"""The page is made of the recorded rows, the latest of each fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.load import Figures
from tests.faults.page import GROUPS, Recorder, page

FIGURES = Figures(requests=90, failed=0, excused=2, usual=50.04, median=60.0, worst=700.0, errors=("503",))


def test_rows_become_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows"
    monkeypatch.setenv("KVCAR_FAULTS", str(path))
    for group in GROUPS:
        Recorder().add(group, f"a fault of {group}", FIGURES, saw="answers", recovered="all of it", seconds=1.26)
    text = page([json.loads(line) for line in path.read_text("utf-8").splitlines()], date="2026-01-02")
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == list(GROUPS)
    assert "| a fault of kvcar | answers | 90 | 0 | 2 | 50, 60, 700 ms | 1.3 s | all of it |" in text


def test_without_a_file_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVCAR_FAULTS", raising=False)
    Recorder().add("kvcar", "a fault", FIGURES, saw="answers", recovered="", seconds=None)
