"""One pool's answer to "who holds this prefix": the index, the streams that feed it, and what is wrong with them.

    Fleet --update()--> plan() --> Stream per (instance, dp_rank) --follow / unfollow--> driver (transport thread)
    set_publishers() --------------> Stream per pool publisher ----'        push() ------> |
                                     | open(), close(): view + StreamSync, in the driver's thread
                                     v
                               published table: instance -> views of its ranks      one attribute load
                                     v
    request --match(keys)--> PrefixIndex.find --> Match (per rank; minimum over ranks)

Rule: views are opened, written, closed and published in the driver's thread only; `update` runs in the fleet's writer
thread and only posts; `match` and `status` read immutable objects and take no lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from kvindex.dialects import DIALECTS, Dialect, DialectOptions
from kvindex.dialects.pushed import Push, PushDecoder
from kvindex.errors import ConfigurationError, KVIndexError
from kvindex.fleet import (
    Fleet,
    Instance,
    PoolPublisher,
    StreamEndpoint,
    check_medium,
    endpoints_of,
    one_port_each,
    same_stream,
)
from kvindex.hashing import DEFAULT_SEED
from kvindex.index import PrefixIndex, StreamView, Walk
from kvindex.link import LinkStatus
from kvindex.match import NO_BLOCKS, Match, Ranks
from kvindex.pools import PoolView, open_pool
from kvindex.pushes import PushFeed, PushResult
from kvindex.sync import Recovery, StreamStatus, StreamSync, SyncLimits

__all__ = ["NO_BLOCKS", "Directory", "Driver", "Match", "Plan", "Ranks", "Stream", "StreamReport", "plan"]

StreamKey = tuple[str, int]
"""(instance name, dp_rank)"""

PoolKey = tuple[str, int, str]
"""(publisher name, 0, "") or, of a store that publishes per rank and medium, (instance name, dp_rank, medium)"""


class Driver(Protocol):
    """What a directory needs of the transport. Every method may be called from any thread and returns at once."""

    def pace(self) -> None: ...
    def follow(self, stream: Stream) -> None: ...
    def unfollow(self, stream: Stream) -> None: ...
    def resync(self, stream: Stream) -> None: ...
    def rebuild(self, stream: Stream) -> None: ...
    def post(self, work: Callable[[], None]) -> None: ...


class Plan(NamedTuple):
    """Which instances to follow, and why not the others (reason for the person on call)."""

    followed: Mapping[str, Instance]
    skipped: Mapping[str, tuple[Instance, str]]


def plan(instances: Iterable[Instance], *, max_streams: int, taken: Mapping[str, str] = MappingProxyType({})) -> Plan:
    """Pure. Instances in name order; decode and suspect ones and those without event endpoints are left out silently.

    taken   endpoints that others than instances have, and who these are

    Two instances that claim one endpoint are both skipped (events are never mixed), and so is, whole, each instance
    whose streams would go over `max_streams`. The outcome depends on the set alone, so replicas agree.
    """
    wanted = sorted((one for one in instances if one.followed and one.events), key=lambda one: one.name)
    owners: dict[str, list[str]] = {endpoint: [owner] for endpoint, owner in taken.items()}
    for instance in wanted:
        for stream in instance.events:
            for endpoint in endpoints_of(stream):
                owners.setdefault(endpoint, []).append(instance.name)
    followed: dict[str, Instance] = {}
    skipped: dict[str, tuple[Instance, str]] = {}
    used = 0
    for instance in wanted:
        clash = next(
            (one for stream in instance.events for one in endpoints_of(stream) if len(owners[one]) > 1),
            None,
        )
        if clash is not None:
            others = sorted(set(owners[clash]) - {instance.name}) or [instance.name]
            hint = one_port_each(clash, instance)
            skipped[instance.name] = (instance, f"endpoint {clash} is also claimed by {', '.join(others)}{hint}")
        elif used + len(instance.events) > max_streams:
            reason = f"max_streams {max_streams} reached: {used} in use, {len(instance.events)} more needed"
            skipped[instance.name] = (instance, reason)
        else:
            used += len(instance.events)
            followed[instance.name] = instance
    return Plan(MappingProxyType(followed), MappingProxyType(skipped))


class Stream:
    """The KV events of one (instance, dp_rank), or of a pool: what the driver drives. Made by the directory.

    publisher   None for streams of an instance
    """

    __slots__ = ("_directory", "endpoint", "instance", "link", "name", "publisher", "sync", "view")

    def __init__(
        self, directory: Directory, instance: Instance, endpoint: StreamEndpoint, publisher: PoolPublisher | None = None
    ) -> None:
        self._directory = directory
        self.instance = instance
        self.endpoint = endpoint
        self.publisher = publisher
        self.name = f"{instance.name}/{endpoint.dp_rank}"
        if endpoint.medium:
            self.name = f"pool {publisher.name}" if publisher else f"{self.name}/{endpoint.medium}"
        self.link = LinkStatus()
        self.sync: StreamSync | PushFeed | None = None
        self.view: StreamView | None = None

    @property
    def key(self) -> StreamKey:
        return (self.instance.name, self.endpoint.dp_rank)

    def open(self) -> StreamSync:
        """Fresh view and sync state in place of the old ones, if any. Driver's thread.

        Raises ConfigurationError (dialect, recovery) and CapacityExceeded (no free slot in the index).
        """
        self.close()
        self.view, sync = self._directory.open_view(self)
        self.sync = sync
        self._directory.publish()
        return sync

    def open_pushed(self) -> None:
        """Fresh view for a rank whose events are pushed. Driver's thread. What is wrong is kept in `link.error`."""
        self.close()
        try:
            self.view, self.sync = self._directory.open_pushed(self)
            self.link = LinkStatus()
        except KVIndexError as error:
            self.link = LinkStatus(error=str(error))
        self._directory.publish()

    def close(self) -> None:
        """Drop what the stream brought. Driver's thread; idempotent; budgeted through the driver's pace."""
        view, sync = self.view, self.sync
        self.view = self.sync = None
        self._directory.publish()
        if sync is not None:
            sync.retire()
        if view is not None:
            view.close()


