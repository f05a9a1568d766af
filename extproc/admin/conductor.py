"""`POST /query` as the conductors of MindIE Motor and Mooncake answer it. Pure.

The two answers differ in the type under `DP`, so one cannot serve both: `admin.conductor_form` says which.

    motor     exclusive blocks     {"default": {"a": {"longest_matched": 640, "DP": {"0":
                                      {"matched_tokens": 640, "npu_blocks": 3, "cpu_blocks": 2, "disk_blocks": 0}}}}}
    mooncake  cumulative tokens    {"default": {"a": {"longest_matched": 640, "GPU": 384, "CPU": 640, "DISK": 640,
                                      "DP": {"0": 384}}}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from extproc.admin.tokens import token_bytes
from extproc.registrar import Holder
from extproc.registry import TENANT
from kvindex.fleet import Instance
from kvindex.hashing import content_keys, extras_bytes, root_bytes
from kvindex.index import PrefixIndex
from kvindex.match import NO_BLOCKS, Match
from kvindex.rolling import hashed_keys, local_hashes, rolled
from kvindex.walk import TierBlocks


class BadQuery(ValueError):
    """A body that cannot be answered. status: 400, or 422 where Motor says so for a wrong shape."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked.

    tokens     packed u32
    root       namespace of the adapter; extras: of the first block (cache salt)
    instances  only these, None = all
    """

    model: str
    tenant: str
    block_size: int | None
    tokens: bytes
    root: bytes
    extras: bytes
    instances: frozenset[str] | None

    def chains(self, index: PrefixIndex) -> list[list[bytes]]:
        """Content keys of the whole blocks, and those they have where only hashes were pushed. O(tokens)."""
        size = index.block_size
        if not size:
            return []
        found = [content_keys(self.tokens, size, root=self.root, extras=[self.extras], seed=index.seed)]
        if index.names is not None and index.names.has_hashed and not (self.root or self.extras):
            found.append(hashed_keys(local_hashes(self.tokens, size), size, index.seed))
        return found

    def missing(self) -> str:
        return f"no indexer for model={self.model} tenant={self.tenant}"


@dataclass(frozen=True, slots=True)
class HashAsk:
    """The same for rolling hashes of its blocks, without adapter and salt (kvindex.rolling)."""

    model: str
    tenant: str
    block_size: int | None
    names: tuple[int, ...]
    instances: frozenset[str] | None

    def chains(self, index: PrefixIndex) -> list[list[bytes]]:
        """Raises BadQuery (404) where hashes are not remembered."""
        if index.names is None:
            raise BadQuery(
                f"{self.missing()} by hash: only a pool with `discovery: [{{type: http}}]` remembers hashes", 404
            )
        return index.names.chains(self.names)

    def missing(self) -> str:
        return f"no indexer for model={self.model} tenant={self.tenant}"


def parse_hashes(fields: object, form: str) -> HashAsk:
    """`block_hashes` are Motor's, of each block alone; `seq_hashes`, or `block_hash`, Mooncake's rolling ones.

    Raises BadQuery that names the field. O(hashes).
    """
    status = 422 if form == "motor" else 400
    model, size, tenant, instances = _common(fields, status)
    assert isinstance(fields, dict)
    given = [key for key in ("block_hashes", "seq_hashes", "block_hash") if key in fields]
    if len(given) != 1:
        raise BadQuery("block_hashes (of each block alone) or seq_hashes (rolling): give one of them", status)
    hashes = fields[given[0]]
    if not isinstance(hashes, list) or not all(one.__class__ is int and 0 <= one < 1 << 64 for one in hashes):
        raise BadQuery(f"{given[0]} must be a list of whole numbers from 0 to 2^64-1", status)
    return HashAsk(model, tenant, size, tuple(rolled(hashes) if given[0] == "block_hashes" else hashes), instances)


def parse(fields: object, form: str) -> Ask:
    """Raises BadQuery that names the field. O(tokens)."""
    status = 422 if form == "motor" else 400
    model, size, tenant, instances = _common(fields, status)
    assert isinstance(fields, dict)
    lora_id = _whole(fields, "lora_id", status)
    if "token_ids" not in fields:
        raise BadQuery("token_ids is missing", status)
    try:
        tokens = token_bytes(fields["token_ids"])
    except ValueError as error:
        raise BadQuery(str(error), status) from None
    salt = _text(fields, "cache_salt", status)
    return Ask(
        model,
        tenant,
        size,
        tokens,
        root_bytes(_text(fields, "lora_name", status), lora_id),
        extras_bytes([salt]) if salt else b"",
        instances,
    )


def _common(fields: object, status: int) -> tuple[str, int | None, str, frozenset[str] | None]:
    """Model, block size, tenant and the only instances that are asked for."""
    if not isinstance(fields, dict):
        raise BadQuery("the body must be an object", status)
    model = _text(fields, "model", status)
    if not model:
        raise BadQuery("model is missing", status)
    size = _whole(fields, "block_size", status)
    tenant = _text(fields, "tenant_id", status) or TENANT
    wanted = fields.get("instance_id")
    if isinstance(wanted, str):
        wanted = [wanted]
    if wanted is not None and not (isinstance(wanted, list) and all(isinstance(one, str) for one in wanted)):
        raise BadQuery("instance_id must be a text or a list of texts", status)
    return model, size or None, tenant, frozenset(wanted) if wanted else None


def _text(fields: Mapping[str, Any], key: str, status: int) -> str | None:
    value = fields.get(key)
    if value is not None and not isinstance(value, str):
        raise BadQuery(f"{key} must be a text", status)
    return value


def _whole(fields: Mapping[str, Any], key: str, status: int) -> int | None:
    value = fields.get(key)
    if value is not None and (value.__class__ is not int or not 0 <= value < 1 << 63):
        raise BadQuery(f"{key} must be a whole number of at least 0", status)
    return value


def answer(holder: Holder | None, ask: Ask | HashAsk, form: str) -> dict[str, Any]:
    """Every instance of the holder and what it holds. Raises BadQuery (404) for None. O(tokens + ranks).

    An index look-up, not a prediction: the engine's last token is not taken off.
    """
    if holder is None:
        raise BadQuery(ask.missing(), 404)
    directory = holder.directory
    size = directory.block_size
    if size is not None and ask.block_size not in (None, size):
        raise BadQuery(f"{ask.missing()} block_size={ask.block_size}: the pool has blocks of {size}", 404)
    chains = ask.chains(directory.index)
    matches = [directory.match(chain) for chain in chains if chain]
    row = FORMS[form]
    return {
        ask.tenant: {
            name: row({rank: _most(matches, name, rank) for rank in _ranks(one)}, size or 0)
            for name, one in holder.by_name.items()
            if one.followed and (ask.instances is None or name in ask.instances)
        }
    }


def _most(matches: Sequence[Match], name: str, rank: int) -> TierBlocks:
    """Of a rank that has told some of its blocks with their tokens and some by hash: the longer prefix."""
    return max((match.rank(name, rank) for match in matches), key=sum, default=NO_BLOCKS)


def _ranks(one: Instance) -> list[int]:
    """Of an instance that registers rank by rank: those that have come."""
    return sorted({stream.dp_rank for stream in one.events}) or list(range(one.dp_size))


def motor(ranks: Mapping[int, TierBlocks], size: int) -> dict[str, Any]:
    """One instance: exclusive blocks by tier, unweighted tokens."""
    rows = {
        str(rank): {
            "matched_tokens": sum(blocks) * size,
            "npu_blocks": blocks.device,
            "cpu_blocks": blocks.host,
            "disk_blocks": blocks.disk,
        }
        for rank, blocks in ranks.items()
    }
    return {"longest_matched": max((row["matched_tokens"] for row in rows.values()), default=0), "DP": rows}


def mooncake(ranks: Mapping[int, TierBlocks], size: int) -> dict[str, Any]:
    """One instance: how far each tier and those above it reach, in tokens, the farthest of all ranks."""
    ends = [(one.device, one.device + one.host, sum(one)) for one in ranks.values()] or [(0, 0, 0)]
    gpu, cpu, disk = (max(column) * size for column in zip(*ends, strict=True))
    return {
        "longest_matched": disk,
        "GPU": gpu,
        "CPU": cpu,
        "DISK": disk,
        "DP": {str(rank): one.device * size for rank, one in ranks.items()},
    }


FORMS = {"motor": motor, "mooncake": mooncake}
