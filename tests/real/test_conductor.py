"""`kvcar conductor` as a process, with real ZMQ publishers; registration at a running `kvcar serve`."""

from __future__ import annotations

import json
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from click.testing import CliRunner

from examples.local.processes import KvcarProcess, Process, wait_for
from examples.local.stack import TOKENIZER
from extproc.cli import main
from kvindex.hashing import pack_tokens
from kvindex.rolling import local_hashes, rolled
from tests.real.publisher import BLOCK, Publisher, chain, removed, until

pytestmark = pytest.mark.real
TOKENS = list(range(5 * BLOCK))
LOCAL = local_hashes(pack_tokens(TOKENS), BLOCK)


class ConductorProcess(Process):
    def __init__(self, folder: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "extproc", "conductor", "--port", "0", "--print-port", *arguments]
        super().__init__("conductor", command, folder)
        self.address = ""

    def wait_ready(self) -> None:
        def told() -> Any:
            line, newline, _ = self.out_path.read_text("utf-8").partition("\n")
            return json.loads(line) if newline else None

        self.address = self._wait_for(told, "the line with its address")["address"]


@pytest.fixture
def conductor(tmp_path: Path) -> Iterator[ConductorProcess]:
    with ConductorProcess(tmp_path) as process:
        process.wait_ready()
        yield process


