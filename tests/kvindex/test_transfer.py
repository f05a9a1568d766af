"""Views handed from replica to replica: content survives the way, and a stream takes only what is provably its own.

`KVCAR_SEEDS=N` runs N seeds instead of 60.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from kvindex.dialects import DIALECTS, DialectOptions
from kvindex.errors import CapacityExceeded, DecodeError
from kvindex.events import BlocksMapped, BlockStored, Tier
from kvindex.hashing import DEFAULT_SEED
from kvindex.index import PrefixIndex, StreamView, Walk
from kvindex.sync import Recovery, StreamSync, SyncLimits
from kvindex.transfer import Header, pack, unpack
from tests.kvindex.engine_model import BLOCK, KEYS, TOPIC, Engine, Message, walk
from tests.kvindex.index_model import EventMaker, chain_keys
from tests.kvindex.test_sync import Trace, payload

SEEDS = int(os.environ.get("KVCAR_SEEDS", "60"))


def header(sequence: int = 0, complete: bool = True, recent: tuple[tuple[int, int], ...] = ()) -> Header:
    return Header("engine", 0, "1", 2, DEFAULT_SEED, sequence, complete, recent)


def copy(view: StreamView, index: PrefixIndex) -> StreamView:
    """Over the wire into another index."""
    taken = index.open(walk=view.walk)
    _, events = unpack(pack(header(), view.dump()))
    taken.fill(events)
    taken.visible = True
    return taken


@pytest.mark.parametrize("seed", range(SEEDS))
def test_content_survives_the_way(seed: int) -> None:
    """Also what comes after: further events mean the same to both."""
    rng = random.Random(seed)
    here, there = PrefixIndex(block_size=2), PrefixIndex(block_size=2)
    makers = EventMaker(rng)
    view = here.open(walk=rng.choice(list(Walk)))
    view.visible = True
    other = there.open(walk=Walk.CASCADE)  # somebody else's blocks share the rows
    for _ in range(rng.choice((0, 5, 80))):
        view.apply(makers.event())
        other.apply(makers.event())
    taken = copy(view, there)
    there.check()
    assert (taken.blocks, taken.known) == (view.blocks, view.known)
    equal = not view.unanchored  # the tokens of such blocks do not travel
    for _ in range(30):
        for chain in (makers.chain() for _ in range(4)):
            keys = chain_keys(chain, 2)
            mine, his = here.find(keys).get(view), there.find(keys).get(taken)
            if equal:
                assert mine == his
            elif his is not None:
                assert sum(mine or ()) >= sum(his), "never more than the giver knows"
        event = makers.event()
        view.apply(event)
        taken.apply(event)
        equal = equal and not view.unanchored
        there.check()


def test_runs_stay_together() -> None:
    index, other = PrefixIndex(block_size=2), PrefixIndex(block_size=2)
    view = index.open(walk=Walk.CASCADE)
    view.visible = True
    count = 3000
    tokens = b"".join(number.to_bytes(4, "little") for number in range(2 * count))
    view.apply(BlockStored(list(range(count)), None, tokens, 2))
    events = list(view.dump())
    assert len(events) <= count / 64 + 5, "neighbours travel together"
    taken = copy(view, other)
    keys = [key for event in events for key in event.keys]
    assert other.find(keys) == {taken: (count, 0, 0)}


def test_bounds_hold() -> None:
    index = PrefixIndex(block_size=2)
    view = index.open(walk=Walk.CASCADE, max_blocks=3, name="small")
    with pytest.raises(CapacityExceeded, match="max_blocks=3"):
        view.fill([BlocksMapped([1, 2, 3, 4], [bytes([n]) * 16 for n in range(4)], ((Tier.DEVICE, 0, 1),))])
    view.clear()
    index.check()


BAD: list[tuple[str, bytes]] = [
    ("empty", b""),
    ("no header", b"\xc0"),
    ("another version", pack(header(), [])[:1] + b"\x63" + pack(header(), [])[2:]),
    ("cut", pack(header(), [])[:-1]),
    ("more behind the end", pack(header(), []) + b"\xc0"),
    ("wrong count", pack(header(), [])[:-1] + b"\x07"),
    ("negative rank", pack(header()._replace(dp_rank=-1), [])),
    ("keys too short", pack(header(), [BlocksMapped([1, 2], [b"k" * 16], ((Tier.DEVICE, 0, 1),))])),
    ("no copies", pack(header(), [BlocksMapped([1], [b"k" * 16], ())])),
    ("a hash of text", pack(header(), [BlocksMapped(["x"], [b"k" * 16], ((Tier.DEVICE, 0, 1),))])),  # type: ignore[list-item]
    ("messages above its end", pack(header(3, True, ((3, 1), (4, 2))), [])),
    ("no block size", pack(header()._replace(block_size=0), [])),
    ("half a copy", pack(header(), [BlocksMapped([1], [b"k" * 16], ((Tier.DEVICE, 0, 1.5),))])),  # type: ignore[arg-type]
    ("a bool for a tier", pack(header(), [BlocksMapped([1], [b"k" * 16], ((True, 0, 1),))])),  # type: ignore[arg-type]
    ("a group out of range", pack(header(), [BlocksMapped([1], [b"k" * 16], ((Tier.DEVICE, 1 << 16, 1),))])),
    ("copies twice", pack(header(), [BlocksMapped([1], [b"k" * 16], ((Tier.DEVICE, 0, 2**32 - 1),) * 2)])),
    ("a tier that is none", pack(header(), [BlocksMapped([1], [b"k" * 16], ((7, 0, 1),))])),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("body", [row[1] for row in BAD], ids=[row[0] for row in BAD])
def test_bad_bodies(body: bytes) -> None:
    with pytest.raises(DecodeError):
        unpack(body)


def test_any_bytes() -> None:
    rng = random.Random(5)
    good = pack(header(7, True, ((6, 1), (7, 2))), [
        BlocksMapped([1, b"two", 2**70, -(2**70)], [bytes([n]) * 16 for n in range(4)], ((Tier.DEVICE, 0, 1),)),
        BlocksMapped([9], [], ((Tier.HOST, 1, 2),)),
    ])  # fmt: skip
    assert pack(*unpack(good)) == good
    for _ in range(3000):
        body = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(body))
            body[place : place + rng.choice((0, 1, 1, 9))] = rng.randbytes(rng.choice((0, 1, 1, 9)))
        try:
            _, events = unpack(bytes(body))
        except DecodeError:
            continue
        view = PrefixIndex(block_size=2).open(walk=Walk.CASCADE)
        view.fill(events)


# -- adoption


def given(words: str) -> tuple[Header, list[BlocksMapped]]:
    giver = Trace("none").play(words)
    found = giver.sync.content()
    assert found is not None
    sequence, complete, recent = found
    return header(sequence, complete, recent), list(giver.view.dump())


# the giver's words, the taker's before it asks, and while the answer is on its way; the outcome, what follows, outcome
ADOPTIONS = [
    ("late joiner", "0a 1b 2c", "up 2c", "", "live 2 abc complete", "3d", "live 3 abcd complete"),
    ("busy meanwhile", "0a 1b 2c", "up 2c", "3d 4e", "live 4 abcde complete", "", "live 4 abcde complete"),
    ("removed meanwhile", "0a 1b 2c", "up 2c", "3~a", "live 3 bc complete", "", "live 3 bc complete"),
    ("giver is ahead", "0a 1b 2c 3d", "up 2c", "", "live 3 abcd complete", "3d 4e", "live 4 abcde complete"),
    ("nothing seen yet", "0a 1b", "up", "", "live 1 ab complete", "2c", "live 2 abc complete"),
    ("first one meanwhile", "0a 1b 2c", "up", "2c 3d", "live 3 abcd complete", "4e", "live 4 abcde complete"),
    ("late ones after", "0a 1b 2c", "up 1b", "", "live 2 abc complete", "2c 3d", "live 3 abcd complete"),
    ("incomplete giver", "1b 2c", "up 2c", "", "live 2 bc", "", "live 2 bc"),
    ("restart after", "0a 1b 2c", "up 2c", "", "live 2 abc complete", "0x 1d", "live 1 d"),
    ("gap after", "0a 1b 2c", "up 2c", "", "live 2 abc complete", "5d", "live 5 d"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "giver", "before", "between", "outcome", "after", "then"), ADOPTIONS, ids=[row[0] for row in ADOPTIONS]
)
def test_adoption(name: str, giver: str, before: str, between: str, outcome: str, after: str, then: str) -> None:
    taker = Trace("none").play(before)
    assert taker.sync.begin_adoption() is None
    taker.play(between)
    assert taker.sync.adopt(*given(giver), taker.now) is None
    taker.index.check()
    assert taker.outcome() == outcome
    assert taker.play(after).outcome() == then


def test_the_whole_truth_is_not_given_up() -> None:
    """A peer that began later may know more hashes, removed since; its view would not be complete."""
    taker = Trace("none").play("up 0abc 1~ab")
    assert taker.sync.begin_adoption() == "the stream knows all there is"
    assert taker.outcome() == "live 1 c complete"


REFUSALS = [
    ("older than ours", "0a 1b", "up 2c", "", "no message was seen by both"),
    ("another process", "0a 1b 2d", "up 2c", "", "another process"),
    ("another process, seen meanwhile", "0a 1b 2d", "up 1b", "2c", "another process"),
    ("no message in common", "0a 1b", "up 7c", "", "no message was seen by both"),
    ("a message is missing", "0a 1b", "up", "3d", "no message was seen by both"),
    ("no message in common, though the numbers fit", "0a 1b", "up", "2c", "no message was seen by both"),
    ("connection lost", "0a 1b 2c", "up 2c", "down", "connection"),
    ("connection renewed", "0a 1b 2c", "up 2c", "down again 2c", "connection"),
    ("gap meanwhile", "0a 1b 2c", "up 2c", "4e", "lost"),
    ("restart meanwhile", "0a 1b 2c", "up 2c", "0a", "restarted"),
    ("damage meanwhile", "0a 1b 2c", "up 2c", "3?e", "3"),
]


@pytest.mark.parametrize(("name", "giver", "before", "between", "reason"), REFUSALS, ids=[row[0] for row in REFUSALS])
def test_refusals_change_nothing(name: str, giver: str, before: str, between: str, reason: str) -> None:
    taker = Trace("none").play(before)
    assert taker.sync.begin_adoption() is None
    taker.play(between)
    outcome = taker.outcome()
    told = taker.sync.adopt(*given(giver), taker.now)
    assert told is not None
    assert reason in told
    assert taker.outcome() == outcome
    taker.index.check()


@pytest.mark.parametrize(
    ("recovery", "words", "reason"),
    [("snapshot", "up", "itself"), ("history", "up go", "fetch"), ("none", "up 0a down", "offline")],
)
def test_where_adoption_cannot_begin(recovery: str, words: str, reason: str) -> None:
    told = Trace(recovery).play(words).sync.begin_adoption()
    assert told is not None
    assert reason in told


def test_too_much_meanwhile() -> None:
    taker = Trace("none", SyncLimits(max_buffered_bytes=1500)).play("up 2c")
    assert taker.sync.begin_adoption() is None
    taker.play("3d 4e 5f 6g 7h")
    told = taker.sync.adopt(*given("0a 1b 2c"), taker.now)
    assert told == "too much came while the snapshot was on its way"


def test_a_giver_that_is_not_synchronized_gives_nothing() -> None:
    assert Trace("none").play("up").sync.content() is None
    assert Trace("none").play("up 0a down").sync.content() is None


class Listener:
    """A stream without recovery, late or not."""

    def __init__(self) -> None:
        self.index = PrefixIndex(block_size=BLOCK)
        dialect = DIALECTS["auto"](DialectOptions())
        self.view = self.index.open(walk=dialect.walk)
        self.sync = StreamSync(
            view=self.view, dialect=dialect, recovery=Recovery.NONE, dp_rank=0, topic=TOPIC, limits=SyncLimits()
        )
        self.sync.connected(0.0)

    def hear(self, message: Message) -> None:
        self.sync.live([TOPIC, message.sequence.to_bytes(8, "big"), message.payload], 0.0)

    def check(self, told: dict[int, Message]) -> None:
        """Safety, and that complete is complete."""
        if not self.sync.synchronized or self.sync.last is None:
            assert not any(self.index.find(keys) for keys in KEYS)
            return
        truth = told[self.sync.last].truth
        for keys in KEYS:
            found = self.index.find(keys).get(self.view)
            expected = walk(truth, keys, self.view.walk)
            if self.sync.complete:
                assert (found or (0, 0, 0)) == expected
            elif found is not None:
                assert sum(found) <= sum(expected)


def test_random_adoptions() -> None:
    """Two replicas of one engine, one late; at times the peer's answer is of another process of it."""
    taken = 0
    reasons: dict[str, int] = {}
    for seed in range(SEEDS * 4):
        dice = random.Random(seed)
        engine, stranger = (Engine(dice, Recovery.NONE, ring=10, process=n) for n in (1, 2))
        giver, taker = Listener(), Listener()
        foreign = dice.random() < 0.25
        told: dict[int, Message] = {}
        on_way_to_giver: list[Message] = []
        on_way_to_taker: list[Message] = []
        answer: Any = None
        asked = False
        joined = dice.randrange(25)
        for step in range(60):
            message = engine.step()
            told[message.sequence] = message
            other = stranger.step()
            on_way_to_giver.append(other if foreign else message)
            if step >= joined:
                on_way_to_taker.append(message)
            while on_way_to_giver and dice.random() < 0.8:
                giver.hear(on_way_to_giver.pop(0))
            while on_way_to_taker and dice.random() < 0.8:
                taker.hear(on_way_to_taker.pop(0))
                taker.check(told)
            heard = taker.sync.last is not None or not foreign  # else nothing could show it
            if step > joined and heard and not asked and not taker.sync.complete and dice.random() < 0.3:
                asked = taker.sync.begin_adoption() is None
            elif asked and answer is None and dice.random() < 0.5:
                found = giver.sync.content()
                if found is not None:
                    answer = pack(header(*found), giver.view.dump())
            elif answer is not None and dice.random() < 0.5:
                reason = taker.sync.adopt(*unpack(answer), 0.0)
                taker.check(told)
                taker.index.check()
                assert not (foreign and reason is None), f"seed {seed}: took a stranger's view"
                taken += reason is None
                if reason is not None:
                    reasons[reason.split(":")[0][:30]] = reasons.get(reason.split(":")[0][:30], 0) + 1
                asked, answer = False, None
        while on_way_to_taker:
            taker.hear(on_way_to_taker.pop(0))
            taker.check(told)
    assert taken > SEEDS, (taken, reasons)


def test_payloads_of_the_traces_are_alike() -> None:
    """Digests tell processes apart only if equal messages are equal bytes."""
    assert payload("a") == payload("a")
