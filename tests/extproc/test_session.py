"""session.py: one row a rule. Messages and replies go through wire.py and an independent protobuf library."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.messages import Immediate, Kind, Outcome, refusal
from extproc.reasons import Reason
from extproc.session import Session
from extproc.session_rules import OWN_REASONS, SessionOptions, SessionRules
from tests.extproc.gateway_model import (
    BUFFERED,
    DESTINATION,
    DUPLEX,
    NONE,
    PARTIAL,
    STREAMED,
    chat,
    request_body,
    request_headers,
    request_trailers,
    response_body,
    response_headers,
    response_trailers,
)
from tests.extproc.session_driver import A, B, Drive, Recorder, chosen

BODY = b'{"model": "m", "messages": [{"role": "user", "content": "h\xc3\xa9llo"}]}'
SPOOFED = (
    (DESTINATION, "127.0.0.1:9901"),
    ("x-data-parallel-rank", "7"),
    ("x-prefiller-host-port", "127.0.0.1:1"),
    ("x-other", "kept"),
)
TINY = SessionOptions(max_body_bytes=100, chunk_bytes=10)


# --- where the decision goes ---

BUFFERED_MODES = (BUFFERED, NONE)


@pytest.mark.parametrize("modes", [None, BUFFERED_MODES, (BUFFERED, STREAMED)])
def test_buffered_decision_is_in_the_body_reply(modes: tuple[int, int] | None) -> None:
    drive = Drive(client=SPOOFED)
    assert drive.feed(request_headers(chat(*SPOOFED), modes=modes)) == ["request_headers"]
    assert drive.exchange.headers == {"x-other": "kept"}, "already gone, should the plugin die before the body"
    drive.exchange.headers.update(SPOOFED)
    assert drive.feed(request_body(BODY)) == ["request_body"]
    assert drive.exchange.headers == {DESTINATION: f"{A},{B}", "x-other": "kept"}
    assert drive.exchange.metadata == {"envoy.lb": {DESTINATION: f"{A},{B}"}, "kvcar": {"matched_blocks": 17.0}}
    assert drive.exchange.body == b"", "the body is Envoy's to send"
    assert not drive.exchange.cleared_route
    (request,) = drive.requests
    assert (request.method, request.path, request.body) == ("POST", "/v1/chat/completions", BODY)
    assert request.headers["content-type"] == "application/json"
    assert drive.recorder.reasons == []


def test_buffered_with_trailers_behind() -> None:
    """BUFFERED: the flag of the only body message is unset when trailers follow; no more body will come."""
    drive = Drive()
    drive.feed(request_headers(modes=BUFFERED_MODES))
    assert drive.feed(request_body(BODY, end=False)) == ["request_body"]
    assert drive.exchange.destination == f"{A},{B}"
    assert drive.feed(request_trailers()) == ["request_trailers"]


@pytest.mark.parametrize("parts", [(BODY, b""), (BODY[:5], BODY[5:]), (b"", BODY), (b"", b"", BODY[:9], BODY[9:], b"")])
@pytest.mark.parametrize("modes", [None, (STREAMED, NONE), (STREAMED, STREAMED)])
def test_streamed_decision_is_in_the_last_reply(parts: tuple[bytes, ...], modes: tuple[int, int] | None) -> None:
    drive = Drive(client=SPOOFED)
    assert drive.feed(request_headers(modes=modes)) == ["request_headers"]
    for part in parts[:-1]:
        assert drive.feed(request_body(part, end=False)) == ["request_body"]
        assert drive.exchange.destination is None
    assert drive.feed(request_body(parts[-1])) == ["request_body"]
    assert drive.exchange.destination == f"{A},{B}"
    assert drive.requests[0].body == BODY


def test_streamed_body_ended_by_trailers() -> None:
    """All that is left to carry the decision is metadata on the reply to the trailers."""
    drive = Drive()
    drive.feed(request_headers(modes=(STREAMED, NONE)))
    assert drive.feed(request_body(BODY, end=False)) == ["request_body"]
    assert drive.feed(request_trailers()) == ["request_trailers"]
    assert drive.exchange.metadata["envoy.lb"] == {DESTINATION: f"{A},{B}"}
    assert drive.requests[0].body == BODY


@pytest.mark.parametrize("parts", [(BODY, b""), (BODY,), (BODY[:5], BODY[5:]), (b"", BODY)])
@pytest.mark.parametrize("trailers", [False, True])
def test_duplex_holds_the_header_reply(parts: tuple[bytes, ...], trailers: bool) -> None:
    drive = Drive(SessionOptions(chunk_bytes=10), client=SPOOFED)
    assert drive.feed(request_headers(modes=(DUPLEX, DUPLEX))) == []
    kinds: list[str] = []
    for number, part in enumerate(parts):
        assert kinds == [], "nothing goes out before the body has ended"
        kinds = drive.feed(request_body(part, end=number == len(parts) - 1 and not trailers))
    if trailers:
        assert kinds == []
        kinds = drive.feed(request_trailers())
        assert kinds.pop() == "request_trailers"
    assert kinds == ["request_headers"] + ["request_body"] * -(-len(BODY) // 10)
    assert drive.exchange.decision_in == "request_headers"
    assert drive.exchange.headers == {DESTINATION: f"{A},{B}", "x-other": "kept"}
    assert drive.exchange.metadata["envoy.lb"] == {DESTINATION: f"{A},{B}"}
    assert drive.exchange.body == BODY
    assert drive.exchange.body_ended == (not trailers)
    assert drive.exchange.largest_chunk == 10


def test_duplex_empty_body() -> None:
    drive = Drive()
    drive.feed(request_headers(modes=(DUPLEX, DUPLEX)))
    assert drive.feed(request_body(b"")) == ["request_headers", "request_body"]
    assert (drive.exchange.body, drive.exchange.body_ended) == (b"", 1)


@pytest.mark.parametrize("size", [1, 61_999, 62_000, 62_001, 124_000, 124_001])
def test_duplex_chunk_edges(size: int) -> None:
    drive = Drive()
    drive.feed(request_headers(modes=(DUPLEX, DUPLEX)))
    body = bytes(range(256)) * (size // 256 + 1)
    drive.feed(request_body(body[:size]))
    assert drive.exchange.body == body[:size]
    assert drive.exchange.body_ended == 1
    assert drive.exchange.largest_chunk == min(size, 62_000)
    assert len(drive.exchange.kinds) == 1 + -(-size // 62_000)


def test_metadata_of_the_body_message_wins() -> None:
    """A subset hint may be on any message; the latest is what the Decider sees."""
    drive = Drive()
    drive.feed(request_headers(metadata={"envoy.lb.subset_hint": {"k": ["a"]}}))
    drive.feed(request_body(BODY[:3], end=False, metadata={"envoy.lb.subset_hint": {"k": ["b"]}}))
    drive.feed(request_body(BODY[3:]))
    assert drive.requests[0].metadata == {"envoy.lb.subset_hint": {"k": ["b"]}}


# --- what the Outcome may say ---


def test_more_headers() -> None:
    rank = (("x-data-parallel-rank", "3"), ("x-kvcar-a", "1"))
    drive = Drive(SessionOptions(clear_route_cache=True), lambda ticket: Outcome((A,), headers=rank), client=SPOOFED)
    drive.feed(request_headers())
    drive.feed(request_body(BODY))
    assert drive.exchange.headers == {DESTINATION: A, "x-data-parallel-rank": "3", "x-kvcar-a": "1", "x-other": "kept"}
    assert drive.exchange.cleared_route


def test_other_destination_header() -> None:
    options = SessionOptions(destination_header="target-pod", strip_headers=("X-Secret",))
    drive = Drive(options, client=(("target-pod", "evil"), ("x-secret", "1"), (DESTINATION, "not ours")))
    drive.feed(request_headers())
    drive.feed(request_body(BODY))
    assert drive.exchange.headers == {"target-pod": f"{A},{B}", DESTINATION: "not ours"}
    assert drive.exchange.metadata["envoy.lb"] == {DESTINATION: f"{A},{B}"}, (
        "the gateway reads this key whatever the header"
    )


@pytest.mark.parametrize("destinations", [(), ("",), ("", "")])
@pytest.mark.parametrize("modes", [None, (DUPLEX, NONE)])
def test_unscored_by_the_decider(destinations: tuple[str, ...], modes: tuple[int, int] | None) -> None:
    """Never an empty or stale header; the decider counts its own reasons, the access log sees them."""
    outcome = Outcome(destinations, reason="no_candidate", metadata={"model": "m"})
    drive = Drive(decide=lambda ticket: outcome, client=SPOOFED)
    drive.feed(request_headers(modes=modes))
    drive.feed(request_body(BODY))
    assert drive.exchange.headers == {"x-other": "kept"}
    assert drive.exchange.metadata == {"kvcar": {"reason": "no_candidate", "model": "m"}}
    assert drive.recorder.reasons == []


def test_response_headers_of_the_outcome_and_served_header() -> None:
    options = SessionOptions(served_header="x-served")
    drive = Drive(options, lambda ticket: Outcome((A,), response_headers=(("x-session-token", "t"),)))
    drive.feed(request_headers())
    drive.feed(request_body(BODY))
    assert drive.feed(response_headers(served=B)) == ["response_headers"]
    assert drive.exchange.response_headers == {"x-session-token": "t", "x-served": B}


@pytest.mark.parametrize("modes", [None, (DUPLEX, DUPLEX)])
def test_immediate_ends_the_exchange(modes: tuple[int, int] | None) -> None:
    answer = refusal(429, "full", kind="rate_limit_error", details="kvcar_shed", retry_after=2)
    drive = Drive(decide=lambda ticket: Outcome(immediate=answer, ticket=ticket))
    drive.feed(request_headers(modes=modes))
    assert drive.feed(request_body(BODY)) == ["immediate_response"]
    assert drive.session.ended
    immediate = drive.exchange.immediate
    assert immediate is not None
    assert immediate.status is not None
    assert int(immediate.status.code) == 429
    assert immediate.body == b'{"error": {"message": "full", "type": "rate_limit_error", "param": null, "code": 429}}'
    assert immediate.headers is not None
    given = {option.header.key: option.header.raw_value for option in immediate.headers.set_headers if option.header}
    assert given == {"content-type": b"application/json", "retry-after": b"2"}
    assert drive.feed(response_headers()) == []
    drive.close()
    assert drive.recorder.calls == [("close",)]


@pytest.mark.parametrize("reason", [Reason.TIMEOUT, Reason.INTERNAL])
@pytest.mark.parametrize("modes", [None, (STREAMED, NONE), (DUPLEX, DUPLEX)])
def test_failed_decision_passes_unscored(reason: Reason, modes: tuple[int, int] | None) -> None:
    drive = Drive(decide=lambda ticket: reason, client=SPOOFED)
    drive.feed(request_headers(modes=modes))
    drive.feed(request_body(BODY))
    assert drive.exchange.headers == {"x-other": "kept"}
    assert drive.exchange.metadata == {"kvcar": {"reason": str(reason)}}
    assert drive.recorder.reasons == [reason]
    assert drive.exchange.body == (BODY if modes == (DUPLEX, DUPLEX) else b"")


def spoilt(ticket: Recorder) -> Outcome:
    return Outcome(destinations=(A, 5), ticket=ticket)  # type: ignore[arg-type]


@pytest.mark.parametrize("decide", [lambda ticket: None, spoilt, lambda ticket: Outcome((A,), headers=(("one",),))])
def test_outcome_that_is_none(decide: Any) -> None:
    """A plugin's nonsense is an internal fault of that request; a ticket it made is closed at once."""
    drive = Drive(decide=decide)
    drive.feed(request_headers())
    assert drive.feed(request_body(BODY)) == ["request_body"]
    assert drive.exchange.destination is None
    assert (drive.recorder.reasons, drive.recorder.faults) == (["internal"], ["decider"])
    drive.feed(response_headers())
    drive.close()
    assert drive.recorder.calls == ([("close",)] if decide is spoilt else [])


