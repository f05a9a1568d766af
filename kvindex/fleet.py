"""Who is there: the registry of engine instances, written by discovery, read by directory and router.

    discovery --upsert / remove--> Fleet --FleetChange--> listeners (Directory.update, ...)
                                     `-- snapshot() --> immutable mapping for readers

Identity, as the xLLM service has it. A new announcement of a known name keeps its streams when incarnation, address,
dp_size and stream endpoints are all the same; otherwise the old process is gone for us and new streams start empty. An
instance without incarnation may gain and lose ranks one by one (`same_stream`). A removal that names another
incarnation than the tracked one is late news of an older process and is ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from kvindex.endpoints import check_address, check_endpoint
from kvindex.errors import ConfigurationError

log = logging.getLogger(__name__)

ROLES = ("default", "prefill", "decode", "mix")
RECOVERIES = ("none", "history", "snapshot")
PUSHED = "push:"
"""In place of an events endpoint: no socket, the events are handed to `Directory.push`."""
POOL_MEDIA = ("cpu", "disk")
MAX_DP_SIZE = 4096


class InstanceState(StrEnum):
    """What discovery thinks of an instance; the states of the xLLM service's registry."""

    ACTIVE = "active"
    LEASE_LOST = "lease_lost"
    """Its lease is gone but it answers: streams kept, routable."""
    SUSPECT = "suspect"
    """It does not answer: streams dropped, not routable."""
    UNREACHABLE = "unreachable"
    """Requests sent there failed: not routable for a while; streams kept. Never said by discovery."""
    PROBATION = "probation"
    """It was unreachable, and the next request may try it. Never said by discovery."""
    DRAINING = "draining"
    """Leaving: finishes what it has, gets nothing new; streams kept."""


@dataclass(frozen=True, slots=True)
class StreamEndpoint:
    """Where the KV events of one data-parallel rank come from.

    dp_rank   0 .. dp_size-1
    events    ZMQ endpoint of the engine's PUB socket, or PUSHED
    replay    ZMQ endpoint of its replay ROUTER, None = the engine has none (the vLLM default)
    topic     compared whole; "" = exactly the empty topic, None = any (who registered the engine did not say)
    dialect   a name of `kvindex.dialects.DIALECTS`
    recovery  "none", "history" or "snapshot"; None = the dialect's own with a replay endpoint, "none" without
    bind      True: the engine connects to us, so `events` is what we listen on
    medium    "" = the engine's own stream. "cpu", "disk": of a store beside it that publishes per rank and medium
              (YuanRong); what its events are about when they do not say
    """

    dp_rank: int
    events: str
    replay: str | None = None
    topic: str | None = ""
    dialect: str = "auto"
    recovery: str | None = None
    bind: bool = False
    medium: str = ""

    @property
    def pushed(self) -> bool:
        return self.events == PUSHED

    @property
    def topic_bytes(self) -> bytes | None:
        return None if self.topic is None else self.topic.encode()

    def check(self) -> None:
        """Raises ConfigurationError that names the value and the remedy."""
        if not _is_int(self.dp_rank) or not 0 <= self.dp_rank < MAX_DP_SIZE:
            raise ConfigurationError(f"dp_rank {self.dp_rank!r} is not in 0..{MAX_DP_SIZE - 1}")
        if self.medium:
            check_medium(self.medium, self.recovery)
        if self.pushed:
            if self.medium or self.replay is not None or self.bind:
                raise ConfigurationError(f"a rank whose events are pushed ({PUSHED}) has no medium, replay or bind")
            return
        check_endpoint(self.events, bind=self.bind, what="events endpoint")
        if self.replay is not None:
            check_endpoint(self.replay, what="replay endpoint")
            if self.replay == self.events:
                raise ConfigurationError(f"events and replay endpoint are both {self.events!r}: they are two sockets")
        if self.recovery is not None and self.recovery not in RECOVERIES:
            raise ConfigurationError(f"recovery {self.recovery!r} is none of {', '.join(RECOVERIES)}")
        if self.recovery in ("history", "snapshot") and self.replay is None:
            raise ConfigurationError(f"recovery {self.recovery!r} of {self.events} needs a replay endpoint")


