"""The emulator's event sockets over loopback ZMQ: live frames, replay framings, and every event fault."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio

from examples.emulator.faults import Faults, parse_control
from examples.emulator.publisher import GARBAGE, PortsTaken, Publisher
from examples.emulator.wire import END_SEQUENCE, Removed, wire_form

DEADLINE = 10.0


class Link:
    """A publisher and a connected subscriber."""

    def __init__(self, publisher: Publisher, context: zmq.asyncio.Context, sub: zmq.asyncio.Socket) -> None:
        self.publisher = publisher
        self.faults = publisher.faults
        self._context = context
        self._sub = sub

    def publish(self, count: int = 1) -> None:
        for _ in range(count):
            self.publisher.publish([Removed([self.publisher.sequence])], ts=1.0)

    async def live(self, count: int) -> list[list[bytes]]:
        async with asyncio.timeout(DEADLINE):
            return [await self._sub.recv_multipart() for _ in range(count)]

    async def numbers(self, count: int) -> list[int]:
        return [int.from_bytes(frames[1], "big") for frames in await self.live(count)]

    async def nothing(self) -> bool:
        """Nothing waits: the next message is one published now."""
        self.publish()
        (frames,) = await self.live(1)
        return int.from_bytes(frames[1], "big") == self.publisher.sequence - 1

    async def replay(self, start: bytes, *, until: Callable[[list[list[bytes]]], bool] | None = None) -> list[Any]:
        """Answer as a DEALER sees it, up to the end marker (left out) or `until`."""
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(f"tcp://127.0.0.1:{self.publisher.replay_port}")
            await dealer.send_multipart([b"", start])
            answer: list[list[bytes]] = []
            async with asyncio.timeout(DEADLINE):
                while True:
                    frames = await dealer.recv_multipart()
                    if frames[-2] == END_SEQUENCE:
                        return answer
                    answer.append(frames)
                    if until is not None and until(answer):
                        return answer


@asynccontextmanager
async def linked(version: str = "vllm-0.32", *, topic: str = "kv", **options: Any) -> AsyncIterator[Link]:
    context = zmq.asyncio.Context()
    publisher = Publisher(form=wire_form(version), topic=topic, **options)
    publisher.start(zmq.Context.shadow(context.underlying), host="127.0.0.1", port=0, replay_port=0)
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.LINGER, 0)
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    sub.connect(f"tcp://127.0.0.1:{publisher.port}")
    try:
        # An XPUB would tell about the subscription; a PUB does not, so greet until the first message comes through.
        async with asyncio.timeout(DEADLINE):
            while not await sub.poll(20):
                publisher._pub.send_multipart([b"hello"])  # type: ignore[union-attr]
        while await sub.poll(0):
            await sub.recv_multipart()
        yield Link(publisher, context, sub)
    finally:
        sub.close()
        publisher.close()
        context.term()


def sequences(answer: list[list[bytes]]) -> list[int]:
    return [int.from_bytes(frames[-2], "big") for frames in answer]


async def test_live_frames() -> None:
    async with linked() as link:
        link.publish(3)
        frames = await link.live(3)
    assert [f[0] for f in frames] == [b"kv"] * 3
    assert [f[1] for f in frames] == [n.to_bytes(8, "big") for n in range(3)]
    assert msgpack.unpackb(frames[2][2]) == [1.0, [{"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU"}], 0]


@pytest.mark.parametrize(("version", "lead"), [("vllm-0.25", [b""]), ("vllm-0.26", [b"", b"kv"])])
async def test_replay_framing(version: str, lead: list[bytes]) -> None:
    async with linked(version) as link:
        link.publish(3)
        live = await link.live(3)
        answer = await link.replay((1).to_bytes(8, "big"))
    assert answer == [[*lead, *frames[1:]] for frames in live[1:]]


@pytest.mark.parametrize(
    ("start", "numbers"),
    [
        ((0).to_bytes(8, "big"), [3, 4, 5, 6]),  # the ring has rolled, nothing says so
        ((5).to_bytes(8, "big"), [5, 6]),
        (b"\x06", [6]),
        ((7).to_bytes(8, "big"), []),
        (b"\xff" * 8, []),
    ],
)
async def test_what_a_replay_gives(start: bytes, numbers: list[int]) -> None:
    async with linked(buffer_steps=4) as link:
        link.publish(7)
        assert sequences(await link.replay(start)) == numbers


async def test_malformed_requests_get_no_answer_and_do_no_harm() -> None:
    async with linked() as link:
        link.publish(2)
        with link._context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(f"tcp://127.0.0.1:{link.publisher.replay_port}")
            for frames in ([b"\x00" * 8], [b"x", b"\x00"], [b"", b"\x00", b""]):
                await dealer.send_multipart(frames)
            await dealer.send_multipart([b"", b"\x01"])
            async with asyncio.timeout(DEADLINE):
                answer = [await dealer.recv_multipart(), await dealer.recv_multipart()]
        assert sequences(answer) == [1, 2**64 - 1]


async def test_an_empty_topic_keeps_its_frame() -> None:
    async with linked(topic="") as link:
        link.publish()
        (live,) = await link.live(1)
        (replayed,) = await link.replay(b"\x00")
    assert live[0] == b""
    assert replayed[:2] == [b"", b""]


# fault, numbers seen live of six batches, numbers that a replay gives afterwards
EVENT_FAULTS = [
    ({"drop": 2}, [2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
    ({"lose": 2}, [2, 3, 4, 5], [2, 3, 4, 5]),
    ({"gap": 3}, [3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 7, 8]),
    ({"dup": 2}, [0, 0, 1, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
    ({"garbage": 1}, [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),
    ({"hole_replay": 1}, [0, 1, 2, 3, 4, 5], [0, 1, 2, 4, 5]),
]


@pytest.mark.parametrize(("faults", "live", "replayed"), EVENT_FAULTS, ids=lambda v: next(iter(v), "") if v else "")
async def test_event_faults(faults: dict[str, int], live: list[int], replayed: list[int]) -> None:
    async with linked(faults=Faults(**faults)) as link:
        link.publish(6)
        assert await link.numbers(len(live)) == live
        assert await link.nothing()
        assert sequences(await link.replay(b"\x00"))[: len(replayed)] == replayed
        usual = Faults().as_dict()
        spent = {key: value for key, value in link.faults.as_dict().items() if value != usual[key]}
        assert spent == {}, "a counted fault ends by itself"


async def test_garbage_is_live_only_or_in_the_ring_too() -> None:
    async with linked(faults=Faults(garbage=1, garbage_ring=1)) as link:
        link.publish()
        assert [frames[2] for frames in await link.live(1)] == [GARBAGE]
        link.faults.garbage = 1
        link.publish()
        assert [frames[2] for frames in await link.live(1)] == [GARBAGE]
        damaged, good = await link.replay(b"\x00")
    assert damaged[-1] == GARBAGE
    assert msgpack.unpackb(good[-1])[1][0]["block_hashes"] == [1]
    with pytest.raises(ValueError):
        msgpack.unpackb(GARBAGE)


async def test_truncated_replay_has_no_end_marker() -> None:
    async with linked(faults=Faults(truncate_replay=1)) as link:
        link.publish(6)
        assert sequences(await link.replay(b"\x00", until=lambda answer: len(answer) == 3)) == [0, 1, 2]
        assert sequences(await link.replay(b"\x00")) == [0, 1, 2, 3, 4, 5], "the next answer is whole"


async def test_mute_replay_and_back() -> None:
    async with linked(faults=Faults(mute_replay=True)) as link:
        link.publish()
        with link._context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(f"tcp://127.0.0.1:{link.publisher.replay_port}")
            await dealer.send_multipart([b"", b"\x00"])
            assert not await dealer.poll(100)
            link.faults.mute_replay = False
            await dealer.send_multipart([b"", b"\x05"])
            async with asyncio.timeout(DEADLINE):
                assert (await dealer.recv_multipart())[-2] == END_SEQUENCE


async def test_frozen_events_come_later_in_order() -> None:
    async with linked() as link:
        link.publish()
        assert await link.numbers(1) == [0]
        link.publisher.freeze(True)
        link.publish(3)
        assert not await link._sub.poll(50)
        link.publisher.freeze(False)
        link.publish()
        assert await link.numbers(4) == [1, 2, 3, 4]


async def test_restart_starts_again_from_zero() -> None:
    async with linked() as link:
        link.publish(3)
        assert await link.numbers(3) == [0, 1, 2]
        link.publisher.restart()
        assert await link.replay(b"\x00") == []
        link.publish()
        assert await link.numbers(1) == [0]


async def test_a_taken_port_is_refused_and_leaves_nothing_open() -> None:
    async with linked() as link:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        other = Publisher(form=wire_form("vllm-0.32"))
        with pytest.raises(PortsTaken):
            other.start(context, host="127.0.0.1", port=0, replay_port=link.publisher.port)
        context.term()


async def test_a_publisher_that_connects() -> None:
    context = zmq.asyncio.Context()
    sub = context.socket(zmq.SUB)
    sub.setsockopt(zmq.LINGER, 0)
    sub.setsockopt(zmq.SUBSCRIBE, b"kv")
    port = sub.bind_to_random_port("tcp://127.0.0.1")
    publisher = Publisher(form=wire_form("vllm-0.32"), topic="kv")
    publisher.start(
        zmq.Context.shadow(context.underlying),
        host="127.0.0.1",
        port=0,
        replay_port=None,
        connect=f"tcp://127.0.0.1:{port}",
    )
    try:
        async with asyncio.timeout(DEADLINE):
            while not await sub.poll(20):
                publisher.publish([])
        assert (await sub.recv_multipart())[0] == b"kv"
        assert publisher.port is None
        assert publisher.replay_port is None
    finally:
        sub.close()
        publisher.close()
        context.term()


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ([], "object"),
        ({"explode": 1}, "unknown key 'explode'; known: drop"),
        ({"drop": -1}, "drop: -1"),
        ({"drop": True}, "drop: True"),
        ({"drop": "1"}, "drop: '1'"),
        ({"hang": 1}, "hang: 1"),
        ({"restart": 1}, "restart: 1"),
    ],
)
def test_control_is_strict(body: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_control(body)
