"""The router: eligibility, ranks, hits, order, rotation, pairs, faults; and its random-trace properties."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from extproc.decision import Profile
from extproc.loads.inflight import InFlight
from extproc.router import Router
from extproc.scorers import Candidate, Cost, Load, Request, Role, build
from kvindex.fleet import Instance, InstanceState

Blocks = tuple[int, int, int]

DATA = Path(__file__).parents[1] / "data"
VECTORS = json.loads((DATA / "vectors.json").read_text())
SCORING = json.loads((DATA / "cases/scoring.json").read_text())["cases"]


@dataclass
class Hits:
    """Blocks by instance name and rank; a plain stand-in for a Match."""

    blocks: Mapping[str, Sequence[Blocks]]

    def hits(self, instance: Any) -> Sequence[Blocks]:
        return self.blocks.get(instance.name, ())


@dataclass
class Loads:
    """Waiting by name, or by "name/rank"."""

    waiting: Mapping[str, float]

    def get(self, name: str, now: float, rank: int | None = None) -> Load | None:
        waiting = self.waiting.get(name if rank is None else f"{name}/{rank}")
        return None if waiting is None else Load(waiting)


def instance(name: str, role: str = "default", **fields: Any) -> Instance:
    number = sum(map(ord, name)) % 200
    return Instance(name, fields.pop("address", f"10.0.0.{number}:8000"), role=role, **fields)


def fleet(names: str, **fields: Any) -> tuple[Instance, ...]:
    return tuple(instance(name, **fields) for name in names.split())


def address(name: str) -> str:
    return instance(name).address


def route(router: Router, instances: Sequence[Instance], **given: Any) -> Any:
    request = given.pop("request", Request(given.pop("tokens", 1024), 16))
    hits = Hits(given.pop("hits", {}))
    waiting = given.pop("waiting", {one.name: 0 for one in instances})
    return router.route(
        request, instances, hits, Loads(waiting), given.pop("inflight", InFlight()), given.pop("now", 1.0), **given
    )


# -- one decision


def test_decision_says_everything() -> None:
    router = Router(build("car"), max_endpoints=2)
    decision = route(
        router, fleet("a b c"), waiting={"a": 10, "b": 0, "c": 5}, hits={"a": [(48, 0, 0)], "b": [(0, 16, 4)]}
    )
    assert decision.chosen.name == "b"
    assert decision.destinations == (address("b"), address("a"))
    assert decision.costs == {"b": (pytest.approx(0.4375),), "a": (pytest.approx(0.625),), "c": (pytest.approx(0.75),)}
    assert decision.hit_tokens == 20 * 16, "what the engine should report: every tier, unweighted"
    assert decision.uncached_tokens == 1024 - 16 * 16 * 0.5
    assert decision.best_available_hit == 768
    assert (decision.reason, decision.rank, decision.headers) == (None, None, ())
    explained = json.loads(json.dumps(decision.explain()))
    assert explained["chosen"] == "b"
    assert [c["name"] for c in explained["candidates"]] == ["b", "a", "c"]
    assert explained["candidates"][0] | {"cost": 0} == {
        "name": "b",
        "address": address("b"),
        "cost": 0,
        "device_tokens": 0,
        "host_tokens": 256,
        "disk_tokens": 64,
        "speculative_tokens": 0,
        "waiting": 0,
        "running": None,
        "usage": 0.0,
        "requests": 0,
        "uncached_tokens": 0,
    }


ELIGIBLE = [  # state, role of "b", waiting of "b", only, why b is out (None = it is in)
    ("active", "default", 0, None, None),
    ("lease_lost", "default", 0, None, None),
    ("probation", "default", 0, None, None),
    ("suspect", "default", 0, None, "state"),
    ("draining", "default", 0, None, "state"),
    ("active", "decode", 0, None, "role"),
    ("active", "default", None, None, "no_load"),
    ("active", "default", 0, (address("a"),), "excluded"),
    ("active", "default", 0, (address("b"), "10.9.9.9:1"), None),
]


@pytest.mark.parametrize("row", ELIGIBLE, ids=str)
def test_who_may_be_chosen(row: tuple[Any, ...]) -> None:
    state, role, waiting, only, why = row
    instances = (instance("a"), instance("b", role, state=InstanceState(state)))
    waits = {"a": 3.0} | ({} if waiting is None else {"b": waiting})
    decision = route(Router(build("car")), instances, waiting=waits, only=only)
    assert ("b" in decision.costs) == (why is None)
    assert decision.excluded.get("b") == why


def test_nobody_left_is_an_answer() -> None:
    router = Router(build("car"))
    decision = route(router, fleet("a b c", state=InstanceState.SUSPECT))
    assert (decision.reason, decision.destinations, decision.detail) == ("no_candidate", (), "state: 3")
    decision = route(router, fleet("a b"), waiting={}, hits={"a": [(8, 0, 0)]})
    assert (decision.reason, decision.detail) == ("no_candidate", "no_load: 2")
    assert decision.best_available_hit == 128, "who has it counts, also without a load report"
    decision = route(router, ())
    assert (decision.reason, decision.detail) == ("no_candidate", "the pool has no instance")
    assert json.dumps(decision.explain())
    assert decision.charge(InFlight(), 0.0).charges == ()


HIT_ROWS = [  # tokens, block size, blocks of ranks, dp_size, hit_tokens
    (1024, 16, [(8, 0, 0)], 1, 128),
    (100, 16, [(8, 0, 0)], 1, 100),  # never above the prompt
    (100, 16, [(5, 5, 5)], 1, 100),
    (15, 16, [(8, 0, 0)], 1, 0),  # shorter than a block
    (1024, 0, [(8, 0, 0)], 1, 0),  # block size not known yet
    (1024, 16, [(48, 0, 0), (16, 0, 0)], 2, 256),  # lowest rank
    (1024, 16, [(48, 0, 0)], 2, 0),  # a rank is missing
    (1024, 16, [(48, 0, 0), (0, 0, 0)], 2, 0),  # a rank is not synchronized
    (1024, 16, [], 1, 0),  # unknown, or of another incarnation
    (1024, 16, [(8, 0, 0), (0, 12, 0)], 2, 192),  # by weight: 12 host blocks are worth 6
]


@pytest.mark.parametrize("row", HIT_ROWS, ids=str)
def test_hits(row: tuple[int, int, list[Blocks], int, int]) -> None:
    tokens, size, blocks, ranks, wanted = row
    decision = route(
        Router(build("car")), (instance("a", dp_size=ranks),), request=Request(tokens, size), hits={"a": blocks}
    )
    assert decision.hit_tokens == wanted


@pytest.mark.parametrize("case", VECTORS["car_multi_dp"], ids=lambda case: case["desc"])
def test_ranks_of_an_instance_by_vectors(case: dict[str, Any]) -> None:
    """The ratio of the worst rank; a missing or unsynchronized rank, or another incarnation (no hits at all): 0."""
    blocks = [(round((hit or 0) * 100), 0, 0) for hit in case["dp_hit"]]
    if case.get("incarnation") == "differs":
        blocks = []
    router = Router(build("car", **{"lambda": 1.0}))
    decision = route(router, (instance("a", dp_size=case["dp_size"]),), request=Request(1600, 16), hits={"a": blocks})
    assert decision.costs["a"] == pytest.approx((1 - case["ratio"],))


def test_ranks_of_an_instance_by_case() -> None:
    """C08: lowest rank, one unsynchronized makes it 0."""
    case = next(case for case in SCORING if case["id"] == "C08")
    fleet_ = tuple(instance(name, dp_size=2) for name in case["ranks"])
    hits = {name: [((tokens or 0) // 4, 0, 0) for tokens in ranks] for name, ranks in case["ranks"].items()}
    decision = route(
        Router(build("car", **{"lambda": case["lam"]})), fleet_, request=Request(case["input"], 4), hits=hits
    )
    assert {name: cost[0] for name, cost in decision.costs.items()} == pytest.approx(case["scores"])


@pytest.mark.parametrize(
    "bad", [Load(math.nan), Load(-1), Load(math.inf), Load(0, usage=math.nan), Load(0, usage=-0.5)]
)
@pytest.mark.parametrize("scorer", ["car", "least_waiting"])
def test_illegal_loads_never_win(bad: Load, scorer: str) -> None:
    """Whatever a load source says: the instance is no candidate, and the others' costs are as without it."""

    class Source:
        def get(self, name: str, now: float, rank: int | None = None) -> Load:
            return bad if name == "a" else Load({"b": 4, "c": 2}[name], usage=0.1)

    inflight = InFlight()
    decision = Router(build(scorer)).route(Request(64, 16), fleet("a b c"), None, Source(), inflight, 1.0)
    assert decision.destinations == (address("c"), address("b"))
    assert decision.excluded == {"a": "no_load"}
    without = Router(build(scorer)).route(Request(64, 16), fleet("b c"), None, Source(), inflight, 1.0)
    assert decision.costs == without.costs


