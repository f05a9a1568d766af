"""The emulator's encoders against what each vLLM version published: equal to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest

from examples.emulator.hashing import block_hash, cbor, root_hash
from examples.emulator.wire import (
    Cleared,
    Removed,
    Stored,
    encode_batch,
    end_frames,
    live_frames,
    parse_replay_request,
    replay_frames,
    wire_form,
)

DATA = Path(__file__).parents[1] / "data"
HASHES = [0x1111111111111111, 0xF222222222222222, 0x3333]
DIGESTS = [bytes([number]) * 32 for number in (1, 2, 3)]


def stored(hashes: list[Any], parent: Any, tokens: list[int], **changes: Any) -> Stored:
    fields: dict[str, Any] = {
        "block_size": 4,
        "extra_keys": [None] * len(hashes),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        **changes,
    }
    return Stored(hashes, parent, tokens, **fields)


# note of the capture -> the events that were given to vLLM's encoder
SAMPLES: dict[str, list[Any]] = {
    "root + child in one batch": [
        stored(HASHES[:2], None, [1, 2, 3, 4, 5, 6, 7, 8]),
        stored(HASHES[2:], HASHES[1], [9, 10, 11, 12]),
    ],
    "bytes hashes": [stored(DIGESTS[:2], None, [1, 2, 3, 4, 5, 6, 7, 8]), Removed(DIGESTS[:1], group_idx=0)],
    "cpu placeholder": [
        stored(HASHES[:1], None, [], block_size=0, medium="CPU", extra_keys=None, kv_cache_spec_kind=None),
        Removed(HASHES[:1], medium="CPU", group_idx=0),
    ],
    "salted": [stored(HASHES[:1], None, [1, 2, 3, 4], extra_keys=[["tenant-a"]])],
    "lora": [stored(HASHES[:1], None, [1, 2, 3, 4], lora_id=1, lora_name="ada", extra_keys=[["ada"]])],
    "removed": [Removed(HASHES[2:], group_idx=0)],
    "cleared": [Cleared()],
}


def captured() -> dict[str, list[dict[str, Any]]]:
    versions: dict[str, list[dict[str, Any]]] = {}
    path = DATA / "captures" / "dialects_0.9.2_to_0.31.0.jsonl"
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if "vllm" in row:
            versions.setdefault(row["vllm"], []).append(row)
    return versions


CAPTURED = captured()


@pytest.mark.parametrize("version", CAPTURED)
def test_every_version_byte_for_byte(version: str) -> None:
    form = wire_form(version, int_hashes=False)
    published = CAPTURED[version]
    (facts,) = [row for row in published if row["kind"] == "version"]
    assert list(form.fields[Stored]) == facts["stored_fields"]
    assert list(form.fields[Removed]) == facts["removed_fields"]
    assert form.maps == (facts["form"] == "map")

    payloads: dict[int, bytes] = {}
    live = [row for row in published if row["kind"] == "live"]
    assert len(live) == (5 if version == "0.9.2" else 7)
    for number, row in enumerate(live):
        payloads[number] = encode_batch(form, SAMPLES[row["note"]], ts=1700000000.25, rank=facts["dp_rank"])
        expected = [bytes.fromhex(frame) for frame in row["frames"]]
        assert live_frames(b"kv-events", number, payloads[number]) == expected, row["note"]

    replayed = [[bytes.fromhex(frame) for frame in row["frames"]] for row in published if row["kind"] == "replay"]
    if replayed:
        start = len(live) - 2
        ours = [replay_frames(form, b"kv-events", n, payloads[n]) for n in range(start, len(live))]
        assert [*ours, end_frames(form)] == replayed


# form, fields of Stored, fields of Removed, elements of a plain Stored on the wire, replay frames at the client
FORMS = [
    ("vllm-0.9", 5, 1, 6, 3),
    ("vllm-0.11", 6, 2, 7, 3),
    ("vllm-0.14", 7, 2, 8, 3),
    ("vllm-0.17", 8, 2, 9, 3),
    ("vllm-0.20", 9, 3, 10, 3),
    ("vllm-0.22", 11, 3, 12, 3),
    ("vllm-0.23", 11, 3, 12, 3),
    ("vllm-0.24", 11, 3, 11, 3),
    ("0.25.1", 11, 3, 11, 3),
    ("0.26.0", 12, 4, 11, 4),
    ("vllm-0.29", 13, 5, 11, 4),
    ("vllm-0.30", 14, 5, 11, 4),
    ("vllm-0.32", 14, 5, 11, 4),
]


@pytest.mark.parametrize(("name", "stored_fields", "removed_fields", "elements", "frames"), FORMS)
def test_forms_by_name(name: str, stored_fields: int, removed_fields: int, elements: int, frames: int) -> None:
    form = wire_form(name)
    assert len(form.fields[Stored]) == stored_fields
    assert len(form.fields[Removed]) == removed_fields
    batch = msgpack.unpackb(encode_batch(form, [stored(DIGESTS[:1], None, [1, 2, 3, 4])], ts=1.5, rank=3))
    assert batch[0] == 1.5
    assert batch[2] == 3
    assert len(batch[1][0]) == elements
    assert len(replay_frames(form, b"t", 1, b"x")) == len(end_frames(form)) == frames


def test_session_and_tier_fields_appear_when_set() -> None:
    event = stored(HASHES[:1], None, [1, 2, 3, 4], locality="LOCAL", ownership="kvcr", session_id="s1")
    unpacked = [
        msgpack.unpackb(encode_batch(wire_form(name), [event], ts=0.0, rank=0))[1][0]
        for name in ("vllm-0.25", "vllm-0.26", "vllm-0.29", "vllm-0.30")
    ]
    shown = [[key for key in ("locality", "ownership", "session_id") if key in event] for event in unpacked]
    assert shown == [[], ["locality"], ["locality", "ownership"], ["locality", "ownership", "session_id"]]


@pytest.mark.parametrize("name", ["", "vllm", "vllm-0.8", "0.9.1", "vllm-0.33", "sglang", "1.2.3"])
def test_unknown_versions_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="wire form"):
        wire_form(name)


def test_int_hashes_are_the_last_eight_bytes() -> None:
    digest = bytes(range(32))
    form = wire_form("vllm-0.32")
    batch = msgpack.unpackb(encode_batch(form, [Removed([digest]), Stored([digest], digest, [1], 1)], ts=0.0, rank=0))
    number = int.from_bytes(digest[24:], "big")
    assert batch[1][0]["block_hashes"] == [number]
    assert batch[1][1]["parent_block_hash"] == number


@pytest.mark.parametrize(
    ("frames", "parsed"),
    [
        ([b"id", b"", (5).to_bytes(8, "big")], (b"id", 5)),
        ([b"id", b"", b"\x05"], (b"id", 5)),
        ([b"id", b"", b"\xff" * 8], (b"id", 2**64 - 1)),
        ([b"id", (5).to_bytes(8, "big")], None),
        ([b"id", b"x", b"\x05"], None),
        ([b"id", b"", b"\x05", b""], None),
    ],
)
def test_replay_requests(frames: list[bytes], parsed: tuple[bytes, int] | None) -> None:
    assert parse_replay_request(frames) == parsed


def test_hashes_equal_the_real_engine() -> None:
    vectors = json.loads((DATA / "vectors.json").read_text())["hash"]
    real = vectors["vllm_0_32_engine"]["sha256_cbor"]
    size = real["block_size"]
    tokens = list(range(*real["tokens_range"]))
    for extras, expected in ((None, real["plain"]), ([["cache_salt", "s3cret"]], real["cache_salt_s3cret"])):
        first = block_hash(root_hash(), tokens[:size], extras)
        second = block_hash(first, tokens[size:])
        assert [first.hex(), second.hex()] == expected
    old = vectors["vllm_sha256_cbor_untagged_extras"]
    assert root_hash("0").hex() == old["root_hex"]
    for case in old["cases"]:
        extras = case["extras"] or [None, None]
        first = block_hash(root_hash("0"), [1, 2, 3, 4], extras[0])
        assert [first.hex(), block_hash(first, [5, 6, 7, 8], extras[1]).hex()] == case["digests_hex"]


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (0, "00"),
        (23, "17"),
        (24, "1818"),
        (255, "18ff"),
        (256, "190100"),
        (65536, "1a00010000"),
        (2**32, "1b0000000100000000"),
        (-1, "20"),
        (-500, "3901f3"),
        (None, "f6"),
        (True, "f5"),
        (False, "f4"),
        (b"\x01", "4101"),
        ("é", "62c3a9"),
        ([1, [2, None]], "820182 02f6".replace(" ", "")),
    ],
)
def test_cbor(value: Any, encoded: str) -> None:
    assert cbor(value).hex() == encoded
