"""The admin port's own pages: guard, health, limits of the decision list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from extproc.admin.server import make_app


class Source:
    """Answers of a kvcar that is ready or not."""

    ready = True

    def readiness(self) -> tuple[bool, Mapping[str, Any]]:
        return self.ready, {"pools": {}}

    def status(self) -> Mapping[str, Any]:
        return {"text": "half a pair \ud800", "number": float("nan")}

    def streams(self) -> list[Mapping[str, Any]]:
        raise RuntimeError("a fault of ours")

    def decisions(self, limit: int, pool: str | None, reason: str | None, request_id: str | None) -> list[Any]:
        return [limit]

    def metrics(self, accept: str) -> tuple[bytes, str]:
        return b"x 1\n", "text/plain; version=0.0.4; charset=utf-8"


def client(token: str | None = None) -> TestClient[Any, Any]:
    return TestClient(TestServer(make_app(Source(), token=token)))


@pytest.mark.parametrize(
    ("limit", "status"),
    [("1", 200), ("10000", 200), ("0", 400), ("10001", 400), ("-1", 400), ("x", 400), ("", 400), ("00001", 200),
     ("000001", 400), ("0" * 5 + "9" * 5000, 400), ("\u0663", 400)],
)  # fmt: skip
async def test_limit_of_decisions(limit: str, status: int) -> None:
    async with client() as http:
        assert (await http.get("/decisions", params={"limit": limit})).status == status


async def test_token_guards_all_but_health_and_metrics() -> None:
    async with client("a-long-secret") as http:
        for path in ("/healthz", "/readyz", "/metrics"):
            assert (await http.get(path)).status == 200
        for headers in (
            {},
            {"X-Internal-Token": "wrong"},
            {"Authorization": "Bearer a-long"},
            {"X-Internal-Token": "é"},
        ):
            answer = await http.get("/decisions", headers=headers)
            assert (answer.status, await answer.json()) == (401, {"error": "invalid internal token"})
        for headers in ({"X-Internal-Token": "a-long-secret"}, {"Authorization": "Bearer a-long-secret"}):
            assert (await http.get("/decisions", headers=headers)).status == 200


async def test_answers_are_json_whatever_they_hold() -> None:
    async with client() as http:
        assert (await http.get("/status")).status == 200
        answer = await http.get("/streams")
        assert (answer.status, await answer.json()) == (500, {"error": "internal error, see the log"})
        answer = await http.get("/nowhere")
        told = {"error": "there is no such path: GET /openapi.json describes every one"}
        assert (answer.status, await answer.json()) == (404, told)
        answer = await http.post("/status")
        told = {"error": "POST is not allowed here, only GET,HEAD: GET /openapi.json describes every path"}
        assert (answer.status, answer.headers["Allow"], await answer.json()) == (405, "GET,HEAD", told)


async def test_not_ready_is_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Source, "ready", False)
    async with client() as http:
        assert (await http.get("/readyz")).status == 503
        assert (await http.get("/healthz")).status == 200