# --- requests that are not decided ---

NOT_DECIDED: list[tuple[str, tuple[tuple[str, str], ...], bool, str]] = [
    ("GET without body", ((":method", "GET"), (":path", "/v1/models")), True, "no_body"),
    ("POST without body", chat(), True, "no_body"),
    ("other method", ((":method", "PUT"), (":path", "/v1/chat/completions")), False, "method"),
    ("no method", ((":path", "/v1/chat/completions"),), False, "method"),
    ("other path", ((":method", "POST"), (":path", "/v1/responses")), False, "path"),
    ("longer path", ((":method", "POST"), (":path", "/v1/chat/completions/batch")), False, "path"),
    ("no path", ((":method", "POST"),), False, "path"),
    ("gzip", chat(("content-encoding", "gzip")), False, "encoding"),
    ("gzip and identity", chat(("content-encoding", "identity, gzip")), False, "encoding"),
    ("announced too large", chat(("content-length", "101")), False, "too_large"),
    ("announced absurdly large", chat(("content-length", "9" * 5000)), False, "too_large"),
]


@pytest.mark.parametrize(
    ("headers", "end", "reason"), [row[1:] for row in NOT_DECIDED], ids=[row[0] for row in NOT_DECIDED]
)
@pytest.mark.parametrize("modes", [None, BUFFERED_MODES, (STREAMED, STREAMED), (DUPLEX, DUPLEX)])
def test_not_decided(
    headers: tuple[tuple[str, str], ...], end: bool, reason: str, modes: tuple[int, int] | None
) -> None:
    drive = Drive(TINY, client=SPOOFED)
    assert drive.feed(request_headers(headers, end=end, modes=modes)) == ["request_headers"], "at once"
    assert drive.exchange.headers == {"x-other": "kept"}
    assert drive.exchange.metadata == {"kvcar": {"reason": reason}}
    if not end:
        drive.exchange.headers.update(SPOOFED)
        first = drive.feed(request_body(b"x" * 25, end=False))
        last = drive.feed(request_body(b"y" * 25))
        if modes == (DUPLEX, DUPLEX):
            assert (first, last) == (["request_body"] * 3, ["request_body"] * 3)
            assert drive.exchange.body == b"x" * 25 + b"y" * 25
            assert drive.exchange.body_ended == 1
        else:
            assert (first, last) == (["request_body"], ["request_body"])
            assert drive.exchange.headers == {"x-other": "kept"}
    assert drive.feed(response_headers()) == ["response_headers"]
    drive.close()
    assert drive.requests == []
    assert drive.recorder.reasons == [reason]
    assert drive.recorder.calls == []


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions?api-version=1", "/openai/v1/completions"])
def test_paths_that_are_decided(path: str) -> None:
    drive = Drive(SessionOptions(prefixes=("/openai/",)))
    drive.feed(request_headers(((":method", "POST"), (":path", path), ("content-encoding", "Identity"))))
    drive.feed(request_body(BODY))
    assert drive.requests[0].path == path


