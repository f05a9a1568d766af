"""Captures: what an engine published and answered, recorded; and the proof that the index predicts it.

`verify` feeds the recorded live frames, in file order, to the real dialect, StreamSync and PrefixIndex and compares,
for each request, the predicted cached tokens with those the engine reported itself. `kvcar record` makes a file.

Format: JSON lines, frames as hex. Other keys are for the reader, and so are records of other kinds.

    {"kind": "meta", "args": ["--lora-modules", "ada=..."]}                 the first line
    {"kind": "live", "port": 5557, "frames": [topic, sequence, payload]}    one message; a stream for each port
      "history": true                                                       published before the recording began
    {"kind": "request", "path", "body", "status", "usage", "prompt_token_ids", "output_token_ids", "headers",
     "t": when the answer was there, "start": when it was sent}             written after the events of that request

Which events came before a request was looked up? All those before the previous request's line, and then

* a clear that leaves with the request's own scheduler step, in front of its blocks (an idle vLLM engine
  publishes a reset only then): before;
* what the request itself evicted or stored: after;
* of requests that ran at the same time: all up to the first block that only this one can have stored.

A difference counts as explained when a known exception (docs/captures.md) accounts for it to the token:

    reset_external    the engine emptied its host tier without a word: equal when we empty it too
    report_mode_full  a prefix announced again looked like a second copy: equal when it adds none
    sliding_window    a hybrid model needs its window's blocks too: equal when they are asked
    late_offload      copies on lower tiers told one step later: equal when they count
    concurrent, several_prompts, rank_unknown   the order of the look-ups, or the rank, is not in the file
    incomplete        the capture begins in mid-stream or lost frames: the engine holds more than was seen (D4)
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, TypeGuard

from kvindex.dialects import DIALECTS, DialectOptions
from kvindex.errors import DecodeError, KVIndexError
from kvindex.events import AllBlocksCleared, BlockStored, Event, Skipped, Tier
from kvindex.hashing import content_keys, extras_bytes, pack_tokens, root_bytes
from kvindex.retrace import NO_BLOCKS, Found, Lookup, Position, RecordedBatch, RecordedStream, Retrace, Variant

OVERLAP = 0.35
"""Seconds. A request's line is written at least 0.4 s after its answer, and only then is the next one sent: answers
that are closer together belong to requests that ran at the same time. Used where `start` is missing."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request. predicted and engine are cached tokens; device, host and disk the prediction by tier, in tokens.

    status  equal, explained (`reason` names the exception) or different
    """

    line: int
    path: str
    dp_rank: int | None
    prompt_tokens: int
    predicted: int
    engine: int
    device: int
    host: int
    disk: int
    status: str
    reason: str | None
    note: str


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """One file. `problems`: what the streams complained about on the way."""

    file: str
    rows: tuple[Row, ...]
    frames: int
    problems: tuple[str, ...]

    @property
    def requests(self) -> int:
        return len(self.rows)

    def count(self, status: str) -> int:
        return sum(row.status == status for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "requests": self.requests,
            "equal": self.count("equal"),
            "explained": self.count("explained"),
            "different": self.count("different"),
            "frames": self.frames,
            "problems": list(self.problems),
            "rows": [asdict(row) for row in self.rows],
        }


class CaptureError(KVIndexError):
    """The file is no capture; the message names file and line."""


def as_json(reports: Iterable[CaptureReport]) -> dict[str, Any]:
    """What `kvcar verify --json` prints."""
    return {"captures": [report.as_dict() for report in reports]}


def verify(path: str | Path, *, dialect: str = "auto") -> CaptureReport:
    """Compare prediction and engine for each request that says enough (answered 200, with usage and prompt tokens).

    Raises CaptureError, OSError. O(file).
    """
    capture = _Capture(read(path), dialect, str(path))
    return capture.report()


def read(path: str | Path) -> list[dict[str, Any]]:
    """The records of a file, with their line numbers. Raises CaptureError, OSError."""
    records: list[dict[str, Any]] = []
    # What is not UTF-8 is no JSON of a capture either; some editors put a byte order mark in front.
    with open(path, encoding="utf-8-sig", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise CaptureError(f"{path}, line {number}: no JSON ({error})") from None
            if not isinstance(record, dict):
                raise CaptureError(f"{path}, line {number}: {type(record).__name__}, not an object")
            _check(record, f"{path}, line {number}")
            records.append({**record, "line": number})
    return records


def _check(record: dict[str, Any], where: str) -> None:
    """Raises CaptureError for a key that cannot be read; one that is nil counts as absent."""
    for key, (right, what) in _KEYS.get(str(record.get("kind")), {}).items():
        value: Any = record
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None and not right(value):
            raise CaptureError(f"{where}: {key} is not {what}")


@dataclass(slots=True, eq=False)
class _Request:
    """keys: of each prompt's whole blocks; chain: of the first prompt and what was generated after it."""

    record: int
    line: int
    path: str
    at: float
    start: float | None
    prompts: list[list[int]]
    engine: int
    salt: Any
    adapter: str
    dp_rank: int | None
    full: bool
    keys: list[list[bytes]] = field(default_factory=list)
    chain: frozenset[bytes] = frozenset()
    concurrent: bool = False
    certain: bool = True
    lookups: list[tuple[str, Lookup]] = field(default_factory=list)

    def note(self) -> str:
        notes = {
            f"adapter {self.adapter}": bool(self.adapter),
            "salted": bool(self.salt),
            "concurrent": self.concurrent,
            "report mode full": self.full,
            f"{len(self.prompts)} prompts": len(self.prompts) > 1,
        }
        return ", ".join(note for note, applies in notes.items() if applies)


