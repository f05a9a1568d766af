"""Captures of real engines: the prediction equals the engine's own cached_tokens, request by request."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvindex.capture import CaptureError, CaptureReport, as_json, read, verify
from tests.kvindex.casework import DATA

CAPTURES = DATA / "captures"
FILES = sorted(CAPTURES.glob("v*.jsonl"))

# requests that can be compared, and the exceptions that explain the differences
KNOWN: dict[str, tuple[int, list[str]]] = {
    "v0.23.0_base": (18, []),
    "v0.32_base_bs32_sha256": (42, []),
    "v0.32_bytes_bs128_sha256cbor_emptytopic": (11, []),
    "v0.32_dp2": (10, []),
    "v0.32_dup_copies": (39, []),
    "v0.32_gemma3_hybrid_prefix": (10, ["sliding_window", "sliding_window"]),
    "v0.32_gemma3_hybrid_swa": (12, []),
    "v0.32_llama_bs64_xxhashcbor_seed0": (4, []),
    "v0.32_load_bufsteps8": (6, []),
    "v0.32_lora": (5, []),
    "v0.32_offload_cpu_placeholder": (22, []),
    "v0.32_offload_cpu_selfdescribing": (23, ["reset_external"]),
    "v0.32_offload_tiering_fs": (12, []),
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_prediction_equals_the_engine(path: Path) -> None:
    report = verify(path)
    assert report.count("different") == 0, [row for row in report.rows if row.status == "different"]
    assert report.problems == ()
    if path.stem in KNOWN:
        requests, explained = KNOWN[path.stem]
        assert report.requests == requests
        assert [row.reason for row in report.rows if row.status == "explained"] == explained
        assert report.count("equal") == requests - len(explained)


def test_all_captures_are_there() -> None:
    assert {path.stem for path in FILES} >= set(KNOWN)


def test_hits_of_every_kind_are_among_them() -> None:
    rows = [row for path in FILES for row in verify(path).rows]
    assert sum(row.engine > 0 for row in rows) >= 25
    assert any(row.host for row in rows)
    assert any(row.disk for row in rows)
    assert any(row.engine and "salted" in row.note for row in rows)
    assert any(row.engine and "adapter" in row.note for row in rows)
    assert any("concurrent" in row.note for row in rows)


def test_json() -> None:
    report = verify(CAPTURES / "v0.32_lora.jsonl")
    document = json.loads(json.dumps(as_json([report, report])))
    (first, second) = document["captures"]
    assert first == second
    assert {key: first[key] for key in ("requests", "equal", "explained", "different")} == {
        "requests": 5, "equal": 5, "explained": 0, "different": 0,
    }  # fmt: skip
    assert first["file"].endswith("v0.32_lora.jsonl")
    assert set(first["rows"][0]) >= {"line", "path", "predicted", "engine", "status", "reason"}


# -- it can fail


def changed(path: Path, tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> CaptureReport:
    out = tmp_path / "changed.jsonl"
    lines = [change(json.loads(line)) for line in path.read_text().splitlines()]
    out.write_text("".join(json.dumps(line) + "\n" for line in lines if line is not None))
    return verify(out)


def events_of(record: dict[str, Any]) -> list[Any]:
    return list(msgpack.unpackb(bytes.fromhex(record["frames"][2]))[1])


def with_events(record: dict[str, Any], events: list[Any]) -> dict[str, Any]:
    batch = msgpack.unpackb(bytes.fromhex(record["frames"][2]))
    batch[1] = events
    return {**record, "frames": [*record["frames"][:2], msgpack.packb(batch).hex()]}


@pytest.mark.parametrize("stem", ["v0.23.0_base", "v0.32_base_bs32_sha256"])
def test_an_engine_that_says_otherwise(stem: str, tmp_path: Path) -> None:
    def change(record: dict[str, Any]) -> dict[str, Any]:
        if record["kind"] == "request" and isinstance(record.get("usage"), dict):
            details = record["usage"].get("prompt_tokens_details") or {}
            record["usage"]["prompt_tokens_details"] = {"cached_tokens": (details.get("cached_tokens") or 0) + 32}
        return record

    report = changed(CAPTURES / f"{stem}.jsonl", tmp_path, change)
    assert report.count("equal") == 0
    assert report.count("different") >= report.requests - 5


def test_events_without_the_evictions(tmp_path: Path) -> None:
    def change(record: dict[str, Any]) -> dict[str, Any]:
        if record["kind"] != "live":
            return record
        return with_events(record, [one for one in events_of(record) if one["type"] != "BlockRemoved"])

    report = changed(CAPTURES / "v0.32_base_bs32_sha256.jsonl", tmp_path, change)
    assert report.count("different") >= 1


def test_events_without_the_salt(tmp_path: Path) -> None:
    def change(record: dict[str, Any]) -> dict[str, Any]:
        if record["kind"] != "live":
            return record
        return with_events(record, [{**one, "extra_keys": None} for one in events_of(record)])

    assert changed(CAPTURES / "v0.32_base_bs32_sha256.jsonl", tmp_path, change).count("different") >= 1


def test_a_lost_message(tmp_path: Path) -> None:
    """The stream drops all at the gap: what it does not know then is explained by that alone."""
    gone = iter([False] * 5 + [True] + [False] * 1000)
    path = CAPTURES / "v0.32_base_bs32_sha256.jsonl"
    report = changed(path, tmp_path, lambda record: None if record["kind"] == "live" and next(gone) else record)
    assert report.count("different") == 0
    assert {row.reason for row in report.rows if row.status == "explained"} == {"incomplete"}


def test_a_damaged_message_is_told(tmp_path: Path) -> None:
    def change(record: dict[str, Any]) -> dict[str, Any]:
        if record["kind"] == "live" and record["frames"][1].endswith("0003"):
            record["frames"][2] = record["frames"][2][:-2]
        return record

    report = changed(CAPTURES / "v0.32_base_bs32_sha256.jsonl", tmp_path, change)
    assert any("MessagePack" in problem for problem in report.problems)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"kind": "meta"}\nnot json\n', "line 2: no JSON"),
        ("[1, 2]\n", "line 1: list"),
        ('{"kind": "live"}\n', "line 1: frames"),
        ('{"kind": "live", "frames": ["zz"]}\n', "line 1: frames"),
        ('\n{"kind": "live", "frames": 5}\n', "line 2: frames"),
        ('{"kind": "live", "frames": [], "port": [1]}\n', "line 1: port is not a number"),
        ('{"kind": "meta", "args": 5}\n', "line 1: args is not a list"),
        ('{"kind": "request", "t": "noon"}\n', "line 1: t is not a number"),
        ('{"kind": "request", "start": true}\n', "line 1: start is not a number"),
        ('{"kind": "request", "headers": [1]}\n', "line 1: headers is not an object"),
        ('{"kind": "request", "output_token_ids": 5}\n', "line 1: output_token_ids is not a list"),
        ('{"kind": "request", "body": {"vllm_xargs": []}}\n', "line 1: body.vllm_xargs is not an object"),
        ('{"kind": "request", "usage": {"prompt_tokens_details": [1]}}\n', "prompt_tokens_details is not an object"),
        *(
            (
                f'{{"kind": "request", "usage": {{"prompt_tokens_details": {{"cached_tokens": {one}}}}}}}\n',
                "cached_tokens",
            )
            for one in ('"many"', "-16", "16.5", "NaN", "true")
        ),
        ("[" * 100_000 + "\n", "line 1: no JSON"),
    ],
)
def test_no_capture(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(CaptureError, match=message):
        verify(path)


@pytest.mark.parametrize(("front", "end"), [("", "\r\n"), ("\ufeff", "\n"), ("\n \n", "\n\n")])
def test_text_as_other_systems_write_it(front: str, end: str, tmp_path: Path) -> None:
    whole = (CAPTURES / "v0.32_lora.jsonl").read_text()
    path = tmp_path / "same.jsonl"
    path.write_bytes((front + whole.replace("\n", end)).encode())
    assert [row.engine for row in verify(path).rows] == [
        row.engine for row in verify(CAPTURES / "v0.32_lora.jsonl").rows
    ]


def test_a_wrong_answer_in_the_first_line_is_not_excused(tmp_path: Path) -> None:
    """The capture has the engine's first message: before it, nothing was cached, and nothing is incomplete."""
    first = iter([True])

    def change(record: dict[str, Any]) -> dict[str, Any]:
        if record["kind"] == "request" and isinstance(record.get("usage"), dict) and next(first, False):
            record["usage"]["prompt_tokens_details"] = {"cached_tokens": 32}
        return record

    report = changed(CAPTURES / "v0.32_base_bs32_sha256.jsonl", tmp_path, change)
    assert [row.status for row in report.rows if row.status != "equal"] == ["different"]


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    assert read(path) == []
    assert verify(path).requests == 0


