"""Where the emulator keeps blocks: a GPU block pool as vLLM's, and an optional host tier. No I/O, no clock.

GPU pool (`BlockPool`), vLLM's rules:

    free queue   front: blocks without content; behind them cached blocks, least recently freed first
    allocate     takes from the front; a cached block taken loses its content: one Removed event each
    release      in the order given (callers pass a request's blocks tail first): to the back; blocks without content to
                 the front (measured on 0.32; 0.23 puts them to the back as well: `empty_first=False`)
    touch        a prefix hit takes the block out of the free queue, so a block in use is never evicted
    store        a full block gets its hash; consecutive new ones make one Stored event

Several blocks may hold the same hash (a prompt of exactly k blocks recomputes block k); a hit uses the oldest of them.
Block 0 is vLLM's null block, so N blocks give N - 1 usable ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from .wire import Cleared, KVEvent, Removed, Stored

KIND = "full_attention"
GROUP = 0


class Content(NamedTuple):
    """What a full block holds, tied to the request it was computed for.

    digest   block hash, 32 bytes
    parent   hash of the block before it, None for the first block of a prompt
    tokens   token ids, block_size of them
    extras   extra keys as they go over the wire (adapter name, salt), None = plain
    lora     (id, name) of the adapter, None = base model
    """

    digest: bytes
    parent: bytes | None
    tokens: tuple[int, ...]
    extras: tuple[str, ...] | None = None
    lora: tuple[int, str] | None = None


class Block:
    """One physical block."""

    __slots__ = ("content", "number", "users")

    def __init__(self, number: int) -> None:
        self.number = number
        self.users = 0
        self.content: Content | None = None


class BlockPool:
    """The GPU tier of one rank. `emit` receives the events in order."""

    def __init__(
        self, blocks: int, block_size: int, emit: Callable[[KVEvent], None], *, empty_first: bool = True
    ) -> None:
        if blocks < 2:
            raise ValueError(f"blocks: {blocks}: at least 2 (block 0 is reserved, as in vLLM)")
        self.block_size = block_size
        self.usable = blocks - 1
        self._emit = emit
        self._empty_first = empty_first
        self._blocks = [Block(number) for number in range(1, blocks)]
        self._free: OrderedDict[int, Block] = OrderedDict((block.number, block) for block in self._blocks)
        self._cached: dict[bytes, OrderedDict[int, Block]] = {}

    @property
    def free(self) -> int:
        """Blocks that could be allocated now, cached ones included."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that running requests hold, 0..1 (vLLM's kv_cache_usage_perc)."""
        return 1.0 - len(self._free) / self.usable

    def find(self, digests: Iterable[bytes]) -> list[Block]:
        """Blocks of the longest run of `digests` that is cached, from the first one on. Changes nothing."""
        found: list[Block] = []
        for digest in digests:
            copies = self._cached.get(digest)
            if not copies:
                break
            found.append(next(iter(copies.values())))
        return found

    def touch(self, blocks: Iterable[Block]) -> None:
        """Add one user to each block."""
        for block in blocks:
            if block.users == 0:
                del self._free[block.number]
            block.users += 1

    def allocate(self, count: int) -> list[Block]:
        """`count` blocks for new content, least recently used ones evicted. MemoryError if too few are free."""
        if count > len(self._free):
            raise MemoryError(f"{count} blocks wanted, {len(self._free)} free")
        taken = []
        for _ in range(count):
            _, block = self._free.popitem(last=False)
            self._evict(block)
            block.users = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[Block]) -> None:
        """Take one user from each block; those without any become free, in this order."""
        empty = []
        for block in blocks:
            block.users -= 1
            if block.users:
                continue
            if block.content is None and self._empty_first:
                empty.append(block)
            else:
                self._free[block.number] = block
        for block in reversed(empty):
            self._free[block.number] = block
            self._free.move_to_end(block.number, last=False)

    def store(self, blocks: Sequence[Block], contents: Sequence[Content], *, session: str | None = None) -> None:
        """Consecutive blocks are full: they get their content, with one Stored event.

        Blocks that have it already (prefix hits announced again) are named in the event and stay as they are.
        """
        for block, content in zip(blocks, contents, strict=True):
            if block.content is None:
                block.content = content
                self._cached.setdefault(content.digest, OrderedDict())[block.number] = block
        first = contents[0]
        self._emit(
            Stored(
                block_hashes=[content.digest for content in contents],
                parent_block_hash=first.parent,
                token_ids=[token for content in contents for token in content.tokens],
                block_size=self.block_size,
                lora_id=first.lora[0] if first.lora else None,
                lora_name=first.lora[1] if first.lora else None,
                extra_keys=[list(content.extras) if content.extras else None for content in contents],
                group_idx=GROUP,
                kv_cache_spec_kind=KIND,
                session_id=session,
            )
        )

    def reset(self) -> bool:
        """Drop all content, with one Cleared event. False, and nothing done, while a request holds blocks."""
        if len(self._free) != self.usable:
            return False
        self._cached.clear()
        for block in self._blocks:
            block.content = None
        self._emit(Cleared())
        return True

    def resident(self) -> list[tuple[Content, int]]:
        """Every cached content with its number of copies."""
        rows = []
        for copies in self._cached.values():
            content = next(iter(copies.values())).content
            assert content is not None
            rows.append((content, len(copies)))
        return rows

    def check(self) -> None:
        """Assert the pool's invariants."""
        for block in self._blocks:
            assert block.users >= 0
            assert (block.users == 0) == (block.number in self._free), f"block {block.number} in the wrong list"
            if block.content is not None:
                assert self._cached[block.content.digest][block.number] is block
        cached = [block for copies in self._cached.values() for block in copies.values()]
        assert all(self._cached.values()), "a hash without a block"
        assert len(cached) == sum(block.content is not None for block in self._blocks)
        assert all(block.content is not None for block in cached)

    def _evict(self, block: Block) -> None:
        content, block.content = block.content, None
        if content is None:
            return
        copies = self._cached[content.digest]
        del copies[block.number]
        if not copies:
            del self._cached[content.digest]
        self._emit(Removed([content.digest], group_idx=GROUP))


