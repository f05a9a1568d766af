"""Recording: what an engine publishes and answers, written down as a capture (format: capture.py).

    EventTransport --frames--> rank: history first, then live --+
                                                                +--> one file, a line each, in order of arrival
    whoever sends the requests --request(record)----------------+

Rule: frames are written as they came, nothing is left out or repaired; `capture.verify` judges them. With a replay
endpoint the engine's history is written in front of the live frames, so that a capture of a running engine is whole.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, cast

from kvindex.dialects import DIALECTS, DialectOptions
from kvindex.endpoints import parse_host_port
from kvindex.errors import ConfigurationError, DecodeError
from kvindex.fleet import StreamEndpoint
from kvindex.link import LinkStatus
from kvindex.sync import Action, CancelReplay, StartReplay, StreamSync
from kvindex.transport import EventTransport, TransportOptions

HISTORY_TIMEOUT = 5.0
"""Seconds without a message that end the wait for the engine's history."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What is in the file so far.

    live      messages, `history` of them from the replay endpoint
    missed    sequence numbers that were left out: those messages were lost on the way
    restarts  times the sequence went back
    """

    live: int = 0
    history: int = 0
    requests: int = 0
    missed: int = 0
    restarts: int = 0
    size: int = 0


class RankRecorder:
    """Stands where the transport has a StreamSync: writes the frames down instead of reading them. Sans-IO.

    With `history` it asks for everything from sequence 0 once the subscription is up, and keeps live frames back (at
    most `max_held` bytes) until that has come.
    """

    def __init__(
        self, write: Callable[[list[bytes], bool], None], *, history: bool, topic: bytes, max_held: int = 64 << 20
    ) -> None:
        self.next_timer: float | None = None
        self.ready = not history
        self._write = write
        self._split = DIALECTS["auto"](DialectOptions()).split_reply
        self._topic = topic
        self._max_held = max_held
        self._held: list[list[bytes]] = []
        self._held_bytes = 0
        self._asked = False
        self._newest = -1

    def connected(self, _now: float) -> list[Action]:
        if self.ready or self._asked:
            return []
        self._asked = True
        return [StartReplay(1, 0)]

    reconnected = connected

    def disconnected(self, _now: float) -> list[Action]:
        return []

    def resync(self, _now: float) -> list[Action]:
        return []

    def live(self, frames: list[bytes], _now: float) -> list[Action]:
        if self.ready:
            self._write(frames, False)
            return []
        if len(frames) == 3:
            self._topic = frames[0]
        self._held.append(frames)
        self._held_bytes += sum(map(len, frames))
        return self._release() if self._held_bytes > self._max_held else []

    def attempt_started(self, _attempt: int, now: float) -> list[Action]:
        self.next_timer = now + HISTORY_TIMEOUT
        return []

    def reply(self, _attempt: int, frames: list[bytes], now: float) -> list[Action]:
        if self.ready:
            return []
        try:
            found = self._split(frames)
        except DecodeError:
            return []
        if found is None:
            return self._release()
        self.next_timer = now + HISTORY_TIMEOUT
        sequence, payload = found
        # engines before vLLM 0.26 leave the topic out of a reply
        topic = frames[-3] if len(frames) == 4 else self._topic
        self._newest = max(self._newest, sequence)
        self._write([topic, sequence.to_bytes(8, "big"), payload], True)
        return []

    def attempt_failed(self, _attempt: int, _reason: str, _now: float) -> list[Action]:
        return self._release()

    def timer(self, _now: float) -> list[Action]:
        return self._release()

    def retire(self) -> None:
        self._release()

    def _release(self) -> list[Action]:
        """The history is there, or will not come: go on with the live frames that it did not bring."""
        self.next_timer = None
        if self.ready:
            return []
        self.ready = True
        held, self._held = self._held, []
        for frames in held:
            if len(frames) != 3 or int.from_bytes(frames[1], "big") > self._newest:
                self._write(frames, False)
        return [CancelReplay(1)]


class _Rank:
    """What the transport drives for one rank."""

    def __init__(self, recording: Recording, endpoint: StreamEndpoint) -> None:
        # every topic is recorded: which one is the engine's shows in the file
        self.endpoint = replace(endpoint, topic="")
        self.name = endpoint.events
        self.link = LinkStatus()
        self.last: int | None = None
        self.port = port_of(endpoint)
        self.recorder = RankRecorder(
            lambda frames, history: recording._frames(self, frames, history),
            history=endpoint.replay is not None,
            topic=endpoint.topic_bytes or b"",
        )

    def open(self) -> StreamSync:
        return cast(StreamSync, self.recorder)

    def close(self) -> None:
        self.recorder.retire()


class Recording:
    """A capture being written; a context manager. `request` may be called from any thread.

    endpoints  one a rank
    meta       further keys of the first line
    max_bytes  the file does not grow beyond it: then `full` is set and the rest is left out
    error      why nothing is written any more: the file is full, or the disk

    Raises ConfigurationError for an endpoint, OSError (FileExistsError without `overwrite`) for the file.
    """

    def __init__(
        self,
        path: str | Path,
        endpoints: Sequence[StreamEndpoint],
        *,
        meta: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        max_bytes: int = 1 << 30,
        options: TransportOptions | None = None,
    ) -> None:
        for endpoint in endpoints:
            endpoint.check()
        if len({port_of(endpoint) for endpoint in endpoints}) != len(endpoints):
            raise ConfigurationError("two ranks have the same events port: the port tells them apart in the file")
        self.error: str | None = None
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._counts = Counts()
        self._ranks = [_Rank(self, endpoint) for endpoint in endpoints]
        self._transport = EventTransport(options or TransportOptions(reconnect_initial=0.1, reconnect_max=5.0))
        self._file = open(path, "w" if overwrite else "x", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._write({"kind": "meta", "args": [], "events_port": self._ranks[0].port, **(meta or {})})

    @property
    def counts(self) -> Counts:
        return self._counts

    @property
    def ready(self) -> bool:
        """Every rank's connection is up and its history, if asked for, is written."""
        return all(rank.link.connected and rank.recorder.ready for rank in self._ranks)

    @property
    def problems(self) -> list[str]:
        """Of each rank that is not connected: why."""
        return [
            rank.link.error or f"no connection to {rank.name} yet" for rank in self._ranks if not rank.link.connected
        ]

    def request(self, record: Mapping[str, Any]) -> None:
        """A request that was answered (keys: capture.py). To be called once its events have been published."""
        if self._write({"kind": "request", **record}):
            with self._lock:
                self._counts = replace(self._counts, requests=self._counts.requests + 1)

    def start(self) -> Self:
        self._transport.start()
        for rank in self._ranks:
            self._transport.follow(rank)
        return self

    def stop(self) -> None:
        """What has been received is written, then the file is closed. Idempotent."""
        self._transport.flush()
        self._transport.stop()
        with self._lock:
            self._file.close()

    def discard(self) -> None:
        """The recording did not come to anything: take the file away."""
        with self._lock:
            self._file.close()
        Path(self._file.name).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- the transport's thread

    def _frames(self, rank: _Rank, frames: list[bytes], history: bool) -> None:
        row: dict[str, Any] = {"kind": "live", "t": now(), "port": rank.port}
        if history:
            row["history"] = True
        row["frames"] = [frame.hex() for frame in frames]
        if not self._write(row):
            return
        missed = restarts = 0
        if len(frames) == 3 and len(frames[1]) == 8:
            sequence = int.from_bytes(frames[1], "big")
            if rank.last is not None:
                missed, restarts = max(0, sequence - rank.last - 1), int(sequence <= rank.last)
            rank.last = sequence
        with self._lock:
            counts = self._counts
            self._counts = replace(
                counts,
                live=counts.live + 1,
                history=counts.history + history,
                missed=counts.missed + missed,
                restarts=counts.restarts + restarts,
            )

    def _write(self, record: Mapping[str, Any]) -> bool:
        line = json.dumps(record, separators=(",", ":"), default=str) + "\n"  # ASCII: a character is a byte
        with self._lock:
            if self.error is not None or self._file.closed:
                return False
            size = self._counts.size + len(line)
            if size > self._max_bytes:
                self.error = f"the capture has reached its limit of {self._max_bytes} bytes"
                return False
            try:
                self._file.write(line)
            except OSError as error:
                self.error = f"cannot write the capture: {error.strerror or error}"
                return False
            self._counts = replace(self._counts, size=size)
            return True


def now() -> float:
    """Seconds since the epoch, to the millisecond, as captures have them."""
    return round(time.time(), 3)


def port_of(endpoint: StreamEndpoint) -> int:
    """What tells ranks apart in the file: the port, or the rank where there is none (ipc)."""
    scheme, _, rest = endpoint.events.partition("://")
    return parse_host_port(rest, what="events endpoint").port if scheme == "tcp" else endpoint.dp_rank
