"""What an endpoint picker of the Gateway API Inference Extension does beyond scoring (proposal 004): every request gets
an endpoint or an error, also one that cannot be scored, and the gateway's subset is the whole world.

`listen.endpoint_picker: true` switches it on. Off, what cannot be scored passes without a destination and the gateway
balances.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from weakref import WeakKeyDictionary

from extproc.decision import Decision, InstanceLike
from extproc.messages import refusal
from extproc.pool import Pool
from extproc.router import Router
from extproc.scorers import build
from extproc.scorers.base import Request

SUBSET = ("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset")
"""Namespace and key under which a gateway limits the choice."""

NO_ENDPOINT = refusal(
    503,
    "No endpoint is ready for this request.",
    kind="service_unavailable",
    details="kvcar_no_endpoint",
    headers=(("x-kvcar-dropped-reason", "rejected-no-endpoints"),),
)


def subset(metadata: Mapping[str, Mapping[str, object]], instances: Iterable[InstanceLike]) -> frozenset[str] | None:
    """Addresses that the gateway allows; None = the key is absent, no limit. An empty answer allows nobody.

    A list or a comma list of "ip:port"; an "ip" alone allows every port of it, as the extension's own pickers read it.
    """
    given = metadata.get(SUBSET[0], {}).get(SUBSET[1]) if metadata else None
    if isinstance(given, str):
        given = given.split(",")
    if not isinstance(given, (list, tuple)):
        return None
    items = {item.strip() for item in given if isinstance(item, str)} - {""}
    hosts = {item.strip("[]") for item in items if item.endswith("]") or item.count(":") != 1}
    if hosts:
        items |= {one.address for one in instances if one.address.rpartition(":")[0].strip("[]") in hosts}
    return frozenset(items)


class EndpointPicker:
    """Chooses by our own requests in flight, ties in turn. One thread."""

    def __init__(self) -> None:
        self._routers: WeakKeyDictionary[Pool, Router] = WeakKeyDictionary()

    def pick(
        self, pools: Iterable[Pool], metadata: Mapping[str, Mapping[str, object]], now: float
    ) -> tuple[Pool, Decision] | None:
        """The first pool with an eligible instance and the decision there, not yet charged; None = there is none."""
        for pool in pools:
            only = subset(metadata, pool.instances)
            decision = self._router(pool).route(
                Request(0, 0, now=now), pool.instances, None, pool.inflight, pool.inflight, now, only=only
            )
            if decision.chosen is not None:
                return pool, decision
        return None

    def _router(self, pool: Pool) -> Router:
        found = self._routers.get(pool)
        if found is None:
            like = pool.router
            found = self._routers[pool] = Router(
                build("least_request"),
                max_endpoints=like.max_endpoints,
                profile=like.profile,
                split_min_tokens=1,  # no prompt, no prefill to hand out
            )
        return found
