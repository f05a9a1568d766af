"""One pool's answer to "who holds this prefix": the index, the streams that feed it, and what is wrong with them.

    Fleet --update()--> plan() --> Stream per (instance, dp_rank) --follow / unfollow--> driver (transport thread)
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
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

from kvindex.dialects import DIALECTS, Dialect, DialectOptions
from kvindex.errors import ConfigurationError
from kvindex.fleet import Fleet, Instance, StreamEndpoint, endpoints_of, same_stream
from kvindex.hashing import DEFAULT_SEED
from kvindex.index import PrefixIndex, StreamView, TierBlocks, Walk
from kvindex.link import LinkStatus
from kvindex.sync import Recovery, StreamStatus, StreamSync, SyncLimits

NO_BLOCKS = TierBlocks(0, 0, 0)

StreamKey = tuple[str, int]
"""(instance name, dp_rank)"""


class Driver(Protocol):
    """What a directory needs of the transport. Every method may be called from any thread and returns at once."""

    def pace(self) -> None: ...
    def follow(self, stream: Stream) -> None: ...
    def unfollow(self, stream: Stream) -> None: ...
    def resync(self, stream: Stream) -> None: ...
    def rebuild(self, stream: Stream) -> None: ...


class Ranks(NamedTuple):
    """The views of one instance, dp_rank by dp_rank; None = no stream of that rank is open."""

    incarnation: str
    views: tuple[StreamView | None, ...]


class Match:
    """What each instance of the pool holds of one prompt, in blocks. Immutable; every answer is a look-up or two.

    An instance may be named or given as `Instance`: then its incarnation must be the one whose events were followed,
    else nothing is credited (a restarted process has none of the old one's blocks).
    """

    __slots__ = ("_found", "_table")

    def __init__(self, table: Mapping[str, Ranks], found: Mapping[StreamView, TierBlocks]) -> None:
        self._table = table
        self._found = found

    def __bool__(self) -> bool:
        """True when any stream holds at least the first block."""
        return bool(self._found)

    def rank(self, instance: Instance | str, dp_rank: int) -> TierBlocks:
        """Blocks of one rank; zeros when it has none, is unknown or not synchronized."""
        hits = self.hits(instance)
        return hits[dp_rank] if 0 <= dp_rank < len(hits) else NO_BLOCKS

    def hits(self, instance: Instance | str) -> tuple[TierBlocks, ...]:
        """Blocks rank by rank, `dp_size` entries; () for an instance whose streams are not followed."""
        ranks = self._ranks(instance)
        if ranks is None:
            return ()
        get = self._found.get
        return tuple(NO_BLOCKS if view is None else get(view, NO_BLOCKS) for view in ranks.views)

    def minimum(self, instance: Instance | str) -> TierBlocks:
        """Blocks of the rank that holds least (D13 `dp: min`): a missing or unsynchronized rank makes it zeros."""
        ranks = self._ranks(instance)
        return NO_BLOCKS if ranks is None else self._lowest(ranks.views)

    def _lowest(self, views: tuple[StreamView | None, ...]) -> TierBlocks:
        get: Callable[[StreamView | None, TierBlocks], TierBlocks] = self._found.get  # type: ignore[assignment]
        if len(views) == 1:
            return get(views[0], NO_BLOCKS)
        return min((get(view, NO_BLOCKS) for view in views), key=_order, default=NO_BLOCKS)

    @property
    def best(self) -> tuple[str, TierBlocks] | None:
        """The instance with the most blocks (by `minimum`) and those blocks, None when nobody has any. O(instances)."""
        if not self._found:
            return None
        best: tuple[str, TierBlocks] | None = None
        most = (0, 0, 0)
        for name, ranks in self._table.items():
            blocks = self._lowest(ranks.views)
            if blocks is not NO_BLOCKS and (order := _order(blocks)) > most:
                best, most = (name, blocks), order
        return best

    def _ranks(self, instance: Instance | str) -> Ranks | None:
        if instance.__class__ is str:
            return self._table.get(instance)
        ranks = self._table.get(instance.name)  # type: ignore[union-attr]
        if ranks is not None and ranks.incarnation != instance.incarnation:  # type: ignore[union-attr]
            return None
        return ranks


def _order(blocks: TierBlocks) -> tuple[int, int, int]:
    return (blocks[0] + blocks[1] + blocks[2], blocks[0], blocks[1])


class Plan(NamedTuple):
    """Which instances to follow, and why not the others (reason for the person on call)."""

    followed: Mapping[str, Instance]
    skipped: Mapping[str, tuple[Instance, str]]


def plan(instances: Iterable[Instance], *, max_streams: int) -> Plan:
    """Pure. Instances in name order; decode and suspect ones and those without event endpoints are left out silently.

    Two instances that claim one endpoint are both skipped (events are never mixed), and so is, whole, each instance
    whose streams would go over `max_streams`. The outcome depends on the set alone, so replicas agree.
    """
    wanted = sorted((one for one in instances if one.followed and one.events), key=lambda one: one.name)
    owners: dict[str, list[str]] = {}
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
            skipped[instance.name] = (instance, f"endpoint {clash} is also claimed by {', '.join(others)}")
        elif used + len(instance.events) > max_streams:
            reason = f"max_streams {max_streams} reached: {used} in use, {len(instance.events)} more needed"
            skipped[instance.name] = (instance, reason)
        else:
            used += len(instance.events)
            followed[instance.name] = instance
    return Plan(MappingProxyType(followed), MappingProxyType(skipped))


class Stream:
    """The KV events of one (instance, dp_rank): what the driver drives. Made by the directory."""

    __slots__ = ("_directory", "endpoint", "instance", "link", "name", "sync", "view")

    def __init__(self, directory: Directory, instance: Instance, endpoint: StreamEndpoint) -> None:
        self._directory = directory
        self.instance = instance
        self.endpoint = endpoint
        self.name = f"{instance.name}/{endpoint.dp_rank}"
        self.link = LinkStatus()
        self.sync: StreamSync | None = None
        self.view: StreamView | None = None

    @property
    def key(self) -> StreamKey:
        return (self.instance.name, self.endpoint.dp_rank)

    def open(self) -> StreamSync:
        """Fresh view and sync state in place of the old ones, if any. Driver's thread.

        Raises ConfigurationError (dialect, recovery) and CapacityExceeded (no free slot in the index).
        """
        self.close()
        self.view, self.sync = self._directory.open_view(self)
        self._directory.publish()
        return self.sync

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
        self._streams: Mapping[StreamKey, Stream] = MappingProxyType({})
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
        return fleet.listen(lambda _change: self.update(fleet.snapshot().values()))

    def update(self, instances: Iterable[Instance]) -> None:
        """These are the instances now. Streams of the same process go on, others are retired or started. O(streams)."""
        mine = [one for one in instances if self.pool is None or one.pool == self.pool]
        self._plan = wanted = plan(mine, max_streams=self.max_streams)
        old = self._streams
        streams: dict[StreamKey, Stream] = {}
        started: list[Stream] = []
        for name, instance in wanted.followed.items():
            for endpoint in instance.events:
                key = (name, endpoint.dp_rank)
                stream = old.get(key)
                if stream is not None and same_stream(stream.instance, instance, endpoint):
                    stream.instance = instance
                else:
                    stream = Stream(self, instance, endpoint)
                    started.append(stream)
                streams[key] = stream
        self._streams = MappingProxyType(streams)
        for key, stream in old.items():
            if streams.get(key) is not stream:
                self._driver.unfollow(stream)
        for stream in started:
            self._driver.follow(stream)

    def close(self) -> None:
        """Retire every stream. The directory can be updated again afterwards."""
        self.update(())

    def resync(self, instance: str, dp_rank: int | None = None) -> int:
        """Ask for a fresh snapshot or history now; returns how many streams were asked."""
        return self._each(instance, dp_rank, self._driver.resync)

    def rebuild(self, instance: str, dp_rank: int | None = None) -> int:
        """Drop what the streams brought, connection included, and start again; returns how many."""
        return self._each(instance, dp_rank, self._driver.rebuild)

    def _each(self, instance: str, dp_rank: int | None, act: Callable[[Stream], None]) -> int:
        chosen = [
            stream for (name, rank), stream in self._streams.items() if name == instance and dp_rank in (None, rank)
        ]
        for stream in chosen:
            act(stream)
        return len(chosen)

    # -- the driver's thread

    def open_view(self, stream: Stream) -> tuple[StreamView, StreamSync]:
        """For `Stream.open`."""
        endpoint = stream.endpoint
        dialect = make_dialect(endpoint.dialect, self._dialect_options)
        view = self._index.open(
            walk=self._walk or dialect.walk,
            max_blocks=self._max_blocks,
            max_unanchored=self._max_unanchored,
            name=stream.name,
        )
        sync = StreamSync(
            view=view,
            dialect=dialect,
            recovery=recovery_of(endpoint, dialect),
            dp_rank=endpoint.dp_rank,
            topic=endpoint.topic_bytes,
            limits=self._limits,
        )
        return view, sync

    def publish(self) -> None:
        """Show readers the views that are open now, in one step. O(streams)."""
        streams = self._streams
        table: dict[str, Ranks] = {}
        for (name, rank), stream in streams.items():
            ranks = table.get(name)
            if ranks is None:
                views: list[StreamView | None] = [None] * stream.instance.dp_size
            else:
                views = list(ranks.views)
            views[rank] = stream.view
            table[name] = Ranks(stream.instance.incarnation, tuple(views))
        self._table = MappingProxyType(table)

    # -- any thread

    def status(self, now: float | None = None) -> list[StreamReport]:
        """One report a stream, by instance name and rank; skipped instances and missing ranks included."""
        now = time.monotonic() if now is None else now
        reports = [_report(stream, now) for stream in self._streams.values()]
        current = self._plan
        for instance in current.followed.values():
            present = {endpoint.dp_rank for endpoint in instance.events}
            for rank in range(instance.dp_size):
                if rank not in present:
                    error = f"no events endpoint for rank {rank} of {instance.dp_size}: the instance's minimum is 0"
                    reports.append(_idle(instance, StreamEndpoint(rank, ""), "missing", error))
        for instance, reason in current.skipped.values():
            reports.extend(_idle(instance, endpoint, "skipped", reason) for endpoint in instance.events)
        reports.sort(key=lambda report: (report.instance, report.dp_rank))
        return reports


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
