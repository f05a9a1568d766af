"""`POST /query` as the conductors of MindIE Motor and Mooncake answer it. Pure.

The two answers differ in the type under `DP`, so one cannot serve both: `admin.conductor_form` says which.

    motor     exclusive blocks     {"default": {"a": {"longest_matched": 640, "DP": {"0":
                                      {"matched_tokens": 640, "npu_blocks": 3, "cpu_blocks": 2, "disk_blocks": 0}}}}}
    mooncake  cumulative tokens    {"default": {"a": {"longest_matched": 640, "GPU": 384, "CPU": 640, "DISK": 640,
                                      "DP": {"0": 384}}}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from extproc.admin.tokens import token_bytes
from kvindex.directory import Directory
from kvindex.fleet import Instance
from kvindex.hashing import content_keys, extras_bytes, root_bytes
from kvindex.walk import TierBlocks

NO_BLOCKS = TierBlocks(0, 0, 0)
TENANT = "default"
"""The only tenant there is: the index keeps adapters and salts apart, not customers."""


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

    def keys(self, block_size: int, seed: int) -> list[bytes]:
        """Content keys of the whole blocks. O(tokens)."""
        return content_keys(self.tokens, block_size, root=self.root, extras=[self.extras], seed=seed)

    def missing(self) -> str:
        return f"no indexer for model={self.model} tenant={self.tenant}"


def parse(fields: object, form: str) -> Ask:
    """Raises BadQuery that names the field. O(tokens)."""
    status = 422 if form == "motor" else 400
    if not isinstance(fields, dict):
        raise BadQuery("the body must be an object", status)
    model = _text(fields, "model", status)
    if not model:
        raise BadQuery("model is missing", status)
    size, lora_id = _whole(fields, "block_size", status), _whole(fields, "lora_id", status)
    if "token_ids" not in fields:
        raise BadQuery("token_ids is missing", status)
    try:
        tokens = token_bytes(fields["token_ids"])
    except ValueError as error:
        raise BadQuery(str(error), status) from None
    salt = _text(fields, "cache_salt", status)
    wanted = fields.get("instance_id")
    if isinstance(wanted, str):
        wanted = [wanted]
    if wanted is not None and not (isinstance(wanted, list) and all(isinstance(one, str) for one in wanted)):
        raise BadQuery("instance_id must be a text or a list of texts", status)
    return Ask(
        model,
        _text(fields, "tenant_id", status) or TENANT,
        size or None,
        tokens,
        root_bytes(_text(fields, "lora_name", status), lora_id),
        extras_bytes([salt]) if salt else b"",
        frozenset(wanted) if wanted else None,
    )


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


class Holder(Protocol):
    """Whose instances are asked for: a pool, or a conductor's index of one model."""

    @property
    def directory(self) -> Directory: ...
    @property
    def by_name(self) -> Mapping[str, Instance]: ...


def answer(holder: Holder | None, ask: Ask, form: str) -> dict[str, Any]:
    """Every instance of the holder and what it holds. Raises BadQuery (404) for None. O(tokens + ranks).

    An index look-up, not a prediction: the engine's last token is not taken off.
    """
    if holder is None:
        raise BadQuery(ask.missing(), 404)
    directory = holder.directory
    size = directory.block_size
    if size is not None and ask.block_size not in (None, size):
        raise BadQuery(f"{ask.missing()} block_size={ask.block_size}: the pool has blocks of {size}", 404)
    keys = ask.keys(size, directory.seed) if size else []
    match = directory.match(keys)
    row = FORMS[form]
    return {
        ask.tenant: {
            name: row(dict(enumerate(match.hits(name) or (NO_BLOCKS,) * one.dp_size)), size or 0)
            for name, one in holder.by_name.items()
            if one.followed and (ask.instances is None or name in ask.instances)
        }
    }


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
