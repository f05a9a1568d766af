"""Checks of what the engines say of themselves over HTTP: nothing is generated."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Sequence
from email.utils import parsedate_to_datetime

from extproc.config import Pool
from extproc.doctor.check import Check, Found, Skip
from extproc.doctor.context import Context
from extproc.doctor.engine_page import EnginePage
from extproc.doctor.finding import Finding, error, note, warning
from kvindex.fleet import Instance

NEEDS = ("engines",)
CLOCK_LIMIT = 5.0
"""Seconds. Nothing depends on equal clocks but what people compare: logs, event lag, load reports' age."""
SALT_FROM = (0, 17)
"""First vLLM version whose events tell extra keys."""


def of(pool: Pool, instance: Instance) -> str:
    """How findings name an instance."""
    return f"instance {instance.name} of pool {pool.name}"


async def over_pages(
    context: Context, judge: Callable[[Pool, Instance, EnginePage], Iterator[Finding]]
) -> tuple[list[Finding], int]:
    """(findings, pages read) of every engine's /metrics page. Raises Skip when no engine has one."""
    found: list[Finding] = []
    read = 0
    for pool in context.pools:
        instances = await context.instances(pool)
        pages = await asyncio.gather(*(context.page(pool, one) for one in instances))
        for one, page in zip(instances, pages, strict=True):
            if page is not None:
                read += 1
                found.extend(judge(pool, one, page))
    if not read:
        raise Skip("no engine shows a /metrics page")
    return found, read


async def reachable(context: Context) -> Found:
    found: list[Finding] = []
    count = 0
    for pool in context.pools:
        instances = await context.instances(pool)
        if not instances:
            found.append(
                warning(
                    "engine.none",
                    f"pool {pool.name}",
                    "the pool has no instance, so its requests pass unscored",
                    cause="none is written down, and none was discovered",
                    remedy="add pools[*].instances; with discovery only, run doctor while kvcar runs",
                )
            )
        answers = await asyncio.gather(*(context.engine(one, "/health") for one in instances))
        for one, answer in zip(instances, answers, strict=True):
            count += 1
            if not answer.status:
                found.append(
                    error(
                        "engine.unreachable",
                        of(pool, one),
                        f"nobody answers at {one.address}",
                        cause="the engine is down, still loading, or its address is not the one Envoy connects to",
                        evidence=(str(answer),),
                        remedy="start the engine, or correct `address`",
                    )
                )
            elif answer.status >= 500:
                found.append(
                    warning(
                        "engine.unhealthy",
                        of(pool, one),
                        "the engine answers, and says that it is not healthy",
                        evidence=(str(answer),),
                        remedy="look at the engine's log; Envoy's health check sees the same",
                    )
                )
    return Found(tuple(found), f"{count} instances")


async def models(context: Context) -> Found:
    found: list[Finding] = []
    for pool in context.pools:
        for one in await context.answering(pool):
            answer = await context.engine(one, "/v1/models")
            if answer.status in (401, 403):
                found.append(_refused(context, pool, one, str(answer)))
            rows = (answer.json() or {}).get("data") if isinstance(answer.json(), dict) else None
            if answer.ok and isinstance(rows, list):
                found.extend(_models(pool, one, [row for row in rows if isinstance(row, dict)]))
    return Found(tuple(found), "served names are those of the pools")


def _refused(context: Context, pool: Pool, one: Instance, seen: str) -> Finding:
    given = context.options.api_key is not None
    return warning(
        "engine.api_key",
        of(pool, one),
        "the engine refuses the API key, so its models and tokens are not checked"
        if given
        else "the engine wants an API key, so its models and tokens are not checked",
        cause="it was started with another --api-key" if given else "it was started with --api-key, and none was given",
        evidence=(seen,),
        remedy="--api-key KEY, or KVCAR_API_KEY in the environment",
    )


