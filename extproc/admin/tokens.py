"""Token ids as callers write them. Pure."""

from __future__ import annotations

from kvindex.hashing import pack_tokens


def token_bytes(value: object) -> bytes:
    """Packed u32 of a list of ids, or of bytes that are so already (Mooncake's binary form).

    Raises ValueError that says what is wrong. O(n), about 20 ns a token.
    """
    if isinstance(value, bytes):
        if len(value) % 4:
            raise ValueError(f"token_ids has {len(value)} bytes, not 4 for each id")
        return value
    if not isinstance(value, list):
        raise ValueError("token_ids must be a list of token ids")
    if not set(map(type, value)) <= {int}:  # True is no token id, though it is an int
        raise ValueError("token_ids must hold whole numbers only")
    try:
        return pack_tokens(value)
    except OverflowError:
        raise ValueError("a token id is not in 0 to 4294967295") from None
