"""Texts to token ids, incrementally, off the event loop.

    text -> pieces (segments.Cutter) -> known ones from an LRU bounded by bytes, by a digest of their text
                                     -> those that another request is having encoded: wait for the same job
                                     -> the others, in jobs of some 10 ms, to threads

One event loop owns the object: only the encoding itself runs in threads. Jobs of large texts take turns and never hold
all threads, so a 128k-token prompt does not keep others waiting. A result that comes after its request gave up still
goes into the cache: the answer is late, the next turn of the conversation is not.

Every so often a prompt made of pieces is compared with a whole encode; one difference switches the cutting off for
good.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from itertools import count, pairwise

from xxhash import xxh3_128_digest

from extproc.prompt.segments import Cutter
from extproc.prompt.stats import Stats
from extproc.prompt.tokenizer import TokenizerError, reraise_exit
from kvindex.hashing import pack_tokens

log = logging.getLogger(__name__)

INLINE_BYTES = (
    1024  # new texts of a request that are encoded where it is: about 0.3 ms, two changes of thread cost more
)
JOB_BYTES = 32_768  # texts of one job: about 10 ms in a thread, 0.2 ms of the GIL
LARGE_BYTES = 131_072  # new text of one request from which on its jobs take turns with others
SEGMENT_BYTES = 320  # objects and dictionary entry of one cached segment
MAX_PENDING_BYTES = 64 << 20

Encode = Callable[[Sequence[str], bool], list[bytes]]
_SERIALS = count()
# Digests of texts are seeded at random in each process: nobody outside can make two texts that share one.
_SEED = int.from_bytes(os.urandom(8), "little")


class EncodeTimeout(Exception):
    """The ids were not there in time."""


class Segment:
    """Ids of one piece of text; the serial is never used again for other ids."""

    __slots__ = ("serial", "tokens")

    def __init__(self, tokens: bytes) -> None:
        self.serial = next(_SERIALS)
        self.tokens = tokens

    def __repr__(self) -> str:
        return f"Segment({len(self.tokens) // 4} tokens)"


class Pieces:
    """A text cut up: its UTF-8, where the pieces begin, and a 128-bit digest of each as its name in the cache.

    special  the whole text, to be encoded with special tokens around it
    """

    __slots__ = ("bounds", "data", "keys", "special")

    def __init__(self, data: bytes, bounds: list[int], *, special: bool = False) -> None:
        self.data = data
        self.bounds = bounds
        self.special = special
        seed = _SEED ^ special
        self.keys = [xxh3_128_digest(data[start:end], seed) for start, end in pairwise(bounds)]

    def __len__(self) -> int:
        return len(self.keys)

    def text(self, index: int) -> str:
        return self.data[self.bounds[index] : self.bounds[index + 1]].decode()


class SegmentCache:
    """LRU from the digest of a text to its ids, bounded by bytes: the ids and the objects around them."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._entries: OrderedDict[bytes, Segment] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> Segment | None:
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def get_all(self, keys: Sequence[bytes]) -> list[Segment | None]:
        """`get` of each."""
        entries = self._entries
        found = [entries.get(key) for key in keys]
        for key, segment in zip(keys, found, strict=True):
            if segment is not None:
                entries.move_to_end(key)
        return found

    def put(self, key: bytes, tokens: bytes) -> Segment:
        """The segment; kept if it fits."""
        segment = Segment(tokens)
        before = self._entries.pop(key, None)
        if before is not None:
            self.bytes -= SEGMENT_BYTES + len(before.tokens)
        self._entries[key] = segment
        self.bytes += SEGMENT_BYTES + len(tokens)
        while self.bytes > self.max_bytes:
            _, dropped = self._entries.popitem(last=False)
            self.bytes -= SEGMENT_BYTES + len(dropped.tokens)
        return segment

    def clear(self) -> None:
        self._entries.clear()
        self.bytes = 0

    def check(self) -> None:
        assert self.bytes == sum(SEGMENT_BYTES + len(segment.tokens) for segment in self._entries.values())
        assert self.bytes <= self.max_bytes


class _Job:
    """Texts that go to a thread together."""

    __slots__ = ("done", "keys", "results", "size", "special", "texts")

    def __init__(self, special: bool, done: asyncio.Future[None]) -> None:
        self.keys: list[bytes] = []
        self.texts: list[str] = []
        self.size = 0
        self.special = special
        self.done = done
        self.results: dict[bytes, Segment | TokenizerError] = {}


