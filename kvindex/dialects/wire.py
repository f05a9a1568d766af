"""Bytes -> batch envelope and raw events, with bounded memory and time: the only user of msgpack in this package.

    up to 4 KiB    one unpackb
    up to 64 KiB   structure walked first (no allocation), then one unpackb
    above          structure walked event by event, then each event unpacked when it is asked for: the interpreter is
                   never held for a whole snapshot; a truncated or trailing tail is found before any event is applied

Walking first matters for hostile lengths: nested arrays that announce more than they hold would make msgpack reserve
memory for each level.
"""

from __future__ import annotations

import io
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import msgpack

from kvindex.errors import DecodeError

WALK_BYTES = 4 << 10
EAGER_BYTES = 64 << 10
SMALLEST_EVENT = 3
"""Bytes of the shortest array with a tag; a batch that announces more events than fit is refused at once."""
READ_BYTES = 64 << 10

# What msgpack raises for bytes that are no MessagePack, for strict map keys, invalid UTF-8, limits and depth.
_ERRORS = (ValueError, TypeError, OverflowError, RecursionError, MemoryError, msgpack.UnpackException)

RANK_KEYS = ("data_parallel_rank", "dp_rank")
TIME_KEYS = ("ts", "timestamp", "timestamp_ms")


LONG = object()


RawBatch = tuple[list[Any] | Iterator[Any], int | None, float | None]
"""(events, dp_rank, timestamp). events: a list, or a lazy iterator that may raise DecodeError for what is wrong inside
one event."""


def unpack(data: bytes | memoryview) -> Any:
    """One whole MessagePack value, strictly: no trailing bytes, text or bytes as map keys, valid UTF-8."""
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True)
    except _ERRORS as error:
        raise DecodeError(_reason(error)) from None


def open_batch(payload: bytes, *, single: bool = False, pace: Callable[[], None] | None = None) -> RawBatch:
    """The envelope of one message. Raises DecodeError.

    `[ts, events]`, `[ts, events, rank]` or a map with `events`; with `single` a map without `events` is one event.
    """
    size = len(payload)
    if size > EAGER_BYTES:
        return _open_large(payload, single, pace)
    if size > WALK_BYTES:
        _walk(payload)
    value = unpack(payload)
    if value.__class__ is list:
        if not 2 <= len(value) <= 3:
            raise DecodeError(f"batch is an array of {len(value)}, not of 2 or 3")
        return _listed(value[1], size), rank_of(value[2]) if len(value) == 3 else None, seconds_of(value[0])
    if value.__class__ is dict:
        if "events" not in value:
            if single and value:
                return [value], None, None
            raise DecodeError("batch is a map without events")
        rank, time = _any_of(value, RANK_KEYS), _any_of(value, TIME_KEYS)
        return _listed(value["events"], size), rank_of(rank), seconds_of(time)
    raise DecodeError(f"batch is {type(value).__name__}, not an array or a map")


def _open_large(payload: bytes, single: bool, pace: Callable[[], None] | None) -> RawBatch:
    scan = _Scan(payload, pace)
    view = memoryview(payload)
    try:
        if _is_array(payload[0]):
            length = scan.unpacker.read_array_header()
            if not 2 <= length <= 3:
                raise DecodeError(f"batch is an array of {length}, not of 2 or 3")
            timestamp = scan.small(view)
            bounds = scan.events()
            rank = scan.small(view) if length == 3 else None
        elif _is_map(payload[0]):
            fields: dict[str, Any] = {}
            bounds = None
            count = scan.unpacker.read_map_header()
            single = single and count > 0
            for _ in range(count):
                key = scan.small(view)
                if key == "events":
                    bounds = scan.events()
                elif key is LONG or isinstance(key, (str, bytes)):
                    value = scan.small(view)
                    if key in RANK_KEYS or key in TIME_KEYS:
                        fields[key] = value
                else:
                    raise DecodeError("a map key is neither text nor bytes")
            rank, timestamp = _any_of(fields, RANK_KEYS), _any_of(fields, TIME_KEYS)
        else:
            raise DecodeError("batch is not an array or a map")
        scan.end(len(payload))
    except _ERRORS as error:
        raise DecodeError(_reason(error)) from None
    if bounds is None:
        if not single:
            raise DecodeError("batch is a map without events")
        bounds = array("I", (0, len(payload)))
    return _lazily(view, bounds, pace), rank_of(rank), seconds_of(timestamp)


