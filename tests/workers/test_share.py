"""What workers tell one another of requests in flight: rows, loss, death; and that a burst spreads as over one."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from extproc.loads.inflight import Charge, InFlight
from extproc.router import Router
from extproc.scorers import Load, Request, build
from extproc.workers import share
from extproc.workers.place import Place
from extproc.workers.share import Ledger, Sharing
from kvindex.fleet import Instance

ENGINES = tuple(Instance(name, f"10.0.0.{number}:8000") for number, name in enumerate("abcd"))


@dataclass
class Pool:
    name: str = "qwen"
    inflight: InFlight = field(default_factory=InFlight)

    def __post_init__(self) -> None:
        self.inflight.update(ENGINES)


class Worker:
    """A pool and its ledger, as `Sharing` wires them."""

    def __init__(self, number: int) -> None:
        self.pool = Pool()
        self.inflight = self.pool.inflight
        self.ledger = Ledger([self.pool], number)
        self.inflight.watch = lambda counters: self.ledger.changed(self.pool, counters)
        self.router = Router(build("least_request"))

    def tell(self, *others: Worker, now: float = 0.0) -> None:
        for datagram in self.ledger.changes():
            for other in others:
                other.ledger.receive(datagram, now)

    def request(self, now: float = 0.0) -> str:
        """One decision, charged."""
        asked = Request(1000, 16, now=now)
        decision = self.router.route(asked, ENGINES, None, self.inflight, self.inflight, now)
        assert decision.chosen is not None
        decision.charge(self.inflight, now)
        return decision.chosen.name


def seen(worker: Worker, name: str) -> tuple[int, int, float]:
    counters = worker.inflight.find(name)
    return (counters.requests, counters.waiting_requests, counters.uncached_tokens) if counters else (0, 0, 0.0)


def own(worker: Worker, name: str) -> tuple[int, int, float]:
    requests, waiting, uncached = worker.inflight.of_instance(name)
    return requests, waiting, uncached


def test_each_step_of_a_request_reaches_the_other_and_stays_apart_from_its_own() -> None:
    one, other = Worker(0), Worker(1)
    mine = one.inflight.charge("a", 100, 60.0, 1.0)
    theirs = other.inflight.charge("a", 50, 50.0, 2.0)
    one.tell(other)
    other.tell(one)
    for worker, alone in ((one, (1, 1, 60.0)), (other, (1, 1, 50.0))):
        assert seen(worker, "a") == (2, 2, 110.0)
        assert own(worker, "a") == alone
        assert worker.inflight.get("a", 3.0) == Load(2, 0)
        assert worker.inflight.total() == 1
    mine.first_byte(3.0)
    one.tell(other)
    assert seen(other, "a") == (2, 1, 50.0)
    assert other.inflight.get("a", 3.0) == Load(1, 1)
    mine.close()
    one.tell(other)
    assert seen(other, "a") == own(other, "a") == (1, 1, 50.0)
    theirs.close()
    other.tell(one)
    assert seen(one, "a") == seen(other, "a") == (0, 0, 0.0)


def test_what_moves_to_another_host_moves_for_all() -> None:
    one, other = Worker(0), Worker(1)
    charge = one.inflight.charge("a", 100, 60.0, 1.0)
    charge.moved(ENGINES[1].address, 2.0)
    one.tell(other)
    assert (seen(other, "a"), seen(other, "b")) == ((0, 0, 0.0), (1, 1, 60.0))


def test_ranks_have_their_own_rows() -> None:
    one, other = Worker(0), Worker(1)
    one.inflight.charge("a", 100, 60.0, 1.0, rank=3)
    one.tell(other)
    assert seen(other, "a/3") == (1, 1, 60.0)
    assert other.inflight.get("a", 1.0) == Load(1, 0), "the whole instance is seen as loaded, too"


def test_a_lost_datagram_is_made_good_and_a_silent_worker_forgotten() -> None:
    one, other = Worker(0), Worker(1)
    one.inflight.charge("a", 100, 60.0, 1.0)
    one.ledger.changes()  # lost
    assert seen(other, "a") == (0, 0, 0.0)
    for datagram in one.ledger.everything():
        other.ledger.receive(datagram, 10.0)
    assert seen(other, "a") == (1, 1, 60.0)
    other.ledger.expire(10.0 + share.EXPIRY)
    assert seen(other, "a") == (1, 1, 60.0)
    other.ledger.expire(10.0 + share.EXPIRY + 0.1)
    assert seen(other, "a") == (0, 0, 0.0)


def test_nothing_in_flight_says_nothing() -> None:
    one = Worker(0)
    one.inflight.charge("a", 100, 60.0, 1.0).close()
    assert len(one.ledger.changes()) == 1
    assert one.ledger.changes() == one.ledger.everything() == []


def test_an_engine_that_restarts_loses_the_others_part_as_well() -> None:
    one, other = Worker(0), Worker(1)
    one.inflight.charge("a", 100, 60.0, 1.0)
    one.tell(other)
    other.inflight.update([Instance("a", "10.0.0.0:8000", incarnation="second"), *ENGINES[1:]])
    assert seen(other, "a") == (0, 0, 0.0)


@pytest.mark.parametrize(
    "datagram",
    [
        b"", b"{", b"[]", b"[1]", b"[1, [[]]]", b'[1, [["qwen", "a", 1, [2]]]]', b"17",
        b'[1, [["other", "a", 1, 1, 1, 1, 1, 1.0, []]]]', b'[1, [["qwen", "unknown", 1, 1, 1, 1, 1, 1.0, []]]]',
        b'[1, [["qwen", "unknown/0", 1, 1, 1, 1, 1, 1.0, []]]]',
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_left_out(datagram: bytes) -> None:
    worker = Worker(0)
    worker.ledger.receive(datagram, 1.0)
    assert not list(worker.inflight.candidates())


def test_many_rows_go_in_datagrams_of_a_bounded_size() -> None:
    pool = Pool()
    pool.inflight.update([Instance(f"engine-{number}", f"10.1.0.{number}:1") for number in range(200)])
    for number in range(200):
        for _ in range(2 * share.LATEST):
            pool.inflight.charge(f"engine-{number}", 100_000, 99_999.5, 123_456.789012)
    datagrams = Ledger([pool], 0).everything()
    assert len(datagrams) == -(-200 // share.ROWS)
    assert max(map(len, datagrams)) < 100_000


def test_own_delta_counts_what_others_sent_since_the_report() -> None:
    one, other = Worker(0), Worker(1)
    for at in (1.0, 2.0, 3.0):
        one.inflight.charge("a", 100, 60.0, at)
    other.inflight.charge("a", 100, 60.0, 2.5)
    one.tell(other)
    assert [other.inflight.sent_since("a", at) for at in (0.0, 2.0, 2.6, 4.0)] == [4, 3, 1, 0]


def test_random_steps_end_with_the_same_sums_everywhere() -> None:
    rng = random.Random(3)
    workers = [Worker(number) for number in range(3)]
    charges: list[tuple[Worker, Charge]] = []
    for step in range(2000):
        worker = rng.choice(workers)
        if rng.random() < 0.5 or not charges:
            prompt = rng.randrange(2000)
            charges.append((worker, worker.inflight.charge(rng.choice("abcd"), prompt, prompt / 3, step)))
        else:
            _, charge = charges[rng.randrange(len(charges))]
            rng.choice((charge.close, charge.first_byte, lambda: charge.moved(rng.choice(ENGINES).address, step)))()  # noqa: B023
        if rng.random() < 0.3:
            worker.tell(*(one for one in workers if one is not worker))
    for worker in workers:
        worker.tell(*(one for one in workers if one is not worker))
    for name in "abcd":
        parts = [own(worker, name) for worker in workers]
        for worker in workers:
            assert seen(worker, name) == pytest.approx(tuple(map(sum, zip(*parts, strict=True))), abs=1e-6)
            counters = worker.inflight.find(name)
            assert counters is not None
            assert counters.own(0)[:6] == pytest.approx(counters_alone(counters), abs=1e-6)


def counters_alone(counters: object) -> tuple[float, ...]:
    """Counted anew from the open requests."""
    opened, waiting = list(counters.open), list(counters.waiting)  # type: ignore[attr-defined]
    return (
        len(opened), len(waiting), sum(one.prompt for one in opened), sum(one.prompt for one in waiting),
        sum(one.prompt**2 for one in waiting), sum(one.uncached for one in waiting),
    )  # fmt: skip


def spread(workers: list[Worker], *, tell: bool) -> list[int]:
    """40 requests over engines of which one is idle and the others have 10 each; requests take turns over workers."""
    for name in "abc":
        for _ in range(10):
            workers[0].inflight.charge(name, 1000, 1000.0, 0.0)
    workers[0].tell(*workers[1:])
    for number in range(40):
        worker = workers[number % len(workers)]
        worker.request()
        if tell and number % 4 == 3:  # some decisions fall between two datagrams
            for one in workers:
                one.tell(*(other for other in workers if other is not one))
    total: Counter[str] = Counter()
    for worker in workers:
        for name in "abcd":
            total[name] += own(worker, name)[0]
    return [total[name] for name in "abcd"]


def test_a_burst_over_two_workers_spreads_like_over_one() -> None:
    alone = spread([Worker(0)], tell=True)
    assert max(alone) - min(alone) <= 1
    shared = spread([Worker(0), Worker(1)], tell=True)
    assert max(shared) - min(shared) <= 3
    herd = spread([Worker(0), Worker(1)], tell=False)
    assert max(herd) - min(herd) > 3, "without word of one another they would herd: the test sees it"


async def test_over_the_socket(tmp_path: Path) -> None:
    workers = [Worker(0), Worker(1)]
    running = []
    for number, worker in enumerate(workers):
        worker.inflight.watch = None
        running.append(asyncio.create_task(Sharing([worker.pool], Place(number, 2, "", tmp_path)).run()))
    try:
        await until(lambda: all(worker.inflight.watch for worker in workers))
        charge = workers[0].inflight.charge("a", 100, 60.0, 1.0)
        await until(lambda: seen(workers[1], "a") == (1, 1, 60.0))
        charge.close()
        await until(lambda: seen(workers[1], "a") == (0, 0, 0.0))
        running[1].cancel()  # nobody listens there any more: nothing happens
        workers[0].inflight.charge("b", 100, 60.0, 1.0)
        await asyncio.sleep(0)
        # one that comes back in its place is told within a refresh
        running[1] = asyncio.create_task(Sharing([workers[1].pool], Place(1, 2, "", tmp_path)).run())
        await until(lambda: seen(workers[1], "b") == (1, 1, 60.0))
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the other side is a socket
            await asyncio.sleep(0.001)
