"""Which connection frames belong to: every row is what the socket monitor and the queue can tell in one look."""

from __future__ import annotations

import random

import pytest

from kvindex.link import Event, Link, Told, Verdict

C, R, A, H, D = Event.CONNECTING, Event.RETRYING, Event.ACCEPTED, Event.HANDSHAKE, Event.DISCONNECTED
UP, DOWN, AGAIN = Told.CONNECTED, Told.DISCONNECTED, Told.RECONNECTED

Look = tuple[list[Event], bool, Verdict]
"""Events that came after a batch was read, whether that read found the queue empty, the answer."""

MET: Look = ([C, H], True, Verdict((UP,), True, (), False))

LOOKS: dict[str, list[Look]] = {
    "first connection keeps its frames": [([C], True, Verdict()), MET, ([], True, Verdict())],
    "more frames waiting: look again": [MET, ([], False, Verdict(again=True)), ([], True, Verdict())],
    "lost: its last frames are read before sync hears": [
        MET,
        ([D, R], True, Verdict(again=True)),
        ([], False, Verdict(again=True)),
        ([], True, Verdict(after=(DOWN,))),
        ([C, H], True, Verdict((AGAIN,))),
        ([], True, Verdict()),
    ],
    "back before the last frames were read": [
        MET,
        ([D, R], False, Verdict(again=True)),
        ([C, H], True, Verdict(keep=False, again=True)),
        ([], True, Verdict(keep=False, after=(DOWN, AGAIN))),
        ([], True, Verdict()),
    ],
    "lost and back between two looks: everything up to an empty queue is thrown away": [
        MET,
        ([D, R, C, H], False, Verdict(keep=False, again=True)),
        ([], False, Verdict(keep=False, again=True)),
        ([], True, Verdict(keep=False, after=(DOWN, AGAIN))),
        ([], True, Verdict()),
    ],
    "an empty queue before the news proves nothing": [
        MET,
        ([D, R, C, H], True, Verdict(keep=False, again=True)),
        ([], True, Verdict(keep=False, after=(DOWN, AGAIN))),
    ],
    "back twice while throwing away": [
        MET,
        ([D, R, H], False, Verdict(keep=False, again=True)),
        ([D, R, H], True, Verdict(keep=False, again=True)),
        ([], True, Verdict(keep=False, after=(DOWN, AGAIN))),
    ],
    "lost again while throwing away": [
        MET,
        ([D, R, H], False, Verdict(keep=False, again=True)),
        ([D, R], True, Verdict(keep=False, again=True)),
        ([], True, Verdict(keep=False, after=(DOWN,))),
        ([H], False, Verdict((AGAIN,), again=True)),
        ([], True, Verdict()),
    ],
    "back and lost in one look": [
        MET,
        ([D, R], True, Verdict(again=True)),
        ([], True, Verdict(after=(DOWN,))),
        ([H, D, R], True, Verdict((AGAIN,), again=True)),
        ([], True, Verdict(after=(DOWN,))),
    ],
    "first connection, lost and back in one look": [
        ([H, D, R, H], True, Verdict((UP,), False, (), True)),
        ([], True, Verdict(keep=False, after=(DOWN, AGAIN))),
    ],
    "failed tries are no connection": [([C, R, C, D, R], True, Verdict()), MET],
}


@pytest.mark.parametrize("looks", LOOKS.values(), ids=LOOKS)
def test_looks(looks: list[Look]) -> None:
    link = Link()
    for number, (events, drained, expected) in enumerate(looks):
        for event in events:
            link.event(event)
        assert link.judge(drained) == expected, f"look {number}"


def test_deaf_socket_is_noticed() -> None:
    """After a protocol error libzmq does not retry: `lost` stays."""
    link = Link()
    for event, lost in [(C, False), (D, True), (R, False), (C, False), (H, False), (D, True)]:
        link.event(event)
        assert link.lost is lost
        link.judge(False)
    link.replaced()
    assert not link.lost
    link.event(H)
    assert link.judge(True) == Verdict((DOWN, AGAIN)), "a new socket's first connection is a reconnection for sync"


def test_bound_socket_is_down_when_the_last_peer_is_gone() -> None:
    link = Link(bind=True)
    link.event(A, 7)
    link.event(H)
    assert link.judge(True) == Verdict((UP,))
    link.event(A, 8)
    link.event(H)
    link.judge(True)
    assert link.judge(True).after == (DOWN, AGAIN)
    link.event(D, 7)
    assert link.up
    assert link.judge(True) == Verdict()
    link.event(D, 8)
    assert not link.up
    assert not link.lost, "the peer has to come back, the socket is fine"
    assert link.judge(True).again
    assert link.judge(True).after == (DOWN,)


def test_random_histories_never_mix_connections() -> None:
    """A queue in which connections follow each other; sync must never get frames of two without hearing so between."""
    for seed in range(300):
        rng = random.Random(seed)
        link = Link()
        queue: list[int] = []
        news: list[Event] = []
        connection, up = 0, False
        heard: int | None = None  # the connection sync believes in
        told, kept = 0, 0
        for _ in range(150):
            read = [queue.pop(0) for _ in range(min(len(queue), rng.randrange(6)))]
            drained = not queue
            for _ in range(rng.randrange(5)):  # the world goes on between reading frames and reading the monitor
                step = rng.random()
                if up and step < 0.6:
                    queue.append(connection)
                elif up and step < 0.8:
                    up = False
                    news += [D, R]
                elif not up:
                    connection, up = connection + 1, True
                    news.append(H)
            for event in news:
                link.event(event)
            news.clear()
            verdict = link.judge(drained)
            told += verdict.before.count(Told.CONNECTED)
            if verdict.before:
                heard = None
            if verdict.keep:
                kept += len(read)
                for frame in read:
                    assert heard in (None, frame), f"seed {seed}: frames of {heard} and {frame} in one run"
                    heard = frame
            if verdict.after:
                heard = None
        assert told == 1
        assert kept > 0
