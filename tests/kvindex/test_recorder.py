"""What is written down of a rank: history first, then the live frames that it did not bring; never a frame lost."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from extproc.commands.record import record
from kvindex.errors import ConfigurationError
from kvindex.fleet import StreamEndpoint
from kvindex.recorder import RankRecorder, Recording
from kvindex.sync import CancelReplay, StartReplay

END = b"\xff" * 8
DOCS = (Path(__file__).parents[2] / "docs" / "captures.md").read_text("utf-8")


def seq(number: int) -> bytes:
    return number.to_bytes(8, "big")


def live(number: int, topic: bytes = b"kv") -> list[bytes]:
    return [topic, seq(number), b"p%d" % number]


class Rank:
    def __init__(self, *, history: bool = True, **options: Any) -> None:
        self.written: list[tuple[bytes, int, bool]] = []
        self.rank = RankRecorder(self._write, history=history, topic=b"given", **options)

    def _write(self, frames: list[bytes], history: bool) -> None:
        assert frames[-1] == b"p%d" % int.from_bytes(frames[1], "big")
        self.written.append((frames[0], int.from_bytes(frames[1], "big"), history))

    @property
    def numbers(self) -> list[int]:
        return [number for _, number, _ in self.written]


def test_without_history_frames_are_written_as_they_come() -> None:
    one = Rank(history=False)
    assert one.rank.connected(0.0) == []
    for number in (5, 7, 5, 0):
        assert one.rank.live(live(number), 0.0) == []
    assert one.written == [(b"kv", 5, False), (b"kv", 7, False), (b"kv", 5, False), (b"kv", 0, False)]


# what follows the request for history, numbers written in the end
ENDINGS = [
    ("end marker", lambda rank: rank.reply(1, [b"", END, b""], 1.0), [0, 1, 2, 3, 4]),
    ("end marker with topic", lambda rank: rank.reply(1, [b"", b"", END, b""], 1.0), [0, 1, 2, 3, 4]),
    ("failed", lambda rank: rank.attempt_failed(1, "refused", 1.0), [0, 1, 2, 3, 4]),
    ("silence", lambda rank: rank.timer(rank.next_timer), [0, 1, 2, 3, 4]),
    ("end of the recording", lambda rank: rank.retire(), [0, 1, 2, 3, 4]),
]


@pytest.mark.parametrize(("_name", "ending", "numbers"), ENDINGS, ids=[row[0] for row in ENDINGS])
@pytest.mark.parametrize("topic", [[], [b"kv"]], ids=["old framing", "new framing"])
def test_history_comes_first(_name: str, ending: Any, numbers: list[int], topic: list[bytes]) -> None:
    one = Rank()
    rank = one.rank
    assert rank.connected(0.0) == [StartReplay(1, 0)]
    assert rank.connected(0.0) == [], "asked once"
    rank.attempt_started(1, 0.0)
    rank.live(live(2), 0.1)
    for number in range(3):
        assert rank.reply(1, [b"", *topic, seq(number), b"p%d" % number], 0.2) == []
    rank.live(live(3), 0.3)
    rank.reply(1, [b"damaged"], 0.3)
    assert not rank.ready
    ending(rank)
    assert rank.ready
    assert rank.next_timer is None
    rank.live(live(4), 1.0)
    assert one.numbers == numbers
    assert [history for *_, history in one.written] == [True] * 3 + [False] * 2
    assert {name for name, *_ in one.written} == {b"kv"}, "the topic is the live frames' where a reply has none"
    assert rank.reply(1, [b"", b"kv", seq(9), b"p9"], 2.0) == []
    assert one.numbers == numbers, "a late reply is nobody's"


def test_topic_as_given_where_nothing_tells_it() -> None:
    one = Rank()
    one.rank.connected(0.0)
    one.rank.reply(1, [b"", seq(0), b"p0"], 0.2)
    assert one.written == [(b"given", 0, True)]


def test_frames_kept_back_are_bounded() -> None:
    one = Rank(max_held=40)
    one.rank.connected(0.0)
    actions = [one.rank.live(live(number), 0.0) for number in range(6)]
    assert actions[:3] == [[], [], []]
    assert [CancelReplay(1)] in actions
    assert one.numbers == list(range(6))


def test_two_ranks_need_two_ports(tmp_path: Path) -> None:
    same = [StreamEndpoint(0, "tcp://10.0.0.1:5557"), StreamEndpoint(1, "tcp://10.0.0.2:5557")]
    with pytest.raises(ConfigurationError, match="same events port"):
        Recording(tmp_path / "a", same)
    assert not (tmp_path / "a").exists()


def test_a_full_disk_ends_the_recording(tmp_path: Path) -> None:
    recording = Recording(tmp_path / "a", [StreamEndpoint(0, "tcp://10.0.0.1:5557")])
    recording._file.close()
    recording._file = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    recording.request({"path": "/v1/completions"})
    assert recording.error is not None
    assert "No space" in recording.error
    assert recording.counts.requests == 0


def test_the_page_names_every_key_and_exception(tmp_path: Path) -> None:
    """What a Recording writes, and what verify may answer, is in docs/captures.md."""
    recording = Recording(tmp_path / "a", [StreamEndpoint(0, "tcp://10.0.0.1:5557")], meta={"vllm": {}})
    recording._frames(recording._ranks[0], live(0), True)
    recording.request({})
    rows = [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["meta", "live", "request"]
    documented = set(re.findall(r"`([a-z_]+)`", DOCS))
    assert {key for row in rows for key in row} - {"kind"} <= documented
    source = (Path(__file__).parents[2] / "kvindex" / "capture.py").read_text("utf-8")
    reasons = set(re.findall(r'"(reset_external|report_mode_full|[a-z]+_[a-z]+|concurrent|incomplete)"', source))
    named = {"reset_external", "report_mode_full", "sliding_window", "late_offload", "concurrent", "several_prompts"}
    named |= {"rank_unknown", "incomplete"}
    assert named <= reasons, "a reason that verify does not know any more"
    assert named <= set(re.findall(r"^\| `([^`]+)`", DOCS, re.MULTILINE))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--ranks", "0"], "--ranks"),
        (["--settle-ms", "-5"], "--settle-ms"),
        (["--max-bytes", "0"], "--max-bytes"),
        (["--listen", "127.0.0.1:99999"], "--listen"),
        (["--engine", "grpc://127.0.0.1:1"], "--engine"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_cannot_be(flags: list[str], words: str, tmp_path: Path) -> None:
    """Told before the engine is asked for anything."""
    path = tmp_path / "new.jsonl"
    given = ["--engine", "http://127.0.0.1:1", "--events", "tcp://127.0.0.1:1", *flags]
    result = CliRunner().invoke(record, [str(path), *given])
    assert result.exit_code == 2, result.output
    assert words in result.output
    assert not path.exists()
