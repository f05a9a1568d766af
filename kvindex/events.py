"""What every dialect is decoded into: the few facts about KV blocks that the index needs.

A dialect turns one wire message into a `Batch`. Events keep their order: it counts (a block may be removed and stored
again in one batch). Everything an engine says that does not concern the index is dropped in the dialect.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum, StrEnum
from typing import NamedTuple

EngineHash = int | bytes
"""Opaque block id of one stream: an int of any width and sign, or bytes of any length. Never compared across streams,
never shortened."""


class Tier(IntEnum):
    """Where a copy of a block lives, nearest first. Value = bit group in the index's masks."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class BlockStored(NamedTuple):
    """Consecutive blocks became resident on `tier`.

    hashes      one engine hash a block; hash i's parent is hash i-1, hash 0's parent is `parent`
    parent      engine hash of the block before the first one; None = the first block starts the prompt
    tokens      the blocks' token ids packed as u32 little endian, `4 * block_size * len(hashes)` bytes;
                b"" = token-less: one more copy of blocks whose tokens are (or will be) known from other events
    block_size  tokens per block; 0 in token-less events
    group       attention (KV cache) group the copies belong to
    root        namespace bytes of the LoRA adapter (`hashing.root_bytes`), b"" for the base model
    extras      canonical bytes of each block's extra keys (`hashing.extras_bytes`), None = none for every block
    adds_copy   False for an announcement of a block that was already resident (origin REUSED)
    """

    hashes: list[EngineHash]
    parent: EngineHash | None
    tokens: bytes
    block_size: int
    tier: Tier = Tier.DEVICE
    group: int = 0
    root: bytes = b""
    extras: tuple[bytes, ...] | None = None
    adds_copy: bool = True


class BlocksMapped(NamedTuple):
    """Blocks as another replica knows them: no event of an engine, see transfer.py.

    hashes, keys   engine hashes and content keys of consecutive blocks, each one's parent being the one before; no keys
                   = any blocks whose tokens are not known
    copies         (tier, group, count) of each copy that each of the hashes has
    """

    hashes: list[EngineHash]
    keys: list[bytes]
    copies: tuple[tuple[Tier, int, int], ...]


class BlockRemoved(NamedTuple):
    """One copy of each block left `tier` (in `group`). Unknown hashes are ignored."""

    hashes: list[EngineHash]
    tier: Tier = Tier.DEVICE
    group: int = 0


class AllBlocksCleared(NamedTuple):
    """Every copy on these tiers of this stream is gone."""

    tiers: tuple[Tier, ...] = (Tier.DEVICE,)


class Skipped(NamedTuple):
    """An event that was not taken over.

    reason   one of a small closed set, a metric label (`unknown_tag`, `medium`, `attention_kind`, `block_size`, ...)
    detail   for the person on call; never holds token ids
    lost     True when the event's effect on the resident set is lost, so the stream must be rebuilt
    tainted  lost, and it shows that events before it were taken wrongly: what was built of them is void, too
    """

    reason: str
    detail: str
    lost: bool = False
    tainted: bool = False


class Pooled(NamedTuple):
    """What a pool says of one of its objects. `dialects.objects.Objects` turns it into the events above.

    owner       backend and tenant
    object_key  None = all of the owner's objects are gone
    stored      the blocks it holds now; None = it is gone
    tier        of the copy that is gone, None = not said
    hashes      blocks the removal names, None = it names none
    """

    owner: tuple[str, str]
    object_key: str | None = None
    stored: BlockStored | None = None
    tier: Tier | None = None
    hashes: list[EngineHash] | None = None
    group: int = 0


Event = BlockStored | BlockRemoved | AllBlocksCleared | Skipped | Pooled


class Outcome(StrEnum):
    """What became of an event. Only `OK` and `UNKNOWN_PARENT` were taken over."""

    OK = "ok"
    UNKNOWN_PARENT = "unknown_parent"  # some of its blocks got no key: kept un-anchored
    BLOCK_SIZE = "block_size"  # not the index's block size
    TOKEN_COUNT = "token_count"  # hashes and tokens do not fit together
    SKIPPED = "skipped"  # the dialect had skipped it


class Batch(NamedTuple):
    """One wire message.

    events    in order; may be a lazy iterator for large payloads, which can raise DecodeError while it runs
    dp_rank   what the payload says, None when it does not; identity of a stream comes from configuration
    timestamp seconds since the epoch, None when absent
    """

    events: Iterable[Event]
    dp_rank: int | None = None
    timestamp: float | None = None
