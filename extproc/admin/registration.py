"""The conductors' API beside `POST /query`: registrations, pushed events, look-ups by hash (docs/conductor.md).

    POST /register, /unregister   registry.py, registrar.py
    GET  /workers, /services      who is registered
    POST /query                   who holds a prompt, by token ids; in `kvcar serve` query.py answers it
    POST /query_by_hash           the same by hashes of blocks
    POST /events                  events that an engine hands over
    GET  /health                  OK

Bodies are JSON or MessagePack, answers in the encoding of the body. Where nobody may register, /register, /unregister,
/workers and /services answer 404 and say how to change that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from extproc.admin import bodies, conductor
from extproc.admin.conductor import BadQuery
from extproc.admin.endpoint import Endpoint, any_of, record, reference
from extproc.admin.schemas import COUNT, OBJECT, TEXT
from extproc.registrar import Registrar
from extproc.registry import (
    MOONCAKE,
    TENANT,
    Rejected,
    Shape,
    parse_registration,
    services_page,
    workers_page,
)
from kvindex.errors import DecodeError
from kvindex.pushes import PushResult

MAX_REGISTRATION = 64 << 10
PUSH_TIMEOUT = 30.0
"""Seconds for pushed events to be taken over."""

_REGISTRATION = record(
    {"instance_id": TEXT, "modelname": TEXT},
    {
        "type": {"enum": ["vLLM", "SGLang", "xLLM", "Mooncake"]}, "dp_rank": COUNT, "block_size": COUNT,
        "endpoint": TEXT, "medium_endpoints": OBJECT, "replay_endpoint": TEXT, "store_backend": TEXT,
        "tenant_id": TEXT, "lora_name": TEXT, "additionalsalt": TEXT, "node_id": TEXT,
        "address": TEXT, "role": TEXT, "dp_size": COUNT, "topic": TEXT,
    },
)  # fmt: skip
_UNREGISTRATION = record({"instance_id": TEXT}, {"dp_rank": any_of("integer", "null"), "tenant_id": TEXT})
_HASHES = record({"model": TEXT}, {"block_hashes": {"type": "array"}, "seq_hashes": {"type": "array"}})
_PUSH = record({"instance_id": TEXT, "events": {"type": "array", "items": OBJECT}}, {"shutdown": {"type": "boolean"}})

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Registrations:
    """The handlers. `form` is the registry's: "motor" or "mooncake"."""

    def __init__(self, registrar: Registrar, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.registrar = registrar
        self.form = registrar.registry.form
        self._clock = clock

    def routes(self, *, with_query: bool = False) -> list[Endpoint]:
        """`with_query`: also POST /query, where nobody else serves it."""
        error = reference("Error")
        wrong = {400: error, 404: error, 422: error}
        done = {201: OBJECT} if self.form != MOONCAKE else {200: OBJECT}
        page = {"description": "only this one", **TEXT}
        found = [
            Endpoint("POST", "/register", self._served(self._register), "An engine tells where its events are",
                     {**done, **wrong, 409: error}, body=_REGISTRATION),
            Endpoint("POST", "/unregister", self._served(self._unregister), "An engine, or one rank of it, leaves",
                     {200: OBJECT, **wrong}, body=_UNREGISTRATION),
            Endpoint("GET", "/workers", self._served(self._workers), "Registered instances",
                     {200: record({"workers": {"type": "array"}, "indexer": {"type": "array"}}), 404: error},
                     query={"model_name": page, "tenant_id": page}),
            Endpoint("GET", "/services", self._served(self._services), "Registered ranks, as Mooncake lists them",
                     {200: record({"count": COUNT, "services": {"type": "array"}}), 404: error}),
            Endpoint("POST", "/query_by_hash", self._served(self._query_by_hash, always=True),
                     "Who holds a prompt, by hashes of its blocks", {200: OBJECT, **wrong}, body=_HASHES),
            Endpoint("POST", "/events", self._served(self._events, always=True),
                     "Takes events that an engine hands over",
                     {200: record({"status": TEXT, "events_applied": COUNT}), **wrong, 500: OBJECT}, body=_PUSH),
            Endpoint("GET", "/health", self._health, "`OK` while the process runs", {200: TEXT}, open=True,
                     media="text/plain"),
        ]  # fmt: skip
        if with_query:
            found.append(
                Endpoint("POST", "/query", self._served(self._query, always=True),
                         "Who holds a prompt: the conductors' API", {200: OBJECT, **wrong},
                         body=record({"model": TEXT, "token_ids": {"type": "array"}}))
            )  # fmt: skip
        return found

    def _served(self, handler: Callable[[web.Request], Awaitable[web.Response]], *, always: bool = False) -> Answer:
        """`always`: also where nobody may register."""

        async def answer(request: web.Request) -> web.StreamResponse:
            closed = None if always else self.registrar.homes.closed()
            if closed is not None:
                return bodies.encoded(request, {"error": closed}, 404)
            try:
                return await handler(request)
            except Rejected as error:
                reason = {"reason": error.reason} if self.form == MOONCAKE else {}
                return bodies.encoded(request, {"error": str(error), **reason}, error.status)
            except BadQuery as error:
                return bodies.encoded(request, {"error": str(error)}, error.status)

        return answer

    async def _fields(self, request: web.Request, limit: int | None = None) -> tuple[bytes, Any]:
        data = await bodies.read(request)
        if limit is not None and len(data) > limit:
            raise BadQuery(f"a body of {len(data)} bytes, at most {limit} are taken here", 413)
        return data, await bodies.work(data, bodies.decoder(request), data)

    # -- registrations

    async def _register(self, request: web.Request) -> web.Response:
        _, fields = await self._fields(request, MAX_REGISTRATION)
        given = parse_registration(fields, self.form)
        self.registrar.register(given, self._clock())
        if self.form == MOONCAKE:
            done = {"status": "registered successfully", "instance_id": given.worker.instance_id}
            return bodies.encoded(request, done)
        return bodies.encoded(request, {"status": "ok"}, 201)

    async def _unregister(self, request: web.Request) -> web.Response:
        _, fields = await self._fields(request, MAX_REGISTRATION)
        shape = Shape(fields, self.form)
        gone = self.registrar.unregister(
            shape.text("instance_id", required=True),
            dp_rank=shape.number("dp_rank", 0, 4095),
            tenant=shape.text("tenant_id") or TENANT,
            model=shape.text("modelname") or None,
        )
        if self.form == MOONCAKE:
            done = {"status": "unregistered successfully", "removed_instances": [str(one) for one in gone]}
            return bodies.encoded(request, done)
        return bodies.encoded(request, {"status": "ok"})

    async def _workers(self, request: web.Request) -> web.Response:
        model, tenant = request.query.get("model_name"), request.query.get("tenant_id")
        registry = self.registrar.registry
        indexer = [
            {
                "model_name": home.model,
                "tenant_id": home.context.tenant,
                "worker_count": len(registry.workers(home.context)),
                "total_blocks": home.directory.index.blocks,
            }
            for home in self.registrar.homes.held()
            if model in (None, home.model) and tenant in (None, home.context.tenant)
        ]
        workers = workers_page(registry, model=model, tenant=tenant)
        return bodies.encoded(request, {"workers": workers, "indexer": indexer})

    async def _services(self, request: web.Request) -> web.Response:
        services = services_page(self.registrar.registry)
        return bodies.encoded(request, {"count": len(services), "services": services})

    # -- look-ups

    async def _query(self, request: web.Request) -> web.Response:
        data, fields = await self._fields(request)
        ask = await bodies.work(data, conductor.parse, fields, self.form)
        holder = self.registrar.homes.holder(ask.model, ask.tenant)
        return bodies.encoded(request, await bodies.work(data, conductor.answer, holder, ask, self.form))

    async def _query_by_hash(self, request: web.Request) -> web.Response:
        data, fields = await self._fields(request)
        ask = await bodies.work(data, conductor.parse_hashes, fields, self.form)
        holder = self.registrar.homes.holder(ask.model, ask.tenant)
        return bodies.encoded(request, await bodies.work(data, conductor.answer, holder, ask, self.form))

    # -- events

    async def _events(self, request: web.Request) -> web.Response:
        _, fields = await self._fields(request)
        shape = Shape(fields, self.form)
        instance_id = shape.text("instance_id", required=True)
        tenant, model = shape.text("tenant_id") or TENANT, shape.text("model_name") or None
        holders = self.registrar.homes.holders_of(instance_id, model, tenant)
        if not holders:
            raise Rejected(f"instance_id={instance_id} tenant={tenant} is not registered", 404, "not_registered")
        if len(holders) > 1:
            raise shape.wrong(f"model_name is missing: {instance_id} is registered for several models")
        pushed = asyncio.wrap_future(holders[0].directory.push(fields))
        try:
            result: PushResult = await asyncio.wait_for(asyncio.shield(pushed), PUSH_TIMEOUT)
        except DecodeError as error:
            raise shape.wrong(str(error)) from None
        except TimeoutError:
            raise BadQuery("the events are not taken over in time", 503) from None
        if result.errors:
            partial = {"status": "partial", "events_applied": result.applied, "errors": list(result.errors)}
            return bodies.encoded(request, partial, 500)
        return bodies.encoded(request, {"status": "ok", "events_applied": result.applied})

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(text="OK")
