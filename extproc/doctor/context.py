"""What checks look at: the configuration, and facts about its surroundings that are fetched once and shared."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from extproc import __version__
from extproc.admin.trust import trust
from extproc.assembly import instances_of, prompter_options
from extproc.config import Config, Pool
from extproc.doctor import engine_page
from extproc.doctor.check import NEEDS, Skip
from extproc.doctor.engine_page import EnginePage
from extproc.doctor.envoy_view import EnvoyView, read_view
from extproc.doctor.http import Answer, Http
from extproc.doctor.listen import Listener
from extproc.doctor.options import DoctorOptions
from kvindex.fleet import Instance, StreamEndpoint

if TYPE_CHECKING:
    from extproc.prompt.prompter import Prompter

T = TypeVar("T")


class Context:
    """Made for one examination, in its event loop; `close` at the end. Answers hold failures; only Skip is raised."""

    def __init__(self, config: Config, options: DoctorOptions) -> None:
        self.config = config
        self.options = options
        self.pools: tuple[Pool, ...] = tuple(one for one in config.pools if options.pool in (None, one.name))
        self.http = Http(timeout=options.timeout, max_answer=options.max_answer)
        self._facts: dict[Hashable, asyncio.Task[Any]] = {}
        self._listeners: list[Listener] = []
        self._written = {
            pool.name: [one for one in instances_of(config) if one.pool == pool.name] for pool in self.pools
        }

    async def once(self, key: Hashable, make: Callable[[], Awaitable[T]]) -> T:
        """The result of the first call with this key. A check that is cut off does not cut off the others' fact."""
        task = self._facts.get(key)
        if task is None:
            task = self._facts[key] = asyncio.ensure_future(make())
        found: T = await asyncio.shield(task)
        return found

    def lacks(self, need: str) -> str:
        """Why what is needed was not given, "" when it was."""
        options = self.options
        missing = {
            "kvcar": self.admin is None,
            "envoy": options.envoy_admin is None,
            "gateway": options.gateway is None,
            "live": not options.live,
        }
        return f"needs {NEEDS[need]}" if missing.get(need) else ""

    # -- the running kvcar

    @property
    def admin(self) -> str | None:
        """Base URL of the admin port; None when the configuration leaves the port open and no option names it."""
        if self.options.admin:
            return self.options.admin
        host, _, port = self.config.admin.address.rpartition(":")
        if port == "0":
            return None
        # a wildcard is where a server listens, not where it is
        host = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
        return f"{'https' if self.config.admin.tls else 'http'}://{host}:{port}"

    async def kvcar(self, path: str) -> Answer:
        """GET of the admin port, with the configured token and certificates; asked once."""
        return await self.once(("kvcar", path), lambda: self.ask_kvcar(path))

    async def ask_kvcar(self, path: str) -> Answer:
        """The same, as it is now."""
        token, tls = self.config.admin.token, self.config.admin.tls
        headers = {"X-Internal-Token": token} if token else None
        url = f"{self.admin}{path}"
        if tls and tls.client_ca and self.options.cert is None:
            return Answer(url, error="admin.tls.client_ca wants a client certificate: give --cert and --key")
        try:
            shown = trust(tls.cert, self.options.cert, self.options.key) if tls else None
        except OSError as error:  # ssl.SSLError is one
            return Answer(url, error=f"admin.tls: the files cannot be used: {error}")
        return await self.http.get(url, headers=headers, trust=shown)

    async def status(self) -> Mapping[str, Any]:
        """/status of the running kvcar. Raises Skip when it does not answer (check kvcar.running says so)."""
        found = (answer := await self.kvcar("/status")).json()
        if not answer.ok or not isinstance(found, dict) or not isinstance(found.get("pools"), list):
            raise Skip("kvcar does not answer")
        return found

    async def pool_status(self, pool: Pool) -> Mapping[str, Any]:
        """The pool's part of it. Raises Skip."""
        for one in (await self.status())["pools"]:
            if one.get("name") == pool.name:
                found: Mapping[str, Any] = one
                return found
        raise Skip(f"the running kvcar has no pool {pool.name!r}")

    # -- engines

    async def instances(self, pool: Pool) -> list[Instance]:
        """The configured ones, and those that the running kvcar has discovered."""
        return await self.once(("instances", pool.name), lambda: self._instances(pool))

    async def _instances(self, pool: Pool) -> list[Instance]:
        found = list(self._written[pool.name])
        if not pool.discovery or self.admin is None:
            return found
        try:
            status = await self.pool_status(pool)
        except Skip:
            return found
        known = {one.name for one in found}
        streams: dict[str, list[StreamEndpoint]] = {}
        for row in status.get("streams", ()):
            # /status does not tell the topic
            one = StreamEndpoint(row["dp_rank"], row["endpoint"], row["replay"], None, row["dialect"])
            if one.events:
                streams.setdefault(row["instance"], []).append(one)
        for row in status.get("instances", ()):
            if row["name"] not in known:
                mine = tuple(streams.get(row["name"], ()))
                found.append(
                    Instance(
                        row["name"],
                        row["address"],
                        pool.name,
                        row["role"],
                        max(1, len(mine)),
                        "discovered",
                        events=mine,
                    )
                )
        return found

    async def engine(self, instance: Instance, path: str) -> Answer:
        """GET of an engine."""
        return await self.once(
            ("engine", instance.address, path),
            lambda: self.http.get(f"http://{instance.address}{path}", headers=self.client_headers()),
        )

    def client_headers(self, **more: str) -> dict[str, str]:
        """What a client sends engines and gateways: `more`, and the API key where one is given."""
        key = self.options.api_key
        return {**({"authorization": f"Bearer {key}"} if key else {}), **more}

    async def answering(self, pool: Pool) -> list[Instance]:
        """Instances whose /health answered anything at all. Raises Skip when there is none."""
        instances = await self.instances(pool)
        answers = await asyncio.gather(*(self.engine(one, "/health") for one in instances))
        found = [one for one, answer in zip(instances, answers, strict=True) if answer.status]
        if not found:
            raise Skip(f"no engine of pool {pool.name} answers")
        return found

    async def page(self, pool: Pool, instance: Instance) -> EnginePage | None:
        """The engine's /metrics page, None when there is none."""
        return await self.once(("page", pool.name, instance.name), lambda: self.fresh_page(pool, instance))

    async def fresh_page(self, pool: Pool, instance: Instance) -> EnginePage | None:
        """The same, as it is now."""
        given = {one.name: one.metrics for one in pool.instances}.get(instance.name)
        answer = await self.http.get(given or f"http://{instance.address}{pool.load.path}")
        return engine_page.parse(answer.body.decode("utf-8", "replace")) if answer.ok else None

    async def prompter(self, pool: Pool) -> Prompter | str:
        """The pool's prompter as the server loads it, or why it cannot be loaded."""
        return await self.once(("prompter", pool.name), lambda: asyncio.to_thread(self._load, pool))

    async def load(self) -> None:
        """Loads every pool's tokenizer now."""
        for pool in self.pools:
            await self.prompter(pool)

    def _load(self, pool: Pool) -> Prompter | str:
        from dataclasses import replace

        from extproc.prompt.prompter import Prompter
        from extproc.prompt.template import BadTemplate
        from extproc.prompt.tokenizer import TokenizerError

        # a machine that is being looked at may be slow: the time budget of a request is another check's
        options = replace(prompter_options(pool, self.config), timeout=self.options.check_timeout)
        try:
            return Prompter.load(options)
        except (TokenizerError, BadTemplate) as error:
            return str(error)

    # -- events

    async def listener(self, pool: Pool) -> Listener:
        """Follows the pool's streams; settled: every stream had its time."""
        return await self.once(("listener", pool.name), lambda: self._listen(pool))

    async def _listen(self, pool: Pool) -> Listener:
        instances = await self.instances(pool)
        listener = Listener(
            self.config, pool, instances, timeout=min(2.0, self.options.timeout), listen=self.options.listen
        )
        self._listeners.append(listener)
        await listener.start()
        await listener.settle(self.options.listen)
        return listener

    # -- Envoy

    async def envoy(self) -> EnvoyView:
        """Raises Skip when it does not answer (check envoy.reachable says so)."""
        found = await self.envoy_or_error()
        if isinstance(found, str):
            raise Skip("Envoy's admin port does not answer")
        return found

    async def envoy_or_error(self) -> EnvoyView | str:
        base = (self.options.envoy_admin or "").rstrip("/")
        return await self.once("envoy", lambda: read_view(self.http, base, self.config))

    # -- the end

    async def summary(self) -> dict[str, Any]:
        """Versions and sizes, for the head of the report. Only what is known by now."""
        facts: dict[str, Any] = {"kvcar": __version__, "pools": {}}
        for pool in self.pools:
            facts["pools"][pool.name] = {"instances": len(await self.instances(pool))}
        return facts

    async def close(self) -> None:
        for task in self._facts.values():
            task.cancel()
        await asyncio.gather(*self._facts.values(), return_exceptions=True)
        for listener in self._listeners:
            await listener.close()
        await self.http.close()
