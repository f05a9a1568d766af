"""Several kvcar of one fleet: a stream whose engine cannot give the whole past gets it from a replica that was there.

    stream connected, not complete --begin--> GET peer/v1/internal/kv-cache/snapshot --take--> complete, or why not

Asked at start before health says SERVING, and later whenever a stream has lost its past (a gap, a restart of an engine
without replay). A peer may only give what it is sure of; what it gives is taken only if both provably followed the same
process (kvindex/adoption.py).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp

from extproc.pool import Pool
from kvindex import exchange
from kvindex.directory import StreamReport
from kvindex.errors import DecodeError
from kvindex.exchange import Refused
from kvindex.transfer import unpack

log = logging.getLogger(__name__)

PATH = "/v1/internal/kv-cache/snapshot"
TOKEN_HEADER = "X-Internal-Token"
MAX_BODY = 256 << 20
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0

T = TypeVar("T")


def needs(report: StreamReport) -> bool:
    """Would a peer's view make this stream better? Its own recovery comes first."""
    if not report.link.connected or report.state not in ("empty", "live"):
        return False
    return not (report.synchronized and report.complete)


class Replicas:
    """The asking side.

    peers    base URLs of the other replicas' admin ports; a name may stand for several addresses, all are asked
    token    their `admin.token`
    timeout  seconds for one answer
    """

    def __init__(self, peers: Sequence[str], *, token: str | None = None, timeout: float = 10.0) -> None:
        self._peers = tuple(peer.rstrip("/") for peer in peers)
        self._headers = {TOKEN_HEADER: token} if token else {}
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None
        self._next: dict[tuple[str, str, int, object], tuple[float, float]] = {}
        self._silent: set[tuple[str, str]] = set()
        self.taken = 0
        """Views taken over since the start."""
        self.refused: dict[tuple[str, str, int], str] = {}
        """Why the last try for a stream came to nothing, by (pool, instance, dp_rank)."""

    async def run(self, pools: Iterable[Pool], interval: float) -> None:
        """Looks for streams in need for ever; `pools` is read anew each time."""
        while True:
            await self.warm(pools)
            await asyncio.sleep(interval)

    async def warm(self, pools: Iterable[Pool]) -> None:
        """One round: asks for each stream in need that is due. Never raises."""
        now = time.monotonic()
        due = []
        present = set()
        for pool in pools:
            for report in pool.directory.status():
                life = (report.link.connections, report.status.rebuilds if report.status else 0)
                key = (pool.name, report.instance, report.dp_rank, life)
                if needs(report):
                    present.add(key)
                    if self._next.get(key, (0.0, 0.0))[0] <= now:
                        due.append((pool, report, key))
        self._next = {key: value for key, value in self._next.items() if key in present}
        self.refused = {key: why for key, why in self.refused.items() if any(key == one[:3] for one in present)}
        if not due:
            return
        peers = list(await self._addresses())
        there = {address for address, _ in peers}  # a peer that started again has another address
        self._silent = {one for one in self._silent if one[0] == "name" or one[1] in there}
        for pool, report, key in due:
            reason = await self._fill(pool, report, peers)
            name = (pool.name, report.instance, report.dp_rank)
            if reason is None:
                self.refused.pop(name, None)
                self._next.pop(key, None)
            else:
                pause = min(LONGEST_PAUSE, 2 * self._next.get(key, (0.0, FIRST_PAUSE / 2))[1])
                self._next[key] = (time.monotonic() + pause, pause)
                log.debug("stream %s/%d: no view from a peer: %s", *name[1:], reason)
                self.refused[name] = reason

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _fill(self, pool: Pool, report: StreamReport, peers: list[tuple[str, str]]) -> str | None:
        """From the first peer that helps. Returns why none did. A peer that does not answer is taken out of `peers`: to
        wait for it once a round is enough."""
        directory, instance, rank = pool.directory, report.instance, report.dp_rank
        reason = "no peer is known or answers"
        for address, host in list(peers):
            try:
                await _done(exchange.begin(directory, instance, rank), self._timeout)
                known = report.status.known if report.status else 0
                query = {"pool": pool.name, "instance": instance, "dp_rank": str(rank), "known": str(known)}
                try:
                    body = await self._ask(address, host, query)
                except (aiohttp.ClientConnectionError, TimeoutError, OSError) as error:
                    peers.remove((address, host))
                    self._away("address", address, error)
                    raise
                header, blocks = await asyncio.to_thread(unpack, body)
                count = await _done(exchange.take(directory, instance, rank, header, blocks), self._timeout)
            except (Refused, DecodeError) as error:
                reason = f"{address}: {error}"
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                reason = f"{address}: {type(error).__name__}: {error}".removesuffix(": ")
            except Exception as error:
                log.exception("taking over the view of %s/%d from %s failed", instance, rank, address)
                reason = f"{address}: {type(error).__name__}"
            else:
                self.taken += 1
                log.info("stream %s/%d: %d blocks taken over from %s", instance, rank, count, address)
                return None
        return reason

    def _away(self, kind: str, peer: str, error: BaseException) -> None:
        """`kind`: "name" that does not resolve, "address" that does not answer. Told once until it is there again."""
        if (kind, peer) not in self._silent:
            self._silent.add((kind, peer))
            log.warning("peer %s does not answer: %s", peer, f"{type(error).__name__}: {error}".removesuffix(": "))

    def _there(self, kind: str, peer: str) -> None:
        if (kind, peer) in self._silent:
            self._silent.discard((kind, peer))
            log.info("peer %s is there again", peer)

    async def _ask(self, address: str, host: str, query: dict[str, str]) -> bytes:
        async with (
            asyncio.timeout(self._timeout),
            self.session_of(address).get(
                address + PATH, params=query, headers={"Host": host}, allow_redirects=False
            ) as answer,
        ):
            self._there("address", address)
            if answer.status != 200:
                raise Refused(f"{answer.status} {(await answer.content.read(200)).decode('utf-8', 'replace').strip()}")
            body = bytearray()
            async for part in answer.content.iter_any():
                body += part
                if len(body) > MAX_BODY:
                    raise Refused(f"its answer is over {MAX_BODY} bytes")
            return bytes(body)

    def session_of(self, address: str) -> aiohttp.ClientSession:
        """What a peer is asked with; made in the event loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers)
        return self._session

    async def _addresses(self) -> Sequence[tuple[str, str]]:
        """(base URL by address, the name it was found under) of every peer, each once. Names that fail are left out."""
        found: dict[str, str] = {}
        for peer in self._peers:
            parts = urlsplit(peer)
            if parts.scheme == "https":  # the certificate is the name's
                found.setdefault(peer, parts.netloc)
                continue
            try:
                rows = await asyncio.get_running_loop().getaddrinfo(
                    parts.hostname, parts.port or 80, type=socket.SOCK_STREAM
                )
            except OSError as error:
                self._away("name", peer, error)
                continue
            self._there("name", peer)
            for row in rows:
                ip, port = row[4][0], row[4][1]
                if isinstance(ip, str) and isinstance(port, int):
                    netloc = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
                    found.setdefault(f"http://{netloc}{parts.path}", parts.netloc)
        return list(found.items())


async def _done(future: Future[T], seconds: float) -> T:
    async with asyncio.timeout(seconds):
        return await asyncio.wrap_future(future)


class Giver:
    """The answering side: one view at a time, so that the event thread always gets on with its own work."""

    def __init__(self, pools: Iterable[Pool]) -> None:
        self._pools = pools
        self._one = asyncio.Lock()

    async def give(self, pool: str, instance: str, dp_rank: int, known: int) -> bytes:
        """Raises Refused (nothing to give now), KeyError (no such pool or stream), TimeoutError."""
        found = next((one for one in self._pools if one.name == pool), None)
        if found is None:
            raise KeyError(f"no pool {pool!r} here")
        directory = found.directory
        report = next((one for one in directory.status() if (one.instance, one.dp_rank) == (instance, dp_rank)), None)
        if report is None:
            raise KeyError(f"stream {instance}/{dp_rank} is not followed here")
        status: Any = report.status
        if status is not None and not report.complete and status.known <= known:
            raise Refused("it knows no more")
        async with self._one:
            return await _done(exchange.give(directory, instance, dp_rank), 30.0)
