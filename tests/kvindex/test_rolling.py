"""Hashes of conductors: test values, and names against a model of what is stored."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kvindex.events import BlockRemoved, BlockStored
from kvindex.hashing import content_keys, extras_bytes, pack_tokens, root_bytes
from kvindex.index import PrefixIndex, StreamView
from kvindex.rolling import HASHED, hashed_keys, local_hashes, rolled, stand_in
from kvindex.walk import Walk

HASHES = json.loads((Path(__file__).parents[1] / "data" / "vectors.json").read_text("utf-8"))["hash"]
SIZE = 4


def tokens_of(row: dict[str, Any]) -> bytes:
    return pack_tokens(row["tokens"] if "tokens" in row else range(*row["tokens_range"]))


@pytest.mark.parametrize("row", HASHES["motor_local_xxh3_64"], ids=lambda row: str(row["hash"]))
def test_local(row: dict[str, Any]) -> None:
    tokens = tokens_of(row)
    assert local_hashes(tokens, len(tokens) // 4) == [row["hash"]]


@pytest.mark.parametrize("row", HASHES["rfc1527_rolling_xxh3_64"], ids=str)
def test_rolling(row: dict[str, Any]) -> None:
    local = local_hashes(tokens_of(row), row["block_size"])
    assert local == row["local"]
    assert rolled(local) == row["rolling"]
    assert rolled(local[1:], rolled(local)[0]) == row["rolling"][1:]


def index() -> tuple[PrefixIndex, StreamView]:
    made = PrefixIndex(block_size=SIZE)
    made.keep_names()
    view = made.open(walk=Walk.CASCADE)
    view.visible = True
    return made, view


def stored(prompt: list[int], first: int = 0, **more: Any) -> BlockStored:
    """The blocks of a prompt from `first` on; the engine's hash of a block is its prefix's Python hash."""
    count = len(prompt) // SIZE
    hashes = [hash(tuple(prompt[: (one + 1) * SIZE])) for one in range(count)]
    return BlockStored(
        hashes[first:], hashes[first - 1] if first else None, pack_tokens(prompt[first * SIZE :]), SIZE, **more
    )


def names_of(prompt: list[int]) -> list[int]:
    return rolled(local_hashes(pack_tokens(prompt), SIZE))


PROMPT = list(range(100, 116))
PLAIN = content_keys(pack_tokens(PROMPT), SIZE)
SALT, LORA = extras_bytes(["salt"]), root_bytes("ada")


@pytest.mark.parametrize(
    ("events", "known"),
    [
        ([stored(PROMPT)], 4),
        ([stored(PROMPT[:8]), stored(PROMPT, 2)], 4),
        ([stored(PROMPT, 2), stored(PROMPT[:8])], 2),  # told before their parent: named when told again
        ([stored(PROMPT, 2), stored(PROMPT[:8]), stored(PROMPT, 2)], 4),
        ([stored(PROMPT, root=LORA)], 0),
        ([stored(PROMPT, extras=(SALT,))], 0),
        ([stored(PROMPT, extras=(SALT,)), stored(PROMPT, 1)], 0),
        ([stored(PROMPT, extras=(SALT,)), stored(PROMPT)], 0),  # an offload event repeats them without the salt
        ([stored(PROMPT, extras=(b"", b"", SALT))], 2),
    ],
    ids=range(9),
)
def test_names(events: list[BlockStored], known: int) -> None:
    made, view = index()
    for event in events:
        view.apply(event)
    assert made.names is not None
    assert made.names.chains(names_of(PROMPT)) == [PLAIN[:known], []]


def test_blocks_pushed_by_hash() -> None:
    """They have parents as others, and no content key of their tokens."""
    made, view = index()
    local = local_hashes(pack_tokens(PROMPT), SIZE)
    view.apply(BlockStored([1, 2], None, stand_in(local[:2], SIZE), SIZE, root=HASHED))
    view.apply(BlockStored([3], 2, stand_in(local[2:3], SIZE), SIZE, root=HASHED))
    keys = hashed_keys(local, SIZE, made.seed)
    assert made.find(keys)[view].device == 3
    assert made.find(PLAIN) == {}
    assert made.names is not None
    assert made.names.has_hashed
    assert made.names.chains(names_of(PROMPT)) == [[], keys[:3]]
    assert stand_in(local, 1) == b""


def test_names_are_forgotten_with_their_blocks() -> None:
    made, view = index()
    assert made.names is not None
    made.names._spare = 50
    rng = random.Random(3)
    prompts = [[rng.randrange(1000) for _ in range(SIZE * rng.randint(1, 6))] for _ in range(200)]
    resident: set[int] = set()
    for turn in range(600):
        number = rng.randrange(len(prompts))
        if number in resident and rng.random() < 0.8:
            resident.discard(number)
            view.apply(BlockRemoved(stored(prompts[number]).hashes))
        elif len(resident) < 10:
            resident.add(number)
            view.apply(stored(prompts[number]))
        if turn % 20 == 0:
            for one in resident:
                keys, _ = made.names.chains(names_of(prompts[one]))
                assert keys == content_keys(pack_tokens(prompts[one]), SIZE)
        assert len(made.names) <= 2 * made.blocks + 50 + 6
    made.check()