def test_ranks_as_candidates() -> None:
    """dp: target: each rank by its own hits, load and counters; the header names it; one address once in the list."""
    router = Router(build("car"), dp="target", rank_header="x-rank")
    instances = (instance("a", dp_size=2), instance("b"))
    inflight = InFlight()
    waiting = {"a/0": 0, "a/1": 0, "b": 0}
    decision = route(router, instances, hits={"a": [(0, 0, 0), (32, 0, 0)]}, waiting=waiting, inflight=inflight)
    assert decision.chosen.name == "a/1"
    assert decision.rank == 1
    assert decision.headers == (("x-rank", "1"),)
    assert decision.destinations == (address("a"), address("b"))
    ticket = decision.charge(inflight, 1.0)
    assert (inflight.get("a", 1.0, 1).waiting, inflight.get("a", 1.0, 0).waiting) == (1, 0)
    ticket.close()
    decision = route(router, instances, hits={"a": [(0, 0, 0)]}, waiting={"b": 0, "a/1": 9}, inflight=inflight)
    assert (decision.chosen.name, decision.rank, decision.headers) == ("b", None, ())
    assert decision.excluded == {"a/0": "no_load"}
    rank = route(router, (instances[0],), hits={}, waiting={"a/0": 0, "a/1": 1})
    assert rank.rank == 0, "rank 0 is named too"


