"""A gateway for tests: makes ext_proc messages and applies the replies as Envoy does, with another protobuf library.

Messages are built and replies are read by envoy-data-plane (betterproto2), so that a mistake in our own table of field
numbers cannot cancel itself out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import betterproto2
import envoy_data_plane.envoy.config.core.v3 as core
import envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 as filter_v3
import envoy_data_plane.envoy.service.ext_proc.v3 as ext_proc
import envoy_data_plane.google.protobuf as wkt

DESTINATION = "x-gateway-destination-endpoint"
NONE, STREAMED, BUFFERED, PARTIAL, DUPLEX = 0, 1, 2, 3, 4

CHAT = ((":method", "POST"), (":path", "/v1/chat/completions"), ("content-type", "application/json"))


def chat(*more: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    """Headers of a chat request and more."""
    return (*CHAT, *more)


def request_headers(
    headers: tuple[tuple[str, str], ...] = CHAT,
    *,
    end: bool = False,
    modes: tuple[int, int] | None = None,
    values_in: str = "raw_value",
    metadata: dict[str, Any] | None = None,
    observe: bool = False,
) -> ext_proc.ProcessingRequest:
    message = ext_proc.ProcessingRequest(
        request_headers=ext_proc.HttpHeaders(headers=_map(headers, values_in), end_of_stream=end),
        observability_mode=observe,
        metadata_context=_metadata(metadata),
    )
    return _with_modes(message, modes)


def request_body(
    body: bytes, *, end: bool = True, metadata: dict[str, Any] | None = None
) -> ext_proc.ProcessingRequest:
    return ext_proc.ProcessingRequest(
        request_body=ext_proc.HttpBody(body=body, end_of_stream=end), metadata_context=_metadata(metadata)
    )


def request_trailers() -> ext_proc.ProcessingRequest:
    return ext_proc.ProcessingRequest(request_trailers=ext_proc.HttpTrailers(trailers=_map((("x-t", "1"),))))


def response_headers(
    status: int | None = 200,
    *more: tuple[str, str],
    end: bool = False,
    served: str | None = None,
    served_metadata: str | None = None,
    modes: tuple[int, int] | None = None,
    flags: float | None = None,
) -> ext_proc.ProcessingRequest:
    told = {"upstream.address": served, "response.code": 200.0} | ({} if flags is None else {"response.flags": flags})
    attributes = {"envoy.filters.http.ext_proc": struct(told)}
    spaces = {"envoy.lb": {f"{DESTINATION}-served": served_metadata}} if served_metadata else None
    headers = more if status is None else ((":status", str(status)), *more)
    message = ext_proc.ProcessingRequest(
        response_headers=ext_proc.HttpHeaders(headers=_map(headers), end_of_stream=end),
        attributes=attributes if served else {},
        metadata_context=_metadata(spaces),
    )
    return _with_modes(message, modes)


def response_body(body: bytes, *, end: bool = False) -> ext_proc.ProcessingRequest:
    return ext_proc.ProcessingRequest(response_body=ext_proc.HttpBody(body=body, end_of_stream=end))


def response_trailers() -> ext_proc.ProcessingRequest:
    return ext_proc.ProcessingRequest(response_trailers=ext_proc.HttpTrailers(trailers=_map(())))


def struct(mapping: dict[str, Any]) -> wkt.Struct:
    return wkt.Struct(fields={name: _value(value) for name, value in mapping.items()})


def _value(value: Any) -> wkt.Value:
    if isinstance(value, dict):
        return wkt.Value(struct_value=struct(value))
    if isinstance(value, list):
        return wkt.Value(list_value=wkt.ListValue(values=[_value(item) for item in value]))
    if isinstance(value, bool):
        return wkt.Value(bool_value=value)
    if isinstance(value, float):
        return wkt.Value(number_value=value)
    return wkt.Value(null_value=wkt.NullValue(0)) if value is None else wkt.Value(string_value=value)


def plain(value: Any) -> Any:
    """A Struct or Value of betterproto2 as plain Python."""
    if isinstance(value, wkt.Struct):
        return {name: plain(item) for name, item in value.fields.items()}
    if value.struct_value is not None:
        return plain(value.struct_value)
    if value.list_value is not None:
        return [plain(item) for item in value.list_value.values]
    return next((x for x in (value.number_value, value.string_value, value.bool_value) if x is not None), None)


def _map(headers: tuple[tuple[str, str], ...], values_in: str = "raw_value") -> core.HeaderMap:
    if values_in == "value":
        return core.HeaderMap(headers=[core.HeaderValue(key=name, value=value) for name, value in headers])
    return core.HeaderMap(headers=[core.HeaderValue(key=name, raw_value=value.encode()) for name, value in headers])


def _metadata(spaces: dict[str, Any] | None) -> core.Metadata | None:
    if spaces is None:
        return None
    return core.Metadata(filter_metadata={name: struct(space) for name, space in spaces.items()})


def _with_modes(message: ext_proc.ProcessingRequest, modes: tuple[int, int] | None) -> ext_proc.ProcessingRequest:
    if modes is not None:
        kind = filter_v3.ProcessingModeBodySendMode
        message.protocol_config = ext_proc.ProtocolConfiguration(
            request_body_mode=kind(modes[0]), response_body_mode=kind(modes[1])
        )
    return message


@dataclass
class Exchange:
    """What Envoy makes of the replies to one request: the request as the engine would get it, and the answer."""

    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    body_ended: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    response_headers: dict[str, str] = field(default_factory=dict)
    response_body: bytes = b""
    response_ended: int = 0
    immediate: ext_proc.ImmediateResponse | None = None
    kinds: list[str] = field(default_factory=list)
    decision_in: str | None = None
    largest_chunk: int = 0
    cleared_route: bool = False

    @property
    def destination(self) -> str | None:
        return self.headers.get(DESTINATION)

    def apply(self, data: bytes) -> str:
        """Applies one reply; returns which message it answers. Fails on what Envoy would refuse."""
        reply = ext_proc.ProcessingResponse.parse(data)
        kind, part = betterproto2.which_one_of(reply, "response")
        assert part is not None, "a reply that answers nothing"
        self.kinds.append(kind)
        if reply.dynamic_metadata is not None:
            self.metadata |= plain(reply.dynamic_metadata)
        if kind == "immediate_response":
            self.immediate = part
            return kind
        if kind.endswith("_trailers"):
            assert part.header_mutation is None
            return kind
        common = part.response
        if common is None:
            return kind
        assert common.status == 0
        self.cleared_route |= common.clear_route_cache
        if common.header_mutation is not None:
            target = self.response_headers if kind.startswith("response") else self.headers
            self._mutate(target, common.header_mutation, kind)
        if common.body_mutation is not None:
            chunk = common.body_mutation.streamed_response
            assert chunk is not None, "only streamed_response may be used: the body is never changed"
            self.largest_chunk = max(self.largest_chunk, len(chunk.body))
            if kind == "request_body":
                assert not self.body_ended
                self.body += chunk.body
                self.body_ended += chunk.end_of_stream
            else:
                assert not self.response_ended
                self.response_body += chunk.body
                self.response_ended += chunk.end_of_stream
        return kind

    def _mutate(self, target: dict[str, str], mutation: ext_proc.HeaderMutation, kind: str) -> None:
        for name in mutation.remove_headers:
            target.pop(name, None)
        for option in mutation.set_headers:
            header = option.header
            assert header is not None
            assert header.value == "", "value and raw_value both set make Envoy answer 500"
            assert option.append_action == core.HeaderValueOptionHeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
            target[header.key] = header.raw_value.decode()
            if header.key == DESTINATION:
                self.decision_in = kind
        names = [option.header.key for option in mutation.set_headers if option.header]
        assert not set(names) & set(mutation.remove_headers)
