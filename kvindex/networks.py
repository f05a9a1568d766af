"""Where instances may be that others tell of: registrations, etcd, DNS, Kubernetes. Not the configuration's own. Pure.

kvcar connects to what it is told (events, replay, metrics, token ids), and gateways send requests there. So whoever
may tell it of an instance could make it knock at doors that are closed to himself. Literal addresses are checked here;
only ZMQ endpoints may be names at all, and an HTTP address is never one (`Instance.check`).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from kvindex.endpoints import parse_host_port
from kvindex.errors import ConfigurationError
from kvindex.fleet import Instance

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

LOOPBACK = ("127.0.0.0/8", "::1/128")
SPECIAL: tuple[tuple[str, Network], ...] = tuple(
    (what, ipaddress.ip_network(text))
    for what, texts in {
        "this machine": LOOPBACK,
        "link-local, where clouds keep credentials": ("169.254.0.0/16", "fe80::/10"),
        "a cloud's metadata service": (
            "100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32", "fd00:ec2::254/128", "fd20:ce::254/128",
            "fd00:c1::a9fe:a9fe/128", "fd00:42::42/128",
        ),
        "no single machine": ("0.0.0.0/8", "224.0.0.0/3", "::/128", "ff00::/8"),
        "an IPv4 address for a gateway": ("::/96", "::ffff:0:0:0/96", "64:ff9b:1::/48", "2002::/16"),
    }.items()
    for text in texts
)  # fmt: skip
"""Never meant by a wide network such as 0.0.0.0/0: only an entry that lies within one of these opens it."""
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def parse_network(text: str) -> Network:
    """Raises ConfigurationError that names the value and the remedy."""
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ConfigurationError(f"{text!r} is no network ({error}): write 10.0.0.0/8 or fd00::/8") from None


class Networks:
    """allowed   networks that instances have to be in; () = any but the SPECIAL ones
    loopback  whether this machine's own addresses are allowed without being listed
    """

    def __init__(self, allowed: Iterable[str] = (), *, loopback: bool = False) -> None:
        self._allowed = tuple(parse_network(text) for text in allowed)
        self._opened = (*self._allowed, *(parse_network(text) for text in LOOPBACK if loopback))

    def admit(self, instance: Instance) -> None:
        """Raises ConfigurationError that names the place, why it is refused, and the remedy. O(ranks x networks)."""
        if instance.address:
            self._host(parse_host_port(instance.address).host, f"address {instance.address}", names=False)
        if instance.metrics:
            place, text = instance.metrics.partition("://")[2].partition("/")[0], f"metrics {instance.metrics}"
            if "@" in place:
                raise _refused(text, "a user in a URL hides which part of it is the address")
            host = place.rpartition("]")[0].strip("[") if place.startswith("[") else place.partition(":")[0]
            self._host(host, text, names=False)
        for stream in instance.events:
            for place in () if stream.pushed else filter(None, (stream.events, stream.replay)):
                transport, _, rest = place.partition("://")
                host = "localhost" if transport == "ipc" else parse_host_port(rest).host
                self._host(host, f"endpoint {place}", names=True)

    def _host(self, host: str, place: str, *, names: bool) -> None:
        address = _address_of(host)
        if address is None:
            if _reads_as_number(host):
                raise _refused(place, f"{host!r} is another way to write an IP address")
            if not names or self._allowed:
                raise _refused(place, "what a name stands for can change; give an IP address where `networks` is set")
            return
        for what, network in SPECIAL:
            if address in network and not any(_within(one, network) and address in one for one in self._opened):
                raise _refused(place, f"{address} is {what}; list it in `networks` if it is meant")
        if self._allowed and not any(address in one for one in self._opened):
            raise _refused(place, f"{address} is in none of the allowed `networks`")


def is_local(host: str) -> bool:
    """Whether a server that listens there is reached from this machine only."""
    address = _address_of(host)
    return address is not None and address.is_loopback


def _refused(place: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"{place} is not allowed for an instance: {why}")


def _within(one: Network, other: Network) -> bool:
    return one.version == other.version and one.network_address in other and one.broadcast_address in other


def _address_of(host: str) -> Address | None:
    """None = a name. An IPv4 address inside an IPv6 one is what it stands for."""
    if f".{host.rstrip('.').lower()}".endswith(".localhost"):
        return ipaddress.IPv4Address("127.0.0.1")
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        if address in NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return address.ipv4_mapped or address
    return address


def _reads_as_number(name: str) -> bool:
    """`0x7f.1`, `127.1`, `2130706433`: resolvers read them as addresses."""
    last = name.rstrip(".").rpartition(".")[2].lower()
    return last.isdigit() or (last.startswith("0x") and all(one in "0123456789abcdef" for one in last[2:]))
