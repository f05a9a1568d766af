"""Directory: which streams a pool follows, and what a match says. The driver is a fake that opens streams at once."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from kvindex.directory import NO_BLOCKS, Directory, Match, Ranks, Stream, plan
from kvindex.errors import ConfigurationError
from kvindex.fleet import Fleet, Instance, InstanceState, StreamEndpoint
from kvindex.hashing import content_keys, pack_tokens
from kvindex.index import PrefixIndex, StreamView, TierBlocks, Walk

BLOCK = 4


class FakeDriver:
    """Does at once what the transport does in its thread; keeps what it was asked for."""

    def __init__(self, *, opening: bool = True) -> None:
        self.asked: list[tuple[str, str]] = []
        self.opening = opening

    def pace(self) -> None:
        pass

    def follow(self, stream: Stream) -> None:
        self.asked.append(("follow", stream.name))
        if self.opening:
            stream.open().connected(0.0)

    def unfollow(self, stream: Stream) -> None:
        self.asked.append(("unfollow", stream.name))
        stream.close()

    def resync(self, stream: Stream) -> None:
        self.asked.append(("resync", stream.name))

    def rebuild(self, stream: Stream) -> None:
        self.asked.append(("rebuild", stream.name))

    def post(self, work: Callable[[], None]) -> None:
        if self.opening:
            work()

    def taken(self) -> list[str]:
        asked, self.asked = self.asked, []
        return [f"{verb} {name}" for verb, name in asked]


def engine(name: str, *, ranks: int = 1, dp_size: int | None = None, **more: Any) -> Instance:
    number = int(name.rpartition("-")[2])
    more.setdefault("dialect", "vllm")
    dialect = more.pop("dialect")
    events = tuple(
        StreamEndpoint(rank, f"tcp://10.0.0.{number}:{5557 + rank}", dialect=dialect) for rank in range(ranks)
    )
    more.setdefault("events", events)
    return Instance(name, f"10.0.0.{number}:8000", dp_size=dp_size or max(1, ranks), **more)


def tokens(blocks: int, extra: int = 1) -> list[int]:
    return list(range(blocks * BLOCK + extra))


def keys(blocks: int) -> list[bytes]:
    return content_keys(pack_tokens(tokens(blocks)), BLOCK)


def feed(directory: Directory, name: str, rank: int, blocks: int, *, medium: str = "GPU", first: int = 0) -> None:
    """The stream stores blocks first .. first+blocks of the one prompt."""
    stream = directory._streams[(name, rank)]
    assert stream.sync is not None
    sequence = -1 if stream.sync.status.sequence is None else stream.sync.status.sequence
    hashes = [1 + first + number for number in range(blocks)]
    ids = list(range(first * BLOCK, (first + blocks) * BLOCK))
    event = ["BlockStored", hashes, first or None, ids, BLOCK, None, medium]
    payload = msgpack.packb([0.0, [event], rank])
    stream.sync.live([b"", struct.pack(">Q", sequence + 1), payload], 1.0)


def directory(*instances: Instance, **options: Any) -> tuple[Directory, FakeDriver]:
    driver = FakeDriver()
    made = Directory(driver, block_size=options.pop("block_size", BLOCK), **options)
    made.update(instances)
    return made, driver


# -- plan


PLANS: dict[str, tuple[list[Instance], int, list[str], dict[str, str]]] = {
    "all fit": ([engine("e-2"), engine("e-1")], 2, ["e-1", "e-2"], {}),
    "name order decides, not arrival": ([engine("e-2"), engine("e-1")], 1, ["e-1"], {"e-2": "max_streams 1"}),
    "never some ranks of an instance": (
        [engine("e-1", ranks=2), engine("e-2", ranks=2), engine("e-3")],
        3,
        ["e-1", "e-3"],
        {"e-2": "2 in use, 2 more"},
    ),
    "decode and suspect are not followed": (
        [engine("e-1", role="decode"), engine("e-2", state=InstanceState.SUSPECT), engine("e-3", role="mix")],
        9,
        ["e-3"],
        {},
    ),
    "no endpoints": ([engine("e-1", events=())], 9, [], {}),
    "one endpoint claimed twice: both are left out": (
        [engine("e-1"), replace(engine("e-2"), events=engine("e-1").events), engine("e-3")],
        9,
        ["e-3"],
        {"e-1": "also claimed by e-2", "e-2": "also claimed by e-1"},
    ),
    "clashing ones use no streams": (
        [engine("e-1"), replace(engine("e-2"), events=engine("e-1").events), engine("e-3")],
        1,
        ["e-3"],
        {"e-1": "claimed", "e-2": "claimed"},
    ),
}


@pytest.mark.parametrize(("instances", "bound", "followed", "skipped"), PLANS.values(), ids=PLANS)
def test_plan(instances: list[Instance], bound: int, followed: list[str], skipped: dict[str, str]) -> None:
    outcome = plan(instances, max_streams=bound)
    assert list(outcome.followed) == followed
    assert set(outcome.skipped) == set(skipped)
    for name, words in skipped.items():
        assert words in outcome.skipped[name][1]


# -- following


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({}, []),
        ({"state": InstanceState.LEASE_LOST}, []),
        ({"state": InstanceState.DRAINING}, []),
        ({"incarnation": "b"}, ["unfollow e-1/0", "follow e-1/0"]),
        ({"address": "10.0.0.9:8000"}, ["unfollow e-1/0", "follow e-1/0"]),
        ({"dp_size": 2}, ["unfollow e-1/0", "follow e-1/0"]),
        ({"events": (StreamEndpoint(0, "tcp://10.0.0.1:9"),)}, ["unfollow e-1/0", "follow e-1/0"]),
        ({"state": InstanceState.SUSPECT}, ["unfollow e-1/0"]),
        ({"role": "decode"}, ["unfollow e-1/0"]),
        ({"role": "mix", "acting": "decode"}, ["unfollow e-1/0"]),
    ],
)
def test_same_process_keeps_its_stream(changes: dict[str, Any], asked: list[str]) -> None:
    first = engine("e-1", incarnation="a")
    made, driver = directory(first)
    feed(made, "e-1", 0, 3)
    driver.taken()
    made.update([replace(first, **changes)])
    assert driver.taken() == asked
    assert made.match(keys(3)).minimum("e-1").device == (0 if asked else 3)
    made.index.check()


def test_ranks_come_and_go_one_by_one() -> None:
    """As instances that register rank by rank: the streams of the other ranks go on, whatever dp_size becomes."""
    two = engine("e-1", ranks=2, incarnation="")
    first = replace(two, dp_size=1, events=two.events[:1])
    made, driver = directory(first)
    feed(made, "e-1", 0, 3)
    assert driver.taken() == ["follow e-1/0"]
    made.update([two])
    assert driver.taken() == ["follow e-1/1"]
    assert made.match(keys(3)).hits("e-1") == (TierBlocks(3, 0, 0), NO_BLOCKS)
    feed(made, "e-1", 1, 2)
    made.update([replace(two, events=two.events[1:])])
    assert driver.taken() == ["unfollow e-1/0"]
    assert made.match(keys(3)).hits("e-1") == (NO_BLOCKS, TierBlocks(2, 0, 0))
    made.index.check()


def test_fleet_drives_the_directory_of_its_pool() -> None:
    fleet = Fleet()
    fleet.upsert(engine("e-1", pool="big"))
    driver = FakeDriver()
    made = Directory(driver, pool="big", block_size=BLOCK)
    stop = made.attach(fleet)
    fleet.upsert(engine("e-2", pool="small"))
    fleet.upsert(engine("e-3", pool="big"))
    fleet.remove("e-1")
    assert driver.taken() == ["follow e-1/0", "follow e-3/0", "unfollow e-1/0"]
    stop()
    fleet.remove("e-3")
    assert driver.taken() == []
    made.close()
    assert driver.taken() == ["unfollow e-3/0"]
    assert made.index.blocks == 0


def test_index_has_a_place_again_after_each_replacement() -> None:
    made, _ = directory(engine("e-1", incarnation="0"), max_streams=1)
    for number in range(1, 20):
        made.update([engine("e-1", incarnation=str(number))])
        feed(made, "e-1", 0, 2)
    assert made.match(keys(2)).minimum("e-1").device == 2
    made.index.check()


# -- match


def test_match_per_rank_and_minimum() -> None:
    """D13: ranks with 8 and 4 of 8 blocks -> 4; ranks are never stitched."""
    made, _ = directory(engine("e-1", ranks=2), engine("e-2"))
    feed(made, "e-1", 0, 8)
    feed(made, "e-1", 1, 4)
    feed(made, "e-2", 0, 6)
    match = made.match(keys(8))
    assert match.hits("e-1") == (TierBlocks(8, 0, 0), TierBlocks(4, 0, 0))
    assert match.rank("e-1", 0) == TierBlocks(8, 0, 0)
    assert match.minimum("e-1") == TierBlocks(4, 0, 0)
    assert match.best == ("e-2", TierBlocks(6, 0, 0))
    assert match
    assert [match.rank("e-1", rank) for rank in (-1, 2)] == [NO_BLOCKS, NO_BLOCKS]
    assert (match.hits("nobody"), match.minimum("nobody"), match.rank("nobody", 0)) == ((), NO_BLOCKS, NO_BLOCKS)


def test_rank_that_is_missing_or_not_synchronized_makes_the_minimum_zero() -> None:
    made, _ = directory(engine("e-1", ranks=2), engine("e-2", ranks=1, dp_size=2))
    feed(made, "e-1", 0, 8)
    feed(made, "e-2", 0, 8)
    match = made.match(keys(8))
    assert match.minimum("e-1") == NO_BLOCKS
    assert match.minimum("e-2") == NO_BLOCKS
    assert match.hits("e-2") == (TierBlocks(8, 0, 0), NO_BLOCKS)
    assert match.best is None
    assert match, "some rank has the prefix, for dp: target"


def test_minimum_gives_the_tiers_of_the_rank_with_the_lowest_total() -> None:
    made, _ = directory(engine("e-1", ranks=2))
    feed(made, "e-1", 0, 2)
    feed(made, "e-1", 0, 4, first=2, medium="CPU")
    feed(made, "e-1", 1, 4)
    match = made.match(keys(8))
    assert match.hits("e-1") == (TierBlocks(2, 4, 0), TierBlocks(4, 0, 0))
    assert match.minimum("e-1") == TierBlocks(4, 0, 0)


def test_candidate_of_another_incarnation_gets_nothing() -> None:
    """As in the xLLM service: the view's incarnation must equal the candidate's."""
    old = engine("e-1", incarnation="a")
    made, _ = directory(old)
    feed(made, "e-1", 0, 4)
    new = replace(old, incarnation="b")
    match = made.match(keys(4))
    assert match.minimum(old).device == match.rank(old, 0).device == 4
    assert (match.minimum(new), match.rank(new, 0), match.hits(new)) == (NO_BLOCKS, NO_BLOCKS, ())
    made.update([new])
    assert made.match(keys(4)).minimum(new) == NO_BLOCKS, "the new process has told nothing yet"
    assert match.minimum(old).device == 4, "a match once given does not change"


def test_nobody_has_it() -> None:
    made, _ = directory(engine("e-1"))
    match = made.match(keys(4))
    assert not match
    assert match.best is None
    assert not made.match([])


@pytest.mark.parametrize(
    ("dialect", "size", "n_tokens", "limit"),
    [
        ("vllm", 32, 32, 0),
        ("vllm", 32, 33, 1),
        ("vllm", 32, 64, 1),
        ("vllm", 32, 65, 2),
        ("vllm", 32, 200, 6),
        ("vllm", 32, 1, 0),
        ("vllm", 32, 0, 0),
        ("xllm", 32, 64, 2),
        ("xllm", 32, 63, 1),
        ("vllm", None, 64, 0),
    ],
)
def test_key_limit(dialect: str, size: int | None, n_tokens: int, limit: int) -> None:
    """D12: an engine of the vLLM dialects computes the last token again."""
    made, _ = directory(engine("e-1", dialect=dialect), block_size=size)
    assert made.key_limit(n_tokens) == limit


def test_block_size_auto_adopts_the_first_event() -> None:
    made, _ = directory(engine("e-1"), block_size=None)
    assert made.block_size is None
    feed(made, "e-1", 0, 2)
    assert made.block_size == BLOCK
    assert made.key_limit(9) == 2
    assert made.seed == 1024


# -- status


def test_status_names_every_stream_and_every_reason() -> None:
    driver = FakeDriver(opening=False)
    made = Directory(driver, block_size=BLOCK, max_streams=2)
    made.update([engine("e-2", ranks=1, dp_size=2), engine("e-1"), engine("e-3"), engine("e-4", role="decode")])
    assert [(one.instance, one.dp_rank, one.state) for one in made.status()] == [
        ("e-1", 0, "waiting"),
        ("e-2", 0, "waiting"),
        ("e-2", 1, "missing"),
        ("e-3", 0, "skipped"),
    ]
    assert "max_streams 2" in str(made.status()[3].error)
    assert "rank 1 of 2" in str(made.status()[2].error)
    made._streams[("e-1", 0)].open().connected(0.0)
    feed(made, "e-1", 0, 3)
    report = made.status(now=5.0)[0]
    assert (report.synchronized, report.complete, report.sequence, report.error) == (True, True, 0, None)
    assert report.event_age == 4.0
    assert report.endpoint == "tcp://10.0.0.1:5557"
    assert report.status is not None
    assert tuple(report.status.blocks) == (3, 0, 0)


def test_admin_actions_reach_the_named_streams() -> None:
    made, driver = directory(engine("e-1", ranks=2), engine("e-2"))
    driver.taken()
    assert made.resync("e-1") == 2
    assert made.rebuild("e-1", 1) == 1
    assert made.resync("nobody") == 0
    assert driver.taken() == ["resync e-1/0", "resync e-1/1", "rebuild e-1/1"]


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        (StreamEndpoint(0, "tcp://h:1", dialect="klingon"), "'klingon'.*auto"),
    ],
)
def test_stream_that_cannot_open_says_why(endpoint: StreamEndpoint, words: str) -> None:
    made = Directory(FakeDriver(opening=False), block_size=BLOCK)
    made.update([Instance("e-1", "10.0.0.1:1", events=(endpoint,))])
    with pytest.raises(ConfigurationError, match=words):
        made._streams[("e-1", 0)].open()


def test_reader_beside_a_churning_fleet_sees_whole_answers() -> None:
    """Matches while instances are replaced: never an exception, never more than the prompt, no answer of the dead."""
    instances = [engine(f"e-{number}", ranks=2, incarnation="0") for number in range(1, 5)]
    made, _ = directory(*instances)
    wanted, failures, stop = keys(6), [], threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                match = made.match(wanted)
                for one in instances:
                    assert 0 <= sum(match.minimum(one)) <= 6
                    match.hits(one)
                assert match.best is None or 0 < sum(match.best[1]) <= 6
                made.status()
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for turn in range(60):
        number = turn % 4
        instances[number] = replace(instances[number], incarnation=str(turn))
        made.update(instances)
        feed(made, f"e-{number + 1}", 0, 6)
        feed(made, f"e-{number + 1}", 1, 6)
    stop.set()
    reader.join()
    assert not failures
    made.index.check()


def test_match_alone() -> None:
    """Match needs nothing but a table and an answer of the index."""
    index = PrefixIndex(block_size=BLOCK)
    one, two = (index.open(walk=Walk.CASCADE) for _ in range(2))
    table: dict[str, Ranks] = {"a": Ranks("", (one, None)), "b": Ranks("", (two,))}
    found: dict[StreamView, TierBlocks] = {one: TierBlocks(3, 0, 0), two: TierBlocks(1, 1, 0)}
    assert names(Match(table, found), table) == {"a": NO_BLOCKS, "b": TierBlocks(1, 1, 0)}


def names(match: Match, table: Iterable[str]) -> dict[str, TierBlocks]:
    return {name: match.minimum(name) for name in table}
