"""One log line when a stream is lost, comes back, or loses and regains its place: what the person on call greps for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from kvindex.directory import Directory, StreamReport

log = logging.getLogger(__name__)

INTERVAL = 2.0
"""Seconds between looks. A stream that changes faster than that gives one line, not many."""

State = tuple[bool, bool, bool]


class StreamLog:
    """Remembers (connected, synchronized, never reached) of every stream and logs what changed."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str, int], State] = {}

    def look(self, reports: Iterable[tuple[str, StreamReport]]) -> None:
        """`reports`: (name of its directory, report) of every stream there is."""
        seen: dict[tuple[str, str, int], State] = {}
        for pool, report in reports:
            key = (pool, report.instance, report.dp_rank)
            seen[key] = now = (report.link.connected, report.synchronized, _never_reached(report))
            before = self._seen.get(key, (False, False, False))
            if now != before:
                self._tell(f"{report.instance}/{report.dp_rank}", report, before, now)
        for key in self._seen.keys() - seen.keys():
            log.info("stream %s/%d: no longer followed", key[1], key[2])
        self._seen = seen

    @staticmethod
    def _tell(name: str, report: StreamReport, before: State, now: State) -> None:
        connected, synchronized, never_reached = now
        if synchronized:
            log.info(
                "stream %s: synchronized at sequence %s, %s", name, report.sequence,
                "complete" if report.complete else "without what the engine had before",
            )  # fmt: skip
        elif connected and not before[0]:
            log.info("stream %s: connected to %s", name, report.endpoint)
        elif never_reached:
            log.warning("stream %s: no connection so far, its hits do not count: %s", name, report.error or "")
        elif not connected:
            log.warning("stream %s: lost %s, its hits do not count: %s", name, report.endpoint, report.error or "")
        else:
            log.warning("stream %s: not synchronized, its hits do not count: %s", name, report.error or "")


def _never_reached(report: StreamReport) -> bool:
    """Tried in vain since it is followed: a wrong port would otherwise never be in the log."""
    return not report.link.connected and not report.link.connections and report.link.connect_retries > 0


def settled(report: StreamReport) -> bool:
    """Nothing better is to be expected of this stream soon: it is synchronized, cannot be reached, is not followed, or
    has no way to ask for the past."""
    if report.synchronized or report.state in ("skipped", "missing"):
        return True
    tried = report.link.connected or report.link.connect_retries > 0
    return tried and report.state not in ("waiting", "fetch")


async def watch(directories: Callable[[], Iterable[tuple[str, Directory]]], interval: float = INTERVAL) -> None:
    """Looks for ever; cancel it to end.

    `directories`  those there are now, each with a name that no other one has
    """
    lines = StreamLog()
    while True:
        lines.look(
            (name, report)
            for name, directory in directories()
            for report in (*directory.status(), *directory.pool_status())
        )
        await asyncio.sleep(interval)
