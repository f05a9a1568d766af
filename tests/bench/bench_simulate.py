"""Routing quality on a real trace: every scorer in the lab, and what one decision costs.

    .venv/bin/python -m tests.bench.bench_simulate [--full]

`run()` gives the rows of `make bench`: mean and p99 TTFT of `ttft` against the best other scorer (below 1 is better),
the same with its prefill rate misjudged by two, and the published figures of round robin and CAR. `--full` prints more:
other loads, cache sizes and engine models.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from extproc.loads.inflight import InFlight
from extproc.router import Router
from extproc.scorers import Request, build
from extproc.simulate import POLICIES, Result, TraceRequest, read_trace, simulate
from kvindex.fleet import Instance
from tests.bench.rows import Row, log, row

TRACE = Path(__file__).parents[1] / "data/traces/mooncake_conversation.jsonl.gz"
PUBLISHED = {"round_robin": (0.081, 3.28), "car": (0.210, 1.92)}
MISJUDGED = ("ttft:prefill_rate=4000", "ttft:prefill_rate=16000")
VARIANTS = ("car:lambda=0.75", "unified:load=uncached", "ttft:own_weight=1", *MISJUDGED)


def run() -> list[Row]:
    log.info("simulate: %d scorers on an hour of traffic, 8 engines", len(POLICIES) + len(MISJUDGED))
    results = {one.policy: one for one in simulate(read_trace(TRACE), 8, policies=[*POLICIES, *MISJUDGED])}
    others = [results[name] for name in POLICIES if name != "ttft"]
    rows = []
    for what, label in (("ttft_mean_s", "mean"), ("ttft_p99_s", "p99")):
        best = min(others, key=lambda one: float(getattr(one, what)))
        for name in ("ttft", *MISJUDGED):
            ours, theirs = getattr(results[name], what), getattr(best, what)
            rows.append(row(f"{name} {label} TTFT, 8 engines", ours, "s", best.policy, theirs, 1.0, 0.95))
    for name, (hit, mean) in PUBLISHED.items():
        rows.append(row(f"{name} mean TTFT", results[name].ttft_mean_s, "s", "published", mean, 1.02))
        rows.append(row(f"{name} prompt tokens missed", 1 - results[name].hit_ratio, "", "published", 1 - hit, 1.02))
    log.info("simulate: one decision, by number of instances")
    return rows + [decision_cost(count) for count in (8, 32, 128)]


class _Full:
    """Everybody holds a little of the prompt."""

    def hits(self, instance: Instance) -> tuple[tuple[int, int, int], ...]:
        return ((len(instance.name) % 5, 0, 0),)


def decision_cost(instances: int, rounds: int = 300) -> Row:
    """Microseconds of one `Router.route` with CAR; the peer is a bare loop that computes the same costs and takes the
    least."""
    fleet = tuple(Instance(f"i{n}", f"10.0.{n // 250}.{n % 250}:80") for n in range(instances))
    inflight = InFlight()
    inflight.update(fleet)
    for one in fleet:
        inflight.charge(one.name, 1000, 500)
    router, hits, request = Router(build("car")), _Full(), Request(4096, 16, now=1.0)

    def bare() -> str:
        best, name = 9.0, ""
        for one in fleet:
            load = inflight.get(one.name, 1.0)
            cost = 0.5 * (1 - hits.hits(one)[0][0] * 16 / 4096) + 0.5 * load.waiting
            if cost < best:
                best, name = cost, one.name
        return name

    times: dict[str, float] = {}
    for what, act in (("ours", lambda: router.route(request, fleet, hits, inflight, inflight, 1.0)), ("bare", bare)):
        best = 9.0
        for _ in range(5):
            started = time.perf_counter()
            for _ in range(rounds // 5):
                act()
            best = min(best, (time.perf_counter() - started) / (rounds // 5))
        times[what] = best * 1e6
    return row(f"one decision, {instances} instances", times["ours"], "us", "bare loop", times["bare"])


def table(title: str, results: list[Result]) -> Table:
    out = Table(title=title)
    for column in ("policy", "hit", "TTFT mean s", "p50", "p90", "p99", "imbalance"):
        out.add_column(column, justify="left" if column == "policy" else "right")
    for one in results:
        numbers = (one.ttft_mean_s, one.ttft_p50_s, one.ttft_p90_s, one.ttft_p99_s, one.imbalance)
        out.add_row(one.policy, f"{one.hit_ratio:.3f}", *(f"{n:.2f}" for n in numbers))
    return out


FULL: list[tuple[str, dict[str, Any]]] = [
    ("8 engines", {"engines": 8}),
    ("16 engines", {"engines": 16}),
    ("8 engines, ties by the router's own rotation", {"engines": 8, "ties": "router"}),
    ("8 engines, trace 1.2 times as fast", {"engines": 8, "speed": 1.2}),
    ("32 engines, trace twice as fast", {"engines": 32, "speed": 2.0}),
    ("8 engines, a quarter of the cache", {"engines": 8, "blocks": 500}),
    ("8 engines, hits seen only after the prefill", {"engines": 8, "events": "prefill"}),
    ("8 engines of two speeds", {"engines": 8, "rates": (4000.0,) * 4 + (12000.0,) * 4}),
]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--full", action="store_true")
    console = Console(width=120)
    trace: list[TraceRequest] = read_trace(TRACE)
    for title, options in FULL if arguments.parse_args().full else FULL[:2]:
        console.print(table(title, simulate(trace, policies=[*POLICIES, *VARIANTS], **options)))


if __name__ == "__main__":
    main()