# -- rotation


@pytest.mark.parametrize(
    "scorer",
    [
        "car",
        "least_request",
        "least_waiting",
        "unified",
        "load_gated",
        "prefix_match",
        "ttft",
        "slo_aware",
        "round_robin",
    ],
)
def test_serial_cold_traffic_is_split_evenly(scorer: str) -> None:
    """Equal candidates, strictly one request at a time: each gets N/k plus or minus 1, in whatever order they come."""
    for tokens in (1024, 5):
        router = Router(build(scorer))
        instances = list(fleet("a b c d e"))
        shuffle = random.Random(7)
        picks: Counter[str] = Counter()
        for _ in range(52):
            shuffle.shuffle(instances)
            picks[route(router, instances, tokens=tokens).chosen.name] += 1
        assert sorted(picks.values()) == [10, 10, 10, 11, 11]


def test_rotation_survives_a_changing_tied_set() -> None:
    """Least recently picked first, never-picked ones in name order."""
    router = Router(build("car"))
    sets = ["a b c", "a b c", "b c", "a b", "c d", "a b c d", "a b c d"]
    picks = [route(router, fleet(names)).chosen.name for names in sets]
    assert picks == ["a", "b", "c", "a", "d", "b", "c"]


def test_picks_by_cost_do_not_shift_the_turns() -> None:
    """Between two ties the same one always wins by its hit: the ties are still split evenly."""
    router = Router(build("car"))
    picks = []
    for _ in range(10):
        picks.append(route(router, fleet("a b")).chosen.name)
        assert route(router, fleet("a b"), hits={"a": [(64, 0, 0)]}).chosen.name == "a"
    assert Counter(picks) == {"a": 5, "b": 5}


def test_near_equal_costs_are_equal() -> None:
    class Noisy:
        def costs(self, request: Request, candidates: Sequence[Candidate]) -> list[Cost | None]:
            return [(1.0 + 4e-10 * (c.name == "a"), float(c.name == "c")) for c in candidates]

    router = Router(Noisy())
    decisions = [route(router, fleet("a b c")) for _ in range(4)]
    assert [d.chosen.name for d in decisions] == ["a", "b", "a", "b"]
    assert [d.main.tied for d in decisions] == [2] * 4
    assert decisions[0].explain()["tied"] == ["a", "b"]