def test_records_that_say_too_little(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"kind": "request"},
        {"kind": "request", "path": "/v1/completions", "status": 500, "body": {"prompt": [1]}, "usage": {}},
        {"kind": "request", "path": "/v1/completions", "status": 200, "body": None, "usage": {}},
        {"kind": "request", "path": "/v1/completions", "status": 200, "body": {"prompt": "text"}, "usage": {}},
        {"kind": "request", "path": "/v1/completions", "status": 200, "body": {"prompt": ["a", "b"]}, "usage": {}},
        {"kind": "request", "path": "/v1/completions", "status": 200, "body": {"prompt": [1]}, "usage": None},
        {"kind": "live", "frames": []},
        {"kind": "live", "frames": ["", "00"]},
        {"kind": "request", "path": "/v1/completions", "status": 200, "body": {"prompt": [1, 2]}, "usage": {}},
    ]
    path = tmp_path / "little.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = verify(path).rows
    assert (row.predicted, row.engine, row.status) == (0, 0, "equal")


# -- made captures: what the shared ones do not have


class Made:
    """Writes a capture by hand: block size 4, one port unless said."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[dict[str, Any]] = [{"kind": "meta", "args": []}]
        self.sequence: dict[int, int] = {}
        self.time = 1000.0

    def live(self, *events: Any, port: int = 1, rank: int = 0) -> Made:
        number = self.sequence.get(port, -1) + 1
        self.sequence[port] = number
        payload = msgpack.packb([self.time, list(events), rank])
        self.lines.append(
            {"kind": "live", "port": port, "frames": ["", number.to_bytes(8, "big").hex(), payload.hex()]}
        )
        return self

    def request(self, prompt: Any, cached: int, gap: float = 1.0, **more: Any) -> Made:
        self.time += gap
        body = {"model": "m", "prompt": prompt, **more.pop("body", {})}
        usage = {"prompt_tokens_details": {"cached_tokens": cached}}
        self.lines.append(
            {
                "kind": "request",
                "t": self.time,
                "path": "/v1/completions",
                "body": body,
                "status": 200,
                "usage": usage,
                **more,
            }
        )
        return self

    def reset(self, external: bool = False) -> Made:
        path = "/reset_prefix_cache" + ("?reset_external=true" if external else "")
        self.lines.append({"kind": "request", "t": self.time, "path": path, "body": None, "status": 200})
        return self

    def rows(self) -> list[tuple[int, int, str, str | None]]:
        self.path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        report = verify(self.path)
        assert report.problems == ()
        return [(row.predicted, row.engine, row.status, row.reason) for row in report.rows]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "made.jsonl")


P = list(range(1, 13))  # three blocks
Q = [*P, 13]


def put(
    hashes: list[int], tokens: list[int], parent: int | None = None, medium: str = "GPU", **more: Any
) -> dict[str, Any]:
    return {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
        "block_size": 4, "lora_id": None, "medium": medium, "lora_name": None, **more,
    }  # fmt: skip


def drop(hashes: list[int], medium: str = "GPU", **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium, **more}


CLEAR = {"type": "AllBlocksCleared"}


def test_made_plain(made: Made) -> None:
    made.live(put([1, 2, 3], P)).request(Q, 0).request(Q, 12).request(P, 8)
    made.live(drop([3]), put([9], [5, 6, 7, 8])).request([5, 6, 7, 8, 9], 0).request(Q, 8)
    assert made.rows() == [(0, 0, "equal", None), (12, 12, "equal", None), (8, 8, "equal", None), (0, 0, "equal", None),
                           (8, 8, "equal", None)]  # fmt: skip


def test_made_evictions_of_the_request_itself_come_after_its_look_up(made: Made) -> None:
    made.live(put([1, 2, 3], P)).request(Q, 0)
    made.live(drop([3])).live(drop([2]), put([7, 8], [50, 51, 52, 53, 54, 55, 56, 57], 1)).request(
        [*P[:4], *range(50, 59)], 4
    )
    assert made.rows()[1] == (4, 4, "equal", None)


def test_made_late_clear(made: Made) -> None:
    made.live(put([1, 2, 3], P)).request(Q, 0).reset().live(CLEAR, put([1, 2, 3], P)).request(Q, 0)
    assert [row[2] for row in made.rows()] == ["equal", "equal"]


def test_made_tiers(made: Made) -> None:
    """GPU, CPU and file system; the reset of the external tier takes the CPU's, not the file system's (12.13)."""
    made.live(put([1, 2, 3], P)).live(put([2], P[4:8], 1, "CPU"), put([1], P[:4], None, "CPU")).request(Q, 0)
    made.live(put([1], P[:4], None, "STORAGE", locality="LOCAL")).request([9], 0)
    made.live(drop([3]), drop([2]), drop([1]), put([7], [7, 7, 7, 7])).request([7, 7, 7, 7, 7], 0)
    made.request(Q, 8)
    made.reset(external=True).live(CLEAR).request([8], 0).request(Q, 4)
    assert made.rows()[3] == (8, 8, "equal", None)
    assert made.rows()[5] == (8, 4, "explained", "reset_external")


def test_made_hybrid(made: Made) -> None:
    """Sliding window of 5 tokens: the engine hits only where the last block before the hit is there too."""
    swa = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 5}
    full = {"group_idx": 1, "kv_cache_spec_kind": "full_attention"}
    made.live(put([3], P, **swa), put([1, 2, 3], P, **full)).request(Q, 0).request(Q, 12)
    made.live(drop([3], group_idx=0), put([9], [9] * 4, **full)).request([9] * 5, 0).request(Q, 0)
    made.live(put([2], P[:8], **swa)).request([4], 0).request(Q, 8).request(Q, 4)
    rows = made.rows()
    assert rows[1] == (12, 12, "equal", None)
    assert rows[3] == (12, 0, "explained", "sliding_window")
    assert rows[5] == (12, 8, "explained", "sliding_window")
    assert rows[6] == (12, 4, "different", None), "an exception explains what it accounts for, no more"


def test_made_hybrid_arrays(made: Made) -> None:
    swa = ["BlockStored", [3], None, P, 4, None, "GPU", None, None, 0, "sliding_window", 5]
    full = ["BlockStored", [1, 2, 3], None, P, 4, None, "GPU", None, None, 1, "full_attention", None]
    made.live(swa, full).request(Q, 0).live(["BlockRemoved", [3], "GPU", 0]).request([9], 0).request(Q, 0)
    assert made.rows()[2] == (12, 0, "explained", "sliding_window")


def test_made_report_mode_full(made: Made) -> None:
    full = {"vllm_xargs": {"kv_cache_report_mode": "full"}}
    made.live(put([1, 2, 3], P)).request(Q, 0).live(put([1, 2, 3], P)).request(Q, 12, body=full)
    made.live(drop([3]), drop([2]), drop([1]), put([9], [9] * 4)).request([9] * 5, 0).request(Q, 0)
    assert made.rows()[3] == (12, 0, "explained", "report_mode_full")


def test_made_late_offload(made: Made) -> None:
    """The copy on the host is told with the next step's events; the engine knew of it before."""
    made.live(put([1, 2, 3], P)).request(Q, 0).live(drop([3]), drop([2]), drop([1])).request([5], 0)
    made.live(put([1], P[:4], None, "CPU"), put([1], P[:4])).request(Q, 4)
    assert made.rows()[2] == (0, 4, "explained", "late_offload")


