"""What every dialect checks the same way: hash lists, token lists, media, attention kinds, extra keys, adapters.

Each check returns the value in the index's form or raises `Malformed` (that event is wrong, D11) or `Unusable` (a
sound event the index has no use for, D7, D8, D10). None leaves the package: the decoder turns them into `Skipped`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvindex.events import EngineHash, Tier
from kvindex.hashing import extras_bytes, pack_tokens, root_bytes


class Malformed(Exception):
    """The event breaks the format; its effect on the resident set is unknown."""


class Miscounted(Exception):
    """The event is of no use, and shows that earlier ones of its attention group were of none either (D8)."""


class Unusable(Exception):
    """The event is sound and of no use. `reason` is a metric label."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


# D7. Words are compared in lower case; None stands for nil and absent.
MEDIA: dict[str | None, Tier] = {
    None: Tier.DEVICE,
    "gpu": Tier.DEVICE,
    "npu": Tier.DEVICE,
    "xpu": Tier.DEVICE,
    "hbm": Tier.DEVICE,
    "device": Tier.DEVICE,
    "cpu": Tier.HOST,
    "cpu_pinned": Tier.HOST,
    "host": Tier.HOST,
    "dram": Tier.HOST,
    "memory": Tier.HOST,
    "disk": Tier.DISK,
    "ssd": Tier.DISK,
    "nvme": Tier.DISK,
    "nof_ssd": Tier.DISK,
    "storage": Tier.DISK,
    "shared_storage": Tier.DISK,
    "fs": Tier.DISK,
    "dfs": Tier.DISK,
    "obj": Tier.DISK,
    "external": Tier.DISK,
}
MEDIA_PREFIXES = {"cpu_tier": Tier.HOST}

# D8. Keys are lower case without underscores and without a final "spec"; what is not here is skipped.
COUNTED_KINDS = frozenset({"fullattention", "mlaattention", "sinkfullattention"})

INTS = frozenset({int})
INTS_AND_BYTES = frozenset({int, bytes})
MAX_GROUP = 2**16
_LARGEST_TOKEN = 2**32 - 1
_LONGEST_HASH = 256  # characters: 1,024 bits in hex, and no number that Python refuses to print
QUICK_MEDIA: dict[str | None, Tier] = dict(MEDIA)
QUICK_MEDIA.update((word.upper(), tier) for word, tier in MEDIA.items() if word)


def tier_of(medium: Any) -> Tier:
    """D7. Raises Unusable for an unknown word, Malformed for what is no word."""
    if medium is None or isinstance(medium, str):
        tier = QUICK_MEDIA.get(medium)
        if tier is not None:
            return tier
        word = str(medium).lower()
        tier = MEDIA.get(word)
        if tier is not None:
            return tier
        for prefix, other in MEDIA_PREFIXES.items():
            if word.startswith(prefix):
                return other
        raise Unusable("medium", f"unknown medium {clip(medium)}")
    raise Malformed(f"medium is {typename(medium)}, not a word")


def counted_kind(kind: str) -> bool:
    """D8: whether blocks of a group of this kind are reusable prefix blocks."""
    return kind.lower().replace("_", "").removesuffix("spec") in COUNTED_KINDS


def hashes_of(value: object) -> list[EngineHash]:
    """A list of block hashes: ints of any width and sign, and byte strings. True is not 1."""
    if value.__class__ is list:
        kinds = set(map(type, value))
        if kinds <= INTS or kinds <= INTS_AND_BYTES:
            return value
        raise Malformed(f"block hashes hold {names(kinds - INTS_AND_BYTES)}")
    raise Malformed(f"block hashes are {typename(value)}, not a list")


def parent_of(value: object) -> EngineHash | None:
    """One block hash, or None for the first block of a prompt."""
    if value is None or value.__class__ is int or value.__class__ is bytes:
        return value
    raise Malformed(f"parent block hash is {typename(value)}")


def tokens_of(value: list[Any]) -> bytes:
    """A list of token ids, or of EAGLE's pairs (first of each), packed as u32 little endian (D9).

    About 10 ns a token; a list with 0 or 1 in it takes the slower way that tells them from False and True.
    """
    data = packed(value)
    # Is there a word of 0 or 1? Rare neighbours such as 40, 65536 look like one, too: a search knows no words.
    if b"\0\0\0" in data and (b"\0\0\0\0" in data or b"\1\0\0\0" in data) and bool in set(map(type, value)):
        raise Malformed("a token id is a bool")
    return data


