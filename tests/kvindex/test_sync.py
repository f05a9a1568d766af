"""The rules of synchronisation as traces: what goes in, what the stream is after it.

A trace is words; sequence numbers are decimal, blocks are letters, each the first block of a prompt of its own.

    5ab    live message 5 that stores a and b            up     connected
    5~a    ... removes a                                 down   disconnected
    5!ab   ... clears, then stores a and b               again  reconnected
    5b<a   ... stores b as the child of a                go     the attempt's request went out
    5.     ... has no events                             end    end marker
    5x     ... cannot be decoded                         fail   the attempt's socket broke
    5?     ... has an event whose effect is lost         wait   time passes until the timer fires
    5*     ... has an event of an unknown kind           soon   a second passes
    5a'    the bytes differ from 5a                      ask    operator's resync
    r5a    the same as a reply of the attempt            r<9a   ... of the attempt before
    5#     ... is over max_message_bytes                 cut    a live message that lacks a frame

Outcome: state, last sequence, blocks credited; then `complete`, and `asked` with the start of each attempt so far.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvindex.dialects import DIALECTS, DialectOptions
from kvindex.events import AllBlocksCleared, BlockStored
from kvindex.hashing import content_keys, pack_tokens
from kvindex.index import Outcome, PrefixIndex
from kvindex.machine import ACTIONS
from kvindex.states import RULES, TABLE, Input, Recovery, State, markdown, parse
from kvindex.sync import Action, CancelReplay, StartReplay, StreamSync, SyncLimits

END = b"\xff" * 8
LETTERS = "abcdefgh"
HUGE = 1000


def tokens(letter: str) -> list[int]:
    return [ord(letter), 1000]


def stored(letter: str, parent: str | None = None) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [ord(letter)],
        "parent_block_hash": None if parent is None else ord(parent),
        "token_ids": tokens(letter),
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def removed(letter: str) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [ord(letter)], "medium": "GPU"}


def payload(what: str) -> bytes:
    stamp = 2.0 if what.endswith("'") else 1.0
    if what == "x":
        return b"\xc1"
    if what == "#":
        return bytes(HUGE)
    events: list[Any] = []
    for part in what.rstrip("'").split(","):
        if "<" in part:
            events.append(stored(part[0], part[2]))
            continue
        make: Callable[[str], dict[str, Any]] = stored
        for sign in part:
            if sign == "~":
                make = removed
            elif sign == "!":
                events.append({"type": "AllBlocksCleared"})
            elif sign == "?":
                events.append({"type": "BlockRemoved", "block_hashes": [None]})
            elif sign == "*":
                events.append({"type": "BlockMoved"})
            elif sign != ".":
                events.append(make(sign))
    return msgpack.packb([stamp, events, 0])  # type: ignore[no-any-return]


class Trace:
    def __init__(self, recovery: str, limits: SyncLimits | None = None, max_blocks: int = 100) -> None:
        self.index = PrefixIndex(block_size=2)
        dialect = DIALECTS["xllm" if recovery == "snapshot" else "vllm"](DialectOptions())
        self.view = self.index.open(walk=dialect.walk, max_blocks=max_blocks)
        self.sync = StreamSync(
            view=self.view,
            dialect=dialect,
            recovery=Recovery(recovery),
            dp_rank=0,
            topic=b"t",
            limits=limits or SyncLimits(max_message_bytes=HUGE - 1),
        )
        self.now = 100.0
        self.running: int | None = None
        self.asked: list[int] = []

    def play(self, words: str) -> Trace:
        for word in words.split():
            self.word(word)
        self.index.check()
        return self

    def word(self, word: str) -> None:
        sync, now = self.sync, self.now
        simple = {"up": sync.connected, "down": sync.disconnected, "again": sync.reconnected, "ask": sync.resync}
        if word in simple:
            self.do(simple[word](now))
        elif word == "go":
            self.do(sync.attempt_started(self.attempt, now))
        elif word == "end":
            self.do(sync.reply(self.attempt, [b"", END, b""], now))
        elif word == "fail":
            self.do(sync.attempt_failed(self.attempt, "it broke", now))
        elif word == "cut":
            self.do(sync.live([b"t", payload("a")], now))
        elif word == "soon":
            self.now += 1
        elif word == "wait":
            assert sync.next_timer is not None
            self.now = sync.next_timer
            self.do(sync.timer(self.now))
        else:
            match = re.fullmatch(r"(r<?)?(\d+)(\D+)", word)
            assert match is not None, word
            head, body = int(match[2]).to_bytes(8, "big"), payload(match[3])
            if match[1]:
                attempt = self.attempt - 1 if match[1] == "r<" else self.attempt
                self.do(sync.reply(attempt, [b"", head, body], now))
            else:
                self.do(sync.live([b"t", head, body], now))

    @property
    def attempt(self) -> int:
        assert self.running is not None, "no attempt runs"
        return self.running

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StartReplay):
                assert self.running is None, "two attempts at once"
                self.running = action.attempt
                self.asked.append(action.start)
            elif isinstance(action, CancelReplay):
                assert self.running == action.attempt
                self.running = None

    def hits(self) -> str:
        return "".join(one for one in LETTERS if self.index.find(content_keys(pack_tokens(tokens(one)), 2)))

    def outcome(self) -> str:
        status = self.sync.status
        words = [str(status.state), str(status.sequence), self.hits() or "-"]
        words += ["complete"] if status.complete else []
        words += ["asked", ",".join(map(str, self.asked))] if self.asked else []
        return " ".join(words)


ROWS = [
    # -- none
    ("none", "up", "empty None -"),
    ("none", "up 0a", "live 0 a complete"),
    ("none", "0a", "live 0 a complete"),
    ("none", "up 7a", "live 7 a"),
    ("none", "up 0. 1a 2b", "live 2 ab complete"),
    ("none", "up 0a 1~a", "live 1 - complete"),
    ("none", "up 0a 1b 1b", "live 1 ab complete"),
    ("none", "up 0a 1b 1b'", "live 1 b"),
    ("none", "up 0a 1b 1b 2~b", "live 2 a complete"),
    ("none", "up 0a 1b 0c", "live 0 c complete"),
    ("none", "up 3a 4b 2c", "live 2 c"),
    ("none", "up 0a 2b", "live 2 b"),
    ("none", "up 0a 1b<z 2z", "live 2 a complete"),
    ("none", "up 0a 1x", "empty None -"),
    ("none", "up 0a 1x 2b", "live 2 b"),
    ("none", "up 0a 1?b", "empty None -"),
    ("none", "up 0a 1?b 2c", "live 2 c"),
    ("none", "up 0a 1*b 2c", "live 2 abc complete"),
    ("none", "up 0x 1a", "live 1 a"),
    ("none", "up 0a down", "offline None -"),
    ("none", "up 0a down 1b", "offline None -"),
    ("none", "up 0a down again", "empty None -"),
    ("none", "up 0a down again 1b", "live 1 b"),
    ("none", "up 0a again 1b", "live 1 b"),
    ("none", "up 0a down again 0b", "live 0 b complete"),
    ("none", "up 0a ask 1b", "live 1 b"),
    ("none", "up 0a 1!b", "live 1 b complete"),
    # -- history: start
    ("history", "up", "fetch None - asked 0"),
    ("history", "5a", "fetch None - asked 0"),
    ("history", "up go r0a r1b end", "live 1 ab complete asked 0"),
    ("history", "up 2c go r0a r1b end", "live 2 abc complete asked 0"),
    ("history", "up 2c 3d go r0a r1b r2c end", "live 3 abcd complete asked 0"),
    ("history", "up go r3a r4b end", "live 4 ab asked 0"),
    ("history", "up go end", "empty None - asked 0"),
    ("history", "up go end 0a 1b", "live 1 ab complete asked 0"),
    ("history", "up go end 4a", "live 4 a asked 0"),
    ("history", "up 0a 1b go end", "live 1 ab complete asked 0"),
    ("history", "up 0a 2b 3c go end", "live 3 bc asked 0"),
    # -- history: gap
    ("history", "up go r0a end 1b 4e", "fetch 1 - asked 0,1"),
    ("history", "up go r0a end 1b 4e go r1b r2c r3d r4e r5f end", "live 5 abcdef complete asked 0,1"),
    ("history", "up go r0a end 1b 4e 5f go r1b r2c r3d end", "live 5 abcdef complete asked 0,1"),
    ("history", "up go r0a end 1b 4e go r2c r3d end", "live 4 abcde complete asked 0,1"),
    ("history", "up go r0a end 1b 4e go r3d end", "live 4 de asked 0,1"),
    ("history", "up go r0a end 1b 4e go r1b' ", "fetch None - asked 0,1,0"),
    ("history", "up go r0a end 1b 4e go r1b' go r0c r1b' r2. r3. end", "live 4 bce complete asked 0,1,0"),
    ("history", "up go r0a end 1b 4e go end", "fetch None - asked 0,1,0"),
    ("history", "up go r0a end 1b 4e go r0a r1b r2c r3d end", "live 4 abcde complete asked 0,1"),
    # -- history: holes, time-outs, attempts
    ("history", "up go r0a r2c", "backoff 0 - asked 0"),
    ("history", "up go r0a r2c 3d wait", "fetch 0 - asked 0,0"),
    ("history", "up go r0a r2c wait go r0a r1b r2c end", "live 2 abc complete asked 0,0"),
    ("history", "up go r0a r2c wait go r<9h r0a r1b end", "live 1 ab complete asked 0,0"),
    ("history", "up 3d go r0a r1b end", "backoff 1 - asked 0"),
    ("history", "up 1b 3d go r0a end", "backoff 1 - asked 0"),
    ("history", "up go wait", "backoff None - asked 0"),
    ("history", "up go r0a soon r1b wait", "fetch 1 - asked 0"),
    ("history", "up go r0a soon r1b wait wait", "backoff 1 - asked 0"),
    ("history", "up fail wait fail wait fail", "empty None - asked 0,0,0"),
    ("history", "up fail wait fail wait 4a 5b fail", "live 5 ab asked 0,0,0"),
    ("history", "up fail 4a wait fail 5b wait fail 6c", "live 6 c asked 0,0,0"),
    ("history", "up fail wait fail wait fail 4a 6b", "fetch 4 - asked 0,0,0,4"),
    ("history", "up go r1a r0b", "backoff 1 - asked 0"),
    ("history", "up go r0a r1b r1b end", "live 1 ab complete asked 0"),
    # -- history: what is late, double or from before
    ("history", "up go r0a r1b r2c end 1b 2c 3d", "live 3 abcd complete asked 0"),
    ("history", "up go r0a r1b r2c end 1b'", "fetch None - asked 0,0"),
    ("history", "up go r0a r1b end 2c 2c", "live 2 abc complete asked 0"),
    ("history", "up go r0a r1b r1b end 1b 2c 2c 3~b,~c", "live 3 a complete asked 0"),
    ("history", "up go r0a r1b end 2c 2c'", "fetch None - asked 0,0"),
    ("history", "up go r0a end 1b 0c", "fetch None - asked 0,0"),
    ("history", "up go r0a end 1b 0c go r0c end", "live 0 c complete asked 0,0"),
    ("history", "up 5a 6b 0c go r0c end", "live 0 c complete asked 0,0"),
    # -- history: damage
    ("history", "up go r0a end 1x", "fetch 0 - asked 0,0"),
    ("history", "up go r0a end 1x go r0a r1b end", "live 1 ab complete asked 0,0"),
    ("history", "up go r0a end 1?b go r0a r1?b end", "empty None - asked 0,0"),
    ("history", "up go r0a end 1?b 2c go r0a r1?b r2c end", "live 2 c asked 0,0"),
    ("history", "up go r0a r1x r2c end", "live 2 c asked 0"),
    ("history", "up go r0x r1b end", "live 1 b asked 0"),
    ("history", "up 2c go r0a r1x end", "live 2 c asked 0"),
    ("history", "up 1b 2? go r0a end", "backoff 1 - asked 0"),
    # -- history: damage while an attempt runs: it counts when it brings what was lost
    *(
        ("history", words.replace("LOST", lost), expected)
        for lost in ("1#", "1x", "1?")
        for words, expected in (
            ("up go r0ab LOST end", "backoff 0 - asked 0"),
            ("up go r0ab LOST r1~a end", "live 1 b complete asked 0"),
            ("up go r0ab LOST 2c end", "backoff 0 - asked 0"),
            ("up go r0ab LOST end wait go r0ab r1~a end", "live 1 b complete asked 0,0"),
            ("up go r0ab LOST end wait go r0ab end", "backoff 0 - asked 0,0"),
            ("up go r0ab LOST end wait fail wait fail", "backoff 0 - asked 0,0,0"),
            ("up go r0ab LOST end wait fail wait fail wait fail", "empty None - asked 0,0,0,0"),
            ("up LOST go r0ab fail wait fail wait fail wait LOST fail 2c", "live 2 c asked 0,0,0,0"),
            ("up 0a LOST go end", "empty None - asked 0"),
            ("up 0a LOST 2c go end", "live 2 c asked 0"),
            ("up go r0a end LOST go r0a end", "backoff 0 - asked 0,0"),
        )
    ),
    ("history", "up go r0a end 1b 0#", "fetch None - asked 0,0"),
    ("history", "up go r0a r1b end 1#", "fetch None - asked 0,0"),
    ("history", "up go r0ab cut", "backoff 0 - asked 0"),
    ("history", "up go r0ab cut wait go r0ab r1~a end", "live 1 b complete asked 0,0"),
    ("history", "up cut wait cut wait cut", "empty None - asked 0,0,0"),
    ("history", "up cut wait cut wait cut cut 3a", "live 3 a asked 0,0,0"),
    ("history", "up go r0a end cut", "fetch 0 - asked 0,0"),
    # -- history: connection
    ("history", "up go r0a end 1b down", "offline 1 - asked 0"),
    ("history", "up go r0a end 1b down again", "fetch 1 - asked 0,1"),
    ("history", "up go r0a end 1b again", "fetch 1 - asked 0,1"),
    ("history", "up go r0a end 1b down again go r1b r2c end", "live 2 abc complete asked 0,1"),
    ("history", "up go r0a end 1b down again go r1b' go r0c r1b' end 2d", "live 2 bcd complete asked 0,1,0"),
    ("history", "up go r0a end 1b down again go r2c end", "live 2 c asked 0,1"),
    ("history", "up go r0a end 1b down again 1c", "fetch None - asked 0,1,0"),
    ("history", "up go r0a end 1b down again 0c", "fetch None - asked 0,1,0"),
    ("history", "up go r0a end 1b down again 2c go r1b end", "live 2 abc complete asked 0,1"),
    ("history", "up go r0a end 1b down again fail wait go r2c end", "live 2 c asked 0,1,1"),
    ("history", "up down up go r0a end", "live 0 a complete asked 0,0"),
    ("history", "up go r0a down again go r0a r1b end", "live 1 ab complete asked 0,0"),
    ("history", "up go r0a end 1b ask", "fetch None - asked 0,0"),
    # -- snapshot
    ("snapshot", "up", "fetch None - asked 0"),
    ("snapshot", "7a", "fetch None - asked 0"),
    ("snapshot", "up go r12ab end", "live 12 ab complete asked 0"),
    ("snapshot", "up go r0. end", "live 0 - complete asked 0"),
    ("snapshot", "up go r12ab", "fetch None - asked 0"),
    ("snapshot", "up 11a 12~a 13b go r12c end", "live 13 bc complete asked 0"),
    ("snapshot", "up 14d go r12c end", "backoff None - asked 0"),
    ("snapshot", "up go r12a end 13b 14c", "live 14 abc complete asked 0"),
    ("snapshot", "up go r12a end 14b", "fetch None - asked 0,0"),
    ("snapshot", "up go r12a end 10h 11~a 12~a 13b", "live 13 ab complete asked 0"),
    ("snapshot", "up go r12a end 13b 12c", "fetch None - asked 0,0"),
    ("snapshot", "up go r12a end 13b 13b", "live 13 ab complete asked 0"),
    ("snapshot", "up go r12a end 13b 13b 14~b", "live 14 a complete asked 0"),
    ("snapshot", "up go r12a end 13b 13c", "fetch None - asked 0,0"),
    ("snapshot", "up go end", "backoff None - asked 0"),
    ("snapshot", "up go r12a r13b", "backoff None - asked 0"),
    ("snapshot", "up go r12x end", "backoff None - asked 0"),
    ("snapshot", "up go r12?a end", "backoff None - asked 0"),
    ("snapshot", "up go r12a wait", "backoff None - asked 0"),
    ("snapshot", "up go r12a wait wait go r<13b r12c end", "live 12 c complete asked 0,0"),
    ("snapshot", "up fail wait fail wait fail wait fail wait fail 1a", "backoff None - asked 0,0,0,0,0"),
    ("snapshot", "up go r12a,b<z end", "live 12 a complete asked 0"),
    ("snapshot", "up go r12a end 13b<z", "fetch None - asked 0,0"),
    ("snapshot", "up 13b<z go r12a end", "backoff None - asked 0"),
    ("snapshot", "up go r12a end 13x", "fetch None - asked 0,0"),
    ("snapshot", "up go r12a end 13x 14b go r14c end", "live 14 c complete asked 0,0"),
    # -- snapshot: damage while an attempt runs is covered by a watermark at or above it
    *(
        ("snapshot", words.replace("LOST", lost), expected)
        for lost in ("13#", "13x", "13?")
        for words, expected in (
            ("up LOST go r12a end", "backoff None - asked 0"),
            ("up LOST go r12a end wait go r13b end", "live 13 b complete asked 0,0"),
            ("up LOST go r12a end wait go r12a end", "backoff None - asked 0,0"),
            ("up go r12a end wait LOST", "fetch 12 - asked 0,0"),
            ("up go r12a end wait LOST go r12a end", "backoff 12 - asked 0,0"),
            ("up go r12a end wait LOST go r13b end 14c", "live 14 bc complete asked 0,0"),
            ("up go r12a end wait LOST 14c go r12a end", "backoff 12 - asked 0,0"),
        )
    ),
    ("snapshot", "up go r13a end 13#", "live 13 a complete asked 0"),
    ("snapshot", "up go r13a end 14b 13#", "fetch None - asked 0,0"),
    ("snapshot", "up 13!b?", "backoff None - asked 0"),
    ("snapshot", "up go r12a end wait 13!b?", "backoff 12 - asked 0,0"),
    ("snapshot", "up go cut", "backoff None - asked 0"),
    ("snapshot", "up go r12a end wait go cut", "backoff 12 - asked 0,0"),
    ("snapshot", "up go r12a end cut", "fetch None - asked 0,0"),
    ("snapshot", "up go r12a end down", "offline 12 - asked 0"),
    ("snapshot", "up go r12a end down again go r3b end 4c", "live 4 bc complete asked 0,0"),
    # -- snapshot: clear and stored is the whole content
    ("snapshot", "up 4a 5!bc", "live 5 bc complete asked 0"),
    ("snapshot", "5!bc 6d", "live 6 bcd complete"),
    ("snapshot", "up go r12a end 13b 20!c 21d", "live 21 cd complete asked 0"),
    ("snapshot", "up go r12a end 13b 3!c 4d", "live 4 cd complete asked 0"),
    ("snapshot", "up fail 5!bc", "live 5 bc complete asked 0"),
    ("snapshot", "up go r12a end 13!", "live 13 - complete asked 0"),
    ("snapshot", "up go r12a end 15!", "fetch None - asked 0,0"),
    ("snapshot", "up go r12a end 13!b?", "fetch None - asked 0,0"),
    # -- snapshot: resync beside the old view
    ("snapshot", "up go r12ab end wait", "resync 12 ab complete asked 0,0"),
    ("snapshot", "up go r12ab end ask", "resync 12 ab complete asked 0,0"),
    ("snapshot", "up go r12ab end wait 13c go r13a end", "live 13 a complete asked 0,0"),
    ("snapshot", "up go r12ab end wait 13c 14d go r13a end", "live 14 ad complete asked 0,0"),
    ("snapshot", "up go r12ab end wait 13c", "resync 13 abc complete asked 0,0"),
    ("snapshot", "up go r12ab end wait go r19c end 20d", "live 20 cd complete asked 0,0"),
    ("snapshot", "up go r12ab end wait fail 13c", "live 13 abc complete asked 0,0"),
    ("snapshot", "up go r12ab end wait go wait wait", "resync 12 ab complete asked 0,0,0"),
    ("snapshot", "up go r12ab end wait 14c", "fetch 12 - asked 0,0"),
    # -- snapshot: one from before what is there, or came, is dismissed, unless the live messages bridge the two
    ("snapshot", "up go r12ab end wait go r11a end", "live 12 ab complete asked 0,0"),
    ("snapshot", "up go r12ab end wait go r11a end wait go r12b end", "live 12 b complete asked 0,0,0"),
    ("snapshot", "up go r12ab end 13c wait go r12a end", "live 13 abc complete asked 0,0"),
    ("snapshot", "up go r12ab end 13c wait 14d go r12a end", "live 14 abcd complete asked 0,0"),
    ("snapshot", "up go r12ab end wait 13c 14d go r12a end", "live 14 acd complete asked 0,0"),
    ("snapshot", "up go r19ab end 13c wait go r15a end 20d", "live 20 abd complete asked 0,0"),
    ("snapshot", "up go r12ab end 13c<z go r12a end", "backoff None - asked 0,0"),
    ("snapshot", "up fail 13c wait go r12a end", "backoff None - asked 0,0"),
    ("snapshot", "up fail 13c wait go r13a end", "live 13 a complete asked 0,0"),
    ("snapshot", "up go r12ab end 13c down again go r2a end", "live 2 a complete asked 0,0"),
    ("snapshot", "up go r12ab end wait 14c go r13a end", "live 14 ac complete asked 0,0"),
    ("snapshot", "up go r12ab end wait 13c<z", "fetch 13 - asked 0,0"),
    ("snapshot", "up go r12ab end wait 13? go r13a end", "live 13 a complete asked 0,0"),
    ("snapshot", "up go r12ab end wait 13c 12d", "fetch None - asked 0,0,0"),
    ("snapshot", "up go r12ab end wait 30!c", "live 30 c complete asked 0,0"),
    ("snapshot", "up go r12ab end wait down again", "fetch None - asked 0,0,0"),
]


@pytest.mark.parametrize(("recovery", "words", "expected"), ROWS, ids=[f"{row[0]}: {row[1]}" for row in ROWS])
def test_trace(recovery: str, words: str, expected: str) -> None:
    trace = Trace(recovery).play(words)
    assert trace.outcome() == expected, trace.sync.status
    assert trace.sync.synchronized == expected.startswith(("live", "resync"))
    error = trace.sync.status.error
    assert bool(error) != trace.sync.synchronized or "resync failed" in str(error) or "incomplete" in str(error), error


# -- the table


def test_every_input_has_an_answer_in_every_state() -> None:
    for recovery in Recovery:
        for state in State:
            assert set(RULES[recovery][state]) == set(Input)
            for action in RULES[recovery][state].values():
                assert action == "-" or action in ACTIONS
    used = {action for states in RULES.values() for row in states.values() for action in row.values()}
    assert used - {"-"} == set(ACTIONS)
    assert all(action.__doc__ for action in ACTIONS.values())


def test_a_table_with_a_hole_is_refused() -> None:
    lines = TABLE.strip().splitlines()
    with pytest.raises(ValueError, match="no answer"):
        parse("\n".join(lines[:-1]))
    with pytest.raises(ValueError, match="twice"):
        parse("\n".join([*lines, lines[-1]]))


def test_table_is_drawn() -> None:
    drawn = markdown().splitlines()
    assert len(drawn) == len(Input) + 2
    assert all(line.count("|") == 8 for line in drawn)


@pytest.mark.parametrize("recovery", ["none", "history", "snapshot"])
def test_every_input_in_every_state(recovery: str) -> None:
    """None raises, whatever the state; a retired stream does nothing."""
    ways = {
        "none": ["up", "0a", "0a down"],
        "history": ["", "up", "up go r0a end 1b", "up fail", "up go r0a end down", "up go end", "up go r0a"],
        "snapshot": ["", "up", "up go r3a end", "up go r3a end ask", "up fail", "up down", "up go r3a"],
    }
    inputs = "up down again 0a 1b 2c 3a 3a' 4d 5e 9! 9!ab 4x 4? 4* 4b<z go end fail r0a r3a r4b wait ask r<7a".split()
    for way in ways[recovery]:
        for word in inputs:
            trace = Trace(recovery).play(way)
            if word in ("go", "end", "fail") or word.startswith("r"):
                trace.running = trace.running or 99
            if word == "wait":
                trace.do(trace.sync.timer(1e9))
            elif word == "again":
                trace.play("again")
            else:
                trace.word(word)
            trace.index.check()
            trace.do(trace.sync.retire())
            assert trace.sync.state is State.RETIRED
            assert trace.sync.next_timer is None
            assert trace.hits() == ""
            trace.running = 99
            for after in inputs:
                if after == "wait":
                    assert trace.sync.timer(1e9) == []
                else:
                    trace.word(after)
            assert trace.sync.state is State.RETIRED
            assert trace.hits() == ""


# -- frames


def frame(sequence: int, what: str) -> list[bytes]:
    return [b"t", sequence.to_bytes(8, "big"), payload(what)]


def test_foreign_topic_is_ignored() -> None:
    """SUBSCRIBE matches prefixes: the whole topic counts. Nothing moves, and a stream that hears only this says so."""
    trace = Trace("none")
    trace.sync.live([b"tt", *frame(0, "a")[1:]], 1.0)
    trace.sync.live([b"tt", b"broken"], 1.0)
    assert trace.outcome() == "empty None -"
    status = trace.sync.status
    assert (status.foreign, status.damaged) == (2, 0)
    assert "'tt'" in str(status.error)
    assert "'t'" in str(status.error)
    trace.play("up 0a")
    trace.sync.live([b"other", *frame(9, "b")[1:]], 1.0)
    trace.play("1b")
    assert trace.outcome() == "live 1 ab complete"
    assert trace.sync.status.error is None


def test_any_topic() -> None:
    """Of a stream whose topic nobody has told."""
    trace = Trace("none")
    trace.sync.topic = None
    trace.play("up 0a")
    trace.sync.live([b"kv-events", *frame(1, "b")[1:]], 1.0)
    assert trace.outcome() == "live 1 ab complete"
    assert trace.sync.status.foreign == 0


def test_end_marker_on_the_live_channel() -> None:
    """Never applied, never a watermark."""
    trace = Trace("none").play("up 0a")
    assert trace.sync.live([b"t", END, payload("b")], 1.0) == []
    trace.play("1c")
    assert trace.outcome() == "live 1 ac complete"
    assert trace.sync.status.skipped == {"end_marker": 1}


@pytest.mark.parametrize(
    "frames", [[], [b"t"], [b"t", b"x"], [b"t", b"\0" * 7, b""], [b"t", b"\0" * 9, b""], [b"t"] * 4]
)
def test_broken_framing_loses_the_message(frames: list[bytes]) -> None:
    trace = Trace("none").play("up 0a")
    trace.do(trace.sync.live(frames, 1.0))
    assert trace.outcome() == "empty None -"
    assert trace.sync.status.damaged == 1


def test_wrong_rank_is_refused() -> None:
    trace = Trace("none").play("up 0a")
    trace.do(trace.sync.live([b"t", (1).to_bytes(8, "big"), msgpack.packb([1.0, [], 3])], 1.0))
    assert trace.outcome() == "empty None -"
    assert "rank 3" in str(trace.sync.status.error)
    assert "rank 0" in str(trace.sync.status.error)


def test_largest_sequence_numbers() -> None:
    trace = Trace("none")
    top = 2**64 - 2
    trace.do(trace.sync.live([b"t", (top - 1).to_bytes(8, "big"), payload("a")], 1.0))
    trace.do(trace.sync.live([b"t", top.to_bytes(8, "big"), payload("b")], 1.0))
    trace.do(trace.sync.live([b"t", END, payload("c")], 1.0))
    assert trace.outcome() == f"live {top} ab"


# -- bounds, each tiny


def test_message_over_the_limit() -> None:
    size = len(payload("a"))
    limits = SyncLimits(max_message_bytes=size)
    assert Trace("none", limits).play("up 0a 1ab").outcome() == "empty None -"
    trace = Trace("history", limits).play("up go r0a r1ab")
    assert trace.outcome() == "backoff 0 - asked 0"
    assert "max_message_bytes" in str(trace.sync.status.error)
    trace = Trace("snapshot", limits).play("up go r9ab")
    assert trace.outcome() == "backoff None - asked 0"


@pytest.mark.parametrize("recovery", ["history", "snapshot"])
def test_buffer_over_the_limit(recovery: str) -> None:
    trace = Trace(recovery, SyncLimits(max_buffered_bytes=2000)).play("up 5a 6b 7c")
    for sequence in range(8, 40):
        if trace.running is not None:
            trace.word(f"{sequence}d")
        assert trace.sync.status.buffered_bytes <= 2000
    assert trace.outcome() == "backoff None - asked 0"
    assert "max_buffered_bytes" in str(trace.sync.status.error)


def test_snapshot_over_the_buffer() -> None:
    trace = Trace("snapshot", SyncLimits(max_buffered_bytes=100)).play("up go r9ab")
    assert trace.outcome() == "backoff None - asked 0"


def test_resync_over_the_buffer_keeps_the_old_view() -> None:
    trace = Trace("snapshot", SyncLimits(max_buffered_bytes=1500)).play("up go r9a end wait 10b 11c 12d 13e")
    assert trace.outcome().startswith("live 13 abcde complete")
    assert "resync failed" in str(trace.sync.status.error)


@pytest.mark.parametrize(
    ("recovery", "words", "expected"),
    [
        ("none", "up 0a 1b 2c", "empty None -"),
        ("none", "up 0a 1b 2c 3d", "live 3 d"),
        ("history", "up go r0a end 1b 2c", "backoff None - asked 0"),
        ("history", "up go r0a r1b r2c", "backoff None - asked 0"),
        ("history", "up go r0a r1b r2c wait go r0a r1b r2c wait go r0a r1b r2c", "backoff None - asked 0,0,0"),
        ("snapshot", "up go r9abc end", "backoff None - asked 0"),
        ("snapshot", "up go r9a end 10b 11c", "backoff None - asked 0"),
        ("snapshot", "up go r9ab end wait go r12abc end", "live 9 ab complete asked 0,0"),
        ("snapshot", "up go r9ab end 10!abc", "fetch None - asked 0,0"),
    ],
)
def test_too_many_blocks(recovery: str, words: str, expected: str) -> None:
    trace = Trace(recovery, max_blocks=2).play(words)
    assert trace.outcome() == expected
    if not expected.startswith("live 3"):
        assert "max_blocks" in str(trace.sync.status.error)


# -- pacing of recovery


def test_back_off_doubles_up_to_its_limit() -> None:
    trace = Trace("snapshot", SyncLimits(backoff_initial=1, backoff_max=6)).play("up")
    waits = []
    for _ in range(6):
        trace.play("fail")
        waits.append((trace.sync.next_timer or 0) - trace.now)
        trace.play("wait")
    assert waits == [1, 2, 4, 6, 6, 6]
    trace.play("go r9a end 11b fail")
    assert (trace.sync.next_timer or 0) - trace.now == 1, "a success starts it anew"


def test_the_time_out_runs_from_the_start_of_the_attempt() -> None:
    """Waiting for a place among the replays that may run at once is no failure."""
    trace = Trace("history").play("up")
    assert trace.sync.next_timer is None
    trace.now += 1000
    trace.play("go")
    assert trace.sync.next_timer == trace.now + 5
    assert Trace("snapshot").play("up go").sync.next_timer == 102
    assert Trace("snapshot", SyncLimits(replay_timeout=7)).play("up go").sync.next_timer == 107


def test_a_history_that_goes_on_for_ever_is_cut_off() -> None:
    trace = Trace("history").play("up go r0a")
    for sequence in range(1, 200):
        trace.now += 3
        if trace.running is None:
            break
        trace.play(f"r{sequence}.")
        while trace.sync.next_timer is not None and trace.sync.next_timer <= trace.now and trace.running:
            trace.do(trace.sync.timer(trace.now))
    assert trace.sync.state is State.BACKOFF
    assert trace.now < 200


def test_lossy_replays_come_through() -> None:
    """Each attempt brings a part and has a hole. What was brought is kept; more than three are needed."""
    trace = Trace("history").play("up")
    for hole in range(2, 12, 2):
        trace.play(f"go r{max(0, hole - 2)}. ")
        for sequence in range(max(0, hole - 2) + 1, hole + 1):
            trace.play(f"r{sequence}.")
        trace.play(f"r{hole + 2}. wait")
    trace.play("go r10. r11a end")
    assert trace.outcome() == "live 11 a complete asked 0,2,4,6,8,10"


def test_damage_over_and_over_does_not_ask_over_and_over() -> None:
    trace = Trace("history").play("up go r0. end")
    for sequence in range(1, 40, 2):
        trace.play(f"{sequence}?")
        if trace.running is not None:
            start = trace.asked[-1]
            trace.play(f"go r{start}{'a' if start else '.'} r{sequence}? end")
        trace.play(f"{sequence + 1}a")
        assert trace.sync.synchronized
    assert len(trace.asked) <= 5


def test_unknown_parents_over_and_over_do_not_ask_over_and_over() -> None:
    trace = Trace("snapshot").play("up go r0. end")
    for sequence in range(1, 60, 2):
        trace.play(f"{sequence}a<z")
        if trace.running is not None:
            trace.play(f"go r{sequence + 1}. end")
        elif trace.sync.next_timer is not None and trace.sync.next_timer <= trace.now:
            trace.play("wait")
        trace.now += 0.1
    assert len(trace.asked) <= 8


def test_what_came_by_replay_is_known_again_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvindex.machine.REMEMBERED", 3)
    trace = Trace("history").play("up go r0a r1b r2c r3d r4e end 2c")
    assert trace.outcome() == "live 4 abcde complete asked 0"
    assert len(trace.sync._replayed) == 3
    assert Trace("history").play("up go r0a r1b r2c r3d r4e end").play("1b").outcome().startswith("fetch")


# -- large messages


def test_large_message_with_a_bad_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its events are decoded one by one: the damage may be found after some were applied. None is ever credited."""
    bad = msgpack.packb([1.0, [stored("b"), stored("c"), {"type": "BlockStored", "block_hashes": "x"}], 0])
    worse = msgpack.packb(
        [1.0, [stored("b"), {"type": "AllBlocksCleared", "\udcff": 1}], 0], unicode_errors="surrogateescape"
    )
    monkeypatch.setattr("kvindex.dialects.wire.EAGER_BYTES", 0)
    for body in (bad, worse, bad[:-30], bad + b"\0"):
        head = (1).to_bytes(8, "big")
        trace = Trace("none").play("up 0a")
        trace.do(trace.sync.live([b"t", head, body], 1.0))
        assert trace.outcome() == "empty None -"
        assert trace.play("2d").outcome() == "live 2 d"
        trace = Trace("history").play("up go r0a end")
        trace.do(trace.sync.live([b"t", head, body], 1.0))
        assert trace.hits() == ""
        trace.play("go r0a r1b r2c end")
        assert trace.outcome().startswith("live 2 abc complete asked 0,0")
        trace = Trace("snapshot").play("up go r0a end")
        trace.do(trace.sync.live([b"t", head, body], 1.0))
        assert trace.hits() == ""
        trace = Trace("snapshot").play("up go r0a end wait go")
        trace.do(trace.sync.reply(trace.attempt, [b"", head, body], trace.now))
        trace.play("end")
        assert trace.outcome() == "live 0 a complete asked 0,0"
        trace.index.check()