class _Capture:
    def __init__(self, records: list[dict[str, Any]], dialect: str, name: str) -> None:
        self.name = name
        self.dialect = dialect
        self.records = records
        self.size = 0
        self.hybrid = False
        self.roots: set[bytes] = set()
        self.streams: list[RecordedStream] = []
        self.batches: dict[int, RecordedBatch] = {}
        self.history: set[int] = set()
        self.stored_at: dict[bytes, list[Position]] = {}
        self.elsewhere: set[bytes] = set()  # stored before the recording, or on a lower tier
        self.caps = DIALECTS[dialect](DialectOptions()).caps_last_token
        self.unread = False  # requests that cannot be compared may have stored blocks, too
        self._read_batches()
        self.requests: list[_Request] = []
        self.boundaries: list[int] = []
        self.externals: list[int] = []
        self._read_requests()
        self.first_cover: dict[bytes, int] = {}
        self.covers: Counter[bytes] = Counter()  # requests that can have caused a block
        for request in reversed(self.requests):
            self.first_cover.update(dict.fromkeys(request.chain, request.record))
            self.covers.update(request.chain)

    # -- reading

    def _read_batches(self) -> None:
        numbers: dict[Any, int] = {}
        decoders: list[Any] = []
        chains: list[dict[Any, bytes]] = []
        for number, record in enumerate(self.records):
            if record.get("kind") != "live":
                continue
            try:
                frames = [bytes.fromhex(part) for part in record["frames"]]
            except (KeyError, TypeError, ValueError):
                raise CaptureError(f"{self.name}, line {record['line']}: frames are not a list of hex text") from None
            stream = numbers.setdefault((record.get("port"), record.get("vllm")), len(decoders))
            if stream == len(decoders):
                decoders.append(DIALECTS[self.dialect](DialectOptions()))
                chains.append({})
            events: list[Event] = []
            dp_rank = None
            try:
                if len(frames) == 3:
                    events, dp_rank = (batch := decoders[stream].decode(frames[2])).events, batch.dp_rank
                    events = list(events)
            except DecodeError:
                events = []
            if stream == len(self.streams):
                self.streams.append(RecordedStream(f"port {record.get('port')}", b"".join(frames[:1]), dp_rank or 0))
            self.hybrid |= any(isinstance(event, Skipped) and event.reason == "attention_kind" for event in events)
            events = [event for event in events if not isinstance(event, Skipped)]
            keys = [self._stored(event, chains[stream]) for event in events]
            self.batches[number] = RecordedBatch(stream, frames, events, keys)
            if record.get("history") is True:
                self.history.add(number)  # no request of the file caused it
                self.elsewhere.update(*keys)
                continue
            for place, stored in enumerate(keys):
                for key in stored:
                    self.stored_at.setdefault(key, []).append((number, place))

    def _stored(self, event: Event, chain: dict[Any, bytes]) -> frozenset[bytes]:
        if not isinstance(event, BlockStored) or not event.tokens:
            return frozenset()
        self.size = self.size or event.block_size
        self.roots.add(event.root)
        if event.tier is not Tier.DEVICE and all(one in chain for one in event.hashes):
            return frozenset()  # told without its extra keys: the mapping that is there is the better one
        parent = None if event.parent is None else chain.get(event.parent)
        if event.parent is not None and parent is None:
            return frozenset()
        keys = content_keys(event.tokens, event.block_size, root=event.root, extras=event.extras, parent=parent)
        chain.update(zip(event.hashes, keys, strict=False))
        if event.tier is not Tier.DEVICE:
            self.elsewhere.update(keys)
            return frozenset()
        return frozenset(keys)

    def _read_requests(self) -> None:
        adapters = _adapters(self.records[0] if self.records else {})
        for number, record in enumerate(self.records):
            if record.get("kind") != "request":
                continue
            path = str(record.get("path", ""))
            if path.startswith("/reset_prefix_cache"):
                if "reset_external=true" in path.lower() and record.get("status") == 200:
                    self.externals.append(number)
                continue
            self.boundaries.append(number)
            request = _request(number, record)
            if request is None:
                self.unread = True
                continue
            if request.adapter not in adapters and root_bytes(request.adapter) not in self.roots:
                request.adapter = ""
            request.keys = [self._keys(request, prompt) for prompt in request.prompts]
            if self.size:
                output = [one for one in record.get("output_token_ids") or () if _is_id(one)]
                request.chain = frozenset(self._keys(request, request.prompts[0] + output)).union(*request.keys)
            self.requests.append(request)
        for before, after in zip(self.requests, self.requests[1:], strict=False):
            if before.start is not None and after.start is not None:
                overlap = max(before.start, after.start) < min(before.at, after.at)
            else:
                overlap = abs(after.at - before.at) < OVERLAP
            if overlap:
                before.concurrent = after.concurrent = True

    def _keys(self, request: _Request, tokens: Sequence[int]) -> list[bytes]:
        if not self.size:
            return []
        extras = [extras_bytes([request.salt])] if request.salt else None
        return content_keys(pack_tokens(tokens), self.size, root=root_bytes(request.adapter), extras=extras)

    # -- when was each request looked up?

    def _plan(self) -> None:
        previous: int = -1
        following = iter(self.boundaries)
        for request in self.requests:
            for boundary in following:
                if boundary == request.record:
                    break
                previous = boundary
            begin, previous = previous + 1, request.record
            begin = max((number + 1 for number in self.history if begin <= number < request.record), default=begin)
            window = [number for number in range(begin, request.record) if number in self.batches]
            own = self._own(request, begin)
            stream = self._stream_of(request, own, window)
            request.certain = stream is not None
            for one in range(len(self.streams)) if stream is None else (stream,):
                for label, at in self._moments(request, one, begin, window, own):
                    prompts = tuple(
                        (keys, len(prompt)) for keys, prompt in zip(request.keys, request.prompts, strict=True)
                    )
                    request.lookups.append((label, Lookup(request.record, one, at, prompts)))

    def _own(self, request: _Request, begin: int) -> Position | None:
        """The first event of the prompt's blocks that no request answered before it can have caused."""
        found: Position | None = None
        for key in {key for keys in request.keys for key in keys}:
            for place in self.stored_at.get(key, ()):
                mine = place[0] >= begin or self.first_cover[key] >= request.record
                if mine and place[0] < request.record:
                    found = place if found is None else min(found, place)
                    break
        return found

    def _stream_of(self, request: _Request, own: Position | None, window: list[int]) -> int | None:
        if len(self.streams) == 1:
            return 0
        if request.dp_rank is not None:
            ranks = [stream.dp_rank for stream in self.streams]
            return ranks.index(request.dp_rank) if request.dp_rank in ranks else None
        if own is not None:
            return self.batches[own[0]].stream
        busy = {self.batches[number].stream for number in window}
        return busy.pop() if len(busy) == 1 else None

    def _moments(
        self, request: _Request, stream: int, begin: int, window: list[int], own: Position | None
    ) -> list[tuple[str, Position]]:
        """The moment of the look-up, and others with the name of the exception that would explain them."""
        mine = [number for number in window if self.batches[number].stream == stream]
        start = (begin, 0)
        late: Position | None = None
        for number in mine:
            if own is not None and number > own[0]:
                break
            before = own[1] if own is not None and number == own[0] else len(self.batches[number].events)
            start = self._after_clear(number, before) or start
        for number in mine:
            offload = 0
            for place, event in enumerate(self.batches[number].events):
                if (number, place) >= start and (not isinstance(event, BlockStored) or event.tier is Tier.DEVICE):
                    break
                offload = place + 1
            if offload and (number, offload) > start:
                late = (number, offload)
            if offload < len(self.batches[number].events):
                break
        moments = [("", start)]
        if late is not None:
            moments.append(("late_offload", late))
        if own is not None and self.batches[own[0]].stream == stream and (request.concurrent or own[0] < begin):
            anchor = self._after_clear(*own) or (own[0], 0)
            moments.insert(
                0 if request.concurrent else len(moments), ("" if request.concurrent else "concurrent", anchor)
            )
        return moments[:1] if request.concurrent else moments

    def _after_clear(self, number: int, before: int) -> Position | None:
        events = self.batches[number].events[:before]
        clears = [place for place, event in enumerate(events) if isinstance(event, AllBlocksCleared)]
        return (number, clears[-1] + 1) if clears else None

    # -- the verdict

    def report(self) -> CaptureReport:
        self._plan()
        lookups = [lookup for request in self.requests for _, lookup in request.lookups]
        owners = self._owners()
        runs = {
            name: Retrace(
                self.streams, self.batches, lookups, dialect=self.dialect, owners=owners, variant=variant
            ).run(len(self.records))
            for name, variant in self._variants().items()
        }
        rows = tuple(self._judge(request, runs) for request in self.requests)
        return CaptureReport(self.name, rows, len(self.batches), tuple(runs[""].problems))

    def _owners(self) -> dict[int, int]:
        """Record of a batch -> record of the request in whose window it is."""
        owners: dict[int, int] = {}
        following = iter(self.boundaries)
        boundary = next(following, None)
        for number in self.batches:
            while boundary is not None and boundary < number:
                boundary = next(following, None)
            if boundary is not None and number not in self.history:
                owners[number] = boundary
        return owners

    def _variants(self) -> dict[str, Variant]:
        full = {
            request.record: frozenset(request.keys[0][: request.engine // self.size])
            for request in self.requests
            if request.full and request.keys
        }
        external = tuple(self.externals)
        variants = {
            "": Variant(),
            "reset_external": Variant(external=external),
            "report_mode_full": Variant(full=full),
            "reset_external+report_mode_full": Variant(external, full),
            "sliding_window": Variant(external, full, True),
        }
        needed = {
            "": True,
            "reset_external": bool(external),
            "report_mode_full": bool(full),
            "reset_external+report_mode_full": bool(external and full),
            "sliding_window": self.hybrid,
        }
        return {name: variant for name, variant in variants.items() if needed[name]}

    def _judge(self, request: _Request, runs: Mapping[str, Retrace]) -> Row:
        plain = [(lookup, runs[""].found[lookup]) for label, lookup in request.lookups if not label]
        values = {self._tokens(found) for _, found in plain}
        # Without a rank in the file, the one that fits; then the one that holds most.
        lookup, found = (
            max(plain, key=lambda one: (self._tokens(one[1]) == request.engine, self._tokens(one[1])))
            if plain
            else (None, Found(NO_BLOCKS, bool(self.streams)))
        )
        predicted = self._tokens(found)
        reason = None
        if predicted != request.engine:
            reason = self._explain(request, runs, predicted, found)
        elif not request.certain and len(values) > 1:
            reason = "rank_unknown"
        status = "explained" if reason else "equal" if predicted == request.engine else "different"
        return Row(
            line=request.line,
            path=request.path,
            dp_rank=self.streams[lookup.stream].dp_rank if lookup is not None and request.certain else None,
            prompt_tokens=sum(map(len, request.prompts)),
            predicted=predicted,
            engine=request.engine,
            device=found.blocks.device * self.size,
            host=found.blocks.host * self.size,
            disk=found.blocks.disk * self.size,
            status=status,
            reason=reason,
            note=request.note(),
        )

    def _explain(self, request: _Request, runs: Mapping[str, Retrace], predicted: int, found: Found) -> str | None:
        for name, run in runs.items():
            for label, lookup in request.lookups:
                if self._tokens(run.found[lookup]) == request.engine:
                    return "+".join(filter(None, (name, label))) or "rank_unknown"
        # What cannot be told to the token has to be possible at least.
        step, most = self.size or 1, self._most(request, seen=found.complete)
        blocks, rest = divmod(request.engine, step)
        if rest or blocks > sum(most):
            return None
        if len(request.prompts) > 1:
            return "several_prompts" if blocks <= max(most) else None
        if request.concurrent:
            return "concurrent"
        return "incomplete" if predicted < request.engine and not found.complete else None

    def _most(self, request: _Request, *, seen: bool) -> list[int]:
        """Of each prompt, the blocks that an engine could reuse at most; `seen` = of those that the file tells of."""
        most = []
        for keys, prompt in zip(request.keys, request.prompts, strict=True):
            limit = (len(prompt) - self.caps) // (self.size or 1)
            if seen:
                limit = next((at for at, key in enumerate(keys[:limit]) if not self._met(request, key)), limit)
            most.append(limit)
        return most

    def _met(self, request: _Request, key: bytes) -> bool:
        """Can the request have found this block, which means: was it stored by its line, and not by itself alone?"""
        if key in self.elsewhere:
            return True
        others = self.covers[key] > 1 or sum(key in keys for keys in request.keys) > 1 or self.unread
        return others and any(place[0] < request.record for place in self.stored_at.get(key, ()))

    def _tokens(self, found: Found) -> int:
        return sum(found.blocks) * self.size


def _request(number: int, record: Mapping[str, Any]) -> _Request | None:
    """None for what cannot be compared."""
    body, usage = record.get("body"), record.get("usage")
    if record.get("status") != 200 or not isinstance(usage, dict) or not isinstance(body, dict):
        return None
    prompts = _prompts(record, body)
    if not prompts:
        return None
    headers = {str(key).lower(): str(value) for key, value in (record.get("headers") or {}).items()}
    dp_rank = headers.get("x-data-parallel-rank", "")
    start = record.get("start")
    return _Request(
        record=number,
        line=record["line"],
        path=str(record.get("path", "")),
        at=float(record.get("t") or 0.0),
        start=None if start is None else float(start),
        prompts=prompts,
        engine=int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
        salt=body.get("cache_salt"),
        adapter=str(body.get("model") or ""),
        dp_rank=int(dp_rank) if dp_rank.isdecimal() else None,
        full=(body.get("vllm_xargs") or {}).get("kv_cache_report_mode") == "full",
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)


def _is_count(value: Any) -> bool:
    return value.__class__ is int and value >= 0


def _is_text_or_number(value: Any) -> bool:
    return isinstance(value, (str, int))


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_map(value: Any) -> bool:
    return isinstance(value, dict)


# What `verify` reads of each kind of record. `frames` and the prompts have checks of their own.
_KEYS: dict[str, dict[str, tuple[Callable[[Any], bool], str]]] = {
    "meta": {"args": (_is_list, "a list")},
    "live": {"port": (_is_text_or_number, "a number")},
    "request": {
        "headers": (_is_map, "an object"),
        "t": (_is_number, "a number"),
        "start": (_is_number, "a number"),
        "output_token_ids": (_is_list, "a list"),
        "body.vllm_xargs": (_is_map, "an object"),
        "usage.prompt_tokens_details": (_is_map, "an object"),
        "usage.prompt_tokens_details.cached_tokens": (_is_count, "a number of tokens"),
    },
}


def _prompts(record: Mapping[str, Any], body: Mapping[str, Any]) -> list[list[int]]:
    prompt, told = body.get("prompt"), record.get("prompt_token_ids")
    if isinstance(prompt, list) and prompt and all(_ids(one) for one in prompt):
        return prompt
    if isinstance(prompt, list) and len(prompt) > 1 and not _ids(prompt):
        return []  # several texts: only the first one's tokens are in the answer
    return [list(one) for one in (told, prompt) if _ids(one)][:1]


def _ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(map(_is_id, value))


def _is_id(value: Any) -> bool:
    return value.__class__ is int and 0 <= value < 2**32


def _adapters(meta: Mapping[str, Any]) -> set[str]:
    """Names given to --lora-modules, as name=path or JSON."""
    names: set[str] = set()
    inside = False
    for argument in map(str, meta.get("args") or ()):
        if argument.startswith("--"):
            inside = argument == "--lora-modules"
        elif inside:
            try:
                names.add(str(json.loads(argument)["name"]))
            except (ValueError, TypeError, KeyError):
                names.add(argument.partition("=")[0])
    return names