def call(address: str, path: str, body: Any = None, *, packed: bool = False) -> tuple[int, Any]:
    data, kind = (msgpack.packb(body), "application/msgpack") if packed else (json.dumps(body).encode(), "text/plain")
    request = urllib.request.Request(
        f"http://{address}{path}", None if body is None else data, {"Content-Type": kind} if body is not None else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            status, found = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, found = error.code, error.read()
    return status, (msgpack.unpackb if packed else json.loads)(found)


def ranks(address: str, path: str, **body: Any) -> dict[str, int]:
    """Rank -> matched tokens of instance e1."""
    _, found = call(address, path, {"model": "m", **body})
    rows = found.get("default", {}).get("e1", {"DP": {}})["DP"]
    return {rank: row["matched_tokens"] for rank, row in rows.items()}


def registration(rank: int, publisher: Publisher, **more: Any) -> dict[str, Any]:
    return {"instance_id": "e1", "type": "vLLM", "modelname": "m", "block_size": BLOCK, "dp_rank": rank,
            "endpoint": publisher.endpoint, "replay_endpoint": publisher.replay, **more}  # fmt: skip


def test_from_registration_to_its_end(conductor: ConductorProcess) -> None:
    at = conductor.address
    # the topic is not told to a conductor: any will do
    with Publisher(topic=b"kv-events") as zero, Publisher(rank=1, frames=4) as one:
        zero.publish(chain(0, 2))
        assert call(at, "/register", registration(0, zero)) == (201, {"status": "ok"})
        until(lambda: ranks(at, "/query", token_ids=TOKENS) == {"0": 8}, zero, what="blocks from before it registered")
        one.publish(chain(0, 1))
        assert call(at, "/register", registration(1, one), packed=True) == (201, {"status": "ok"})
        asked = len(zero.asked)
        until(lambda: ranks(at, "/query", token_ids=TOKENS) == {"0": 8, "1": 4}, zero, one, what="both ranks")
        zero.publish(chain(2, 3))
        until(lambda: ranks(at, "/query", token_ids=TOKENS) == {"0": 20, "1": 4}, zero, one, what="live events")
        assert len(zero.asked) == asked, "the stream of rank 0 began anew when rank 1 came"
        assert ranks(at, "/query_by_hash", block_hashes=LOCAL) == {"0": 20, "1": 4}
        assert ranks(at, "/query_by_hash", seq_hashes=rolled(LOCAL)) == {"0": 20, "1": 4}
        _, found = call(at, "/query", {"model": "m", "token_ids": pack_tokens(TOKENS)}, packed=True)
        assert found["default"]["e1"]["longest_matched"] == 20
        zero.publish(removed([5]))
        until(lambda: ranks(at, "/query", token_ids=TOKENS) == {"0": 16, "1": 4}, zero, one, what="a block removed")

        assert call(at, "/unregister", {"instance_id": "e1", "dp_rank": 0}) == (200, {"status": "ok"})
        until(lambda: ranks(at, "/query", token_ids=TOKENS) == {"1": 4}, zero, one, what="rank 0 is gone")
        until(lambda: zero.subscribers == 0, zero, one, what="its socket is closed")
        assert call(at, "/unregister", {"instance_id": "e1"})[0] == 200
        assert call(at, "/query", {"model": "m", "token_ids": TOKENS}) == (200, {"default": {}})
        assert call(at, "/unregister", {"instance_id": "e1"})[0] == 404
        until(lambda: one.subscribers == 0, zero, one, what="no socket is left")
    assert call(at, "/workers")[1]["indexer"][0]["worker_count"] == 0


def test_pushed_events_reach_the_index(conductor: ConductorProcess) -> None:
    at = conductor.address
    body = {"instance_id": "e1", "modelname": "m", "block_size": BLOCK}
    assert call(at, "/register", body)[0] == 201
    blocks = [{"block_hash": place, "tokens_hash": one} for place, one in enumerate(LOCAL[:3])]
    events = [{"event_id": 1, "data": {"type": "stored", "parent_hash": None, "blocks": blocks}},
              {"event_id": 2, "type": "removed", "block_hashes": [2]}]  # fmt: skip
    answer = call(at, "/events", {"instance_id": "e1", "block_size": BLOCK, "events": events}, packed=True)
    assert answer == (200, {"status": "ok", "events_applied": 2})
    assert ranks(at, "/query", token_ids=TOKENS) == {"0": 8}
    assert ranks(at, "/query_by_hash", block_hashes=LOCAL) == {"0": 8}


def test_it_ends_when_told_to(tmp_path: Path) -> None:
    with ConductorProcess(tmp_path, "--form", "mooncake") as process, Publisher() as publisher:
        process.wait_ready()
        answer = call(process.address, "/register", registration(0, publisher))
        assert answer == (200, {"status": "registered successfully", "instance_id": "e1"})
        assert "conductor (mooncake) listens on http://127.0.0.1:" in process.log()
        process.signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
        assert "Traceback" not in process.log()


def test_an_endpoint_that_nobody_serves_is_in_the_log_once(tmp_path: Path) -> None:
    """Each instance of its model, also where two models have instances of one name."""
    with ConductorProcess(tmp_path) as process, Publisher() as publisher, socket.socket() as unused:
        process.wait_ready()
        unused.bind(("127.0.0.1", 0))  # and does not listen
        dead = f"tcp://127.0.0.1:{unused.getsockname()[1]}"

        def register(**more: Any) -> None:
            assert call(process.address, "/register", registration(0, publisher) | more)[0] == 201

        register(endpoint=dead, replay_endpoint=None, modelname="other")
        register()
        wait_for(lambda: "WARNING extproc.watch: stream e1/0: no connection so far" in process.log(), "the line")
        assert dead in process.log()
        # told by a later look, in which nothing has changed for the others
        register(endpoint=dead.replace("127.0.0.1", "127.0.0.2"), replay_endpoint=None, instance_id="e2")
        wait_for(lambda: "stream e2/0: no connection so far" in process.log(), "the line of e2")
        assert process.log().count("stream e1/0: no connection so far") == 1


def test_mistakes_on_the_command_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        rows = [
            (("--port", port), 1, f"cannot listen on 127.0.0.1:{port}: Address already in use"),
            (("--host", "192.0.2.1", "--port", "0", "--token", "long-enough"), 1, "cannot listen on 192.0.2.1:0"),
            (("--token", "short"), 2, "at least 8"),
            (("--host", "0.0.0.0", "--port", "0"), 2, "set --token, or --allow-unauthenticated"),
            (("--host", "192.0.2.1", "--port", "0", "--allow-unauthenticated"), 1, "cannot listen on 192.0.2.1:0"),
            (("--network", "10.0.0.1/8"), 2, "--network: '10.0.0.1/8' is no network"),
            (("--form", "other"), 2, "mooncake"),
            (("--block-size", "0"), 2, "--block-size"),
        ]
        for arguments, code, words in rows:
            result = CliRunner().invoke(main, ["conductor", *arguments])
            assert (result.exit_code, words in result.output) == (code, True), (arguments, result.output)


def test_registration_at_kvcar_serve(tmp_path: Path) -> None:
    """An engine that registers with its address is routed to, and is gone when it unregisters."""
    pool = {"name": "demo", "models": ["m"], "tokenizer": str(TOKENIZER), "block_size": BLOCK,
            "discovery": [{"type": "http"}]}  # fmt: skip
    config = {"listen": {"address": "127.0.0.1:0", "drain_wait_ms": 0}, "admin": {"address": "127.0.0.1:0"},
              "pools": [pool]}  # fmt: skip
    with KvcarProcess(config, tmp_path) as kvcar, Publisher() as publisher:
        kvcar.wait_ready()
        wait_for(lambda: call(kvcar.admin, "/readyz")[0] == 200, "ready")
        publisher.publish(chain(0, 3))
        assert call(kvcar.admin, "/register", registration(0, publisher, address="127.0.0.1:8000"))[0] == 201
        until(lambda: ranks(kvcar.admin, "/query", token_ids=TOKENS) == {"0": 12}, publisher)
        assert ranks(kvcar.admin, "/query_by_hash", block_hashes=LOCAL) == {"0": 12}
        _, told = call(kvcar.admin, "/status")
        assert [(one["name"], one["address"]) for one in told["pools"][0]["instances"]] == [("e1", "127.0.0.1:8000")]
        assert call(kvcar.admin, "/unregister", {"instance_id": "e1"})[0] == 200
        assert call(kvcar.admin, "/status")[1]["pools"][0]["instances"] == []
        until(lambda: publisher.subscribers == 0, publisher)
