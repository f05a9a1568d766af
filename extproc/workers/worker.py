"""One worker: a whole kvcar whose admin port is a socket of the supervisor's, and that shares what it has in flight."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from extproc.app import App, run_in_loop
from extproc.config import Config
from extproc.reload import read
from extproc.workers.place import Place, share_of
from extproc.workers.share import Sharing
from extproc.workers.siblings import Siblings

log = logging.getLogger(__name__)


def run(config: Config, path: Path, place: Place, announce: Callable[[dict[str, Any]], None]) -> None:
    """Until SIGTERM, or the supervisor is gone. Raises as `extproc.app.run`."""
    run_in_loop(_serve(config, path, place, announce))


async def _serve(config: Config, path: Path, place: Place, announce: Callable[[dict[str, Any]], None]) -> None:
    app = App(
        share_of(config, place),
        path,
        reread=lambda file: share_of(read(file), place),
        admin_socket=place.admin_socket,
    )
    app.replicas = Siblings(place, token=config.admin.token, peers=config.replicas)
    sharing = asyncio.create_task(Sharing(app.pools, place).run())
    loop = asyncio.get_running_loop()

    # The supervisor holds the other end and never writes: readable means that it is gone.
    def orphaned() -> None:
        loop.remove_reader(sys.stdin.fileno())
        app.request_stop()

    loop.add_reader(sys.stdin.fileno(), orphaned)
    try:
        addresses = await app.start()
        log.info("worker %d of %d serves ext_proc on %s", place.number, place.count, addresses["ext_proc"])
        announce(addresses)
        await app.wait()
    finally:
        loop.remove_reader(sys.stdin.fileno())
        await app.stop()
        sharing.cancel()


def name_logs(number: int) -> None:
    """Every line of this process says which worker it is of: `extproc.app[1]`."""
    make = logging.getLogRecordFactory()

    def named(*arguments: Any, **more: Any) -> logging.LogRecord:
        record = make(*arguments, **more)
        record.name = f"{record.name}[{number}]"
        return record

    logging.setLogRecordFactory(named)
