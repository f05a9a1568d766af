"""`make bench`: every benchmark; writes bench.json, bench.md and plots.

    python -m tests.bench [--only NAME ...] [--out FOLDER]
    python -m tests.bench --check [--only NAME ...] [--times K]     exit status 1 when a ratio got worse than noise
    python -m tests.bench --reference [...]                         writes what --check compares with

A row compares two things measured in the same run, ours and a peer or baseline, in turns; `goal` is a bound of the
ratio, `aim` the one to go for. With --only the rows of the other benchmarks stay as bench.json has them. Nothing here
asserts a time; without --check the exit status is 0 whatever the figures are.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.bench import check, plots, report

ROOT = Path(__file__).resolve().parents[2]
BENCHES = (
    "bench_index", "bench_ingest", "bench_tokens", "bench_extproc", "bench_open", "bench_envoy", "bench_peers",
    "bench_beside", "bench_simulate", "bench_workers",
)  # fmt: skip
CHECKED = ("bench_index", "bench_tokens", "bench_extproc")
"""What --check runs unless told otherwise: no Envoy, no peers' processes, a few minutes."""


def measure(names: list[str], console: Console) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(names, 1):
        module = importlib.import_module(f"tests.bench.{name}")
        if not hasattr(module, "run"):
            continue
        console.print(f"{number} of {len(names)}: {name} ...", end=" ")
        started = time.monotonic()
        try:
            found = module.run()
        except ImportError as error:
            console.print(f"skipped: {error}")
            continue
        console.print(f"{time.monotonic() - started:.0f} s")
        rows += [{"bench": name, **row} for row in found]
    return rows


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", nargs="+", choices=BENCHES, metavar="NAME", help=f"some of {', '.join(BENCHES)}")
    arguments.add_argument("--out", type=Path, default=ROOT, help="where to write, default the project's folder")
    arguments.add_argument("--quiet", action="store_true", help="no table of rows, no plots")
    arguments.add_argument("--check", action="store_true", help="compare with the committed ratios")
    arguments.add_argument("--reference", action="store_true", help="write the ratios to compare with")
    arguments.add_argument("--times", type=int, default=3, help="runs of each benchmark for --check and --reference")
    given = arguments.parse_args()
    if given.check or given.reference:
        raise SystemExit(check.check(given.only or CHECKED, given.times, update=given.reference))
    console = Console()
    names = list(given.only or (name for name in BENCHES if importlib.util.find_spec(f"tests.bench.{name}")))
    rows = measure(names, console)
    if given.only:
        rows = [row for row in report.read(given.out / "bench.json") if row.get("bench") not in names] + rows
    found = report.make(rows)
    drawn = [] if given.quiet else plots.draw(found, given.out)
    report.write(found, given.out, drawn)
    wide = Console(width=200)
    if not given.quiet:
        wide.print(report.row_table(rows))
    wide.print(report.goal_table(found))
    console.print(f"wrote {', '.join(('bench.json', 'bench.md', *drawn))}")


if __name__ == "__main__":
    main()
