"""Figures of the fault tests, and the page made of them.

KVCAR_FAULTS=FILE pytest tests/faults          each test adds a line of JSON to FILE
KVCAR_SOAK=SOAK pytest tests/soak              a run that passed leaves its figures in SOAK
python -m tests.faults.page FILE SOAK PAGE     writes PAGE, docs/reliability.md; SOAK's figures if there are any
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.faults.load import Figures

GROUPS = ("kvcar", "Engines", "Events and network", "Envoy and clients", "Operations", "Disk and clock")

HEAD = """\
# Reliability

What clients saw of each fault through a real Envoy, and how long it took until everything was right again. Generated
by `make faults` ({machine}, {date}). Every row is a test in `tests/faults/`; it fails when *failed* is not 0.
Each ran under steady traffic of small chats (four or more conversations at a time, half of the answers streamed) with
three emulated engines; clients, Envoy, engines and kvcar had the same cores, so compare latencies within a row only.

- **requests**: those that ended while the fault lasted and healed, one way or the other.
- **lost with it**: of these, not answered with 200 and completely, as must be expected: what the engine that died, or
  the gateway that went away, was serving; with full duplex bodies also what came before Envoy noticed that kvcar had
  gone.
- **failed**: of these, not answered with 200 and completely for any other reason.
- **usual, during, worst**: latency before the fault (median), while it lasted and healed (median, slowest), of what was
  answered. An answer of a hung engine takes as long as the engine hangs; that is in *worst*.
- **recovered in**: from the moment the cause was gone until the named state was reached; where a process had to be
  started, its start is in it.

`make soak` is about [time](#soak) instead.
"""

SOAK = """
## Soak

`make soak` (30 minutes; `SECONDS=...`): engines join, leave, restart, forget and lose events, a second kvcar is killed
and restarted, the configuration is read again and clients leave, all at once. It fails on a failed request, on a view
that is not the engine's truth, and when memory, threads, sockets, descriptors or metric series grow beyond a bound.
"""

SOAK_RUN = """
The last run, {minutes:.0f} minutes: {requests:,} requests, none failed, besides {aborted:,} aborted by their clients;
{done}. At the end {agreed}. What the kvcar that lived through all of it held, each time with the same number
of engines:

| after | resident | threads | descriptors | sockets | metric series |
|---|---|---|---|---|---|
"""
SOAK_ROWS = 8

COLUMNS = (
    "fault", "what clients saw", "requests", "lost with it", "failed", "usual, during, worst", "recovered in",
    "what recovered",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    group: str
    fault: str
    saw: str
    recovered: str
    requests: int
    failed: int
    excused: int
    usual: float
    median: float
    worst: float
    seconds: float | None
    load: float


class Recorder:
    """Keeps the rows of a run: in $KVCAR_FAULTS when that is set, and on the terminal of the test."""

    def __init__(self) -> None:
        path = os.environ.get("KVCAR_FAULTS")
        self._path = Path(path) if path else None

    def add(self, group: str, fault: str, figures: Figures, *, saw: str, recovered: str, seconds: float | None) -> None:
        """`seconds`: from the end of the cause to recovery, None = there was nothing to recover."""
        assert group in GROUPS, group
        row = Row(
            group, fault, saw, recovered, figures.requests, figures.failed, figures.excused,
            round(figures.usual, 1), round(figures.median, 1), round(figures.worst, 1),
            None if seconds is None else round(seconds, 2), round(os.getloadavg()[0], 1),
        )  # fmt: skip
        print(f"{fault}: {asdict(row)}")
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")


def page(rows: list[dict[str, Any]], *, date: str) -> str:
    load = max((row.get("load", 0.0) for row in rows), default=0.0)
    text = HEAD.format(machine=f"{os.cpu_count()} cores, load average up to {load:.0f}", date=date)
    for group in GROUPS:
        chosen = [row for row in rows if row["group"] == group]
        if not chosen:
            continue
        text += f"\n## {group}\n\n| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|\n"
        for row in chosen:
            latency = f"{row['usual']:.0f}, {row['median']:.0f}, {row['worst']:.0f} ms" if row["worst"] else "-"
            seconds = "-" if row["seconds"] is None else f"{row['seconds']:.1f} s"
            text += (
                f"| {row['fault']} | {row['saw']} | {row['requests']} | {row['excused']} | {row['failed']} | {latency} "
                f"| {seconds} | {row['recovered']} |\n"
            )
    return text + SOAK


def soak_part(figures: dict[str, Any]) -> str:
    done = ", ".join(f"{count:,} x {kind}" for kind, count in sorted(figures["done"].items()))
    views, complete = figures["views"], figures["complete"]
    agreed = f"all {views} views of kvcar were complete and equal to what the engines held, block by block"
    if complete < views:
        agreed = (
            f"{complete} of {views} views of kvcar were complete and equal to what the engines held, block by block; "
            "the others knew that they might lack blocks, and had none too many"
        )
    text = SOAK_RUN.format(**{**figures, "minutes": figures["seconds"] / 60, "done": done, "agreed": agreed})
    held = figures["held"]
    step = max(1, math.ceil((len(held) - 1) / SOAK_ROWS))
    for row in [*held[:-1:step], held[-1]]:
        text += (
            f"| {row['seconds'] / 60:.0f} min | {row['resident'] / (1 << 20):.1f} MiB | {row['threads']} "
            f"| {row['descriptors']} | {row['sockets']} | {row['series']} |\n"
        )
    return text


def main(arguments: Sequence[str]) -> None:
    import datetime

    path, soak, target = map(Path, arguments)
    # A test that ran twice tells its latest figures.
    rows = {row["fault"]: row for row in map(json.loads, path.read_text("utf-8").splitlines())}
    date = datetime.date.fromtimestamp(path.stat().st_mtime)
    text = page(list(rows.values()), date=date.isoformat())
    if soak.is_file():
        text += soak_part(json.loads(soak.read_text("utf-8")))
    target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
