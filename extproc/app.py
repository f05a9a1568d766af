"""Builds a running kvcar out of a configuration and takes it down again. The only place where everything meets."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from extproc import __version__
from extproc.admin import snapshot
from extproc.admin.query import Queries
from extproc.admin.registration import Registrations
from extproc.admin.server import AdminServer, make_app, tls_context
from extproc.aibrix_metrics import add_aibrix
from extproc.assembly import Assembly, Built, instances_of, same_bounds, tracing_of, with_names
from extproc.config import Config, ConfigError, EndpointsFileConfig, pair_headers
from extproc.dashboard import Dashboard
from extproc.decider import PoolDecider
from extproc.decisions import DecisionLog
from extproc.endpoint_picker import EndpointPicker
from extproc.endpoints_file import EndpointsFile
from extproc.metrics import Metrics
from extproc.observe import add_families, add_reload, add_transport, forget_gone, stream_dict
from extproc.openai import PATHS, Routes
from extproc.overrides import Overrides
from extproc.pool import Pool
from extproc.pools import Pools
from extproc.reasons import Reason
from extproc.registrar import PoolHomes, Registrar
from extproc.registry import Registry
from extproc.reload import FileWatch, applicable, changes, read, replace_instances
from extproc.replicas import Giver, Replicas
from extproc.server import ExtProcServer, LoggingObserver, ServerError, ServerOptions, TlsOptions
from extproc.session_rules import SessionOptions
from extproc.sources import Sources
from extproc.speculative import Approximate
from extproc.trace_log import TraceLog
from extproc.watch import settled, watch
from kvindex.discovery.registered import Registered
from kvindex.errors import ConfigurationError
from kvindex.fleet import Fleet
from kvindex.options import TransportOptions, from_environment
from kvindex.pacer import SWITCH_INTERVAL
from kvindex.sync import SyncLimits
from kvindex.transport import EventTransport

log = logging.getLogger(__name__)


class _Watch(LoggingObserver):
    """Counts what sessions do on their own account, and logs faults without the text of a request."""

    def __init__(self, decider: PoolDecider, metrics: Metrics) -> None:
        self._decider = decider
        self._faults = metrics.faults

    def unscored(self, reason: Reason) -> None:
        self._decider.unscored(reason)

    def fault(self, where: str, error: BaseException | None = None) -> None:
        self._faults.labels(where).inc()
        super().fault(where, error)


class App:
    """One kvcar process: `start`, then `wait` (until SIGTERM or SIGINT), then `stop`. Made and run in the event loop.

    Raises ConfigError from the constructor for what the file alone cannot show (endpoints, duplicates).
    """

    def __init__(
        self,
        config: Config,
        path: Path | None = None,
        *,
        reread: Callable[[Path], Config] = read,
        admin_socket: Path | None = None,
    ) -> None:
        """
        path          the file to read again on `reload`, None = it was made by hand
        reread        how that is done
        admin_socket  where the admin port is instead of `admin.address`: one of several workers, behind their front
        """
        self._file = FileWatch(path) if path is not None else None  # first: what follows takes seconds
        self.config = config
        self.started = time.time()
        self.metrics_registry = Metrics(__version__)
        self.decision_log = DecisionLog()
        self.fleet = Fleet()
        events = config.events
        options, limits = from_environment(
            TransportOptions(
                max_replays=events.max_replays,
                max_frame_bytes=max(TransportOptions().max_frame_bytes, 2 * events.max_message_bytes),
                reconnect_initial=events.reconnect_initial_ms / 1000,
                reconnect_max=max(events.reconnect_initial_ms, events.reconnect_max_ms) / 1000,
            ),
            SyncLimits(
                max_message_bytes=events.max_message_bytes,
                max_buffered_bytes=events.max_buffered_bytes,
                replay_timeout=None if events.replay_timeout_ms is None else events.replay_timeout_ms / 1000,
                resync_interval=events.resync_interval_ms / 1000,
                attempts=events.replay_attempts,
                backoff_initial=events.backoff_initial_ms / 1000,
                backoff_max=events.backoff_max_ms / 1000,
            ),
        )
        instances_of(config)
        self.transport = EventTransport(options)
        self.overrides = Overrides()
        self.sources = Sources(self.fleet, loopback=config.admin.is_local)
        self._assembly = Assembly(config, self.fleet, self.transport, limits, self.overrides)
        self._built = {pool.name: self._assembly.make(pool) for pool in config.pools}
        self.pools = Pools(built.pool for built in self._built.values())
        self.reload_error: str | None = None
        given = config.replicas
        self.replicas: Replicas | None = None
        if given is not None:
            self.replicas = Replicas(given.peers, token=given.token, timeout=given.timeout_ms / 1000)
        self._path = path
        self._reread = reread
        self._admin_socket = admin_socket
        self._reloading = asyncio.Lock()
        trace = config.trace
        self._trace = TraceLog(Path(trace.path), max_bytes=trace.max_bytes) if trace else None
        self._tracing = tracing_of(config)
        self.decider = PoolDecider(
            self.pools,
            self.metrics_registry,
            self.decision_log,
            names=config.headers,
            routes=Routes(config.paths.bases, config.paths.rewrites),
            max_body_bytes=config.limits.max_body_bytes,
            trace=self._trace,
            picker=EndpointPicker() if config.listen.endpoint_picker else None,
            tracing=self._tracing,
        )
        self.dashboard = Dashboard(
            self, routes=Routes(config.paths.bases, config.paths.rewrites), max_body_bytes=config.limits.max_body_bytes
        )
        self._server: ExtProcServer | None = None
        self._admin: AdminServer | None = None
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._files: dict[str, tuple[EndpointsFileConfig, EndpointsFile, asyncio.Task[None]]] = {}
        self._serving = self._warm = False
        add_families(self.metrics_registry, self.pools)
        add_transport(self.metrics_registry, self.transport)
        add_reload(self.metrics_registry, lambda: self.reload_error)
        forget_gone(self.metrics_registry, self.fleet)
        if config.admin.aibrix_metrics:
            add_aibrix(self.metrics_registry, self.pools)

    # -- life

    async def start(self) -> dict[str, Any]:
        """Binds both ports and follows the engines. Returns {"ext_proc": "ip:port", "admin": "ip:port"}.

        Raises OSError that names the address which cannot be bound.
        """
        config = self.config
        self.transport.start()
        for pool in self.pools:
            pool.attach()
        self.sources.use(config.pools)
        limits, headers = config.limits, config.headers
        tls = config.listen.tls
        self._server = ExtProcServer(
            self.decider,
            ServerOptions(
                address=config.listen.address,
                tls=TlsOptions(tls.cert, tls.key, tls.client_ca) if tls else None,
                decide_timeout=limits.decide_timeout_ms / 1000,
                # the gateway may send somewhat more than the body itself; what is over the limit passes unscored
                max_message_bytes=2 * limits.max_body_bytes + (1 << 20),
                drain_wait=config.listen.drain_wait_ms / 1000,
                grace=config.listen.drain_grace_ms / 1000,
                trace_context=config.tracing is not None,
            ),
            SessionOptions(
                destination_header=headers.destination,
                strip_headers=tuple(dict.fromkeys((headers.rank, headers.prefill, *pair_headers(config)))),
                session_header=headers.stateful_session,
                endpoint_picker=config.listen.endpoint_picker,
                paths=tuple(dict.fromkeys((*PATHS, *config.paths.rewrites))),
                prefixes=config.paths.bases,
                max_body_bytes=limits.max_body_bytes,
                observe_usage=config.listen.observe_usage,
            ),
            observer=_Watch(self.decider, self.metrics_registry),
            pacer=self.transport.pace,
        )
        host, _, port = config.admin.address.rpartition(":")
        queries = Queries(
            self.pools,
            ready=lambda: self.readiness()[0],
            form=config.admin.conductor_form,
            max_body_bytes=limits.max_body_bytes,
        )
        more = (*queries.routes(), *self.dashboard.endpoints(), *snapshot.routes(Giver(self.pools)))
        registrar = Registrar(
            Registry(form=config.admin.conductor_form),
            PoolHomes(self.pools, lambda: self.sources.of_type(Registered)),
        )
        admin = make_app(
            self,
            token=config.admin.token,
            behind=self._admin_socket is not None,
            more=[*more, *Registrations(registrar).routes()],
        )
        admin.cleanup_ctx.append(self.dashboard.sampling)
        try:
            files = config.admin.tls
            context = tls_context(files.cert, files.key, files.client_ca) if files else None
        except OSError as error:
            raise ConfigError(f"admin.tls: the files cannot be used: {error}") from None
        self._admin = AdminServer(admin, host.strip("[]"), int(port), tls=context, path=self._admin_socket)
        try:
            admin_port = await self._admin.start()
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise ConfigError(f"admin.address: cannot listen on {config.admin.address}: {reason}") from None
        try:
            ext_proc_port = await self._server.start(ready=False)
        except ServerError as error:
            raise ConfigError(f"listen: {error}") from None
        self._spawn(watch(lambda: ((pool.name, pool.directory) for pool in self.pools)))
        self._spawn(self._get_ready(self._server))
        self._spawn(registrar.run())
        self._spawn(self._start_files())
        if self._file is not None and config.reload.watch:
            self._spawn(self._follow_file(self._file))
        # What exists by now lives as long as the process: full collections need not look at it again.
        gc.collect()
        gc.freeze()
        self._serving = True
        return {
            "ext_proc": f"{config.listen.address.rpartition(':')[0]}:{ext_proc_port}",
            "admin": f"{host}:{admin_port}",
        }

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs beside the server until it ends or the process stops; what it raises is logged, not lost."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the server failed", exc_info=task.exception())

    async def _get_ready(self, server: ExtProcServer) -> None:
        """Health says SERVING once the fleet is known and what can be synchronized is, or the time is up."""
        deadline = time.monotonic() + self.config.startup.wait_ms / 1000
        await self.sources.wait_ready(deadline - time.monotonic())
        while time.monotonic() < deadline:
            if all(settled(report) for pool in self.pools for report in pool.directory.status()):
                break
            await asyncio.sleep(0.05)
        if self.replicas is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await self.replicas.warm(self.pools)
            self._spawn(self._ask_replicas(self.replicas))
        self._warm = True
        await server.set_ready(True)

    async def _ask_replicas(self, replicas: Replicas) -> None:
        given = self.config.replicas
        await replicas.run(self.pools, given.interval_ms / 1000 if given is not None else 2.0)

    async def _start_files(self) -> None:
        """Until every pool that wants a file has one."""
        looks = 0
        while waiting := self._use_files():
            looks += 1
            if not looks % 60:
                log.warning("endpoints files of %s wait for discovery's first picture", ", ".join(waiting))
            await self.sources.wait_ready(1.0)

    def _use_files(self) -> list[str]:
        """One file of endpoints for each pool that wants one; the others' tasks end, their files stay as they are.

        Returns the pools with a source that has not told anything yet: their instances are not all, so their files are
        left as they are for now.
        """
        wanted = {name: built.given.endpoints_file for name, built in self._built.items()}
        for name, (given, _, task) in list(self._files.items()):
            if wanted.get(name) != given:
                task.cancel()
                del self._files[name]
        waiting = []
        for name, built in self._built.items():
            chosen = built.given.endpoints_file
            built.pool.on_instances = None
            if chosen is None:
                continue
            if not self.sources.ready_of(name):
                waiting.append(name)
                continue
            if name not in self._files:
                file = EndpointsFile(Path(chosen.path), chosen.cluster)
                self._files[name] = (chosen, file, self._spawn(file.run()))
            file = self._files[name][1]
            built.pool.on_instances = file.show
            file.show(built.pool.instances)
        return waiting

    # -- reload

    async def _follow_file(self, file: FileWatch) -> None:
        interval = self.config.reload.interval_ms / 1000
        while True:
            await file.wait(interval)
            await self.reload()

    async def reload(self) -> str | None:
        """Reads the configuration file again. Returns why it was refused (then nothing has changed), None = applied."""
        if self._path is None:
            return "the configuration did not come from a file"
        async with self._reloading:
            try:
                new, waiting = applicable(self.config, await asyncio.to_thread(self._reread, self._path))
                await self._apply(new)
            except (ConfigError, ConfigurationError) as error:
                self.reload_error = str(error)
                self.metrics_registry.reload_failures.inc()
                reasons = "; ".join(str(error).splitlines())
                log.error("the changed configuration is refused, the old one stays: %s", reasons)
                return self.reload_error
            except Exception as error:  # ours, but no reason to stop looking at the file
                self.reload_error = f"internal error: {type(error).__name__}: {error}"
                self.metrics_registry.reload_failures.inc()
                log.exception("the changed configuration could not be applied")
                return self.reload_error
            self.reload_error = None
            self.metrics_registry.reloads.inc()
            if waiting:
                log.warning("these sections take effect at the next start: %s", ", ".join(waiting))
            return None

    async def _apply(self, new: Config) -> None:
        """Swaps pools in one step. What is equal goes on; requests under way end with what they began with."""
        before = self._built
        built: dict[str, Built] = {}
        for given in new.pools:
            old = before.get(given.name)
            if old is not None and old.given == given:
                built[given.name] = old
            elif old is not None and replace_instances(old.given, given) == given and same_bounds(old.given, given):
                built[given.name] = with_names(Built(given, old.pool))
            else:
                built[given.name] = await asyncio.to_thread(self._assembly.make, given, old)
        for one in built.values():
            one.pool.check()
        for name, one in built.items():
            was = before.get(name)
            if was is None or was.pool is not one.pool:
                one.pool.attach(was.pool if was else None)
        self.pools.use(one.pool for one in built.values())
        if new.log.level != self.config.log.level:  # else a level set by hand stays
            logging.getLogger().setLevel(new.log.level.upper())
        self._built, self.config = built, new
        for one in built.values():
            one.pool.on_instances = None  # a source that takes another's place starts without instances
        self.sources.use(new.pools)
        if self._use_files():
            self._spawn(self._start_files())
        for name, was in before.items():
            after = built.get(name)
            if after is None or after.pool is not was.pool:
                await was.pool.close(after.pool if after else None)
        told = []
        for name in sorted(before.keys() | built.keys()):
            old, now = before.get(name), built.get(name)
            what = changes(old.given if old else None, now.given if now else None)
            if what:
                told.append(f"pool {name}: {what}")
        log.info("configuration read again: %s", "; ".join(told) or "no pool has changed")

    def request_stop(self) -> None:
        self._stop.set()

    def _hang_up(self) -> None:
        self._spawn(self.reload())

    async def wait(self) -> None:
        """Until `request_stop` or a signal."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request_stop)
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        await self._stop.wait()

    async def stop(self) -> None:
        """Drain: health says NOT_SERVING, running exchanges finish within the grace, then everything closes."""
        self._serving = False
        for task in self._tasks:
            task.cancel()
        if self._server is not None and self._server.port:
            log.info("draining: %d requests in flight", sum(pool.inflight.total() for pool in self.pools))
            await self._server.drain()
            await self._server.stop()
        await self.sources.close()
        if self.replicas is not None:
            await self.replicas.close()
        for pool in self.pools:
            await pool.close()
            pool.prompter.end()
        if self._trace is not None:
            await asyncio.to_thread(self._trace.close)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        if self._admin is not None:
            await self._admin.stop()
        await asyncio.to_thread(self.transport.stop)

    # -- what the admin port shows (extproc.admin.server.Source)

    @property
    def ready(self) -> bool:
        return self._serving and self._warm and self.transport.alive

    def readiness(self) -> tuple[bool, Mapping[str, Any]]:
        detail = {
            pool.name: {
                "tokenizer": pool.tokenizer_loaded,
                "streams": len(reports := pool.directory.status()),
                "synchronized": sum(report.synchronized for report in reports),
            }
            for pool in self.pools
        }
        return self.ready, {"pools": detail}

    def status(self) -> Mapping[str, Any]:
        return {
            "version": __version__,
            "uptime_seconds": round(time.time() - self.started, 1),
            "serving": self._serving,
            "reload_error": self.reload_error,
            "discovery": self.sources.status(),
            "endpoints_files": [
                {"pool": name, "path": str(file.path), "error": file.error}
                for name, (_, file, _) in self._files.items()
            ],
            "trace": {"path": str(trace.path), "error": trace.error, "dropped": trace.dropped}
            if (trace := self._trace) is not None
            else None,
            "pools": [self._pool_status(pool) for pool in self.pools],
        }

    def _pool_status(self, pool: Pool) -> Mapping[str, Any]:
        now = time.monotonic()
        return {
            "name": pool.name,
            "models": pool.models,
            "scorer": pool.scorer_name,
            "tokenizer_loaded": pool.tokenizer_loaded,
            "speculative_blocks": pool.speculative_blocks,
            "approximate": isinstance(pool.beside, Approximate),
            "block_size": pool.directory.block_size,
            "self_verification": pool.self_verification.as_dict(observed=self.config.listen.observe_usage),
            "instances": [
                {
                    "name": one.name,
                    "address": one.address,
                    "role": one.current_role,
                    "state": str(one.state),
                    "in_flight": pool.inflight.of_instance(one.name).requests,
                    "load": load._asdict() if (load := pool.loads.get(one.name, now)) is not None else None,
                }
                for one in pool.instances
            ],
            "streams": [stream_dict(report) for report in (*pool.directory.status(), *pool.directory.pool_status())],
        }

    def streams(self) -> list[Mapping[str, Any]]:
        return [
            {"pool": pool.name, **stream_dict(report)}
            for pool in self.pools
            for report in (*pool.directory.status(), *pool.directory.pool_status())
        ]

    def decisions(
        self, limit: int, pool: str | None, reason: str | None, request_id: str | None
    ) -> list[Mapping[str, Any]]:
        found = self.decision_log.latest(limit, pool=pool, reason=reason, request_id=request_id)
        return [record.as_dict() for record in found]

    def metrics(self, accept: str) -> tuple[bytes, str]:
        return self.metrics_registry.render(accept)


async def serve(config: Config, path: Path | None = None, *, announce: Any = None) -> None:
    """Runs until SIGTERM or SIGINT. `announce` is called with the bound addresses once both ports answer."""
    app = App(config, path)
    try:
        addresses = await app.start()
        log.info("kvcar %s serves ext_proc on %s, admin on %s", __version__, addresses["ext_proc"], addresses["admin"])
        if announce is not None:
            announce(addresses)
        await app.wait()
    finally:
        await app.stop()


def run(config: Config, path: Path | None = None, *, announce: Any = None) -> None:
    """`serve` in a new event loop."""
    run_in_loop(serve(config, path, announce=announce))


def run_in_loop(main: Coroutine[Any, Any, None]) -> None:
    """In a new event loop, uvloop's where there is one, set up for requests."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)
