"""The bytes that each vLLM version puts on its KV event sockets: pure functions, no socket, no clock.

vLLM's encoder is a msgspec struct per event. Up to 0.23 a struct is an array with the tag first and every field of that
version present (nil when unset); from 0.24 it is a map whose newer keys are left out when unset. So one table of
(field, first version) describes every form. Checked byte for byte against what 22 versions published
(tests/data/captures/dialects_*.jsonl).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

Hash = int | bytes
Version = tuple[int, int, int]

END_SEQUENCE = b"\xff" * 8
"""Sequence frame that ends a replay answer."""


class Stored(NamedTuple):
    """Consecutive blocks became resident. Field names and order are vLLM's."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = "GPU"
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class Removed(NamedTuple):
    """One copy of each block is gone."""

    block_hashes: list[Hash]
    medium: str | None = "GPU"
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class Cleared(NamedTuple):
    """The GPU prefix cache was reset."""


KVEvent = Stored | Removed | Cleared

TAGS: dict[type, str] = {Stored: "BlockStored", Removed: "BlockRemoved", Cleared: "AllBlocksCleared"}

FIELDS: dict[type, tuple[tuple[str, Version], ...]] = {
    Stored: (
        ("block_hashes", (0, 9, 2)),
        ("parent_block_hash", (0, 9, 2)),
        ("token_ids", (0, 9, 2)),
        ("block_size", (0, 9, 2)),
        ("lora_id", (0, 9, 2)),
        ("medium", (0, 10, 2)),
        ("lora_name", (0, 14, 1)),
        ("extra_keys", (0, 17, 1)),
        ("group_idx", (0, 20, 2)),
        ("kv_cache_spec_kind", (0, 22, 1)),
        ("kv_cache_spec_sliding_window", (0, 22, 1)),
        ("locality", (0, 26, 0)),
        ("ownership", (0, 29, 0)),
        ("session_id", (0, 30, 0)),
    ),
    Removed: (
        ("block_hashes", (0, 9, 2)),
        ("medium", (0, 10, 2)),
        ("group_idx", (0, 20, 2)),
        ("locality", (0, 26, 0)),
        ("ownership", (0, 29, 0)),
    ),
    Cleared: (),
}

MAPS_FROM: Version = (0, 24, 0)
TOPIC_IN_REPLAY_FROM: Version = (0, 26, 0)
OLDEST: Version = (0, 9, 2)
NEWEST: Version = (0, 32, 99)

LEFT_OUT_WHEN_NIL = frozenset(
    {
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
        "locality",
        "ownership",
        "session_id",
    }
)
"""Keys of the map form that are absent when unset; the others are there with nil."""


@dataclass(frozen=True)
class WireForm:
    """How one vLLM version writes events and replay answers.

    fields        per event type the fields that the version knows, in order
    maps          map form (0.24 on) instead of arrays
    replay_topic  4-frame replay answers (0.26 on) instead of 3
    int_hashes    block hashes as the low 64 bits of the digest (vLLM's default) instead of the whole 32 bytes
    """

    name: str
    fields: dict[type, tuple[str, ...]]
    maps: bool
    replay_topic: bool
    int_hashes: bool = True


def wire_form(version: str, *, int_hashes: bool = True) -> WireForm:
    """The form of a vLLM version: "vllm-0.20", "0.20.2", ... A bare minor version means its newest patch.

    Raises ValueError for text that is no version between 0.9 and 0.32.
    """
    match = re.fullmatch(r"(?:vllm-)?v?(\d+)\.(\d+)(?:\.(\d+))?", version.strip())
    number = (int(match[1]), int(match[2]), int(match[3] or 99)) if match else (0, 0, 0)
    if not OLDEST <= number <= NEWEST:
        raise ValueError(f"wire form {version!r}: expected vllm-0.9 (0.9.2) to vllm-0.32")
    return WireForm(
        name=f"vllm-{match[1]}.{match[2]}" + (f".{match[3]}" if match[3] else "") if match else "",
        fields={kind: tuple(name for name, since in rows if since <= number) for kind, rows in FIELDS.items()},
        maps=number >= MAPS_FROM,
        replay_topic=number >= TOPIC_IN_REPLAY_FROM,
        int_hashes=int_hashes,
    )


def wire_hash(form: WireForm, value: Hash | None) -> Hash | None:
    """A digest as it goes over the wire: itself, or its last 8 bytes as an unsigned big-endian number."""
    if form.int_hashes and isinstance(value, bytes):
        return int.from_bytes(value[-8:], "big")
    return value


def encode_event(form: WireForm, event: KVEvent) -> list[Any] | dict[str, Any]:
    """One event as the array or map of this version; fields that the version does not know are left out."""
    kind = type(event)
    pairs: list[tuple[str, Any]] = []
    for name in form.fields[kind]:
        value = getattr(event, name)
        if name == "block_hashes":
            value = [wire_hash(form, item) for item in value]
        elif name == "parent_block_hash":
            value = wire_hash(form, value)
        pairs.append((name, value))
    if not form.maps:
        return [TAGS[kind], *(value for _, value in pairs)]
    present = {name: value for name, value in pairs if value is not None or name not in LEFT_OUT_WHEN_NIL}
    return {"type": TAGS[kind], **present}


def encode_batch(form: WireForm, events: Sequence[KVEvent], *, ts: float, rank: int) -> bytes:
    """Payload of one message: `[ts, events, data_parallel_rank]` in MessagePack."""
    packed: bytes = msgpack.packb([ts, [encode_event(form, event) for event in events], rank], use_bin_type=True)
    return packed


def sequence_frame(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")


def live_frames(topic: bytes, sequence: int, payload: bytes) -> list[bytes]:
    """Frames of a live message."""
    return [topic, sequence_frame(sequence), payload]


def replay_frames(form: WireForm, topic: bytes, sequence: int, payload: bytes) -> list[bytes]:
    """Frames of one replayed message after the ROUTER's identity frame, the empty delimiter included."""
    if form.replay_topic:
        return [b"", topic, sequence_frame(sequence), payload]
    return [b"", sequence_frame(sequence), payload]


def end_frames(form: WireForm) -> list[bytes]:
    """Frames of the end marker after the ROUTER's identity frame."""
    return [b"", b"", END_SEQUENCE, b""] if form.replay_topic else [b"", END_SEQUENCE, b""]


def parse_replay_request(frames: Sequence[bytes]) -> tuple[bytes, int] | None:
    """`[identity, b"", start]` at the ROUTER -> (identity, start); anything else gets no answer, as in vLLM.

    The start frame is read as a big-endian number of any length.
    """
    if len(frames) != 3 or frames[1] != b"":
        return None
    return frames[0], int.from_bytes(frames[2], "big")
