"""Decides one request: body -> pool -> tokens -> who holds them -> who gets it. What the ext_proc server asks.

Never blocks and never refuses: whatever cannot be scored passes with a reason, counted once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from xxhash import xxh3_128_hexdigest

from extproc.config import Headers
from extproc.decision import Decision, Ticket, instance_of
from extproc.decisions import SHOWN, DecisionLog, Record, shown
from extproc.endpoint_picker import NO_ENDPOINT, EndpointPicker, subset
from extproc.logs import ABOUT
from extproc.messages import HttpRequest, Immediate, Outcome
from extproc.metrics import Metrics
from extproc.openai import DEFAULT_ROUTES, Routes, parse_body
from extproc.pool import Ask, Pool
from extproc.pools import Pools
from extproc.reasons import Reason, Unscored
from extproc.self_verification import comparable, judge
from extproc.shedding import priority_of
from extproc.trace_log import TraceLog

if TYPE_CHECKING:  # the library is optional
    from extproc.tracing import Tracing

log = logging.getLogger(__name__)

DEFAULT_HEADERS = Headers()
MAX_SESSION_KEY = 256
CANCELLED = "cancelled"
"""In traces: a decision that was broken off."""
UNAVAILABLE = (503, 504)
"""Nobody served the request: the gateway's answer when connections fail or time out. An engine may say so, too."""
UNSERVED = 0x7C
"""Envoy's response flags that are a host's fault: UT, LR, UR, UF, UC. Not so UO (the gateway's own bounds) or UH."""


class Follow:
    """Follows one decided request: moves its load to the host that serves it, releases it, records the answer."""

    __slots__ = (
        "_clock",
        "_comparable",
        "_contended",
        "_metrics",
        "_missing",
        "_pool",
        "_record",
        "_ticket",
        "_trace",
        "_tracing",
    )

    def __init__(
        self,
        ticket: Ticket,
        record: Record,
        pool: Pool,
        metrics: Metrics,
        clock: Callable[[], float],
        trace: Callable[[int | None], None] | None,
        *,
        tracing: Tracing | None = None,
        comparable: bool = False,
        contended: bool = False,
        missing: bytes | None = None,
    ) -> None:
        """comparable, contended, missing: see `extproc.self_verification`."""
        self._ticket = ticket
        self._record = record
        self._pool = pool
        self._metrics = metrics
        self._clock = clock
        self._trace = trace
        self._tracing = tracing
        self._comparable = comparable
        self._contended = contended
        self._missing = missing

    def on_response_headers(self, status: int | None, served: str | None, flags: int | None = None) -> None:
        self._record.status = status
        decision = self._record.decision
        destinations = decision.destinations if decision is not None else ()
        if served:
            self._record.served = served
            if destinations and destinations[0] != served:
                self._ticket.moved(served, self._clock())
                self._metrics.failover.labels(self._pool.name).inc()
        if destinations:
            self._judge(destinations, status, served, flags)

    def _judge(self, destinations: tuple[str, ...], status: int | None, served: str | None, flags: int | None) -> None:
        """Who answered, and who before it in the list did not. A host outside the list says nothing of those in it:
        the gateway may not follow our list at all. An engine that says 503 itself, because its queue is full, answers;
        where the gateway does not tell its flags that cannot be known, and counts as a failure."""
        pool, now = self._pool, self._clock()
        tried = destinations[: destinations.index(served)] if served in destinations else ()
        for address in tried:
            pool.failed(address, now, f"the gateway went on to {served}")
        if status in UNAVAILABLE and flags != 0:
            if flags is None or flags & UNSERVED:
                pool.failed(served or destinations[0], now, f"requests end with {status}")
        elif served:
            pool.answered(served)

    def on_first_byte(self) -> None:
        self._active()
        self._ticket.first_byte(self._clock(), learn=self._record.status == 200)

    def on_usage(self, cached_tokens: int | None, prompt_tokens: int | None) -> None:
        if cached_tokens is not None:
            self._record.cached_tokens = cached_tokens
            self._metrics.hit(self._pool.name, "delivered", cached_tokens, prompt_tokens or 0)
            self._verify(cached_tokens, prompt_tokens)

    def _verify(self, cached: int, counted: int | None) -> None:
        """Compares with the prediction, where the answer is the chosen engine's."""
        record, decision = self._record, self._record.decision
        if not self._comparable or decision is None or decision.chosen is None or record.status != 200:
            return
        if record.served not in (None, "", decision.chosen.address):
            return
        predicted, tokens = decision.hit_tokens, decision.request.tokens
        chosen = self._pool.by_name.get(instance_of(decision.chosen))
        verdict = judge(
            predicted,
            cached,
            tokens,
            counted,
            block=decision.request.block_size,
            contended=self._contended,
            at_least=decision.rank is None and chosen is not None and chosen.dp_size > 1,
        )
        verification = self._pool.self_verification
        verification.add(verdict, (predicted - cached) / max(1, tokens), self._clock())
        if verification.state != "unknown":
            self._metrics.prediction_drift.labels(self._pool.name).set(verification.difference)

    def _active(self) -> None:
        chosen = self._record.decision.chosen if self._record.decision is not None else None
        if chosen is not None:
            self._pool.self_verification.active(instance_of(chosen), self._missing, self._clock())

    def close(self) -> None:
        self._active()
        self._ticket.close(self._clock())
        if self._trace is not None:
            self._trace(self._record.cached_tokens)
        if self._tracing is not None:
            self._tracing.add(self._record)


