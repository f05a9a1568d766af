"""What a reload must not lose: the endpoints file, late news of requests, what has registered itself."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.local.stack import TOKENIZER
from extproc.app import App
from extproc.config import ConfigError, load
from extproc.registrar import PoolHomes, Registrar
from extproc.registry import Registry, parse_registration
from extproc.reload import applicable
from kvindex.discovery.registered import Registered

ONE = {"name": "a", "address": "127.0.0.2:8000"}
TWO = {"name": "b", "address": "127.0.0.3:8000"}


def hosts(text: str) -> list[str]:
    found = json.loads(text)["resources"][0]["endpoints"][0]["lb_endpoints"]
    return [one["endpoint"]["address"]["socket_address"]["address"] for one in found]


class Reloading:
    """An App and the file it came from."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "kvcar.yaml"
        self.tree: dict[str, Any] = {
            "listen": {"address": "127.0.0.1:0", "drain_wait_ms": 0},
            "admin": {"address": "127.0.0.1:0"},
            "reload": {"watch": False},
            "pools": [{"name": "qwen", "models": ["qwen3-8b"], "tokenizer": str(TOKENIZER), "instances": [ONE, TWO]}],
        }
        self.pool: dict[str, Any] = self.tree["pools"][0]
        self.pool["endpoints_file"] = {"path": str(folder / "eds.json")}
        self.file = folder / "eds.json"

    def write(self) -> None:
        self.path.write_text(yaml.safe_dump(self.tree), encoding="utf-8")

    async def start(self) -> None:
        self.write()
        self.app = App(load(self.path), self.path)
        await self.app.start()

    async def reload(self, **changes: Any) -> str | None:
        self.pool.update(changes)
        self.write()
        return await self.app.reload()

    def wanted(self) -> list[str]:
        return hosts(self.app._files["qwen"][1]._wanted or "")

    def written(self) -> list[str]:
        return hosts(self.file.read_text("utf-8")) if self.file.exists() else []

    async def until_written(self, *hosts: str) -> None:
        async with asyncio.timeout(10):
            while self.written() != list(hosts):  # noqa: ASYNC110 - a file tells nobody
                await asyncio.sleep(0.005)


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Reloading]:
    running = Reloading(tmp_path)
    await running.start()
    try:
        yield running
    finally:
        await running.app.stop()


async def test_endpoints_follow_the_fleet_over_reloads(running: Reloading, tmp_path: Path) -> None:
    await running.until_written("127.0.0.2", "127.0.0.3")
    more = tmp_path / "more.json"
    source = {"type": "file", "path": str(more), "interval_ms": 10}

    # A source that has not told anything takes the place of the list: nothing is taken away for its silence.
    assert await running.reload(discovery=[source], instances=[], scorer={"name": "car", "lambda": 0.9}) is None
    assert running.app.pools[0].instances == ()
    assert running.wanted() == running.written()
    more.write_text(json.dumps({"instances": [TWO]}))
    await running.until_written("127.0.0.3")
    more.write_text(json.dumps({"instances": [ONE, TWO]}))
    await running.until_written("127.0.0.2", "127.0.0.3")


async def test_late_news_of_requests_count_for_the_pool_there_is_now(running: Reloading) -> None:
    await running.until_written("127.0.0.2", "127.0.0.3")
    before = running.app.pools[0]
    assert await running.reload(instances=[TWO], scorer="round_robin") is None
    now = running.app.pools[0]
    assert now is not before
    await running.until_written("127.0.0.3")
    assert await running.reload(instances=[ONE, TWO], scorer="least_request") is None
    last = running.app.pools[0]
    for _ in range(3):
        before.failed("127.0.0.3:8000", time.monotonic(), "refused")
    assert {one.name: str(one.state) for one in last.instances} == {"a": "active", "b": "unreachable"}
    await running.until_written("127.0.0.2", "127.0.0.3")
    before.answered("127.0.0.3:8000")
    assert {str(one.state) for one in last.instances} == {"active"}


async def test_a_refused_publisher_leaves_everything_as_it_was(running: Reloading) -> None:
    assert await running.reload(discovery=[{"type": "http"}]) is None
    app = running.app
    registrar = Registrar(Registry(), PoolHomes(app.pools, lambda: app.sources.of_type(Registered)))
    store = {"instance_id": "store", "modelname": "qwen3-8b", "type": "Mooncake", "endpoint": "tcp://127.0.0.9:5560"}
    registrar.register(parse_registration(store, "motor"), 0.0)
    refused = await running.reload(
        scorer="round_robin", publishers=[{"name": "store", "events": "tcp://127.0.0.9:5561"}], instances=[ONE]
    )
    assert refused is not None
    assert "'store' is listed twice" in refused
    assert app.pools[0].scorer_name == "car"
    engine = {"instance_id": "c", "modelname": "qwen3-8b", "address": "127.0.0.4:8000"}
    registrar.register(parse_registration(engine, "motor"), 0.0)
    assert {one.name for one in app.pools[0].instances} == {"a", "b", "c"}


async def test_hashes_are_remembered_from_the_moment_that_engines_may_register(running: Reloading) -> None:
    index = running.app.pools[0].directory.index
    assert index.names is None
    assert await running.reload(discovery=[{"type": "http"}]) is None
    assert running.app.pools[0].directory.index is index
    assert index.names is not None


@pytest.mark.parametrize(
    ("pool", "more", "refused"),
    [
        ({"discovery": [{"type": "http"}]}, {}, ""),  # its pairs are told by a header that is always removed
        ({"discovery": [{"type": "http"}]}, {"headers": {"prefill": "x-mine"}}, ""),  # which stays what it was
        ({"discovery": [{"type": "http"}], "pairs": {"profile": "plain"}}, {}, "x-decode-host-port"),
        (
            {"instances": [{**ONE, "role": "prefill"}], "pairs": {"profile": "xllm"}},
            {},
            "x-decode-name, x-prefill-name",
        ),
        ({"pairs": {"profile": "xllm"}}, {}, ""),  # nobody is of a pair
    ],
)
def test_headers_that_the_server_has_to_know_from_the_start(
    tmp_path: Path, pool: dict[str, Any], more: dict[str, Any], refused: str
) -> None:
    site = Reloading(tmp_path)
    site.write()
    old = load(site.path)
    site.pool.update(pool)
    site.tree.update(more)
    site.write()
    if refused:
        with pytest.raises(ConfigError, match=refused):
            applicable(old, load(site.path))
    else:
        assert applicable(old, load(site.path))[1] == list(more)


def test_the_form_of_the_log_waits_for_the_next_start(tmp_path: Path) -> None:
    site = Reloading(tmp_path)
    site.write()
    old = load(site.path)
    site.tree["log"] = {"level": "debug", "format": "json"}
    site.write()
    found, waiting = applicable(old, load(site.path))
    assert (found.log.level, found.log.format, waiting) == ("debug", "text", ["log.format"])
