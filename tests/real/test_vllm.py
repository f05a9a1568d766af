"""Two real vLLM engines behind kvcar and Envoy: the predicted hit equals vLLM's own cached_tokens, request by request.

Needs KVCAR_VLLM_RIG, the home of a CPU vLLM: `venv/` with vllm, `models/qwen3` with a tiny model (any weights).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from examples.local.processes import EnvoyProcess, KvcarProcess, Process, free_port, http_get, wait_for
from extproc.envoy_config import EnvoyOptions

RIG = os.environ.get("KVCAR_VLLM_RIG", "")
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not RIG, reason="KVCAR_VLLM_RIG names no rig"),
    pytest.mark.timeout(1800),
]

MODEL = "tiny"
BLOCK = 32
SYSTEM = "You are the assistant of a railway. Answer in one sentence, name platform and time, and never guess. " * 4
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
    "VLLM_LOGGING_COLOR": "0", "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
    "VLLM_HOST_IP": "127.0.0.1",
}  # fmt: skip


class Vllm(Process):
    """One engine with random weights; events and replay on free ports."""

    def __init__(self, name: str, folder: Path) -> None:
        self.port, self.events, self.replay = (free_port() for _ in range(3))
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events}",
            "replay_endpoint": f"tcp://*:{self.replay}",
            "topic": "kv-events",
        }
        command = [
            f"{RIG}/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", f"{RIG}/models/qwen3",
            "--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", MODEL, "--load-format", "dummy",
            "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "8",
            "--num-gpu-blocks-override", "120", "--block-size", str(BLOCK), "--enable-prefix-caching",
            "--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events),
        ]  # fmt: skip
        super().__init__(name, command, folder, env=ENVIRONMENT)

    def stop(self, *, timeout: float = 30.0) -> None:
        """vLLM's workers are processes of their own and may outlive a start that failed."""
        super().stop(timeout=timeout)
        with contextlib.suppress(ProcessLookupError, AssertionError):  # AssertionError: it was never started
            os.killpg(self.pid, signal.SIGKILL)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def wait_ready(self) -> None:
        self._wait_for(lambda: http_get(f"http://{self.address}/health")[0] == 200, "/health", timeout=600)


