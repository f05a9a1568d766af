"""An emulated engine as a child process, for tests and the demo.

    with EmulatorProcess(name="a", block_size=16, blocks=512) as engine:
        requests go to engine.url; events come from engine.events_endpoint

The child prints its ports as one JSON line when it is ready. It stops when the context ends, and also by itself when
the parent dies: it watches its standard input, whose other end only the parent holds.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, ClassVar, Self

ROOT = Path(__file__).parents[2]
READY_TIMEOUT = 30.0
STOP_TIMEOUT = 5.0


class StartFailed(RuntimeError):
    """The child ended or did not get ready in time; the message holds the end of its standard error."""


class EmulatorProcess:
    """One child. Keyword options are flags of `python -m examples.emulator`: `block_size=16` is `--block-size 16`,
    `no_replay=True` is `--no-replay`, a list repeats its flag, None and False are left out.

    Ports are chosen by the child at the first start and kept over `restart`.
    """

    popen: ClassVar[Any] = subprocess.Popen  # tests put a quicker start here

    def __init__(
        self,
        *,
        name: str = "engine",
        arguments: Sequence[str] = (),
        ready_timeout: float = READY_TIMEOUT,
        **options: object,
    ) -> None:
        self.name = name
        self.ready: dict[str, Any] = {}
        self._arguments = list(arguments)
        self._options = options
        self._ready_timeout = ready_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self, *, wait: bool = True) -> Self:
        """Start the child; with `wait` until it is ready. Raises StartFailed."""
        if self._process is not None:
            raise RuntimeError(f"{self.name} is running")
        command = [sys.executable, "-m", "examples.emulator", "--exit-with-stdin", "--name", self.name]
        command += [*_flags({**self._options, **self._kept_ports()}), *self._arguments]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._process = self.popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=ROOT,
            start_new_session=True,
        )
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self) -> Self:
        """Until the child has told its ports. Raises StartFailed, and leaves no child then."""
        process = self._process
        if process is None or process.stdout is None:
            raise RuntimeError(f"{self.name} was not started")
        deadline = time.monotonic() + self._ready_timeout
        line = b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                self._fail("was not ready in time")
            part = os.read(process.stdout.fileno(), 65536)
            if not part:
                process.wait(STOP_TIMEOUT)
                self._fail(f"ended with status {process.returncode}")
            line += part
        self.ready = json.loads(line)
        return self

    def stop(self) -> None:
        """Ask the child to end, then make it. Nothing happens if it has ended."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL: sockets just close."""
        self._end(signal.SIGKILL)

    def restart(self) -> Self:
        """End the child if it runs and start a new one, empty, on the same ports."""
        self.stop()
        return self.start()

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, nothing answers."""
        self._signal(signal.SIGSTOP)

    def cont(self) -> None:
        """SIGCONT after `freeze`."""
        self._signal(signal.SIGCONT)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError(f"{self.name} is not running")
        return self._process.pid

    def __enter__(self) -> Self:
        return self if self._process is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- where it is --------------------------------------------------------------------------------------------

    @property
    def http_port(self) -> int:
        return int(self.ready["http_port"])

    @property
    def address(self) -> str:
        """ip:port, as a router names the instance."""
        return f"{self.ready['host']}:{self.http_port}"

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    @property
    def events_endpoint(self) -> str:
        return str(self.ready["events_endpoint"])

    @property
    def replay_endpoint(self) -> str | None:
        endpoint = self.ready["replay_endpoint"]
        return None if endpoint is None else str(endpoint)

    @property
    def block_size(self) -> int:
        return int(self.ready["block_size"])

    # -- talking to it ------------------------------------------------------------------------------------------

    def call(self, path: str, body: object = None, *, timeout: float = 30.0) -> Any:
        """GET, or POST when there is a body; the answer's JSON. Raises urllib.error.HTTPError and OSError."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text = answer.read()
        return json.loads(text) if text[:1] in (b"{", b"[") else text.decode()

    def control(self, **changes: int | bool) -> dict[str, Any]:
        """Set misbehaviour switches (faults.py); returns all of them."""
        result: dict[str, Any] = self.call("/emulator/control", changes)
        return result

    def state(self) -> dict[str, Any]:
        """What is resident, queued and buffered: the truth that a router's view is compared with."""
        result: dict[str, Any] = self.call("/emulator/state")
        return result

    def lookup(self, token_ids: Sequence[int], *, cache_salt: str | None = None, lora: str | None = None) -> list[Any]:
        """Per rank: what a prompt of these ids would hit now."""
        body = {"token_ids": list(token_ids), "cache_salt": cache_salt, "lora": lora}
        rows: list[Any] = self.call("/emulator/lookup", body)["ranks"]
        return rows

    def errors(self) -> str:
        """The end of the child's standard error."""
        if self._errors is None:
            return ""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 4000))
        return self._errors.read().decode(errors="replace")

    # -- parts --------------------------------------------------------------------------------------------------

    def _kept_ports(self) -> dict[str, object]:
        if not self.ready:
            return {}
        ports: dict[str, object] = {"port": self.ready["http_port"], "events_port": self.ready["events_ports"][0]}
        if self.ready["replay_ports"]:
            ports["replay_port"] = self.ready["replay_ports"][0]
        return ports

    def _signal(self, number: signal.Signals) -> None:
        if self.running:
            os.kill(self.pid, number)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)
            try:
                process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pipe in (process.stdin, process.stdout, self._errors):
            if pipe is not None:
                pipe.close()
        self._errors = None

    def _fail(self, what: str) -> None:
        message = f"emulator {self.name} {what}: {self.errors().strip()}"
        self.kill()
        raise StartFailed(message)


def _flags(options: dict[str, object]) -> list[str]:
    words: list[str] = []
    for key, value in options.items():
        flag = "--" + key.replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            words.append(flag)
        elif isinstance(value, list | tuple):
            words += [word for item in value for word in (flag, str(item))]
        else:
            words += [flag, str(value)]
    return words


def start_all(engines: Sequence[EmulatorProcess]) -> None:
    """Start several children side by side. Raises StartFailed, with all of them stopped."""
    try:
        for engine in engines:
            engine.start(wait=False)
        for engine in engines:
            engine.wait_ready()
    except BaseException:
        for engine in engines:
            engine.kill()
        raise
