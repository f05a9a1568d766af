"""The ext_proc server: the only grpc file. Bytes from Envoy -> wire -> Session -> wire -> bytes to Envoy.

One coroutine an exchange, in the read()/write() form: one frame less than an async generator, and the place where a
cancellation arrives is known. The method handler passes raw bytes; decoding is ours, so that a message that is no
protobuf ends its own stream with a status and nothing else.

An exchange can end as end of messages, as CancelledError (Envoy resets the stream, which is the normal end too) or as
GeneratorExit. Session.close() runs in `finally`, without await, in all three.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
import traceback
import types
from collections.abc import Callable, Coroutine, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

from extproc import wire
from extproc.allocator import keep_freed_memory
from extproc.messages import Decider, HttpRequest, Immediate, Reply
from extproc.reasons import Reason
from extproc.session import Session
from extproc.session_rules import Observer, SessionOptions, SessionRules
from kvindex.pacer import Pacer

log = logging.getLogger(__name__)

_SOCKETS = ("unix:", "unix-abstract:")
LIVENESS = "liveness"
READINESS = ("", "readiness", wire.SERVICE)
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class ServerError(Exception):
    """The server cannot be started; the message names the address or file and what is wrong with it."""


@dataclass(slots=True, frozen=True)
class TlsOptions:
    """PEM files, read again when they change. With client_ca_file every client must show a certificate signed by it."""

    cert_file: str
    key_file: str
    client_ca_file: str | None = None


@dataclass(slots=True, frozen=True)
class ServerOptions:
    """
    address              "ip:port", "[ip6]:port" or "unix:/path"; port 0 takes a free one
    decide_timeout       seconds that the Decider may take, to be below Envoy's message_timeout; then unscored
    max_message_bytes    gRPC receive limit, to be above the largest body that Envoy buffers plus headers; -1 = none. A
                         larger message is gRPC error 8: 500, or Envoy's own balancing with failure_mode_allow
    min_ping_interval    seconds between pings that a client may send; grpc's own 300 closes the connection of an Envoy
                         with connection_keepalive
    drain_wait           seconds between NOT_SERVING and refusing streams: health check interval x unhealthy_threshold
    grace                seconds that open exchanges may take to end after that
    trace_context        whether requests are to carry the traceparent of Envoy's call, its own span, where it traces
    keep_freed_bytes     freed memory that the process keeps for the next bodies (allocator.py), 0 = as malloc likes
    """

    address: str = "127.0.0.1:9002"
    tls: TlsOptions | None = None
    decide_timeout: float = 1.5
    max_message_bytes: int = 64 << 20
    min_ping_interval: float = 0.5
    drain_wait: float = 2.5
    grace: float = 30.0
    keep_freed_bytes: int = 64 << 20
    trace_context: bool = False
    extra_options: tuple[tuple[str, int | str], ...] = ()


class LoggingObserver(Observer):
    """Logs faults: the type of the error and where it was raised. Never its text, which may quote a request."""

    def fault(self, where: str, error: BaseException | None = None) -> None:
        if error is None:
            log.warning("ext_proc: %s message from the gateway", where)
        else:
            frames = traceback.extract_tb(error.__traceback__)
            at = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else "?"
            log.error("ext_proc: %s raised %s at %s", where, type(error).__name__, at)


class ExtProcServer:
    """Serves ext_proc and gRPC health on one port.

    await start() -> port; await drain(); await stop(). All on one event loop. Exchanges go ahead of the thread that
    the pacer paces.
    """

    def __init__(
        self,
        decider: Decider,
        options: ServerOptions | None = None,
        session_options: SessionOptions | None = None,
        observer: Observer | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        self.options = options or ServerOptions()
        self.pacer = pacer or Pacer()
        self.port = 0
        self._decider = decider
        self._observer = observer or LoggingObserver()
        self._rules = SessionRules(session_options, self._observer)
        self._encoder = wire.Encoder(self._rules.constants())
        self._health = HealthServicer()
        self._server: Any = None
        self._sessions = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    @property
    def sessions(self) -> int:
        """Exchanges open now."""
        return self._sessions

    async def start(self, *, ready: bool = True) -> int:
        """Listens and serves; returns the port. Raises ServerError. With ready=False health begins as NOT_SERVING."""
        options = self.options
        limit = self._rules.options.max_body_bytes
        if 0 <= options.max_message_bytes <= limit:
            raise ServerError(f"max_message_bytes {options.max_message_bytes} must be above max_body_bytes {limit}")
        _check_address(options.address)
        if options.keep_freed_bytes:
            keep_freed_memory(options.keep_freed_bytes)
        server = grpc.aio.server(options=_channel_options(options))
        server.add_generic_rpc_handlers((_Routes(self._exchange, self._health),))
        await self._health.set(LIVENESS, _SERVING)
        await self.set_ready(ready)
        credentials = None if options.tls is None else _credentials(options.tls)
        try:
            if credentials is None:
                self.port = server.add_insecure_port(options.address)
            else:
                self.port = server.add_secure_port(options.address, credentials)
        except RuntimeError:
            raise ServerError(f"cannot listen on {options.address}: {_why_not(options.address)}") from None
        await server.start()
        self._server = server
        return self.port

    async def set_ready(self, ready: bool) -> None:
        """What health says under the names of READINESS. Without effect once draining."""
        if not self._draining:
            await self._set_health(ready)

    async def drain(self, wait: float | None = None) -> None:
        """Health says NOT_SERVING (liveness stays), then waits until gateways have noticed. New streams still work."""
        await self.set_ready(False)
        self._draining = True
        await asyncio.sleep(self.options.drain_wait if wait is None else wait)

    async def stop(self, grace: float | None = None) -> None:
        """Refuses new streams and returns when the open ones have ended, at the latest after `grace` seconds."""
        server, self._server = self._server, None
        if server is None:
            return
        await self.set_ready(False)
        self._draining = True
        stopping = asyncio.ensure_future(server.stop(self.options.grace if grace is None else grace))
        # Health watches never end by themselves: with no exchange left there is nothing to wait for. Looked at twice,
        # because a stream that was accepted a moment ago may not have reached its handler yet.
        quiet = 0
        while not stopping.done() and quiet < 2:
            idle = asyncio.ensure_future(self._idle.wait())
            await asyncio.wait({stopping, idle}, return_when=asyncio.FIRST_COMPLETED)
            idle.cancel()
            await asyncio.wait({stopping}, timeout=0.05)
            quiet = quiet + 1 if self._idle.is_set() else 0
        await server.stop(None)
        await stopping

    async def _set_health(self, serving: bool) -> None:
        for name in READINESS:
            await self._health.set(name, _SERVING if serving else _NOT_SERVING)

    async def _exchange(self, _requests: object, context: Any) -> None:
        await self.pacer.ahead(self._process(context))

    async def _process(self, context: Any) -> None:
        session = Session(self._rules)
        read, write, encode = context.read, context.write, self._encoder.encode
        self._sessions += 1
        self._idle.clear()
        try:
            while (data := await _kept(read())) is not grpc.aio.EOF:
                message = wire.decode(data)
                del data  # a body is held once, not twice
                if message is None:
                    self._observer.fault("unknown")
                    continue
                replies = session.receive(message)
                del message
                if session.request is not None:
                    if self.options.trace_context:
                        session.request.traceparent = _traceparent(context)
                    replies = await self._decide(session)
                for reply in replies:
                    await write(encode(reply))
                if session.ended:
                    break
            else:
                # Envoy half-closes and resets at once. grpc would answer the dead call with a status, and never frees
                # what it took for that (grpc issue 43360): let the cancellation that is on its way come first.
                await asyncio.sleep(0)
        except wire.MalformedMessage:
            self._observer.fault("malformed")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "malformed ProcessingRequest")
        except grpc.aio.BaseError:
            # The peer reset the stream between two of our calls. Ends like any other reset; grpc would log an error.
            raise asyncio.CancelledError from None
        except Exception as error:  # ours; grpc would log its text
            self._observer.fault("server", error)
            await context.abort(grpc.StatusCode.INTERNAL, "internal error")
        finally:
            session.close()
            self._sessions -= 1
            if not self._sessions:
                self._idle.set()

    async def _decide(self, session: Session) -> Iterable[Reply | Immediate]:
        request = session.request
        assert request is not None  # the caller looked
        if request.reason is not None:
            return self._without_score(session, request, request.reason)
        try:
            async with asyncio.timeout(self.options.decide_timeout) as deadline:
                outcome = await self._decider.decide(request)
        except TimeoutError as error:
            if deadline.expired():
                return self._without_score(session, request, Reason.TIMEOUT)
            self._observer.fault("decider", error)
            return self._without_score(session, request, Reason.INTERNAL)
        except Exception as error:
            self._observer.fault("decider", error)
            return self._without_score(session, request, Reason.INTERNAL)
        return session.decided(outcome)

    def _without_score(self, session: Session, request: HttpRequest, reason: Reason) -> Iterable[Reply | Immediate]:
        """The request passes on as it is, or, for an endpoint picker, to an endpoint all the same."""
        if not self._rules.options.endpoint_picker:
            return session.failed(reason)
        try:
            outcome = self._decider.pick(request, reason)
        except Exception as error:
            self._observer.fault("decider", error)
            return session.failed(reason)
        return session.decided(outcome)


def _traceparent(context: Any) -> str | None:
    """Of the gRPC call, not of the request in it."""
    found = [value for name, value in context.invocation_metadata() if name == "traceparent"]
    return found[0] if len(found) == 1 and isinstance(found[0], str) else None


@types.coroutine
def _kept(reading: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Awaits a read; where this task is cancelled, the read is not: it ends by itself when the call does.

    grpc never frees the 80 bytes of a cancelled one, see `_process`. About 3 us.
    """
    try:
        pending = reading.send(None)
        while True:
            pending._asyncio_future_blocking = False  # not the task awaits it, we do
            told = pending.get_loop().create_future()
            pending.add_done_callback(lambda _, told=told: told.done() or told.set_result(None))
            try:
                yield from told
            except BaseException:
                pending.add_done_callback(lambda _: _finish(reading))
                raise
            pending = reading.send(None)
    except StopIteration as ended:
        return ended.value


