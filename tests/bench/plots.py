"""The report's plots, as SVG: what a request costs, what it waits, the goals, growth."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.report import Report
from tests.bench.rows import Row

OURS, THEIRS, FLOOR = "#1f6f8b", "#b8b8b8", "#d98f4e"


def draw(report: Report, folder: Path) -> list[str]:
    """Writes folder/bench/NAME.svg of what the rows suffice for; returns their paths in it. [] without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "kvcar", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    )
    rows: list[Row] = report["rows"]
    names = []
    figures = {"goals": _goals(report), "peers": _peers(rows), "events": _events(rows),
               "find": _find(rows)}  # fmt: skip
    for name, figure in figures.items():
        if figure is not None:
            (folder / "bench").mkdir(parents=True, exist_ok=True)
            names.append(f"bench/{name}.svg")
            figure.savefig(folder / names[-1], metadata={"Date": None}, bbox_inches="tight")
    return names


def _figure(columns: int, height: float, lines: int = 1) -> tuple[Any, Any]:
    """(figure, its axes by line and column)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, height), layout="constrained")
    return figure, figure.subplots(lines, columns, squeeze=False)


def _goals(report: Report) -> Any:
    """Each goal's ratio as a part of what is to be reached: 1 is the bound."""
    goals = [one for one in report["goals"] if one["ratio"] is not None][::-1]
    if not goals:
        return None
    figure, ((axes,),) = _figure(1, 0.5 + 0.32 * len(goals))
    shares = [one["ratio"] / one["reach"] for one in goals]
    axes.barh([one["goal"] for one in goals], shares, color=[OURS if one["ok"] else FLOOR for one in goals])
    right = max(1.2, *shares)
    for number, one in enumerate(goals):
        axes.text(right, number, f" {one['ratio']:.3g} of {one['reach']:.3g}", va="center")  # beside bars and marks
        if one["aim"]:
            axes.plot([one["aim"] / one["reach"]] * 2, [number - 0.4, number + 0.4], color="black", linewidth=1)
    axes.axvline(1, color="black", linewidth=1, linestyle=":")
    axes.set_xlim(0, right)
    axes.set_xlabel("part of what is to be reached: 1 is the bound, the black mark the aim; less is better")
    return figure


def _sides(rows: Sequence[Row], start: str, size: str) -> dict[str, float]:
    """Side -> value, of the rows of bench_peers whose name starts so."""
    found: dict[str, float] = {}
    for row in rows:
        if row.get("bench") == "bench_peers" and row["name"] == f"{start}, {size}":
            found[row["peer"]] = row["peer_value"]
            found["Envoy + kvcar"] = row["ours"]
    return found


def _peers(rows: Sequence[Row]) -> Any:
    sizes = ("4k-token late turn", "32k-token late turn")
    measured = [size for size in sizes if _sides(rows, "CPU a request", size)]
    if not measured:
        return None
    latency = [size for size in measured if _sides(rows, "added p99, paced", size)]
    figure, axes = _figure(2 if latency else 1, 2.4 * len(measured), lines=len(measured))
    for number, size in enumerate(measured):
        cpu = _sides(rows, "CPU a request", size)
        p50, p99 = (_sides(rows, f"added {part}, paced", size) for part in ("p50", "p99"))
        names = sorted(cpu, key=lambda name: cpu[name], reverse=True)
        colors = [OURS if "kvcar" in name else FLOOR if name.startswith("Envoy") else THEIRS for name in names]
        left = axes[number][0]
        left.barh(names, [cpu[name] / 1e3 for name in names], color=colors)
        left.set_title(f"{size}: CPU ms a request")
        if not latency:
            continue
        right = axes[number][1]
        right.barh(names, [max(0.0, p99.get(name, 0)) for name in names], color=colors, alpha=0.35)
        right.barh(names, [max(0.0, p50.get(name, 0)) for name in names], color=colors)
        right.set_title("added ms, paced: p50, p99 (pale)")
        right.set_yticks([])
    return figure


def _events(rows: Sequence[Row]) -> Any:
    found = [row for row in rows if row["name"].startswith("request p")]
    if not found:
        return None
    figure, ((axes,),) = _figure(1, 2.4)
    by_load: dict[str, dict[str, float]] = {}
    for row in found:
        part, load = re.findall(r"request (p\d+) beside (.*)", row["name"])[0]
        by_load.setdefault(row["peer"], {})[part] = row["peer_value"]
        by_load.setdefault(load, {})[part] = row["ours"]
    names = list(by_load)[::-1]
    axes.barh(names, [by_load[name].get("p99", 0) for name in names], color=OURS, alpha=0.35)
    axes.barh(names, [by_load[name].get("p50", 0) for name in names], color=OURS)
    axes.set_xlabel("ms of a 4k-token late turn: p50, p99 (pale)")
    return figure


def _find(rows: Sequence[Row]) -> Any:
    """Growth of a look-up with blocks and instances."""
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        match = re.fullmatch(r"find, full, (\d+) blocks, (\d+) streams", row["name"])
        if match and row["peer"] == "RadixTree":
            for who, value in (("kvcar", row["ours"]), ("RadixTree", row["peer_value"])):
                lines.setdefault((who, match[1]), []).append((int(match[2]), value))
    if not lines:
        return None
    figure, ((axes,),) = _figure(1, 2.8)
    for (who, blocks), points in lines.items():
        style = "-" if blocks == "2048" else "--"
        axes.plot(*zip(*points, strict=True), style, marker="o", color=OURS if who == "kvcar" else THEIRS,
                  label=f"{who}, {blocks} blocks")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    engines = sorted({number for points in lines.values() for number, _ in points})
    axes.set_xticks(engines, [str(number) for number in engines])
    axes.set_yticks((10, 20, 50, 100, 200), ("10", "20", "50", "100", "200"))
    axes.minorticks_off()
    axes.set_xlabel("engines")
    axes.set_ylabel("us a full hit, waits included")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
