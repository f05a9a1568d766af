"""Runs every check at once, each within its time; whatever goes wrong in one is a finding of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from extproc.config import Config
from extproc.doctor.check import Check, Found, Skip
from extproc.doctor.checks import ALL
from extproc.doctor.context import Context
from extproc.doctor.finding import Finding, Outcome, Report, error
from extproc.doctor.options import DoctorOptions

SHOWN = 4
"""Subjects named by a finding about many."""

Progress = Callable[[int, int, str], None]


async def examine(
    config: Config,
    options: DoctorOptions | None = None,
    *,
    progress: Progress | None = None,
    table: Sequence[Check] | None = None,
) -> Report:
    """The report on the chain that this configuration describes.

    progress   called with (checks done, checks in all, title of the one just done)
    table      the checks, default: all
    """
    options = options or DoctorOptions()
    chosen = tuple(ALL if table is None else table)
    started = time.monotonic()
    context = Context(config, options)
    done = 0

    async def one(check: Check) -> Outcome:
        nonlocal done
        outcome = await run_check(check, context)
        done += 1
        if progress is not None:
            progress(done, len(chosen), check.title)
        return outcome

    try:
        if progress is not None:
            progress(0, len(chosen), "loading tokenizers")
        # first and alone: it holds the interpreter for seconds, and would make every time-out fire
        await context.load()
        outcomes = await asyncio.gather(*(one(check) for check in chosen))
        return Report(tuple(outcomes), await context.summary(), time.monotonic() - started)
    finally:
        await context.close()


async def run_check(check: Check, context: Context) -> Outcome:
    started = time.monotonic()
    skipped = next((why for need in check.needs if (why := context.lacks(need))), "")
    found = Found()
    if not skipped:
        try:
            async with asyncio.timeout(context.options.check_timeout):
                found = await check.run(context)
        except Skip as why:
            skipped = str(why)
        except TimeoutError:
            found = Found((_late(check, context.options.check_timeout),))
        except Exception as fault:
            found = Found((_fault(check, fault),))
    seconds = time.monotonic() - started
    return Outcome(check.id, check.group, check.title, merged(found.findings), skipped, found.detail, seconds)


def merged(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """What is wrong in the same way in many places is one finding that names the places: fleets have many engines."""
    alike: dict[tuple[object, ...], list[Finding]] = {}
    for one in findings:
        alike.setdefault((one.id, one.severity, one.what, one.cause, one.remedy), []).append(one)
    return tuple(_merge(group) for group in alike.values())


def _merge(group: Sequence[Finding]) -> Finding:
    subjects = list(dict.fromkeys(one.subject for one in group))
    more = f" and {len(subjects) - SHOWN} more" if len(subjects) > SHOWN else ""
    evidence = dict.fromkeys(line for one in group for line in one.evidence)
    return replace(group[0], subject=", ".join(subjects[:SHOWN]) + more, evidence=tuple(evidence)[: 2 * SHOWN])


def _late(check: Check, seconds: float) -> Finding:
    return error(
        "doctor.timeout",
        check.id,
        f"the check did not end within {seconds:g} s, so nothing is known about: {check.title}",
        cause="something on the way accepts connections and does not answer, or this machine is very busy",
        remedy="look at the other findings first; then run again with a larger --timeout",
    )


def _fault(check: Check, fault: Exception) -> Finding:
    return error(
        "doctor.fault",
        check.id,
        f"the check itself failed, so nothing is known about: {check.title}",
        cause="a fault of kvcar doctor, or an answer of a shape it does not know",
        evidence=(f"{type(fault).__name__}: {fault}"[:300],),
        remedy="please report it with the output of --json",
    )
