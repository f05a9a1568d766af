"""Every case file about events, malformed messages and replay framing, through the real StreamSync and PrefixIndex."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvindex.events import BlockStored
from kvindex.hashing import content_keys, pack_tokens
from kvindex.index import PrefixIndex
from kvindex.sync import State, SyncLimits
from tests.kvindex.casework import CASES, END, CaseDriver, Driven, load, number

EVENT_FILES = sorted((CASES / "events").glob("*.json"))
MALFORMED = load(CASES / "wire_malformed.json")
FRAMING = load(CASES / "replay_framing.json")


@pytest.mark.parametrize("path", EVENT_FILES, ids=lambda path: path.stem)
def test_events(path: Path) -> None:
    CaseDriver(load(path)).run()


def test_there_are_cases() -> None:
    assert len(EVENT_FILES) >= 35
    assert len(MALFORMED["cases"]) >= 11


# -- wire_malformed.json


def good(sequence: int, engine_hash: int, tokens: list[int], parent: int | None = None) -> list[bytes]:
    event = {
        "type": "BlockStored",
        "block_hashes": [engine_hash],
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return [b"kv", number(sequence), msgpack.packb([1.0, [event], 0])]


def hits(stream: Driven, tokens: list[int]) -> int:
    return sum(stream.index.find(content_keys(pack_tokens(tokens), 4)).get(stream.view, ())) * 4


def expect_outcome(stream: Driven, expected: list[str], payload: bytes | None) -> str:
    """Which of the allowed outcomes a bad message at sequence 1 had, after a good one at 0."""
    status = stream.sync.status
    if status.damaged:
        outcome = "rebuild"
        assert not status.synchronized
        assert hits(stream, OLD) == 0
        assert status.error
    elif status.skipped:
        outcome = "skip"
        assert status.synchronized
        assert status.sequence == 1
        assert hits(stream, OLD) == 4
        assert payload is not None
        for event in stream.sync.dialect.decode(payload).events:
            if isinstance(event, BlockStored):
                assert all(stream.view.knows(one) for one in event.hashes), "a sibling was not applied"
    else:
        outcome = "apply" if status.sequence == 1 else "ignore"
        assert status.synchronized
        assert hits(stream, OLD) == 4
    assert outcome in expected, status
    return outcome


OLD, NEW = [9, 8, 7, 6], [5, 4, 3, 2]


@pytest.mark.parametrize("recovery", ["none", "history"])
@pytest.mark.parametrize("case", MALFORMED["cases"], ids=lambda case: case["id"])
def test_malformed_payload(case: dict[str, Any], recovery: str) -> None:
    payload = bytes.fromhex(case["payload_hex"])
    run_malformed([b"kv", number(1), payload], case["expect"], payload, recovery)


@pytest.mark.parametrize("recovery", ["none", "history"])
@pytest.mark.parametrize("case", MALFORMED["frame_cases"], ids=lambda case: case["id"])
def test_malformed_frames(case: dict[str, Any], recovery: str) -> None:
    payload = good(1, 77, NEW)[2]
    frames = (
        [b"kv", number(1), payload, b"extra"][: case["frames"]] if "frames" in case else [b"kv", b"\0" * 7, payload]
    )
    run_malformed(frames, case["expect"], None, recovery)


def run_malformed(frames: list[bytes], expected: list[str], payload: bytes | None, recovery: str) -> None:
    first = good(0, 50, OLD)
    stream = Driven(PrefixIndex(block_size=4), recovery=recovery, topic="kv")
    if recovery == "history":
        stream.answer([[b"", first[1], first[2]], [b"", END, b""]])
    else:
        stream.live(first)
    assert hits(stream, OLD) == 4
    stream.live(frames)
    outcome = expect_outcome(stream, expected, payload)
    if outcome == "rebuild" and recovery == "history":
        # The same damage comes back in the replay: what follows it is a run of its own.
        start = stream.asked().start
        assert start == 0
        stream.answer([[b"", first[1], first[2]], [b"", number(1), frames[-1] if payload else b""], [b"", END, b""]])
        assert not stream.sync.status.synchronized
    stream.live(good(2, 60, NEW))
    status = stream.sync.status
    assert status.synchronized
    assert status.sequence == 2
    assert hits(stream, NEW) == 4
    assert status.complete == (outcome != "rebuild")
    assert hits(stream, OLD) == (0 if outcome == "rebuild" else 4)
    stream.index.check()


# -- replay_framing.json: last = 0, then a live frame 3 shows the gap

GAP = good(3, 90, [40, 41, 42, 43])
H0 = [101, 102, 103, 104]
CHAIN = [*H0, *range(105, 113)]


def replies_of(name: str) -> list[list[bytes]]:
    (case,) = [case for case in FRAMING["cases"] if case["id"] == name]
    return [[bytes.fromhex(part) for part in message] for message in case["replies"]]


def at_gap(*, limits: SyncLimits | None = None) -> Driven:
    """h0's engine hash is the parent that the first replayed frame names."""
    stream = Driven(PrefixIndex(block_size=4), recovery="history", topic="kv", limits=limits)
    event = next(iter(stream.sync.dialect.decode(replies_of("R01")[0][-1]).events))
    assert isinstance(event, BlockStored)
    assert event.parent is not None
    h0 = good(0, event.parent, H0)  # type: ignore[arg-type]
    stream.applied[0] = h0[2]
    stream.answer([[b"", h0[1], h0[2]], [b"", END, b""]])
    assert stream.sync.status.complete
    assert hits(stream, CHAIN) == 4
    stream.live(GAP)
    assert not stream.sync.status.synchronized
    assert hits(stream, CHAIN) == 0
    return stream


