"""The lab against hand-computed traces, its options, its page, and the published figures on a piece of a real trace."""

from __future__ import annotations

import gzip
import json
import os
import random
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from extproc.cli import main
from extproc.commands.simulate import simulate as command
from extproc.simulate import (
    POLICIES,
    Model,
    TraceError,
    TraceRequest,
    as_json,
    page,
    parse_policy,
    read_trace,
    simulate,
)

R = TraceRequest


def played(trace: list[TraceRequest], policy: str = "round_robin", **options: Any) -> Any:
    options = {"engines": 1, "blocks": 100, "prefill_rate": 1000.0, "overhead": 0.0, "block_size": 100} | options
    return simulate(trace, policies=policy, **options)[0]


HAND = [  # what, trace, options, hit ratio, sorted TTFTs
    ("one request", [R(0, 500, 0, (1, 2, 3, 4, 5))], {}, 0.0, [0.5]),
    ("overhead", [R(0, 500, 0, (1, 2, 3, 4, 5))], {"overhead": 0.01}, 0.0, [0.51]),
    ("the second waits for the first", [R(0, 500, 0, (1,)), R(0.2, 300, 0, (2,))], {}, 0.0, [0.5, 0.6]),
    ("an idle engine begins at once", [R(0, 500, 0, (1,)), R(0.7, 300, 0, (2,))], {}, 0.0, [0.3, 0.5]),
    ("shared prefix of two blocks", [R(0, 300, 0, (1, 2, 3)), R(1, 300, 0, (1, 2, 4))], {}, 200 / 600, [0.1, 0.3]),
    ("a hole ends the prefix", [R(0, 100, 0, (2,)), R(1, 200, 0, (1, 2))], {}, 0.0, [0.1, 0.2]),
    ("a partial last block counts as its tokens", [R(0, 150, 0, (1, 2)), R(1, 150, 0, (1, 2))], {}, 0.5, [0.0, 0.15]),
    ("evicted", [R(0, 200, 0, (1, 2)), R(1, 200, 0, (3, 4)), R(2, 200, 0, (1, 2))], {"blocks": 2}, 0.0, [0.2] * 3),
    ("used lately is kept",
     [R(0, 100, 0, (1,)), R(1, 100, 0, (2,)), R(2, 100, 0, (1,)), R(3, 100, 0, (3,)), R(4, 100, 0, (1,))],
     {"blocks": 2}, 0.4, [0.0, 0.0, 0.1, 0.1, 0.1]),
    ("host tier takes what is evicted; its tokens cost a fifth", [R(0, 100, 0, (1,)), R(1, 100, 0, (2,)),
     R(2, 100, 0, (1,))], {"blocks": 1, "host_blocks": 4}, 1 / 3, [0.02, 0.1, 0.1]),
    ("seen only after the prefill", [R(0, 500, 0, (1, 2, 3, 4, 5)), R(0.1, 500, 0, (1, 2, 3, 4, 5)),
     R(0.2, 500, 0, (1, 2, 3, 4, 5))], {"engines": 2, "events": "prefill"}, 1 / 3, [0.3, 0.5, 0.5]),
    ("faster trace", [R(0, 500, 0, (1,)), R(0.4, 300, 0, (2,))], {"speed": 2.0}, 0.0, [0.5, 0.6]),
    ("one slow engine", [R(0, 500, 0, (1,)), R(0, 500, 0, (2,))],
     {"engines": 2, "rates": (1000.0, 500.0)}, 0.0, [0.5, 1.0]),
]  # fmt: skip


