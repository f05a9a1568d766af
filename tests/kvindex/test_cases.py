"""Every case file about events, malformed messages and replay framing, through the real StreamSync and PrefixIndex."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvindex.hashing import content_keys, pack_tokens
from kvindex.index import PrefixIndex
from kvindex.sync import State, SyncLimits
from tests.kvindex.casework import CASES, END, CaseDriver, Driven, load, number

EVENT_FILES = sorted((CASES / "events").glob("*.json"))
MALFORMED = load(CASES / "wire_malformed.json")
FRAMING = load(CASES / "replay_framing.json")


@pytest.mark.parametrize("path", EVENT_FILES, ids=lambda path: path.stem)
def test_events(path: Path) -> None:
    CaseDriver(load(path)).run()


def test_there_are_cases() -> None:
    assert len(EVENT_FILES) >= 35
    assert len(MALFORMED["cases"]) >= 11