class HostTier:
    """Copies of blocks in host memory: LRU by block, a run of blocks is used tail first. No duplicates.

    blocks            capacity; 0 = no host tier
    self_describing   Stored events carry tokens and parent; False: placeholders without tokens. Both one event a block
    """

    def __init__(
        self, blocks: int, block_size: int, emit: Callable[[KVEvent], None], *, self_describing: bool = True
    ) -> None:
        self.capacity = blocks
        self.block_size = block_size
        self.self_describing = self_describing
        self._emit = emit
        self._blocks: OrderedDict[bytes, Content] = OrderedDict()
        self._pending: set[bytes] = set()
        self._pinned: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, digests: Iterable[bytes]) -> int:
        """Length of the longest run of `digests` held here, from the first one on. Changes nothing."""
        count = 0
        for digest in digests:
            if digest not in self._blocks:
                break
            count += 1
        return count

    def pin(self, digests: Sequence[bytes]) -> None:
        """A load back to the GPU starts: these blocks are used now, and stay until `unpin`."""
        for digest in reversed(digests):
            self._blocks.move_to_end(digest)
            self._pinned[digest] = self._pinned.get(digest, 0) + 1

    def unpin(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            left = self._pinned.get(digest, 0) - 1
            if left > 0:
                self._pinned[digest] = left
            else:
                self._pinned.pop(digest, None)

    def prepare(self, contents: Sequence[Content]) -> list[Content]:
        """Make room for those of `contents` that are not here or on their way, and return them for `store`.

        Evictions make one Removed event. Nothing is returned and nothing evicted when they do not fit.
        """
        fresh = [c for c in contents if c.digest not in self._blocks and c.digest not in self._pending]
        if not fresh:
            return []
        wanted = {content.digest for content in contents}
        excess = len(self._blocks) + len(self._pending) + len(fresh) - self.capacity
        victims = []
        if excess > 0:
            for digest in self._blocks:
                if digest not in wanted and digest not in self._pinned:
                    victims.append(digest)
                    if len(victims) == excess:
                        break
            if len(victims) < excess:
                return []
            for digest in victims:
                del self._blocks[digest]
            self._emit(Removed(list(victims), medium="CPU", group_idx=GROUP))
        self._pending.update(content.digest for content in fresh)
        return fresh

    def store(self, contents: Sequence[Content], order: Sequence[Content]) -> None:
        """Take in blocks that `prepare` made room for, announced one by one in `order`."""
        for content in reversed(contents):
            self._pending.discard(content.digest)
            self._blocks[content.digest] = content
        for content in order:
            self._emit(self._stored(content))

    def clear(self) -> None:
        """Forget everything, without an event (vLLM's `reset_external`)."""
        self._blocks.clear()
        self._pinned.clear()

    def resident(self) -> list[Content]:
        return list(self._blocks.values())

    def _stored(self, content: Content) -> Stored:
        fields: dict[str, Any] = {"medium": "CPU", "group_idx": GROUP}
        if not self.self_describing:
            return Stored([content.digest], None, [], 0, **fields)
        if content.lora:
            fields["lora_id"], fields["lora_name"] = content.lora
        return Stored(
            [content.digest],
            content.parent,
            list(content.tokens),
            self.block_size,
            kv_cache_spec_kind=KIND,
            **fields,
        )
