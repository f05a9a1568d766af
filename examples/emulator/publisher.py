"""The event sockets of one rank: PUB for live batches, ROUTER for replays of the last `buffer_steps` batches.

Behaves as vLLM's publisher: sequence from 0, high-water-mark loss is silent, a replay starts at the oldest kept batch
without saying so, a malformed request gets no answer. Everything runs on the event loop of the caller.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import zmq
import zmq.asyncio

from .faults import Faults
from .wire import (
    KVEvent,
    WireForm,
    encode_batch,
    end_frames,
    live_frames,
    parse_replay_request,
    replay_frames,
)

GARBAGE = b"\xc1\x00garbage\xff"
"""No MessagePack: 0xc1 is the byte that the format never uses."""

YIELD_EVERY = 256
"""Replayed messages between two turns of the event loop."""


class PortsTaken(Exception):
    """The wanted port cannot be bound."""


def _bind(socket: zmq.Socket[Any], host: str, port: int) -> int:
    address = f"[{host}]" if ":" in host else host
    socket.setsockopt(zmq.IPV6, ":" in host)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.bind(f"tcp://{address}:{port or '*'}")
    except zmq.ZMQError as error:
        raise PortsTaken(f"tcp://{address}:{port}: {error}") from error
    endpoint: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)  # type: ignore[assignment]
    return int(endpoint.rstrip(b"\0").rsplit(b":", 1)[1])


class Publisher:
    """One rank's sockets. `start` binds them, `close` frees them."""

    def __init__(
        self,
        *,
        form: WireForm,
        rank: int = 0,
        topic: str = "",
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        faults: Faults | None = None,
    ) -> None:
        self.form = form
        self.rank = rank
        self.topic = topic.encode()
        self.faults = faults or Faults()
        self.sequence = 0
        self.port: int | None = None
        self.replay_port: int | None = None
        self._hwm = hwm
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._held: list[list[bytes]] = []
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._pub: zmq.Socket[bytes] | None = None
        self._router: zmq.asyncio.Socket | None = None
        self._server: asyncio.Task[None] | None = None

    @property
    def buffered(self) -> list[int]:
        """Sequence numbers that a replay can give."""
        return [sequence for sequence, _ in self._ring]

    def start(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        host: str,
        port: int | None,
        replay_port: int | None,
        connect: str | None = None,
    ) -> None:
        """Bind (0 = a free port, None = no such socket). Raises PortsTaken and leaves nothing open.

        connect   the PUB socket connects there instead of binding, as vLLM does for an endpoint without `*`
        """
        try:
            if connect or port is not None:
                self._pub = context.socket(zmq.PUB)
                self._pub.set_hwm(self._hwm)
            if self._pub is not None and connect:
                self._pub.setsockopt(zmq.LINGER, 0)
                self._pub.connect(connect)
            elif self._pub is not None and port is not None:
                self.port = _bind(self._pub, host, port)
            if replay_port is not None:
                self._router = zmq.asyncio.Context.shadow(context.underlying).socket(zmq.ROUTER)
                self.replay_port = _bind(self._router, host, replay_port)
                self._server = asyncio.get_running_loop().create_task(self._serve_replays(self._router))
        except PortsTaken:
            self.close()
            raise

    def close(self) -> None:
        if self._server is not None:
            self._server.cancel()
        for socket in (self._pub, self._router):
            if socket is not None:
                socket.close()
        self._pub = self._router = self._server = None

    def publish(self, events: Sequence[KVEvent], ts: float | None = None) -> None:
        """Send one batch. Never blocks; without a subscriber it goes to the ring only."""
        faults = self.faults
        if faults.gap:
            self.sequence += faults.gap
            faults.gap = 0
        sequence, self.sequence = self.sequence, self.sequence + 1
        at = time.time() - faults.clock_behind_ms / 1000 if ts is None else ts
        payload = encode_batch(self.form, events, ts=at, rank=self.rank)
        if faults.take("lose"):
            return
        if faults.take("garbage_ring"):
            payload = GARBAGE
        self._ring.append((sequence, payload))
        if faults.take("garbage"):
            payload = GARBAGE
        if faults.take("drop"):
            return
        for _ in range(2 if faults.take("dup") else 1):
            self._send(live_frames(self.topic, sequence, payload))

    def freeze(self, frozen: bool) -> None:
        """Hold live batches and replays back, or let them go."""
        if frozen:
            self._thawed.clear()
            return
        self._thawed.set()
        held, self._held = self._held, []
        for frames in held:
            self._send(frames)

    def restart(self) -> None:
        """As in a new process: sequence from 0, empty ring. The sockets stay."""
        self.sequence = 0
        self._ring.clear()
        self._held.clear()

    def _send(self, frames: list[bytes]) -> None:
        if not self._thawed.is_set():
            self._held.append(frames)
        elif self._pub is not None:
            self._pub.send_multipart(frames, zmq.DONTWAIT)

    async def _serve_replays(self, router: zmq.asyncio.Socket) -> None:
        while True:
            request = parse_replay_request(await router.recv_multipart())
            await self._thawed.wait()
            if request is None or self.faults.mute_replay:
                continue
            identity, start = request
            answer = self._answer(start)
            for number, frames in enumerate(answer):
                with suppress(zmq.ZMQError):
                    await router.send_multipart([identity, *frames])
                if number % YIELD_EVERY == YIELD_EVERY - 1:
                    await asyncio.sleep(0)

    def _answer(self, start: int) -> list[list[bytes]]:
        """Everything kept from `start` on, and the end marker; less than that when a fault says so."""
        kept = [replay_frames(self.form, self.topic, number, data) for number, data in self._ring if number >= start]
        if self.faults.take("truncate_replay"):
            return kept[: len(kept) // 2]
        if len(kept) > 2 and self.faults.take("hole_replay"):
            del kept[len(kept) // 2]
        return [*kept, end_frames(self.form)]