@pytest.mark.parametrize("row", HAND, ids=lambda row: row[0])
def test_hand_computed(row: tuple[str, list[TraceRequest], dict[str, Any], float, list[float]]) -> None:
    _, trace, options, hit_ratio, times = row
    result = played(trace, **options)
    assert result.hit_ratio == pytest.approx(hit_ratio)
    assert result.ttft_mean_s == pytest.approx(sum(times) / len(times))
    assert result.ttft_p50_s == pytest.approx(times[len(times) // 2])
    assert result.ttft_p99_s == pytest.approx(times[-1])


def test_hand_computed_choices() -> None:
    """The second turn waits behind the first, or goes to the idle engine without a hit, as the scorer says."""
    trace = [R(0, 2000, 0, tuple(range(20))), R(1, 2000, 0, tuple(range(20)))]
    two: dict[str, Any] = {"engines": 2}
    assert played(trace, "least_waiting", **two).ttft_mean_s == pytest.approx(2.0)
    assert played(trace, "car:lambda=1", **two).ttft_mean_s == pytest.approx((2.0 + 1.0) / 2)
    assert played(trace, "ttft", **two).hit_ratio == 0.5, "1 s of waiting is less than 2 s of computing"
    assert played(trace, "car:lambda=0", **two).imbalance == pytest.approx(1.0)
    assert played(trace, "car:lambda=1", **two).imbalance == pytest.approx(2.0)


def test_load_reports_come_late() -> None:
    """Everything looks idle in a report that is a minute old: ties still rotate, but a busy engine is not seen."""
    burst = [R(0, 8000, 0, (0,)), *(R(0.6 * i, 500, 0, (i,)) for i in range(1, 9))]
    options: dict[str, Any] = {"engines": 2, "ties": "router"}
    fresh = played(burst, "least_waiting", **options)
    late = played(burst, "least_waiting", report_interval=60.0, **options)
    mended = played(burst, "least_waiting", report_interval=60.0, own_delta=True, **options)
    assert mended.ttft_mean_s == pytest.approx(fresh.ttft_mean_s)
    assert late.ttft_mean_s > fresh.ttft_mean_s


def test_decode_time_counts_as_in_flight() -> None:
    """With decode time, least_request avoids the engine that still answers; without, both are equal again."""
    trace = [R(0, 100, 1000, (1,)), R(1, 100, 0, (2,)), R(2, 100, 0, (3,)), R(3, 100, 0, (4,))]
    spread = played(trace, "least_request", engines=2, decode_seconds=0.05, ties="router")
    assert spread.imbalance == pytest.approx(3 / 2)
    assert played(trace, "least_request", engines=2, ties="router").imbalance == pytest.approx(1.0)


def test_speculation_keeps_siblings_together() -> None:
    """Eight equal prompts within one prefill: spread by events alone, all on one engine with speculation."""
    burst = [R(0.001 * i, 1000, 0, tuple(range(10))) for i in range(8)]
    options: dict[str, Any] = {"engines": 4, "events": "prefill"}
    without, with_it = (played(burst, "ttft", speculative=on, **options) for on in (False, True))
    assert without.hit_ratio == pytest.approx(4 / 8)
    assert with_it.hit_ratio == pytest.approx(7 / 8)


def random_trace(requests: int = 400) -> list[TraceRequest]:
    """Conversations that come back with a longer prompt."""
    rng = random.Random(4)
    history: dict[int, tuple[int, ...]] = {who: (0, 1000 * who) for who in range(1, 21)}
    trace = []
    for i in range(requests):
        who = rng.choice(list(history))
        history[who] = (*history[who], 1_000_000 + 2 * i, 1_000_001 + 2 * i)
        if len(history[who]) > 24:
            history[who] = (0, 2_000_000 + i)
        trace.append(R(i * 0.2, 100 * len(history[who]), rng.randint(0, 50), history[who]))
    return trace


def test_same_arguments_same_figures() -> None:
    trace = random_trace()
    options: dict[str, Any] = {"engines": 4, "blocks": 60, "prefill_rate": 2000.0, "block_size": 100}
    first, again = (simulate(trace, **options, seed=1) for _ in range(2))
    assert first == again
    assert [result.policy for result in first] == list(POLICIES)
    noisy = [simulate(trace, **options, policies="car", seed=seed, jitter=0.2) for seed in (2, 2, 3)]
    assert noisy[0] == noisy[1] != noisy[2]
    by_name = {result.policy: result for result in first}
    assert by_name["ttft"].hit_ratio > by_name["round_robin"].hit_ratio + 0.1
    assert all(0 <= result.hit_ratio <= 1 and result.imbalance >= 1 for result in first)
    assert all(r.ttft_p50_s <= r.ttft_p90_s <= r.ttft_p99_s for r in first)


def test_every_request_is_answered_once_in_every_model() -> None:
    trace = random_trace(150)
    models: list[dict[str, Any]] = [
        {}, {"events": "prefill"}, {"events": "prefill", "speculative": True}, {"host_blocks": 20},
        {"report_interval": 1.0}, {"decode_seconds": 0.01}, {"ties": "router"}, {"jitter": 0.5},
    ]  # fmt: skip
    for options in models:
        finished: list[str] = []

        def progress(policy: str, done: int, total: int, finished: list[str] = finished) -> None:
            if done == total:
                finished.append(policy)

        for result in simulate(
            trace,
            3,
            30,
            2000.0,
            "car,round_robin",
            block_size=100,
            progress=progress,
            **options,
        ):
            assert result.ttft_mean_s > 0
            assert result.series
        assert finished == ["car", "round_robin"]


MOONCAKE = [  # policy, hit, mean, p90, p99 over 8 engines of 2000 blocks at 8000 tokens/s, by a model written apart
    ("round_robin", 0.081, 3.28, 8.6, 18.4),
    ("car", 0.210, 1.92, 4.6, 13.2),
]


def mooncake() -> Path:
    return Path(__file__).parents[1] / "data/traces/mooncake_conversation.jsonl.gz"


@pytest.mark.parametrize("row", MOONCAKE, ids=lambda row: row[0])
def test_published_figures(row: tuple[str, float, float, float, float]) -> None:
    policy, hit, mean, p90, p99 = row
    result = simulate(mooncake(), policies=policy)[0]
    assert (result.hit_ratio, result.ttft_mean_s, result.ttft_p90_s, result.ttft_p99_s) == pytest.approx(
        (hit, mean, p90, p99), rel=0.02
    )


# -- reading, arguments


def test_read_trace(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 2000, "input_length": 700, "output_length": 3, "hash_ids": [0, 5]},
        {"timestamp": 1000, "input_length": 10, "hash_ids": [0]},
    ]
    text = "\n".join(map(json.dumps, rows)) + "\n\n"
    plain, packed = tmp_path / "t.jsonl", tmp_path / "t.jsonl.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    wanted = [R(1.0, 10, 0, (0,)), R(2.0, 700, 3, (0, 5))]
    assert read_trace(plain) == read_trace(str(packed)) == wanted


@pytest.mark.parametrize(
    "line",
    ["not json", "[]", "{}", '{"timestamp": 1, "input_length": "x", "hash_ids": []}',
     '{"timestamp": null, "input_length": 1, "hash_ids": []}', '{"timestamp": 1, "input_length": 1, "hash_ids": 5}',
     '{"timestamp": 1, "input_length": -1, "hash_ids": []}'],
)  # fmt: skip
def test_bad_traces_name_file_and_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 1, "input_length": 1, "hash_ids": []}\n' + line + "\n")
    with pytest.raises(TraceError, match=r"bad\.jsonl, line 2"):
        read_trace(path)


