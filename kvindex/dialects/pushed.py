"""Events that are pushed over HTTP (`POST /events` of a conductor): a JSON body -> events, in order.

    nested    {"event_id": 1, "dp_rank": 0, "data": {"type": "stored", "parent_hash": null, "blocks": [
                  {"block_hash": 100, "tokens_hash": 123}]}}
    flat      {"event_id": 2, "dp_rank": 0, "type": "removed", "block_hashes": [100]}
    RFC 1527  {"event_id": 3, "event_type": "stored", "seq_hashes": [...], "medium": "cpu", "token_ids": [...]}

A type that is missing is an error of that event: "cleared" is never guessed from what else is missing (D11).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvindex.dialects.base import DialectOptions
from kvindex.dialects.fields import Malformed, hash_from_text, parent_of, typename
from kvindex.dialects.mooncake import NAMES, Mooncake
from kvindex.errors import DecodeError
from kvindex.events import BlockStored, EngineHash, Event, Skipped
from kvindex.rolling import HASHED, stand_in


class PushedEvent(NamedTuple):
    """One pushed event. `Pooled` is left to the objects of the view it goes to.

    event_id       the sender's number, None when it has none
    tokens_hashes  unchained 64-bit hash of each block's tokens, () when not given
    parent         block before the first one, where tokens_hashes are given; an event with token ids has its own
    takes_away     it said removed or cleared and cannot be used: what it meant to take away is not known
    """

    dp_rank: int
    event_id: int | None
    event: Event
    tokens_hashes: tuple[int, ...] = ()
    parent: EngineHash | None = None
    takes_away: bool = False


class Push(NamedTuple):
    """One body. shutdown: the sender goes away, everything of it is void."""

    instance_id: str
    model_name: str | None
    tenant_id: str
    block_size: int
    events: list[PushedEvent]
    shutdown: bool


STAND_IN_BYTES = 64 << 20
"""Of one body, the room for what stands for the tokens of blocks that come with hashes of them alone: 131,072 blocks of
128 tokens. It is made of `block_size`, which any body may say."""


class PushDecoder:
    """One a body: keeps the attention kinds that its events tell, and the room that is left."""

    def __init__(self, options: DialectOptions | None = None) -> None:
        self._dialect = Mooncake(options)
        self._room = STAND_IN_BYTES
        self._pace = self._dialect.options.pace

    def decode(self, body: Any) -> Push:
        """Raises DecodeError for a body of the wrong shape; what is wrong with one event is `Skipped` in its place."""
        if not isinstance(body, Mapping):
            raise DecodeError(f"body is {typename(body)}, not an object")
        events = body.get("events", [])
        if not isinstance(events, list):
            raise DecodeError(f"events is {typename(events)}, not a list")
        size = body.get("block_size", 128)
        if size.__class__ is not int or size < 1:
            raise DecodeError("block_size is not a positive number")
        shutdown = body.get("shutdown", False)
        if not isinstance(shutdown, bool):
            raise DecodeError(f"shutdown is {typename(shutdown)}, not true or false")
        return Push(
            _text(body, "instance_id", None) or _missing("instance_id"),
            _text(body, "model_name", None),
            _text(body, "tenant_id", None) or "default",
            size,
            [self._event(event, size) for event in events],
            shutdown,
        )

    def _event(self, raw: Any, size: int) -> PushedEvent:
        dp_rank, event_id, takes_away = 0, None, False
        if self._pace is not None:
            self._pace()
        try:
            if not isinstance(raw, Mapping):
                raise Malformed(f"an event is {typename(raw)}")
            event_id = _number(raw.get("event_id"), "event_id")
            dp_rank = _number(raw.get("dp_rank"), "dp_rank") or 0
            flat = dict(raw)
            if "data" in raw:
                if not isinstance(raw["data"], Mapping):
                    raise Malformed(f"data is {typename(raw['data'])}")
                flat = dict(raw["data"])
            flat.setdefault("event_type", flat.pop("type", None))
            takes_away = NAMES.get(str(flat["event_type"])) in ("removed", "cleared")
            tokens_hashes = _blocks(flat)
            needed = 4 * size * len(tokens_hashes)
            if needed > self._room:
                raise Malformed(f"block_size {size} and the tokens_hash of so many blocks are too much for one body")
            self._room -= needed
            if flat.get("token_ids") and flat.get("block_size") is None:
                flat["block_size"] = size
            parent = flat.get("parent_hash") if tokens_hashes else None
            parent = parent_of(hash_from_text(parent) if isinstance(parent, str) else parent)
        except Malformed as error:
            return PushedEvent(dp_rank, event_id, Skipped("malformed", str(error), True), takes_away=takes_away)
        event = _by_hash(self._dialect.event(flat), tokens_hashes, parent, size)
        lost = isinstance(event, Skipped) and event.lost
        return PushedEvent(dp_rank, event_id, event, tokens_hashes, parent, takes_away and lost)


def _by_hash(event: Event, tokens_hashes: tuple[int, ...], parent: EngineHash | None, size: int) -> Event:
    """Blocks that come with the hash of their tokens alone: the hash stands for the tokens (rolling.py)."""
    if not tokens_hashes or not isinstance(event, BlockStored) or event.tokens or event.root:
        return event
    tokens = stand_in(tokens_hashes, size)
    return event._replace(parent=parent, tokens=tokens, block_size=size, root=HASHED) if tokens else event


def _blocks(flat: dict[str, Any]) -> tuple[int, ...]:
    """Turns `blocks` into hashes; returns their token hashes."""
    blocks = flat.pop("blocks", None)
    if blocks is None:
        return ()
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise Malformed("blocks is not a list of objects")
    flat["seq_hashes"] = [block.get("block_hash") for block in blocks]
    tokens = [block.get("tokens_hash") for block in blocks]
    if all(one is None for one in tokens):
        return ()
    if not all(one.__class__ is int and 0 <= one < 2**64 for one in tokens):
        raise Malformed("a tokens_hash is no 64-bit number")
    return tuple(tokens)


def _number(value: Any, name: str) -> int | None:
    if value is None or (value.__class__ is int and value >= 0):
        return value
    raise Malformed(f"{name} is {typename(value)}, not a number")


def _text(body: Mapping[str, Any], name: str, default: str | None) -> str | None:
    value = body.get(name, default)
    if value is None or isinstance(value, str):
        return value
    raise DecodeError(f"{name} is {typename(value)}, not text")


def _missing(name: str) -> str:
    raise DecodeError(f"{name} is missing")