def _models(pool: Pool, one: Instance, rows: Sequence[dict[str, object]]) -> Iterator[Finding]:
    base = {str(row.get("id")) for row in rows if not row.get("parent")}
    adapters = {str(row.get("id")) for row in rows if row.get("parent")}
    known = {*pool.models, *pool.adapters}
    if base and not base & known:
        yield error(
            "engine.model",
            of(pool, one),
            f"the engine serves {', '.join(sorted(base))}, the pool {', '.join(pool.models)}: requests that one of the "
            "two takes, the other refuses",
            cause="pools[*].models must hold the name that clients send, which is the engine's --served-model-name",
            evidence=(f"/v1/models: {', '.join(sorted(base | adapters))}",),
            remedy=f"models: [{', '.join(sorted(base))}]",
        )
    if unknown := sorted(adapters - known):
        yield warning(
            "engine.adapter",
            of(pool, one),
            f"requests for the adapters {', '.join(unknown[:8])} pass unscored (model)",
            cause="LoRA adapters have cache entries of their own, so kvcar must know their names",
            evidence=(f"/v1/models: parent of {unknown[0]} is {next(iter(sorted(base)), '?')}",),
            remedy=f"adapters: [{', '.join(unknown)}]",
        )
    if missing := sorted(set(pool.adapters) - adapters - base):
        yield note(
            "engine.adapter_missing",
            of(pool, one),
            f"configured adapters that this engine does not have loaded: {', '.join(missing)}",
            cause="they may be loaded on demand; until then the engine answers 404",
        )


async def block_size(context: Context) -> Found:
    sizes: set[int] = set()

    def judge(pool: Pool, one: Instance, page: EnginePage) -> Iterator[Finding]:
        told = page.block_sizes()
        sizes.update(told[:1])
        if told and isinstance(pool.block_size, int) and pool.block_size not in told:
            yield error(
                "engine.block_size",
                of(pool, one),
                f"the engine's blocks have {told[0]} tokens, the pool's {pool.block_size}: none of its events is used",
                cause="pools[*].block_size must be the engine's --block-size (its hash block size)",
                evidence=(f"cache_config_info: {', '.join(f'{k}={v}' for k, v in page.cache.items() if 'size' in k)}",),
                remedy=f"block_size: {told[0]}, or block_size: auto",
            )

    found, _ = await over_pages(context, judge)
    return Found(tuple(found), f"{', '.join(map(str, sorted(sizes))) or 'not told'} tokens")


async def prefix_caching(context: Context) -> Found:
    def judge(pool: Pool, one: Instance, page: EnginePage) -> Iterator[Finding]:
        if page.prefix_caching is False and one.current_role != "decode":
            yield error(
                "engine.prefix_caching",
                of(pool, one),
                "prefix caching is off in this engine: it reuses nothing, and there is nothing to route by",
                cause="--no-enable-prefix-caching, or a model for which vLLM switches it off",
                evidence=("vllm:cache_config_info enable_prefix_caching=False",),
                remedy="start it with --enable-prefix-caching",
            )
        if page.sleeping:
            yield warning(
                "engine.sleeping",
                of(pool, one),
                "the engine sleeps: its cache is gone, and an idle engine does not say so",
                evidence=("vllm:engine_sleep_state",),
                remedy="wake it up; kvcar learns of the lost cache with the next event",
            )

    found, read = await over_pages(context, judge)
    return Found(tuple(found), f"{read} engines")


async def ranks(context: Context) -> Found:
    def judge(pool: Pool, one: Instance, page: EnginePage) -> Iterator[Finding]:
        count = len(page.ranks)
        if not count or count == one.dp_size:
            return
        more = count > one.dp_size
        yield error(
            "engine.ranks",
            of(pool, one),
            f"the engine has {count} data-parallel ranks, configured are {one.dp_size}: "
            + ("what the others hold is not seen" if more else "a rank that does not exist makes every hit 0"),
            cause="dp_size must be the engine's --data-parallel-size",
            evidence=(f"/metrics has series of the ranks {sorted(page.ranks)}",),
            remedy=f"dp_size: {count}",
        )

    found, _ = await over_pages(context, judge)
    return Found(tuple(found), "as configured")


async def kind(context: Context) -> Found:
    seen: set[str] = set()

    def judge(pool: Pool, one: Instance, page: EnginePage) -> Iterator[Finding]:
        seen.add(page.kind)
        if page.kind and pool.engine in ("vllm", "sglang") and page.kind != pool.engine:
            yield warning(
                "engine.kind",
                of(pool, one),
                f"the engine looks like {page.kind}, the pool says {pool.engine}: prompts may be rendered differently",
                cause="pools[*].engine chooses the engine's rules for messages and tools",
                evidence=(f"names of /metrics begin with {page.kind}",),
                remedy=f"engine: {page.kind}",
            )

    found, _ = await over_pages(context, judge)
    return Found(tuple(found), ", ".join(sorted(filter(None, seen))) or "not told")


