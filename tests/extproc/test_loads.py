"""Load sources: in-flight accounting, reports and their age, engine metric pages, heartbeats, the poller."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from contextlib import suppress
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from extproc.loads.base import InvalidReport, Reports, combine, valid_load
from extproc.loads.heartbeat import MAX_BYTES, Answer, Beat, Heartbeats, refuse
from extproc.loads.heartbeat import parse as parse_beat
from extproc.loads.inflight import Charge, InFlight
from extproc.loads.prometheus import PrometheusPoller, Target, parse
from extproc.scorers import Load
from kvindex.fleet import Instance

A, B = Instance("a", "10.0.0.1:80"), Instance("b", "10.0.0.2:80")


def counted(inflight: InFlight, name: str) -> tuple[int, int, int, int, float]:
    c = inflight.find(name)
    if c is None:
        return (0, 0, 0, 0, 0)
    return (c.requests, c.waiting_requests, c.prompt_tokens, c.waiting_prompt_tokens, c.uncached_tokens)


NOTHING = (0, 0, 0, 0, 0)


def test_life_of_a_request() -> None:
    inflight = InFlight()
    inflight.update([A, B])
    charge = inflight.charge("a", 1000, 400)
    assert counted(inflight, "a") == (1, 1, 1000, 1000, 400)
    assert inflight.get("a", 0.0) == Load(1, 0)
    charge.moved("10.0.0.1:80")
    assert counted(inflight, "a") == (1, 1, 1000, 1000, 400), "served where it was sent: no change"
    charge.moved("10.0.0.2:80")
    assert (counted(inflight, "a"), counted(inflight, "b")) == (NOTHING, (1, 1, 1000, 1000, 400))
    charge.first_byte()
    charge.first_byte()
    assert counted(inflight, "b") == (1, 0, 1000, 0, 0)
    assert inflight.get("b", 0.0) == Load(0, 1)
    charge.close()
    charge.close()
    charge.first_byte()
    charge.moved("10.0.0.1:80")
    assert (counted(inflight, "a"), counted(inflight, "b")) == (NOTHING, NOTHING)


def test_every_way_to_end_releases_once() -> None:
    """Client gone before headers, mid-stream, after the end."""
    inflight = InFlight()
    charges = [inflight.charge("a", 10, 10) for _ in range(3)]
    charges[1].first_byte()
    charges[2].first_byte()
    for charge in charges:
        charge.close()
        charge.close()
    assert counted(inflight, "a") == NOTHING
    assert inflight.total() == 0


@pytest.mark.parametrize(
    "after", [[B], [A, B, Instance("c", "10.0.0.3:80")], [Instance("a", "10.0.0.1:80", incarnation="2"), B]], ids=str
)
def test_removed_and_restarted_instances_take_their_counters_along(after: list[Instance]) -> None:
    inflight = InFlight()
    inflight.update([A, B])
    late = inflight.charge("a", 100, 100)
    other = inflight.charge("b", 7, 7)
    inflight.update(after)
    kept = A in after
    assert counted(inflight, "a") == ((1, 1, 100, 100, 100) if kept else NOTHING)
    fresh = inflight.charge("a", 50, 50)
    late.first_byte()
    late.close()
    assert counted(inflight, "a") == (1, 1, 50, 50, 50), "late releases reach the old object, never the new one"
    fresh.close()
    other.close()
    assert inflight.total() == 0


def test_served_by_a_host_nobody_knows() -> None:
    inflight = InFlight()
    inflight.update([A])
    charge = inflight.charge("a", 10, 10)
    charge.moved("10.9.9.9:80")
    assert charge.instance is None
    assert inflight.total() == 0
    charge.first_byte()
    charge.close()
    assert inflight.total() == 0


def test_sent_since_a_report() -> None:
    inflight = InFlight()
    charges = [inflight.charge("a", 1, 1, now=float(t)) for t in range(5)]
    assert [inflight.sent_since("a", at) for at in (-1.0, 0.0, 2.0, 4.1)] == [5, 5, 3, 0]
    charges[4].close()
    assert inflight.sent_since("a", 2.0) == 2
    assert inflight.sent_since("nobody", 0.0) == 0


def test_prefill_rate_of_requests_that_met_an_empty_queue() -> None:
    """Tokens over time to first byte, weighted by tokens, forgetting the old ones."""
    inflight = InFlight(rate_memory=4)
    assert inflight.counters_of("a").rate is None
    inflight.charge("a", 8000, 8000, now=0.0).first_byte(1.0)
    assert inflight.counters_of("a").rate == pytest.approx(8000)
    inflight.charge("a", 9000, 10, now=2.0).first_byte(3.0)  # too little to learn from
    inflight.charge("a", 9000, 9000, now=3.0).first_byte(3.1, learn=False)  # an error answer
    inflight.charge("a", 9000, 9000, now=3.0).close(3.1)
    assert inflight.counters_of("a").rate == pytest.approx(8000)
    inflight.charge("a", 4000, 4000, now=4.0).first_byte(5.0)
    assert inflight.counters_of("a").rate == pytest.approx((8000 * 0.75 + 4000) / (1 * 0.75 + 1))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_prefill_rate_behind_a_queue(order: tuple[int, int, int]) -> None:
    """Waiting behind others is no work: only the time since the last first byte counts, in any order."""
    inflight = InFlight(rate_memory=1e9)
    charges = [inflight.charge("a", 2000, 2000, now=0.1 * i) for i in range(3)]
    for turn, i in enumerate(order, 1):
        charges[i].first_byte(float(turn))
    assert inflight.counters_of("a").rate == pytest.approx(2000)
    idle = inflight.charge("a", 2000, 2000, now=100.0)
    idle.first_byte(101.0)
    assert inflight.counters_of("a").rate == pytest.approx(2000), "an idle queue is no slow one"


def test_progress_of_the_oldest() -> None:
    inflight = InFlight()
    first, second = inflight.charge("a", 900, 700, now=1.0), inflight.charge("a", 900, 300, now=2.0)
    counters = inflight.counters_of("a")
    assert (counters.busy_since, counters.head_tokens) == (1.0, 700)
    first.first_byte(5.0)
    assert (counters.busy_since, counters.head_tokens) == (5.0, 300)
    third = inflight.charge("a", 900, 100, now=6.0)
    third.close(7.0)
    assert (counters.busy_since, counters.head_tokens) == (5.0, 300), "an abort behind it is no progress"
    second.close(8.0)
    assert (counters.busy_since, counters.head_tokens) == (None, 0)


def test_random_calls_never_go_below_zero_and_end_at_zero() -> None:
    rng = random.Random(3)
    inflight = InFlight()
    fleet = {name: Instance(name, f"10.0.0.{i}:80", incarnation="0") for i, name in enumerate("abcd")}
    inflight.update(fleet.values())
    live: list[Charge] = []
    for step in range(4000):
        move = rng.random()
        if move < 0.4:
            prompt = rng.randint(0, 5000)
            rank = rng.choice([None, None, 0, 1])
            live.append(
                inflight.charge(
                    rng.choice("abcd"), prompt, rng.random() * prompt, step, rank=rank, prefill_only=rng.random() < 0.2
                )
            )
        elif live and move < 0.9:
            charge = rng.choice(live)
            action = rng.randrange(4)
            if action == 0:
                charge.moved(f"10.0.0.{rng.randint(0, 5)}:80", step)
            elif action == 1:
                charge.first_byte(float(step))
            else:
                charge.close()
                if action == 2:
                    live.remove(charge)
        elif move > 0.97:
            name = rng.choice("abcd")
            fleet[name] = Instance(name, fleet[name].address, incarnation=str(step))
            inflight.update(
                fleet.values() if rng.random() < 0.7 else [one for one in fleet.values() if one.name != name]
            )
        for name in ("a", "b", "c", "d", "a/0", "a/1"):
            assert min(counted(inflight, name)) >= -1e-6
            load = inflight.get(name, 0.0)
            assert load.waiting >= 0
            assert load.running is not None
            assert load.running >= 0
    for charge in live:
        charge.close()
    for name in ("a", "b", "c", "d", "a/0", "b/0", "c/1", "d/1"):
        assert counted(inflight, name) == NOTHING
        counters = inflight.find(name)
        assert counters is None or (counters.waiting_squares == 0 and not counters.open)


# -- reports


def test_reports_age_and_fail() -> None:
    reports = Reports(stale_after=2.0)
    assert reports.get("a", 0.0) is None
    reports.put("a", {0: Load(1, 2, 0.5), 1: Load(3, None, 0.25)}, 10.0)
    assert reports.get("a", 12.0) == Load(4, 2, 0.5, 10.0)
    assert reports.get("a", 12.0, 1) == Load(3, None, 0.25, 10.0)
    assert reports.get("a", 12.0, 2) is None, "a rank that is not reported is not idle"
    assert reports.get("a", 12.01) is None, "stale"
    reports.fail("a", "refused", invalid=False)
    assert reports.get("a", 11.0) is not None, "a missed poll lets the old one age"
    reports.fail("a", "NaN")
    assert reports.get("a", 11.0) is None, "an invalid report counts at once"
    reports.put("a", {None: Load(0)}, 11.0)
    assert reports.get("a", 11.0, 5) == Load(0, at=11.0), "an engine that tells no ranks speaks for all"
    reports.put("a", {}, 11.5)
    assert reports.get("a", 11.5) is None
    reports.retain(["b"])
    assert not reports.status


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), -1.0])
def test_illegal_numbers_are_no_report(bad: float) -> None:
    for values in ((bad,), (0, bad), (0, 0, bad)):
        with pytest.raises(InvalidReport, match="expected a finite number"):
            valid_load(*values)
    assert valid_load(0, None, 1.7) == Load(0, None, 1.0)
    assert combine([Load(1, None, 0.1), Load(2, None, 0.3)]) == Load(3, None, 0.3)


# -- metric pages

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 4.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 900.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",num_gpu_blocks="1024",engine="0"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.5e+06
vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} 1.0
"""

