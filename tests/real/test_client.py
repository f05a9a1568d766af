"""kvindex as a client library: handlers of one's own over real sockets, and the README's examples as they stand."""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

import kvindex
from kvindex import AllBlocksCleared, BlockRemoved, BlockStored, ConfigurationError, Event, Reset, SyncLimits, Tier
from kvindex.client import Subscription, subscribe
from kvindex.options import TransportOptions
from kvindex.transport import EventTransport
from tests.real.publisher import BLOCK, END, Publisher, chain, removed, settled, until

pytestmark = pytest.mark.real

OPTIONS = TransportOptions(reconnect_initial=0.02, reconnect_max=0.1)


def follow(publisher: Publisher, handler: Callable[[Event | Reset], None], **more: Any) -> Subscription:
    more.setdefault("replay", publisher.replay)
    more.setdefault("options", OPTIONS)
    return subscribe(publisher.endpoint, handler, dialect=more.pop("dialect", "vllm"), **more)


def spell(event: Event | Reset) -> str:
    """Short form for comparing."""
    match event:
        case BlockStored():
            return "+" + ",".join(map(str, event.hashes))
        case BlockRemoved():
            return "-" + ",".join(map(str, event.hashes))
        case AllBlocksCleared():
            return "0"
        case Reset():
            return "reset"
    return "?"


def test_events_arrive_in_order_with_what_was_missed() -> None:
    told: list[str] = []
    with Publisher() as publisher:
        publisher.publish(chain(0, 2))
        publisher.publish(removed([2]))
        with follow(publisher, lambda event: told.append(spell(event))) as engine:
            until(lambda: engine.wait_synchronized(0), publisher)
            assert told == ["+1,2", "-2"]
            publisher.publish(chain(1, 1), lose=True)
            publisher.publish(["AllBlocksCleared"], chain(0, 1))
            until(lambda: len(told) == 5, publisher)
            assert told[2:] == ["+2", "0", "+1"], "the lost one by replay, in its place, and no reset"
            # The handler hears an event before the message it came in is done with.
            until(lambda: engine.status is not None and engine.status.complete, publisher)
            assert engine.status is not None
            assert (engine.status.sequence, engine.link.connected) == (3, True)


def test_event_carries_tokens_and_tier() -> None:
    got: list[BlockStored] = []
    with Publisher() as publisher, follow(publisher, got.append) as engine:  # type: ignore[arg-type]
        until(lambda: engine.link.connected, publisher)
        publisher.publish(["BlockStored", [5], None, [7, 8, 9, 10], BLOCK, None, "CPU"])
        until(lambda: got, publisher)
    assert (got[0].hashes, got[0].tokens, got[0].tier) == ([5], kvindex.pack_tokens([7, 8, 9, 10]), Tier.HOST)


def test_gap_without_replay_is_a_reset() -> None:
    told: list[str] = []
    with Publisher(replay=None) as publisher, follow(publisher, lambda event: told.append(spell(event))):
        until(lambda: publisher.subscribers, publisher)
        publisher.publish(chain(0, 1))
        publisher.publish(chain(1, 1), lose=True)
        publisher.publish(chain(2, 1))
        until(lambda: len(told) == 3, publisher)
        assert told == ["+1", "reset", "+3"]


def test_restarted_engine_is_a_reset() -> None:
    told: list[str] = []
    first = Publisher()
    with follow(first, lambda event: told.append(spell(event))):
        until(lambda: first.subscribers, first)
        first.publish(chain(0, 1))
        until(lambda: told == ["+1"], first)
        first.close()
        with Publisher(endpoint=first.endpoint, replay=str(first.replay)) as second:
            second.publish(chain(0, 1, prompt=1))
            until(lambda: told == ["+1", "reset", "+1001"], second)


def test_snapshot_replaces_what_was_told() -> None:
    def state(first: int, count: int) -> bytes:
        event = {
            "type": "BlockStored",
            "block_hashes": [number + 1 for number in range(first, first + count)],
            "parent_block_hash": first or None,
            "token_ids": list(range(first * BLOCK, (first + count) * BLOCK)),
            "block_size": BLOCK,
        }
        return msgpack.packb([1.0, [event], 0])

    def answer(publisher: Publisher, to: list[bytes], start: int) -> None:
        publisher.reply(to, struct.pack(">Q", publisher.sequence - 1), state(0, publisher.sequence))
        publisher.reply(to, END, b"")

    told: list[str] = []
    with Publisher() as publisher:
        publisher.answer = answer
        publisher.publish_raw(state(0, 1))
        with follow(publisher, lambda event: told.append(spell(event)), dialect="xllm") as engine:
            until(lambda: engine.wait_synchronized(0), publisher)
            assert told == ["+1"]
            publisher.publish_raw(state(1, 1), lose=True)
            publisher.publish_raw(state(2, 1))
            until(lambda: told == ["+1", "reset", "+1,2,3"], publisher)


