"""Examinations of configurations that are made in the test, and what they found."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from examples.emulator.process import EmulatorProcess
from examples.local.stack import kvcar_config
from extproc.config import Config, parse
from extproc.doctor import DoctorOptions, Report, Severity, examine
from extproc.doctor.checks import ALL

NO_GATEWAY = tuple(check for check in ALL if check.group in ("Engines", "Tokens", "KV events", "Probes"))


def configuration(engines: Sequence[EmulatorProcess], **changes: Any) -> Config:
    """kvcar's configuration for these engines; `changes` as `kvcar_config` takes them."""
    data = kvcar_config(engines, ext_proc="127.0.0.1:0", **changes)
    data["pools"][0]["instances"] = [
        {key: value for key, value in one.items() if value is not None} for one in data["pools"][0]["instances"]
    ]
    return parse(yaml.safe_dump(data))


def examined(config: Config, **options: Any) -> Report:
    values: dict[str, Any] = {"listen": 0.6, "timeout": 3.0, "check_timeout": 20.0, **options}
    return asyncio.run(examine(config, DoctorOptions(**values), table=NO_GATEWAY))


def ids(report: Report, least: Severity = Severity.WARNING) -> set[str]:
    return {one.id for one in report.findings if one.severity >= least}


def told(report: Report) -> str:
    """Everything found, for the message of an assertion."""
    return "\n".join(
        f"{one.severity.name} {one.id} {one.subject}: {one.what} {one.evidence}" for one in report.findings
    )


def warm(engine: EmulatorProcess, **body: Any) -> None:
    """One served chat: the engine then has events to replay."""
    text = "A prompt that fills a few blocks of sixteen tokens each, said twice or thrice. " * 4
    fields: Mapping[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, **body}
    engine.call("/v1/chat/completions", fields)
