"""The emulator's cache against real vLLM engines: recorded prompts and answers give the events that were recorded.

Every request of a capture is run through `Engine` with the recorded prompt ids and, as answer, the recorded output ids.
The events must be those that the engine published: kinds, order, tokens, parents, extra keys, batches. Hash values are
compared too where the capture used sha256_cbor; otherwise (pickle) each side's hashes are numbered by first use.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from examples.emulator.engine import Engine, EngineConfig, Request
from examples.emulator.hashing import root_hash
from examples.emulator.wire import encode_batch, wire_form

CAPTURES = Path(__file__).parents[1] / "data" / "captures"

ADAPTERS = {"ada": (1, "ada"), "adb": (2, "adb")}


class Numbered:
    """Hashes replaced by the order of their first appearance."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def __call__(self, value: Any) -> Any:
        return value if value is None else self.numbers.setdefault(value, len(self.numbers))

    def event(self, event: Any) -> Any:
        if isinstance(event, list):
            row = list(event)
            if len(row) > 1:
                row[1] = [self(value) for value in row[1]]
            if row[0] == "BlockStored":
                row[2] = self(row[2])
            return row
        fields = dict(event)
        if "block_hashes" in fields:
            fields["block_hashes"] = [self(value) for value in fields["block_hashes"]]
        if "parent_block_hash" in fields:
            fields["parent_block_hash"] = self(fields["parent_block_hash"])
        return fields


def rows(name: str) -> Iterator[dict[str, Any]]:
    for line in (CAPTURES / f"{name}.jsonl").read_text().splitlines():
        yield json.loads(line)


def groups(name: str, concurrent: dict[str, int]) -> Iterator[tuple[list[dict[str, Any]], list[list[Any]]]]:
    """(requests running at the same time, batches published meanwhile), in order. A reset is a group of its own.

    concurrent  mark prefix -> number of requests after that mark that ran together
    """
    batches: list[list[Any]] = []
    requests: list[dict[str, Any]] = []
    together = 1
    for row in rows(name):
        if row["kind"] == "mark":
            together = next((n for prefix, n in concurrent.items() if row["note"].startswith(prefix)), 1)
        elif row["kind"] == "live":
            batches.append(msgpack.unpackb(bytes.fromhex(row["frames"][2])))
        elif row["kind"] == "request" and row.get("status") == 200 and row.get("success") is not False:
            requests.append(row)
            if len(requests) >= together:
                yield requests, batches
                requests, batches, together = [], [], 1


