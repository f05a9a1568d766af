"""Probe requests (--live): predicted hits against the engines' own cached_tokens, directly and through the gateway.

Each instance gets one prompt of its own twice, one token each: cold, then, once its events have come, warm. The
prediction is doctor's own, from the same directory and tokenizer that a running kvcar has; through the gateway it is
the running kvcar's.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from extproc.config import Pool
from extproc.doctor.check import Check, Found, Skip
from extproc.doctor.context import Context
from extproc.doctor.engines import of
from extproc.doctor.finding import Finding, error, note, warning
from extproc.doctor.http import Answer
from extproc.doctor.listen import Listener
from extproc.openai import Body, Endpoint
from extproc.prompt.prompter import Prompt, Prompter
from kvindex.fleet import Instance

BLOCKS = 4
"""Whole blocks that a probe's prompt has at least: enough to tell a late difference from an early one."""
SENTENCE = "The quick brown fox jumps over the lazy dog while the kettle boils. "
DEFAULT_BLOCK = 16
AT_ONCE = 4
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Usage:
    """Of an answer; None = not told."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Probe:
    """
    count      prompt tokens by kvcar
    predicted  tokens that the instance's stream holds of it after the first answer
    elsewhere  instance whose stream holds it instead, "" = none
    first, second   the answers; `second` None = not sent
    """

    instance: Instance
    count: int
    block: int
    predicted: int
    elsewhere: str
    first: Answer
    second: Answer | None

    @property
    def ok(self) -> bool:
        return self.first.ok


def usage_of(answer: Answer | None) -> Usage:
    told = answer.json() if answer is not None and answer.ok else None
    usage = told.get("usage") if isinstance(told, dict) else None
    if not isinstance(usage, dict):
        return Usage()
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    count = usage.get("prompt_tokens")
    return Usage(count if isinstance(count, int) else None, cached if isinstance(cached, int) else None)


async def probe(context: Context, pool: Pool) -> tuple[Probe, ...]:
    """Sent once per examination, whoever asks first."""
    return await context.once(("probes", pool.name), lambda: _probe(context, pool))


async def _probe(context: Context, pool: Pool) -> tuple[Probe, ...]:
    prompter = await context.prompter(pool)
    if isinstance(prompter, str):
        return ()
    listener = await context.listener(pool)
    chosen = [one for one in await context.answering(pool) if one.role != "decode"]
    chosen = chosen[: context.options.max_probes // 2]
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(instance: Instance) -> Probe:
        async with slots:
            return await _pair(context, pool, prompter, listener, instance)

    return tuple(await asyncio.gather(*(one(instance) for instance in chosen)))


async def _pair(context: Context, pool: Pool, prompter: Prompter, listener: Listener, instance: Instance) -> Probe:
    page = await context.page(pool, instance)
    block = listener.directory.block_size or next(iter(page.block_sizes() if page else ()), DEFAULT_BLOCK)
    body, prompt = await question(pool, prompter, block)
    headers = context.client_headers(**({context.config.headers.rank: "0"} if instance.dp_size > 1 else {}))
    url = f"http://{instance.address}{CHAT}"
    first = await context.http.post(url, body, headers=headers)
    if not first.ok:
        return Probe(instance, prompt.count, block, 0, "", first, None)

    def held(name: str) -> int:
        size = listener.directory.block_size
        if not size:
            return 0
        keys = prompter.keys(prompt, size, listener.directory.seed, listener.directory.key_limit(prompt.count))
        return sum(listener.directory.match(keys).rank(name, 0)) * size

    whole = (prompt.count - 1) // block * block
    await listener.until(lambda: held(instance.name) >= whole, context.options.listen)
    predicted = held(instance.name)
    others = [one.name for one in await context.instances(pool) if one.name != instance.name]
    elsewhere = "" if predicted else next((name for name in others if held(name) >= whole), "")
    second = await context.http.post(url, body, headers=headers)
    return Probe(instance, prompt.count, block, predicted, elsewhere, first, second)


async def question(pool: Pool, prompter: Prompter, block: int) -> tuple[dict[str, Any], Prompt]:
    """A chat that nobody has asked before, of at least BLOCKS blocks. Raises Skip when it cannot be tokenized."""
    times = 1 + BLOCKS * block // 12
    text = f"Probe {secrets.token_hex(8)}. " + SENTENCE * times
    body = {
        "model": pool.models[0],
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 1,
        "temperature": 0,
    }
    prompt = await prompter.prompt_of(Body(Endpoint.CHAT, pool.models[0], body))
    if not isinstance(prompt, Prompt):
        raise Skip(f"a chat of pool {pool.name} cannot be tokenized here: {prompt.reason} {prompt.detail}")
    return body, prompt


async def engines(context: Context) -> Found:
    found: list[Finding] = []
    pairs = equal = 0
    for pool in context.pools:
        for one in await probe(context, pool):
            mine = list(_judge(pool, one))
            pairs += 1
            equal += not mine
            found.extend(mine)
    if not pairs:
        raise Skip("no prompt can be tokenized here, or no engine answers")
    return Found(tuple(found), f"{equal} of {pairs} engines cached what was predicted")


def _judge(pool: Pool, one: Probe) -> Iterator[Finding]:
    where = of(pool, one.instance)
    failed = one.first if not one.first.ok else one.second if one.second is not None and not one.second.ok else None
    if failed is not None:
        yield error(
            "live.failed",
            where,
            "the engine does not answer a plain chat",
            cause="an API key, another model name, or an engine that is stuck",
            evidence=(str(failed),),
            remedy="try the same with curl; --api-key is sent as bearer token",
        )
        return
    cold, warm = usage_of(one.first), usage_of(one.second)
    if cold.prompt_tokens is not None and cold.prompt_tokens != one.count:
        yield error(
            "live.prompt_tokens",
            where,
            f"the engine counts {cold.prompt_tokens} prompt tokens, kvcar {one.count}: the two prompts differ",
            cause="another tokenizer or chat template than the engine's",
            evidence=(f"usage.prompt_tokens {cold.prompt_tokens}",),
            remedy="see tokens.equal for the first token that differs",
        )
    if one.instance.events and one.elsewhere:
        yield error(
            "live.wrong_stream",
            where,
            f"its events come over the stream of instance {one.elsewhere}",
            cause="the events endpoints of the two are exchanged, so hits are credited to the wrong engine",
            evidence=(f"a prompt served by {one.instance.address} appeared at {one.elsewhere}",),
            remedy="`events` and `replay` must be of the engine at `address`",
        )
    elif one.instance.events and not one.predicted:
        yield error(
            "live.no_hit",
            where,
            "a prompt that the engine has just served is not known to be in its cache",
            cause="its events do not arrive, are not understood, or are about other tokens; see the other findings",
            evidence=(f"{one.count} tokens served; 0 predicted after listening",),
            remedy="events.* and tokens.equal say what to change",
        )
    if warm.cached_tokens is None:
        yield warning(
            "live.no_cached_tokens",
            where,
            "the engine does not report cached_tokens: delivered hits cannot be observed or verified",
            cause="vLLM reports them only when told to",
            evidence=("usage.prompt_tokens_details is missing",),
            remedy="start it with --enable-prompt-tokens-details",
        )
    elif one.predicted and one.predicted != warm.cached_tokens:
        less = warm.cached_tokens < one.predicted
        yield error(
            "live.prediction",
            where,
            f"predicted were {one.predicted} cached tokens, the engine reused {warm.cached_tokens}",
            cause="events announce blocks that the engine does not use"
            if less
            else "the engine holds more than events say",
            evidence=(f"prompt of {one.count} tokens, blocks of {one.block}",),
            remedy="`kvcar record` and `kvcar verify` show request by request where they part",
        )


# ---------------------------------------------------------------- through the gateway


async def gateway_answers(context: Context) -> Found:
    base = (context.options.gateway or "").rstrip("/")
    answer = await context.http.get(f"{base}/v1/models", headers=context.client_headers())
    found: tuple[Finding, ...] = ()
    if not answer.status or answer.status >= 500:
        found = (
            error(
                "gateway.unreachable",
                base,
                "clients get no answer from the gateway",
                cause="Envoy is down, listens elsewhere, or no engine is healthy",
                evidence=(str(answer),),
                remedy="give --gateway the URL that clients use; see envoy.* for the rest",
            ),
        )
    return Found(found, base)


async def gateway(context: Context) -> Found:
    base = (context.options.gateway or "").rstrip("/")
    found: list[Finding] = []
    for pool in context.pools:
        found.extend(await _through(context, pool, base))
    return Found(tuple(found), "chosen, served and cached as predicted")


async def _through(context: Context, pool: Pool, base: str) -> list[Finding]:
    prompter = await context.prompter(pool)
    if isinstance(prompter, str):
        raise Skip("no prompt can be tokenized here")
    listener = await context.listener(pool)
    body, prompt = await question(pool, prompter, listener.directory.block_size or DEFAULT_BLOCK)
    where = f"{base}, pool {pool.name}"
    records: list[Mapping[str, Any]] = []
    answers = []
    for _ in range(2):
        name = f"kvcar-doctor-{secrets.token_hex(8)}"
        answer = await context.http.post(base + CHAT, body, headers=context.client_headers(**{"x-request-id": name}))
        answers.append(answer)
        if not answer.ok:
            return [
                error(
                    "gateway.failed",
                    where,
                    "a plain chat through the gateway fails",
                    cause="no route, no healthy engine, or the gateway wants a key",
                    evidence=(str(answer),),
                    remedy="see envoy.* and engine.*; --api-key is sent as bearer token",
                )
            ]
        if context.admin is not None:
            record = await _record(context, pool, name, prompt.count)
            if record is None:
                return [_not_asked(context, where)]
            records.append(record)
            # the events of the first answer have to reach kvcar before the second is asked about
            await asyncio.sleep(0.2)
    if not records:
        return [
            note("gateway.unknown", where, "answers come; whether kvcar was asked is not known without its admin port")
        ]
    return list(_judge_gateway(where, records, answers))


async def _record(context: Context, pool: Pool, name: str, tokens: int) -> Mapping[str, Any] | None:
    """kvcar's record of a request; by its length where the gateway gave it another id."""
    for query in (f"request_id={name}", f"limit=20&pool={pool.name}"):
        answer = await context.ask_kvcar(f"/decisions?{query}")
        rows = (answer.json() or {}).get("decisions", []) if answer.ok else []
        for row in rows:
            decision = row.get("decision") or {}
            if row.get("request_id") == name or decision.get("prompt_tokens") == tokens:
                found: Mapping[str, Any] = row
                return found
    return None


