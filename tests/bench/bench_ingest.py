"""KV events over real ZMQ, from the socket to the index: kvcar's directory against Dynamo's SelectionService.

    python -m tests.bench.bench_ingest [--blocks N] [--rounds N]

Four publishers in this process send vLLM's stored events of 16 blocks as fast as the follower reads; the follower is a
process of its own (follow_events.py), its wall clock and CPU count. Dynamo runs with one indexer thread and with four.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import struct
import subprocess
import sys

import zmq

from tests.bench.bench_extproc import ROOT
from tests.bench.publish_events import EVENT, Batch
from tests.bench.rows import Row, log, row, told

PUBLISHERS = 4


def ingest(kind: str, batches: list[Batch], threads: int = 1) -> tuple[float, float]:
    """(wall, CPU) us a block."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = []
    for _ in batches:
        socket = context.socket(zmq.XPUB)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.LINGER, 0)
        socket.bind("tcp://127.0.0.1:*")
        sockets.append(socket)
    endpoints = [one.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode() for one in sockets]
    command = [sys.executable, "-m", "tests.bench.follow_events", kind, *endpoints]
    environment = {**os.environ, "DYN_LOG": "error"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        given = {"first": batches[0].first, "last": [batch.last for batch in batches], "threads": threads}
        process.stdin.write(json.dumps(given).encode() + b"\n")
        process.stdin.flush()
        _line(process)
        for socket in sockets:
            assert socket.poll(10_000), "no subscription"
            socket.recv()
        for number in range(max(len(batch.payloads) for batch in batches)):
            for socket, batch in zip(sockets, batches, strict=True):
                if number < len(batch.payloads):
                    socket.send_multipart([b"", struct.pack(">Q", number), batch.payloads[number]])
        found = json.loads(_line(process))
    finally:
        process.kill()
        process.communicate()
        context.destroy(linger=0)
    blocks = sum(batch.blocks for batch in batches)
    return found["wall"] / blocks * 1e6, found["cpu"] / blocks * 1e6


def _line(process: subprocess.Popen[bytes]) -> bytes:
    """The next line of the child that is not a log line of the peer."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith((b"ready", b"{")):
            return line
    raise RuntimeError("the follower ended early")


def run(blocks: int = 200_000, rounds: int = 3) -> list[Row]:
    kinds = {"ours": ("ours", 1)}
    if importlib.util.find_spec("dynamo"):
        kinds |= {"SelectionService, 1 thread": ("dynamo", 1), "SelectionService, 4 threads": ("dynamo", 4)}
    rows: list[Row] = []
    for events in (1, 8):
        log.info("ingest: %d blocks over ZMQ, %d events a message, %d rounds", blocks, events, rounds)
        batches = [Batch(blocks // PUBLISHERS, events, seed) for seed in range(PUBLISHERS)]
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
        for _ in range(rounds):
            for name, (kind, threads) in kinds.items():
                seen[name].append(ingest(kind, batches, threads))
        figures = {
            name: [statistics.median(values) for values in zip(*found, strict=True)] for name, found in seen.items()
        }
        wall, cpu = figures["ours"]
        for name, theirs in figures.items():
            for what, mine, value in (("wall", wall, theirs[0]), ("CPU", cpu, theirs[1])):
                if name != "ours":
                    label = f"events over ZMQ, {events} of {EVENT} blocks a message, {what} a block"
                    rows.append(row(label, mine, "us", name, value))
    return rows


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--blocks", type=int, default=200_000)
    arguments.add_argument("--rounds", type=int, default=3)
    given = arguments.parse_args()
    for one in run(given.blocks, given.rounds):
        print(told(one), flush=True)


if __name__ == "__main__":
    main()
