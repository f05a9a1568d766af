"""What goes into and comes out of a Session, as plain values, and the seam to whatever decides (Decider, Ticket).

Messages are made by the shell (wire.py) and read by the session; replies the other way round. All are to be taken as
read-only; they are not frozen because a frozen dataclass costs four times as much to make.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Protocol

from extproc.reasons import Reason

# --- from Envoy -------------------------------------------------------------------------------------------------------


class BodyMode(IntEnum):
    """Values of ProcessingMode.BodySendMode. A later Envoy may send others, so messages carry plain ints."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX = 4


@dataclass(slots=True)
class RequestHeaders:
    """headers: lower-case names, pseudo headers included. modes: (request, response) body modes, if announced."""

    headers: dict[str, str]
    end_of_stream: bool
    modes: tuple[int, int] | None = None
    metadata: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    observe_only: bool = False


@dataclass(slots=True)
class RequestBody:
    body: bytes
    end_of_stream: bool
    metadata: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


@dataclass(slots=True)
class RequestTrailers:
    pass


@dataclass(slots=True)
class ResponseHeaders:
    """served: "ip:port" of the host that answered, None when Envoy does not tell or answered itself.
    flags: Envoy's response flags as a number, 0 = all went well, None when it does not tell."""

    headers: dict[str, str]
    end_of_stream: bool
    modes: tuple[int, int] | None = None
    served: str | None = None
    flags: int | None = None


@dataclass(slots=True)
class ResponseBody:
    body: bytes
    end_of_stream: bool


@dataclass(slots=True)
class ResponseTrailers:
    pass


Message = RequestHeaders | RequestBody | RequestTrailers | ResponseHeaders | ResponseBody | ResponseTrailers


# --- to Envoy ---------------------------------------------------------------------------------------------------------


class Kind(StrEnum):
    """Which message a reply answers; the value is the field of ProcessingResponse."""

    REQUEST_HEADERS = "request_headers"
    REQUEST_BODY = "request_body"
    REQUEST_TRAILERS = "request_trailers"
    RESPONSE_HEADERS = "response_headers"
    RESPONSE_BODY = "response_body"
    RESPONSE_TRAILERS = "response_trailers"


@dataclass(slots=True)
class Reply:
    """CONTINUE, with what to change. chunk is set in full duplex only: the body bytes to pass on, part by part."""

    kind: Kind
    set_headers: tuple[tuple[str, str], ...] = ()
    remove_headers: tuple[str, ...] = ()
    metadata: Mapping[str, Mapping[str, object]] | None = None
    clear_route_cache: bool = False
    chunk: bytes | None = None
    end_of_stream: bool = False


@dataclass(slots=True)
class Immediate:
    """Answer the client ourselves; the exchange ends with it. details: one word for the access log."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    details: str = ""


def refusal(
    status: int,
    message: str,
    *,
    kind: str,
    details: str,
    retry_after: int | None = None,
    headers: tuple[tuple[str, str], ...] = (),
) -> Immediate:
    """An Immediate with an OpenAI error body, e.g. 429 rate_limit_error or 503 service_unavailable.

    retry_after is in whole seconds. `details` shows up as %RESPONSE_CODE_DETAILS%: one word such as kvcar_no_capacity.
    """
    error = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    given = (("content-type", "application/json"), *headers)
    if retry_after is not None:
        given += (("retry-after", str(retry_after)),)
    return Immediate(status=status, headers=given, body=json.dumps(error).encode(), details=details)


# --- the decider ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class HttpRequest:
    """A whole request for a handled path. headers as in RequestHeaders; metadata: the namespaces Envoy forwards.

    traceparent: of the gateway's own span, which comes beside the messages; only if asked for.
    reason: for Decider.pick, not decide: why it cannot be scored. Its body is what is to be passed on, if anything.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    metadata: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    reason: Reason | None = None
    traceparent: str | None = None


class Ticket(Protocol):
    """Follows a decided request to its end. Every method is called at most once, close() always exactly once, last.

    All are plain calls on the event loop's thread and must not block. on_usage is called only where the observation of
    response bodies is switched on. `served` and `flags`: see `ResponseHeaders`.
    """

    def on_response_headers(self, status: int | None, served: str | None, flags: int | None = None) -> None: ...

    def on_first_byte(self) -> None: ...

    def on_usage(self, cached_tokens: int | None, prompt_tokens: int | None) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Outcome:
    """What was decided for a request.

    destinations      "ip:port", best first; empty = unscored, Envoy balances
    headers           further request headers to set (rank, prefill peer), lower-case names
    metadata          own facts for the access log, namespace kvcar
    reason            why unscored; counted by whoever decided, not by the session
    ticket            told what becomes of the request
    immediate         answer the client instead of passing the request on
    response_headers  headers to set on the response
    """

    destinations: tuple[str, ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    metadata: Mapping[str, object] = field(default_factory=dict)
    reason: str | None = None
    ticket: Ticket | None = None
    immediate: Immediate | None = None
    response_headers: tuple[tuple[str, str], ...] = ()


class Decider(Protocol):
    """Decides one request. Called once the body is complete; cancelled when the client leaves or time is up.

    Should not raise: an exception passes the request on unscored with reason `internal`. Whoever creates a ticket and
    is then cancelled before returning closes it.
    """

    async def decide(self, request: HttpRequest) -> Outcome: ...

    def pick(self, request: HttpRequest, reason: Reason) -> Outcome:
        """For an endpoint picker (SessionOptions.endpoint_picker): a destination without scoring, or an Immediate.
        At once: it stands in when `decide` failed or was too late."""
        ...
