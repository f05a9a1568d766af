"""Options of the whole suite."""

from __future__ import annotations

import os

import pytest

from examples.emulator.process import EmulatorProcess
from examples.local.processes import Process
from tests import forked

Process.popen = EmulatorProcess.popen = forked.Popen


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seeds",
        type=int,
        default=int(os.environ.get("KVCAR_SEEDS", "0")),
        help="random traces to run of each kind; 0 = each test's own number",
    )


@pytest.fixture(scope="session")
def seeds(pytestconfig: pytest.Config) -> int:
    return int(pytestconfig.getoption("--seeds"))