@dataclass(frozen=True, slots=True)
class PoolPublisher:
    """Who tells what a pool of host memory or disk holds that many engines share: a Mooncake master, Memcache.

    Its hashes are those of its member engines, which explain them: they must have event streams of their own, and the
    same hash seed.

    name      unique among the publishers of a directory
    endpoint  where its events come from; `medium` is the tier of events that name none
    members   names of instances; () = all that are followed
    """

    name: str
    endpoint: StreamEndpoint
    members: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises ConfigurationError that names publisher, value and remedy."""
        if not isinstance(self.name, str) or not self.name:
            raise ConfigurationError(f"a pool publisher needs a name, got {self.name!r}")
        try:
            check_medium(self.endpoint.medium, self.endpoint.recovery)
            if self.endpoint.pushed:
                raise ConfigurationError("its events cannot be pushed: write the endpoint it publishes at")
            self.endpoint.check()
        except ConfigurationError as error:
            raise ConfigurationError(f"publisher {self.name!r}: {error}") from None


def check_medium(medium: str, recovery: str | None = None) -> None:
    if medium not in POOL_MEDIA:
        raise ConfigurationError(f"medium {medium!r} is none of {', '.join(POOL_MEDIA)}")
    if recovery == "snapshot":
        raise ConfigurationError("recovery 'snapshot': a pool has no snapshot, write none (or history)")


@dataclass(frozen=True, slots=True)
class Instance:
    """One engine process as discovery names it.

    name         unique in a fleet
    address      "ip:port" of its HTTP server as Envoy knows it; "" = not known: it can be asked for, not routed to
    pool         which pool (served model) it belongs to
    role         default, prefill, decode or mix; `acting` is the current role of a mix instance ("" = prefill)
    dp_size      number of data-parallel ranks
    incarnation  changes when the process restarts; "" = unknown (a reconnect then has to show it)
    events       at most one endpoint a rank and medium; none = no KV events, routable by load alone
    metrics      URL of its metrics page; "" = at `address`, where the pool's `load.path` says
    """

    name: str
    address: str
    pool: str = ""
    role: str = "default"
    dp_size: int = 1
    incarnation: str = ""
    state: InstanceState = InstanceState.ACTIVE
    events: tuple[StreamEndpoint, ...] = ()
    model: str = ""
    acting: str = ""
    metrics: str = ""

    @property
    def current_role(self) -> str:
        """The role it acts in now: a mix instance resolved to prefill or decode."""
        return (self.acting or "prefill") if self.role == "mix" else self.role

    @property
    def followed(self) -> bool:
        """Whether its KV streams are of use: not a decode instance (its blocks are no reusable prefixes), not gone."""
        return self.current_role != "decode" and self.state is not InstanceState.SUSPECT

    def check(self) -> None:
        """Raises ConfigurationError that names instance, value and remedy."""
        if not isinstance(self.name, str) or not self.name:
            raise ConfigurationError(f"an instance needs a name, got {self.name!r}")
        try:
            if self.address:
                check_address(self.address)
            if self.role not in ROLES:
                raise ConfigurationError(f"role {self.role!r} is none of {', '.join(ROLES)}")
            if self.acting not in ("", "prefill", "decode"):
                raise ConfigurationError(f"acting role {self.acting!r} is neither prefill nor decode")
            if not _is_int(self.dp_size) or not 1 <= self.dp_size <= MAX_DP_SIZE:
                raise ConfigurationError(f"dp_size {self.dp_size!r} is not in 1..{MAX_DP_SIZE}")
            ranks: set[tuple[int, str]] = set()
            used: set[str] = set()
            for stream in self.events:
                stream.check()
                if stream.dp_rank >= self.dp_size:
                    raise ConfigurationError(f"a stream of rank {stream.dp_rank} with dp_size {self.dp_size}")
                if (stream.dp_rank, stream.medium) in ranks:
                    medium = f", medium {stream.medium}" if stream.medium else ""
                    raise ConfigurationError(f"two streams of rank {stream.dp_rank}{medium}")
                ranks.add((stream.dp_rank, stream.medium))
                for endpoint in endpoints_of(stream):
                    if endpoint in used:
                        raise ConfigurationError(f"endpoint {endpoint!r} is used twice: each rank has its own port")
                    used.add(endpoint)
        except ConfigurationError as error:
            raise ConfigurationError(f"instance {self.name!r}: {error}") from None


def endpoints_of(stream: StreamEndpoint) -> tuple[str, ...]:
    """The addresses that are this stream's alone."""
    if stream.pushed:
        return ()
    return (stream.events,) if stream.replay is None else (stream.events, stream.replay)


def same_process(old: Instance, new: Instance) -> bool:
    """Whether `new` is a registration refresh of `old`: its streams go on untouched."""
    return (
        old.incarnation == new.incarnation
        and old.address == new.address
        and old.dp_size == new.dp_size
        and old.events == new.events
    )


