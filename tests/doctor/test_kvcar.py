"""What the running kvcar says of itself, and the command: one row each."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from examples.local.processes import free_port
from extproc import __version__
from extproc.cli import main
from extproc.config import Config, parse
from extproc.doctor import DoctorOptions, Severity
from extproc.doctor.check import Check, Found, Skip
from extproc.doctor.checks import ALL
from extproc.doctor.context import Context
from extproc.doctor.finding import Finding, Outcome, Report, error, note, warning
from extproc.doctor.http import Answer
from extproc.doctor.kvcar import CHECKS
from extproc.doctor.live import CHECKS as PROBES
from extproc.doctor.live import _judge_gateway as judge_gateway
from extproc.doctor.ports import look
from extproc.doctor.runner import examine, merged, run_check
from extproc.self_verification import CAUSES, NOT_OBSERVED, TOO_FEW, Verdict

Json = dict[str, Any]
ADDRESS = "127.0.0.1:18001"
ROOT = Path(__file__).parents[2]


def configured(**pool: Any) -> Config:
    whole = {"name": "p", "models": ["m"], "tokenizer": "/m", "instances": [{"name": "e", "address": ADDRESS}], **pool}
    return parse(yaml.safe_dump({"pools": [whole]}))


class Answering(Context):
    """A context whose kvcar gives these answers."""

    def __init__(self, answers: dict[str, Answer], **options: Any) -> None:
        super().__init__(configured(), DoctorOptions(**options))
        self._answers = answers

    async def kvcar(self, path: str) -> Answer:
        return self._answers.get(path, Answer(path, error="connection refused"))


def status(**pool: Any) -> Json:
    healthy = {
        "name": "p",
        "models": ["m"],
        "tokenizer_loaded": True,
        "instances": [{"name": "e", "address": ADDRESS, "load": {"waiting": 0}}],
        "streams": [{"instance": "e", "dp_rank": 0, "synchronized": True, "connected": True, "sequence": 3}],
        "self_verification": {"state": "ok", "samples": 40},
    }
    return {"version": __version__, "pools": [healthy | pool]}


LOST = {"instance": "e", "dp_rank": 0, "synchronized": False, "connected": False, "sequence": None, "state": "EMPTY"}
DRIFT = {"state": "drift", "samples": 50, "equal": 2, "likely_cause": CAUSES[Verdict.TOKENS][0], "remedy": "this"}
COUNTS = 'kvcar_requests_total{pool="p",outcome="scored"} %d\nkvcar_requests_total{pool="p",outcome="unscored"} %d\n'


def instances(*states: str, roles: Sequence[str] = ("default", "default")) -> Json:
    """The first is at the address of the configuration."""
    common = {"load": {"waiting": 0}}
    rows = [
        {
            "name": f"e{number}",
            "address": ADDRESS if not number else "10.9.9.9:1",
            "state": state,
            "role": role,
            **common,
        }
        for number, (state, role) in enumerate(zip(states, roles, strict=True))
    ]
    return {"instances": rows}


@dataclass
class Row:
    name: str
    found: set[str] = field(default_factory=set)
    pool: Json = field(default_factory=dict)
    top: Json = field(default_factory=dict)
    metrics: str = ""
    code: int = 200
    options: Json = field(default_factory=dict)


ROWS = [
    Row("healthy"),
    Row("not there", {"kvcar.not_running"}, code=0),
    Row("not there, behind a gateway", {"kvcar.not_running"}, code=0, options={"gateway": "http://g"}),
    Row("other token", {"kvcar.token"}, code=401),
    Row("other version", {"kvcar.version"}, top={"version": "0.0.9"}),
    Row("other pools", {"kvcar.other_configuration"}, pool={"name": "q"}),
    Row("other instances", {"kvcar.other_configuration"}, pool={"instances": []}),
    Row("other models", {"kvcar.other_configuration"}, pool={"models": ["x"]}),
    Row("no tokenizer", {"kvcar.no_tokenizer"}, pool={"tokenizer_loaded": False}),
    Row("lost stream", {"kvcar.stream"}, pool={"streams": [LOST]}),
    Row("idle stream", pool={"streams": [LOST | {"connected": True}]}),
    Row("all drained", {"kvcar.no_candidate"}, pool=instances("draining", "draining")),
    Row("one drained", {"kvcar.left_out"}, pool=instances("draining", "active")),
    Row("no prefill", {"kvcar.no_candidate"}, pool=instances("suspect", "active", roles=("prefill", "decode"))),
    Row("on probation", pool=instances("probation", "lease_lost")),
    Row("no load", {"kvcar.no_load"}, pool={"instances": [{"name": "e", "address": ADDRESS, "load": None}]}),
    Row("drift", {"kvcar.drift"}, pool={"self_verification": DRIFT}),
    Row("unscored", {"kvcar.unscored"}, metrics=COUNTS % (50, 50) + 'kvcar_unscored_total{reason="timeout"} 50\n'),
    Row("few unscored", metrics=COUNTS % (95, 5) + 'kvcar_unscored_total{reason="timeout"} 5\n'),
    Row("few requests", metrics=COUNTS % (2, 2) + 'kvcar_unscored_total{reason="timeout"} 2\n'),
    Row("faults", {"kvcar.faults"}, metrics='kvcar_faults_total{where="decider"} 3\n'),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name.replace(" ", "-"))
def test_found_and_nothing_else(row: Row) -> None:
    body = json.dumps(status(**row.pool) | row.top).encode()
    page = Answer("/metrics", row.code, row.metrics.encode())
    answers = {"/status": Answer("/status", row.code, body), "/metrics": page} if row.code else {}

    async def look_at() -> list[Outcome]:
        context = Answering(answers, **row.options)
        try:
            return [await run_check(check, context) for check in CHECKS]
        finally:
            await context.close()

    findings = [one for item in asyncio.run(look_at()) for one in item.findings]
    assert {one.id for one in findings} == row.found, findings


@pytest.mark.parametrize(
    ("checked", "skipped"),
    [
        ({"state": "unknown", "samples": 0, "reason": NOT_OBSERVED}, "listen.observe_usage is off"),
        ({"state": "unknown", "samples": 3, "reason": TOO_FEW}, "too few answers so far"),
        ({"state": "ok", "samples": 40, "reason": ""}, None),
    ],
)
async def test_predictions_that_nobody_judged_do_not_hold(checked: Json, skipped: str | None) -> None:
    body = json.dumps(status(self_verification=checked)).encode()
    context = Answering({"/status": Answer("/status", 200, body)})
    outcome = await run_check(next(one for one in CHECKS if one.id == "kvcar.drift"), context)
    await context.close()
    assert outcome.skipped == (skipped or "")


def record(**more: Any) -> Json:
    decision = {"destinations": ["1:1", "2:2"], "chosen": "e", "hit_tokens": 64, "prompt_tokens": 100}
    return {"served": "1:1", "reason": None, "decision": decision, **more}


def answer(cached: int | None) -> Answer:
    details = {"prompt_tokens_details": {"cached_tokens": cached}} if cached is not None else {}
    return Answer("u", 200, json.dumps({"usage": {"prompt_tokens": 100, **details}}).encode())


@pytest.mark.parametrize(
    ("second", "cached", "found"),
    [
        (record(), 64, []),
        (record(), None, []),
        (record(served=None), 64, []),
        (record(), 48, ["gateway.prediction"]),
        (record(served="2:2"), 64, ["gateway.not_obeyed"]),
        (record(reason="path", decision=None), 0, ["gateway.unscored"]),
        (record(decision={"destinations": ["1:1"], "hit_tokens": 0}), 0, ["gateway.no_hit"]),
    ],
)
def test_gateway(second: Json, cached: int | None, found: list[str]) -> None:
    assert [one.id for one in judge_gateway("g", [record(), second], [answer(0), answer(cached)])] == found


async def test_no_gateway() -> None:
    context = Context(configured(), DoctorOptions(gateway=f"http://127.0.0.1:{free_port()}"))
    check = next(one for one in PROBES if one.id == "gateway.answers")
    outcome = await run_check(check, context)
    await context.close()
    assert [one.id for one in outcome.findings] == ["gateway.unreachable"]


async def test_an_unreachable_port(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", never)
    assert (await look("tcp://127.0.0.1:1", 0.01)).state == "unreachable"
    assert (await look("ipc:///tmp/x", 0.01)).state == "unknown"


# ---------------------------------------------------------------- the runner


def check(run: Any, *needs: str) -> Check:
    return Check("one", "Group", "a title", needs, run)


@pytest.mark.parametrize(
    ("raised", "found", "skipped"),
    [(Skip("no reason"), [], "no reason"), (RuntimeError("oh"), ["doctor.fault"], ""), (None, ["doctor.timeout"], "")],
)
async def test_a_check_that_fails_is_a_finding(raised: Exception | None, found: list[str], skipped: str) -> None:
    async def run(_context: Context) -> Found:
        if raised is not None:
            raise raised
        await asyncio.Event().wait()
        return Found()

    seen: list[tuple[int, int, str]] = []
    report = await examine(
        configured(),
        DoctorOptions(check_timeout=0.05),
        table=[check(run), check(run, "live")],
        progress=lambda *now: seen.append(now),
    )
    first, second = report.outcomes
    assert ([one.id for one in first.findings], first.skipped) == (found, skipped)
    assert "--live" in second.skipped
    assert [done for done, _, _ in seen] == [0, 1, 2]


@pytest.mark.parametrize(
    ("findings", "code"),
    [((), 0), ((note,), 0), ((warning,), 1), ((note, error), 2), ((error, warning), 2)],
)
def test_exit_status(findings: tuple[Callable[..., Finding], ...], code: int) -> None:
    made = tuple(make("id", "subject", "what") for make in findings)
    report = Report((Outcome("c", "g", "t", made),), {})
    assert report.exit_status == report.as_dict()["exit_status"] == code


def test_merged() -> None:
    many = [note("a", f"s{number}", "w", evidence=(f"e{number}",)) for number in range(6)] + [note("a", "s9", "other")]
    first, second = merged(many)
    assert first.subject == "s0, s1, s2, s3 and 2 more"
    assert second.subject == "s9"


# ---------------------------------------------------------------- the command, and its page


def invoked(tmp_path: Path, *arguments: str, port: int = 0) -> Any:
    path = tmp_path / "kvcar.yaml"
    instances = [{"name": "e\u001b[31m", "address": f"127.0.0.1:{free_port()}"}]
    pool = {"name": "p", "models": ["m"], "tokenizer": "/nowhere", "instances": instances}
    path.write_text(yaml.safe_dump({"admin": {"address": f"127.0.0.1:{port}"}, "pools": [pool]}), "utf-8")
    return CliRunner().invoke(main, ["doctor", "-c", str(path), "--listen", "0.1", *arguments])


def test_text(tmp_path: Path) -> None:
    result = invoked(tmp_path)
    assert result.exit_code == 2, result.output
    assert "[engine.unreachable]" in result.output
    assert "  do     " in result.output
    assert "\x1b" not in result.output  # neither colours off a terminal nor what a peer or a file brings
    assert not any(line != line.rstrip() for line in result.output.splitlines())
    assert re.search(r"\d+ checks in [\d.]+ s: \d+ errors?, \d+ warnings?, \d+ notes?", result.output)


def test_json(tmp_path: Path) -> None:
    result = invoked(tmp_path, "--json", "--pool", "p")
    told = json.loads(result.stdout)
    assert (told["exit_status"], result.exit_code) == (2, 2)
    assert {one["id"] for one in told["findings"] if one["severity"] == "error"} == {
        "engine.unreachable",
        "tokens.load",
    }
    assert len(told["checks"]) == len(ALL)
    assert {one["severity"] for one in told["checks"]} <= {"ok", "note", "warning", "error", "skipped"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--pool", "x"), "'x' is not configured"),
        (("--envoy-admin", "ftp://x"), "--envoy-admin"),
        (("--gateway", "http://"), "--gateway"),
    ],
)
def test_wrong_options(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    result = invoked(tmp_path, *arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_every_finding_is_documented() -> None:
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "extproc/doctor").glob("*.py"))
    made = set(re.findall(r'(?:note|warning|error|make)\(\s*"([a-z]+\.\w+)"', sources))
    made -= {"doctor.timeout", "doctor.fault", "envoy.stats"}
    rates = {f"envoy.stats.{name}" for name in re.findall(r'^    "(\w+)": \($', sources, re.MULTILINE)}
    documented = set(re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs/doctor.md").read_text("utf-8"), re.MULTILINE))
    documented = {one for one in documented if "." in one}
    assert made | rates == documented
    assert len({one.id for one in ALL}) == len(ALL)


def test_severities_are_ordered() -> None:
    assert sorted(Severity) == [Severity.OK, Severity.NOTE, Severity.WARNING, Severity.ERROR]
