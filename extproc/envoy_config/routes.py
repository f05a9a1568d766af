"""The routes: which requests kvcar sees, and which cluster serves them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from envoy_data_plane.envoy.config.route import v3 as route
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc
from envoy_data_plane.envoy.extensions.retry.host.previous_hosts import v3 as previous_hosts
from envoy_data_plane.envoy.type.matcher import v3 as matcher
from envoy_data_plane.google.protobuf import Any as Packed

from extproc.envoy_config.clusters import DIRECT, ENGINES, METADATA_NAMESPACE, seconds
from extproc.envoy_config.filters import EXT_PROC_FILTER
from extproc.envoy_config.options import DESTINATION, EnvoyOptions, Routing


def routes(options: EnvoyOptions) -> list[route.Route]:
    """Requests with prompts switch the filter on; on every other path kvcar is not asked."""
    regexes = _path_regexes(options)
    scored = [_scored(options, regex) for regex in regexes]
    if options.routing is Routing.ORIGINAL_DST:
        scored = [_scored(options, regex, decided=True) for regex in regexes] + scored
    others = route.Route(
        match=route.RouteMatch(prefix="/"), route=route.RouteAction(cluster=ENGINES, timeout=seconds(30))
    )
    return [*scored, others]


def _scored(options: EnvoyOptions, regex: str, *, decided: bool = False) -> route.Route:
    """A route through kvcar. With `decided` only for requests that carry a decision, to where it names."""
    match = route.RouteMatch(safe_regex=matcher.RegexMatcher(regex=regex))
    if decided:
        match.dynamic_metadata = [
            matcher.MetadataMatcher(
                filter=METADATA_NAMESPACE,
                path=[matcher.MetadataMatcherPathSegment(key=DESTINATION)],
                value=matcher.ValueMatcher(present_match=True),
            )
        ]
    return route.Route(
        match=match,
        request_body_buffer_limit=options.max_body_bytes,
        route=route.RouteAction(
            cluster=DIRECT if decided else ENGINES, timeout=seconds(0), retry_policy=_retry(other_hosts=not decided)
        ),
        # Nothing overridden: that a route says anything of the filter is what switches it on.
        typed_per_filter_config={
            EXT_PROC_FILTER: Packed.pack(ext_proc.ExtProcPerRoute(overrides=ext_proc.ExtProcOverrides()))
        },
    )


def _retry(*, other_hosts: bool) -> route.RetryPolicy:
    result = route.RetryPolicy(
        retry_on="connect-failure,refused-stream,retriable-status-codes",
        retriable_status_codes=[503],
        num_retries=2,
        retry_back_off=route.RetryPolicyRetryBackOff(base_interval=seconds(0.005), max_interval=seconds(0.05)),
    )
    if other_hosts:
        result.retry_host_predicate = [
            route.RetryPolicyRetryHostPredicate(
                name="envoy.retry_host_predicates.previous_hosts",
                typed_config=Packed.pack(previous_hosts.PreviousHostsPredicate()),
            )
        ]
        result.host_selection_retry_max_attempts = 5
    return result


def _path_regexes(options: EnvoyOptions) -> list[str]:
    """Each matches whole paths; together every handled one, also behind every prefix.

    Envoy takes RE2 programs up to size 100: what paths share is written once, and a prefix has expressions of its own.
    """

    def any_of(texts: Iterable[str]) -> str:
        # re.escape writes a backslash before a hyphen, which outside a class needs none
        return "(" + "|".join(re.escape(text).replace("\\-", "-") for text in texts) + ")"

    below = [path.removeprefix("/v1/") for path in options.paths if path.startswith("/v1/")]
    others = [path for path in options.paths if not path.startswith("/v1/")]
    parts = [f"/v1/{any_of(below)}"] * bool(below) + [any_of(others)] * bool(others)
    prefixes = (re.escape(prefix.rstrip("/")).replace("\\-", "-") for prefix in options.path_prefixes)
    return ["|".join(parts), *(f"{prefix}{part}" for prefix in prefixes for part in parts)]
