"""A follower of KV events as a process of its own: kvcar's directory, or Dynamo's SelectionService.

    python -m tests.bench.follow_events ours|dynamo ENDPOINT ...

Reads one JSON line from its input with what to wait for, `{"last": [[token, ...], ...]}`: a prompt per endpoint whose
blocks are published last. Prints `ready` once it listens, then `{"cpu": seconds, "wall": seconds}`: from the first
block until all of those prompts are known to the end.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

from kvindex import Directory, EventTransport, Instance, StreamEndpoint, content_keys, pack_tokens

BLOCK = 16
POLL = 0.01
MODEL = "m"

Known = Callable[[list[int]], Coroutine[Any, Any, dict[int, int]]]
"""Blocks of a prompt that each engine has, by its number."""


async def has(known: Known, number: int, prompt: list[int]) -> None:
    """Until engine `number` is known to have all of the prompt: asked again and again, no follower tells by itself."""
    while (await known(prompt)).get(number, 0) * BLOCK < len(prompt):  # noqa: ASYNC110
        await asyncio.sleep(POLL)


async def wait(known: Known, first: list[int], last: list[list[int]]) -> None:
    print("ready", flush=True)
    await has(known, 0, first)
    wall, cpu = time.perf_counter(), time.process_time()
    for number, prompt in enumerate(last):
        await has(known, number, prompt)
    print(json.dumps({"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}), flush=True)


async def ours(endpoints: list[str], given: dict[str, Any]) -> None:
    with EventTransport() as transport:
        directory = Directory(transport, block_size=BLOCK)
        directory.update(
            [
                Instance(str(number), f"127.0.0.1:{number + 1}", events=(StreamEndpoint(0, one, dialect="vllm"),))
                for number, one in enumerate(endpoints)
            ]
        )

        keys: dict[int, list[bytes]] = {}  # of each prompt, hashed once: asking is not what is measured

        async def known(prompt: list[int]) -> dict[int, int]:
            if id(prompt) not in keys:
                keys[id(prompt)] = content_keys(pack_tokens(prompt), BLOCK)
            match = directory.match(keys[id(prompt)])
            return {n: sum(match.minimum(str(n))) for n in range(len(endpoints)) if sum(match.minimum(str(n)))}

        gc.collect()
        gc.freeze()  # as the server does after its start
        await wait(known, given["first"], given["last"])


async def dynamo(endpoints: list[str], given: dict[str, Any]) -> None:
    from dynamo._core import SelectionService

    service = SelectionService(indexer_threads=given["threads"])
    for number, one in enumerate(endpoints):
        await service.upsert_worker(
            {
                "worker_id": number + 1, "model_name": MODEL, "endpoint": f"x://{number}", "block_size": BLOCK,
                "max_num_batched_tokens": 8192, "data_parallel_start_rank": 0, "data_parallel_size": 1,
                "kv_events_endpoints": {0: one},
            }
        )  # fmt: skip

    async def known(prompt: list[int]) -> dict[int, int]:
        found: Any = await service.overlap_scores({"model_name": MODEL, "token_ids": prompt})
        return {one["worker_id"] - 1: one["device_blocks"] for one in found["workers"] if one["device_blocks"]}

    await wait(known, given["first"], given["last"])
    service.shutdown()


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    kinds = {"ours": ours, "dynamo": dynamo}
    asyncio.run(kinds[sys.argv[1]](sys.argv[2:], json.loads(sys.stdin.readline())))