async def hash_seed(context: Context) -> Found:
    """Routers that compare engine hashes need equal seeds; kvcar does not. Said because people look for it."""
    algorithms: set[str] = set()

    def judge(pool: Pool, one: Instance, page: EnginePage) -> Iterator[Finding]:
        algorithms.add(page.cache.get("prefix_caching_hash_algo", ""))
        return iter(())

    await over_pages(context, judge)
    algorithms.discard("")
    found: tuple[Finding, ...] = ()
    if len(algorithms) > 1:
        found = (
            note(
                "engine.hash_algorithms",
                "engines",
                f"engines hash blocks differently ({', '.join(sorted(algorithms))}): that does not matter here",
                cause="kvcar computes content keys from token ids and never compares engines' hashes",
            ),
        )
    return Found(found, "PYTHONHASHSEED and hash algorithm do not matter: blocks are known by their tokens")


async def versions(context: Context) -> Found:
    found: list[Finding] = []
    shown = []
    for pool in context.pools:
        by_version: dict[str, list[str]] = {}
        instances = await context.answering(pool)
        answers = await asyncio.gather(*(context.engine(one, "/version") for one in instances))
        for one, answer in zip(instances, answers, strict=True):
            told = answer.json() if answer.ok else None
            version = told.get("version") if isinstance(told, dict) else None
            if isinstance(version, str):
                by_version.setdefault(version, []).append(one.name)
        shown += sorted(by_version)
        found.extend(_versions(pool, by_version))
    return Found(tuple(found), f"engines {', '.join(dict.fromkeys(shown)) or 'tell none'}")


def _versions(pool: Pool, by_version: dict[str, list[str]]) -> Iterator[Finding]:
    if len(by_version) > 1:
        yield warning(
            "engine.versions",
            f"pool {pool.name}",
            f"engines of one pool run different versions: {', '.join(sorted(by_version))}",
            cause="versions may render and cut prompts differently; kvcar computes one prompt for the pool",
            evidence=tuple(f"{version}: {', '.join(names[:4])}" for version, names in sorted(by_version.items())),
            remedy="run one version; the check of tokens shows whether it matters now",
        )
    for version, names in by_version.items():
        numbers = re.match(r"v?(\d+)\.(\d+)", version)
        if pool.engine == "vllm" and numbers and (int(numbers[1]), int(numbers[2])) < SALT_FROM:
            yield note(
                "engine.no_extra_keys",
                f"pool {pool.name}",
                f"vLLM {version} does not tell salted blocks and images from plain text in its events",
                cause="extra_keys are published from 0.17 on",
                evidence=(f"instances {', '.join(names[:4])}",),
                remedy="matters for requests with cache_salt or media alone: their blocks count as plain text",
            )


async def clocks(context: Context) -> Found:
    found: list[Finding] = []
    largest = 0.0
    for pool in context.pools:
        for one in await context.answering(pool):
            answer = await context.engine(one, "/health")
            try:
                told = parsedate_to_datetime(answer.headers["date"]).timestamp()
            except (KeyError, ValueError, TypeError):
                continue
            # the header has whole seconds, cut off
            apart = answer.at - told - 0.5
            largest = max(largest, abs(apart))
            if abs(apart) > CLOCK_LIMIT:
                found.append(clock_finding(of(pool, one), apart, f"Date: {answer.headers['date']}"))
    return Found(tuple(found), f"at most {largest:.1f} s apart")


def clock_finding(subject: str, apart: float, seen: str) -> Finding:
    side = "behind" if apart > 0 else "ahead of"
    return warning(
        "engine.clock",
        subject,
        f"its clock is {abs(apart):.0f} s {side} this machine's: event lag and times in logs mislead",
        cause="one of the two clocks is not synchronized; routing itself does not depend on it",
        evidence=(seen, f"here it was {time.strftime('%a, %d %b %Y %H:%M:%S GMT', time.gmtime())}"),
        remedy="run chrony or systemd-timesyncd on both",
    )


CHECKS = (
    Check("engine.reachable", "Engines", "engines answer", NEEDS, reachable),
    Check("engine.versions", "Engines", "one version", NEEDS, versions),
    Check("engine.models", "Engines", "served models and adapters", NEEDS, models),
    Check("engine.kind", "Engines", "kind of engine", NEEDS, kind),
    Check("engine.prefix_caching", "Engines", "prefix caching is on", NEEDS, prefix_caching),
    Check("engine.block_size", "Engines", "block size", NEEDS, block_size),
    Check("engine.ranks", "Engines", "data-parallel ranks", NEEDS, ranks),
    Check("engine.hash_seed", "Engines", "hash seeds", NEEDS, hash_seed),
    Check("engine.clocks", "Engines", "clocks agree", NEEDS, clocks),
)
