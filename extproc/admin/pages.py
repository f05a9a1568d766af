"""What the admin port shows (GET): health, metrics, status, pools, streams, decisions, configuration."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from aiohttp import web

from extproc.admin.endpoint import Endpoint, listing, record, reference
from extproc.admin.masking import masked
from extproc.admin.reply import reply
from extproc.admin.schemas import OBJECT, TEXT
from extproc.config import Config
from extproc.config import Pool as PoolConfig
from extproc.overrides import Overrides
from extproc.pool import Pool

LIMIT = 10_000


class Source(Protocol):
    """What the admin port shows and acts on; `extproc.app.App` is one. Read anew at every request."""

    @property
    def config(self) -> Config: ...
    @property
    def pools(self) -> Sequence[Pool]: ...
    @property
    def overrides(self) -> Overrides: ...
    def readiness(self) -> tuple[bool, Mapping[str, Any]]: ...
    def status(self) -> Mapping[str, Any]: ...
    def streams(self) -> list[Mapping[str, Any]]: ...
    def decisions(
        self, limit: int, pool: str | None, reason: str | None, request_id: str | None
    ) -> list[Mapping[str, Any]]: ...
    def metrics(self, accept: str) -> tuple[bytes, str]: ...


class Pages:
    """The handlers over one source."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def endpoints(self) -> list[Endpoint]:
        decisions = {
            "limit": {"type": "integer", "minimum": 1, "maximum": LIMIT, "default": 100, "description": "at most"},
            "pool": {**TEXT, "description": "of this pool"},
            "reason": {**TEXT, "description": "passed unscored for this reason (docs/unscored.md), or `shed`"},
            "request_id": {**TEXT, "description": "with this x-request-id"},
        }
        return [
            Endpoint("GET", "/healthz", self._healthz, "`ok` while the process runs", {200: TEXT}, open=True,
                     media="text/plain"),
            Endpoint("GET", "/readyz", self._readyz, "Whether both ports serve and events are followed",
                     {200: reference("Ready"), 503: reference("Ready")}, open=True),
            Endpoint("GET", "/metrics", self._metrics, "Metrics, in the text forms of Prometheus and OpenMetrics",
                     {200: TEXT}, open=True, media="text/plain"),
            Endpoint("GET", "/status", self._status, "Pools, instances with role, state and load, streams",
                     {200: reference("Status")}),
            Endpoint("GET", "/pools", self._pools, "How each pool routes: models, scorer, tokenizer, limits, instances",
                     {200: record({"pools": listing("Pool")})}),
            Endpoint("GET", "/streams", self._streams, "Every KV event stream and what is wrong with it",
                     {200: record({"streams": listing("Stream")})}),
            Endpoint("GET", "/decisions", self._decisions, "The latest decisions, newest first, each with its reasons",
                     {200: record({"decisions": listing("Decision")}), 400: reference("Error")}, decisions),
            Endpoint("GET", "/config", self._config, "The configuration in effect, secrets masked",
                     {200: record({"config": OBJECT})}),
            Endpoint("GET", "/log-level", self._log_level, "How much is logged",
                     {200: record({"level": TEXT})}),
        ]  # fmt: skip

    async def _healthz(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    async def _readyz(self, _request: web.Request) -> web.StreamResponse:
        ready, detail = self._source.readiness()
        return reply({"ready": ready, **detail}, 200 if ready else 503)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        body, content_type = self._source.metrics(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _status(self, _request: web.Request) -> web.StreamResponse:
        return reply(self._source.status())

    async def _pools(self, _request: web.Request) -> web.StreamResponse:
        config = self._source.config
        given = {pool.name: pool for pool in config.pools}
        return reply({"pools": [pool_dict(pool, given.get(pool.name), config) for pool in self._source.pools]})

    async def _streams(self, _request: web.Request) -> web.StreamResponse:
        return reply({"streams": self._source.streams()})

    async def _decisions(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        text = query.get("limit", "100")
        if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= LIMIT):
            return reply({"error": f"limit must be a number from 1 to {LIMIT}"}, 400)
        found = self._source.decisions(int(text), query.get("pool"), query.get("reason"), query.get("request_id"))
        return reply({"decisions": found})

    async def _config(self, _request: web.Request) -> web.StreamResponse:
        return reply({"config": masked(self._source.config.model_dump(mode="json"))})

    async def _log_level(self, _request: web.Request) -> web.StreamResponse:
        return reply({"level": log_level()})


def log_level() -> str:
    return logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()


def instance_dicts(pool: Pool, now: float | None = None) -> list[dict[str, Any]]:
    """The pool's instances as they are routed to now, for JSON. `now`: monotonic, for the age of loads."""
    now = time.monotonic() if now is None else now
    return [
        {
            "name": one.name,
            "address": one.address,
            "role": one.current_role,
            "state": str(one.state),
            "in_flight": pool.inflight.of_instance(one.name).requests,
            "load": load._asdict() if (load := pool.loads.get(one.name, now)) is not None else None,
        }
        for one in pool.instances
    ]


def pool_dict(pool: Pool, given: PoolConfig | None, config: Config) -> dict[str, Any]:
    """One pool for JSON: what is configured beside what is so now. `given` None: it stands in no configuration file."""
    stats = pool.prompter.refresh_stats()
    directory, events = pool.directory, config.events
    shown: dict[str, Any] = {
        "name": pool.name,
        "models": pool.models,
        "adapters": given.adapters if given else (),
        "scorer": _scorer(given.scorer) if given else {"name": pool.scorer_name, "parameters": {}},
        "decode_scorer": _scorer(given.decode_scorer) if given and given.decode_scorer else None,
        "allowed_scorers": sorted(pool.routers),
        "block_size": directory.block_size,
        "hash_seed": directory.seed,
        "engine": given.engine if given else "",
        "tokenizer": {
            "source": masked(given.tokenizer) if given else "",
            "loaded": pool.tokenizer_loaded,
            "remote": pool.prompter.remote is not None,
            "incremental": pool.prompter.incremental,
            "verified": stats.verified,
            "mismatches": stats.mismatches,
            "cache_bytes": stats.cache_bytes + stats.chain_bytes,
        },
        "load": {"source": given.load.source if given else "", "own_delta": bool(given and given.load.own_delta)},
        "limits": {
            "max_endpoints": pool.router.max_endpoints,
            "max_model_len": given.max_model_len if given else None,
            "max_streams": directory.max_streams,
            "max_blocks_per_stream": events.max_blocks_per_stream,
            "max_body_bytes": config.limits.max_body_bytes,
            "tokenize_timeout_ms": config.limits.tokenize_timeout_ms,
            "decide_timeout_ms": config.limits.decide_timeout_ms,
        },
        "speculative_blocks": pool.speculative_blocks,
        "instances": instance_dicts(pool),
    }
    if given:
        for name in ("sessions", "speculation", "approximate", "shedding"):
            part = getattr(given, name)
            shown[name] = part.model_dump(mode="json") if part is not None else None
        shown["dp"] = given.dp
    return shown


def _scorer(given: Any) -> dict[str, Any]:
    return {"name": given.name, "parameters": masked(given.parameters)}
