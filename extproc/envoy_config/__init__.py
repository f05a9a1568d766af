"""Envoy configuration for kvcar, from envoy-data-plane's typed classes: `kvcar envoy-config`.

The design: ext_proc sees the buffered body and answers with dynamic metadata envoy.lb / x-gateway-destination-endpoint.
The override_host policy of the engines' cluster obeys it, walks the ordered list on retries and falls back to
LEAST_REQUEST when there is no decision. Clients cannot write metadata, and their copies of the routing headers are
removed before anything reads them. `Routing` names two other ways to obey.

    options ---> clusters, filters ---> routes ---> complete ---> render ---> YAML
    (checked)    (typed pieces)                     (bootstrap)   (yaml_form: comments, line breaks)

`render()` is a complete configuration or the pieces to merge into an Envoy that already exists. Importing this package
costs about a second (envoy-data-plane), so the command line imports it only when asked for it.
"""

from extproc.envoy_config.clusters import EXT_PROC_SERVICE, METADATA_NAMESPACE, SERVED
from extproc.envoy_config.complete import ACCESS_LOG_FIELDS, bootstrap
from extproc.envoy_config.filters import EXT_PROC_FILTER
from extproc.envoy_config.options import (
    CACHED_PATHS,
    DESTINATION,
    ROUTING_HEADERS,
    SESSION_HEADER,
    BodyMode,
    ClientTls,
    EnvoyOptions,
    Http,
    Routing,
    options_for,
    split_address,
)
from extproc.envoy_config.render import Part, as_dict, render

__all__ = [
    "ACCESS_LOG_FIELDS",
    "CACHED_PATHS",
    "DESTINATION",
    "EXT_PROC_FILTER",
    "EXT_PROC_SERVICE",
    "METADATA_NAMESPACE",
    "ROUTING_HEADERS",
    "SERVED",
    "SESSION_HEADER",
    "BodyMode",
    "ClientTls",
    "EnvoyOptions",
    "Http",
    "Part",
    "Routing",
    "as_dict",
    "bootstrap",
    "options_for",
    "render",
    "split_address",
]
