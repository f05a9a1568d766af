"""Configurations and fragments as plain data and as commented YAML."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from extproc.envoy_config.clusters import clusters
from extproc.envoy_config.complete import access_log, bootstrap
from extproc.envoy_config.filters import early_header_mutation, http_filters
from extproc.envoy_config.options import EnvoyOptions, Routing
from extproc.envoy_config.routes import routes
from extproc.envoy_config.yaml_form import COMMENTS, PLACES, dump, plain


class Part(StrEnum):
    """What to write: everything, all fragments, or one of them."""

    BOOTSTRAP = "bootstrap"
    FRAGMENT = "fragment"
    FILTER = "filter"
    CLUSTERS = "clusters"
    ROUTES = "routes"
    LISTENER = "listener"


_FRAGMENTS: Mapping[Part, Callable[[EnvoyOptions], dict[str, Any]]] = {
    Part.CLUSTERS: lambda options: {"clusters": plain(clusters(options))},
    Part.LISTENER: lambda options: {
        "early_header_mutation_extensions": plain([early_header_mutation(options)]),
        **({"access_log": plain([access_log(options.access_log)])} if options.access_log else {}),
    },
    Part.FILTER: lambda options: {"http_filters": plain(http_filters(options))},
    Part.ROUTES: lambda options: {"routes": plain(routes(options))},
}


def as_dict(options: EnvoyOptions, part: Part = Part.BOOTSTRAP) -> dict[str, Any]:
    """The configuration as plain data in proto-JSON form with snake_case names, the form Envoy's documentation uses."""
    if part is Part.BOOTSTRAP:
        data: dict[str, Any] = plain(bootstrap(options))
        return data
    if part is Part.FRAGMENT:
        return {key: value for build in _FRAGMENTS.values() for key, value in build(options).items()}
    return _FRAGMENTS[part](options)


def render(options: EnvoyOptions, part: Part = Part.BOOTSTRAP) -> str:
    """The configuration as commented YAML. Costs a few ms."""
    if part is Part.BOOTSTRAP:
        return _TITLE + _OBEYS[options.routing] + dump(as_dict(options, part), COMMENTS)
    return _FRAGMENT_TITLE + _OBEYS[options.routing] + dump(as_dict(options, part), {**COMMENTS, **PLACES})


_TITLE = """\
# Envoy in front of LLM engines, with kvcar choosing the engine. Written by `kvcar envoy-config`; Envoy 1.40.
# kvcar (ext_proc) reads the request body and answers with dynamic metadata envoy.lb / x-gateway-destination-endpoint.
"""

_FRAGMENT_TITLE = """\
# Pieces for an Envoy that exists already. Written by `kvcar envoy-config`; Envoy 1.40.
# Merge each list into the place its comment names; envoy/README.md walks through it.
# kvcar (ext_proc) reads the request body and answers with dynamic metadata envoy.lb / x-gateway-destination-endpoint.
"""

_OBEYS = {
    Routing.OVERRIDE_HOST: """\
# It is "ip:port[,ip:port...]", best first. The engines' cluster obeys it; without a decision LEAST_REQUEST serves.
""",
    Routing.ORIGINAL_DST: """\
# WARNING: ORIGINAL_DST. Envoy dials whatever address kvcar names, member of a cluster or not: who can register an
# instance with kvcar can make Envoy connect anywhere it reaches, its own admin port included. Prefer override-host.
# One address, no health checks, no other host on a retry. Without a decision LEAST_REQUEST serves among the members.
""",
    Routing.STATEFUL_SESSION: """\
# The stateful_session filter reads the same choice, one address in base64, from a header that kvcar sets; a host that
# fails Envoy's health check is replaced at once. Without a decision LEAST_REQUEST serves.
""",
}
