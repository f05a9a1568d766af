"""A stream as a plain dict knows it, and how blocks, keys and events are written down in the index's tests.

The model holds no row, mask, key or hint: a block's content is the tuple of everything before it. It follows the rules
of decisions D1, D2, D3, D6, D9 and D12 word by word, slowly.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from kvindex.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, Event, Tier
from kvindex.hashing import content_keys, pack_tokens
from kvindex.index import Outcome, TierBlocks, Walk

Block = tuple[bytes, bytes]
"""(extras, packed tokens)"""
Chain = tuple[bytes, tuple[Block, ...]]
"""(root, blocks from the first one on): the content of the last block"""


class Full(Exception):
    """The model is over a bound."""


def chain_keys(chain: Chain, size: int, seed: int = 1024) -> list[bytes]:
    """Content keys of every block of the chain."""
    root, blocks = chain
    tokens = b"".join(block for _, block in blocks)
    extras = [extra for extra, _ in blocks]
    return content_keys(tokens, size, root=root, extras=extras, seed=seed)


def plain(*blocks: int, size: int = 4) -> bytes:
    """Packed tokens of blocks, each named by a number: size times that number."""
    return pack_tokens(number for number in blocks for _ in range(size))


def plain_keys(*blocks: int, size: int = 4) -> list[bytes]:
    return content_keys(plain(*blocks, size=size), size)


def stored(
    hashes: Iterable[EngineHash],
    blocks: Iterable[int],
    parent: EngineHash | None = None,
    tier: Tier = Tier.DEVICE,
    *,
    size: int = 4,
    **more: object,
) -> BlockStored:
    return BlockStored(list(hashes), parent, plain(*blocks, size=size), size, tier, **more)  # type: ignore[arg-type]


def copied(hashes: Iterable[EngineHash], tier: Tier = Tier.HOST, group: int = 0) -> BlockStored:
    """Token-less."""
    return BlockStored(list(hashes), None, b"", 0, tier, group)


def walk_blocks(walk: Walk, residency: list[set[Tier]]) -> TierBlocks:
    """D12, for one stream, written from its text."""
    if walk is Walk.INTERLEAVED:
        counts = [0, 0, 0]
        for tiers in residency:
            if not tiers:
                break
            counts[min(tiers)] += 1
        return TierBlocks(*counts)
    ends = []
    position = 0
    for tier in Tier:
        while position < len(residency) and tier in residency[position]:
            position += 1
        ends.append(position)
    device, host, disk = ends
    return TierBlocks(device, host - device, disk - host)


class StreamModel:
    """One stream: copies by (tier, group, hash), what is known of each hash, and the bounds."""

    def __init__(self, walk: Walk, max_blocks: int = 10**9, max_unanchored: int = 10**9) -> None:
        self.walk = walk
        self.max_blocks = max_blocks
        self.max_unanchored = max_unanchored
        self.reset()

    def reset(self) -> None:
        self.copies: dict[tuple[Tier, int, EngineHash], int] = {}
        self.content: dict[EngineHash, Chain] = {}
        self.pending: dict[EngineHash, tuple[EngineHash, Block]] = {}

    def known(self) -> set[EngineHash]:
        return {hash_ for _, _, hash_ in self.copies}

    def apply(self, event: Event) -> Outcome:
        if isinstance(event, BlockStored):
            return self._store(event)
        if isinstance(event, BlockRemoved):
            for hash_ in event.hashes:
                place = (event.tier, event.group, hash_)
                if place in self.copies:
                    self.copies[place] -= 1
                    if not self.copies[place]:
                        del self.copies[place]
                self._forget()
        elif isinstance(event, AllBlocksCleared):
            self.copies = {place: n for place, n in self.copies.items() if place[0] not in event.tiers}
            self._forget()
        return Outcome.OK

    def _forget(self) -> None:
        known = self.known()
        self.content = {hash_: chain for hash_, chain in self.content.items() if hash_ in known}
        self.pending = {hash_: what for hash_, what in self.pending.items() if hash_ in known}

    def _store(self, event: BlockStored) -> Outcome:
        size = event.block_size
        here: Chain | None = None  # content of the block before
        if event.tokens:
            here = (event.root, ()) if event.parent is None else self.content.get(event.parent)
        before = event.parent
        lost = False
        for index, hash_ in enumerate(event.hashes):
            known = hash_ in self.known()
            if event.adds_copy and not known and len(self.known()) >= self.max_blocks:
                raise Full
            if event.tokens:
                block = event.tokens[4 * size * index : 4 * size * (index + 1)]
                extra = event.extras[index] if event.extras and index < len(event.extras) else b""
                if hash_ in self.content:
                    here = self.content[hash_]
                elif here is not None:
                    here = (here[0], (*here[1], (extra, block)))
                    if known or event.adds_copy:
                        self.content[hash_] = here
                        self.pending.pop(hash_, None)
                else:
                    lost = True
                if here is None and (known or event.adds_copy):
                    assert before is not None
                    if hash_ not in self.pending:
                        if len(self.pending) >= self.max_unanchored:
                            raise Full
                        self.pending[hash_] = (before, (extra, block))
                    elif extra or not self.pending[hash_][1][0]:
                        self.pending[hash_] = (before, (extra, block))
            if event.adds_copy:
                place = (event.tier, event.group, hash_)
                self.copies[place] = self.copies.get(place, 0) + 1
            self._anchor()
            before = hash_
        return Outcome.UNKNOWN_PARENT if lost else Outcome.OK

    def _anchor(self) -> None:
        moved = True
        while moved:
            moved = False
            for hash_, (parent, block) in list(self.pending.items()):
                if parent in self.content:
                    root, blocks = self.content[parent]
                    self.content[hash_] = (root, (*blocks, block))
                    del self.pending[hash_]
                    moved = True

    def residency(self, chain: Chain) -> list[set[Tier]]:
        root, blocks = chain
        held: dict[Chain | None, set[Tier]] = {}
        for tier, _, hash_ in self.copies:
            held.setdefault(self.content.get(hash_), set()).add(tier)
        return [held.get((root, blocks[: n + 1]), set()) for n in range(len(blocks))]

    def match(self, chain: Chain) -> TierBlocks:
        return walk_blocks(self.walk, self.residency(chain))

    def blocks(self) -> TierBlocks:
        held = [
            {self.content[hash_] for at, _, hash_ in self.copies if at is tier and hash_ in self.content}
            for tier in Tier
        ]
        return TierBlocks(*map(len, held))


class EventMaker:
    """Random events of one engine, from a small tree of prompts, so that everything happens often.

    `forms` of engine hashes: what `hash_of` makes of a content; several hashes of one content differ in `variant`.
    """

    def __init__(self, rng: random.Random, *, size: int = 2, groups: int = 2) -> None:
        self.rng = rng
        self.size = size
        self.groups = groups
        self.form = rng.choice(("small", "u64", "signed", "wide", "bytes", "mixed"))
        self.depth = rng.choice((3, 6, 12))
        self.branches = rng.choice((1, 2, 3))
        self.salted = rng.random() < 0.4
        self.variants = rng.choice((1, 1, 2))
        self._hashes: dict[tuple[Chain, int], EngineHash] = {}

    def chain(self) -> Chain:
        rng = self.rng
        root = b"Ls3:ada" if self.salted and rng.random() < 0.2 else b""
        blocks = []
        for depth in range(rng.randint(1, self.depth)):
            number = rng.randrange(self.branches if depth < 3 else 1)
            extra = b"Xs1:s" if self.salted and rng.random() < 0.2 else b""
            blocks.append((extra, pack_tokens([number] * self.size)))
        return root, tuple(blocks)

    def hash_of(self, chain: Chain, variant: int) -> EngineHash:
        known = self._hashes.get((chain, variant))
        if known is None:
            number = len(self._hashes)
            form = self.rng.choice(("u64", "bytes")) if self.form == "mixed" else self.form
            known = {
                "small": number,
                "u64": self.rng.getrandbits(64),
                "signed": self.rng.getrandbits(64) - 2**63,
                "wide": self.rng.getrandbits(200) << 8 | number & 3,
                "bytes": number.to_bytes(4, "big") * 8 if number else b"",
            }[form]
            self._hashes[chain, variant] = known
        return known

    def hashes(self, chain: Chain) -> list[EngineHash]:
        """One hash a block, of random variants; a block's parent in the engine is the block before, any variant."""
        root, blocks = chain
        return [self.hash_of((root, blocks[: n + 1]), self.rng.randrange(self.variants)) for n in range(len(blocks))]

    def event(self) -> Event:
        rng = self.rng
        chain = self.chain()
        hashes = self.hashes(chain)
        end = rng.randint(1, len(hashes))
        start = rng.choice((0, 0, rng.randrange(end)))
        tier = rng.choice((Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.DISK))
        group = 0 if rng.random() < 0.8 else rng.randrange(self.groups)
        kind = rng.random()
        if kind < 0.40:
            some = hashes[start:end]
            rng.shuffle(some)
            if rng.random() < 0.1:
                some.append(rng.choice((123456789, b"unknown")))
            return BlockRemoved(some, tier, group)
        if kind < 0.43:
            return AllBlocksCleared(rng.choice(((Tier.DEVICE,), (Tier.HOST, Tier.DISK), tuple(Tier))))
        if kind < 0.50:
            return BlockStored(hashes[start:end], None, b"", 0, tier, group)
        parent = hashes[start - 1] if start else None
        if start and rng.random() < 0.05:
            parent = rng.choice((hashes[start], b"never stored", 2**70))
        tokens = b"".join(block for _, block in chain[1][start:end])
        extras: tuple[bytes, ...] | None = tuple(extra for extra, _ in chain[1][start:end])
        if rng.random() < 0.2 or not any(extras or ()):
            extras = None  # as offload events have it
        elif rng.random() < 0.1:
            extras = extras and extras[:-1]
        names = hashes[start:end]
        if rng.random() < 0.03:
            names = [names[0]] * len(names)  # one hash for everything
        return BlockStored(names, parent, tokens, self.size, tier, group, chain[0], extras, rng.random() > 0.1)