@dataclass(frozen=True, slots=True)
class StreamReport:
    """One line of the status page.

    state        the sync state; "waiting" = not opened yet; "fault" = being rebuilt after an internal error;
                 "skipped" = not followed, `error` says why; "missing" = a rank without an endpoint
    event_age    seconds since the last event, None before the first
    status       sync's own status (counters, blocks by tier), None while there is none
    """

    instance: str
    dp_rank: int
    incarnation: str
    endpoint: str
    replay: str | None
    dialect: str
    state: str
    synchronized: bool = False
    complete: bool = False
    sequence: int | None = None
    error: str | None = None
    event_age: float | None = None
    status: StreamStatus | None = None
    link: LinkStatus = field(default_factory=LinkStatus)


class Directory:
    """One per pool. `attach` it to a fleet (or call `update`), then `match`.

    block_size    tokens a block; None = adopt the first stored event's
    walk          None = each dialect's own (D12)
    pool          take only the fleet's instances of that pool; None = all
    """

    def __init__(
        self,
        driver: Driver,
        *,
        pool: str | None = None,
        block_size: int | None = None,
        seed: int = DEFAULT_SEED,
        max_streams: int = 128,
        max_blocks: int = 262_144,
        max_unanchored: int = 65_536,
        limits: SyncLimits | None = None,
        walk: Walk | None = None,
        dialect_options: DialectOptions | None = None,
    ) -> None:
        if max_streams < 1:
            raise ConfigurationError(f"max_streams {max_streams} must be at least 1")
        self.pool = pool
        self.max_streams = max_streams
        self._driver = driver
        self._index = PrefixIndex(block_size=block_size, seed=seed, max_streams=max_streams, pace=driver.pace)
        self._max_blocks = max_blocks
        self._max_unanchored = max_unanchored
        self._limits = limits or SyncLimits()
        self._walk = walk
        self._dialect_options = replace(dialect_options or DialectOptions(), pace=driver.pace)
        self._instances: tuple[Instance, ...] = ()
        self._given: dict[str, tuple[PoolPublisher, ...]] = {}
        self._streams: Mapping[StreamKey, Stream] = MappingProxyType({})
        self._pools: Mapping[PoolKey, Stream] = MappingProxyType({})
        self._plan = Plan(MappingProxyType({}), MappingProxyType({}))
        self._table: Mapping[str, Ranks] = MappingProxyType({})

    @property
    def index(self) -> PrefixIndex:
        return self._index

    @property
    def block_size(self) -> int | None:
        """Tokens a block; None until an event told it (`block_size=None`)."""
        return self._index.block_size

    @property
    def seed(self) -> int:
        return self._index.seed

    # -- the request path: no lock, no allocation beyond the answer

    def match(self, keys: Sequence[bytes]) -> Match:
        """Who holds how much of this chain of content keys. Any thread; `PrefixIndex.find` plus about a microsecond."""
        table = self._table
        return Match(table, self._index.find(keys))

    def key_limit(self, n_tokens: int) -> int:
        """At most so many keys of a prompt of `n_tokens` can count: the engine computes the last token again (D12).

        0 while the block size is unknown.
        """
        size = self._index.block_size
        if not size or n_tokens <= 0:
            return 0
        return (n_tokens - 1) // size if self.caps_last_token else n_tokens // size

    @property
    def caps_last_token(self) -> bool:
        """Whether any followed stream's engine computes the last token again; True while nothing is followed."""
        capped = True
        for stream in self._streams.values():
            sync = stream.sync
            if sync is not None:
                if sync.dialect.caps_last_token:
                    return True
                capped = False
        return capped

    # -- the fleet's writer thread

    def attach(self, fleet: Fleet) -> Callable[[], None]:
        """Follow a fleet from now on; returns the way to stop (streams stay until `close`)."""
        self.update(fleet.snapshot().values())
        return fleet.listen(lambda _change: self.update(fleet.snapshot().values()), present=False)

    def update(self, instances: Iterable[Instance]) -> None:
        """These are the instances now. Streams of the same process go on, others are retired or started. O(streams)."""
        self._instances = tuple(one for one in instances if self.pool is None or one.pool == self.pool)
        self._follow()

    def check_publishers(self, publishers: Iterable[PoolPublisher], *, source: str = "") -> None:
        """Raises ConfigurationError where `set_publishers` would."""
        check_publishers(one for some in {**self._given, source: tuple(publishers)}.values() for one in some)

    def set_publishers(self, publishers: Iterable[PoolPublisher], *, source: str = "") -> None:
        """These are the pool publishers that `source` knows now (any name for who says so; each has its own list).

        One of the same name and endpoint goes on with what it brought, also when its members change; others are
        retired or started. O(streams). Raises ConfigurationError, and changes nothing: an invalid one, a name or an
        endpoint twice.
        """
        publishers = tuple(publishers)
        self.check_publishers(publishers, source=source)
        self._given = {**self._given, source: publishers}
        self._follow()

    def _follow(self) -> None:
        publishers = [one for some in self._given.values() for one in some]
        taken = {at: f"publisher {one.name}" for one in publishers for at in endpoints_of(one.endpoint)}
        self._plan = wanted = plan(self._instances, max_streams=self.max_streams, taken=taken)
        streams: dict[StreamKey, Stream] = {}
        pools: dict[PoolKey, Stream] = {}
        old: list[Stream] = [*self._streams.values(), *self._pools.values()]
        started: list[Stream] = []
        for name, instance in wanted.followed.items():
            for endpoint in instance.events:
                key = (name, endpoint.dp_rank)
                stream = self._pools.get((*key, endpoint.medium)) if endpoint.medium else self._streams.get(key)
                if stream is not None and same_stream(stream.instance, instance, endpoint):
                    stream.instance = instance
                else:
                    stream = Stream(self, instance, endpoint)
                    started.append(stream)
                if endpoint.medium:
                    pools[(*key, endpoint.medium)] = stream
                else:
                    streams[key] = stream
        for publisher in publishers:
            pool_key = (publisher.name, 0, "")
            stream = self._pools.get(pool_key)
            if stream is None or stream.endpoint != publisher.endpoint:
                stream = Stream(self, Instance(publisher.name, ""), publisher.endpoint, publisher)
                started.append(stream)
            elif stream.publisher != publisher:
                stream.publisher = publisher
                self._driver.post(self.publish)
            pools[pool_key] = stream
        self._streams, self._pools = MappingProxyType(streams), MappingProxyType(pools)
        kept = {*streams.values(), *pools.values()}
        for stream in old:
            if stream in kept:
                continue
            if stream.endpoint.pushed:
                self._driver.post(stream.close)
            else:
                self._driver.unfollow(stream)
        for stream in started:
            if stream.endpoint.pushed:
                self._driver.post(stream.open_pushed)
            else:
                self._driver.follow(stream)

    def close(self) -> None:
        """Retire every stream. The directory can be updated again afterwards."""
        self._given = {}
        self.update(())

    def resync(self, instance: str, dp_rank: int | None = None) -> int:
        """Ask for a fresh snapshot or history now; returns how many streams were asked."""
        return self._each(instance, dp_rank, self._driver.resync)

    def rebuild(self, instance: str, dp_rank: int | None = None) -> int:
        """Drop what the streams brought, connection included, and start again; returns how many."""
        return self._each(instance, dp_rank, self._driver.rebuild)

    def push(self, body: Any) -> Future[PushResult]:
        """Events handed over by their sender: the parsed body of `POST /events`. Any thread; returns at once.

        They go to the ranks of `instance_id` whose endpoint is `fleet.PUSHED`, in the order of the calls. `shutdown`
        drops what its ranks hold, after the events. The result says how many events were taken over (or known already)
        and what is wrong with the others; a body of the wrong shape raises DecodeError there. It comes from the
        driver's thread: wait for it with a time-out. An event costs what it costs a stream, and its check.
        """
        done: Future[PushResult] = Future()
        self._driver.post(partial(self._push, body, done))
        return done

    def stream(self, instance: str, dp_rank: int) -> Stream | None:
        """The stream of an engine's rank that is followed over the network. What it holds is the driver's thread's."""
        stream = self._streams.get((instance, dp_rank))
        return None if stream is None or stream.endpoint.pushed else stream

    def post(self, work: Callable[[], None]) -> None:
        """Does it in the driver's thread; returns at once."""
        self._driver.post(work)

    def _each(self, instance: str, dp_rank: int | None, act: Callable[[Stream], None]) -> int:
        """Streams of an instance, or of the publisher of that name."""
        chosen = [
            stream
            for (name, rank, *_), stream in (*self._streams.items(), *self._pools.items())
            if name == instance and dp_rank in (None, rank)
        ]
        for stream in chosen:
            if stream.endpoint.pushed:
                self._driver.post(stream.open_pushed)
            else:
                act(stream)
        return len(chosen)

    # -- the driver's thread

    def open_view(self, stream: Stream) -> tuple[StreamView, StreamSync]:
        """For `Stream.open`."""
        endpoint = stream.endpoint
        options = self._dialect_options
        if endpoint.medium:
            options = replace(options, default_medium=endpoint.medium)
        dialect = make_dialect(endpoint.dialect, options)
        recovery = recovery_of(endpoint, dialect)
        view = self._open_pool(stream, recovery) if endpoint.medium else self._open(stream, dialect)
        sync = StreamSync(
            view=view,
            dialect=dialect,
            recovery=recovery,
            dp_rank=endpoint.dp_rank,
            topic=endpoint.topic_bytes,
            limits=self._limits,
        )
        return view, sync

    def open_pushed(self, stream: Stream) -> tuple[StreamView, PushFeed]:
        """For `Stream.open_pushed`."""
        dialect = make_dialect(stream.endpoint.dialect, self._dialect_options)
        view = self._open(stream, dialect)
        return view, PushFeed(view, dialect, self._dialect_options.max_objects)

    def _open(self, stream: Stream, dialect: Dialect) -> StreamView:
        return self._index.open(
            walk=self._walk or dialect.walk,
            max_blocks=self._max_blocks,
            max_unanchored=self._max_unanchored,
            name=stream.name,
        )

    def _open_pool(self, stream: Stream, recovery: Recovery) -> StreamView:
        check_medium(stream.endpoint.medium, str(recovery))
        return open_pool(
            self._index, max_blocks=self._max_blocks, max_unanchored=self._max_unanchored, name=stream.name
        )

    def publish(self) -> None:
        """Show readers the views that are open now, in one step, and who is whose member. O(streams * pools)."""
        streams = self._streams
        table: dict[str, Ranks] = {}
        for (name, rank), stream in streams.items():
            ranks = table.get(name)
            views: list[StreamView | None] = [] if ranks is None else list(ranks.views)
            # `update` may be at work in its thread: the ranks of one instance may be of two announcements
            views += [None] * (max(stream.instance.dp_size, rank + 1) - len(views))
            views[rank] = stream.view
            table[name] = Ranks(stream.instance.incarnation, tuple(views))
        serving: dict[StreamView, list[PoolView]] = {}
        for (name, rank, _), pool in self._pools.items():
            view = pool.view
            if not isinstance(view, PoolView):
                continue
            wanted = None if pool.publisher is None else pool.publisher.members
            members = [
                one.view
                for key, one in streams.items()
                if one.view is not None and (key == (name, rank) if wanted is None else not wanted or key[0] in wanted)
            ]
            view.serve(members)
            for member in members:
                serving.setdefault(member, []).append(view)
        for stream in streams.values():
            if stream.view is not None:
                stream.view.explain_to(tuple(serving.get(stream.view, ())))
        self._table = MappingProxyType(table)

    def _push(self, body: Any, done: Future[PushResult]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(self._pushed(PushDecoder(self._dialect_options).decode(body)))
        except Exception as error:
            done.set_exception(error)

    def _pushed(self, push: Push) -> PushResult:
        name = push.instance_id
        ranks = {
            rank: stream.sync
            for (owner, rank), stream in self._streams.items()
            if owner == name and isinstance(stream.sync, PushFeed)
        }
        if not ranks:
            return PushResult(0, (f"instance {name!r} takes no pushed events: register it without event endpoints",))
        errors: list[str] = []
        now = time.monotonic()
        for place, one in enumerate(push.events):
            feed = ranks.get(one.dp_rank)
            wrong = f"rank {one.dp_rank} is not registered" if feed is None else feed.apply(one, now)
            if wrong is not None:
                number = f" (event_id {one.event_id})" if one.event_id is not None else ""
                errors.append(f"event {place}{number}: {wrong}")
            self._driver.pace()
        if push.shutdown:
            for feed in ranks.values():
                feed.clear()
        return PushResult(len(push.events) - len(errors), tuple(errors))

    # -- any thread

    def status(self, now: float | None = None) -> list[StreamReport]:
        """One report a stream, by instance name and rank; skipped instances and missing ranks included."""
        now = time.monotonic() if now is None else now
        reports = [_report(stream, now) for stream in self._streams.values()]
        current = self._plan
        for instance in current.followed.values():
            present = {endpoint.dp_rank for endpoint in instance.events if not endpoint.medium}
            for rank in range(instance.dp_size):
                if rank not in present:
                    error = f"no events endpoint for rank {rank} of {instance.dp_size}: the instance's minimum is 0"
                    reports.append(_idle(instance, StreamEndpoint(rank, ""), "missing", error))
        for instance, reason in current.skipped.values():
            own = [endpoint for endpoint in instance.events if not endpoint.medium]
            reports.extend(_idle(instance, endpoint, "skipped", reason) for endpoint in own)
        reports.sort(key=lambda report: (report.instance, report.dp_rank))
        return reports

    def pool_status(self, now: float | None = None) -> list[StreamReport]:
        """The same for pools: `instance` is the publisher's name, or instance:medium; `blocks` are those that can be
        credited, `remembered` the hashes that no member explained."""
        now = time.monotonic() if now is None else now
        reports = []
        for stream in self._pools.values():
            report = _report(stream, now)
            if stream.publisher is None:
                report = replace(report, instance=f"{report.instance}:{stream.endpoint.medium}")
            reports.append(report)
        return sorted(reports, key=lambda report: (report.instance, report.dp_rank))


def check_publishers(publishers: Iterable[PoolPublisher]) -> None:
    """Raises ConfigurationError: an invalid one, a name or an endpoint twice."""
    names: set[str] = set()
    owners: dict[str, str] = {}
    for publisher in publishers:
        publisher.check()
        if publisher.name in names:
            raise ConfigurationError(f"publisher {publisher.name!r} is listed twice: names are unique")
        names.add(publisher.name)
        for endpoint in endpoints_of(publisher.endpoint):
            other = owners.setdefault(endpoint, publisher.name)
            if other != publisher.name:
                raise ConfigurationError(f"publishers {other!r} and {publisher.name!r} both have {endpoint!r}")


def make_dialect(name: str, options: DialectOptions | None = None) -> Dialect:
    """A fresh dialect object for one stream. Raises ConfigurationError for an unknown name."""
    factory = DIALECTS.get(name)
    if factory is None:
        raise ConfigurationError(f"dialect {name!r} is unknown: write one of {', '.join(sorted(DIALECTS))}")
    return factory(options or DialectOptions())


def recovery_of(endpoint: StreamEndpoint, dialect: Dialect) -> Recovery:
    """What is configured, else the dialect's own with a replay endpoint and none without."""
    if endpoint.recovery is not None:
        return Recovery(endpoint.recovery)
    return Recovery(dialect.default_recovery) if endpoint.replay is not None else Recovery.NONE


def _report(stream: Stream, now: float) -> StreamReport:
    sync, link = stream.sync, stream.link
    endpoint = stream.endpoint
    base = (stream.instance.name, endpoint.dp_rank, stream.instance.incarnation, endpoint.events, endpoint.replay)
    if sync is None:
        state = "fault" if link.error else "waiting"
        return StreamReport(*base, endpoint.dialect, state, error=link.error, link=link)
    status = sync.status
    return StreamReport(
        *base,
        endpoint.dialect,
        str(status.state),
        synchronized=status.synchronized,
        complete=status.complete,
        sequence=status.sequence,
        error=link.error or status.error,  # a broken connection is the cause of what sync sees
        event_age=None if status.last_event_at is None else max(0.0, now - status.last_event_at),
        status=status,
        link=link,
    )


def _idle(instance: Instance, endpoint: StreamEndpoint, state: str, error: str) -> StreamReport:
    return StreamReport(
        instance.name,
        endpoint.dp_rank,
        instance.incarnation,
        endpoint.events,
        endpoint.replay,
        endpoint.dialect,
        state,
        error=error,
    )
