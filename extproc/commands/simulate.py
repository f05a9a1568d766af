"""`kvcar simulate`: scorers on a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from extproc.commands.common import fail


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--engines", default=8, show_default=True, help="How many engines.")
@click.option("--blocks", default=2000, show_default=True, help="Cache of each engine, in trace blocks.")
@click.option("--prefill-rate", default=8000.0, show_default=True, help="Prefill of each engine, tokens per second.")
@click.option(
    "--policies",
    default=None,
    help="Comma list of scorers, as name or name:parameter=value; default: all but slo_aware.",
)
@click.option("--speed", default=1.0, show_default=True, help="Play the trace this much faster.")
@click.option(
    "--events",
    type=click.Choice(["arrival", "prefill"]),
    default="arrival",
    show_default=True,
    help="When a prompt is seen in a cache: when it arrives, or when its prefill ends.",
)
@click.option(
    "--speculative",
    is_flag=True,
    help="Count routed prompts as cached until events confirm them; takes --events prefill.",
)
@click.option("--decode-ms", default=0.0, show_default=True, help="Decode time of an answer token.")
@click.option("--host-blocks", default=0, show_default=True, help="Second tier of each engine, in trace blocks.")
@click.option(
    "--report-interval",
    default=0.0,
    show_default=True,
    help="Seconds between load reports; 0: the router's own counts.",
)
@click.option(
    "--ties",
    type=click.Choice(["turn", "router"]),
    default="turn",
    show_default=True,
    help="Equal costs by a running number, or as the router does.",
)
@click.option("--block-size", type=int, help="Tokens a trace block; default: what the trace says, else 512.")
@click.option("--seed", default=0, show_default=True, help="Same seed, same numbers.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write an HTML page with the curves.")
def simulate(
    trace: Path,
    engines: int,
    blocks: int,
    prefill_rate: float,
    policies: str | None,
    speed: float,
    events: str,
    speculative: bool,
    decode_ms: float,
    host_blocks: int,
    report_interval: float,
    ties: str,
    block_size: int | None,
    seed: int,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Replay a trace through the real scorers against a model of the engines: hit ratio, TTFT, imbalance.

    TRACE is JSON lines in the Mooncake form: timestamp (ms), input_length, output_length, hash_ids; or a log that kvcar
    itself wrote (`trace.path` in its configuration).
    """
    if not trace.is_file():
        fail(f"{trace}: is read more than once: give a file, no pipe")
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from extproc import simulate as lab

    console = Console(stderr=True)
    options: dict[str, Any] = {
        "speed": speed,
        "events": "prefill" if speculative else events,
        "speculative": speculative,
        "decode_seconds": decode_ms / 1000,
        "host_blocks": host_blocks,
        "report_interval": report_interval,
        "ties": ties,
    }
    if policies is not None:
        options["policies"] = policies
    try:
        options["block_size"] = lab.block_size_of(trace) if block_size is None else block_size
        with Progress(console=console, transient=True) as progress:
            bars: dict[str, Any] = {}

            def show(policy: str, done: int, total: int) -> None:
                if policy not in bars:
                    bars[policy] = progress.add_task(policy, total=total)
                progress.update(bars[policy], completed=done)

            results = lab.simulate(
                trace, engines=engines, blocks=blocks, prefill_rate=prefill_rate, seed=seed, progress=show, **options
            )
    except ValueError as error:
        fail(str(error))
    if plot is not None:
        plot.write_text(lab.page(str(trace.name), results), encoding="utf-8")
        click.echo(f"wrote {plot}", err=True)
    if as_json:
        click.echo(json.dumps(lab.as_json(str(trace), results)))
        return
    table = Table(title=f"{trace.name}: {engines} engines, {blocks} blocks each, {prefill_rate:g} tokens/s prefill")
    for name in ("policy", "hit ratio", "TTFT mean s", "p50", "p90", "p99", "imbalance"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for result in results:
        row = result.as_dict()
        numbers = [
            row[key] for key in ("hit_ratio", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "imbalance")
        ]
        table.add_row(result.policy, *(f"{number:.3f}" for number in numbers))
    Console().print(table)
