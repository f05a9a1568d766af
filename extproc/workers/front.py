"""The admin port of several workers: asks theirs, over a Unix socket each, and answers as one.

GET /readyz /metrics /status /streams /decisions   all are asked, merged (merge.py, families.py)
the dashboard's overview                           the same (overview.py); one decision: the worker that made it
what changes something (ALL)                       goes to all; kept for a worker that starts later (`Memory`)
everything else                                    one of them answers, the first that is ready: all know the same

Who may ask is judged by the workers' own guard, which is told where the request came from: one rule, one place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import aiohttp
import orjson
from aiohttp import web
from multidict import CIMultiDict

from extproc.admin import bodies
from extproc.admin.conductor import BadQuery
from extproc.admin.reply import reply
from extproc.admin.server import MAX_BODY, REMOTE_HEADER
from extproc.workers import merge
from extproc.workers.families import Pages, process_page, render, worker_families
from extproc.workers.overview import LOOK_BACK, decision_of, overview

log = logging.getLogger(__name__)

ALL = frozenset({
    "/streams/resync", "/streams/rebuild", "/instances/drain", "/instances/undrain", "/log-level",
    "/v1/internal/heartbeat", "/register", "/unregister", "/events",
})  # fmt: skip
TIMEOUT = aiohttp.ClientTimeout(total=60.0, sock_connect=2.0)
QUICK = aiohttp.ClientTimeout(total=3.0)
"""For pages made from memory: probes and scrapers do not wait for a worker that hangs."""
_HOP = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "upgrade", "content-length", "te", REMOTE_HEADER.lower()}
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Answer(NamedTuple):
    """One worker's. `status` 0: it could not be asked, the body says why."""

    worker: int
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return orjson.loads(self.body)


class Crew(Protocol):
    """What the front asks of the supervisor."""

    @property
    def total(self) -> int: ...
    def sessions(self) -> Mapping[int, aiohttp.ClientSession]:
        """Of the workers that have started, by number."""

    def rows(self) -> list[dict[str, Any]]:
        """Each worker for /status."""


