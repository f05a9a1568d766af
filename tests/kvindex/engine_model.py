"""An engine as its events describe it, the network between it and us, and what must hold for whoever listens.

Engine: blocks of a few prompts on three tiers with counted copies, one numbered message a step, a ring of the last
messages (history) or the whole content (snapshot). It can be restarted; each message knows what was resident after it.

World: carries messages to one StreamSync and loses, repeats, damages, delays and cuts as the dice say, within what the
transport promises: no frame of one connection is delivered as of another, `disconnected` follows its last frame.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgpack
from xxhash import xxh3_64_intdigest

from kvindex.dialects import DIALECTS, DialectOptions
from kvindex.events import Tier
from kvindex.hashing import content_keys, pack_tokens
from kvindex.index import PrefixIndex, TierBlocks, Walk
from kvindex.sync import CancelReplay, Recovery, StartReplay, State, StreamSync, SyncLimits

BLOCK = 2
WORDS = {Tier.DEVICE: "GPU", Tier.HOST: "cpu", Tier.DISK: "STORAGE"}
END = b"\xff" * 8
TOPIC = b"kv"
OVERSIZE = 40_000

# Prompts that share beginnings. A block's engine hash is made of its prefix and the engine's own seed.
PROMPTS = [
    [1, 2, 3, 4, 5, 6, 7, 8],
    [1, 2, 3, 4, 9, 10],
    [1, 2, 11, 12, 13, 14, 15, 16, 17, 18],
    [20, 21, 22, 23],
]
KEYS = [content_keys(pack_tokens(prompt), BLOCK) for prompt in PROMPTS]

Truth = dict[Tier, frozenset[bytes]]


@dataclass
class Message:
    """truth: what is resident once it is applied; harm: its own events cannot all be taken over."""

    sequence: int
    payload: bytes
    truth: Truth
    process: int
    harm: bool = False


class Engine:
    def __init__(self, dice: random.Random, recovery: Recovery, *, ring: int, process: int, first: int = 0) -> None:
        self.dice, self.recovery, self.process = dice, recovery, process
        self.copies: dict[Tier, Counter[bytes]] = {tier: Counter() for tier in Tier}
        self.told: set[bytes] = set()
        self.ring: deque[Message] = deque(maxlen=ring)
        self.snapshots: deque[Message] = deque(maxlen=6)
        self.next = first
        self.array = recovery is not Recovery.SNAPSHOT and dice.random() < 0.4
        self.seed = dice.getrandbits(40)
        self.last: Message | None = None
        if first and dice.random() < 0.5:  # it had content before its first message
            self._store(dice.randrange(len(PROMPTS)))

    # -- events

    def hash(self, key: bytes) -> int | bytes:
        number = xxh3_64_intdigest(key, self.seed)
        return number.to_bytes(8, "big") * 4 if self.seed % 3 == 0 else number - (1 << 63 if self.seed % 3 == 1 else 0)

    def truth(self) -> Truth:
        return {tier: frozenset(self.copies[tier]) for tier in Tier}

    def _event(self, prompt: int, begin: int, end: int, tier: Tier, *, tokens: bool = True) -> dict[str, Any]:
        keys = KEYS[prompt]
        return {
            "type": "BlockStored",
            "block_hashes": [self.hash(key) for key in keys[begin:end]],
            "parent_block_hash": self.hash(keys[begin - 1]) if begin and tokens else None,
            "token_ids": PROMPTS[prompt][begin * BLOCK : end * BLOCK] if tokens else [],
            "block_size": BLOCK if tokens else 0,
            "lora_id": None,
            "medium": WORDS[tier],
            "lora_name": None,
        }

    def _store(self, prompt: int) -> list[dict[str, Any]]:
        """Whatever of the prompt is not on the device, from its first missing block on."""
        keys, device = KEYS[prompt], self.copies[Tier.DEVICE]
        end = self.dice.randint(1, len(keys))
        begin = next((place for place in range(end) if not device[keys[place]]), end)
        if begin == end:
            begin = end - 1  # computed twice at the same time: a second copy
        for key in keys[begin:end]:
            device[key] += 1
        return [self._event(prompt, begin, end, Tier.DEVICE)]

    def _remove(self) -> list[dict[str, Any]]:
        tier = self.dice.choice(list(Tier))
        held = sorted(self.copies[tier])
        if not held:
            return []
        key = self.dice.choice(held)
        if tier is Tier.DEVICE:  # an engine evicts the tail first: a block goes only when none stands on it
            standing = {keys[place - 1] for keys in KEYS for place in range(1, len(keys)) if keys[place] in held}
            if key in standing:
                return []
        self._take(tier, key)
        return [{"type": "BlockRemoved", "block_hashes": [self.hash(key)], "medium": WORDS[tier]}]

    def _take(self, tier: Tier, key: bytes) -> None:
        self.copies[tier][key] -= 1
        if self.copies[tier][key] <= 0:
            del self.copies[tier][key]

    def _offload(self) -> list[dict[str, Any]]:
        tier = self.dice.choice((Tier.HOST, Tier.DISK))
        prompt = self.dice.randrange(len(PROMPTS))
        resident = [place for place, key in enumerate(KEYS[prompt]) if self.copies[Tier.DEVICE][key]]
        if not resident:
            return []
        place = self.dice.choice(resident)
        self.copies[tier][KEYS[prompt][place]] += 1
        return [self._event(prompt, place, place + 1, tier, tokens=self.dice.random() < 0.5)]

    def _clear(self) -> list[dict[str, Any]]:
        for tier in (Tier.DEVICE,) if self.recovery is not Recovery.SNAPSHOT else tuple(Tier):
            self.copies[tier].clear()
        if self.recovery is Recovery.SNAPSHOT:
            # Cleared, then stored, is the whole content in this dialect; a plain clear stands alone.
            return [{"type": "AllBlocksCleared"}]
        return [{"type": "AllBlocksCleared"}, *self._store(0)]

    def content(self) -> list[dict[str, Any]]:
        """The whole resident content as stored events, parents first."""
        events, done = [], set()
        for prompt, keys in enumerate(KEYS):
            for place, key in enumerate(keys):
                if key in done:
                    continue
                done.add(key)
                for tier in Tier:
                    events += [self._event(prompt, place, place + 1, tier)] * self.copies[tier][key]
        return events

    # -- messages

    def step(self, *, harm: bool = False) -> Message:
        events: list[dict[str, Any]] = []
        restore = False
        for _ in range(self.dice.choice((0, 1, 1, 1, 2, 3))):
            roll = self.dice.random()
            if roll < 0.5:
                events += self._store(self.dice.randrange(len(PROMPTS)))
            elif roll < 0.75:
                events += self._remove()
            elif roll < 0.95:
                events += self._offload()
            elif not events:
                events += self._clear()
                break
        if self.recovery is Recovery.SNAPSHOT and self.dice.random() < 0.05 and self.content():
            events, restore = [{"type": "AllBlocksCleared"}, *self.content()], True
        if self.dice.random() < 0.1 and not restore:
            events.insert(0, {"type": "SomethingNew", "medium": "GPU"})
        if harm:
            events.insert(self.dice.randrange(len(events) + 1), {"type": "BlockRemoved", "block_hashes": [1.5]})
        message = Message(self.next, self.pack(events), self.truth(), self.process, harm)
        self.ring.append(message)
        self.last = message
        self.next += 1
        if self.recovery is Recovery.SNAPSHOT:
            self.snapshots.append(self.snapshot())
        return message

    def snapshot(self) -> Message:
        return Message(self.next - 1, self.pack(self.content()), self.truth(), self.process)

    def pack(self, events: list[Any]) -> bytes:
        if self.array:
            events = [list(event.values()) for event in events]
        rank = self.dice.choice((0, 0, None))
        return msgpack.packb([self.dice.random() * 1e9, events, rank])  # type: ignore[no-any-return]

    def replay(self, start: int, *, stale: bool = False) -> list[Message]:
        """stale: a snapshot of some messages ago."""
        if self.recovery is Recovery.SNAPSHOT:
            return [self.dice.choice(self.snapshots) if stale and self.snapshots else self.snapshot()]
        return [message for message in self.ring if message.sequence >= start]


def walk(truth: Truth, keys: list[bytes], kind: Walk) -> TierBlocks:
    """D12 by its definition."""
    held = [{tier for tier in Tier if key in truth[tier]} for key in keys]
    if kind is Walk.INTERLEAVED:
        best = []
        for tiers in held:
            if not tiers:
                break
            best.append(min(tiers))
        return TierBlocks(*(best.count(tier) for tier in Tier))
    device = next((place for place, tiers in enumerate(held) if Tier.DEVICE not in tiers), len(held))
    host = next((place for place in range(device, len(held)) if Tier.HOST not in held[place]), len(held))
    disk = next((place for place in range(host, len(held)) if Tier.DISK not in held[place]), len(held))
    return TierBlocks(device, host - device, disk - host)


# -- the network


@dataclass
class Faults:
    """Chances a step; all 0 = a perfect network."""

    lose: float = 0.0
    repeat: float = 0.0
    damage: float = 0.0
    harm: float = 0.0
    cut: float = 0.0
    restart: float = 0.0
    foreign: float = 0.0
    hole: float = 0.0
    truncate: float = 0.0
    refuse: float = 0.0
    stray: float = 0.0
    stale: float = 0.0
    operator: float = 0.0


@dataclass
class Answer:
    attempt: int
    start: int
    messages: deque[list[bytes]] = field(default_factory=deque)
    begun: bool = False


class World:
    def __init__(self, seed: int, recovery: Recovery, *, lazy: bool = False) -> None:
        self.dice = dice = random.Random(seed)
        self.recovery = recovery
        self.small = dice.random() < 0.3
        """Tiny bounds: over them a stream cannot come to rest."""
        self.limits = SyncLimits(
            attempts=3,
            backoff_initial=1.0,
            backoff_max=4.0,
            resync_interval=20.0,
            max_buffered_bytes=6000 if self.small else 1 << 20,
            max_message_bytes=OVERSIZE - 1,
        )
        self.ring = dice.choice((3, 8, 1000))
        self.processes = count(1)
        self.seen_before: dict[int, Message] = {}
        self.engine = self._engine(first=dice.choice((0, 0, 5)))
        self.index = PrefixIndex(block_size=BLOCK)
        name = "xllm" if recovery is Recovery.SNAPSHOT else dice.choice(("vllm", "sglang", "auto"))
        dialect = DIALECTS[name](DialectOptions())
        self.view = self.index.open(walk=dialect.walk, max_blocks=dice.choice((12, 1000)) if self.small else 1000)
        self.sync = StreamSync(
            view=self.view, dialect=dialect, recovery=recovery, dp_rank=0, topic=TOPIC, limits=self.limits
        )
        self.now = 0.0
        self.up = False
        self.met = False
        self.on_wire: deque[list[bytes]] = deque()  # sent over this connection, not delivered yet
        self.answers: list[Answer] = []
        self.abandoned: list[Answer] = []
        self.started = 0
        self.newest_told = self.engine.process  # process behind the connection we were last told of
        self.faults = Faults()
        self.heard = -1
        """Number of the last message that arrived damaged over this connection; snapshot: that arrived, or was applied.
        A view below it has gone back, or lacks a message that nobody will ask for."""
        self.checked: Any = None

    def _engine(self, first: int = 0) -> Engine:
        return Engine(self.dice, self.recovery, ring=self.ring, process=next(self.processes), first=first)

    def note(self, message: Message) -> Message:
        self.seen_before[xxh3_64_intdigest(message.payload)] = message
        return message

    def do(self, actions: list[Any]) -> None:
        for action in actions:
            if isinstance(action, StartReplay):
                assert not self.answers, "two attempts at once"
                self.answers.append(Answer(action.attempt, action.start))
                self.started += 1
            elif isinstance(action, CancelReplay):
                self.abandoned += [one for one in self.answers if one.attempt == action.attempt]
                self.answers = [one for one in self.answers if one.attempt != action.attempt]
        self.check()

    # -- one step of the world

    def step(self) -> None:
        dice, faults, roll = self.dice, self.faults, self.dice.random
        self.now += dice.choice((0.0, 0.01, 0.3, 2.0))
        if not self.up:
            if roll() < 0.5:
                self.connect()
        elif roll() < faults.cut:
            self.cut()
        if roll() < faults.restart:
            self.restart()
        if roll() < 0.7:
            self.publish(harm=roll() < faults.harm)
        for _ in range(dice.randint(0, 3)):
            self.deliver()
        for _ in range(dice.randint(0, 4)):
            self.answer()
        if self.abandoned and roll() < faults.stray:
            old = dice.choice(self.abandoned)
            frames = old.messages.popleft() if old.messages else [b"", END, b""]
            self.do(self.sync.reply(old.attempt, frames, self.now))
        if roll() < faults.operator:
            self.do(self.sync.resync(self.now))
        self.do(self.sync.timer(self.now))

    def connect(self) -> None:
        self.up = True
        self.on_wire.clear()
        self.heard = -1
        self.newest_told = self.engine.process
        self.do(self.sync.reconnected(self.now) if self.met else self.sync.connected(self.now))
        self.met = True

    def cut(self) -> None:
        while self.on_wire and self.dice.random() < 0.7:
            self.deliver()
        self.on_wire.clear()
        self.up = False
        self.do(self.sync.disconnected(self.now))

    def restart(self) -> None:
        """The old process ends: its connection breaks, its replies stop. The new one may be numbers ahead already."""
        if self.up:
            self.cut()
        for answer in self.answers:
            if answer.begun:
                answer.messages.clear()
        self.engine = self._engine()
        for _ in range(self.dice.choice((0, 0, 1, 3, 9))):
            self.note(self.engine.step())

    def publish(self, *, harm: bool = False) -> None:
        message = self.note(self.engine.step(harm=harm))
        if not self.up:
            return
        roll, faults = self.dice.random, self.faults
        frames = [TOPIC, message.sequence.to_bytes(8, "big"), message.payload]
        if roll() < faults.foreign:
            self.on_wire.append([TOPIC + b"-other", frames[1], frames[2]])
        if roll() < faults.lose:
            return
        if roll() < faults.damage:
            frames = self.damaged(frames)
        self.on_wire.append(frames)
        if roll() < faults.repeat:
            self.on_wire.append(frames)

    def damaged(self, frames: list[bytes]) -> list[bytes]:
        topic, head, payload = frames
        middle = len(payload) // 2
        return self.dice.choice(
            (
                [topic, head, payload[:middle]],
                [topic, head, payload + b"\0"],
                [topic, head, b""],
                [topic, head, bytes(OVERSIZE)],
                [topic, head, self.dice.randbytes(40)],
                [topic, head, msgpack.packb([1.0, [], 7])],
                [topic, head, msgpack.packb([1.0, [{"type": "BlockStored", "block_hashes": [True]}], 0])],
                [topic, head, msgpack.packb([1.0, [b"\xff"], 0])],
                [topic, head[:7], payload],
                [topic, payload],
                [topic, head, payload, b""],
                [topic, END, payload],
            )
        )

    def deliver(self) -> None:
        if self.up and self.on_wire:
            frames = self.on_wire.popleft()
            numbered = len(frames) == 3 and len(frames[1]) == 8
            true = self.seen_before.get(xxh3_64_intdigest(frames[-1]))
            counts = true is None or true.harm or self.recovery is Recovery.SNAPSHOT
            if numbered and frames[0] == TOPIC and frames[1] != END and counts:
                self.heard = int.from_bytes(frames[1], "big")
            running = self.answers[:1]
            self.do(self.sync.live(frames, self.now))
            assert numbered or not running or running != self.answers, "an attempt outlives the loss of who knows what"

    def answer(self) -> None:
        if not self.answers:
            return
        answer, dice, faults = self.answers[0], self.dice, self.faults
        if not answer.begun:
            if dice.random() < 0.3:
                return  # waits for its turn
            answer.begun = True
            if dice.random() < faults.refuse:
                self.do(self.sync.attempt_failed(answer.attempt, "refused", self.now))
                return
            answer.messages = self.replies(answer.start)
            self.do(self.sync.attempt_started(answer.attempt, self.now))
        elif answer.messages:
            self.do(self.sync.reply(answer.attempt, answer.messages.popleft(), self.now))

    def replies(self, start: int) -> deque[list[bytes]]:
        faults, roll = self.faults, self.dice.random
        topic = [TOPIC] if self.dice.random() < 0.5 else []
        messages = [
            [b"", *topic, message.sequence.to_bytes(8, "big"), message.payload]
            for message in map(self.note, self.engine.replay(start, stale=roll() < faults.stale))
            if message.sequence >= 0  # nothing published yet: there is no watermark below 0
        ]
        if messages and roll() < faults.hole:
            del messages[self.dice.randrange(len(messages))]
        if messages and roll() < faults.damage:
            place = self.dice.randrange(len(messages))
            messages[place] = [
                b"",
                *self.damaged([*topic, *messages[place][-2:]] if topic else [b"", *messages[place][-2:]])[1:],
            ]
        messages.append([b"", END, b""])
        if roll() < faults.truncate:
            del messages[self.dice.randrange(len(messages)) :]
        return deque(messages)

    # -- what must hold

    def check(self) -> None:
        """After every input; nothing is looked at again while nothing moved."""
        sync = self.sync
        now = (
            self.heard,
            sync.state,
            sync.last,
            sync.complete,
            sync._counts["rebuilds"],
            sync._counts["batches"],
            self.newest_told,
        )
        if now == self.checked:
            return
        self.checked = now
        found = [self.index.find(keys).get(self.view, TierBlocks(0, 0, 0)) for keys in KEYS]
        if not sync.synchronized:
            assert not any(map(any, found)), f"hits while {sync.state}"
            assert not self.view.visible
            return
        assert self.view.visible
        assert sync.last is not None
        assert sync.last >= self.heard, f"message {self.heard} came, and {sync.last} is the last in the view"
        if self.recovery is Recovery.SNAPSHOT:
            self.heard = sync.last
        message = self.seen_before[sync._digest]
        assert message.sequence == sync.last
        assert message.process >= self.newest_told, "credits a process that is known to be gone"
        for keys, blocks in zip(KEYS, found, strict=True):
            true = walk(message.truth, keys, self.view.walk)
            if sync.complete:
                assert blocks == true, f"complete, yet {blocks} against {true}"
            self.subset(message.truth, keys, blocks)

    def subset(self, truth: Truth, keys: list[bytes], blocks: TierBlocks) -> None:
        if self.view.walk is Walk.INTERLEAVED:
            assert sum(blocks) <= sum(walk(truth, keys, Walk.INTERLEAVED)), f"{blocks} credited, lacking on the engine"
            return
        place = 0
        for tier, number in zip(Tier, blocks, strict=True):
            for key in keys[place : place + number]:
                assert key in truth[tier], f"{blocks} credited: a block is not on {tier.name}"
            place += number

    def heal(self) -> int:
        """Perfect from here on. Returns the attempts it took until the view was right again."""
        self.faults = Faults()
        self.sync.limits = self.limits
        before = self.started
        if not self.up:
            self.connect()
        for _ in range(400):
            self.now += 0.25
            if not self.on_wire or self.dice.random() < 0.5:
                self.publish()
            self.deliver()
            self.answer()
            due = self.sync.next_timer
            if due is not None and due <= self.now:
                self.do(self.sync.timer(self.now))
            newest = self.engine.last
            if (
                self.sync.state is State.LIVE
                and newest is not None
                and self.sync.last == newest.sequence
                and self.seen_before[self.sync._digest].process == self.engine.process
            ):
                return self.started - before
        raise AssertionError(f"not synchronized after the network healed: {self.sync.status}")
