"""wire.py against an independent protobuf implementation, both ways, and against bytes that are no message."""

from __future__ import annotations

import random
from typing import Any

import envoy_data_plane.envoy.service.ext_proc.v3 as ext_proc
import pytest

from extproc import wire
from extproc.messages import (
    Immediate,
    Kind,
    Reply,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
)
from tests.extproc import gateway_model as gateway


def test_c_implementation() -> None:
    assert wire.IMPLEMENTATION == "upb"


def test_types_stay_out_of_the_default_pool() -> None:
    from google.protobuf import descriptor_pool

    with pytest.raises(KeyError):
        descriptor_pool.Default().FindMessageTypeByName("kvcar.wire.ProcessingRequest")
    assert len(wire.TYPES) >= 18


SUBSET = {"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": ["10.0.0.1:8000", "10.0.0.2:8000"]}}
MIXED = {"a": {"number": 1.5, "text": "é", "yes": True, "no": False, "none": None, "deep": {"list": [1.0, [], {}]}}}
HEADERS = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"}

DECODED: list[tuple[str, ext_proc.ProcessingRequest, Any]] = [
    ("headers in raw_value", gateway.request_headers(), RequestHeaders(HEADERS, False)),
    ("headers in value", gateway.request_headers(values_in="value"), RequestHeaders(HEADERS, False)),
    ("end of stream", gateway.request_headers(end=True), RequestHeaders(HEADERS, True)),
    ("modes", gateway.request_headers(modes=(4, 1)), RequestHeaders(HEADERS, False, modes=(4, 1))),
    ("modes, all NONE", gateway.request_headers(modes=(0, 0)), RequestHeaders(HEADERS, False, modes=(0, 0))),
    ("subset hint", gateway.request_headers(metadata=SUBSET), RequestHeaders(HEADERS, False, metadata=SUBSET)),
    ("every kind of value", gateway.request_headers(metadata=MIXED), RequestHeaders(HEADERS, False, metadata=MIXED)),
    ("observability", gateway.request_headers(observe=True), RequestHeaders(HEADERS, False, observe_only=True)),
    (
        "repeated headers joined",
        gateway.request_headers((("x-a", "1"), ("x-a", "2"), ("x-b", "é"))),
        RequestHeaders({"x-a": "1,2", "x-b": "é"}, False),
    ),
    ("no headers at all", gateway.request_headers(()), RequestHeaders({}, False)),
    ("body", gateway.request_body(b"\x00\xff", end=False), RequestBody(b"\x00\xff", False)),
    ("last body, metadata", gateway.request_body(b"", metadata=SUBSET), RequestBody(b"", True, metadata=SUBSET)),
    ("request trailers", gateway.request_trailers(), RequestTrailers()),
    ("response headers", gateway.response_headers(503), ResponseHeaders({":status": "503"}, False)),
    (
        "served host by attribute",
        gateway.response_headers(served="10.0.0.1:8000", served_metadata="10.0.0.9:1"),
        ResponseHeaders({":status": "200"}, False, served="10.0.0.1:8000"),
    ),
    (
        "flags",
        gateway.response_headers(served="10.0.0.1:8000", flags=96.0),
        ResponseHeaders({":status": "200"}, False, served="10.0.0.1:8000", flags=96),
    ),
    (
        "flags that are no flags",
        gateway.response_headers(served="10.0.0.1:8000", flags=-1.0),
        ResponseHeaders({":status": "200"}, False, served="10.0.0.1:8000"),
    ),
    (
        "served host by metadata",
        gateway.response_headers(served_metadata="[::1]:8000", end=True),
        ResponseHeaders({":status": "200"}, True, served="[::1]:8000"),
    ),
    ("response body", gateway.response_body(b"data: x\n\n"), ResponseBody(b"data: x\n\n", False)),
    ("response trailers", gateway.response_trailers(), ResponseTrailers()),
    ("a kind of a later version", ext_proc.ProcessingRequest(), None),
]


