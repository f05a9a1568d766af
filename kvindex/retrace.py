"""A recorded stream of events once more through dialect, StreamSync and PrefixIndex, with look-ups at given moments.

For `capture.verify`. Variants change one thing each, to see whether a known exception accounts for a difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvindex.dialects import DIALECTS, DialectOptions
from kvindex.dialects.fields import counted_kind
from kvindex.dialects.wire import open_batch
from kvindex.errors import DecodeError
from kvindex.events import AllBlocksCleared, BlockStored, Event, Tier
from kvindex.hashing import content_keys, extras_bytes, pack_tokens, root_bytes
from kvindex.index import Outcome, PrefixIndex, StreamView, TierBlocks
from kvindex.sync import Recovery, StreamSync

Position = tuple[int, int]
"""(record, event of its batch that is not skipped): the moment just before it was applied."""

NO_BLOCKS = TierBlocks(0, 0, 0)


class RecordedBatch(NamedTuple):
    """One live message. keys: the content keys that each event stored on the device."""

    stream: int
    frames: list[bytes]
    events: list[Event]
    keys: list[frozenset[bytes]]


class RecordedStream(NamedTuple):
    name: str
    topic: bytes
    dp_rank: int


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """What to look up, and when: the content keys of each prompt, and how many tokens it has."""

    request: int
    stream: int
    at: Position
    prompts: tuple[tuple[list[bytes], int], ...]


class Found(NamedTuple):
    """Blocks of all prompts together, and whether the view was the engine's whole truth."""

    blocks: TierBlocks
    complete: bool


class Variant(NamedTuple):
    """What is done otherwise than in the product.

    external  records of resets after which the next clear of each stream empties the host tier too
    full      record of a request -> its re-announced keys, which add no copy
    windows   ask the sliding-window groups too
    """

    external: tuple[int, ...] = ()
    full: Mapping[int, frozenset[bytes]] = {}
    windows: bool = False


class _Tap:
    """Stands between StreamSync and the view: sees each event before it is applied."""

    def __init__(self, run: Retrace, stream: int, view: StreamView) -> None:
        self._run, self._stream, self._view = run, stream, view

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    @property
    def visible(self) -> bool:
        return self._view.visible

    @visible.setter
    def visible(self, value: bool) -> None:
        self._view.visible = value

    def apply(self, event: Event) -> Outcome:
        return self._view.apply(self._run.before(self._stream, event))

    def clear(self) -> None:
        self._view.clear()

    def shadow(self) -> StreamView:
        return self._view.shadow()

    def swap(self, shadow: StreamView) -> None:
        self._view.swap(shadow)


