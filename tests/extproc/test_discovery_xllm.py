"""`discovery` of types etcd and xllm-file in the configuration: checked, bounded, read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from extproc import assembly, config
from extproc.config import ConfigError
from extproc.instances import PoolFacts
from kvindex.discovery.etcd import EtcdSource
from kvindex.discovery.file import FileSource
from kvindex.errors import ConfigurationError
from kvindex.sync import SyncLimits

STREAM = {
    "instance_name": "10.0.0.1:8000",
    "endpoint": "tcp://10.0.0.1:18000",
    "replay_endpoint": "tcp://10.0.0.1:38000",
}
FACTS = PoolFacts("p", "m")
ETCD = {"endpoints": ["http://10.0.0.9:2379"]}


def parsed(*sources: dict[str, Any], **pool: Any) -> config.Config:
    one = {"name": "p", "models": ["m"], "tokenizer": "some/model", "discovery": sources, **pool}
    return config.parse(json.dumps({"pools": [one]}))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kv_events.json"
    path.write_text(json.dumps({"streams": [STREAM], "max_streams": 3, "replay_timeout_ms": 700}))
    return path


def test_etcd() -> None:
    (given,) = parsed({"type": "etcd", **ETCD}).pools[0].discovery
    assert isinstance(given.source(FACTS), EtcdSource)
    assert given.bounds() == {}
    with pytest.raises(ConfigError, match=r"discovery\[0\].*endpoints"):
        parsed({"type": "etcd", "endpoints": []})
    with pytest.raises(ConfigError, match=r"discovery\[0\].*endpoints\[0\]"):
        parsed({"type": "etcd", "endpoints": ["10.0.0.9:2379"]})
    files = parsed({"type": "etcd", "endpoints": ["https://10.0.0.9:2379"], "ca": "/nowhere/ca.pem"})
    with pytest.raises(ConfigError, match=r"pools\[0\].discovery\[0\]: ca '/nowhere/ca.pem'"):
        assembly.check_files(files)


def test_static_file_and_its_limits(file: Path) -> None:
    whole = parsed({"type": "xllm-file", "path": str(file)})
    assembly.check_files(whole)
    (given,) = whole.pools[0].discovery
    assert isinstance(given.source(FACTS), FileSource)
    bounds = assembly.bounds_of(whole.pools[0])
    assert bounds == {"max_streams": 3, "replay_timeout_ms": 700, "block_size": 128, "hash_seed": 1024}
    limits = SyncLimits(max_message_bytes=5)
    assert assembly.bounded(limits, bounds) == SyncLimits(max_message_bytes=5, replay_timeout=0.7)


def test_file_with_discovery(file: Path) -> None:
    file.write_text(json.dumps({"discovery": {"block_size": 16}}))
    bare, full = ({"type": "xllm-file", "path": str(file), **more} for more in ({}, {"etcd": ETCD}))
    with pytest.raises(ConfigError, match=r"discovery\[0\]: .*kv_events.json has `discovery`: say under `etcd`"):
        assembly.check_files(parsed(bare))
    assembly.check_files(parsed(full))
    assert isinstance(parsed(full).pools[0].discovery[0].source(FACTS), EtcdSource)


@pytest.mark.parametrize(
    ("content", "pool", "named"),
    [
        (None, {}, "kv_events.json: cannot be read"),
        ("{", {}, "kv_events.json: no JSON"),
        (json.dumps({"streams": [STREAM | {"dp_rank": -1}]}), {}, r"kv_events.json: streams\[0\].dp_rank"),
        (json.dumps({"streams": [STREAM]}), {"block_size": 64}, "block_size 128, the pool 64"),
        (json.dumps({"streams": [STREAM | {"hash_seed": 7}]}), {}, "hash_seed 7, the pool 1024"),
    ],
)
def test_what_is_wrong_has_place_and_remedy(file: Path, content: str | None, pool: Any, named: str) -> None:
    file.unlink()
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"pools\[0\].discovery\[0\]: .*" + named):
        assembly.check_files(parsed({"type": "xllm-file", "path": str(file)}, **pool))


def test_a_changed_file_makes_other_options(file: Path) -> None:
    """So that a reload starts the source anew, and only then."""
    options = {"type": "xllm-file", "path": str(file)}
    before, same = (parsed(options).pools[0].discovery for _ in range(2))
    file.write_text(json.dumps({"streams": [STREAM], "max_streams": 4}))
    assert before == same
    assert before != parsed(options).pools[0].discovery


def test_static_streams_that_turn_into_discovery_change_nothing(file: Path) -> None:
    given: Any = parsed({"type": "xllm-file", "path": str(file)}).pools[0].discovery[0]
    assert [one.name for one in given._static(file.read_text(), FACTS)] == ["10.0.0.1:8000"]
    with pytest.raises(ConfigurationError, match="SIGHUP"):
        given._static(json.dumps({"discovery": {}}), FACTS)
