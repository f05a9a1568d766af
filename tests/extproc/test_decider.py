"""From a body to an outcome, without sockets: what is chosen, what passes and why, what clients may say."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from extproc import simulate
from extproc.config import Headers
from extproc.decider import PoolDecider
from extproc.decisions import DecisionLog
from extproc.liveness import Liveness
from extproc.messages import HttpRequest, Outcome
from extproc.metrics import Metrics
from extproc.pool import Pool
from extproc.router import Router
from extproc.scorers import build, with_sessions
from extproc.shedding import Shedding
from extproc.speculative import Approximate, Speculation
from extproc.trace_log import TraceLog
from tests.extproc.pool_model import engine, make_pool

IDS = list(range(100, 121))
A, B, C = (f"10.0.0.{number}:8000" for number in (1, 2, 3))


class Bench:
    """A decider over pools, with a clock that stands still until told."""

    def __init__(self, *pools: Pool, **options: Any) -> None:
        self.now = 100.0
        self.metrics = Metrics("test")
        self.log = DecisionLog()
        self.pools = pools
        self.decider = PoolDecider(pools, self.metrics, self.log, clock=lambda: self.now, **options)

    def ask(self, body: Any = None, path: str = "/v1/completions", **headers: str) -> Outcome:
        data = body if isinstance(body, bytes) else orjson.dumps(body or {"model": "qwen3-8b", "prompt": IDS})
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return asyncio.run(self.decider.decide(HttpRequest("POST", path, given, data)))

    def counted(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"kvcar_{name}_total", labels) or 0.0


def three(**options: Any) -> Pool:
    return make_pool(*(engine(f"engine-{letter}") for letter in "abc"), **options)


@pytest.mark.parametrize(
    ("body", "reason", "pool"),
    [
        (b"{", "bad_json", ""),
        (b"[]", "bad_request", ""),
        ({"model": "other", "prompt": "x"}, "model", ""),
        ({"model": "qwen3-8b"}, "bad_request", "qwen"),
        ({"model": "qwen3-8b", "prompt": ["a", "b"]}, "batch", "qwen"),
        ({"model": "qwen3-8b", "prompt": ""}, "bad_request", "qwen"),
    ],
)
def test_what_cannot_be_scored_passes_with_one_counted_reason(body: Any, reason: str, pool: str) -> None:
    bench = Bench(three())
    outcome = bench.ask(body)
    assert (outcome.destinations, outcome.reason, outcome.ticket) == ((), reason, None)
    assert bench.counted("unscored", reason=reason) == 1
    assert bench.counted("requests", pool=pool, outcome="unscored") == 1
    assert next(iter(bench.log.latest())).reason == reason


def test_a_choice_is_charged_until_its_ticket_is_closed() -> None:
    bench = Bench(three())
    outcome = bench.ask(x_request_id="r1")
    assert outcome.destinations[0] == A
    assert set(outcome.destinations) == {A, B, C}
    assert outcome.metadata["prompt_tokens"] == len(IDS)
    counters = bench.pools[0].inflight.find("engine-a")
    assert counters is not None
    assert (counters.requests, counters.waiting_requests) == (1, 1)
    assert outcome.ticket is not None
    outcome.ticket.on_response_headers(200, A)
    bench.now += 1
    outcome.ticket.on_first_byte()
    assert (counters.requests, counters.waiting_requests) == (1, 0)
    outcome.ticket.on_usage(16, 21)
    outcome.ticket.close()
    assert counters.requests == 0
    record = next(bench.log.latest(request_id="r1"))
    assert (record.served, record.status, record.cached_tokens) == (A, 200, 16)
    assert bench.counted("hit_tokens", pool="qwen", kind="delivered") == 16


def test_load_moves_to_the_host_that_served() -> None:
    bench = Bench(three())
    outcome = bench.ask()
    assert outcome.ticket is not None
    outcome.ticket.on_response_headers(200, B)
    first, second = (bench.pools[0].inflight.find(name) for name in ("engine-a", "engine-b"))
    assert first is not None
    assert second is not None
    assert (first.requests, second.requests) == (0, 1)
    assert bench.counted("served_elsewhere", pool="qwen") == 1


@pytest.mark.parametrize(
    ("status", "served", "flags", "out"),
    [
        (503, A, 0x20, "engine-a"),  # UF: no connection
        (503, None, 0x40, "engine-a"),  # UC, and the gateway does not say where
        (504, A, 0x4, "engine-a"),  # UT
        (503, A, 0x8020, "engine-a"),  # UF, after all retries
        (503, A, None, "engine-a"),  # a gateway that tells no flags
        (503, A, 0, None),  # the engine's own: its queue is full
        (503, A, 0x8000, None),  # the engine's own, after retries
        (503, None, 0x80, None),  # UO: the gateway's own bounds
        (500, A, 0, None),
        (200, B, 0, "engine-a"),  # the gateway went on
        (200, "10.9.9.9:1", 0, None),  # the gateway has its own mind
    ],
)
def test_whose_failure_it_is(status: int, served: str | None, flags: int | None, out: str | None) -> None:
    bench = Bench(three(liveness=Liveness(failures=1)))
    outcome = bench.ask()
    assert outcome.destinations[:2] == (A, B)
    assert outcome.ticket is not None
    outcome.ticket.on_response_headers(status, served, flags)
    liveness = bench.pools[0].liveness
    assert liveness is not None
    assert set(liveness.out(bench.now)) == ({out} if out else set())


def test_the_gateways_subset_is_obeyed() -> None:
    bench = Bench(three())
    body = orjson.dumps({"model": "qwen3-8b", "prompt": IDS})
    for given in ([B], f"{B}, 10.9.9.9:1"):
        metadata = {"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": given}}
        request = HttpRequest("POST", "/v1/completions", {}, body, metadata)
        assert asyncio.run(bench.decider.decide(request)).destinations == (B,)
    empty = {"envoy.lb.subset_hint": {"x-gateway-destination-endpoint-subset": []}}
    outcome = asyncio.run(bench.decider.decide(HttpRequest("POST", "/v1/completions", {}, body, empty)))
    assert (outcome.destinations, outcome.reason) == ((), "no_candidate")


def test_a_header_chooses_among_allowed_scorers_only() -> None:
    bench = Bench(three(routers={"round_robin": Router(build("round_robin"))}))
    assert bench.ask(x_kvcar_scorer="round_robin").metadata["scorer"] == "round_robin"
    assert bench.ask(x_kvcar_scorer="least_request").metadata["scorer"] == "car"
    assert bench.ask().metadata["scorer"] == "car"


def test_answers_explain_themselves_when_the_operator_allows_it() -> None:
    assert Bench(three()).ask().response_headers == ()
    headers = dict(Bench(three(), names=Headers(explain=True)).ask().response_headers)
    assert headers["x-kvcar-instance"] == "engine-a"
    assert headers["x-kvcar-prompt-tokens"] == str(len(IDS))


def test_a_session_stays() -> None:
    router = Router(with_sessions(build("car"), mode="pin"))
    bench = Bench(three(router=router, session_header="x-session-id"))
    first = bench.ask(x_session_id="s1").destinations[0]
    assert {bench.ask(x_session_id="s1").destinations[0] for _ in range(5)} == {first}
    assert len({bench.ask().destinations[0] for _ in range(6)}) > 1


@pytest.mark.parametrize("beside", [Speculation(ttl=2.0), Approximate(ttl=2.0)], ids=["speculation", "approximate"])
def test_siblings_stay_together_while_a_prompt_is_pending(beside: Speculation | Approximate) -> None:
    bench = Bench(three(beside=beside, router=Router(build("car", **{"lambda": 1.0}))))
    first = bench.ask()
    assert first.metadata["hit_tokens"] == 0
    second = bench.ask()
    assert second.destinations[0] == first.destinations[0]
    assert second.metadata["hit_tokens"] == second.metadata["speculative_tokens"] == 20
    bench.now += 3
    assert bench.ask().metadata["hit_tokens"] == 0, "forgotten after its time"


def test_ranks_as_candidates_count_for_their_instance() -> None:
    pool = make_pool(
        engine("engine-a", ranks=2), router=Router(build("car"), dp="target"), shedding=Shedding(queue_threshold=1)
    )
    bench = Bench(pool)
    bench.ask()
    assert pool.inflight.of_instance("engine-a").requests == 1
    assert pool.loads.get("engine-a", bench.now).waiting == 1  # type: ignore[union-attr]
    assert bench.ask().immediate is not None, "saturated"


def test_a_session_key_is_kept_short() -> None:
    router = Router(with_sessions(build("car"), mode="pin"))
    bench = Bench(three(router=router, session_header="x-session-id"))
    first = bench.ask(x_session_id="k" * 60_000).destinations[0]
    assert bench.ask(x_session_id="k" * 60_000).destinations[0] == first
    record = next(bench.log.latest())
    assert record.decision is not None
    assert len(record.decision.request.session or "") < 300


def test_shedding_refuses_only_while_all_are_saturated() -> None:
    bench = Bench(three(shedding=Shedding(queue_threshold=2, spare_priority=5)))
    tickets = [bench.ask().ticket for _ in range(6)]
    refused = bench.ask()
    assert refused.immediate is not None
    assert refused.immediate.status == 429
    assert dict(refused.immediate.headers)["retry-after"] == "1"
    assert bench.counted("requests", pool="qwen", outcome="shed") == 1
    assert bench.ask(x_kvcar_priority="5").immediate is None, "important requests are served"
    assert tickets[0] is not None
    tickets[0].on_first_byte()
    assert bench.ask().immediate is None


def test_the_trace_is_what_the_lab_replays(tmp_path: Path) -> None:
    trace = TraceLog(tmp_path / "decisions.jsonl")
    bench = Bench(three(), trace=trace)
    for number in range(3):
        bench.now += 1
        outcome = bench.ask({"model": "qwen3-8b", "prompt": [*IDS, *range(number * 4)]})
        assert outcome.ticket is not None
        outcome.ticket.on_usage(16, 21)
        outcome.ticket.close()
    trace.close()
    first, second, third = simulate.read_trace(tmp_path / "decisions.jsonl")
    assert (first.at, first.tokens, len(first.blocks)) == (1.0, 21, 5)
    assert third.at == 3.0
    assert second.blocks[:5] == first.blocks == third.blocks[:5]
    assert simulate.block_size_of(tmp_path / "decisions.jsonl") == 4
    (result,) = simulate.simulate(tmp_path / "decisions.jsonl", engines=2, blocks=100, policies="car", block_size=4)
    assert result.hit_ratio > 0


def test_a_full_trace_ends_without_harm(tmp_path: Path) -> None:
    trace = TraceLog(tmp_path / "small.jsonl", max_bytes=300)
    for _ in range(50):
        trace.add(1.0, [b"k" * 16], tokens=5, block_size=4, instance="a", hit=0, cached=None)
    trace.close()
    assert 0 < (tmp_path / "small.jsonl").stat().st_size <= 300


def test_what_clients_write_is_kept_short_and_printable() -> None:
    """The ring holds a thousand records: a client must not fill it with megabytes, nor with half a surrogate."""
    bench = Bench(three())
    body = b'{"model": "' + b"m" * 100_000 + b'\\ud800", "prompt": "x"}'
    bench.ask(body, x_request_id="r" * 5000)
    bench.ask(b'{"model": "de\\ud800mo", "prompt": "x"}')
    for record in bench.log.latest():
        assert len(orjson.dumps(record.as_dict())) < 2000
