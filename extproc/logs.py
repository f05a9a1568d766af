"""How kvcar logs: lines of text or JSON on stderr, bounded in number, with the request they are about, without secrets.

What is never logged is kept out where lines are written: no text of a request, no header but its id. Masking here is
the second line, for addresses with passwords and for what libraries say.
"""

from __future__ import annotations

import atexit
import json
import logging
import re
import sys
from contextvars import ContextVar
from typing import Protocol

from extproc.log_limits import LogLimits

NOISY = ("transformers", "asyncio", "aiohttp", "grpc", "httpx", "urllib3", "huggingface_hub", "opentelemetry")
"""Libraries that are asked for warnings only."""

LONGEST = 8000
"""Characters of one message; what a decision explains of 32 instances fits."""


class About(Protocol):
    """The request that lines are about."""

    request_id: str
    traceparent: str | None


ABOUT: ContextVar[About | None] = ContextVar("about", default=None)
"""Set by the decider; one exchange is one task, so it holds for whatever is logged on its behalf."""

_MASKS = (
    (re.compile(r"(?<=://)[^/?#@\s]+@"), "***@"),
    (
        re.compile(
            r"""((?:authorization|x-internal-token|api[-_]?key|password|secret)['"]?\s*[:=]\s*['"]?)"""
            r"""((?:bearer|basic)\s+)?[^\s,;'"&]+""",
            re.IGNORECASE,
        ),
        r"\1\2***",
    ),
    (re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{6,}", re.IGNORECASE), r"\1 ***"),
)

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")


def redacted(text: str) -> str:
    """Without user names and passwords in URLs, bearer tokens and values named like a secret; at most LONGEST."""
    for pattern, replacement in _MASKS:
        text = pattern.sub(replacement, text)
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."


def trace_id(traceparent: str | None) -> str | None:
    """The 32 hex digits of a W3C traceparent, None if it is none."""
    found = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
    return found[1] if found else None


def facts(record: logging.LogRecord) -> dict[str, object]:
    """What a line says beside its text: the request it is about, how many like it were left out."""
    left_out = getattr(record, "left_out", None)
    if left_out is not None:
        return {"left_out": left_out}  # of many requests
    about = ABOUT.get()
    if about is None:
        return {}
    found = {"request_id": about.request_id, "trace_id": trace_id(about.traceparent)}
    return {name: value for name, value in found.items() if value}


class TextLines(logging.Formatter):
    """Lines for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = redacted(record.message)
        line = super().formatMessage(record)
        more = " ".join(f"{name}={value}" for name, value in facts(record).items() if name != "left_out")
        return f"{line} [{more}]" if more else line

    def formatException(self, ei: object) -> str:
        return redacted(super().formatException(ei))  # type: ignore[arg-type]


class JsonLines(TextLines):
    """One JSON object a line, for log collectors."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "ts": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redacted(record.getMessage()),
            **facts(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def set_up_logs(level: str, form: str) -> None:
    """Replaces the handlers of the root logger. `level` as in logging, in any case; `form` is text or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    limits = LogLimits(handler)
    handler.addFilter(limits)
    atexit.register(limits.flush, all_of_them=True)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)
