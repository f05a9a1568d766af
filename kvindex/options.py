"""Bounds and pacing of the event transport, and the environment variables that AIBrix documents for the same things."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvindex.errors import ConfigurationError
from kvindex.sync import SyncLimits


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """Times in seconds.

    max_replays           replays running at once over all streams
    receive_hwm           messages queued for us per stream before the engine has to keep (and then drop) them: its own
                          queue holds 100,000, ours only adds to what one engine can make us hold
    replay_hwm            the same per replay attempt: high, because a ROUTER drops what its reader does not take
    max_frame_bytes       a larger frame ends the connection before it is taken in; far above the max_message_bytes of
                          SyncLimits, which drops a message and keeps the connection
    reconnect_initial     wait before reconnecting, doubled up to reconnect_max (AIBrix: 1 s to 30 s)
    heartbeat_interval    ZMTP ping, answered by the engine's I/O thread; 0 = off
    heartbeat_timeout     silence after a ping that ends the connection; also the limit for a handshake
    keepalive_idle        TCP keepalive begins after so long; 0 = system default
    work_budget, rest     after so much work the thread sleeps `rest`, so that others get the interpreter
    patience              longest time for which it lets requests go ahead before it works for work_budget again
    poll_timeout          longest wait for a socket
    """

    max_replays: int = 4
    receive_hwm: int = 1_000
    replay_hwm: int = 100_000
    max_frame_bytes: int = 64 << 20
    reconnect_initial: float = 1.0
    reconnect_max: float = 30.0
    heartbeat_interval: float = 10.0
    heartbeat_timeout: float = 30.0
    keepalive_idle: float = 30.0
    work_budget: float = 0.001
    rest: float = 0.0001
    patience: float = 0.002
    poll_timeout: float = 1.0

    def __post_init__(self) -> None:
        for name in ("max_replays", "receive_hwm", "replay_hwm", "max_frame_bytes"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} {getattr(self, name)} must be at least 1")
        for name in ("reconnect_initial", "heartbeat_timeout", "work_budget", "poll_timeout"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"{name} {getattr(self, name)} s must be above 0")
        for name in ("rest", "patience"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name} {getattr(self, name)} s must be 0 or more")
        if self.reconnect_max < self.reconnect_initial:
            raise ConfigurationError(
                f"reconnect_max {self.reconnect_max} s is below reconnect_initial {self.reconnect_initial} s"
            )


_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|us|µs|ns|s|m|h)?")
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def parse_duration(text: str, *, what: str = "duration") -> float:
    """Seconds of a Go duration (`100ms`, `1m30s`) or of a bare number of seconds. Raises ConfigurationError."""
    text = text.strip()
    parts = list(_PART.finditer(text))
    units = [part.group(2) for part in parts]
    if not parts or "".join(part.group(0) for part in parts) != text or (None in units and len(parts) > 1):
        raise ConfigurationError(f"{what} {text!r} is no duration: write 100ms, 5s or 1m30s")
    seconds = sum(float(part.group(1)) * _UNITS[part.group(2) or "s"] for part in parts)
    if seconds <= 0:
        raise ConfigurationError(f"{what} {text!r} must be above 0")
    return seconds


def from_environment(
    options: TransportOptions, limits: SyncLimits, environ: Mapping[str, str] = os.environ
) -> tuple[TransportOptions, SyncLimits]:
    """Both, with AIBrix's variables applied where set: AIBRIX_ZMQ_POLL_TIMEOUT, AIBRIX_ZMQ_REPLAY_TIMEOUT and
    AIBRIX_ZMQ_RECONNECT_INTERVAL. Raises ConfigurationError that names the variable."""

    def read(name: str) -> float | None:
        value = environ.get(name, "")
        return parse_duration(value, what=name) if value else None

    poll = read("AIBRIX_ZMQ_POLL_TIMEOUT")
    if poll is not None:
        options = replace(options, poll_timeout=poll)
    reconnect = read("AIBRIX_ZMQ_RECONNECT_INTERVAL")
    if reconnect is not None:
        options = replace(options, reconnect_initial=reconnect, reconnect_max=max(reconnect, options.reconnect_max))
    replay = read("AIBRIX_ZMQ_REPLAY_TIMEOUT")
    if replay is not None:
        limits = replace(limits, replay_timeout=replay)
    return options, limits
