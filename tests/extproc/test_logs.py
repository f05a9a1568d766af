"""Log lines: bounded under storms, about which request, without secrets and texts of requests."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from extproc import logs
from extproc.decider import PoolDecider
from extproc.decisions import DecisionLog, Record
from extproc.log_limits import ALWAYS, OTHERS, LogLimits
from extproc.logs import JsonLines, TextLines, redacted, trace_id
from extproc.messages import HttpRequest
from extproc.metrics import Metrics
from extproc.server import LoggingObserver
from tests.extproc.pool_model import engine, make_pool
from tests.extproc.test_tracing import PARENT, TRACE, configuration, exchange

PROMPT, KEY = "an unmistakable sentence of the client", "s3cret-key"


class Lines(logging.Handler):
    def __init__(self, **limits: Any) -> None:
        super().__init__()
        self.now = 0.0
        self.lines: list[str] = []
        self.records: list[logging.LogRecord] = []
        given: dict[str, Any] = {"timer": False, "clock": lambda: self.now}
        self.limits = LogLimits(self, **(given | limits))
        self.addFilter(self.limits)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.records.append(record)


@pytest.fixture
def quiet() -> Iterator[logging.Logger]:
    """A logger that nothing else hears."""
    logger = logging.getLogger("tests.storm")
    logger.propagate = False
    logger.setLevel(logging.DEBUG)
    yield logger
    logger.handlers.clear()


# --- storms -----------------------------------------------------------------------------------------------------------


def test_a_storm_is_its_first_lines_and_one_a_period(quiet: logging.Logger) -> None:
    quiet.addHandler(handler := Lines(burst=3, period=10.0))
    for _ in range(800):  # 100 s, 8 lines a second
        quiet.warning("instance %s fails: %s", "a", "why")
        handler.now += 0.125
    handler.limits.flush(all_of_them=True)
    assert Counter(handler.lines) == {
        "instance a fails: why": 30,
        "77 more lines like this in 10 s: instance a fails: why": 10,
    }
    summary = handler.records[3]
    assert (summary.name, summary.levelno, summary.left_out) == (quiet.name, logging.WARNING, 77)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("one", "other", "together"),
    [
        (("lost %s", "a"), ("lost %s", "a"), True),
        (("lost %s", "a"), ("lost %s", "b"), False),
        (("lost %s", "a"), ("found %s", "a"), False),
        (("lost %s: %s", "a", "x"), ("lost %s: %s", "a", "y"), True),
        (("lost %d", 1), ("lost %d", 2), True),
        (("lost %(name)s", {"name": "a"}), ("lost %(name)s", {"name": "b"}), True),
        (("lost",), ("lost",), True),
        ((ValueError("x"),), (ValueError("x"),), True),
        (("wrong %d", "a"), ("wrong %d", "a"), True),
    ],
)
def test_kinds(quiet: logging.Logger, one: Any, other: Any, together: bool) -> None:
    handler = Lines(burst=1)
    records = [quiet.makeRecord(quiet.name, logging.INFO, "", 0, msg, args, None) for msg, *args in (one, other)]
    for record, (_, *args) in zip(records, (one, other), strict=True):
        record.args = args[0] if args and isinstance(args[0], dict) else tuple(args)
    assert [bool(handler.filter(record)) for record in records] == [True, not together]


def test_levels(quiet: logging.Logger) -> None:
    quiet.addHandler(handler := Lines(burst=1))
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        for _ in range(5):
            quiet.log(level, "x")
    assert Counter(record.levelname for record in handler.records) == {"DEBUG": 5, "INFO": 1, "WARNING": 1, "ERROR": 1}


def test_a_record_of_who_did_what_is_complete(quiet: logging.Logger) -> None:
    quiet.addHandler(handler := Lines(burst=1))
    for _ in range(5):
        quiet.warning("admin action", extra=ALWAYS)
    assert len(handler.records) == 5


def test_more_kinds_than_are_counted_share_one(quiet: logging.Logger) -> None:
    quiet.addHandler(handler := Lines(burst=2, period=10.0, max_kinds=10))
    for number in range(500):
        quiet.error("instance %s fails", f"i{number}")
    assert len(handler.lines) == 10 + 2
    assert len(handler.limits._kinds) == 11
    handler.now = 11.0
    assert handler.limits.flush() is False
    assert handler.lines[-1] == "488 more lines like this in 10 s: instance i12 fails"
    quiet.error("instance %s fails", "i500")  # room again
    assert handler.lines[-1] == "instance i500 fails"
    assert (OTHERS,) not in handler.limits._kinds


def test_every_line_is_written_or_counted_and_the_bound_holds(quiet: logging.Logger) -> None:
    rng = random.Random(3)
    burst, period, kinds = 3, 10.0, 4
    quiet.addHandler(handler := Lines(burst=burst, period=period, max_kinds=kinds))
    logged = 0
    for _ in range(3000):
        quiet.warning("instance %s fails", rng.choice("abcdef"))
        logged += 1
        handler.now += rng.expovariate(10)
        if rng.random() < 0.01:
            handler.limits.flush()
    handler.limits.flush(all_of_them=True)
    counted = sum(getattr(record, "left_out", 0) for record in handler.records)
    written = sum(not hasattr(record, "left_out") for record in handler.records)
    assert written + counted == logged
    periods = handler.now / period + 1
    assert len(handler.records) <= periods * (kinds + 1) * (burst + 1)


def test_the_count_comes_when_the_storm_has_ended(quiet: logging.Logger) -> None:
    done = threading.Event()

    class Told(Lines):
        def emit(self, record: logging.LogRecord) -> None:
            super().emit(record)
            if hasattr(record, "left_out"):
                done.set()

    quiet.addHandler(handler := Told(burst=1, period=0.05, timer=True, clock=time.monotonic))

    def storm() -> None:
        for _ in range(50):
            quiet.error("x")

    threads = [threading.Thread(target=storm) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done.wait(20)
    handler.limits.flush(all_of_them=True)
    total = sum(getattr(record, "left_out", 1) for record in handler.records)
    assert total == 200


def test_at_the_end_of_the_process_no_line_and_no_thread_is_missing(quiet: logging.Logger, monkeypatch: Any) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    quiet.addHandler(handler := Lines(burst=1, timer=True))
    for _ in range(3):
        quiet.error("x")
    handler.limits.flush(all_of_them=True)
    assert handler.lines == ["x", "2 more lines like this in 10 s: x"]


# --- what a line says -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("etcd http://ada:pw@10.0.0.1:2379: away", "etcd http://***@10.0.0.1:2379: away"),
        ("https://user@host/x?q=a@b", "https://***@host/x?q=a@b"),
        ("authorization: Bearer abc.def-ghi==", "authorization: Bearer ***"),
        ("{'Authorization': 'Basic dTpw'}", "{'Authorization': 'Basic ***'}"),
        ("sent with Bearer abcdefgh", "sent with Bearer ***"),
        ("{'X-Internal-Token': 'abc', 'a': 1}", "{'X-Internal-Token': '***', 'a': 1}"),
        ("api_key=abc&x=1", "api_key=***&x=1"),
        ('{"password": "p w"}', '{"password": "*** w"}'),
        ("a bearer of 12 tokens", "a bearer of 12 tokens"),
        ("tokenizer /models/a@b: password too short", "tokenizer /models/a@b: password too short"),
        ("x" * 9000, "x" * 8000 + "..."),
    ],
)
def test_redacted(text: str, shown: str) -> None:
    assert redacted(text) == shown


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (PARENT, TRACE),
        (f"cc-{TRACE}-{'1' * 16}-01-later", TRACE),
        (f"00-{'0' * 32}-{'1' * 16}-01", None),
        ("", None),
        (None, None),
        (PARENT + "\n", None),
        ("x" * 300, None),
    ],
)
def test_trace_id(given: str | None, found: str | None) -> None:
    assert trace_id(given) == found


def decide(body: Any, pool: Any, **headers: str) -> None:
    """One request in a task of its own, as the server has it."""
    decider = PoolDecider([pool], Metrics("test"), DecisionLog())
    data = body if isinstance(body, bytes) else orjson.dumps(body)

    async def exchange() -> None:
        outcome = await decider.decide(HttpRequest("POST", "/v1/chat/completions", headers, data))
        LoggingObserver().fault("decider", ValueError(PROMPT))
        if outcome.ticket is not None:
            outcome.ticket.on_response_headers(503, outcome.destinations[0])
            outcome.ticket.close()

    asyncio.run(exchange())


@pytest.fixture(params=["text", "json"])
def written(request: pytest.FixtureRequest) -> Iterator[tuple[str, io.StringIO]]:
    """What the root logger writes at level debug, in both forms."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if request.param == "json" else TextLines())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield request.param, stream
    root.removeHandler(handler)
    root.setLevel(level)


