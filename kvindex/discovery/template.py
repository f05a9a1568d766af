"""Instances of sources that find out hosts only: what they have in common is written down once. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvindex.discovery.port_offset import pattern_endpoints
from kvindex.endpoints import HostPort
from kvindex.fleet import Instance, InstanceState, StreamEndpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """All of an instance but name, host and incarnation.

    port          of the HTTP server
    event_port    of rank 0's KV event publisher, rank r uses port + r; None = no KV events
    replay_port   of rank 0's replay socket, likewise; None = the engines have none
    metrics_port  where /metrics is when it has a port of its own
    metrics_path  its path there
    """

    pool: str = ""
    model: str = ""
    role: str = "default"
    dp_size: int = 1
    port: int = 8000
    event_port: int | None = 5557
    replay_port: int | None = 5558
    metrics_port: int | None = None
    metrics_path: str = "/metrics"
    topic: str = ""
    dialect: str = "auto"
    recovery: str | None = None

    def instance(
        self, name: str, host: str, *, incarnation: str = "", state: InstanceState = InstanceState.ACTIVE
    ) -> Instance:
        """The instance on `host` (an IP address, IPv6 without brackets). Raises ConfigurationError."""
        streams: tuple[StreamEndpoint, ...] = ()
        if self.event_port is not None:
            streams = pattern_endpoints(
                host,
                self.dp_size,
                events=f"tcp://*:{self.event_port}",
                replay=None if self.replay_port is None else f"tcp://*:{self.replay_port}",
                topic=self.topic,
                dialect=self.dialect,
                recovery=self.recovery,
            )
        metrics = ""
        if self.metrics_port is not None and self.metrics_port != self.port:
            metrics = f"http://{HostPort(host, self.metrics_port)}{self.metrics_path}"
        instance = Instance(
            name=name,
            address=str(HostPort(host, self.port)),
            pool=self.pool,
            role=self.role,
            dp_size=self.dp_size,
            incarnation=incarnation,
            state=state,
            events=streams,
            model=self.model,
            metrics=metrics,
        )
        instance.check()
        return instance