def test_gateway_that_sends_no_body() -> None:
    """Mode NONE: no body message will come, so waiting for one would be for ever."""
    drive = Drive()
    assert drive.feed(request_headers(modes=(NONE, NONE))) == ["request_headers"]
    assert drive.recorder.reasons == ["no_body"]


def test_partially_buffered_body() -> None:
    """BUFFERED_PARTIAL over Envoy's limit: one message without the flag, the rest passes unseen."""
    drive = Drive()
    drive.feed(request_headers(modes=(PARTIAL, NONE)))
    assert drive.feed(request_body(BODY, end=False)) == ["request_body"]
    assert (drive.requests, drive.recorder.reasons) == ([], ["too_large"])


@pytest.mark.parametrize("modes", [None, (STREAMED, NONE), (BUFFERED, NONE)])
def test_over_the_limit_releases_the_buffer(modes: tuple[int, int] | None) -> None:
    drive = Drive(TINY, client=SPOOFED)
    drive.feed(request_headers(modes=modes))
    if modes == (BUFFERED, NONE):
        assert drive.feed(request_body(b"x" * 101)) == ["request_body"]
    else:
        for _ in range(20):
            assert drive.feed(request_body(b"x" * 10, end=False)) == ["request_body"]
            assert sum(map(len, drive.session._chunks)) <= 100
        assert drive.feed(request_body(b"x")) == ["request_body"]
        assert drive.session._chunks == []
    assert drive.recorder.reasons == ["too_large"]
    assert drive.exchange.headers == {"x-other": "kept"}
    assert drive.exchange.metadata == {"kvcar": {"reason": "too_large"}}


