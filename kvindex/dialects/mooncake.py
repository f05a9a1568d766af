"""RFC 1527 maps: the Mooncake master, Motor's Memcache and YuanRong pools, and whoever else writes them (7, 8).

A pool names whole objects. `stored` for an object that is there is a refresh, not a second copy; `removed` follows the
object, not the 64-bit hash, which two objects may share; `cleared` drops the objects of that backend and tenant. So
objects (`object_key`) are remembered per backend, a bounded number of them. Events without `object_key` are counted
like an engine's (D2).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from xxhash import xxh3_64_intdigest

from kvindex.dialects.base import Decoder, DialectOptions
from kvindex.dialects.fields import Malformed, Unusable, clip, hash_from_text, hashes_of, tier_of, typename
from kvindex.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, EngineHash, Event, Skipped, Tier

EVERY_TIER = (Tier.DEVICE, Tier.HOST, Tier.DISK)
NAMES = {
    "stored": "stored",
    "removed": "removed",
    "cleared": "cleared",
    "BlockStored": "stored",
    "BlockRemoved": "removed",
    "AllBlocksCleared": "cleared",
}

_Objects = dict[int, tuple[EngineHash, Tier]]


class Rfc1527:
    """Decodes the events of one publisher; one map can stand for several index events."""

    def __init__(self, decoder: Decoder, options: DialectOptions) -> None:
        self._decoder = decoder
        self._options = options
        self._backends: dict[tuple[str, str], _Objects] = {}
        self._count = 0

    def reset(self) -> None:
        self._backends.clear()
        self._count = 0

    def events(self, raw: dict[Any, Any]) -> tuple[Event, ...]:
        """Never raises."""
        try:
            kind = kind_of(raw)
            if kind == "cleared":
                return self._cleared(raw)
            return (self._stored(raw) if kind == "stored" else self._removed(raw),)
        except Malformed as error:
            return (Skipped("malformed", str(error), True),)
        except Unusable as error:
            return (Skipped(error.reason, str(error)),)

    def _stored(self, raw: dict[Any, Any]) -> Event:
        get = raw.get
        hashes = self._hashes(raw)
        event = self._decoder._stored(
            hashes,
            _hash(_first(raw, "parent_hash", "parent_block_hash")),
            get("token_ids"),
            get("block_size"),
            get("lora_id"),
            get("medium"),
            get("lora_name"),
            get("extra_keys"),
            _group(raw),
            get("kv_cache_spec_kind"),
            get("cache_salt"),
            False,
        )
        if not isinstance(event, BlockStored) or not hashes:
            raise Unusable("no_hash", "event names no block")
        if (object_key := get("object_key")) is None:
            return event
        owned = self._backends.setdefault(_owner(raw), {})
        number = _object(object_key, event.tier)
        if number in owned:
            return event._replace(adds_copy=False)
        if self._count >= self._options.max_objects:
            return Skipped("capacity", f"more than max_objects {self._options.max_objects} objects", True)
        owned[number] = (hashes[0], event.tier)
        self._count += 1
        return event

    def _removed(self, raw: dict[Any, Any]) -> Event:
        hashes = self._hashes(raw)
        tier = self._tier(raw)
        if (object_key := raw.get("object_key")) is None:
            return BlockRemoved(hashes, tier, _group(raw) or 0)
        known = self._backends.get(_owner(raw), {}).pop(_object(object_key, tier), None)
        if known is None:
            raise Unusable("unknown_object", "removed object was not announced")
        self._count -= 1
        return BlockRemoved([known[0]], tier)

    def _cleared(self, raw: dict[Any, Any]) -> tuple[Event, ...]:
        """All copies of that backend and tenant; of the whole stream where objects cannot be told apart."""
        if not self._backends:
            return (AllBlocksCleared(EVERY_TIER),)
        gone = self._backends.pop(_owner(raw), {})
        self._count -= len(gone)
        events = []
        for tier in EVERY_TIER:
            hashes = [engine_hash for engine_hash, where in gone.values() if where is tier]
            if hashes:
                events.append(BlockRemoved(hashes, tier))
        return tuple(events)

    def _tier(self, raw: dict[Any, Any]) -> Tier:
        medium = raw.get("medium")
        return tier_of(self._options.default_medium if medium is None else medium)

    def _hashes(self, raw: dict[Any, Any]) -> list[EngineHash]:
        value = _first(raw, "seq_hashes", "block_hashes")
        if value is None:
            raise Malformed("event has neither seq_hashes nor block_hashes")
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

    def reset(self) -> None:
        super().reset()
        self._rfc.reset()

    def decode(self, payload: bytes) -> Batch:
        # The rank of a pool's batch is a number of its own configuration, not an engine's rank.
        return super().decode(payload)._replace(dp_rank=None)

    def events(self, raw: Iterable[Any]) -> list[Event]:
        found: list[Event] = []
        for one in raw:
            if is_rfc(one):
                found.extend(self._rfc.events(one))
            else:
                found.append(self.event(one))
        return found


def is_rfc(raw: Any) -> bool:
    return raw.__class__ is dict and ("event_type" in raw or "seq_hashes" in raw)


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


def _hash(value: Any) -> Any:
    return hash_from_text(value) if value.__class__ is str else value


def _group(raw: dict[Any, Any]) -> int | None:
    value = _first(raw, "group_id", "group_idx")
    return value if value.__class__ is int else None


def _owner(raw: dict[Any, Any]) -> tuple[str, str]:
    return str(raw.get("backend_id") or ""), str(raw.get("tenant_id") or "default")


def _object(key: Any, tier: Tier) -> int:
    if key.__class__ is not str:
        raise Malformed(f"object_key is {typename(key)}")
    return xxh3_64_intdigest(key.encode("utf-8", "surrogatepass"), int(tier))
