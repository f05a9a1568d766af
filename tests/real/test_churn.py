"""64 engines join, leave, restart and change roles at random under traffic through Envoy; nobody notices.

    seconds of churn: KVCAR_CHURN_SECONDS (default 8; the long run is 60)

The engines live in this process, in the test's own event loop; kvcar (discovery: file, endpoints_file) and Envoy (EDS
file) are real processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.emulator.engine import EngineConfig
from examples.emulator.hashing import DEFAULT_ROOT_TEXT, root_hash
from examples.emulator.server import Server, ServerConfig
from examples.emulator.text import TextModel, load
from examples.emulator.wire import wire_form
from extproc.endpoints_file import replace_file
from extproc.envoy_config import EnvoyOptions
from tests.real.harness import TOKENIZER, Answer, Client, EnvoyProcess, KvcarProcess, free_port

pytestmark = pytest.mark.real

ENGINES = 64
SECONDS = float(os.environ.get("KVCAR_CHURN_SECONDS", "8"))
CONVERSATIONS = 8
BLOCK = 16


class Fleet:
    """The engines that exist, and the file that tells of those that serve."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.path = folder / "fleet.json"
        self.serving: dict[str, Server] = {}
        self.away: list[str] = [f"engine-{number:02}" for number in range(ENGINES)]
        self.joins = self.leaves = self.restarts = 0
        self._rng = rng
        self._text: TextModel = load(TOKENIZER)
        engine = EngineConfig(root=root_hash(DEFAULT_ROOT_TEXT), block_size=BLOCK, blocks=128, prefill_rate=100_000)
        form = wire_form("vllm-0.32", int_hashes=True)
        self._config = ServerConfig("", "demo", replace(engine, empty_first=form.maps), form)

    def tell(self) -> None:
        rows = [
            {
                "name": name,
                "address": f"127.0.0.1:{server.port}",
                "events": f"tcp://127.0.0.1:{server.ranks[0].publisher.port}",
                "replay": f"tcp://127.0.0.1:{server.ranks[0].publisher.replay_port}",
            }
            for name, server in sorted(self.serving.items())
        ]
        replace_file(self.path, json.dumps({"instances": rows}))

    async def join(self, name: str, like: Server | None = None) -> None:
        """A new process; `like`: at the ports of one that has just ended."""
        config = replace(self._config, name=name)
        if like is not None:
            publisher = like.ranks[0].publisher
            config = replace(config, port=like.port, events_port=publisher.port, replay_port=publisher.replay_port)
        server = Server(config, self._text)
        await server.start()
        self.serving[name] = server

    async def leave(self, name: str) -> Server:
        """As a rolling update does it: no longer listed, then what runs is finished, then the process ends."""
        server = self.serving.pop(name)
        self.tell()
        await asyncio.sleep(0.3)  # the grace that a preStop hook gives: the news reach kvcar and Envoy meanwhile
        await until(lambda: not busy(server), "the engine's last request")
        await server.stop()
        return server

    async def churn(self) -> None:
        """One change: someone joins, leaves, is replaced at its address, or loses its cache."""
        kind = self._rng.choice(["join", "leave", "restart", "forget"])
        count = len(self.serving)
        if self.away and (kind == "join" or count < ENGINES // 2):
            await self.join(self.away.pop(self._rng.randrange(len(self.away))))
            self.joins += 1
        elif kind == "leave" and count > ENGINES // 2:
            name = self._rng.choice(sorted(self.serving))
            await self.leave(name)
            self.away.append(name)
            self.leaves += 1
        elif kind == "restart":
            name = self._rng.choice(sorted(self.serving))
            await self.join(name, like=await self.leave(name))
            self.restarts += 1
        else:
            server = self.serving[self._rng.choice(sorted(self.serving))]
            if not busy(server):
                for rank in server.ranks:
                    rank.engine.reset_prefix_cache(running=False, external=True)
        self.tell()

    async def stop(self) -> None:
        await asyncio.gather(*(server.stop() for server in self.serving.values()))


def busy(server: Server) -> bool:
    return any(rank.engine.waiting or rank.engine.running for rank in server.ranks)


async def until(condition: Callable[[], Any | Awaitable[Any]], what: str) -> Any:
    deadline = time.monotonic() + 20.0
    while True:
        found = condition()
        if isinstance(found, Awaitable):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        await asyncio.sleep(0.02)


@asynccontextmanager
async def running(tmp_path: Path, fleet: Fleet) -> AsyncIterator[tuple[KvcarProcess, EnvoyProcess]]:
    ext_proc, admin = (f"127.0.0.1:{free_port()}" for _ in range(2))
    endpoints = tmp_path / "eds" / "engines.yaml"
    endpoints.parent.mkdir()
    pool = {
        "name": "demo",
        "models": ["demo"],
        "tokenizer": str(TOKENIZER),
        "discovery": [{"type": "file", "path": str(fleet.path), "interval_ms": 50}],
        "endpoints_file": {"path": str(endpoints)},
    }
    config = {
        "listen": {"address": ext_proc, "drain_wait_ms": 0},
        "admin": {"address": admin},
        "events": {"max_streams": 128},
        "pools": [pool],
    }
    kvcar = KvcarProcess(config, tmp_path)
    options = EnvoyOptions(
        engines_file=str(endpoints), ext_proc=(ext_proc,), listen="127.0.0.1:0", admin="127.0.0.1:0",
        access_log=str(tmp_path / "access.log"),
    )  # fmt: skip
    envoy = EnvoyProcess(options, tmp_path)
    try:
        kvcar.start()
        await asyncio.to_thread(kvcar.wait_ready)
        await until(endpoints.exists, "the endpoints file")
        envoy.start()
        await asyncio.to_thread(envoy.wait_ready)
        await asyncio.to_thread(envoy.wait_healthy, "extproc", 1)
        await asyncio.to_thread(envoy.wait_healthy, "engines", len(fleet.serving))
        yield kvcar, envoy
    finally:
        await asyncio.to_thread(envoy.stop)
        await asyncio.to_thread(kvcar.stop)


async def talk(client: Client, number: int, ended: asyncio.Event, answers: list[Answer]) -> None:
    """Conversations, one after the other, until told to end."""
    topic = 0
    while not ended.is_set():
        topic += 1
        messages = [{"role": "user", "content": f"Talk {number}.{topic}. " + "Tell me of the weather. " * 12}]
        for _ in range(4):
            answer = await client.chat(messages, max_tokens=4)
            answers.append(answer)
            messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And then?"}]
            if ended.is_set():
                break


def held(kvcar: KvcarProcess) -> dict[str, int]:
    """Streams, threads, descriptors and series of the process."""
    process = Path(f"/proc/{kvcar.pid}")
    return {
        "streams": len(kvcar.get("/streams")["streams"]),
        "threads": len(list((process / "task").iterdir())),
        "descriptors": len(list((process / "fd").iterdir())),
        "series": sum("engine-" in name for name in kvcar.metrics()),
    }


async def test_churn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(11)
    fleet = Fleet(tmp_path, rng)
    answers: list[Answer] = []
    try:
        for _ in range(ENGINES * 3 // 4):
            await fleet.join(fleet.away.pop())
        fleet.tell()
        async with running(tmp_path, fleet) as (kvcar, envoy), Client(f"http://{envoy.address}") as client:

            async def in_step() -> bool:
                """kvcar follows just the fleet, and has applied all that each engine has published."""
                rows = (await asyncio.to_thread(kvcar.get, "/streams"))["streams"]
                seen = {row["instance"]: row for row in rows}
                return seen.keys() == fleet.serving.keys() and all(
                    seen[name]["connected"]
                    and seen[name]["sequence"] == (server.ranks[0].publisher.sequence - 1 or None)
                    if server.ranks[0].publisher.sequence > 1
                    else seen[name]["connected"]
                    for name, server in fleet.serving.items()
                )

            await until(in_step, "the first picture")
            ended = asyncio.Event()
            talks = [asyncio.create_task(talk(client, number, ended, answers)) for number in range(CONVERSATIONS)]
            await until(lambda: len(answers) > 50, "traffic")
            before = await asyncio.to_thread(held, kvcar)
            finish = time.monotonic() + SECONDS
            while time.monotonic() < finish:
                await fleet.churn()
                await asyncio.sleep(rng.random() * 0.05)
            ended.set()
            await asyncio.gather(*talks)
            # Back to as many as there were, so that what is held can be compared.
            while len(fleet.serving) < before["streams"]:
                await fleet.join(fleet.away.pop())
            while len(fleet.serving) > before["streams"]:
                fleet.away.append(next(iter(fleet.serving)))
                await fleet.leave(fleet.away[-1])
            fleet.tell()
            # As vLLM does it, an engine tells of a reset with its next step: an idle one has to be given one.
            for server in fleet.serving.values():
                async with Client(f"http://127.0.0.1:{server.port}") as direct:
                    await direct.complete("One step.", max_tokens=1)
            await until(in_step, "streams equal to the fleet")

            failed = [answer.status for answer in answers if answer.status != 200]
            after = await asyncio.to_thread(held, kvcar)
            rows = (await asyncio.to_thread(kvcar.get, "/streams"))["streams"]
            truth = {name: len(server.ranks[0].engine.pool.resident()) for name, server in fleet.serving.items()}
            with capsys.disabled():
                print(
                    f"\nchurn: {len(answers)} requests, {len(failed)} failed; {fleet.joins} joins, "
                    f"{fleet.leaves} leaves, {fleet.restarts} restarts in {SECONDS:.0f} s; "
                    f"held before {before}, after {after}"
                )
            assert failed == []
            assert {row["instance"]: row["blocks"]["device"] for row in rows} == truth
            assert all(row["synchronized"] for row in rows if truth[row["instance"]]), "views that say what they hold"
            assert after["streams"] == before["streams"]
            assert after["threads"] <= before["threads"] + 2
            assert after["descriptors"] <= before["descriptors"] + 16
            labels = {
                name.partition('engine="')[2].partition('"')[0]
                for name in await asyncio.to_thread(kvcar.metrics)
                if 'engine="engine-' in name
            }
            assert labels <= fleet.serving.keys(), "no label of an engine that has left"
            scored = sum(
                1
                for row in (await asyncio.to_thread(kvcar.get, "/decisions?limit=200"))["decisions"]
                if not row["reason"]
            )
            assert scored > 150
    finally:
        await fleet.stop()