def test_over_the_limit_in_duplex_sends_what_was_held() -> None:
    drive = Drive(TINY, client=SPOOFED)
    drive.feed(request_headers(modes=(DUPLEX, DUPLEX)))
    parts = [bytes([number]) * 30 for number in range(6)]
    kinds = [drive.feed(request_body(part, end=number == 5)) for number, part in enumerate(parts)]
    assert kinds[:3] == [[], [], []]
    assert kinds[3] == ["request_headers"] + ["request_body"] * 12
    assert kinds[4] == kinds[5] == ["request_body"] * 3
    assert drive.session._chunks == []
    assert drive.exchange.body == b"".join(parts)
    assert drive.exchange.body_ended == 1
    assert drive.exchange.headers == {"x-other": "kept"}
    assert drive.recorder.reasons == ["too_large"]


def test_over_the_limit_with_the_last_part() -> None:
    drive = Drive(TINY)
    drive.feed(request_headers(modes=(DUPLEX, DUPLEX)))
    drive.feed(request_body(b"x" * 101))
    assert (drive.exchange.body, drive.exchange.body_ended) == (b"x" * 101, 1)


@pytest.mark.parametrize("size", [100, 101])
def test_the_limit_itself(size: int) -> None:
    drive = Drive(TINY)
    drive.feed(request_headers())
    drive.feed(request_body(b"x" * size))
    assert len(drive.requests) == (size == 100)


