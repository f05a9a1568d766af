"""Broken engines and configurations of them, one row each: what doctor must find, and that it finds nothing else."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from examples.emulator.process import EmulatorProcess, start_all
from examples.local.processes import free_port
from examples.local.stack import TOKENIZER
from extproc.doctor import Severity
from tests.doctor.support import configuration, examined, ids, told, warm

pytestmark = pytest.mark.real
FLEET: dict[str, dict[str, Any]] = {
    "a": {},
    "b": {},
    "old": {"wire": "vllm-0.16"},
    "uncached": {"no_prefix_caching": True},
    "ranks": {"dp": 2},
    "connects": {"events_connect": "tcp://127.0.0.1:{port}"},
    "no_events": {"no_events": True},
    "lora": {"lora": ["ada"]},
    "short": {"buffer_steps": 1},
}


@pytest.fixture(scope="module")
def fleet() -> Iterator[dict[str, EmulatorProcess]]:
    port = free_port()
    made = {}
    for name, options in FLEET.items():
        given = {key: value.format(port=port) if isinstance(value, str) else value for key, value in options.items()}
        made[name] = EmulatorProcess(name=name, block_size=16, blocks=512, decode_rate=2000, **given)
    start_all(list(made.values()))
    try:
        for engine in made.values():
            warm(engine)
        for length in (64, 160):  # the second is all that its replay holds, and hangs below the first
            made["short"].call("/v1/completions", {"prompt": list(range(100, 100 + length)), "max_tokens": 1})
        yield made
    finally:
        for engine in made.values():
            engine.kill()


@dataclass
class Row:
    """One set-up. `found`: ids above a note, no more and no less; `notes`: ids that must be among the notes."""

    name: str
    found: set[str] = field(default_factory=set)
    notes: set[str] = field(default_factory=set)
    engines: tuple[str, ...] = ("a",)
    pool: dict[str, Any] = field(default_factory=dict)
    instance: dict[str, Any] = field(default_factory=dict)
    faults: dict[str, Any] = field(default_factory=dict)
    top: dict[str, Any] = field(default_factory=dict)
    live: bool = False
    traffic: dict[str, Any] | None = None
    listen: float = 0.6


CLOSED = f"tcp://127.0.0.1:{free_port()}"
ROWS = [
    Row("healthy"),
    Row("healthy, probed", live=True),
    Row("healthy ranks, probed", engines=("ranks",), instance={"dp_size": 2}, live=True),
    Row("healthy pair, probed", engines=("a", "b"), live=True),
    Row("no instance", {"engine.none"}, pool={"instances": []}),
    Row("nobody there", {"engine.unreachable"}, instance={"address": CLOSED.removeprefix("tcp://")}),
    Row("not ready", {"engine.unhealthy"}, faults={"not_ready": True}),
    Row("other model", {"engine.model"}, pool={"models": ["other"]}),
    Row("unknown adapter", {"engine.adapter"}, engines=("lora",)),
    Row("adapter not there", notes={"engine.adapter_missing"}, pool={"adapters": ["ada"]}),
    Row("block size", {"engine.block_size", "events.block_size"}, pool={"block_size": 32}),
    Row("caching off", {"engine.prefix_caching", "events.silent"}, engines=("uncached",)),
    Row("too few ranks", {"engine.ranks"}, engines=("ranks",)),
    Row("too many ranks", {"engine.ranks", "events.refused", "events.replay_port"}, instance={"dp_size": 2}),
    Row("other engine", {"engine.kind", "tokens.differ"}, pool={"engine": "sglang"}),
    Row("two versions", {"engine.versions"}, {"engine.no_extra_keys"}, engines=("a", "old")),
    Row("clock", {"engine.clock"}, faults={"clock_behind_ms": 60_000}, live=True),
    Row("no tokenizer", {"tokens.load"}, pool={"tokenizer": "/nowhere"}),
    Row("wrong template", {"tokens.differ"}, pool={"chat_template": "indented"}),
    Row("wrong template, probed", {"tokens.differ", "live.prompt_tokens", "live.no_hit"},
        pool={"chat_template": "indented"}, live=True),
    Row("no template", {"tokens.no_template", "tokens.differ"}, pool={"tokenizer": "bare"}),
    Row("no token API", notes={"tokens.no_api"}, faults={"no_token_api": True}),
    Row("no events endpoint", {"events.none"}, instance={"events": None, "replay": None}),
    Row("events off", {"events.refused"}, engines=("no_events",), instance={"events": CLOSED}),
    Row("connects", {"events.connects"}, engines=("connects",)),
    Row("events at the HTTP port", {"events.not_zmq"}, instance={"events": "tcp://{address}"}),
    Row("swapped ports", {"events.handshake"}, instance={"events": "{replay}", "replay": "{events}"}),
    Row("too many streams", {"events.not_followed"}, engines=("a", "b"), top={"events": {"max_streams": 1}}),
    Row("topic", {"events.topic", "live.no_hit"}, instance={"topic": "kv"}, live=True),
    Row("silent", {"events.silent", "live.no_hit"}, engines=("b",), faults={"lose": 1000}, live=True,
        instance={"replay": None}, notes={"events.no_replay"}),
    Row("idle", notes={"events.idle", "events.no_replay"}, instance={"replay": None}),
    Row("no dialect", {"events.undecodable", "live.no_hit"}, instance={"replay": None}, live=True,
        faults={"garbage": 1000}, notes={"events.no_replay"}),
    Row("other dialect", {"events.replay_silent"}, pool={"dialect": "xllm"}, listen=3.0),
    Row("rank of another", {"engine.ranks", "events.rank", "live.no_hit"}, engines=("ranks",), live=True,
        instance={"events": "{events_of_rank_1}", "replay": None}),
    Row("no replay there", {"events.replay_port"}, instance={"replay": CLOSED}),
    Row("silent replay", {"events.replay_silent"}, faults={"mute_replay": True}, listen=3.0),
    Row("late", {"events.unanchored"}, {"events.incomplete"}, engines=("short",)),
    Row("salt", notes={"events.salted"}, traffic={"cache_salt": "salt-{number}"}, listen=2.0),
    Row("adapters", {"engine.adapter", "events.adapters"}, engines=("lora",), traffic={"model": "ada"},
        listen=2.0),
    Row("healthy, engine connects", engines=("connects",), instance={"bind": True}),
    Row("nobody connects", {"events.nobody_connects"}, instance={"bind": True, "events": CLOSED}),
    Row("swapped engines", {"live.wrong_stream"}, engines=("a", "lora"), pool={"adapters": ["ada"]}, live=True,
        instance={"events": "{events_of_other}", "replay": "{replay_of_other}"}),
    Row("no cached_tokens", {"live.no_cached_tokens"}, faults={"no_cached_tokens": True}, live=True),
    Row("fails", {"live.failed"}, faults={"fail_requests": 1000}, live=True),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name.replace(" ", "-"))
def test_found_and_nothing_else(row: Row, fleet: dict[str, EmulatorProcess], tmp_path: Path) -> None:
    engines = [fleet[name] for name in row.engines]
    config = configuration(
        engines,
        pool=_files(row.pool, tmp_path),
        instance={engine.name: _filled(row.instance, engine, engines, fleet) for engine in engines},
        **row.top,
    )
    before = {engine.name: engine.state()["faults"] for engine in engines}
    for engine in engines:
        if row.faults:
            engine.control(**row.faults)
    stop = threading.Event()
    traffic = threading.Thread(target=_ask, args=(engines[0], row.traffic, stop)) if row.traffic else None
    try:
        if traffic is not None:
            traffic.start()
        report = examined(config, live=row.live, listen=row.listen)
    finally:
        stop.set()
        if traffic is not None:
            traffic.join()
        for engine in engines:
            engine.control(**before[engine.name])
    assert ids(report) == row.found, told(report)
    assert row.notes <= ids(report, Severity.NOTE), told(report)
    for finding in report.findings:
        assert finding.subject, finding
        assert finding.severity < Severity.WARNING or (finding.remedy and (finding.cause or finding.evidence)), finding
    assert report.exit_status == max((one.severity for one in report.findings), default=1) - 1 or not row.found


def _files(pool: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Fills in templates and tokenizers that differ from the engine's."""
    pool = dict(pool)
    if pool.get("chat_template") == "indented":
        source = next(TOKENIZER.glob("chat_template.jinja")).read_text("utf-8")
        assert "<|im_start|>" in source
        (folder / "wrong.jinja").write_text(source.replace("<|im_start|>", " <|im_start|>"), "utf-8")
        pool["chat_template"] = str(folder / "wrong.jinja")
    if pool.get("tokenizer") == "bare":
        bare = folder / "bare"
        shutil.copytree(TOKENIZER, bare, ignore=shutil.ignore_patterns("chat_template*"))
        pool["tokenizer"] = str(bare)
    return pool


