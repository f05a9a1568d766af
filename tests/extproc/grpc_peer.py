"""A gateway's side of the gRPC connection for tests: raw bytes over grpc.aio, messages from gateway_model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from extproc import wire
from extproc.messages import HttpRequest, Outcome
from extproc.server import ExtProcServer, ServerOptions
from extproc.session_rules import SessionOptions
from tests.extproc.gateway_model import Exchange
from tests.extproc.session_driver import A, B, Recorder

DEADLINE = 20.0


async def until(condition: Callable[[], bool]) -> None:
    """Waits for a condition; fails the test after DEADLINE."""
    async with asyncio.timeout(DEADLINE):
        while not condition():  # noqa: ASYNC110 - conditions of all kinds, in tests only
            await asyncio.sleep(0.002)


class Tickets:
    """A Decider that names A and B and hands out recording tickets. `gate`, if set, is awaited before deciding."""

    def __init__(self) -> None:
        self.tickets: list[Recorder] = []
        self.requests: list[HttpRequest] = []
        self.cancelled = 0
        self.gate: Callable[[], Awaitable[object]] | None = None
        self.outcome: Callable[[Recorder], Any] = lambda ticket: Outcome((A, B), ticket=ticket)

    async def decide(self, request: HttpRequest) -> Outcome:
        self.requests.append(request)
        if self.gate is not None:
            try:
                await self.gate()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        ticket = Recorder()
        self.tickets.append(ticket)
        outcome: Outcome = self.outcome(ticket)
        return outcome

    @property
    def open(self) -> int:
        return sum(("close",) not in ticket.calls for ticket in self.tickets)

    def check_closed_once(self) -> None:
        assert [ticket.calls.count(("close",)) for ticket in self.tickets] == [1] * len(self.tickets)


class Peer:
    """A started server with its decider and observer, and a channel to it."""

    def __init__(self, server: ExtProcServer, decider: Tickets, observer: Recorder, channel: Any) -> None:
        self.server = server
        self.decider = decider
        self.observer = observer
        self.channel = channel

    def call(self) -> Any:
        """One raw stream: await call.write(bytes), await call.read()."""
        return self.channel.stream_stream(wire.METHOD)()

    @contextlib.asynccontextmanager
    async def stream(self, *client: tuple[str, str]) -> AsyncIterator[Stream]:
        call = self.call()
        try:
            yield Stream(call, Exchange(headers=dict(client)))
        finally:
            call.cancel()

    async def quiet(self) -> None:
        """Waits until the server has no exchange left and every ticket is closed."""
        await until(lambda: self.server.sessions == 0 and self.decider.open == 0)
        self.decider.check_closed_once()


class Stream:
    def __init__(self, call: Any, exchange: Exchange) -> None:
        self.call = call
        self.exchange = exchange

    async def send(self, message: Any) -> None:
        await self.call.write(bytes(message))

    async def read(self) -> str | None:
        """Which message the next reply answers; None at the end of the stream, whatever its status."""
        async with asyncio.timeout(DEADLINE):
            try:
                data = await self.call.read()
            except grpc.aio.AioRpcError:
                return None
        return None if data is grpc.aio.EOF else self.exchange.apply(data)

    async def ask(self, message: Any) -> str | None:
        await self.send(message)
        return await self.read()


@contextlib.asynccontextmanager
async def serving(
    options: ServerOptions | None = None, session_options: SessionOptions | None = None, **start: Any
) -> AsyncIterator[Peer]:
    decider, observer = Tickets(), Recorder()
    server = ExtProcServer(decider, options or ServerOptions("127.0.0.1:0"), session_options, observer)
    await server.start(**start)
    channel = grpc.aio.insecure_channel(
        f"127.0.0.1:{server.port}",
        options=[("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)],
    )
    try:
        yield Peer(server, decider, observer, channel)
    finally:
        await channel.close()
        await server.stop(0)
