"""Types that every part of the configuration is made of: a strict frozen node, addresses, header names, URLs, paths."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from kvindex.errors import ConfigurationError
from kvindex.networks import parse_network

LONGEST_SHOWN = 200
"""Characters of a path in a message."""


class ConfigError(Exception):
    """The configuration cannot be used; the message has one line a mistake, ready to print."""


def _listen_address(value: Any) -> str:
    return _address(value, "127.0.0.1:9002", "names are not looked up; 127.0.0.1: this machine only, 0.0.0.0: all", 0)


def _address(value: Any, example: str, why_no_name: str, least: int) -> str:
    """'ip:port' or '[ipv6]:port'; raises ValueError that says what is allowed, and why a host name is not."""
    if not isinstance(value, str):
        raise ValueError(f'must be ip:port in quotes, such as "{example}"')
    text = value
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not least <= int(port) <= 65535:
        raise ValueError(f"must be ip:port with a port of {least} to 65535, such as {example} or [::1]:8000")
    try:
        parsed = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        raise ValueError(f"the part before the port must be an IP address ({why_no_name})") from None
    if parsed.version == 6 and not host.startswith("["):
        raise ValueError("an IPv6 address needs brackets, such as [::1]:8000")
    return text


def _engine_address(value: Any) -> str:
    text = _address(value, "10.0.0.1:8000", "Envoy compares addresses, a host name never matches", 1)
    if ipaddress.ip_address(text.rpartition(":")[0].strip("[]")).is_unspecified:
        raise ValueError("must be the address that Envoy connects to, not a wildcard")
    return text


def _header_name(text: str) -> str:
    allowed = "abcdefghijklmnopqrstuvwxyz0123456789-_."
    if not text or any(letter not in allowed for letter in text):
        raise ValueError("must be a lower-case header name (letters, digits, '-', '_', '.')")
    return text


Address = Annotated[str, BeforeValidator(_listen_address)]
"""Where kvcar listens."""
EngineAddress = Annotated[str, BeforeValidator(_engine_address)]
"""An engine as Envoy matches it."""
HeaderName = Annotated[str, AfterValidator(_header_name)]


class Node(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def is_path(text: str, look: Callable[[Path], bool] = Path.is_file) -> bool:
    """Whether there is such a file (or what `look` asks for); a text that can be no path, PEM or Jinja, is none."""
    try:
        return look(Path(text))
    except (OSError, RuntimeError, ValueError):
        return False


def short(text: str) -> str:
    """In quotes, its beginning only where it is long: a template or a certificate where a path belongs."""
    return repr(text) if len(text) <= LONGEST_SHOWN else repr(text[:LONGEST_SHOWN]) + "..."


def _path(text: str) -> str:
    if not text.startswith("/") or "?" in text or "#" in text:
        raise ValueError("must be a path that starts with '/', without query")
    return text


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")) or len(text.split("/", 3)[2]) == 0:
        raise ValueError("must be a URL such as http://10.0.0.1:8000/metrics")
    if "@" in text.split("/", 3)[2]:
        raise ValueError("must hold no user or password: they would be shown in logs and status pages")
    return text


def _network(text: str) -> str:
    try:
        parse_network(text)
    except ConfigurationError as error:
        raise ValueError(str(error)) from None
    return text


NetworkText = Annotated[str, AfterValidator(_network)]
HttpUrl = Annotated[str, AfterValidator(_url)]
RequestPath = Annotated[str, AfterValidator(_path)]


def _json(value: dict[str, Any]) -> dict[str, Any]:
    """What an engine takes is JSON: no dates, sets, bytes, NaN."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"holds what JSON cannot ({error}): put it in quotes") from None
    return value


JsonMapping = Annotated[dict[str, Any], AfterValidator(_json)]
"""Values for a template, as a request could bring them."""
MAX_VALUES = 1_000_000
"""Of a file: aliases of aliases make gigabytes of a few lines."""


def immutable(value: Any, number: Iterator[int]) -> Any:
    """Lists become tuples: strict mode takes no list for a tuple, and the tree has to be immutable.
    `number` counts the values met, from 1 on.

    Raises RecursionError for a tree that holds itself, OverflowError for one of more than MAX_VALUES values,
    UnicodeEncodeError for a lone surrogate.
    """
    if next(number) > MAX_VALUES:
        raise OverflowError
    if isinstance(value, str):
        value.encode()
    if isinstance(value, list):
        return tuple(immutable(item, number) for item in value)
    if isinstance(value, dict):
        return {immutable(key, number): immutable(item, number) for key, item in value.items()}
    return value
