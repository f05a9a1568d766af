"""kvcar's ext_proc server as a process of its own, with any Decider; the default one names two addresses at once.

    python -m tests.bench.serve_extproc [--decider MODULE:FACTORY] [--address HOST:PORT]

FACTORY() returns the Decider. Prints the port on its first line and serves until SIGTERM or the end of its input.
"""

from __future__ import annotations

import argparse
import gc
import importlib

import uvloop

from extproc.messages import Decider, HttpRequest, Outcome
from extproc.server import ExtProcServer, ServerOptions
from tests.bench.noop_extproc import until_stopped


class Trivial:
    """A decision without thought: what is left is the server itself."""

    async def decide(self, request: HttpRequest) -> Outcome:
        return Outcome(
            ("10.0.0.1:8000", "10.0.0.2:8000"),
            metadata={"pool": "p", "scorer": "car", "instance": "a", "prompt_tokens": 4096, "hit_tokens": 4000},
        )


async def serve(decider: Decider, address: str) -> None:
    server = ExtProcServer(decider, ServerOptions(address))
    port = await server.start()
    gc.collect()
    gc.freeze()
    print(port, flush=True)
    await until_stopped()
    await server.stop(0)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--decider", default="tests.bench.serve_extproc:Trivial")
    arguments.add_argument("--address", default="127.0.0.1:0")
    given = arguments.parse_args()
    module, _, factory = given.decider.partition(":")
    uvloop.run(serve(getattr(importlib.import_module(module), factory)(), given.address))


if __name__ == "__main__":
    main()
