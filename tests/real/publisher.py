"""A small engine side for tests: PUB (XPUB) and replay ROUTER as vLLM has them; no thread, `serve` it while waiting.

As a program it is a publisher in a process of its own, to be frozen and killed: `python -m tests.real.publisher`; it
prints its endpoints and obeys lines on stdin (see `main`).
"""

from __future__ import annotations

import json
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import msgpack
import zmq

END = b"\xff" * 8
BLOCK = 4


def until(condition: Callable[[], Any], *publishers: Publisher, timeout: float = 15.0, what: str = "") -> Any:
    """Serve the publishers until `condition` holds, then return its value; fails the test at the deadline."""
    deadline = time.monotonic() + timeout
    while True:
        for publisher in publishers:
            publisher.serve()
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not in {timeout} s: {what or condition}"
        time.sleep(0.002)


def settled(*publishers: Publisher, seconds: float) -> None:
    """Serve for a while: for showing that nothing happens."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for publisher in publishers:
            publisher.serve()
        time.sleep(0.002)


def stored(hashes: Sequence[int], tokens: Iterable[int], parent: int | None = None, medium: str = "GPU") -> list[Any]:
    """vLLM's array form."""
    return ["BlockStored", list(hashes), parent, list(tokens), BLOCK, None, medium]


def removed(hashes: Sequence[int], medium: str = "GPU") -> list[Any]:
    return ["BlockRemoved", list(hashes), medium]


def chain(first: int, count: int, parent: int | None = None, prompt: int = 0) -> list[Any]:
    """Blocks `first` .. of the prompt whose tokens are prompt*1000 + 0, 1, 2, ...; engine hash = block number + 1."""
    hashes = [prompt * 1000 + first + number + 1 for number in range(count)]
    if parent is None and first:
        parent = prompt * 1000 + first
    return stored(hashes, range(prompt * 1000 + first * BLOCK, prompt * 1000 + (first + count) * BLOCK), parent)


class Publisher:
    """One rank of one engine.

    endpoint   bind address; a port of `*` is a free one. With `connect` it is where the consumer listens
    replay     bind address of the ROUTER, None = no replay
    frames     3 = `[b"", seq, payload]` replies (vLLM up to 0.25), 4 = with topic (from 0.26)
    ring       batches kept for replay
    """

    def __init__(
        self,
        *,
        endpoint: str = "tcp://127.0.0.1:*",
        replay: str | None = "tcp://127.0.0.1:*",
        topic: bytes = b"",
        frames: int = 3,
        ring: int = 10_000,
        rank: int = 0,
        connect: bool = False,
        hwm: int = 100_000,
        ipv6: bool = False,
        first: int = 0,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.topic, self.frames, self.rank = topic, frames, rank
        self.sequence = first
        self.ring: deque[tuple[int, bytes]] = deque(maxlen=ring)
        self.asked: list[int] = []
        self.subscribers = 0
        self.mute = False
        self.answer: Callable[[Publisher, list[bytes], int], None] = Publisher.answer_history
        self._connect, self._hwm, self._ipv6 = connect, hwm, ipv6
        self._own = context is None
        self.context = context or zmq.Context()
        self.endpoint = endpoint
        self._open_pub()
        self.router: zmq.Socket[bytes] | None = None
        self.replay: str | None = None
        if replay is not None:
            self.router = self.context.socket(zmq.ROUTER)
            self.router.set(zmq.LINGER, 0)
            self.router.set(zmq.SNDHWM, 0)
            self.router.set(zmq.IPV6, int(ipv6))
            self.replay = bind(self.router, replay)

    def _open_pub(self) -> None:
        self.pub = self.context.socket(zmq.XPUB)
        self.pub.set(zmq.XPUB_VERBOSE, 1)
        self.pub.set(zmq.LINGER, 0)
        self.pub.set(zmq.SNDHWM, self._hwm)
        self.pub.set(zmq.IPV6, int(self._ipv6))
        if self._connect:
            self.pub.set(zmq.RECONNECT_IVL, 10)
            self.pub.connect(self.endpoint)
        else:
            self.endpoint = bind(self.pub, self.endpoint)

    def drop_connections(self) -> None:
        """The network fails, the process lives: same port, same numbers, nobody connected."""
        self.subscribers = 0
        self.pub.close(0)
        self._open_pub()

    def publish(self, *events: list[Any], lose: bool = False) -> int:
        """One batch; returns its sequence. `lose`: it goes to the ring but not to the wire."""
        return self.publish_raw(msgpack.packb([time.time(), list(events), self.rank]), lose=lose)

    def publish_raw(self, payload: bytes, *, lose: bool = False) -> int:
        sequence = self.sequence
        self.sequence += 1
        self.ring.append((sequence, payload))
        if not lose:
            self.pub.send_multipart([self.topic, struct.pack(">Q", sequence), payload])
        return sequence

    def serve(self) -> None:
        """Take note of subscriptions, answer what has been asked. Returns at once."""
        with suppress(zmq.Again):
            while True:
                message = self.pub.recv(zmq.NOBLOCK)
                self.subscribers += 1 if message[:1] == b"\x01" else -1
        if self.router is None or self.mute:
            return
        with suppress(zmq.Again):
            while True:
                who, delimiter, start = self.router.recv_multipart(zmq.NOBLOCK)
                assert delimiter == b""
                assert len(start) == 8
                self.asked.append(int.from_bytes(start, "big"))
                self.answer(self, [who, delimiter], self.asked[-1])

    def reply(self, to: list[bytes], sequence: bytes, payload: bytes) -> None:
        assert self.router is not None
        topic = [self.topic] if self.frames == 4 else []
        self.router.send_multipart([*to, *topic, sequence, payload])

    def answer_history(self, to: list[bytes], start: int) -> None:
        """Every kept batch from `start` on, then the end marker."""
        for sequence, payload in list(self.ring):
            if sequence >= start:
                self.reply(to, struct.pack(">Q", sequence), payload)
        self.reply(to, END, b"")

    def close(self) -> None:
        self.pub.close(0)
        if self.router is not None:
            self.router.close(0)
        if self._own:
            self.context.term()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Bind, waiting for an earlier owner of the port to go; returns the endpoint with its real port."""
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.bind(endpoint)
            return socket.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        except zmq.ZMQError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def main() -> None:
    """Lines on stdin: `[[event, ...], lose]` publishes a batch, `quit` ends."""
    with Publisher(frames=4) as publisher:
        print(json.dumps([publisher.endpoint, publisher.replay]), flush=True)
        while True:
            publisher.serve()
            if select.select([sys.stdin], [], [], 0.005)[0]:
                line = sys.stdin.readline()
                if not line or line == "quit\n":
                    return
                events, lose = json.loads(line)
                publisher.publish(*events, lose=lose)


if __name__ == "__main__":
    main()
