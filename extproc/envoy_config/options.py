"""What may differ from one Envoy to the next, checked; and the options that go with a kvcar configuration."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from extproc.config import Config, ConfigError, Pool, pair_headers
from extproc.openai import PATHS, Endpoint
from extproc.workers.place import addresses

DESTINATION = "x-gateway-destination-endpoint"
SESSION_HEADER = "x-kvcar-host"

# Headers that steer an engine, a rank or a prefill peer. Stripped from every client request: with fail-open a client's
# own copy would otherwise survive an outage of kvcar.
ROUTING_HEADERS = (
    DESTINATION,
    "x-data-parallel-rank",
    "x-data-parallel-host-port",
    "x-prefiller-host-port",
    "x-encoder-hosts-ports",
    "x-kv-cache-source-host-port",
)

# Tokenizing reads no cache, so it need not be routed by one.
CACHED_PATHS = tuple(path for path, endpoint in PATHS.items() if endpoint is not Endpoint.TOKENIZE)


class BodyMode(StrEnum):
    """How Envoy hands over the request body."""

    BUFFERED = "buffered"
    FULL_DUPLEX = "full-duplex"


class Routing(StrEnum):
    """How Envoy obeys the decision; docs/envoy.md says which when.

    OVERRIDE_HOST     members of the cluster only, an ordered list, a fallback for everything else
    ORIGINAL_DST      whatever address kvcar names is dialled, member or not; one address
    STATEFUL_SESSION  members of the cluster that Envoy's health checks pass; one address
    """

    OVERRIDE_HOST = "override-host"
    ORIGINAL_DST = "original-dst"
    STATEFUL_SESSION = "stateful-session"


class Http(StrEnum):
    """The engines' protocol. Clients may use either: the listener looks at the first bytes."""

    HTTP1 = "http1"
    HTTP2 = "http2"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """TLS from Envoy to kvcar, PEM files as Envoy finds them. Envoy reads them when it starts.

    ca    signed kvcar's certificate
    cert  Envoy's own certificate, which kvcar's `listen.tls.client_ca` signed, and its key; both or none
    name  the name or IP in kvcar's certificate; None = the host of each ext_proc address

    Raises ValueError.
    """

    ca: str
    cert: str | None = None
    key: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("ext_proc_tls: a client certificate needs its key, and a key its certificate")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvoyOptions:
    """What may differ from one installation to the next. Addresses are "ip:port", "[ip6]:port" or "name:port".

    engines             the pool's members; the same "ip:port" that kvcar's configuration gives its instances. Only
                        `clusters` needs them, or the file
    engines_file        watched EDS file instead of `engines` (relative to Envoy's working directory)
    routing             how the decision is obeyed; two of the three take a single address, so kvcar's pools need
                        max_endpoints: 1 with them
    session_header      what the stateful_session filter reads; the same as kvcar's headers.stateful_session
    engine_protocol     HTTP/1.1 or HTTP/2 (prior knowledge) to the engines
    ext_proc            one kvcar or several: a failed stream is tried on another one
    ext_proc_tls        None = plain text
    admin               Envoy's admin address, None = no admin listener
    max_body_bytes      larger bodies get 413; keep kvcar's own receive limit above it
    paths               request paths that go through kvcar, each also behind every one of `path_prefixes`
    observe_usage       True: answers stream through kvcar too, so that it can read the engine's own cached_tokens
    message_timeout     seconds kvcar may take over one message
    fail_open           True: without kvcar requests are served by the fallback policy; False: they fail with 500
    written_headers     what kvcar writes beyond the usual names (a renamed rank or prefill header)
    stripped_headers    removed from every client request, together with the two above
    max_requests        circuit breaker of all clusters, requests in flight
    access_log          path, None = no access log

    Raises ValueError naming the option and the value.
    """

    engines: tuple[str, ...] = ()
    engines_file: str | None = None
    routing: Routing = Routing.OVERRIDE_HOST
    session_header: str = SESSION_HEADER
    engine_protocol: Http = Http.HTTP1
    listen: str = "127.0.0.1:10000"
    admin: str | None = "127.0.0.1:9901"
    ext_proc: tuple[str, ...] = ("127.0.0.1:9002",)
    ext_proc_tls: ClientTls | None = None
    body_mode: BodyMode = BodyMode.BUFFERED
    paths: tuple[str, ...] = CACHED_PATHS
    path_prefixes: tuple[str, ...] = ()
    observe_usage: bool = False
    max_body_bytes: int = 32 << 20
    message_timeout: float = 2.0
    max_message_timeout: float = 10.0
    fail_open: bool = True
    destination_header: str = DESTINATION
    written_headers: tuple[str, ...] = ()
    stripped_headers: tuple[str, ...] = ROUTING_HEADERS
    engine_health_path: str = "/health"
    max_requests: int = 100_000
    stream_idle_timeout: float = 600.0
    access_log: str | None = "/dev/stdout"

    def __post_init__(self) -> None:
        if self.engines and self.engines_file is not None:
            raise ValueError("engines: give addresses or a file, not both")
        if not self.ext_proc:
            raise ValueError("ext_proc: at least one address is needed")
        for option in ("listen", "admin", "ext_proc", "engines"):
            value = getattr(self, option)
            for address in value if isinstance(value, tuple) else (value,):
                if address is not None:
                    split_address(address, option=option)
        for option, headers in (
            ("destination_header", (self.destination_header,)),
            ("session_header", (self.session_header,)),
            ("written_headers", self.written_headers),
            ("stripped_headers", self.stripped_headers),
        ):
            for header in headers:
                if not re.fullmatch(r"[a-z0-9_.-]+", header):
                    raise ValueError(
                        f"{option}: {header!r} is no header name (lower-case letters, digits, '-', '_', '.')"
                    )
        for option in ("max_body_bytes", "message_timeout", "max_requests", "stream_idle_timeout"):
            if getattr(self, option) <= 0:
                raise ValueError(f"{option}: {getattr(self, option)!r} must be above 0")
        if self.max_message_timeout < self.message_timeout:
            raise ValueError(f"max_message_timeout: {self.max_message_timeout!r} is below message_timeout")
        if not self.engine_health_path.startswith("/"):
            raise ValueError(f"engine_health_path: {self.engine_health_path!r} must start with '/'")

    @property
    def own_headers(self) -> tuple[str, ...]:
        """What kvcar itself writes into requests."""
        session = (self.session_header,) if self.routing is Routing.STATEFUL_SESSION else ()
        return tuple(dict.fromkeys((self.destination_header, *session, *self.written_headers)))