def test_large_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvindex.dialects.wire.EAGER_BYTES", 0)
    assert Trace("snapshot").play("up 4a 5!bc").outcome() == "live 5 bc complete asked 0"
    assert Trace("snapshot").play("up go r9ab end wait 10c go r9a end").outcome() == "live 10 ac complete asked 0,0"


# -- status, ownership


def test_status_counts() -> None:
    trace = Trace("history").play("up go r0a r1b end 1b 2*c 5d go r2*c r3. r4. r5d end 6e 6e 3a")
    status = trace.sync.status
    assert status.state is State.FETCH
    assert (status.gaps, status.missed, status.restarts, status.duplicates, status.late) == (1, 2, 1, 2, 0)
    assert (status.replays, status.replay_failures, status.batches) == (3, 0, 7)
    assert status.events == {"BlockStored": 5, "BlockRemoved": 0, "AllBlocksCleared": 0}
    assert status.skipped == {"unknown_tag": 1}
    with pytest.raises(AttributeError):
        status.gaps = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        status.skipped["x"] = 1  # type: ignore[index]


def test_times_and_blocks_in_the_status() -> None:
    trace = Trace("none").play("up")
    assert trace.sync.status.last_event_at is None
    trace.play("0a soon 1c,b<z")
    status = trace.sync.status
    assert (status.last_event_at, status.timestamp) == (101.0, 1.0)
    assert (status.blocks.device, status.known, status.unanchored) == (2, 3, 1)