@pytest.mark.parametrize(("message", "expected"), [row[1:] for row in DECODED], ids=[row[0] for row in DECODED])
def test_decode(message: ext_proc.ProcessingRequest, expected: Any) -> None:
    assert wire.decode(bytes(message)) == expected


def test_header_value_that_is_no_utf8() -> None:
    message = gateway.request_headers((("x-a", ""),))
    message.request_headers.headers.headers[0].raw_value = b"a\xffb"  # type: ignore[union-attr]
    decoded = wire.decode(bytes(message))
    assert isinstance(decoded, RequestHeaders)
    assert decoded.headers == {"x-a": "a\ufffdb"}


def test_bytes_that_are_no_message() -> None:
    """Any bytes decode or raise MalformedMessage (rule: no other error)."""
    generator = random.Random(7)
    good = bytes(gateway.request_headers(metadata=MIXED, modes=(2, 0)))
    refused = 0
    for turn in range(3000):
        if turn % 2:
            data = generator.randbytes(generator.randrange(1, 80))
        else:
            mutable = bytearray(good)
            for _ in range(generator.randrange(1, 5)):
                mutable[generator.randrange(len(mutable))] = generator.randrange(256)
            data = bytes(mutable[: generator.randrange(1, len(mutable) + 1)])
        try:
            wire.decode(data)
        except wire.MalformedMessage:
            refused += 1
    assert 500 < refused < 3000


LARGE = bytes(range(256)) * 400


@pytest.mark.parametrize("end", [False, True])
@pytest.mark.parametrize("metadata", [None, SUBSET])
@pytest.mark.parametrize("size", [16_370, 16_384, 100_000, 102_400])
def test_large_body(size: int, metadata: dict[str, Any] | None, end: bool) -> None:
    decoded = wire.decode(bytes(gateway.request_body(LARGE[:size], end=end, metadata=metadata)))
    assert decoded == RequestBody(LARGE[:size], end, metadata=metadata or {})


def test_large_messages_in_unusual_form() -> None:
    """Fields in another order or given twice, cut off, or spoilt: as protobuf reads them, or refused by it."""
    flag, body = b"\x10\x01", b"\x0a" + _length(LARGE) + LARGE
    for part in (flag + body, body + flag + body, body + b"\x0a\x01y" + flag, b"\x0a\x00" + flag + body):
        message = b"\x22" + _length(part) + part
        other = ext_proc.ProcessingRequest.parse(message).request_body
        assert other is not None
        assert wire.decode(message) == RequestBody(other.body, other.end_of_stream)
        headers = bytes(gateway.request_headers())
        assert wire.decode(message + headers) == RequestHeaders(HEADERS, False), "the last of a oneof counts"
        assert wire.decode(headers + message) == RequestBody(other.body, other.end_of_stream)
    generator = random.Random(5)
    good = bytes(gateway.request_body(LARGE, metadata=SUBSET))
    for turn in range(300):
        spoilt = bytearray(good[: generator.randrange(16_400, len(good))] if turn % 2 else good)
        spoilt[generator.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, -1, -20, -60))] = generator.randrange(256)
        try:
            expected = wire.ProcessingRequest.FromString(bytes(spoilt))
        except Exception:
            with pytest.raises(wire.MalformedMessage):
                wire.decode(bytes(spoilt))
        else:
            decoded = wire.decode(bytes(spoilt))
            kind = expected.WhichOneof("kind")
            assert (decoded is None) == (kind is None)
            if kind == "request_body":
                body = expected.request_body
                assert decoded == RequestBody(body.body, body.end_of_stream, decoded.metadata)  # type: ignore[union-attr]


def test_deep_nesting_is_refused() -> None:
    value = b"\x1a\x00"
    for _ in range(300):
        value = b"\x32" + _length(value) + value  # list_value
        value = b"\x0a" + _length(value) + value
    space = b"\x0a\x01a\x12" + _length(value) + value
    entry = b"\x0a\x01m\x12" + _length(space) + space
    context = b"\x0a" + _length(entry) + entry
    with pytest.raises(wire.MalformedMessage):
        wire.decode(b"\x12\x00\x42" + _length(context) + context)


