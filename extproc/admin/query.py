"""Who holds a prompt: the query APIs and the heartbeat of the admin port (docs/admin-api.md).

    POST /v1/internal/kv-cache/query   {"token_ids": [...]}        as xLLM has it: {"matches": [...]}; [] = status only
                                       {"model", "messages" ...}   a request: tokenized as it would be, then the same
    POST /query                        conductor.py: the conductors of Motor and Mooncake
    POST /v1/internal/heartbeat        loads/heartbeat.py: loads that xLLM engines push

A wrong body is answered with 4xx and {"error"}, whatever it holds. Large bodies are read and hashed in a thread: the
event loop also serves Envoy.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from aiohttp import web

from extproc.admin import bodies, conductor
from extproc.admin.conductor import BadQuery
from extproc.admin.endpoint import Endpoint, Schema, any_of, listing, record, reference
from extproc.admin.reply import reply
from extproc.admin.schemas import FLAG, OBJECT, TEXT
from extproc.admin.tokens import token_bytes
from extproc.loads import heartbeat
from extproc.loads.heartbeat import Heartbeats
from extproc.openai import Body, parse_body
from extproc.openai import Endpoint as Api
from extproc.pool import Pool
from extproc.pools import Pools
from extproc.prompt.prompter import Prompt
from extproc.reasons import Reason, Unscored
from extproc.registry import TENANT
from kvindex.directory import Match, StreamReport
from kvindex.discovery.xllm_registry import REGISTERED
from kvindex.fleet import Instance
from kvindex.walk import TierBlocks

NO_BLOCKS = TierBlocks(0, 0, 0)
STATIC = "static"
"""Incarnation of configured instances: the engine's own is not known, so a heartbeat of any is taken."""
THEIRS = frozenset({Reason.BAD_JSON, Reason.BAD_REQUEST, Reason.MODEL, Reason.PATH, Reason.TOO_LARGE, Reason.NO_BODY})
"""Reasons that are a mistake in the body: 400. Others tell what would happen to such a request: 200."""

_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}}
QUERY_BODY = record({}, {"token_ids": _IDS, "model": any_of("string", "null"), "messages": {"type": "array"}})
CONDUCTOR_BODY = record(
    {"model": TEXT, "token_ids": _IDS},
    {"block_size": {"type": "integer", "minimum": 0}, "tenant_id": TEXT, "lora_name": TEXT, "cache_salt": TEXT},
)
HEARTBEAT_BODY = record({"name": TEXT}, {"load_metrics": OBJECT, "latency_metrics": OBJECT})


