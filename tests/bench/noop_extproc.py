"""The floor: an ext_proc server that looks at the first byte of each message and answers CONTINUE, nothing else.

    python -m tests.bench.noop_extproc [--form read|generator] [--route generic|registered] [--parse] [--address HOST:PORT]

Prints the port on its first line and serves until SIGTERM or the end of its standard input. --parse decodes each
message with the same protobuf types as the server does, and drops the result.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import uvloop

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),
]

# tag of ProcessingRequest's oneof -> an empty answer of the same kind
REPLIES = {0x12: b"\x0a\x00", 0x1A: b"\x12\x00", 0x22: b"\x1a\x00", 0x2A: b"\x22\x00", 0x32: b"\x2a\x00", 0x3A: b"\x32\x00"}


def _ignore(data: bytes) -> None:
    pass


def _parser() -> Callable[[bytes], Any]:
    from extproc.wire import decode

    return decode


async def read_write(_requests: Any, context: Any, parse: Callable[[bytes], Any]) -> None:
    read, write = context.read, context.write
    while True:
        data = await read()
        if data is grpc.aio.EOF:
            return
        parse(data)
        await write(REPLIES[data[0]])


async def generator(requests: AsyncIterator[bytes], _context: Any, parse: Callable[[bytes], Any]) -> AsyncIterator[bytes]:
    async for data in requests:
        parse(data)
        yield REPLIES[data[0]]


async def serve(form: str, route: str, address: str, parse: Callable[[bytes], Any]) -> None:
    async def as_coroutine(requests: Any, context: Any) -> None:
        await read_write(requests, context, parse)

    async def as_generator(requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for reply in generator(requests, context, parse):
            yield reply

    handler = grpc.stream_stream_rpc_method_handler(as_coroutine if form == "read" else as_generator)
    server = grpc.aio.server(options=OPTIONS)
    if route == "generic":
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),))
    else:
        server.add_registered_method_handlers(SERVICE, {"Process": handler})
    port = server.add_insecure_port(address)
    await server.start()
    print(port, flush=True)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    with contextlib.suppress(OSError, ValueError):
        loop.add_reader(sys.stdin, lambda: sys.stdin.buffer.read1(1) or stop.set())  # type: ignore[attr-defined]
    await stop.wait()
    await server.stop(None)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--form", choices=("read", "generator"), default="read")
    arguments.add_argument("--route", choices=("generic", "registered"), default="generic")
    arguments.add_argument("--parse", action="store_true")
    arguments.add_argument("--address", default="127.0.0.1:0")
    given = arguments.parse_args()
    uvloop.run(serve(given.form, given.route, given.address, _parser() if given.parse else _ignore))


if __name__ == "__main__":
    main()
