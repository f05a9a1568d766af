"""`kvcar conductor`: the KV directory behind the HTTP API of MindIE Motor's kv-conductor or Mooncake's conductor."""

from __future__ import annotations

import json
import logging
import sys

import click

from extproc.commands.common import fail
from kvindex.errors import ConfigurationError
from kvindex.networks import is_local, parse_network


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 = all.")
@click.option("--port", default=13333, show_default=True, type=click.IntRange(0, 65535), help="0 = any free port.")
@click.option(
    "--form",
    type=click.Choice(["motor", "mooncake"]),
    default="motor",
    show_default=True,
    help="Whose status codes and answers: they differ.",
)
@click.option("--block-size", type=click.IntRange(1, 65536), help="Tokens a block; default: what registrations say.")
@click.option("--model", "models", multiple=True, help="Take registrations of this model only; repeat for several.")
@click.option(
    "--hash-seed",
    default=1024,
    show_default=True,
    type=click.IntRange(0, 2**64 - 1),
    help="Seed of the index's own keys.",
)
@click.option("--token", envvar="KVCAR_TOKEN", help="Ask for it as X-Internal-Token or Bearer; also $KVCAR_TOKEN.")
@click.option(
    "--allow-unauthenticated", is_flag=True, help="Listen on an address that is not loopback without a --token."
)
@click.option(
    "--network",
    "networks",
    multiple=True,
    metavar="CIDR",
    help="Take registrations of addresses in it only; repeat for several. Default: any but link-local ones, cloud"
    " metadata services and, unless --host is one, loopback.",
)
@click.option(
    "--expire-after",
    type=click.FloatRange(min=1),
    metavar="SECONDS",
    help="Drop an engine that does not register again for so long; default: never.",
)
@click.option(
    "--max-streams", default=256, show_default=True, type=click.IntRange(1, 4096), help="Ranks followed of one model."
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="What is logged, to stderr.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Lines for people or for collectors.",
)
@click.option("--print-port", is_flag=True, help="Print one JSON line with the address on stdout when ready.")
def conductor(
    host: str, port: int, form: str, block_size: int | None, models: tuple[str, ...], hash_seed: int,
    token: str | None, allow_unauthenticated: bool, networks: tuple[str, ...], expire_after: float | None,
    max_streams: int, log_level: str, log_format: str, print_port: bool,
) -> None:  # fmt: skip
    """Run the KV directory alone, behind the HTTP API of a conductor.

    A drop-in for kv-conductor of MindIE Motor (and, with --form mooncake, for Mooncake's): engines register, their
    events are followed, /query says who holds a prompt. No gateway, no tokenizer, no configuration file. Runs until
    SIGTERM or SIGINT. See docs/conductor.md.
    """
    from extproc import conductor as server
    from extproc.logs import set_up_logs

    set_up_logs(log_level, log_format)
    if token is not None and len(token) < 8:
        fail("--token: at least 8 letters")
    if token is None and not allow_unauthenticated and not is_local(host):
        fail(
            f"--host {host} is reachable from outside, and whoever reaches it could register engines: set --token,"
            " or --allow-unauthenticated if the network protects it"
        )
    try:
        for one in networks:
            parse_network(one)
    except ConfigurationError as error:
        fail(f"--network: {error}")
    options = server.ConductorOptions(
        host, port, block_size, models, hash_seed, token, form, expire_after, max_streams, networks
    )

    def announce(bound: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        logging.getLogger(__name__).info("conductor (%s) listens on http://%s:%d", form, shown, bound)
        if print_port:
            click.echo(json.dumps({"ready": True, "address": f"{shown}:{bound}"}))
            sys.stdout.flush()

    try:
        server.run(options, announce)
    except OSError as error:
        fail(str(error), 1)