def test_made_ranks(made: Made) -> None:
    made.live(put([1, 2, 3], P), port=7, rank=1).request(Q, 0).live(put([5], [5] * 4), port=6, rank=0).request(
        [5] * 5, 0
    )
    made.request(Q, 12, headers={"X-Data-Parallel-Rank": "1"}).request(Q, 0, headers={"x-data-parallel-rank": "0"})
    made.request(Q, 12).request([99] * 9, 0).request(Q, 4)
    rows = made.rows()
    assert [row[2:] for row in rows[:4]] == [("equal", None)] * 4
    assert rows[4] == (12, 12, "explained", "rank_unknown")
    assert rows[5] == (0, 0, "equal", None)
    assert rows[6] == (12, 4, "different", None)


def test_made_concurrent(made: Made) -> None:
    """The second asks while the first computes the same prompt; told by answers close together, or by `start`."""
    made.live(put([1, 2, 3], P)).request(Q, 0).request(Q, 8, gap=0.01)
    assert made.rows()[1] == (12, 8, "explained", "concurrent")
    made.lines[-1].update(start=2000.0, t=2001.0)
    made.lines[-2].update(start=1000.0, t=1001.0)
    assert made.rows()[1] == (12, 8, "different", None)
    made.lines[-1].update(start=1000.5)
    assert made.rows()[1] == (12, 8, "explained", "concurrent")


