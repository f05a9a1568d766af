"""Instances from etcd, as xLLM registers them (xllm_registry.py). One watch, questions to those whose key is gone.

    list at revision r --> watch from r+1 --> connection lost --> watch from where it ended, at the next endpoint
                      ^                                              |
                      +------- compacted, or another cluster --------+

While etcd cannot be reached everything stays as it was found: an outage of the registry is not one of the engines.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing

import aiohttp

from kvindex.discovery.base import Notify
from kvindex.discovery.etcd_client import Compacted, EtcdClient, EtcdError, EtcdOptions
from kvindex.discovery.xllm_registry import Question, Registry, key_range
from kvindex.errors import ConfigurationError
from kvindex.fleet import Instance

log = logging.getLogger(__name__)

HEALTH_TIMEOUT = 1.0
FAILURES = (
    aiohttp.ClientError, EtcdError, ConfigurationError, OSError, TimeoutError,
    ValueError, KeyError, TypeError, AttributeError,
)  # fmt: skip
"""What an etcd, something that is none, or a certificate that has been replaced may bring about."""


class EtcdSource:
    """`run` until cancelled. Made with a Registry of the same namespace. Raises ConfigurationError for TLS files that
    cannot be read.

    health_path  of the engines; 200 within a second is an answer
    """

    def __init__(
        self,
        options: EtcdOptions,
        registry: Registry,
        *,
        namespace: str = "",
        health_path: str = "/health",
        retry: float = 1.0,
        retry_max: float = 15.0,
    ) -> None:
        options.tls()
        self._options = options
        self._registry = registry
        self._range = key_range(namespace)
        self._health_path = health_path
        self._retry, self._retry_max = retry, retry_max
        self._next: int | None = None  # revision to watch from; None = to be listed
        self._cluster = ""
        self._trouble: str | None = None
        self._told: tuple[int, str | None, str] | None = None
        self._changed = asyncio.Event()

    async def run(self, notify: Notify) -> None:
        self._next = self._told = None
        self._registry.forget_questions()
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._ask(session, notify, tasks))
            turn, pause = 0, self._retry
            while True:
                endpoint = self._options.endpoints[turn % len(self._options.endpoints)]
                try:
                    await self._follow(EtcdClient(session, endpoint, self._options), notify)
                except Compacted as why:
                    log.info("etcd %s: %s; listing again", endpoint, why)
                    self._next, pause = None, self._retry
                    continue
                except FAILURES as error:
                    if self._trouble is None:
                        pause = self._retry
                    said = str(error) or type(error).__name__
                    self._trouble = f"etcd {endpoint}: {said}; what was found before stays"
                    self._tell(notify)
                turn += 1
                await asyncio.sleep(pause)
                pause = min(self._retry_max, pause * 2)

    async def _follow(self, client: EtcdClient, notify: Notify) -> None:
        """List if need be, then watch until something breaks."""
        await client.authenticate()
        if self._next is None:
            listing = await client.list(*self._range)
            self._registry.listed(listing.pairs, time.monotonic())
            self._next, self._cluster = listing.revision + 1, listing.cluster
            self._trouble = None
            self._tell(notify)
            notify.ready()
        parts = [asyncio.create_task(self._watch(client, notify)), asyncio.create_task(self._check(client))]
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for part in parts:
                part.cancel()
            results = await asyncio.gather(*parts, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        raise EtcdError("the watch ended")

    async def _watch(self, client: EtcdClient, notify: Notify) -> None:
        assert self._next is not None
        async with aclosing(client.watch(*self._range, self._next, self._cluster)) as stream:
            async for changes in stream:
                now = time.monotonic()
                for change in changes.changes:
                    if change.value is None:
                        self._registry.deleted(change.key, change.previous, now)
                    else:
                        self._registry.put(change.key, change.value)
                self._next = changes.next_revision
                self._trouble = None
                self._tell(notify)

    async def _check(self, client: EtcdClient) -> None:
        """Raises when the member cannot answer any more: it hangs, or has no quorum. Its watch would only be silent."""
        while True:
            await asyncio.sleep(self._options.check_every)
            await client.list(*self._range, limit=1)

    # -- instances whose key is gone

    async def _ask(self, session: aiohttp.ClientSession, notify: Notify, tasks: asyncio.TaskGroup) -> None:
        while True:
            for question in self._registry.due(time.monotonic()):
                tasks.create_task(self._question(session, notify, question))
            self._tell(notify)
            self._changed.clear()
            due = self._registry.next_due()
            try:
                async with asyncio.timeout(None if due is None else max(0.0, due - time.monotonic())):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _question(self, session: aiohttp.ClientSession, notify: Notify, question: Question) -> None:
        try:
            notify.admit(Instance(question.name, question.address))
            healthy = await self._healthy(session, question.address)
        except ConfigurationError:  # refused before, too: nothing is sent there
            healthy = False
        if healthy:
            self._registry.answered(question, time.monotonic())
        else:
            self._registry.silent(question, time.monotonic())
        self._changed.set()
        self._tell(notify)

    async def _healthy(self, session: aiohttp.ClientSession, address: str) -> bool:
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT)
        try:
            url = f"http://{address}{self._health_path}"
            async with session.get(url, timeout=timeout, allow_redirects=False) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return False

    def _tell(self, notify: Notify) -> None:
        """The fleet, and what is wrong, as they are now, if either has changed."""
        news = (self._registry.version, self._trouble, self._cluster)
        if news == self._told:
            return
        self._told = news
        self._changed.set()
        if not self._cluster:  # nothing was ever listed: no news about instances
            notify.problem(self._trouble)
            return
        assignment = self._registry.assignment()
        notify.replace(assignment.instances)
        left_out = {**self._registry.refused, **assignment.excluded}
        notify.problem(self._trouble or "; ".join(f"{name}: {why}" for name, why in sorted(left_out.items())) or None)
