"""Engines, kvcar and Envoy, wired together on free ports: what the demo shows and what the real-peer tests drive.

    with Stack(folder) as stack:
        requests go to stack.url

Everything is stopped when the context ends, however it ends. After a failure to start, the message holds the end of the
log of the process that failed; all logs stay in `folder`.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from examples.emulator.process import EmulatorProcess
from examples.local.processes import EnvoyProcess, KvcarProcess, NotReady, free_ports, unbroken, wait_for
from extproc.envoy_config import EnvoyOptions

HERE = Path(__file__).parent
TOKENIZER = HERE / "tokenizer"


def kvcar_config(
    engines: Sequence[EmulatorProcess],
    *,
    ext_proc: str,
    admin: str = "127.0.0.1:0",
    scorer: Mapping[str, Any] | str = "car",
    listen: Mapping[str, Any] = MappingProxyType({}),
    pool: Mapping[str, Any] = MappingProxyType({}),
    instance: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    **changes: Any,
) -> dict[str, Any]:
    """kvcar's configuration for these engines, as plain data. `listen` and `pool` add to their parts, `instance` (by
    engine name) to the engines' entries; `changes` replace top-level keys."""
    instances = [
        {
            "name": engine.name,
            "address": engine.address,
            "events": engine.events_endpoint,
            **({"replay": engine.replay_endpoint} if engine.replay_endpoint else {}),
            **instance.get(engine.name, {}),
        }
        for engine in engines
    ]
    whole = {
        "name": "demo",
        "models": ["demo"],
        "tokenizer": str(TOKENIZER),
        "block_size": engines[0].block_size,
        "dialect": "vllm",
        "scorer": scorer,
        "instances": instances,
        **pool,
    }
    return {
        # Envoy is stopped first, so nobody needs the time to notice that kvcar is going.
        "listen": {"address": ext_proc, "drain_wait_ms": 0, **listen},
        "admin": {"address": admin},
        "pools": [whole],
        **changes,
    }


