"""Readers beside the writer: every interleaving of one write at each of a reader's looks, then real threads.

The first part is deterministic: the columns are replaced by lists that run a piece of writing when they are looked at
for the n-th time, for every n, which is what a thread switch at that point does.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvindex import index as index_module
from kvindex import rows as rows_module
from kvindex.events import AllBlocksCleared, BlockRemoved, Tier
from kvindex.index import PrefixIndex, StreamView, TierBlocks, Walk
from tests.kvindex.index_model import copied, plain_keys, stored

NONE = TierBlocks(0, 0, 0)


class Spy(list):
    """A column that tells when it is looked at."""

    look: Callable[[], None] = staticmethod(lambda: None)

    def __getitem__(self, item: Any) -> Any:
        found = super().__getitem__(item)
        self.look()
        return found


class Disturbed:
    """Runs `find`, with `write` run once at look number `at`; or at every look from `at` on, with `again`."""

    def __init__(self, index: PrefixIndex, write: Callable[[], None]) -> None:
        self.index = index
        self.write = write
        self.looks = 0
        rows = index._rows
        rows.keys, rows.masks, rows.after, rows.heads = (
            Spy(rows.keys), Spy(rows.masks), Spy(rows.after), Spy(rows.heads),
        )  # fmt: skip

    def find(self, keys: list[bytes], at: int, *, again: bool = False) -> dict[StreamView, TierBlocks]:
        self.looks = 0

        def look() -> None:
            self.looks += 1
            if self.looks == at or (again and self.looks > at):
                Spy.look = staticmethod(lambda: None)
                self.write()
                if again:
                    Spy.look = staticmethod(look)

        Spy.look = staticmethod(look)
        try:
            return self.index.find(keys)
        finally:
            Spy.look = staticmethod(lambda: None)


@pytest.fixture(params=[16, 2], ids=["stretches", "small"])
def _sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "_FIRST_STRETCH", request.param)
    monkeypatch.setattr(rows_module, "_STREAK", request.param // 2)


LENGTH = 12
BLOCKS = list(range(1, LENGTH + 1))


def built(*, scattered: bool, kept: bool = False) -> tuple[PrefixIndex, StreamView, StreamView]:
    """A chain of a and b (b: the first half), on neighbouring rows or not; `kept`: no row of it is ever freed."""
    index = PrefixIndex(block_size=4)
    a = index.open(walk=Walk.CASCADE, name="a")
    b = index.open(walk=Walk.INTERLEAVED, name="b")
    a.visible = b.visible = True
    if scattered:
        for number in BLOCKS:
            a.apply(stored([number], [number], number - 1 or None))
            if number % 3:
                a.apply(stored([100 + number], [100 + number]))
    else:
        a.apply(stored(BLOCKS, BLOCKS))
    b.apply(stored(BLOCKS[:6], BLOCKS[:6]))
    if kept:
        index.open(walk=Walk.CASCADE, name="keeper").apply(stored([*BLOCKS, 99], [*BLOCKS, 99]))
    return index, a, b


def rekey(index: PrefixIndex, a: StreamView, b: StreamView) -> None:
    """The chain's rows, from block 4 on, go to other blocks, which b holds all."""
    b.apply(BlockRemoved([6, 5, 4]))
    a.apply(BlockRemoved(BLOCKS[:2:-1]))
    b.apply(stored(range(50, 50 + LENGTH), range(50, 50 + LENGTH)))


def rekey_one_by_one(index: PrefixIndex, a: StreamView, b: StreamView) -> None:
    """As `rekey`, by events of one block."""
    b.apply(BlockRemoved([6, 5, 4]))
    a.apply(BlockRemoved(BLOCKS[:2:-1]))
    for number in range(50, 50 + LENGTH):
        b.apply(stored([number], [number]))


def rekey_and_back(index: PrefixIndex, a: StreamView, b: StreamView) -> None:
    """The rows of a's tail go to b's blocks and back to the same keys in the same rows."""
    rekey(index, a, b)
    b.apply(BlockRemoved(list(range(49 + LENGTH, 49, -1))))
    a.apply(stored(BLOCKS[3:], BLOCKS[3:], 3))


def reopen(index: PrefixIndex, a: StreamView, b: StreamView) -> None:
    """a goes; c takes its slot and holds a block more."""
    a.close()
    c = index.open(walk=Walk.CASCADE, name="c")
    c.apply(stored([*BLOCKS, 99], [*BLOCKS, 99]))
    c.visible = True


