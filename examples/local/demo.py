"""`make demo`: three emulated engines, kvcar and a real Envoy; the same chats routed by CAR, then by round robin.

    python -m examples.local.demo [--stay]

Every request goes through Envoy. kvcar's prediction comes from Envoy's access log, the cached tokens from the engine's
own answer. Exit status 1 when they differ in any request.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.emulator.process import StartFailed
from examples.local.client import Client
from examples.local.processes import NotReady
from examples.local.routed import Routed, routed
from examples.local.stack import Stack
from examples.local.workload import Application, workload

# A small model on a slow GPU: a miss costs about as much as it does in real life, the demo ends within a minute.
ENGINE = {"prefill_rate": 3000, "decode_rate": 200, "blocks": 8192, "max_model_len": 16_384}
MAX_TOKENS = 24


@dataclass(frozen=True)
class Turn:
    """One request of the workload. `ttft` is None where the answer came as one JSON body."""

    conversation: str
    number: int
    result: Routed
    ttft: float | None

    @property
    def agreed(self) -> bool:
        return self.result.predicted == self.result.cached and self.result.served == self.result.chosen[0]


@dataclass(frozen=True)
class Summary:
    """One policy on the whole workload. Times in seconds, of the streamed answers."""

    requests: int
    agreed: int
    prompt_tokens: int
    cached_tokens: int
    mean_ttft: float
    p90_ttft: float

    @property
    def hit_ratio(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def summarise(turns: Sequence[Turn]) -> Summary:
    """Raises ValueError with fewer than two streamed answers."""
    times = [turn.ttft for turn in turns if turn.ttft is not None]
    return Summary(
        requests=len(turns),
        agreed=sum(turn.agreed for turn in turns),
        prompt_tokens=sum(turn.result.answer.prompt_tokens for turn in turns),
        cached_tokens=sum(turn.result.cached for turn in turns),
        mean_ttft=statistics.fmean(times),
        p90_ttft=statistics.quantiles(times, n=10, method="inclusive")[-1],
    )


class Show:
    """The terminal: one line a turn, a progress bar below them where there is a terminal."""

    HEAD = "chat  turn  form    engine     prompt  predicted  cached        TTFT"

    def __init__(self, console: Console) -> None:
        self.console = console

    @contextlib.contextmanager
    def policy(self, title: str, total: int) -> Iterator[Progress]:
        self.console.print(f"\n[bold]{title}[/bold]")
        self.console.print(f"[dim]{self.HEAD}[/dim]")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as progress:
            progress.add_task("requests", total=total)
            yield progress

    def turn(self, progress: Progress, turn: Turn) -> None:
        result = turn.result
        predicted = "-" if result.predicted is None else str(result.predicted)
        mark = "[green]=[/green]" if turn.agreed else "[bold red]DIFFERS[/bold red]"
        ttft = "" if turn.ttft is None else f"{turn.ttft * 1000:6.0f} ms"
        self.console.print(
            f"{turn.conversation:<4}  {turn.number:>4}  {'json' if turn.ttft is None else 'stream':<6}  "
            f"{result.served:<9} {result.answer.prompt_tokens:>7} {predicted:>10} {result.cached:>7} {mark} {ttft:>10}",
            highlight=False,
        )
        progress.advance(progress.task_ids[0])

    def table(self, car: Summary, other: Summary) -> None:
        table = Table(title="The same chats, CAR against round robin", title_justify="left")
        for name, side in (("", "left"), ("kvcar (CAR)", "right"), ("round robin", "right"), ("CAR is", "right")):
            table.add_column(name, justify=side)  # type: ignore[arg-type]

        def ratio(one: float, two: float, word: str) -> str:
            return f"{one / two:.1f}x {word}" if two > 0 else "-"

        rows = [
            ("prompt tokens found in cache", f"{car.hit_ratio:.1%}", f"{other.hit_ratio:.1%}",
             ratio(car.hit_ratio, other.hit_ratio, "more")),
            ("TTFT mean", f"{car.mean_ttft * 1000:.0f} ms", f"{other.mean_ttft * 1000:.0f} ms",
             ratio(other.mean_ttft, car.mean_ttft, "faster")),
            ("TTFT p90", f"{car.p90_ttft * 1000:.0f} ms", f"{other.p90_ttft * 1000:.0f} ms",
             ratio(other.p90_ttft, car.p90_ttft, "faster")),
            ("prediction = engine's own count", _share(car), _share(other), ""),
        ]  # fmt: skip
        for row in rows:
            table.add_row(*row)
        self.console.print()
        self.console.print(table)
        self.console.print("[dim]TTFT: of the streamed answers, through Envoy and kvcar.[/dim]")


def _share(summary: Summary) -> str:
    return f"{summary.agreed}/{summary.requests} ({summary.agreed / summary.requests:.0%})"


async def drive(stack: Stack, applications: Sequence[Application], show: Show, progress: Progress) -> list[Turn]:
    """Runs the workload: the applications side by side, the turns of each in their order."""
    turns: list[Turn] = []
    async with Client(stack.url) as client:

        async def run(application: Application) -> None:
            for number, conversation in enumerate(application):
                stream = number % 4 != 3
                answer = await client.chat(conversation.ask(), stream=stream, max_tokens=MAX_TOKENS)
                if answer.status != 200:
                    raise NotReady(f"{conversation.name}: status {answer.status}: {answer.body[:300]!r}")
                conversation.answered(answer.text)
                result = await asyncio.to_thread(routed, stack, answer)
                turns.append(Turn(conversation.name, conversation.turn, result, answer.ttft if stream else None))
                show.turn(progress, turns[-1])

        async with asyncio.TaskGroup() as group:
            for application in applications:
                group.create_task(run(application))
    return turns


@contextlib.contextmanager
def running(stack: Stack, show: Show, what: str) -> Iterator[Stack]:
    """The stack while the block runs. A second Ctrl-C does not keep it from being taken down."""
    began = time.monotonic()
    try:
        with show.console.status(f"starting {what}"):
            stack.start()
        show.console.print(f"[dim]{what}: up after {time.monotonic() - began:.1f} s[/dim]", highlight=False)
        yield stack
    finally:
        was = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
        stack.stop()
        for number, handler in was.items():
            signal.signal(number, handler)


def measure(stack: Stack, args: argparse.Namespace, show: Show, title: str) -> Summary:
    applications = workload(
        applications=args.applications, conversations=args.conversations, turns=args.turns, seed=args.seed
    )
    with show.policy(title, args.applications * args.conversations * args.turns) as progress:
        return summarise(asyncio.run(drive(stack, applications, show, progress)))


def stay(stack: Stack, show: Show) -> None:
    """Leaves the CAR stack up until Ctrl-C."""
    bin_path = Path(sys.executable).parent
    # Several blocks of 16 tokens, so that the second time shows a hit.
    question = "Where is the library, when does it open in the morning, and which bus goes there? " * 2
    chat = json.dumps({"model": "demo", "messages": [{"role": "user", "content": question.strip()}], "max_tokens": 16})
    body = '{"model": "demo", "messages": [{"role": "user", "content": "Tell me more."}], "stream": true}'
    header = "-H 'content-type: application/json'"
    lines = (
        (
            "a chat, and what the engine found in its cache (run it twice)",
            f"curl -s {stack.url}/v1/chat/completions {header} -d '{chat}'",
        ),
        ("streamed", f"curl -sN {stack.url}/v1/chat/completions {header} -d '{body}'"),
        ("the dashboard, for a browser on this machine", f"http://{stack.kvcar.admin}/"),
        (
            "the whole chain, link by link",
            f"{bin_path}/kvcar doctor -c {stack.kvcar.config_path} --live --gateway {stack.url} "
            f"--envoy-admin http://{stack.envoy.admin}",
        ),
        ("kvcar's log: change kvcar.yaml beside it, and it says what came of that", f"tail -f {stack.kvcar.log_path}"),
        ("the last decision: candidates, hits, costs", f"curl -s 'http://{stack.kvcar.admin}/decisions?limit=1'"),
        ("what kvcar knows of each engine", f"curl -s http://{stack.kvcar.admin}/streams"),
        ("metrics", f"curl -s http://{stack.kvcar.admin}/metrics"),
        ("Envoy's log, one line a request", f"tail -f {stack.envoy.access_log_path}"),
    )
    show.console.print("\nEverything stays up until Ctrl-C. Try:")
    for what, command in lines:
        show.console.print(f"  [dim]# {what}[/dim]", highlight=False)
        # Not through rich's wrapping: the line is there to be copied.
        show.console.out(f"  {command}", highlight=False)
    signal.pause()


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make demo ARGS=...", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--stay", action="store_true", help="leave engines, kvcar and Envoy up, and print commands to try")
    add("--applications", type=int, default=4, help="each with a system prompt of its own (default %(default)s)")
    add("--conversations", type=int, default=4, help="of each application (default %(default)s)")
    add("--turns", type=int, default=5, help="of each conversation (default %(default)s)")
    # Our own count takes every request without a first byte as waiting, so a queue of one says little: weigh it less
    # than kvcar's default of 0.5 does.
    add(
        "--lambda",
        dest="weight",
        type=float,
        default=0.75,
        help="CAR's weight of the cache, 0 to 1 (default %(default)s)",
    )
    add("--seed", type=int, default=7, help="of the workload (default %(default)s)")
    args = parser.parse_args(arguments)
    if not 0 <= args.weight <= 1:
        parser.error("--lambda must be 0 to 1")
    for name in ("applications", "conversations", "turns"):
        if not 1 <= getattr(args, name) <= 26:
            parser.error(f"--{name} must be 1 to 26")
    if args.applications * args.conversations * args.turns < 4:
        parser.error("too few requests to compare anything")
    return args


def run(args: argparse.Namespace, show: Show, folder: Path) -> int:
    """The exit status: 0 when every prediction was the engine's own count."""
    with contextlib.ExitStack() as stacks:
        scorer = {"name": "car", "lambda": args.weight}
        car_stack = Stack(folder / "car", engine_options=ENGINE, scorer=scorer)
        stacks.enter_context(running(car_stack, show, "3 engines, kvcar, Envoy"))
        title = f"kvcar: cost = {args.weight:g} x missing prefix + {1 - args.weight:g} x queue"
        car = measure(car_stack, args, show, title)
        if not args.stay:
            stacks.close()
        fresh = Stack(folder / "round-robin", engine_options=ENGINE, scorer="round_robin")
        with running(fresh, show, "3 fresh engines, kvcar with round robin, Envoy") as other_stack:
            other = measure(other_stack, args, show, "round robin")
        show.table(car, other)
        agreed = all(summary.agreed == summary.requests for summary in (car, other))
        if not agreed:
            show.console.print(
                "[bold red]kvcar's prediction and the engines' own count differ: see DIFFERS above[/bold red]"
            )
        if args.stay:
            stay(car_stack, show)
    return 0 if agreed else 1


def main() -> int:
    args = parse()
    console = Console(soft_wrap=True)
    for number in SIGNALS:
        signal.signal(number, _interrupt)
    folder = Path(tempfile.mkdtemp(prefix="kvcar-demo-"))
    status = 1
    try:
        status = run(args, Show(console), folder)
    except* KeyboardInterrupt:
        console.print("\nstopped; nothing is left running")
        status = 0 if args.stay else 130
    except* (NotReady, StartFailed, EOFError, OSError) as group:
        for error in group.exceptions:
            console.print(f"[bold red]the demo failed:[/bold red] {error}", highlight=False, markup=True)
    if status == 1:
        console.print(f"[dim]logs: {folder}[/dim]", highlight=False)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
