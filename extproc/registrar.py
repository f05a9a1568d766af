"""From registrations to instances: who is registered (registry.py) is kept in step with the homes they belong to.

    POST /register --> Registrar --Registry: may it?--> Home of (model, tenant) --upsert--> fleet --> streams
                                                        |
        kvcar serve      a pool with `discovery: [{type: http}]` that serves the model       PoolHomes
        kvcar conductor  made at the first registration of a model and tenant                extproc/conductor.py

Everything here happens in the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol

from extproc.pool import Pool
from extproc.pools import Pools
from extproc.registry import (
    TENANT,
    Context,
    Registration,
    Registry,
    Rejected,
    Removed,
    Worker,
    instance_of,
    publisher_of,
)
from kvindex.directory import Directory
from kvindex.discovery.registered import Registered
from kvindex.errors import ConfigurationError
from kvindex.fleet import Instance, PoolPublisher

log = logging.getLogger(__name__)


class Holder(Protocol):
    """Whose instances can be asked for: a pool, or a conductor's index of one model."""

    @property
    def directory(self) -> Directory: ...
    @property
    def by_name(self) -> Mapping[str, Instance]: ...


class Home(Holder, Protocol):
    """Where the workers of one context live.

    context, model  under which they are registered, and a name that it is asked for by
    name            of the pool that its instances belong to
    dialect, recovery, expire_after   as in `Registered`
    """

    @property
    def context(self) -> Context: ...
    @property
    def model(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def dialect(self) -> str: ...
    @property
    def recovery(self) -> str | None: ...
    @property
    def expire_after(self) -> float | None: ...
    def knows(self, name: str) -> bool:
        """Whether it has been told of this worker."""

    def taken(self, name: str) -> bool:
        """Whether somebody else has an instance of this name."""

    def admit(self, instance: Instance) -> None:
        """Raises ConfigurationError for a place where none may be (kvindex/networks.py)."""

    def upsert(self, instance: Instance) -> None: ...
    def remove(self, name: str) -> None: ...


class Homes(Protocol):
    def of(self, context: Context) -> Home | None:
        """The home of registered workers, None = it takes no registrations any more."""

    def find(self, model: str, tenant: str) -> Home | None:
        """Where workers of this model register, None = nowhere yet."""

    def open(self, model: str, tenant: str, block_size: int | None) -> Home:
        """The same, made if need be, and nothing else is changed. Raises Rejected that says what to do."""

    def keep(self, home: Home) -> None:
        """Takes what `open` gave: somebody is registered there."""

    def closed(self) -> str | None:
        """Why there are no registrations at all here, None = there are."""

    def held(self) -> Iterable[Home]:
        """Every home there is."""
        ...

    def holder(self, model: str, tenant: str) -> Holder | None:
        """Who answers queries for a model."""

    def holders_of(self, instance_id: str, model: str | None, tenant: str) -> list[Holder]:
        """Who has an instance of this name, registered or not."""
        ...


class Registrar:
    """Registers and unregisters; `tick` once a second or so."""

    def __init__(self, registry: Registry, homes: Homes) -> None:
        self.registry = registry
        self.homes = homes
        self._failed: dict[Worker, str] = {}
        self._told: dict[Context, tuple[Directory, tuple[PoolPublisher, ...]]] = {}

    def register(self, given: Registration, now: float) -> None:
        """Raises Rejected, and then changes nothing."""
        home = self.homes.open(given.model, given.worker.context.tenant, given.block_size)
        worker = Worker(home.context, given.worker.instance_id)
        given = replace(given, worker=worker)
        size = home.directory.block_size
        if size is not None and given.block_size not in (None, size):
            raise self.registry.conflict(f"model {given.model} has blocks of {size} tokens, not {given.block_size}")
        known = dict(self.registry.ranks(worker))
        try:
            home.admit(_places(given))
        except ConfigurationError as error:
            raise Rejected(str(error), 403, "forbidden_address") from None
        if not given.is_pool:
            if not known and home.taken(worker.instance_id):
                raise self.registry.conflict(
                    f"an instance {worker.instance_id} is known from the configuration or another source, which says"
                    " where its events are: register under another instance_id"
                )
            try:
                _instance({**known, given.dp_rank: given}, home)
            except ConfigurationError as error:
                raise self.registry.conflict(str(error)) from None
        if self.registry.register(given, now):
            log.info("registered %s rank %d of model %s, events at %s", worker.instance_id, given.dp_rank,
                     given.model, given.events)  # fmt: skip
            self.homes.keep(home)
            try:
                self._refresh(worker, home)
            except ConfigurationError as error:  # a store whose name or endpoint a configured one has
                before = known.get(given.dp_rank)
                self.registry.unregister(
                    worker.instance_id, dp_rank=given.dp_rank, tenant=worker.context.tenant, model=worker.context.model
                )
                if before is not None:
                    self.registry.register(before, now)
                raise self.registry.conflict(str(error)) from None

    def unregister(
        self, instance_id: str, *, dp_rank: int | None = None, tenant: str = TENANT, model: str | None = None
    ) -> list[Removed]:
        """Raises Rejected (404) for what is not registered."""
        home = self.homes.find(model, tenant) if model is not None else None
        within = model if home is None else home.context.model
        found = self.registry.unregister(instance_id, dp_rank=dp_rank, tenant=tenant, model=within)
        self._gone(found, "unregistered")
        return found

    def tick(self, now: float) -> None:
        """Drops what has expired; tells homes that are new, after a reload, who is registered."""
        self._gone(self.registry.expire(now, self._expire_after), "not registered again in time")
        for worker in self.registry.workers():
            home = self.homes.of(worker.context)
            if home is not None:
                is_pool = any(one.is_pool for one in self.registry.ranks(worker).values())
                if is_pool or not home.knows(worker.instance_id):
                    self._keep(worker, home)

    async def run(self, interval: float = 1.0) -> None:
        """Ticks until cancelled."""
        while True:
            self.tick(time.monotonic())
            await asyncio.sleep(interval)

    def _expire_after(self, context: Context) -> float | None:
        home = self.homes.of(context)
        return home.expire_after if home is not None else None

    def _gone(self, removed: Iterable[Removed], why: str) -> None:
        for one in removed:
            log.info("%s: %s rank %d of %s", why, one.worker.instance_id, one.dp_rank, one.worker.context.model)
        for worker in {one.worker for one in removed}:
            home = self.homes.of(worker.context)
            if home is not None:
                self._keep(worker, home)

    def _keep(self, worker: Worker, home: Home) -> None:
        """As `_refresh`; what a reload has made impossible is logged once."""
        try:
            self._refresh(worker, home)
            self._failed.pop(worker, None)
        except ConfigurationError as error:
            if self._failed.get(worker) != str(error):
                log.error("registered %s cannot be followed: %s", worker.instance_id, error)
            self._failed[worker] = str(error)

    def _refresh(self, worker: Worker, home: Home) -> None:
        """The home has the worker, or has it not, as the registry says. Raises ConfigurationError."""
        ranks = self.registry.ranks(worker)
        self._publish(worker.context, home)
        if not ranks or next(iter(ranks.values())).is_pool:
            home.remove(worker.instance_id)
            return
        home.upsert(_instance(ranks, home))

    def _publish(self, context: Context, home: Home) -> None:
        wanted = tuple(
            publisher_of(one)
            for worker in self.registry.workers(context)
            for one in self.registry.ranks(worker).values()
            if one.is_pool
        )
        before, told = self._told.get(context, (None, ()))
        if told != wanted or (wanted and before is not home.directory):
            home.directory.set_publishers(wanted, source="registered")
            if wanted:
                self._told[context] = (home.directory, wanted)
            else:
                del self._told[context]


def _instance(ranks: Mapping[int, Registration], home: Home) -> Instance:
    return instance_of(ranks, pool=home.name, dialect=home.dialect, recovery=home.recovery)


def _places(given: Registration) -> Instance:
    """All the places of a registration, an engine's or a store's."""
    if given.is_pool:
        return Instance(given.worker.instance_id, given.address, events=(publisher_of(given).endpoint,))
    return instance_of({given.dp_rank: given}, pool="")


class PoolHome:
    """A pool of `kvcar serve` with the source that its registrations go to."""

    def __init__(self, pool: Pool, pools: Pools, source: Registered) -> None:
        self._pool = pool
        self._pools = pools
        self._source = source
        self.name = pool.name
        self.context = Context(pool.name)
        self.model = pool.models[0]
        self.directory = pool.directory
        self.dialect, self.recovery, self.expire_after = source.dialect, source.recovery, source.expire_after

    @property
    def by_name(self) -> Mapping[str, Instance]:
        return self._pool.by_name

    def knows(self, name: str) -> bool:
        return name in self._source.instances

    def taken(self, name: str) -> bool:
        return any(name in pool.by_name for pool in self._pools)

    def admit(self, instance: Instance) -> None:
        self._source.admit(instance)

    def upsert(self, instance: Instance) -> None:
        self._source.upsert(instance)

    def remove(self, name: str) -> None:
        self._source.remove(name)


class PoolHomes:
    """The pools of `kvcar serve` whose `discovery` takes registrations, as they are at each call.

    sources  those that run now
    """

    def __init__(self, pools: Pools, sources: Callable[[], Iterable[Registered]]) -> None:
        self._pools = pools
        self._sources = sources

    def closed(self) -> str | None:
        return None if any(True for _ in self.held()) else (
            "no pool takes registrations: add `discovery: [{type: http}]` to one"
        )  # fmt: skip

    def of(self, context: Context) -> PoolHome | None:
        return next((home for home in self.held() if home.context == context), None)

    def find(self, model: str, tenant: str) -> PoolHome | None:
        pool = self._pools.of(model) if tenant == TENANT else None
        return self.of(Context(pool.name)) if pool is not None else None

    def open(self, model: str, tenant: str, block_size: int | None) -> PoolHome:
        if tenant != TENANT:
            raise Rejected(f"tenant {tenant!r}: there is one tenant here, {TENANT}", 404, "unknown_context")
        home = self.find(model, tenant)
        if home is None:
            raise Rejected(
                f"no pool that serves model {model!r} takes registrations: add `discovery: [{{type: http}}]` to it, or"
                " the model to the `models` of one that does", 404, "unknown_context",
            )  # fmt: skip
        return home

    def keep(self, home: Home) -> None:
        """Pools are there anyway."""

    def holder(self, model: str, tenant: str) -> Pool | None:
        return self._pools.of(model) if tenant == TENANT else None

    def holders_of(self, instance_id: str, model: str | None, tenant: str) -> list[Holder]:
        if tenant != TENANT:
            return []
        pools = self._pools if model is None else filter(None, [self._pools.of(model)])
        return [pool for pool in pools if instance_id in pool.by_name]

    def held(self) -> Iterator[PoolHome]:
        sources = {source.pool: source for source in self._sources()}
        for pool in self._pools:
            if pool.name in sources:
                yield PoolHome(pool, self._pools, sources[pool.name])