def sequences(row: dict[str, Any]) -> list[Request]:
    """The engine requests of one recorded HTTP request (two prompts in one body are two)."""
    body = row["body"]
    prompts = [row["prompt_token_ids"]]
    answers = [row["output_token_ids"]]
    if body.get("prompt") and isinstance(body["prompt"][0], list):
        prompts = body["prompt"]
        answers = [[7] * body["max_tokens"]] * len(prompts)
    return [
        Request(
            prompt=prompt,
            answer=iter(answer),
            max_tokens=len(answer),
            salt=body.get("cache_salt"),
            lora=ADAPTERS.get(body["model"]),
            session=body.get("session_id") or row.get("headers", {}).get("X-Session-ID"),
            report_full=(body.get("vllm_xargs") or {}).get("kv_cache_report_mode") == "full",
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def run(engine: Engine, arrivals: list[list[Request]]) -> list[list[Any]]:
    """Run to the end; `arrivals[i]` come in before step i."""
    batches: list[list[Any]] = []
    todo = list(arrivals)
    now = 0.0
    while todo or engine.running or engine.waiting:
        for request in todo.pop(0) if todo else ():
            engine.add(request)
        step = engine.schedule(now)
        if step is None:
            batches.append(engine.take_events())
            assert engine.next_ready is not None
            now = engine.next_ready
            continue
        batches += engine.finish(step).batches
        engine.pool.check()
    return [batch for batch in batches if batch]


def sort_host(batches: list[list[Any]]) -> list[list[Any]]:
    """Host copies are announced in any order: sort runs of single-block CPU Stored events, which are whole batches."""
    return [
        sorted(batch, key=lambda e: e["token_ids"] or e["block_hashes"])
        if batch and all(isinstance(e, dict) and e.get("medium") == "CPU" and "token_ids" in e for e in batch)
        else batch
        for batch in batches
    ]


CASES = [
    # capture, blocks, block size, wire form, other settings, requests at the same time
    ("v0.32_base_bs32_sha256", 40, 32, "0.32.0", {}, {"14 two identical": 2}),
    ("v0.32_dup_copies", 40, 32, "0.32.0", {}, {}),
    ("v0.32_bytes_bs128_sha256cbor_emptytopic", 12, 128, "0.32.0", {}, {}),
    ("v0.32_llama_bs64_xxhashcbor_seed0", 20, 64, "0.32.0", {}, {}),
    ("v0.32_lora", 40, 32, "0.32.0", {}, {}),
    ("v0.32_offload_cpu_selfdescribing", 40, 32, "0.32.0", {"host_blocks": 60}, {}),
    ("v0.32_offload_cpu_placeholder", 40, 32, "0.32.0", {"host_blocks": 60, "host_self_describing": False}, {}),
    ("v0.23.0_base", 40, 32, "0.23.0", {"empty_first": False}, {}),
]


@pytest.mark.parametrize(("name", "blocks", "size", "version", "extra", "concurrent"), CASES, ids=[c[0] for c in CASES])
def test_same_events_as_the_real_engine(
    name: str, blocks: int, size: int, version: str, extra: dict[str, Any], concurrent: dict[str, int]
) -> None:
    exact = "sha256cbor" in name
    form = wire_form(version, int_hashes=not exact)
    engine = Engine(EngineConfig(root=root_hash(), block_size=size, blocks=blocks, **extra))
    theirs, ours = Numbered(), Numbered()
    compared = 0
    for number, (recorded, published) in enumerate(groups(name, concurrent)):
        if recorded[0]["path"].startswith("/reset_prefix_cache"):
            query = recorded[0]["path"]
            engine.reset_prefix_cache(
                running="reset_running_requests=true" in query, external="reset_external=true" in query
            )
            continue
        if any(row["prompt_token_ids"] is None for row in recorded):
            pytest.fail(f"group {number} has no token ids")
        first, *rest = [sequences(row) for row in recorded]
        requests = [*first, *(request for sequence in rest for request in sequence)]
        # The prompts of one body reach the engine one after the other, concurrent bodies of this capture did together.
        produced = run(engine, [[request] for request in first] if not rest else [requests])
        packed = [msgpack.unpackb(encode_batch(form, batch, ts=1.0, rank=0)) for batch in produced]
        expected = [batch[1] for batch in published]
        actual = [batch[1] for batch in packed]
        if not exact:
            expected = [[theirs.event(event) for event in batch] for batch in expected]
            actual = [[ours.event(event) for event in batch] for batch in actual]
        assert sort_host(actual) == sort_host(expected), f"group {number}: {recorded[0]['path']}"
        for request, row in zip(requests, recorded, strict=False):
            details = row["usage"]["prompt_tokens_details"] or {}
            assert request.cached_tokens == (details.get("cached_tokens") or 0)
        compared += len(expected)
    assert compared > 2


def test_same_events_under_load() -> None:
    """Six requests of 100 + 300 tokens, two at a time, through 39 blocks: admission, decode blocks, eviction order."""
    name = "v0.32_load_bufsteps8"
    form = wire_form("0.32.0")
    recorded = [row for row in rows(name) if row["kind"] == "request" and not row["body"].get("stream")]
    by_prompt = {row["prompt_token_ids"][0]: sequences(row)[0] for row in recorded}
    order = [600, 500, 700, 800, 900, 1000]
    assert sorted(by_prompt) == sorted(order)
    first, second, *rest = (by_prompt[start] for start in order)
    engine = Engine(EngineConfig(root=root_hash(), block_size=32, blocks=40, max_seqs=2))
    produced = run(engine, [[first], [second], rest])

    theirs, ours = Numbered(), Numbered()
    published = [msgpack.unpackb(bytes.fromhex(row["frames"][2]))[1] for row in rows(name) if row["kind"] == "live"]
    actual = [msgpack.unpackb(encode_batch(form, batch, ts=1.0, rank=0))[1] for batch in produced]
    expected = [[theirs.event(event) for event in batch] for batch in published[:-1]]
    assert [[ours.event(event) for event in batch] for batch in actual] == expected
    assert len(expected) == 75
