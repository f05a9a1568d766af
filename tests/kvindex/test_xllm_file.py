"""The xLLM service's JSON file: what it says, and what is refused with key and remedy."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvindex.discovery.xllm_file import parse
from kvindex.discovery.xllm_registry import PortRule
from kvindex.errors import ConfigurationError
from kvindex.fleet import StreamEndpoint


def stream(number: int = 1, **changes: Any) -> dict[str, Any]:
    fields = {
        "instance_name": f"10.0.0.{number}:8000",
        "endpoint": f"tcp://10.0.0.{number}:18000",
        "replay_endpoint": f"tcp://10.0.0.{number}:38000",
    }
    return {key: value for key, value in (fields | changes).items() if value is not ...}


def rank(number: int) -> dict[str, Any]:
    ports = {"endpoint": f"tcp://10.0.0.1:{18000 + number}", "replay_endpoint": f"tcp://10.0.0.1:{38000 + number}"}
    return stream(dp_rank=number, **ports)


def text(root: Any = None, **keys: Any) -> str:
    return json.dumps(keys if root is None else root)


def test_static_streams() -> None:
    found = parse(text(streams=[rank(1), stream(2, topic="xllm-kv"), rank(0)], max_streams=7), pool="p", model="m")
    one, two = found.instances
    assert (one.name, one.address, one.pool, one.model, one.dp_size) == ("10.0.0.1:8000", "10.0.0.1:8000", "p", "m", 2)
    assert one.events == (
        StreamEndpoint(0, "tcp://10.0.0.1:18000", "tcp://10.0.0.1:38000", "", "xllm"),
        StreamEndpoint(1, "tcp://10.0.0.1:18001", "tcp://10.0.0.1:38001", "", "xllm"),
    )
    assert two.events[0].topic == "xllm-kv"
    assert (found.ports, found.block_size, found.hash_seed) == (None, 128, 1024)
    assert found.limits == {"max_streams": 7}


def test_discovery() -> None:
    assert parse(text(discovery={})).ports == PortRule(10000, 30000, "")
    given = {"event_port_offset": 1, "replay_port_offset": 2, "topic": "t", "block_size": 16, "hash_seed": 5}
    found = parse(text(discovery={**given, "refresh_interval_ms": 1000, "new": 1}, streams=[], other=2))
    assert (found.ports, found.block_size, found.hash_seed) == (PortRule(1, 2, "t"), 16, 5)
    assert found.instances == ()
    assert found.ignored == ("other", "discovery.new")


def test_every_limit() -> None:
    limits = {
        "max_streams": 128,
        "max_blocks_per_stream": 262144,
        "max_message_bytes": 8388608,
        "max_buffered_bytes": 16777216,
        "replay_timeout_ms": 2000,
        "resync_interval_ms": 30000,
    }
    assert parse(text(discovery={}, **limits)).limits == limits


def test_names_that_are_no_address() -> None:
    addresses = {"engine-a": "10.0.0.1:8000"}
    (instance,) = parse(text(streams=[stream(instance_name="engine-a")]), addresses=addresses).instances
    assert (instance.name, instance.address) == ("engine-a", "10.0.0.1:8000")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "no JSON object"),
        ("{}", "no streams"),
        (text(streams=[]), "no streams"),
        (text(streams={}), "no streams"),
        (text(streams=[stream()], discovery={}), "exclude each other"),
        (text(discovery=[]), "discovery is"),
        (text(discovery={"event_port_offset": 0}), "discovery.event_port_offset is 0"),
        (text(discovery={"refresh_interval_ms": 49}), "50 to 60000"),
        (text(discovery={"topic": 1}), "discovery.topic is 1"),
        (text(discovery={}, max_streams=129), "max_streams is 129: write a whole number of 1 to 128"),
        (text(discovery={}, max_streams=True), "max_streams is True"),
        (text(discovery={}, replay_timeout_ms=1.5), "replay_timeout_ms is 1.5"),
        (text(streams=[1]), r"streams\[0\] is 1"),
        (text(streams=[stream(instance_name=...)]), r"streams\[0\].instance_name is missing"),
        (text(streams=[stream(endpoint=...)]), r"streams\[0\].endpoint is missing"),
        (text(streams=[stream(replay_endpoint="")]), r"streams\[0\].replay_endpoint is missing"),
        (text(streams=[stream(endpoint="tcp://*:1")]), r"streams\[0\].endpoint .*write the engine's host"),
        (text(streams=[stream(replay_endpoint="tcp://0.0.0.0:1")]), r"streams\[0\].replay_endpoint"),
        (text(streams=[stream(endpoint="http://10.0.0.1:1")]), "transport"),
        (text(streams=[stream(dp_rank=-1)]), r"streams\[0\].dp_rank is -1"),
        (
            text(streams=[stream(), stream(2, block_size=64)]),
            r"streams\[1\].block_size is 64, that of .* 128",
        ),
        (text(streams=[stream(hash_seed=1), stream(2)]), r"streams\[1\].hash_seed is 1024"),
        (text(streams=[stream(), stream(2, endpoint="tcp://10.0.0.1:18000")]), r"is that of streams\[0\].endpoint"),
        (text(streams=[stream(replay_endpoint="tcp://10.0.0.1:18000")]), r"is that of streams\[0\].endpoint"),
        (text(streams=[rank(0), rank(1) | {"dp_rank": 0}]), "rank 0 of instance '10.0.0.1:8000' is listed twice"),
        (text(streams=[stream(instance_name="engine-a")]), "addresses"),
        (text(streams=[stream(instance_name="engine-a:8000")]), "addresses"),
    ],
)
def test_refused_with_key_and_remedy(given: str, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        parse(given)
