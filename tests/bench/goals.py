"""The goals, each over the rows that show it, and why one is not at its aim.

A goal takes the worst of its rows in one run. `explained` says what the time or memory goes to and what the limit is
that nothing in CPython passes; the figures in it come from the same run where it has them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.bench.rows import Row


@dataclass(frozen=True, slots=True)
class Goal:
    """
    rows        regular expression over "name against peer" of a row
    reach, aim  upper bounds of ours / theirs
    value       "ratio", or "ours" for a goal in a row's own unit
    floor       regular expression of the row that holds the physical limit
    why         what keeps it from the aim; {floor} is that row's ratio
    """

    name: str
    rows: str
    reach: float
    aim: float | None
    why: str
    value: str = "ratio"
    floor: str | None = None


GOALS = (
    Goal(
        "pack and chain against Dynamo's block hash, block 16",
        r"^pack and chain .* block 16 ", 1.8, 1.0,
        "One call into xxhash and one bytes slice a block, about 140 ns, is what CPython needs; Dynamo makes all of "
        "them in one call and pays for the list of Python ints once. The chain makes 16-byte keys instead of 8, so "
        "that two prompts never share one by chance.",
    ),
    Goal(
        "pack and chain against Dynamo's block hash, block 128",
        r"^pack and chain .* block 128 ", 1.1, 1.0,
        "Copying the ids out of Python ints is most of it, and the same in both.",
    ),
    Goal(
        "find, full hit of 256 blocks, against Dynamo's RadixTree", r"^find, full, 256 blocks.*RadixTree", 1.8, 1.0,
        "A full hit visits every block's key: one dict look-up and one comparison of 16 bytes, about 50 ns each in "
        "CPython. RadixTree is compiled code.",
    ),
    Goal(
        "find, full hit of 2048 blocks, against Dynamo's RadixTree", r"^find, full, 2048 blocks.*RadixTree", 3.0, 1.0,
        "As with 256 blocks; the longer the chain, the more the interpreter's cost a block counts.",
    ),
    Goal(
        "find, zero hit, against Dynamo's RadixTree", r"^find, zero.*RadixTree", 0.1, None,
        "One dict look-up ends it; the peer's call first converts the whole list of hashes.",
    ),
    Goal(
        "stored event all-in (decode, hash, index), 16 blocks, against Dynamo's apply_event",
        r"^stored all-in \(decode, hash, index\), 16-block.*RadixTree", 1.0, 0.5,
        "Ours counts decoding and hashing, theirs starts behind them. unpackb, array('I') and XXH3 alone, without "
        "index or any check, are {floor:.2f} of the peer's figure: the floor of this interpreter. With the peer's "
        "decoding and hashing counted in, see the row 'stored all-in, the peer's as well'.",
        floor=r"^stored, unpackb, array and XXH3 alone \(floor\), 16-block",
    ),
    Goal(
        "bytes a (stream, block) against Dynamo", r"^memory a \(stream, block\)", 5.5, 1.0,
        "A dict entry for the content key and one for the engine's hash, a 16-byte key object (49 B with its header) "
        "and an int (32 B): Python objects have headers, the peer's nodes have none.",
    ),
    Goal(
        "turn 20 of a 32k-token chat, cached, against apply_chat_template", r"^tokens: turn 20 of a chat of 3\dk",
        1 / 8, 1 / 20,
        "The new tokens have to be encoded, whole, by the same Rust code as the peer's; parsing 130 KB of JSON and "
        "rendering the template take the rest.",
    ),
    Goal(
        "exact repeat of a 32k-token chat against apply_chat_template", r"^tokens: exact repeat of a chat of 3\dk",
        1 / 20, 1 / 50,
        "No token is encoded again: JSON, the template and finding the segments are left, all linear in the bytes.",
    ),
    Goal(
        "request p99 at 200k blocks/s against no events", r"^request p99 beside 200k blocks/s against ", 1.5, 1.1,
        "One interpreter lock: a request that comes in waits 0.5 ms at most until the event thread hands it over, "
        "then goes ahead of it. The rest is the machine's: see the row of the same events followed by another process, "
        "where only two cores and their caches are shared with publisher and follower.",
    ),
    Goal(
        "request p99 during 8 MiB snapshots against no events", r"^request p99 beside .*snapshot a second against ",
        1.5, 1.1,
        "As at 200k blocks/s: a snapshot is applied in the same slices, and receiving 8 MiB is one copy in "
        "libzmq's own thread.",
    ),
    Goal(
        "longest GC pause with 2 M blocks (ms)", r"^full collection with", 10.0, 3.0,
        "A full collection visits every container; columns have few, and gc.freeze() takes away what is there "
        "at start.",
        value="ours",
    ),
    Goal(
        "server CPU of a scored request (4k-token chat, late turn) against a no-op ext_proc, through Envoy",
        r"^server CPU a scored request through Envoy", 3.0, 1.5,
        "The no-op's own gRPC stack is most of both. On top come JSON, the template, the segments' tokens, the keys, "
        "the look-up and the scorer, see tokens: exact repeat of 4k tokens; none of them can be left out.",
    ),
)  # fmt: skip


def reached(goals: Sequence[Goal], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """[{goal, ratio, one_core, reach, aim, ok, ...}] in the goals' order; ratio and ok are None without a row.

    `one_core` is the ratio where both had one core: the peer's waking up is in `ratio`, and in that one it is not. None
    for what was not measured so.
    """
    out = []
    for goal in goals:
        worst = _worst(goal, rows)
        alone = _worst(replace(goal, rows=goal.rows.replace("^", "^one core: ", 1)), rows)
        ratio = float(worst[goal.value]) if worst else None
        entry: dict[str, Any] = {
            "goal": goal.name, "ratio": ratio, "one_core": float(alone[goal.value]) if alone else None,
            "reach": goal.reach, "aim": goal.aim, "ok": None if ratio is None else ratio <= goal.reach,
        }  # fmt: skip
        if worst is not None:
            entry["row"] = worst["name"]
            if ratio is not None and ratio > (goal.reach if goal.aim is None else goal.aim):
                entry["explained"] = goal.why.format(floor=_floor(goal, rows))
        out.append(entry)
    return out


def _worst(goal: Goal, rows: Sequence[Row]) -> Row | None:
    found = [row for row in rows if re.search(goal.rows, _label(row)) and row.get(goal.value) is not None]
    return max(found, key=lambda row: float(row[goal.value]), default=None)


def _label(row: Row) -> str:
    return f"{row['name']} against {row.get('peer') or ''}"


def _floor(goal: Goal, rows: Sequence[Row]) -> float:
    found = [row["ratio"] for row in rows if goal.floor and re.search(goal.floor, _label(row)) and row.get("ratio")]
    return max(found, default=float("nan"))
