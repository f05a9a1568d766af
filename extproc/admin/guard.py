"""Who may ask what of the admin port. Pure: header values in, the objection out.

a page of another site in a browser   may send requests here, but says so: Sec-Fetch-Site or Origin (as Go 1.25's
                                      CrossOriginProtection reads them); refused for all that is not GET or HEAD
a page whose name was made to point   comes with that name as Host; refused without a token, when it arrives over
here (DNS rebinding)                  loopback, where nobody needs another name than localhost
everybody else                        the token, where one is configured
actions                               also: a JSON content type, which no page can send unasked; without a token
                                      only from loopback
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping

TOKEN_HEADER = "X-Internal-Token"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})


def cross_site(method: str, headers: Mapping[str, str]) -> bool:
    """Whether a browser says that a page of another origin sends this request, which may change something."""
    if method in SAFE:
        return False
    site = headers.get("Sec-Fetch-Site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("Origin")
    return origin is not None and origin.partition("://")[2] != headers.get("Host")


def is_loopback(remote: str | None) -> bool:
    try:
        address = ipaddress.ip_address((remote or "").partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def foreign_name(host: str) -> bool:
    """Whether a Host header is a name that a foreign page may have: neither an IP address nor localhost."""
    name = host[: host.rfind("]") + 1] if host.startswith("[") else host.partition(":")[0]
    if name == "localhost" or name.endswith(".localhost"):
        return False
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return True
    return False


def has_token(headers: Mapping[str, str], expected: bytes) -> bool:
    """Compared in constant time. `Authorization: Bearer` does as well."""
    given = headers.get(TOKEN_HEADER) or headers.get("Authorization", "").removeprefix("Bearer ")
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected)


def objection(
    method: str, headers: Mapping[str, str], remote: str | None, *, expected: bytes | None, open_to_all: bool
) -> tuple[int, str] | None:
    """Status and text to refuse a request with, None = go on. `expected` None: no token is configured."""
    if cross_site(method, headers):
        return 403, "a page of another site may not send this"
    if open_to_all:
        return None
    if expected is not None:
        return None if has_token(headers, expected) else (401, "invalid internal token")
    if is_loopback(remote) and foreign_name(headers.get("Host", "localhost")):
        return 403, "ask by IP address or localhost, or set admin.token"
    return None


def action_objection(content_type: str, remote: str | None, *, with_token: bool) -> tuple[int, str] | None:
    """As `objection`, for requests that change something; to be asked after it."""
    if content_type != "application/json":
        return 415, "an action needs Content-Type: application/json"
    if not with_token and not is_loopback(remote):
        return 403, "without admin.token actions are taken from loopback only"
    return None
