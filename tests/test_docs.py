"""Docs say what the code does: every metric, unscored reason, configuration key and command is documented."""

from __future__ import annotations

import re
from pathlib import Path

import click

from extproc.cli import main
from extproc.metrics import Metrics
from extproc.observe import add_families, add_reload, add_transport
from extproc.reasons import Reason
from kvindex.transport import EventTransport

ROOT = Path(__file__).parent.parent


def rows(path: str) -> set[str]:
    """The names in code marks that open a table row of the page."""
    return set(re.findall(r"^\| `([^`]+)`", (ROOT / path).read_text("utf-8"), re.MULTILINE))


def test_metrics() -> None:
    metrics = Metrics("test")
    add_families(metrics, [])
    add_transport(metrics, EventTransport())
    add_reload(metrics, lambda: None)
    names = {family.name for family in metrics.registry.collect() if family.name.startswith("kvcar_")}
    assert rows("docs/metrics.md") == names


def test_unscored_reasons() -> None:
    assert rows("docs/unscored.md") == {str(reason) for reason in Reason}


def test_every_command_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    for name in main.commands:
        assert f"kvcar {name}" in text, f"README does not show `kvcar {name}`"


def test_every_option_has_help() -> None:
    for name, command in main.commands.items():
        assert command.help, name
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                assert parameter.help, f"{name} --{parameter.name}"


def test_tests_that_the_threat_model_names() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs/threat-model.md").read_text("utf-8"))
    assert len(named) > 60
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text("utf-8"), re.MULTILINE), f"{path}::{name}"


def test_every_claim_of_the_threat_model_names_a_test() -> None:
    claims = False
    for line in (ROOT / "docs/threat-model.md").read_text("utf-8").splitlines():
        if not line.startswith("|"):
            claims = False
        elif line.endswith("| shown by |"):
            claims = True
        elif claims and not line.startswith("|---"):
            assert "::test_" in line.split("|")[3], line


def test_links_between_pages_lead_somewhere() -> None:
    for page in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("*/README.md"),
        *ROOT.glob("examples/*/README.md"),
    ]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)}: {target}"