def packed(value: list[Any]) -> bytes:
    """`tokens_of` where no token id can be a bool. About 7 ns a token."""
    try:
        return pack_tokens(value)
    except OverflowError:
        raise Malformed(f"a token id is outside 0..{_LARGEST_TOKEN}") from None
    except TypeError:
        return packed(_first_of_pairs(value))


def _first_of_pairs(value: list[Any]) -> list[int]:
    firsts: list[int] = []
    for pair in value:
        if pair.__class__ is not list or len(pair) != 2:
            raise Malformed(f"a token id is {typename(pair)}")
        first, second = pair
        if first.__class__ is not int or second.__class__ is not int:
            raise Malformed("a pair of token ids holds no ints")
        firsts.append(first)
    return firsts


def size_of(value: object) -> int:
    """block_size as the event has it."""
    if value.__class__ is int and value >= 0:
        return value
    raise Malformed(f"block_size is {clip(value)}")


def group_of(value: object) -> int:
    """group_idx; nil and absent are group 0."""
    if value is None:
        return 0
    if value.__class__ is int and 0 <= value < MAX_GROUP:
        return value
    raise Malformed(f"group_idx is {clip(value)}")


def root_of(lora_name: object, lora_id: object) -> bytes:
    """Namespace of the adapter (D1): by name, else by number. Adapter numbers start at 1: 0 is the base model."""
    if not lora_name and not lora_id:
        return b""
    if lora_name is not None and lora_name.__class__ is not str:
        raise Malformed(f"lora_name is {typename(lora_name)}")
    if lora_name:
        return root_bytes(lora_name)
    if lora_id.__class__ is int:
        return root_bytes(None, lora_id)
    if lora_id.__class__ is str:
        return root_bytes(lora_id)
    raise Malformed(f"lora_id is {typename(lora_id)}")


def extras_of(value: object, count: int, lora_name: object) -> tuple[bytes, ...] | None:
    """extra_keys, one list or nil a block, as canonical bytes; None when every block is plain.

    The adapter's name, which vLLM repeats in front of each list, is left out: the root has it.
    """
    if value is None:
        return None
    if value.__class__ is not list:
        raise Malformed(f"extra_keys is {typename(value)}")
    if not any(value):
        return None
    if len(value) != count:
        raise Malformed(f"extra_keys has {len(value)} entries for {count} blocks")
    found: list[bytes] = []
    for entry in value:
        if entry is not None and entry.__class__ is not list:
            raise Malformed(f"an entry of extra_keys is {typename(entry)}")
        if entry and lora_name and entry[0] == lora_name:
            entry = entry[1:]
        try:
            found.append(extras_bytes(entry))
        except (TypeError, RecursionError) as error:
            raise Malformed(f"extra_keys: {error}") from None
    return tuple(found) if any(found) else None


def salted(salt: object, count: int, parent: EngineHash | None) -> tuple[bytes, ...] | None:
    """SGLang names the salt at every block of a salted prompt; as in vLLM it belongs to block 0 and is inherited."""
    if not salt or parent is not None or not count:
        return None
    if salt.__class__ is not str:
        raise Malformed(f"cache_salt is {typename(salt)}")
    return (extras_bytes([salt]), *(b"",) * (count - 1))


def is_reuse(*words: object) -> bool:
    """D2: REUSED in `ownership` or `origin` announces a block that was resident before."""
    return any(word.__class__ is str and word.upper() == "REUSED" for word in words)


def hash_from_text(text: str) -> int:
    """The number that a pool's text hash spells: `0x...`, decimal, or bare hex. Raises Malformed."""
    if len(text) > _LONGEST_HASH:
        raise Malformed(f"block hash is a text of {len(text)} characters")
    try:
        if text[:2].lower() == "0x":
            return int(text, 16)
        return int(text, 10) if text.isdecimal() else int(text, 16)
    except ValueError:
        raise Malformed(f"block hash {clip(text)} is no number") from None


def names(kinds: Sequence[type] | set[type] | frozenset[type]) -> str:
    return ", ".join(sorted(kind.__name__ for kind in kinds))


def typename(value: object) -> str:
    return "nil" if value is None else type(value).__name__


def clip(value: object, limit: int = 60) -> str:
    """A short repr for an error text; never of a container (it could hold token ids or be endless)."""
    if isinstance(value, (list, tuple, dict, bytes)):
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value) if not isinstance(value, int) or -(2**128) < value < 2**128 else "a huge int"
    return text if len(text) <= limit else text[: limit - 1] + "…"
