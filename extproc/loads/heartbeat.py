"""Loads pushed by xLLM engines: `POST` of a JSON heartbeat, used at once (kv-events.md 17.2).

    {"name": "10.0.0.1:8000", "incarnation_id": "x1", "load_metrics": {"waiting_requests_num": 3,
     "gpu_cache_usage_perc": .4}, "latency_metrics": {"recent_max_ttft": 120, "recent_max_tbt": 25}}    (times in ms)

or with the numbers beside `name`. It is protobuf's JSON: names in snake or camel case, numbers also as text, a zero
left out, null for what is not set, unknown fields ignored. A heartbeat without a load is taken and changes nothing.
Numbers that must not be used (NaN, infinite, negative) make the instance no candidate until the next valid heartbeat.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from extproc.loads.base import InvalidReport, Reports, valid_load
from extproc.scorers.base import Load

DEFAULT_STALE_AFTER = 10.0
MAX_BYTES = 1 << 20


class Answer(NamedTuple):
    """HTTP status; xLLM's own error text, "" with 200; and for people what is wrong."""

    status: int
    error: str = ""
    detail: str = ""


OK = Answer(200)
BAD_JSON = Answer(400, "invalid heartbeat json")
NO_NAME = Answer(400, "missing instance name")
UNKNOWN = Answer(409, "instance not registered or stale incarnation")


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat whose shape is right; its numbers are not read yet."""

    name: str
    incarnation: str
    fields: Mapping[str, Any]


def parse(body: bytes, *, max_bytes: int = MAX_BYTES) -> Beat | Answer:
    """The heartbeat, or the 400 to answer. Never raises."""
    try:
        fields = json.loads(body) if len(body) <= max_bytes else None
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return BAD_JSON._replace(detail="the body is no JSON object")
    name, incarnation = fields.get("name"), _field(fields, "incarnation_id")
    if name is not None and not isinstance(name, str):
        return BAD_JSON._replace(detail="name is no text")
    if not name:
        return NO_NAME
    return Beat(name, "" if incarnation is None else str(incarnation), fields)


class Heartbeats:
    """The latest heartbeat of every instance; a load source. Pure: the HTTP server hands bodies in.

    max_bytes  a longer body is refused
    """

    def __init__(self, *, stale_after: float = DEFAULT_STALE_AFTER, max_bytes: int = MAX_BYTES):
        self.reports = Reports(stale_after=stale_after)
        self._max_bytes = max_bytes

    def get(self, name: str, now: float, rank: int | None = None) -> Load | None:
        return self.reports.get(name, now, rank)

    def receive(self, body: bytes, incarnations: Mapping[str, str], now: float) -> Answer:
        """Takes one heartbeat.

        incarnations  by instance name, as discovery has them; "" = unknown, so any is taken
        """
        beat = parse(body, max_bytes=self._max_bytes)
        if isinstance(beat, Answer):
            return beat
        refused = refuse(beat, incarnations.get(beat.name))
        return refused or self.take(beat, now)

    def take(self, beat: Beat, now: float) -> Answer:
        """The load of a heartbeat whose sender is known."""
        try:
            found = _read(beat.fields)
        except InvalidReport as error:
            self.reports.fail(beat.name, str(error))
            return BAD_JSON._replace(detail=str(error))
        if found is not None:
            load, clamped, facts = found
            self.reports.put(beat.name, {None: load}, now, clamped=clamped, info=facts)
        return OK


def refuse(beat: Beat, registered: str | None) -> Answer | None:
    """409 for an instance that discovery does not know (None), or another incarnation of it; "" = unknown."""
    if registered is None:
        return UNKNOWN._replace(detail=f"instance {beat.name[:200]!r} is not known")
    if registered and beat.incarnation != registered:
        return UNKNOWN._replace(detail=f"the registered incarnation is not {beat.incarnation[:200]!r}")
    return None


_LOAD = ("waiting_requests_num", "gpu_cache_usage_perc")
_LATENCY = ("recent_max_ttft", "recent_max_tbt")


def _read(fields: Mapping[str, Any]) -> tuple[Load, int, dict[str, str]] | None:
    """Load, number of clamped usages, and the recent maxima as facts; None = nothing is said. Raises InvalidReport."""
    load, latency = _field(fields, "load_metrics"), _field(fields, "latency_metrics")
    if not all(part is None or isinstance(part, Mapping) for part in (load, latency)):
        raise InvalidReport("load_metrics and latency_metrics have to be objects")
    if load is None:
        if all(_field(fields, key) is None for key in _LOAD):
            return None
        load = fields
        if _field(load, "waiting_requests_num") is None:
            raise InvalidReport("waiting_requests_num is missing")
    latency = fields if latency is None else latency
    waiting, usage = (_number(load, key) for key in _LOAD)
    facts = {key: str(_number(latency, key)) for key in _LATENCY if _field(latency, key) is not None}
    return valid_load(waiting, None, usage), int(usage > 1), facts


def _field(fields: Mapping[str, Any], name: str) -> Any:
    """By its snake case name, or by the camel case one that protobuf writes."""
    value = fields.get(name)
    return fields.get(re.sub("_(.)", lambda found: found[1].upper(), name)) if value is None else value


_NUMBER = re.compile(r"-?\d{1,400}(\.\d{1,400})?([eE][+-]?\d{1,3})?\Z", re.ASCII)


def _number(fields: Mapping[str, Any], key: str) -> float:
    value = _field(fields, key)
    if value is None:
        return 0.0
    if isinstance(value, str) and _NUMBER.match(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidReport(f"{key} is {value!r:.60}, expected a number of at least 0")
    return float(value) if abs(value) < 1e300 else float("inf")
