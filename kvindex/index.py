"""Who holds which prefix: the KV blocks of all streams of one pool, by content key.

    index = PrefixIndex(block_size=16)
    view = index.open(walk=Walk.CASCADE, name="engine-1/0")
    view.apply(event)                          # events of the stream, in order
    view.visible = True
    index.find(content_keys(tokens, 16))       # {view: TierBlocks(device=3, host=0, disk=0)}

Exact, holes included: a view is credited with exactly the contiguous prefix its events say is resident. All streams are
answered at once. Blocks of several streams share one row (rows.py); a stream's own part is content.py; the tier walk is
walk.py.

Threads: all writers (everything but `find`) run in ONE thread; `find` may run in any number of others, beside it, with
no lock. Why that is sound:

* What a mask bit stands for is told by the *exposure*, an immutable object in one attribute that the writer replaces.
  A stream's bits stand for it only while the exposure says so. A reader takes the exposure first and looks again at the
  end; if it is another one (or a row was re-keyed, see rows.py), it starts again. So an answer that is given was worked
  out under one exposure, whose slots meant the same all along.
* Bits that must go in bulk are first taken out of the exposure, then swept in slices, and the slot is used again only
  after that: `clear` hides the tiers, sweeps, shows them again; `close` hides the stream for good; `swap` exchanges the
  slots of two contents in one exposure, so a reader sees all of the old content or all of the new, never a mixture.
* Every event changes whole masks row by row: a reader beside it sees some of the event's blocks, each as it was at one
  moment of the look-up. As a stored event goes from parent to child, that is a prefix of it.
* After `_ATTEMPTS` starts (a busy writer that publishes or re-keys rows while the reader is switched out each time) the
  reader takes `careful_runs`, which no re-keying can mislead, and then drops every view whose part of the exposure was
  replaced meanwhile. That always ends, and errs only by leaving out.

* A pool's copies (pools.py) count for its members: the exposure names the pool's slot and the set of its members, and
  each mask is completed with them before the walk. Without such a pool masks are taken as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, Final, Protocol

from kvindex.content import Content
from kvindex.errors import CapacityExceeded, KVIndexError
from kvindex.events import AllBlocksCleared, BlockRemoved, BlocksMapped, BlockStored, EngineHash, Event, Outcome, Tier
from kvindex.hashing import DEFAULT_SEED
from kvindex.proof import prove
from kvindex.rolling import HASHED, RollingNames
from kvindex.rows import Rows, Run
from kvindex.transfer import dump
from kvindex.walk import TierBlocks, Walk, credit

__all__ = ["Outcome", "PrefixIndex", "StreamView", "TierBlocks", "Walk"]

_ATTEMPTS: Final = 4
_TOLD: Final = 64  # blocks told to a pool between two calls of `pace`
_DECODED: Final = 1_024  # sets of streams whose members are kept at hand


def _no_pace() -> None:
    pass


class Pupil(Protocol):
    """Who learns from a stream which blocks its engine hashes are: a pool."""

    def learn(self, known: Iterable[tuple[EngineHash, int]]) -> None:
        """(engine hash, row of its block; 0 = not known) of blocks that the stream was told with their tokens."""


class _Exposure:
    """What readers may credit. Immutable but for the memo `decoded`, where a lost update does no harm.

    interleaved, cascade   sets of visible streams (bit 3*slot)
    blind                  mask bits of visible streams that are being swept
    views                  slot -> view, for visible streams and pools
    pools                  (three times the slot, set of visible members) of each visible pool that has any
    marks                  view -> objects of which one is replaced whenever the stream's part of the exposure is, or
                           that of a pool that serves it
    """

    __slots__ = ("blind", "cascade", "decoded", "interleaved", "marks", "merged", "pools", "views")

    def __init__(self, views: dict[int, StreamView]) -> None:
        self.views = views
        self.interleaved = self.cascade = self.blind = 0
        self.marks: dict[StreamView, tuple[object, ...]] = {}
        self.decoded: dict[int, tuple[StreamView, ...]] = {}
        self.merged: dict[int, int] = {}
        self.pools: list[tuple[int, int]] = []
        for slot, view in views.items():
            self.marks[view] = (view._mark,)
            self.blind |= view._blind << 3 * slot
            if view.is_pool:
                members = sum(1 << 3 * one._content.slot for one in view.members if one._visible)
                if members:
                    self.pools.append((3 * slot, members))
            elif view.walk is Walk.INTERLEAVED:
                self.interleaved |= 1 << 3 * slot
            else:
                self.cascade |= 1 << 3 * slot
        for view in views.values():
            for member in view.members:
                if member in self.marks:
                    self.marks[member] += (view._mark,)

    def credit(self, runs: Iterable[Run]) -> list[tuple[int, TierBlocks]]:
        """walk.credit for the visible streams, the copies of their pools included."""
        if self.pools:
            return credit(self._with_pools(runs), self.interleaved, self.cascade, 0)
        return credit(runs, self.interleaved, self.cascade, self.blind)

    def _with_pools(self, runs: Iterable[Run]) -> Iterator[Run]:
        merged = self.merged
        for mask, length in runs:
            whole = merged.get(mask)
            if whole is None:
                whole = mask & ~self.blind
                for shift, members in self.pools:
                    for tier in (Tier.HOST, Tier.DISK):
                        if whole >> shift + tier & 1:
                            whole |= members << tier
                if len(merged) >= _DECODED:
                    merged = self.merged = {}
                merged[mask] = whole
            yield whole, length

    def members(self, streams: int) -> tuple[StreamView, ...]:
        """The views of a set. O(1) when asked before, else O(streams)."""
        known = self.decoded.get(streams)
        if known is None:
            known = tuple(view for slot, view in self.views.items() if streams >> 3 * slot & 1)
            if len(self.decoded) >= _DECODED:
                self.decoded = {}
            self.decoded[streams] = known
        return known


class PrefixIndex:
    """The blocks of all streams of one pool.

    block_size   tokens per block; None = that of the first stored event (attribute `block_size` tells)
    seed         seed of the content keys
    max_streams  views open at once (each may have one shadow besides); pools come on top
    pace         called by long loops every 64 steps or less; may sleep, must not raise or call the index

    Costs, on one core: `find` about 25 ns a block where a chain was stored in one go, 100 ns where it was pieced
    together, 0.3 us when nobody has the first block, and 30 ns for each view in the answer. Memory: about 90 bytes a
    (stream, block), and about 120 more for each distinct block.
    """

    def __init__(
        self,
        *,
        block_size: int | None = None,
        seed: int = DEFAULT_SEED,
        max_streams: int = 128,
        pace: Callable[[], None] = _no_pace,
    ) -> None:
        if block_size is not None and block_size < 1:
            raise ValueError(f"block_size must be 1 or more, not {block_size}")
        self.block_size = block_size
        self.seed = seed
        self.max_streams = max_streams
        self._pace = pace
        self._rows = Rows(pace)
        self._slots: list[bool] = []  # in use?
        self._views: list[StreamView] = []  # open ones, shadows left out
        self._exposure = _Exposure({})
        self.names: RollingNames | None = None
        """Blocks by rolling hash, once `keep_names` was called."""

    def keep_names(self) -> None:
        """Remember the rolling hash of every block that is stored from now on: about 300 bytes and 1 us a block."""
        if self.names is None:
            rows = self._rows
            self.names = RollingNames(self.seed, keys=rows.keys, block_count=lambda: rows.in_use, pace=self._pace)

    def open(
        self,
        *,
        walk: Walk,
        max_blocks: int = 262_144,
        max_unanchored: int = 65_536,
        max_places: int = 64,
        name: str = "",
    ) -> StreamView:
        """A new, empty, invisible stream.

        max_blocks      engine hashes known at once, with or without a key
        max_unanchored  blocks among them that wait for an unknown parent
        max_places      different (tier, attention group) pairs

        Raises CapacityExceeded when `max_streams` are open. O(1).
        """
        opened = sum(not view.is_pool for view in self._views)
        if opened >= self.max_streams:
            raise CapacityExceeded(
                f"stream {name}: {opened} streams are open, the bound is max_streams={self.max_streams}"
            )
        view = StreamView(self, walk, name, max_blocks, max_unanchored, max_places)
        self._views.append(view)
        return view

    def find(self, keys: Sequence[bytes]) -> dict[StreamView, TierBlocks]:
        """Each visible stream that holds at least the first block, with its contiguous reusable prefix (D12).

        `keys` are the prompt's content keys, first block first. Any thread; see the class for the cost.
        """
        if type(keys) is not list:
            keys = list(keys)
        rows = self._rows
        if not keys or not rows.lookup(keys[0]):
            return {}
        for _ in range(_ATTEMPTS):
            exposure = self._exposure
            epoch = rows.epoch
            sets = exposure.credit(rows.runs(keys))
            if epoch == rows.epoch and exposure is self._exposure:
                return self._answer(exposure, sets)
        exposure = self._exposure
        sets = exposure.credit(rows.careful_runs(keys))
        found = self._answer(exposure, sets)
        now = self._exposure.marks
        return {view: blocks for view, blocks in found.items() if now.get(view) == exposure.marks[view]}

    @staticmethod
    def _answer(exposure: _Exposure, sets: list[tuple[int, TierBlocks]]) -> dict[StreamView, TierBlocks]:
        found: dict[StreamView, TierBlocks] = {}
        for streams, blocks in sets:
            members = exposure.decoded.get(streams)
            found.update(dict.fromkeys(members if members is not None else exposure.members(streams), blocks))
        return found

    @property
    def blocks(self) -> int:
        """Distinct blocks held by any stream, or explained to a pool."""
        return self._rows.in_use

    def check(self) -> None:
        """Assert every invariant. O(everything), writer thread."""
        self._rows.check()
        bits: dict[int, int] = {}
        contents = [view._content for view in self._views]
        contents += [view._shadow._content for view in self._views if view._shadow is not None]
        for content in contents:
            prove(content, bits)
        masks = self._rows.masks
        assert bits == {row: mask for row, mask in enumerate(masks) if mask}, "masks and streams disagree"
        slots = [content.slot for content in contents]
        assert len(set(slots)) == len(slots), "two streams in one slot"
        assert set(slots) == {slot for slot, used in enumerate(self._slots) if used}, "slots leak"
        exposure = self._exposure
        assert exposure.views == {view._content.slot: view for view in self._views if view._visible}
        assert exposure.blind == 0
        fresh = _Exposure(exposure.views)
        assert (exposure.marks, exposure.pools) == (fresh.marks, fresh.pools), "published pools and marks are not these"

    # ---- writer thread, for the views ---------------------------------------------------------------------------

    def _new_content(
        self, name: str, max_blocks: int, max_unanchored: int, max_places: int, kind: type[Content] = Content
    ) -> Content:
        """In the lowest free slot: masks stay as short as the number of streams allows."""
        if False in self._slots:
            slot = self._slots.index(False)
            self._slots[slot] = True
        else:
            slot = len(self._slots)
            self._slots.append(True)
        return kind(
            self._rows,
            slot,
            seed=self.seed,
            pace=self._pace,
            name=name,
            max_blocks=max_blocks,
            max_unanchored=max_unanchored,
            max_places=max_places,
        )

    def _drop_content(self, content: Content) -> None:
        """Sweep a content that no exposure shows, then let its slot be used again."""
        content.sweep()
        self._slots[content.slot] = False

    def _publish(self) -> None:
        """Let readers see the views as they are now, in one step. O(streams)."""
        self._exposure = _Exposure({view._content.slot: view for view in self._views if view._visible})


class StreamView:
    """The write handle of one stream, and its name in the answers of `find`. Hashable by identity.

    name, walk   as opened
    closed       True after `close`, and for a shadow also after `swap`

    Figures (`blocks`, `known`, ...) may be read from any thread.
    """

    __slots__ = (
        "_blind", "_bounds", "_content", "_index", "_mark", "_parent", "_pupils", "_shadow", "_visible", "closed",
        "name", "walk",
    )  # fmt: skip

    is_pool: ClassVar[bool] = False
    content_type: ClassVar[type[Content]] = Content

    def __init__(
        self,
        index: PrefixIndex,
        walk: Walk,
        name: str,
        max_blocks: int,
        max_unanchored: int,
        max_places: int,
        parent: StreamView | None = None,
    ) -> None:
        self.name = name
        self.walk = walk
        self.closed = False
        self._index = index
        self._bounds = (max_blocks, max_unanchored, max_places)
        self._content = index._new_content(name, max_blocks, max_unanchored, max_places, self.content_type)
        self._pupils: tuple[Pupil, ...] = ()
        self._parent = parent  # of a shadow
        self._shadow: StreamView | None = None
        self._visible = False
        self._blind = 0  # three bits: tiers being swept
        self._mark = object()

    def __repr__(self) -> str:
        return f"<StreamView {self.name}{' closed' if self.closed else ''}>"

    # ---- figures ------------------------------------------------------------------------------------------------

    @property
    def blocks(self) -> TierBlocks:
        """Resident blocks with a key on each tier; one that is on two tiers counts on both."""
        return TierBlocks(*self._content.counts)

    @property
    def block_size(self) -> int | None:
        """The index's: events of another size are not taken over."""
        return self._index.block_size

    @property
    def known(self) -> int:
        """Engine hashes that have a copy: what `max_blocks` bounds."""
        return self._content.known

    @property
    def unanchored(self) -> int:
        """Blocks that wait for an unknown parent."""
        return len(self._content.unanchored)

    @property
    def remembered(self) -> int:
        """Hashes with copies whose tokens were never told."""
        return self._content.remembered

    # ---- writing ------------------------------------------------------------------------------------------------

    @property
    def visible(self) -> bool:
        """`find` credits the stream only while True. A shadow is never visible."""
        return self._visible

    @visible.setter
    def visible(self, value: bool) -> None:
        self._usable()
        if value != self._visible:
            if self._parent is not None:
                raise KVIndexError(f"stream {self.name}: a shadow cannot be shown, swap it in")
            self._visible = value
            self._expose(0)

    def apply(self, event: Event) -> Outcome:
        """Take over one event. O(blocks of the event).

        Raises CapacityExceeded when a bound of the stream would be broken: the event may then be applied in part, so
        drop the content (`clear`). Nothing else an event can say raises.
        """
        if self.closed:
            self._usable()
        if isinstance(event, BlockStored):
            index = self._index
            hashes, _, tokens, size = event[:4]
            if tokens:
                fits = len(tokens) == 4 * size * len(hashes)
                if size != index.block_size:
                    if index.block_size is not None or size < 1:
                        return Outcome.BLOCK_SIZE
                    if fits:
                        index.block_size = size
                if not fits:
                    return Outcome.TOKEN_COUNT
            if not hashes:
                return Outcome.OK
            outcome = self._content.store(event)
            if tokens and self._pupils and event.root != HASHED:  # others may know the tokens themselves
                self._explain(hashes)
            if tokens and index.names is not None:
                self._name(event)
            return outcome
        if isinstance(event, BlockRemoved):
            return self._content.remove(event)
        if isinstance(event, AllBlocksCleared):
            self._clear(event.tiers)
            return Outcome.OK
        return Outcome.SKIPPED

    def _name(self, event: BlockStored) -> None:
        assert self._index.names is not None
        parent = [] if event.parent is None else [event.parent]
        rows = [row for _, row in self._content.rows_of([*parent, *event.hashes])]
        first = len(parent)
        self._index.names.learn(event, rows[0] if parent else 0, rows[first:])

    def clear(self) -> None:
        """Drop everything of the stream; readers see it empty from the start. O(known hashes), paced."""
        self._usable()
        self._clear(tuple(Tier))

    def _clear(self, tiers: Sequence[Tier]) -> None:
        if not self._content.known:
            return
        self._expose(sum(1 << tier for tier in set(tiers)))
        self._content.clear(tiers)
        self._expose(0)

    def dump(self) -> Iterator[BlocksMapped]:
        """Everything it knows, for another replica's view. Writer thread; nothing may be written before it ends."""
        self._usable()
        return dump(self._content, self._index._rows, self._index._pace)

    def fill(self, parts: Iterable[BlocksMapped]) -> None:
        """Takes over what another replica's view has dumped. O(blocks + rows of the index), paced.

        Raises CapacityExceeded, as `apply`.
        """
        self._usable()
        unlisted = self._index._rows.unlisted()
        for part in parts:
            self._content.store_mapped(part, unlisted)
            if part.keys and self._pupils:
                self._explain(part.hashes)
            self._index._pace()

    def shadow(self) -> StreamView:
        """An empty, invisible sibling to build a snapshot in; a shadow made before is closed. O(1)."""
        self._usable()
        if self._parent is not None:
            raise KVIndexError(f"stream {self.name}: a shadow has no shadow")
        if self._shadow is not None:
            self._shadow.close()
        self._shadow = StreamView(self._index, self.walk, self.name, *self._bounds, parent=self)
        self._shadow.explain_to(self._pupils)
        return self._shadow

    def swap(self, shadow: StreamView) -> None:
        """Take over the shadow's content, in one step for readers; the old content is swept. Closes the shadow.

        O(streams + known hashes of the old content), paced.
        """
        self._usable()
        if shadow is not self._shadow:
            raise KVIndexError(f"stream {self.name}: not its shadow")
        self._content, shadow._content = shadow._content, self._content
        self._expose(0)
        shadow.close()

    def close(self) -> None:
        """Drop the stream and its shadow; every other method raises KVIndexError from here on. Paced. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if self._parent is not None:
            self._parent._shadow = None
        else:
            self._index._views.remove(self)
            if self._visible:
                self._visible = False
                self._expose(0)
        if self._shadow is not None:
            self._shadow.close()
        self._index._drop_content(self._content)

    # ---- pools --------------------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[StreamView, ...]:
        """Of a pool: the streams whose blocks its copies are."""
        return ()

    def explain_to(self, pupils: tuple[Pupil, ...]) -> None:
        """Tell these from now on which block each engine hash is. What is known already is told to new ones at once,
        O(known hashes), paced."""
        self._usable()
        new = tuple(one for one in pupils if one not in self._pupils)
        self._pupils = pupils
        content = self._content
        content.anchored = [] if pupils else None
        if self._shadow is not None:
            self._shadow.explain_to(pupils)
        if new:
            for number in range(len(content.shards)):
                part = list(content.shards[number].items())
                for start in range(0, len(part), _TOLD):
                    for pupil in new:
                        pupil.learn(part[start : start + _TOLD])
                    self._index._pace()

    def _explain(self, hashes: list[EngineHash]) -> None:
        """These hashes of an event, and those that could be anchored because of it."""
        content = self._content
        anchored, content.anchored = content.anchored, []
        known = content.rows_of([*hashes, *anchored] if anchored else hashes)
        for pupil in self._pupils:
            pupil.learn(known)

    def knows(self, engine_hash: EngineHash) -> bool:
        """Has the hash a copy here? O(1), writer thread."""
        return self._content.knows(engine_hash)

    def _expose(self, blind: int) -> None:
        """Publish the view's present content, visibility and blind tiers."""
        self._blind = blind
        self._mark = object()
        self._index._publish()

    def _usable(self) -> None:
        if self.closed:
            raise KVIndexError(f"stream {self.name} is closed")