def test_observability_mode_gets_no_replies() -> None:
    drive = Drive()
    messages = [request_headers(observe=True), request_body(BODY), request_trailers(), response_headers()]
    messages += [response_body(b"x", end=True), response_trailers(), request_headers()]
    assert [drive.feed(message) for message in messages] == [[]] * 7
    assert drive.requests == []


def test_messages_out_of_order_are_answered() -> None:
    """Illegal for a gateway, but never a hang and never an exception."""
    drive = Drive()
    assert drive.feed(request_body(BODY)) == ["request_body"]
    assert drive.feed(request_trailers()) == ["request_trailers"]
    assert drive.feed(request_headers()) == ["request_headers"]
    assert drive.feed(request_headers()) == ["request_headers"]
    assert drive.feed(request_body(BODY)) == ["request_body"]
    assert drive.feed(request_body(BODY)) == ["request_body"]
    assert len(drive.requests) == 1


# --- the ticket ---


def follow(*messages: Any, options: SessionOptions | None = None, modes: tuple[int, int] = BUFFERED_MODES) -> list[Any]:
    """Calls on the ticket of a decided request, close() included."""
    drive = Drive(options)
    drive.feed(request_headers(modes=modes))
    drive.feed(request_body(BODY))
    for message in messages:
        drive.feed(message)
    drive.close()
    drive.close()
    assert drive.recorder.faults == []
    return drive.recorder.calls


