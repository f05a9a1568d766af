"""`POST /v1/internal/explain`: what kvcar makes of one request, and whom each scorer would choose. Nothing is charged.

    {"model", "messages" | "prompt" | "input", ...}, optional "path"; ?tokens=N ids shown (default 512)

Tokens, keys, hits and candidates come from the code that a request runs through; only the pick is not remembered. Like
any look-up it may warm the tokenizer's caches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from extproc.decision import Decision, Hits, Side, instance_of
from extproc.openai import DEFAULT_ROUTES, Body, Routes, parse_body
from extproc.pool import Pool
from extproc.prompt.prompter import Prompt
from extproc.reasons import Reason, Unscored
from extproc.router import Router
from extproc.scorers import SCORERS, build
from extproc.scorers.base import Candidate, Request

LARGE = 64 << 10
"""Bytes from which on a body is worked on in a thread."""
DEFAULT_TOKENS = 512
MAX_TOKENS = 8192
MAX_INSTANCES = 512


class Answer(NamedTuple):
    status: int
    body: dict[str, Any]


class Preview(Router):
    """A router's next answer, without it being taken: same scorer, weights and turns, no memory of the pick."""

    @classmethod
    def of(cls, router: Router, scorer: str | None = None) -> Preview:
        """`scorer`: another one instead of the router's, with its default parameters."""
        preview = cls.__new__(cls)
        preview.__dict__.update(router.__dict__)
        if scorer is not None:
            preview.scorer = build(scorer)
            preview.weights = getattr(preview.scorer, "weights", router.weights)
            if router.decode_scorer is router.scorer:
                preview.decode_scorer = preview.scorer
        return preview

    def _remember(self, request: Request, candidate: Candidate, plan: Any, side: Side) -> None:
        """Nobody is picked."""


