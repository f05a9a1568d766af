"""A publisher of KV events at a rate, as a process of its own.

    python -m tests.bench.publish_events BLOCKS_PER_SECOND [--snapshots PER_SECOND] [--idle]

Prints its endpoint, waits for a subscriber, and sends until its input ends: stored events of 16 blocks, eight a
message, and after a while the removal of the same, so that a follower's index keeps its size. --snapshots sends
messages of 8 MiB in between: one batch of some 6,000 stored events, and next time their removal. --idle: it stands for
other machines, and takes only what nobody here wants of the cores (SCHED_IDLE: behind a core that a process of nice 19
holds, whoever wakes up waits for milliseconds).
"""

from __future__ import annotations

import argparse
import os
import random
import select
import struct
import sys
import time
from itertools import cycle
from typing import Any

import msgpack
import zmq

BLOCK = 16
EVENT = 16  # blocks
CHAIN = 32  # events of a chain
PER_MESSAGE = 8
RING = 128
"""Messages stored before they are removed again."""
SNAPSHOT_BYTES = 8 << 20


class Batch:
    """Payloads of a publisher, with the tokens of the first and the last chain."""

    def __init__(self, blocks: int, events: int, seed: int) -> None:
        rng = random.Random(seed)
        self.payloads: list[bytes] = []
        pending: list[Any] = []
        parent: int | None = None
        chain: list[int] = []
        self.first: list[int] = []
        total = max(1, blocks // (EVENT * CHAIN)) * CHAIN
        for number in range(total):
            if number % CHAIN == 0:
                parent, chain = None, []
            tokens = rng.choices(range(150_000), k=EVENT * BLOCK)
            hashes = [rng.getrandbits(63) for _ in range(EVENT)]
            pending.append(["BlockStored", hashes, parent, tokens, BLOCK, None, "GPU", None, None, 0, "full_attention",
                            None])  # fmt: skip
            parent = hashes[-1]
            chain += tokens
            self.first = self.first or list(tokens)
            if len(pending) == events or number == total - 1:
                self.payloads.append(msgpack.packb([time.time(), pending, 0]))
                pending = []
        self.last = chain
        self.blocks = total * EVENT


def removal(payload: bytes) -> bytes:
    """The message that takes back what `payload` stored."""
    stamp, events, rank = msgpack.unpackb(payload)
    return msgpack.packb([stamp, [["BlockRemoved", event[1][::-1], "GPU"] for event in reversed(events)], rank])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("rate", type=float)
    arguments.add_argument("--snapshots", type=float, default=0.0)
    arguments.add_argument("--idle", action="store_true")
    given = arguments.parse_args()
    if given.idle:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    blocks = PER_MESSAGE * EVENT
    stored = Batch(RING * blocks, PER_MESSAGE, 3).payloads
    messages = cycle([*stored, *(removal(one) for one in reversed(stored))])
    large: list[bytes] = []
    if given.snapshots:
        each = len(stored[0]) / blocks
        large = Batch(int(SNAPSHOT_BYTES / each), 1 << 20, 4).payloads
        large += [removal(one) for one in large]
    snapshots = cycle(large)
    with zmq.Context() as context, context.socket(zmq.XPUB) as socket:
        socket.set(zmq.SNDHWM, 10_000)
        socket.set(zmq.LINGER, 0)
        socket.bind("tcp://127.0.0.1:*")
        print(socket.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode(), flush=True)
        socket.recv()
        start = time.perf_counter()
        sent = big = sequence = 0
        while not select.select([sys.stdin], [], [], 0.0005)[0]:
            passed = time.perf_counter() - start
            due = min(int(passed * given.rate / blocks) - sent, 64)
            out = [next(messages) for _ in range(due)]
            sent += due
            if passed * given.snapshots > big + 1:
                big += 1
                out.append(next(snapshots))
            for payload in out:
                socket.send_multipart([b"", struct.pack(">Q", sequence), payload])
                sequence += 1


if __name__ == "__main__":
    main()