def options_for(config: Config, *, pool: str | None = None, **overrides: Any) -> EnvoyOptions:
    """The options that go with kvcar's own configuration; `overrides` are EnvoyOptions fields.

    `pool` names the pool whose instances Envoy gets; it may be left out when there is one. Envoy needs a cluster and a
    route for each pool: in one cluster the fallback would hand a request to an engine of another model.
    Raises ValueError, also where the two configurations would not understand each other.
    """
    pools = {item.name: item for item in config.pools}
    if pool is None and len(pools) > 1:
        raise ValueError(f"pool: several are configured, name one of {', '.join(pools)}")
    if pool is not None and pool not in pools:
        raise ValueError(f"pool: {pool!r} is not configured, only {', '.join(pools)}")
    chosen = pools[pool] if pool is not None else config.pools[0]
    try:
        listen = [split_address(address) for address in addresses(config)]
    except ConfigError as error:
        raise ValueError(str(error)) from None
    host, _ = listen[0]
    local = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    headers = config.headers
    session = headers.stateful_session
    written = (headers.rank, headers.prefill, *pair_headers(config), *((session,) if session else ()))
    values: dict[str, Any] = {
        "ext_proc": tuple(f"{local}:{port}" for _, port in listen),
        "max_body_bytes": config.limits.max_body_bytes,
        "message_timeout": max(2.0, 2 * config.limits.decide_timeout_ms / 1000),
        "destination_header": headers.destination,
        "session_header": session or SESSION_HEADER,
        "written_headers": tuple(dict.fromkeys(written)),
        "paths": tuple(dict.fromkeys((*CACHED_PATHS, *config.paths.rewrites))),
        "path_prefixes": config.paths.bases,
        "observe_usage": config.listen.observe_usage,
    }
    if chosen.endpoints_file is not None and overrides.get("engines_file") is None:
        values["engines_file"] = chosen.endpoints_file.path
    elif overrides.get("engines_file") is None:
        values["engines"] = tuple(item.address for item in chosen.instances)
    values["max_message_timeout"] = max(10.0, overrides.get("message_timeout", values["message_timeout"]))
    options = EnvoyOptions(**(values | overrides))
    _agree(options, config, chosen)
    return options


def _agree(options: EnvoyOptions, config: Config, pool: Pool) -> None:
    """What Envoy would answer with 503, or what it would ignore silently, is refused here, all of it at once."""
    wrong = []
    if options.routing is not Routing.OVERRIDE_HOST and pool.max_endpoints != 1:
        wrong.append(
            f"routing: {options.routing} takes one address and no list: "
            f"set max_endpoints: 1 in kvcar's pool {pool.name!r} (it is {pool.max_endpoints})"
        )
    if options.routing is Routing.STATEFUL_SESSION and config.headers.stateful_session is None:
        wrong.append(
            f"routing: the stateful_session filter reads a header that kvcar does not set: "
            f"add headers: {{stateful_session: {SESSION_HEADER}}} to kvcar's configuration"
        )
    tls, given = config.listen.tls, options.ext_proc_tls
    if tls is not None and given is None:
        wrong.append("ext_proc_tls: kvcar's listen.tls is set: name the CA that signed its certificate (--ext-proc-ca)")
    if tls is not None and tls.client_ca is not None and (given is None or given.cert is None):
        wrong.append(
            "ext_proc_tls: kvcar's listen.tls.client_ca wants a client certificate (--ext-proc-cert, --ext-proc-key)"
        )
    if wrong:
        raise ValueError("\n".join(wrong))


def split_address(address: str, *, option: str = "address") -> tuple[str, int]:
    """("host", port) of "host:port"; brackets around an IPv6 host are taken off. Raises ValueError."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.%]+)\]|([^\[\]:/\s]+)):([0-9]{1,5})", address)
    if not found or not 0 <= int(found[3]) <= 65535:
        raise ValueError(f"{option}: {address!r} is not host:port (IPv6 as [::1]:8000)")
    return found[1] or found[2], int(found[3])


def is_ip(host: str) -> bool:
    """An address, not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