@pytest.mark.parametrize("with_last", [False, True], ids=["from the one after last", "from last"])
@pytest.mark.parametrize("framing", ["old", "with topic", "empty topic"])
def test_history_replies(framing: str, with_last: bool) -> None:
    """R01, in all three framings, whether the publisher sends our last frame again (it is asked to) or not."""
    stream = at_gap()
    replies = replies_of("R01")
    if with_last:
        replies.insert(0, [b"", number(0), stream.applied[0]])
    if framing != "old":
        topic = b"kv" if framing == "with topic" else b""
        replies = [[b"", b"" if one[-1] == b"" else topic, *one[1:]] for one in replies]
    stream.answer(replies)
    status = stream.sync.status
    assert status.synchronized
    assert status.complete
    assert status.sequence == 3
    assert hits(stream, CHAIN) == 12
    assert hits(stream, [40, 41, 42, 43]) == 4
    assert not stream.wanted, "the attempt is over: its socket has to be closed"


def test_bare_end_marker() -> None:
    """R03: the end, or an attempt that fails; never data."""
    stream = at_gap()
    stream.answer(replies_of("R03"))
    status = stream.sync.status
    assert status.synchronized
    assert (status.sequence, hits(stream, CHAIN)) == (3, 12)


def test_no_end_marker() -> None:
    """R06: times out, is asked again on a socket of its own, never credits h0 while 2 is missing."""
    stream = at_gap()
    first = stream.asked().attempt
    stream.answer(replies_of("R06"))
    assert hits(stream, CHAIN) == 0
    while stream.sync.state is State.FETCH:
        stream.expire()
    assert 5 <= stream.now < 5.2, "the last reply prolongs it"
    assert stream.sync.state is State.BACKOFF
    assert not stream.wanted, "the socket of the failed attempt has to be closed"
    stream.expire()
    again = stream.asked()
    assert again.attempt != first
    assert again.start == 1
    # what the abandoned attempt still sends is nothing to us
    stream.do(stream.sync.reply, first, [b"", END, b""])
    assert not stream.sync.status.synchronized
    stream.answer([one for one in replies_of("R01") if one[1] != number(0)])
    stream.live(good(3, 90, [40, 41, 42, 43]))
    assert stream.sync.status.synchronized
    assert hits(stream, CHAIN) == 12


def test_replay_overlaps_live() -> None:
    """R09: the frame that is in both is applied once. Its Removed would take two copies away otherwise."""
    stream = at_gap()
    replies = replies_of("R09")
    stream.sync._buffer[:] = [stream.sync._buffer[0]._replace(payload=replies[2][2])]
    again = next(iter(stream.sync.dialect.decode(replies[1][2]).events))
    assert isinstance(again, BlockStored)
    twice = msgpack.packb([1.0, [event_map(again), event_map(again)], 0])
    replies[1] = [b"", number(2), twice]
    stream.answer(replies)
    assert stream.sync.status.sequence == 3
    assert hits(stream, CHAIN) == 12, "one of two copies was removed: the block is resident"
    assert stream.sync.status.batches == 4


def event_map(event: BlockStored) -> dict[str, Any]:
    tokens = list(memoryview(event.tokens).cast("I"))
    return {
        "type": "BlockStored",
        "block_hashes": event.hashes,
        "parent_block_hash": event.parent,
        "token_ids": tokens,
        "block_size": event.block_size,
    }


def test_snapshot_reply() -> None:
    """R10: the view is replaced at watermark 12; the next live sequence is 13."""
    stream = Driven(PrefixIndex(block_size=4), engine="xllm", recovery="snapshot", topic="kv")
    stream.live(good(11, 5, OLD))
    stream.live(good(12, 6, NEW))
    stream.answer(replies_of("R10"))
    status = stream.sync.status
    assert status.complete
    assert status.sequence == 12
    assert (hits(stream, H0), hits(stream, OLD), hits(stream, NEW)) == (4, 0, 0)
    stream.live(good(13, 7, OLD))
    assert stream.sync.status.sequence == 13
    assert hits(stream, OLD) == 4


def test_replay_port_closed() -> None:
    """R12, vLLM: bounded attempts with back-off, then as without a replay endpoint."""
    stream = at_gap()
    waits: list[float] = []
    while stream.wanted:
        attempt = stream.asked().attempt
        stream.do(stream.sync.attempt_failed, attempt, "connection refused")
        due = stream.sync.next_timer
        waits.append(0.0 if due is None else round(due - stream.now, 3))
        if due is not None:
            assert stream.sync.status.error == "replay: connection refused"
            stream.expire()
    assert waits == [1.0, 2.0, 0.0]
    stream.live(good(4, 91, NEW))
    status = stream.sync.status
    assert status.synchronized
    assert not status.complete
    assert hits(stream, NEW) == 4
    assert hits(stream, CHAIN) == 0
    assert "incomplete" in (status.error or "")


def test_snapshot_port_closed() -> None:
    """R12, xLLM: stays unsynchronized, asks for ever, ever slower."""
    stream = Driven(PrefixIndex(block_size=4), engine="xllm", recovery="snapshot", topic="kv")
    waits = []
    for sequence in range(8):
        stream.do(stream.sync.attempt_failed, stream.asked().attempt, "connection refused")
        waits.append(round((stream.sync.next_timer or 0) - stream.now, 3))
        stream.live(good(sequence, sequence, NEW))
        assert not stream.sync.status.synchronized
        assert hits(stream, NEW) == 0
        stream.expire()
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