def _filled(
    instance: dict[str, Any], engine: EmulatorProcess, engines: list[EmulatorProcess], fleet: dict[str, EmulatorProcess]
) -> dict[str, Any]:
    other = engines[engines.index(engine) - 1]
    words = {
        "address": engine.address,
        "events": engine.events_endpoint,
        "replay": engine.replay_endpoint,
        "events_of_a": fleet["a"].events_endpoint,
        "events_of_other": other.events_endpoint,
        "replay_of_other": other.replay_endpoint,
        "events_of_rank_1": f"tcp://127.0.0.1:{engine.ready['events_ports'][-1]}",
    }
    return {key: value.format(**words) if isinstance(value, str) else value for key, value in instance.items()}


def _ask(engine: EmulatorProcess, body: dict[str, str], stop: threading.Event) -> None:
    number = 0
    while not stop.wait(0.05):
        number += 1
        text = f"Question {number}: " + "a prompt that fills a few blocks of sixteen tokens each. " * 4
        message = {"role": "user", "content": text}
        warm(engine, messages=[message], **{key: value.format(number=number) for key, value in body.items()})


def test_the_first_difference_is_shown(fleet: dict[str, EmulatorProcess], tmp_path: Path) -> None:
    config = configuration([fleet["a"]], pool=_files({"chat_template": "indented"}, tmp_path))
    (finding,) = [one for one in examined(config).findings if one.id == "tokens.differ"]
    assert "template" in finding.cause
    assert "samples that differ: plain, system" in finding.evidence[0]
    here, engine = (next(line for line in finding.evidence if line.startswith(side)) for side in ("here:", "engine:"))
    assert "' <|im_start|>" in here
    assert "'<|im_start|>" in engine


def test_many_alike_are_one_finding(fleet: dict[str, EmulatorProcess]) -> None:
    config = configuration([fleet["a"], fleet["b"]], instance={name: {"replay": None} for name in ("a", "b")})
    (finding,) = [one for one in examined(config).findings if one.id == "events.no_replay"]
    assert finding.subject == "instance a of pool demo, instance b of pool demo"
