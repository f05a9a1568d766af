"""`kvcar record` in front of an emulated engine: the capture it makes is verified with every request equal."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from examples.emulator.process import EmulatorProcess
from examples.local.processes import free_port
from extproc.cli import main
from kvindex import capture

pytestmark = pytest.mark.real
WAIT = 20.0
SYSTEM = "You answer questions about the railways of a small country, briefly and with the name of the line. " * 2


class Recorder:
    """The real command as a child process."""

    def __init__(self, engine: EmulatorProcess, output: Path, *options: str) -> None:
        self.output = output
        command = [sys.executable, "-m", "extproc", "record", str(output), "--engine", engine.url]
        command += ["--events", engine.events_endpoint, "--settle-ms", "60", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        found = re.search(r"http://\S+:\d+", self.process.stdout.readline())
        if not found:
            raise AssertionError(self.process.communicate(timeout=WAIT)[1])
        self.url = found[0]

    def send(self, path: str, body: object, **headers: str) -> bytes:
        data = json.dumps(body).encode() if body is not None else b""
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json", **headers})
        with urllib.request.urlopen(request, timeout=WAIT) as answer:
            result: bytes = answer.read()
        return result

    def chat(self, *turns: str, **extra: Any) -> bytes:
        roles = ("user", "assistant")
        messages = [{"role": "system", "content": SYSTEM}]
        messages += [{"role": roles[number % 2], "content": turn} for number, turn in enumerate(turns)]
        return self.send("/v1/chat/completions", {"model": "demo", "messages": messages, "max_tokens": 24, **extra})

    def end(self, code: int = 0) -> str:
        """Ctrl-C; the last words."""
        self.process.send_signal(signal.SIGINT)
        out, err = self.process.communicate(timeout=WAIT)
        assert self.process.returncode == code, err
        return out


@contextmanager
def recorder(engine: EmulatorProcess, output: Path, *options: str) -> Iterator[Recorder]:
    made = Recorder(engine, output, *options)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.process.kill()
        made.process.communicate()


def records(path: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in map(json.loads, path.read_text().splitlines()) if row["kind"] == kind]


@pytest.fixture(scope="module")
def engine() -> Iterator[EmulatorProcess]:
    with EmulatorProcess(name="a", block_size=16, blocks=256, topic="kv-events", decode_rate=2000) as process:
        yield process


def test_recorded_chats_verify_as_equal(engine: EmulatorProcess, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    note = "serve demo --lora-modules 'ada=/x y'"
    with recorder(engine, path, "--note", note) as proxy:
        answer = json.loads(proxy.chat("Where does line 3 end?"))
        text = answer["choices"][0]["message"]["content"]
        assert answer["prompt_token_ids"]
        proxy.chat("Where does line 3 end?", text, "And line 4?")
        proxy.chat("Where does line 3 end?", cache_salt="tenant")
        streamed = proxy.chat(
            "Where does line 3 end?", text, "And 5?", stream=True, stream_options={"include_usage": True}
        )
        assert streamed.rstrip().endswith(b"data: [DONE]")
        proxy.send("/v1/completions", {"model": "demo", "prompt": list(range(100, 180)), "max_tokens": 4})
        again = {"model": "demo", "prompt": list(range(100, 190)), "max_tokens": 4}
        proxy.send("/v1/completions", again, Authorization="Bearer s")
        proxy.send("/reset_prefix_cache", None)
        proxy.chat("Where does line 3 end?")
        with urllib.request.urlopen(proxy.url + "/v1/models", timeout=WAIT) as models:
            assert json.loads(models.read())["data"][0]["id"] == "demo"
        with pytest.raises(urllib.error.HTTPError, match="400"):
            proxy.send("/v1/completions", {"model": "demo"})
        with pytest.raises(urllib.error.HTTPError, match="400"):
            proxy.send("/v1/completions", ["no", "object"])
        words = proxy.end()
    report = capture.verify(path)
    assert [(row.status, row.predicted) for row in report.rows] == [("equal", row.engine) for row in report.rows]
    cached = [row.engine for row in report.rows]
    assert len(cached) == 7
    assert [bool(one) for one in cached] == [False, True, False, True, False, True, False]
    assert not report.problems
    assert "10 requests" in words
    assert "lost" not in words
    (meta,) = records(path, "meta")
    assert (meta["args"], meta["block_size"]) == (["serve", "demo", "--lora-modules", "ada=/x y"], 16)
    assert meta["vllm"]["version"].startswith("0.32")
    rows = records(path, "request")
    assert all(row["start"] <= row["t"] for row in rows)
    assert [row["status"] for row in rows] == [200] * 8 + [400] * 2
    assert rows[-1]["body"] is None
    assert rows[3]["output_token_ids"]
    assert "Bearer" not in path.read_text()
    result = CliRunner().invoke(main, ["verify", "--json", str(path)])
    assert result.exit_code == 0
    assert json.loads(result.output)["captures"][0]["equal"] == 7


def test_history_makes_a_running_engine_whole(engine: EmulatorProcess, tmp_path: Path) -> None:
    prompt = list(range(500, 600))
    engine.call("/v1/completions", {"prompt": prompt, "max_tokens": 1})
    for options, status in (((), "explained"), (("--replay", str(engine.replay_endpoint)), "equal")):
        path = tmp_path / f"{status}.jsonl"
        with recorder(engine, path, *options) as proxy:
            proxy.send("/v1/completions", {"model": "demo", "prompt": [*prompt, 1, 2, 3], "max_tokens": 1})
            proxy.end()
        (row,) = capture.verify(path).rows
        assert row.status == status, row
        assert row.engine == 96
        sequences = [int(live["frames"][1], 16) for live in records(path, "live")]
        assert sequences == list(range(sequences[0], sequences[0] + len(sequences))) if sequences else not options


def test_two_ranks_and_requests_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "dp.jsonl"
    with (
        EmulatorProcess(name="d", block_size=16, blocks=256, dp=2, decode_rate=500) as engine,
        recorder(engine, path, "--ranks", "2") as proxy,
    ):
        for rank in (0, 1, 0, 1):
            body = {"model": "demo", "prompt": list(range(40 + rank, 140)), "max_tokens": 20}
            proxy.send("/v1/completions", body, **{"X-data-parallel-rank": str(rank)})
        sent = [
            threading.Thread(target=proxy.chat, args=(f"Question {number}",), kwargs={"max_tokens": 40})
            for number in range(6)
        ]
        for thread in sent:
            thread.start()
        for thread in sent:
            thread.join()
        proxy.end()
    report = capture.verify(path)
    assert report.count("different") == 0, report.rows
    assert [(row.status, row.dp_rank, row.engine) for row in report.rows[:4]] == [
        ("equal", 0, 0),
        ("equal", 1, 0),
        ("equal", 0, 96),
        ("equal", 1, 96),
    ]
    assert len({live["port"] for live in records(path, "live")}) == 2
    rows = records(path, "request")[4:]
    assert max(row["start"] for row in rows) < max(row["t"] for row in rows), "they were passed on side by side"


def test_a_full_file_and_a_lost_engine_end_cleanly(tmp_path: Path) -> None:
    path = tmp_path / "full.jsonl"
    with EmulatorProcess(name="f", block_size=16, blocks=64) as engine:
        with recorder(engine, path, "--max-bytes", "2500") as proxy:
            proxy.send("/v1/completions", {"model": "demo", "prompt": list(range(300)), "max_tokens": 1})
            _, err = proxy.process.communicate(timeout=WAIT)
            assert proxy.process.returncode == 1
            assert "limit of 2500 bytes" in err
        assert path.stat().st_size <= 2500
        assert capture.verify(path).requests == 0
        with recorder(engine, path, "--force") as proxy:
            engine.kill()
            with pytest.raises(urllib.error.HTTPError, match="502"):
                proxy.chat("Anyone?")
            proxy.end()
        assert [row["status"] for row in records(path, "request")] == [502]


def test_mistakes_are_told(tmp_path: Path) -> None:
    there = tmp_path / "there.jsonl"
    there.write_text("mine\n")
    gone = f"127.0.0.1:{free_port()}"
    with EmulatorProcess(name="m", blocks=16) as engine:
        good = {"--engine": engine.url, "--events": engine.events_endpoint}
        rows = [
            (there, {}, 2, "--force"),
            (tmp_path / "a", {"--events": "tcp://*:1"}, 2, "tcp://"),
            (tmp_path / "b", {"--listen": "80"}, 2, "--listen"),
            (tmp_path / "c", {"--engine": f"http://{gone}"}, 1, "does not answer"),
            (tmp_path / "d", {"--listen": engine.address}, 1, "address already in use"),
            (tmp_path / "none" / "e", {}, 1, "No such file"),
        ]
        for path, changes, code, words in rows:
            flags = [part for pair in (good | changes).items() for part in pair]
            result = CliRunner().invoke(main, ["record", str(path), *flags])
            assert result.exit_code == code, (path, result.output)
            assert words in result.output
    assert there.read_text() == "mine\n"
    assert [path.name for path in tmp_path.iterdir()] == ["there.jsonl"]
