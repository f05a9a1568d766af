"""Content keys: reference values, the chain, and that nothing but equal input gives equal keys."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvindex import hashing
from kvindex.hashing import canonical, content_key, content_keys, extras_bytes, pack_tokens, root_bytes

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "vectors.json").read_text())["hash"]

QUICK = settings(max_examples=60, deadline=None)


@pytest.mark.parametrize("row", VECTORS["content_key_xxh3_128"])
def test_reference_values(row: dict) -> None:
    tokens = row["tokens"] if "tokens" in row else range(*row["tokens_range"])
    keys = content_keys(pack_tokens(tokens), row["block_size"], seed=row["seed"])
    assert [key.hex() for key in keys] == row["keys_hex"]


def by_definition(blocks: list[bytes], seed: int, root: bytes, extras: list[bytes]) -> list[bytes]:
    """D1, word for word."""
    keys: list[bytes] = []
    for index, block in enumerate(blocks):
        before = keys[-1] if keys else root
        keys.append(xxhash.xxh3_128_intdigest(before + extras[index] + block, seed).to_bytes(16, "little"))
    return keys


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 130])
@pytest.mark.parametrize("given_extras", [0, 1, 64, 130])
@pytest.mark.parametrize("root", [b"", b"Ls1:a"])
def test_definition(count: int, given_extras: int, root: bytes) -> None:
    """Across the places where blocks are cut out; extras may be shorter or longer than the prompt."""
    size = 3
    tokens = pack_tokens(range(count * size + 2))
    extras = [b"Xi%d;" % index if index % 2 else b"" for index in range(given_extras)]
    blocks = [tokens[4 * size * index : 4 * size * (index + 1)] for index in range(count)]
    expected = by_definition(blocks, 7, root, extras + [b""] * count)
    assert content_keys(tokens, size, root=root, extras=extras, seed=7) == expected
    assert content_keys(tokens, size, root=root, extras=extras, seed=7, limit=5) == expected[:5]
    if not given_extras:
        assert content_keys(tokens, size, root=root, seed=7) == expected


@QUICK
@given(st.integers(0, 12), st.integers(0, 12))
def test_a_chain_may_be_cut_anywhere(first: int, second: int) -> None:
    size, tokens = 2, pack_tokens(range(100, 124))
    middle, end = sorted((first, second))
    whole = content_keys(tokens, size, root=b"Li1;")
    head = content_keys(tokens[: 8 * middle], size, root=b"Li1;")
    tail = content_keys(tokens[8 * middle : 8 * end], size, parent=head[-1]) if middle else []
    assert head + tail == whole[: end if middle else 0]
    if head and len(whole) > len(head):
        assert content_key(head[-1], tokens[8 * middle : 8 * middle + 8]) == whole[middle]


def test_no_whole_block_no_key() -> None:
    assert content_keys(pack_tokens([1, 2, 3]), 4) == []
    assert content_keys(b"", 4) == []
    assert len(content_keys(pack_tokens(range(11)), 4)) == 2


def test_pack_tokens() -> None:
    ids = [0, 1, 255, 256, 2**31, 2**32 - 1]
    assert pack_tokens(ids) == struct.pack("<6I", *ids)
    for bad, error in (
        (-1, OverflowError),
        (2**32, OverflowError),
        (1.0, TypeError),
        ("1", TypeError),
        (None, TypeError),
    ):
        with pytest.raises(error):
            pack_tokens([1, bad])  # type: ignore[list-item]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def same(left: object, right: object) -> bool:
    """Equal, and of equal types all the way down: 1, 1.0 and True are three values."""
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return type(left) is type(right) and repr(left) == repr(right)


@QUICK
@given(values, values)
def test_canonical_bytes_tell_values_apart(left: object, right: object) -> None:
    assert (canonical(left) == canonical(right)) == same(left, right)


@QUICK
@given(st.lists(values, max_size=3), st.lists(values, max_size=3))
def test_extras_tell_lists_apart(left: list, right: list) -> None:
    assert (extras_bytes(left) == extras_bytes(right)) == same(left, right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (["a", "b"], ["ab"]), (["a", ""], ["a"]), ([["a"], "b"], ["a", ["b"]]), (["1"], [1]), ([1], [True]),
        ([b"a"], ["a"]),
        ([["image", 0]], [["image", 1]]), (["s3:abc"], ["abc"]), ([0], [0.0]), ([None], []), ([{"a": 1}], [[["a", 1]]]),
    ],
)  # fmt: skip
def test_extras_that_look_alike(left: list, right: list) -> None:
    assert extras_bytes(left) != extras_bytes(right)


def test_extras_without_form() -> None:
    with pytest.raises(TypeError, match="complex"):
        extras_bytes([1j])
    assert extras_bytes(None) == extras_bytes([]) == extras_bytes(()) == b""
    assert extras_bytes(["\ud800"]), "a lone surrogate is text like another"


def test_root() -> None:
    names = [
        root_bytes(),
        root_bytes("ada"),
        root_bytes("bob"),
        root_bytes(None, 0),
        root_bytes(None, 1),
        root_bytes("1"),
    ]
    assert len(set(names)) == len(names)
    assert root_bytes("ada", 1) == root_bytes("ada", 2), "the number is the load order, the name decides"
    assert root_bytes("", None) == b""


@QUICK
@given(st.sampled_from([b"", root_bytes("ada"), root_bytes(None, 3)]), st.lists(st.text(max_size=3), max_size=2),
       st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4))  # fmt: skip
def test_plain_text_never_matches_other_text(root: bytes, salts: list[str], ids: list[int]) -> None:
    extras = extras_bytes(salts)
    tokens = pack_tokens(ids)
    key = content_keys(tokens, 4, root=root, extras=[extras])[0]
    assert (key == content_keys(tokens, 4)[0]) == (root == extras == b"")
    assert len(root + extras + tokens) > 16 or root == extras == b""


def test_cutters_are_kept_in_bounds() -> None:
    for size in range(1, 400):
        content_keys(bytes(4 * size * 3), size)
    assert hashing._cutter.cache_info().currsize <= 256
