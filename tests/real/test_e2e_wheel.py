"""The wheel, away from the source: it installs, says what it can do, and serves."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from tests.real.harness import TOKENIZER, KvcarProcess, free_port, http_get

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]


def run(command: Sequence[str | Path], cwd: Path) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel in it; the dependencies are those of the running interpreter, by a path entry
    that comes after the environment's own packages. The source tree is not on the path."""
    folder = tmp_path_factory.mktemp("wheel")
    # From a copy: a build leaves its own files beside the source.
    source = folder / "source"
    source.mkdir()
    for name in ("extproc", "kvindex"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    run([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source], folder)
    run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], folder)
    (wheel,) = folder.glob("kvcar-*.whl")
    python = folder / "venv/bin/python"
    run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], folder)
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "venv"


def test_help_and_files(venv: Path, tmp_path: Path) -> None:
    assert "serve" in run([venv / "bin/kvcar", "--help"], tmp_path)
    where = run(
        [venv / "bin/python", "-c", "import extproc, kvindex; print(extproc.__file__, kvindex.__file__)"], tmp_path
    )
    assert all(path.startswith(str(venv)) for path in where.split())
    example = run([venv / "bin/kvcar", "example-config"], tmp_path)
    assert yaml.safe_load(example)["pools"]


def test_serves(venv: Path, tmp_path: Path) -> None:
    port = free_port()
    config = {
        "listen": {"address": "127.0.0.1:0", "drain_wait_ms": 0},
        "admin": {"address": "127.0.0.1:0"},
        "pools": [
            {
                "name": "p",
                "models": ["m"],
                "tokenizer": str(TOKENIZER),
                "instances": [{"name": "e", "address": f"127.0.0.1:{port}"}],
            }
        ],
    }
    kvcar = KvcarProcess(config, tmp_path)
    kvcar.command[0:3] = [str(venv / "bin/kvcar")]
    kvcar.cwd = tmp_path
    with kvcar:
        kvcar.wait_ready()
        status, body = http_get(f"http://{kvcar.admin}/status")
        assert status == 200
        assert b'"tokenizer_loaded":true' in body
    assert kvcar.wait(timeout=1) == 0
