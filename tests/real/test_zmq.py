"""The transport against real sockets: XPUB/ROUTER publishers of tests/real/publisher.py on free loopback ports."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from kvindex.directory import Directory, StreamReport
from kvindex.fleet import Instance, StreamEndpoint
from kvindex.hashing import content_keys, pack_tokens
from kvindex.sync import SyncLimits
from kvindex.transport import EventTransport, TransportOptions
from tests.real.publisher import BLOCK, END, Publisher, chain, settled, until

pytestmark = pytest.mark.real

OPTIONS = TransportOptions(reconnect_initial=0.02, reconnect_max=0.1)
LIMITS = SyncLimits(replay_timeout=5.0, attempts=3, backoff_initial=0.05, backoff_max=0.2)


@pytest.fixture
def transport() -> Iterator[EventTransport]:
    made = EventTransport(OPTIONS).start()
    yield made
    assert made.stop()
    assert made.sockets == 0
    assert made.streams == 0


class Pool:
    """A directory over publishers, one instance each."""

    def __init__(self, transport: EventTransport, *publishers: Publisher, **more: Any) -> None:
        limits = more.pop("limits", LIMITS)
        self.publishers = publishers
        self.directory = Directory(transport, block_size=BLOCK, limits=limits, max_streams=more.pop("max_streams", 128))
        more = {"dialect": "vllm", **more}
        self.instances = [
            Instance(
                f"e-{number:03}",
                f"10.0.0.1:{number + 1}",
                events=(StreamEndpoint(0, one.endpoint, one.replay, one.topic.decode(), **more),),
            )
            for number, one in enumerate(publishers)
        ]
        self.directory.update(self.instances)

    def report(self, number: int = 0) -> StreamReport:
        return self.directory.status()[number]

    def blocks(self, count: int, number: int = 0, prompt: int = 0) -> int:
        """How many of the first `count` blocks of a prompt the instance is credited with."""
        ids = range(prompt * 1000, prompt * 1000 + count * BLOCK)
        match = self.directory.match(content_keys(pack_tokens(ids), BLOCK))
        return sum(match.minimum(f"e-{number:03}"))

    def until(self, condition: Callable[[StreamReport], Any], number: int = 0, what: str = "") -> StreamReport:
        return until(
            lambda: (one := self.report(number)) if condition(self.report(number)) else None,
            *self.publishers,
            what=what,
        )

    def until_subscribed(self) -> None:
        until(lambda: all(one.subscribers > 0 for one in self.publishers), *self.publishers, what="subscribed")

    def until_blocks(self, count: int, number: int = 0, prompt: int = 0) -> None:
        until(
            lambda: self.blocks(count + 1, number, prompt) == count,
            *self.publishers,
            what=f"{count} blocks; {self.report(number)}",
        )


# -- joining


@pytest.mark.parametrize("frames", [3, 4])
def test_late_joiner_gets_everything_by_replay(transport: EventTransport, frames: int) -> None:
    with Publisher(frames=frames) as publisher:
        for number in range(5):
            publisher.publish(chain(number, 1))
        pool = Pool(transport, publisher)
        report = pool.until(lambda one: one.synchronized)
        assert (report.complete, report.sequence, pool.blocks(9)) == (True, 4, 5)
        assert publisher.asked == [0]
        publisher.publish(chain(5, 2))
        pool.until_blocks(7)
        until(lambda: transport.replays == (0, 0), publisher)
        assert transport.sockets == 2, "the attempt's DEALER is gone"


def test_late_joiner_without_replay_sees_only_what_comes(transport: EventTransport) -> None:
    with Publisher(replay=None) as publisher:
        publisher.publish(chain(0, 3))
        pool = Pool(transport, publisher)
        pool.until_subscribed()
        publisher.publish(chain(3, 1), chain(0, 2, prompt=1))
        report = pool.until(lambda one: one.synchronized)
        assert (report.complete, report.sequence) == (False, 1)
        assert (pool.blocks(4), pool.blocks(2, prompt=1)) == (0, 2)


def test_snapshot_dialect(transport: EventTransport) -> None:
    """xLLM: the whole content at a watermark, then live deltas."""

    def state(first: int, count: int) -> bytes:
        hashes = [number + 1 for number in range(first, first + count)]
        event = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": first or None,
            "token_ids": list(range(first * BLOCK, (first + count) * BLOCK)),
            "block_size": BLOCK,
            "medium": "gpu",
        }
        return msgpack.packb([1.0, [event], 0])

    def answer(publisher: Publisher, to: list[bytes], start: int) -> None:
        publisher.reply(to, struct.pack(">Q", publisher.sequence - 1), state(0, publisher.sequence))
        publisher.reply(to, END, b"")

    with Publisher(topic=b"xllm-kv") as publisher:
        publisher.answer = answer
        for number in range(3):
            publisher.publish_raw(state(number, 1))
        pool = Pool(transport, publisher, dialect="xllm")
        report = pool.until(lambda one: one.synchronized)
        assert (report.complete, report.sequence, pool.blocks(9)) == (True, 2, 3)
        publisher.publish_raw(state(3, 1))
        pool.until_blocks(4)
        publisher.publish_raw(state(4, 1), lose=True)
        publisher.publish_raw(state(5, 1))
        pool.until_blocks(6)
        assert len(publisher.asked) >= 2


def test_silent_replay_endpoint_is_asked_again(transport: EventTransport) -> None:
    with Publisher() as publisher:
        publisher.publish(chain(0, 2))
        publisher.mute = True
        pool = Pool(transport, publisher, limits=replace(LIMITS, replay_timeout=0.1))
        pool.until(lambda one: one.error is not None, what="the time-out is told")
        publisher.mute = False
        pool.until_blocks(2)


def test_foreign_topic_that_the_filter_lets_through(transport: EventTransport) -> None:
    """SUBSCRIBE is a prefix match: `kv` also receives `kv-b`."""
    with Publisher(topic=b"kv", replay=None) as publisher:
        pool = Pool(transport, publisher)
        pool.until_subscribed()
        publisher.publish(chain(0, 1))
        publisher.pub.send_multipart([b"kv-b", struct.pack(">Q", 77), b"not for us"])
        publisher.publish(chain(1, 1))
        pool.until_blocks(2)
        report = pool.report()
        assert (report.synchronized, report.complete, report.sequence) == (True, True, 1)


# -- losing


def test_gap_is_filled_by_replay(transport: EventTransport) -> None:
    with Publisher() as publisher:
        pool = Pool(transport, publisher)
        pool.until_subscribed()
        publisher.publish(chain(0, 1))
        pool.until_blocks(1)
        publisher.publish(chain(1, 1), lose=True)
        publisher.publish(chain(2, 1))
        pool.until_blocks(3)
        assert pool.report().complete
        assert publisher.asked[-1] == 0, "from the last applied one, inclusive"


def test_gap_without_replay_drops_the_stream(transport: EventTransport) -> None:
    with Publisher(replay=None) as publisher:
        pool = Pool(transport, publisher)
        pool.until_subscribed()
        publisher.publish(chain(0, 2))
        pool.until_blocks(2)
        publisher.publish(chain(2, 1), lose=True)
        publisher.publish(chain(0, 1, prompt=1))
        pool.until_blocks(1, prompt=1)
        assert pool.blocks(2) == 0
        assert (pool.report().synchronized, pool.report().complete) == (True, False)


def test_queue_overflow_while_we_stall(transport: EventTransport) -> None:
    """12.3: HWM loss is silent until the next message; then the replay brings all of it."""
    stalled, go_on = threading.Event(), threading.Event()

    def stall() -> None:
        stalled.set()
        go_on.wait(20)

    small = EventTransport(replace(OPTIONS, receive_hwm=10)).start()
    try:
        with Publisher(hwm=10) as publisher:
            pool = Pool(small, publisher)
            pool.until_subscribed()
            publisher.publish(chain(0, 1))
            pool.until_blocks(1)
            small.post(stall)
            assert stalled.wait(10)
            payload = ["BlockStored", [9], None, list(range(100_000, 100_000 + BLOCK)), BLOCK, None, "GPU" + " " * 4000]
            for _ in range(2000):
                publisher.publish(payload)
            go_on.set()
            publisher.publish(chain(1, 1))
            pool.until_blocks(2)
            report = pool.report()
            assert report.complete
            assert report.sequence == 2001
            assert len(publisher.asked) >= 2, "something was lost"
    finally:
        go_on.set()
        assert small.stop()


def test_burst_is_read_to_its_end(transport: EventTransport) -> None:
    """A descriptor tells of a burst once: what is over a batch has to be read without another wake-up."""
    stalled, go_on = threading.Event(), threading.Event()

    def stall() -> None:
        stalled.set()
        go_on.wait(20)

    with Publisher(replay=None) as publisher:
        pool = Pool(transport, publisher)
        pool.until_subscribed()
        publisher.publish(chain(0, 1))
        pool.until_blocks(1)
        transport.post(stall)
        assert stalled.wait(10)
        for number in range(1, 300):
            publisher.publish(chain(number, 1))
        settled(publisher, seconds=0.2)  # all of it in our queue
        go_on.set()
        pool.until_blocks(300)


def test_a_flood_does_not_hold_up_the_others(transport: EventTransport) -> None:
    """Streams take turns of a bounded number of messages: the other one is not behind all of the flood."""
    stalled, go_on = threading.Event(), threading.Event()

    def stall() -> None:
        stalled.set()
        go_on.wait(20)

    count = 2_000
    with Publisher(replay=None) as flood, Publisher(replay=None) as other:
        pool = Pool(transport, flood, other)
        pool.until_subscribed()
        transport.post(stall)
        assert stalled.wait(10)
        for number in range(count):
            flood.publish(chain(0, 40, prompt=number % 50))
        other.publish(chain(0, 2))
        go_on.set()
        pool.until_blocks(2, number=1)
        behind = pool.report()
        assert behind.sequence is None or behind.sequence < count - 1
        pool.until(lambda one: one.sequence == count - 1, what="the flood itself")


def test_oversize_message_costs_its_stream_alone_and_no_connection(transport: EventTransport) -> None:
    with Publisher(replay=None) as publisher, Publisher(replay=None) as other:
        pool = Pool(transport, publisher, other, limits=replace(LIMITS, max_message_bytes=64 << 10))
        pool.until_subscribed()
        publisher.publish(chain(0, 2))
        other.publish(chain(0, 2))
        pool.until_blocks(2)
        pool.until_blocks(2, number=1)
        publisher.publish_raw(b"x" * (200 << 10))
        pool.until_blocks(0)
        assert "65536" in str(pool.report().error).replace(",", "")
        publisher.publish(chain(0, 3))
        pool.until_blocks(3)
        assert pool.report().link.connections == 1, "no reconnect because of one message"
        assert pool.blocks(2, number=1) == 2


def test_frame_beyond_all_bounds_is_not_taken_in() -> None:
    """The sender loses its connection when it has told the length; no memory is kept ready for what it announces."""
    made = EventTransport(replace(OPTIONS, max_frame_bytes=1 << 20)).start()
    try:
        with Publisher(replay=None) as publisher, Publisher(replay=None) as other:
            pool = Pool(made, publisher, other)
            pool.until_subscribed()
            for one in (publisher, other):
                one.publish(chain(0, 2))
            pool.until_blocks(2)
            pool.until_blocks(2, number=1)
            publisher.publish_raw(b"x" * (2 << 20))
            pool.until(lambda one: one.link.connections > 1, what="a new connection")
            pool.until_blocks(0)
            assert (pool.blocks(2, number=1), pool.report(1).link.connections) == (2, 1)
            until(lambda: publisher.subscribers > 0, publisher)
            publisher.publish(chain(0, 3))
            pool.until_blocks(3)
    finally:
        assert made.stop()


def test_oversize_message_that_the_replay_repeats(transport: EventTransport) -> None:
    with Publisher() as publisher:
        pool = Pool(transport, publisher, limits=replace(LIMITS, max_message_bytes=64 << 10))
        pool.until_subscribed()
        publisher.publish(chain(0, 2))
        pool.until_blocks(2)
        publisher.publish_raw(b"x" * (200 << 10))
        pool.until(lambda one: one.state == "empty" and "204800" in str(one.error), what="the replay has it too")
        publisher.publish(chain(0, 2, prompt=1))
        pool.until_blocks(2, prompt=1)
        assert not pool.report().complete


@pytest.mark.parametrize(
    "garbage", [[b"", b"short", b"x"], [b""], [b"", b"\0" * 8, b"\xc1"], [b"", b"\0" * 7 + b"\1", b""]]
)
def test_garbage_marks_the_stream_and_it_recovers(transport: EventTransport, garbage: list[bytes]) -> None:
    with Publisher(replay=None) as publisher:
        pool = Pool(transport, publisher)
        pool.until_subscribed()
        publisher.publish(chain(0, 1))
        pool.until_blocks(1)
        publisher.pub.send_multipart(garbage)
        publisher.publish(chain(0, 2, prompt=1))
        pool.until_blocks(2, prompt=1)
        assert pool.report().link.faults == 0
        assert transport.alive


# -- connections


def test_restart_on_the_same_port(transport: EventTransport) -> None:
    """The new process starts at 0 with an empty cache: nothing of the old one is credited."""
    first = Publisher()
    pool = Pool(transport, first)
    pool.until_subscribed()
    first.publish(chain(0, 3))
    pool.until_blocks(3)
    first.close()
    with Publisher(endpoint=first.endpoint, replay=str(first.replay)) as second:
        pool.publishers = (second,)
        second.publish(chain(0, 2, prompt=1))
        pool.until_blocks(2, prompt=1)
        assert pool.blocks(3) == 0
        assert pool.report().complete
        assert pool.report().link.connections == 2


def test_restart_that_looks_contiguous(transport: EventTransport) -> None:
    """12.7: the first frame seen of the new process continues the old numbers; the replayed digest tells."""
    first = Publisher()
    pool = Pool(transport, first)
    pool.until_subscribed()
    for number in range(4):
        first.publish(chain(number, 1))
    pool.until_blocks(4)
    first.close()
    with Publisher(endpoint=first.endpoint, replay=str(first.replay)) as second:
        for number in range(4):
            second.publish(chain(number, 1, prompt=1), lose=True)
        pool.publishers = (second,)
        pool.until_subscribed()
        second.publish(chain(4, 1, prompt=1))
        pool.until_blocks(5, prompt=1)
        assert pool.blocks(4) == 0
        assert second.asked[0] == 3, "the last applied one, to compare"


def test_reconnect_to_the_same_process_keeps_the_view(transport: EventTransport) -> None:
    """Continuity is shown by the digest of the last applied frame; the ring no longer has the first ones."""
    with Publisher(ring=2) as publisher:
        pool = Pool(transport, publisher)
        pool.until_subscribed()
        for number in range(5):
            publisher.publish(chain(number, 1))
            pool.until_blocks(number + 1)
        publisher.drop_connections()
        publisher.publish(chain(5, 1))
        pool.until_blocks(6)
        report = pool.report()
        assert (report.complete, report.link.connections, report.link.disconnections) == (True, 2, 1)
        assert publisher.asked[-1] == 4


def test_reconnect_without_replay_drops_the_view(transport: EventTransport) -> None:
    with Publisher(replay=None) as publisher:
        pool = Pool(transport, publisher)
        pool.until_subscribed()
        publisher.publish(chain(0, 3))
        pool.until_blocks(3)
        publisher.drop_connections()
        pool.until_subscribed()
        pool.until_blocks(0)
        publisher.publish(chain(0, 2))
        pool.until_blocks(2)


def test_engine_that_comes_later(transport: EventTransport) -> None:
    with Publisher() as early:
        endpoint, ask = early.endpoint, early.replay
    pool = Pool(transport, early)
    pool.publishers = ()
    pool.until(lambda one: "cannot connect" in str(one.error) and one.link.connect_retries > 1)
    with Publisher(endpoint=endpoint, replay=ask) as publisher:
        publisher.publish(chain(0, 2))
        pool.publishers = (publisher,)
        pool.until_blocks(2)
        assert pool.report().error is None


def test_peer_that_is_no_publisher_then_is_one(transport: EventTransport) -> None:
    """After a protocol error libzmq gives the socket up for good; ours is replaced and meets the real one."""
    greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x01NULL" + b"\0" * 16 + b"\0" + b"\0" * 31
    ready = b"\x05READY\x0bSocket-Type\0\0\0\x03REP"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def play_rep() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(greeting + bytes([4, len(ready)]) + ready)
                while connection.recv(1024):
                    pass

        peer = threading.Thread(target=play_rep)
        peer.start()
        endpoint = StreamEndpoint(0, f"tcp://127.0.0.1:{port}", dialect="vllm")
        directory = Directory(transport, block_size=BLOCK)
        directory.update([Instance("e-000", "10.0.0.1:1", events=(endpoint,))])
        until(lambda: "PUB" in str(directory.status()[0].error), what="the error names the mistake")
        peer.join(10)
    with Publisher(endpoint=f"tcp://127.0.0.1:{port}", replay=None) as publisher:
        until(lambda: publisher.subscribers, publisher)
        publisher.publish(chain(0, 2))
        keys = content_keys(pack_tokens(range(3 * BLOCK)), BLOCK)
        until(lambda: directory.match(keys).minimum("e-000").device == 2, publisher)


@pytest.mark.parametrize("heartbeat", [True, False])
def test_freeze_and_thaw(heartbeat: bool) -> None:
    """SIGSTOP. With heartbeats the connection is given up and taken again; without, silence is just silence."""
    options = replace(OPTIONS, heartbeat_interval=0.1 if heartbeat else 0.0, heartbeat_timeout=0.3)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.real.publisher"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None

    def tell(*events: list[Any], lose: bool = False) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps([events, lose]) + "\n")
        process.stdin.flush()

    try:
        with EventTransport(options) as transport:
            endpoint, ask = json.loads(process.stdout.readline())
            directory = Directory(transport, block_size=BLOCK, limits=LIMITS)
            directory.update(
                [Instance("e-000", "10.0.0.1:1", events=(StreamEndpoint(0, endpoint, ask, dialect="vllm"),))]
            )
            keys = content_keys(pack_tokens(range(9 * BLOCK)), BLOCK)

            def blocks() -> int:
                return directory.match(keys).minimum("e-000").device

            tell(chain(0, 2))
            until(lambda: blocks() == 2)
            process.send_signal(signal.SIGSTOP)
            tell(chain(2, 1))
            if heartbeat:
                until(lambda: not directory.status()[0].link.connected, what="heartbeats notice")
            else:
                settled(seconds=0.3)
                assert directory.status()[0].link.connected
            process.send_signal(signal.SIGCONT)
            until(lambda: blocks() == 3)
            tell(chain(3, 1))
            until(lambda: blocks() == 4)
            report = directory.status()[0]
            assert report.complete
            assert (report.link.connections > 1) is heartbeat
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_engine_that_connects_to_us(transport: EventTransport, tmp_path: Path) -> None:
    """vLLM with an endpoint without `*`: we bind. A second process of it is a reconnect: dropped."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    first = Publisher(endpoint=endpoint, connect=True, replay=None)
    pool = Pool(transport, first, bind=True)
    pool.until_subscribed()
    first.publish(chain(0, 2))
    pool.until_blocks(2)
    first.close()
    with Publisher(endpoint=endpoint, connect=True, replay=None) as second:
        pool.publishers = (second,)
        pool.until_subscribed()
        pool.until_blocks(0)
        second.publish(chain(0, 1, prompt=1))
        pool.until_blocks(1, prompt=1)


