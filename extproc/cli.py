"""The `kvcar` command. Every sub-command imports what it needs itself, so that `--help` answers at once."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import click

from extproc import __version__
from extproc.commands.common import CONFIG, fail, read_config
from extproc.commands.conductor import conductor
from extproc.commands.doctor import doctor
from extproc.commands.query import query
from extproc.commands.record import record
from extproc.commands.simulate import simulate
from extproc.commands.tokens import tokens
from extproc.commands.verify import verify
from extproc.logs import set_up_logs


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvcar")
def main() -> None:
    """KV-cache-aware routing for Envoy.

    An ext_proc server that sends each LLM request to the engine that already holds its prefix.
    Start with `kvcar example-config`, then `kvcar check`, `kvcar envoy-config` and `kvcar serve`.
    """


@main.command()
@CONFIG
@click.option("--print-ports", is_flag=True, help="Print one JSON line with the bound addresses on stdout when ready.")
@click.option(
    "--workers", type=click.IntRange(1, 64), help="Processes, each with a port of its own; default: listen.workers."
)
def serve(config_path: Path, print_ports: bool, workers: int | None) -> None:
    """Run the ext_proc server until SIGTERM or SIGINT (then it drains)."""
    from extproc import assembly
    from extproc.config import ConfigError
    from extproc.server import ServerError
    from extproc.workers.place import StartFailed
    from kvindex.errors import ConfigurationError

    config = read_config(config_path)
    written = config.listen.workers
    if workers is not None:
        config = config.model_copy(update={"listen": config.listen.model_copy(update={"workers": workers})})
    set_up_logs(config.log.level, config.log.format)
    if workers not in (None, written):
        logging.getLogger(__name__).warning(
            "--workers %d, but listen.workers is %d: `kvcar envoy-config` goes by the file, set it there too",
            workers, written,
        )  # fmt: skip

    def announce(addresses: dict[str, Any]) -> None:
        if print_ports:
            click.echo(json.dumps({"ready": True, **addresses}))
            sys.stdout.flush()

    try:
        assembly.check_files(config, str(config_path))
        assembly.instances_of(config, str(config_path))
        if config.listen.workers == 1:
            from extproc import app

            app.run(config, config_path, announce=announce)
        else:
            from extproc.workers import supervisor

            supervisor.run(config, config_path, announce)
    except StartFailed as error:
        fail(str(error), error.status if error.status > 0 else 1)
    except (ConfigError, ConfigurationError) as error:
        fail(str(error))
    except (OSError, ServerError) as error:
        fail(str(error), 1)


@main.command()
@CONFIG
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def check(config_path: Path, as_json: bool) -> None:
    """Validate a configuration and print what would be watched. Exit status 2 when it cannot be used."""
    from extproc import assembly
    from extproc.config import ConfigError
    from extproc.workers.place import addresses

    config = read_config(config_path)
    try:
        assembly.check_files(config, str(config_path))
        instances = assembly.instances_of(config, str(config_path))
        listen = addresses(config)
    except ConfigError as error:
        fail(str(error))
    doubts = assembly.doubts(config, str(config_path))
    if as_json:
        click.echo(
            json.dumps(
                {
                    "warnings": doubts,
                    "pools": [pool.name for pool in config.pools],
                    "streams": [
                        {
                            "pool": one.pool,
                            "instance": one.name,
                            "dp_rank": stream.dp_rank,
                            "events": stream.events,
                            "replay": stream.replay,
                            "topic": stream.topic,
                            "dialect": stream.dialect,
                            "medium": stream.medium or None,
                        }
                        for one in instances
                        for stream in one.events
                    ],
                    "publishers": [
                        {"pool": pool.name, **publisher.model_dump()}
                        for pool in config.pools
                        for publisher in pool.publishers
                    ],
                }
            )
        )
        return
    click.echo(f"{config_path}: valid")
    for doubt in doubts:
        click.echo(f"warning: {doubt}")
    click.echo(f"ext_proc on {', '.join(listen)}, admin on {config.admin.address}")
    for pool in config.pools:
        mine = [one for one in instances if one.pool == pool.name]
        click.echo(
            f"\npool {pool.name}: models {', '.join(pool.models + pool.adapters)}; scorer {pool.scorer.name}; "
            f"block size {pool.block_size}; load {pool.load.source}; tokenizer {pool.tokenizer}"
        )
        for one in mine:
            click.echo(f"  {one.name}  {one.address}  role {one.role}")
            for stream in one.events:
                replay = (
                    f"replay {stream.replay}" if stream.replay else "no replay: older blocks stay unknown after a start"
                )
                if stream.pushed:
                    click.echo(f"    rank {stream.dp_rank}  events are pushed to the admin port")
                    continue
                if stream.medium:
                    replay = f"{stream.medium} of a store"
                click.echo(f"    rank {stream.dp_rank}  events {stream.events}  topic {stream.topic!r}  {replay}")
            if not one.events:
                click.echo("    no events endpoint: routed by load alone")
        for publisher in pool.publishers:
            members = ", ".join(publisher.members) or "all instances"
            click.echo(f"  publisher {publisher.name}  events {publisher.events}  {publisher.medium} of {members}")
        for source in pool.discovery:
            where = next((value for key in _WHERE if (value := getattr(source, key, None))), "")
            click.echo(f"  discovery {source.type} {where}".rstrip())
        if not mine:
            click.echo("  no static instances" if pool.discovery else "  no instances, and no discovery to find any")
    click.echo(f"\nNothing was contacted: `kvcar doctor -c {config_path}` does that.")


_WHERE = ("path", "name", "service", "selector")
"""The option of a discovery source that tells it apart."""


@main.command("envoy-config")
@CONFIG
@click.option("--pool", help="Which pool's instances Envoy gets; needed when several are configured.")
@click.option(
    "--part",
    type=click.Choice(["bootstrap", "fragment", "filter", "clusters", "routes", "listener"]),
    default="bootstrap",
    show_default=True,
    help="A complete configuration, all pieces for an existing Envoy, or one piece.",
)
@click.option("--listen", default="127.0.0.1:10000", show_default=True, help="Where clients connect.")
@click.option("--envoy-admin", default="127.0.0.1:9901", show_default=True, help="Envoy's admin address; 'none' = off.")
@click.option("--ext-proc", multiple=True, help="kvcar's address as Envoy reaches it; repeat for several replicas.")
@click.option(
    "--body-mode",
    type=click.Choice(["buffered", "full-duplex"]),
    default="buffered",
    show_default=True,
    help="How Envoy hands over bodies.",
)
@click.option(
    "--routing",
    type=click.Choice(["override-host", "original-dst", "stateful-session"]),
    default="override-host",
    show_default=True,
    help="How Envoy obeys the decision; docs/envoy.md says which when. original-dst and stateful-session need "
    "max_endpoints: 1 in the pool, the latter headers.stateful_session, too.",
)
@click.option(
    "--engine-protocol",
    type=click.Choice(["http1", "http2"]),
    default="http1",
    show_default=True,
    help="The engines' protocol; clients may use either.",
)
@click.option("--ext-proc-ca", metavar="PEM", help="TLS to kvcar: the CA that signed its certificate.")
@click.option("--ext-proc-cert", metavar="PEM", help="Mutual TLS: Envoy's own certificate ...")
@click.option("--ext-proc-key", metavar="PEM", help="... and its key.")
@click.option("--ext-proc-name", metavar="NAME", help="Name in kvcar's certificate, if not the host of its address.")
@click.option("--engines-file", help="Endpoints from this watched EDS file instead of the configured instances.")
@click.option("--fail-closed", is_flag=True, help="Answer 500 while kvcar is away, instead of balancing without it.")
def envoy_config(
    config_path: Path,
    pool: str | None,
    part: str,
    listen: str,
    envoy_admin: str,
    ext_proc: tuple[str, ...],
    body_mode: str,
    routing: str,
    engine_protocol: str,
    ext_proc_ca: str | None,
    ext_proc_cert: str | None,
    ext_proc_key: str | None,
    ext_proc_name: str | None,
    engines_file: str | None,
    fail_closed: bool,
) -> None:
    """Print the Envoy configuration that goes with a kvcar configuration, as YAML."""
    config = read_config(config_path)
    from extproc import envoy_config as envoy

    overrides: dict[str, Any] = {
        "listen": listen,
        "admin": None if envoy_admin == "none" else envoy_admin,
        "body_mode": envoy.BodyMode(body_mode),
        "routing": envoy.Routing(routing),
        "engine_protocol": envoy.Http(engine_protocol),
        "fail_open": not fail_closed,
        "engines_file": engines_file,
    }
    if ext_proc:
        overrides["ext_proc"] = ext_proc
    try:
        if ext_proc_ca is not None:
            overrides["ext_proc_tls"] = envoy.ClientTls(
                ca=ext_proc_ca, cert=ext_proc_cert, key=ext_proc_key, name=ext_proc_name
            )
        elif ext_proc_cert or ext_proc_key or ext_proc_name:
            raise ValueError("--ext-proc-ca is missing: the other --ext-proc options of TLS need it")
        text = envoy.render(envoy.options_for(config, pool=pool, **overrides), envoy.Part(part))
    except ValueError as error:
        fail(str(error))
    if ext_proc_ca is not None and config.listen.tls is None:
        click.echo(
            "warning: --ext-proc-ca, but listen.tls is not set: unless something in front of kvcar ends TLS, Envoy "
            "does not reach it and balances without it",
            err=True,
        )
    click.echo(text, nl=False)


@main.command("example-config")
def example_config() -> None:
    """Print a complete, commented configuration."""
    from importlib.resources import files

    click.echo(files("extproc").joinpath("example.yaml").read_text("utf-8"), nl=False)


for command in (verify, tokens, simulate, record, query, doctor, conductor):
    main.add_command(command)

if __name__ == "__main__":
    main(prog_name="kvcar")
