"""Answers of the admin port."""

from __future__ import annotations

import json

import orjson
from aiohttp import web


def reply(value: object, status: int = 200) -> web.Response:
    """JSON; NaN and infinities become null, as JSON wants."""
    try:
        body = orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE, default=str)
    except TypeError:  # text with a lone surrogate, which JSON can carry as an escape
        body = json.dumps(value, default=str).encode() + b"\n"
    return web.Response(body=body, status=status, content_type="application/json")
