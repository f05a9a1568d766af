"""Loads pushed by xLLM engines: `POST` of a JSON heartbeat, used at once.

    {"name": "10.0.0.1:8000", "incarnation_id": "x1", "load_metrics": {"waiting_requests_num": 3,
     "gpu_cache_usage_perc": .4}, "latency_metrics": {"recent_max_ttft": 120, "recent_max_tbt": 25}}    (times in ms)

or with the numbers beside `name`. It is protobuf's JSON: names in snake or camel case, numbers also as text, a zero
left out, null for what is not set, all other fields ignored. A heartbeat without a load is taken and changes nothing.
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


def parse(body: bytes) -> Beat | Answer:
    """The heartbeat, or the 400 to answer. Never raises."""
    try:
        fields = json.loads(body) if len(body) <= MAX_BYTES else None
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
    """The latest heartbeat of every instance; a load source. Pure: the HTTP server hands heartbeats in."""

    def __init__(self, *, stale_after: float = DEFAULT_STALE_AFTER):
        self.reports = Reports(stale_after=stale_after)

    def get(self, name: str, now: float, rank: int | None = None) -> Load | None:
        return self.reports.get(name, now, rank)

    def take(self, beat: Beat, now: float) -> Answer:
        """The load of a heartbeat whose sender is known."""
        try:
            found = _read(beat.fields)
        except InvalidReport as error:
            self.reports.fail(beat.name, str(error))
            return BAD_JSON._replace(detail=str(error))
        if found is not None:
            load, clamped = found
            self.reports.put(beat.name, {None: load}, now, clamped=clamped)
        return OK


def refuse(beat: Beat, registered: str | None) -> Answer | None:
    """409 for an instance that discovery does not know (None), or another incarnation of it; "" = unknown."""
    if registered is None:
        return UNKNOWN._replace(detail=f"instance {beat.name[:200]!r} is not known")
    if registered and beat.incarnation != registered:
        return UNKNOWN._replace(detail=f"the registered incarnation is not {beat.incarnation[:200]!r}")
    return None


_LOAD = ("waiting_requests_num", "gpu_cache_usage_perc")


def _read(fields: Mapping[str, Any]) -> tuple[Load, int] | None:
    """Load and number of clamped usages; None = nothing is said. Raises InvalidReport."""
    load = _field(fields, "load_metrics")
    if load is not None and not isinstance(load, Mapping):
        raise InvalidReport("load_metrics has to be an object")
    if load is None:
        if all(_field(fields, key) is None for key in _LOAD):
            return None
        load = fields
        if _field(load, "waiting_requests_num") is None:
            raise InvalidReport("waiting_requests_num is missing")
    waiting, usage = (_number(load, key) for key in _LOAD)
    return valid_load(waiting, None, usage), int(usage > 1)


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