PAGES = [  # what, page, loads by rank, clamped
    ("vllm ranks", VLLM, {0: Load(3, 4, 0.25), 1: Load(0, 2, 0.75)}, 0),
    (
        "vllm old usage name, no rank",
        'vllm:num_requests_waiting{model_name="m"} 1\nvllm:gpu_cache_usage_perc{model_name="m"} .5',
        {None: Load(1, None, 0.5)},
        0,
    ),
    (
        "new name wins",
        "vllm:num_requests_waiting 1\nvllm:gpu_cache_usage_perc .5\nvllm:kv_cache_usage_perc .2",
        {None: Load(1, None, 0.2)},
        0,
    ),
    ("no usage at all", "vllm:num_requests_waiting 1", {None: Load(1)}, 0),
    ("usage above 1", "vllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 1.0001", {None: Load(0, None, 1.0)}, 1),
    (
        "two series of a rank",
        'vllm:num_requests_waiting{engine="0",model="a"} 1\nvllm:num_requests_waiting{engine="0",model="b"} 2',
        {0: Load(3)},
        0,
    ),
    ("colons rewritten, timestamp, CRLF", "vllm_num_requests_waiting 2 1712345678901\r\n", {None: Load(2)}, 0),
    (
        "label with brace and escaped quote",
        'vllm:num_requests_waiting{model_name="x}\\"y,engine=\\"7\\"",engine="1"} 2',
        {1: Load(2)},
        0,
    ),
    (
        "sglang",
        'sglang:num_queue_reqs{dp_rank="1"} 5\nsglang:num_running_reqs{dp_rank="1"} 6\n'
        'sglang:token_usage{dp_rank="1"} 0.5',
        {1: Load(5, 6, 0.5)},
        0,
    ),
    (
        "trtllm",
        "trtllm_num_requests_waiting 1\ntrtllm_num_requests_running 2\ntrtllm_kv_cache_utilization 0.5",
        {None: Load(1, 2, 0.5)},
        0,
    ),
    (
        "xllm",
        "num_waiting_requests 1\nnum_running_requests 2\nkv_cache_utilization_perc 0.5",
        {None: Load(1, 2, 0.5)},
        0,
    ),
]


