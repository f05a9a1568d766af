"""The emulator's README names every flag, switch and endpoint; its code stands apart from the router's."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import examples.emulator
from examples.emulator.__main__ import parser
from examples.emulator.faults import ACTIONS, Faults

FOLDER = Path(examples.emulator.__file__).parent
README = (FOLDER / "README.md").read_text(encoding="utf-8")


def test_every_flag_is_documented() -> None:
    flags = {flag for action in parser()._actions for flag in action.option_strings} - {"-h", "--help"}
    table = README.split("## Flags")[1].split("## ")[0]
    assert set(re.findall(r"`(--[a-z-]+)`", table)) == flags


def test_every_switch_is_documented() -> None:
    keys = {item.name for item in fields(Faults)} | set(ACTIONS)
    table = README.split("## Misbehaving")[1].split("Killing")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {key for row in rows for key in re.findall(r"`(\w+)`", row)} == keys


def test_it_shares_no_code_with_the_router() -> None:
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert not [name for name in names if name.split(".")[0] in ("extproc", "kvindex")], path.name