class Encoder:
    def __init__(
        self,
        encode: Encode,
        executor: Executor,
        *,
        threads: int = 2,
        cutter: Cutter | None = None,
        around: tuple[Iterable[int], Iterable[int]] | None = None,
        max_bytes: int = 128 << 20,
        verify_every: int = 512,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        inline_bytes: int = INLINE_BYTES,
        stats: Stats | None = None,
    ) -> None:
        """
        threads        of the executor; large texts use one less (at least one)
        around         ids before and after a text with special tokens; None = unknown, such texts are encoded whole
        verify_every   every so many prompts made of several pieces are compared with a whole encode, 0 = never
        inline_bytes   up to so much new text of a request is encoded in the event loop's thread, 0 = never
        """
        self.stats = stats or Stats()
        self.cache = SegmentCache(max_bytes)
        self._encode = encode
        self._executor = executor
        self._cutter = cutter or Cutter(())
        self._around = None if around is None else [_constant(side) for side in around]
        self._pending: dict[bytes, _Job] = {}
        self._pending_bytes = 0
        self._max_pending_bytes = max_pending_bytes
        self._inline_bytes = inline_bytes
        self._large: deque[deque[_Job]] = deque()
        self._large_running = 0
        self._large_limit = max(1, threads - 1)
        self._verify_every = verify_every
        self._until_verify = verify_every
        self._tasks: set[asyncio.Future[list[bytes | TokenizerError]]] = set()

    @property
    def incremental(self) -> bool:
        return bool(self._cutter)

    @property
    def delimiters(self) -> tuple[str, ...]:
        return self._cutter.delimiters

    def cut(self, text: str, add_special_tokens: bool = False) -> Pieces:
        """The pieces of a text. Raises TokenizerError for lone surrogates. O(len(text)); callable from any thread."""
        try:
            data = text.encode()
        except UnicodeEncodeError:
            raise TokenizerError("UnicodeEncodeError", bad_text=True) from None
        if not self._cutter or (add_special_tokens and self._around is None):
            return Pieces(data, [0, len(data)], special=add_special_tokens)
        return Pieces(data, self._cutter.bounds(data))

    def cut_before(self, text: str, mark: str) -> Pieces | None:
        """The pieces of a text that are whole before `mark` first stands in it: up to the last delimiter there.

        Their ids are those that the text begins with, whatever stands in place of the mark. None if there are none.
        Raises TokenizerError for lone surrogates.
        """
        if not self._cutter:
            return None
        data = self.cut(text.partition(mark)[0]).data
        end = self._cutter.last(data)
        return Pieces(data[:end], self._cutter.bounds(data[:end])) if end else None

    async def segments(
        self, pieces: Pieces, *, add_special_tokens: bool = False, budget: float | None = None
    ) -> list[Segment]:
        """Segments whose concatenated tokens are the ids of the text that was cut.

        Raises EncodeTimeout after `budget` seconds, and TokenizerError. Known pieces cost about 0.2 us each and no
        thread; up to `inline_bytes` of new text are encoded at once, which saves an eighth of a late turn's CPU.
        """
        stats = self.stats
        found: list[Segment] = []
        new: dict[bytes, int] = {}
        waiting: set[_Job] = set()
        for index, segment in enumerate(self.cache.get_all(pieces.keys)):
            if segment is not None:
                found.append(segment)
                continue
            key = pieces.keys[index]
            job = self._pending.get(key)
            if job is None:
                new[key] = index
            else:
                stats.shared_pieces += 1
                waiting.add(job)
        stats.known_pieces += len(found)
        if new and not waiting and self._size(pieces, new) <= self._inline_bytes:
            found = self._encoded_here(pieces, new, found)
        elif new or waiting:
            found = await self._encoded(pieces, new, waiting, budget)
        if add_special_tokens and self._around is not None and not pieces.special:
            before, after = self._around
            return [*before, *found, *after]
        return found

    @staticmethod
    def _size(pieces: Pieces, new: dict[bytes, int]) -> int:
        return sum(pieces.bounds[index + 1] - pieces.bounds[index] for index in new.values())

    def _encoded_here(self, pieces: Pieces, new: dict[bytes, int], known: list[Segment]) -> list[Segment]:
        """As `_encoded`, in the event loop's own thread: the usual late turn, an answer and a question."""
        self.stats.new_pieces += len(new)
        self.stats.encoded_bytes += self._size(pieces, new)
        results = self._safe([pieces.text(index) for index in new.values()], pieces.special)
        fresh: dict[bytes, Segment] = {}
        for key, tokens in zip(new, results, strict=True):
            if isinstance(tokens, TokenizerError):
                self.stats.failed += 1
                raise tokens
            fresh[key] = self.cache.put(key, tokens)
        rest = iter(known)
        return [fresh[key] if key in fresh else next(rest) for key in pieces.keys]

    async def _encoded(
        self, pieces: Pieces, new: dict[bytes, int], waiting: set[_Job], budget: float | None
    ) -> list[Segment]:
        keys = pieces.keys
        held = {key: segment for key in keys if (segment := self.cache.get(key)) is not None}
        waiting.update(self._submit(pieces, new))
        sources = {key: job for job in waiting for key in job.keys}
        _, late = await asyncio.wait([job.done for job in waiting], timeout=budget)
        if late:
            self.stats.late += 1
            raise EncodeTimeout
        result: list[Segment] = []
        for key in keys:
            segment = held.get(key)
            if segment is None:
                outcome = sources[key].results[key]
                if isinstance(outcome, TokenizerError):
                    raise outcome
                segment = outcome
            result.append(segment)
        return result

    def watch(self, text: str, segments: Sequence[Segment], add_special_tokens: bool) -> None:
        """Called with every finished prompt: compares one of `verify_every` with a whole encode, in the background."""
        if not self._cutter or not self._verify_every or len(segments) < 2:
            return
        self._until_verify -= 1
        if self._until_verify > 0 or self._large_running >= self._large_limit:
            return
        self._until_verify = self._verify_every
        self._large_running += 1
        expected = b"".join(segment.tokens for segment in segments)
        call = asyncio.get_running_loop().run_in_executor(self._executor, self._safe, [text], add_special_tokens)
        self._tasks.add(call)

        def compare(done: asyncio.Future[list[bytes | TokenizerError]]) -> None:
            self._tasks.discard(done)
            self._large_running -= 1
            self._next_large()
            if done.cancelled() or done.exception() is not None:
                return
            whole = done.result()[0]
            if isinstance(whole, TokenizerError):
                return
            self.stats.verified += 1
            if whole != expected:
                self.stats.mismatches += 1
                self.switch_off("a prompt's pieces and its whole encode gave different ids")

        call.add_done_callback(compare)

    def switch_off(self, why: str) -> None:
        """Whole encodes from now on."""
        log.error("incremental tokenization is off: %s", why)
        self._cutter = Cutter(())
        self.cache.clear()

    def _submit(self, pieces: Pieces, new: dict[bytes, int]) -> list[_Job]:
        loop = asyncio.get_running_loop()
        jobs: list[_Job] = []
        total = 0
        for key, index in new.items():
            if not jobs or jobs[-1].size >= JOB_BYTES:
                jobs.append(_Job(pieces.special, loop.create_future()))
            job = jobs[-1]
            size = pieces.bounds[index + 1] - pieces.bounds[index]
            job.keys.append(key)
            job.texts.append(pieces.text(index))
            job.size += size
            total += size
        if self._pending_bytes and self._pending_bytes + total > self._max_pending_bytes:
            self.stats.late += 1
            raise EncodeTimeout
        self._pending_bytes += total
        self.stats.new_pieces += len(new)
        self.stats.encoded_bytes += total
        for job in jobs:
            for key in job.keys:
                self._pending[key] = job
        if total < LARGE_BYTES:
            for job in jobs:
                self._start(job, large=False)
        elif jobs:
            self._large.append(deque(jobs))
            self._next_large()
        return jobs

    def _next_large(self) -> None:
        while self._large and self._large_running < self._large_limit:
            request = self._large.popleft()
            job = request.popleft()
            if request:
                self._large.append(request)
            self._large_running += 1
            self._start(job, large=True)

    def _start(self, job: _Job, *, large: bool) -> None:
        call = asyncio.get_running_loop().run_in_executor(self._executor, self._safe, job.texts, job.special)
        self._tasks.add(call)

        def finished(done: asyncio.Future[list[bytes | TokenizerError]]) -> None:
            self._tasks.discard(done)
            self._finish(job, done)
            if large:
                self._large_running -= 1
                self._next_large()

        call.add_done_callback(finished)

    def _finish(self, job: _Job, done: asyncio.Future[list[bytes | TokenizerError]]) -> None:
        self._pending_bytes -= job.size
        job.texts = []
        if done.cancelled() or done.exception() is not None:
            results: list[bytes | TokenizerError] = [TokenizerError("executor") for _ in job.keys]
        else:
            results = done.result()
        for key, tokens in zip(job.keys, results, strict=True):
            if self._pending.get(key) is job:
                del self._pending[key]
            if isinstance(tokens, TokenizerError):
                self.stats.failed += 1
                job.results[key] = tokens
            else:
                job.results[key] = self.cache.put(key, tokens)
        if not job.done.done():
            job.done.set_result(None)

    def _safe(self, texts: list[str], add_special_tokens: bool) -> list[bytes | TokenizerError]:
        """Runs in a thread. One text that cannot be encoded must not spoil its neighbours. Never raises."""
        try:
            return list(self._encode(texts, add_special_tokens))
        except BaseException as error:
            reraise_exit(error)
            if len(texts) == 1:
                return [error if isinstance(error, TokenizerError) else TokenizerError(type(error).__name__)]
        return [self._safe([text], add_special_tokens)[0] for text in texts]


def _constant(ids: Iterable[int]) -> list[Segment]:
    packed = pack_tokens(ids)
    return [Segment(packed)] if packed else []
