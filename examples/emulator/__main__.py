"""`python -m examples.emulator`: one emulated vLLM instance. See README.md beside this file."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from .engine import EngineConfig
from .faults import Faults
from .hashing import DEFAULT_ROOT_TEXT, root_hash
from .publisher import PortsTaken
from .server import Server, ServerConfig
from .text import load
from .wire import wire_form

TOKENIZER = Path(__file__).parents[1] / "local" / "tokenizer"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m examples.emulator", description="An emulated vLLM instance.")
    add = p.add_argument
    server = p.add_argument_group("server")
    server.add_argument("--name", default="engine", help="instance name, sent as response header x-engine")
    server.add_argument("--host", default="127.0.0.1", help="address of all sockets (default %(default)s)")
    server.add_argument("--port", type=int, default=0, help="HTTP port, 0 = a free one (default)")
    server.add_argument("--model", default="demo", help="served model name (default %(default)s)")
    server.add_argument("--lora", action="append", default=[], metavar="NAME", help="an adapter; may be repeated")
    server.add_argument("--tokenizer", type=Path, default=TOKENIZER, metavar="DIR", help="default: the demo tokenizer")
    server.add_argument("--max-model-len", type=int, default=None, help="tokens; default: what the blocks hold")
    server.add_argument("--default-max-tokens", type=int, default=16, help="when a body has none (default %(default)s)")
    server.add_argument("--dp", type=int, default=1, help="data-parallel ranks (default %(default)s)")
    server.add_argument("--exit-with-stdin", action="store_true", help="stop when standard input is closed")

    cache = p.add_argument_group("cache")
    cache.add_argument("--block-size", type=int, default=16, help="tokens a block (default %(default)s)")
    cache.add_argument(
        "--blocks", type=int, default=4096, help="GPU blocks, one of them unusable (default %(default)s)"
    )
    cache.add_argument("--host-blocks", type=int, default=0, help="blocks of the host tier (default: none)")
    cache.add_argument("--no-prefix-caching", action="store_true")
    cache.add_argument("--hash-root", default=DEFAULT_ROOT_TEXT, metavar="TEXT", help="seed text of the block hashes")

    time = p.add_argument_group("timing")
    time.add_argument("--prefill-rate", type=float, default=8000.0, help="uncached tokens/s (default %(default)s)")
    time.add_argument("--prefill-overhead-ms", type=float, default=5.0, help="per step (default %(default)s)")
    time.add_argument("--decode-rate", type=float, default=200.0, help="tokens/s a request (default %(default)s)")
    time.add_argument("--load-rate", type=float, default=80000.0, help="host to GPU, tokens/s (default %(default)s)")
    time.add_argument("--max-seqs", type=int, default=256, help="requests running at once (default %(default)s)")
    time.add_argument("--max-batched-tokens", type=int, default=2048, help="tokens a step (default %(default)s)")
    time.add_argument("--seed", type=int, default=0, help="of the answers (default %(default)s)")

    events = p.add_argument_group("KV events")
    events.add_argument("--events-port", type=int, default=0, help="PUB port of rank 0, 0 = a free one (default)")
    events.add_argument("--no-events", action="store_true", help="no PUB socket: KV events are off")
    events.add_argument("--replay-port", type=int, default=0, help="ROUTER port of rank 0, 0 = a free one (default)")
    events.add_argument("--no-replay", action="store_true", help="no replay socket (vLLM's default)")
    events.add_argument("--events-connect", metavar="ENDPOINT", help="connect the PUB socket there instead of binding")
    events.add_argument("--topic", default="", help="default: empty")
    events.add_argument("--wire", default="vllm-0.32", help="vLLM version whose bytes are sent (default %(default)s)")
    events.add_argument("--hash-form", choices=("int", "bytes"), default="int", help="default %(default)s")
    events.add_argument("--host-events", choices=("self-describing", "placeholder"), default="self-describing")
    events.add_argument("--buffer-steps", type=int, default=10_000, help="batches kept (default %(default)s)")
    events.add_argument("--hwm", type=int, default=100_000, help="of the PUB socket (default %(default)s)")
    add(
        "--fault",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a switch of /emulator/control; may be repeated",
    )
    return p


def configure(arguments: list[str]) -> tuple[ServerConfig, argparse.Namespace]:
    """The configuration of a command line; exits with status 2 and a readable line if it is wrong."""
    p = parser()
    args = p.parse_args(arguments)
    try:
        form = wire_form(args.wire, int_hashes=args.hash_form == "int")
        faults = parse_faults(args.fault)
        if args.blocks < 2 or args.block_size < 1 or args.dp < 1 or args.host_blocks < 0:
            raise ValueError("--blocks must be at least 2, --block-size and --dp at least 1")
        if args.dp > 1 and args.events_connect:
            raise ValueError("--events-connect goes with one rank only")
    except ValueError as error:
        p.error(str(error))
    engine = EngineConfig(
        root=root_hash(args.hash_root),
        block_size=args.block_size,
        blocks=args.blocks,
        host_blocks=args.host_blocks,
        host_self_describing=args.host_events == "self-describing",
        max_seqs=args.max_seqs,
        max_batched_tokens=args.max_batched_tokens,
        prefill_rate=args.prefill_rate,
        prefill_overhead=args.prefill_overhead_ms / 1000,
        decode_rate=args.decode_rate,
        load_rate=args.load_rate,
        prefix_caching=not args.no_prefix_caching,
        empty_first=form.maps,
        seed=args.seed,
    )
    config = ServerConfig(
        name=args.name,
        model=args.model,
        engine=engine,
        form=form,
        host=args.host,
        port=args.port,
        events_port=None if args.no_events else args.events_port,
        events_connect=args.events_connect,
        replay_port=None if args.no_replay else args.replay_port,
        topic=args.topic,
        buffer_steps=args.buffer_steps,
        hwm=args.hwm,
        dp=args.dp,
        loras=tuple(args.lora),
        max_model_len=args.max_model_len,
        default_max_tokens=args.default_max_tokens,
        faults=faults,
    )
    return config, args


def parse_faults(pairs: list[str]) -> Faults:
    """`drop=3`, `hang=true`, ... Raises ValueError."""
    faults = Faults()
    kinds = {item.name: type(item.default) for item in fields(Faults)}
    for pair in pairs:
        key, _, text = pair.partition("=")
        if key not in kinds:
            raise ValueError(f"--fault {pair}: known keys: {', '.join(kinds)}")
        value: Any
        if kinds[key] is bool:
            value = {"true": True, "1": True, "": True, "false": False, "0": False}.get(text.lower())
        else:
            value = int(text) if text.isdecimal() else None
        if value is None:
            raise ValueError(f"--fault {pair}: not a {kinds[key].__name__}")
        setattr(faults, key, value)
    return faults


async def serve(config: ServerConfig, args: argparse.Namespace) -> int:
    server = Server(config, load(args.tokenizer))
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, done.set)
    if args.exit_with_stdin:
        loop.add_reader(0, lambda: done.set() if not os.read(0, 4096) else None)
    try:
        line = await server.start()
    except (OSError, PortsTaken) as error:
        print(f"cannot bind: {error}", file=sys.stderr)
        return 1
    print(json.dumps({**line, "pid": os.getpid()}), flush=True)
    signalled = asyncio.create_task(done.wait())
    finished, _ = await asyncio.wait([signalled, *server.tasks], return_when=asyncio.FIRST_COMPLETED)
    await server.stop()
    for task in finished:
        task.result()  # a rank that failed raises here: better gone than silent
    return 0


def main() -> int:
    config, args = configure(sys.argv[1:])
    try:
        return asyncio.run(serve(config, args))
    except OSError as error:
        print(f"{args.tokenizer}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
