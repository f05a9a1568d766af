"""Content keys: the only key of the index (decision D1).

    key[0] = H(root || extras[0] || tokens[0])          tokens as u32 little endian
    key[i] = H(key[i-1] || extras[i] || tokens[i])      H = XXH3-128, seed 1024 by default

16 bytes each: low 64 bits little endian, then high 64 bits little endian (`xxh3_128_digest` reversed). With empty root
and extras the chain equals xLLM's. Only whole blocks have a key.

root and extras encode type, length and number of their parts, and a plain block's input is exactly 4*block_size (+16)
bytes while any other is longer, so plain text can never match a salted, adapted or multimodal block.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from struct import Struct
from typing import Final

from xxhash import xxh3_128_digest

DEFAULT_SEED = 1024
PLAIN = b""
_CUT: Final = 64  # blocks cut out at a time
_REVERSED: Final = slice(None, None, -1)

if array("I").itemsize != 4:  # pragma: no cover - no CPython platform of ours
    raise ImportError("kvindex needs a platform whose C unsigned int has 4 bytes")


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as u32 little endian, 4 bytes each.

    Raises OverflowError for an id outside 0..2**32-1 and TypeError for one that is no int. O(n), about 7 ns a token.
    """
    if token_ids.__class__ is list:
        packed = array("I")
        packed.fromlist(token_ids)  # a third quicker than the constructor
    else:
        packed = array("I", token_ids)
    if sys.byteorder != "little":  # pragma: no cover
        packed.byteswap()
    return packed.tobytes()


def content_keys(
    tokens: bytes,
    block_size: int,
    *,
    root: bytes = PLAIN,
    extras: Sequence[bytes] | None = None,
    parent: bytes | None = None,
    seed: int = DEFAULT_SEED,
    limit: int | None = None,
) -> list[bytes]:
    """Content keys of the whole blocks of `tokens` (packed u32), first block first; a partial tail has none.

    parent  key of the block before the first one; None = the first block starts the prompt and takes `root`
    extras  canonical bytes per block (shorter = plain from there on), None = plain throughout
    limit   at most this many keys

    O(blocks), about 0.15 us a block of 16 tokens.
    """
    step = 4 * block_size
    count = len(tokens) // step
    if limit is not None and limit < count:
        count = limit
    keys: list[bytes] = []
    digest, backwards = xxh3_128_digest, _REVERSED
    previous = root if parent is None else parent
    given = len(extras) if extras else 0
    for first in range(0, count, _CUT):
        blocks = _cutter(step, min(_CUT, count - first))(tokens, first * step)
        if first < given:
            assert extras is not None
            blocks = [extras[index] + block if index < given else block for index, block in enumerate(blocks, first)]
        for block in blocks:
            previous = digest(previous + block, seed)[backwards]
            keys.append(previous)
    return keys


@lru_cache(maxsize=256)
def _cutter(step: int, count: int) -> Callable[[bytes, int], Sequence[bytes]]:
    """Cuts `count` blocks of `step` bytes from an offset on: half the price of as many slices."""
    return Struct(f"{step}s" * count).unpack_from


def content_key(previous: bytes, tokens: bytes, seed: int = DEFAULT_SEED) -> bytes:
    """Key of one block; `previous` = (parent's key, or root) followed by the block's extras."""
    return xxh3_128_digest(previous + tokens, seed)[::-1]


def root_bytes(lora_name: str | None = None, lora_id: int | None = None) -> bytes:
    """Namespace of an adapter: by its name, else by its number; b"" for the base model."""
    if lora_name:
        return b"L" + canonical(lora_name)
    if lora_id is not None:
        return b"L" + canonical(lora_id)
    return PLAIN


def extras_bytes(extra_keys: Iterable[object] | None) -> bytes:
    """Canonical bytes of one block's extra keys (cache salt, image ids); None and an empty list are plain.

    The adapter name that vLLM repeats in every block's extra keys must be taken out before: the root has it.
    Raises TypeError for a part that MessagePack could not carry.
    """
    parts = list(extra_keys) if extra_keys is not None else []
    return b"X" + canonical(parts) if parts else PLAIN


def canonical(value: object) -> bytes:
    """One value as bytes that tell type, length and nesting apart: text, bytes, numbers, bools, None, lists, maps."""
    if isinstance(value, str):
        body = value.encode("utf-8", "surrogatepass")
        return b"s%d:" % len(body) + body
    if isinstance(value, bytes):
        return b"b%d:" % len(value) + value
    if value is None:
        return b"n"
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, int):
        return b"i%d;" % value
    if isinstance(value, float):
        return b"d" + repr(value).encode() + b";"
    if isinstance(value, (list, tuple)):
        return b"l%d:" % len(value) + b"".join(canonical(part) for part in value)
    if isinstance(value, dict):
        pairs = sorted((canonical(key), canonical(part)) for key, part in value.items())
        return b"m%d:" % len(pairs) + b"".join(key + part for key, part in pairs)
    raise TypeError(f"no canonical form for {type(value).__name__}")