@pytest.mark.parametrize("row", PAGES, ids=lambda row: row[0])
def test_pages(row: tuple[str, str, dict[int | None, Load], int]) -> None:
    _, page, loads, clamped = row
    scrape = parse(page)
    assert scrape.loads == loads
    assert scrape.clamped == clamped


@pytest.mark.parametrize(
    "page",
    [
        "",
        "go_goroutines 7\n",
        "<html>404</html>",
        "vllm:num_requests_running 1\n",
        "vllm:num_requests_waiting NaN",
        "vllm:num_requests_waiting -1",
        "vllm:num_requests_waiting +Inf",
        "vllm:num_requests_waiting many",
        "vllm:num_requests_waiting 1\nvllm:kv_cache_usage_perc NaN",
        "vllm:num_requests_waiting 1\nvllm:num_requests_running -2",
        " vllm:num_requests_waiting 1",
        'vllm:num_requests_waiting{engine="0" 1',
    ],
)
def test_pages_that_are_no_report(page: str) -> None:
    with pytest.raises(InvalidReport):
        parse(page)


def test_any_page_is_a_scrape_or_an_invalid_report() -> None:
    rng = random.Random(5)
    pieces = [*VLLM.splitlines(True), "{", "}", '"', "\\", "NaN", "\n", "vllm:", "é", "\0", " 1e999 ", "engine="]
    for _ in range(500):
        page = "".join(rng.choices(pieces, k=rng.randint(0, 12)))
        page = page[: rng.randint(0, len(page))]
        try:
            scrape = parse(page)
        except InvalidReport:
            continue
        assert all(load.waiting >= 0 for load in scrape.loads.values())


