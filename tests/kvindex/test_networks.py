"""Where instances may be that others tell of, and what becomes of those that are elsewhere."""

from __future__ import annotations

import pytest

from kvindex.discovery.base import FleetFeed
from kvindex.discovery.etcd import EtcdSource
from kvindex.discovery.etcd_client import EtcdOptions
from kvindex.discovery.xllm_registry import Question, Registry
from kvindex.errors import ConfigurationError
from kvindex.fleet import PUSHED, Fleet, Instance, StreamEndpoint
from kvindex.networks import Networks, is_local, parse_network

WIDE, TEN, META, LOCAL = ("0.0.0.0/0", "::/0"), ("10.0.0.0/8",), ("169.254.0.0/16",), ("127.0.0.0/8", "::1/128")
FINE, SPECIAL, ELSEWHERE, NAME = "", "list it in `networks`", "in none of the allowed", "a name stands for"
NUMBER = "another way to write"

# host of the instance, networks, loopback allowed, what the refusal says
HOSTS = [
    ("10.0.0.1", (), False, FINE),
    ("8.8.8.8", (), False, FINE),
    ("[fd00::1]", (), False, FINE),
    ("10.0.0.1", TEN, False, FINE),
    ("11.0.0.1", TEN, True, ELSEWHERE),
    ("[fd00::1]", TEN, True, ELSEWHERE),
    # clouds' metadata services, however they are written, also inside a wide network
    ("169.254.169.254", (), True, SPECIAL),
    ("169.254.169.254", WIDE, True, SPECIAL),
    ("169.254.169.254", META, False, FINE),
    ("[::ffff:169.254.169.254]", WIDE, True, SPECIAL),
    ("[64:ff9b::a9fe:a9fe]", WIDE, True, SPECIAL),
    ("[fe80::1%eth0]", WIDE, True, SPECIAL),
    ("[fd00:ec2::254]", WIDE, True, SPECIAL),
    ("100.100.100.200", WIDE, True, SPECIAL),
    ("168.63.129.16", (), True, SPECIAL),
    ("[fd20:ce::254]", WIDE, True, SPECIAL),
    ("[fd00:c1::a9fe:a9fe]", (), True, SPECIAL),
    ("[fd00:42::42]", (), True, SPECIAL),
    # IPv4 addresses that a gateway would take out of these
    ("[::169.254.169.254]", WIDE, True, SPECIAL),
    ("[::ffff:0:169.254.169.254]", WIDE, True, SPECIAL),
    ("[64:ff9b:1::a9fe:a9fe]", WIDE, True, SPECIAL),
    ("[2002:a9fe:a9fe::1]", WIDE, True, SPECIAL),
    ("[2002:a9fe:a9fe::1]", ("2002:a9fe::/32",), True, FINE),
    ("[::1]", (), True, FINE),
    # this machine
    ("127.0.0.1", (), False, SPECIAL),
    ("127.0.0.1", (), True, FINE),
    ("127.8.8.8", WIDE, False, SPECIAL),
    ("127.0.0.1", LOCAL, False, FINE),
    ("10.0.0.1", LOCAL, False, ELSEWHERE),
    ("[::1]", (), False, SPECIAL),
    ("[::ffff:127.0.0.1]", (), False, SPECIAL),
    # nobody
    ("0.1.2.3", WIDE, True, SPECIAL),
    ("224.0.0.1", WIDE, True, SPECIAL),
    ("255.255.255.255", WIDE, True, SPECIAL),
    ("[ff02::1]", WIDE, True, SPECIAL),
]
NAMES = [
    ("engine-0.llm.svc", (), False, FINE),
    ("engine-0.llm.svc", TEN, False, NAME),
    ("localhost", (), False, SPECIAL),
    ("a.localhost.", WIDE, False, SPECIAL),
    ("LOCALHOST", (), False, SPECIAL),
    ("a.LocalHost", (), False, SPECIAL),
    ("localhost", (), True, FINE),
    ("0x7f.1", (), True, NUMBER),
    ("0x7f000001", (), True, NUMBER),
    ("x.0x1", (), True, NUMBER),
    ("x.1", (), True, NUMBER),
    ("2130706433x", (), False, FINE),
]


