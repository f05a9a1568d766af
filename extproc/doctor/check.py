"""The shape of a check. To add one: a coroutine in the file of its group, and a line in that file's CHECKS."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from extproc.doctor.finding import Finding

if TYPE_CHECKING:
    from extproc.doctor.context import Context


class Skip(Exception):
    """The check cannot be made; the text says why, and another check's finding or an option says what to do."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a check returns: findings, and a few words on what was seen when there are none."""

    findings: tuple[Finding, ...] = ()
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """
    id      stable name
    group   heading of the output
    title   what is right when nothing is found
    needs   parts of the chain it looks at, see `NEEDS`
    run     never needs to catch network failures: the context's answers hold them
    """

    id: str
    group: str
    title: str
    needs: tuple[str, ...]
    run: Callable[[Context], Awaitable[Found]]


NEEDS: dict[str, str] = {
    "engines": "engines over HTTP, read only",
    "tokens": "the engines' render or /tokenize endpoint",
    "events": "a subscription to the engines' KV events",
    "kvcar": "the admin port of a running kvcar",
    "envoy": "--envoy-admin URL",
    "gateway": "--gateway URL",
    "live": "--live: requests that generate one token each",
}
