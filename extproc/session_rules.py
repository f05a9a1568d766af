"""What the sessions of one server share: options, the replies that never change, and where faults are reported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from extproc.messages import Kind, Reply
from extproc.reasons import Reason

OWN_REASONS = (
    Reason.NO_BODY,
    Reason.METHOD,
    Reason.PATH,
    Reason.ENCODING,
    Reason.TOO_LARGE,
    Reason.TIMEOUT,
    Reason.INTERNAL,
)
"""Reasons that a session gives itself; a Decider has its own."""


@dataclass(slots=True, frozen=True)
class SessionOptions:
    """
    destination_header  header that carries the decision, beside the metadata envoy.lb/x-gateway-destination-endpoint
    strip_headers       headers that a client must not set, besides destination_header. Envoy's mutation_rules must
                        allow every one of them, or each request counts as a rejected mutation
    paths, prefixes     paths to decide for, each also behind every prefix
    max_body_bytes      a larger body is passed on unscored and not kept
    chunk_bytes         largest body part in a full-duplex reply (64 KiB is Envoy's own bound)
    clear_route_cache   for gateways that choose a route or cluster by the header; override_host does not need it
    observe_usage       read token counts from response bodies, if Envoy sends them
    session_header      request header for the first destination in base64, as Envoy's stateful_session filter reads it
    endpoint_picker     every request gets a destination or an answer of ours (Gateway API Inference Extension): what
                        cannot be scored goes to Decider.pick, by its headers where they decide it
    served_header       response header to fill with the address that answered, None = none
    """

    destination_header: str = "x-gateway-destination-endpoint"
    strip_headers: tuple[str, ...] = ("x-data-parallel-rank", "x-prefiller-host-port")
    paths: tuple[str, ...] = ("/v1/chat/completions", "/v1/completions")
    prefixes: tuple[str, ...] = ()
    max_body_bytes: int = 32 << 20
    chunk_bytes: int = 62_000
    clear_route_cache: bool = False
    observe_usage: bool = False
    usage_tail_bytes: int = 65_536
    served_header: str | None = None
    session_header: str | None = None
    endpoint_picker: bool = False


class Observer:
    """Told what a session did on its own account; the default does nothing. Calls must be quick and must not raise."""

    def unscored(self, reason: Reason) -> None:
        """A request was passed on without asking the Decider, or its answer was lost: one of OWN_REASONS."""

    def fault(self, where: str, error: BaseException | None = None) -> None:
        """Something failed inside: "decider", "ticket", "server"; or the peer's bytes: "malformed", "unknown"."""


class SessionRules:
    """SessionOptions compiled once for a server: look-up sets, and the replies that are always the same."""

    def __init__(self, options: SessionOptions | None = None, observer: Observer | None = None) -> None:
        self.options = options = options or SessionOptions()
        self.observer = observer or Observer()
        self.paths = frozenset(
            f"{prefix.rstrip('/')}{path}" for prefix in ("", *options.prefixes) for path in options.paths
        )
        self.remove = tuple(
            dict.fromkeys(
                name.lower()
                for name in (options.destination_header, options.session_header, *options.strip_headers)
                if name is not None
            )
        )
        self.headers_pass = Reply(Kind.REQUEST_HEADERS, remove_headers=self.remove)
        self.body_pass = Reply(Kind.REQUEST_BODY, remove_headers=self.remove)
        self.headers_unscored = {reason: self._unscored(Kind.REQUEST_HEADERS, reason) for reason in OWN_REASONS}
        self.body_unscored = {reason: self._unscored(Kind.REQUEST_BODY, reason) for reason in OWN_REASONS}
        self.body_decided = Reply(Kind.REQUEST_BODY)
        self.request_trailers = Reply(Kind.REQUEST_TRAILERS)
        self.response_headers = Reply(Kind.RESPONSE_HEADERS)
        self.response_body = Reply(Kind.RESPONSE_BODY)
        self.response_trailers = Reply(Kind.RESPONSE_TRAILERS)

    def _unscored(self, kind: Kind, reason: Reason) -> Reply:
        return Reply(kind, remove_headers=self.remove, metadata={"kvcar": {"reason": str(reason)}})

    def constants(self) -> Iterator[Reply]:
        """The replies that sessions of these rules return as they are, for the shell to serialise once."""
        yield from (self.headers_pass, self.body_pass, self.body_decided, self.request_trailers)
        yield from (self.response_headers, self.response_body, self.response_trailers)
        yield from self.headers_unscored.values()
        yield from self.body_unscored.values()