# -- heartbeats

BEAT = {
    "name": "a",
    "incarnation_id": "x1",
    "waiting_requests_num": 3,
    "gpu_cache_usage_perc": 0.4,
    "recent_max_ttft": 120,
    "recent_max_tbt": 25,
}

BEATS: list[tuple[Any, int]] = [
    (BEAT, 200),
    ({"name": "a", "incarnation_id": "x1", "load_metrics": {"gpu_cache_usage_perc": 0.4}}, 200),
    (BEAT | {"gpu_cache_usage_perc": 1.5}, 200),
    (BEAT | {"name": "b", "incarnation_id": "anything"}, 200),
    (b"not json", 400),
    (b"[" * 100_000, 400),
    (b"\xff", 400),
    ([], 400),
    ({}, 400),
    ({"name": ""}, 400),
    ({"name": 7}, 400),
    (BEAT | {"waiting_requests_num": -1}, 400),
    (BEAT | {"waiting_requests_num": "3"}, 200),
    (BEAT | {"waiting_requests_num": "many"}, 400),
    (BEAT | {"waiting_requests_num": "NaN"}, 400),
    (BEAT | {"gpu_cache_usage_perc": "-0.5"}, 400),
    ({"name": "a", "incarnationId": "x1", "loadMetrics": {"waitingRequestsNum": "3", "gpuCacheUsagePerc": 0.4}}, 200),
    ({"name": "a", "incarnation_id": "x1", "load_metrics": {}, "cache_event": [1], "new": None}, 200),
    (BEAT | {"load_metrics": None}, 200),
    (BEAT | {"waiting_requests_num": True}, 400),
    (BEAT | {"waiting_requests_num": 10**400}, 400),
    (BEAT | {"load_metrics": 5}, 400),
    (b'{"name": "a", "incarnation_id": "x1", "waiting_requests_num": NaN}', 400),
    (BEAT | {"name": "nobody"}, 409),
    (BEAT | {"incarnation_id": "x0"}, 409),
    ({key: value for key, value in BEAT.items() if key != "incarnation_id"}, 409),
]


def receive(beats: Heartbeats, body: bytes, incarnations: dict[str, str], now: float) -> Answer:
    """The three steps of the admin port's handler."""
    beat = parse_beat(body)
    if not isinstance(beat, Beat):
        return beat
    return refuse(beat, incarnations.get(beat.name)) or beats.take(beat, now)


