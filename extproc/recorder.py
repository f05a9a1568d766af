"""`kvcar record`: a proxy in front of one engine that writes down what it answers, beside its KV events.

    client --HTTP--> proxy --the same, and return_token_ids--> engine
                       |  answer: usage, token ids                | KV events
                       v                                          v
                     kvindex.recorder.Recording: one capture file

A request's line has to stand behind its events and in front of those of the next request. The engine sends both on
their own ways, so the line is written `settle` seconds after the answer, and a request that comes meanwhile, with no
other in flight, waits for it. Requests that do run at the same time are passed on at once: `start` and `t` tell.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

from kvindex.recorder import Recording, now

log = logging.getLogger(__name__)

PROMPTS = frozenset({"/v1/chat/completions", "/v1/completions"})
RECORDED = PROMPTS | {"/reset_prefix_cache"}
KEPT_HEADERS = ("x-data-parallel-rank",)
"""Request headers that go into the capture. Never more: the others may hold secrets."""
HOP_BY_HOP = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade", "host", "content-length", "accept-encoding", "content-encoding", "expect",
    }
)  # fmt: skip
MAX_BODY = 64 << 20
MAX_LINE = 16 << 20


@dataclass(slots=True)
class Answer:
    """What an answer says of the prompt, read from a JSON body or from server-sent events as they come.

    done  the last event of a stream was seen
    """

    streamed: bool
    usage: dict[str, Any] | None = None
    prompt: list[int] | None = None
    output: list[int] = field(default_factory=list)
    done: bool = False
    _rest: bytes = b""

    def feed(self, part: bytes) -> None:
        """The next bytes of a stream. Never raises."""
        lines = (self._rest + part).split(b"\n")
        self._rest = lines.pop()[-MAX_LINE:]
        for line in lines:
            data = line.strip()
            if data.startswith(b"data:"):
                data = data[5:].strip()
                self.done |= data == b"[DONE]"
                self.read(data)

    def read(self, data: bytes) -> None:
        """A whole body, or one event. Never raises."""
        try:
            body = orjson.loads(data)
        except ValueError:
            return
        if not isinstance(body, dict):
            return
        if isinstance(body.get("usage"), dict):
            self.usage = body["usage"]
        choices = body.get("choices")
        rows = [row for row in choices if isinstance(row, dict)] if isinstance(choices, list) else []
        for holder in (body, *rows[:1]):
            if self.prompt is None and isinstance(holder.get("prompt_token_ids"), list):
                self.prompt = holder["prompt_token_ids"]
        for row in rows:
            if row.get("index", 0) == 0 and isinstance(row.get("token_ids"), list):
                self.output += row["token_ids"]


class Proxy:
    """Forwards everything to one engine; requests with a prompt, and cache resets, are recorded.

    settle          seconds from an answer to its line in the file
    one_at_a_time   a request waits until the one before is answered and written
    without_ids     answers without token ids: `verify` cannot compare those requests
    without_cached  answers that do not tell cached tokens, of `answered` in all
    """

    def __init__(self, engine: str, recording: Recording, *, settle: float = 0.4, one_at_a_time: bool = False) -> None:
        self.engine = engine.rstrip("/")
        self.answered = self.without_ids = self.without_cached = 0
        self._recording = recording
        self._settle = settle
        self._one_at_a_time = one_at_a_time
        self._in_flight = 0
        self._settling: set[asyncio.Task[None]] = set()
        self._waiting: list[asyncio.Future[None]] = []
        self._session: ClientSession | None = None

    def make_app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._handle)
        app.cleanup_ctx.append(self._connect)
        return app

    async def _connect(self, _app: web.Application) -> Any:
        async with new_session() as self._session:
            yield
            while self._settling:
                await asyncio.wait(self._settling)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.method != "POST" or request.path not in RECORDED:
            return await self._forward(request, body, None, {})
        fields = parse(body) if request.path in PROMPTS else None
        if fields is not None and "return_token_ids" not in fields:
            fields["return_token_ids"] = True
            body = orjson.dumps(fields)
        while not self._may_go():
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
        self._in_flight += 1
        record = {
            "start": now(),
            "path": request.path_qs,
            "body": fields,
            "headers": {name: request.headers[name] for name in KEPT_HEADERS if name in request.headers},
        }
        answer = Answer(streamed=bool(fields and fields.get("stream")))
        try:
            return await self._forward(request, body, answer, record)
        finally:
            self._finish(answer, record)

    def _may_go(self) -> bool:
        if self._one_at_a_time:
            return not self._settling and not self._in_flight
        return not self._settling or self._in_flight > 0

    async def _forward(
        self, request: web.Request, body: bytes, answer: Answer | None, record: dict[str, Any]
    ) -> web.StreamResponse:
        assert self._session is not None
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP]
        reply: web.StreamResponse | None = None
        try:
            async with self._session.request(
                request.method, self.engine + request.path_qs, data=body or None, headers=headers, allow_redirects=False
            ) as upstream:
                record["status"] = upstream.status
                reply = web.StreamResponse(status=upstream.status, reason=upstream.reason)
                for name, value in upstream.headers.items():
                    if name.lower() not in HOP_BY_HOP:
                        reply.headers.add(name, value)
                if answer is None or answer.streamed:
                    await reply.prepare(request)
                    async for part in upstream.content.iter_any():
                        if answer is not None:
                            answer.feed(part)
                            if answer.done:  # the client's next request may come before the stream's end does
                                self._finish(answer, record)
                        await reply.write(part)
                else:
                    data = await upstream.read()
                    answer.read(data)
                    self._finish(answer, record)
                    await reply.prepare(request)
                    await reply.write(data)
                await reply.write_eof()
                return reply
        except ClientError as error:
            record["aborted"] = True
            if reply is not None and reply.prepared:  # either side is gone in mid-answer: so is the other one now
                if request.transport is not None:
                    request.transport.abort()
                return reply
            record["status"] = 502
            log.warning("%s %s: %s", request.method, request.path, error)
            return web.json_response({"error": f"the engine does not answer: {error}"}, status=502)

    def _finish(self, answer: Answer, record: dict[str, Any]) -> None:
        """The answer is there: write its line once its events must have come. Done once."""
        if "t" in record:
            return
        record["t"] = now()
        if isinstance(record["body"], dict):
            self.answered += 1
            if record.get("status") == 200:
                self.without_ids += not answer.prompt
                self.without_cached += not (answer.usage or {}).get("prompt_tokens_details")
        record.update(usage=answer.usage, prompt_token_ids=answer.prompt, output_token_ids=answer.output)
        self._in_flight -= 1
        task = asyncio.create_task(self._write(record))
        self._settling.add(task)
        task.add_done_callback(self._written)

    async def _write(self, record: Mapping[str, Any]) -> None:
        await asyncio.sleep(self._settle)
        self._recording.request(record)

    def _written(self, task: asyncio.Task[None]) -> None:
        self._settling.discard(task)
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if not one.done():
                one.set_result(None)


def parse(body: bytes) -> dict[str, Any] | None:
    """A JSON object, or None. Never raises."""
    try:
        fields = orjson.loads(body)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None


def new_session() -> ClientSession:
    """No time limit: an engine may think for long. Compressed answers are not asked for."""
    return ClientSession(
        timeout=ClientTimeout(total=None, sock_connect=10),
        headers={"Accept-Encoding": "identity"},
        skip_auto_headers=("User-Agent", "Content-Type"),
        connector=TCPConnector(limit=0),
        auto_decompress=True,
    )


async def facts(engine: str) -> dict[str, Any]:
    """What the engine says of itself, for the first line: {"vllm": {"version"}, "block_size"}, as far as it does.

    Raises OSError when it cannot be reached.
    """
    found: dict[str, Any] = {}
    async with new_session() as session:
        try:
            async with session.get(f"{engine}/version", timeout=ClientTimeout(10)) as answer:
                version = parse(await answer.read())
                if answer.status == 200 and version and isinstance(version.get("version"), str):
                    found["vllm"] = {"version": version["version"]}
            async with session.get(f"{engine}/metrics", timeout=ClientTimeout(10)) as answer:
                size = block_size(await answer.text(errors="replace")) if answer.status == 200 else None
                if size is not None:
                    found["block_size"] = size
        except (ClientError, TimeoutError, ValueError) as error:
            raise OSError(f"the engine at {engine} does not answer: {error or type(error).__name__}") from None
    return found


def block_size(page: str) -> int | None:
    """Tokens a block, from a metrics page."""
    found = re.search(r'^\w+:cache_config_info\{[^}]*\b(?:block_size|page_size)="(\d+)"', page, re.MULTILINE)
    return int(found[1]) if found else None


def summary(recording: Recording, proxy: Proxy) -> list[str]:
    """What was written, and what makes it less than it could be."""
    counts = recording.counts
    lines = [f"{counts.requests} requests, {counts.live} event messages ({counts.history} of them history)"]
    if counts.missed:
        lines.append(f"{counts.missed} event messages were lost: what follows them counts as incomplete")
    if counts.restarts:
        lines.append(f"the engine's sequence went back {counts.restarts} times: was it restarted?")
    if proxy.without_ids:
        lines.append(f"{proxy.without_ids} answers without token ids: the engine does not know return_token_ids")
    if proxy.answered and proxy.without_cached == proxy.answered:
        lines.append("no answer told cached tokens: does vLLM run with --enable-prompt-tokens-details?")
    return lines
