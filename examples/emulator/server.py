"""The emulated engine as an HTTP server: OpenAI API, vLLM's side endpoints, and the /emulator/ switchboard."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import zmq
from aiohttp import web

from . import api
from .api import Api, ApiError, Choice, Job
from .engine import Engine, EngineConfig, Request
from .faults import Faults, parse_control
from .hashing import block_hash
from .metrics import render_metrics
from .pool import Content
from .publisher import PortsTaken, Publisher
from .rank import Item, Rank
from .text import Answers, TextModel
from .wire import WireForm, wire_hash

PORT_ATTEMPTS = 50
MAX_BODY = 64 << 20
REMEMBERED_REQUESTS = 4096

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class ServerConfig:
    """Everything that the command line sets. Ports: 0 = a free one; None = no such socket."""

    name: str
    model: str
    engine: EngineConfig
    form: WireForm
    host: str = "127.0.0.1"
    port: int = 0
    events_port: int | None = 0
    events_connect: str | None = None
    replay_port: int | None = 0
    topic: str = ""
    buffer_steps: int = 10_000
    hwm: int = 100_000
    dp: int = 1
    loras: tuple[str, ...] = ()
    max_model_len: int | None = None
    default_max_tokens: int = 16
    faults: Faults = field(default_factory=Faults)


class Lost(Exception):
    """The engine was restarted under the request."""


class Server:
    """One emulated instance."""

    def __init__(self, config: ServerConfig, text: TextModel) -> None:
        capacity = (config.engine.blocks - 1) * config.engine.block_size
        self.config = config
        self.text = text
        self.faults = config.faults
        self.answers = Answers(text, config.engine.seed)
        self.api = Api(
            text=text,
            model=config.model,
            max_model_len=min(config.max_model_len or capacity, capacity),
            ranks=config.dp,
            loras={name: number for number, name in enumerate(config.loras, 1)},
            default_max_tokens=config.default_max_tokens,
        )
        self.ranks: list[Rank] = []
        self.port = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._runner: web.AppRunner | None = None
        self.tasks: list[asyncio.Task[None]] = []
        self._next_rank = 0
        self._served: deque[dict[str, Any]] = deque(maxlen=REMEMBERED_REQUESTS)

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> dict[str, Any]:
        """Bind everything and serve; returns the line that tells the chosen ports. Raises OSError or PortsTaken."""
        publishers = self._bind_publishers()
        for publisher in publishers:
            self.ranks.append(Rank(Engine(self.config.engine), publisher, self.faults))
        self._runner = web.AppRunner(self._app(), handler_cancellation=True, access_log=None)
        await self._runner.setup()
        listener = socket.socket(socket.AF_INET6 if ":" in self.config.host else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self.config.host, self.config.port))
        await web.SockSite(self._runner, listener, shutdown_timeout=0.5).start()
        self.port = listener.getsockname()[1]
        self._apply_faults()
        self.tasks = [asyncio.create_task(rank.run()) for rank in self.ranks]
        return self._ready_line()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for rank in self.ranks:
            rank.publisher.close()
        self._context.term()

    def _bind_publishers(self) -> list[Publisher]:
        """Port of rank r = base port + r, for both sockets; free base ports are tried until all ranks fit."""
        config = self.config
        for attempt in range(1, PORT_ATTEMPTS + 1):
            publishers: list[Publisher] = []
            try:
                for rank in range(config.dp):
                    publishers.append(self._publisher(rank))
                    base, replay = config.events_port, config.replay_port
                    if rank:
                        base, replay = publishers[0].port, publishers[0].replay_port
                    publishers[rank].start(
                        self._context,
                        host=config.host,
                        port=None if base is None else base + rank,
                        replay_port=None if replay is None else replay + rank,
                        connect=config.events_connect,
                    )
                return publishers
            except PortsTaken:
                for publisher in publishers:
                    publisher.close()
                if config.dp == 1 or attempt == PORT_ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    def _publisher(self, rank: int) -> Publisher:
        config = self.config
        return Publisher(
            form=config.form,
            rank=rank,
            topic=config.topic,
            buffer_steps=config.buffer_steps,
            hwm=config.hwm,
            faults=self.faults,
        )

    def _ready_line(self) -> dict[str, Any]:
        config = self.config
        host = f"[{config.host}]" if ":" in config.host else config.host
        events = [rank.publisher.port for rank in self.ranks]
        replays = [rank.publisher.replay_port for rank in self.ranks]
        return {
            "name": config.name,
            "model": config.model,
            "host": config.host,
            "http_port": self.port,
            "url": f"http://{host}:{self.port}",
            "events_ports": events,
            "replay_ports": replays if config.replay_port is not None else None,
            "events_endpoint": config.events_connect or (f"tcp://{host}:{events[0]}" if events[0] else None),
            "replay_endpoint": f"tcp://{host}:{replays[0]}" if config.replay_port is not None else None,
            "topic": config.topic,
            "wire": config.form.name,
            "block_size": config.engine.block_size,
            "max_model_len": self.api.max_model_len,
            "dp": config.dp,
        }

    # -- HTTP ---------------------------------------------------------------------------------------------------

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY)
        routes: list[tuple[str, str, Handler]] = [
            ("POST", "/v1/chat/completions", self._chat),
            ("POST", "/v1/completions", self._completion),
            ("POST", "/v1/chat/completions/render", self._render_chat),
            ("POST", "/v1/completions/render", self._render_completion),
            ("POST", "/tokenize", self._tokenize),
            ("POST", "/reset_prefix_cache", self._reset),
            ("GET", "/v1/models", self._models),
            ("GET", "/health", self._health),
            ("GET", "/ping", self._health),
            ("GET", "/version", self._version),
            ("GET", "/load", self._load),
            ("GET", "/metrics", self._metrics),
            ("GET", "/emulator/state", self._state),
            ("GET", "/emulator/requests", self._requests),
            ("POST", "/emulator/lookup", self._lookup),
            ("POST", "/emulator/control", self._control),
        ]
        for method, path, handler in routes:
            app.router.add_route(method, path, self._guarded(handler))
        return app

    def _guarded(self, handler: Handler) -> Handler:
        async def call(request: web.Request) -> web.StreamResponse:
            try:
                response = await handler(request)
            except ApiError as error:
                response = web.json_response(error.body, status=error.status)
            except Lost:
                if request.transport is not None:
                    request.transport.abort()
                response = web.Response(status=500)
            if not response.prepared:
                response.headers["x-engine"] = self.config.name
            return response

        return call

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=True)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, chat=False)

    async def _generate(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        if self.faults.delay_ms:
            await asyncio.sleep(self.faults.delay_ms / 1000)
        if self.faults.take("fail_requests"):
            raise ApiError(self.faults.fail_status, "EngineCore encountered an issue.", kind="InternalServerError")
        job = self.api.parse(await request.read(), request.headers, chat=chat)
        rank = self._pick(job)
        sequences = [self._sequence(job, prompt, index) for prompt in job.prompts for index in range(job.n)]
        output: asyncio.Queue[Item] = asyncio.Queue()
        try:
            rank.submit(sequences, output)
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        choices = [Choice(self.text, self.text.eos) for _ in sequences]
        try:
            if job.stream:
                return await self._stream(request, job, sequences, choices, output)
            while any(choice.finish is None for choice in choices):
                index, token, finish = await output.get()
                if token is None:
                    raise Lost
                choices[index].feed(token, finish)
            return web.json_response(api.full_answer(job, choices, self._usage(job, sequences, choices)))
        finally:
            rank.abort(sequences)
            self._remember(request, job, rank, sequences, choices)

    async def _stream(
        self,
        request: web.Request,
        job: Job,
        sequences: list[Request],
        choices: list[Choice],
        output: asyncio.Queue[Item],
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "x-engine": self.config.name}
        )
        await response.prepare(request)  # before the prefill, as vLLM does
        opened = False

        def counted() -> dict[str, Any] | None:
            return self._usage(job, sequences, choices) if job.continuous_usage else None

        while any(choice.finish is None for choice in choices):
            index, token, finish = await output.get()
            if token is None:
                raise Lost
            if not opened:
                opened = True
                if job.chat:
                    roles = [api.role_row(number) for number in range(len(choices))]
                    await response.write(api.chunk(job, roles, first=True, counted=counted()))
            choice = choices[index]
            text = choice.feed(token, finish)
            row = api.delta_row(job, index, text, token, finish, first=len(choice.ids) == 1)
            await response.write(api.chunk(job, [row], counted=counted()))
        if job.include_usage:
            await response.write(api.chunk(job, [], counted=self._usage(job, sequences, choices)))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _sequence(self, job: Job, prompt: list[int], index: int) -> Request:
        return Request(
            prompt=prompt,
            answer=self.answers.start(prompt, index=index, endless=job.ignore_eos),
            max_tokens=job.max_tokens,
            eos=None if job.ignore_eos else self.text.eos,
            salt=job.salt,
            lora=job.lora,
            session=job.session,
            read_cache=job.read_cache,
            report_full=job.report_full,
        )

    def _usage(self, job: Job, sequences: list[Request], choices: list[Choice]) -> dict[str, Any]:
        """vLLM's count: each prompt once, all generated tokens, cached tokens of the last prompt's first choice."""
        counted = api.usage(
            sum(map(len, job.prompts)),
            sum(len(choice.ids) for choice in choices),
            sequences[-job.n].cached_tokens or 0,
        )
        if self.faults.no_cached_tokens:
            del counted["prompt_tokens_details"]
        return counted

    def _pick(self, job: Job) -> Rank:
        if job.rank is not None:
            return self.ranks[job.rank]
        count = len(self.ranks)
        order = [self.ranks[(self._next_rank + offset) % count] for offset in range(count)]
        self._next_rank = (self._next_rank + 1) % count
        return min(order, key=lambda rank: rank.pressure)

    def _remember(
        self, request: web.Request, job: Job, rank: Rank, sequences: list[Request], choices: list[Choice]
    ) -> None:
        self._served.append(
            {
                "id": job.identity,
                "headers": {
                    name.lower(): value for name, value in request.headers.items() if name.lower().startswith("x-")
                },
                "rank": rank.publisher.rank,
                "prompt_tokens": [len(prompt) for prompt in job.prompts],
                "cached_tokens": [request.cached_tokens for request in sequences],
                "host_tokens": [request.host_tokens for request in sequences],
                "completion_tokens": [len(choice.ids) for choice in choices],
                "finished": [choice.finish for choice in choices],
            }
        )

    # -- vLLM's side endpoints ----------------------------------------------------------------------------------

    async def _render_chat(self, request: web.Request) -> web.StreamResponse:
        self._needs_token_api()
        return self._rendered(self.api.parse(await request.read(), request.headers, chat=True))

    async def _render_completion(self, request: web.Request) -> web.StreamResponse:
        self._needs_token_api()
        return self._rendered(self.api.parse(await request.read(), request.headers, chat=False))

    def _rendered(self, job: Job) -> web.Response:
        rows = [{"request_id": job.identity, "token_ids": prompt, "model": job.model} for prompt in job.prompts]
        return web.json_response(rows[0] if job.chat else rows)

    def _needs_token_api(self) -> None:
        if self.faults.no_token_api:
            raise ApiError(404, "Not Found", kind="NotFoundError")

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        self._needs_token_api()
        return web.json_response(self.api.tokenize(await request.read()))

    async def _reset(self, request: web.Request) -> web.StreamResponse:
        running = request.query.get("reset_running_requests") == "true"
        external = request.query.get("reset_external") == "true"
        done = [rank.engine.reset_prefix_cache(running=running, external=external) for rank in self.ranks]
        return web.json_response({"success": all(done)})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self.api.models())

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=503 if self.faults.not_ready else 200)

    async def _version(self, request: web.Request) -> web.StreamResponse:
        version = self.config.form.name.removeprefix("vllm-")
        return web.json_response({"version": version if version.count(".") == 2 else f"{version}.0"})

    async def _load(self, request: web.Request) -> web.StreamResponse:
        busy = sum(len(rank.engine.waiting) + len(rank.engine.running) for rank in self.ranks)
        return web.json_response({"server_load": busy})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        page = render_metrics([rank.engine for rank in self.ranks], self.config.model)
        return web.Response(body=page.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    # -- switchboard --------------------------------------------------------------------------------------------

    async def _control(self, request: web.Request) -> web.StreamResponse:
        try:
            changes = parse_control(json.loads(await request.read()))
        except ValueError as error:
            raise ApiError(400, str(error)) from error
        for key, value in changes.items():
            if key == "restart":
                if value:
                    for rank in self.ranks:
                        rank.restart()
            else:
                setattr(self.faults, key, value)
        self._apply_faults()
        return web.json_response(self.faults.as_dict())

    def _apply_faults(self) -> None:
        for rank in self.ranks:
            rank.publisher.freeze(self.faults.freeze_events)
            rank.wake.set()

    async def _requests(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"requests": list(self._served)})

    async def _state(self, request: web.Request) -> web.StreamResponse:
        """The truth. `?blocks=0` leaves the blocks out."""
        detailed = request.query.get("blocks") != "0"
        rows = []
        for rank in self.ranks:
            engine, publisher = rank.engine, rank.publisher
            buffered = publisher.buffered
            gpu, host = engine.pool.resident(), engine.host.resident()
            row: dict[str, Any] = {
                "rank": publisher.rank,
                "next_sequence": publisher.sequence,
                "buffered": [buffered[0], buffered[-1]] if buffered else None,
                "waiting": len(engine.waiting),
                "running": len(engine.running),
                "gpu_blocks": len(gpu),
                "host_blocks": len(host),
            }
            if detailed:
                row["gpu"] = [self._block(content, copies) for content, copies in gpu]
                row["host"] = [self._block(content, 1) for content in host]
            rows.append(row)
        return web.json_response(
            {
                "name": self.config.name,
                "block_size": self.config.engine.block_size,
                "faults": self.faults.as_dict(),
                "ranks": rows,
            }
        )

    def _block(self, content: Content, copies: int) -> dict[str, Any]:
        """One resident block, hashes in their wire form (bytes as hex)."""

        def shown(digest: bytes | None) -> Any:
            value = wire_hash(self.config.form, digest)
            return value.hex() if isinstance(value, bytes) else value

        return {
            "hash": shown(content.digest),
            "parent": shown(content.parent),
            "tokens": list(content.tokens),
            "extra": list(content.extras or ()),
            "lora": content.lora[1] if content.lora else None,
            "copies": copies,
        }

    async def _lookup(self, request: web.Request) -> web.StreamResponse:
        """What a prompt would hit now, per rank, without touching anything: the last-token rule included."""
        body = api.parse_json(await request.read())
        tokens, salt, lora = body.get("token_ids"), body.get("cache_salt"), body.get("lora")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise ApiError(400, "token_ids must be a list of integers", param="token_ids")
        size = self.config.engine.block_size
        digests: list[bytes] = []
        parent = self.config.engine.root
        for index in range(max(0, len(tokens) - 1) // size):
            extras = [["lora", lora, lora]] if lora else []
            extras += [["cache_salt", salt]] if salt and index == 0 else []
            parent = block_hash(parent, tokens[index * size : (index + 1) * size], extras or None)
            digests.append(parent)
        rows = []
        for rank in self.ranks:
            gpu = len(rank.engine.pool.find(digests))
            host = rank.engine.host.find(digests[gpu:])
            rows.append({"rank": rank.publisher.rank, "gpu_blocks": gpu, "host_blocks": host})
        return web.json_response({"ranks": rows})
