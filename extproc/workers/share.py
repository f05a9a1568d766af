"""Workers tell one another what they have in flight, so that they do not all send to the engine that looks idle.

    request charged, answered, ended --watch--> changed rows --at most every PAUSE--> datagram to each other worker
    every REFRESH                    --------> all rows with something in flight
    no word of a row for EXPIRY      --------> nothing is in flight there: the worker is gone

A row has absolute numbers, so a lost datagram costs accuracy until the next one and nothing else. `Ledger` is what is
said and believed (no I/O, told the time); `Sharing` has the socket. Nobody waits: what a full or missing socket does
not take is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import orjson

from extproc.loads.inflight import NOTHING, Counters, InFlight, Shared
from extproc.workers.place import Place, load_socket

log = logging.getLogger(__name__)

PAUSE = 0.002
"""Seconds between two datagrams of changes."""
REFRESH = 0.25
EXPIRY = 1.0
ROWS = 64
"""Rows a datagram: with LATEST times each they stay below what a datagram may have (about 200 KiB)."""
LATEST = 32
"""Times of requests in a row, for `own_delta`; older ones are in the engine's report by then."""


class Routed(Protocol):
    """What is read of a pool."""

    @property
    def name(self) -> str: ...
    @property
    def inflight(self) -> InFlight: ...


class Ledger:
    """What this worker says and what it believes of the others. One thread. `pools` is read anew each time."""

    def __init__(self, pools: Iterable[Routed], number: int) -> None:
        self._pools = pools
        self._number = number
        self._changed: dict[Counters, Routed] = {}
        self._heard: dict[tuple[int, str, str], float] = {}

    def changed(self, pool: Routed, counters: Counters) -> None:
        self._changed[counters] = pool

    def changes(self) -> list[bytes]:
        """What has changed since the last call, as datagrams. O(changed)."""
        changed, self._changed = self._changed, {}
        return self._datagrams((pool, counters) for counters, pool in changed.items())

    def everything(self) -> list[bytes]:
        """All that is in flight, as datagrams. O(candidates)."""
        return self._datagrams(
            (pool, counters) for pool in self._pools for counters in pool.inflight.candidates() if counters.open
        )

    def _datagrams(self, found: Iterable[tuple[Routed, Counters]]) -> list[bytes]:
        rows = [(pool.name, counters.name, *counters.own(LATEST)) for pool, counters in found]
        return [orjson.dumps((self._number, rows[at : at + ROWS])) for at in range(0, len(rows), ROWS)]

    def receive(self, datagram: bytes, now: float) -> None:
        """Takes over what another worker says; what makes no sense is left out."""
        for worker, pool, candidate, told in _rows(datagram):
            inflight = self._inflight(pool)
            if inflight is None:
                continue
            inflight.take(worker, candidate, told)
            if told.requests:
                self._heard[worker, pool, candidate] = now
            else:
                self._heard.pop((worker, pool, candidate), None)

    def expire(self, now: float) -> None:
        """Forgets what nobody has repeated for EXPIRY seconds."""
        for key, heard in list(self._heard.items()):
            if now - heard > EXPIRY:
                del self._heard[key]
                worker, pool, candidate = key
                inflight = self._inflight(pool)
                if inflight is not None:
                    inflight.take(worker, candidate, NOTHING)

    def _inflight(self, name: str) -> InFlight | None:
        return next((pool.inflight for pool in self._pools if pool.name == name), None)


def _rows(datagram: bytes) -> Iterator[tuple[int, str, str, Shared]]:
    try:
        worker, rows = orjson.loads(datagram)
        for pool, candidate, requests, waiting, prompt, waiting_prompt, squares, uncached, entered in rows:
            told = Shared(requests, waiting, prompt, waiting_prompt, squares, uncached, tuple(entered))
            yield worker, pool, candidate, told
    except (ValueError, TypeError):
        log.debug("a datagram of %d bytes is none of a worker", len(datagram))


class Sharing:
    """The socket of one worker. `run` until cancelled; made and used in the event loop."""

    def __init__(self, pools: Iterable[Routed], place: Place) -> None:
        self.ledger = Ledger(pools, place.number)
        self._pools = pools
        self._place = place
        self._peers = [str(load_socket(place.directory, number)) for number in place.others]
        self._flush: asyncio.TimerHandle | None = None
        self._flushed = 0.0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    async def run(self) -> None:
        """Raises OSError when the socket cannot be bound."""
        path = load_socket(self._place.directory, self._place.number)
        path.unlink(missing_ok=True)  # of the process in this place before
        self._socket.bind(str(path))
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket.fileno(), self._read)
        try:
            while True:
                for pool in self._pools:  # new ones come with a reload
                    if pool.inflight.watch is None:
                        pool.inflight.watch = self._watch(pool)
                self._send(self.ledger.everything())
                self.ledger.expire(loop.time())
                await asyncio.sleep(REFRESH)
        finally:
            loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _watch(self, pool: Routed) -> Callable[[Counters], None]:
        loop = asyncio.get_running_loop()

        def changed(counters: Counters) -> None:
            self.ledger.changed(pool, counters)
            if self._flush is None:
                self._flush = loop.call_later(max(0.0, self._flushed + PAUSE - loop.time()), self._flush_now)

        return changed

    def _flush_now(self) -> None:
        self._flush = None
        self._flushed = asyncio.get_running_loop().time()
        self._send(self.ledger.changes())

    def _send(self, datagrams: list[bytes]) -> None:
        for datagram in datagrams:
            for peer in self._peers:
                try:
                    self._socket.sendto(datagram, peer)
                except OSError:  # full, or that worker is not there: the next refresh repeats it
                    continue

    def _read(self) -> None:
        now = asyncio.get_running_loop().time()
        for _ in range(64):  # then requests have their turn
            try:
                datagram = self._socket.recv(1 << 18)
            except OSError:
                return
            self.ledger.receive(datagram, now)
