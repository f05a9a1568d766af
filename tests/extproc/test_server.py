"""server.py over real gRPC: message sequences of a gateway, ends of every kind, faults of messages and deciders."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import grpc
import pytest

from extproc.messages import Outcome, refusal
from extproc.server import ServerOptions
from extproc.session_rules import SessionOptions
from tests.extproc.gateway_model import (
    BUFFERED,
    DESTINATION,
    DUPLEX,
    STREAMED,
    request_body,
    request_headers,
    request_trailers,
    response_body,
    response_headers,
    response_trailers,
)
from tests.extproc.grpc_peer import Stream, serving, until
from tests.extproc.session_driver import A, B

BODY = b'{"messages": []}'
BUFFERED_MODES = (BUFFERED, 0)
CHUNKED = (DUPLEX, DUPLEX)


async def decided(stream: Stream, modes: tuple[int, int] = BUFFERED_MODES, body: bytes = BODY) -> None:
    assert await stream.ask(request_headers(modes=modes)) == "request_headers"
    assert await stream.ask(request_body(body)) == "request_body"


# --- sequences of a real Envoy (recommended file) ---


@pytest.mark.parametrize("end", ["half-close", "reset"])
async def test_whole_exchange(end: str) -> None:
    async with serving() as peer:
        async with peer.stream((DESTINATION, "127.0.0.1:9901")) as stream:
            await decided(stream)
            assert stream.exchange.headers == {DESTINATION: f"{A},{B}"}
            assert await stream.ask(response_headers(served=B)) == "response_headers"
            assert peer.server.sessions == 1
            assert peer.decider.open == 1, "the ticket is held to the end of the answer"
            if end == "half-close":
                await stream.call.done_writing()
                assert await stream.read() is None
                assert await stream.call.code() == grpc.StatusCode.OK
        await peer.quiet()
        assert peer.decider.tickets[0].calls == [("headers", 200, B), ("first_byte",), ("close",)]
        assert peer.decider.requests[0].body == BODY


async def test_request_without_body() -> None:
    async with serving() as peer, peer.stream() as stream:
        assert await stream.ask(request_headers(end=True, modes=BUFFERED_MODES)) == "request_headers"
        assert await stream.ask(response_headers()) == "response_headers"
        assert (peer.decider.requests, peer.observer.reasons) == ([], ["no_body"])


async def test_chunked_bodies_both_ways() -> None:
    async with serving() as peer, peer.stream() as stream:
        await stream.send(request_headers(modes=CHUNKED))
        await stream.send(request_body(BODY, end=False))
        await stream.send(request_trailers())
        assert [await stream.read() for _ in range(3)] == ["request_headers", "request_body", "request_trailers"]
        assert stream.exchange.decision_in == "request_headers"
        assert (stream.exchange.body, stream.exchange.body_ended) == (BODY, 0)
        assert await stream.ask(response_headers()) == "response_headers"
        for number in range(4):
            assert await stream.ask(response_body(b"data: x\n\n", end=number == 3)) == "response_body"
        assert stream.exchange.response_body == b"data: x\n\n" * 4
        assert await stream.ask(response_trailers()) == "response_trailers"


@pytest.mark.parametrize("modes", [BUFFERED_MODES, (STREAMED, 0), CHUNKED])
async def test_body_of_8_mib(modes: tuple[int, int]) -> None:
    body = random.Random(1).randbytes(8 << 20)
    async with serving() as peer, peer.stream() as stream:
        await stream.send(request_headers(modes=modes))
        if modes == BUFFERED_MODES:
            await stream.send(request_body(body))
        else:
            asyncio.get_running_loop().create_task(send_parts(stream, body))
        while not (stream.exchange.destination and (modes != CHUNKED or stream.exchange.body_ended)):
            await stream.read()
        assert peer.decider.requests[0].body == body
        if modes == CHUNKED:
            assert stream.exchange.body == body
            assert stream.exchange.largest_chunk == 62_000


async def send_parts(stream: Stream, body: bytes, part: int = 1 << 20) -> None:
    for start in range(0, len(body), part):
        await stream.send(request_body(body[start : start + part], end=start + part >= len(body)))


async def test_immediate_response_ends_the_stream() -> None:
    async with serving() as peer, peer.stream() as stream:
        answer = refusal(503, "none", kind="service_unavailable", details="kvcar_none")
        peer.decider.outcome = lambda ticket: Outcome(immediate=answer, ticket=ticket)
        assert await stream.ask(request_headers()) == "request_headers"
        assert await stream.ask(request_body(BODY)) == "immediate_response"
        assert await stream.read() is None
        assert await stream.call.code() == grpc.StatusCode.OK
        await peer.quiet()


# --- the client leaves ---

PHASES = ["opened", "headers answered", "deciding", "decided", "answering", "duplex, header reply held"]


@pytest.mark.parametrize("phase", PHASES)
async def test_client_leaves(phase: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving() as peer:
        never = asyncio.Event()
        async with peer.stream() as stream:
            if phase == "deciding":
                peer.decider.gate = never.wait
            if phase == "opened":
                await stream.call.wait_for_connection()
            elif phase == "duplex, header reply held":
                await stream.send(request_headers(modes=CHUNKED))
                await stream.send(request_body(BODY, end=False))
                await until(lambda: peer.server.sessions == 1)
            else:
                await stream.ask(request_headers(modes=BUFFERED_MODES))
                if phase == "deciding":
                    await stream.send(request_body(BODY))
                    await until(lambda: len(peer.decider.requests) == 1)
                elif phase != "headers answered":
                    await stream.ask(request_body(BODY))
                if phase == "answering":
                    await stream.ask(response_headers())
        await peer.quiet()
        assert peer.decider.cancelled == (phase == "deciding")
        assert len(peer.decider.tickets) == (phase in ("decided", "answering"))
        assert peer.observer.faults == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_client_leaves_while_the_body_is_echoed() -> None:
    """The server is blocked in write(): nobody reads."""
    async with serving() as peer:
        async with peer.stream() as stream:
            await stream.send(request_headers(modes=CHUNKED))
            await send_parts(stream, b"x" * (8 << 20))
            await until(lambda: peer.decider.open == 1)
        await peer.quiet()


async def test_many_streams_with_random_ends(caplog: pytest.LogCaptureFixture) -> None:
    """Seeded: 150 exchanges, each left at a random point; nothing stays open and each ticket is closed once."""
    generator = random.Random(11)
    messages = [request_headers(modes=BUFFERED_MODES), request_body(BODY), response_headers(), response_trailers()]
    caplog.set_level(logging.WARNING)
    async with serving() as peer:

        async def one(stop: int, read_last: bool) -> None:
            async with peer.stream() as stream:
                for number, message in enumerate(messages[:stop]):
                    await stream.send(message)
                    if number < stop - 1 or read_last:
                        await stream.read()

        for _ in range(5):
            await asyncio.gather(*(one(generator.randrange(5), generator.random() < 0.5) for _ in range(30)))
        await peer.quiet()
        assert len(peer.decider.tickets) > 20
    assert caplog.records == []


# --- faults ---


async def test_decider_out_of_time() -> None:
    async with serving(ServerOptions("127.0.0.1:0", decide_timeout=0.02)) as peer, peer.stream() as stream:
        never = asyncio.Event()
        peer.decider.gate = never.wait
        await decided(stream)
        assert stream.exchange.destination is None
        assert peer.observer.reasons == ["timeout"]
        assert peer.decider.cancelled == 1
        peer.decider.gate = None
        async with peer.stream() as other:
            await decided(other)
            assert other.exchange.destination == f"{A},{B}"


@pytest.mark.parametrize("error", [ValueError("secret prompt"), TimeoutError(), RecursionError()])
async def test_decider_that_raises(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    def fail(ticket: Any) -> Any:
        raise error

    async with serving() as peer, peer.stream() as stream:
        peer.decider.outcome = fail
        await decided(stream)
        assert stream.exchange.destination is None
        assert (peer.observer.reasons, peer.observer.faults) == (["internal"], ["decider"])
        assert await stream.ask(response_headers()) == "response_headers"
    assert "secret" not in caplog.text


async def test_malformed_message_ends_only_its_stream() -> None:
    async with serving() as peer, peer.stream() as good, peer.stream() as bad:
        await decided(good)
        await decided(bad)
        await bad.call.write(b"\xff\xff\xff")
        assert await bad.read() is None
        assert await bad.call.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert await bad.call.details() == "malformed ProcessingRequest"
        await until(lambda: peer.decider.open == 1)
        assert await good.ask(response_headers()) == "response_headers"
        assert peer.observer.faults == ["malformed"]


async def test_message_of_a_later_version_is_skipped() -> None:
    async with serving() as peer, peer.stream() as stream:
        await stream.call.write(b"\xa2\x06\x00")  # an empty message in field 100
        await decided(stream)
        assert peer.observer.faults == ["unknown"]


async def test_message_over_the_receive_limit_ends_only_its_stream() -> None:
    options = ServerOptions("127.0.0.1:0", max_message_bytes=100_000)
    async with serving(options, SessionOptions(max_body_bytes=50_000)) as peer, peer.stream() as stream:
        await stream.ask(request_headers())
        await stream.send(request_body(b"x" * 150_000))
        assert await stream.read() is None
        assert await stream.call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        async with peer.stream() as other:
            await decided(other, body=b"x" * 99_000)
            assert peer.observer.reasons == ["too_large"]


class ResetPeer:
    """A context whose peer is gone by the time of the first write, before grpc has cancelled the handler."""

    def __init__(self) -> None:
        self.messages = [bytes(request_headers()), bytes(request_body(BODY))]

    async def read(self) -> bytes:
        return self.messages.pop(0)

    async def write(self, data: bytes) -> None:
        if not self.messages:
            raise grpc.aio.InternalError("batch failed")


async def test_reset_between_two_calls_ends_like_a_cancellation() -> None:
    """grpc would log anything else as an error of the handler."""
    async with serving() as peer:
        with pytest.raises(asyncio.CancelledError):
            await peer.server._process(ResetPeer())
        await peer.quiet()
        assert len(peer.decider.tickets) == 1
        assert peer.observer.faults == []


async def test_event_work_gives_way_while_a_request_is_decided() -> None:
    """And only then: not while one waits for somebody else, nor once it has its answer."""
    async with serving() as peer:
        pacer = peer.server.pacer
        asked: list[bool] = []
        peer.decider.outcome = lambda ticket: asked.append(pacer.requested) or Outcome((A, B), ticket=ticket)
        may = asyncio.Event()
        peer.decider.gate = may.wait
        async with peer.stream() as stream:
            await stream.ask(request_headers(modes=BUFFERED_MODES))
            asking = asyncio.ensure_future(stream.ask(request_body(BODY)))
            await until(lambda: bool(peer.decider.requests))
            assert not pacer.requested
            may.set()
            await asking
        assert asked == [True]
        assert not pacer.requested


async def test_fault_of_our_own_ends_only_its_stream(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(reply: Any) -> bytes:
        raise ValueError("secret prompt")

    async with serving() as peer, peer.stream() as stream:
        with monkeypatch.context() as patch:
            patch.setattr(peer.server._encoder, "encode", fail)
            assert await stream.ask(request_headers()) is None
        assert await stream.call.code() == grpc.StatusCode.INTERNAL
        assert await stream.call.details() == "internal error"
        assert peer.observer.faults == ["server"]
        async with peer.stream() as other:
            await decided(other)
    assert "secret" not in caplog.text