def test_retire_leaves_the_view_to_its_owner() -> None:
    trace = Trace("snapshot").play("up go r9a end wait go r10b")
    trace.do(trace.sync.retire())
    assert trace.running is None, "the attempt's socket is to be closed"
    assert not trace.view.closed
    assert trace.hits() == ""
    trace.view.close()
    assert trace.sync.retire() == []
    trace.index.check()


def test_a_client_may_pass_a_view_of_its_own() -> None:
    class Printing:
        def __init__(self) -> None:
            self.visible = False
            self.seen: list[Any] = []

        def apply(self, event: Any) -> Outcome:
            self.seen.append(event)
            return Outcome.OK

        def clear(self) -> None:
            self.seen.append("clear")

        def shadow(self) -> Any:
            raise NotImplementedError

        def swap(self, shadow: Any) -> None:
            raise NotImplementedError

    view = Printing()
    sync = StreamSync(
        view=view, dialect=DIALECTS["auto"](DialectOptions()), recovery=Recovery.NONE, dp_rank=0, topic=b"t"
    )
    for sequence, what in ((0, "a"), (1, "!b"), (3, "c")):
        sync.live(frame(sequence, what), 1.0)
    kinds = [one if isinstance(one, str) else type(one) for one in view.seen]
    assert kinds == [BlockStored, AllBlocksCleared, BlockStored, "clear", BlockStored]
    assert sync.status.synchronized
    assert sync.status.blocks == (0, 0, 0)


