"""`kvcar doctor`: checks the whole chain and explains what it finds."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from extproc.commands.common import CONFIG, fail, read_config

if TYPE_CHECKING:
    from rich.console import Console

    from extproc.doctor.finding import Finding, Report
    from extproc.doctor.runner import Progress

STYLES = {"OK": "green", "NOTE": "cyan", "WARNING": "yellow", "ERROR": "bold red"}


@click.command()
@CONFIG
@click.option("--live", is_flag=True, help="Also send probe requests: two per engine and gateway, one token each.")
@click.option("--envoy-admin", metavar="URL", help="Envoy's admin port, to check what Envoy really runs.")
@click.option("--gateway", metavar="URL", help="Where clients connect; with --live probes go through it.")
@click.option("--admin", metavar="URL", help="Admin port of the running kvcar; default: admin.address.")
@click.option("--cert", type=click.Path(exists=True), help="Client certificate (PEM), where admin.tls has a client_ca.")
@click.option("--key", type=click.Path(exists=True), help="Its key, when that is a file of its own.")
@click.option("--api-key", envvar="KVCAR_API_KEY", metavar="KEY",
              help="Bearer token for engines and gateway; ps does not show it as KVCAR_API_KEY.")  # fmt: skip
@click.option("--pool", help="Only this pool.")
@click.option("--listen", type=click.FloatRange(0.1, 600), default=3.0, show_default=True, metavar="SECONDS",
              help="How long event streams may take to connect and bring something.")  # fmt: skip
@click.option("--timeout", type=click.FloatRange(0.1, 600), default=5.0, show_default=True, metavar="SECONDS",
              help="Of one HTTP request; a check as a whole has twelve times as long.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
@click.option("-v", "--verbose", is_flag=True, help="A line for each check that found nothing, with what it saw.")
def doctor(
    config_path: Path,
    live: bool,
    envoy_admin: str | None,
    gateway: str | None,
    admin: str | None,
    cert: str | None,
    key: str | None,
    api_key: str | None,
    pool: str | None,
    listen: float,
    timeout: float,
    as_json: bool,
    verbose: bool,
) -> None:
    """Check engines, tokens, KV events, kvcar and Envoy, and explain what is wrong.

    Without --live nothing is generated: pages are read, sample texts are tokenized, events are listened to. Each
    finding says cause, evidence and remedy (docs/doctor.md). Exit status 0: nothing above a note; 1: warnings;
    2: errors, or a configuration that cannot be used.
    """
    from extproc import assembly
    from extproc.config import ConfigError
    from extproc.doctor import DoctorOptions, examine

    config = read_config(config_path)
    names = [one.name for one in config.pools]
    if pool is not None and pool not in names:
        fail(f"--pool: {pool!r} is not configured, only {', '.join(names)}")
    options = DoctorOptions(
        live=live,
        envoy_admin=_url(envoy_admin, "--envoy-admin"),
        gateway=_url(gateway, "--gateway"),
        admin=_url(admin, "--admin"),
        cert=cert,
        key=key,
        api_key=api_key or None,
        pool=pool,
        listen=listen,
        timeout=timeout,
        check_timeout=12 * timeout,
    )
    try:
        assembly.instances_of(config, str(config_path))
    except ConfigError as error:
        fail(str(error))
    with _progress() as progress:
        report = asyncio.run(examine(config, options, progress=progress))
    if as_json:
        click.echo(json.dumps(report.as_dict(), ensure_ascii=False))
    else:
        _print(report, verbose=verbose)
    raise SystemExit(report.exit_status)


def _url(given: str | None, option: str) -> str | None:
    """A base URL without the last slash; "host:port" is taken for http."""
    if given is None:
        return None
    url = given if "://" in given else f"http://{given}"
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https") or not rest.strip("/"):
        fail(f"{option}: {given!r} is no URL such as http://127.0.0.1:9901")
    return url.rstrip("/")


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """On a terminal: a line on stderr that says how far it is and what was done last. Elsewhere nothing."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status("checking ...") as line:
        yield lambda done, total, title: line.update(f"{done} of {total} checks: {title}")


def _print(report: Report, *, verbose: bool) -> None:
    from rich.console import Console

    # off a terminal lines are long, so that they can be searched
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, emoji=False)
    with console.capture() as captured:
        _print_report(console, report, verbose=verbose)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _print_report(console: Console, report: Report, *, verbose: bool) -> None:
    from rich.padding import Padding
    from rich.text import Text

    for group in dict.fromkeys(one.group for one in report.outcomes):
        outcomes = [one for one in report.outcomes if one.group == group]
        console.print(Text(group, style="bold"))
        passed = [one for one in outcomes if not one.findings and not one.skipped]
        skipped: dict[str, list[str]] = {}
        for one in outcomes:
            if one.skipped:
                skipped.setdefault(one.skipped, []).append(one.title)
        ok = [f"{one.title} ({one.detail})" if one.detail else one.title for one in passed]
        for line in ok if verbose else [", ".join(one.title for one in passed)] if passed else []:
            console.print(Padding(Text.assemble(("ok      ", STYLES["OK"]), line), (0, 0, 0, 2), expand=False))
        for why, titles in skipped.items():
            console.print(Text(f"  skipped {', '.join(titles)}: {why}", style="dim"))
        for finding in sorted((f for one in outcomes for f in one.findings), key=lambda one: -one.severity):
            _print_finding(console, finding)
        if not passed and not skipped and not any(one.findings for one in outcomes):
            console.print("  nothing to check")
    counts = {name: sum(one.severity.name == name for one in report.findings) for name in ("ERROR", "WARNING", "NOTE")}
    ran = sum(not one.skipped for one in report.outcomes)
    words = ", ".join(f"{count} {name.lower()}{'s' * (count != 1)}" for name, count in counts.items())
    console.print(
        Text(f"{ran} checks in {report.seconds:.1f} s: {words}", style=f"bold {STYLES[report.severity.name]}")
    )


def _print_finding(console: Console, finding: Finding) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    name = finding.severity.name
    head = Text.assemble((f"{name.lower():8}", STYLES[name]), (_shown(finding.subject), "bold"), f"  [{finding.id}]")
    console.print(Padding(head, (0, 0, 0, 2), expand=False))
    rows: list[tuple[str, Any]] = [("", finding.what), ("cause", finding.cause)]
    rows += [("seen" if index == 0 else "", line) for index, line in enumerate(filter(None, finding.evidence))]
    rows.append(("do", finding.remedy))
    table = Table.grid(padding=(0, 1))
    table.add_column(width=6, style="dim")
    table.add_column(overflow="fold")
    for label, text in rows:
        if text:
            table.add_row(label, Text(_shown(text)))
    console.print(Padding(table, (0, 0, 0, 10), expand=False))


def _shown(text: str) -> str:
    """Evidence may come from a peer: nothing of it steers the terminal."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
