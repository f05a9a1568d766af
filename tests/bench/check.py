"""Regression guard: are today's ratios worse than the committed ones, by more than the noise they have?

Every benchmark runs some times, each in a process of its own. Of a row count the median ratio and its spread (largest /
smallest, as a factor). A row got worse when its median is over the reference by more than both spreads together, and by
at least FLOOR. A row without a reference is told and counts as nothing.

Ratios depend on the machine far less than times do, yet some do: what a peer's caller waits until an idle core has
woken up was three quarters of a call on one machine and little on another. The reference names its machine; on another
one write a reference of its own first (--reference), from the code as it was.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.rows import Row, log

REFERENCE = Path(__file__).with_name("reference.json")
FLOOR = 1.15
"""Less than this factor is never called worse."""

CPUINFO = Path("/proc/cpuinfo")

Ratios = dict[str, list[float]]
Reference = Mapping[str, Mapping[str, float]]
"""Row -> {"ratio": median, "spread": largest / smallest}."""


@dataclass(frozen=True, slots=True)
class Worse:
    row: str
    ratio: float
    reference: float
    allowed: float

    def __str__(self) -> str:
        return (
            f"{self.row}: ratio {self.ratio:.3g}, reference {self.reference:.3g}: worse by "
            f"x{self.ratio / self.reference:.2f}, noise allows x{self.allowed:.2f}"
        )


def spread(values: Sequence[float]) -> float:
    """Largest / smallest, 1.0 of a single value."""
    return max(values) / min(values)


def summary(ratios: Ratios) -> dict[str, dict[str, float]]:
    """What a reference file holds. Ratios of 0 or less say nothing and are left out."""
    return {
        row: {"ratio": round(statistics.median(values), 4), "spread": round(spread(values), 3)}
        for row, values in sorted(ratios.items())
        if min(values) > 0
    }


def compare(ratios: Ratios, reference: Reference) -> list[Worse]:
    """Rows that got worse by more than noise, worst first."""
    found = []
    for row, now in summary(ratios).items():
        if (then := reference.get(row)) is None:
            continue
        allowed = max(FLOOR, now["spread"] * then["spread"])
        if now["ratio"] > then["ratio"] * allowed:
            found.append(Worse(row, now["ratio"], then["ratio"], allowed))
    return sorted(found, key=lambda one: one.reference / one.ratio)


def collect(names: Sequence[str], times: int) -> tuple[Ratios, list[str]]:
    """(the ratios of every row, run by run; benchmarks that could not run). One that fails is tried once more."""
    ratios: Ratios = {}
    failed = []
    for turn in range(times):
        for name in names:
            log.info("run %d of %d: %s", turn + 1, times, name)
            try:
                rows = run_alone(name)
            except subprocess.CalledProcessError:
                log.warning("%s failed, once more", name)
                try:
                    rows = run_alone(name)
                except subprocess.CalledProcessError:
                    failed.append(name)
                    continue
            for row in rows:
                if row.get("ratio") is not None:
                    ratios.setdefault(f"{row['name']} [{row.get('peer')}]", []).append(row["ratio"])
    return ratios, failed


def run_alone(name: str) -> list[Row]:
    """The rows of one benchmark, run in a process of its own: nothing left of the one before.

    Raises CalledProcessError when it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.bench", "--only", name, "--out", folder, "--rows-only"]
        subprocess.run(command, check=True)
        rows: list[Row] = json.loads((Path(folder) / "bench.json").read_text(encoding="utf-8"))["rows"]
        return rows


def write_reference(names: Sequence[str], times: int, *, keep: bool) -> int:
    """With `keep` the rows that these benchmarks do not have stay as they are, if they are of this machine. Exit
    status: 1 when one did not run."""
    theirs, kept = read_reference()
    if keep and theirs not in ("", machine()):
        print(f"{REFERENCE.name} is of another machine, {theirs}: write all of it anew, without --only")
        return 1
    ratios, failed = collect(names, times)
    found = summary(ratios)
    merged = dict(sorted({**(kept if keep or (failed and theirs == machine()) else {}), **found}.items()))
    tree = {"machine": machine(), "rows": merged}
    REFERENCE.write_text(json.dumps(tree, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(found)} rows of {len(merged)} written to {REFERENCE.name}")
    return _told(failed)


def read_reference() -> tuple[str, dict[str, dict[str, float]]]:
    """(its machine, its rows); both empty without a file."""
    found = json.loads(REFERENCE.read_text("utf-8")) if REFERENCE.exists() else {"machine": "", "rows": {}}
    return found["machine"], found["rows"]


def machine() -> str:
    """The processor, as far as the kernel tells, and how many cores there are."""
    text = CPUINFO.read_text("utf-8") if CPUINFO.exists() else ""
    told = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    numbers = [f"{name} {told[key]}" for name, key in (("family", "cpu family"), ("model", "model")) if key in told]
    return ", ".join([told.get("model name") or platform.machine(), *numbers, f"{os.cpu_count()} cores"])


def check(names: Sequence[str], times: int) -> int:
    """Exit status: 1 when a row got worse, or a benchmark could not run."""
    (ratios, failed), (theirs, reference) = collect(names, times), read_reference()
    for row in sorted(ratios.keys() - reference.keys()):
        print(f"no reference: {row}")
    worse = compare(ratios, reference)
    for one in worse:
        print(one)
    if theirs != machine():
        print(f"the reference is of another machine: {theirs or 'not named'}; this one: {machine()}")
        print("what follows from that is told in tests/bench/check.py")
    print(f"{len(ratios)} rows, {len(worse)} worse than {REFERENCE.name} by more than noise")
    return _told(failed) or int(bool(worse))


def _told(failed: Sequence[str]) -> int:
    for name in failed:
        print(f"could not run: {name}")
    return int(bool(failed))
