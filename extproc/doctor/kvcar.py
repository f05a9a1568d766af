"""Checks of the running kvcar, by its own admin port."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc import __version__
from extproc.config import Pool
from extproc.doctor.check import Check, Found, Skip
from extproc.doctor.context import Context
from extproc.doctor.engine_page import samples
from extproc.doctor.finding import Finding, error, note, warning
from extproc.self_verification import TOO_FEW

NEEDS = ("kvcar",)
OURS = frozenset({"no_tokenizer", "no_template", "timeout", "internal", "no_candidate", "renderer", "too_large"})
"""Reasons for unscored requests that settings cure; the others are about what clients send."""
ENOUGH, SHARE = 20, 0.1
"""Shares of unscored requests say something from so many requests on, and matter above this share."""


async def running(context: Context) -> Found:
    answer = await context.kvcar("/status")
    if answer.status == 401:
        return Found(
            (
                error(
                    "kvcar.token",
                    f"{context.admin}",
                    "the running kvcar refuses this configuration's admin.token",
                    cause="it was started with another one",
                    evidence=(str(answer),),
                    remedy="run doctor with the configuration that kvcar was started with",
                ),
            )
        )
    if not answer.ok or not isinstance(answer.json(), dict) or "pools" not in answer.json():
        # before the first start there is nothing wrong; behind a gateway there is
        make = error if context.options.envoy_admin or context.options.gateway else warning
        return Found(
            (
                make(
                    "kvcar.not_running",
                    f"{context.admin}",
                    "kvcar does not answer: Envoy balances without it",
                    cause="it is not running, or admin.address is not where it listens",
                    evidence=(str(answer),),
                    remedy="kvcar serve -c FILE; --admin names another address",
                ),
            )
        )
    version = answer.json().get("version")
    found: tuple[Finding, ...] = ()
    if version != __version__:
        found = (
            note(
                "kvcar.version",
                f"{context.admin}",
                f"kvcar {version} is running, this doctor is of {__version__}",
                remedy="use the doctor of the running version: what it checks may have changed",
            ),
        )
    return Found(found, f"kvcar {version}")


async def configuration(context: Context) -> Found:
    """Does it run what the file says?"""
    status = await context.status()
    there = {str(one.get("name")): one for one in status["pools"]}
    found: list[Finding] = []
    for pool in context.pools:
        if pool.name not in there:
            found.append(_other(pool, f"it has the pools {', '.join(there) or 'none'}"))
            continue
        row = there[pool.name]
        addresses = {one.get("address") for one in row.get("instances", ())}
        missing = sorted({one.address for one in pool.instances} - addresses)
        names = {*pool.models, *pool.adapters} - set(row.get("models", ()))
        if missing or names:
            what = [f"lacks instances {', '.join(missing)}"] * bool(missing)
            found.append(_other(pool, "; ".join([*what, *[f"lacks models {', '.join(sorted(names))}"] * bool(names)])))
        if row.get("tokenizer_loaded") is False and pool.remote_tokenizer is None:
            found.append(
                error(
                    "kvcar.no_tokenizer",
                    f"pool {pool.name}",
                    "the running kvcar could not load the tokenizer: the pool's requests pass unscored",
                    cause="its log says why; see tokens.load",
                    remedy="correct pools[*].tokenizer, and restart kvcar",
                )
            )
    return Found(tuple(found), f"{len(there)} pools")


def _other(pool: Pool, what: str) -> Finding:
    return warning(
        "kvcar.other_configuration",
        f"pool {pool.name}",
        f"the running kvcar has another configuration: {what}",
        cause="the file was changed after the start, or it is another kvcar's",
        remedy="restart kvcar with this file",
    )


async def streams(context: Context) -> Found:
    """The running kvcar's own view; doctor's own is events.*."""
    found: list[Finding] = []
    count = good = 0
    for pool in context.pools:
        for row in (await context.pool_status(pool)).get("streams", ()):
            count += 1
            good += bool(row.get("synchronized"))
            if not row.get("synchronized") and (row.get("sequence") is not None or not row.get("connected")):
                found.append(
                    warning(
                        "kvcar.stream",
                        f"instance {row.get('instance')} rank {row.get('dp_rank')} of pool {pool.name}",
                        "the running kvcar credits no hits to this instance: its stream is not synchronized",
                        cause=str(row.get("error") or row.get("state")),
                        evidence=(f"state {row.get('state')}, connected {row.get('connected')}",),
                        remedy="see events.* for this instance; it heals by itself once the cause is gone",
                    )
                )
    return Found(tuple(found), f"{good} of {count} synchronized")


CHOSEN = frozenset({"active", "lease_lost", "probation"})
LEFT_OUT = {
    "draining": "taken out, by discovery or by POST /instances/drain",
    "suspect": "its lease is gone and it does not answer",
    "unreachable": "requests to it failed, or its metrics did not answer",
}


async def instances(context: Context) -> Found:
    """Whom may it choose? Role by role, as it chooses."""
    found: list[Finding] = []
    count = good = 0
    for pool in context.pools:
        roles: dict[str, list[tuple[str, str]]] = {}
        for row in (await context.pool_status(pool)).get("instances", ()):
            if row.get("state") is not None:
                roles.setdefault(str(row.get("role", "default")), []).append((str(row.get("name")), str(row["state"])))
        for role, members in roles.items():
            out = [(name, state) for name, state in members if state not in CHOSEN]
            count += len(members)
            good += len(members) - len(out)
            told = ", ".join(f"{name}: {state}" for name, state in out[:8])
            why = "; ".join(f"{state}: {LEFT_OUT[state]}" for state in sorted({s for _, s in out} & LEFT_OUT.keys()))
            remedy = "POST /instances/undrain for a drained one; the others by what their log and network say"
            if len(out) == len(members):
                what = f"no instance of role {role} may be chosen: its requests pass unscored, reason no_candidate"
                found.append(
                    error("kvcar.no_candidate", f"pool {pool.name}", what, cause=why, evidence=(told,), remedy=remedy)
                )
            elif out:
                found.append(
                    note("kvcar.left_out", f"pool {pool.name}", f"get no requests: {told}", cause=why, remedy=remedy)
                )
    return Found(tuple(found), f"{good} of {count}")


async def loads(context: Context) -> Found:
    found: list[Finding] = []
    count = 0
    for pool in context.pools:
        rows = (await context.pool_status(pool)).get("instances", ())
        count += len(rows)
        silent = [str(row.get("name")) for row in rows if row.get("load") is None]
        if silent:
            found.append(
                error(
                    "kvcar.no_load",
                    f"pool {pool.name}",
                    f"no valid, fresh load report of {', '.join(silent[:8])}: they are never chosen by a scorer that "
                    "reads reports",
                    cause=f"load.source is {pool.load.source}; a missing report is never taken for idleness",
                    evidence=(f"scorer {pool.scorer.name}",),
                    remedy="prometheus: is /metrics reachable from kvcar; heartbeat: does the engine send any",
                )
            )
    return Found(tuple(found), f"{count} instances")


async def unscored(context: Context) -> Found:
    """Shares by reason, since the start."""
    values = samples((await _metrics(context)), ("kvcar_unscored_total", "kvcar_requests_total"))
    total = sum(value for name, _, value in values if name == "kvcar_requests_total")
    found: list[Finding] = []
    for name, labels, value in values:
        if name != "kvcar_unscored_total" or total < ENOUGH or value < SHARE * total:
            continue
        reason = labels.get("reason", "?")
        make = warning if reason in OURS else note
        found.append(
            make(
                "kvcar.unscored",
                reason,
                f"{100 * value / total:.0f} % of the requests pass unscored: {reason}",
                cause="see docs/unscored.md",
                evidence=(f"{value:.0f} of {total:.0f} requests since the start",),
                remedy="docs/unscored.md says what to do about each reason",
            )
        )
    return Found(tuple(found), f"{total:.0f} requests")


async def faults(context: Context) -> Found:
    values = samples(await _metrics(context), ("kvcar_faults_total",))
    found = [
        warning(
            "kvcar.faults",
            labels.get("where", "?"),
            f"{value:.0f} faults: {labels.get('where')}",
            cause="malformed, unknown: what the gateway sends; the others are kvcar's own",
            remedy="the log has one line for each kind; please report kvcar's own",
        )
        for _, labels, value in values
        if value
    ]
    return Found(tuple(found), "none")


async def drift(context: Context) -> Found:
    """What the running kvcar finds when it compares predictions with delivered hits; nothing judged is no success."""
    found: list[Finding] = []
    shown: list[str] = []
    unknown: list[str] = []
    for pool in context.pools:
        told: Mapping[str, Any] = (await context.pool_status(pool)).get("self_verification") or {}
        state = told.get("state", "unknown")
        shown.append(f"{state}, {told.get('samples', 0)} samples")
        if state == "unknown":
            unknown.append(str(told.get("reason") or TOO_FEW))
        if state == "drift":
            found.append(
                warning(
                    "kvcar.drift",
                    f"pool {pool.name}",
                    f"delivered hits are not the predicted ones: {told.get('likely_cause')}",
                    cause=str(told.get("likely_cause")),
                    evidence=(
                        ", ".join(
                            f"{key} {told.get(key)}"
                            for key in ("samples", "equal", "over", "under", "prompt_token_mismatch")
                        ),
                    ),
                    remedy=str(told.get("remedy")),
                )
            )
    if unknown and len(unknown) == len(shown):
        raise Skip("; ".join(dict.fromkeys(unknown)))
    return Found(tuple(found), "; ".join(shown))


async def _metrics(context: Context) -> str:
    answer = await context.kvcar("/metrics")
    if not answer.ok:
        raise Skip("kvcar does not answer")
    return answer.body.decode("utf-8", "replace")


CHECKS = (
    Check("kvcar.running", "kvcar", "kvcar is running", NEEDS, running),
    Check("kvcar.configuration", "kvcar", "it runs this configuration", NEEDS, configuration),
    Check("kvcar.streams", "kvcar", "its streams are synchronized", NEEDS, streams),
    Check("kvcar.instances", "kvcar", "its instances may be chosen", NEEDS, instances),
    Check("kvcar.loads", "kvcar", "it has a load of every instance", NEEDS, loads),
    Check("kvcar.unscored", "kvcar", "requests are scored", NEEDS, unscored),
    Check("kvcar.faults", "kvcar", "no faults", NEEDS, faults),
    Check("kvcar.drift", "kvcar", "predictions hold", NEEDS, drift),
)
