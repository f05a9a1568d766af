"""A stream's content on the way from one replica to another: out of a view, over the wire, into a view.

    content --dump()--> BlocksMapped ... --pack()--> bytes --unpack()--> BlocksMapped ... --StreamView.apply--> view

What travels is what the engine's own hashes mean: hash -> content key, and its copies. Tokens do not travel (the index
does not keep them), so a hash whose tokens or place are unknown here is unknown there, too. Runs of neighbouring rows
stay together, so that the other index finds them as quickly as this one.

The form is MessagePack, one object after the other: a header, then [hashes, keys joined, [[tier, group, count], ...]],
then the number of these. It is internal to kvcar: `VERSION` changes with it, and another version is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgpack

from kvindex.content import Content
from kvindex.errors import DecodeError
from kvindex.events import BlocksMapped, EngineHash, Tier
from kvindex.rows import BUCKET, Rows

VERSION = 1
KEY_BYTES = 16
LONGEST_RUN = 64
_BIG = 1
"""MessagePack extension type of an int beyond 64 bits."""

Copies = tuple[tuple[Tier, int, int], ...]


class Header(NamedTuple):
    """What the content is of, and where it stands.

    instance, dp_rank, incarnation   whose stream
    block_size, seed                 of the content keys: both indexes must have the same
    sequence                         the last message that is in it
    complete                         whether it is the engine's whole truth
    recent                           (sequence, digest) of the last messages: shows whether two views are of one run
    """

    instance: str
    dp_rank: int
    incarnation: str
    block_size: int
    seed: int
    sequence: int
    complete: bool
    recent: tuple[tuple[int, int], ...]


def dump(content: Content, rows: Rows, pace: Callable[[], None]) -> Iterator[BlocksMapped]:
    """Everything the stream knows. Writer thread; nothing may be written before it ends. O(known + rows), paced."""
    places = {place: (Tier(name & 3), name >> 2) for name, place in content.places.items()}
    described: dict[int, Copies] = {}

    def copies_of(packed: int) -> Copies:
        found = described.get(packed)
        if found is None:
            counted = [(*places[place], packed >> 32 * place & 0xFFFFFFFF) for place in places]
            found = described[packed] = tuple(row for row in counted if row[2])
        return found

    buckets: dict[int, list[tuple[int, int, EngineHash]]] = {}
    without: dict[int, list[EngineHash]] = {}
    for shard, odd in zip(content.shards, content.odd, strict=True):
        for hash_, row in shard.items():
            packed = odd.get(hash_, content.home_unit)
            if row:
                buckets.setdefault(row >> BUCKET, []).append((row, packed, hash_))
            else:
                without.setdefault(packed, []).append(hash_)
        pace()
    keys, after, parents = rows.keys, rows.after, rows.parents()
    for number in sorted(buckets):
        bucket = buckets.pop(number)
        bucket.sort(key=lambda entry: entry[0])
        hashes: list[EngineHash] = []
        run: list[bytes] = []
        last = last_packed = 0
        for row, packed, hash_ in bucket:
            key = keys[row]
            assert key is not None
            child = row == last + 1 and after[last] == row and parents[row] == 1 and key not in rows.listed(key)
            if hashes and (not child or packed != last_packed or len(run) == LONGEST_RUN):
                yield BlocksMapped(hashes, run, copies_of(last_packed))
                hashes, run = [], []
                pace()
            hashes.append(hash_)
            run.append(key)
            last, last_packed = row, packed
        if hashes:
            yield BlocksMapped(hashes, run, copies_of(last_packed))
        pace()
    for packed, hashes in without.items():
        for start in range(0, len(hashes), LONGEST_RUN):
            yield BlocksMapped(hashes[start : start + LONGEST_RUN], [], copies_of(packed))
            pace()


def pack(header: Header, events: Iterable[BlocksMapped]) -> bytes:
    """O(blocks), about 26 bytes each; as slow as `events`."""
    packer = msgpack.Packer(autoreset=False)
    packer.pack([VERSION, *header])
    count = 0
    for event in events:
        packer.pack([[_packed(one) for one in event.hashes], b"".join(event.keys), event.copies])
        count += 1
    packer.pack(count)
    return bytes(packer.bytes())


def unpack(body: bytes) -> tuple[Header, list[BlocksMapped]]:
    """Raises DecodeError for anything that `pack` does not write, another version included."""
    unpacker = msgpack.Unpacker(
        strict_map_key=True, ext_hook=_ext, max_buffer_size=max(len(body), 1), unicode_errors="surrogateescape"
    )
    unpacker.feed(body)
    try:
        header = _header(next(unpacker))
        events: list[BlocksMapped] = []
        for item in unpacker:
            if isinstance(item, int) and not isinstance(item, bool):
                if item != len(events) or unpacker.tell() != len(body):
                    raise DecodeError(f"{len(events)} parts, the end says {item!r}")
                return header, events
            events.append(_event(item))
    except (msgpack.UnpackException, StopIteration, ValueError, TypeError, OverflowError) as error:
        raise DecodeError(f"not a snapshot of a peer: {type(error).__name__}: {error}") from None
    raise DecodeError("it ends too early")


def _packed(hash_: EngineHash) -> Any:
    if isinstance(hash_, int) and not -(1 << 63) <= hash_ < 1 << 64:
        return msgpack.ExtType(_BIG, hash_.to_bytes(hash_.bit_length() // 8 + 1, "big", signed=True))
    return hash_


def _ext(code: int, data: bytes) -> int:
    if code != _BIG:
        raise DecodeError(f"extension type {code}")
    return int.from_bytes(data, "big", signed=True)


def _header(item: Any) -> Header:
    if not isinstance(item, list) or not item or item[0] != VERSION:
        raise DecodeError(f"not version {VERSION}: both replicas must be of one kvcar version")
    _, instance, dp_rank, incarnation, block_size, seed, sequence, complete, recent = item
    if not (isinstance(instance, str) and isinstance(incarnation, str) and isinstance(complete, bool)):
        raise DecodeError("a field of the header has a wrong type")
    numbers = [dp_rank, block_size, seed, sequence, *(value for pair in recent for value in pair)]
    if not all(one.__class__ is int and one >= 0 for one in numbers) or not all(len(pair) == 2 for pair in recent):
        raise DecodeError("a number of the header is none")
    if not block_size:
        raise DecodeError("its block size is 0")
    pairs = tuple((at, digest) for at, digest in recent)
    if any(at > sequence for at, _ in pairs):
        raise DecodeError(f"it ends at message {sequence} and shows later ones")
    return Header(instance, dp_rank, incarnation, block_size, seed, sequence, complete, pairs)


def _event(item: Any) -> BlocksMapped:
    hashes, joined, copies = item
    if not isinstance(hashes, list) or not isinstance(joined, bytes) or not copies:
        raise DecodeError("a part has a wrong type")
    if not all(one.__class__ is int or one.__class__ is bytes for one in hashes):
        raise DecodeError("a hash is neither number nor bytes")
    if joined and len(joined) != KEY_BYTES * len(hashes):
        raise DecodeError(f"{len(joined)} bytes of keys for {len(hashes)} hashes")
    keys = [joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)]
    rows: Copies = tuple((Tier(tier), group, count) for tier, group, count in copies)
    if not all(number.__class__ is int for row in copies for number in row):
        raise DecodeError("a number of the copies is none")
    if not all(0 <= group < 1 << 16 and 0 < count < 1 << 32 for _, group, count in rows):
        raise DecodeError("copies are out of range")
    if len({row[:2] for row in rows}) < len(rows):
        raise DecodeError("copies of one tier and group twice")
    return BlocksMapped(hashes, keys, rows)
