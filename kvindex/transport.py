"""Sockets, thread and clock for the KV event streams: the only file of the library that imports zmq.

One thread drives every stream of the process (one time budget, pacer.py). A stream has a SUB socket with its
monitor, and one DEALER for each replay attempt.

    other threads -- follow, unfollow, resync, rebuild --> commands, wake socket --+
    SUB, monitor, DEALER descriptors ----------------------------------------------+--> turn: commands, timers, sockets
    StreamSync.next_timer --> heap ------------------------------------------------+       | inputs        ^ actions
                                                                                           v               |
                                                                                       StreamSync: StartReplay, Cancel

Rules
- A ZMQ descriptor only says "look again": a socket is read until it would block before its descriptor is waited on.
- No frame is taken for one of another connection: see link.py.
- libzmq gives a connection up for good after a protocol error; then the socket is replaced.
- Subscribe, then ask: a replay starts only after the SUB connection's handshake.
- What goes wrong in one stream (bug, bad endpoint, full index) marks and rebuilds that stream, never ends the thread.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, cast

import zmq

from kvindex.endpoints import needs_ipv6
from kvindex.errors import CapacityExceeded, ConfigurationError
from kvindex.fleet import StreamEndpoint
from kvindex.link import Event, Link, LinkStatus, Told
from kvindex.options import TransportOptions, from_environment
from kvindex.pacer import Pacer
from kvindex.sync import Action, CancelReplay, StartReplay, StreamSync

__all__ = ["EventTransport", "Followed", "TransportOptions", "from_environment"]

log = logging.getLogger(__name__)

BATCH_MESSAGES = 64
BATCH_BYTES = 1 << 20
LOG_PERIOD = 60.0
RETRY_GRACE = 0.5
"""Seconds in which libzmq announces its own reconnect after a loss; without it the socket is deaf."""
TRIES_PER_FAMILY = 2

_EVENTS = {
    zmq.EVENT_CONNECTED: Event.CONNECTING,
    zmq.EVENT_CONNECT_DELAYED: Event.CONNECTING,
    zmq.EVENT_CONNECT_RETRIED: Event.RETRYING,
    zmq.EVENT_ACCEPTED: Event.ACCEPTED,
    zmq.EVENT_DISCONNECTED: Event.DISCONNECTED,
    zmq.EVENT_HANDSHAKE_SUCCEEDED: Event.HANDSHAKE,
}
_WATCHED = sum(int(event) for event in _EVENTS)


class Followed(Protocol):
    """What the transport drives: `directory.Stream`, `client.Subscription`. open and close run in its thread."""

    @property
    def name(self) -> str: ...
    @property
    def endpoint(self) -> StreamEndpoint: ...

    link: LinkStatus

    def open(self) -> StreamSync: ...
    def close(self) -> None: ...


class _Attempt:
    """One replay attempt and its DEALER."""

    __slots__ = ("channel", "number", "socket", "start")

    def __init__(self, channel: _Channel, number: int, start: int) -> None:
        self.channel, self.number, self.start = channel, number, start
        self.socket: zmq.Socket[bytes] | None = None


@dataclass(slots=True, eq=False)
class _Channel:
    """Everything of one followed stream in the transport thread."""

    stream: Followed
    link: Link
    sync: StreamSync | None = None
    sub: zmq.Socket[bytes] | None = None
    monitor: zmq.Socket[Any] | None = None
    attempts: dict[int, _Attempt] = field(default_factory=dict)
    ipv6: bool = False
    reopen_at: float | None = None  # replace the socket then
    rebuild_at: float | None = None  # open the stream anew then
    backoff: float = 0.0  # of replaced sockets, since the last handshake
    fault_backoff: float = 0.0
    faulted_at: float | None = None
    scheduled: float | None = None
    logged_at: float | None = None
    closed: bool = False


class EventTransport:
    """The background thread. `start` it, `follow` streams from any thread, `stop` it.

    After `stop` no thread, socket or context of it is left; started again it follows what was asked for meanwhile.
    """

    def __init__(self, options: TransportOptions | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.options = options or TransportOptions()
        self.pace = Pacer(self.options.work_budget, self.options.rest, self.options.patience)
        self.faults = 0
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._commands: deque[Callable[[], None]] = deque()
        self._wake: socket.socket | None = None
        self._channels: dict[int, _Channel] = {}  # by id of the stream
        self._running: set[_Attempt] = set()
        self._queue: deque[_Attempt] = deque()
        self._ready: dict[_Channel | _Attempt, None] = {}  # in order: to be looked at without waiting
        self._timers: list[tuple[float, int, _Channel]] = []
        self._tickets = itertools.count()
        self._sockets = 0

    # -- any thread

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def streams(self) -> int:
        return len(self._channels)

    @property
    def sockets(self) -> int:
        """ZMQ sockets open now (SUB, monitor, DEALER)."""
        return self._sockets

    @property
    def replays(self) -> tuple[int, int]:
        """Replay attempts that run, and that wait for their turn."""
        return len(self._running), len(self._queue)

    def start(self) -> EventTransport:
        if self.alive:
            raise ConfigurationError("the event transport runs already")
        self._stopping = False
        inner, self._wake = socket.socketpair()
        inner.setblocking(False)
        self._wake.setblocking(False)
        self._thread = threading.Thread(target=self._run, args=(inner,), name="kvindex-events", daemon=True)
        self._thread.start()
        return self

    def stop(self, timeout: float = 10.0) -> bool:
        """Close every stream and socket and end the thread; True when it has ended. Idempotent."""
        thread = self._thread
        if thread is None:
            return True
        self.post(self._stop)
        if thread is threading.current_thread():
            return False
        thread.join(timeout)
        return not thread.is_alive()

    def __enter__(self) -> EventTransport:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def follow(self, stream: Followed) -> None:
        self.post(partial(self._follow, stream))

    def unfollow(self, stream: Followed) -> None:
        """Close its sockets, then the stream. One that is not followed is left alone."""
        self.post(partial(self._unfollow, stream))

    def resync(self, stream: Followed) -> None:
        """Operator's request: a fresh snapshot or history now."""
        self.post(partial(self._command, stream, self._resync))

    def rebuild(self, stream: Followed) -> None:
        """Close connection and content, and start from nothing."""
        self.post(partial(self._command, stream, self._rebuild))

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until everything asked so far was done; False on time-out or when the thread does not run."""
        done = threading.Event()
        self.post(done.set)
        return self.alive and done.wait(timeout)

    def post(self, command: Callable[[], None]) -> None:
        """Do it in the thread that owns the streams, once that runs; what it raises is logged. Returns at once."""
        self._commands.append(command)
        wake = self._wake
        if wake is not None:
            with suppress(OSError):  # full: woken already; closed: the thread has ended
                wake.send(b"\0")

    def _stop(self) -> None:
        self._stopping = True

    # -- the thread

    def _run(self, inner: socket.socket) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 32_768)
        self._selector = selectors.DefaultSelector()
        self._selector.register(inner, selectors.EVENT_READ, None)
        try:
            while not self._stopping:
                try:
                    self._turn(inner)
                except Exception:
                    self.faults += 1
                    log.exception("the event transport stumbled and goes on")
                    time.sleep(0.05)
        finally:
            for channel in list(self._channels.values()):
                self._unfollow(channel.stream)
            wake, self._wake = self._wake, None
            self._selector.close()
            inner.close()
            if wake is not None:
                wake.close()
            self._ready.clear()
            self._timers.clear()
            self._context.destroy(linger=0)

    def _turn(self, inner: socket.socket) -> None:
        wait = 0.0 if self._ready or self._commands else self.options.poll_timeout
        if wait and self._timers:
            wait = min(wait, max(0.0, self._timers[0][0] - self._clock()))
        for key, _ in self._selector.select(wait):
            if key.data is not None:
                self._ready[key.data] = None
                continue
            with suppress(BlockingIOError):
                inner.recv(4096)
        if wait:
            self.pace.rested()
        while self._commands:
            self._commands.popleft()()
        now = self._clock()
        while self._timers and self._timers[0][0] <= now:
            when, _, channel = heapq.heappop(self._timers)
            if channel.scheduled == when:
                channel.scheduled = None
                self._guard(channel, self._expire, channel, now)
        ready, self._ready = self._ready, {}
        for item in ready:
            if isinstance(item, _Channel):
                self._guard(item, self._service, item)
            else:
                self._guard(item.channel, self._service_attempt, item)
        while self._queue and len(self._running) < self.options.max_replays:
            attempt = self._queue.popleft()
            self._guard(attempt.channel, self._start_attempt, attempt)

    def _guard(self, channel: _Channel, work: Callable[..., None], *arguments: Any) -> None:
        """Do one stream's work. Whatever it raises is that stream's fault alone."""
        if channel.closed:
            return
        try:
            work(*arguments)
        except Exception as error:
            self._fault(channel, error)
        self._schedule(channel)

    # -- life of a stream

    def _follow(self, stream: Followed) -> None:
        if id(stream) not in self._channels:
            channel = self._channels[id(stream)] = _Channel(stream, Link(bind=stream.endpoint.bind))
            self._guard(channel, self._build, channel)

    def _unfollow(self, stream: Followed) -> None:
        channel = self._channels.pop(id(stream), None)
        if channel is not None:
            channel.closed = True
            self._dismantle(channel)

    def _command(self, stream: Followed, act: Callable[[_Channel], None]) -> None:
        channel = self._channels.get(id(stream))
        if channel is not None:
            self._guard(channel, act, channel)

    def _resync(self, channel: _Channel) -> None:
        if channel.sync is not None:
            self._perform(channel, channel.sync.resync(self._clock()))

    def _rebuild(self, channel: _Channel) -> None:
        self._dismantle(channel)
        self._build(channel)

    def _build(self, channel: _Channel) -> None:
        endpoint = channel.stream.endpoint
        channel.rebuild_at = None
        channel.sync = channel.stream.open()
        channel.link = Link(bind=endpoint.bind)
        channel.ipv6 = bool(needs_ipv6(endpoint.events))
        self._open_sub(channel)
        self._note(channel, error=None)

    def _dismantle(self, channel: _Channel) -> None:
        """Sockets, then content; each step whatever became of the one before. Never raises."""
        steps: list[Callable[[], None]] = [partial(self._end, attempt) for attempt in channel.attempts.values()]
        steps += [partial(self._close_sub, channel), channel.stream.close]
        for step in steps:
            try:
                step()
            except Exception:
                self.faults += 1
                log.exception("%s: error while closing", channel.stream.name)
        channel.sync = None
        channel.reopen_at = channel.rebuild_at = None
        self._ready.pop(channel, None)
        self._note(channel, connected=False)

    def _fault(self, channel: _Channel, error: Exception) -> None:
        self.faults += 1
        now = self._clock()
        if isinstance(error, ConfigurationError | CapacityExceeded | zmq.ZMQError | OSError):
            reason = str(error)
        else:
            reason = f"internal error, the stream is rebuilt: {type(error).__name__}: {error}"
        if channel.logged_at is None or now - channel.logged_at >= LOG_PERIOD:
            channel.logged_at = now
            log.error("%s: %s", channel.stream.name, reason, exc_info=error)
        self._dismantle(channel)
        recent = channel.faulted_at is not None and now - channel.faulted_at < LOG_PERIOD
        channel.fault_backoff = self._longer(channel.fault_backoff if recent else 0.0)
        channel.faulted_at = now
        channel.rebuild_at = now + channel.fault_backoff
        self._note(channel, faults=channel.stream.link.faults + 1, error=reason)

    def _longer(self, backoff: float) -> float:
        return min(max(backoff * 2, self.options.reconnect_initial), self.options.reconnect_max)

    def _note(self, channel: _Channel, **changes: Any) -> None:
        channel.stream.link = replace(channel.stream.link, **changes)

    # -- timers

    def _schedule(self, channel: _Channel) -> None:
        sync = channel.sync
        due = sync.next_timer if sync is not None else None
        for other in (channel.reopen_at, channel.rebuild_at):
            if other is not None and (due is None or other < due):
                due = other
        # a later time waits for the earlier one to fire, so a timer that moves with every frame costs nothing
        if due is not None and (channel.scheduled is None or due < channel.scheduled):
            channel.scheduled = due
            heapq.heappush(self._timers, (due, next(self._tickets), channel))

    def _expire(self, channel: _Channel, now: float) -> None:
        if channel.rebuild_at is not None and channel.rebuild_at <= now:
            self._build(channel)
        if channel.reopen_at is not None and channel.reopen_at <= now:
            self._replace_sub(channel)
        sync = channel.sync
        if sync is not None and sync.next_timer is not None and sync.next_timer <= now:
            self._perform(channel, sync.timer(now))

    # -- sockets

    def _socket(self, kind: int, hwm: int, *, ipv6: bool) -> zmq.Socket[bytes]:
        """With every option set that must be set before connect."""
        options = self.options
        made: zmq.Socket[bytes] = self._context.socket(kind)
        self._sockets += 1
        made.set(zmq.LINGER, 0)
        made.set(zmq.RCVHWM, hwm)
        made.set(zmq.MAXMSGSIZE, options.max_frame_bytes)
        made.set(zmq.IPV6, int(ipv6))
        made.set(zmq.RECONNECT_IVL, max(1, round(options.reconnect_initial * 1000)))
        made.set(zmq.RECONNECT_IVL_MAX, max(1, round(options.reconnect_max * 1000)))
        made.set(zmq.TCP_KEEPALIVE, 1)
        if options.keepalive_idle:
            made.set(zmq.TCP_KEEPALIVE_IDLE, max(1, round(options.keepalive_idle)))
            made.set(zmq.TCP_KEEPALIVE_INTVL, 10)
            made.set(zmq.TCP_KEEPALIVE_CNT, 3)
        made.set(zmq.HANDSHAKE_IVL, max(1, round(options.heartbeat_timeout * 1000)))
        if options.heartbeat_interval:
            made.set(zmq.HEARTBEAT_IVL, max(1, round(options.heartbeat_interval * 1000)))
            made.set(zmq.HEARTBEAT_TIMEOUT, max(1, round(options.heartbeat_timeout * 1000)))
        return made

    def _discard(self, made: zmq.Socket[Any]) -> None:
        with suppress(KeyError, ValueError):  # not registered yet
            self._selector.unregister(_descriptor(made))
        made.close(0)
        self._sockets -= 1

    def _watch(self, made: zmq.Socket[Any], owner: _Channel | _Attempt) -> None:
        self._selector.register(_descriptor(made), selectors.EVENT_READ, owner)
        self._ready[owner] = None

    def _open_sub(self, channel: _Channel) -> None:
        endpoint = channel.stream.endpoint
        channel.reopen_at = None
        channel.sub = sub = self._socket(zmq.SUB, self.options.receive_hwm, ipv6=channel.ipv6)
        sub.set(zmq.SUBSCRIBE, endpoint.topic_bytes or b"")
        channel.monitor = sub.get_monitor_socket(_WATCHED)
        self._sockets += 1
        if endpoint.bind:
            sub.bind(endpoint.events)
        else:
            sub.connect(endpoint.events)
        self._watch(sub, channel)
        self._watch(channel.monitor, channel)

    def _close_sub(self, channel: _Channel) -> None:
        sub, monitor = channel.sub, channel.monitor
        channel.sub = channel.monitor = None
        if monitor is not None and sub is not None:
            sub.disable_monitor()
            self._discard(monitor)
        if sub is not None:
            self._discard(sub)

    def _replace_sub(self, channel: _Channel) -> None:
        self._close_sub(channel)
        channel.link.replaced()
        self._open_sub(channel)

    # -- replay attempts

    def _start_attempt(self, attempt: _Attempt) -> None:
        channel, sync = attempt.channel, attempt.channel.sync
        endpoint = channel.stream.endpoint.replay
        if sync is None:
            return
        try:
            if endpoint is None:
                raise ConfigurationError("no replay endpoint is configured")
            ipv6 = needs_ipv6(endpoint)
            dealer = self._socket(zmq.DEALER, self.options.replay_hwm, ipv6=channel.ipv6 if ipv6 is None else ipv6)
            attempt.socket = dealer
            dealer.connect(endpoint)
            dealer.send_multipart([b"", struct.pack(">Q", attempt.start)], zmq.NOBLOCK)
            self._watch(dealer, attempt)
        except (ConfigurationError, zmq.ZMQError) as error:
            self._end(attempt)
            reason = f"replay {endpoint}: {error}"
            self._perform(channel, sync.attempt_failed(attempt.number, reason, self._clock()))
            return
        self._running.add(attempt)
        self._perform(channel, sync.attempt_started(attempt.number, self._clock()))

    def _end(self, attempt: _Attempt) -> None:
        """Give up its place and its socket. Idempotent."""
        attempts = attempt.channel.attempts
        if attempts.get(attempt.number) is attempt:
            # replaced, not changed in place: `_dismantle` walks over it
            attempt.channel.attempts = {key: value for key, value in attempts.items() if value is not attempt}
        self._running.discard(attempt)
        self._ready.pop(attempt, None)
        with suppress(ValueError):
            self._queue.remove(attempt)
        dealer, attempt.socket = attempt.socket, None
        if dealer is not None:
            self._discard(dealer)

    # -- frames

    def _perform(self, channel: _Channel, actions: Iterable[Action]) -> None:
        """What sync wants done after an input."""
        for action in actions:
            if isinstance(action, StartReplay):
                attempt = channel.attempts[action.attempt] = _Attempt(channel, action.attempt, action.start)
                self._queue.append(attempt)
            elif isinstance(action, CancelReplay):
                current = channel.attempts.get(action.attempt)
                if current is not None:
                    self._end(current)

    def _tell(self, channel: _Channel, told: tuple[Told, ...]) -> None:
        sync = channel.sync
        if sync is not None:
            heard = {Told.CONNECTED: sync.connected, Told.DISCONNECTED: sync.disconnected}
            for one in told:
                self._perform(channel, heard.get(one, sync.reconnected)(self._clock()))

    def _service_attempt(self, attempt: _Attempt) -> None:
        channel, sync = attempt.channel, attempt.channel.sync
        if attempt.socket is None or sync is None:
            return
        messages, drained = _receive(attempt.socket)
        for frames in messages:
            if attempt.socket is None:  # over: what follows the end marker is nobody's
                return
            self._perform(channel, sync.reply(attempt.number, frames, self._clock()))
            self.pace()
        if not drained and attempt.socket is not None:
            self._ready[attempt] = None

    def _service(self, channel: _Channel) -> None:
        sync = channel.sync
        if channel.sub is None or channel.monitor is None or sync is None:
            return
        messages, drained = _receive(channel.sub)
        if _has_news(channel.monitor):
            self._read_monitor(channel, channel.monitor)
        verdict = channel.link.judge(drained)
        self._tell(channel, verdict.before)
        if verdict.keep:
            clock, applying = self._clock, channel.stream.link.applying
            for frames in messages:
                began = clock()
                actions = sync.live(frames, began)
                applying.add(clock() - began)
                if actions:
                    self._perform(channel, actions)
                self.pace()
        self._tell(channel, verdict.after)
        if verdict.again:
            self._ready[channel] = None

    def _read_monitor(self, channel: _Channel, monitor: zmq.Socket[Any]) -> None:
        """Feed the link, and keep status, watchdog and address family."""
        link, endpoint, was_up = channel.link, channel.stream.endpoint, channel.link.up
        counts = {"connections": 0, "disconnections": 0, "connect_retries": 0}
        names = {Event.HANDSHAKE: "connections", Event.RETRYING: "connect_retries"}
        while True:
            try:
                code, value = struct.unpack("=HI", monitor.recv_multipart(zmq.NOBLOCK)[0])
            except zmq.Again:
                break
            event = _EVENTS.get(code)
            if event is None:
                continue
            up = link.up
            link.event(event, value)
            if event in names:
                counts[names[event]] += 1
            elif up and not link.up:
                counts["disconnections"] += 1
        status = channel.stream.link
        error = status.error
        if link.up:
            error, channel.reopen_at, channel.backoff = None, None, 0.0
        elif link.lost:
            why = (
                "sends what is no ZMQ"
                if was_up
                else "ends the connection before the ZMQ handshake: is it a PUB socket?"
            )
            error = f"{endpoint.events} {why}"
            if channel.reopen_at is None:
                channel.backoff = self._longer(channel.backoff)
                channel.reopen_at = self._clock() + RETRY_GRACE + channel.backoff
        else:
            channel.reopen_at = None
            if link.retries:
                error = f"cannot connect to {endpoint.events}, trying again"
            elif was_up:
                error = f"connection to {endpoint.events} lost, trying again"
            if link.retries >= TRIES_PER_FAMILY and needs_ipv6(endpoint.events) is None and not endpoint.bind:
                channel.ipv6 = not channel.ipv6  # a name: its other address family may be the one the engine binds
                channel.backoff = self._longer(channel.backoff)
                channel.reopen_at = self._clock() + channel.backoff
        added = {name: getattr(status, name) + number for name, number in counts.items()}
        self._note(channel, connected=link.up, error=error, **added)


def _descriptor(made: zmq.Socket[Any]) -> int:
    return cast(int, made.get(zmq.FD))


def _has_news(monitor: zmq.Socket[Any]) -> bool:
    return bool(cast(int, monitor.get(zmq.EVENTS)) & zmq.POLLIN)


def _receive(source: zmq.Socket[bytes]) -> tuple[list[list[bytes]], bool]:
    """Queued messages up to the batch's bounds, and whether the queue was empty then."""
    messages: list[list[bytes]] = []
    size = 0
    while len(messages) < BATCH_MESSAGES and size < BATCH_BYTES:
        try:
            frames = source.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return messages, True
        messages.append(frames)
        size += sum(map(len, frames))
    return messages, False
