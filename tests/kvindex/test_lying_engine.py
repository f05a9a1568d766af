"""An engine that lies: whatever it publishes, every other stream of the directory says what it says without it.

Two directories hear the same honest engines, one of them a liar as well, which knows their hashes, prompts and topic.
It may claim what it does not have, which is a lie about itself alone.
"""

from __future__ import annotations

import os
import random
from typing import Any

import msgpack
import pytest

from kvindex.directory import Directory
from kvindex.fleet import Instance, StreamEndpoint
from kvindex.hashing import content_keys, pack_tokens
from tests.kvindex.directory_driver import Driver

SIZE = 2
HONEST = ("honest-a", "honest-b")
LIAR = "liar"
SEEDS = int(os.environ.get("KVCAR_SEEDS", "8"))
BOUNDS = {"max_blocks": 60, "max_unanchored": 20}


def directory_of(*names: str) -> Directory:
    made = Directory(Driver(), block_size=SIZE, **BOUNDS)
    made.update(
        Instance(name, f"10.0.0.{number}:80", events=(StreamEndpoint(0, f"tcp://10.0.0.{number}:1", dialect="vllm"),))
        for number, name in enumerate(names, 1)
    )
    return made


def frames(sequence: int, payload: bytes) -> list[bytes]:
    return [b"", sequence.to_bytes(8, "big"), payload]


def batch(*events: Any, rank: Any = None) -> bytes:
    packed: bytes = msgpack.packb([1.0, list(events), rank])
    return packed


def feed(directory: Directory, name: str, message: list[bytes]) -> None:
    stream = directory.stream(name, 0)
    assert stream is not None
    assert stream.sync is not None
    stream.sync.live(message, 0.0)  # type: ignore[union-attr]


class World:
    """Prompts that all engines know: block `n` of prompt `p` has the hash 100 * p + n, with every engine the same."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sequences = dict.fromkeys((*HONEST, LIAR), 0)

    def tokens(self, prompt: int, first: int, count: int) -> list[int]:
        return [1000 * prompt + place for place in range(first * SIZE, (first + count) * SIZE)]

    def stored(self, prompt: int, first: int, count: int, *, lie: bool = False) -> list[Any]:
        pick = self.random
        hashes = [100 * prompt + first + place for place in range(count)]
        parent = 100 * prompt + first - 1 if first else None
        tokens, size = self.tokens(prompt, first, count), SIZE
        if lie:
            prompt, size = pick.randrange(4), pick.choice([SIZE, SIZE, SIZE, 1, 4, 0, -1, 2**40])
            tokens = pick.choice([tokens, self.tokens(prompt, 0, count), [], tokens[:-1], [2**40], ["x"]])
            parent = pick.choice([parent, None, 100 * prompt, hashes[0], -1, b"x" * 32])
            hashes = pick.choice([hashes, hashes[::-1], hashes * 3, [pick.getrandbits(64) for _ in range(count)], []])
        medium = pick.choice(["GPU", "GPU", "CPU"])
        return ["BlockStored", hashes, parent, tokens, size, None, medium]

    def honest(self) -> bytes:
        pick = self.random
        prompt, first = pick.randrange(4), pick.choice([0, 0, 1, 2])
        if pick.random() < 0.25:
            return batch(["BlockRemoved", [100 * prompt + pick.randrange(6)], pick.choice(["GPU", "CPU"])])
        return batch(self.stored(prompt, first, pick.randrange(1, 4)))

    def lie(self) -> tuple[int, bytes]:
        """(by how much the sequence grows, payload). Mostly it claims all of a prompt that honest engines serve."""
        pick = self.random
        if pick.random() < 0.6:  # a lie in good form
            return 1, batch(self.stored(pick.randrange(4), 0, 6))
        prompt = pick.randrange(4)
        event = pick.choice(
            [
                lambda: self.stored(prompt, pick.randrange(3), pick.randrange(1, 5), lie=True),
                lambda: [
                    "BlockRemoved",
                    [100 * prompt + place for place in range(6)],
                    pick.choice(["GPU", "CPU", None]),
                ],
                lambda: ["AllBlocksCleared"],
                lambda: ["BlockStored", [pick.getrandbits(64) for _ in range(200)], None, [7] * 400, SIZE, None, "GPU"],
                lambda: [pick.choice(["BlockStored", "Other", 5]), pick.choice([None, {}, [], 2**63, "x"])],
                lambda: {"type": "BlockRemoved", "block_hashes": [100 * prompt]},
            ]
        )
        payload = pick.choice(
            [
                batch(event()), batch(event(), event()), batch(event(), rank=pick.choice([1, -1, "0", 2**63])),
                pick.randbytes(20), b"", b"\xdd\xff\xff\xff\xff", batch(event())[:-3],
            ]
        )  # fmt: skip
        return pick.choice([1, 1, 1, 1, 0, 2, -3, 2**40]), payload


@pytest.mark.parametrize("seed", range(SEEDS))
def test_nobody_else_is_hurt(seed: int) -> None:
    world = World(seed)
    alone, together = directory_of(*HONEST), directory_of(HONEST[0], LIAR, HONEST[1])
    credited = lies = 0
    for turn in range(120):
        name = world.random.choice((*HONEST, LIAR, LIAR))
        number = world.sequences[name]
        if name == LIAR:
            step, payload = world.lie()
            world.sequences[name] = max(0, number + step) % 2**63
            feed(together, name, frames(number, payload))
        else:
            world.sequences[name] = number + 1
            message = frames(number, world.honest())
            feed(alone, name, message)
            feed(together, name, message)
        if not turn % 10:
            together.index.check()
        for prompt in range(4):
            keys = content_keys(pack_tokens(world.tokens(prompt, 0, 6)), SIZE)
            without, beside = alone.match(keys), together.match(keys)
            for honest in HONEST:
                assert beside.minimum(honest) == without.minimum(honest)
                credited += sum(without.minimum(honest))
            lies += sum(beside.minimum(LIAR))
        reports = {report.instance: report for report in together.status()}
        for report in alone.status():
            one = reports[report.instance]
            assert (one.state, one.sequence, one.error) == (report.state, report.sequence, report.error)
        stream = together.stream(LIAR, 0)
        assert stream is not None
        assert stream.view is not None
        assert stream.view.known <= BOUNDS["max_blocks"]
        assert stream.view.unanchored <= BOUNDS["max_unanchored"]
    assert credited > 100
    assert lies > 0, "believed of itself at times: else this shows nothing"
