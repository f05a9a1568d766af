"""What the commands share: the configuration option, reading it, and how a command fails."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from extproc.config import Config

CONFIG = click.option(
    "-c", "--config", "config_path", required=True, type=click.Path(path_type=Path), help="Configuration file (YAML)."
)


def fail(message: str, code: int = 2) -> NoReturn:
    """One clear message on stderr, and an exit status that scripts can tell: 2 = your input, 1 = something else."""
    for line in message.splitlines():
        click.echo(f"kvcar: {line}", err=True)
    raise SystemExit(code)


def read_config(path: Path) -> Config:
    """The configuration, or `fail`."""
    from extproc import config

    try:
        return config.load(path)
    except config.ConfigError as error:
        fail(str(error))
