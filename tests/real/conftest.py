"""One set of real processes for all end-to-end tests: starting them costs more than most tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.real.harness import Stack


@pytest.fixture(scope="session")
def whole_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = {"block_size": 16, "prefill_rate": 40_000, "decode_rate": 200, "max_model_len": 32_768}
    config = {
        "limits": {"max_body_bytes": 4 << 20},
        # The drain has to outlast two failed health checks of Envoy, 1 s apart.
        "listen": {"drain_wait_ms": 2500, "drain_grace_ms": 10_000},
        # Tests kill engines and want to see each request's own way; test_fleet_changes.py is about leaving them out.
        "pool": {"liveness": None},
    }
    with Stack(tmp_path_factory.mktemp("stack"), engine_options=options, config=config) as stack:
        yield stack
        # Nobody is connected any more: no need to wait for gateways to notice.
        stack.kvcar.kill()


@pytest.fixture
def stack(whole_stack: Stack) -> Stack:
    """Engines, kvcar and Envoy, all alive; what an earlier test has cached is still there."""
    whole_stack.repair()
    return whole_stack