class Queries:
    """The handlers over these pools.

    ready  queries are answered 503 before
    form   conductor form: "motor" or "mooncake"
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        *,
        ready: Callable[[], bool] = lambda: True,
        form: str = "motor",
        max_body_bytes: int = 32 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pools = pools if isinstance(pools, Pools) else Pools(pools)
        self._ready = ready
        self._form = form
        self._max_body = max_body_bytes
        self._clock = clock

    def routes(self) -> list[Endpoint]:
        wrong, busy = {400: reference("Error")}, {503: reference("Error")}
        matches = {200: record({"matches": listing("Match")}), **wrong, **busy}
        found = {200: OBJECT, **wrong, 404: reference("Error"), 422: reference("Error"), **busy}
        return [
            Endpoint("POST", "/v1/internal/kv-cache/query", self._served(self._query),
                     "Who holds a prompt: xLLM's API, and by request", matches, body=QUERY_BODY),
            Endpoint("POST", "/query", self._served(self._conductor), "Who holds a prompt: the conductors' API", found,
                     body=CONDUCTOR_BODY),
            Endpoint("POST", "/v1/internal/heartbeat", self._heartbeat, "Takes a load report of an xLLM engine",
                     {200: record({"ok": FLAG}), **wrong, 409: reference("Error")}, body=HEARTBEAT_BODY),
        ]  # fmt: skip

    def _served(
        self, handler: Callable[[web.Request, bytes], Awaitable[web.Response]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def answer(request: web.Request) -> web.StreamResponse:
            if not self._ready():
                return reply({"error": "not ready yet"}, 503)
            try:
                return await handler(request, await bodies.read(request))
            except BadQuery as error:
                return reply({"error": str(error)}, error.status)

        return answer

    # -- xLLM's query, and ours by request

    async def _query(self, _request: web.Request, data: bytes) -> web.Response:
        fields = await bodies.work(data, bodies.load, data)
        if not isinstance(fields, dict):
            raise BadQuery("the body must be an object")
        if "path" in fields or fields.keys() & {"messages", "prompt", "input"}:
            path = fields.get("path", _path(fields))
            if not isinstance(path, str):
                raise BadQuery("path must be a text")
            body = await bodies.work(data, partial(parse_body, path, {}, data, max_bytes=self._max_body))
            return await self._by_request(body)
        if "token_ids" not in fields:
            raise BadQuery("token_ids is missing: a list of token ids, or a request with model and messages or prompt")
        model, ids = fields.get("model"), fields["token_ids"]
        tokens = await bodies.work(data, _tokens, ids)
        if model is None:
            return await self._by_tokens(data, tokens)
        if not isinstance(model, str):
            raise BadQuery("model must be a text")
        if not tokens:
            return await self._by_request(Body(Api.COMPLETIONS, model, {}), status_only=True)
        prompt = {"prompt": ids, "cache_salt": fields.get("cache_salt")}
        return await self._by_request(Body(Api.COMPLETIONS, model, prompt, len(data)))

    async def _by_tokens(self, data: bytes, tokens: bytes) -> web.Response:
        prompt = Prompt(tokens, len(tokens) // 4, "")
        rows: list[dict[str, Any]] = []
        for pool in self.pools:
            match = await bodies.work(data, pool.match, prompt) if tokens else None
            rows += [_row(report, match, pool.directory.block_size or 0) for report in pool.directory.status()]
        return reply({"matches": rows})

    async def _by_request(self, body: Body | Unscored, *, status_only: bool = False) -> web.Response:
        """A request as a client would send it, or token ids for a model."""
        if isinstance(body, Unscored):
            raise _refused(body)
        pool = self.pools.of(body.model)
        if pool is None:
            raise _refused(Unscored(Reason.MODEL, f"no pool serves {body.model!r:.200}"))
        prompt: Prompt | None = None
        why: Unscored | None = None
        if not status_only:
            told = await pool.tokens(body)
            prompt, why = (None, told) if isinstance(told, Unscored) else (told, None)
        if why is not None and why.reason in THEIRS:
            raise _refused(why)
        match = pool.match(prompt) if prompt is not None else None
        size = pool.directory.block_size
        return reply(
            {
                "pool": pool.name,
                "model": body.model,
                "adapter": prompt.adapter if prompt is not None else None,
                "tokens": prompt.count if prompt is not None else None,
                "block_size": size,
                "reads_cache": prompt.reads_cache if prompt is not None else None,
                "reason": why.reason if why is not None else None,
                "detail": why.detail if why is not None else None,
                "instances": [_instance(one, match, size or 0) for one in pool.instances],
                "matches": [
                    {**_row(report, match, size or 0), **_more(report, match, size or 0)}
                    for report in pool.directory.status()
                ],
            }
        )

    # -- conductor

    async def _conductor(self, request: web.Request, data: bytes) -> web.Response:
        fields = await bodies.work(data, bodies.decoder(request), data)
        ask = await bodies.work(data, conductor.parse, fields, self._form)
        pool = self.pools.of(ask.model) if ask.tenant == TENANT else None
        found = await bodies.work(data, conductor.answer, pool, ask, self._form)
        return bodies.encoded(request, found)

    # -- heartbeat

    async def _heartbeat(self, request: web.Request) -> web.Response:
        try:
            beat = heartbeat.parse(await bodies.read(request))
        except BadQuery:
            beat = heartbeat.BAD_JSON
        answer = self._take(beat) if isinstance(beat, heartbeat.Beat) else beat
        if answer.status == 200:
            return reply({"ok": True})
        detail = {"detail": answer.detail} if answer.detail else {}
        return reply({"error": answer.error, **detail}, answer.status)

    def _take(self, beat: heartbeat.Beat) -> heartbeat.Answer:
        for pool in self.pools:
            instance = pool.by_name.get(beat.name)
            if instance is not None:
                known = instance.incarnation
                if known == STATIC or known.startswith(REGISTERED):
                    known = ""
                # a pool whose load comes from elsewhere has no use for it, which is no fault of the engine's
                return heartbeat.refuse(beat, known) or (
                    pool.loads.take(beat, self._clock()) if isinstance(pool.loads, Heartbeats) else heartbeat.OK
                )
        refused = heartbeat.refuse(beat, None)
        assert refused is not None
        return refused


def _refused(why: Unscored) -> BadQuery:
    return BadQuery(f"{why.reason}: {why.detail}" if why.detail else str(why.reason))


def _row(report: StreamReport, match: Match | None, size: int) -> dict[str, Any]:
    """One stream as xLLM tells it."""
    hits = _hits(report, match)
    return {
        "instance_name": report.instance,
        "dp_rank": report.dp_rank,
        "synchronized": report.synchronized,
        "sequence": report.sequence,
        "device_hit_tokens": hits.device * size,
        "host_only_hit_tokens": hits.host * size,
        "reusable_prefix_tokens": (hits.device + hits.host) * size,
        "device_blocks": report.status.blocks.device if report.status is not None else 0,
        "host_blocks": report.status.blocks.host if report.status is not None else 0,
        "error": report.error or "",
    }


def _more(report: StreamReport, match: Match | None, size: int) -> dict[str, Any]:
    """What xLLM does not have."""
    return {
        "disk_only_hit_tokens": _hits(report, match).disk * size,
        "disk_blocks": report.status.blocks.disk if report.status is not None else 0,
        "complete": report.complete,
    }


def _instance(one: Instance, match: Match | None, size: int) -> dict[str, Any]:
    """What an instance is good for: its rank that holds least (D13 `dp: min`)."""
    hits = match.minimum(one) if match is not None else NO_BLOCKS
    return {
        "instance_name": one.name,
        "address": one.address,
        "role": one.current_role,
        "state": str(one.state),
        "device_hit_tokens": hits.device * size,
        "host_only_hit_tokens": hits.host * size,
        "disk_only_hit_tokens": hits.disk * size,
    }


def _hits(report: StreamReport, match: Match | None) -> TierBlocks:
    return match.rank(report.instance, report.dp_rank) if match is not None and report.synchronized else NO_BLOCKS


def _path(fields: dict[str, Any]) -> str:
    """The path that goes with a body."""
    if "messages" in fields:
        return "/v1/chat/completions"
    return "/v1/responses" if "input" in fields else "/v1/completions"


def _tokens(value: object) -> bytes:
    try:
        return token_bytes(value)
    except ValueError as error:
        raise BadQuery(str(error)) from None
