"""bench.json and bench.md: what a run measured, goal by goal and row by row."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from tests.bench.goals import GOALS, Row, reached

Report = dict[str, Any]

COLUMNS = ("benchmark", "ours", "unit", "peer", "peer's", "ratio", "reach", "aim", "ok")


def make(rows: Sequence[Row]) -> Report:
    load = os.getloadavg()[0]
    machine = {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count(),
               "load_average": round(load, 1)}  # fmt: skip
    return {"machine": machine, "goals": reached(GOALS, rows), "rows": list(rows)}


def read(path: Path) -> list[Row]:
    """The rows of an earlier run, [] without one."""
    try:
        rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
        return rows
    except (OSError, ValueError, KeyError):
        return []


def write(report: Report, folder: Path, plots: Sequence[str]) -> None:
    (folder / "bench.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / "bench.md").write_text(markdown(report, plots), encoding="utf-8")


def markdown(report: Report, plots: Sequence[str] = ()) -> str:
    machine = report["machine"]
    lines = [
        f"Python {machine['python']}, {machine['machine']}, {machine['cores']} cores, load average at the end "
        f"{machine['load_average']}. Ratios are ours / theirs in one run; below 1 is faster or smaller.",
        "", "| goal | ratio | reach | aim | |", "|---|---|---|---|---|",
    ]  # fmt: skip
    lines += [
        f"| {one['goal']} | {cell(one['ratio'])} | {cell(one['reach'])} | {cell(one['aim'])} | {word(one['ok'])} |"
        for one in report["goals"]
    ]
    lines += [f"\n**{one['goal']}**: {one['explained']}" for one in report["goals"] if "explained" in one]
    lines += ["", *(f"![{Path(name).stem}]({name})" for name in plots)]
    lines += ["", "| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join(cells(row))} |" for row in report["rows"]]
    return "\n".join(lines) + "\n"


def goal_table(report: Report) -> Table:
    table = Table("goal", "ratio", "reach", "aim", "ok", title="Goals")
    for one in report["goals"]:
        style = {True: "green", False: "red", None: "dim"}[one["ok"]]
        table.add_row(one["goal"], *(cell(one[key]) for key in ("ratio", "reach", "aim")), word(one["ok"]), style=style)
    return table


def row_table(rows: Sequence[Row]) -> Table:
    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*cells(row))
    return table


def cells(row: Row) -> list[str]:
    numbers = (cell(row.get(key)) for key in ("ours", "unit", "peer", "peer_value", "ratio", "goal", "aim"))
    return [row["name"], *numbers, word(within(row))]


def within(row: Row) -> bool | None:
    """Whether a row's own bound is kept, None without one."""
    if row.get("goal") is None or row.get("ratio") is None:
        return None
    return bool(row["ratio"] <= row["goal"])


def word(value: bool | None) -> str:
    return {True: "yes", False: "no", None: ""}[value]


def cell(value: Any) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
