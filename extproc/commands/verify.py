"""`kvcar verify`: recorded engines against the index."""

from __future__ import annotations

import json
from pathlib import Path

import click

from extproc.commands.common import fail


@click.command()
@click.argument("captures", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
@click.option("--dialect", default="auto", show_default=True, help="Form of the KV events: auto, vllm, sglang, xllm.")
def verify(captures: tuple[Path, ...], as_json: bool, dialect: str) -> None:
    """Replay recorded KV events and compare predicted with engine-reported cached tokens.

    Each CAPTURE is a JSON-lines file (docs/captures.md). Exit status 1 when a request differs and no known exception
    explains it, 2 when a file is no capture.
    """
    from kvindex import capture
    from kvindex.dialects import DIALECTS

    if dialect not in DIALECTS:
        raise click.BadParameter(f"{dialect!r} is none of {', '.join(DIALECTS)}", param_hint="--dialect")
    reports = []
    for path in captures:
        try:
            reports.append(capture.verify(path, dialect=dialect))
        except capture.CaptureError as error:
            fail(str(error))
        if not as_json:
            _print(reports[-1])
    if as_json:
        click.echo(json.dumps(capture.as_json(reports)))
    raise SystemExit(1 if any(report.count("different") for report in reports) else 0)


def _print(report: object) -> None:
    from kvindex.capture import CaptureReport

    assert isinstance(report, CaptureReport)
    click.echo(
        f"{report.file}: {report.requests} requests, {report.count('equal')} equal, "
        f"{report.count('explained')} explained, {report.count('different')} different"
    )
    if not report.requests:
        click.echo("  nothing to compare: no request was answered 200 with usage and ids of the prompt")
    for problem in report.problems:
        click.echo(f"  {problem}")
    for row in report.rows:
        rank = "" if row.dp_rank is None else f" rank {row.dp_rank}"
        reason = f" ({row.reason})" if row.reason else ""
        click.echo(
            f"  line {row.line:5}{rank}  {row.path:22} {row.prompt_tokens:6} tokens  predicted {row.predicted:6}  "
            f"engine {row.engine:6}  {row.status}{reason}"
        )