def test_lines_name_their_request(written: tuple[str, io.StringIO]) -> None:
    form, stream = written
    pool = make_pool(engine("engine-a"))
    for number in range(2):
        headers = {"x-request-id": f"r-{number}", "traceparent": PARENT}
        decide({"model": "qwen3-8b", "messages": [{"role": "user", "content": "x"}]}, pool, **headers)
    logging.getLogger("extproc.app").info("of no request")
    lines = stream.getvalue().splitlines()
    fault = [line for line in lines if "decider raised" in line]
    if form == "json":
        found = [json.loads(line) for line in fault]
        assert [(one["request_id"], one["trace_id"]) for one in found] == [("r-0", TRACE), ("r-1", TRACE)]
        assert set(json.loads(lines[-1])) == {"ts", "level", "logger", "message"}
    else:
        assert [line.rpartition(" [")[2] for line in fault] == [
            f"request_id=r-{number} trace_id={TRACE}]" for number in range(2)
        ]
        assert lines[-1].endswith("INFO    extproc.app: of no request")


BODIES: list[Any] = [
    {"model": "qwen3-8b", "messages": [{"role": "user", "content": PROMPT}]},
    {"model": "qwen3-8b", "messages": [{"role": PROMPT, "content": PROMPT, "name": PROMPT}]},
    {"model": "qwen3-8b", "messages": PROMPT},
    {"model": "qwen3-8b", "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}, {"type": "x"}]}]},
    {"model": "qwen3-8b", "messages": [{"role": "user", "content": PROMPT}], "tools": [PROMPT]},
    {"model": "qwen3-8b", "messages": [{"role": "user", "content": PROMPT}], "chat_template": "{{ " + PROMPT + " }}"},
    {"model": "qwen3-8b", "messages": [{"role": "user", "content": PROMPT}], "cache_salt": [PROMPT]},
    {"model": "qwen3-8b", "messages": [{"role": "user", "content": PROMPT + "\ud800"}]},
    orjson.dumps({"messages": [{"role": "user", "content": PROMPT}]})[:-2],
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_no_text_and_no_secret_of_a_request_is_logged(
    written: tuple[str, io.StringIO], body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, stream = written
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {KEY}", "x-api-key": KEY, "cookie": KEY, "x-request-id": "r-1"}
    pool = make_pool(engine("engine-a"))
    decide(data, pool, **headers)

    def fail(*_: object) -> None:
        raise ValueError(PROMPT)

    monkeypatch.setattr(pool.prompter, "_prompt_of", fail)
    decide(data, pool, **headers)
    text = stream.getvalue()
    assert "request r-1" in text
    assert "unmistakable" not in text
    assert KEY not in text


async def test_no_text_and_no_secret_of_an_exchange_is_logged(written: tuple[str, io.StringIO]) -> None:
    from extproc.app import App

    given = configuration(endpoint="http://127.0.0.1:1", headers={"authorization": f"Bearer {KEY}"})
    app = App(given)
    try:
        await exchange((await app.start())["ext_proc"])
    finally:
        await app.stop()
    text = written[1].getvalue()
    assert "request r-7" in text
    assert "takes no spans" in text
    assert "unmistakable" not in text
    assert KEY not in text


def test_set_up_logs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As `kvcar serve` has it: a storm on the root handler, an exception with a secret in it."""
    ended: list[Any] = []
    monkeypatch.setattr("atexit.register", lambda function, **given: ended.append((function, given)))
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        logs.set_up_logs("info", "json")
        for number in range(100):
            try:
                raise ValueError(f"Authorization: Bearer {KEY}")
            except ValueError:
                logging.getLogger("extproc.x").exception("failed on %d", number)
        for function, given in ended:
            function(**given)
        assert logging.getLogger("opentelemetry").getEffectiveLevel() == logging.WARNING
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == [
        *(f"failed on {number}" for number in range(5)),
        "95 more lines like this in 10 s: failed on 5",
    ]
    assert lines[-1]["left_out"] == 95
    assert "Bearer ***" in lines[0]["exception"]
    assert KEY not in json.dumps(lines)


def test_the_decision_log_shows_the_trace() -> None:
    assert Record(0.0, "r", "/", traceparent=PARENT).as_dict()["trace_id"] == TRACE


def test_the_page_shows_every_attribute() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tracing-and-logs.md").read_text("utf-8")
    source = (Path(__file__).parents[2] / "extproc" / "tracing.py").read_text("utf-8")
    names = {word for word in source.replace('"', " ").split() if word.startswith(("kvcar.", "gen_ai.", "http.resp"))}
    names = {name.rstrip(":,]()") for name in names if "*" not in name}
    assert len(names) > 12
    assert not [name for name in names if f"`{name}`" not in page]
