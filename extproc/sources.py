"""Runs the sources of instances, one task each, into one fleet. Everything here happens in the event loop.

    configured instances --+
    etcd, Kubernetes, ... -+--FleetFeed (owns the names it brought)--> Fleet --> directories, pools, ...

A source that fails is started again with a growing pause; what it had found stays. One that is no longer configured
takes its instances with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from extproc.config import Pool as PoolConfig
from extproc.discovery_config import DiscoveryNode
from extproc.instances import PoolFacts, instance_of
from kvindex.discovery.base import FleetFeed, Source
from kvindex.fleet import ChangeKind, Fleet, FleetChange
from kvindex.networks import Networks

log = logging.getLogger(__name__)

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0

Key = tuple[str, str, int]
"""Pool name, type of the source, and which of that type: a source with changed options takes over the instances of the
one before, so that those it finds again keep their streams."""


@dataclass(slots=True)
class _Running:
    given: tuple[PoolFacts, DiscoveryNode]
    source: Source
    feed: FleetFeed
    task: asyncio.Task[None]


class Sources:
    """All sources of one process. `use` needs a running event loop; `close` ends them and leaves the fleet as it is."""

    def __init__(self, fleet: Fleet, *, loopback: bool = True, first_pause: float = FIRST_PAUSE) -> None:
        """loopback  whether what is found may be on this machine without being listed in the pool's `networks`"""
        self._fleet = fleet
        self._loopback = loopback
        self._first_pause = first_pause
        self._configured: dict[str, FleetFeed] = {}
        self._running: dict[Key, _Running] = {}
        self._changed = asyncio.Event()
        fleet.listen(self._left)

    def use(self, pools: Iterable[PoolConfig]) -> None:
        """The pools from now on: equal sources run on, others are ended or started."""
        pools = list(pools)
        wanted = _keyed(pools)
        for key in [key for key in self._running if key not in wanted]:
            running = self._running.pop(key)
            running.task.cancel()
            running.feed.replace(())
        names = {pool.name for pool in pools}
        for name in [name for name in self._configured if name not in names]:
            self._configured.pop(name).replace(())
        for pool in pools:  # first what leaves: an instance may have gone to a pool that stands before its old one
            if (old_feed := self._configured.get(pool.name)) is not None:
                kept = (given for given in pool.instances if given.name in old_feed.names)
                old_feed.replace([instance_of(pool.facts, given) for given in kept])
        for pool in pools:
            feed = self._configured.get(pool.name)
            if feed is None:
                feed = self._configured[pool.name] = FleetFeed(self._fleet, name=f"{pool.name}/configured")
            feed.replace(instance_of(pool.facts, given) for given in pool.instances)
            feed.ready()
        allowed = {pool.name: Networks(pool.networks, loopback=self._loopback) for pool in pools}
        for key, given in wanted.items():
            old = self._running.get(key)
            facts, options = given
            networks = None if options.by_hand else allowed[key[0]]
            if old is not None:
                old.feed.restrict(networks)
            if old is not None and old.given == given:
                continue
            source = options.source(facts)
            if old is None:
                name = f"{key[0]}/{key[1]}" + (f"#{key[2]}" if key[2] else "")
                feed = FleetFeed(self._fleet, name=name, on_ready=self._changed.set, networks=networks)
            else:
                old.task.cancel()
                feed = old.feed
            task = asyncio.create_task(self._supervise(source, feed), name=f"discovery {feed.name}")
            self._running[key] = _Running(given, source, feed, task)

    @property
    def ready(self) -> bool:
        """Every source has told its first full picture."""
        return all(running.feed.is_ready for running in self._running.values())

    def ready_of(self, pool: str) -> bool:
        """The same of one pool's sources."""
        return all(running.feed.is_ready for key, running in self._running.items() if key[0] == pool)

    async def wait_ready(self, deadline: float) -> bool:
        """Waits at most `deadline` seconds for `ready`; returns it."""
        try:
            async with asyncio.timeout(deadline):
                while not self.ready:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self.ready

    def of_type(self, kind: type[Any]) -> Sequence[Any]:
        """The running sources of one class."""
        return [running.source for running in self._running.values() if isinstance(running.source, kind)]

    def status(self) -> list[Mapping[str, Any]]:
        """For status pages: name, whether it is ready, what is wrong, the instances it brought or may not bring."""
        feeds = [*self._configured.values(), *(running.feed for running in self._running.values())]
        return [
            {
                "name": feed.name,
                "ready": feed.is_ready,
                "error": feed.error,
                "instances": sorted(feed.names),
                "refused": dict(feed.refused),
            }
            for feed in feeds
        ]

    async def close(self) -> None:
        tasks = [running.task for running in self._running.values()]
        self._running.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _supervise(self, source: Source, feed: FleetFeed) -> None:
        pause = self._first_pause
        while True:
            started = asyncio.get_running_loop().time()
            try:
                await source.run(feed)
                feed.problem("the source ended by itself; starting it again")
            except Exception as error:
                log.exception("discovery %s failed", feed.name)
                feed.problem(f"{type(error).__name__}: {error}")
            if asyncio.get_running_loop().time() - started > LONGEST_PAUSE:
                pause = self._first_pause
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, pause * 2)

    def _left(self, change: FleetChange) -> None:
        """A name has become free: whoever was refused it gets it. Later, so that all hear of the leaving first."""
        if change.kind is ChangeKind.LEFT:
            for feed in (*self._configured.values(), *(running.feed for running in self._running.values())):
                if feed.refused:
                    asyncio.get_running_loop().call_soon(feed.retry)


def _keyed(pools: Iterable[PoolConfig]) -> dict[Key, tuple[PoolFacts, DiscoveryNode]]:
    found: dict[Key, tuple[PoolFacts, DiscoveryNode]] = {}
    for pool in pools:
        for given in pool.discovery:
            number = sum(key[:2] == (pool.name, given.type) for key in found)
            found[pool.name, given.type, number] = (pool.facts, given)
    return found
