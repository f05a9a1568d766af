"""Loads scraped from the engines' own /metrics pages.

    page --parse--> Scrape (loads by rank) --Reports.put--> LoadSource

Only lines that begin with a name of ENGINES are parsed: a page of 200 KB costs about 0.3 ms. Every instance is
polled by its own task, so a frozen engine delays nobody; its report goes stale.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import aiohttp

from extproc.loads.base import InvalidReport, Reports, valid_load
from extproc.scorers.base import Load

log = logging.getLogger(__name__)


class Names(NamedTuple):
    """What one engine calls its gauges. `rank`: the label that tells the data-parallel rank, "" = none."""

    waiting: tuple[str, ...]
    running: tuple[str, ...]
    usage: tuple[str, ...]
    rank: str = ""


ENGINES: dict[str, Names] = {
    "vllm": Names(
        ("vllm:num_requests_waiting",),
        ("vllm:num_requests_running",),
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "engine",
    ),
    "sglang": Names(("sglang:num_queue_reqs",), ("sglang:num_running_reqs",), ("sglang:token_usage",), "dp_rank"),
    "trtllm": Names(
        ("trtllm_num_requests_waiting",), ("trtllm_num_requests_running",), ("trtllm_kv_cache_utilization",)
    ),
    "xllm": Names(("num_waiting_requests",), ("num_running_requests",), ("kv_cache_utilization_perc",)),
}
"""First name that is present wins. vLLM renamed gpu_cache_usage_perc to kv_cache_usage_perc."""

_LABELS = r"""(?:[^"}\n]++|"(?:[^"\\\n]++|\\.)*+")*+"""
_WANTED = [name for names in ENGINES.values() for group in names[:3] for name in group]


def _pattern(names: Iterable[str]) -> re.Pattern[str]:
    """A sample line of one of the names: name, optional labels in braces, value, optional timestamp.

    Begins with the newline and has each engine's prefix once, which makes the search ten times faster than `^` over
    whole names. Exporters that rewrite colons make "vllm_" of "vllm:". No part can be matched in two ways, so that a
    page made for it costs no more than any other (`tests/extproc/test_loads.py`).
    """
    tails: dict[str, list[str]] = {}
    for name in names:
        head, colon, tail = name.rpartition(":")
        tails.setdefault(re.escape(head) + "[:_]" if colon else "", []).append(re.escape(tail))
    each = "|".join(f"{head}(?:{'|'.join(group)})" for head, group in tails.items())
    return re.compile(rf"\n({each})(?:\{{({_LABELS})\}})?[ \t]++([^\s]++)(?:[ \t]++-?\d++)?+[ \t]*+\r?(?=\n)")


_LINE = _pattern(_WANTED)
_CANONICAL = {name.replace(":", "_"): name for name in _WANTED}
_LABEL = re.compile(r'[ \t]*+([a-zA-Z_][a-zA-Z0-9_]*+)[ \t]*+=[ \t]*+"((?:[^"\\]++|\\.)*+)"[ \t]*+,?+')
MAX_SERIES = 8192
"""Lines of interest on a page: all ranks of an engine, several times over."""
MAX_RANK_DIGITS = 5
MAX_LABELS = 64


@dataclass(slots=True)
class Scrape:
    """One page.

    engine   key of ENGINES, "" when the page is of none
    loads    by rank; key None when the engine tells no ranks
    clamped  usages above 1, taken as 1
    """

    engine: str = ""
    loads: dict[int | None, Load] = field(default_factory=dict)
    clamped: int = 0


def parse(page: str) -> Scrape:
    """A /metrics page as loads by rank.

    Raises InvalidReport when the page is of no known engine, lacks the waiting gauge, or a value is NaN, infinite,
    negative or no number, or there are more than MAX_SERIES of them. Several series of one rank: waiting and running
    are summed, usage is the highest. O(page).
    """
    series: dict[str, list[tuple[dict[str, str], str]]] = {}
    for number, line in enumerate(_LINE.finditer(f"\n{page}\n")):
        if number == MAX_SERIES:
            raise InvalidReport(f"more than {MAX_SERIES} lines of waiting, running and usage on the page")
        name, labels, value = line.groups()
        key = _CANONICAL[name.replace(":", "_")]
        series.setdefault(key, []).append((_labels(labels or ""), value))
    for engine, names in ENGINES.items():
        if any(name in series for name in names.waiting):
            return _read(engine, names, series)
    raise InvalidReport("no waiting gauge of a known engine on the page (" + ", ".join(ENGINES) + ")")


def _labels(text: str) -> dict[str, str]:
    """Up to the first that is none."""
    found: dict[str, str] = {}
    at = 0
    while len(found) < MAX_LABELS and (label := _LABEL.match(text, at)):
        found[label[1]], at = label[2], label.end()
    return found


def _read(engine: str, names: Names, series: Mapping[str, list[tuple[dict[str, str], str]]]) -> Scrape:
    waiting, running, usage = (_by_rank(group, names.rank, series) for group in names[:3])
    scrape = Scrape(engine)
    for rank, values in waiting.items():
        highest = max(usage.get(rank, [0.0]))
        scrape.clamped += highest > 1
        scrape.loads[rank] = valid_load(sum(values), sum(running[rank]) if rank in running else None, highest)
    return scrape


def _by_rank(
    group: tuple[str, ...], label: str, series: Mapping[str, list[tuple[dict[str, str], str]]]
) -> dict[int | None, list[float]]:
    """Values of the first name that is present, by rank. Raises InvalidReport for one that must not be used."""
    out: dict[int | None, list[float]] = {}
    name = next((name for name in group if name in series), None)
    for labels, text in series.get(name, ()) if name else ():
        try:
            value = float(text)
        except ValueError:
            raise InvalidReport(f"{name} is {text[:40]!r}, expected a number") from None
        if not math.isfinite(value) or value < 0:
            raise InvalidReport(f"{name} is {text[:40]!r}, expected a finite number of at least 0")
        rank = labels.get(label, "")
        told = rank.isdecimal() and len(rank) <= MAX_RANK_DIGITS
        out.setdefault(int(rank) if told else None, []).append(value)
    return out


@dataclass(frozen=True, slots=True)
class Target:
    """One page to poll: the instance's name and the URL."""

    name: str
    url: str


class PrometheusPoller:
    """Polls every target's page in a task of its own and keeps `reports`, the load source.

    interval      seconds between polls of one target (from start to start)
    timeout       seconds one poll may take, default the interval but at least 1
    max_bytes     a longer page is an error
    clock         monotonic seconds, the same as the router's `now`
    """

    def __init__(
        self,
        *,
        interval: float = 0.5,
        stale_after: float | None = None,
        timeout: float | None = None,
        max_bytes: int = 4 << 20,
        clock: Callable[[], float] | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        self.reports = Reports(stale_after=max(2.0, 3 * interval) if stale_after is None else stale_after)
        self._interval = interval
        self._timeout = max(1.0, interval) if timeout is None else timeout
        self._max_bytes = max_bytes
        self._clock = clock
        self._headers = dict(headers or {})
        self._tasks: dict[Target, asyncio.Task[None]] = {}
        self._session: aiohttp.ClientSession | None = None
        self.on_poll: Callable[[str, float, str], None] | None = None
        """Called after each poll with the instance, the time it began, and why nobody answered ("" = somebody did)."""

    def get(self, name: str, now: float, rank: int | None = None) -> Load | None:
        return self.reports.get(name, now, rank)

    def update(self, targets: Iterable[Target]) -> None:
        """The targets from now on. Needs a running event loop; starts and stops tasks, waits for nothing."""
        wanted = set(targets)
        for target in [target for target in self._tasks if target not in wanted]:
            self._tasks.pop(target).cancel()
        self.reports.retain(target.name for target in wanted)
        for target in wanted - set(self._tasks):
            self._tasks[target] = asyncio.get_running_loop().create_task(self._poll(target), name=f"load {target.name}")

    async def close(self) -> None:
        """Stops everything."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _poll(self, target: Target) -> None:
        """Polls one page for ever. Whatever goes wrong is noted in the report's status."""
        clock = self._clock or asyncio.get_running_loop().time
        while True:
            started = clock()
            silent = ""
            try:
                page = await self._fetch(target.url)
                scrape = parse(page)
                self.reports.put(target.name, scrape.loads, started, clamped=scrape.clamped)
            except InvalidReport as error:
                self.reports.fail(target.name, str(error))
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                silent = f"{type(error).__name__}: {error}".removesuffix(": ")
                self.reports.fail(target.name, silent, invalid=False)
            except Exception as error:
                log.exception("polling the load of %s failed", target.name)
                self.reports.fail(target.name, f"{type(error).__name__}: {error}")
            if self.on_poll is not None:
                self.on_poll(target.name, started, silent)
            await asyncio.sleep(max(0.0, self._interval - (clock() - started)))

    async def _fetch(self, url: str) -> str:
        if self._session is None:
            # No limit on connections: several targets may share a host, and a frozen one must not hold up the others.
            connector = aiohttp.TCPConnector(limit=0)
            headers = {"accept-encoding": "identity", **self._headers}
            self._session = aiohttp.ClientSession(headers=headers, connector=connector, auto_decompress=False)
        # an engine must not send us elsewhere, nor a small page that unpacks to a very large one
        asked = self._session.get(url, allow_redirects=False)
        async with asyncio.timeout(self._timeout), asked as response:
            if response.status != 200:
                raise InvalidReport(f"{url} answered {response.status}")
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > self._max_bytes:
                    raise InvalidReport(f"{url} is longer than {self._max_bytes} bytes")
            return body.decode("utf-8", "replace")