def test_handler_that_raises_is_counted_and_called_again(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    def handle(event: Event | Reset) -> None:
        told.append(spell(event))
        raise RuntimeError("handler bug")

    with Publisher() as publisher, follow(publisher, handle) as engine:
        until(lambda: engine.link.connected, publisher)
        for number in range(3):
            publisher.publish(chain(number, 1))
        until(lambda: len(told) == 3, publisher)
        assert told == ["+1", "+2", "+3"]
        until(lambda: engine.handler_errors == 3)
        assert engine.link.faults == 0
    assert sum("handler failed" in record.message for record in caplog.records) == 1


def test_nothing_is_told_after_close_and_nothing_is_left() -> None:
    told: list[str] = []
    threads = threading.active_count()
    with Publisher() as publisher:
        engine = follow(publisher, lambda event: told.append(spell(event)))
        publisher.publish(chain(0, 1))
        until(lambda: told, publisher)
        engine.close()
        publisher.publish(chain(1, 1))
        settled(publisher, seconds=0.05)
        assert told == ["+1"], "no reset either: what was collected stays"
        assert engine.status is None
        engine.close()
    assert threading.active_count() == threads


def test_two_subscriptions_share_a_transport() -> None:
    one, two = [], []  # type: ignore[var-annotated]
    with Publisher() as first, Publisher() as second, EventTransport(OPTIONS) as transport:
        a = follow(first, one.append, options=None, transport=transport)
        b = follow(second, two.append, options=None, transport=transport)
        first.publish(chain(0, 1))
        second.publish(chain(0, 1), chain(1, 1))
        until(lambda: (len(one), len(two)) == (1, 2), first, second)
        a.close()
        assert (transport.alive, transport.streams) == (True, 1)
        b.close()
        assert transport.sockets == 0


@pytest.mark.parametrize(
    ("endpoint", "more", "words"),
    [
        ("tcp://*:5557", {}, "host"),
        ("tcp://h:5557", {"dialect": "klingon"}, "klingon"),
        ("tcp://h:5557", {"recovery": "history"}, "replay"),
    ],
)
def test_impossible_subscription(endpoint: str, more: dict[str, Any], words: str) -> None:
    threads = threading.active_count()
    with pytest.raises(ConfigurationError, match=words):
        subscribe(endpoint, print, limits=SyncLimits(), **more)
    assert threading.active_count() == threads


def test_public_names_are_there() -> None:
    assert all(hasattr(kvindex, name) for name in kvindex.__all__)
    assert set(kvindex.__all__) <= set(dir(kvindex))
    with pytest.raises(AttributeError, match="nonsense"):
        kvindex.nonsense  # noqa: B018


EXAMPLES = re.findall(
    r"```python\n(.*?)```", (Path(kvindex.__file__).parent / "README.md").read_text("utf-8"), flags=re.DOTALL
)
EXPECTED = {"subscribe(": "3 blocks after message 1", "Directory(": "engine-1 has 48 of 100 tokens"}


@pytest.mark.parametrize("opening", EXPECTED)
def test_readme_example(opening: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As printed, but for the ports."""
    (source,) = (one for one in EXAMPLES if opening in one)
    failures: list[BaseException] = []
    with Publisher() as publisher:
        assert "tcp://127.0.0.1:5557" in source
        source = source.replace("tcp://127.0.0.1:5557", publisher.endpoint)
        source = source.replace("tcp://127.0.0.1:5558", str(publisher.replay))
        for hashes, parent in (([1, 2], None), ([3], 2)):
            first = (hashes[0] - 1) * 16
            publisher.publish(
                ["BlockStored", hashes, parent, list(range(first, first + 16 * len(hashes))), 16, None, "GPU"]
            )

        def run() -> None:
            try:
                exec(compile(source, "kvindex/README.md", "exec"), {})
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        until(lambda: not thread.is_alive(), publisher)
    assert not failures
    assert EXPECTED[opening] in capsys.readouterr().out
