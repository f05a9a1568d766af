"""`kvcar query`: ask a running kvcar who holds a prompt."""

from __future__ import annotations

import http.client
import json
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from extproc.admin.trust import trust
from extproc.commands.common import CONFIG, fail, read_config

LONGEST_ID = 10
"""Digits of a token id."""


@click.command()
@CONFIG
@click.option("--request", "request_file", type=click.File("rb"), help="A request body (JSON); - = standard input.")
@click.option("--tokens", default=None, help="Token ids instead, separated by commas or spaces.")
@click.option("--model", help="Only the pool of this model, default: the file's only one; it replaces --request's.")
@click.option("--admin", default=None, help="Admin address ip:port; default: admin.address of the configuration.")
@click.option("--cert", type=click.Path(exists=True), help="Client certificate (PEM), where admin.tls has a client_ca.")
@click.option("--key", type=click.Path(exists=True), help="Its key, when that is a file of its own.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as it came.")
def query(
    config_path: Path,
    request_file: Any,
    tokens: str | None,
    model: str | None,
    admin: str | None,
    cert: str | None,
    key: str | None,
    as_json: bool,
) -> None:
    """Show which instances hold how much of a prompt, on which tier; without a prompt: what they hold at all.

    Asks the admin port of a running `kvcar serve` (docs/admin-api.md). Exit status 1 when it does not answer or
    refuses, 2 when the question is wrong.
    """
    config = read_config(config_path)
    if request_file is not None and tokens is not None:
        fail("--request and --tokens are two questions: give one")
    if tokens is not None and not tokens.strip():
        fail("--tokens: no token ids are given; leave it away to see what every instance holds")
    body: dict[str, Any] = {"token_ids": _ids(tokens or "")}
    if request_file is not None:
        try:
            body = json.loads(request_file.read())
        except ValueError as error:
            fail(f"--request: no JSON ({error})")
        except RecursionError:
            fail("--request: nested too deeply")
        if not isinstance(body, dict):
            fail("--request: the body is no object")
    if model is not None:
        body["model"] = model
    bodies = [body]
    if len(config.pools) == 1 and "model" not in body:
        # The answer of one pool tells more than xLLM's of all: the disk tier. A running kvcar may have other pools,
        # then xLLM's it is; a request is nothing without a model.
        bodies = [{**body, "model": config.pools[0].models[0]}, *([body] if request_file is None else [])]
    tls = config.admin.tls
    try:
        shown = trust(tls.cert, cert, key) if tls else None
    except OSError as error:  # ssl.SSLError is one
        fail(f"admin.tls: the certificates cannot be used: {error}")
    answer = _ask(_url(admin or config.admin.address, "https" if tls else "http"), config.admin.token, bodies, shown)
    if as_json:
        click.echo(json.dumps(answer))
    else:
        _print(answer)


def _ids(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    wrong = next((word for word in words if not (word.isascii() and word.isdigit())), None)
    if wrong is not None:
        fail(f"--tokens: {wrong!r} is no token id")
    large = next((word for word in words if len(word) > LONGEST_ID), None)
    if large is not None:
        fail(f"--tokens: {large[:LONGEST_ID]}... is no token id: it has {len(large)} digits")
    return [int(word) for word in words]


def _url(address: str, scheme: str) -> str:
    address = address.removeprefix(f"{scheme}://").rstrip("/")  # as `kvcar doctor --admin` takes it
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or len(port) > 5 or not 0 < int(port) <= 65_535:
        fail(f"the admin address {address!r} has no fixed port: give --admin ip:port")
    # a wildcard is where a server listens, not where it is
    host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    return f"{scheme}://{host}:{port}/v1/internal/kv-cache/query"


def _ask(url: str, token: str | None, bodies: Sequence[dict[str, Any]], trust: ssl.SSLContext | None) -> dict[str, Any]:
    """The answer to the first body that is not refused as a bad one; ends the program when there is none."""
    headers = {"Content-Type": "application/json", **({"X-Internal-Token": token} if token else {})}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trust))
    found: Any = None
    for number, body in enumerate(bodies, 1):
        try:
            request = urllib.request.Request(url, json.dumps(body).encode(), headers)
            with opener.open(request, timeout=30) as answer:
                found = json.loads(answer.read())
            break
        except urllib.error.HTTPError as error:
            if error.code != 400 or number == len(bodies):
                fail(f"{url}: {error.code} {_reason(error.read())}", 1)
        except OSError as error:
            fail(f"{url}: {getattr(error, 'reason', error)}: does kvcar run?", 1)
        except http.client.InvalidURL:
            fail(f"{url}: is no address: give --admin ip:port")
        except (ValueError, http.client.HTTPException):
            fail(f"{url}: the answer is no JSON: is it kvcar's admin port?", 1)
    if not isinstance(found, dict) or not isinstance(found.get("matches"), list):
        fail(f"{url}: the answer has no matches: is it kvcar's admin port?", 1)
    return found


def _reason(data: bytes) -> str:
    try:
        return str(json.loads(data)["error"])
    except (ValueError, TypeError, KeyError):
        return ""


def _print(answer: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if "pool" in answer:
        size = answer["block_size"] or "unknown: no event yet"
        tokens = "" if answer["tokens"] is None else f"  tokens: {answer['tokens']}"
        adapter = f"  adapter: {answer['adapter']}" if answer["adapter"] else ""
        click.echo(f"pool: {answer['pool']}  model: {answer['model']}{adapter}{tokens}  block size: {size}")
        if answer["reason"]:
            click.echo(f"such a request passes unscored: {answer['reason']} {answer['detail']} (docs/unscored.md)")
        if answer["reads_cache"] is False:
            click.echo("the engine does not read its prefix cache for this request: no hit counts")
    table = Table(box=None, pad_edge=False)
    more = any("disk_blocks" in row for row in answer["matches"])
    table.add_column("instance")
    for name in ("rank", "hit tokens", "device", "host", *(["disk"] if more else []), "holds blocks", "sequence"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for row in sorted(answer["matches"], key=lambda row: -row["reusable_prefix_tokens"]):
        hits = [row["device_hit_tokens"], row["host_only_hit_tokens"]]
        held = [row["device_blocks"], row["host_blocks"]]
        if more:
            hits.append(row["disk_only_hit_tokens"])
            held.append(row["disk_blocks"])
        state = "synchronized" if row["synchronized"] else "not synchronized"
        cells = [
            row["instance_name"], row["dp_rank"], sum(hits), *hits, "+".join(map(str, held)),
            "-" if row["sequence"] is None else row["sequence"], f"{state}: {row['error']}" if row["error"] else state,
        ]  # fmt: skip
        table.add_row(*(Text(str(cell)) for cell in cells))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    if not answer["matches"]:
        click.echo("no instance with an events endpoint")
