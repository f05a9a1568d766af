"""Loads pushed by xLLM engines: `POST` of a JSON heartbeat, used at once.

    {"name": "a", "incarnation_id": "x1", "waiting_requests_num": 3, "gpu_cache_usage_perc": .4,
     "recent_max_ttft": 120, "recent_max_tbt": 25}                                            (times in ms)

or with the numbers inside `load_metrics` and `latency_metrics`, where protobuf's JSON leaves out zeros: there a missing
number is 0. Answers: 200 taken over; 400 no JSON object, no name, or a value that must not be used (the instance is
then no candidate until the next valid one); 409 an instance or incarnation that discovery does not know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from extproc.loads.base import InvalidReport, Reports, valid_load
from extproc.scorers.base import Load

DEFAULT_STALE_AFTER = 10.0


class Heartbeats:
    """The latest heartbeat of every instance; a load source. Pure: the HTTP server hands bodies in.

    max_bytes  a longer body is refused
    """

    def __init__(self, *, stale_after: float = DEFAULT_STALE_AFTER, max_bytes: int = 1 << 20):
        self.reports = Reports(stale_after=stale_after)
        self._max_bytes = max_bytes

    def get(self, name: str, now: float, rank: int | None = None) -> Load | None:
        return self.reports.get(name, now, rank)

    def receive(self, body: bytes, incarnations: Mapping[str, str], now: float) -> tuple[int, str]:
        """Takes one heartbeat; the HTTP status to answer and a line that says why.

        incarnations  by instance name, as discovery has them; "" = unknown, so any is taken
        """
        try:
            beat = json.loads(body) if len(body) <= self._max_bytes else None
        except (ValueError, RecursionError):
            beat = None
        if not isinstance(beat, dict):
            return 400, "the body is no JSON object"
        name = beat.get("name")
        if not isinstance(name, str) or not name:
            return 400, "name is missing"
        known = incarnations.get(name)
        if known is None:
            return 409, f"instance {name[:200]!r} is not known"
        incarnation = beat.get("incarnation_id", "")
        if known and str(incarnation) != known:
            return 409, f"incarnation {str(incarnation)[:200]!r} of {name!r} is not the registered one"
        try:
            load, clamped, facts = _read(beat)
        except InvalidReport as error:
            self.reports.fail(name, str(error))
            return 400, str(error)
        self.reports.put(name, {None: load}, now, clamped=clamped, info=facts)
        return 200, "ok"


def _read(beat: Mapping[str, Any]) -> tuple[Load, int, dict[str, str]]:
    """Load, number of clamped usages, and the recent maxima as facts. Raises InvalidReport."""
    load = beat.get("load_metrics", beat)
    latency = beat.get("latency_metrics", beat)
    if not isinstance(load, Mapping) or not isinstance(latency, Mapping):
        raise InvalidReport("load_metrics and latency_metrics have to be objects")
    zero = None if load is beat else 0.0
    waiting, usage = _number(load, "waiting_requests_num", zero), _number(load, "gpu_cache_usage_perc", 0.0)
    facts = {key: str(_number(latency, key)) for key in ("recent_max_ttft", "recent_max_tbt") if key in latency}
    return valid_load(waiting, None, usage), int(usage > 1), facts


def _number(fields: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = fields.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidReport(f"{key} is {value!r:.60}, expected a number of at least 0")
    return float(value) if abs(value) < 1e300 else float("inf")