def _finish(reading: Coroutine[Any, Any, Any]) -> None:
    with contextlib.suppress(Exception):
        reading.send(None)


class _Routes(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Every method of the port in one look-up; registered handlers would cost the accept loop one future each."""

    def __init__(self, process: Callable[..., Any], health: HealthServicer) -> None:
        check, reply = health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString
        self._handlers = {
            wire.METHOD: grpc.stream_stream_rpc_method_handler(process),
            "/grpc.health.v1.Health/Check": grpc.unary_unary_rpc_method_handler(health.Check, check, reply),
            "/grpc.health.v1.Health/Watch": grpc.unary_stream_rpc_method_handler(health.Watch, check, reply),
        }

    def service(self, handler_call_details: Any) -> Any:
        return self._handlers.get(handler_call_details.method)


def _channel_options(options: ServerOptions) -> list[tuple[str, int | str]]:
    """Names as grpcio knows them: it ignores unknown ones silently, the C macros' names too."""
    return [
        ("grpc.max_receive_message_length", min(options.max_message_bytes, (1 << 31) - 1)),
        ("grpc.http2.min_ping_interval_without_data_ms", round(options.min_ping_interval * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.so_reuseport", 0),  # a second server on the port is an error, not half of the traffic
        *options.extra_options,
    ]


def _credentials(tls: TlsOptions) -> Any:
    """Server credentials that follow the files: a rotated certificate serves the next connection."""
    names = [name for name in (tls.cert_file, tls.key_file, tls.client_ca_file) if name is not None]

    def stamps() -> list[tuple[int, int]]:
        return [(stat.st_mtime_ns, stat.st_ino) for stat in map(os.stat, names)]

    def configuration() -> Any:
        # grpc takes anything and fails each handshake; this refuses a bad file, and a new certificate beside an old key
        check = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        check.load_cert_chain(tls.cert_file, tls.key_file)
        if tls.client_ca_file is not None:
            check.load_verify_locations(tls.client_ca_file)
        authority = None if tls.client_ca_file is None else Path(tls.client_ca_file).read_bytes()
        pair = (Path(tls.key_file).read_bytes(), Path(tls.cert_file).read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=authority)

    try:
        seen = stamps()
        first = configuration()
    except OSError as error:
        raise ServerError(f"TLS files {', '.join(names)}: {error.strerror or error}") from None

    def changed() -> Any:
        """Called by grpc for each new connection, in a thread of its own. None = nothing new."""
        nonlocal seen
        try:
            now = stamps()
            if now == seen:
                return None
            fresh = configuration()
        except OSError as error:
            log.warning("ext_proc: keeping the old certificate: %s", error.strerror or error)
            return None
        seen = now
        return fresh

    return grpc.dynamic_ssl_server_credentials(
        first, changed, require_client_authentication=tls.client_ca_file is not None
    )


def _check_address(address: str) -> None:
    """Before grpc sees it, which takes a port modulo 65536."""
    host, _, port = address.rpartition(":")
    if not address.startswith(_SOCKETS) and not (host and port.isdecimal() and int(port) < 65_536):
        raise ServerError(f"cannot listen on {address}: not ip:port or unix:path")


def _why_not(address: str) -> str:
    """The operating system's own words for a failed bind; grpc gives none."""
    if address.startswith(_SOCKETS):
        return "the socket path cannot be used"
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, int(port)))
            probe.listen()
    except OSError as error:
        known = {errno.EADDRINUSE: "the port is in use", errno.EADDRNOTAVAIL: "the address is not one of this host"}
        return known.get(error.errno or 0, error.strerror or str(error))
    return "grpc could not bind it"
