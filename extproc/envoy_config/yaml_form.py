"""Envoy messages as YAML that people read: short values on one line, comments beside or above the keys they explain.

PyYAML drops comments, so the walk over mappings and lists is done here and every scalar and short value is left to
PyYAML's own dumper, which owns the quoting rules. What is written loads back equal to what was given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml
from betterproto2 import Casing

Comments = Mapping[tuple[str, ...], str]
"""Trailing part of a key path (list positions left out) -> comment. The longest match wins. A last part "key=value"
speaks of that scalar value only."""

WIDTH = 120
_FLOW_WIDTH = 96


def dump(data: Mapping[str, Any], comments: Comments | None = None) -> str:
    """`data` (dicts, lists, scalars) as YAML text. Costs a pass and a PyYAML call for every value kept on a line."""
    return "\n".join(_mapping(data, 0, (), comments or {})) + "\n"


def _flow(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _find(path: tuple[str, ...], comments: Comments, value: Any = None) -> str | None:
    valued = (*path[:-1], f"{path[-1]}={value}")
    for start in range(len(path)):
        if text := comments.get(path[start:]) or comments.get(valued[start:]):
            return text
    return None


def _commented_inside(value: Any, path: tuple[str, ...], comments: Comments) -> bool:
    if isinstance(value, Mapping):
        return any(
            _find((*path, key), comments, item) is not None or _commented_inside(item, (*path, key), comments)
            for key, item in value.items()
        )
    if isinstance(value, list):
        return any(_commented_inside(item, path, comments) for item in value)
    return False


def _depth(value: Any) -> int:
    if isinstance(value, Mapping):
        return 1 + max((_depth(item) for item in value.values()), default=0)
    if isinstance(value, list):
        # A list of plain words reads as one value; a list of mappings is a level of its own.
        return max((_depth(item) for item in value), default=0)
    return 0


def _one_line(value: Any, path: tuple[str, ...], comments: Comments, room: int) -> str | None:
    """The flow form of `value`, None for a container that is long, holds a comment or reads better on several lines."""
    if not isinstance(value, Mapping | list) or not value:
        return _flow(value)
    if _commented_inside(value, path, comments):
        return None
    # Several members of a list get a line each; a mapping around two scalars may nest deep and still reads well.
    if isinstance(value, list) and len(value) > 1 and any(isinstance(item, Mapping | list) for item in value):
        return None
    if isinstance(value, Mapping) and len(value) > 1 and _depth(value) > 3:
        return None
    text = _flow(value)
    return text if len(text) <= room else None


def _lines(value: Any, indent: int, path: tuple[str, ...], comments: Comments) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from _mapping(value, indent, path, comments)
    else:
        yield from _sequence(value, indent, path, comments)


def _mapping(data: Mapping[str, Any], indent: int, path: tuple[str, ...], comments: Comments) -> Iterator[str]:
    pad = " " * indent
    for key, value in data.items():
        inner = (*path, key)
        name = f"{pad}{_flow(key)}:"
        comment = _find(inner, comments, value)
        text = _one_line(value, inner, comments, _FLOW_WIDTH)
        line = name if text is None else f"{name} {text}"
        if comment is not None:
            if len(line) + len(comment) + 4 <= WIDTH and "\n" not in comment:
                line = f"{line}  # {comment}"
            else:
                yield from (f"{pad}# {part}" for part in comment.split("\n"))
        yield line
        if text is None:
            # Lists stand at their key's own column, as Envoy's documentation writes them.
            yield from _lines(value, indent + 2 if isinstance(value, Mapping) else indent, inner, comments)


def _sequence(data: Sequence[Any], indent: int, path: tuple[str, ...], comments: Comments) -> Iterator[str]:
    pad = " " * indent
    for value in data:
        text = _one_line(value, path, comments, _FLOW_WIDTH)
        if text is not None:
            yield f"{pad}- {text}"
            continue
        rows = iter(_lines(value, indent + 2, path, comments))
        first = next(rows)
        # Comment lines above the first key stay above the dash.
        while first.lstrip().startswith("#"):
            yield pad + first.lstrip()
            first = next(rows)
        yield f"{pad}- {first.lstrip()}"
        yield from rows


# ---------------------------------------------------------------- messages to plain data


def plain(value: Any) -> Any:
    """Messages to plain data. Proto-JSON leaves default values out and writes int64 as text; both are undone where a
    reader would stumble over them."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    return _readable(value.to_dict(casing=Casing.SNAKE))


# Key order for readers; keys not named follow in the order of the proto.
_FIRST = (
    "admin", "node", "name", "disabled", "type", "@type", "stat_prefix", "match", "address", "connect_timeout",
    "cluster", "timeout", "interval", "no_traffic_interval", "stream_idle_timeout", "http2_protocol_options",
    "early_header_mutation_extensions", "request_body_buffer_limit", "failure_mode_allow", "message_timeout",
    "max_message_timeout", "retry_on",
)  # fmt: skip
_LAST = ("load_assignment", "access_log")
_RANK = {key: rank for rank, key in enumerate(_FIRST)} | {key: 1000 + rank for rank, key in enumerate(_LAST)}