class _Scan:
    """Walks a payload without building values; offsets of the events come out."""

    def __init__(self, payload: bytes, pace: Callable[[], None] | None) -> None:
        self._payload = payload
        self.unpacker = msgpack.Unpacker(
            io.BytesIO(payload),
            raw=False,
            strict_map_key=True,
            read_size=min(READ_BYTES, len(payload)),
            max_buffer_size=len(payload),
        )
        self._pace = pace
        self._size = len(payload)

    def small(self, view: memoryview) -> Any:
        """The next value when it is short, else LONG (nothing the batch envelope needs is long)."""
        start = self.unpacker.tell()
        self.unpacker.skip()
        end = self.unpacker.tell()
        return unpack(view[start:end]) if end - start <= 256 else LONG

    def events(self) -> array[int]:
        """Start of each event and the end of the last one."""
        if not _is_array(self._peek()):
            raise DecodeError("events is not a list")
        count = self.unpacker.read_array_header()
        _bound(count, self._size)
        bounds = array("I")
        append, tell, skip, pace = bounds.append, self.unpacker.tell, self.unpacker.skip, self._pace
        for _ in range(count):
            append(tell())
            skip()
            if pace is not None:  # at each of them, for one event may be thousands of tokens
                pace()
        append(tell())
        return bounds

    def _peek(self) -> int:
        position = self.unpacker.tell()
        if position >= self._size:
            raise DecodeError("no MessagePack batch: payload ends early")
        return int(self._payload[position])

    def end(self, size: int) -> None:
        if self.unpacker.tell() != size:
            raise DecodeError(f"{size - self.unpacker.tell()} bytes after the batch")


def _lazily(view: memoryview, bounds: array[int], pace: Callable[[], None] | None) -> Iterator[Any]:
    start = bounds[0]
    for number in range(1, len(bounds)):
        end = bounds[number]
        yield unpack(view[start:end])
        start = end
        if pace is not None:
            pace()


def _walk(payload: bytes) -> None:
    unpacker = msgpack.Unpacker(max_buffer_size=len(payload))
    unpacker.feed(payload)
    try:
        unpacker.skip()
    except _ERRORS as error:
        raise DecodeError(_reason(error)) from None
    if unpacker.tell() != len(payload):
        raise DecodeError(f"{len(payload) - unpacker.tell()} bytes after the batch")


def _is_array(byte: int) -> bool:
    return 0x90 <= byte <= 0x9F or byte in (0xDC, 0xDD)


def _is_map(byte: int) -> bool:
    return 0x80 <= byte <= 0x8F or byte in (0xDE, 0xDF)


def _bound(events: int, size: int) -> None:
    if events > size // SMALLEST_EVENT:
        raise DecodeError(f"batch announces {events} events in {size} bytes")


def _listed(value: Any, size: int) -> list[Any]:
    if value.__class__ is list:
        _bound(len(value), size)
        return value
    raise DecodeError(f"events is {'nil' if value is None else type(value).__name__}, not a list")


def rank_of(value: Any) -> int | None:
    if value is None:
        return None
    if value.__class__ is int and value >= 0:
        return value
    raise DecodeError(f"data-parallel rank is {type(value).__name__}, not a number")


def seconds_of(value: Any) -> float | None:
    """Seconds, or milliseconds (an int, as pools write it) made seconds; None for anything unusable."""
    if value.__class__ is float:
        return value if 0 <= value < 1e12 else None
    if value.__class__ is int:
        return value / 1000 if 10**11 < value < 10**15 else float(value) if 0 <= value <= 10**11 else None
    return None


def _any_of(fields: dict[Any, Any], keys: tuple[str, ...]) -> Any:
    for key in keys:
        if fields.get(key) is not None:
            return fields[key]
    return None


def _reason(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, UnicodeDecodeError):
        text = "text is not valid UTF-8"
    elif isinstance(error, msgpack.ExtraData):
        text = "bytes after the batch"
    elif isinstance(error, msgpack.OutOfData):
        text = "payload ends early"
    return f"no MessagePack batch: {text or type(error).__name__}"
