"""A TCP relay that can be cut: what a network does to a connection, without a network.

    relay = Relay()            listens on a free port at once
    relay.target = port        where connections go from then on
    relay.stall() / relay.go() bytes stop in both directions, connections stay open: SIGSTOP of a proxy in between
    relay.reset()              every connection ends with RST

All relays of a process share one event loop in one daemon thread.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from examples.emulator.process import EmulatorProcess

_loop: asyncio.AbstractEventLoop | None = None


def _relay_loop() -> asyncio.AbstractEventLoop:
    global _loop
    if _loop is None:
        _loop = asyncio.new_event_loop()
        threading.Thread(target=_loop.run_forever, name="relay", daemon=True).start()
    return _loop


class Relay:
    """One listening port on loopback. Methods may be called from any thread and return when it is done."""

    def __init__(self) -> None:
        self.target = 0
        self._loop = _relay_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        future = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop)
        self._server = future.result(10)
        self.port: int = self._server.sockets[0].getsockname()[1]

    def stall(self) -> None:
        self._do(self._flowing.clear)

    def go(self) -> None:
        self._do(self._flowing.set)

    def reset(self) -> None:
        def abort() -> None:
            for writer in list(self._writers):
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()

        self._do(abort)

    def close(self) -> None:
        self._do(self._server.close)
        self.reset()
        self.go()

    def _do(self, action: Callable[[], object]) -> None:
        async def run() -> None:
            action()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flowing.wait()
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self._writers |= both
        try:
            pumps = [asyncio.create_task(self._pump(reader, far_writer)),
                     asyncio.create_task(self._pump(far_reader, writer))]  # fmt: skip
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
        finally:
            self._writers -= both
            for one in both:
                one.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass


class RelayedEngine(EmulatorProcess):
    """An emulated engine whose KV events reach kvcar through relays. HTTP is direct."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.relays = (Relay(), Relay())

    def wait_ready(self) -> RelayedEngine:
        super().wait_ready()
        self.relays[0].target = self.ready["events_ports"][0]
        self.relays[1].target = (self.ready["replay_ports"] or [0])[0]
        return self

    @property
    def events_endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.relays[0].port}"

    @property
    def replay_endpoint(self) -> str | None:
        return f"tcp://127.0.0.1:{self.relays[1].port}" if self.ready["replay_ports"] else None
