"""Drives one Session with gateway messages and a canned decision, keeping what happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import envoy_data_plane.envoy.service.ext_proc.v3 as ext_proc

from extproc import wire
from extproc.messages import HttpRequest, Outcome
from extproc.reasons import Reason
from extproc.session import Session
from extproc.session_rules import Observer, SessionOptions, SessionRules
from tests.extproc.gateway_model import Exchange

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


class Recorder(Observer):
    """Observer and Ticket in one: every call, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.reasons: list[str] = []
        self.faults: list[str] = []
        self.fails: set[str] = set()

    def unscored(self, reason: Reason) -> None:
        self.reasons.append(str(reason))

    def fault(self, where: str, error: BaseException | None = None) -> None:
        self.faults.append(where)

    def _call(self, name: str, *values: Any) -> None:
        self.calls.append((name, *values))
        if name in self.fails:
            raise ValueError("a ticket that fails")

    def on_response_headers(self, status: int | None, served: str | None, flags: int | None = None) -> None:
        self._call("headers", status, served)

    def on_first_byte(self) -> None:
        self._call("first_byte")

    def on_usage(self, cached_tokens: int | None, prompt_tokens: int | None) -> None:
        self._call("usage", cached_tokens, prompt_tokens)

    def close(self) -> None:
        self._call("close")


def chosen(ticket: Recorder) -> Outcome:
    return Outcome((A, B), metadata={"matched_blocks": 17}, ticket=ticket)


class Drive:
    """One exchange. feed() returns the kinds of the replies to one message; the rest is there to be looked at."""

    def __init__(
        self,
        options: SessionOptions | None = None,
        decide: Callable[[Recorder], Outcome | Reason | None] = chosen,
        client: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.recorder = Recorder()
        self.rules = SessionRules(options, self.recorder)
        self.session = Session(self.rules)
        self.encoder = wire.Encoder(self.rules.constants())
        self.exchange = Exchange(headers=dict(client))
        self.requests: list[HttpRequest] = []
        self.decide = decide

    def feed(self, message: ext_proc.ProcessingRequest | bytes) -> list[str]:
        decoded = wire.decode(bytes(message))
        assert decoded is not None
        replies = self.session.receive(decoded)
        if self.session.request is not None:
            assert list(replies) == []
            self.requests.append(self.session.request)
            outcome = self.decide(self.recorder)
            failed = isinstance(outcome, Reason)
            replies = self.session.failed(outcome) if failed else self.session.decided(outcome)  # type: ignore[arg-type]
        return [self.exchange.apply(self.encoder.encode(reply)) for reply in replies]

    def close(self) -> None:
        self.session.close()