def says(networks: Networks, instance: Instance) -> str:
    try:
        networks.admit(instance)
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("host", "allowed", "loopback", "refusal"), HOSTS + NAMES)
def test_every_place_of_an_instance(host: str, allowed: tuple[str, ...], loopback: bool, refusal: str) -> None:
    networks, good = Networks(allowed, loopback=loopback), "10.0.0.1"
    if allowed not in ((), TEN, WIDE):
        good = host  # nothing else is allowed
    places = [
        Instance("e", f"{good}:80", events=(StreamEndpoint(0, f"tcp://{host}:5557"),)),
        Instance("e", f"{good}:80", events=(StreamEndpoint(0, f"tcp://{good}:1", replay=f"tcp://{host}:5558"),)),
        Instance("e", "", events=(StreamEndpoint(0, f"tcp://{good}:1"), StreamEndpoint(1, f"tcp://{host}:5558"))),
    ]
    if (host, allowed, loopback, refusal) in HOSTS:
        places += [Instance("e", f"{host}:80"), Instance("e", f"{good}:80", metrics=f"http://{host}:80/metrics")]
    for instance in places:
        found = says(networks, instance)
        assert (refusal in found) if refusal else not found, instance


def test_names_are_for_endpoints_only() -> None:
    for instance in (Instance("e", "engine-0:80"), Instance("e", "", metrics="http://engine-0/metrics")):
        assert NAME in says(Networks(), instance)


@pytest.mark.parametrize(
    "url",
    ["http://10.0.0.1:80@169.254.169.254/metrics", "http://10.0.0.1:\n80@169.254.169.254/", "http://[fd00::1]@[fe80::1]/",
     "http://169.254.169.254?@10.0.0.1/", "http://169.254.169.254#@10.0.0.1/",
     "http:///10.0.0.1/", "http:10.0.0.1", "10.0.0.1"],
)  # fmt: skip
def test_urls_that_look_as_if_they_were_elsewhere(url: str) -> None:
    assert "is not allowed for an instance" in says(Networks(), Instance("e", "", metrics=url))


def test_sockets_in_the_file_system_are_this_machine() -> None:
    instance = Instance("e", "", events=(StreamEndpoint(0, "ipc:///run/docker.sock"),))
    assert SPECIAL in says(Networks(), instance)
    assert not says(Networks(loopback=True), instance)
    assert not says(Networks(), Instance("e", "", events=(StreamEndpoint(0, PUSHED),)))


@pytest.mark.parametrize("text", ["", "10.0.0.1/8", "engines", "10.0.0.0/33", "tcp://10.0.0.0/8"])
def test_what_is_no_network(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is no network"):
        parse_network(text)


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False), ("kvcar", False)],
)
def test_is_local(host: str, local: bool) -> None:
    assert is_local(host) is local


def test_a_feed_refuses_places_and_names_them() -> None:
    fleet = Fleet()
    feed = FleetFeed(fleet, name="etcd", networks=Networks())
    near, far = Instance("near", "169.254.169.254:80"), Instance("far", "10.0.0.1:80")
    feed.replace([near, far])
    assert set(fleet.snapshot()) == {"far"}
    assert SPECIAL in feed.refused["near"]
    feed.restrict(Networks(("192.168.0.0/16",)))
    assert not fleet.snapshot()
    assert ELSEWHERE in feed.refused["far"]
    feed.restrict(None)
    assert set(fleet.snapshot()) == {"near", "far"}
    assert feed.refused == {}


class Session:
    def __init__(self) -> None:
        self.asked: list[str] = []

    def get(self, url: str, **_: object) -> None:
        self.asked.append(url)
        raise OSError


@pytest.mark.parametrize(("address", "asked"), [("10.0.0.1:80", ["http://10.0.0.1:80/health"]), ("127.0.0.1:80", [])])
async def test_etcd_asks_nobody_where_none_may_be(address: str, asked: list[str]) -> None:
    """What was registered and deleted is asked whether it lives: only where an instance may be."""
    source = EtcdSource(EtcdOptions(("http://10.0.0.9:2379",)), Registry(pool="p", model="m"))
    session = Session()
    feed = FleetFeed(Fleet(), name="etcd", networks=Networks())
    await source._question(session, feed, Question("e", address, "1"))  # type: ignore[arg-type]
    assert session.asked == asked


def test_an_instance_cannot_move_to_a_forbidden_place() -> None:
    fleet = Fleet()
    feed = FleetFeed(fleet, name="etcd", networks=Networks())
    feed.upsert(Instance("e", "10.0.0.1:80"))
    feed.upsert(Instance("e", "169.254.169.254:80"))
    known = fleet.get("e")
    assert known is not None
    assert known.address == "10.0.0.1:80"
