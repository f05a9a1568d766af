"""The judgement of the dependency audit, without asking anybody."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from tests import audit

CLEAN = {"name": "a", "version": "1", "vulns": []}
FIXED = {"name": "b", "version": "1", "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1", "2"]}]}
OPEN = {"name": "c", "version": "1", "vulns": [{"id": "PYSEC-2", "fix_versions": []}]}
SILENT = {"name": "d", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("found", "status", "words"),
    [
        ([CLEAN], 0, "1 of 1 packages looked up, 0 findings with a fix"),
        ([CLEAN, FIXED], 1, "now b 1: PYSEC-1, fixed in 1.1, 2"),
        ([OPEN], 0, "now c 1: PYSEC-2, no fix yet"),
        ([CLEAN, SILENT], 0, "1 of 2 packages looked up"),
        ([CLEAN, SILENT], 0, "warning: the advisories did not answer for d"),
        ([SILENT], 0, "warning: the advisories did not answer for any of them"),
    ],
)
def test_what_fails(found: list[Any], status: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = audit.judge({"dependencies": found}, "now")
    assert audit.told([("now", len(found), verdict)]) == status
    assert words in capsys.readouterr().out


def test_every_run_time_requirement_has_a_minimum() -> None:
    least = audit.minimum(tomllib.loads((audit.ROOT / "pyproject.toml").read_text("utf-8")))
    assert {"aiohttp", "jinja2", "orjson", "pyyaml", "dnspython", "kubernetes-asyncio"} <= set(least)
    with pytest.raises(ValueError, match="give it a minimum"):
        audit.minimum(
            {"project": {"dependencies": ["x<3"], "optional-dependencies": {one: [] for one in audit.EXTRAS}}}
        )


def test_what_is_installed_is_what_kvcar_needs() -> None:
    """What its requirements need themselves, but no tools of the tests."""
    found = audit.installed()
    assert {"aiohttp", "yarl", "tokenizers", "msgpack"} <= set(found)
    assert not {"kvcar", "pytest", "ruff", "ai-dynamo-runtime"} & set(found)
