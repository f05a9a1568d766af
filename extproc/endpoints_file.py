"""The file of endpoints that Envoy watches (EDS over the file system), kept in step with a pool's instances.

    fleet changes --(a few at once)--> render --> PATH.new --rename--> PATH    Envoy takes it within milliseconds

Nothing is written before discovery has told its first picture: an empty list would take Envoy's engines away when
kvcar starts. What cannot be written is tried again; Envoy goes on with the file as it was.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from kvindex.fleet import Instance, InstanceState

log = logging.getLogger(__name__)

SETTLE = 0.02
"""Seconds: changes that come together are written together."""
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 30.0

_NUMBERS = itertools.count()

HEALTH = {
    InstanceState.ACTIVE: "HEALTHY",
    InstanceState.LEASE_LOST: "HEALTHY",
    InstanceState.DRAINING: "DRAINING",
    InstanceState.UNREACHABLE: "UNHEALTHY",
    InstanceState.PROBATION: "UNHEALTHY",  # kvcar may name it, Envoy's own balancing had better not
    # SUSPECT is left out: leaving the file is the only way to be sure that Envoy does not pick a host
}


def render(cluster: str, instances: Iterable[Instance]) -> str:
    """A discovery response with one ClusterLoadAssignment, JSON (which is YAML too). In order of the names."""
    endpoints = []
    for one in sorted(instances, key=lambda one: one.name):
        health = HEALTH.get(one.state)
        if one.address and health is not None:
            host, _, port = one.address.rpartition(":")
            address = {"address": host.strip("[]"), "port_value": int(port)}
            endpoints.append({"endpoint": {"address": {"socket_address": address}}, "health_status": health})
    resource = {
        "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
        "cluster_name": cluster,
        "endpoints": [{"lb_endpoints": endpoints}],
    }
    return json.dumps({"resources": [resource]}, indent=1) + "\n"


def replace_file(path: Path, text: str) -> None:
    """Blocking. Readers see the old content or the new one, whole. Raises OSError; then the old one is untouched."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{next(_NUMBERS)}.new")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


class EndpointsFile:
    """Writes one file. `show` may be called at any rate, in the event loop; `run` writes."""

    def __init__(self, path: Path, cluster: str, *, first_pause: float = FIRST_PAUSE) -> None:
        self.path = path
        self.error: str | None = None
        self._cluster = cluster
        self._first_pause = first_pause
        self._wanted: str | None = None
        self._written: str | None = None
        self._changed = asyncio.Event()

    def show(self, instances: Iterable[Instance]) -> None:
        """These are the instances now. O(instances)."""
        self._wanted = render(self._cluster, instances)
        if self._wanted != self._written:
            self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        pause = self._first_pause
        while True:
            await self._changed.wait()
            await asyncio.sleep(SETTLE)
            self._changed.clear()
            text = self._wanted
            if text is None or text == self._written:
                continue
            try:
                await asyncio.to_thread(replace_file, self.path, text)
            except OSError as error:
                reason = f"{self.path} cannot be written: {error.strerror or error}"
                if reason != self.error:
                    log.error("%s; Envoy keeps the endpoints it has, trying again", reason)
                self.error = reason
                self._changed.set()
                await asyncio.sleep(pause)
                pause = min(LONGEST_PAUSE, pause * 2)
                continue
            if self.error is not None:
                log.info("%s is written again", self.path)
            self._written, self.error, pause = text, None, self._first_pause
