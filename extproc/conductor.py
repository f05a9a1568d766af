"""`kvcar conductor`: the directory behind the conductors' API alone. No gateway, no tokenizer, no configuration file.

    POST /register --> an index of its own for each (model, tenant) --> POST /query, /query_by_hash

As kv-conductor has it, an index is made by the first registration of a model and stays, empty, when the last one is
gone, until its place is needed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from extproc.admin.registration import Registrations
from extproc.admin.server import AdminServer, guarded
from extproc.registrar import Holder, Home, Registrar
from extproc.registry import MOTOR, Context, Registry, Rejected
from extproc.watch import watch
from kvindex.directory import Directory
from kvindex.fleet import Fleet, Instance
from kvindex.hashing import DEFAULT_SEED
from kvindex.networks import Networks, is_local
from kvindex.options import TransportOptions, from_environment
from kvindex.pacer import SWITCH_INTERVAL
from kvindex.sync import SyncLimits
from kvindex.transport import EventTransport

log = logging.getLogger(__name__)

PORT = 13333
MAX_CONTEXTS = 64


@dataclass(frozen=True, slots=True)
class ConductorOptions:
    """host, port      where it listens; port 0 = any free one
    block_size      tokens a block of every model, None = what registrations say, else the first event
    models          only these may register, () = any
    seed            of the content keys
    token           every request but GET /health has to carry it, None = nobody is asked
    form            of the answers: "motor" or "mooncake"
    expire_after    seconds after which a registration that is not repeated is dropped, None = never
    max_streams     ranks followed of one model
    networks        where what registers may be, () = see kvindex/networks.py
    """

    host: str = "127.0.0.1"
    port: int = PORT
    block_size: int | None = None
    models: tuple[str, ...] = ()
    seed: int = DEFAULT_SEED
    token: str | None = None
    form: str = MOTOR
    expire_after: float | None = None
    max_streams: int = 256
    networks: tuple[str, ...] = ()


class OpenHome:
    """Index and instances of one model and tenant."""

    dialect = "auto"
    recovery: str | None = None
    name = ""

    def __init__(self, context: Context, directory: Directory, expire_after: float | None, networks: Networks) -> None:
        self.context = context
        self.model = context.model
        self.directory = directory
        self.expire_after = expire_after
        self._networks = networks
        self._fleet = Fleet()
        directory.index.keep_names()
        directory.attach(self._fleet)

    @property
    def by_name(self) -> Mapping[str, Instance]:
        return self._fleet.snapshot()

    def knows(self, name: str) -> bool:
        return self._fleet.get(name) is not None

    def taken(self, name: str) -> bool:
        return False

    def admit(self, instance: Instance) -> None:
        self._networks.admit(instance)

    def upsert(self, instance: Instance) -> None:
        self._fleet.upsert(instance)

    def remove(self, name: str) -> None:
        self._fleet.remove(name)


class OpenHomes:
    """Homes that are made when somebody registers. `make`: a directory for blocks of so many tokens, None = any."""

    def __init__(self, make: Callable[[int | None], Directory], options: ConductorOptions) -> None:
        self._make = make
        self._options = options
        self._networks = Networks(options.networks, loopback=is_local(options.host))
        self._homes: dict[Context, OpenHome] = {}

    def closed(self) -> str | None:
        return None

    def of(self, context: Context) -> OpenHome | None:
        return self._homes.get(context)

    def find(self, model: str, tenant: str) -> OpenHome | None:
        return self._homes.get(Context(model, tenant))

    def holder(self, model: str, tenant: str) -> Holder | None:
        return self.find(model, tenant)

    def holders_of(self, instance_id: str, model: str | None, tenant: str) -> list[Holder]:
        return [
            home
            for context, home in self._homes.items()
            if context.tenant == tenant and model in (None, context.model) and home.knows(instance_id)
        ]

    def open(self, model: str, tenant: str, block_size: int | None) -> OpenHome:
        options = self._options
        if options.models and model not in options.models:
            raise Rejected(
                f"model {model!r} is not served here: this conductor was started with --model"
                f" {', '.join(options.models)}", 404, "unknown_context",
            )  # fmt: skip
        context = Context(model, tenant)
        home = self._homes.get(context)
        wanted = options.block_size or block_size
        if home is not None and (home.by_name or home.directory.block_size in (None, wanted)):
            return home
        if home is None and len(self._homes) >= MAX_CONTEXTS and self._left() is None:
            raise Rejected(f"{MAX_CONTEXTS} models and tenants are registered, which is the bound", 503, "full")
        return OpenHome(context, self._make(wanted), options.expire_after, self._networks)

    def keep(self, home: Home) -> None:
        """A new one takes the place of an empty one: its own before, or where there is none left, another's."""
        if not isinstance(home, OpenHome) or self._homes.get(home.context) is home:
            return
        left: Context | None = home.context
        if left not in self._homes:
            left = self._left() if len(self._homes) >= MAX_CONTEXTS else None
        if left is not None:
            self._homes.pop(left).directory.close()
        self._homes[home.context] = home

    def _left(self) -> Context | None:
        return next((context for context, home in self._homes.items() if not home.by_name), None)

    def held(self) -> Iterable[OpenHome]:
        return self._homes.values()


class Conductor:
    """One process: `start`, `wait` (until SIGTERM or SIGINT), `stop`; in the event loop."""

    def __init__(self, options: ConductorOptions) -> None:
        self.options = options
        transport_options, self._limits = from_environment(TransportOptions(), SyncLimits())
        self.transport = EventTransport(transport_options)
        self._homes = homes = OpenHomes(self._directory, options)
        self.registrar = Registrar(Registry(form=options.form), homes)
        self._server = AdminServer(
            guarded(Registrations(self.registrar).routes(with_query=True), token=options.token),
            options.host,
            options.port,
        )
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def _directory(self, block_size: int | None) -> Directory:
        return Directory(
            self.transport,
            block_size=block_size,
            seed=self.options.seed,
            max_streams=self.options.max_streams,
            limits=self._limits,
        )

    async def start(self) -> int:
        """Binds and serves; returns the port. Raises OSError that names the address."""
        host, port = self.options.host, self.options.port
        try:
            bound = await self._server.start()
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
            raise OSError(f"cannot listen on {host}:{port}: {reason}") from None
        self.transport.start()
        watching = watch(lambda: ((repr(home.context), home.directory) for home in self._homes.held()))
        self._tasks = [asyncio.create_task(one) for one in (self.registrar.run(), watching)]
        return bound

    async def wait(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        await self._stop.wait()

    async def stop(self) -> None:
        """Answers what is being asked, then takes everything down."""
        for task in self._tasks:
            task.cancel()
        await self._server.stop()
        await asyncio.to_thread(self.transport.stop)


async def serve(options: ConductorOptions, announce: Callable[[int], None]) -> None:
    """Runs until SIGTERM or SIGINT. `announce` is called with the port once it answers."""
    conductor = Conductor(options)
    try:
        announce(await conductor.start())
        await conductor.wait()
        log.info("stopping: %d ranks are registered", len(conductor.registrar.registry))
    finally:
        await conductor.stop()


def run(options: ConductorOptions, announce: Callable[[int], None]) -> None:
    """`serve` in a new event loop."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    asyncio.run(serve(options, announce))