def _length(data: bytes) -> bytes:
    size, out = len(data), b""
    while size > 127:
        out += bytes([size & 127 | 128])
        size >>= 7
    return out + bytes([size])


# --- replies ---


def read(reply: Reply | Immediate) -> ext_proc.ProcessingResponse:
    return ext_proc.ProcessingResponse.parse(wire.encode(reply))


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_answers_its_own_message(kind: Kind) -> None:
    exchange = gateway.Exchange()
    assert exchange.apply(wire.encode(Reply(kind))) == kind


def test_decision() -> None:
    reply = Reply(
        Kind.REQUEST_BODY,
        set_headers=(("x-gateway-destination-endpoint", "10.0.0.1:8000,10.0.0.2:8000"), ("x-é", "ü")),
        remove_headers=("x-prefiller-host-port",),
        metadata={
            "envoy.lb": {"k": "10.0.0.1:8000"},
            "kvcar": {"blocks": 17, "share": 0.5, "more": {"a": [1, "b", None, True]}},
        },
        clear_route_cache=True,
    )
    exchange = gateway.Exchange(headers={"x-prefiller-host-port": "evil", "x-gateway-destination-endpoint": "evil"})
    assert exchange.apply(wire.encode(reply)) == "request_body"
    assert exchange.headers == {"x-gateway-destination-endpoint": "10.0.0.1:8000,10.0.0.2:8000", "x-é": "ü"}
    assert exchange.metadata == {
        "envoy.lb": {"k": "10.0.0.1:8000"},
        "kvcar": {"blocks": 17.0, "share": 0.5, "more": {"a": [1.0, "b", None, True]}},
    }
    assert exchange.cleared_route


def test_a_pass_carries_nothing() -> None:
    response = read(Reply(Kind.REQUEST_BODY))
    assert response.dynamic_metadata is None
    assert response.request_body is not None
    assert response.request_body.response is None


@pytest.mark.parametrize(("chunk", "end"), [(b"abc", False), (b"", True), (b"\x00" * 62_000, True)])
def test_streamed_chunk(chunk: bytes, end: bool) -> None:
    response = read(Reply(Kind.RESPONSE_BODY, chunk=chunk, end_of_stream=end))
    streamed = response.response_body.response.body_mutation.streamed_response  # type: ignore[union-attr]
    assert streamed is not None
    assert (streamed.body, streamed.end_of_stream) == (chunk, end)


def test_immediate() -> None:
    immediate = read(Immediate(429, (("retry-after", "2"),), b"{}", "kvcar_shed")).immediate_response
    assert immediate is not None
    assert immediate.status is not None
    assert (int(immediate.status.code), immediate.body, immediate.details) == (429, b"{}", "kvcar_shed")
    assert immediate.headers is not None
    assert [(o.header.key, o.header.raw_value) for o in immediate.headers.set_headers if o.header] == [
        ("retry-after", b"2")
    ]


def test_text_that_is_no_text_still_goes_out() -> None:
    """A decider's odd values must not lose the decision."""
    odd = {"model": "a\ud800b", "nan": float("nan"), "type": int, "big": 10**5000, "b\udfff": 1}
    reply = Reply(Kind.REQUEST_BODY, set_headers=(("x-a", "\udcff"),), metadata={"kvcar": odd})
    exchange = gateway.Exchange()
    exchange.apply(wire.encode(reply))
    assert exchange.headers == {"x-a": "?"}
    assert exchange.metadata["kvcar"] == {
        "model": "a?b",
        "nan": "out of range",
        "type": "<class 'int'>",
        "big": "out of range",
        "b?": 1.0,
    }


def test_encoder_keeps_constants_ready() -> None:
    constant = Reply(Kind.REQUEST_HEADERS, remove_headers=("a",))
    encoder = wire.Encoder([constant])
    assert encoder.encode(constant) is encoder.encode(constant)
    assert encoder.encode(constant) == wire.encode(constant)
    other = Reply(Kind.REQUEST_HEADERS)
    assert encoder.encode(other) == wire.encode(other) != encoder.encode(constant)
