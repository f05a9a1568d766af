"""Pending prefixes and approximate mode: what is credited, for how long, and that it is told apart from the index."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from extproc.loads.inflight import InFlight
from extproc.router import Router
from extproc.scorers import Request, build
from extproc.speculative import Approximate, Speculation
from kvindex.fleet import Instance
from kvindex.hashing import content_keys, extras_bytes, pack_tokens, root_bytes

A, B = Instance("a", "10.0.0.1:80", incarnation="1"), Instance("b", "10.0.0.2:80")
TWO = Instance("two", "10.0.0.3:80", dp_size=2)


@dataclass
class Match:
    """Blocks by instance name."""

    blocks: Mapping[str, Sequence[tuple[int, int, int]]]

    def hits(self, instance: Any) -> Sequence[tuple[int, int, int]]:
        return self.blocks.get(instance.name, ())


def seen(speculation: Speculation, keys: Sequence[Hashable], confirmed: int, now: float, instance: Any = A) -> Any:
    """(blocks in all, of them pending) of rank 0."""
    over = speculation.over(Match({instance.name: [(confirmed, 0, 0)]}), keys, now)
    pending = over.speculative(instance)[0]
    return sum(over.hits(instance)[0]), pending


ROWS = [  # what, keys sent, keys asked, confirmed, seconds later, blocks, pending
    ("a whole prompt", "abcd", "abcd", 0, 0.0, 4, 4),
    ("a longer one", "abcd", "abcdef", 0, 0.0, 4, 4),
    ("another branch", "abcd", "abxy", 0, 0.0, 2, 2),
    ("another prompt", "abcd", "xbcd", 0, 0.0, 0, 0),
    ("behind confirmed blocks", "abcd", "abcd", 2, 0.0, 4, 2),
    ("all confirmed", "abcd", "abcd", 4, 0.0, 4, 0),
    ("more confirmed than was sent", "ab", "abcd", 3, 0.0, 3, 0),
    ("still believed", "abcd", "abcd", 0, 1.9, 4, 4),
    ("no more", "abcd", "abcd", 0, 2.0, 0, 0),
    ("nothing asked", "abcd", "", 0, 0.0, 0, 0),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_credit(row: tuple[str, str, str, int, float, int, int]) -> None:
    _, sent, asked, confirmed, later, blocks, pending = row
    speculation = Speculation(ttl=2.0)
    speculation.add(A, None, sent, 100.0)
    assert seen(speculation, asked, confirmed, 100.0 + later) == (blocks, pending)
    assert seen(speculation, asked, 0, 100.0, B) == (0, 0), "another instance has nothing"


def test_events_take_over() -> None:
    """Once confirmed, the index has the word: what is evicted afterwards is no hit, although the time is not over."""
    speculation = Speculation(ttl=10.0)
    speculation.add(A, None, "abcd", 0.0)
    assert seen(speculation, "abcd", 3, 1.0) == (4, 1)
    assert seen(speculation, "abcd", 1, 2.0) == (1, 0)
    speculation.add(A, None, "wxyz", 2.0)
    speculation.settle(A, 0, "xy")
    assert seen(speculation, "wxyz", 0, 2.0) == (1, 1)
    speculation.settle(A, 0, "unknown")


@pytest.mark.parametrize("how", ["clear", "other rank", "restart", "other instance"])
def test_what_ends_it(how: str) -> None:
    speculation = Speculation()
    speculation.add(A, None, "abcd", 0.0)
    instance: Any = A
    if how == "restart":
        instance = replace(A, incarnation="2")
    else:
        speculation.clear("b" if how == "other instance" else "a", 1 if how == "other rank" else None)
    kept = how in ("other rank", "other instance")
    assert seen(speculation, "abcd", 0, 0.1, instance)[0] == (4 if kept else 0)
    assert len(speculation) == (0 if how == "clear" else 4)


def test_ranks_are_kept_apart() -> None:
    speculation = Speculation()
    speculation.add(TWO, 1, "abc", 0.0)
    over = speculation.over(None, "abc", 0.0)
    assert list(over.hits(TWO)) == [(0, 0, 0), (3, 0, 0)]
    assert over.speculative(TWO) == [0, 3]


def test_bounded_and_forgetting() -> None:
    speculation = Speculation(ttl=2.0, max_blocks=10)
    for i in range(50):
        speculation.add(A, None, [f"{i}/{block}" for block in range(3)], 0.0)
        assert len(speculation) <= 10
    assert seen(speculation, ["49/0", "49/1", "49/2"], 0, 0.0) == (3, 3), "the newest are kept"
    speculation.over(None, "", 2.0)
    assert len(speculation) == 0
    for options in ({"ttl": 0.0}, {"max_blocks": 0}):
        with pytest.raises(ValueError, match="above 0"):
            Speculation(**options)


def burst(speculation: Speculation | None, scorer: str, tokens: int = 4096) -> Counter[str]:
    """64 equal cold prompts over 4 equal instances, all before any event."""
    instances = tuple(Instance(name, f"10.0.0.{i}:80") for i, name in enumerate("abcd"))
    router, inflight = Router(build(scorer)), InFlight()
    keys = list(range(tokens // 16))
    picks: Counter[str] = Counter()
    for i in range(64):
        now = i / 1000
        hits = speculation.over(None, keys, now) if speculation is not None else None
        decision = router.route(Request(tokens, 16), instances, hits, inflight, inflight, now)
        assert decision.chosen is not None
        if speculation is not None:
            speculation.add(next(one for one in instances if one.name == decision.chosen.name), None, keys, now)
            told = decision.explain()
            assert told["speculative_tokens"] == decision.speculative_tokens == decision.hit_tokens
        decision.charge(inflight, now)
        picks[decision.chosen.name] += 1
    return picks


@pytest.mark.parametrize("scorer", ["car", "ttft", "unified", "least_request", "round_robin"])
def test_without_speculation_a_burst_is_spread(scorer: str) -> None:
    assert max(burst(None, scorer).values()) <= 32


def test_with_speculation_siblings_stay_together() -> None:
    assert burst(Speculation(), "ttft") == {"a": 64}
    assert burst(Speculation(), "round_robin") == dict.fromkeys("abcd", 16)


def test_own_namespace_for_adapter_and_salt() -> None:
    """Content keys carry adapter and salt, so pending prefixes never meet across them."""
    tokens = pack_tokens(range(64))
    plain = content_keys(tokens, 16)
    speculation = Speculation()
    speculation.add(A, None, plain, 0.0)
    for other in (content_keys(tokens, 16, root=root_bytes("lora")),
                  content_keys(tokens, 16, extras=[extras_bytes(["salt"])])):  # fmt: skip
        assert seen(speculation, other, 0, 0.0) == (0, 0)


# -- approximate mode


def test_approximate_is_an_lru_of_what_was_sent() -> None:
    guess = Approximate(ttl=120.0, capacity=4)
    guess.add(A, None, "abcd", 0.0)
    over = guess.over(None, "abx", 10.0)
    assert (list(over.hits(A)), over.speculative(A)) == ([(2, 0, 0)], [2])
    assert list(over.hits(B)) == [(0, 0, 0)]
    guess.add(A, None, "ab", 20.0)
    guess.add(A, None, "z", 21.0)
    assert list(guess.over(None, "abcd", 22.0).hits(A)) == [(2, 0, 0)], "c was used longest ago"
    assert list(guess.over(None, "ab", 140.0).hits(A)) == [(0, 0, 0)], "too old"
    assert guess.blocks() == {"a": 4}
    guess.retain([replace(A, incarnation="9"), B])
    assert guess.blocks() == {}
    for options in ({"ttl": 0.0}, {"capacity": 0}):
        with pytest.raises(ValueError, match="above 0"):
            Approximate(**options)


def test_approximate_against_a_plain_model() -> None:
    rng = random.Random(1)
    guess, model = Approximate(ttl=50.0, capacity=12), dict[int, float]()
    for step in range(2000):
        now = float(step)
        keys = [rng.randint(0, 3) * 100 + i for i in range(rng.randint(1, 6))]
        if rng.random() < 0.5:
            guess.add(A, 0, keys, now)
            for key in keys:
                model.pop(key, None)
                model[key] = now
            model = dict(list(model.items())[-12:])
        wanted = 0
        for key in keys:
            if key not in model or model[key] + 50 <= now:
                break
            wanted += 1
        assert guess.over(None, keys, now).speculative(A) == [wanted]


def test_an_instance_is_looked_up_once_a_request() -> None:
    """The router asks for the hits and then for their speculative part."""
    asked: list[str] = []

    class Counting(Match):
        def hits(self, instance: Any) -> Sequence[tuple[int, int, int]]:
            asked.append(instance.name)
            return super().hits(instance)

    speculation = Speculation()
    speculation.add(TWO, 1, "abcd", 0.0)
    over = speculation.over(Counting({"two": [(1, 1, 0), (2, 0, 0)]}), "abcd", 0.0)
    assert list(over.hits(TWO)) == [(1, 1, 0), (4, 0, 0)]
    assert over.speculative(TWO) == [0, 2]
    assert list(over.hits(A)) == [(0, 0, 0)]
    assert asked == ["two", "a"]
