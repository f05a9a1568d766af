"""What an operator may do (POST): resync and rebuild streams, drain instances, change the log level.

Every action is logged with where it came from. Bodies are small JSON objects; a wrong one is answered 400, a name that
nobody has 404. guard.py says who may do this.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from extproc.admin.endpoint import Endpoint, Schema, record, reference
from extproc.admin.pages import Source, log_level
from extproc.admin.reply import reply
from extproc.admin.schemas import COUNT, FLAG, INSTANCE_STATES, TEXT
from extproc.log_limits import ALWAYS
from extproc.pool import Pool

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # of its own: who did what is logged at every level, also who silenced the log

MAX_BODY = 64 << 10
LEVELS = ("debug", "info", "warning", "error")


def _body(required: Schema, optional: Schema | None = None) -> dict[str, Any]:
    return {**record(required, optional), "additionalProperties": False}


_STREAM = _body({"instance": TEXT}, {"dp_rank": COUNT})
_INSTANCE = _body({"instance": TEXT})
_LEVEL = _body({"level": {"enum": list(LEVELS)}})


class Refused(Exception):
    """An action that cannot be done: status and text of the answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Actions:
    """The handlers over one source."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def endpoints(self) -> list[Endpoint]:
        wrong = {400: reference("Error"), 404: reference("Error")}
        asked = {200: record({"instance": TEXT, "streams": COUNT}), **wrong}
        drained = {
            200: record(
                {"instance": TEXT, "changed": FLAG, "state": {"enum": [*INSTANCE_STATES, "gone"]}, "in_flight": COUNT}
            ),
            **wrong,
        }
        level = {200: record({"level": TEXT, "before": TEXT}), 400: reference("Error")}
        return [
            self._action("/streams/resync", self._resync, "Ask the engine for its history or a snapshot now", asked,
                         _STREAM),
            self._action("/streams/rebuild", self._rebuild, "Drop what a stream brought and its connection, start anew",
                         asked, _STREAM),
            self._action("/instances/drain", self._drain, "No new requests for an instance; its streams are kept",
                         drained, _INSTANCE),
            self._action("/instances/undrain", self._undrain, "Requests for it again", drained, _INSTANCE),
            self._action("/log-level", self._level, "Log more or less, until the next start", level, _LEVEL),
        ]  # fmt: skip

    def _action(
        self, path: str, act: Callable[[dict[str, Any]], dict[str, Any]], summary: str, answers: Any, body: Any
    ) -> Endpoint:
        async def handle(request: web.Request) -> web.StreamResponse:
            fields: dict[str, Any] = {}
            try:
                fields = await _fields(request, body)
                answer = act(fields)
            except Refused as error:
                log.warning("admin action %s%s from %s refused: %s", path, _words(fields), request.remote, error)
                return reply({"error": str(error)}, error.status)
            news = {name: value for name, value in answer.items() if name not in fields}
            log.info("admin action %s%s from %s:%s", path, _words(fields), request.remote, _words(news), extra=ALWAYS)
            return reply(answer)

        return Endpoint("POST", path, handle, summary, answers, body=body, action=True)

    def _pool_of(self, name: str) -> Pool:
        for pool in self._source.pools:
            if name in pool.by_name:
                return pool
        raise Refused(404, f"instance {name!r:.200} is not known: GET /status names them")

    def _resync(self, fields: dict[str, Any]) -> dict[str, Any]:
        return self._streams(fields, lambda pool: pool.directory.resync)

    def _rebuild(self, fields: dict[str, Any]) -> dict[str, Any]:
        return self._streams(fields, lambda pool: pool.directory.rebuild)

    def _streams(
        self, fields: dict[str, Any], act: Callable[[Pool], Callable[[str, int | None], int]]
    ) -> dict[str, Any]:
        name, rank = fields["instance"], fields.get("dp_rank")
        count = act(self._pool_of(name))(name, rank)
        if not count:
            which = "no stream" if rank is None else f"no stream of rank {rank}"
            raise Refused(404, f"instance {name!r:.200} has {which} that is followed: GET /streams says why")
        return {"instance": name, "streams": count}

    def _drain(self, fields: dict[str, Any]) -> dict[str, Any]:
        name = fields["instance"]
        pool = self._pool_of(name)
        return self._drained(pool, name, self._source.overrides.drain(name))

    def _undrain(self, fields: dict[str, Any]) -> dict[str, Any]:
        name = fields["instance"]
        changed = self._source.overrides.undrain(name)  # also one that has left: it may come back
        if changed and not any(name in pool.by_name for pool in self._source.pools):
            return {"instance": name, "changed": True, "state": "gone", "in_flight": 0}
        return self._drained(self._pool_of(name), name, changed)

    @staticmethod
    def _drained(pool: Pool, name: str, changed: bool) -> dict[str, Any]:
        state = str(pool.by_name[name].state)
        in_flight = pool.inflight.of_instance(name).requests
        return {"instance": name, "changed": changed, "state": state, "in_flight": in_flight}

    @staticmethod
    def _level(fields: dict[str, Any]) -> dict[str, Any]:
        before = log_level()
        logging.getLogger().setLevel(fields["level"].upper())
        return {"level": fields["level"], "before": before}


def _words(fields: Mapping[str, Any]) -> str:
    """' name=value name=value' for a log line; what could break the line or pretend to be another field is quoted."""
    return "".join(f" {name}={_word(value)}" for name, value in fields.items())


def _word(value: Any) -> str:
    plain = isinstance(value, str) and re.fullmatch(r"[\w.:/\[\]-]{1,200}", value, re.ASCII)
    return value if plain else json.dumps(value)[:200]


async def _fields(request: web.Request, schema: dict[str, Any]) -> dict[str, Any]:
    """The body as the schema wants it. Raises Refused that names what is wrong."""
    if request.content_length is None or request.content_length > MAX_BODY:
        raise Refused(400, f"the body must be a JSON object of at most {MAX_BODY} bytes, with Content-Length")
    try:
        fields = json.loads(await request.read())
    except (ValueError, RecursionError):
        raise Refused(400, "the body is no JSON") from None
    if not isinstance(fields, dict):
        raise Refused(400, "the body must be an object")
    known = schema["properties"]
    for name in schema["required"]:
        if name not in fields:
            raise Refused(400, f"{name} is missing")
    for name, value in fields.items():
        if name not in known:
            raise Refused(400, f"{name!r:.100} is not known: there are {', '.join(known)}")
        if problem := _problem(value, known[name]):
            raise Refused(400, f"{name} {problem}, not {json.dumps(value)[:100]}")
    return fields


def _problem(value: Any, schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return "" if value in schema["enum"] else f"must be one of {', '.join(schema['enum'])}"
    if schema["type"] == "integer":
        # JSON has one kind of number: 1.0 is a whole one
        whole = value.is_integer() if isinstance(value, float) else isinstance(value, int)
        return "" if whole and not isinstance(value, bool) and value >= 0 else "must be a whole number of at least 0"
    return "" if isinstance(value, str) else "must be a text"