@pytest.mark.parametrize(("beat", "status"), BEATS, ids=lambda value: str(value)[:60])
def test_heartbeats(beat: Any, status: int) -> None:
    beats = Heartbeats(stale_after=3.0)
    body = beat if isinstance(beat, bytes) else json.dumps(beat).encode()
    answer = receive(beats, body, {"a": "x1", "b": ""}, 100.0)
    assert answer.status == status, answer
    assert bool(answer.error) == bool(answer.status != 200)
    name = beat["name"] if status == 200 else "a"
    load = beats.get(name, 101.0)
    assert (load is not None) == (status == 200)
    if load is not None:
        assert beats.get(name, 103.1) is None
        assert load.usage <= 1


def test_an_invalid_heartbeat_takes_the_instance_out_until_the_next_valid_one() -> None:
    beats = Heartbeats()
    known = {"a": "x1"}
    assert receive(beats, json.dumps(BEAT).encode(), known, 1.0)[0] == 200
    assert receive(beats, json.dumps(BEAT | {"incarnation_id": "old"}).encode(), known, 1.1)[0] == 409
    assert beats.get("a", 1.2) is not None, "somebody else's heartbeat changes nothing"
    assert receive(beats, json.dumps(BEAT | {"waiting_requests_num": -2}).encode(), known, 1.3)[0] == 400
    assert beats.get("a", 1.4) is None
    assert receive(beats, json.dumps(BEAT).encode(), known, 1.5)[0] == 200
    assert beats.get("a", 1.6) == Load(3, None, 0.4, 1.5)


def test_heartbeats_are_answered_in_the_words_of_xllm() -> None:
    beats = Heartbeats()
    known = {"a": "x1"}
    for body, status, words in [
        (b"{", 400, "invalid heartbeat json"),
        (b'{"name": "a", "incarnation_id": "x1", "waiting_requests_num": -1}', 400, "invalid heartbeat json"),
        (b" " * (MAX_BYTES + 1), 400, "invalid heartbeat json"),
        (b'{"incarnation_id": "x1"}', 400, "missing instance name"),
        (b'{"name": "b"}', 409, "instance not registered or stale incarnation"),
        (b'{"name": "a", "incarnation_id": "x0"}', 409, "instance not registered or stale incarnation"),
        (b'{"name": "a", "incarnation_id": "x1"}', 200, ""),
    ]:  # fmt: skip
        assert receive(beats, body, known, 1.0)[:2] == (status, words)
    assert beats.get("a", 1.0) is None, "a heartbeat without a load is no report"
    beats = Heartbeats()
    assert receive(beats, json.dumps(BEAT).encode(), known, 1.0).status == 200
    assert receive(beats, b'{"name": "a", "incarnation_id": "x1"}', known, 2.0).status == 200
    assert beats.get("a", 2.0) == Load(3, None, 0.4, 1.0), "and takes nothing away"


# -- the poller, against real HTTP servers


