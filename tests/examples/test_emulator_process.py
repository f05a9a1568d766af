"""The emulator as a real child process: ports, SSE, kill and restart on the same ports, freeze, and no leaked child."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from examples.emulator.process import ROOT, EmulatorProcess, StartFailed, start_all

DEADLINE = 20.0
BODY = {"model": "demo", "messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 6}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """The process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="module")
def engine() -> Iterator[EmulatorProcess]:
    with EmulatorProcess(name="a", blocks=128, topic="kv", decode_rate=2000) as process:
        yield process


def test_ready_line_and_answers(engine: EmulatorProcess) -> None:
    assert engine.running
    assert engine.address == f"127.0.0.1:{engine.http_port}"
    assert engine.events_endpoint.startswith("tcp://127.0.0.1:")
    assert engine.replay_endpoint
    assert (engine.block_size, engine.ready["topic"], engine.ready["wire"]) == (16, "kv", "vllm-0.32")
    assert engine.call("/health") == ""
    answer = engine.call("/v1/chat/completions", BODY)
    assert answer["usage"]["completion_tokens"] == 6
    assert engine.state()["name"] == "a"
    tokens = engine.call("/tokenize", {"messages": BODY["messages"]})["tokens"]
    assert engine.lookup(tokens) == [{"rank": 0, "gpu_blocks": (len(tokens) - 1) // 16, "host_blocks": 0}]


def test_server_sent_events(engine: EmulatorProcess) -> None:
    data = json.dumps({**BODY, "stream": True, "stream_options": {"include_usage": True}}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(engine.url + "/v1/chat/completions", data, headers)
    with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-engine"] == "a"
        lines = [line.decode().strip() for line in answer if line.strip()]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert len(events) == 1 + 6 + 1
    assert events[-1]["usage"]["completion_tokens"] == 6


def test_replay_over_real_sockets(engine: EmulatorProcess) -> None:
    engine.call("/v1/completions", {"prompt": list(range(100, 140)), "max_tokens": 1})
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(str(engine.replay_endpoint))
        dealer.send_multipart([b"", bytes(8)])
        answer = []
        while not answer or answer[-1][-1] != b"":
            assert dealer.poll(int(DEADLINE * 1000))
            answer.append(dealer.recv_multipart())
    assert [frames[:2] for frames in answer[:-1]] == [[b"", b"kv"]] * (len(answer) - 1)
    assert [int.from_bytes(frames[2], "big") for frames in answer[:-1]] == list(range(len(answer) - 1))
    assert len(answer) == engine.state()["ranks"][0]["next_sequence"] + 1


def test_control_and_freeze(engine: EmulatorProcess) -> None:
    engine.control(fail_requests=1)
    with pytest.raises(urllib.error.HTTPError, match="500"):
        engine.call("/v1/chat/completions", BODY)
    engine.freeze()
    try:
        with pytest.raises(TimeoutError):
            engine.call("/health", timeout=0.2)
    finally:
        engine.cont()
    assert engine.call("/health") == ""


def test_kill_and_restart_on_the_same_ports() -> None:
    engine = EmulatorProcess(name="b", blocks=64, no_replay=True, lora=["x", "y"], fault=["delay_ms=1"])
    with engine:
        first = dict(engine.ready)
        assert first["replay_ports"] is None
        assert engine.replay_endpoint is None
        assert len(engine.call("/v1/models")["data"]) == 3
        engine.call("/v1/chat/completions", BODY)
        pid = engine.pid
        engine.kill()
        assert not engine.running
        assert not alive(pid)
        with pytest.raises(OSError):
            engine.call("/health", timeout=1)
        engine.start()
        assert {**engine.ready, "pid": 0} == {**first, "pid": 0}
        assert engine.state()["ranks"][0]["next_sequence"] == 0
        engine.freeze()
    assert not engine.running, "a stopped process ends with its context too"
    engine.stop()


def test_start_failures_say_why_and_leave_nothing() -> None:
    with pytest.raises(StartFailed, match=r"expected vllm-0\.9"):
        EmulatorProcess(wire="vllm-9.9").start()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        engine = EmulatorProcess(port=taken.getsockname()[1])
        with pytest.raises(StartFailed, match="cannot bind"):
            engine.start()
        assert not engine.running


def test_the_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = (
        "import time\n"
        "from examples.emulator.process import EmulatorProcess\n"
        "engine = EmulatorProcess(blocks=16).start()\n"
        "print(engine.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.communicate()
    until(lambda: not alive(child))


def test_several_start_side_by_side() -> None:
    engines = [EmulatorProcess(name=f"e{number}", blocks=64, hash_root=f"root {number}") for number in range(2)]
    try:
        start_all(engines)
        assert len({engine.http_port for engine in engines}) == 2
        answers = [engine.call("/v1/chat/completions", BODY)["choices"] for engine in engines]
        assert answers[0] == answers[1], "same model, same answer"
        hashes = [{block["hash"] for block in engine.state()["ranks"][0]["gpu"]} for engine in engines]
        assert not hashes[0] & hashes[1], "other hash seed, other hashes"
    finally:
        for engine in engines:
            engine.stop()
    assert not any(engine.running for engine in engines)