def test_port_we_shall_bind_is_taken(transport: EventTransport, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder, caplog.at_level(logging.CRITICAL):
        endpoint = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
        directory = Directory(transport, block_size=BLOCK)
        directory.update([Instance("e-000", "10.0.0.1:1", events=(StreamEndpoint(0, endpoint, bind=True),))])
        until(lambda: directory.status()[0].link.faults > 1)
        assert directory.status()[0].state == "fault"
        assert "in use" in str(directory.status()[0].error)
    with Publisher(endpoint=endpoint, connect=True, replay=None) as publisher:
        until(lambda: publisher.subscribers, publisher, what="bound once the port is free")
        until(lambda: directory.status()[0].link.error is None, publisher)
        assert "in use" not in str(directory.status()[0].error)


def ipv6_works() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
            return True
    except OSError:
        return False


@pytest.mark.skipif(not ipv6_works(), reason="no IPv6 loopback here")
def test_ipv6(transport: EventTransport) -> None:
    with Publisher(endpoint="tcp://[::1]:*", replay="tcp://[::1]:*", ipv6=True) as publisher:
        assert publisher.endpoint.startswith("tcp://[::1]:")
        publisher.publish(chain(0, 2))
        pool = Pool(transport, publisher)
        pool.until_blocks(2)
        assert pool.report().complete


def test_host_name_is_tried_in_both_address_families(transport: EventTransport) -> None:
    """libzmq takes the first address of one family; the engine may be bound on the other."""
    port = free_port()
    endpoint = StreamEndpoint(0, f"tcp://localhost:{port}", dialect="vllm")
    directory = Directory(transport, block_size=BLOCK)
    directory.update([Instance("e-000", "10.0.0.1:1", events=(endpoint,))])
    seen: set[bool] = set()

    def families() -> set[bool]:
        seen.update(channel.ipv6 for channel in list(transport._channels.values()))
        return seen

    until(lambda: families() == {True, False})
    with Publisher(endpoint=f"tcp://127.0.0.1:{port}", replay=None) as publisher:
        until(lambda: publisher.subscribers, publisher)
        publisher.publish(chain(0, 2))
        keys = content_keys(pack_tokens(range(3 * BLOCK)), BLOCK)
        until(lambda: directory.match(keys).minimum("e-000").device == 2, publisher)


# -- many, and clean


def test_128_streams_at_once(transport: EventTransport) -> None:
    """Everyone recovers, never more than four replays run, and nothing is left."""
    with ExitStack() as stack:
        context = zmq.Context()
        stack.callback(context.term)
        publishers = [stack.enter_context(Publisher(context=context)) for _ in range(128)]
        for publisher in publishers:
            publisher.publish(chain(0, 2))
        most = 0
        pool = Pool(transport, *publishers)

        def all_synchronized() -> bool:
            nonlocal most
            most = max(most, transport.replays[0])
            return all(one.synchronized and one.complete for one in pool.directory.status())

        until(all_synchronized, *publishers, timeout=30)
        assert 1 <= most <= OPTIONS.max_replays
        for publisher in publishers:
            publisher.publish(chain(2, 1))
        until(lambda: all(pool.blocks(3, number) == 3 for number in range(128)), *publishers, timeout=30)
        assert {tuple(one.asked) for one in publishers} == {(0,)}
        until(lambda: transport.sockets == 256, *publishers, what="SUB and monitor of each")
        pool.directory.close()
        assert transport.flush()
        assert (transport.sockets, transport.streams, pool.directory.index.blocks) == (0, 0, 0)
        pool.directory.index.check()


def test_unfollow_and_stop_leave_nothing() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with Publisher() as publisher:
        publisher.publish(chain(0, 2))
        before, threads = descriptors(), threading.active_count()
        for _ in range(5):
            transport = EventTransport(OPTIONS).start()
            pool = Pool(transport, publisher)
            pool.until_blocks(2)
            pool.directory.update([])
            assert transport.flush()
            assert transport.sockets == 0
            assert transport.stop()
            assert transport.stop(), "idempotent"
            assert not transport.alive
        until(lambda: threading.active_count() == threads)
        until(lambda: descriptors() <= before + 2, publisher, what="the publisher's side closes too")


def test_unfollow_in_the_middle_of_a_replay(transport: EventTransport) -> None:
    with Publisher() as publisher:
        publisher.publish(chain(0, 2))
        publisher.mute = True
        pool = Pool(transport, publisher)
        until(lambda: transport.replays == (1, 0), publisher)
        pool.directory.close()
        assert transport.flush()
        assert (transport.sockets, transport.replays) == (0, (0, 0))


def test_transport_can_be_started_again() -> None:
    transport = EventTransport(OPTIONS)
    with Publisher() as publisher:
        publisher.publish(chain(0, 2))
        for _ in range(2):
            pool = Pool(transport, publisher)  # asked for before the thread runs
            with transport:
                pool.until_blocks(2)
                pool.directory.close()


def test_new_incarnation_gets_nothing_of_the_old(transport: EventTransport) -> None:
    with Publisher(replay=None) as publisher:
        pool = Pool(transport, publisher)
        pool.until_subscribed()
        publisher.publish(chain(0, 3))
        pool.until_blocks(3)
        fresh = [replace(one, incarnation="new") for one in pool.instances]
        pool.directory.update(fresh)
        assert transport.flush()
        assert pool.blocks(3) == 0
        assert not pool.report().synchronized


# -- faults of our own


def test_bug_in_one_stream_stops_no_other(transport: EventTransport, caplog: pytest.LogCaptureFixture) -> None:
    with Publisher() as one, Publisher() as two, caplog.at_level(logging.ERROR, "kvindex"):
        pool = Pool(transport, one, two)
        pool.until(lambda report: report.synchronized or report.link.connected)
        pool.until_subscribed()
        one.publish(chain(0, 2))
        two.publish(chain(0, 2))
        pool.until_blocks(2)
        stream = pool.directory._streams[("e-000", 0)]
        assert stream.sync is not None
        dialect = stream.sync.dialect

        def explode(_: bytes) -> Any:
            raise ZeroDivisionError("bug")

        dialect.decode = explode  # type: ignore[method-assign]
        one.publish(chain(2, 1))
        two.publish(chain(2, 1))
        pool.until_blocks(3, number=1)
        pool.until(lambda report: report.link.faults == 1, what="told")
        pool.until_blocks(3)
        assert pool.report().error is None, "rebuilt from the replay with a fresh dialect"
        assert pool.report(1).link.faults == 0
        assert transport.alive
        assert sum("ZeroDivisionError" in record.getMessage() for record in caplog.records) == 1


def test_resync_and_rebuild_by_the_operator(transport: EventTransport) -> None:
    with Publisher() as publisher:
        publisher.publish(chain(0, 2))
        pool = Pool(transport, publisher)
        pool.until_blocks(2)
        asked = len(publisher.asked)
        pool.directory.rebuild("e-000")
        until(lambda: len(publisher.asked) > asked, publisher)
        pool.until_blocks(2)
        pool.directory.resync("e-000")
        assert transport.flush()
        pool.until(lambda one: one.synchronized)
        pool.until_blocks(2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
