"""`pools[*].discovery`: where a pool's instances come from, beside those written down. One class a source.

Each class checks its keys and makes its source with `source(facts)`, which imports what it needs only then: a client
library of a registry that nobody uses is never loaded.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from extproc.config_types import Node
from extproc.instances import PoolFacts
from kvindex.discovery.base import Source


class DiscoveryNode(Node):
    """Keys that every source has."""

    def source(self, facts: PoolFacts) -> Source:
        """The source that these options describe, not yet running."""
        raise NotImplementedError


class HttpDiscovery(DiscoveryNode):
    """Instances that register themselves at the admin port (`POST /register`, as kv-conductor has it)."""

    type: Literal["http"]

    def source(self, facts: PoolFacts) -> Source:
        from kvindex.discovery.registered import Registered

        return Registered(facts.name)


DiscoveryConfig = Annotated[HttpDiscovery, Field()]
