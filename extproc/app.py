"""Builds a running kvcar out of a configuration and takes it down again. The only place where everything meets."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from extproc import __version__
from extproc.admin.query import Queries
from extproc.admin.server import AdminServer, make_app
from extproc.config import Config, ConfigError, pair_headers, profile_of
from extproc.config import Pool as PoolConfig
from extproc.decider import PoolDecider
from extproc.decisions import DecisionLog
from extproc.instances import instance_of
from extproc.loads.base import LoadSource
from extproc.loads.heartbeat import Heartbeats
from extproc.loads.prometheus import PrometheusPoller, Target
from extproc.metrics import Metrics
from extproc.observe import add_families, stream_dict
from extproc.openai import PATHS, Routes
from extproc.pool import Pool
from extproc.prompt.prompter import Options as PrompterOptions
from extproc.prompt.prompter import Prompter
from extproc.prompt.remote import RemoteTokenizer
from extproc.reasons import Reason
from extproc.router import Router
from extproc.scorers import build as build_scorer
from extproc.scorers import with_sessions
from extproc.server import ExtProcServer, LoggingObserver, ServerError, ServerOptions, TlsOptions
from extproc.session_rules import SessionOptions
from extproc.shedding import Shedding
from extproc.speculative import Approximate, Speculation
from extproc.trace_log import TraceLog
from extproc.watch import watch
from kvindex.directory import Directory
from kvindex.errors import ConfigurationError
from kvindex.fleet import Fleet, FleetChange, Instance, check_instances
from kvindex.options import TransportOptions, from_environment
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

    def __init__(self, config: Config) -> None:
        self.config = config
        self.started = time.time()
        self.metrics_registry = Metrics(__version__)
        self.decision_log = DecisionLog()
        self.fleet = Fleet()
        events = config.events
        options, limits = from_environment(
            TransportOptions(
                max_replays=events.max_replays,
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
        self.transport = EventTransport(options)
        self._remotes: list[RemoteTokenizer] = []
        self.pools = [self._pool(pool, limits) for pool in config.pools]
        for instance in instances_of(config):
            self.fleet.upsert(instance)
        trace = config.trace
        self._trace = TraceLog(Path(trace.path), max_bytes=trace.max_bytes) if trace else None
        self.decider = PoolDecider(
            self.pools,
            self.metrics_registry,
            self.decision_log,
            names=config.headers,
            routes=Routes(config.paths.bases, config.paths.rewrites),
            session_headers={pool.name: pool.sessions.header for pool in config.pools if pool.sessions},
            max_body_bytes=config.limits.max_body_bytes,
            trace=self._trace,
        )
        self._server: ExtProcServer | None = None
        self._admin: AdminServer | None = None
        self._stop = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._serving = False
        add_families(self.metrics_registry, self.pools)

    # -- life

    async def start(self) -> dict[str, Any]:
        """Binds both ports and follows the engines. Returns {"ext_proc": "ip:port", "admin": "ip:port"}.

        Raises OSError that names the address which cannot be bound.
        """
        config = self.config
        self.transport.start()
        self.fleet.listen(self._poll_loads)
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
            ),
            SessionOptions(
                destination_header=headers.destination,
                strip_headers=tuple(dict.fromkeys((headers.rank, headers.prefill, *pair_headers(config)))),
                paths=tuple(dict.fromkeys((*PATHS, *config.paths.rewrites))),
                prefixes=config.paths.bases,
                max_body_bytes=limits.max_body_bytes,
                observe_usage=config.listen.observe_usage,
            ),
            observer=_Watch(self.decider, self.metrics_registry),
        )
        host, _, port = config.admin.address.rpartition(":")
        queries = Queries(
            self.pools,
            ready=lambda: self.readiness()[0],
            form=config.admin.conductor_form,
            max_body_bytes=limits.max_body_bytes,
        )
        admin = make_app(self, token=config.admin.token, more=queries.routes())
        self._admin = AdminServer(admin, host.strip("[]"), int(port))
        try:
            admin_port = await self._admin.start()
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise ConfigError(f"admin.address: cannot listen on {config.admin.address}: {reason}") from None
        try:
            ext_proc_port = await self._server.start()
        except ServerError as error:
            raise ConfigError(f"listen: {error}") from None
        self._watch = asyncio.create_task(watch(self.pools))
        # What exists by now lives as long as the process: full collections need not look at it again.
        gc.collect()
        gc.freeze()
        self._serving = True
        return {
            "ext_proc": f"{config.listen.address.rpartition(':')[0]}:{ext_proc_port}",
            "admin": f"{host}:{admin_port}",
        }

    def _poll_loads(self, _change: FleetChange) -> None:
        """Each pool that scrapes polls the instances that the fleet has now."""
        for pool, given in zip(self.pools, self.config.pools, strict=True):
            if isinstance(pool.loads, PrometheusPoller):
                pool.loads.update(
                    Target(one.name, one.metrics or f"http://{one.address}{given.load.path}")
                    for one in pool.instances
                )

    def request_stop(self) -> None:
        self._stop.set()

    async def wait(self) -> None:
        """Until `request_stop` or a signal."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request_stop)
        await self._stop.wait()

    async def stop(self) -> None:
        """Drain: health says NOT_SERVING, running exchanges finish within the grace, then everything closes."""
        self._serving = False
        if self._watch is not None:
            self._watch.cancel()
        if self._server is not None and self._server.port:
            log.info("draining: %d requests in flight", sum(pool.inflight.total() for pool in self.pools))
            await self._server.drain()
            await self._server.stop()
        for pool in self.pools:
            if isinstance(pool.loads, PrometheusPoller):
                await pool.loads.close()
        if self._trace is not None:
            await asyncio.to_thread(self._trace.close)
        for remote in self._remotes:
            await remote.close()
        if self._admin is not None:
            await self._admin.stop()
        await asyncio.to_thread(self.transport.stop)

    # -- what the admin port shows (extproc.admin.server.Source)

    def readiness(self) -> tuple[bool, Mapping[str, Any]]:
        detail = {
            pool.name: {
                "tokenizer": pool.tokenizer_loaded,
                "streams": len(reports := pool.directory.status()),
                "synchronized": sum(report.synchronized for report in reports),
            }
            for pool in self.pools
        }
        return self._serving and self.transport.alive, {"pools": detail}

    def status(self) -> Mapping[str, Any]:
        return {
            "version": __version__,
            "uptime_seconds": round(time.time() - self.started, 1),
            "serving": self._serving,
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
            "streams": [stream_dict(report) for report in pool.directory.status()],
        }

    def streams(self) -> list[Mapping[str, Any]]:
        return [{"pool": pool.name, **stream_dict(report)} for pool in self.pools for report in pool.directory.status()]

    def decisions(
        self, limit: int, pool: str | None, reason: str | None, request_id: str | None
    ) -> list[Mapping[str, Any]]:
        found = self.decision_log.latest(limit, pool=pool, reason=reason, request_id=request_id)
        return [record.as_dict() for record in found]

    def metrics(self, accept: str) -> tuple[bytes, str]:
        return self.metrics_registry.render(accept)


async def serve(config: Config, *, announce: Any = None) -> None:
    """Runs until SIGTERM or SIGINT. `announce` is called with the bound addresses once both ports answer."""
    app = App(config)
    try:
        addresses = await app.start()
        log.info("kvcar %s serves ext_proc on %s, admin on %s", __version__, addresses["ext_proc"], addresses["admin"])
        if announce is not None:
            announce(addresses)
        await app.wait()
    finally:
        await app.stop()


def run(config: Config, *, announce: Any = None) -> None:
    """`serve` in a new event loop, uvloop's where there is one."""
    # Threads that hold the interpreter for its default 5 ms would show in every request's p99.
    sys.setswitchinterval(0.0005)
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(config, announce=announce))
    else:
        uvloop.run(serve(config, announce=announce))
