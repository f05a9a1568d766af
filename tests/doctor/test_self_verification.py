"""Predictions against delivered hits: the rules as tables, and real (emulated) engines, healthy and not."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from examples.emulator.process import EmulatorProcess
from examples.local.stack import TOKENIZER
from extproc.app import App
from extproc.messages import HttpRequest
from extproc.self_verification import (
    CAUSES,
    LAG,
    LOG_EVERY,
    NOT_OBSERVED,
    REMEMBERED,
    TOO_FEW,
    SelfVerification,
    Verdict,
    judge,
)
from tests.doctor.support import configuration

ROWS: list[tuple[str, dict[str, Any], Verdict]] = [
    ("as predicted", {"predicted": 64, "cached": 64}, Verdict.EQUAL),
    ("less than a block apart", {"predicted": 64, "cached": 79}, Verdict.EQUAL),
    ("a block less", {"predicted": 64, "cached": 48}, Verdict.OVER),
    ("a block more", {"predicted": 64, "cached": 80}, Verdict.UNDER),
    ("as predicted, others were at work", {"predicted": 64, "cached": 64, "contended": True}, Verdict.EXCUSED),
    ("a block less, others waited", {"predicted": 64, "cached": 48, "contended": True}, Verdict.EXCUSED),
    ("a block more, others waited", {"predicted": 64, "cached": 80, "contended": True}, Verdict.EXCUSED),
    ("other prompt tokens are never excused", {"counted": 101, "contended": True}, Verdict.TOKENS),
    ("count not told", {"predicted": 64, "cached": 64, "counted": None}, Verdict.EQUAL),
    ("the least of several ranks, more", {"predicted": 0, "cached": 80, "at_least": True}, Verdict.EQUAL),
    ("the least of several ranks, less", {"predicted": 80, "cached": 0, "at_least": True}, Verdict.OVER),
    ("block size unknown", {"predicted": 0, "cached": 0, "block": 0}, Verdict.EQUAL),
]


@pytest.mark.parametrize(("name", "given", "verdict"), ROWS, ids=[row[0] for row in ROWS])
def test_verdicts(name: str, given: dict[str, Any], verdict: Verdict) -> None:
    values = {"predicted": 0, "cached": 0, "tokens": 100, "counted": 100, "block": 16, "contended": False}
    assert judge(**(values | {"at_least": False} | given)) is verdict, name


def fed(*parts: tuple[Verdict, int], window: int = 100, enough: int = 10) -> SelfVerification:
    one = SelfVerification("p", window=window, enough=enough)
    for verdict, count in parts:
        for _ in range(count):
            one.add(verdict, 0.0, 0.0)
    return one


EQUAL, OVER, UNDER, TOKENS, EXCUSED = Verdict.EQUAL, Verdict.OVER, Verdict.UNDER, Verdict.TOKENS, Verdict.EXCUSED


@pytest.mark.parametrize(
    ("parts", "state", "cause"),
    [
        ([], "unknown", None),
        ([(OVER, 9)], "unknown", None),
        ([(EXCUSED, 100)], "unknown", None),
        ([(EQUAL, 10)], "ok", None),
        ([(EQUAL, 90), (OVER, 10)], "ok", None),
        ([(EQUAL, 80), (OVER, 20)], "drift", OVER),
        ([(EQUAL, 10), (UNDER, 30), (OVER, 10)], "drift", UNDER),
        ([(UNDER, 30), (TOKENS, 31)], "drift", TOKENS),
        # other tokens are a share of all, excused or not
        ([(EXCUSED, 80), (TOKENS, 20)], "drift", TOKENS),
        ([(EXCUSED, 81), (TOKENS, 19)], "ok", None),
        ([(EQUAL, 80), (OVER, 20), (EXCUSED, 100)], "drift", None),
        # excused ones count neither for nor against
        ([(EXCUSED, 80), (EQUAL, 10), (OVER, 2)], "ok", None),
        ([(EXCUSED, 80), (EQUAL, 10), (OVER, 3)], "drift", OVER),
        # it ends below the lower threshold only, and the window forgets
        ([(EQUAL, 80), (OVER, 20), (EQUAL, 85)], "drift", OVER),
        ([(EQUAL, 80), (OVER, 20), (EQUAL, 91)], "ok", None),
    ],
)
def test_states(parts: list[tuple[Verdict, int]], state: str, cause: Verdict | None) -> None:
    told = fed(*parts).as_dict()
    assert told["reason"] == (TOO_FEW if state == "unknown" else "")
    assert fed(*parts).as_dict(observed=False)["reason"] == (NOT_OBSERVED if state == "unknown" else "")
    assert told["state"] == state
    assert cause is None or told["likely_cause"] == CAUSES[cause][0]
    assert bool(told["remedy"]) == bool(told["likely_cause"]) == (state == "drift")


def test_contended() -> None:
    """By who waits, and by who lacked the same block at the same engine a moment ago."""
    one = SelfVerification("p")
    assert not one.contended("a", b"block", 0, 10.0)
    assert one.contended("a", b"block", 1, 10.0)
    assert one.contended("a", None, 1, 10.0)
    one.active("a", b"block", 10.0)
    one.active("a", None, 10.0)
    assert one.contended("a", b"block", 0, 10.0 + LAG / 2)
    assert not one.contended("a", b"other", 0, 10.0 + LAG / 2)
    assert not one.contended("a", None, 0, 10.0 + LAG / 2)
    assert not one.contended("b", b"block", 0, 10.0 + LAG / 2)
    assert not one.contended("a", b"block", 0, 10.0 + 1.01 * LAG)
    for number in range(REMEMBERED + 1):
        one.active("a", number.to_bytes(4, "big"), 10.0)
    assert not one.contended("a", b"block", 0, 10.0)
    assert not one.contended("a", bytes(4), 0, 10.0)
    assert one.contended("a", (1).to_bytes(4, "big"), 0, 10.0)


def test_the_window_is_bounded_and_holds_judged_answers() -> None:
    rng = random.Random(7)
    one = SelfVerification("p", window=50, enough=5)
    judged: list[tuple[Verdict, float]] = []
    every: list[Verdict] = []
    for _ in range(500):
        verdict, share = rng.choice(list(Verdict)), rng.random()
        every.append(verdict)
        if verdict is not EXCUSED:
            judged = [*judged, (verdict, share)][-50:]
        one.add(verdict, share, 0.0)
        told = one.as_dict()
        assert told["samples"] == len(judged)
        assert all(told[str(v)] == sum(x is v for x, _ in judged) for v in Verdict if v is not EXCUSED)
        assert told["excused"] == every.count(EXCUSED)
        if judged:
            assert told["difference"] == pytest.approx(sum(s for _, s in judged) / len(judged), abs=1e-3)


def test_a_busy_engine_is_judged_by_the_few_that_are_not_excused() -> None:
    one = SelfVerification("p", window=50, enough=5)
    for _ in range(5):
        for _ in range(100):
            one.add(EXCUSED, 0.0, 0.0)
        one.add(Verdict.UNDER, -0.5, 0.0)
    assert one.state == "drift"


def test_a_drift_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "extproc.self_verification")
    one = SelfVerification("p", window=20, enough=10)
    for now in (0.0, 1.0, LOG_EVERY + 1):  # three drifts, each over again; the second comes too soon
        for verdict in [EQUAL] * 20 + [TOKENS] * 20 + [EQUAL] * 20:
            one.add(verdict, 0.0, now)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "template" in lines[0]
    assert "kvcar doctor" in lines[0]


# ---------------------------------------------------------------- engines


async def conversations(app: App, engine: EmulatorProcess, count: int, *, at_once: int) -> None:
    """Turns of a few conversations, routed by kvcar's decider and served by the engine, as a gateway would."""
    rng = random.Random(3)
    words = "river lake hill field town street house garden window table letter morning evening winter".split()
    histories: list[list[dict[str, str]]] = [[] for _ in range(8)]
    slots = asyncio.Semaphore(at_once)

    async def turn(index: int) -> None:
        async with slots:
            history = histories[index]
            history.append({"role": "user", "content": " ".join(rng.choices(words, k=40))})
            body = {"model": "demo", "messages": list(history), "max_tokens": 4}
            data = json.dumps(body).encode()
            headers = {":path": "/v1/chat/completions", ":method": "POST"}
            outcome = await app.decider.decide(HttpRequest("POST", "/v1/chat/completions", headers, data))
            assert outcome.ticket is not None, outcome
            answer = await asyncio.to_thread(engine.call, "/v1/chat/completions", body)
            outcome.ticket.on_response_headers(200, engine.address)
            outcome.ticket.on_first_byte()
            usage = answer["usage"]
            outcome.ticket.on_usage(usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"])
            outcome.ticket.close()
            history.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            if at_once == 1:
                await applied(app, engine)

    for start in range(0, count, len(histories)):
        await asyncio.gather(*(turn(index) for index in range(min(len(histories), count - start))))


async def applied(app: App, engine: EmulatorProcess) -> None:
    """Until kvcar has seen what the engine has sent (what it could see)."""
    state = await asyncio.to_thread(engine.call, "/emulator/state?blocks=0")
    last = (state["ranks"][0]["buffered"] or [0, -1])[1]
    async with asyncio.timeout(20):
        while (app.pools[0].directory.status()[0].sequence or 0) < last:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def verified(engine: EmulatorProcess, *, at_once: int, **pool: Any) -> tuple[dict[str, Any], str]:
    """(self_verification of /status, /metrics) after some conversations."""
    app = App(configuration([engine], pool=pool))
    await app.start()
    try:
        async with asyncio.timeout(20):
            while not app.readiness()[1]["pools"]["demo"]["synchronized"]:  # noqa: ASYNC110 - a directory has no event
                await asyncio.sleep(0.02)
        await conversations(app, engine, 40, at_once=at_once)
        return app.status()["pools"][0]["self_verification"], app.metrics("")[0].decode()
    finally:
        await app.stop()


@pytest.fixture(scope="module")
def engine() -> Any:
    # room for about half of what eight conversations need: there are evictions all the time
    with EmulatorProcess(name="a", block_size=16, blocks=96, decode_rate=2000, prefill_rate=50_000) as process:
        process.call("/v1/completions", {"prompt": [5] * 40, "max_tokens": 1})
        yield process


def drift_of(page: str) -> float | None:
    line = next((line for line in page.splitlines() if line.startswith("kvcar_hit_prediction_drift_ratio{")), None)
    return None if line is None else float(line.rpartition(" ")[2])


@pytest.mark.real
async def test_a_healthy_engine_under_eviction_is_ok(engine: EmulatorProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.self_verification.LAG", 0.0)  # the test waits for the events itself
    told, page = await verified(engine, at_once=1)
    assert (told["state"], told["samples"], told["equal"]) == ("ok", 40, 40), told
    assert drift_of(page) == 0.0


@pytest.mark.real
async def test_requests_at_the_same_time_are_excused(engine: EmulatorProcess) -> None:
    told, _ = await verified(engine, at_once=4)
    assert told["state"] != "drift", told
    assert told["excused"] > 20, told
    assert told["prompt_token_mismatch"] == 0


@pytest.mark.real
async def test_a_wrong_template_is_a_drift(engine: EmulatorProcess, tmp_path: Path) -> None:
    source = (TOKENIZER / "chat_template.jinja").read_text("utf-8")
    (tmp_path / "wrong.jinja").write_text(source.replace("<|im_start|>", " <|im_start|>"), "utf-8")
    told, page = await verified(engine, at_once=4, chat_template=str(tmp_path / "wrong.jinja"))
    assert told["state"] == "drift", told
    assert told["likely_cause"] == CAUSES[TOKENS][0]
    assert drift_of(page) is not None


@pytest.mark.real
async def test_a_lost_stream_is_a_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.self_verification.LAG", 0.0)
    with EmulatorProcess(name="a", block_size=16, blocks=512, decode_rate=2000) as process:
        process.call("/v1/completions", {"prompt": [5] * 40, "max_tokens": 1})
        # numbered, neither sent nor replayable: the next message would show the gap, and none comes
        process.control(lose=1000)
        told, _ = await verified(process, at_once=1)
    assert (told["state"], told["likely_cause"]) == ("drift", CAUSES[UNDER][0]), told
