"""Hides secrets in plain data that is about to be shown. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

MASK = "***"
SECRET = frozenset("token secret password passwd passphrase credential credentials authorization apikey".split())
PAIRS = frozenset({("api", "key"), ("access", "key"), ("private", "key")})
NAMES_A_PLACE = frozenset("file path dir header".split())
"""Keys that end so say where a secret is, not what it is: `token_file`."""
USER_INFO = re.compile(r"(?<=://)[^/?#@\s]+@")


def is_secret(key: str) -> bool:
    """Whether a key's text is a secret by its name: `admin_token`, `api-key`, `Authorization`; not `tokenizer`."""
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", key).lower())
    if words[-1] in NAMES_A_PLACE:
        return False
    return not SECRET.isdisjoint(words) or not PAIRS.isdisjoint(pairwise(words))


def masked(value: Any, key: str = "") -> Any:
    """A copy in which texts under secret keys, and user names and passwords in URLs, are `***`. Numbers are shown:
    `token_cache_bytes` is no secret."""
    if isinstance(value, Mapping):
        return {name: masked(item, key if is_secret(key) else str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item, key) for item in value]
    if not isinstance(value, str):
        return value
    return MASK if is_secret(key) else USER_INFO.sub(f"{MASK}@", value)
