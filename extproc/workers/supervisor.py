"""Keeps N workers running and answers for them. The parent process: it serves no request itself.

    starting --its first line: the ports--> running --ends--> waiting --a pause--> starting
       |         FIRST_PAUSE, doubled up to LONGEST_PAUSE; from the start after SETTLED seconds up
       +-- ends before any start succeeded: the whole command fails with its exit status

SIGHUP    all workers read the configuration again
SIGTERM   one after the other drains: the next begins when gateways have noticed the one before
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from extproc.admin.server import AdminServer, tls_context
from extproc.config import Config, ConfigError
from extproc.workers.front import Front
from extproc.workers.place import LONGEST_SOCKET_PATH, StartFailed, addresses, admin_socket

log = logging.getLogger(__name__)

FIRST_PAUSE = 0.25
LONGEST_PAUSE = 30.0
SETTLED = 30.0
KILL_AFTER = 15.0
"""Seconds beyond the drain and its grace after which a worker that has not ended is killed."""


class Worker:
    """One place and the process in it."""

    def __init__(self, number: int, address: str) -> None:
        self.number = number
        self.address = address
        self.state = "starting"
        self.began = 0.0
        self.restarts = 0
        self.exit_status: int | None = None
        self.process: asyncio.subprocess.Process | None = None
        self.session: aiohttp.ClientSession | None = None
        self.running = asyncio.Event()

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    def row(self) -> dict[str, Any]:
        process = self.process
        return {
            "worker": self.number,
            "ext_proc": self.address,
            "pid": process.pid if process is not None and process.returncode is None else None,
            "state": self.state,
            "restarts": self.restarts,
            "last_exit_status": self.exit_status,
        }


class Supervisor:
    """`run` until SIGTERM or SIGINT. Implements the front's `Crew`.

    command  what a worker is started with; its place follows as options
    """

    def __init__(
        self, config: Config, path: Path, command: tuple[str, ...] = (sys.executable, "-m", "extproc.workers")
    ) -> None:
        self._config = config
        self._path = path
        self._command = command
        self._stopping = asyncio.Event()
        self.workers = [Worker(number, address) for number, address in enumerate(addresses(config))]
        self.directory = Path(tempfile.mkdtemp(prefix="kvcar-"))  # mode 700: nobody else may ask the sockets
        self.front = Front(self, token=config.admin.token)

    # -- Crew

    @property
    def total(self) -> int:
        return len(self.workers)

    def sessions(self) -> Mapping[int, aiohttp.ClientSession]:
        """Those that run longest first: they know most."""
        running = [one for one in self.workers if one.state == "running"]
        running.sort(key=lambda one: one.began)
        return {one.number: one.session for one in running if one.session is not None}

    def rows(self) -> list[dict[str, Any]]:
        return [one.row() for one in self.workers]

    # -- life

    async def run(self, announce: Callable[[dict[str, Any]], None]) -> None:
        """Raises ConfigError (ports), StartFailed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request_stop)
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        keepers: list[asyncio.Task[None]] = []
        watching = asyncio.create_task(self.front.watch_start())
        admin = self._admin()
        try:
            for worker in self.workers:
                _check_free(worker.address)
            port = await self._bind(admin)
            for worker in self.workers:
                path = str(admin_socket(self.directory, worker.number))
                worker.session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(path), auto_decompress=False)
            keepers = [asyncio.create_task(self._keep(worker)) for worker in self.workers]
            started = asyncio.create_task(self._started())
            stopping = asyncio.create_task(self._stopped())
            await asyncio.wait({started, stopping, *keepers}, return_when=asyncio.FIRST_COMPLETED)
            for keeper in keepers:
                if keeper.done():
                    keeper.result()
            if started.done():
                log.info("%d workers serve ext_proc on %s", self.total, ", ".join(one.address for one in self.workers))
                host = self._config.admin.address.rpartition(":")[0]
                announce(
                    {
                        "ext_proc": self.workers[0].address,
                        "workers": [one.address for one in self.workers],
                        "admin": f"{host}:{port}",
                    }
                )
            started.cancel()
            await stopping
        finally:
            self._stopping.set()
            watching.cancel()
            await self._drain()
            await asyncio.gather(*keepers, return_exceptions=True)
            await admin.stop()
            for worker in self.workers:
                if worker.session is not None:
                    await worker.session.close()
            shutil.rmtree(self.directory, ignore_errors=True)

    async def _stopped(self) -> None:
        await self._stopping.wait()

    async def _started(self) -> None:
        for worker in self.workers:
            await worker.running.wait()

    def request_stop(self) -> None:
        self._stopping.set()

    def _admin(self) -> AdminServer:
        given = self._config.admin
        host, _, port = given.address.rpartition(":")
        try:
            files = given.tls
            context = tls_context(files.cert, files.key, files.client_ca) if files else None
        except OSError as error:
            raise ConfigError(f"admin.tls: the files cannot be used: {error}") from None
        return AdminServer(self.front.app(), host.strip("[]"), int(port), tls=context)

    async def _bind(self, admin: AdminServer) -> int:
        longest = len(os.fsencode(admin_socket(self.directory, self.total)))
        if longest > LONGEST_SOCKET_PATH:
            raise ConfigError(f"{self.directory}: too long for sockets: set TMPDIR to a shorter directory")
        address = self._config.admin.address
        try:
            return await admin.start()
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise ConfigError(f"admin.address: cannot listen on {address}: {reason}") from None

    def _hang_up(self) -> None:
        for worker in self.workers:
            worker.signal(signal.SIGHUP)

    async def _keep(self, worker: Worker) -> None:
        """Starts it, again and again, until we stop. Raises StartFailed when the first start fails."""
        pause = FIRST_PAUSE
        while not self._stopping.is_set():
            worker.began = time.monotonic()
            try:
                status = await self._live(worker)
            except Exception:
                log.exception("worker %d could not be started", worker.number)
                status = 1
            worker.exit_status = status
            self.front.pages.end(worker.number)
            if self._stopping.is_set():
                worker.state = "stopped"
                return
            if not worker.running.is_set():
                raise StartFailed(status)
            pause = FIRST_PAUSE if time.monotonic() - worker.began > SETTLED else pause
            worker.state = "waiting"
            log.error("worker %d ended with status %d, starts again in %.2f s", worker.number, status, pause)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
            pause = min(LONGEST_PAUSE, 2 * pause)
            worker.restarts += not self._stopping.is_set()

    async def _live(self, worker: Worker) -> int:
        """One process from start to end; its exit status (below 0: the signal that killed it)."""
        worker.state = "starting"
        worker.process = process = await asyncio.create_subprocess_exec(
            *self._command, "--config", str(self._path), "--number", str(worker.number),
            "--count", str(self.total), "--address", worker.address, "--directory", str(self.directory),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is ours to pass on
        )  # fmt: skip
        if self._stopping.is_set():  # while it was being made: nobody else tells it
            worker.signal(signal.SIGTERM)
        assert process.stdout is not None
        line = await process.stdout.readline()
        if line and not self._stopping.is_set():
            worker.address = json.loads(line)["ext_proc"]
            if worker.session is not None and worker.running.is_set():
                await self.front.replay(worker.session)
            worker.state = "running"
            worker.running.set()
        while await process.stdout.read(1 << 16):
            pass
        return await process.wait()

    async def _drain(self) -> None:
        """One after the other is told to end; all have ended when this returns."""
        listen = self._config.listen
        for worker in self.workers:
            worker.signal(signal.SIGTERM)
            if worker is not self.workers[-1]:
                await self._ended([worker], listen.drain_wait_ms / 1000)
        await self._ended(self.workers, (listen.drain_wait_ms + listen.drain_grace_ms) / 1000 + KILL_AFTER)
        for worker in self.workers:
            worker.signal(signal.SIGKILL)

    @staticmethod
    async def _ended(workers: list[Worker], seconds: float) -> None:
        """Returns when these have, or the time is up."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for worker in workers:
                    if worker.process is not None:
                        await worker.process.wait()


def _check_free(address: str) -> None:
    """Said once and at once, before any worker starts and finds out. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
            probe.listen()  # with SO_REUSEADDR this is what finds another listener
        except OSError as error:
            raise ConfigError(f"listen: cannot listen on {address}: {error.strerror or error}") from None


def run(config: Config, path: Path, announce: Callable[[dict[str, Any]], None]) -> None:
    """Until SIGTERM or SIGINT. Raises ConfigError, StartFailed."""

    async def main() -> None:
        await Supervisor(config, path).run(announce)

    asyncio.run(main())
