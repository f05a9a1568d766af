"""Known vulnerabilities of what kvcar needs at run time: `make audit`, or `python -m tests.audit`.

    installed   each package that kvcar[kubernetes,dns,otel] brings here, as installed
    minimum     each requirement of pyproject.toml at the least version that it allows

Asks pip-audit (PyPI's advisories). What has a fix fails: raise the minimum to it, or install it. What has none is told,
and so is what the service does not answer for: neither is a reason to stop work, and silence is not called clean.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
EXTRAS = ("kubernetes", "dns", "otel")
Pins = Mapping[str, str]


class Verdict(NamedTuple):
    fixable: list[str]
    unfixed: list[str]
    unknown: list[str]


def minimum(pyproject: Mapping[str, Any]) -> Pins:
    """Of every run-time requirement. Raises ValueError for one that has none."""
    project = pyproject["project"]
    texts = [*project["dependencies"], *(text for extra in EXTRAS for text in project["optional-dependencies"][extra])]
    found = {}
    for text in texts:
        requirement = Requirement(text)
        least = [one.version for one in requirement.specifier if one.operator in (">=", "==", "~=")]
        if len(least) != 1:
            raise ValueError(f"{text}: give it a minimum version")
        found[canonicalize_name(requirement.name)] = least[0]
    return found


def installed(top: str = "kvcar") -> Pins:
    """Everything that the distribution needs here, itself left out."""
    found: dict[str, str] = {}
    todo: list[tuple[str, frozenset[str]]] = [(canonicalize_name(top), frozenset(EXTRAS))]
    seen = set(todo)
    while todo:
        name, extras = todo.pop()
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # for another platform, or an extra nobody installed
            continue
        found[name] = distribution.version
        for text in distribution.requires or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                one = (canonicalize_name(needed.name), frozenset(needed.extras))
                if one not in seen:
                    seen.add(one)
                    todo.append(one)
    del found[canonicalize_name(top)]
    return found


def judge(report: Mapping[str, Any], what: str) -> Verdict:
    """pip-audit's JSON."""
    verdict = Verdict([], [], [])
    for one in report["dependencies"]:
        if "skip_reason" in one:
            verdict.unknown.append(one["name"])
            continue
        for bug in one["vulns"]:
            where, fixes = f"{what} {one['name']} {one['version']}: {bug['id']}", bug["fix_versions"]
            (verdict.fixable if fixes else verdict.unfixed).append(
                f"{where}, fixed in {', '.join(fixes)}" if fixes else f"{where}, no fix yet"
            )
    return verdict


def ask(pins: Pins, what: str) -> Verdict:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("".join(f"{name}=={version}\n" for name, version in pins.items()))
        file.flush()
        command = [sys.executable, "-m", "pip_audit", "-s", "pypi", "-f", "json", "--no-deps", "--disable-pip"]
        options = ["--progress-spinner", "off", "--timeout", "10", "-r", file.name]
        done = subprocess.run([*command, *options], check=False, capture_output=True, text=True, timeout=300)
    try:
        report = json.loads(done.stdout)
        for reason in [one["skip_reason"] for one in report["dependencies"] if "skip_reason" in one][:1]:
            print(f"audit, {what}: {reason}")
        return judge(report, what)
    except ValueError:
        print((re.findall(r"^.*Error.*$", done.stderr, re.MULTILINE) or ["pip-audit gave no report"])[-1])
        return Verdict([], [], list(pins))


def told(verdicts: Iterable[tuple[str, int, Verdict]]) -> int:
    """Prints what was found; the exit status."""
    failed = False
    for what, count, verdict in verdicts:
        for line in (*verdict.fixable, *verdict.unfixed):
            print(line)
        failed |= bool(verdict.fixable)
        known = count - len(verdict.unknown)
        print(f"audit, {what}: {known} of {count} packages looked up, {len(verdict.fixable)} findings with a fix")
        if verdict.unknown:
            which = ", ".join(sorted(verdict.unknown)) if known else "any of them: nothing is known"
            print(f"  warning: the advisories did not answer for {which}")
    return int(failed)


def main() -> int:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    lists = {"installed": installed(), "minimum": minimum(pyproject)}
    return told((what, len(pins), ask(pins, what)) for what, pins in lists.items())


if __name__ == "__main__":
    sys.exit(main())