def _not_asked(context: Context, where: str) -> Finding:
    return error(
        "gateway.not_asked",
        where,
        "the request was answered, and kvcar was not asked about it",
        cause="the ext_proc filter is missing, switched off on this route, or failed open",
        evidence=(f"{context.admin}/decisions has no record of it",),
        remedy="envoy.filter, envoy.processor and envoy.stats say which (--envoy-admin)",
    )


def _judge_gateway(where: str, records: list[Mapping[str, Any]], answers: list[Answer]) -> Iterator[Finding]:
    first, second = records[0], records[-1]
    if second.get("reason"):
        yield error(
            "gateway.unscored",
            where,
            f"kvcar passes a plain chat unscored: {second['reason']} {second.get('detail', '')}".rstrip(),
            cause="see docs/unscored.md",
            evidence=(f"path {second.get('path')}",),
            remedy="docs/unscored.md says what to do about each reason",
        )
        return
    for record in records:
        named = (record.get("decision") or {}).get("destinations") or [""]
        served = record.get("served")
        if served and served != named[0]:
            yield error(
                "gateway.not_obeyed",
                where,
                f"kvcar chose {named[0]}, Envoy used {served}",
                cause="nothing in Envoy reads the decision, its namespace is not received, or the address is unknown",
                evidence=(f"destinations {', '.join(named)}",),
                remedy="envoy.obeyed, envoy.metadata and envoy.endpoints say which (--envoy-admin)",
            )
            return
    hit = (second.get("decision") or {}).get("hit_tokens", 0)
    cached = usage_of(answers[-1]).cached_tokens
    if not hit:
        yield error(
            "gateway.no_hit",
            where,
            "the same prompt a second time has no hit anywhere",
            cause="the running kvcar does not receive or understand the engines' events",
            evidence=(f"first to {(first.get('decision') or {}).get('chosen')}, then hit_tokens 0",),
            remedy="kvcar.streams and events.* say which",
        )
    elif cached is not None and cached != hit:
        yield error(
            "gateway.prediction",
            where,
            f"kvcar predicted {hit} cached tokens, the engine reused {cached}",
            cause="events announce other blocks than the engine uses",
            evidence=(f"chosen {(second.get('decision') or {}).get('chosen')}",),
            remedy="see live.prediction and tokens.equal",
        )


CHECKS = (
    Check("live.prediction", "Probes", "predicted hits are the engines' own", ("live",), engines),
    Check("gateway.answers", "Probes", "the gateway answers", ("gateway",), gateway_answers),
    Check("gateway.routing", "Probes", "the gateway routes as kvcar says", ("gateway", "live"), gateway),
)
