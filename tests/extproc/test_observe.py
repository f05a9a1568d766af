"""Metric families that are read at scrape time."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.metrics import Metrics
from extproc.observe import add_families
from kvindex.directory import Directory
from tests.extproc.pool_model import engine, make_pool


def test_a_scrape_walks_the_streams_once_and_sees_them_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[str] = []
    status = Directory.status

    def counted(directory: Directory) -> Any:
        walks.append("one")
        return status(directory)

    monkeypatch.setattr(Directory, "status", counted)
    pool = make_pool(engine("engine-a"), engine("engine-b"))
    metrics = Metrics("1")
    add_families(metrics, [pool])
    first = metrics.render()[0].decode()
    assert walks == ["one"]
    assert first.count("\nkvcar_stream_synchronized{") == 2
    pool.directory.update([engine("engine-a")])
    second = metrics.render()[0].decode()
    assert walks == ["one"] * 2
    assert second.count("\nkvcar_stream_synchronized{") == 1
    assert 'kvcar_stream_sequence{dp_rank="0",engine="engine-a",pool="qwen"} -1.0' in second
