"""Engines in this process that come, go, restart and forget; two kvcar and an Envoy; clients that talk and leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from examples.emulator.server import Server
from extproc.envoy_config import EnvoyOptions
from tests.real.harness import TOKENIZER, Client, EnvoyProcess, KvcarProcess, free_port
from tests.real.test_churn import Fleet, busy, until

ENGINES = 6
"""At each measurement; between them 4 to 9."""
TALKS = 4

Messages = list[dict[str, str]]


@dataclass
class Traffic:
    """What clients did. `failed` holds statuses and kinds of errors; requests that were aborted do not count."""

    requests: int = 0
    aborted: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    latest: dict[int, Messages] = field(default_factory=dict)


@dataclass(frozen=True)
class Held:
    """What a process holds. Resident bytes; series: samples on its metrics page."""

    resident: int
    threads: int
    descriptors: int
    sockets: int
    series: int

    def __str__(self) -> str:
        return (
            f"{self.resident / (1 << 20):.1f} MiB, {self.threads} threads, {self.descriptors} descriptors "
            f"({self.sockets} sockets), {self.series} series"
        )


def held(kvcar: KvcarProcess) -> Held:
    process = Path(f"/proc/{kvcar.pid}")
    links = []
    for entry in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(entry))
    return Held(
        resident=int((process / "statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        threads=len(list((process / "task").iterdir())),
        descriptors=len(links),
        sockets=sum(link.startswith("socket:") for link in links),
        series=len(kvcar.metrics()),
    )


class Soak:
    """All that runs. `kvcar[0]` lives from beginning to end and is measured, `kvcar[1]` is restarted and killed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.fleet = Fleet(folder, self.rng)
        self.traffic = Traffic()
        self.done: Counter[str] = Counter()
        self.complete = 0
        self._folder = folder
        self._ended = asyncio.Event()
        self._clients: list[asyncio.Task[None]] = []
        self.kvcar: list[KvcarProcess] = []
        self.envoy: EnvoyProcess

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            for _ in range(ENGINES):
                await self.fleet.join(self.fleet.away.pop())
            self.fleet.tell()
            await self._start()
            self._clients = [
                *(asyncio.create_task(self._talk(number)) for number in range(TALKS)),
                asyncio.create_task(self._leave()),
            ]
            yield
        finally:
            await self._end_clients()
            for process in (getattr(self, "envoy", None), *self.kvcar):
                if process is not None:
                    await asyncio.to_thread(process.kill)
            await self.fleet.stop()

    async def _start(self) -> None:
        endpoints = self._folder / "eds" / "engines.yaml"
        endpoints.parent.mkdir()
        ports = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        for number, port in enumerate(ports):
            pool = {
                "name": "demo",
                "models": ["demo"],
                "tokenizer": str(TOKENIZER),
                "load": {"source": "prometheus"},
                "speculation": {"ttl_ms": 1000},
                "discovery": [{"type": "file", "path": str(self.fleet.path), "interval_ms": 50}],
                **({"endpoints_file": {"path": str(endpoints)}} if not number else {}),
            }
            config = {
                "listen": {"address": port, "drain_wait_ms": 2500, "drain_grace_ms": 5000},
                "admin": {"address": f"127.0.0.1:{free_port()}"},
                "limits": {"token_cache_bytes": 4 << 20},  # full early: what grows afterwards is no cache
                "trace": {"path": str(self._folder / f"trace-{number}.jsonl"), "max_bytes": 1 << 20},
                "pools": [pool],
            }
            self.kvcar.append(KvcarProcess(config, self._folder, name=f"kvcar-{number}"))
            self.kvcar[-1].start()
        for one in self.kvcar:
            await asyncio.to_thread(one.wait_ready)
        await until(endpoints.exists, "the endpoints file")
        options = EnvoyOptions(
            engines_file=str(endpoints), ext_proc=tuple(ports), listen="127.0.0.1:0", admin="127.0.0.1:0",
            access_log=None,
        )  # fmt: skip
        self.envoy = EnvoyProcess(options, self._folder)
        self.envoy.start()
        await asyncio.to_thread(self.envoy.wait_ready)
        await asyncio.to_thread(self.envoy.wait_healthy, "extproc", 2)
        await asyncio.to_thread(self.envoy.wait_healthy, "engines", ENGINES)

    # -- clients

    async def _talk(self, number: int) -> None:
        topic = 0
        async with Client(f"http://{self.envoy.address}") as client:
            while not self._ended.is_set():
                topic += 1
                messages = [{"role": "user", "content": f"Talk {number}.{topic}. " + "Tell me of the weather. " * 12}]
                for turn in range(4):
                    try:
                        answer = await client.chat(messages, max_tokens=4, stream=bool(turn % 2))
                        error, text = "" if answer.status == 200 else str(answer.status), answer.text
                    except (aiohttp.ClientError, EOFError, TimeoutError) as problem:
                        error, text = type(problem).__name__, ""
                    self.traffic.requests += 1
                    if error:
                        self.traffic.failed[error] += 1
                    self.traffic.latest[number] = list(messages)
                    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]
                    if self._ended.is_set():
                        return

    async def _leave(self) -> None:
        """Clients that go away at some moment of a streamed answer."""
        host, _, port = self.envoy.address.rpartition(":")
        while not self._ended.is_set():
            text = f"Never mind {self.rng.random()}"
            body = json.dumps({"model": "demo", "prompt": text, "max_tokens": 60, "stream": True}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            whole = head + b"content-length: %d\r\n\r\n" % len(body) + body
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(whole[: self.rng.choice([10, len(whole) - len(body), len(whole) - 9, len(whole)])])
            await asyncio.sleep(self.rng.random() * 0.2)
            writer.transport.abort()
            self.traffic.aborted += 1

    async def _end_clients(self) -> None:
        self._ended.set()
        await asyncio.gather(*self._clients)

    # -- trouble

    async def trouble(self, seconds: float) -> None:
        """For so long: something happens several times a second."""
        finish = time.monotonic() + seconds
        restarting = asyncio.create_task(self._restart_second(finish))
        try:
            while time.monotonic() < finish:
                await self._happen()
                await asyncio.sleep(self.rng.random() * 0.3)
        finally:
            await restarting

    async def _happen(self) -> None:
        fleet, rng = self.fleet, self.rng
        kind = rng.choice(["join", "leave", "restart", "forget", "lost events", "gap", "reload"])
        count = len(fleet.serving)
        name = rng.choice(sorted(fleet.serving))
        if kind == "join" and count < ENGINES + 3:
            await fleet.join(fleet.away.pop(rng.randrange(len(fleet.away))))
        elif kind == "leave" and count > ENGINES - 2:
            await fleet.leave(name)
            fleet.away.append(name)
        elif kind == "restart":
            await fleet.join(name, like=await fleet.leave(name))
        elif kind == "forget" and not busy(fleet.serving[name]):
            for rank in fleet.serving[name].ranks:
                rank.engine.reset_prefix_cache(running=False, external=True)
        elif kind == "lost events":
            fleet.serving[name].faults.drop = rng.randrange(1, 4)
        elif kind == "gap":
            fleet.serving[name].faults.gap = 1
        elif kind == "reload":
            self.kvcar[0].signal(signal.SIGHUP)
        else:
            return
        fleet.tell()
        self.done[kind] += 1

    async def _restart_second(self, finish: float) -> None:
        """The other kvcar: drained and started, or killed and started, in turn."""
        second, killed = self.kvcar[1], False
        while time.monotonic() < finish:
            killed = not killed
            if killed:
                await asyncio.to_thread(second.kill)
            else:
                second.signal(signal.SIGTERM)
                await asyncio.to_thread(lambda: second.wait(timeout=20))
            second.start()
            await asyncio.to_thread(second.wait_ready)
            await asyncio.to_thread(self.envoy.wait_healthy, "extproc", 2)
            self.done["kvcar killed" if killed else "kvcar restarted"] += 1
            await asyncio.sleep(min(10.0, max(0.0, finish - time.monotonic())))

    # -- measuring

    async def calm(self) -> Held:
        """Back to the usual number of engines, and in step with them; then what the first kvcar holds."""
        fleet = self.fleet
        while len(fleet.serving) < ENGINES:
            await fleet.join(fleet.away.pop())
        while len(fleet.serving) > ENGINES:
            fleet.away.append(next(iter(fleet.serving)))
            await fleet.leave(fleet.away[-1])
        fleet.tell()
        for server in fleet.serving.values():
            server.faults.drop = server.faults.gap = 0
        await self.in_step()
        await asyncio.to_thread(self.envoy.wait_healthy, "extproc", 2)
        return await asyncio.to_thread(held, self.kvcar[0])

    async def in_step(self) -> None:
        """Until the first kvcar follows just the fleet, every stream of which is synchronized."""

        async def true() -> bool:
            rows = (await asyncio.to_thread(self.kvcar[0].get, "/streams"))["streams"]
            if {row["instance"] for row in rows} != self.fleet.serving.keys():
                return False
            return all(row["connected"] and (row["synchronized"] or row["sequence"] is None) for row in rows)

        await until(true, "streams equal to the fleet")

    async def quiet(self) -> None:
        """No more clients; each engine has taken a step, which tells of what happened since its last one."""
        await self._end_clients()
        for server in self.fleet.serving.values():
            async with Client(f"http://127.0.0.1:{server.port}") as direct:
                await direct.complete(f"One step, {self.rng.random()}.", max_tokens=1)

        async def applied() -> bool:
            rows = (await asyncio.to_thread(self.kvcar[0].get, "/streams"))["streams"]
            seen = {row["instance"]: row["sequence"] for row in rows if row["synchronized"]}
            return all(seen.get(name) == last(server) for name, server in self.fleet.serving.items())

        await until(applied, "everything applied")

    async def differences(self) -> list[str]:
        """Where kvcar's view is not the engines' truth: resident blocks, and the hits of each latest conversation.

        A view that says of itself that it is not complete (numbers were skipped, so something may be missing) may lack
        blocks; it may not have more than the engine.
        """
        found = []
        rows = (await asyncio.to_thread(self.kvcar[0].get, "/streams"))["streams"]
        seen = {row["instance"]: row for row in rows}
        self.complete = sum(row["complete"] for row in rows)

        def wrong(name: str, view: int, truth: int) -> bool:
            return view != truth if seen[name]["complete"] else view > truth

        for name, server in self.fleet.serving.items():
            view, truth = seen[name]["blocks"]["device"], len(server.ranks[0].engine.pool.resident())
            if wrong(name, view, truth):
                found.append(f"{name}: {view} blocks, it holds {truth}: {seen[name]}")
        async with aiohttp.ClientSession() as session:
            for messages in self.traffic.latest.values():
                body = {"model": "demo", "messages": messages}
                url = f"http://{self.kvcar[0].admin}/v1/internal/kv-cache/query"
                async with session.post(url, json=body) as answer:
                    hits = {
                        row["instance_name"]: row["device_hit_tokens"] for row in (await answer.json())["instances"]
                    }
                for name, server in self.fleet.serving.items():
                    engine = f"http://127.0.0.1:{server.port}"
                    async with session.post(f"{engine}/v1/chat/completions/render", json=body) as answer:
                        ids = (await answer.json())["token_ids"]
                    async with session.post(f"{engine}/emulator/lookup", json={"token_ids": ids}) as answer:
                        (rank,) = (await answer.json())["ranks"]
                    truth = rank["gpu_blocks"] * server.config.engine.block_size
                    if wrong(name, hits[name], truth):
                        found.append(f"{name}: {hits[name]} tokens of a prompt, it would hit {truth}")
        return found


def last(server: Server) -> int:
    """The latest published sequence number."""
    return server.ranks[0].publisher.sequence - 1