SSE = response_headers(200, ("content-type", "text/event-stream"), served=A)
WITH_BODY = (BUFFERED, STREAMED)
FOLLOWED: list[tuple[str, tuple[Any, ...], tuple[int, int], list[Any]]] = [
    ("never answered", (), BUFFERED_MODES, [("close",)]),
    (
        "body not sent: headers are the first byte",
        (response_headers(served=A),),
        BUFFERED_MODES,
        [("headers", 200, A), ("first_byte",), ("close",)],
    ),
    (
        "streamed, body not sent: its headers come before its prefill",
        (SSE,),
        BUFFERED_MODES,
        [("headers", 200, A), ("close",)],
    ),
    (
        "local reply of the gateway",
        (response_headers(503),),
        BUFFERED_MODES,
        [("headers", 503, None), ("first_byte",), ("close",)],
    ),
    (
        "status missing",
        (response_headers(None),),
        BUFFERED_MODES,
        [("headers", None, None), ("first_byte",), ("close",)],
    ),
    (
        "served by another host, told by metadata",
        (response_headers(served_metadata=B),),
        BUFFERED_MODES,
        [("headers", 200, B), ("first_byte",), ("close",)],
    ),
    ("body sent, none came yet", (SSE,), WITH_BODY, [("headers", 200, A), ("close",)]),
    (
        "empty body message is no first byte",
        (SSE, response_body(b""), response_body(b"x"), response_body(b"", end=True)),
        WITH_BODY,
        [("headers", 200, A), ("first_byte",), ("close",)],
    ),
    (
        "answer without body",
        (response_headers(204, end=True),),
        WITH_BODY,
        [("headers", 204, None), ("first_byte",), ("close",)],
    ),
    (
        "everything told once",
        (SSE, SSE, response_body(b"x"), response_body(b"x", end=True), response_trailers(), response_trailers()),
        WITH_BODY,
        [("headers", 200, A), ("first_byte",), ("close",)],
    ),
]


@pytest.mark.parametrize(
    ("messages", "modes", "calls"), [row[1:] for row in FOLLOWED], ids=[row[0] for row in FOLLOWED]
)
def test_ticket(messages: tuple[Any, ...], modes: tuple[int, int], calls: list[Any]) -> None:
    assert follow(*messages, modes=modes) == calls


@pytest.mark.parametrize("stop", range(6))
def test_closed_once_wherever_it_ends(stop: int) -> None:
    """A client may leave at every phase: a ticket is closed once, without one nothing happens, the body is released."""
    messages = [request_headers(modes=(DUPLEX, DUPLEX)), request_body(BODY), response_headers()]
    messages += [response_body(b"x"), response_body(b"", end=True)]
    drive = Drive()
    for message in messages[:stop]:
        drive.feed(message)
    for _ in range(3):
        drive.close()
    assert drive.recorder.calls.count(("close",)) == (1 if stop >= 2 else 0)
    assert drive.recorder.calls[-1:] in ([], [("close",)])
    assert (drive.session.request, drive.session._head, drive.session._chunks) == (None, None, [])
    assert drive.feed(response_trailers()) == []


def test_closed_while_deciding() -> None:
    drive = Drive()
    session = Session(drive.rules)
    from extproc import wire

    session.receive(wire.decode(bytes(request_headers())))  # type: ignore[arg-type]
    assert list(session.receive(wire.decode(bytes(request_body(BODY))))) == []  # type: ignore[arg-type]
    assert session.request is not None
    with pytest.raises(RuntimeError):
        session.receive(wire.decode(bytes(response_headers())))  # type: ignore[arg-type]
    session.close()
    assert session.request is None
    for late in (lambda: session.decided(chosen(drive.recorder)), lambda: session.failed(Reason.TIMEOUT)):
        with pytest.raises(RuntimeError):
            late()


