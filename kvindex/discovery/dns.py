"""Instances from DNS: the addresses of a name (a headless Service, for one), or its SRV records with their ports.

The name is asked for again when its records expire (their TTL, within bounds). An answer with records is the whole
picture. No such name, no records, a failing server or none at all keep the last good picture and are told: DNS says
NXDOMAIN for what is gone and for what is broken alike, and instances that are gone show it themselves.

Needs dnspython (extra `dns`): the system's resolver gives neither TTLs nor SRV records.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvindex.discovery.base import Notify
from kvindex.discovery.template import Template
from kvindex.endpoints import HostPort
from kvindex.errors import ConfigurationError
from kvindex.fleet import Instance

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver
    from dns.name import Name
    from dns.resolver import Answer
    from dns.rrset import RRset

Record = Literal["a", "aaaa", "srv"]


class Host(NamedTuple):
    """One engine as DNS has it; port None = the template's."""

    name: str
    address: str
    port: int | None = None


def instance_of(host: Host, template: Template) -> Instance:
    """Its incarnation stays unknown: a process that is replaced at its address is noticed by its streams.

    Raises ConfigurationError.
    """
    full = template if host.port is None else replace(template, port=host.port)
    return full.instance(host.name, host.address)


class DnsSource:
    """The hosts of one name.

    record        "a", "aaaa" (names are ip:port) or "srv" (names are target:port; priority and weight are not used)
    nameservers   IP addresses to ask, () = the system's; `nameserver_port` theirs
    intervals     least and longest time in seconds between two questions; failures double it from the least
    timeout       seconds for one question, repetitions included

    Raises ConfigurationError when dnspython is not installed.
    """

    def __init__(
        self,
        name: str,
        template: Template,
        *,
        record: Record = "a",
        nameservers: Sequence[str] = (),
        nameserver_port: int = 53,
        intervals: tuple[float, float] = (1.0, 60.0),
        timeout: float = 5.0,
    ) -> None:
        if importlib.util.find_spec("dns") is None:
            raise ConfigurationError("discovery with dns needs dnspython: pip install 'kvcar[dns]'")
        self.name, self.template, self.record = name, template, record
        self._nameservers, self._port = tuple(nameservers), nameserver_port
        self._intervals, self._timeout = intervals, timeout
        self._known: dict[Name, str] = {}

    async def run(self, notify: Notify) -> None:
        from dns.exception import DNSException

        task = asyncio.current_task()
        failures = 0
        while True:
            try:
                hosts, ttl, unresolved = await self.look_up()
                instances = [instance_of(host, self.template) for host in hosts]
            except (DNSException, OSError, ConfigurationError, ValueError) as error:
                failures += 1
                notify.problem(f"{self.name} {self.record.upper()}: {_explain(error)}; the instances found before stay")
                wait = self._intervals[0] * 2 ** min(failures - 1, 16)
            else:
                failures = 0
                notify.replace(instances)
                notify.problem(f"{self.name}: no address for {', '.join(unresolved)}" if unresolved else None)
                notify.ready()
                wait = ttl
            if task is not None and task.cancelling():
                # dnspython waits with asyncio.wait_for, which before Python 3.12 loses a cancellation that comes
                # together with an answer.
                raise asyncio.CancelledError
            await asyncio.sleep(self.pause(wait))

    def pause(self, seconds: float) -> float:
        """Within the bounds."""
        least, longest = self._intervals
        return min(longest, max(least, seconds))

    async def look_up(self) -> tuple[list[Host], float, list[str]]:
        """Hosts, seconds until the answer expires, and SRV targets without an address."""
        resolver = self._resolver()
        answer = await resolver.resolve(self.name, self.record.upper(), search=True, lifetime=self._timeout)
        ttl = float(answer.rrset.ttl) if answer.rrset is not None else 0.0
        if self.record == "srv":
            return await self._targets(resolver, answer, ttl)
        addresses = sorted({str(record.address) for record in answer})
        return [Host(str(HostPort(one, self.template.port)), one) for one in addresses], ttl, []

    async def _targets(self, resolver: Resolver, answer: Answer, ttl: float) -> tuple[list[Host], float, list[str]]:
        """SRV records with the addresses of their targets: those sent along, else asked for."""
        sent = {rrset.name: rrset for rrset in answer.response.additional if rrset.rdtype.name in ("A", "AAAA")}
        wanted = sorted({record.target for record in answer})
        found = dict(
            zip(wanted, await asyncio.gather(*(self._address(resolver, one, sent) for one in wanted)), strict=True)
        )
        known = self._known
        self._known = {}
        for target in wanted:
            addresses, seconds = found[target]
            ttl = min(ttl, seconds)
            last = known.get(target)
            # A target of several addresses is one engine: the address it has been known by, while that is among them.
            if addresses or last:
                self._known[target] = last if last and (not addresses or last in addresses) else addresses[0]
        hosts = []
        for target, port in sorted({(record.target, record.port) for record in answer}):
            if target in self._known:
                hosts.append(Host(f"{target.to_text(omit_final_dot=True)}:{port}", self._known[target], port))
        unresolved = [target.to_text(omit_final_dot=True) for target in wanted if not found[target][0]]
        return hosts, ttl, unresolved

    async def _address(self, resolver: Resolver, target: Name, sent: Mapping[Name, RRset]) -> tuple[list[str], float]:
        """Addresses of a target, IPv4 before IPv6, and the seconds they are good for; none for whatever reason."""
        from dns.exception import DNSException

        if target in sent:
            return sorted(str(record.address) for record in sent[target]), float(sent[target].ttl)
        for kind in ("A", "AAAA"):
            try:
                answer = await resolver.resolve(target, kind, lifetime=self._timeout)
            except (DNSException, OSError):
                continue
            return sorted(str(record.address) for record in answer), float(answer.rrset.ttl) if answer.rrset else 0.0
        return [], 0.0

    def _resolver(self) -> Resolver:
        from dns.asyncresolver import Resolver

        resolver = Resolver(configure=not self._nameservers)
        if self._nameservers:
            resolver.nameservers = list(self._nameservers)
            resolver.port = self._port
        return resolver


def _explain(error: Exception) -> str:
    """dnspython's own words, which name the question; its class says what happened where these do not."""
    return f"{type(error).__name__}: {error}"