async def until(condition: Any, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the condition is of another task's making
            await asyncio.sleep(0.005)


async def test_poller_one_frozen_engine_delays_nobody() -> None:
    pages = {"a": "vllm:num_requests_waiting 1", "b": "vllm:num_requests_waiting 2", "c": "nothing"}
    frozen = asyncio.Event()
    polls = {"a": 0, "b": 0, "c": 0}

    async def metrics(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        polls[name] += 1
        if name == "b" and frozen.is_set():
            await asyncio.sleep(3600)
        return web.Response(text=pages[name])

    app = web.Application()
    app.router.add_get("/{name}/metrics", metrics)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    clock = asyncio.get_running_loop().time
    poller = PrometheusPoller(interval=0.02, stale_after=0.5, timeout=0.3)
    try:
        poller.update(Target(name, f"http://127.0.0.1:{port}/{name}/metrics") for name in "abc")
        await until(lambda: poller.get("a", clock()) and poller.get("b", clock()))
        frozen.set()
        await until(lambda: poller.get("b", clock()) is None)
        before = polls["a"]
        await until(lambda: polls["a"] >= before + 5)
        a = poller.get("a", clock())
        assert a is not None
        assert a.waiting == 1
        await until(lambda: "TimeoutError" in poller.reports.status["b"].error)
        assert "no waiting gauge" in poller.reports.status["c"].error
        pages["a"] = "vllm:num_requests_waiting NaN"
        await until(lambda: poller.get("a", clock()) is None)
        pages["a"] = "vllm:num_requests_waiting 9"
        await until(lambda: poller.get("a", clock()) is not None)
        poller.update([])
        assert poller.get("a", clock()) is None
    finally:
        await poller.close()
        await runner.cleanup()


WAITING = "vllm:num_requests_waiting"
ESCAPED = 'a="' + chr(92) + '"'
N = 1_000_000
HOSTILE = {
    "one endless label": WAITING + "{" + "a" * N + "} 1",
    "quotes that never end": WAITING + "{" + ESCAPED * (N // 5) + "} 1",
    "labels without end": WAITING + "{" + ",".join(f'a{number}=""' for number in range(N // 10)) + "} 1",
    "braces": WAITING + "{" + "} " * (N // 2) + " 1x y",
    "values": WAITING + "{" + ("} 1 1" + " " * 100 + "x") * (N // 100),
    "blanks": WAITING + "{} 1 1" + " " * N + "x",
    "names": WAITING * (N // len(WAITING)),
    "lines": (WAITING + "{x\n") * (N // len(WAITING)),
    "ranks": "\n".join(f'{WAITING}{{engine="{number}"}} 1' for number in range(N // 30)),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_page_made_to_be_slow_costs_what_its_length_costs(what: str) -> None:
    """That it ends is the test: what looks at each pair of letters takes hours for a page of 1 MB."""
    with suppress(InvalidReport):
        assert len(parse(HOSTILE[what]).loads) == 1


@pytest.mark.parametrize(
    ("labels", "rank"),
    [
        ('engine="3"', 3),
        ('model_name="a}b, engine=\\"9\\"",engine="3"', 3),
        ('model_name="",engine="12345",x="y",', 12345),
        ('engine="' + "9" * 5000 + '"', None),
        ('x="y" engine="3"', 3),
        ('%="y",engine="3"', None),
    ],
)
def test_labels(labels: str, rank: int | None) -> None:
    assert list(parse(f"{WAITING}{{{labels}}} 1").loads) == [rank]


async def test_poller_unpacks_nothing() -> None:
    async def metrics(request: web.Request) -> web.Response:
        assert request.headers["Accept-Encoding"] == "identity"
        packed = gzip.compress(b"# " + bytes(8 << 20))
        return web.Response(body=packed, headers={"Content-Encoding": "gzip"})

    async with TestServer(app_of("/metrics", metrics)) as server:
        poller = PrometheusPoller(interval=0.02)
        try:
            poller.update([Target("sly", str(server.make_url("/metrics")))])
            await until(lambda: bool(poller.reports.status) and poller.reports.status["sly"].failed > 0)
            assert "no waiting gauge" in poller.reports.status["sly"].error
        finally:
            await poller.close()


def app_of(path: str, handler: Any) -> web.Application:
    app = web.Application()
    app.router.add_get(path, handler)
    return app


async def test_poller_refused_and_overlong_pages() -> None:
    async def metrics(request: web.Request) -> web.Response:
        return web.Response(text="# " + "x" * 5000 + "\nvllm:num_requests_waiting 1")

    async def elsewhere(request: web.Request) -> web.Response:
        raise web.HTTPFound("/metrics")

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/elsewhere", elsewhere)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    poller = PrometheusPoller(interval=0.02, max_bytes=1000)
    pages = {"big": "metrics", "gone": "none", "sly": "elsewhere"}
    try:
        poller.update([Target(name, f"http://127.0.0.1:{port}/{page}") for name, page in pages.items()])
        await until(lambda: len(poller.reports.status) == 3)
        await until(lambda: "answered 302" in poller.reports.status["sly"].error)
        await until(lambda: "longer than 1000" in poller.reports.status["big"].error)
        await until(lambda: "answered 404" in poller.reports.status["gone"].error)
    finally:
        await runner.cleanup()
    try:
        await until(
            lambda: "Error" in poller.reports.status["big"].error and "longer" not in poller.reports.status["big"].error
        )
    finally:
        await poller.close()
