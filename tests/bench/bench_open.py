"""What exchanges cost that stay open, as long answers do: memory of one, and CPU of a new request beside many.

    python -m tests.bench.bench_open [--open N ...]

An exchange is open after the decision, until its answer has passed: Envoy keeps the gRPC stream. kvcar's server against
the no-op one, the same messages, plain gRPC.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import grpc
import uvloop

from extproc import wire
from tests.bench.bench_extproc import Server, drive, kvcar, messages, noop, over_grpc
from tests.bench.rows import Row, log, row, told

OPEN = (1000, 4000)
ONE_CHANNEL = 500  # streams


def rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def beside(server: Server, count: int, requests: int) -> tuple[float, float]:
    """(bytes an open exchange, CPU us a request beside them)."""
    exchange = messages(16 << 10)[:-1]
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_concurrent_streams", count)]
    address = f"127.0.0.1:{server.port}"
    channels = [grpc.aio.insecure_channel(address, options=options) for _ in range(max(1, count // ONE_CHANNEL))]
    before = rss(server.pid)
    calls = []
    for number in range(count):
        call = channels[number % len(channels)].stream_stream(wire.METHOD)()
        for message, replies in exchange:
            await call.write(message)
            for _ in range(replies):
                await call.read()
        calls.append(call)
    held = (rss(server.pid) - before) / max(1, count)
    started = server.cpu()
    await drive(server.port, messages(2 << 10), requests)
    used = (server.cpu() - started) / requests * 1e6
    for call in calls:
        call.cancel()
    for channel in channels:
        await channel.close()
    return held, used


def run(counts: tuple[int, ...] = OPEN, requests: int = 300) -> list[Row]:
    rows = []
    alone: dict[str, float] = {}
    for count in (0, *counts):
        log.info("open: a request beside %d open exchanges", count)
        found = {}
        with kvcar() as ours, noop() as floor:
            for name, server in (("kvcar", ours), ("no-op", floor)):
                over_grpc(messages(16 << 10), requests)(server)  # the allocator's first pages, the code's first run
                found[name] = uvloop.run(beside(server, count, requests))
        if not count:
            alone = {name: used for name, (_, used) in found.items()}
            continue
        held, used = found["kvcar"]
        rows += [
            row(f"memory an open exchange, {count} open", held / 1024, "KiB", "no-op ext_proc",
                found["no-op"][0] / 1024),
            row(f"server CPU a request beside {count} open exchanges", used, "us", "none open", alone["kvcar"]),
        ]  # fmt: skip
    return rows


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--open", type=int, nargs="*", default=list(OPEN))
    for one in run(tuple(arguments.parse_args().open)):
        print(told(one), flush=True)


if __name__ == "__main__":
    main()
