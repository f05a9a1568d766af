"""The DNS source against a server of its own, by way of dnspython."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import dns.rcode
import pytest

from kvindex.discovery.base import FleetFeed
from kvindex.discovery.dns import DnsSource
from kvindex.discovery.template import Template
from kvindex.errors import ConfigurationError
from kvindex.fleet import ChangeKind, Fleet
from tests.kvindex.discovery_peer import running
from tests.kvindex.dns_server import DnsServer, dns_server

NAME = "engines.llm.svc.cluster.local"
SRV = "_http._tcp." + NAME
FAST = (0.01, 0.05)


@pytest.fixture
async def server() -> AsyncIterator[DnsServer]:
    async with dns_server() as one:
        yield one


def source(server: DnsServer, record: Any = "a", name: str = NAME, **options: Any) -> DnsSource:
    defaults: dict[str, Any] = {"intervals": FAST, "timeout": 2.0}
    return DnsSource(
        name,
        Template(pool="qwen", model="qwen3-8b"),
        record=record,
        nameservers=["127.0.0.1"],
        nameserver_port=server.port,
        **{**defaults, **options},
    )


async def test_addresses_come_and_go(server: DnsServer) -> None:
    server.zone[NAME, "A"] = (0, ["10.1.0.2", "10.1.0.1"])
    async with running(source(server)) as it:
        await it.until(lambda: it.feed.is_ready)
        assert it.addresses == {"10.1.0.1:8000": "10.1.0.1:8000", "10.1.0.2:8000": "10.1.0.2:8000"}
        first = it.instances["10.1.0.1:8000"]
        assert (first.pool, first.model, first.incarnation) == ("qwen", "qwen3-8b", "")
        assert [one.events for one in first.events] == ["tcp://10.1.0.1:5557"]
        server.zone[NAME, "A"] = (0, ["10.1.0.2", "10.1.0.3"])
        await it.until(lambda: sorted(it.instances) == ["10.1.0.2:8000", "10.1.0.3:8000"])
    assert [change.kind for change in it.changes[2:]] == [ChangeKind.LEFT, ChangeKind.JOINED]
    assert not any(it.feed.problems)


async def test_ipv6_addresses(server: DnsServer) -> None:
    server.zone[NAME, "AAAA"] = (0, ["fd00::1"])
    async with running(source(server, "aaaa")) as it:
        await it.until(lambda: it.addresses == {"[fd00::1]:8000": "[fd00::1]:8000"})


@pytest.mark.parametrize("glue", [False, True], ids=["asked for", "sent along"])
async def test_srv_records(server: DnsServer, glue: bool) -> None:
    server.glue = glue
    server.zone[SRV, "SRV"] = (0, [f"0 50 8000 e0.{NAME}.", f"0 50 8001 e1.{NAME}."])
    server.zone["e0." + NAME, "A"] = (0, ["10.1.0.1"])
    server.zone["e1." + NAME, "AAAA"] = (0, ["fd00::2"])
    async with running(source(server, "srv", SRV)) as it:
        await it.until(lambda: it.feed.is_ready)
        assert it.addresses == {f"e0.{NAME}:8000": "10.1.0.1:8000", f"e1.{NAME}:8001": "[fd00::2]:8001"}
        server.zone["e0." + NAME, "A"] = (0, ["10.1.0.7"])  # the pod of a StatefulSet has moved
        await it.until(lambda: it.changes[-1].kind is ChangeKind.REPLACED)
        assert it.addresses[f"e0.{NAME}:8000"] == "10.1.0.7:8000"
        del server.zone["e1." + NAME, "AAAA"]  # its address cannot be had: it stays, and that is told
        await it.until(lambda: it.feed.error is not None)
        assert it.addresses[f"e1.{NAME}:8001"] == "[fd00::2]:8001"
        assert f"no address for e1.{NAME}" in (it.feed.error or "")
        server.zone[SRV, "SRV"] = (0, [f"0 50 8000 e0.{NAME}."])
        await it.until(lambda: list(it.instances) == [f"e0.{NAME}:8000"] and it.feed.error is None)
    if glue:  # until one was missing
        first = [kind for _, kind in server.questions].index("A")
        assert first > 2


async def test_target_with_several_addresses_is_one_engine(server: DnsServer) -> None:
    server.zone[SRV, "SRV"] = (0, [f"0 50 8000 e0.{NAME}."])
    server.zone["e0." + NAME, "A"] = (0, ["10.1.0.5"])
    async with running(source(server, "srv", SRV)) as it:
        await it.until(lambda: it.feed.is_ready)
        server.zone["e0." + NAME, "A"] = (0, ["10.1.0.4", "10.1.0.5"])
        asked = len(server.questions)
        await it.until(lambda: len(server.questions) > asked + 6)
        assert it.addresses == {f"e0.{NAME}:8000": "10.1.0.5:8000"}
    assert len(it.changes) == 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"rcode": dns.rcode.SERVFAIL}, "SERVFAIL"),
        ({"rcode": dns.rcode.REFUSED}, "REFUSED"),
        ({"zone": {}}, "NXDOMAIN"),
        ({"zone": {(NAME, "TXT"): (0, ["x"])}}, "NoAnswer"),
        ({"silent": True}, "Timeout"),
    ],
    ids=["servfail", "refused", "no such name", "no records", "silence"],
)
async def test_last_good_set_stays(server: DnsServer, fault: dict[str, Any], words: str) -> None:
    good = {(NAME, "A"): (0, ["10.1.0.1"])}
    usual = {"rcode": dns.rcode.NOERROR, "silent": False, "zone": good}
    for key, value in {**usual, **fault}.items():
        setattr(server, key, value)
    async with running(source(server, timeout=0.1)) as it:
        await it.until(lambda: words in (it.feed.error or ""))
        assert not it.feed.is_ready
        for key, value in usual.items():
            setattr(server, key, value)
        await it.until(lambda: it.feed.is_ready and it.feed.error is None)
        for key, value in fault.items():
            setattr(server, key, value)
        await it.until(lambda: words in (it.feed.error or ""))
        assert list(it.instances) == ["10.1.0.1:8000"]
        assert NAME in (it.feed.error or "")
        for key, value in usual.items():
            setattr(server, key, value)
        await it.until(lambda: it.feed.error is None)
    assert len(it.changes) == 1


async def test_nobody_listens(server: DnsServer) -> None:
    server.port = 1
    async with running(source(server, timeout=0.1)) as it:
        await it.until(lambda: it.feed.error is not None)


@pytest.mark.parametrize(
    ("ttl", "intervals", "pause"),
    [(30, (1.0, 60.0), 30.0), (0, (1.0, 60.0), 1.0), (300, (1.0, 60.0), 60.0), (5, (10.0, 60.0), 10.0)],
)
async def test_asks_again_when_the_records_expire(
    server: DnsServer, ttl: int, intervals: tuple[float, float], pause: float
) -> None:
    server.zone[NAME, "A"] = (ttl, ["10.1.0.1"])
    one = source(server, intervals=intervals)
    _, found, _ = await one.look_up()
    assert one.pause(found) == pause


async def test_srv_expires_with_the_first_of_its_records(server: DnsServer) -> None:
    server.zone[SRV, "SRV"] = (30, [f"0 50 8000 e0.{NAME}.", f"0 50 8000 e1.{NAME}."])
    server.zone["e0." + NAME, "A"] = (20, ["10.1.0.1"])
    server.zone["e1." + NAME, "A"] = (10, ["10.1.0.2"])
    _, ttl, _ = await source(server, "srv", SRV).look_up()
    assert ttl == 10


async def test_answers_too_long_for_udp(server: DnsServer) -> None:
    server.truncate = True
    server.zone[NAME, "A"] = (0, [f"10.1.{number // 250}.{number % 250}" for number in range(600)])
    async with running(source(server)) as it:
        await it.until(lambda: len(it.instances) == 600)


async def test_template_that_cannot_be_is_told(server: DnsServer) -> None:
    server.zone[SRV, "SRV"] = (0, [f"0 50 0 e0.{NAME}."])
    server.zone["e0." + NAME, "A"] = (0, ["10.1.0.1"])
    async with running(source(server, "srv", SRV)) as it:
        await it.until(lambda: "port '0'" in (it.feed.error or ""))


async def test_can_be_cancelled_at_any_moment(server: DnsServer) -> None:
    """Also when the answer arrives in the same turn of the loop, where asyncio.wait_for of Python 3.11 forgets it."""
    server.zone[NAME, "A"] = (0, ["10.1.0.1"])
    for turns in range(5, 105):
        task = asyncio.create_task(source(server, intervals=(0.0, 0.0)).run(FleetFeed(Fleet(), name="test")))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=10)
        assert done
        assert task.cancelled()


def test_needs_dnspython(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'kvcar\[dns\]'"):
        DnsSource(NAME, Template())
