"""The floor: an ext_proc server that looks at the first byte of each message and answers CONTINUE, nothing else.

    python -m tests.bench.noop_extproc [--decode] [--address HOST:PORT]

Prints the port on its first line and serves until SIGTERM or the end of its input. --decode decodes each message as
the server does, and drops the result.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import stat
from collections.abc import Callable
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
REPLIES = {
    0x12: b"\x0a\x00",
    0x1A: b"\x12\x00",
    0x22: b"\x1a\x00",
    0x2A: b"\x22\x00",
    0x32: b"\x2a\x00",
    0x3A: b"\x32\x00",
}


async def until_stopped() -> None:
    """Until SIGTERM, or until whoever started the process closes its standard input (or dies)."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        loop.add_reader(0, lambda: os.read(0, 4096) or stop.set())
    await stop.wait()


def _ignore(data: bytes) -> None:
    pass


def _decode() -> Callable[[bytes], Any]:
    from extproc.wire import decode

    return decode


async def serve(address: str, parse: Callable[[bytes], Any]) -> None:
    async def process(_: Any, context: Any) -> None:
        read, write = context.read, context.write
        while (data := await read()) is not grpc.aio.EOF:
            parse(data)
            await write(REPLIES[data[0]])

    server = grpc.aio.server(options=OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(process)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),))
    port = server.add_insecure_port(address)
    await server.start()
    gc.collect()
    gc.freeze()
    print(port, flush=True)
    await until_stopped()
    await server.stop(None)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--decode", action="store_true")
    arguments.add_argument("--address", default="127.0.0.1:0")
    given = arguments.parse_args()
    uvloop.run(serve(given.address, _decode() if given.decode else _ignore))


if __name__ == "__main__":
    main()
