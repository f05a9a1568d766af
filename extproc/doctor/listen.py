"""Follows the engines' KV events for a while: once as kvcar does, and once raw, to see what kvcar would not take.

The directory is kvcar's own, built from the same configuration, so what it says is what a running kvcar would say. The
raw subscription takes every topic, so that a wrong one shows.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from extproc.config import Config, Pool
from extproc.doctor.ports import Port, look
from kvindex.directory import Directory, StreamReport, make_dialect
from kvindex.errors import KVIndexError
from kvindex.events import BlockStored
from kvindex.fleet import Instance, StreamEndpoint
from kvindex.sync import SyncLimits
from kvindex.transport import EventTransport, TransportOptions

DECODED = 256
"""Raw messages decoded per stream; the rest are only counted."""
POLL = 0.05


@dataclass(slots=True)
class Heard:
    """What came over one raw subscription, live messages only.

    topics    messages by topic
    ranks     data-parallel ranks the payloads name
    lag       smallest (our clock - the engine's) seen, seconds; transit makes it larger, never smaller
    salted    blocks with extra keys (salt, images); adapters: blocks of a LoRA adapter
    broken    messages that the configured dialect cannot decode; `error` is the last reason
    """

    messages: int = 0
    topics: Counter[str] = field(default_factory=Counter)
    ranks: set[int] = field(default_factory=set)
    lag: float | None = None
    salted: int = 0
    adapters: int = 0
    broken: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """One configured stream, seen from all sides. `replay_port` None = no replay endpoint."""

    instance: Instance
    endpoint: StreamEndpoint
    port: Port
    replay_port: Port | None
    report: StreamReport
    heard: Heard

    @property
    def name(self) -> str:
        rank = f" rank {self.endpoint.dp_rank}" if self.instance.dp_size > 1 else ""
        store = f" {self.endpoint.medium} store" if self.endpoint.medium else ""
        return f"{self.instance.name}{rank}{store}"

    @property
    def usable(self) -> bool:
        """The port is there (or cannot be looked at): what else is found is about what comes over it."""
        return self.port.state in ("open", "unknown")


def _name(instance: Instance, stream: StreamEndpoint) -> str:
    """As the directory's reports have it: the engine's own stream, or that of a store beside it."""
    return f"{instance.name}:{stream.medium}" if stream.medium else instance.name


class Listener:
    """Of one pool. `start`, then `settle`, then `facts` as often as wanted; `close` at the end."""

    def __init__(
        self, config: Config, pool: Pool, instances: Sequence[Instance], *, timeout: float, listen: float
    ) -> None:
        self._instances = [one for one in instances if one.followed and one.events]
        self._timeout = timeout
        self._pool = pool
        events = config.events
        self._transport = EventTransport(TransportOptions(reconnect_initial=0.1, reconnect_max=1.0))
        self.directory = Directory(
            self._transport,
            block_size=None if pool.block_size == "auto" else pool.block_size,
            seed=pool.hash_seed,
            max_streams=events.max_streams,
            max_blocks=events.max_blocks_per_stream,
            max_unanchored=events.max_unanchored_blocks,
            # a replay that brings nothing has to fail twice while somebody still looks
            limits=SyncLimits(
                max_message_bytes=events.max_message_bytes, replay_timeout=max(1.0, listen / 3), backoff_initial=0.1
            ),
        )
        self._raw: Mapping[tuple[str, int], Heard] = {
            (_name(one, stream), stream.dp_rank): Heard() for one in self._instances for stream in one.events
        }
        self._ports: dict[str, Port] = {}
        self._context = zmq.asyncio.Context()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Looks at the ports first: a subscription would keep the port of an engine that binds only one peer."""
        endpoints = {
            text
            for one in self._instances
            for stream in one.events
            for text in (None if stream.bind else stream.events, stream.replay)
            if text
        }
        ports = await asyncio.gather(*(look(text, self._timeout) for text in endpoints))
        self._ports = dict(zip(endpoints, ports, strict=True))
        self._transport.start()
        self.directory.update(self._instances)
        for one in self._instances:
            for stream in one.events:
                if not stream.bind:
                    heard = self._raw[_name(one, stream), stream.dp_rank]
                    self._tasks.append(asyncio.create_task(self._listen(stream, heard)))

    async def _listen(self, stream: StreamEndpoint, heard: Heard) -> None:
        dialect = make_dialect(stream.dialect)
        sub = self._context.socket(zmq.SUB)
        try:
            sub.set(zmq.IPV6, stream.events.startswith("tcp://["))
            sub.subscribe(b"")
            with suppress(zmq.ZMQError):
                sub.connect(stream.events)
            while True:
                frames = await sub.recv_multipart()
                heard.messages += 1
                if len(heard.topics) < 16:
                    heard.topics[frames[0][:64].decode("utf-8", "replace") if len(frames) > 2 else ""] += 1
                if heard.messages > DECODED:
                    continue
                try:
                    batch = dialect.decode(frames[-1])
                    events = list(batch.events)
                except KVIndexError as error:
                    heard.broken += 1
                    heard.error = str(error)[:200]
                    continue
                if batch.dp_rank is not None:
                    heard.ranks.add(batch.dp_rank)
                if batch.timestamp is not None:
                    lag = time.time() - batch.timestamp
                    heard.lag = lag if heard.lag is None else min(heard.lag, lag)
                for event in events:
                    if isinstance(event, BlockStored):
                        heard.adapters += len(event.hashes) if event.root else 0
                        heard.salted += sum(map(bool, event.extras or ()))
        finally:
            sub.close(0)

    async def settle(self, limit: float) -> None:
        """Until every stream whose port is open is synchronized, or the time is over. A third of it at least: what only
        live messages show (topics, salt, clocks) needs some."""
        least = time.monotonic() + limit / 3
        await self.until(lambda: time.monotonic() >= least and self._synchronized(), limit)

    def _synchronized(self) -> bool:
        return all(one.report.synchronized for one in self.facts() if one.usable)

    async def until(self, condition: Callable[[], bool], limit: float) -> bool:
        """Whether it came true within `limit` seconds."""
        end = time.monotonic() + limit
        while not condition():
            if time.monotonic() > end:
                return False
            await asyncio.sleep(POLL)
        return True

    def facts(self) -> list[StreamFacts]:
        """As of now, in the order of the configuration; skipped instances (two claim one endpoint) included."""
        told = (*self.directory.status(), *self.directory.pool_status())
        reports = {(one.instance, one.dp_rank): one for one in told}
        return [
            StreamFacts(
                one,
                stream,
                self._ports.get(stream.events, Port("unknown")),
                self._ports.get(stream.replay) if stream.replay else None,
                reports[_name(one, stream), stream.dp_rank],
                self._raw[_name(one, stream), stream.dp_rank],
            )
            for one in self._instances
            for stream in one.events
            if (_name(one, stream), stream.dp_rank) in reports
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._transport.stop)
        self._context.destroy(0)