def test_made_overlap_that_only_the_events_show(made: Made) -> None:
    """Its blocks were stored before another request's line, and nobody else can have stored them."""
    made.live(put([5], [5] * 4)).live(put([1, 2, 3], P)).request([5] * 5, 0, start=1000.0).request(Q, 0, start=1001.5)
    assert made.rows() == [(0, 0, "equal", None), (12, 0, "explained", "concurrent")]


def test_made_several_prompts(made: Made) -> None:
    made.live(put([1, 2, 3], P)).request([Q, [5] * 5], 0).request([Q, [5] * 5], 12).request([Q, Q], 12)
    rows = made.rows()
    assert rows[1] == (12, 12, "equal", None)
    assert rows[2] == (24, 12, "explained", "several_prompts")


def test_made_adapters(made: Made) -> None:
    made.lines[0]["args"] = ["--enable-lora", "--lora-modules", "ada=x", '{"name": "bea", "path": "y"}', "--port", "1"]
    made.live(put([1, 2, 3], P)).request(Q, 0).request(Q, 0, body={"model": "ada"}).request(Q, 0, body={"model": "bea"})
    made.live(put([4, 5, 6], P, lora_name="cat", lora_id=3)).request(Q, 0, body={"model": "cat"})
    made.request(Q, 12, body={"model": "cat"}).request(Q, 12, body={"model": "alias"})
    assert [row[2] for row in made.rows()] == ["equal"] * 6


