"""Drives StreamSync and PrefixIndex with the steps of a case file (tests/data/cases/README.md), whatever case."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvindex.dialects import DIALECTS, DialectOptions
from kvindex.hashing import content_keys, pack_tokens
from kvindex.index import PrefixIndex, TierBlocks
from kvindex.sync import Action, Recovery, StartReplay, State, StreamSync, SyncLimits

DATA = Path(__file__).parent.parent / "data"
CASES = DATA / "cases"
END = b"\xff" * 8


def load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def number(sequence: int) -> bytes:
    return struct.pack(">Q", sequence)


class Driven:
    """One stream and the shell around it: remembers which attempt is asked for, and passes time."""

    def __init__(
        self,
        index: PrefixIndex,
        *,
        name: str = "A/0",
        engine: str = "vllm",
        recovery: str = "none",
        topic: str = "",
        limits: SyncLimits | None = None,
    ) -> None:
        dialect = DIALECTS[engine](DialectOptions())
        self.index = index
        self.view = index.open(walk=dialect.walk, name=name)
        self.sync = StreamSync(
            view=self.view,
            dialect=dialect,
            recovery=Recovery(recovery),
            dp_rank=int(name.rpartition("/")[2]),
            topic=topic.encode(),
            limits=limits,
        )
        self.now = 0.0
        self.wanted: list[StartReplay] = []
        self.starts: list[StartReplay] = []
        self.applied: dict[int, bytes] = {}
        self.do(self.sync.connected)

    def do(self, call: Callable[..., list[Action]], *arguments: Any) -> list[Action]:
        self.now += 0.01
        actions = call(*arguments, self.now)
        for action in actions:
            if isinstance(action, StartReplay):
                self.wanted.append(action)
                self.starts.append(action)
            else:
                self.wanted = [one for one in self.wanted if one.attempt != action.attempt]
        return actions

    def live(self, frames: list[bytes]) -> list[Action]:
        if len(frames) == 3:
            self.applied[int.from_bytes(frames[1], "big")] = frames[2]
        return self.do(self.sync.live, frames)

    def asked(self) -> StartReplay:
        """The attempt that runs; when none does, whatever brings the stream to one: its timer, else the operator."""
        for _ in range(10):
            if self.wanted:
                return self.wanted[-1]
            due = self.sync.next_timer
            if self.sync.state is State.BACKOFF and due is not None:
                self.now = max(self.now, due)
                self.do(self.sync.timer)
            else:
                self.do(self.sync.resync)
        raise AssertionError(f"the stream asks for nothing: {self.sync.status}")

    def answer(self, replies: list[list[bytes]]) -> None:
        attempt = self.asked().attempt
        self.do(self.sync.attempt_started, attempt)
        for frames in replies:
            self.do(self.sync.reply, attempt, frames)

    def expire(self) -> None:
        """Let time pass until the next timer has fired."""
        due = self.sync.next_timer
        assert due is not None
        self.now = max(self.now, due)
        self.do(self.sync.timer)

    def content(self) -> tuple[Any, ...]:
        status = self.sync.status
        return status.sequence, status.blocks, status.known, status.synchronized

    def close(self) -> None:
        self.sync.retire()
        self.view.close()


class CaseDriver:
    """The streams of one case. `step` raises AssertionError where the outcome is not the case's."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        size = case.get("block_size", 4)
        self.index = PrefixIndex(block_size=None if size == "auto" else size)
        self.streams: dict[str, Driven] = {}
        self.removed: set[str] = set()

    def run(self) -> None:
        for position, step in enumerate(self.case["steps"]):
            try:
                getattr(self, f"_{step['op']}")(step)
                self.index.check()
            except AssertionError as error:
                raise AssertionError(f"{self.case['id']}, step {position} ({step['op']}): {error}") from error

    def stream(self, name: str) -> Driven:
        if name not in self.streams:
            case = self.case
            self.streams[name] = Driven(
                self.index, name=name, engine=case["engine"], recovery=case["recovery"], topic=case["topic"]
            )
        return self.streams[name]

    def _live(self, step: dict[str, Any]) -> None:
        name = step["stream"]
        if name.partition("/")[0] in self.removed:
            assert step["effect"] == "ignore"
            return
        stream = self.stream(name)
        before = stream.content()
        stream.live([bytes.fromhex(part) for part in step["frames_hex"]])
        status = stream.sync.status
        reached = status.synchronized and status.sequence == step["seq"]
        expected = {
            "apply": reached,
            "ignore": stream.content() == before,
            "buffer": not status.synchronized and status.buffered_bytes > 0,
            "desync": not status.synchronized,
            "fresh": reached and status.rebuilds > 0,
            "rebuild": reached and status.complete,
        }
        assert expected[step["effect"]], f"effect is not {step['effect']}: {status}"
        for word in step.get("must_report", ()):
            assert status.error is not None, f"nothing reported: {status}"
            assert word in status.error, status.error

    def _snapshot(self, step: dict[str, Any]) -> None:
        payload = bytes.fromhex(step["payload_hex"])
        self.stream(step["stream"]).answer([[b"", number(step["watermark"]), payload], [b"", END, b""]])

    def _replayed(self, step: dict[str, Any]) -> None:
        stream = self.stream(step["stream"])
        frames = [(one["seq"], bytes.fromhex(_payload(one))) for one in step["frames"]]
        start = stream.asked().start
        # After a gap the stream asks from its last frame where the file says the one after it.
        assert start in (step["asked"], step["asked"] - 1), f"asked from {start}, not {step['asked']}"
        if start < step["asked"]:
            frames.insert(0, (start, stream.applied[start]))
        stream.applied.update(frames)
        stream.answer([[b"", number(sequence), payload] for sequence, payload in frames] + [[b"", END, b""]])

    def _disconnect(self, step: dict[str, Any]) -> None:
        stream = self.stream(step["stream"])
        stream.do(stream.sync.disconnected)
        stream.do(stream.sync.reconnected)

    def _remove_instance(self, step: dict[str, Any]) -> None:
        self.removed.add(step["instance"])
        for name in [name for name in self.streams if name.partition("/")[0] == step["instance"]]:
            self.streams.pop(name).close()

    def _add_instance(self, step: dict[str, Any]) -> None:
        self.removed.discard(step["instance"])

    def _query(self, step: dict[str, Any]) -> None:
        tokens = step["tokens"]
        size = self.index.block_size or 4
        found = self.index.find(content_keys(pack_tokens(tokens), size))
        for name, expected in step.get("expect", {}).items():
            if expected == "absent":
                assert name not in self.streams
                continue
            stream = self.stream(name)
            blocks = found.get(stream.view, TierBlocks(0, 0, 0))
            status = stream.sync.status
            actual = {
                "synchronized": status.synchronized,
                "complete": status.complete,
                "device": blocks.device * size,
                "host_only": blocks.host * size,
                "disk_only": blocks.disk * size,
            }
            assert {key: actual[key] for key in expected} == expected, f"{name}: {status}"
        for name, expected in step.get("predicted_tokens", {}).items():
            stream = self.stream(name)
            hit = sum(found.get(stream.view, TierBlocks(0, 0, 0)))
            if stream.sync.dialect.caps_last_token:
                hit = min(hit, max(len(tokens) - 1, 0) // size)
            assert hit * size == expected, name


def _payload(frame: dict[str, Any]) -> str:
    if "payload_hex" in frame:
        return str(frame["payload_hex"])
    return str(frame["frames_hex"][-1])
