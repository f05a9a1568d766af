"""ZMQ endpoints and engine addresses as text: what is allowed, and what to write instead.

Pure rules, no name is resolved here. Errors name the value and the remedy.

    connect   tcp://host:port     host = name, IPv4, or IPv6 in brackets; one fixed port; no `*`, `0.0.0.0`, `[::]`
              ipc:///path
    bind      the same, and `*`, `0.0.0.0` or `[::]` as host (for engines that connect to us)
    pattern   tcp://*:5557        as engines write it: `*` becomes the instance's host, the port grows by the rank
"""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

from kvindex.errors import ConfigurationError

ANY_HOSTS = frozenset({"*", "0.0.0.0", "::"})
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?\Z")


class HostPort(NamedTuple):
    """host without brackets, port 1..65535. `str()` gives the form for an endpoint or an address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_host_port(value: str, *, what: str = "address", shown: str | None = None) -> HostPort:
    """`host:port` with IPv6 in brackets. Raises ConfigurationError, which names `shown` (default: the value)."""
    if not isinstance(value, str):
        raise ConfigurationError(f"{what} {value!r} is no text: write host:port")
    shown = value if shown is None else shown
    host, colon, port_text = value.rpartition(":")
    if not colon or not host:
        raise ConfigurationError(f"{what} {shown!r} has no port: write host:port, for example 10.0.0.1:8000")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if _ip_version(host.partition("%")[0]) != 6:
            raise ConfigurationError(f"{what} {shown!r}: {host!r} in brackets is no IPv6 address")
    elif ":" in host:
        raise ConfigurationError(f"{what} {shown!r}: write an IPv6 address in brackets, [2001:db8::1]:5557")
    elif host != "*" and _ip_version(host) is None:
        if re.fullmatch(r"[0-9.]+", host):
            raise ConfigurationError(f"{what} {shown!r}: {host!r} is no IPv4 address")
        if not _NAME.match(host):
            raise ConfigurationError(f"{what} {shown!r}: {host!r} is no host name or IP address")
    if not (port_text.isascii() and port_text.isdigit()) or not 1 <= int(port_text) <= 65535:
        raise ConfigurationError(f"{what} {shown!r}: port {port_text!r} is not in 1..65535")
    return HostPort(host, int(port_text))


def check_address(value: str, *, what: str = "address", literal: bool = False) -> HostPort:
    """An engine's HTTP address. `literal`: an IP address is required (what Envoy's override_host needs)."""
    parsed = parse_host_port(value, what=what)
    if parsed.host in ANY_HOSTS:
        raise ConfigurationError(f"{what} {value!r} is a wildcard, nobody can connect to it: write the engine's own IP")
    if literal and _ip_version(parsed.host) is None:
        raise ConfigurationError(f"{what} {value!r}: Envoy needs an IP address here, not a name")
    return parsed


def check_endpoint(value: str, *, bind: bool = False, what: str = "endpoint") -> str:
    """A ZMQ endpoint to connect to (or, with `bind`, to listen on). Returns it; raises ConfigurationError."""
    if not isinstance(value, str) or "://" not in value:
        raise ConfigurationError(f"{what} {value!r} has no transport: write tcp://host:port")
    transport, _, rest = value.partition("://")
    if transport == "ipc" and rest:
        return value
    if transport != "tcp":
        raise ConfigurationError(f"{what} {value!r}: transport {transport!r} is not supported, use tcp:// (or ipc://)")
    host = parse_host_port(rest, what=what, shown=value).host
    if host in ANY_HOSTS and not bind:
        raise ConfigurationError(
            f"{what} {value!r} is what the engine binds; we connect: write the engine's host in place of {host!r}"
            " (or set bind for an engine that connects to us)"
        )
    return value


def from_pattern(pattern: str, host: str, dp_rank: int = 0, *, bind: bool = False, what: str = "endpoint") -> str:
    """The endpoint of one rank from what the engine was given: `*` -> host, port + dp_rank (vLLM, SGLang, Motor).

    A pattern with a host of its own keeps it. ipc:// has no ranks. Raises ConfigurationError (also: port over 65535).
    """
    check_endpoint(pattern, bind=True, what=what)
    if pattern.startswith("ipc://"):
        if dp_rank:
            raise ConfigurationError(f"{what} {pattern!r}: ipc has no port to add rank {dp_rank} to, use tcp://")
        return pattern
    own = parse_host_port(pattern.partition("://")[2], what=what)
    port = own.port + dp_rank
    if port > 65535:
        raise ConfigurationError(f"{what} {pattern!r}: port {own.port} + rank {dp_rank} is over 65535")
    endpoint = f"tcp://{HostPort(host if own.host in ANY_HOSTS else own.host, port)}"
    return check_endpoint(endpoint, bind=bind, what=what)


def needs_ipv6(endpoint: str) -> bool | None:
    """Address family of a tcp endpoint's host: True IPv6, False IPv4 (or not tcp), None = a name, either may hold."""
    if not endpoint.startswith("tcp://"):
        return False
    host = endpoint[6:].rpartition(":")[0].strip("[]").partition("%")[0]
    if host == "*":
        return None
    version = _ip_version(host)
    return None if version is None else version == 6


def _ip_version(host: str) -> int | None:
    try:
        return ipaddress.ip_address(host).version
    except ValueError:
        return None