def swap(index: PrefixIndex, a: StreamView, b: StreamView) -> None:
    shadow = a.shadow()
    shadow.apply(stored([7, 8, 9], BLOCKS[:3]))
    a.swap(shadow)
    d = index.open(walk=Walk.CASCADE, name="d")  # in the slot that the old content had
    d.apply(stored([*BLOCKS, 99], [*BLOCKS, 99]))


def clear_device(index: PrefixIndex, a: StreamView, b: StreamView) -> None:
    a.apply(AllBlocksCleared())


def store_more(index: PrefixIndex, a: StreamView, b: StreamView) -> None:
    b.apply(stored(BLOCKS[6:], BLOCKS[6:], 6))


WRITES = {
    # name: what is written, a's blocks before or after, b's likewise
    rekey: ({12, 3}, {6, 3}),
    rekey_one_by_one: ({12, 3}, {6, 3}),
    rekey_and_back: ({12, 3}, {6, 3}),
    reopen: ({12, 0}, {6}),
    swap: ({12, 3}, {6}),
    clear_device: ({12, 0}, {6}),
    store_more: ({12}, {6, 12}),
}


@pytest.mark.usefixtures("_sizes")
@pytest.mark.parametrize("scattered", [False, True], ids=["neighbours", "scattered"])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_one_write_at_every_look(write: Callable, scattered: bool) -> None:
    """An event takes effect block by block, so the answer may also lie between before and after."""
    keys = plain_keys(*BLOCKS, 99)
    of_a, of_b = WRITES[write]
    at = 0
    answers = set()
    while True:
        at += 1
        # rows that stay what they are show that the exposure is looked at too, not `epoch` alone
        index, a, b = built(scattered=scattered, kept=write in (reopen, swap, clear_device))
        disturbed = Disturbed(index, lambda index=index, a=a, b=b: write(index, a, b))
        found = disturbed.find(keys, at)
        total_a, total_b = sum(found.get(a, NONE)), sum(found.get(b, NONE))
        answers.add((total_a, total_b))
        if write in (rekey, rekey_one_by_one, rekey_and_back, clear_device):
            assert total_a <= max(of_a)
            assert total_b <= max(of_b)
        else:
            assert total_a in of_a
            assert total_b in of_b
        for view, blocks in found.items():
            if view not in (a, b):
                assert view.name == "c"
                assert tuple(blocks) == (LENGTH + 1, 0, 0)
        if at > disturbed.looks:
            break
    assert at > 4, "the reader was never looked over the shoulder"
    assert len(answers) > 1 or write is rekey_and_back, "no interleaving mattered: the test is blind"


@pytest.mark.usefixtures("_sizes")
@pytest.mark.parametrize("scattered", [False, True], ids=["neighbours", "scattered"])
def test_a_writer_at_every_look(scattered: bool) -> None:
    """A reader that is disturbed each time takes the careful path, ends, and credits nothing wrong.

    The rows of a's blocks 4.. change hands all the time: never may a have more than 12, b more than 6 (of its other
    chain's mask), and c, which has a's slot in turn with nobody, more than block 1.
    """
    keys = plain_keys(*BLOCKS, 99)
    for at in (*range(1, 12), 15, 20, 27, 35):
        index, a, b = built(scattered=scattered)
        turn = 0

        def write(index: PrefixIndex = index, a: StreamView = a, b: StreamView = b) -> None:
            nonlocal turn
            turn += 1
            if turn % 2:
                b.apply(BlockRemoved([6, 5, 4]))
                a.apply(BlockRemoved(BLOCKS[:2:-1]))
                b.apply(stored(range(50, 50 + LENGTH), range(50, 50 + LENGTH)))
            else:
                b.apply(BlockRemoved(list(range(49 + LENGTH, 49, -1))))
                a.apply(stored(BLOCKS[3:], BLOCKS[3:], 3))

        disturbed = Disturbed(index, write)
        found = disturbed.find(keys, at, again=True)
        if turn > 8:
            assert sum(found.get(b, NONE)) in (0, 3, 6)
        assert sum(found.get(b, NONE)) <= 6
        assert sum(found.get(a, NONE)) <= 12


def test_views_that_change_under_a_disturbed_reader_are_left_out() -> None:
    index, a, b = built(scattered=False)
    keys = plain_keys(*BLOCKS)

    def write() -> None:
        shadow = a.shadow()
        shadow.apply(stored([1], [1]))
        a.swap(shadow)

    found = Disturbed(index, write).find(keys, 1, again=True)
    assert found == {b: (6, 0, 0)}


# ---- real threads ---------------------------------------------------------------------------------------------------


