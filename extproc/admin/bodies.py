"""Bodies of requests to the admin port: read, decoded, worked on beside the event loop when they are large."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

import msgpack
import orjson
from aiohttp import web

from extproc.admin.conductor import BadQuery
from extproc.admin.reply import reply

T = TypeVar("T")
LARGE = 64 << 10
"""Bytes from which on a body is worked on in a thread."""
MSGPACK = frozenset({"application/msgpack", "application/x-msgpack"})


async def read(request: web.Request) -> bytes:
    """Raises BadQuery for one that ends early or is compressed; the application bounds its size (413)."""
    if request.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
        raise BadQuery("a compressed body is not taken", 415)
    try:
        return await request.read()
    except web.RequestPayloadError:
        raise BadQuery("the body cannot be read") from None


def decoder(request: web.Request) -> Callable[[bytes], Any]:
    """What reads this body, by its content type: MessagePack where it says so, else JSON."""
    return unpack if request.content_type in MSGPACK else load


def load(data: bytes) -> Any:
    """JSON; lone surrogates and huge numbers, which engines take, too."""
    try:
        return orjson.loads(data)
    except ValueError:
        pass
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise BadQuery("the body is no JSON") from None


def unpack(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException):
        raise BadQuery("the body is no MessagePack") from None


def encoded(request: web.Request, value: object, status: int = 200) -> web.Response:
    """The answer in the encoding of the request's body."""
    if request.content_type in MSGPACK:
        return web.Response(body=msgpack.packb(value), status=status, content_type=request.content_type)
    return reply(value, status)


async def work(data: bytes, work: Callable[..., T], *arguments: Any) -> T:
    """At once for small bodies."""
    return await asyncio.to_thread(work, *arguments) if len(data) > LARGE else work(*arguments)
