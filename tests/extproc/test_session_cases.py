"""Every case of tests/data/cases/extproc.json through a Session, in every body mode the case allows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from extproc.messages import Outcome
from extproc.session_rules import SessionOptions
from tests.extproc.gateway_model import (
    BUFFERED,
    DESTINATION,
    DUPLEX,
    STREAMED,
    request_body,
    request_headers,
    response_body,
    response_headers,
)
from tests.extproc.session_driver import A, B, Drive, Recorder

CASES = {
    case["id"]: case
    for case in json.loads((Path(__file__).parents[1] / "data/cases/extproc.json").read_text(encoding="utf-8"))["cases"]
}
MODES = {"buffered": BUFFERED, "streamed": STREAMED, "duplex": DUPLEX}
SPOOFED = ((DESTINATION, "127.0.0.1:9901"), ("x-data-parallel-rank", "7"))
LIMIT = 4 << 20


def decide(ticket: Recorder) -> Outcome:
    return Outcome((A, B), ticket=ticket)


class Run(Drive):
    """The messages of one case; largest is the most body bytes ever held."""

    def __init__(self, case: dict[str, Any], mode: int, decide: Callable[[Recorder], Outcome]) -> None:
        super().__init__(SessionOptions(max_body_bytes=LIMIT, observe_usage=True), decide, client=SPOOFED)
        self.mode = mode
        self.sent = b""
        self.replies: list[tuple[str, list[str]]] = []
        self.largest = 0
        for message in case["messages"]:
            self._message(message)
        self.answered_before_close = len(self.replies)

    def _message(self, message: dict[str, Any]) -> None:
        ((kind, value),) = message.items()
        if kind == "request_headers":
            headers = tuple((name, text) for name, text in value["headers"])
            self._feed(
                kind,
                request_headers(
                    headers, end=value["end_of_stream"], modes=(self.mode, 0), values_in=value["values_in"]
                ),
            )
        elif kind == "request_body":
            self._body(bytes.fromhex(value["body_hex"]), value["end_of_stream"])
        elif kind == "generate":
            chunk = bytes(range(256)) * (value["size"] // 256)
            if self.mode == BUFFERED:
                self._body(chunk * value["chunks"], True)
            else:
                part = bytes(request_body(chunk, end=False))
                for _ in range(value["chunks"] - 1):
                    self.sent += chunk
                    self._feed("request_body", part)
                self._body(chunk, True)
        elif kind == "response_body":
            self._feed(kind, response_body(bytes.fromhex(value["body_hex"]), end=value["end_of_stream"]))
        else:
            assert kind == "server_stop"
            self.close()

    def _body(self, body: bytes, end: bool) -> None:
        self.sent += body
        self._feed("request_body", request_body(body, end=end))

    def _feed(self, kind: str, message: Any) -> None:
        self.replies.append((kind, self.feed(message)))
        self.largest = max(self.largest, sum(map(len, self.session._chunks)))


def run(case: str, mode: str, decide: Callable[[Recorder], Outcome] = decide) -> Run:
    return Run(CASES[case], MODES[mode], decide)


def check_replies(done: Run) -> None:
    """Exactly one reply per message that needs one; in full duplex the body comes back byte for byte."""
    if done.mode == DUPLEX:
        kinds = done.exchange.kinds
        assert kinds.count("request_headers") == 1
        assert kinds[0] == "request_headers"
        if done.sent:
            assert done.exchange.body == done.sent
            assert done.exchange.body_ended == 1
            assert done.exchange.largest_chunk <= 62_000
    else:
        for kind, replies in done.replies:
            assert replies == [kind]
        assert done.exchange.body == b""


def check_decided(done: Run) -> None:
    check_replies(done)
    assert done.exchange.headers == {DESTINATION: f"{A},{B}"}
    assert done.exchange.metadata["envoy.lb"] == {DESTINATION: f"{A},{B}"}
    assert done.exchange.decision_in == ("request_headers" if done.mode == DUPLEX else "request_body")
    assert done.recorder.reasons == []
    assert done.requests[0].body == done.sent


def check_unscored(done: Run, reason: str, counted: bool = True) -> None:
    check_replies(done)
    assert done.exchange.headers == {}, "no decision, and the client's own copies are gone"
    assert done.exchange.metadata == {"kvcar": {"reason": reason}}
    assert done.recorder.reasons == ([reason] if counted else [])
    assert done.recorder.calls == []


DECIDED = [(case, mode) for case in ("X02", "X06", "X07", "X10", "X11") for mode in MODES]
DECIDED.remove(("X02", "buffered"))  # BUFFERED has one body message


@pytest.mark.parametrize(("case", "mode"), DECIDED)
def test_decided(case: str, mode: str) -> None:
    """X07 and X10 in part: only raw_value is set (checked for every reply), clear_route_cache is an option."""
    done = run(case, mode)
    check_decided(done)
    if case == "X06":
        other = json.loads(json.dumps(CASES[case]).replace('"values_in": "value"', '"values_in": "raw_value"'))
        assert Run(other, MODES[mode], decide).requests == done.requests


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["X04", "X05"])
def test_without_body(case: str, mode: str) -> None:
    done = run(case, mode)
    check_unscored(done, "no_body")
    assert done.feed(response_headers(served=A)) == ["response_headers"]


@pytest.mark.parametrize("mode", MODES)
def test_over_the_limit(mode: str) -> None:
    done = run("X12", mode)
    check_unscored(done, "too_large")
    assert done.largest <= LIMIT


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("case", "reason"), [("X13", "bad_json"), ("X20", "no_candidate")])
def test_unscored_by_the_decider(case: str, reason: str, mode: str) -> None:
    done = run(case, mode, lambda ticket: Outcome(reason=reason))
    check_unscored(done, reason, counted=False)
    assert done.requests[0].body == done.sent


@pytest.mark.parametrize("mode", MODES)
def test_encoded(mode: str) -> None:
    check_unscored(run("X15", mode), "encoding")


@pytest.mark.parametrize("mode", MODES)
def test_usage_split_over_messages(mode: str) -> None:
    done = run("X21", mode)
    done.close()
    assert done.recorder.calls.count(("usage", 4, 7)) == 1
    assert done.recorder.calls[-1] == ("close",)
    if mode != "duplex":
        check_decided(done)


@pytest.mark.parametrize("mode", MODES)
def test_server_stops_while_a_body_is_awaited(mode: str) -> None:
    done = run("X22", mode)
    assert done.session.ended
    assert done.recorder.calls == []


def test_no_case_is_left_out() -> None:
    assert set(CASES) == {"X02", "X04", "X05", "X06", "X07", "X10", "X11", "X12", "X13", "X15", "X20", "X21", "X22"}
