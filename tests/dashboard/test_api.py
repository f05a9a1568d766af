"""The dashboard's endpoints over a real App: overview, decision, explain, files."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from extproc.dashboard.pages import FILES
from extproc.scorers import SCORERS
from tests.dashboard.world import SIZE, World, wait_for

pytestmark = pytest.mark.real
EXPLAIN = "/v1/internal/explain"
LONG = "who holds the prefix of this prompt, and who is idle enough to go on from there? " * 8


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(3, pool={"allowed_scorers": ["round_robin"]}) as made:
        made.ask(LONG)
        made.settle()
        yield made


def call(world: World, path: str, data: bytes | None = None, **headers: str) -> tuple[int, Any, bytes]:
    request = urllib.request.Request(
        world.url + path, data, {key.replace("_", "-"): value for key, value in headers.items()}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], **more}


def test_overview_says_what_the_status_says(world: World) -> None:
    found, status = world.get("/v1/internal/overview"), world.get("/status")["pools"][0]
    keys = ("name", "address", "role", "state", "in_flight")
    assert [[one[key] for key in keys] for one in found["instances"]] == [
        [one[key] for key in keys] for one in status["instances"]
    ]
    volatile = ("event_age_seconds", "problem", "pool")
    assert [{k: v for k, v in one.items() if k not in volatile} for one in found["streams"]] == [
        {k: v for k, v in one.items() if k not in volatile} for one in status["streams"]
    ]
    assert sum(one["blocks"]["device"] for one in found["instances"]) == sum(
        one["blocks"]["device"] for one in status["streams"] if one["blocks"]
    )
    assert sum(one["chosen"] for one in found["instances"]) == found["pools"][0]["instances"] - 2 == 1


def test_overview_tells_only_newer_history(world: World) -> None:
    first = world.get("/v1/internal/overview")["history"]
    again = wait_for(
        lambda: (found := world.get(f"/v1/internal/overview?since={first['tick']}")["history"])["totals"] and found,
        "the next sample",
    )
    assert all(row[0] > first["tick"] for rows in again["totals"].values() for row in rows)


@pytest.mark.parametrize("since", ["x", "-2", "", "1e3", "9" * 13, "\u0663"])
def test_overview_refuses_a_bad_tick(world: World, since: str) -> None:
    assert call(world, f"/v1/internal/overview?since={urllib.request.quote(since)}")[0] == 400  # type: ignore[attr-defined]


def test_decisions_by_number(world: World) -> None:
    exchange = world.ask(LONG + "one more")
    row = world.get("/v1/internal/overview")["decisions"][0]
    assert (row["request_id"], row["chosen"]) == (exchange.record.request_id, exchange.record.decision.chosen.name)  # type: ignore[union-attr]
    assert row["cached_tokens"] == row["hit_tokens"] > 0
    whole = world.get(f"/v1/internal/decision?number={row['number']}")
    assert whole["decision"] == world.get("/decisions?limit=1")["decisions"][0]["decision"]
    assert len(whole["decision"]["candidates"]) == 3
    for query, status in (("?number=0", 404), ("?number=99999", 404), ("?number=x", 400), ("", 400)):
        assert call(world, f"/v1/internal/decision{query}")[0] == status


def test_explain_is_what_a_request_would_meet(world: World) -> None:
    world.settle()
    found = world.get(EXPLAIN, chat(LONG))
    own = found["scorers"][0]
    assert (own["name"], own["use"]) == ("car", "pool")
    assert [row["name"] for row in found["scorers"]] == [
        "car",
        "round_robin",
        *(n for n in SCORERS if n not in ("car", "round_robin")),
    ]
    assert [row["use"] for row in found["scorers"]] == ["pool", "allowed", *["default"] * (len(SCORERS) - 2)]
    assert found["blocks"] == (found["tokens"] - 1) // SIZE
    holder = next(one for one in found["instances"] if one["name"] == own["chosen"])
    assert holder["ranks"] == [[found["blocks"], 0, 0]]
    exchange = world.ask(LONG)
    decision = exchange.record.decision
    assert decision is not None
    assert decision.chosen is not None
    assert (decision.chosen.name, decision.hit_tokens) == (own["chosen"], own["hit_tokens"])
    assert decision.request.tokens == found["tokens"]
    assert [[one.name, list(cost)] for one, cost in zip(decision.candidates, decision.main.costs, strict=True)] == own[
        "costs"
    ]


def test_explain_takes_no_turn_and_charges_nobody(world: World) -> None:
    """Equal candidates take turns: asking for an explanation must not move them, for any scorer."""
    before = world.get("/status")
    for turn in range(3):
        body = chat(f"{turn} never seen before")
        told = [world.get(EXPLAIN, body)["scorers"] for _ in range(4)]
        names = [[row["chosen"] for row in one] for one in told]
        assert names == [names[0]] * 4
        assert world.ask(body["messages"]).record.decision.chosen.name == names[0][0]  # type: ignore[union-attr]
        world.settle()
    after = world.get("/status")
    assert [one["in_flight"] for one in after["pools"][0]["instances"]] == [
        one["in_flight"] for one in before["pools"][0]["instances"]
    ]


def test_explain_shows_at_most_so_many_tokens(world: World) -> None:
    whole = world.get(EXPLAIN, chat(LONG))
    assert len(whole["ids"]) == len(whole["texts"]) == whole["tokens"]
    assert "".join(whole["texts"]).count(LONG[:40]) >= 1
    few = world.get(f"{EXPLAIN}?tokens=3", chat(LONG))
    assert (few["ids"], few["tokens"]) == (whole["ids"][:3], whole["tokens"])
    for bad in ("x", "-1", "8193", "999999", ""):
        assert call(world, f"{EXPLAIN}?tokens={bad}", json.dumps(chat("x")).encode())[0] == 400


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"", 400, "no_body"),
        (b"hello", 400, "bad_json"),
        (b"[1]", 400, "bad_request"),
        (b'{"model": 1}', 400, "bad_request"),
        (b'{"path": 1, "prompt": "x"}', 400, "bad_request"),
        (b'{"path": "/nowhere", "prompt": "x"}', 200, "path"),
        (b'{"model": "gpt", "prompt": "x"}', 200, "model"),
        (b'{"model": "demo"}', 200, "bad_request"),
        (b'{"model": "demo", "prompt": ["a", "b"]}', 200, "batch"),
        (b'{"model": "demo", "prompt": "x"}', 200, None),
        (b'{"prompt": [1, 2, 3]}', 200, None),
        (b'{"model": "demo", "path": "/v1/completions", "prompt": "\\ud800"}', 200, "bad_request"),
    ],
)
def test_explain_of_any_body(world: World, body: bytes, status: int, reason: str | None) -> None:
    code, _, data = call(world, EXPLAIN, body)
    found = json.loads(data)
    assert (code, found["reason"]) == (status, reason)
    assert ("error" in found) == (status == 400 or reason == "path")


def test_no_prompt_is_shown(world: World) -> None:
    secret = "the-quick-brown-secret"
    exchange = world.ask(f"{secret} {LONG}")
    world.send({"model": "demo", "messages": [{"role": "user", "content": [{"type": "video", "text": secret}]}]})
    number = world.get("/v1/internal/overview")["decisions_seen"]
    assert exchange.record.decision is not None
    for path in ("/v1/internal/overview", *(f"/v1/internal/decision?number={number - back}" for back in (0, 1))):
        assert secret.encode() not in call(world, path)[2]


def test_files_are_open_and_strict() -> None:
    with World(1, admin={"token": "a-long-secret"}) as world:
        for path, file in FILES.items():
            status, headers, body = call(world, path)
            assert (status, body, headers["Content-Type"]) == (200, file.body, f"{file.kind}; charset=utf-8")
            assert headers["Content-Security-Policy"] == (
                "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
                "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            )
            assert headers["X-Content-Type-Options"] == "nosniff"
            again = call(world, path, If_None_Match=headers["ETag"])
            assert (again[0], again[2]) == (304, b"")
            assert again[1]["Content-Security-Policy"]
        for path in ("/v1/internal/overview", "/v1/internal/decision?number=1"):
            assert call(world, path)[0] == 401
            assert call(world, path, X_Internal_Token="a-long-secret")[0] in (200, 404)
        assert call(world, EXPLAIN, b"{}")[0] == 401
        assert call(world, "/dashboard/../admin/server.py")[0] in (401, 404)