class Fleet:
    """What a test drives: the gateway's address, kvcar, Envoy, and the engines by address."""

    def __init__(self, engines: list[Vllm], kvcar: KvcarProcess, envoy: EnvoyProcess) -> None:
        self.engines, self.kvcar, self.envoy = engines, kvcar, envoy
        self._ids = itertools.count()

    def ask(self, path: str, body: dict[str, Any]) -> tuple[int, int, str]:
        """(predicted, cached, engine's name) of one request through Envoy; waits until its blocks are known."""
        request_id = f"vllm-test-{next(self._ids)}"
        request = urllib.request.Request(
            f"http://{self.envoy.address}{path}",
            data=json.dumps({"model": MODEL, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **body}).encode(),
            headers={"content-type": "application/json", "x-request-id": request_id},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.load(response)
        entry = self.envoy.logged(request_id)
        served = next(engine for engine in self.engines if engine.address == entry["upstream"])
        details = answer["usage"]["prompt_tokens_details"] or {}
        wait_for(lambda: self.is_current(served), "the request's events", timeout=20)
        assert entry["kvcar"]["prompt_tokens"] == answer["usage"]["prompt_tokens"], "same number of tokens"
        assert entry["chosen"].split(",")[0] == entry["upstream"]
        return int(entry["kvcar"]["hit_tokens"]), details.get("cached_tokens") or 0, served.name

    def is_current(self, engine: Vllm) -> bool:
        """Whether kvcar has applied all that the engine published, by three replies in a row of its replay socket: a
        request that fills no block publishes nothing, so there is nothing else to wait for."""
        row = next(row for row in self.kvcar.get("/streams")["streams"] if row["instance"] == engine.name)
        last = -1 if row["sequence"] is None else row["sequence"]
        return bool(row["synchronized"] or last < 0) and all(newest(engine) <= last for _ in range(3))


def newest(engine: Vllm) -> int:
    """The engine's newest sequence number, -1 before its first message."""
    found = -1
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.connect(f"tcp://127.0.0.1:{engine.replay}")
        dealer.send_multipart([b"", (0).to_bytes(8, "big")])
        while dealer.poll(5000):
            frames = dealer.recv_multipart()
            if frames[-2] == b"\xff" * 8:
                return found
            found = int.from_bytes(frames[-2], "big")
    raise AssertionError(f"{engine.name} answers no replay request")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("vllm")
    engines = [Vllm(name, folder) for name in ("a", "b")]
    ext_proc = f"127.0.0.1:{free_port()}"
    config = {
        "listen": {"address": ext_proc, "drain_wait_ms": 0},
        "admin": {"address": "127.0.0.1:0"},
        "pools": [
            {
                "name": "tiny",
                "models": [MODEL],
                "tokenizer": f"{RIG}/models/qwen3",
                "block_size": "auto",
                "instances": [
                    {
                        "name": engine.name,
                        "address": engine.address,
                        "events": f"tcp://127.0.0.1:{engine.events}",
                        "replay": f"tcp://127.0.0.1:{engine.replay}",
                        "topic": "kv-events",
                    }
                    for engine in engines
                ],
            }
        ],
    }
    kvcar = KvcarProcess(config, folder)
    envoy = EnvoyProcess(
        EnvoyOptions(
            engines=tuple(engine.address for engine in engines),
            ext_proc=(ext_proc,),
            listen="127.0.0.1:0",
            admin="127.0.0.1:0",
            access_log=str(folder / "access.log"),
        ),
        folder,
    )
    processes = [*engines, kvcar, envoy]
    try:
        for process in processes:  # one after the other: each engine's start keeps every core busy
            process.start()
            process.wait_ready()
        envoy.wait_healthy("extproc", 1)
        wait_for(lambda: all(row["connected"] for row in kvcar.get("/streams")["streams"]), "both streams", timeout=30)
        yield Fleet(engines, kvcar, envoy)
    finally:
        for process in reversed(processes):
            process.stop(timeout=20)


def test_prediction_equals_the_engine(fleet: Fleet) -> None:
    rows: list[tuple[str, int, int, str]] = []
    chats = {
        name: [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"I am {name}. When is my train?"}]
        for name in ("ada", "grace", "edsger", "barbara")
    }
    # a first request teaches the block size ("auto") and warms one engine with the system prompt
    for turn in range(4):
        for name, messages in chats.items():
            predicted, cached, engine = fleet.ask("/v1/chat/completions", {"messages": messages})
            rows.append((f"{name} {turn}", predicted, cached, engine))
            messages += [
                {"role": "assistant", "content": f"Platform {turn + 3}, at {turn + 9}:15."},
                {"role": "user", "content": f"And after that, number {turn}? 你好 🙂 <|im_end|> {name}"},
            ]
    tools = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "b": 1, "a": 2}}}]
    for number in range(2):
        body = {"messages": [{"role": "user", "content": "Find it. " * 40}], "tools": tools, "tool_choice": "none"}
        rows.append((f"tools {number}", *fleet.ask("/v1/chat/completions", body)))
    text = "The quick brown fox jumps over the lazy dog, again and again. " * 12
    for number, prompt in enumerate((text, text + "And once more.", list(range(1000, 1200)), list(range(1000, 1300)))):
        rows.append((f"completion {number}", *fleet.ask("/v1/completions", {"prompt": prompt})))
    for number in range(2):
        rows.append((f"salted {number}", *fleet.ask("/v1/completions", {"prompt": text, "cache_salt": "tenant-a"})))
    for row in rows:
        print("{:14} predicted {:5} cached {:5} engine {}".format(*row))
    assert [row for row in rows if row[1] != row[2]] == []
    assert sum(cached for _, _, cached, _ in rows) > 0
    hits = {name: cached for name, _, cached, _ in rows}
    assert hits["ada 3"] > hits["ada 0"]
    assert hits["salted 0"] == 0
    assert hits["salted 1"] > 0


def test_a_restarted_engine_gets_no_hits_for_what_it_lost(fleet: Fleet) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Where does it leave? " * 20}]
    _, _, first = fleet.ask("/v1/chat/completions", {"messages": messages})
    predicted, cached, again = fleet.ask("/v1/chat/completions", {"messages": messages})
    assert (again, predicted) == (first, cached)
    assert cached > 0
    engine = next(engine for engine in fleet.engines if engine.name == first)
    engine.stop(timeout=30)
    engine.start()
    engine.wait_ready()
    fleet.envoy.wait_healthy("engines", 2)

    def empty() -> bool:
        row = next(row for row in fleet.kvcar.get("/streams")["streams"] if row["instance"] == first)
        return bool(row["connected"]) and row["blocks"]["device"] == 0

    wait_for(empty, "the old process's blocks to be dropped", timeout=30)
    for _ in range(4):
        predicted, cached, _ = fleet.ask("/v1/chat/completions", {"messages": messages})
        assert predicted == cached