class PoolDecider:
    """The decider of a server with these pools; also counts what sessions pass on without asking.

    names            headers that a client may use, and whether answers explain the decision
    tracing          gets the record of each request when it is complete
    picker           for an endpoint picker: names an endpoint for what cannot be scored; None = it passes without
    """

    def __init__(
        self,
        pools: Sequence[Pool],
        metrics: Metrics,
        decisions: DecisionLog,
        *,
        names: Headers = DEFAULT_HEADERS,
        routes: Routes = DEFAULT_ROUTES,
        max_body_bytes: int = 32 << 20,
        trace: TraceLog | None = None,
        tracing: Tracing | None = None,
        picker: EndpointPicker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pools = pools if isinstance(pools, Pools) else Pools(pools)
        self._metrics = metrics
        self._decisions = decisions
        self._names = names
        self._routes = routes
        self._max_body = max_body_bytes
        self._trace = trace
        self._tracing = tracing
        self._picker = picker
        self._began = clock()
        self._clock = clock

    async def decide(self, request: HttpRequest) -> Outcome:
        """See `extproc.messages.Decider`."""
        clock = self._clock
        started = clock()
        headers = request.headers
        record = Record(time.time(), shown(headers.get("x-request-id", "")), shown(request.path.partition("?")[0]))
        traceparent = request.traceparent or headers.get("traceparent")
        if traceparent is not None and len(traceparent) <= SHOWN:
            record.traceparent = traceparent
        ABOUT.set(record)
        body = parse_body(
            request.path, headers, request.body, method=request.method, routes=self._routes, max_bytes=self._max_body
        )
        if isinstance(body, Unscored):
            return self._pass(record, body, None, started, request)
        pool = self.pools.of(body.model)
        record.model, record.endpoint = shown(body.model or ""), body.endpoint
        if pool is None:
            return self._pass(record, Unscored(Reason.MODEL, "no pool serves this model name"), None, started, request)
        record.pool = pool.name
        ask = self._ask(pool, request)
        refusal = pool.refuse(started, ask.priority)  # before the work that would be in vain
        if refusal is not None:
            return self._refuse(record, refusal, pool)
        try:
            prompt = await pool.tokens(body)
        except asyncio.CancelledError:
            self._cancelled(record, started)
            raise
        encoded = clock()
        record.tokenize_seconds = encoded - started
        if isinstance(prompt, Unscored):
            return self._pass(record, prompt, pool, started, request)
        keys = pool.keys(prompt)
        hits = pool.hits(keys, encoded)
        matched = clock()
        decision = pool.route(prompt, keys, hits, matched, ask)
        record.decision = decision
        record.scorer = scorer = ask.scorer if ask.scorer in pool.routers else pool.scorer_name
        scored = clock()
        record.match_seconds, record.score_seconds = matched - encoded, scored - matched
        stage = self._metrics.stage
        stage["tokenize"].observe(encoded - started)
        stage["match"].observe(record.match_seconds)
        stage["score"].observe(record.score_seconds)
        chosen = decision.chosen
        if chosen is None:
            reason = Reason.NO_CANDIDATE if decision.reason == "no_candidate" else Reason.INTERNAL
            return self._pass(record, Unscored(reason, decision.detail), pool, started, request)
        engine = instance_of(chosen)
        waiting = int(pool.inflight.get(engine, scored).waiting)
        reused = decision.hit_tokens // (decision.request.block_size or 1)
        missing = keys[reused] if reused < len(keys) else None
        contended = pool.self_verification.contended(engine, missing, waiting, scored)
        pool.self_verification.active(engine, missing, scored)
        ticket = decision.charge(pool.inflight, scored)
        record.total_seconds = clock() - started
        stage["total"].observe(record.total_seconds)
        name = pool.name
        metrics = self._metrics
        costs = decision.main.costs
        metrics.scored(
            name,
            scorer,
            chosen.name,
            prompt=prompt.count,
            available=decision.best_available_hit,
            chosen=decision.hit_tokens,
            spread=costs[-1][0] - costs[0][0] if len(costs) > 1 else None,
        )
        if log.isEnabledFor(logging.DEBUG):
            log.debug("request %s: %s", record.request_id, decision.explain())
        self._decisions.add(record)
        return Outcome(
            destinations=decision.destinations,
            headers=decision.headers,
            metadata={
                "pool": name,
                "scorer": scorer,
                "instance": chosen.name,
                "prompt_tokens": prompt.count,
                "hit_tokens": decision.hit_tokens,
                "best_available_hit": decision.best_available_hit,
                "speculative_tokens": decision.speculative_tokens,
            },
            response_headers=self._explain(record.scorer, chosen.name, decision) if self._names.explain else (),
            ticket=Follow(
                ticket,
                record,
                pool,
                metrics,
                clock,
                self._traced(started, pool, decision, keys),
                tracing=self._tracing,
                comparable=comparable(decision, partial=prompt.partial),
                contended=contended,
                missing=missing,
            ),
        )

    def _traced(
        self, started: float, pool: Pool, decision: Decision, keys: list[bytes]
    ) -> Callable[[int | None], None] | None:
        """What to call with the engine's own count when the request has ended, None while no trace is written."""
        trace = self._trace
        if trace is None or decision.chosen is None:
            return None
        seconds, name = started - self._began, decision.chosen.name
        tokens, size, hit = decision.request.tokens, pool.directory.block_size or 0, decision.hit_tokens
        return lambda cached: trace.add(
            seconds, keys, tokens=tokens, block_size=size, instance=name, hit=hit, cached=cached
        )

    def _ask(self, pool: Pool, request: HttpRequest) -> Ask:
        """What the client and the gateway say about routing."""
        headers, names = request.headers, self._names
        session = pool.session_header
        return Ask(
            scorer=headers.get(names.scorer) if len(pool.routers) > 1 else None,
            session=_session_key(headers.get(session)) if session is not None else None,
            priority=priority_of(headers.get(names.priority)) if pool.shedding is not None else 0,
            only=subset(request.metadata, pool.instances),
        )

    def _refuse(self, record: Record, refusal: Immediate, pool: Pool) -> Outcome:
        record.reason, record.status = "shed", refusal.status
        self._decisions.add(record)
        if self._tracing is not None:
            self._tracing.add(record)
        self._metrics.requests.labels(pool.name, "shed").inc()
        return Outcome(reason="shed", immediate=refusal)

    @staticmethod
    def _explain(scorer: str, instance: str, decision: Decision) -> tuple[tuple[str, str], ...]:
        return (
            ("x-kvcar-instance", instance),
            ("x-kvcar-scorer", scorer),
            ("x-kvcar-hit-tokens", str(decision.hit_tokens)),
            ("x-kvcar-prompt-tokens", str(decision.request.tokens)),
        )

    def pick(self, request: HttpRequest, reason: Reason) -> Outcome:
        """See `extproc.messages.Decider`."""
        headers = request.headers
        record = Record(time.time(), shown(headers.get("x-request-id", "")), shown(request.path.partition("?")[0]))
        return self._pass(record, Unscored(reason), None, self._clock(), request)

    def _pass(
        self, record: Record, unscored: Unscored, pool: Pool | None, started: float, request: HttpRequest
    ) -> Outcome:
        if self._picker is not None:
            return self._pick(self._picker, record, unscored, pool, started, request)
        reason = unscored.reason
        record.reason, record.detail = reason, unscored.detail
        record.total_seconds = self._clock() - started
        self._decisions.add(record)
        if self._tracing is not None:
            self._tracing.add(record)
        self._count(reason, pool)
        log.debug("request %s passes unscored: %s %s", record.request_id, reason, unscored.detail)
        return Outcome(reason=str(reason), metadata={"pool": pool.name} if pool is not None else {})

    def _pick(
        self,
        picker: EndpointPicker,
        record: Record,
        unscored: Unscored,
        pool: Pool | None,
        started: float,
        request: HttpRequest,
    ) -> Outcome:
        """An endpoint without a score, or 503: what a gateway expects of its endpoint picker."""
        reason = record.reason = unscored.reason
        record.detail = unscored.detail
        found = picker.pick(self.pools if pool is None else (pool,), request.metadata, started)
        record.total_seconds = self._clock() - started
        self._decisions.add(record)
        if found is None:
            record.status = NO_ENDPOINT.status
            self._metrics.unscored.labels(reason).inc()
            self._metrics.requests.labels(record.pool, "refused").inc()
            if self._tracing is not None:
                self._tracing.add(record)
            return Outcome(reason=str(reason), immediate=NO_ENDPOINT)
        pool, decision = found
        self._count(reason, pool)
        record.pool, record.decision = pool.name, decision
        ticket = decision.charge(pool.inflight, started)
        return Outcome(
            destinations=decision.destinations,
            headers=decision.headers,
            metadata={"pool": pool.name, "instance": decision.chosen.name if decision.chosen else ""},
            reason=str(reason),
            ticket=Follow(ticket, record, pool, self._metrics, self._clock, None, tracing=self._tracing),
        )

    def _cancelled(self, record: Record, started: float) -> None:
        """The time was up, or the client has left: counted by the session, shown in the trace."""
        if self._tracing is not None:
            record.reason, record.total_seconds = CANCELLED, self._clock() - started
            self._tracing.add(record)

    def _count(self, reason: Reason, pool: Pool | None) -> None:
        self._metrics.unscored.labels(reason).inc()
        self._metrics.requests.labels(pool.name if pool is not None else "", "unscored").inc()

    def unscored(self, reason: Reason) -> None:
        """A session passed a request on without asking."""
        self._count(reason, None)


def _session_key(given: str | None) -> str | None:
    """A client's key, kept short: sessions are remembered by it."""
    return (
        given
        if given is None or len(given) <= MAX_SESSION_KEY
        else xxh3_128_hexdigest(given.encode("utf-8", "replace"))
    )
