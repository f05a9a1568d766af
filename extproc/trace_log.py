"""kvcar's own decision log: a trace that `kvcar simulate` replays. Off unless `trace.path` is configured.

One JSON line a scored request, in the Mooncake form and with what was decided:

    {"timestamp": ms since the log began, "input_length", "output_length": 0 when not observed, "hash_ids": one int a
     whole block, "block_size", "instance", "hit_length", "cached_length": the engine's own count or null}

`hash_ids` are the first 8 bytes of content keys: no text and no tokens, but equal prefixes have equal ids, so keep the
file as you would keep a log of who asked what when.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

log = logging.getLogger(__name__)


class TraceLog:
    """Written by a thread of its own; the request path only puts a record into a queue.

    max_bytes  the file is closed when it has grown to this; what comes later is not logged
    waiting    records that may wait for the disk; more are dropped and counted

    Raises OSError from the constructor when the file cannot be opened.
    """

    def __init__(self, path: Path, *, max_bytes: int = 1 << 30, waiting: int = 10_000) -> None:
        self._file = path.open("ab")
        self._room = max_bytes - self._file.tell()
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(waiting)
        self.dropped = 0
        self._thread = threading.Thread(target=self._write, name="kvcar-trace", daemon=True)
        self._thread.start()

    def add(
        self,
        seconds: float,
        keys: Sequence[bytes],
        *,
        tokens: int,
        block_size: int,
        instance: str,
        hit: int,
        cached: int | None,
        output: int = 0,
    ) -> None:
        """One finished request, `seconds` after the log began. Never blocks."""
        record = {
            "timestamp": round(seconds * 1000),
            "input_length": tokens,
            "output_length": output,
            "hash_ids": [int.from_bytes(key[:8], "little") for key in keys],
            "block_size": block_size,
            "instance": instance,
            "hit_length": hit,
            "cached_length": cached,
        }
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Writes what waits, then ends the thread."""
        self._queue.put(None)
        self._thread.join(5.0)

    def _write(self) -> None:
        with self._file as file:
            while True:
                record = self._queue.get()
                if record is None:
                    return
                line = orjson.dumps(record) + b"\n"
                self._room -= len(line)
                if self._room < 0:
                    log.warning("the trace %s has reached its bound: later requests are not logged", file.name)
                    break
                try:
                    file.write(line)
                    if self._queue.empty():
                        file.flush()
                except OSError as error:
                    log.error("the trace %s cannot be written, later requests are not logged: %s", file.name, error)
                    break
        while self._queue.get() is not None:
            self.dropped += 1
