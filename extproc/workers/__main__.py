"""One worker as a process, started by the supervisor: `python -m extproc.workers`, never by hand."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from extproc import assembly
from extproc.commands.common import fail, read_config
from extproc.config import ConfigError
from extproc.logs import set_up_logs
from extproc.server import ServerError
from extproc.workers import worker
from extproc.workers.place import Place
from kvindex.errors import ConfigurationError


def main() -> None:
    options = argparse.ArgumentParser(prog="kvcar worker")
    options.add_argument("--config", type=Path, required=True)
    options.add_argument("--number", type=int, required=True)
    options.add_argument("--count", type=int, required=True)
    options.add_argument("--address", required=True)
    options.add_argument("--directory", type=Path, required=True)
    given = options.parse_args()
    config = read_config(given.config)
    set_up_logs(config.log.level, config.log.format)
    worker.name_logs(given.number)

    def announce(addresses: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(addresses) + "\n")
        sys.stdout.flush()

    try:
        assembly.check_files(config, str(given.config))
        place = Place(given.number, given.count, given.address, given.directory)
        worker.run(config, given.config, place, announce)
    except (ConfigError, ConfigurationError) as error:
        fail(str(error))
    except (OSError, ServerError) as error:
        fail(str(error), 1)


if __name__ == "__main__":
    main()
