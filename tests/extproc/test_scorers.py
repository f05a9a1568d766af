"""Every numeric table of the scorers: costs, order, winners."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from extproc.scorers import SCORERS, Candidate, Cost, Load, Request, Role, Scorer, build, with_sessions
from extproc.scorers.prefix_match import imbalanced
from extproc.scorers.profiles import fit
from extproc.scorers.session import rendezvous

DATA = Path(__file__).parents[1] / "data"
VECTORS = json.loads((DATA / "vectors.json").read_text())
SCORING = {case["id"]: case for case in json.loads((DATA / "cases/scoring.json").read_text())["cases"]}


def made(name: str, **fields: Any) -> Candidate:
    waiting = fields.pop("waiting", None)
    load = None if waiting is None else Load(waiting, usage=fields.pop("usage", 0.0))
    return Candidate(name, f"10.0.0.1:{9000 + sum(map(ord, name))}", load=load, **fields)


def winners(candidates: Sequence[Candidate], costs: Sequence[Cost | None]) -> list[str]:
    rated = [(cost, c.name) for c, cost in zip(candidates, costs, strict=True) if cost is not None]
    best = min(cost for cost, _ in rated)
    return [name for cost, name in rated if all(abs(a - b) <= 1e-9 for a, b in zip(cost, best, strict=True))]


def ranking(candidates: Sequence[Candidate], costs: Sequence[Cost | None]) -> list[str]:
    rated = [(cost, i) for i, cost in enumerate(costs) if cost is not None]
    return [candidates[i].name for _, i in sorted(rated)]


# -- car


@pytest.mark.parametrize("case", VECTORS["car_prefill"], ids=lambda case: case["desc"])
def test_car_prefill_vectors(case: dict[str, Any]) -> None:
    params = case["params"]
    scorer = build("car", **{"lambda": params.get("lam", 0.5), "w_host": params.get("wh", 0.5)})
    candidates = [made(c["name"], device=c["dev"], host=c["host"], waiting=c["waiting"]) for c in case["candidates"]]
    costs = scorer.costs(Request(params["n"], 128), candidates)
    assert {c.name: cost and cost[0] for c, cost in zip(candidates, costs, strict=True)} == pytest.approx(
        case["scores"]
    )
    assert winners(candidates, costs) == case["winners"]


CAR_ROWS = [  # lambda, w_host, n, (device, host, waiting)..., costs, winners
    (0.5, 0.5, 1024, [(768, 0, 10), (0, 0, 0)], [0.625, 0.5], "B"),
    (0.7, 0.5, 1024, [(768, 0, 10), (0, 0, 0)], [0.475, 0.7], "A"),
    (0.0, 0.5, 1024, [(1024, 0, 3), (0, 0, 2), (0, 0, 4)], [0.75, 0.5, 1.0], "B"),
    (1.0, 0.5, 1024, [(1024, 0, 300), (512, 0, 0)], [0.0, 0.5], "A"),
    (0.5, 0.5, 1024, [(0, 1024, 0), (512, 0, 0)], [0.25, 0.25], "AB"),
    (0.5, 0.0, 1024, [(0, 1024, 0), (128, 0, 0)], [0.5, 0.4375], "B"),
    (0.5, 1.0, 1024, [(0, 1024, 0), (896, 0, 0)], [0.0, 0.0625], "A"),
    (0.5, 0.5, 1024, [(256, 0, 0), (512, 0, 0)], [0.375, 0.25], "B"),
    (0.5, 0.5, 1024, [(128, 0, 1), (0, 0, 1)], [0.9375, 1.0], "A"),
    (0.5, 0.5, 1000, [(896, 0, 0), (0, 0, 0)], [0.052, 0.5], "A"),
    (0.5, 0.5, 1024, [(0, 0, 2), (0, 0, 2)], [1.0, 1.0], "AB"),
    (0.5, 0.5, 1024, [(2048, 0, 0), (1024, 0, 0)], [0.0, 0.0], "AB"),
    (0.5, 0.5, 0, [(0, 0, 1), (0, 0, 0)], [1.0, 0.5], "B"),
]


@pytest.mark.parametrize("row", CAR_ROWS, ids=str)
def test_car_prefill(row: tuple[float, float, int, list[tuple[int, int, int]], list[float], str]) -> None:
    lam, w_host, tokens, given, wanted, best = row
    scorer = build("car", car_prefill_lambda=lam, car_host_hit_weight=w_host)
    candidates = [
        made("ABC"[i], device=device, host=host, waiting=waiting) for i, (device, host, waiting) in enumerate(given)
    ]
    costs = scorer.costs(Request(tokens, 128), candidates)
    assert [cost[0] for cost in costs if cost] == pytest.approx(wanted)
    assert "".join(winners(candidates, costs)) == best


@pytest.mark.parametrize("case", VECTORS["car_decode"], ids=lambda case: case["desc"])
def test_car_decode(case: dict[str, Any]) -> None:
    """Hits never count for a decode instance: its blocks are no reusable prefix."""
    candidates = [
        made(c["name"], waiting=c["waiting"], usage=c["usage"], device=900 * (i == 0))
        for i, c in enumerate(case["candidates"])
    ]
    costs = build("car").costs(Request(1024, 16, Role.DECODE), candidates)
    assert {c.name: cost and cost[0] for c, cost in zip(candidates, costs, strict=True)} == pytest.approx(
        case["scores"]
    )
    assert winners(candidates, costs) == case["winners"]


@pytest.mark.parametrize("case", [case for case in SCORING.values() if "P" in case], ids=lambda case: case["id"])
def test_car_scoring_cases(case: dict[str, Any]) -> None:
    candidates = [made(c["n"], device=c["dev"], host=c["host"], waiting=c["waiting"]) for c in case["P"]]
    picks = case.get("pick_by_lambda") or {str(case["lam"]): case["pick"]}
    for lam, pick in picks.items():
        costs = build("car", **{"lambda": float(lam), "w_host": case.get("hw", 0.5)}).costs(
            Request(case["input"], 4), candidates
        )
        assert winners(candidates, costs) == [pick]
        for name, score in case.get("scores", {}).items():
            assert dict(zip([c.name for c in candidates], costs, strict=True))[name] == pytest.approx((score,))


def test_car_disk_weight_and_missing_reports() -> None:
    """A disk hit counts only when asked for; no report, no cost, whatever the hit."""
    candidates = [made("A", disk=1024, waiting=0), made("B", device=1024)]
    assert build("car").costs(Request(1024, 16), candidates) == [(0.5,), None]
    assert build("car", w_disk=0.25).costs(Request(1024, 16), candidates) == [(0.375,), None]


# -- motor


@pytest.mark.parametrize("case", VECTORS["motor_scoring"], ids=lambda case: case["desc"])
def test_motor_vectors(case: dict[str, Any]) -> None:
    """The cases give the load as one number: a decode-side charge is exactly that number in prefill terms."""
    params = case["params"]
    weights = dict(zip(("w_npu", "w_cpu", "w_disk"), params.get("w", (1, 1, 0)), strict=True))
    candidates = []
    for c in case["candidates"]:
        device, host, disk = (128 * n for n in c.get("blocks", (0, 0, 0)))
        load = c["load"]
        candidates.append(
            made(c["name"], device=c.get("matched", device), host=host, disk=disk, waiting_prompt_tokens=load)
        )
    if params.get("mode") == "load_gated":
        scorer = build("load_gated", load_gate_topn=params.get("topn", 0), **weights)
    else:
        scorer = build("unified", load_weight=params.get("lw", 1.0), **weights)
    costs = scorer.costs(Request(case["isl"], 128, Role.PREFILL), candidates)
    assert ranking(candidates, costs) == [name for name, _ in case["ranking"]]
    by_name = dict(zip([c.name for c in candidates], costs, strict=True))
    for name, score in case["ranking"]:
        cost = by_name[name]
        assert cost is not None
        assert cost[-1] == pytest.approx(score)


def test_unified_credit_above_one_never_goes_below_zero() -> None:
    """C10: n 10, 2 blocks of 4, w_npu 2, credit 1.5: matched is 10, prefill 0, only the load is left."""
    case = SCORING["C10"]["unified"]
    scorer = build("unified", w_npu=case["w_npu"], overlap_credit=case["overlap_credit"])
    candidate = made("A", device=case["npu"] * case["block"], waiting_prompt_tokens=case["load"])
    assert scorer.costs(Request(case["isl"], case["block"], Role.PREFILL), [candidate]) == [(SCORING["C10"]["score"],)]


def test_load_gated_case() -> None:
    """C11: the longest prefix is on the busiest of three, which the default gate of two leaves out."""
    candidates = [
        made(e["n"], device=e["matched"], waiting_prompt_tokens=e["load"]) for e in SCORING["C11"]["gated"]["eps"]
    ]
    costs = build("load_gated").costs(Request(128, 16, Role.PREFILL), candidates)
    assert costs[0] is None
    assert winners(candidates, costs) == [SCORING["C11"]["pick"]]


@pytest.mark.parametrize(
    ("role", "load"), [(Role.PREFILL, 100 + 0.3 * 400), (Role.DEFAULT, 100 + 0.15 * 400), (Role.DECODE, 400)]
)
def test_motor_load_by_role(role: Role, load: float) -> None:
    candidate = made("A", waiting_prompt_tokens=100, prompt_tokens=400, uncached_tokens=7)
    cost = build("unified").costs(Request(0, 16, role), [candidate])[0]
    assert cost == pytest.approx((load,))


def test_unified_with_uncached_load() -> None:
    candidates = [made("A", uncached_tokens=70, waiting_prompt_tokens=900, device=32)]
    assert build("unified", load="uncached").costs(Request(100, 16), candidates) == [(68 + 70,)]


# -- prefix_match


@pytest.mark.parametrize("case", VECTORS["aibrix_matched_selection"], ids=str)
def test_prefix_match_selection(case: dict[str, Any]) -> None:
    """Per cent of 100 blocks; the gate is out of the way. No match within the bound: fewest requests."""
    candidates = [
        made(name, requests=count, device=16 * case["match"].get(name, 0)) for name, count in case["load"].items()
    ]
    costs = build("prefix_match", factor=case["factor"], abs_threshold=1 << 40).costs(Request(1600, 16), candidates)
    best = winners(candidates, costs)
    matched = min(cost for cost in costs if cost)[0] == 0
    assert (best if matched else None) == (case["expect"] and [case["expect"]])
    if not matched:
        fewest = min(case["load"].values())
        assert best == [name for name, count in case["load"].items() if count == fewest]


@pytest.mark.parametrize("case", VECTORS["aibrix_imbalance"], ids=str)
def test_prefix_match_gate(case: dict[str, Any]) -> None:
    assert imbalanced(case["counts"], case["threshold"]) == case["imbalanced"]


def test_prefix_match_gate_limits_matching() -> None:
    """0 10 20: only the idle one may match, so the full match on the busy one is not taken."""
    candidates = [made("A", requests=0), made("B", requests=10, device=160), made("C", requests=20, device=160)]
    assert winners(candidates, build("prefix_match").costs(Request(160, 16), candidates)) == ["A"]
    low = [made("A", requests=0, device=16), made("B", requests=0), made("C", requests=20, device=160)]
    assert build("prefix_match").costs(Request(160, 16), low)[0] == (0, -10, 0)


def test_prefix_match_needs_a_whole_block() -> None:
    candidates = [made("A", requests=1, device=16), made("B", requests=0)]
    assert winners(candidates, build("prefix_match").costs(Request(15, 16), candidates)) == ["B"]


# -- simple ones


def test_round_robin_keeps_its_place() -> None:
    """a b c a; and b leaving after the first a gives c a c."""
    scorer = build("round_robin")

    def turn(names: str, role: Role = Role.DEFAULT) -> str:
        candidates = [made(name) for name in names]
        best = winners(candidates, scorer.costs(Request(1, 16, role), candidates))
        assert len(best) == 1
        scorer.picked(Request(1, 16, role), made(best[0]))  # type: ignore[attr-defined]
        return best[0]

    assert [turn("abc") for _ in range(4)] == ["a", "b", "c", "a"]
    assert [turn("ac") for _ in range(3)] == ["c", "a", "c"]
    assert turn("cba") == "a"
    assert turn("abc", Role.DECODE) == "a", "each role has its own pointer"


def test_asking_for_costs_changes_nothing() -> None:
    candidates = [made("a"), made("b")]
    scorer = build("round_robin")
    assert [scorer.costs(Request(1, 16), candidates) for _ in range(3)] == [[(0.0,), (1.0,)]] * 3


def test_least_request() -> None:
    candidates = [made("A", requests=3), made("B", requests=1), made("C", requests=1)]
    assert winners(candidates, build("least_request").costs(Request(1, 16), candidates)) == ["B", "C"]
    reported = [Candidate("A", load=Load(1, 3)), Candidate("B"), Candidate("C", load=Load(5))]
    assert build("least_request", counts="report").costs(Request(1, 16), reported) == [(4.0,), None, (5.0,)]


def test_least_waiting() -> None:
    candidates = [made("A", waiting=3), made("B"), made("C", waiting=5)]
    assert build("least_waiting").costs(Request(1, 16), candidates) == [(3,), None, (5,)]


TTFT_ROWS = [  # n 4096; (queued, rate, device, host)..., costs, winner
    ([(0, 8000, 0, 0), (12000, 8000, 3072, 0), (2000, 8000, 2048, 0)], [0.512, 1.628, 0.506], "C"),
    ([(6000, 8000, 4032, 0), (0, 4000, 0, 0)], [0.758, 1.024], "A"),
    ([(0, 8000, 0, 2048), (0, 8000, 0, 0)], [0.384, 0.512], "A"),
    ([(0, 8000, 0, 0), (0, 8000, 0, 0)], [0.512, 0.512], "AB"),
    ([(100, None, 0, 0), (0, None, 0, 0)], [4196, 4096], "B"),
    ([(0, None, 0, 0), (0, 2000, 0, 0), (0, 4000, 0, 0)], [4096 / 3000, 2.048, 1.024], "C"),
]


@pytest.mark.parametrize("row", TTFT_ROWS, ids=str)
def test_ttft(row: tuple[list[tuple[int, int | None, int, int]], list[float], str]) -> None:
    given, wanted, best = row
    candidates = [
        made("ABC"[i], uncached_tokens=queued, prefill_rate=rate, device=device, host=host)
        for i, (queued, rate, device, host) in enumerate(given)
    ]
    costs = build("ttft", own_weight=1).costs(Request(4096, 16), candidates)
    assert [cost[0] for cost in costs if cost] == pytest.approx(wanted)
    assert "".join(winners(candidates, costs)) == best


def test_ttft_configured_rates_and_weight() -> None:
    candidates = [made("A", uncached_tokens=800, prefill_rate=1), made("B", prefill_rate=1), made("C", prefill_rate=1)]
    scorer = build("ttft", prefill_rate=8000, prefill_rates={"B": 7000}, own_weight=4)
    assert scorer.costs(Request(4000, 16), candidates) == [(1.1,), (8000 / 7000,), (1.0,)], "one of three is busy"
    idle = [made("A"), made("B")]
    assert scorer.costs(Request(4000, 16), idle) == [(0.5,), (4000 / 7000,)], "nobody waits: the plain estimate"


def test_ttft_learnt_rates_of_equal_engines_are_equal() -> None:
    """7000 and 8000 are chance, 2000 is another machine."""
    candidates = [made("ABC"[i], prefill_rate=rate) for i, rate in enumerate((7000, 8000, 2000))]
    assert build("ttft").costs(Request(7000, 16), candidates) == [(1.0,), (1.0,), (3.5,)]
    assert build("ttft", rate_tolerance=0).costs(Request(7000, 16), candidates) == [(1.0,), (0.875,), (3.5,)]


def test_ttft_counts_what_the_oldest_must_have_done_by_now() -> None:
    """At most the whole of the oldest, whatever the time: the others cannot have begun."""
    for busy, queued in ((0.0, 5000), (0.5, 4000), (60.0, 2000)):
        candidate = made("A", uncached_tokens=5000, head_tokens=3000, busy_seconds=busy, prefill_rate=2000)
        assert build("ttft").costs(Request(0, 16), [candidate]) == [(queued / 2000,)]
    wrong = made("A", uncached_tokens=5000, head_tokens=3000, busy_seconds=0.5, prefill_rate=2000)
    assert build("ttft", prefill_rate=8000).costs(Request(0, 16), [wrong]) == [(4000 / 8000,)], "the learnt one knows"
    unknown = made("A", uncached_tokens=5000, head_tokens=3000, busy_seconds=9.0)
    assert build("ttft").costs(Request(0, 16), [unknown]) == [(5000,)], "no rate, no progress"


# -- slo_aware

PROFILES = {
    "*": {
        "ttft": [(n, 20 + 0.1 * n) for n in (100, 1000, 4000)],
        "tpot": [(m, b, 10 + b + 0.001 * b * (m - 1)) for m in (101, 1001, 2001) for b in (1, 8, 32)],
    }
}


def queue(name: str, backlog: float) -> Candidate:
    """A prefill candidate with one waiting request of `backlog` ms (20 + .1 * tokens)."""
    tokens = round((backlog - 20) * 10) if backlog else 0
    return made(name, waiting_requests=int(backlog > 0), waiting_prompt_tokens=tokens, waiting_squares=tokens**2)


SLO_ROWS = [  # prefill backlogs, decode (requests, tokens, backlog), est, decode pick, prefill pick
    ({"p1": 300, "p2": 100}, {"d1": (10, 20000, 0), "d2": (0, 0, 0)}, [42, 12], "d1", "p2"),
    ({"p1": 1500, "p2": 1800}, {"d1": (10, 20000, 0), "d2": (0, 0, 0)}, [42, 12], "d1", "d2"),
    ({"p1": 300, "p2": 100}, {"d1": (20, 40000, 0), "d2": (20, 30000, 0)}, [72, 62], "d2", "p2"),
    ({"p1": 1500, "p2": 1800}, {"d1": (10, 20000, 0), "d2": (0, 0, 1600)}, [42, 12], "d1", "p1"),
]


@pytest.mark.parametrize("row", SLO_ROWS, ids=str)
def test_slo_aware(row: tuple[dict[str, float], dict[str, tuple[int, int, float]], list[int], str, str]) -> None:
    backlogs, decoders, estimates, decode_pick, prefill_pick = row
    scorer: Any = build("slo_aware", profiles=PROFILES)
    prefill = [queue(name, backlog) for name, backlog in backlogs.items()]
    decode = []
    for name, (requests, tokens, backlog) in decoders.items():
        candidate = queue(name, backlog)
        candidate.requests, candidate.prompt_tokens = requests, tokens
        decode.append(candidate)
    request = Request(1000, 16)
    assert [scorer.estimate(request, d) for d in decode] == estimates
    first, second = scorer.pair(request, prefill, decode)
    assert winners(decode, second) == [decode_pick]
    assert winners([*prefill, *decode], first) == [prefill_pick]


def test_slo_aware_equal_ones_are_tied() -> None:
    """Everything equal rotates, in both roles; without tokens and without profiles too."""
    for profiles, tokens in ((PROFILES, 1000), (PROFILES, 0), ({}, 1000)):
        scorer: Any = build("slo_aware", profiles=profiles)
        prefill, decode = [made("p1"), made("p2")], [made("d1"), made("d2")]
        first, second = scorer.pair(Request(tokens, 16), prefill, decode)
        assert winners([*prefill, *decode], first) == ["p1", "p2"]
        assert winners(decode, second) == ["d1", "d2"]
        assert winners(prefill, scorer.costs(Request(tokens, 16), prefill)) == ["p1", "p2"]


def test_fit_finds_the_coefficients_and_survives_poor_data() -> None:
    assert fit(
        [(1, n, n * n) for n in (10.0, 500.0, 8000.0, 60000.0)],
        [3 + 0.5 * n + 1e-5 * n * n for n in (10.0, 500.0, 8000.0, 60000.0)],
    ) == pytest.approx((3, 0.5, 1e-5))
    assert fit([], []) == (0, 0, 0)
    one = fit([(1.0, 100.0, 10000.0)], [50.0])
    assert one[0] + 100 * one[1] + 10000 * one[2] == pytest.approx(50)


# -- sessions


@pytest.mark.parametrize(
    ("key", "three", "two"), [("s1", 3, 1), ("s2", 2, 2), ("s3", 3, 1), ("alice", 2, 2), ("bob", 2, 2)]
)
def test_rendezvous_vectors(key: str, three: int, two: int) -> None:
    addresses = [f"10.0.0.{n}:8000" for n in (1, 2, 3)]
    assert max(addresses, key=lambda a: rendezvous(key, a)) == f"10.0.0.{three}:8000"
    assert max(addresses[:2], key=lambda a: rendezvous(key, a)) == f"10.0.0.{two}:8000"
    candidates = [Candidate(a, a) for a in addresses]
    costs = with_sessions(build("least_request"), mode="hash").costs(Request(1, 16, session=key), candidates)
    assert winners(candidates, costs) == [f"10.0.0.{three}:8000"]


def bound_to(name: str, **parameters: Any) -> Any:
    scorer = with_sessions(build("least_request"), **parameters)
    scorer.picked(Request(1, 16, session="s", now=100.0), made(name))
    return scorer


SESSION_ROWS = [  # mode, slack, requests of A B C, bound, winner
    ("prefer", 0.05, (5, 5, 9), "B", ["B"]),  # a tie goes to the bound one
    ("prefer", 0.05, (100, 104, 200), "B", ["B"]),  # near: 4 <= .05 * 100
    ("prefer", 0.05, (100, 106, 200), "B", ["A"]),  # too far
    ("prefer", 0.0, (5, 5, 9), "B", ["B"]),
    ("prefer", 0.05, (5, 5, 9), "C", ["A", "B"]),
    ("pin", 0.05, (0, 0, 900), "C", ["C"]),
    ("pin", 0.05, (1, 0, 900), "gone", ["B"]),  # not a candidate: scored
]


@pytest.mark.parametrize("row", SESSION_ROWS, ids=str)
def test_session_modes(row: tuple[str, float, tuple[int, int, int], str, list[str]]) -> None:
    mode, slack, counts, bound, wanted = row
    scorer = bound_to(bound, mode=mode, session_slack=slack)
    candidates = [made("ABC"[i], requests=n) for i, n in enumerate(counts)]
    assert winners(candidates, scorer.costs(Request(1, 16, session="s", now=101.0), candidates)) == wanted
    plain = build("least_request").costs(Request(1, 16), candidates)
    assert scorer.costs(Request(1, 16, now=101.0), candidates) == plain, "no session key, no change"
    assert scorer.costs(Request(1, 16, session="other", now=101.0), candidates) == plain


def test_session_binding_expires_is_bounded_and_follows_the_pick() -> None:
    scorer = bound_to("C", mode="pin", session_ttl=300, max_sessions=2)
    candidates = [made("A"), made("B", requests=1), made("C", requests=2)]

    def winner(session: str, now: float) -> list[str]:
        return winners(candidates, scorer.costs(Request(1, 16, session=session, now=now), candidates))

    assert winner("s", 400.0) == ["C"]
    assert winner("s", 400.1) == ["A"], "idle for longer than the TTL"
    for session in ("t", "u", "v"):
        scorer.picked(Request(1, 16, session=session, now=401.0), made("B"))
    assert [winner(session, 401.0) for session in ("t", "u", "v")] == [["A"], ["B"], ["B"]]
    scorer.picked(Request(1, 16, session="u", now=402.0), made("C"))
    assert winner("u", 402.0) == ["C"]


def test_session_key_that_is_an_address_binds_only_to_a_candidate() -> None:
    candidates = [Candidate("A", "10.0.0.1:8000"), Candidate("B", "10.0.0.2:8000", requests=3)]
    scorer = with_sessions(build("least_request"), mode="pin")
    for key, wanted in (("10.0.0.2:8000", "B"), ("MTAuMC4wLjI6ODAwMA==", "B"), ("127.0.0.1:22", "A"), ("é", "A")):
        assert winners(candidates, scorer.costs(Request(1, 16, session=key), candidates)) == [wanted], key


def test_session_keeps_excluded_candidates_out() -> None:
    scorer = with_sessions(build("least_waiting"), mode="pin")
    scorer.picked(Request(1, 16, session="s"), made("B"))
    candidates = [made("A", waiting=9), made("B")]
    assert scorer.costs(Request(1, 16, session="s"), candidates) == [(9,), None]


# -- registry

BAD_PARAMETERS = [
    ("car", {"lambda": 1.5}, "scorer car: lambda: 1.5 is not allowed, expected a number from 0 to 1"),
    ("car", {"car_prefill_lambda": -0.1}, "lambda: -0.1"),
    ("car", {"lambda": math.nan}, "lambda: nan"),
    ("car", {"lambda": "half"}, "lambda: 'half'"),
    ("car", {"lambda": True}, "lambda: True"),
    ("car", {"lambda": 0.5, "car_prefill_lambda": 0.5}, "given twice"),
    ("car", {"lam": 0.5}, "no parameter 'lam'; it takes: lambda, w_host, w_disk"),
    ("unified", {"load_weight": -1}, "expected a number of at least 0"),
    ("unified", {"load_weight": math.inf}, "load_weight: inf"),
    ("unified", {"load": "tokens"}, "one of prompt, uncached"),
    ("load_gated", {"load_gate_topn": 1.5}, "an integer of at least 0"),
    ("ttft", {"prefill_rate": 0}, "or null"),
    ("ttft", {"prefill_rates": {"A": "x"}}, "prefill_rates.A: 'x'"),
    ("ttft", {"prefill_rates": 5}, "prefill_rates: 5"),
    ("slo_aware", {"profiles": {"*": {"ttft": [[1]]}}}, "profiles.*.ttft: expected a list of rows of 2 numbers"),
    ("slo_aware", {"profiles": {"*": {"other": []}}}, "profiles.*:"),
    ("slo_aware", {"profiles": []}, "profiles: []"),
    ("round_robin", {"x": 1}, "it takes: none"),
    ("best", {}, "'best' is not known, expected one of car, ttft"),
    ("no.such.module:Class", {}, "cannot be loaded"),
    ("extproc.scorers.car:Nothing", {}, "cannot be loaded"),
    ("json:JSONEncoder", {}, "no method costs"),
    ("tests.extproc.test_scorers:Outside", {"colour": 1}, "colour"),
    ("extproc.scorers.car:Car", {"lambda": 2}, "from 0 to 1"),
]


@pytest.mark.parametrize(("name", "parameters", "words"), BAD_PARAMETERS, ids=str)
def test_bad_parameters_name_the_parameter_the_value_and_the_range(
    name: str, parameters: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match="scorer") as error:
        build(name, **parameters)
    assert words in str(error.value)


class Outside:
    """A scorer from outside, found by its dotted path."""

    def __init__(self, *, bias: float = 1.0):
        self.bias = bias

    def costs(self, request: Request, candidates: Sequence[Candidate]) -> list[Cost | None]:
        return [(self.bias,)] * len(candidates)


def test_outside_scorer_by_dotted_path() -> None:
    scorer = build("tests.extproc.test_scorers:Outside", bias=3.0)
    assert scorer.costs(Request(1, 16), [made("A")]) == [(3.0,)]


DEFAULTS = {  # as extproc/README.md documents them
    "car": {"lambda": 0.5, "w_host": 0.5, "w_disk": 0.0},
    "unified": {
        "load_weight": 1.0,
        "overlap_credit": 1.0,
        "prefill_load_scale": 1.0,
        "w_npu": 1.0,
        "w_cpu": 1.0,
        "w_disk": 0.0,
        "load": "prompt",
    },
    "load_gated": {"load_gate_topn": 0, "w_npu": 1.0, "w_cpu": 1.0, "w_disk": 0.0},
    "prefix_match": {"abs_threshold": 8, "factor": 1.0, "counts": "own"},
    "least_request": {"counts": "own"},
    "slo_aware": {"target_ttft_ms": 1000.0, "target_tpot_ms": 50.0, "profiles": {}},
}


@pytest.mark.parametrize("name", SCORERS)
def test_parameter_tables(name: str) -> None:
    """The table's defaults are the constructor's, and both are the documented ones."""
    table = {parameter.name: parameter.default for parameter in SCORERS[name].PARAMETERS}
    if name in DEFAULTS:
        assert table == DEFAULTS[name]
    assert vars(build(name)) == vars(SCORERS[name]())


def test_every_scorer_and_parameter_is_documented() -> None:
    """A row of the README's table for every scorer, with every parameter's name."""
    text = (Path(__file__).parents[2] / "extproc/README.md").read_text()
    rows = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    for name in SCORERS:
        for parameter in SCORERS[name].PARAMETERS:
            assert f"`{parameter.name}`" in rows[name], f"{name}: {parameter.name}"


# -- properties over all scorers

LOADED = [name for name in SCORERS if name != "round_robin"]


@pytest.mark.parametrize("name", LOADED)
def test_more_load_never_costs_less(name: str) -> None:
    """Raising one candidate's load, all else equal, never makes its place better."""
    scorer: Scorer = build(name, **({"profiles": PROFILES} if name == "slo_aware" else {}))
    for role in (Role.DEFAULT, Role.DECODE):
        places = []
        for extra in range(0, 40, 4):
            tokens = 100 * extra
            busy = Candidate(
                "B",
                "b:1",
                load=Load(extra, extra, extra / 100),
                requests=extra,
                waiting_requests=extra,
                prompt_tokens=tokens,
                waiting_prompt_tokens=tokens,
                uncached_tokens=tokens,
                waiting_squares=extra * 100**2,
            )
            other = Candidate(
                "A",
                "a:1",
                load=Load(10, 10, 0.1),
                requests=10,
                waiting_requests=10,
                prompt_tokens=1000,
                waiting_prompt_tokens=1000,
                uncached_tokens=1000,
                waiting_squares=10 * 100**2,
            )
            candidates = [other, busy]
            order = ranking(candidates, scorer.costs(Request(1000, 16, role), candidates))
            places.append(order.index("B") if "B" in order else 9)
        assert places == sorted(places), f"{name} {role}"


@pytest.mark.parametrize("name", [n for n in SCORERS if n in ("car", "ttft", "unified", "load_gated", "prefix_match")])
def test_more_hit_never_costs_more(name: str) -> None:
    scorer = build(name)
    for tier in ("device", "host", "disk"):
        previous: Cost | None = None
        for hit in range(0, 2000, 160):
            candidates = [made("A", waiting=1), made("B", waiting=1, **{tier: hit})]
            cost = scorer.costs(Request(1600, 16), candidates)[1]
            assert cost is not None
            assert previous is None or cost <= previous
            previous = cost
