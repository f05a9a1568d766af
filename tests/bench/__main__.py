"""`make bench`: measures everything, and says which goals are reached.

    python -m tests.bench [--only NAME ...] [--large] [--out FOLDER]      bench.json, bench.md and bench/*.svg
    python -m tests.bench --check [--only NAME ...] [--times K]           exit status 1: a ratio got worse than noise
    python -m tests.bench --reference [--only NAME ...] [--times K]       writes what --check compares with

A row compares two things measured in the same run, ours and a peer's or a baseline, in turns: trust ratios, not times.
With --only the rows of the other benchmarks stay as bench.json has them. Nothing here asserts a time: without --check
the exit status is 0 whatever the figures are, and 1 when a benchmark could not run.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tests.bench import check, plots, report
from tests.bench.rows import Row, log

ROOT = Path(__file__).resolve().parents[2]
BENCHES = {
    "bench_index": "hashing, decoding, look-ups, events, snapshots, memory against Dynamo's RadixTree",
    "bench_ingest": "events over real ZMQ against Dynamo's SelectionService",
    "bench_tokens": "growing chats, repeats, misses of 128k tokens against apply_chat_template",
    "bench_extproc": "the gRPC server against one that does nothing",
    "bench_open": "memory and CPU beside thousands of open exchanges",
    "bench_envoy": "server CPU of a scored request through Envoy, events and all",
    "bench_peers": "Envoy alone, with a no-op ext_proc, with kvcar; sglang-router, vllm-router: CPU and latency",
    "bench_beside": "latency while events come at 50k, 200k, 1 M blocks/s, and beside 8 MiB snapshots",
    "bench_workers": "CPU, event cost and memory of two workers against one",
    "bench_simulate": "time to first token of every scorer on a real trace; cost of a decision",
}
QUICK = ("bench_index", "bench_ingest", "bench_tokens", "bench_extproc", "bench_open", "bench_envoy")
"""What --check runs unless told otherwise: ratios of CPU, memory and calls that take turns, not of waiting."""


def measure(names: Sequence[str], *, large: bool = False) -> tuple[list[Row], list[str]]:
    """(rows, names of those that failed). One that is not installed is left out, and one that fails stops no other."""
    rows: list[Row] = []
    failed = []
    for number, name in enumerate(names, 1):
        log.info("%d of %d, %s: %s", number, len(names), name, BENCHES[name])
        try:
            module = importlib.import_module(f"tests.bench.{name}")
            found = module.run(large=True) if large and name == "bench_index" else module.run()
        except ImportError as error:
            log.warning("%s is left out: %s", name, error)
        except Exception:
            log.exception("%s failed, the others go on", name)
            failed.append(name)
        else:
            rows += [{"bench": name, **row} for row in found]
    return rows, failed


def tell_progress() -> None:
    """Lines of `log` to standard error, with the time since the start."""
    started = time.monotonic()

    class Passed(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            minutes, seconds = divmod(int(time.monotonic() - started), 60)
            return f"{minutes:2}:{seconds:02}  {super().format(record)}"

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Passed())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def main(given: Sequence[str] | None = None) -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", nargs="+", choices=BENCHES, metavar="NAME", help=f"some of {', '.join(BENCHES)}")
    arguments.add_argument(
        "--large", action="store_true", help="index of 10 M blocks instead of 1 M: 3 GB, 12 minutes more"
    )
    arguments.add_argument("--out", type=Path, default=ROOT, help="where to write, default the project's folder")
    arguments.add_argument("--rows-only", action="store_true", help=argparse.SUPPRESS)
    arguments.add_argument("--check", action="store_true", help="compare with the committed ratios")
    arguments.add_argument("--reference", action="store_true", help="write the ratios to compare with")
    arguments.add_argument("--times", type=int, default=3, help="runs of each benchmark for --check and --reference")
    options = arguments.parse_args(given)
    tell_progress()
    if options.check:
        return check.check(options.only or QUICK, options.times)
    if options.reference:
        return check.write_reference(options.only or list(BENCHES), options.times, keep=options.only is not None)
    names = options.only or list(BENCHES)
    rows, failed = measure(names, large=options.large)
    if options.rows_only:
        report.write_json(report.make(rows), options.out)
        return 1 if failed else 0
    kept = [] if len(names) == len(BENCHES) else report.read(options.out / "bench.json")
    found = report.make(sorted(
        [*(row for row in kept if row.get("bench") not in names), *rows],
        key=lambda row: list(BENCHES).index(row["bench"]) if row["bench"] in BENCHES else len(BENCHES),
    ))  # fmt: skip
    report.write_json(found, options.out)  # first of all: what follows may be wanted, this took minutes
    drawn = plots.draw(found, options.out)
    report.write(found, options.out, drawn)
    console = Console(width=160)
    if options.only:  # a hundred lines and more of a whole run are better read in bench.md
        console.print(report.row_table(rows))
    console.print(*report.side_by_side(rows), report.goal_table(found))
    console.print(f"wrote {', '.join(('bench.json', 'bench.md', *drawn))}")
    if failed:
        console.print(f"failed, see above: {', '.join(failed)}", style="red")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
