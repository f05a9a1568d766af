"""Any bytes: a batch, or DecodeError. Never another error, never much memory, the same events however they are read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvindex.dialects import DIALECTS, DialectOptions, wire
from kvindex.dialects.usual import UsualForm
from kvindex.errors import DecodeError
from kvindex.events import AllBlocksCleared, BlockRemoved, BlockStored, Skipped, Tier

QUICK = settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=8), st.binary(max_size=40)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
tags = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "stored", "removed", "cleared", "Other"])
keys = st.sampled_from(
    ["type", "event_type", "block_hashes", "seq_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id",
     "medium", "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "ownership", "cache_salt", "object_key",
     "backend_id"]
)  # fmt: skip
fields = st.one_of(
    values,
    st.lists(st.integers(0, 2**32), max_size=8),
    st.lists(st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=32), max_size=3),
    st.sampled_from(["GPU", "CPU", "STORAGE", "full_attention", "mamba", 4, 2, None]),
)
map_events = st.builds(lambda tag, rest: {"type": tag, **rest}, tags, st.dictionaries(keys, fields, max_size=9))
rfc_events = st.builds(lambda tag, rest: {"event_type": tag, **rest}, tags, st.dictionaries(keys, fields, max_size=9))
array_events = st.builds(lambda tag, rest: [tag, *rest], tags, st.lists(fields, max_size=12))
batches = st.builds(
    lambda time, events, rest: [time, events, *rest],
    scalars,
    st.lists(st.one_of(map_events, rfc_events, array_events, values), max_size=6),
    st.lists(st.none() | st.integers(-1, 5) | scalars, max_size=2),
)

USUAL = {
    "block_hashes": [11, 12], "parent_block_hash": None, "token_ids": [*range(100, 108)], "block_size": 4,
    "lora_id": None, "medium": "GPU", "lora_name": None, "extra_keys": None, "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}  # fmt: skip
almost_usual = st.builds(
    lambda tag, changed, as_map: [{"type": tag, **USUAL, **changed}, [tag, *(USUAL | changed).values()]][not as_map],
    tags, st.dictionaries(st.sampled_from([*USUAL, "seq_hashes", "ownership"]), fields, max_size=2), st.booleans(),
)  # fmt: skip


def well_formed(event: Any) -> None:
    """What the index relies on."""
    if isinstance(event, Skipped):
        assert event.reason
        assert len(event.detail) < 300
        return
    if isinstance(event, AllBlocksCleared):
        return
    assert all(type(one) in (int, bytes) for one in event.hashes)
    assert isinstance(event.tier, Tier)
    assert event.group >= 0
    if isinstance(event, BlockRemoved):
        return
    assert isinstance(event, BlockStored)
    assert len(event.tokens) == 4 * event.block_size * len(event.hashes)
    assert event.parent is None or type(event.parent) in (int, bytes)
    assert event.extras is None or len(event.extras) == len(event.hashes)
    assert isinstance(event.root, bytes)


def outcome(dialect: str, payload: bytes) -> Any:
    """(rank, time, events) or None; no error but DecodeError comes out."""
    try:
        made = DIALECTS[dialect](DialectOptions())
        batch, objects = made.decode(payload), made.objects()
        events = list(batch.events if objects is None else objects.resolve(batch.events))
    except DecodeError as error:
        return None if 0 < len(str(error)) < 300 else f"unreadable error: {error}"
    for event in events:
        well_formed(event)
    return repr((batch.dp_rank, batch.timestamp, events))


def both_ways(payload: bytes, *, broken: bool = False) -> None:
    """As a usual message if it is one, whole, and event by event: the same outcome.

    broken   text in it may be no UTF-8; where nobody reads it, a usual message is taken all the same
    """
    before = wire.EAGER_BYTES, wire.WALK_BYTES
    for dialect in DIALECTS:
        found = {outcome(dialect, payload)}
        with patch.object(UsualForm, "decode", return_value=None):
            try:
                for wire.EAGER_BYTES, wire.WALK_BYTES in ((1 << 16, 1 << 12), (1 << 16, 0), (0, 0)):
                    found.add(outcome(dialect, payload))
            finally:
                wire.EAGER_BYTES, wire.WALK_BYTES = before
        if broken and None in found and UsualForm().decode(payload) is not None:
            continue
        assert len(found) == 1, f"{dialect}: {found}"
        assert "unreadable" not in str(found)


@QUICK
@given(st.binary(max_size=200))
def test_any_bytes(payload: bytes) -> None:
    both_ways(payload)


@QUICK
@given(values)
def test_any_value(value: Any) -> None:
    both_ways(msgpack.packb(value))


def test_events_too_small_to_be_any() -> None:
    both_ways(msgpack.packb([None, [None, None]]))


@QUICK
@given(batches)
def test_any_batch(batch: Any) -> None:
    both_ways(msgpack.packb(batch))


@QUICK
@given(batches, st.data())
def test_broken_batches(batch: Any, data: st.DataObject) -> None:
    payload = bytearray(msgpack.packb(batch))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(payload) - 1))
        payload[place] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    both_ways(bytes(payload), broken=True)
    both_ways(bytes(payload[:cut]), broken=True)


@QUICK
@given(st.lists(st.binary(max_size=9), max_size=6))
def test_any_reply(frames: list[bytes]) -> None:
    for dialect in DIALECTS:
        try:
            reply = DIALECTS[dialect](DialectOptions()).split_reply(frames)
        except DecodeError:
            continue
        assert reply is None or (0 <= reply[0] < 2**64 - 1 and reply[1] == frames[-1])


HOSTILE = """
import resource, sys
from kvindex.dialects import DIALECTS, DialectOptions
from kvindex.errors import DecodeError

