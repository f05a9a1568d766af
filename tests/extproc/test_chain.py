"""Chain cache: always the keys of the joined tokens, whatever was remembered, dropped or cut."""

from __future__ import annotations

import random

import pytest

from extproc.prompt.chain import KEY_BYTES, NODE_BYTES, ChainCache
from extproc.prompt.encoder import Segment
from kvindex.hashing import content_keys, extras_bytes, pack_tokens, root_bytes


def segment(*ids: int) -> Segment:
    return Segment(pack_tokens(ids))


def joined(pieces: list[Segment]) -> bytes:
    return b"".join(piece.tokens for piece in pieces)


SHAPES = [
    ("one piece, whole blocks", [[1, 2, 3, 4, 5, 6, 7, 8]]),
    ("blocks over piece borders", [[1, 2, 3], [4, 5], [6, 7, 8, 9]]),
    ("pieces of one token", [[n] for n in range(11)]),
    ("shorter than a block", [[1], [2]]),
    ("empty pieces", [[], [1, 2, 3, 4], [], [5, 6, 7, 8]]),
    ("no pieces", []),
]


@pytest.mark.parametrize(("what", "shape"), SHAPES, ids=[row[0] for row in SHAPES])
@pytest.mark.parametrize("root", [b"", root_bytes("ada")])
@pytest.mark.parametrize("salt", [b"", extras_bytes(["s"])])
def test_keys_are_those_of_the_joined_tokens(what: str, shape: list[list[int]], root: bytes, salt: bytes) -> None:
    pieces = [segment(*ids) for ids in shape]
    cache = ChainCache()
    for _ in range(2):
        keys = cache.keys(pieces, 4, root=root, first_extras=salt)
        assert keys == content_keys(joined(pieces), 4, root=root, extras=[salt])
    assert cache.hits == cache.misses == len(pieces)


def test_the_vector_of_the_reference() -> None:
    pieces = [segment(1, 2, 3), segment(4, 5, 6, 7, 8, 9)]
    expected = ["b0c6037e37a15e2de8d8689c759e965f", "94600a4a64fa896e3c6f4572bb0437f0"]
    assert [key.hex() for key in ChainCache().keys(pieces, 4)] == expected


def test_block_size_seed_root_and_salt_are_kept_apart() -> None:
    cache = ChainCache()
    pieces = [segment(*range(8)), segment(*range(8, 20))]
    seen = set()
    for block_size in (2, 4):
        for seed in (1024, 0):
            for root in (b"", root_bytes("a"), root_bytes("b")):
                for salt in (b"", extras_bytes(["s"])):
                    keys = cache.keys(pieces, block_size, seed=seed, root=root, first_extras=salt)
                    expected = content_keys(joined(pieces), block_size, seed=seed, root=root, extras=[salt])
                    assert keys == expected
                    seen.add(keys[-1])
    assert len(seen) == 24


def test_limit() -> None:
    cache = ChainCache()
    pieces = [segment(*range(8)), segment(*range(8))]
    assert cache.keys(pieces, 4, limit=3) == cache.keys(pieces, 4)[:3]
    assert cache.keys(pieces, 4, limit=0) == []


def test_a_longer_chat_hashes_only_its_end() -> None:
    cache = ChainCache()
    pieces = [segment(*range(n, n + 50)) for n in range(40)]
    cache.keys(pieces[:39], 16)
    before = cache.misses
    cache.keys(pieces, 16)
    assert cache.misses - before == 1


@pytest.mark.parametrize("max_bytes", [0, NODE_BYTES, 4 * (NODE_BYTES + 4 * KEY_BYTES), 100_000])
def test_random_use_within_any_bound(max_bytes: int) -> None:
    rng = random.Random(5)
    cache = ChainCache(max_bytes)
    known = [segment(*(rng.randrange(100) for _ in range(rng.randrange(30)))) for _ in range(12)]
    for _ in range(400):
        pieces = [rng.choice(known) for _ in range(rng.randrange(8))]
        block_size = rng.choice((1, 4, 16))
        assert cache.keys(pieces, block_size) == content_keys(joined(pieces), block_size)
        cache.check()
    cache.clear()
    cache.check()
    assert len(cache) == 0


def test_eviction_takes_the_ends_of_chats_before_their_beginnings() -> None:
    pieces = [segment(*range(16)) for _ in range(10)]
    cache = ChainCache(8 * (NODE_BYTES + KEY_BYTES))
    cache.keys(pieces, 16)
    before = cache.hits
    cache.keys(pieces, 16)
    assert cache.hits - before == 8
