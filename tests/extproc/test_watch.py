"""What the log says of streams: one line a change, none while nothing changes."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from extproc.watch import StreamLog
from kvindex.directory import StreamReport
from kvindex.link import LinkStatus


def report(connected: bool, synchronized: bool, error: str | None = None) -> StreamReport:
    return StreamReport(
        instance="a", dp_rank=0, incarnation="", endpoint="tcp://e:1", replay=None, dialect="vllm", state="live",
        synchronized=synchronized, complete=True, sequence=7, error=error, link=LinkStatus(connected=connected),
    )  # fmt: skip


def test_one_line_a_change(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lines = StreamLog()
    for step, said in (
        (report(False, False), ""),
        (report(True, False), "connected to tcp://e:1"),
        (report(True, False), ""),
        (report(True, True), "synchronized at sequence 7, complete"),
        (report(True, True), ""),
        (report(True, False, "gap"), "not synchronized, its hits do not count: gap"),
        (report(False, False, "refused"), "lost tcp://e:1, its hits do not count: refused"),
        (report(True, True), "synchronized"),
    ):
        caplog.clear()
        lines.look([("p", step)])
        assert said in caplog.text
        assert bool(caplog.text) == bool(said)
    caplog.clear()
    lines.look([])
    assert "a/0: no longer followed" in caplog.text


def test_a_stream_never_reached_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lines = StreamLog()
    waiting, tried = report(False, False), report(False, False, "cannot connect to tcp://e:1")
    tried = replace(tried, link=LinkStatus(connect_retries=1))
    again = replace(tried, link=LinkStatus(connect_retries=9))
    up = replace(report(True, False), link=LinkStatus(connected=True, connections=1, connect_retries=9))
    down = replace(tried, link=LinkStatus(connections=1, disconnections=1, connect_retries=10))
    for step, said in (
        (waiting, ""),
        (tried, "a/0: no connection so far, its hits do not count: cannot connect to tcp://e:1"),
        (again, ""),
        (up, "a/0: connected to tcp://e:1"),
        (down, "a/0: lost tcp://e:1"),
    ):
        caplog.clear()
        lines.look([("p", step)])
        assert said in caplog.text
        assert bool(caplog.text) == bool(said)
