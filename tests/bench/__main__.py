"""`make bench`: every benchmark, one table of ratios, bench.json and bench.md beside it.

    python -m tests.bench [--only NAME ...]

A row compares two things measured in the same run: ours and a peer or baseline. `goal` is the ratio to reach at least,
`aim` the one to go for. Nothing here asserts a time; the exit status is 0 whatever the figures are.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import platform
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
BENCHES = ("bench_index", "bench_tokens", "bench_extproc", "bench_envoy", "bench_simulate")


def cell(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def ok(row: dict[str, Any]) -> bool | None:
    """Whether the goal is reached, None without one. A goal is an upper bound of ours / peer."""
    if row.get("goal") is None or row.get("ratio") is None:
        return None
    return bool(row["ratio"] <= row["goal"])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--only", nargs="*", help=f"some of {', '.join(BENCHES)}")
    given = arguments.parse_args()
    console = Console()
    rows: list[dict[str, Any]] = []
    for name in given.only or BENCHES:
        if importlib.util.find_spec(f"tests.bench.{name}") is None:
            continue
        started = time.monotonic()
        console.print(f"{name} ...", end=" ")
        try:
            found = importlib.import_module(f"tests.bench.{name}").run()
        except ImportError as error:
            console.print(f"skipped: {error}")
            continue
        console.print(f"{time.monotonic() - started:.0f} s")
        rows += [{"bench": name, **row} for row in found]
    table = Table()
    for column in ("benchmark", "ours", "unit", "peer", "peer's", "ratio", "reach", "aim", "ok"):
        table.add_column(column)
    lines = [
        "| benchmark | ours | unit | peer | peer's | ratio | reach | aim | ok |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        good = {True: "yes", False: "no", None: ""}[ok(row)]
        cells = [
            row["name"],
            *(cell(row.get(key)) for key in ("ours", "unit", "peer", "peer_value", "ratio", "goal", "aim")),
            good,
        ]
        table.add_row(*cells)
        lines.append(f"| {' | '.join(cells)} |")
    Console(width=200).print(table)
    goals = [
        {"goal": row["name"], "ratio": row["ratio"], "reach": row["goal"], "aim": row.get("aim"), "ok": ok(row)}
        for row in rows
        if row.get("goal") is not None
    ]
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    (ROOT / "bench.json").write_text(json.dumps({"machine": machine, "goals": goals, "rows": rows}, indent=1) + "\n")
    (ROOT / "bench.md").write_text("\n".join(lines) + "\n")
    console.print("wrote bench.json and bench.md")


if __name__ == "__main__":
    main()
