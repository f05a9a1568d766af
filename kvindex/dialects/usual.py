"""The messages that engines usually send, decoded and checked by msgspec in one pass of C.

    [timestamp, [event, ...], rank]     events all arrays (vLLM up to 0.23, SGLang) or all maps (vLLM from 0.24, xLLM)

Nothing is decided here: what is no such message goes through wire.py and fields.py, which say what is wrong with it,
and every event decoded here means what they would have found; but what nobody reads (newer fields) is passed over
unseen, where they refuse a message for text in it that is no UTF-8. msgspec makes no room for what a length only
announces.
"""

from __future__ import annotations

from typing import Any

import msgspec

Hash = int | bytes
Scalar = bool | int | float | str | None
"""With bytes (not beside text in msgspec), maps and extension types (read differently) a message is no usual one."""
ExtraKeys = list[list[Scalar | list[Scalar]] | None] | None


class StoredArray(msgspec.Struct, array_like=True, tag="BlockStored", gc=False):
    """lora_name: or SGLang's map with metadata. token_ids: or EAGLE's pairs."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int | list[int]] | None
    block_size: int | None
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | dict[str, Scalar] | None = None
    extra_keys: ExtraKeys = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class RemovedArray(msgspec.Struct, array_like=True, tag="BlockRemoved", gc=False):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


class _NoPool(msgspec.Struct, tag_field="type", gc=False, kw_only=True):
    """A map with one of these keys is a pool's (mooncake.py), whatever its type: no value is right for them."""

    event_type: msgspec.UnsetType = msgspec.UNSET
    seq_hashes: msgspec.UnsetType = msgspec.UNSET
    backend_id: msgspec.UnsetType = msgspec.UNSET


class StoredMap(_NoPool, tag="BlockStored", gc=False, kw_only=True):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None = None
    token_ids: list[int | list[int]] | None = None
    block_size: int | None = None
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: ExtraKeys = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    cache_salt: Scalar = None
    ownership: Scalar = None
    origin: Scalar = None


class RemovedMap(_NoPool, tag="BlockRemoved", gc=False, kw_only=True):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class ClearedMap(_NoPool, tag="AllBlocksCleared", gc=False, kw_only=True):
    pass


class ArrayBatch(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    timestamp: float | int | None
    events: list[StoredArray | RemovedArray | ClearedArray]
    dp_rank: int | None = None


class MapBatch(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    timestamp: float | int | None
    events: list[StoredMap | RemovedMap | ClearedMap]
    dp_rank: int | None = None


Event = StoredArray | RemovedArray | ClearedArray | StoredMap | RemovedMap | ClearedMap
Batch = ArrayBatch | MapBatch
_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)


class UsualForm:
    """One a stream: which of the two forms came last is tried first."""

    def __init__(self) -> None:
        self._decoders: list[msgspec.msgpack.Decoder[Any]] = [
            msgspec.msgpack.Decoder(ArrayBatch), msgspec.msgpack.Decoder(MapBatch)
        ]  # fmt: skip

    def decode(self, payload: bytes) -> Batch | None:
        """None: it is no usual message, or none at all."""
        for decoder in self._decoders:
            try:
                batch: Batch = decoder.decode(payload)
            except _ERRORS:
                continue
            if decoder is not self._decoders[0] and batch.events:
                self._decoders.reverse()
            return batch
        return None
