"""kvindex as a client library: follow one engine's KV events with a handler of your own, no index, no fleet.

    def handle(event):                       # in the transport's thread, in order; be quick
        match event:
            case BlockStored(): ...
            case BlockRemoved() | AllBlocksCleared(): ...
            case Reset(): ...                # forget everything of this engine; what follows builds it anew

    with subscribe("tcp://127.0.0.1:5557", handle, replay="tcp://127.0.0.1:5558") as engine:
        engine.wait_synchronized(timeout=10)

The same sync, dialects and transport as in a directory: replay, gaps, restarts and reconnects are dealt with; what the
handler has been told since the last Reset is a gap-free run.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from kvindex.dialects import DialectOptions
from kvindex.directory import make_dialect, recovery_of
from kvindex.events import Event, Skipped
from kvindex.fleet import StreamEndpoint
from kvindex.index import Outcome, TierBlocks
from kvindex.link import LinkStatus
from kvindex.sync import StreamStatus, StreamSync, SyncLimits
from kvindex.transport import EventTransport, TransportOptions

log = logging.getLogger(__name__)


class Reset(NamedTuple):
    """Everything told about this engine before is void (gap, restart, lost connection, snapshot)."""


Handler = Callable[[Event | Reset], None]


class _HandlerView:
    """Stands where a directory has its StreamView: hands on what would be indexed."""

    walk = None
    blocks = TierBlocks(0, 0, 0)
    known = unanchored = remembered = 0

    def __init__(self, subscription: Subscription) -> None:
        self._subscription = subscription
        self._visible = False
        self.closed = False

    @property
    def visible(self) -> bool:
        return self._visible

    @visible.setter
    def visible(self, value: bool) -> None:
        self._visible = value
        self._subscription._shown(value)

    def apply(self, event: Event) -> Outcome:
        if isinstance(event, Skipped):
            return Outcome.SKIPPED
        self._subscription._tell(event)
        return Outcome.OK

    def knows(self, _hash: object) -> bool:
        return True

    def clear(self) -> None:
        self._subscription._void()

    def shadow(self) -> _Recorder:
        return _Recorder()

    def swap(self, shadow: _Recorder) -> None:
        self.clear()
        for event in shadow.events:
            self.apply(event)

    def close(self) -> None:
        self.visible = False
        self.closed = True


class _Recorder:
    """A snapshot on its way: kept until it is whole."""

    blocks = TierBlocks(0, 0, 0)
    known = unanchored = remembered = 0
    visible = False

    def __init__(self) -> None:
        self.events: list[Event] = []

    def apply(self, event: Event) -> Outcome:
        if isinstance(event, Skipped):
            return Outcome.SKIPPED
        self.events.append(event)
        return Outcome.OK

    def knows(self, _hash: object) -> bool:
        return True

    def clear(self) -> None:
        self.events.clear()

    def close(self) -> None:
        self.events.clear()


class _Followed:
    """What the transport drives for a subscription; open and close run in its thread."""

    def __init__(self, subscription: Subscription, endpoint: StreamEndpoint) -> None:
        self.endpoint = endpoint
        self.name = endpoint.events
        self.link = LinkStatus()
        self.sync: StreamSync | None = None
        self._subscription = subscription
        self._view: _HandlerView | None = None

    def open(self) -> StreamSync:
        self.close()
        self._subscription._void()
        dialect = make_dialect(self.endpoint.dialect, self._subscription.dialect_options)
        self._view = _HandlerView(self._subscription)
        self.sync = StreamSync(
            view=self._view,
            dialect=dialect,
            recovery=recovery_of(self.endpoint, dialect),
            dp_rank=self.endpoint.dp_rank,
            topic=self.endpoint.topic_bytes,
            limits=self._subscription.limits,
        )
        return self.sync

    def close(self) -> None:
        sync, view = self.sync, self._view
        self.sync = self._view = None
        if sync is not None:
            sync.retire()
        if view is not None:
            view.close()


class Subscription:
    """One engine rank followed by a handler. Made by `subscribe`; a context manager.

    handler_errors   calls of the handler that raised; the first is logged
    """

    def __init__(
        self,
        endpoint: StreamEndpoint,
        handler: Handler,
        *,
        transport: EventTransport | None = None,
        limits: SyncLimits | None = None,
        options: TransportOptions | None = None,
        dialect_options: DialectOptions | None = None,
    ) -> None:
        endpoint.check()
        make_dialect(endpoint.dialect, dialect_options)
        self.limits = limits or SyncLimits()
        self.handler_errors = 0
        self._handler = handler
        self._told = False  # something since the last Reset
        self._synchronized = threading.Event()
        self._stream = _Followed(self, endpoint)
        self._own = transport is None
        self._transport = EventTransport(options).start() if transport is None else transport
        self.dialect_options = replace(dialect_options or DialectOptions(), pace=self._transport.pace)
        self._transport.follow(self._stream)

    @property
    def status(self) -> StreamStatus | None:
        """State, sequence, error and counters; None before the thread has opened the stream, and after `close`."""
        sync = self._stream.sync
        return None if sync is None else sync.status

    @property
    def link(self) -> LinkStatus:
        """The connection: up or down, tries, error."""
        return self._stream.link

    def wait_synchronized(self, timeout: float | None = None) -> bool:
        """Until what the handler was told is a gap-free run, or the time is over."""
        return self._synchronized.wait(timeout)

    def resync(self) -> None:
        """Ask the engine for a fresh snapshot or history now."""
        self._transport.resync(self._stream)

    def close(self) -> None:
        """No call of the handler starts after this returns (unless the handler itself closes). Idempotent."""
        self._transport.unfollow(self._stream)
        if self._own:
            self._transport.stop()
        else:
            self._transport.flush()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the transport's thread

    def _shown(self, visible: bool) -> None:
        if visible:
            self._synchronized.set()
        else:
            self._synchronized.clear()

    def _void(self) -> None:
        if self._told:
            self._tell(Reset())
            self._told = False

    def _tell(self, event: Event | Reset) -> None:
        self._told = True
        try:
            self._handler(event)
        except Exception:
            self.handler_errors += 1
            if self.handler_errors == 1:
                log.exception("%s: the event handler failed; later failures are only counted", self._stream.name)


def subscribe(
    events: str,
    handler: Handler,
    *,
    replay: str | None = None,
    topic: str = "",
    dialect: str = "auto",
    recovery: str | None = None,
    dp_rank: int = 0,
    bind: bool = False,
    **more: Any,
) -> Subscription:
    """Follow the KV events of one engine rank. `handler(event)` runs in the transport's thread.

    The fields are those of `StreamEndpoint`; `more`: transport (default: one of its own), limits, options,
    dialect_options. Raises ConfigurationError for an endpoint, dialect or recovery that cannot be.
    """
    endpoint = StreamEndpoint(dp_rank, events, replay, topic, dialect, recovery, bind)
    return Subscription(endpoint, handler, **more)