def test_rotation_memory_is_bounded() -> None:
    router = Router(build("least_request"), remembered=5)
    for i in range(200):
        route(router, (instance(f"n{i}", address=f"10.1.0.{i % 250}:1"),))
    assert len(router._picked) <= 6


def test_the_same_tuple_is_planned_once_and_stays_right() -> None:
    router = Router(build("car"))
    instances = fleet("a b c")
    picks = "".join(route(router, instances).chosen.name for _ in range(7))
    assert picks == "abcabca"
    assert route(router, fleet("a b c")).chosen.name == "b"


# -- prefill and decode

PAIRS = fleet("p1 p2", role="prefill") + fleet("d1 d2", role="decode")


def test_pair_llm_d() -> None:
    """The destination is the decode instance, the header names the prefiller; each by its own formula."""
    router = Router(build("car"))
    decision = route(
        router, PAIRS, hits={"p2": [(32, 0, 0)], "d1": [(64, 0, 0)]}, waiting={"p1": 0, "p2": 0, "d1": 4, "d2": 0}
    )
    assert (decision.chosen.name, decision.decode.name) == ("p2", "d2")
    assert decision.destinations == (address("d2"), address("d1"))
    assert decision.headers == (("x-prefiller-host-port", address("p2")),)
    assert decision.hit_tokens == 512
    assert decision.explain()["decode"] == "d2"


@pytest.mark.parametrize(
    ("profile", "destination", "headers"),
    [
        ("llm-d", "d1", {"x-prefiller-host-port": address("p1")}),
        ("xllm", "p1", {"x-prefill-name": "p1", "x-decode-name": "d1"}),
        ("plain", "p1", {"x-prefill-host-port": address("p1"), "x-decode-host-port": address("d1")}),
        (Profile(Role.DECODE, "x-p", None), "d1", {"x-p": address("p1")}),
    ],
)
def test_pair_profiles(profile: str | Profile, destination: str, headers: dict[str, str]) -> None:
    decision = route(Router(build("car"), profile=profile), PAIRS)
    assert decision.destinations[0] == address(destination)
    assert dict(decision.headers) == headers


def test_pairs_rotate_in_both_roles() -> None:
    router = Router(build("car"))
    decisions = [route(router, PAIRS) for _ in range(4)]
    assert [d.chosen.name for d in decisions] == ["p1", "p2", "p1", "p2"]
    assert [d.decode.name for d in decisions] == ["d1", "d2", "d1", "d2"]


ROLE_ROWS = [  # roles (mix:acting), chosen, decode, reason
    ({"x": "default"}, "x", None, None),
    ({"p": "prefill"}, None, None, "no_candidate"),
    ({"d": "decode"}, None, None, "no_candidate"),
    ({"p": "prefill", "d": "decode"}, "p", "d", None),
    ({"m": "mix", "d": "decode"}, "m", "d", None),
    ({"m": "mix:decode", "p": "prefill"}, "p", "m", None),
    ({"m": "mix:decode"}, None, None, "no_candidate"),
    ({"m": "mix:prefill"}, None, None, "no_candidate"),
    ({"a": "default", "p": "prefill"}, "a", None, None),  # a tie, in name order: a serves alone
]


@pytest.mark.parametrize("row", ROLE_ROWS, ids=str)
def test_roles(row: tuple[dict[str, str], str | None, str | None, str | None]) -> None:
    roles, chosen, decode, reason = row
    instances = tuple(
        instance(name, role.partition(":")[0], acting=role.partition(":")[2]) for name, role in roles.items()
    )
    decision = route(Router(build("car")), instances)
    assert (decision.chosen and decision.chosen.name, decision.decode and decision.decode.name) == (chosen, decode)
    assert decision.reason == reason
    assert bool(decision.destinations) == (reason is None)


def test_a_default_instance_never_lists_prefill_ones_behind_it() -> None:
    instances = (*fleet("a b"), instance("p", "prefill"), instance("d", "decode"))
    decision = route(Router(build("car")), instances, hits={"a": [(64, 0, 0)], "p": [(60, 0, 0)]})
    assert decision.destinations == (address("a"), address("b"))


