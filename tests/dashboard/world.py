"""A real App in a thread, with publishers in place of engines: what the dashboard's tests and screenshots look at.

with World(3) as world:
    world.ask("Hello")            one request, decided by the App, "served" by a model of the chosen engine
    world.url                     its admin port
"""

from __future__ import annotations

import asyncio
import json
import struct
import threading
import time
import urllib.error
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, Self

import msgpack
import yaml
import zmq

from examples.local.stack import TOKENIZER
from extproc import config
from extproc.app import App
from extproc.dashboard.history import History
from extproc.dashboard.overview import loads, totals
from extproc.decisions import Record
from extproc.messages import HttpRequest, Ticket
from tests.real.publisher import Publisher

SIZE = 16


def wait_for(condition: Callable[[], Any], what: str, timeout: float = 15.0) -> Any:
    """The condition's value once it is true; fails at the deadline."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not in {timeout} s: {what}"
        time.sleep(0.02)
    return value


class Engine:
    """An engine's cache as far as routing sees it: blocks by prefix, on the device and copied to the host, LRU."""

    def __init__(self, name: str, number: int, context: zmq.Context[Any], blocks: int, host: int) -> None:
        self.name, self.address = name, f"10.0.{number // 250}.{number % 250 + 1}:8000"
        self.publisher = Publisher(context=context)
        self.blocks, self.host = blocks, host
        self.on_device: OrderedDict[int, None] = OrderedDict()
        self.on_host: OrderedDict[int, None] = OrderedDict()

    def serve(self, ids: Sequence[int]) -> int:
        """Computes a prompt; returns its cached tokens, as the engine reports them."""
        hashes = [hash(tuple(ids[: end * SIZE])) & (1 << 62) - 1 for end in range(1, len(ids) // SIZE + 1)]
        hits = 0
        while hits < len(hashes) and (hashes[hits] in self.on_device or hashes[hits] in self.on_host):
            hits += 1
        missing = next((i for i, one in enumerate(hashes) if one not in self.on_device), len(hashes))
        events = [self._stored(hashes, ids, missing, "GPU")] if missing < len(hashes) else []
        for one in reversed(hashes):  # a prompt's end is evicted before its beginning
            self.on_device[one] = None
            self.on_device.move_to_end(one)
        out = [self.on_device.popitem(last=False)[0] for _ in range(len(self.on_device) - self.blocks)]
        if out:
            events.append(["BlockRemoved", out, "GPU"])
        if self.host and missing < len(hashes):
            events.append(self._stored(hashes, ids, missing, "CPU"))
            for one in reversed(hashes):
                self.on_host[one] = None
                self.on_host.move_to_end(one)
            gone = [self.on_host.popitem(last=False)[0] for _ in range(len(self.on_host) - self.host)]
            events += [["BlockRemoved", gone, "CPU"]] if gone else []
        if events:
            self.publisher.publish(*events)
        return min(hits, (len(ids) - 1) // SIZE) * SIZE

    @staticmethod
    def _stored(hashes: Sequence[int], ids: Sequence[int], first: int, medium: str) -> list[Any]:
        tokens = list(ids[first * SIZE : len(hashes) * SIZE])
        return ["BlockStored", list(hashes[first:]), hashes[first - 1] if first else None, tokens, SIZE, None, medium]


class Exchange(NamedTuple):
    record: Record
    ticket: Ticket | None
    data: bytes


class World:
    """names of the engines, or how many; `more` are top-level keys of the configuration, `pool` keys of the pool.

    past  the history begins so many seconds ago, to be filled by `remember` and used from `show_past` on
    """

    def __init__(
        self,
        names: Sequence[str] | int,
        *,
        pool: Mapping[str, Any] | None = None,
        more: Mapping[str, Any] | None = None,
        admin: Mapping[str, Any] | None = None,
        instance: Mapping[str, Mapping[str, Any]] | None = None,
        blocks: int = 4000,
        host: int = 0,
        past: float = 0.0,
    ) -> None:
        names = [f"engine-{number}" for number in range(names)] if isinstance(names, int) else names
        self._context: zmq.Context[Any] = zmq.Context()
        self._lock = threading.RLock()
        self.engines = {name: Engine(name, number, self._context, blocks, host) for number, name in enumerate(names)}
        instances = [
            {"name": one.name, "address": one.address, "events": one.publisher.endpoint, "replay": one.publisher.replay,
             **(instance or {}).get(one.name, {})}
            for one in self.engines.values()
        ]  # fmt: skip
        whole = {"name": "demo", "models": ["demo"], "tokenizer": str(TOKENIZER), "block_size": SIZE, "dialect": "vllm",
                 "instances": instances, **(pool or {})}  # fmt: skip
        tree = {
            "listen": {"address": "127.0.0.1:0", "drain_wait_ms": 0},
            "admin": {"address": "127.0.0.1:0", **(admin or {})},
            "limits": {"tokenize_timeout_ms": 5000, "decide_timeout_ms": 6000},  # on busy machines
            "pools": [whole],
            **(more or {}),
        }
        self.config = config.parse(yaml.safe_dump(tree))
        self.url = ""
        self._past = past
        self._done = threading.Event()
        self._records = 0

    # -- life

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.run(self._start())
        self._pump = threading.Thread(target=self._serve)
        self._done.clear()
        self._pump.start()

    async def _start(self) -> None:
        self.app = App(self.config)
        self._history = History(time.monotonic() - self._past)
        address = (await self.app.start())["admin"]
        self.url = f"http://{address}"
        # one that starts again is where its pages look for it
        self.config = self.config.model_copy(
            update={"admin": self.config.admin.model_copy(update={"address": address})}
        )

    def stop_app(self) -> None:
        """The server goes away; engines stay."""
        self.run(self.app.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._done.set()
        self._pump.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._done.is_set():
            self.stop_app()
        for engine in self.engines.values():
            engine.publisher.close()
        self._context.term()

    def _serve(self) -> None:
        while not self._done.wait(0.03):
            with self._lock:
                for engine in self.engines.values():
                    engine.publisher.serve()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """In the App's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    # -- traffic

    def ask(self, content: Any, *, serve: bool = True, **fields: Any) -> Exchange:
        """One chat request; with `serve` until the chosen engine has computed and announced it, else it stays open."""
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        return self.send({"model": "demo", "messages": messages, **fields}, serve=serve)

    def send(self, body: Any, *, serve: bool = True, path: str = "/v1/chat/completions") -> Exchange:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._records += 1
        exchange: Exchange = self.run(self._decide(data, path))
        if serve:
            self.compute(exchange)
            self.finish(exchange)
        return exchange

    def compute(self, exchange: Exchange) -> None:
        """The chosen engine has computed the prompt: its events are out, the first byte is there."""
        self.run(self._compute(exchange))

    def finish(self, exchange: Exchange) -> None:
        async def close() -> None:
            if exchange.ticket is not None:
                exchange.ticket.close()

        self.run(close())

    async def _decide(self, data: bytes, path: str) -> Exchange:
        request = HttpRequest("POST", path, {"x-request-id": f"request-{self._records}"}, data)
        outcome = await self.app.decider.decide(request)
        record = self.app.decision_log.at(self.app.decision_log.added)
        assert record is not None
        return Exchange(record, outcome.ticket, data)

    async def _compute(self, exchange: Exchange) -> None:
        record, ticket, data = exchange
        if ticket is None or record.decision is None or record.decision.chosen is None:
            return
        engine = self.engines[record.decision.chosen.name]
        ids = await self._ids(data)
        with self._lock:
            cached = engine.serve(ids)
        ticket.on_response_headers(200, engine.address)
        ticket.on_first_byte()
        ticket.on_usage(cached, len(ids))

    async def _ids(self, data: bytes) -> list[int]:
        from extproc.openai import Body, parse_body

        body = parse_body("/v1/chat/completions", {}, data)
        assert isinstance(body, Body)
        prompt = await self.app.pools[0].tokens(body)
        return prompt.ids  # type: ignore[union-attr, no-any-return]

    def settle(self) -> None:
        """Until everything published is applied."""

        def applied() -> bool:
            seen = {row["endpoint"]: row["sequence"] for row in self.get("/streams")["streams"]}
            publishers = [one.publisher for one in self.engines.values() if one.publisher.sequence]
            return all(seen.get(one.endpoint, one.sequence - 1) == one.sequence - 1 for one in publishers)

        wait_for(applied, "all events applied")

    def publish(self, name: str, *events: list[Any]) -> None:
        with self._lock:
            self.engines[name].publisher.publish(*events)

    def garbage(self, name: str) -> None:
        """A message that no dialect understands."""
        with self._lock:
            publisher = self.engines[name].publisher
            publisher.pub.send_multipart([b"", struct.pack(">Q", publisher.sequence), msgpack.packb("nonsense")])

    def remember(self, ago: float) -> None:
        """A point of the history, `ago` seconds in the past."""

        async def add() -> None:
            app, now = self.app, time.monotonic() - ago
            self._history.add(now, totals(app.pools, app.metrics_registry), loads(app.pools, time.monotonic()))

        self.run(add())

    def show_past(self) -> None:
        """The page's history is what was remembered, from now on."""
        self.app.dashboard.history = self._history

    # -- its answers

    def get(self, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        more = {"Content-Type": "application/json"} if data else {}
        request = urllib.request.Request(self.url + path, data, {**more, **(headers or {})})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.code} {error.read()!r}") from None