class Memory:
    """What was done to all workers and has to be done again to one that starts anew: drained instances, log level,
    registrations. As much as there are instances."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], tuple[str, str, bytes]] = {}

    def note(self, path: str, content_type: str, data: bytes, fields: Any) -> None:
        """After it was done. `fields`: the body decoded."""
        if not isinstance(fields, dict):
            return
        instance, rank = fields.get("instance"), fields.get("dp_rank")
        if path == "/instances/drain":
            self._kept["drain", instance] = (path, content_type, data)
        elif path == "/instances/undrain":
            self._kept.pop(("drain", instance), None)
        elif path == "/log-level":
            self._kept["level",] = (path, content_type, data)
        elif path == "/register":
            key = ("register", fields.get("instance_id"), rank, fields.get("modelname"), fields.get("tenant_id"))
            self._kept[key] = (path, content_type, data)
        elif path == "/unregister":
            for key in [key for key in self._kept if key[:2] == ("register", fields.get("instance_id"))]:
                if rank is None or key[2] == rank:
                    del self._kept[key]

    def __iter__(self) -> Iterator[tuple[str, str, bytes]]:
        """(path, content type, body) in the order in which they were done."""
        return iter(list(self._kept.values()))


class Front:
    """The application over a crew."""

    def __init__(self, crew: Crew, *, token: str | None) -> None:
        self._crew = crew
        self._headers = {"X-Internal-Token": token} if token else {}
        self._was_ready = False
        self.pages = Pages()
        self.memory = Memory()

    def app(self) -> web.Application:
        merged: dict[str, Handler] = {
            "/healthz": self._healthz, "/readyz": self._readyz, "/metrics": self._metrics,
            "/status": self._status, "/streams": self._streams, "/decisions": self._decisions,
            "/v1/internal/overview": self._overview, "/v1/internal/decision": self._decision,
        }  # fmt: skip

        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                if request.method == "GET" and request.path in merged:
                    return await merged[request.path](request)
                if request.method == "POST" and request.path in ALL:
                    return await self._act(request)
                return await self._forward(request)
            except web.HTTPException as error:
                return reply({"error": error.reason}, error.status)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                return reply({"error": f"a worker did not answer: {type(error).__name__}: {error}"}, 503)
            except Exception:
                log.exception("admin request %s %s failed", request.method, request.path)
                return reply({"error": "internal error, see the log"}, 500)

        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", handle)
        return app

    async def replay(self, session: aiohttp.ClientSession) -> None:
        """Tells a worker that has just started what the others were told before. Never raises."""
        for path, content_type, data in self.memory:
            headers = {**self._headers, REMOTE_HEADER: "127.0.0.1", "Content-Type": content_type}
            try:
                async with session.post(f"http://localhost{path}", data=data, headers=headers) as answer:
                    if answer.status >= 400:
                        log.warning("a restarted worker refused %s: %.200s", path, await answer.text())
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                log.warning("a restarted worker could not be told %s: %s", path, error)

    async def watch_start(self) -> None:
        """Until all have been ready once, also when nobody asks meanwhile: it decides what /readyz says later."""
        while not self._was_ready:
            sessions = self._crew.sessions()
            ready = [await self._is_ready(session) for session in sessions.values()]
            self._was_ready |= len(ready) == self._crew.total and all(ready)
            await asyncio.sleep(0.2)

    @staticmethod
    async def _is_ready(session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get("http://localhost/readyz", timeout=QUICK) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    # -- asking

    async def _ask(
        self, number: int, session: aiohttp.ClientSession, request: web.Request, data: bytes | None
    ) -> Answer:
        timeout = TIMEOUT if request.method == "POST" else QUICK
        try:
            url = f"http://localhost{request.path}{_query(request)}"
            async with session.request(
                request.method, url, data=data, headers=_headers(request), timeout=timeout, allow_redirects=False
            ) as answer:
                return Answer(number, answer.status, answer.headers, await answer.read())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return Answer(number, 0, {}, f"{type(error).__name__}: {error}".encode())

    async def _all(self, request: web.Request, data: bytes | None = None) -> list[Answer]:
        """Of every worker that has started. Raises HTTPServiceUnavailable when nobody has."""
        found = await asyncio.gather(
            *(self._ask(number, session, request, data) for number, session in self._crew.sessions().items())
        )
        answered = [one for one in found if one.status]
        if not answered:
            raise web.HTTPServiceUnavailable(reason="no worker answers")
        return answered

    async def _merged(self, request: web.Request, join: Callable[[list[Answer]], Any]) -> web.Response:
        """All answers as one; the first that is not 200 goes back as it is."""
        found = await self._all(request)
        refused = next((one for one in found if one.status != 200), None)
        return _response(refused) if refused is not None else reply(join(found))

    # -- pages

    async def _healthz(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    async def _readyz(self, request: web.Request) -> web.StreamResponse:
        try:
            answers = [one.json() for one in await self._all(request)]
        except web.HTTPServiceUnavailable:
            answers = []
        serves, page = merge.readiness(answers, self._crew.total, was_ready=self._was_ready)
        self._was_ready |= serves
        return reply(page, 200 if serves else 503)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        plain = request.clone(headers={**_headers(request), "Accept": "text/plain"})
        try:
            for answer in await self._all(plain):
                try:
                    self.pages.put(answer.worker, answer.body.decode())
                except ValueError as error:  # what it said last stays on the page, as of one that hangs
                    log.warning("worker %d answered %d, no metrics page: %.200s", answer.worker, answer.status, error)
        except web.HTTPServiceUnavailable:
            pass  # what was seen last, and that nobody is up
        families = self.pages.merged([("supervisor", process_page())])
        families += worker_families((str(row["worker"]), row["state"], row["restarts"]) for row in self._crew.rows())
        body, content_type = render(families, request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _status(self, request: web.Request) -> web.StreamResponse:
        return await self._merged(request, lambda found: merge.status([one.json() for one in found], self._crew.rows()))

    async def _streams(self, request: web.Request) -> web.StreamResponse:
        return await self._merged(
            request, lambda found: {"streams": merge.streams([one.json()["streams"] for one in found])}
        )

    async def _decisions(self, request: web.Request) -> web.StreamResponse:
        def join(found: list[Answer]) -> Any:
            rows = {one.worker: one.json()["decisions"] for one in found}
            return {"decisions": merge.decisions(rows, int(request.query.get("limit", "100")))}

        return await self._merged(request, join)

    async def _overview(self, request: web.Request) -> web.StreamResponse:
        since = _number(request, "since")
        if since is not None:
            request = _asking(request, since=str(max(-1, since - LOOK_BACK)))

        def join(found: list[Answer]) -> Any:
            return overview({one.worker: one.json() for one in found}, self._crew.total, -1 if since is None else since)

        return await self._merged(request, join)

    async def _decision(self, request: web.Request) -> web.StreamResponse:
        number = _number(request, "number")
        if number is None:
            return await self._forward(request)  # any of them refuses it
        worker, own = decision_of(number, self._crew.total)
        session = self._crew.sessions().get(worker)
        if session is None:
            return reply({"error": f"worker {worker}, which made this decision, does not run"}, 404)
        answer = await self._ask(worker, session, _asking(request, number=str(own)), None)
        if not answer.status:
            return reply({"error": f"worker {worker} did not answer: {answer.body.decode()}"}, 503)
        return (
            reply({**answer.json(), "number": number, "worker": worker}) if answer.status == 200 else _response(answer)
        )

    async def _act(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        found = await self._all(request, data)
        refused = next((one for one in found if one.status >= 400), None)
        if len(found) > 1:
            log.info("%s of %s: %s", request.path, request.remote, [one.status for one in found])
        if any(one.status < 400 for one in found):
            try:
                fields = bodies.decoder(request)(data)
            except BadQuery:
                fields = None
            self.memory.note(request.path, request.content_type, data, fields)
        if refused is not None:
            return _response(refused)
        if request.content_type in bodies.MSGPACK:
            return _response(found[0])
        return reply(merge.action([one.json() for one in found]), found[0].status)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        """By the first worker that has started, streamed: a snapshot may be large."""
        data = await request.read()
        for session in self._crew.sessions().values():
            try:
                answer = await session.request(
                    request.method, f"http://localhost{request.path}{_query(request)}", data=data or None,
                    headers=_headers(request), timeout=TIMEOUT, allow_redirects=False,
                )  # fmt: skip
            except (aiohttp.ClientError, OSError, TimeoutError):
                continue  # the next one knows it as well
            async with answer:
                response = web.StreamResponse(status=answer.status, headers=_kept(answer.headers))
                await response.prepare(request)
                try:
                    async for part in answer.content.iter_any():
                        await response.write(part)
                    await response.write_eof()
                except (aiohttp.ClientError, OSError, TimeoutError):
                    if request.transport is not None:  # only an end of the connection says now that this was not all
                        request.transport.abort()
                return response
        raise web.HTTPServiceUnavailable(reason="no worker answers")


def _number(request: web.Request, name: str) -> int | None:
    """Of the query; None without one, and for what is none (a worker says so)."""
    text = request.query.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else None


def _asking(request: web.Request, **query: str) -> web.Request:
    return request.clone(rel_url=request.rel_url.update_query(query))


def _query(request: web.Request) -> str:
    return f"?{request.query_string}" if request.query_string else ""


def _kept(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _HOP)


def _headers(request: web.Request) -> CIMultiDict[str]:
    """The client's, and where it is."""
    found = _kept(request.headers)
    found[REMOTE_HEADER] = request.remote or ""
    return found


def _response(answer: Answer) -> web.Response:
    return web.Response(status=answer.status, body=answer.body, headers=_kept(answer.headers))