def test_made_late_joiner(made: Made) -> None:
    made.sequence[1] = 40
    made.live(put([4], [21, 22, 23, 24], 3)).request([*P, 21, 22, 23, 24, 25], 12)
    assert made.rows() == [(0, 12, "explained", "incomplete")]


@pytest.mark.parametrize(
    ("number", "cached", "status"),
    [
        (1, 8, "explained"),
        (1, 16, "different"),  # more than the prompt has
        (1, 9, "different"),  # half a block
        (2, 4, "different"),  # a block that nobody else computed
    ],
)
def test_made_concurrent_has_limits(made: Made, number: int, cached: int, status: str) -> None:
    answers = [0, 0, 0]
    answers[number] = cached
    made.live(put([1, 2, 3], P)).request(Q, answers[0]).request(Q, answers[1], gap=0.01)
    made.live(put([4], [7] * 4)).request([7] * 5, answers[2], gap=0.01)
    assert made.rows()[number][1:3] == (cached, status)


@pytest.mark.parametrize(("cached", "status"), [(12, "explained"), (16, "different"), (10, "different")])
def test_made_incomplete_has_limits(made: Made, cached: int, status: str) -> None:
    made.sequence[1] = 40
    assert made.live(put([9], [8] * 4)).request(Q, cached).rows()[0][2] == status


def test_made_one_of_several_prompts(made: Made) -> None:
    made.live(put([1, 2, 3], P)).request(Q, 0).request([Q, Q], 16)
    assert made.rows()[1] == (24, 16, "different", None)
