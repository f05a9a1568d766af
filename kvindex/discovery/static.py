"""Instances written down in the configuration. They are there from the start and never leave.

StaticSource is this as a source of the discovery seam (base.py), for a fleet that other sources feed, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvindex.discovery.base import Notify
from kvindex.endpoints import from_pattern
from kvindex.fleet import Instance, check_instances


class StaticSource:
    """Raises ConfigurationError for an invalid instance, or a name, address or endpoint that is there twice."""

    def __init__(self, instances: Sequence[Instance]) -> None:
        self.instances = tuple(instances)
        check_instances(self.instances)

    async def run(self, notify: Notify) -> None:
        """Tell all, say ready, wait to be cancelled."""
        self.tell(notify)
        await asyncio.Event().wait()

    def tell(self, notify: Notify) -> None:
        notify.replace(self.instances)
        notify.ready()


def rank_endpoint(endpoint: str, dp_rank: int) -> str:
    """Endpoint of a rank from that of rank 0: the port grows by the rank. Raises ConfigurationError."""
    return from_pattern(endpoint, "*", dp_rank, bind=True)
