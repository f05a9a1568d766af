"""bench.json and bench.md: what a run measured, goal by goal and row by row."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from tests.bench.goals import GOALS, reached
from tests.bench.rows import Row

Report = dict[str, Any]

CPU = "CPU a request"
FIGURES = (CPU, "added p50, 4 at a time", "added p99, 4 at a time", "added p50, paced", "added p99, paced")
ROUTER = ("router", "CPU us a request", "requests/s/core", *(f"{what}, ms" for what in FIGURES[1:]))
GOAL = ("goal", "ratio", "on one core", "reach", "aim", "ok")
FIELDS = ("ratio", "one_core", "reach", "aim")
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
    write_json(report, folder)
    (folder / "bench.md").write_text(markdown(report, plots), encoding="utf-8")


def write_json(report: Report, folder: Path) -> None:
    (folder / "bench.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def markdown(report: Report, plots: Sequence[str] = ()) -> str:
    machine = report["machine"]
    lines = [
        f"Python {machine['python']}, {machine['machine']}, {machine['cores']} cores, load average at the end "
        f"{machine['load_average']}. Ratios are ours / theirs in one run; below 1 is faster or smaller.",
        "", f"| {' | '.join(GOAL)} |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    lines += [
        f"| {' | '.join((one['goal'], *(cell(one[key]) for key in FIELDS), word(one['ok'])))} |"
        for one in report["goals"]
    ]
    lines += [f"\n**{one['goal']}**: {one['explained']}" for one in report["goals"] if "explained" in one]
    lines += ["", *(f"![{Path(name).stem}]({name})" for name in plots)]
    for size, found in routers(report["rows"]).items():
        lines += ["", f"Routers in front of the same engines, {size}:", "", *_lines(ROUTER, found)]
    lines += ["", *_lines(COLUMNS, map(cells, report["rows"]))]
    return "\n".join(lines) + "\n"


def _lines(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(one)} |" for one in (header, ["---"] * len(header), *rows)]


def routers(rows: Sequence[Row]) -> dict[str, list[list[str]]]:
    """By size of the prompts, the lines of ROUTER: what each way through costs and adds."""
    values: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        what, comma, size = row["name"].rpartition(", ")
        if row.get("bench") == "bench_peers" and comma and what in FIGURES:
            sides = values.setdefault(size, {})
            sides.setdefault(row["peer"], {})[what] = row["peer_value"]
            sides.setdefault("Envoy + kvcar", {})[what] = row["ours"]
    return {size: [_router(name, found) for name, found in _cheapest_first(sides)] for size, sides in values.items()}


def _cheapest_first(sides: dict[str, dict[str, float]]) -> list[tuple[str, dict[str, float]]]:
    return sorted(sides.items(), key=lambda one: one[1][CPU])


def _router(name: str, found: dict[str, float]) -> list[str]:
    added = [f"{found[what]:.1f}" if what in found else "" for what in FIGURES[1:]]
    return [name, f"{found[CPU]:.0f}", f"{1e6 / found[CPU]:.0f}", *added]


def side_by_side(rows: Sequence[Row]) -> list[Table]:
    tables = []
    for size, found in routers(rows).items():
        tables.append(Table(*ROUTER, title=f"Routers in front of the same engines, {size}"))
        for line in found:
            tables[-1].add_row(*line)
    return tables


def goal_table(report: Report) -> Table:
    table = Table(*GOAL, title="Goals: less is better")
    for one in report["goals"]:
        style = {True: "green", False: "red", None: "dim"}[one["ok"]]
        table.add_row(one["goal"], *(cell(one[key]) for key in FIELDS), word(one["ok"]), style=style)
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
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