@pytest.mark.parametrize(
    ("threshold", "least", "tokens", "hit", "split"),
    [(0, 0, 1024, 60, True), (256, 0, 1024, 60, False), (256, 0, 1024, 40, True), (0, 2048, 1024, 0, False)],
)
def test_split_only_when_it_pays(threshold: int, least: int, tokens: int, hit: int, split: bool) -> None:
    """Few tokens uncached on the decode instance, or a short prompt: it serves alone, no prefiller is named."""
    router = Router(build("car"), split_threshold=threshold, split_min_tokens=least)
    decision = route(
        router,
        PAIRS,
        tokens=tokens,
        hits={"d1": [(hit, 0, 0)]},
        waiting=dict.fromkeys(("p1", "p2", "d1"), 0) | {"d2": 5},
    )
    assert decision.destinations[0] == address("d1")
    assert (decision.decode is not None) == split
    assert bool(decision.headers) == split
    assert decision.chosen.name == ("p1" if split else "d1")


def test_pair_charges() -> None:
    """Prefill is over with the first byte; the decode instance holds the request to the end, without prefill work."""
    router, inflight = Router(build("car")), InFlight()
    inflight.update(PAIRS)
    decision = route(router, PAIRS, inflight=inflight, hits={"p1": [(32, 0, 0)]})
    ticket = decision.charge(inflight, 1.0)
    p1, d1 = inflight.find("p1"), inflight.find("d1")
    assert p1 is not None
    assert d1 is not None
    assert (p1.requests, p1.uncached_tokens, d1.requests, d1.uncached_tokens) == (1, 512, 1, 0)
    ticket.moved(address("d2"), 2.0)
    ticket.first_byte(2.0)
    assert (p1.requests, d1.requests, inflight.get("d2", 2.0).running) == (0, 0, 1)
    ticket.close()
    assert inflight.total() == 0


def test_slo_aware_pairs_are_chosen_together() -> None:
    """Both prefill instances are over the target and the idle decode instance has time: it does the prefill."""
    profiles = {
        "*": {"ttft": [(100, 30), (1000, 120), (4000, 420)], "tpot": [(101, 1, 11.1), (1001, 8, 26), (2001, 32, 106)]}
    }
    router, inflight = Router(build("slo_aware", profiles=profiles)), InFlight()
    for name, prompts in (("p1", [14800]), ("p2", [17800])):
        for prompt in prompts:
            inflight.charge(name, prompt, prompt)
    for _ in range(10):
        inflight.charge("d1", 2000, 0).first_byte()
    decision = route(router, PAIRS, tokens=1000, inflight=inflight)
    assert (decision.chosen.name, decision.decode.name) == ("d2", "d1")
    assert decision.headers == (("x-prefiller-host-port", address("d2")),)


# -- own requests between reports


def test_own_delta_stops_herding() -> None:
    """One stale report says b is idle: with the correction a burst is spread, without it all go to b."""

    class Stale:
        def get(self, name: str, now: float, rank: int | None = None) -> Load:
            return Load({"a": 2, "b": 0}[name], at=10.0)

    picks = {}
    for own_delta in (False, True):
        router, inflight = Router(build("least_waiting"), own_delta=own_delta), InFlight()
        inflight.charge("b", 100, 100, now=9.0)  # before the report: the report has it
        names = []
        for i in range(6):
            decision = router.route(Request(64, 16), fleet("a b"), None, Stale(), inflight, 10.1 + i / 100)
            decision.charge(inflight, 10.1 + i / 100)
            names.append(decision.chosen.name)  # type: ignore[union-attr]
        picks[own_delta] = Counter(names)
    assert picks[False] == {"b": 6}
    assert picks[True] == {"b": 4, "a": 2}


# -- faults


class Faulty:
    def __init__(self, fault: str):
        self.fault = fault

    def costs(self, request: Request, candidates: Sequence[Candidate]) -> list[Cost | None]:
        if self.fault == "raises":
            raise RuntimeError("boom")
        if self.fault == "short":
            return [(1.0,)]
        bad: Cost = {"nan": (math.nan,), "inf": (-math.inf,), "empty": (), "second": (0.0, math.nan)}[self.fault]
        return [bad if c.name == "a" else (5.0, 0.0) for c in candidates]

    def picked(self, request: Request, candidate: Candidate) -> None:
        raise RuntimeError("boom")


