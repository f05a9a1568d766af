"""Metric families that are read at scrape time."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.liveness import Liveness
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


def test_a_role_where_nobody_answers() -> None:
    """Each role by itself: that a decode instance is there helps no prefill."""
    names = ("engine-a", "engine-b", "engine-c")
    roles = dict(zip(names, ("prefill", "prefill", "decode"), strict=True))
    pool = make_pool(*(engine(name, role=role) for name, role in roles.items()), liveness=Liveness(failures=1))
    metrics = Metrics("test")
    add_families(metrics, [pool])

    def unreachable() -> dict[str, float]:
        family = next(one for one in metrics.registry.collect() if one.name == "kvcar_role_unreachable")
        return {sample.labels["role"]: sample.value for sample in family.samples}

    assert unreachable() == {"prefill": 0, "decode": 0}
    pool.failed("10.0.0.1:8000", 1.0, "503")
    assert unreachable() == {"prefill": 0, "decode": 0}
    pool.failed("10.0.0.2:8000", 1.0, "503")
    assert unreachable() == {"prefill": 1, "decode": 0}
    pool._select(1e9)  # half open
    assert {one.state for one in pool.instances if one.role == "prefill"} == {"probation"}
    assert unreachable() == {"prefill": 1, "decode": 0}
    pool.answered("10.0.0.2:8000")
    assert unreachable() == {"prefill": 0, "decode": 0}
