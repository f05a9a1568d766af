"""What a check says: findings with cause, evidence and remedy, and the report they make together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class Severity(IntEnum):
    """NOTE: worth knowing, nothing to do. WARNING: costs hits or safety. ERROR: routing by cache does not work."""

    OK = 0
    NOTE = 1
    WARNING = 2
    ERROR = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found.

    id        stable name, "group.what"; the heading in docs/doctor.md
    subject   where: a pool, an instance, a rank, a listener or cluster of Envoy
    what      one line: what was found, and what it costs
    cause     why it is so, as far as can be told
    evidence  what was seen; names, numbers and a few tokens of the doctor's own sample prompts, never of a client's
    remedy    what to change
    """

    id: str
    severity: Severity
    subject: str
    what: str
    cause: str = ""
    evidence: tuple[str, ...] = ()
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "severity": self.severity.name.lower(),
            "subject": self.subject,
            "what": self.what,
            "cause": self.cause,
            "evidence": list(self.evidence),
            "remedy": self.remedy,
        }


def note(id: str, subject: str, what: str, **more: Any) -> Finding:
    return Finding(id, Severity.NOTE, subject, what, **more)


def warning(id: str, subject: str, what: str, **more: Any) -> Finding:
    return Finding(id, Severity.WARNING, subject, what, **more)


def error(id: str, subject: str, what: str, **more: Any) -> Finding:
    return Finding(id, Severity.ERROR, subject, what, **more)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one check came to.

    skipped   why it could not be made, "" when it was made
    detail    a few words on what was seen, for the line of a check that found nothing
    """

    id: str
    group: str
    title: str
    findings: tuple[Finding, ...] = ()
    skipped: str = ""
    detail: str = ""
    seconds: float = 0.0

    @property
    def severity(self) -> Severity:
        return max((one.severity for one in self.findings), default=Severity.OK)


@dataclass(frozen=True, slots=True)
class Report:
    """Every outcome, in the order of the table of checks."""

    outcomes: tuple[Outcome, ...]
    facts: Mapping[str, Any]
    seconds: float = 0.0

    @property
    def findings(self) -> list[Finding]:
        """Worst first."""
        return sorted((one for item in self.outcomes for one in item.findings), key=lambda one: -one.severity)

    @property
    def severity(self) -> Severity:
        return max((item.severity for item in self.outcomes), default=Severity.OK)

    @property
    def exit_status(self) -> int:
        """0 = nothing above a note, 1 = warnings, 2 = errors."""
        return max(0, self.severity - 1)

    def as_dict(self) -> dict[str, Any]:
        return {
            "severity": self.severity.name.lower(),
            "exit_status": self.exit_status,
            "seconds": round(self.seconds, 3),
            "facts": dict(self.facts),
            "findings": [one.as_dict() for one in self.findings],
            "checks": [
                {
                    "id": item.id,
                    "group": item.group,
                    "title": item.title,
                    "severity": "skipped" if item.skipped else item.severity.name.lower(),
                    "skipped": item.skipped,
                    "detail": item.detail,
                    "findings": [one.id for one in item.findings],
                    "seconds": round(item.seconds, 3),
                }
                for item in self.outcomes
            ],
        }
