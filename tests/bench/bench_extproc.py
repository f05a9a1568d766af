"""Server CPU (user + system) a request of kvcar's ext_proc server against an ext_proc server that does nothing.

    python -m tests.bench.bench_extproc [--requests N] [--rounds N] [--decider MODULE:FACTORY]

Both are processes of their own and get the same messages over plain gRPC, in alternating rounds; the median round
counts. Through a real Envoy: give compare() a load that sends HTTP requests instead.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import uvloop

from extproc import wire
from extproc.messages import Outcome
from extproc.session import Session
from extproc.session_rules import SessionRules
from tests.bench.rows import Row, log, row, told

ROOT = Path(__file__).resolve().parents[2]
TICKS = os.sysconf("SC_CLK_TCK")
CONCURRENCY = 4
BUFFERED, DUPLEX = (2, 0), (4, 4)

Load = Callable[["Server"], int]
"""Sends requests to a server, returns how many."""


class Server:
    """A server process that prints its port; use as a context manager."""

    def __init__(self, name: str, module: str, *arguments: str) -> None:
        self.name = name
        self._command = [sys.executable, "-m", module, *arguments]

    def __enter__(self) -> Server:
        # gRPC as it comes: kvcar sets this for itself (extproc/__init__.py), and a peer must not inherit it
        env = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

    @property
    def pid(self) -> int:
        return self._process.pid

    def cpu(self) -> float:
        """Seconds of user and system time so far, all threads."""
        return self.cpu_of(self.pid)

    @staticmethod
    def cpu_of(pid: int) -> float:
        """The same of any process."""
        try:
            tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")  # nanoseconds; the threads never end
            return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9
        except (OSError, IndexError):
            pass
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS


def noop() -> Server:
    return Server("no-op ext_proc", "tests.bench.noop_extproc")


def kvcar(decider: str | None = None) -> Server:
    return Server("kvcar", "tests.bench.serve_extproc", *(("--decider", decider) if decider else ()))


def compare(servers: Sequence[Server], load: Load, rounds: int) -> list[float]:
    """CPU us a request of each (started) server: alternating rounds after one for warming up, medians.

    Many short rounds beat a few long ones on a machine that others use.
    """
    used: list[list[float]] = [[] for _ in servers]
    for turn in range(rounds + 1):
        for server, seen in zip(servers, used, strict=True):
            before = server.cpu()
            requests = load(server)
            if turn:
                seen.append((server.cpu() - before) / requests * 1e6)
    return [statistics.median(seen) for seen in used]


# --- messages ---


def messages(size: int, modes: tuple[int, int] = BUFFERED, chunk: int = 1 << 20) -> list[tuple[bytes, int]]:
    """(message, replies to read after it) of one exchange: 21 request headers, a body, response headers."""
    head = wire.ProcessingRequest()
    given = [(":method", "POST"), (":path", "/v1/chat/completions"), (":scheme", "http"), (":authority", "llm.local")]
    given += [("content-type", "application/json"), ("content-length", str(size))]
    given += [(f"x-header-{number}", f"value of header {number}") for number in range(15)]
    _headers(head.request_headers, given)
    head.protocol_config.request_body_mode, head.protocol_config.response_body_mode = modes
    duplex = modes[0] == DUPLEX[0]
    out = [(head.SerializeToString(), 0 if duplex else 1)]
    for start in range(0, size, chunk):
        body = wire.ProcessingRequest()
        body.request_body.body = b"x" * min(chunk, size - start)
        body.request_body.end_of_stream = start + chunk >= size
        replies = 1 if not duplex else (1 + -(-size // 62_000)) * body.request_body.end_of_stream
        out.append((body.SerializeToString(), replies))
    answer = wire.ProcessingRequest()
    _headers(answer.response_headers, [(":status", "200"), ("content-type", "text/event-stream")])
    answer.attributes["envoy.filters.http.ext_proc"].fields["upstream.address"].string_value = "10.0.0.1:8000"
    out.append((answer.SerializeToString(), 1))
    return out


def _headers(part: Any, headers: list[tuple[str, str]]) -> None:
    for name, value in headers:
        header = part.headers.headers.add()
        header.key, header.raw_value = name, value.encode()


# --- load over plain gRPC ---


async def drive(port: int, exchange: list[tuple[bytes, int]], requests: int) -> None:
    """CONCURRENCY streams at a time, each message answered before the next, ended by a reset as Envoy does."""
    left = requests
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]

    async def worker(process: Any) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            call = process()
            for message, replies in exchange:
                await call.write(message)
                for _ in range(replies):
                    await call.read()
            call.cancel()

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        process = channel.stream_stream(wire.METHOD)
        await asyncio.gather(*(worker(process) for _ in range(CONCURRENCY)))


def over_grpc(exchange: list[tuple[bytes, int]], requests: int) -> Load:
    """`drive` as a load of a server."""

    def load(server: Server) -> int:
        uvloop.run(drive(server.port, exchange, requests))
        return requests

    return load


def in_process(exchange: list[tuple[bytes, int]], repeat: int = 3000) -> float:
    """us of wire and session alone: decode, receive, decide at once, encode, close."""
    rules = SessionRules()
    encode = wire.Encoder(rules.constants()).encode
    outcome = Outcome(("10.0.0.1:8000", "10.0.0.2:8000"), metadata={"pool": "p", "hit_tokens": 4000, "scorer": "car"})

    def one() -> None:
        session = Session(rules)
        for data, _ in exchange:
            message = wire.decode(data)
            assert message is not None
            replies = session.receive(message)
            if session.request is not None:
                replies = session.decided(outcome)
            for reply in replies:
                encode(reply)
        session.close()

    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeat):
            one()
        rounds.append((time.perf_counter() - start) / repeat * 1e6)
    return min(rounds)


# --- rows ---


def run(requests: int = 400, rounds: int = 5, decider: str | None = None) -> list[Row]:
    rows = []
    with noop() as floor, kvcar(decider) as ours:
        for size, name in ((2 << 10, "2 KiB"), (64 << 10, "64 KiB"), (1 << 20, "1 MiB")):
            log.info("extproc: bodies of %s", name)
            count = requests if size < 1 << 20 else requests // 4
            mine, least = compare([ours, floor], over_grpc(messages(size), count), rounds)
            rows.append(row(f"server CPU a request, BUFFERED {name}", mine, "us", floor.name, least, 3.0, 1.5))
        log.info("extproc: full duplex")
        loads = [over_grpc(messages(64 << 10, modes), requests) for modes in (DUPLEX, BUFFERED)]
        duplex, buffered = (compare([ours], load, rounds)[0] for load in loads)
        rows.append(row("server CPU a request, full duplex 64 KiB", duplex, "us", "kvcar, BUFFERED", buffered))
    return [*rows, row("wire and session alone, 2 KiB", in_process(messages(2 << 10)), "us")]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--requests", type=int, default=400, help="a round and server")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--decider", help="MODULE:FACTORY")
    given = arguments.parse_args()
    for one in run(given.requests, given.rounds, given.decider):
        print(told(one), flush=True)


if __name__ == "__main__":
    main()
