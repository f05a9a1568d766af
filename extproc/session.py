"""The life of one proxied HTTP request as ext_proc shows it. Sans-IO: messages in, replies out, no clock, no protobuf.

    session = Session(rules)
    replies = session.receive(message)        # write them all, in order
    if session.request is not None:           # the body is complete
        replies = session.decided(outcome)    # or session.failed(Reason.TIMEOUT)
    ...
    session.close()                           # however the exchange ends; plain call, any number of times

Request side:

    START --headers--> COLLECT --last body part or trailers--> DECIDE --decided(), failed()--> PASS
      |                   |                                       |
      |                   +--over the limit--> PASS               +--Immediate--> ENDED
      +--no body, other path or method, encoded, announced too large--> PASS, for an endpoint picker DECIDE
      +--observability mode--> OBSERVE

Response side: three events in order (headers, first byte, end), whatever the request side's phase.

Where the decision goes: in full duplex (FULL_DUPLEX_STREAMED, announced by the first message) the reply to the request
headers is held until the body is complete and carries it, then the body follows in chunks. In every other mode the
headers are answered at once and the reply to the last body part carries it; with STREAMED the request may have left
by then, so gateways should use BUFFERED or full duplex.

Every message that needs a reply gets exactly one, in full duplex body bytes are echoed unchanged instead. A client's
own copy of a header that we may set never survives: each reply that can change request headers sets it or removes it.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from enum import Enum, auto

from extproc.messages import (
    BodyMode,
    HttpRequest,
    Immediate,
    Kind,
    Message,
    Outcome,
    Reply,
    RequestBody,
    RequestHeaders,
    RequestTrailers,
    ResponseBody,
    ResponseHeaders,
    ResponseTrailers,
    Ticket,
)
from extproc.reasons import Reason
from extproc.session_rules import SessionRules
from extproc.usage import UsageReader

NOTHING: tuple[Reply, ...] = ()
DESTINATION_KEY = "x-gateway-destination-endpoint"


class Phase(Enum):
    START = auto()
    COLLECT = auto()
    DECIDE = auto()
    PASS = auto()
    OBSERVE = auto()
    ENDED = auto()


class Session:
    """One exchange. Cost without the Decider: about 3 us; memory: the request body until it is decided."""

    __slots__ = (
        "_answered",
        "_at_headers",
        "_body_ended",
        "_chunks",
        "_duplex_request",
        "_duplex_response",
        "_ended_by_trailers",
        "_first_byte",
        "_head",
        "_mode",
        "_phase",
        "_read_usage",
        "_response_body_sent",
        "_response_headers",
        "_rules",
        "_size",
        "_ticket",
        "_usage",
        "request",
    )

    def __init__(self, rules: SessionRules) -> None:
        self._rules = rules
        self._phase = Phase.START
        self.request: HttpRequest | None = None
        """The complete request while the session waits for decided() or failed(), else None."""
        self._head: RequestHeaders | None = None
        self._chunks: list[bytes] = []
        self._size = 0
        self._mode = -1
        self._duplex_request = False
        self._duplex_response = False
        self._response_body_sent = False
        self._ended_by_trailers = False
        self._at_headers = False
        self._body_ended = True
        self._first_byte = False
        self._response_headers: tuple[tuple[str, str], ...] = ()
        self._ticket: Ticket | None = None
        self._answered = False
        self._read_usage = False
        self._usage: UsageReader | None = None

    def receive(self, message: Message) -> Iterable[Reply | Immediate]:
        """The replies due now, possibly none. Never raises on content; RuntimeError while a decision is due."""
        if self._phase is Phase.DECIDE:
            raise RuntimeError("a decision is due: call decided() or failed() first")
        if self._phase is Phase.ENDED:
            return NOTHING
        return _RECEIVERS[type(message)](self, message)

    def decided(self, outcome: Outcome) -> Iterable[Reply | Immediate]:
        """The replies that carry the outcome; takes over its ticket. RuntimeError when no decision is due.

        Something that is no well-formed Outcome is a fault of the decider: its ticket is closed and the request goes on
        unscored, reason `internal`.
        """
        if self._phase is not Phase.DECIDE:
            raise RuntimeError("no decision is due")
        try:
            reply = outcome.immediate or self._decision(outcome)
        except Exception as error:
            self._rules.observer.fault("decider", error)
            self._ticket = getattr(outcome, "ticket", None)
            return self.failed(Reason.INTERNAL)
        self._ticket = outcome.ticket
        self._read_usage = self._rules.options.observe_usage
        if isinstance(reply, Immediate):
            self.request = self._head = None
            self._phase = Phase.ENDED
            return (reply,)
        self._response_headers = outcome.response_headers
        return self._answer(reply, self._take_request())

    def _decision(self, outcome: Outcome) -> Reply:
        options = self._rules.options
        own = dict(outcome.metadata)
        if outcome.reason is not None:
            own.setdefault("reason", outcome.reason)
        metadata: dict[str, dict[str, object]] = {"kvcar": own} if own else {}
        headers = outcome.headers
        destination = ",".join(filter(None, outcome.destinations))
        if destination:
            headers = ((options.destination_header, destination), *headers)
            # The gateway reads this key whatever the header is called (override_host in `kvcar envoy-config`).
            metadata["envoy.lb"] = {DESTINATION_KEY: destination}
            if options.session_header:
                first = destination.partition(",")[0]
                headers = ((options.session_header, b64encode(first.encode()).decode()), *headers)
        given = {name.lower() for name, _ in headers}
        return Reply(
            Kind.REQUEST_HEADERS if self._duplex_request or self._at_headers else Kind.REQUEST_BODY,
            set_headers=headers,
            remove_headers=tuple(name for name in self._rules.remove if name not in given),
            metadata=metadata,
            clear_route_cache=options.clear_route_cache and bool(headers),
        )

    def failed(self, reason: Reason) -> Iterable[Reply | Immediate]:
        """Pass the request on unscored: TIMEOUT or INTERNAL. RuntimeError when no decision is due."""
        if self._phase is not Phase.DECIDE:
            raise RuntimeError("no decision is due")
        self._close_ticket()
        return self._unscored(reason, self._take_request())

    @property
    def ended(self) -> bool:
        """Nothing more is to be read or written: an Immediate went out, or close() was called."""
        return self._phase is Phase.ENDED

    def close(self) -> None:
        """The exchange is over: releases the body, closes the ticket. Never raises, never blocks; idempotent."""
        self._phase = Phase.ENDED
        self.request = self._head = None
        self._chunks = []
        self._close_ticket()

    # --- request side ---

    def _on_request_headers(self, message: RequestHeaders) -> Iterable[Reply]:
        rules = self._rules
        if self._phase is not Phase.START:
            return NOTHING if self._phase is Phase.OBSERVE else (rules.headers_pass,)
        self._announce(message.modes)
        if message.observe_only:
            self._phase = Phase.OBSERVE
            return NOTHING
        reason = self._refuse(message)
        if reason is not None and rules.options.endpoint_picker:
            self._head, self._at_headers = message, True
            return self._ask(reason)
        if reason is not None:
            self._phase = Phase.PASS
            rules.observer.unscored(reason)
            return (rules.headers_unscored[reason],)
        self._phase = Phase.COLLECT
        self._head = message
        return NOTHING if self._duplex_request else (rules.headers_pass,)

    def _refuse(self, message: RequestHeaders) -> Reason | None:
        """Why a request is not worth collecting, by its headers alone."""
        headers = message.headers
        if message.end_of_stream or self._mode == BodyMode.NONE:
            return Reason.NO_BODY
        if headers.get(":method") != "POST":
            return Reason.METHOD
        if headers.get(":path", "").partition("?")[0] not in self._rules.paths:
            return Reason.PATH
        if headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
            return Reason.ENCODING
        length = headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > self._rules.options.max_body_bytes):
            return Reason.TOO_LARGE
        return None

    def _on_request_body(self, message: RequestBody) -> Iterable[Reply]:
        if self._phase is not Phase.COLLECT:
            return self._pass_body(message)
        self._chunks.append(message.body)
        self._size += len(message.body)
        if self._size > self._rules.options.max_body_bytes:
            return self._give_up(message.end_of_stream)
        if message.metadata and self._head is not None:
            self._head.metadata = message.metadata
        # BUFFERED sends the whole body in one message; its flag is unset when trailers follow.
        if message.end_of_stream or self._mode == BodyMode.BUFFERED:
            return self._ask()
        if self._mode == BodyMode.BUFFERED_PARTIAL:  # the rest will pass unseen
            return self._give_up(end_of_stream=False)
        return NOTHING if self._duplex_request else (self._rules.body_pass,)

    def _on_request_trailers(self, message: RequestTrailers) -> Iterable[Reply]:
        if self._phase is Phase.COLLECT:
            self._ended_by_trailers = True
            return self._ask()
        return NOTHING if self._phase is Phase.OBSERVE else (self._rules.request_trailers,)

    def _ask(self, reason: Reason | None = None) -> Iterable[Reply]:
        head = self._head
        assert head is not None  # set with Phase.COLLECT
        body = b"".join(self._chunks)
        self._chunks = []
        self._phase = Phase.DECIDE
        headers = head.headers
        method, path = headers.get(":method", ""), headers.get(":path", "")
        self.request = HttpRequest(method, path, headers, body, head.metadata, reason)
        return NOTHING

    def _take_request(self) -> bytes:
        body = self.request.body if self._duplex_request and self.request is not None else b""
        self.request = self._head = None
        self._phase = Phase.PASS
        return body

    def _give_up(self, end_of_stream: bool) -> Iterable[Reply]:
        """Over the limit: keep no more of it. In full duplex what was held goes out, the rest follows as it comes."""
        if self._rules.options.endpoint_picker:
            self._body_ended = end_of_stream
            return self._ask(Reason.TOO_LARGE)
        body = b"".join(self._chunks) if self._duplex_request else b""
        self._chunks = []
        self._head = None
        self._phase = Phase.PASS
        return self._unscored(Reason.TOO_LARGE, body, end_of_stream)

    def _unscored(self, reason: Reason, body: bytes, end_of_stream: bool = True) -> Iterable[Reply]:
        rules = self._rules
        rules.observer.unscored(reason)
        table = rules.headers_unscored if self._duplex_request or self._at_headers else rules.body_unscored
        return self._answer(table[reason], body, end_of_stream)

    def _answer(self, reply: Reply, body: bytes, end_of_stream: bool = True) -> Iterable[Reply]:
        trailers = self._ended_by_trailers
        if self._at_headers:
            return (reply,)
        end_of_stream = end_of_stream and self._body_ended
        if self._duplex_request:
            return self._echo_request(reply, body, end_of_stream and not trailers)
        if trailers:  # the last body part is answered already: what is left can carry metadata alone
            return (Reply(Kind.REQUEST_TRAILERS, metadata=reply.metadata),)
        return (reply,)

    def _echo_request(self, reply: Reply, body: bytes, end_of_stream: bool) -> Iterator[Reply]:
        yield reply
        yield from self._echo(Kind.REQUEST_BODY, body, end_of_stream)
        if self._ended_by_trailers:
            yield self._rules.request_trailers

    def _pass_body(self, message: RequestBody) -> Iterable[Reply]:
        if self._phase is Phase.OBSERVE:
            return NOTHING
        if self._duplex_request:
            return self._echo(Kind.REQUEST_BODY, message.body, message.end_of_stream)
        return (self._rules.body_decided if self._at_headers else self._rules.body_pass,)

    def _echo(self, kind: Kind, body: bytes, end_of_stream: bool) -> Iterator[Reply]:
        """The bytes again, in parts of at most chunk_bytes; an empty part only to say that the body ends."""
        step = self._rules.options.chunk_bytes
        last = max(0, len(body) - 1) // step * step
        if body or end_of_stream:
            for start in range(0, last + 1, step):
                yield Reply(kind, chunk=body[start : start + step], end_of_stream=end_of_stream and start == last)

    # --- response side ---

    def _on_response_headers(self, message: ResponseHeaders) -> Iterable[Reply]:
        rules = self._rules
        self._announce(message.modes)
        if not self._answered:
            self._answered = True
            status = message.headers.get(":status", "")
            code = int(status) if status.isdecimal() else None
            self._tell(lambda ticket: ticket.on_response_headers(code, message.served, message.flags))
            # An engine that streams sends its headers before its prefill (vLLM does): they say nothing about it.
            streams = message.headers.get("content-type", "").startswith("text/event-stream")
            if message.end_of_stream or not (self._response_body_sent or streams):
                self._on_first_byte()
            if message.headers.get("content-encoding", "identity") != "identity":
                self._read_usage = False
        if self._phase is Phase.OBSERVE:
            return NOTHING
        headers = self._response_headers
        if rules.options.served_header and message.served:
            headers = (*headers, (rules.options.served_header, message.served))
        return (Reply(Kind.RESPONSE_HEADERS, set_headers=headers),) if headers else (rules.response_headers,)

    def _on_response_body(self, message: ResponseBody) -> Iterable[Reply]:
        if message.body or message.end_of_stream:
            self._on_first_byte()
        if self._read_usage:
            if self._usage is None:
                self._usage = UsageReader(self._rules.options.usage_tail_bytes)
            self._usage.feed(message.body)
            if message.end_of_stream:
                self._report_usage()
        if self._phase is Phase.OBSERVE:
            return NOTHING
        if self._duplex_response:
            return self._echo(Kind.RESPONSE_BODY, message.body, message.end_of_stream)
        return (self._rules.response_body,)

    def _on_response_trailers(self, message: ResponseTrailers) -> Iterable[Reply]:
        self._report_usage()
        return NOTHING if self._phase is Phase.OBSERVE else (self._rules.response_trailers,)

    # --- both ---

    def _announce(self, modes: tuple[int, int] | None) -> None:
        """protocol_config comes with the first message only; without it, a body ends with its flag or with trailers."""
        if modes is not None:
            self._mode, response = modes
            self._duplex_request = self._mode == BodyMode.FULL_DUPLEX
            self._duplex_response = response == BodyMode.FULL_DUPLEX
            self._response_body_sent = response != BodyMode.NONE

    def _on_first_byte(self) -> None:
        if not self._first_byte:
            self._first_byte = True
            self._tell(lambda ticket: ticket.on_first_byte())

    def _report_usage(self) -> None:
        if self._usage is not None:
            found = self._usage.usage()
            self._usage = None
            self._read_usage = False
            if found is not None:
                self._tell(lambda ticket: ticket.on_usage(found.cached_tokens, found.prompt_tokens))

    def _close_ticket(self) -> None:
        self._report_usage()  # a client may leave right behind the last chunk
        self._tell(lambda ticket: ticket.close())
        self._ticket = None

    def _tell(self, event: Callable[[Ticket], None]) -> None:
        """A ticket's error is its owner's fault and must not reach the request."""
        if self._ticket is not None:
            try:
                event(self._ticket)
            except Exception as error:
                self._rules.observer.fault("ticket", error)


_RECEIVERS: dict[type, Callable[..., Iterable[Reply | Immediate]]] = {
    RequestHeaders: Session._on_request_headers,
    RequestBody: Session._on_request_body,
    RequestTrailers: Session._on_request_trailers,
    ResponseHeaders: Session._on_response_headers,
    ResponseBody: Session._on_response_body,
    ResponseTrailers: Session._on_response_trailers,
}
