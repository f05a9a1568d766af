"""An engine as a person writes it down, and the registry's form of it: for the configuration and files of instances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from extproc.config_types import EngineAddress, HttpUrl, Node
from kvindex.discovery.static import rank_endpoint
from kvindex.endpoints import check_endpoint
from kvindex.errors import ConfigurationError
from kvindex.fleet import Instance, StreamEndpoint


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
    metrics: HttpUrl | None = None

    @model_validator(mode="after")
    def _reachable(self) -> InstanceConfig:
        try:
            if self.events is not None:
                check_endpoint(self.events, bind=self.bind, what="events")
            if self.replay is not None:
                check_endpoint(self.replay, what="replay")
        except ConfigurationError as error:
            raise ValueError(str(error)) from None
        return self


def instance_of(pool: PoolFacts, given: InstanceConfig, incarnation: str = "static") -> Instance:
    """The registry's form of a written instance. Raises ConfigurationError that names instance, value and remedy."""
    streams = tuple(
        StreamEndpoint(
            dp_rank=rank,
            events=rank_endpoint(given.events, rank),
            replay=rank_endpoint(given.replay, rank) if given.replay else None,
            topic=given.topic,
            dialect=pool.dialect,
            recovery=pool.recovery,
            bind=given.bind,
        )
        for rank in range(given.dp_size)
        if given.events
    )
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
