"""Where each worker stands: its port, its sockets, its part of the configuration. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from extproc.config import Config, ConfigError

LONGEST_SOCKET_PATH = 100
"""Bytes; the system takes about 108."""


class StartFailed(Exception):
    """A worker could not start at all; it has said why. `status`: its exit status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"a worker ended with status {status} before it was ready")
        self.status = status


@dataclass(frozen=True, slots=True)
class Place:
    """One worker of `count`. `address` is its own ext_proc "ip:port"; `directory` holds the sockets of all."""

    number: int
    count: int
    address: str
    directory: Path

    @property
    def admin_socket(self) -> Path:
        return admin_socket(self.directory, self.number)

    @property
    def others(self) -> list[int]:
        return [number for number in range(self.count) if number != self.number]


def admin_socket(directory: Path, number: int) -> Path:
    return directory / f"admin-{number}.sock"


def load_socket(directory: Path, number: int) -> Path:
    return directory / f"load-{number}.sock"


def addresses(config: Config) -> tuple[str, ...]:
    """The ext_proc address of each worker: `listen.address` and the ports after it (port 0: a free one for each).

    Raises ConfigError for a port beyond 65535, and for one that is the admin port's.
    """
    count = config.listen.workers
    host, _, first = config.listen.address.rpartition(":")
    admin_host, _, admin_port = config.admin.address.rpartition(":")
    port = int(first)
    if not port or count == 1:
        return (config.listen.address,) * count
    last = port + count - 1
    if last > 65_535:
        raise ConfigError(f"listen.workers: {count} workers need the ports {port} to {last}: there is none over 65535")
    everywhere = {"0.0.0.0", "[::]"}
    if port <= int(admin_port) <= last and (host == admin_host or everywhere & {host, admin_host}):
        raise ConfigError(
            f"listen.workers: {count} workers take the ports {port} to {last}, and admin.address is "
            f"{config.admin.address}: give admin.address another port"
        )
    return tuple(f"{host}:{port + number}" for number in range(count))


def share_of(config: Config, place: Place) -> Config:
    """The configuration of one worker: its own port, and a trace file of its own (path.NUMBER)."""
    listen = config.listen.model_copy(update={"address": place.address})
    trace = config.trace
    if trace is not None:
        trace = trace.model_copy(update={"path": f"{trace.path}.{place.number}"})
    return config.model_copy(update={"listen": listen, "trace": trace})
