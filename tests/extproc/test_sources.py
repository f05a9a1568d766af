"""Sources in one fleet: who owns which name, changed options, failures. The sources here are scripted ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import pytest

from extproc.config import Pool as PoolConfig
from extproc.discovery_config import DiscoveryNode
from extproc.instances import InstanceConfig, PoolFacts
from extproc.sources import Sources
from kvindex.discovery.base import Notify, Source
from kvindex.fleet import ChangeKind, Fleet, FleetChange, Instance

Script = Callable[[Notify], Any]


class Scripted:
    """Does its script, then waits."""

    def __init__(self, script: Script) -> None:
        self.script = script

    async def run(self, notify: Notify) -> None:
        self.script(notify)
        await asyncio.Event().wait()


class ScriptedConfig(DiscoveryNode):
    type: Literal["scripted"] = "scripted"
    script: Any

    def source(self, facts: PoolFacts) -> Source:
        return Scripted(self.script)


def one(name: str, number: int = 1) -> Instance:
    return Instance(name, f"10.0.0.{number}:80", pool="p")


def pool(*scripts: Script, configured: tuple[tuple[str, int], ...] = (), **options: Any) -> PoolConfig:
    """Not parsed: the scripted source is no part of the configuration's language."""
    given = PoolConfig(
        name="p",
        models=("m",),
        tokenizer="t",
        instances=tuple(InstanceConfig(name=name, address=f"10.0.0.{number}:80") for name, number in configured),
        **options,
    )
    return given.model_copy(update={"discovery": tuple(ScriptedConfig(script=script) for script in scripts)})


@asynccontextmanager
async def running(*pools: PoolConfig) -> AsyncIterator[tuple[Sources, Fleet]]:
    fleet = Fleet()
    sources = Sources(fleet, first_pause=0.001)
    sources.use(pools)
    try:
        yield sources, fleet
    finally:
        await sources.close()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - sources tell nobody
            await asyncio.sleep(0.001)


def ready_with(*instances: Instance) -> Script:
    def script(notify: Notify) -> None:
        notify.replace(instances)
        notify.ready()

    return script


async def test_several_sources_feed_one_fleet() -> None:
    async with running(pool(ready_with(one("b", 2)), ready_with(one("c", 3)), configured=(("a", 1),))) as (
        sources,
        fleet,
    ):
        assert await sources.wait_ready(5)
        assert set(fleet.snapshot()) == {"a", "b", "c"}
        assert [row["name"] for row in sources.status()] == ["p/configured", "p/scripted", "p/scripted#1"]


async def test_not_ready_until_each_has_told() -> None:
    async with running(pool(lambda notify: None)) as (sources, _):
        assert not await sources.wait_ready(0.01)


async def test_a_name_belongs_to_who_came_first_and_is_free_when_he_goes() -> None:
    second = ready_with(one("a", 2))
    async with running(pool(second, configured=(("a", 1),))) as (sources, fleet):
        assert await sources.wait_ready(5)
        assert fleet.snapshot()["a"].address == "10.0.0.1:80"
        assert "already known" in sources.status()[1]["refused"]["a"]
        sources.use([pool(second)])
        await until(lambda: "a" in fleet.snapshot())
        assert fleet.snapshot()["a"].address == "10.0.0.2:80"
        assert sources.status()[1]["refused"] == {}


async def test_changed_options_keep_what_is_found_again() -> None:
    changes: list[FleetChange] = []
    async with running(pool(ready_with(one("a", 1), one("b", 2)))) as (sources, fleet):
        assert await sources.wait_ready(5)
        fleet.listen(changes.append)
        changes.clear()
        sources.use([pool(ready_with(one("b", 2), one("c", 3)))])
        await until(lambda: "c" in fleet.snapshot())
        assert [(change.kind, (change.after or change.before).name) for change in changes] == [  # type: ignore[union-attr]
            (ChangeKind.LEFT, "a"),
            (ChangeKind.JOINED, "c"),
        ]


async def test_networks_bind_what_is_found_and_not_what_is_written() -> None:
    """Also when a reload changes them; instances of the configuration may be anywhere."""
    far = Instance("far", "169.254.169.254:80", pool="p")
    script = ready_with(one("a"), far)
    async with running(pool(script, configured=(("mine", 9),))) as (sources, fleet):
        await until(lambda: sources.ready)
        assert set(fleet.snapshot()) == {"a", "mine"}
        assert "link-local" in sources.status()[1]["refused"]["far"]
        sources.use([pool(script, configured=(("mine", 9),), networks=("192.168.0.0/16",))])
        assert set(fleet.snapshot()) == {"mine"}
        sources.use([pool(script, configured=(("mine", 9),), networks=("10.0.0.0/8", "169.254.169.254/32"))])
        assert set(fleet.snapshot()) == {"a", "far", "mine"}


async def test_equal_options_change_nothing() -> None:
    calls: list[int] = []

    def script(notify: Notify) -> None:
        calls.append(1)
        notify.ready()

    async with running(pool(script)) as (sources, _):
        assert await sources.wait_ready(5)
        sources.use([pool(script, max_endpoints=2)])
        await asyncio.sleep(0)
        assert calls == [1]


async def test_an_instance_moves_to_a_pool_that_stands_before_its_own(caplog: pytest.LogCaptureFixture) -> None:
    first, second = pool(), pool(configured=(("a", 1), ("b", 2)))
    second = second.model_copy(update={"name": "q"})
    async with running(first, second) as (sources, fleet):
        assert await sources.wait_ready(5)
        taker = pool(configured=(("a", 1),))
        giver = pool(configured=(("b", 2),)).model_copy(update={"name": "q"})
        sources.use([taker, giver])
        assert {name: one.pool for name, one in fleet.snapshot().items()} == {"a": "p", "b": "q"}
    assert caplog.text == ""


async def test_a_source_that_is_gone_takes_its_instances_along() -> None:
    async with running(pool(ready_with(one("b", 2)), configured=(("a", 1),))) as (sources, fleet):
        assert await sources.wait_ready(5)
        sources.use([pool(configured=(("a", 1),))])
        assert set(fleet.snapshot()) == {"a"}
        sources.use([])
        assert set(fleet.snapshot()) == set()


async def test_a_failing_source_is_started_again_and_keeps_what_it_found() -> None:
    tries: list[int] = []

    def script(notify: Notify) -> None:
        tries.append(1)
        if len(tries) == 1:
            notify.replace([one("a")])
            raise RuntimeError("the registry burnt down")
        if len(tries) == 2:
            raise RuntimeError("still burning")
        notify.problem(None)
        notify.ready()

    async with running(pool(script)) as (sources, fleet):
        await until(lambda: tries)
        assert set(fleet.snapshot()) == {"a"}
        assert await sources.wait_ready(5)
        assert len(tries) == 3
        assert set(fleet.snapshot()) == {"a"}
        assert sources.status()[1]["error"] is None


async def test_an_invalid_instance_is_refused_alone() -> None:
    async with running(pool(ready_with(one("a"), Instance("b", "nowhere", pool="p")))) as (sources, fleet):
        assert await sources.wait_ready(5)
        assert set(fleet.snapshot()) == {"a"}
        assert "nowhere" in sources.status()[1]["refused"]["b"]
