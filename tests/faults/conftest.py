"""One set of real processes for most faults, with relays between the engines' events and kvcar."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import Any

import pytest

from extproc.envoy_config import BodyMode, EnvoyOptions
from tests.faults.page import Recorder
from tests.faults.relay import RelayedEngine
from tests.real.harness import EnvoyProcess, Stack, free_port

ENGINE: dict[str, Any] = {
    "block_size": 16, "blocks": 2048, "prefill_rate": 40_000, "decode_rate": 200, "max_model_len": 32_000,
    "max_seqs": 1024,
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "limits": {"max_body_bytes": 32 << 20},
    "listen": {"drain_wait_ms": 2500, "drain_grace_ms": 10_000},
    "pool": {"load": {"source": "prometheus"}},
}


class FaultStack(Stack):
    """A Stack with relayed events and two Envoys: `envoy` with buffered bodies, `duplex` with full-duplex ones."""

    duplex: EnvoyProcess

    def start(self) -> None:
        self.engines = [RelayedEngine(name=engine.name, **ENGINE) for engine in self.engines]
        super().start()
        assert self.envoy.access_log_path is not None
        options = EnvoyOptions(
            engines=tuple(engine.address for engine in self.engines),
            ext_proc=tuple(replica.ext_proc for replica in self.replicas),
            listen="127.0.0.1:0",
            admin="127.0.0.1:0",
            access_log=str(self.folder / "duplex.access.log"),
            body_mode=BodyMode.FULL_DUPLEX,
        )
        self.duplex = EnvoyProcess(options, self.folder, name="duplex")
        self.duplex.start()
        self.duplex.wait_ready()
        self.duplex.wait_healthy("extproc", len(self.replicas))

    def gateway(self, mode: str) -> EnvoyProcess:
        return self.duplex if mode == "full duplex" else self.envoy

    def repair(self) -> None:
        for engine in self.engines:
            engine.cont()
            for relay in getattr(engine, "relays", ()):
                relay.go()
            if engine.running:
                engine.control(hang=False, delay_ms=0, freeze_events=False)
        if not self.envoy.running:
            self.envoy.start()
            self.envoy.wait_ready()
        super().repair()
        for envoy in (self.envoy, self.duplex):
            envoy.wait_healthy("extproc", len(self.replicas))
            envoy.wait_healthy("engines", len(self.engines))

    def stop(self) -> None:
        if hasattr(self, "duplex"):
            self.duplex.stop()
        super().stop()
        for engine in self.engines:
            for relay in getattr(engine, "relays", ()):
                relay.close()


@pytest.fixture(scope="session")
def _whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultStack]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    options = {"listen": f"127.0.0.1:{free_port()}"}
    with FaultStack(tmp_path_factory.mktemp("faults"), config=CONFIG, envoy=options) as stack:
        yield stack
        stack.kvcar.kill()  # nobody is connected any more: no drain
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def stack(_whole: FaultStack) -> FaultStack:
    """Engines, kvcar and both Envoys, all alive."""
    _whole.repair()
    return _whole


@pytest.fixture(scope="session")
def record() -> Recorder:
    return Recorder()