class Hammer:
    """Readers that ask the same question all the time until the writer is done; each answer goes to `judge`."""

    def __init__(self, index: PrefixIndex, keys: list[bytes], judge: Callable[[dict], str | None]) -> None:
        self.index = index
        self.keys = keys
        self.judge = judge
        self.done = threading.Event()
        self.asked = 0
        self.seen: set[tuple] = set()
        self.wrong: list[str] = []

    def _read(self) -> None:
        try:
            while not self.done.is_set():
                found = self.index.find(self.keys)
                self.asked += 1
                self.seen.add(tuple(sorted((view.name, tuple(blocks)) for view, blocks in found.items())))
                complaint = self.judge(found)
                if complaint:
                    self.wrong.append(complaint)
                    return
        except BaseException as error:
            self.wrong.append(repr(error))
            raise

    def during(self, write: Callable[[], None], *, readers: int = 2) -> None:
        interval = sys.getswitchinterval()
        threads = [threading.Thread(target=self._read) for _ in range(readers)]
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            write()
        finally:
            self.done.set()
            for thread in threads:
                thread.join(30)
            sys.setswitchinterval(interval)
        assert not self.wrong, self.wrong[0]
        assert self.asked > 5


@pytest.mark.parametrize("attempts", [0, 4])
def test_threads_churn(attempts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows change hands all the time, between chains that share two blocks and nothing else."""
    monkeypatch.setattr(index_module, "_ATTEMPTS", attempts)
    index = PrefixIndex(block_size=4)
    steady, churn = (index.open(walk=Walk.CASCADE, name=name) for name in ("steady", "churn"))
    steady.visible = churn.visible = True
    steady.apply(stored(BLOCKS, BLOCKS))
    rng = random.Random(5)

    def write() -> None:
        for turn in range(300):
            hashes = [1000 + turn * 50 + n for n in range(rng.randrange(1, 40))]
            blocks = [n if n < 3 else 1000 + n for n in range(1, len(hashes) + 1)]
            churn.apply(stored(hashes, blocks))
            if turn % 5 == 0:
                steady.apply(BlockRemoved(BLOCKS[5:]))
                steady.apply(stored(BLOCKS[5:], BLOCKS[5:], 5))
            churn.apply(BlockRemoved(hashes[::-1]))

    def judge(found: dict) -> str | None:
        if not 5 <= sum(found.get(steady, NONE)) <= 12:
            return f"steady: {found.get(steady)}"
        if sum(found.get(churn, NONE)) > 2:
            return f"churn has {found.get(churn)} blocks of a chain it shares two of"
        return None

    hammer = Hammer(index, plain_keys(*BLOCKS), judge)
    hammer.during(write)
    index.check()
    assert index.find(plain_keys(*BLOCKS)) == {steady: (12, 0, 0)}


@pytest.mark.parametrize("attempts", [0, 4, 10**6])
def test_threads_swap_clear_close(attempts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The swapped stream always has 200 blocks, on the device or on the host, never a mixture; slots change hands.

    A reader that is disturbed at all its attempts may leave it out, one that never gives up may not.
    """
    monkeypatch.setattr(index_module, "_ATTEMPTS", attempts)
    index = PrefixIndex(block_size=4)
    blocks = list(range(200))
    swapped = index.open(walk=Walk.CASCADE, name="swapped")
    swapped.apply(stored(blocks, blocks))
    swapped.visible = True
    cleared = index.open(walk=Walk.CASCADE, name="cleared")
    cleared.visible = True

    def write() -> None:
        for turn in range(25):
            shadow = swapped.shadow()
            names = [turn * 1000 + n for n in blocks]
            shadow.apply(stored(names, blocks, tier=Tier.HOST if turn % 2 == 0 else Tier.DEVICE))
            cleared.apply(stored(blocks, blocks))
            cleared.apply(copied(blocks[:50]))
            swapped.swap(shadow)
            cleared.apply(AllBlocksCleared())
            guest = index.open(walk=Walk.INTERLEAVED, name="guest")
            guest.apply(stored(blocks[:7], blocks[:7], tier=Tier.DISK))
            guest.visible = True
            cleared.clear()
            guest.close()

    def judge(found: dict) -> str | None:
        for view, answer in found.items():
            allowed = {
                "swapped": answer in ((200, 0, 0), (0, 200, 0)),
                # stored block by block, then 50 on the host too, then the device cleared at once
                "cleared": answer == (0, 50, 0) or (answer.host, answer.disk) == (0, 0),
                "guest": answer.device == answer.host == 0 and answer.disk <= 7,
            }
            if not allowed[view.name]:
                return f"{view.name}: {answer}"
        return None if swapped in found or attempts < 10**6 else "swapped is missing"

    Hammer(index, plain_keys(*blocks), judge).during(write)
    index.check()
