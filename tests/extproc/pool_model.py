"""A pool without sockets: a real directory, prompter and router; what its instances hold is put in by the test."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import msgpack

from examples.local.stack import TOKENIZER
from extproc.pool import Pool
from extproc.prompt.prompter import Options, Prompter
from extproc.router import Router
from extproc.scorers import build
from kvindex.directory import Directory
from kvindex.fleet import Fleet, Instance, StreamEndpoint
from tests.kvindex.directory_driver import Driver


@cache
def prompter(models: tuple[str, ...]) -> Prompter:
    """Loaded once: it takes a second."""
    return Prompter.load(Options(tokenizer=str(TOKENIZER), models=models, adapters=("ada",), timeout=30.0))


def engine(name: str, *, pool: str = "qwen", ranks: int = 1, dialect: str = "vllm", **more: Any) -> Instance:
    """Instance `engine-a` is at 10.0.0.1:8000, and so on."""
    host = f"10.0.0.{ord(name[-1]) - ord('a') + 1}"
    events = tuple(StreamEndpoint(rank, f"tcp://{host}:{5557 + rank}", dialect=dialect) for rank in range(ranks))
    more.setdefault("events", events)
    return Instance(name, f"{host}:8000", pool=pool, dp_size=ranks, **more)


def make_pool(
    *instances: Instance, name: str = "qwen", models: tuple[str, ...] = ("qwen3-8b",), **options: Any
) -> Pool:
    """block_size (default 4), loads"""
    fleet = Fleet()
    directory = Directory(Driver(), pool=name, block_size=options.pop("block_size", 4))
    pool = Pool(
        name,
        (*models, "ada"),
        prompter=prompter(models),
        directory=directory,
        fleet=fleet,
        router=options.pop("router", None) or Router(build("car")),
        scorer_name="car",
        **options,
    )
    pool.attach()
    for instance in instances:
        fleet.upsert(instance)
    return pool


def store(
    pool: Pool,
    name: str,
    ids: Sequence[int],
    *,
    rank: int = 0,
    medium: str = "GPU",
    skip: int = 0,
    lora: str | None = None,
    salt: str | None = None,
) -> None:
    """The instance's stream announces the whole blocks of `ids`, all but the first `skip`."""
    stream = pool.directory._streams[(name, rank)]
    assert stream.sync is not None
    sequence = stream.sync.status.sequence
    size = pool.directory.block_size or 4
    count = len(ids) // size
    hashes = [hash((tuple(ids[: (one + 1) * size]), lora, salt)) & (1 << 63) - 1 for one in range(count)]
    extras = [[lora] * bool(lora) + [salt] * bool(salt and not one) or None for one in range(count)]
    event: list[Any] = [
        "BlockStored",
        hashes[skip:],
        hashes[skip - 1] if skip else None,
        list(ids[skip * size : count * size]),
    ]
    event += [size, None, medium, lora, extras[skip:]]
    payload = msgpack.packb([0.0, [event], rank])
    following = 0 if sequence is None else sequence + 1
    stream.sync.live([b"", struct.pack(">Q", following), payload], 1.0)