def same_stream(old: Instance, new: Instance, endpoint: StreamEndpoint) -> bool:
    """Whether the stream of one rank of `old` goes on as that of `endpoint` of `new`.

    What other ranks announce does not concern it. A process that nobody names (incarnation "") may also tell of more
    ranks than before: that it was restarted shows in the reconnect.
    """
    return (
        old.incarnation == new.incarnation
        and old.address == new.address
        and (old.dp_size == new.dp_size or not new.incarnation)
        and endpoint in old.events
    )


def check_instances(instances: tuple[Instance, ...] | list[Instance]) -> None:
    """A hand-written list: every instance valid, no name, address or endpoint twice. Raises ConfigurationError."""
    names: set[str] = set()
    owners: dict[str, str] = {}
    for instance in instances:
        instance.check()
        if instance.name in names:
            raise ConfigurationError(f"instance {instance.name!r} is listed twice: names are unique")
        names.add(instance.name)
        endpoints = [endpoint for stream in instance.events for endpoint in endpoints_of(stream)]
        for value in (instance.address, *endpoints):
            other = owners.setdefault(value, instance.name)
            if other != instance.name:
                shared = one_port_each(value, instance)
                remedy = shared or ": no two engines have one, give each its own"
                raise ConfigurationError(f"instances {other!r} and {instance.name!r} both have {value!r}{remedy}")


def one_port_each(endpoint: str, instance: Instance) -> str:
    """What to say besides of an endpoint that two instances have: engines that connect to us need a port each."""
    if any(stream.bind and stream.events == endpoint for stream in instance.events):
        return ": engines that connect to one port cannot be told apart when one reconnects, bind a port for each"
    return ""


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class ChangeKind(StrEnum):
    JOINED = "joined"
    REFRESHED = "refreshed"
    """Same process; state, role or other facts may differ."""
    REPLACED = "replaced"
    """Another process under the same name: streams start anew."""
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class FleetChange:
    """One change of the registry; `before` is None for JOINED, `after` for LEFT."""

    kind: ChangeKind
    before: Instance | None
    after: Instance | None


Listener = Callable[[FleetChange], None]


class Fleet:
    """The registry. One thread writes (the event loop of the discovery sources); any thread reads: `snapshot()` is one
    attribute load and never changes once given out.

    Listeners run in the writer's thread after the snapshot shows the change; they must be quick. One that raises is
    logged and does not stop the others.
    """

    def __init__(self) -> None:
        self._instances: Mapping[str, Instance] = MappingProxyType({})
        self._listeners: tuple[Listener, ...] = ()

    def snapshot(self) -> Mapping[str, Instance]:
        """Immutable name -> Instance, in order of joining."""
        return self._instances

    def get(self, name: str) -> Instance | None:
        return self._instances.get(name)

    def upsert(self, instance: Instance) -> FleetChange | None:
        """Add or replace by name. None = nothing new. Raises ConfigurationError (see `Instance.check`). O(fleet)."""
        instance.check()
        before = self._instances.get(instance.name)
        if before == instance:
            return None
        self._instances = MappingProxyType({**self._instances, instance.name: instance})
        if before is None:
            kind = ChangeKind.JOINED
        else:
            kind = ChangeKind.REFRESHED if same_process(before, instance) else ChangeKind.REPLACED
        return self._announce(FleetChange(kind, before, instance))

    def remove(self, name: str, *, incarnation: str | None = None) -> FleetChange | None:
        """Take out by name. With `incarnation`, only if that very process is the tracked one. None = nothing done."""
        before = self._instances.get(name)
        if before is None or (incarnation is not None and incarnation != before.incarnation):
            return None
        self._instances = MappingProxyType({key: value for key, value in self._instances.items() if key != name})
        return self._announce(FleetChange(ChangeKind.LEFT, before, None))

    def listen(self, listener: Listener, *, present: bool = True) -> Callable[[], None]:
        """Call `listener` for each present instance (JOINED) and every later change. Returns the way to stop.

        present   False: later changes alone, for who has just taken the snapshot
        """
        self._listeners = (*self._listeners, listener)
        for instance in self._instances.values() if present else ():
            self._tell(listener, FleetChange(ChangeKind.JOINED, None, instance))

        def stop() -> None:
            self._listeners = tuple(one for one in self._listeners if one is not listener)

        return stop

    def _announce(self, change: FleetChange) -> FleetChange:
        for listener in self._listeners:
            self._tell(listener, change)
        return change

    def _tell(self, listener: Listener, change: FleetChange) -> None:
        try:
            listener(change)
        except Exception:
            log.exception("a fleet listener failed on %s %s", change.kind, (change.after or change.before))
