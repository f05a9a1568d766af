"""kvcar's own decision log: a trace that `kvcar simulate` replays. Off unless `trace.path` is configured.

One JSON line a scored request, in the Mooncake form and with what was decided:

    {"timestamp": ms since the log began, "input_length", "output_length": 0 when not observed, "hash_ids": one int a
     whole block, "block_size", "instance", "hit_length", "cached_length": the engine's own count or null}

`hash_ids` are the first 8 bytes of content keys: no text and no tokens, but equal prefixes have equal ids, so keep the
file as you would keep a log of who asked what when.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

log = logging.getLogger(__name__)


class TraceLog:
    """Written by a thread of its own; the request path only puts a record into a queue.

    max_bytes    the log ends when it has grown to this; what comes later is not logged
    waiting      records that may wait for the disk; more are dropped and counted
    retry_after  seconds without a try after the disk has refused a line; what comes meanwhile is dropped and counted

    `error` says why nothing is written now, None = all is well. The file holds whole lines only, whatever the
    disk does.
    Raises OSError from the constructor when the file cannot be opened.
    """

    def __init__(
        self, path: Path, *, max_bytes: int = 1 << 30, waiting: int = 10_000, retry_after: float = 5.0
    ) -> None:
        self.path = path
        self.dropped = 0
        self.error: str | None = None
        self._file = path.open("ab", buffering=0)
        self._size = self._file.seek(0, os.SEEK_END)
        self._max_bytes, self._retry_after = max_bytes, retry_after
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(waiting)
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
        """Writes what waits, then ends the thread. At most 10 s, however slow the disk is."""
        with contextlib.suppress(queue.Full):  # it hangs: the thread is a daemon
            self._queue.put(None, timeout=5.0)
            self._thread.join(5.0)

    def _write(self) -> None:
        rest_until = 0.0
        with self._file:
            while (record := self._queue.get()) is not None:
                line = orjson.dumps(record) + b"\n"
                if self._size + len(line) > self._max_bytes:
                    if self.error is None:
                        self.error = f"it has reached its bound of {self._max_bytes} bytes"
                        log.warning("the trace %s ends: %s", self.path, self.error)
                    self.dropped += 1
                elif time.monotonic() < rest_until:
                    self.dropped += 1
                else:
                    rest_until = self._append(line)

    def _append(self, line: bytes) -> float:
        """Returns the time before which it is of no use to try again, 0 = written."""
        try:
            # A disk that fills up takes the beginning of a line first.
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
            reason = error.strerror or str(error)
            if reason != self.error:
                log.error("the trace %s cannot be written: %s; trying again", self.path, reason)
            self.error = reason
            self.dropped += 1
            return time.monotonic() + self._retry_after
        self._size += len(line)
        if self.error is not None:
            log.warning("the trace %s is written again; %d requests are not in it", self.path, self.dropped)
            self.error = None
        return 0.0