class Explainer:
    """Over the pools there are at each request; `routes` and `max_body_bytes` as the decider has them."""

    def __init__(
        self,
        pools: Callable[[], Sequence[Pool]],
        *,
        clock: Callable[[], float],
        routes: Routes = DEFAULT_ROUTES,
        max_body_bytes: int = 32 << 20,
    ) -> None:
        self._pools = pools
        self._clock = clock
        self._routes = routes
        self._max_body = max_body_bytes

    async def explain(self, data: bytes, headers: Mapping[str, str], shown: int = DEFAULT_TOKENS) -> Answer:
        """400 for what is no request at all, else 200: `reason` says why one would pass unscored. Never raises."""
        parse = partial(self._parse, data, {key.lower(): value for key, value in headers.items()})
        body = parse() if len(data) < LARGE else await asyncio.to_thread(parse)
        if isinstance(body, Unscored):
            status = 200 if body.reason is Reason.PATH else 400
            return Answer(status, {**_refusal(body), "error": f"{body.reason}: {body.detail or 'not a request body'}"})
        pools = self._pools()
        by_model = {name: pool for pool in pools for name in pool.models}
        only = pools[0] if len(pools) == 1 else None
        pool = by_model.get(body.model) if body.model is not None else only
        if pool is None:
            models = sorted(by_model)[:20]
            why = Unscored(Reason.MODEL, f"no pool serves this model name; there are: {', '.join(models)}")
            return Answer(200, {**_refusal(why), "model": body.model})
        prompt = await pool.tokens(body)
        if isinstance(prompt, Unscored):
            return Answer(200, {**_refusal(prompt), "pool": pool.name, "model": body.model})
        return Answer(200, self._answer(pool, prompt, shown))

    def _parse(self, data: bytes, headers: Mapping[str, str]) -> Body | Unscored:
        """The path is in the body, or goes with what is in it."""
        body = parse_body("/v1/chat/completions", headers, data, max_bytes=self._max_body)
        if isinstance(body, Unscored):
            return body
        path = body.fields.get("path")
        if path is None:
            path = _path(body.fields)
        if not isinstance(path, str):
            return Unscored(Reason.BAD_REQUEST, "path must be a text")
        endpoint = self._routes.endpoint(path)
        if endpoint is None:
            return Unscored(Reason.PATH, "no path that carries a prompt")
        return Body(endpoint, body.model, body.fields, body.size)

    def _answer(self, pool: Pool, prompt: Prompt, shown: int) -> dict[str, Any]:
        now = self._clock()
        directory = pool.directory
        keys = pool.keys(prompt)
        hits = pool.hits(keys, now)
        ids = prompt.ids[: max(0, min(shown, MAX_TOKENS))]
        return {
            "pool": pool.name,
            "model": prompt.model,
            "adapter": prompt.adapter,
            "reason": None,
            "detail": "",
            "tokens": prompt.count,
            "ids": ids,
            "texts": pool.prompter.token_texts(ids),
            "truncated": prompt.truncated,
            "partial": prompt.partial,
            "salted": prompt.salt is not None,
            "reads_cache": prompt.reads_cache,
            "block_size": directory.block_size,
            "blocks": len(keys),
            "instances": [self._instance(pool, one, hits, now) for one in pool.instances[:MAX_INSTANCES]],
            "instances_left_off": max(0, len(pool.instances) - MAX_INSTANCES),
            "scorers": self._scorers(pool, prompt, hits, now),
        }

    @staticmethod
    def _instance(pool: Pool, one: Any, hits: Hits | None, now: float) -> dict[str, Any]:
        """Who holds how many blocks, rank by rank as [device, host, disk], and how busy it is."""
        load = pool.loads.get(one.name, now)
        ranks = hits.hits(one) if hits is not None else ()
        return {
            "name": one.name,
            "address": one.address,
            "role": str(one.current_role),
            "state": str(one.state),
            "ranks": [list(rank) for rank in ranks] or [[0, 0, 0]] * one.dp_size,
            "waiting": load.waiting if load else None,
            "running": load.running if load else None,
            "usage": load.usage if load else None,
            "in_flight": pool.inflight.of_instance(one.name).requests,
        }

    @staticmethod
    def _scorers(pool: Pool, prompt: Prompt, hits: Hits | None, now: float) -> list[dict[str, Any]]:
        """The pool's own first, then those a request may ask for, then all others with default parameters."""
        request = Request(prompt.count, pool.directory.block_size or 0, now=now)
        names = [*pool.routers, *(name for name in SCORERS if name not in pool.routers)]
        rows = []
        for name in names:
            own = pool.routers.get(name)
            router = Preview.of(own) if own is not None else Preview.of(pool.router, name)
            decision = router.route(request, pool.instances, hits, pool.loads, pool.inflight, now)
            use = "pool" if name == pool.scorer_name else "allowed" if own is not None else "default"
            rows.append({"name": name, "use": use, **_choice(decision)})
        return rows


def _choice(decision: Decision) -> dict[str, Any]:
    main = decision.main
    return {
        "chosen": instance_of(decision.chosen) if decision.chosen is not None else None,
        "decode": instance_of(decision.decode) if decision.decode is not None else None,
        "rank": decision.rank,
        "destinations": list(decision.destinations),
        "hit_tokens": decision.hit_tokens,
        "tied": [one.name for one in main.ordered[: main.tied]] if main.tied > 1 else [],
        "costs": [[one.name, list(cost)] for one, cost in zip(main.ordered, main.costs, strict=True)],
        "excluded": dict(main.excluded),
        "reason": decision.reason,
        "detail": decision.detail,
    }


def _refusal(why: Unscored) -> dict[str, Any]:
    return {"pool": None, "model": None, "reason": str(why.reason), "detail": why.detail}


def _path(fields: Mapping[str, Any]) -> str:
    """The path that goes with a body."""
    if "messages" in fields:
        return "/v1/chat/completions"
    return "/v1/responses" if "input" in fields else "/v1/completions"
