"""Which instances answer, by our own experience. Pure: no clock, no I/O; used from one thread.

The gateway's `override_host` policy sends a request to the named host whatever health checks say, so a dead engine has
to leave the candidates here.

                 `failures` failed requests in a row,
                 or `scrape_failures` failed polls, none of its requests answered meanwhile
        up ---------------------------------------------> out (for `out_seconds`, doubled each time up to the maximum)
        ^                                                  |  time is up, or a poll succeeds where polls had failed
        |   answered                                       v
        +--------------------------------------------- half open: the next request may try it, one at a time
                                                           |  failed: out again

A failed request: the gateway went to the next name of our list, or answered 503 or 504 itself. What an engine answers
while it runs (400, 429, 500, its own 503) says nothing here; `extproc.decider` tells them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

BUSY = 1.0
"""Seconds for which an answer shows that an engine lives."""


class Process(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def incarnation(self) -> str: ...


@dataclass(slots=True)
class _Record:
    incarnation: str
    answered_at: float = float("-inf")
    failed: int = 0
    failed_polls: int = 0
    out_until: float | None = None
    by_poll: bool = False
    times_out: int = 0
    trial_until: float | None = None
    reason: str = ""


class Liveness:
    """See the module. Instances never heard of are up.

    failures         failed requests in a row that take an instance out
    scrape_failures  failed polls of its metrics in a row that do
    out_seconds      how long at first
    max_out_seconds  and at most
    trial_seconds    how long one trial request may take before the next may try
    """

    def __init__(
        self,
        *,
        failures: int = 2,
        scrape_failures: int = 3,
        out_seconds: float = 5.0,
        max_out_seconds: float = 60.0,
        trial_seconds: float = 10.0,
    ) -> None:
        self._failures = failures
        self._scrape_failures = scrape_failures
        self._out = out_seconds
        self._max_out = max(out_seconds, max_out_seconds)
        self._trial = trial_seconds
        self._records: dict[str, _Record] = {}
        self.next_change: float | None = None
        """When `out` will next answer otherwise by time alone; None = never."""

    def retain(self, instances: Iterable[Process]) -> None:
        """The processes there are: a new incarnation starts without a past, who is gone is forgotten."""
        kept = {}
        for one in instances:
            record = self._records.get(one.name)
            if record is not None and record.incarnation == one.incarnation:
                kept[one.name] = record
            else:
                kept[one.name] = _Record(one.incarnation)
        self._records = kept
        self._plan()

    def answered(self, name: str, now: float) -> bool:
        """It answered a request. True = it is back among the candidates."""
        record = self._records.get(name)
        if record is None:
            return False
        was_out = record.out_until is not None
        record.answered_at = now
        record.failed = record.failed_polls = record.times_out = 0  # alive, however long its metrics take
        record.out_until = record.trial_until = None
        record.reason = ""
        if was_out:
            self._plan()
        return was_out

    def failed(self, name: str, now: float, reason: str) -> bool:
        """A request could not be served by it. True = it is out from now on.

        Without effect within `BUSY` of an answer: an engine that answers some requests and refuses others is full, not
        dead, and to leave it out would only move its load to the others.
        """
        record = self._records.get(name)
        if record is None or now - record.answered_at < BUSY:
            return False
        record.failed += 1
        return self._count(record, now, reason, record.failed >= self._failures, by_poll=False)

    def polled(self, name: str, now: float, error: str) -> bool:
        """A poll of its metrics ended, `error` "" = well. True = `out` answers otherwise now."""
        record = self._records.get(name)
        if record is None:
            return False
        if error:
            record.failed_polls += 1
            return self._count(
                record, now, f"its metrics: {error}", record.failed_polls >= self._scrape_failures, by_poll=True
            )
        record.failed_polls = 0
        if record.out_until is not None and record.by_poll:
            record.out_until = record.trial_until = None
            record.times_out, record.reason = 0, ""
            self._plan()
            return True
        return False

    def _count(self, record: _Record, now: float, reason: str, enough: bool, *, by_poll: bool) -> bool:
        if record.out_until is None:
            if not enough:
                return False
        elif now < record.out_until:
            return False  # requests that were under way when it went out
        record.out_until = now + min(self._max_out, self._out * 2.0**record.times_out)
        record.times_out = min(record.times_out + 1, 30)
        record.trial_until, record.reason, record.by_poll = None, reason, by_poll
        self._plan()
        return True

    def picked(self, name: str, now: float) -> bool:
        """A request goes there. True = it is a trial: no other request may go there until it has ended."""
        record = self._records.get(name)
        if record is None or record.out_until is None or now < record.out_until:
            return False
        record.trial_until = now + self._trial
        self._plan()
        return True

    def out(self, now: float) -> Mapping[str, str]:
        """Instance name -> why it should get no request now. O(instances)."""
        found = {}
        for name, record in self._records.items():
            if record.out_until is not None and (
                now < record.out_until or (record.trial_until is not None and now < record.trial_until)
            ):
                found[name] = record.reason
        self._plan(now)
        return found

    def half_open(self, now: float) -> frozenset[str]:
        """Instances that were out and that the next request may try. O(instances)."""
        return frozenset(
            name
            for name, record in self._records.items()
            if record.out_until is not None
            and now >= record.out_until
            and (record.trial_until is None or now >= record.trial_until)
        )

    def seconds_out(self, name: str, now: float) -> float:
        """How long it stays out from now on, 0 = it is not out."""
        record = self._records.get(name)
        return max(0.0, record.out_until - now) if record is not None and record.out_until is not None else 0.0

    def _plan(self, now: float | None = None) -> None:
        """Recomputes `next_change`; without `now` the next look is due at once."""
        times = [
            time
            for record in self._records.values()
            if record.out_until is not None
            for time in (record.out_until, record.trial_until)
            if time is not None and (now is None or time > now)
        ]
        self.next_change = min(times, default=None) if now is not None else (0.0 if times else None)
