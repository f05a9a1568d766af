"""An engine as a person writes it down, and the registry's form of it: for the configuration and files of instances."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from extproc.config_types import EngineAddress, HttpUrl, Node
from kvindex.discovery.static import rank_endpoint
from kvindex.endpoints import check_endpoint
from kvindex.errors import ConfigurationError
from kvindex.fleet import POOL_MEDIA, PUSHED, Instance, StreamEndpoint

PUSH = "push"
"""`events` of an instance whose events are posted to the admin port."""


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What all instances of one pool have in common.

    name      the pool's
    model     its first served name
    dialect   a name of `kvindex.dialects.DIALECTS`
    recovery  "none", "history", "snapshot"; None = the dialect's own
    """

    name: str
    model: str
    dialect: str = "auto"
    recovery: str | None = None


class MediumEndpoints(Node):
    """Where a store that publishes per rank and medium (YuanRong) does so; rank r uses port + r.

    npu   the engine's own events, the same as `events`
    """

    npu: str | None = None
    cpu: str | None = None
    disk: str | None = None


class InstanceConfig(Node):
    """One engine. `events` and `replay` are the endpoints of rank 0; rank r uses port + r."""

    name: str = Field(min_length=1, max_length=200)
    address: EngineAddress
    role: Literal["default", "prefill", "decode", "mix"] = "default"
    dp_size: int = Field(1, ge=1, le=1024)
    events: str | None = None
    replay: str | None = None
    topic: str = ""
    bind: bool = False
    medium_endpoints: MediumEndpoints = MediumEndpoints()
    metrics: HttpUrl | None = None

    @model_validator(mode="after")
    def _reachable(self) -> InstanceConfig:
        try:
            if self.events == PUSH and (self.replay or self.bind):
                raise ConfigurationError("events are pushed: replay and bind have no meaning, leave them out")
            if self.events not in (None, PUSH):
                check_endpoint(self.events, bind=self.bind, what="events")
            for medium, endpoint in self.medium_endpoints:
                if endpoint is not None:
                    check_endpoint(endpoint, bind=self.bind, what=f"medium_endpoints.{medium}")
            npu = self.medium_endpoints.npu
            if npu is not None and self.events not in (None, npu):
                raise ConfigurationError(
                    f"events {self.events} and medium_endpoints.npu {npu} differ: write one of them"
                )
            if self.replay is not None:
                check_endpoint(self.replay, what="replay")
        except ConfigurationError as error:
            raise ValueError(str(error)) from None
        return self


def instance_of(pool: PoolFacts, given: InstanceConfig, incarnation: str = "static") -> Instance:
    """The registry's form of a written instance. Raises ConfigurationError that names instance, value and remedy."""
    streams = tuple(stream for rank in range(given.dp_size) for stream in _streams(pool, given, rank))
    instance = Instance(
        name=given.name,
        address=given.address,
        pool=pool.name,
        role=given.role,
        dp_size=given.dp_size,
        incarnation=incarnation,
        events=streams,
        model=pool.model,
        metrics=given.metrics or "",
    )
    instance.check()
    return instance


def _streams(pool: PoolFacts, given: InstanceConfig, rank: int) -> Iterator[StreamEndpoint]:
    """The engine's own stream of a rank, and those of a store beside it."""
    own = given.events or given.medium_endpoints.npu
    if own == PUSH:
        yield StreamEndpoint(rank, PUSHED, dialect=pool.dialect)
    elif own:
        yield StreamEndpoint(
            dp_rank=rank,
            events=rank_endpoint(own, rank),
            replay=rank_endpoint(given.replay, rank) if given.replay else None,
            topic=given.topic,
            dialect=pool.dialect,
            recovery=pool.recovery,
            bind=given.bind,
        )
    subscribed = {own}
    for medium in POOL_MEDIA:
        endpoint = getattr(given.medium_endpoints, medium)
        if (
            endpoint is not None and endpoint not in subscribed
        ):  # one port may serve several media: its events say which
            subscribed.add(endpoint)
            yield StreamEndpoint(rank, rank_endpoint(endpoint, rank), topic=given.topic, bind=given.bind, medium=medium)
