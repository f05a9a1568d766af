"""`make demo`: it agrees with its engines, stays up when asked, and leaves no process behind however it is ended."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.harness import Process, http_get, wait_for

pytestmark = pytest.mark.real


class Demo(Process):
    """The demo as a child; its own children carry the same mark in their environment."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.mark = f"KVCAR_TEST_MARK={uuid.uuid4()}"
        name, _, value = self.mark.partition("=")
        command = [sys.executable, "-m", "examples.local.demo", *arguments]
        super().__init__("demo", command, folder, env={name: value, "TMPDIR": str(folder), "COLUMNS": "120"})

    def marked(self) -> list[int]:
        """Process ids of the demo and everything it started."""
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdigit():
                try:
                    environment = (path / "environ").read_bytes()
                except OSError:
                    continue
                if self.mark.encode() in environment.split(b"\0"):
                    found.append(int(path.name))
        return found

    def output(self) -> str:
        return self.out_path.read_text(encoding="utf-8")

    def stop(self, *, timeout: float = 30.0) -> None:
        super().stop(timeout=timeout)
        for pid in self.marked():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(params=[()])
def demo(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Demo]:
    if not Path("/proc/self/environ").exists():
        pytest.skip("needs /proc to look for processes left behind")
    with Demo(tmp_path, *request.param) as demo:
        yield demo


SMALL = ("--applications", "2", "--conversations", "2", "--turns", "2")


@pytest.mark.parametrize("demo", [("--stay", *SMALL)], indirect=True)
def test_stays_up_and_ends_with_control_c(demo: Demo) -> None:
    demo._wait_for(lambda: "tail -f" in demo.output(), "the commands to try", timeout=90)
    text = demo.output()
    assert text.count("DIFFERS") == 0
    assert re.search(r"prediction = engine's own count\s*│\s*8/8 \(100%\)\s*│\s*8/8 \(100%\)", text)
    assert {name: len(re.findall(rf"^[AB]\d +\d  {name}", text, re.M)) for name in ("stream", "json")} == {
        "stream": 12,
        "json": 4,
    }
    # The first printed command, run as printed, is a chat that kvcar decides.
    command = shlex.split(next(line for line in text.splitlines() if "curl" in line))
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["message"]["content"]
    decisions = next(shlex.split(line)[-1] for line in text.splitlines() if "/decisions" in line)
    last = json.loads(http_get(decisions)[1])["decisions"][0]
    assert last["decision"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert len(demo.marked()) == 1 + 3 + 2

    demo.signal(signal.SIGINT)
    assert demo.wait(timeout=30) == 0
    assert demo.marked() == []
    assert "nothing is left running" in demo.output()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_starting(demo: Demo, number: int) -> None:
    wait_for(lambda: len(demo.marked()) > 2, "its first children", timeout=60)
    demo.signal(number)
    assert demo.wait(timeout=30) == 130
    assert demo.marked() == []