@pytest.mark.parametrize("event", ["headers", "first_byte", "usage", "close"])
def test_ticket_that_raises(event: str) -> None:
    """Its owner's fault: counted, the exchange goes on, later events still arrive."""
    drive = Drive(SessionOptions(observe_usage=True))
    drive.recorder.fails.add(event)
    for message in (request_headers(modes=WITH_BODY), request_body(BODY), SSE):
        drive.feed(message)
    assert drive.feed(response_body(b'data: {"usage":{"prompt_tokens":7}}\n\n', end=True)) == ["response_body"]
    drive.close()
    assert [call[0] for call in drive.recorder.calls] == ["headers", "first_byte", "usage", "close"]
    assert drive.recorder.faults == ["ticket"]


# --- the response ---


def test_duplex_response_is_echoed() -> None:
    drive = Drive(TINY)
    drive.feed(request_headers(modes=(DUPLEX, DUPLEX)))
    drive.feed(request_body(BODY))
    assert drive.feed(response_headers(200)) == ["response_headers"]
    events = [b"data: 1\n\n", b"", b"data: 22222222222222222222\n\n", b""]
    kinds = [drive.feed(response_body(event, end=number == 3)) for number, event in enumerate(events)]
    assert [len(replies) for replies in kinds] == [1, 0, 3, 1]
    assert drive.exchange.response_body == b"".join(events)
    assert drive.exchange.response_ended == 1
    assert drive.feed(response_trailers()) == ["response_trailers"]


@pytest.mark.parametrize("modes", [(BUFFERED, STREAMED), (BUFFERED, BUFFERED)])
def test_other_response_modes_get_one_empty_reply_each(modes: tuple[int, int]) -> None:
    drive = Drive()
    drive.feed(request_headers(modes=modes))
    drive.feed(request_body(BODY))
    drive.feed(response_headers())
    for end in (False, False, True):
        assert drive.feed(response_body(b"x", end=end)) == ["response_body"]
    assert drive.exchange.response_body == b""


USAGE = b'{"usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":4}}}'
GZIP = response_headers(200, ("content-encoding", "gzip"), served=A)


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ((SSE, response_body(USAGE, end=True)), True),
        ((SSE, response_body(USAGE[:20]), response_body(USAGE[20:], end=True)), True),
        ((SSE, response_body(USAGE), response_trailers()), True),
        ((SSE, response_body(USAGE)), True),
        ((SSE, response_body(USAGE, end=True), response_body(USAGE, end=True), response_trailers()), True),
        ((SSE, response_body(USAGE[:30], end=True)), False),
        ((GZIP, response_body(USAGE, end=True)), False),
        ((SSE,), False),
    ],
    ids=["one", "split", "trailers", "client left", "once", "cut off", "encoded", "no body"],
)
def test_usage(messages: tuple[Any, ...], found: bool) -> None:
    calls = follow(*messages, options=SessionOptions(observe_usage=True), modes=WITH_BODY)
    assert [call for call in calls if call[0] == "usage"] == ([("usage", 4, 7)] if found else [])
    assert calls[-1] == ("close",)


def test_usage_is_off_by_default() -> None:
    calls = follow(SSE, response_body(USAGE, end=True), modes=WITH_BODY)
    assert ("usage", 4, 7) not in calls


# --- what the shell relies on ---


def test_constant_replies() -> None:
    rules = SessionRules()
    constants = list(rules.constants())
    assert {reply.kind for reply in constants} == set(Kind)
    for reason in OWN_REASONS:
        assert rules.headers_unscored[reason] in constants
    for reply in constants:
        if reply.kind in (Kind.REQUEST_HEADERS, Kind.REQUEST_BODY) and reply is not rules.body_decided:
            assert DESTINATION in reply.remove_headers


def test_refusal_without_retry() -> None:
    answer = refusal(
        503, "none ready", kind="service_unavailable", details="kvcar_no_endpoint", headers=(("x-a", "b"),)
    )
    assert answer == Immediate(
        503,
        (("content-type", "application/json"), ("x-a", "b")),
        b'{"error": {"message": "none ready", "type": "service_unavailable", "param": null, "code": 503}}',
        "kvcar_no_endpoint",
    )
