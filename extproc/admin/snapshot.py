"""GET /v1/internal/kv-cache/snapshot: a stream's view for another replica (extproc/replicas.py)."""

from __future__ import annotations

from aiohttp import web

from extproc.admin.endpoint import Endpoint, Schema, reference
from extproc.admin.reply import reply
from extproc.replicas import PATH, Giver
from kvindex.exchange import Refused

TEXT: Schema = {"type": "string"}
MAX_NUMBER = 10**9


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 9 else None


def routes(giver: Giver) -> list[Endpoint]:
    async def snapshot(request: web.Request) -> web.StreamResponse:
        query = request.query
        pool, instance = query.get("pool"), query.get("instance")
        dp_rank, known = _number(query.get("dp_rank", "0")), _number(query.get("known", "0"))
        if not pool or not instance or dp_rank is None or known is None:
            return reply({"error": "pool and instance must be given; dp_rank and known are numbers"}, 400)
        try:
            body = await giver.give(pool, instance, dp_rank, known)
        except KeyError as error:
            return reply({"error": str(error.args[0])}, 404)
        except Refused as error:
            return reply({"error": str(error)}, 409)
        except TimeoutError:
            return reply({"error": "the event thread is busy"}, 503)
        return web.Response(body=body, content_type="application/vnd.msgpack")

    number: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_NUMBER - 1}
    return [
        Endpoint(
            "GET",
            PATH,
            snapshot,
            "A stream's whole view with its watermark, for another replica",
            {
                200: {"type": "string", "format": "binary"},
                **{status: reference("Error") for status in (400, 404, 409, 503)},
            },
            query={
                "pool": {**TEXT, "description": "the pool's name"},
                "instance": {**TEXT, "description": "the instance's name"},
                "dp_rank": {**number, "description": "data-parallel rank, default 0"},
                "known": {**number, "description": "an incomplete view that knows no more blocks is not given"},
            },
            media="application/vnd.msgpack",
        )
    ]
