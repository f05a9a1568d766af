"""The seam: what a dialect is, and the decoder that vLLM, SGLang and xLLM share.

    payload --wire.open_batch--> raw events --Decoder.events--> BlockStored, BlockRemoved, AllBlocksCleared, Skipped

A decoder belongs to one stream: it learns which attention kind each group has (placeholder and removed events name the
group only). It never raises for one event; only a message that is no batch raises DecodeError.

Array events are read by position with bounds checks, map events by key; both forms may stand in one batch. Unknown keys
and positions after the last known one are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from kvindex.dialects import usual, wire
from kvindex.dialects.fields import (
    MAX_GROUP,
    QUICK_MEDIA,
    Malformed,
    Miscounted,
    Unusable,
    clip,
    counted_kind,
    extras_of,
    group_of,
    hashes_of,
    is_reuse,
    packed,
    parent_of,
    root_of,
    salted,
    size_of,
    tier_of,
    tokens_of,
    typename,
)
from kvindex.dialects.objects import Objects
from kvindex.dialects.usual import UsualForm
from kvindex.errors import DecodeError
from kvindex.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Event, Skipped, Tier
from kvindex.walk import Walk

END = b"\xff" * 8
"""Sequence frame of the end marker."""


@dataclass(frozen=True, slots=True)
class DialectOptions:
    """What a dialect may be told.

    default_medium  tier word of events without one (YuanRong's port per medium); None = device
    max_objects     objects of a pool that are told apart (Mooncake), then the stream starts again
    pace            called now and then while a large message is walked; sleeps when the time budget is used up
    """

    default_medium: str | None = None
    max_objects: int = 524_288
    pace: Callable[[], None] | None = None


class Dialect(Protocol):
    """One object a stream.

    walk              tier walk of its engines (D12)
    caps_last_token   the engine computes a prompt's last token again, whatever is cached
    default_recovery  "history", "snapshot" or "none": what a replay endpoint of its engines answers
    first_sequence    number of a publisher's first message; a run that starts there is complete
    """

    @property
    def name(self) -> str: ...
    @property
    def walk(self) -> Walk: ...
    @property
    def caps_last_token(self) -> bool: ...
    @property
    def default_recovery(self) -> str: ...
    @property
    def first_sequence(self) -> int: ...

    def decode(self, payload: bytes) -> Batch:
        """Raises DecodeError. The events of a large payload are lazy and may raise DecodeError while they are read."""

    def split_reply(self, frames: list[bytes]) -> tuple[int, bytes] | None:
        """(sequence, payload) of a replay or snapshot message, None for the end marker. Raises DecodeError."""

    def reset(self) -> None:
        """The engine was restarted: what was learnt from its events is void."""

    def objects(self) -> Objects | None:
        """A new memory for the objects a view holds (`Pooled` events go through it); None = its events name none."""


class Decoder:
    """Dialect of the engines. Subclasses set the class attributes, or take over one kind of event."""

    name: ClassVar[str]
    walk: ClassVar[Walk] = Walk.CASCADE
    caps_last_token: ClassVar[bool] = True
    default_recovery: ClassVar[str] = "history"
    first_sequence: ClassVar[int] = 0
    clears: ClassVar[tuple[Tier, ...]] = (Tier.DEVICE,)
    single_events: ClassVar[bool] = False

    def __init__(self, options: DialectOptions | None = None) -> None:
        self.options = options or DialectOptions()
        self._form = UsualForm()
        self._kinds: dict[int, str] = {}
        self._uncounted: set[int] = set()
        self._assumed: set[int] = set()  # groups of which copies were counted before a kind was told
        self._cleared = AllBlocksCleared(self.clears)

    def reset(self) -> None:
        self._kinds.clear()
        self._uncounted.clear()
        self._assumed.clear()

    def objects(self) -> Objects | None:
        return None

    def decode(self, payload: bytes) -> Batch:
        batch = self._form.decode(payload) if len(payload) <= wire.EAGER_BYTES else None
        if batch is not None:
            found = list(map(self._usual, batch.events))
            return Batch(found, wire.rank_of(batch.dp_rank), wire.seconds_of(batch.timestamp))
        events, dp_rank, timestamp = wire.open_batch(payload, single=self.single_events, pace=self.options.pace)
        decoded = self.events(events) if isinstance(events, list) else self._lazily(events)
        return Batch(decoded, dp_rank, timestamp)

    def split_reply(self, frames: list[bytes]) -> tuple[int, bytes] | None:
        """Read from the back: with an empty topic nothing in front tells the forms apart."""
        if not any(frames):
            return None
        if not 2 <= len(frames) <= 4:
            raise DecodeError(f"reply has {len(frames)} frames, not 2 to 4")
        sequence = frames[-2]
        if len(sequence) != 8:
            raise DecodeError(f"sequence of a reply has {len(sequence)} bytes, not 8")
        if sequence == END:
            return None
        return int.from_bytes(sequence, "big"), frames[-1]

    def events(self, raw: Iterable[Any]) -> list[Event]:
        return list(map(self.event, raw))

    def _lazily(self, raw: Iterator[Any]) -> Iterator[Event]:
        for one in raw:
            yield from self.events((one,))

    def event(self, raw: Any) -> Event:
        """One raw event. Never raises."""
        try:
            if raw.__class__ is dict:
                return self._map(raw)
            if raw.__class__ is list:
                return self._array(raw)
            raise Malformed(f"an event is {typename(raw)}")
        except NOT_TAKEN as error:
            return skipped(error)

    def _usual(self, one: usual.Event) -> Event:
        """One event of usual.py. Never raises."""
        try:
            if isinstance(one, (usual.StoredArray, usual.StoredMap)):
                return self._checked(one)
            if isinstance(one, (usual.RemovedArray, usual.RemovedMap)):
                return self._removed(one.block_hashes, one.medium, one.group_idx, True)
            return self._cleared
        except NOT_TAKEN as error:
            return skipped(error)

    def _checked(self, one: usual.StoredArray | usual.StoredMap) -> Event:
        lora_name, salt, reused = one.lora_name, None, False
        if isinstance(one, usual.StoredMap):
            salt = one.cache_salt
            if one.ownership is not None or one.origin is not None:
                reused = is_reuse(one.ownership, one.origin)
        elif lora_name.__class__ is dict:
            salt, lora_name = lora_name.get("cache_salt"), None
        return self._stored(
            one.block_hashes, one.parent_block_hash, one.token_ids, one.block_size, one.lora_id, one.medium, lora_name,
            one.extra_keys, one.group_idx, one.kv_cache_spec_kind, salt, reused, True,
        )  # fmt: skip

    # -- the two forms

    def _map(self, raw: dict[Any, Any]) -> Event:
        get = raw.get
        tag = get("type")
        if tag == "BlockStored":
            owner, origin = get("ownership"), get("origin")
            return self._stored(
                _required(raw, "block_hashes"),
                get("parent_block_hash"),
                get("token_ids"),
                get("block_size"),
                get("lora_id"),
                get("medium"),
                get("lora_name"),
                get("extra_keys"),
                get("group_idx"),
                get("kv_cache_spec_kind"),
                get("cache_salt"),
                (owner is not None or origin is not None) and is_reuse(owner, origin),
            )
        if tag == "BlockRemoved":
            return self._removed(_required(raw, "block_hashes"), get("medium"), get("group_idx"))
        if tag == "AllBlocksCleared":
            return self._cleared
        return _unknown(tag)

    def _array(self, raw: list[Any]) -> Event:
        tag = raw[0] if raw else None
        if tag == "BlockStored":
            if len(raw) < 5:
                raise Malformed(f"BlockStored has {len(raw)} elements, at least 5 are needed")
            # tag, block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, then vLLM's lora_name or
            # SGLang's metadata map, extra_keys, group_idx, kv_cache_spec_kind
            if len(raw) < _FIELDS:
                raw = raw + _NILS
            _, hashes, parent, tokens, size, lora_id, medium, lora_name, extra_keys, group, kind = raw[:_FIELDS]
            salt = None
            if lora_name.__class__ is dict:
                salt, lora_name = lora_name.get("cache_salt"), None
            return self._stored(
                hashes, parent, tokens, size, lora_id, medium, lora_name, extra_keys, group, kind, salt, False
            )
        if tag == "BlockRemoved":
            _, hashes, medium, group = (raw + _NILS)[:4]
            return self._removed(hashes, medium, group)
        if tag == "AllBlocksCleared":
            return self._cleared
        return _unknown(tag)

    # -- the two kinds

    def _stored(
        self,
        hashes: Any,
        parent: Any,
        tokens: Any,
        size: Any,
        lora_id: Any,
        medium: Any,
        lora_name: Any,
        extra_keys: Any,
        group: Any,
        kind: Any,
        salt: Any,
        reused: bool,
        typed: bool = False,
    ) -> Event:
        """Checks in this order: whether the event is of use at all, then whether it is sound.

        typed   hashes, parent and tokens are known to be of the right types. What is as usual is seen without a call
        """
        if medium.__class__ is not str or (tier := QUICK_MEDIA.get(medium)) is None:
            tier = tier_of(self.options.default_medium if medium is None else medium)
        if group.__class__ is not int or not 0 <= group < MAX_GROUP:
            group = group_of(group)
        if kind != self._kinds.get(group) and kind is not None:
            self._learn(group, kind)
        if group in self._uncounted:
            raise Unusable("attention_kind", f"group {group} is {self._kinds[group]}")
        if not typed:
            hashes = hashes_of(hashes)
        count = len(hashes)
        if kind is None and group not in self._kinds and len(self._assumed) < _MAX_GROUPS:
            self._assumed.add(group)
        if not tokens:
            if tokens is not None and tokens.__class__ is not list:
                raise Malformed(f"token_ids is {typename(tokens)}")
            return BlockStored(hashes, None, b"", 0, tier, group, b"", None, not reused)
        if tokens.__class__ is not list:
            raise Malformed(f"token_ids is {typename(tokens)}")
        if size.__class__ is not int or size < 1:
            size = len(tokens) // max(count, 1) if size is None else size_of(size)
        if not size:
            raise Unusable("block_size", f"block_size of an event with {len(tokens)} tokens is 0")
        if count * size != len(tokens):
            raise Unusable("token_count", f"{count} hashes of {size} tokens against {len(tokens)} tokens")
        extras = extras_of(extra_keys, count, lora_name) if extra_keys is not None else None
        if salt is not None and extras is None:
            extras = salted(salt, count, parent)
        root = root_of(lora_name, lora_id) if lora_name or lora_id else b""
        if not typed:
            parent = parent_of(parent)
        data = packed(tokens) if typed else tokens_of(tokens)
        parts = (hashes, parent, data, size, tier, group, root, extras, not reused)
        event: BlockStored = made(BlockStored, parts)
        return event

    def _removed(self, hashes: Any, medium: Any, group: Any, typed: bool = False) -> Event:
        if medium.__class__ is not str or (tier := QUICK_MEDIA.get(medium)) is None:
            tier = tier_of(self.options.default_medium if medium is None else medium)
        group = group_of(group)
        if group in self._uncounted:
            raise Unusable("attention_kind", f"group {group} is {self._kinds[group]}")
        return BlockRemoved(hashes if typed else hashes_of(hashes), tier, group)

    def _learn(self, group: int, kind: Any) -> None:
        if kind.__class__ is not str:
            raise Malformed(f"kv_cache_spec_kind is {typename(kind)}")
        if group not in self._kinds and len(self._kinds) >= _MAX_GROUPS:
            raise Unusable("attention_kind", f"more than {_MAX_GROUPS} attention groups")
        self._kinds[group] = kind[:64]
        if counted_kind(kind):
            self._uncounted.discard(group)
        else:
            self._uncounted.add(group)
            if group in self._assumed:
                self._assumed.discard(group)
                raise Miscounted(f"group {group} is {self._kinds[group]}, its blocks were counted so far")


_FIELDS = 11
_NILS: list[Any] = [None] * _FIELDS
_MAX_GROUPS = 256
NOT_TAKEN = (Miscounted, Malformed, Unusable)
made: Any = tuple.__new__
"""Makes a named tuple in half the time of its own constructor."""


def skipped(error: Exception) -> Skipped:
    """What becomes of an event that raised one of NOT_TAKEN."""
    if isinstance(error, Unusable):
        return Skipped(error.reason, str(error))
    if isinstance(error, Miscounted):
        return Skipped("attention_kind", str(error), True, True)
    return Skipped("malformed", str(error), True)


def _required(raw: dict[Any, Any], key: str) -> Any:
    try:
        return raw[key]
    except KeyError:
        raise Malformed(f"{raw['type']} without {key}") from None


def _unknown(tag: Any) -> Event:
    """An unknown word is a newer engine's event (skipped); no word at all leaves open what was lost."""
    if tag.__class__ is str:
        raise Unusable("unknown_tag", f"unknown event {clip(tag)}")
    raise Malformed(f"an event's tag is {typename(tag)}")
