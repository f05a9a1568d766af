"""Publishers of shared pools (Mooncake master, Memcache) as a person writes them down, and the directory's form."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from extproc.config_types import Node
from kvindex.errors import ConfigurationError
from kvindex.fleet import PoolPublisher, StreamEndpoint


class PublisherConfig(Node):
    """One publisher of what a pool of host memory or disk holds for many engines."""

    name: str = Field(min_length=1, max_length=200)
    events: str
    replay: str | None = None
    topic: str = ""
    bind: bool = False
    dialect: Literal["auto", "vllm", "sglang", "mooncake"] = "mooncake"
    medium: Literal["cpu", "disk"] = "cpu"
    members: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _usable(self) -> PublisherConfig:
        try:
            self.publisher.check()
        except ConfigurationError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def publisher(self) -> PoolPublisher:
        """The directory's form. With a replay endpoint missed events are asked for, as of an engine."""
        endpoint = StreamEndpoint(
            0,
            self.events,
            self.replay,
            self.topic,
            self.dialect,
            "history" if self.replay else None,
            self.bind,
            self.medium,
        )
        return PoolPublisher(self.name, endpoint, self.members)
