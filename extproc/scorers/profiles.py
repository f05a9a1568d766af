"""Profiles of `slo_aware`: least-squares fits of an instance's measured prefill and decode times (milliseconds)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

Three = tuple[float, float, float]


class Profile(NamedTuple):
    """Coefficients; all 0 without data, so every prediction is 0."""

    ttft: Three = (0.0, 0.0, 0.0)
    tpot: Three = (0.0, 0.0, 0.0)


def parse_profiles(value: object) -> dict[str, Profile]:
    """`{instance or "*": {ttft: [[tokens, ms]], tpot: [[mean tokens, batch, ms]]}}` to fitted profiles.

    Raises ValueError with the path of what is wrong.
    """
    if not isinstance(value, Mapping):
        raise ValueError(f"profiles: {value!r} is not allowed, expected a mapping of instance name (or *) to profile")
    profiles: dict[str, Profile] = {}
    for name, data in value.items():
        if not isinstance(data, Mapping) or set(data) - {"ttft", "tpot"}:
            raise ValueError(f"profiles.{name}: {data!r} is not allowed, expected a mapping with ttft and tpot")
        ttft = _rows(f"profiles.{name}.ttft", data.get("ttft", ()), 2)
        tpot = _rows(f"profiles.{name}.tpot", data.get("tpot", ()), 3)
        profiles[str(name)] = Profile(
            fit([(1.0, n, n * n) for n, _ in ttft], [ms for _, ms in ttft]),
            fit([(1.0, batch, batch * (mean - 1)) for mean, batch, _ in tpot], [ms for *_, ms in tpot]),
        )
    return profiles


def _rows(path: str, rows: object, width: int) -> list[list[float]]:
    good = isinstance(rows, Sequence) and all(
        isinstance(row, Sequence)
        and len(row) == width
        and all(isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n < 1e12 for n in row)
        for row in rows
    )
    if not good:
        raise ValueError(f"{path}: expected a list of rows of {width} numbers of at least 0, not {rows!r}")
    assert isinstance(rows, Sequence)
    return [[float(n) for n in row] for row in rows]


def fit(rows: Sequence[Three], wanted: Sequence[float]) -> Three:
    """Least squares over three columns by normal equations; a column that adds nothing gets coefficient 0."""
    if not rows:
        return (0.0, 0.0, 0.0)
    scale = [max(abs(row[k]) for row in rows) or 1.0 for k in range(3)]
    scaled = [[row[k] / scale[k] for k in range(3)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in scaled) for j in range(3)]
        + [sum(row[i] * y for row, y in zip(scaled, wanted, strict=True))]
        for i in range(3)
    ]
    used: list[int] = []
    for k in range(3):
        if abs(matrix[k][k]) < 1e-9 * len(rows):
            continue
        used.append(k)
        pivot = [value / matrix[k][k] for value in matrix[k]]
        for i in range(3):
            if i != k:
                factor = matrix[i][k]
                matrix[i] = [value - factor * p for value, p in zip(matrix[i], pivot, strict=True)]
        matrix[k] = pivot
    a, b, c = (matrix[k][3] / scale[k] if k in used else 0.0 for k in range(3))
    return (a, b, c)