@pytest.mark.parametrize("fault", ["nan", "inf", "empty", "second"])
def test_costs_that_are_no_numbers_never_win(fault: str) -> None:
    decision = route(Router(Faulty(fault)), fleet("a b"))
    assert decision.chosen.name == "b"
    assert decision.excluded == {"a": "no_cost"}


@pytest.mark.parametrize("fault", ["raises", "short"])
def test_a_broken_scorer_leaves_the_request_unscored(fault: str) -> None:
    decision = route(Router(Faulty(fault)), fleet("a b"))
    assert (decision.reason, decision.destinations) == ("scorer_error", ())
    assert "Faulty" in decision.detail
    assert route(Router(build("car"), decode_scorer=Faulty(fault)), PAIRS).reason == "scorer_error"


@pytest.mark.parametrize(
    ("options", "word"), [({"max_endpoints": 0}, "max_endpoints"), ({"dp": "max"}, "dp"), ({"profile": "x"}, "profile")]
)
def test_bad_options(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Router(build("car"), **options)


def test_random_fleets_keep_every_rule() -> None:
    """The winner is eligible, costs ascend, the list holds known addresses once, hits fit the prompt."""
    rng = random.Random(20)
    names = [f"i{i}" for i in range(9)]
    routers = {
        name: Router(build(name), max_endpoints=rng.randint(1, 4), dp=rng.choice(["min", "target"]))
        for name in (
            "car",
            "ttft",
            "unified",
            "load_gated",
            "prefix_match",
            "least_request",
            "round_robin",
            "slo_aware",
        )
    }
    inflight = InFlight()
    open_tickets: list[Any] = []
    served = 0
    for step in range(1500):
        chosen_names = rng.sample(names, rng.randint(0, 9))
        instances = [
            instance(
                name,
                rng.choices(["default", "prefill", "decode", "mix"], [6, 1, 1, 1])[0],
                dp_size=rng.choice([1, 1, 2]),
                state=rng.choices(list(InstanceState), [6, 1, 1, 1, 1, 1])[0],
                address=f"10.2.0.{names.index(name)}:80",
            )
            for name in chosen_names
        ]
        router = routers[rng.choice(list(routers))]
        waiting = {
            key: rng.choice([0, 1, 5])
            for one in instances
            for key in (one.name, f"{one.name}/0", f"{one.name}/1")
            if rng.random() < 0.8
        }
        hits = {
            one.name: [tuple(rng.choice([0, 0, 3, 90]) for _ in range(3)) for _ in range(rng.randint(0, 2))]
            for one in instances
        }
        tokens = rng.choice([0, 7, 64, 1000])
        decision = route(
            router,
            instances,
            request=Request(tokens, 16, session=rng.choice([None, "s"])),
            now=float(step),
            hits=hits,
            waiting=waiting,
            inflight=inflight,
        )
        assert (decision.chosen is None) == (not decision.destinations) == (decision.reason is not None)
        assert len(decision.destinations) <= router.max_endpoints
        assert len(set(decision.destinations)) == len(decision.destinations)
        allowed = {one.address: one for one in instances if one.state in ("active", "lease_lost", "probation")}
        assert set(decision.destinations) <= set(allowed)
        assert 0 <= decision.hit_tokens <= max(decision.best_available_hit, 0) <= tokens
        assert 0 <= decision.uncached_tokens <= tokens
        costs = list(decision.main.costs)
        assert all(a <= tuple(x + 1e-9 for x in b) for a, b in itertools.pairwise(costs))
        if decision.chosen is not None:
            served += 1
            if "car" in routers and router is routers["car"]:
                assert decision.chosen.load is not None
            open_tickets.append(decision.charge(inflight, float(step)))
        if len(open_tickets) > 20 or (open_tickets and rng.random() < 0.4):
            ticket = open_tickets.pop(rng.randrange(len(open_tickets)))
            if rng.random() < 0.5:
                ticket.first_byte(step + 0.5)
            ticket.close()
        json.dumps(decision.explain())
    assert served > 500
    for ticket in open_tickets:
        ticket.close()
    assert inflight.total() == 0