def nested(size, head):
    deep = head(size) * 400
    return deep + bytes(max(0, size - len(deep)))

def array32(size): return b"\\xdd" + (size - 2100).to_bytes(4, "big")
def map32(size): return b"\\xdf" + ((size - 2100) // 2).to_bytes(4, "big")

sizes = (4000, 4097, 60_000, 70_000, 1 << 20)
payloads = [b"\\x93\\xc0" + nested(size, head) for size in sizes for head in (array32, map32)]
payloads += [nested(size, head) for size in sizes for head in (array32, map32)]
payloads += [start + tail for start in (b"", b"\\x93\\xc0", b"\\x93\\xc0\\x91", b"\\x93\\xc0\\x91\\x91") for tail in (
    b"\\xdd\\xff\\xff\\xff\\xff", b"\\xdf\\xff\\xff\\xff\\xff", b"\\xdb\\xff\\xff\\xff\\xff",
    b"\\xc6\\xff\\xff\\xff\\xff", b"\\xc9\\xff\\xff\\xff\\xff\\x01", b"\\xdc\\xff\\xff" * 1000)]
payloads += [b"\\x93\\xc0\\xdd" + (1 << 20).to_bytes(4, "big") + b"\\xc0" * (1 << 20) + b"\\xc0"]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for payload in payloads:
    for name in DIALECTS:
        try:
            for event in DIALECTS[name](DialectOptions()).decode(payload).events:
                pass
        except DecodeError:
            pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_hostile_lengths_take_no_memory() -> None:
    """Announced lengths, alone and nested: the peak of a process of its own grows by less than 16 MiB."""
    if sys.platform != "linux":
        pytest.skip("ru_maxrss is in KiB on Linux")
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE], cwd=root, capture_output=True, text=True, check=True, timeout=60
    )
    assert int(done.stdout) < 16 * 1024


@QUICK
@given(st.lists(almost_usual, min_size=1, max_size=2), st.lists(scalars, max_size=1))
def test_almost_usual_messages(events: list[Any], rank: list[Any]) -> None:
    both_ways(msgpack.packb([1.0, events, *rank]))


ODD = {  # what msgspec and msgpack read differently, or only one of them at all
    "extension": msgpack.ExtType(5, b"x"), "time": msgpack.Timestamp(1), "map": {"a": 1}, "bytes as key": {b"a": 1},
    "number as key": {1: 2}, "nil as key": {None: 1}, "bytes": b"x", "deep": [[[["x"]]]], "float": 1.0, "bool": True,
}  # fmt: skip


@pytest.mark.parametrize("field", [*USUAL, "cache_salt", "ownership", "origin"])
def test_odd_values_in_every_field(field: str) -> None:
    for odd in ODD.values():
        for value in (odd, [odd], [[odd], [odd]], [[[odd]], None], {"cache_salt": odd}):
            event = USUAL | {field: value}
            both_ways(msgpack.packb([1.0, [{"type": "BlockStored", **event}], 0]))
            if field in USUAL:
                both_ways(msgpack.packb([1.0, [["BlockStored", *event.values()]], 0]))


@pytest.mark.parametrize("odd", ODD)
def test_odd_times_and_ranks(odd: str) -> None:
    events = [{"type": "BlockStored", **USUAL}]
    both_ways(msgpack.packb([ODD[odd], events, 0]))
    both_ways(msgpack.packb([1.0, events, ODD[odd]]))


def test_what_nobody_reads_may_be_anything() -> None:
    """Only a usual message is read past a newer field that holds no UTF-8; it is a sound message otherwise."""
    payload = msgpack.packb([1.0, [["BlockStored", *USUAL.values(), "newer"]], 0])
    assert outcome("vllm", payload) is not None
    assert outcome("vllm", payload.replace(b"newer", b"\xff" * 5)) == outcome("vllm", payload)
