"""A whole kvcar whose engines register in a real etcd: they join, their caches are followed, requests go to them."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from extproc import config
from extproc.app import App
from extproc.messages import HttpRequest
from tests.real.etcd_peer import EtcdProcess, registration
from tests.real.harness import TOKENIZER, free_port
from tests.real.publisher import BLOCK, END, Publisher

pytestmark = pytest.mark.real

PROMPT = list(range(10, 10 + 4 * BLOCK))
TOPIC = b"xllm-kv"


class Engine:
    """xLLM's side: a publisher whose replay endpoint answers with the whole content. All have HTTP port 1 on loopback
    addresses of their own, so that the offsets are the ports themselves."""

    def __init__(self, number: int, ports: tuple[int, int]) -> None:
        host = f"127.0.0.{number}"
        self.address = f"{host}:1"
        self.held: list[dict[str, Any]] = []
        events, replay = (f"tcp://{host}:{port}" for port in ports)
        self.publisher = Publisher(endpoint=events, replay=replay, topic=TOPIC)
        self.publisher.answer = self._snapshot
        self.publisher.publish_raw(msgpack.packb([1.0, [], 0]))  # there is no watermark before the first message

    def stored(self, first: int, count: int) -> dict[str, Any]:
        return {
            "type": "BlockStored",
            "block_hashes": [number + 1 for number in range(first, first + count)],
            "parent_block_hash": first or None,
            "token_ids": PROMPT[first * BLOCK : (first + count) * BLOCK],
            "block_size": BLOCK,
            "medium": "gpu",
        }

    def _snapshot(self, publisher: Publisher, to: list[bytes], _: int) -> None:
        watermark = struct.pack(">Q", publisher.sequence - 1)
        publisher.reply(to, watermark, msgpack.packb([1.0, self.held, 0]))
        publisher.reply(to, END, b"")


class World:
    def __init__(self, app: App, etcd: EtcdProcess, engines: list[Engine]) -> None:
        self.app, self.etcd, self.engines = app, etcd, engines

    def register(self, engine: Engine, incarnation: str = "i1") -> None:
        value = registration(engine.address, incarnation=incarnation)
        self.etcd.put(f"/cluster/XLLM:DEFAULT:{engine.address}", value)

    def streams(self) -> dict[str, tuple[bool, int]]:
        reports = self.app.pools[0].directory.status()
        return {
            one.instance.partition(":")[0]: (one.synchronized, one.status.blocks.device if one.status else 0)
            for one in reports
        }

    async def chosen(self) -> str | None:
        body = json.dumps({"model": "m", "prompt": PROMPT}).encode()
        outcome = await self.app.decider.decide(HttpRequest("POST", "/v1/completions", {}, body))
        if outcome.ticket is not None:
            outcome.ticket.close()
        return outcome.destinations[0] if outcome.destinations else None

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        try:
            async with asyncio.timeout(20):
                while not condition():
                    for engine in self.engines:
                        engine.publisher.serve()
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise AssertionError(f"not within 20 s: {what}; {self.streams()} {self.app.sources.status()}") from None


@pytest.fixture
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    ports = free_port(), free_port()
    engines = [Engine(number, ports) for number in (2, 3)]
    with EtcdProcess(tmp_path) as etcd:
        await asyncio.to_thread(etcd.wait_ready)
        offsets = {"event_port_offset": ports[0] - 1, "replay_port_offset": ports[1] - 1, "topic": TOPIC.decode()}
        access = {"endpoints": [etcd.url], "namespace": "cluster"}
        source: dict[str, Any] = {"type": "etcd", **access, **offsets}
        if request.param == "xllm-file":
            path = tmp_path / "kv_events.json"
            path.write_text(json.dumps({"discovery": {**offsets, "block_size": BLOCK}, "max_streams": 1}))
            source = {"type": "xllm-file", "path": str(path), "etcd": access}
        pool = {
            "name": "p",
            "models": ["m"],
            "tokenizer": str(TOKENIZER),
            "engine": "xllm",
            "scorer": {"name": "car", "lambda": 1.0},
            "discovery": [source],
        }
        admin = f"127.0.0.1:{free_port()}"
        listen = {"address": "127.0.0.1:0", "drain_wait_ms": 0}
        limits = {"tokenize_timeout_ms": 5000, "decide_timeout_ms": 6000}  # on busy machines
        tree = {"listen": listen, "admin": {"address": admin}, "limits": limits, "pools": [pool]}
        app = App(config.parse(json.dumps(tree)))
        await app.start()
        try:
            yield World(app, etcd, engines)
        finally:
            await app.stop()
            for engine in engines:
                engine.publisher.close()


@pytest.mark.parametrize("world", ["etcd"], indirect=True)
async def test_registered_engines_are_followed_and_chosen(world: World) -> None:
    one, two = world.engines
    one.held = [one.stored(0, 4)]
    one.publisher.publish_raw(msgpack.packb([1.0, one.held, 0]))
    assert await world.chosen() is None, "nobody is there"
    world.register(two)
    world.register(one)
    await world.until(lambda: world.streams().get("127.0.0.2") == (True, 4), "what the engine held before we came")
    await world.until(lambda: "127.0.0.3" in world.streams(), "the other one")
    for _ in range(4):
        assert await world.chosen() == one.address
    # Another process at the same address: its cache is empty, and the index of the old one is gone with it.
    one.held = []
    world.register(one, "i2")
    await world.until(lambda: world.streams().get("127.0.0.2") == (True, 0), "the new process")
    two.held = [two.stored(0, 2)]
    two.publisher.publish_raw(msgpack.packb([1.0, two.held, 0]))
    await world.until(lambda: world.streams().get("127.0.0.3") == (True, 2), "what the other one holds")
    assert await world.chosen() == two.address
    world.etcd.delete(f"/cluster/XLLM:DEFAULT:{two.address}")
    await world.until(lambda: "127.0.0.3" not in world.streams(), "nobody answers at its address: no streams")
    assert await world.chosen() == one.address


@pytest.mark.parametrize("world", ["xllm-file"], indirect=True)
async def test_xllms_own_file_with_its_limits(world: World) -> None:
    one, two = world.engines
    for engine in (two, one):
        engine.held = [engine.stored(0, 4)]
        engine.publisher.publish_raw(msgpack.packb([1.0, engine.held, 0]))
        world.register(engine)
    await world.until(lambda: world.streams().get("127.0.0.2") == (True, 4), "the first by name")
    assert world.app.pools[0].directory.block_size == BLOCK
    await world.until(lambda: len(world.streams()) == 2, "both are known")
    (left_out,) = [one for one in world.app.pools[0].directory.status() if not one.synchronized]
    assert "max_streams" in str(left_out.error), "the file allows one stream"
    assert await world.chosen() == one.address