def _readable(value: Any) -> Any:
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if not isinstance(value, dict):
        # 0.500s -> 0.5s
        return re.sub(r"^(\d+\.\d*?)0+s$", r"\1s", value) if isinstance(value, str) else value
    if str(value.get("@type")).endswith(".ext_proc.v3.ExternalProcessor"):
        value = {"failure_mode_allow": False, **value}
    result = {key: _readable(value[key]) for key in sorted(value, key=lambda key: _RANK.get(key, 500))}
    if result.get("healthy_panic_threshold") == {}:
        result["healthy_panic_threshold"] = {"value": 0}
    if (attempts := result.get("host_selection_retry_max_attempts")) is not None:
        result["host_selection_retry_max_attempts"] = int(attempts)
    return result


# ---------------------------------------------------------------- what a reader should know

# Where each fragment goes.
PLACES: Comments = {
    ("clusters",): "Append to static_resources.clusters.",
    ("early_header_mutation_extensions",): (
        "Into the HttpConnectionManager. A client can never pin an engine, a rank or a prefill peer: with fail-open\n"
        "its own copy of a header would survive an outage of kvcar."
    ),
    ("access_log",): (
        "Into the HttpConnectionManager: what kvcar decided, who served, what it cost. Where there is a log already,\n"
        "take over the fields."
    ),
    ("path_config_source",): (
        "Must exist at start; replace it by rename() into the watched directory. Envoy's bootstrap needs\n"
        "`node: {id: ..., cluster: ...}` for it."
    ),
    ("http_filters",): "Into the HttpConnectionManager, before envoy.filters.http.router.",
    ("routes",): "Into the virtual host, in this order, in place of the routes to your engines.",
}

COMMENTS: Comments = {
    ("admin",): "unprotected: clients must not reach it",
    ("stream_idle_timeout",): "must exceed the longest silence of a stream (long prefill)",
    ("early_header_mutation_extensions",): (
        "A client can never pin an engine, a rank or a prefill peer: with fail-open its own copy of a header would\n"
        "survive an outage of kvcar."
    ),
    ("request_body_buffer_limit",): "bytes, on this route only; larger: 413. kvcar's receive limit is above it",
    ("route", "timeout=0s"): "none: SSE may be long, stream_idle_timeout bounds it",
    ("retry_host_predicate",): "without it the fallback may pick the failed host again",
    ("route", "retry_policy", "num_retries"): "entries of kvcar's list beyond 1 + num_retries are never used",
    ("typed_per_filter_config",): "switches the filter on; /v1/models, /health, ...: kvcar never sees them",
    ("disabled",): "on the routes that switch it on, and nowhere else",
    ("match", "dynamic_metadata"): "kvcar has decided; a client cannot write metadata",
    ("type=ORIGINAL_DST",): (
        "WARNING: dials whatever address the metadata holds. Never take it from a header here: a client could then\n"
        "reach everything that Envoy reaches (server-side request forgery)."
    ),
    ("route_cache_action",): "the route depends on the decision: look again once it is there",
    ("response_mutations",): "the filter below writes the address of another host that served; clients need not know",
    ("transport_socket",): "files are read when Envoy starts; after a rotation restart it, or move them to SDS",
    ("match_typed_subject_alt_names",): "without it any certificate of this CA would do",
    ("alpn_protocols",): "gRPC servers refuse TLS without it",
    ("failure_mode_allow=True",): "on any error of kvcar the fallback policy serves",
    ("failure_mode_allow=False",): "without kvcar requests fail with 500",
    ("message_timeout",): "kvcar's time for one message, tokenizing included",
    ("processing_mode", "request_body_mode=BUFFERED"): "never reach it by mode_override: large bodies hang",
    ("processing_mode", "response_header_mode"): "status, served host, first byte of what is not streamed",
    (
        "processing_mode",
        "response_trailer_mode",
    ): "holds the gRPC stream to the end of the response",
    ("metadata_options", "receiving_namespaces"): "without it the decision is ignored, silently",
    (
        "grpc_service",
        "retry_policy",
        "retry_back_off",
    ): "Envoy's default of 1 s would delay requests when kvcar has gone",
    ("forward_rules",): "secrets never reach kvcar",
    ("mutation_rules",): "kvcar can write its own headers and nothing else",
    ("circuit_breakers",): "requests in flight: the default of 1024 would be the ceiling",
    (
        "health_checks",
        "http_health_check",
    ): "steers the fallback only: a named host is picked whatever its health",
    ("override_host_sources",): "metadata only: a client cannot write it, request_headers_to_remove cannot lose it",
    ("selected_host_key",): "the host really used, after retries and fallback",
    ("ignore_health_on_host_removal",): "without it a removed host stays routable while it passes its check",
    ("path_config_source",): "must exist at start; replace it by rename() into the watched directory",
    ("update_merge_window",): "a kvcar that was started again is asked once it passes its check, not up to 1 s after",
    ("healthy_panic_threshold",): "NOT_SERVING everywhere: fail open at once instead of panic routing",
}
