"""Starts `python -m MODULE` for tests as a fork of one process that has imported everything already.

kvcar's imports (transformers, grpc, pydantic) are 3 s of CPU, an emulator's 1 s; the suite starts some two hundred. The
child has its own pid, session, descriptors, environment and folder, and runs MODULE's `__main__` from its first line;
only what was imported stays imported. KVCAR_TESTS_EXEC=1 starts everything by exec; other commands always are.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from pathlib import Path
from typing import IO, Any

PRELOADED = "tests.preloaded"
MODULES = frozenset(("extproc", "examples.emulator"))

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([PRELOADED])


class _Descriptor:
    """A file descriptor that travels with the start of a process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __getstate__(self) -> Any:
        return reduction.DupFd(self.number)

    def __setstate__(self, state: Any) -> None:
        self.number = state.detach()


def _run(
    module: str, arguments: list[str], cwd: str, env: dict[str, str], files: list[_Descriptor], new_session: bool
) -> None:
    for target, file in enumerate(files):
        os.dup2(file.number, target)
        os.close(file.number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - multiprocessing has put /dev/null there
    if new_session:
        os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class Popen:
    """The part of subprocess.Popen that the tests' processes need."""

    def __new__(cls, command: Sequence[str], **options: Any) -> Any:
        forks = list(command[:2]) == [sys.executable, "-m"] and command[2] in MODULES
        if not forks or os.environ.get("KVCAR_TESTS_EXEC"):
            return subprocess.Popen(command, **options)
        return super().__new__(cls)

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int | IO[bytes],
        stdout: int | IO[bytes],
        stderr: int | IO[bytes],
        cwd: Path | str,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
    ) -> None:
        with contextlib.ExitStack() as stack:

            def given(file: int | IO[bytes], *, reads: bool) -> tuple[_Descriptor, IO[bytes] | None]:
                if file == subprocess.DEVNULL:
                    number, ours = os.open(os.devnull, os.O_RDWR), None
                elif file == subprocess.PIPE:
                    ends = os.pipe()
                    number, ours = (
                        ends[0 if reads else 1],
                        os.fdopen(ends[1 if reads else 0], "wb" if reads else "rb", 0),
                    )
                else:
                    return _Descriptor(file if isinstance(file, int) else file.fileno()), None
                stack.callback(os.close, number)
                return _Descriptor(number), ours

            child_in, self.stdin = given(stdin, reads=True)
            child_out, self.stdout = given(stdout, reads=False)
            child_err, self.stderr = given(stderr, reads=False)
            self._process = _context.Process(
                target=_run,
                args=(
                    command[2],
                    list(command[3:]),
                    str(cwd),
                    dict(os.environ if env is None else env),
                    [child_in, child_out, child_err],
                    start_new_session,
                ),
                daemon=True,
            )
            self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