class Retrace:
    """`found` maps each look-up to its answer after `run`; `problems` is what the streams complained about.

    batches   record -> batch
    owners    record of a batch -> record of the request whose line is the next
    """

    def __init__(
        self,
        streams: Sequence[RecordedStream],
        batches: Mapping[int, RecordedBatch],
        lookups: Sequence[Lookup],
        *,
        dialect: str,
        owners: Mapping[int, int],
        variant: Variant | None = None,
    ) -> None:
        self.variant = variant or Variant()
        self.index = PrefixIndex(max_streams=max(1, len(streams)))
        self.found: dict[Lookup, Found] = {}
        self.problems: dict[str, None] = {}
        self._batches = batches
        self._owners = owners
        self._at: Position = (0, 0)
        self._external: set[int] = set()
        self._wanted: dict[Position, list[Lookup]] = {}
        for lookup in lookups:
            self._wanted.setdefault(lookup.at, []).append(lookup)
        self._syncs: list[StreamSync] = []
        self._views: list[StreamView] = []
        self._windows = [Windows() for _ in streams]
        self._from_first = [False] * len(streams)  # the publisher's first message is the first of the file
        begun: set[int] = set()
        for number, (name, topic, dp_rank) in enumerate(streams):
            decoder = DIALECTS[dialect](DialectOptions())
            view = self.index.open(walk=decoder.walk, name=name)
            tap = _Tap(self, number, view)
            self._views.append(view)
            self._syncs.append(
                StreamSync(view=tap, dialect=decoder, recovery=Recovery.NONE, dp_rank=dp_rank, topic=topic)
            )
        for batch in batches.values():
            if batch.stream not in begun:
                begun.add(batch.stream)
                first = self._syncs[batch.stream].dialect.first_sequence.to_bytes(8, "big")
                self._from_first[batch.stream] = batch.frames[1:2] == [first]

    def run(self, records: int) -> Retrace:
        for number in range(records):
            self._look((number, 0))
            if number in self.variant.external:
                self._external = set(range(len(self._syncs)))
            batch = self._batches.get(number)
            if batch is None:
                continue
            sync = self._syncs[batch.stream]
            sync.live(batch.frames, float(number))
            if self.variant.windows:
                self._windows[batch.stream].feed(batch.frames[-1])
            self._look((number, len(batch.events)))
            if (error := sync.status.error) is not None:
                self.problems[error] = None
        return self

    def before(self, stream: int, event: Event) -> Event:
        """An event is about to be applied: the look-ups that belong here, and what the variant makes of it."""
        number, place = self._at
        self._look((number, place))
        self._at = (number, place + 1)
        if isinstance(event, AllBlocksCleared) and stream in self._external:
            self._external.discard(stream)
            return AllBlocksCleared((Tier.DEVICE, Tier.HOST))
        if isinstance(event, BlockStored) and self.variant.full:
            again = self.variant.full.get(self._owners.get(number, -1))
            keys = self._batches[number].keys[place]
            if again and keys and keys <= again:
                return event._replace(adds_copy=False)
        return event

    def _look(self, at: Position) -> None:
        self._at = at
        for lookup in self._wanted.pop(at, ()):
            view, sync = self._views[lookup.stream], self._syncs[lookup.stream]
            size = self.index.block_size
            total = [0, 0, 0]
            for keys, tokens in lookup.prompts:
                if size and sync.dialect.caps_last_token:
                    keys = keys[: (tokens - 1) // size]
                blocks = self.index.find(keys).get(view, NO_BLOCKS)
                if self.variant.windows:
                    blocks = _cut(blocks, self._windows[lookup.stream].fitting(keys[: sum(blocks)]))
                total = [one + more for one, more in zip(total, blocks, strict=True)]
            self.found[lookup] = Found(TierBlocks(*total), sync.complete or self._untold(lookup.stream))

    def _untold(self, stream: int) -> bool:
        """Nothing was published yet: no blocks are the whole truth then."""
        status = self._syncs[stream].status
        return self._from_first[stream] and not status.batches and not status.damaged


def _cut(blocks: TierBlocks, left: int) -> TierBlocks:
    parts = []
    for part in blocks:
        parts.append(min(part, left))
        left -= parts[-1]
    return TierBlocks(*parts)


_STORED = (
    "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
    "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window",
)  # fmt: skip
_REMOVED = ("type", "block_hashes", "medium", "group_idx")


class Windows:
    """The device blocks of a hybrid model's sliding-window groups, which the index leaves out (D8), from raw events."""

    def __init__(self) -> None:
        self._window: dict[int, int] = {}
        self._copies: Counter[tuple[int, Any]] = Counter()
        self._hashes: dict[bytes, Any] = {}
        self._keys: dict[Any, bytes] = {}
        self._size = 1

    def feed(self, payload: bytes) -> None:
        try:
            for raw in open_batch(payload)[0]:
                if isinstance(raw, list):
                    raw = dict(zip(_STORED if raw[:1] == ["BlockStored"] else _REMOVED, raw, strict=False))
                if isinstance(raw, dict):
                    self._event(raw)
        except (DecodeError, TypeError, ValueError, KeyError, OverflowError):
            return  # the stream itself complains

    def _event(self, raw: Mapping[str, Any]) -> None:
        if raw.get("type") == "AllBlocksCleared":
            self._copies.clear()
            return
        stored, group, kind = raw.get("type") == "BlockStored", raw.get("group_idx") or 0, raw.get("kv_cache_spec_kind")
        if stored and kind and raw.get("token_ids"):
            if counted_kind(kind):
                self._learn(raw)
            elif raw.get("kv_cache_spec_sliding_window"):
                self._window[group] = raw["kv_cache_spec_sliding_window"]
        if group in self._window and str(raw.get("medium") or "GPU").upper() == "GPU":
            for one in raw.get("block_hashes") or ():
                self._copies[group, one] = max(0, self._copies[group, one] + (1 if stored else -1))

    def _learn(self, raw: Mapping[str, Any]) -> None:
        parent, name, self._size = raw.get("parent_block_hash"), raw.get("lora_name"), raw["block_size"]
        if parent is not None and parent not in self._keys:
            return
        entries = [[part for part in entry or () if part != name] for entry in raw.get("extra_keys") or ()]
        keys = content_keys(
            pack_tokens(raw["token_ids"]),
            self._size,
            root=root_bytes(name),
            extras=[extras_bytes(entry) for entry in entries] or None,
            parent=None if parent is None else self._keys[parent],
        )
        for one, key in zip(raw["block_hashes"], keys, strict=False):
            self._keys[one], self._hashes[key] = key, one

    def fitting(self, keys: Sequence[bytes]) -> int:
        """The longest prefix at whose end every group still has the blocks of its window."""
        hashes = [self._hashes.get(key) for key in keys]
        needed = {group: -(-(window - 1) // self._size) for group, window in self._window.items()}
        for length in range(len(keys), 0, -1):
            if all(
                all(self._copies[group, one] for one in hashes[max(0, length - count) : length])
                for group, count in needed.items()
            ):
                return length
        return 0