class Stack:
    """Three emulated engines (or `engines`), kvcar and Envoy.

    engine_options   flags of the emulator, for all engines
    scorer           name, or mapping with parameters, as in kvcar's configuration
    config           replaces top-level keys of kvcar's configuration; "listen", "pool" and "instance" as kvcar_config's
    envoy            replaces fields of EnvoyOptions
    replicas         how many kvcar there are; `kvcar` is the first
    share            they ask each other for views
    workers          processes of each kvcar
    """

    def __init__(
        self,
        folder: Path,
        *,
        engines: int = 3,
        engine_options: Mapping[str, object] | None = None,
        scorer: Mapping[str, Any] | str = "car",
        config: Mapping[str, Any] | None = None,
        envoy: Mapping[str, Any] | None = None,
        replicas: int = 1,
        share: bool = False,
        workers: int = 1,
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = dict(engine_options or {})
        self.engines = [EmulatorProcess(name=f"engine-{number}", **options) for number in range(engines)]
        self._scorer = scorer
        self._config = dict(config or {})
        self._envoy = dict(envoy or {})
        self._count, self._share, self._workers = replicas, share, workers
        self.kvcar: KvcarProcess
        self.replicas: list[KvcarProcess] = []
        self.envoy: EnvoyProcess

    def start(self) -> None:
        """Until requests are routed by what the engines hold. Raises NotReady or StartFailed."""
        self._start_engines(self.engines)
        # Envoy is told kvcar's port before kvcar has bound it, and finds it there again after a restart of kvcar.
        firsts = [free_ports(self._workers + 1) for _ in range(self._count)]
        ports = [f"127.0.0.1:{first}" for first in firsts]
        admins = [f"127.0.0.1:{first + self._workers}" for first in firsts]  # the system may name one port twice
        for number, (ext_proc, admin) in enumerate(zip(ports, admins, strict=True)):
            config = kvcar_config(self.engines, ext_proc=ext_proc, admin=admin, scorer=self._scorer, **self._config)
            if self._workers > 1:
                config["listen"]["workers"] = self._workers
            if self._share:
                config["replicas"] = {"peers": [f"http://{other}" for other in admins if other != admin]}
            self.replicas.append(KvcarProcess(config, self.folder, name="kvcar" if not number else f"kvcar-{number}"))
        self.kvcar = self.replicas[0]
        for replica in self.replicas:
            replica.start()
        values: dict[str, Any] = {
            "engines": tuple(engine.address for engine in self.engines),
            "ext_proc": tuple(f"127.0.0.1:{port}" for first in firsts for port in range(first, first + self._workers)),
            "listen": "127.0.0.1:0",
            "admin": "127.0.0.1:0",
            "access_log": str(self.folder / "access.log"),
        }
        self.envoy = EnvoyProcess(EnvoyOptions(**(values | self._envoy)), self.folder)
        self.envoy.start()
        for replica in self.replicas:
            replica.wait_ready()
        self.envoy.wait_ready()
        self.envoy.wait_healthy("engines", len(self.engines))
        self.envoy.wait_healthy("extproc", self._count * self._workers)
        self.settle()

    def _start_engines(self, engines: Sequence[EmulatorProcess]) -> None:
        with unbroken():
            for engine in engines:
                engine.start(wait=False)
        for engine in engines:
            engine.wait_ready()

    def repair(self) -> None:
        """Starts what has died. Raises NotReady or StartFailed."""
        dead = [engine for engine in self.engines if not engine.running]
        for engine in dead:
            engine.stop()
        self._start_engines(dead)
        for replica in self.replicas:
            if not replica.running:
                replica.start()
                replica.wait_ready()
        self.wait_routing()

    def wait_routing(self) -> None:
        """Until Envoy asks a kvcar that was started again, and kvcar follows every engine's events.

        Envoy may still believe what it knew before, as a quick restart can come between two health checks. So each
        member has to pass one more.
        """
        members = self._count * self._workers
        self.envoy.wait_checked("extproc", members)
        self.envoy.wait_healthy("extproc", members)
        self.settle()

    def settle(self, engines: Sequence[EmulatorProcess] | None = None) -> None:
        """Until kvcar has applied everything that the (running) engines have published. Raises NotReady."""
        roles = self._config.get("instance", {})
        chosen = [
            engine
            for engine in (self.engines if engines is None else engines)
            # kvcar does not follow decode instances: what they hold is no reusable prefix
            if engine.running and roles.get(engine.name, {}).get("role") != "decode"
        ]
        published = _published(chosen)

        def applied() -> bool:
            for replica in self.replicas:
                seen = {(row["instance"], row["dp_rank"]): row for row in replica.get("/streams")["streams"]}
                # A view beyond what the engine has published by now is that of the process before a restart.
                now = _published(chosen)
                if not all(_applied(seen.get(key), least, now[key]) for key, least in published.items()):
                    return False
            return True

        wait_for(applied, f"kvcar's view at {published}", timeout=10.0, fail=self._check_kvcar)

    def _check_kvcar(self) -> None:
        for replica in self.replicas:
            if not replica.running:
                raise NotReady(f"{replica.name} ended with status {replica.wait(timeout=1)}\n{replica.log()}")

    def stop(self) -> None:
        """Ends every process; all are told first, so that it takes as long as the slowest."""
        processes = [getattr(self, "envoy", None), *self.replicas, *self.engines]
        with contextlib.ExitStack() as stack:
            for process in processes:
                if process is not None:
                    stack.callback(process.stop)
                    if process.running:
                        os.kill(process.pid, signal.SIGTERM)

    @property
    def url(self) -> str:
        return f"http://{self.envoy.address}"

    def name_of(self, address: str) -> str:
        """The engine's name at "ip:port", the address itself when nobody is there."""
        return next((engine.name for engine in self.engines if engine.address == address), address)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _published(engines: Sequence[EmulatorProcess]) -> dict[tuple[str, int], int]:
    """Last published sequence by (engine, rank), -1 = none yet."""
    return {
        (engine.name, row["rank"]): row["next_sequence"] - 1
        for engine in engines
        for row in engine.call("/emulator/state?blocks=0")["ranks"]
    }


def _applied(stream: Mapping[str, Any] | None, least: int, most: int) -> bool:
    if stream is None or not stream["connected"]:
        return False
    # A stream that has nothing to show yet is not synchronized, and need not be.
    if stream["sequence"] is None:
        return least < 0
    return bool(stream["synchronized"]) and least <= stream["sequence"] <= most
