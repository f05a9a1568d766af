"""RFC 1527 maps: the Mooncake master, Motor's Memcache and YuanRong pools, and whoever else writes them (7, 8).

Events that name an object (`object_key`), and `cleared`, become `Pooled`: what they mean for blocks depends on what the
view holds, see objects.py. Events without `object_key` are counted like an engine's (D2).
"""

from __future__ import annotations

from typing import Any, ClassVar

from kvindex.dialects.base import NOT_TAKEN, Decoder, DialectOptions, skipped
from kvindex.dialects.fields import Malformed, Unusable, clip, hash_from_text, hashes_of, tier_of, typename
from kvindex.dialects.objects import EVERY_TIER, Objects
from kvindex.events import Batch, BlockRemoved, BlockStored, EngineHash, Event, Pooled, Tier

NAMES = {
    "stored": "stored",
    "removed": "removed",
    "cleared": "cleared",
    "BlockStored": "stored",
    "BlockRemoved": "removed",
    "AllBlocksCleared": "cleared",
}


class Rfc1527:
    """Decodes the events of one publisher; without a memory of their content."""

    def __init__(self, decoder: Decoder, options: DialectOptions) -> None:
        self._decoder = decoder
        self._options = options

    def event(self, raw: dict[Any, Any]) -> Event:
        """Never raises."""
        try:
            kind = kind_of(raw)
            if kind == "cleared":
                return Pooled(_owner(raw))
            return self._stored(raw) if kind == "stored" else self._removed(raw)
        except NOT_TAKEN as error:
            return skipped(error)

    def _stored(self, raw: dict[Any, Any]) -> Event:
        get = raw.get
        hashes = self._hashes(raw)
        parent, tokens = _hash(_first(raw, "parent_hash", "parent_block_hash")), get("token_ids")
        if parent is None and _inside(raw):
            tokens = None  # blocks of which nobody says what stands before them: never taken for first ones (D6)
        event = self._decoder._stored(
            hashes,
            parent,
            tokens,
            get("block_size"),
            get("lora_id"),
            get("medium"),
            get("lora_name"),
            get("extra_keys"),
            _group(raw),
            get("kv_cache_spec_kind"),
            _first(raw, "cache_salt", "additional_salt"),
            False,
        )
        if not isinstance(event, BlockStored) or not hashes:
            raise Unusable("no_hash", "event names no block")
        key = _object_key(raw)
        return event if key is None else Pooled(_owner(raw), key, event)

    def _removed(self, raw: dict[Any, Any]) -> Event:
        tier, group = self._tier(raw), _group(raw) or 0
        key = _object_key(raw)
        if key is None:
            return BlockRemoved(self._hashes(raw), tier, group)
        named = _first(raw, "seq_hashes", "block_hashes") is not None
        said = raw.get("medium") is not None
        return Pooled(_owner(raw), key, None, tier if said else None, self._hashes(raw) if named else None, group)

    def _tier(self, raw: dict[Any, Any]) -> Tier:
        medium = raw.get("medium")
        return tier_of(self._options.default_medium if medium is None else medium)

    def _hashes(self, raw: dict[Any, Any]) -> list[EngineHash]:
        value = _first(raw, "seq_hashes", "block_hashes")
        if value is None:
            raise Malformed("event has neither seq_hashes nor block_hashes")
        if isinstance(value, str):
            value = [value]
        if isinstance(value, list) and any(one.__class__ is str for one in value):
            value = [_hash(one) for one in value]
        return hashes_of(value)


class Mooncake(Decoder):
    """Also reads arrays and maps of an engine, for YuanRong's per-rank publishers."""

    name: ClassVar[str] = "mooncake"
    default_recovery: ClassVar[str] = "none"
    first_sequence: ClassVar[int] = 1
    clears = EVERY_TIER
    single_events: ClassVar[bool] = True

    def __init__(self, options: DialectOptions | None = None) -> None:
        super().__init__(options)
        self._rfc = Rfc1527(self, self.options)

    def objects(self) -> Objects:
        return Objects(self.options.max_objects)

    def decode(self, payload: bytes) -> Batch:
        # The rank of a pool's batch is a number of its own configuration, not an engine's rank.
        return super().decode(payload)._replace(dp_rank=None)

    def event(self, raw: Any) -> Event:
        return self._rfc.event(raw) if is_rfc(raw) else super().event(raw)


def is_rfc(raw: Any) -> bool:
    """Early pools say `type`, not `event_type`: what else no engine writes tells them from an engine's map."""
    return raw.__class__ is dict and (
        "event_type" in raw
        or "seq_hashes" in raw
        or "backend_id" in raw
        or raw.get("type") in ("stored", "removed", "cleared")
    )


def kind_of(raw: dict[Any, Any]) -> str:
    """stored, removed or cleared. Never guessed from what else the event has (D11)."""
    words = [word for word in (raw.get("event_type"), raw.get("type")) if word is not None]
    if not words:
        raise Malformed("event without event_type")
    if not all(word.__class__ is str for word in words):
        raise Malformed(f"event_type is {typename(words[0])}")
    kinds = {NAMES.get(word) for word in words}
    if None in kinds:
        raise Unusable("unknown_tag", f"unknown event {clip(words[0])}")
    if len(kinds) > 1:
        raise Malformed(f"event_type {clip(words[0])} and type {clip(words[1])} disagree")
    return kinds.pop() or ""


def _first(raw: dict[Any, Any], *keys: str) -> Any:
    for key in keys:
        if raw.get(key) is not None:
            return raw[key]
    return None


def _inside(raw: dict[Any, Any]) -> bool:
    """Does it say that its first block is not the first of a prompt?"""
    index = raw.get("base_block_idx")
    return index.__class__ is int and index > 0


def _hash(value: Any) -> Any:
    return hash_from_text(value) if value.__class__ is str else value


def _group(raw: dict[Any, Any]) -> int | None:
    value = _first(raw, "group_id", "group_idx")
    return value if value.__class__ is int else None


def _owner(raw: dict[Any, Any]) -> tuple[str, str]:
    return str(raw.get("backend_id") or ""), str(raw.get("tenant_id") or "default")


def _object_key(raw: dict[Any, Any]) -> str | None:
    key = raw.get("object_key")
    if key is not None and key.__class__ is not str:
        raise Malformed(f"object_key is {typename(key)}")
    return key