# -- documentation


def test_readme_shows_the_table_that_runs() -> None:
    text = (Path(__file__).parent.parent.parent / "kvindex" / "README.md").read_text(encoding="utf-8")
    assert markdown() in text


@pytest.mark.parametrize("recovery", ["none", "history"])
def test_blocks_of_a_group_that_turns_out_not_to_count(recovery: str) -> None:
    """A late joiner sees a host copy of a group first, and then that it is a sliding window's: it was never one."""
    trace = Trace(recovery, SyncLimits())
    host = {**stored("a"), "token_ids": [], "block_size": 0, "medium": "CPU", "group_idx": 1}
    full = {**stored("a"), "group_idx": 2, "kv_cache_spec_kind": "full_attention"}
    messages = [[host, full], [{**stored("a"), "group_idx": 1, "kv_cache_spec_kind": "sliding_window"}], [full]]
    bodies = [msgpack.packb([1.0, events, 0]) for events in messages]
    heads = [number.to_bytes(8, "big") for number in (4, 5, 6)]
    keys = content_keys(pack_tokens(tokens("a")), 2)

    def found() -> tuple[int, ...]:
        return tuple(trace.index.find(keys).get(trace.view, (0, 0, 0)))

    def whole() -> None:
        for head, body in zip(heads, bodies, strict=True):
            trace.do(trace.sync.reply(trace.attempt, [b"", head, body], trace.now))
        trace.do(trace.sync.reply(trace.attempt, [b"", END, b""], trace.now))

    trace.play("up")
    if recovery == "history":
        trace.play("go")
        heads, bodies, rest = heads[:1], bodies[:1], (heads[1:], bodies[1:])
        whole()
        assert found() == (1, 0, 0)
        trace.do(trace.sync.live([b"t", rest[0][0], rest[1][0]], trace.now))
        assert found() == (0, 0, 0)
        assert trace.asked[-1] == 0, "what was built is void"
        heads, bodies = heads + rest[0], bodies + rest[1]
        trace.play("go")
        whole()
    else:
        for head, body in zip(heads, bodies, strict=True):
            trace.do(trace.sync.live([b"t", head, body], trace.now))
    gone = msgpack.packb([1.0, [{**removed("a"), "group_idx": 2}] * 2, 0])
    assert found() == (1, 0, 0)
    trace.do(trace.sync.live([b"t", (7).to_bytes(8, "big"), gone], trace.now))
    assert found() == (0, 0, 0)
    trace.index.check()
