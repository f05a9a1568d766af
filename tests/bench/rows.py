"""A row of the report: ours and a peer's or a baseline's value, measured in turns in one run. Less is better."""

from __future__ import annotations

import logging
from typing import Any

Row = dict[str, Any]
"""name, ours, unit, peer, peer_value, ratio (ours / peer's, or None), goal and aim (bounds of the ratio)."""

log = logging.getLogger("bench")
"""What a benchmark is about to do, for whoever waits."""


def row(
    name: str,
    ours: float,
    unit: str,
    peer: str | None = None,
    value: float | None = None,
    goal: float | None = None,
    aim: float | None = None,
) -> Row:
    """A latency that a peer adds may come out below zero: that has no ratio."""
    return {
        "name": name, "ours": ours, "unit": unit, "peer": peer, "peer_value": value,
        "ratio": ours / value if value and min(ours, value) > 0 else None, "goal": goal, "aim": aim,
    }  # fmt: skip


def told(one: Row) -> str:
    """A line, for a benchmark that runs alone."""
    against = f"{one['peer']} {one['peer_value']:.2f}" if one["peer"] and one["peer_value"] is not None else ""
    ratio = f"x{one['ratio']:.3f}" if one["ratio"] else ""
    return f"{one['name']:75} {one['ours']:9.2f} {one['unit']:6} {against:40} {ratio}"
