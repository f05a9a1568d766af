"""The trace log on disks that are full, fill up in the middle of a line, and have room again."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from extproc.trace_log import TraceLog
from tests.real.harness import wait_for


class Disk(io.BytesIO):
    """A file with room for so many bytes; what does not fit is written in part, or refused when nothing fits."""

    room = 1 << 30

    def write(self, data: Any) -> int:
        fits = min(len(data), self.room - len(self.getvalue()))
        if fits <= 0:
            raise OSError(28, "No space left on device")
        return super().write(data[:fits])

    def truncate(self, size: int | None = None) -> int:
        done = super().truncate(size)
        self.seek(0, io.SEEK_END)
        return done

    def close(self) -> None:
        """Stays readable for the test."""


def add(trace: TraceLog, number: int) -> None:
    trace.add(number, [b"k" * 16], tokens=5, block_size=4, instance="a", hit=0, cached=None)


def on(disk: Disk, path: Path, **options: Any) -> TraceLog:
    trace = TraceLog(path, **options)
    trace._file.close()
    trace._file = disk  # type: ignore[assignment]  # its thread has nothing to write yet
    return trace


def times(disk: Disk) -> list[int]:
    return [json.loads(line)["timestamp"] for line in disk.getvalue().splitlines()]


def test_goes_on_when_there_is_room_again_and_keeps_whole_lines(tmp_path: Path) -> None:
    disk = Disk()
    trace = on(disk, tmp_path / "trace.jsonl", retry_after=0.0)
    add(trace, 1)
    wait_for(lambda: times(disk) == [1000], "the first line")
    disk.room = len(disk.getvalue()) + 20  # the next line fits in part
    add(trace, 2)
    add(trace, 3)
    wait_for(lambda: trace.dropped == 2, "two lines lost")
    assert trace.error == "No space left on device"
    assert times(disk) == [1000]
    disk.room = 1 << 30
    add(trace, 4)
    trace.close()
    assert times(disk) == [1000, 4000]
    assert trace.error is None


def test_tells_once_and_rests_between_tries(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    disk.room = 0
    trace = on(disk, tmp_path / "trace.jsonl", retry_after=3600.0)
    for number in range(50):
        add(trace, number)
    trace.close()
    assert trace.dropped == 50
    assert [record.message for record in caplog.records if "cannot be written" in record.message] != []
    assert len(caplog.records) == 1


def test_bound_ends_the_log(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = TraceLog(path, max_bytes=400)
    for number in range(9):
        add(trace, number)
    trace.close()
    lines = path.read_text("utf-8").splitlines()
    assert 0 < len(lines) < 9
    assert trace.dropped == 9 - len(lines)
    assert trace.error is not None


def test_a_device_without_room(tmp_path: Path) -> None:
    trace = TraceLog(Path("/dev/full"))
    add(trace, 1)
    trace.close()
    assert (trace.dropped, trace.error) == (1, "No space left on device")