def test_empty_trace_and_bad_options() -> None:
    with pytest.raises(TraceError, match="no request"):
        simulate([])
    one = [R(0, 1, 0, ())]
    for options, word in (
        ({"engines": 0}, "engines: 0"), ({"prefill_rate": 0.0}, "prefill_rate"), ({"events": "x"}, "events: 'x'"),
        ({"ties": "x"}, "ties"), ({"rates": (1.0,)}, "rates: 1 given for 8"), ({"policies": "best"}, "'best'"),
        ({"policies": "car:lambda"}, "name:parameter=value"), ({"policies": "car:lambda=7"}, "from 0 to 1"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=word):
            simulate(one, **options)
    Model().check()
    assert vars(parse_policy("unified:load=uncached:load_weight=2"))["load_weight"] == 2.0


# -- output

KEYS = ["policy", "hit_ratio", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "imbalance"]


def test_json_shape() -> None:
    out = json.loads(json.dumps(as_json("t", simulate(random_trace(30), policies="car,ttft"))))
    assert list(out) == ["trace", "policies"]
    assert [list(row) for row in out["policies"]] == [KEYS, KEYS]


class Page(HTMLParser):
    """Text, tags and anything that would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "srcset", "data")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_shows_everything_and_fetches_nothing() -> None:
    results = simulate(random_trace(60), policies="car,ttft,round_robin")
    text = page("<trace>.jsonl", results)
    seen = Page()
    seen.feed(text)
    assert seen.fetched == []
    assert "script" not in seen.tags
    assert "url(" not in text
    assert seen.tags.count("polyline") == 6
    assert "Scorers on <trace>.jsonl" in seen.text
    for result in results:
        assert result.policy in seen.text
        assert f"{result.ttft_p99_s:.3f}" in seen.text


def test_command(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(
        "".join(
            json.dumps({"timestamp": r.at * 1000, "input_length": r.tokens, "output_length": 1, "hash_ids": r.blocks})
            + "\n"
            for r in random_trace(40)
        )
    )
    plot = tmp_path / "out.html"
    arguments = [str(trace), "--engines", "2", "--policies", "car,ttft", "--json", "--plot", str(plot)]
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0, done.output
    assert [row["policy"] for row in json.loads(done.stdout)["policies"]] == ["car", "ttft"]
    assert "<polyline" in plot.read_text()
    assert CliRunner().invoke(command, [str(trace), "--policies", "best"]).exit_code == 2
    table = CliRunner().invoke(command, [str(trace), "--policies", "car"])
    assert table.exit_code == 0
    assert "hit ratio" in table.stdout


def test_a_pipe_is_no_trace(tmp_path: Path) -> None:
    """It is read for the size of its blocks first: nothing would be left."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = CliRunner().invoke(main, ["simulate", str(pipe)])
    assert (done.exit_code, "give a file, no pipe" in done.output) == (2, True)
