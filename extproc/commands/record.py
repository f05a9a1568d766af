"""`kvcar record`: a capture of a running engine."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import click

from extproc.commands.common import fail


@click.command()
@click.argument("output", metavar="CAPTURE.jsonl", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--engine", required=True, help="The engine's OpenAI API, for example http://127.0.0.1:8000.")
@click.option("--events", required=True, help="Its KV event publisher, for example tcp://127.0.0.1:5557 (rank 0).")
@click.option("--replay", default=None, help="Its replay endpoint: what it published before is recorded too.")
@click.option(
    "--ranks",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Data-parallel ranks; rank r has the event ports + r.",
)
@click.option("--topic", default="", help="The events' topic; only needed with --replay and vLLM before 0.26.")
@click.option("--bind", is_flag=True, help="The engine's publisher connects: bind --events instead of connecting.")
@click.option("--listen", default="127.0.0.1:0", show_default=True, help="Where requests go; port 0 = a free one.")
@click.option("--note", default="", help="The engine's command line, for the first line of the file.")
@click.option(
    "--settle-ms",
    default=400,
    show_default=True,
    type=click.IntRange(0),
    help="An answer's events arrive within this time.",
)
@click.option("--one-at-a-time", is_flag=True, help="Requests wait for each other: every look-up is then certain.")
@click.option(
    "--max-bytes", default=1 << 30, show_default=True, type=click.IntRange(1), help="The file does not grow beyond it."
)
@click.option("--force", is_flag=True, help="Replace CAPTURE.jsonl if it is there.")
def record(output: Path, **options: Any) -> None:
    """Record an engine's KV events and the requests sent through a proxy, until Ctrl-C.

    Send requests to the printed address instead of the engine, then run `kvcar verify CAPTURE.jsonl`. The file holds
    the text of the requests, but no header (docs/captures.md). Exit status 1 when the engine cannot be reached or the
    file is full.
    """
    from kvindex.errors import ConfigurationError

    try:
        raise SystemExit(asyncio.run(_record(output, **options)))
    except FileExistsError:
        fail(f"{output} is there already: --force replaces it")
    except ConfigurationError as error:
        fail(str(error))
    except OSError as error:
        fail(str(error), 1)


CONNECT_TIMEOUT = 10.0


async def _record(
    output: Path,
    *,
    engine: str,
    events: str,
    replay: str | None,
    ranks: int,
    topic: str,
    bind: bool,
    listen: str,
    note: str,
    settle_ms: int,
    one_at_a_time: bool,
    max_bytes: int,
    force: bool,
) -> int:
    from aiohttp import web
    from rich.console import Console

    from extproc import __version__
    from extproc.recorder import Proxy, facts, summary
    from kvindex.discovery.static import rank_endpoint
    from kvindex.errors import ConfigurationError
    from kvindex.fleet import StreamEndpoint
    from kvindex.recorder import Recording

    engine = engine.rstrip("/") if "://" in engine else f"http://{engine}".rstrip("/")
    if not engine.startswith(("http://", "https://")):
        raise ConfigurationError(f"--engine {engine!r}: write http://host:port")
    endpoints = [
        StreamEndpoint(
            rank,
            rank_endpoint(events, rank),
            rank_endpoint(replay, rank) if replay else None,
            topic,
            bind=bind,
        )
        for rank in range(ranks)
    ]
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(f"--listen {listen!r}: write host:port, for example 127.0.0.1:8100")
    try:
        args = shlex.split(note)
    except ValueError as error:
        raise ConfigurationError(f"--note: {error}") from None
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    meta = {"args": args, "rank_ports": len(endpoints), "recorder": f"kvcar {__version__}", **await facts(engine)}
    recording = Recording(output, endpoints, meta=meta, overwrite=force, max_bytes=max_bytes)
    proxy = Proxy(engine, recording, settle=settle_ms / 1000, one_at_a_time=one_at_a_time)
    runner = web.AppRunner(proxy.make_app(), access_log=None, handle_signals=False, shutdown_timeout=10.0)
    console = Console(stderr=True)
    with recording, console.status("connecting to the event publisher") as status:
        try:
            await _connected(recording, stop)
            await runner.setup()
            await web.TCPSite(runner, host.strip("[]"), int(port)).start()
        except OSError:
            recording.discard()
            raise
        try:
            click.echo(f"send requests to http://{host}:{runner.addresses[0][1]}; Ctrl-C ends the recording")
            sys.stdout.flush()
            while not stop.is_set() and recording.error is None:
                counts = recording.counts
                lost = f", {counts.missed} messages lost" if counts.missed else ""
                down = "".join(f"; {problem}" for problem in recording.problems)
                status.update(f"{counts.requests} requests, {counts.live} event messages{lost}{down}")
                await _wait(stop, 0.25)
        finally:
            await runner.cleanup()
    for line in summary(recording, proxy):
        click.echo(line)
    click.echo(f"wrote {output}; now: kvcar verify {output}")
    if recording.error is not None:
        fail(recording.error, 1)
    return 0


async def _connected(recording: Any, stop: asyncio.Event) -> None:
    """Raises OSError, which says what is missing, after CONNECT_TIMEOUT."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + CONNECT_TIMEOUT
    while not recording.ready and not stop.is_set():
        if loop.time() > deadline:
            raise OSError("; ".join(recording.problems) or "the engine's history does not come")
        await _wait(stop, 0.02)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return
