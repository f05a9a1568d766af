"""The configuration file, read again while the process runs: what may change, and when it has changed."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from extproc.assembly import check_files, instances_of
from extproc.config import Config, ConfigError, Pool, load, pair_headers

log = logging.getLogger(__name__)

FIXED = ("listen", "admin", "startup", "reload", "replicas", "trace", "tracing", "paths", "headers", "limits", "events")
"""Sections that take effect at start only. `pools` and `log.level` apply at once."""

SOURCES = ("instances", "discovery")

Signature = tuple[int, int, int] | None


def read(path: Path) -> Config:
    """The file, checked as at start. Blocking. Raises ConfigError."""
    config = load(path)
    check_files(config, str(path))
    instances_of(config, str(path))
    return config


def applicable(old: Config, new: Config) -> tuple[Config, list[str]]:
    """`new` as far as it can be applied, and the sections that wait for a restart.

    Raises ConfigError where the rest would be wrong without them: headers that tell pairs have to be known to the
    server from the start, else a client's own copies of them would pass.
    """
    waiting = [name for name in FIXED if getattr(old, name) != getattr(new, name)]
    found = new.model_copy(update={name: getattr(old, name) for name in waiting})
    if new.log.format != old.log.format:
        waiting.append("log.format")
        found = found.model_copy(update={"log": new.log.model_copy(update={"format": old.log.format})})
    unknown = set(pair_headers(found)) - {old.headers.rank, old.headers.prefill, *pair_headers(old)}
    if unknown:
        raise ConfigError(f"pools: the pair headers {', '.join(sorted(unknown))} are new: restart kvcar to use them")
    return found, waiting


def replace_instances(old: Pool, new: Pool) -> Pool:
    """The old pool with the new one's instances: equal to the new one when nothing else has changed."""
    return old.model_copy(update={name: getattr(new, name) for name in SOURCES})


def signature(path: Path) -> Signature:
    """Changes when the file is written, replaced by a rename, or a link on the way to it is (as Kubernetes does it)."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class FileWatch:
    """Tells when a file has changed and then rested for one interval, so that half-written ones are not read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = self._seen = signature(path)
        self.gone = False

    def changed(self) -> bool:
        """To be called once an interval. A file that is not there is no change."""
        now = signature(self._path)
        settled, self._seen = now == self._seen, now
        if now is None or not settled or now == self._read:
            return False
        self._read = now
        return True

    async def wait(self, interval: float) -> None:
        """Returns when there is something to read."""
        while not self.changed():
            gone = self._seen is None
            if gone != self.gone:
                self.gone = gone
                log.log(
                    logging.WARNING if gone else logging.INFO, "%s %s", self._path,
                    "is not there any more: the configuration read before stays" if gone else "is there again",
                )  # fmt: skip
            await asyncio.sleep(interval)


def changes(old: Pool | None, new: Pool | None) -> str:
    """What became of a pool, for a log line; "" = nothing."""
    if old is None or new is None:
        return "added" if old is None else "removed"
    before = {one.name: one for one in old.instances}
    after = {one.name: one for one in new.instances}
    told = [f"+{name}" for name in after if name not in before]
    told += [f"-{name}" for name in before if name not in after]
    told += [f"{name} changed" for name in after if name in before and before[name] != after[name]]
    keys = [name for name in Pool.model_fields if name != "instances" and getattr(old, name) != getattr(new, name)]
    if keys:
        told.append("changed: " + ", ".join(keys))
    return " ".join(told)
