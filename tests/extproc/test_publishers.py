"""Configuration of shared pools, streams per medium and pushed instances: what becomes of it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from extproc import config
from extproc.assembly import instances_of
from kvindex.fleet import PUSHED, PoolPublisher, StreamEndpoint
from tests.extproc.pool_model import engine, make_pool

ENGINE = {"name": "a", "address": "10.0.0.1:8000", "events": "tcp://10.0.0.1:5557"}
MASTER = {"name": "master", "events": "tcp://10.0.0.9:5560"}


def parsed(instance: dict[str, Any] = ENGINE, **pool: Any) -> config.Config:
    given = {"name": "p", "models": ["m"], "tokenizer": "/models/m", "instances": [instance], **pool}
    return config.parse(yaml.safe_dump({"pools": [given]}))


def streams(instance: dict[str, Any]) -> list[tuple[int, str, str]]:
    (found,) = instances_of(parsed(instance))
    return [(one.dp_rank, one.medium, one.events) for one in found.events]


def test_publishers() -> None:
    endpoint = StreamEndpoint(0, "tcp://10.0.0.9:5560", dialect="mooncake", medium="cpu")
    (given,) = parsed(publishers=[MASTER]).pools[0].publishers
    assert given.publisher == PoolPublisher("master", endpoint)
    more = {**MASTER, "members": ["a"], "medium": "disk", "replay": "tcp://10.0.0.9:5561", "dialect": "vllm"}
    publisher = parsed(publishers=[more]).pools[0].publishers[0].publisher
    assert (publisher.members, publisher.endpoint.medium, publisher.endpoint.recovery) == (("a",), "disk", "history")


MEDIA = {
    "all": ({"npu": 1, "cpu": 11, "disk": 21}, [(0, "", 1), (0, "cpu", 11), (0, "disk", 21), (1, "", 2), (1, "cpu", 12),
                                                (1, "disk", 22)]),
    "cpu and disk share a port": ({"npu": 1, "cpu": 11, "disk": 11}, [(0, "", 1), (0, "cpu", 11), (1, "", 2),
                                                                      (1, "cpu", 12)]),
    "one port for everything": ({"npu": 1, "cpu": 1}, [(0, "", 1), (1, "", 2)]),
}  # fmt: skip


@pytest.mark.parametrize("name", MEDIA)
def test_media(name: str) -> None:
    given, expected = MEDIA[name]
    endpoints = {medium: f"tcp://10.0.0.1:{port}" for medium, port in given.items()}
    instance = {"name": "a", "address": "10.0.0.1:8000", "dp_size": 2, "medium_endpoints": endpoints}
    assert streams(instance) == [(rank, medium, f"tcp://10.0.0.1:{port}") for rank, medium, port in expected]


def test_pushed() -> None:
    assert streams({**ENGINE, "events": "push", "dp_size": 2}) == [(0, "", PUSHED), (1, "", PUSHED)]


REFUSED = {
    "unknown member": ({"publishers": [{**MASTER, "members": ["a", "z"]}]}, "no instance has the name z"),
    "name twice": ({"publishers": [MASTER, {**MASTER, "events": "tcp://10.0.0.9:1"}]}, "publishers"),
    "endpoint twice": ({"publishers": [MASTER, {**MASTER, "name": "b"}]}, "events endpoint"),
    "wildcard": ({"publishers": [{**MASTER, "events": "tcp://*:5560"}]}, "what the engine binds"),
    "medium": ({"publishers": [{**MASTER, "medium": "gpu"}]}, "medium"),
    "two endpoints of an engine": ({"instance": {**ENGINE, "medium_endpoints": {"npu": "tcp://10.0.0.1:1"}}}, "differ"),
    "media": ({"instance": {**ENGINE, "medium_endpoints": {"cpu": "10.0.0.1"}}}, "medium_endpoints.cpu"),
    "push and replay": ({"instance": {**ENGINE, "events": "push", "replay": "tcp://10.0.0.1:5558"}}, "push"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    given, words = REFUSED[name]
    with pytest.raises(config.ConfigError, match=words):
        parsed(**given)


def test_a_pool_follows_its_publishers() -> None:
    given = parsed(publishers=[MASTER]).pools[0].publishers[0].publisher
    pool = make_pool(engine("engine-a"), publishers=(given,))
    assert [report.instance for report in pool.directory.pool_status()] == ["master"]
