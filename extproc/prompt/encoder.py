"""Texts to token ids, incrementally, off the event loop.

    text -> pieces (segments.Cutter) -> known ones from an LRU bounded by bytes
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
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from itertools import count

from extproc.prompt.segments import Cutter
from extproc.prompt.stats import Stats
from extproc.prompt.tokenizer import TokenizerError, reraise_exit
from kvindex.hashing import pack_tokens

log = logging.getLogger(__name__)

JOB_CHARS = 32_768  # texts of one job: about 10 ms in a thread, 0.2 ms of the GIL
LARGE_CHARS = 131_072  # new text of one request from which on its jobs take turns with others
SEGMENT_BYTES = 400  # objects and dictionary entry of one cached segment
MAX_PENDING_CHARS = 64 << 20

Encode = Callable[[Sequence[str], bool], list[bytes]]
Key = str | tuple[str]  # a text without special tokens around it; (text,) = with them
_SERIALS = count()


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


class SegmentCache:
    """LRU from text to ids, bounded by bytes: the text, its ids and the objects around them."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._entries: OrderedDict[Key, Segment] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Segment | None:
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: Key, tokens: bytes) -> Segment:
        """The segment; kept if it fits."""
        segment = Segment(tokens)
        before = self._entries.pop(key, None)
        if before is not None:
            self.bytes -= _size(key, before)
        self._entries[key] = segment
        self.bytes += _size(key, segment)
        while self.bytes > self.max_bytes:
            old, dropped = self._entries.popitem(last=False)
            self.bytes -= _size(old, dropped)
        return segment

    def clear(self) -> None:
        self._entries.clear()
        self.bytes = 0

    def check(self) -> None:
        assert self.bytes == sum(_size(key, segment) for key, segment in self._entries.items())
        assert self.bytes <= self.max_bytes


def _size(key: Key, segment: Segment) -> int:
    text = key if isinstance(key, str) else key[0]
    width = 1 if text.isascii() else 4
    return SEGMENT_BYTES + width * len(text) + len(segment.tokens)


class _Job:
    """Texts that go to a thread together."""

    __slots__ = ("chars", "done", "keys", "results")

    def __init__(self, keys: list[Key], chars: int, done: asyncio.Future[None]) -> None:
        self.keys = keys
        self.chars = chars
        self.done = done
        self.results: dict[Key, Segment | TokenizerError] = {}


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
        max_pending_chars: int = MAX_PENDING_CHARS,
        stats: Stats | None = None,
    ) -> None:
        """
        threads        of the executor; large texts use one less (at least one)
        around         ids before and after a text with special tokens; None = unknown, such texts are encoded whole
        verify_every   every so many prompts made of several pieces are compared with a whole encode, 0 = never
        """
        self.stats = stats or Stats()
        self.cache = SegmentCache(max_bytes)
        self._encode = encode
        self._executor = executor
        self._cutter = cutter or Cutter(())
        self._around = None if around is None else [_constant(side) for side in around]
        self._pending: dict[Key, _Job] = {}
        self._pending_chars = 0
        self._max_pending_chars = max_pending_chars
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

    def cut(self, text: str, add_special_tokens: bool = False) -> list[Key]:
        """The pieces of a text, as keys of the cache. O(len(text)); callable from any thread."""
        if add_special_tokens and (self._around is None or not self._cutter):
            return [(text,)]
        return list(self._cutter.cut(text))

    async def segments(
        self, keys: Sequence[Key], *, add_special_tokens: bool = False, budget: float | None = None
    ) -> list[Segment]:
        """Segments whose concatenated tokens are the ids of the text that `keys` were cut from.

        Raises EncodeTimeout after `budget` seconds, and TokenizerError. Known pieces cost about
        0.2 us each and no thread.
        """
        stats = self.stats
        found: list[Segment] = []
        new: list[Key] = []
        waiting: set[_Job] = set()
        get, pending = self.cache.get, self._pending
        for key in keys:
            segment = get(key)
            if segment is not None:
                stats.known_pieces += 1
                found.append(segment)
                continue
            job = pending.get(key)
            if job is None:
                new.append(key)
            else:
                stats.shared_pieces += 1
                waiting.add(job)
        if new or waiting:
            found = await self._encoded(keys, new, waiting, budget)
        if add_special_tokens and keys and isinstance(keys[0], str) and self._around:
            before, after = self._around
            return [*before, *found, *after]
        return found

    async def _encoded(
        self, keys: Sequence[Key], new: list[Key], waiting: set[_Job], budget: float | None
    ) -> list[Segment]:
        held = {key: segment for key in keys if (segment := self.cache.get(key)) is not None}
        waiting |= set(self._submit(dict.fromkeys(new)))
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

    def _submit(self, keys: Iterable[Key]) -> list[_Job]:
        loop = asyncio.get_running_loop()
        jobs: list[_Job] = []
        room = 0
        total = 0
        for key in keys:
            size = len(key if isinstance(key, str) else key[0])
            total += size
            if room <= 0 or isinstance(jobs[-1].keys[0], str) != isinstance(key, str):
                jobs.append(_Job([], 0, loop.create_future()))
                room = JOB_CHARS
            job = jobs[-1]
            job.keys.append(key)
            job.chars += size
            room -= size
        if jobs and self._pending_chars and self._pending_chars + total > self._max_pending_chars:
            raise EncodeTimeout
        self._pending_chars += total
        for job in jobs:
            self.stats.new_pieces += len(job.keys)
            self.stats.encoded_chars += job.chars
            for key in job.keys:
                self._pending[key] = job
        if total < LARGE_CHARS:
            for job in jobs:
                self._start(job, large=False)
        else:
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
        texts = [key if isinstance(key, str) else key[0] for key in job.keys]
        special = not isinstance(job.keys[0], str)
        call = asyncio.get_running_loop().run_in_executor(self._executor, self._safe, texts, special)
        self._tasks.add(call)

        def finished(done: asyncio.Future[list[bytes | TokenizerError]]) -> None:
            self._tasks.discard(done)
            self._finish(job, done)
            if large:
                self._large_running -= 1
                self._next_large()

        call.add_done_callback(finished)

    def _finish(self, job: _Job, done: asyncio.Future[list[bytes | TokenizerError]]) -> None:
        self._pending_chars -= job.chars
        if done.cancelled() or done.exception() is not None:
            results: list[bytes | TokenizerError] = [TokenizerError("executor")] * len(job.keys)
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
