"""Random traces of two engines and a pool publisher over a bad network (engine_model.py): messages in, matches out.

Safety, after every message: no member is credited with a block that neither it nor the pool had at the last applied
message, and with nothing of a pool that is out of step. Liveness: once the pool has said again what it holds, and the
engines have explained it, every member is credited with all of it. `--seeds N` runs N seeds instead of 25.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count
from typing import Any

import msgpack
from xxhash import xxh3_64_intdigest

from kvindex.directory import Directory, Stream
from kvindex.events import Tier
from kvindex.fleet import Instance, PoolPublisher, StreamEndpoint
from kvindex.index import TierBlocks, Walk
from kvindex.sync import Recovery, State, StreamSync
from tests.kvindex.engine_model import BLOCK, KEYS, PROMPTS, TOPIC, WORDS, Engine, Message, Truth, walk
from tests.kvindex.test_directory import FakeDriver

SEEDS = 25
EMPTY: Truth = {tier: frozenset() for tier in Tier}


class Master:
    """A Mooncake master: one object an event, messages from 1 on, `stored` again for what is there."""

    def __init__(self, dice: random.Random, engine: Engine) -> None:
        self.dice = dice
        self.engine = engine  # by whose seed hashes are made
        self.objects: dict[str, tuple[Tier, bytes]] = {}
        self.next = 1
        self.ids = count(1)

    def _event(self, kind: str, name: str | None = None, tier: Tier = Tier.HOST, key: bytes = b"") -> dict[str, Any]:
        hash_ = self.engine.hash(key)
        low = int.from_bytes(hash_[-8:], "big") if isinstance(hash_, bytes) else hash_ % 2**64
        event: dict[str, Any] = {"event_id": next(self.ids), "event_type": kind, "backend_id": "10.0.0.9"}
        return event if name is None else event | {"seq_hashes": [low], "medium": WORDS[tier], "object_key": name}

    def step(self) -> list[dict[str, Any]]:
        dice, events = self.dice, []
        for _ in range(dice.choice((0, 1, 1, 2, 5))):
            roll = dice.random()
            if roll < 0.6 or not self.objects:
                tier = dice.choice((Tier.HOST, Tier.HOST, Tier.DISK))
                key = dice.choice(dice.choice(KEYS))
                name = f"{key.hex()[:8]}-{dice.randrange(2)}-{tier}"
                self.objects[name] = (tier, key)
                events.append(self._event("stored", name, tier, key))
            elif roll < 0.97:
                name = dice.choice(sorted(self.objects))
                events.append(self._event("removed", name, *self.objects.pop(name)))
            else:
                self.objects.clear()
                events.append(self._event("cleared"))
        return events

    def again(self) -> list[dict[str, Any]]:
        return [self._event("stored", name, *held) for name, held in self.objects.items()]

    def truth(self) -> Truth:
        return {tier: frozenset(key for at, key in self.objects.values() if at is tier) for tier in Tier}

    def pack(self, events: list[dict[str, Any]]) -> Message:
        message = Message(self.next, msgpack.packb([next(self.ids), events, 3]), self.truth(), 0)
        self.next += 1
        return message


class World:
    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.directory = Directory(FakeDriver(), block_size=BLOCK)
        endpoint = StreamEndpoint(0, "tcp://10.0.9.9:5560", topic=TOPIC.decode(), dialect="mooncake", medium="cpu")
        self.directory.set_publishers([PoolPublisher("master", endpoint)])
        self.seed = dice.getrandbits(40)
        self.engines: dict[str, Engine] = {}
        self.instances: dict[str, Instance] = {}
        self.numbers = count(1)
        for name in ("e-1", "e-2"):
            self.start(name)
        self.master = Master(dice, self.engines["e-1"])
        self.seen: dict[int, Truth] = {}
        self.credited = 0

    def start(self, name: str) -> None:
        """A new process: its own blocks are gone, the hashes of its content are the same."""
        number = next(self.numbers)
        engine = self.engines[name] = Engine(self.dice, Recovery.NONE, ring=1, process=number)
        engine.seed = self.seed
        events = (StreamEndpoint(0, f"tcp://10.0.0.1:{number}", topic=TOPIC.decode(), dialect="vllm"),)
        self.instances[name] = Instance(name, "10.0.0.1:8000", incarnation=str(number), events=events)
        self.directory.update(self.instances.values())

    @staticmethod
    def sync(stream: Stream) -> StreamSync:
        assert isinstance(stream.sync, StreamSync)
        return stream.sync

    @property
    def pool(self) -> StreamSync:
        return self.sync(self.directory._pools[("master", 0, "")])

    def live(self, sync: StreamSync, message: Message) -> None:
        sync.live([TOPIC, message.sequence.to_bytes(8, "big"), message.payload], 1.0)
        self.check()

    def tell_engine(self, name: str, message: Message) -> None:
        self.live(self.sync(self.directory._streams[(name, 0)]), message)

    def tell_pool(self, events: list[dict[str, Any]]) -> None:
        message = self.master.pack(events)
        self.seen[xxh3_64_intdigest(message.payload)] = message.truth
        roll = self.dice.random()
        if roll < 0.08:
            return  # lost
        if roll < 0.12:
            message = replace(message, payload=self.dice.randbytes(20))
        self.live(self.pool, message)
        if roll > 0.9:
            self.live(self.pool, message)

    def step(self) -> None:
        dice, roll = self.dice, self.dice.random()
        if roll < 0.45:
            name = dice.choice(sorted(self.engines))
            self.tell_engine(name, self.engines[name].step())
        elif roll < 0.93:
            self.tell_pool(self.master.again() if dice.random() < 0.1 else self.master.step())
        elif roll < 0.95:
            self.start(dice.choice(sorted(self.engines)))
        elif roll < 0.97:
            self.pool.disconnected(1.0)
            self.check()
            if dice.random() < 0.5:  # restarted meanwhile
                self.master = Master(dice, self.engines["e-1"])
            self.pool.reconnected(1.0)
        else:
            self.directory.rebuild("master")
            stream = self.directory._pools[("master", 0, "")]
            stream.open().connected(1.0)
        self.check()

    def pool_truth(self) -> Truth:
        return self.seen[self.pool._digest] if self.pool.synchronized else EMPTY

    def check(self) -> None:
        shared = self.pool_truth()
        for keys in KEYS:
            match = self.directory.match(keys)
            for name, engine in self.engines.items():
                blocks, own = match.minimum(name), engine.truth()
                place = 0
                for tier, number in zip(Tier, blocks, strict=True):
                    for key in keys[place : place + number]:
                        assert key in own[tier] or key in shared[tier], f"{name}: {blocks}, not on {tier.name}"
                        self.credited += key not in own[tier]
                    place += number

    def heal(self) -> None:
        """Everything is explained by one engine, the pool says again what it has, and somebody forgets."""
        dice = self.dice
        explain = [self.engines["e-1"]._event(prompt, 0, len(KEYS[prompt]), Tier.DEVICE) for prompt in range(len(KEYS))]
        say = [lambda: self.everything(explain), self.refresh]
        dice.shuffle(say)
        for one in say:
            one()
        for name in self.engines:
            self.tell_engine(name, self.engines[name].step())
        assert self.pool.state is State.LIVE
        shared = self.pool_truth()
        for keys in KEYS:
            match = self.directory.match(keys)
            for name, engine in self.engines.items():
                stream = self.sync(self.directory._streams[(name, 0)])
                if stream.complete:
                    own = engine.truth()
                    both = {tier: own[tier] | shared[tier] for tier in Tier}
                    assert match.minimum(name) == walk(both, keys, Walk.CASCADE), name
                else:
                    assert isinstance(match.minimum(name), TierBlocks)

    def everything(self, events: list[dict[str, Any]]) -> None:
        engine = self.engines["e-1"]
        for prompt in range(len(KEYS)):
            for key in KEYS[prompt]:
                engine.copies[Tier.DEVICE][key] += 1
        message = Message(engine.next, engine.pack(events), engine.truth(), engine.process)
        engine.next += 1
        self.tell_engine("e-1", message)

    def refresh(self) -> None:
        message = self.master.pack(self.master.again())
        self.seen[xxh3_64_intdigest(message.payload)] = message.truth
        self.live(self.pool, message)


def test_traces(seeds: int) -> None:
    assert len(KEYS) == len(PROMPTS)
    credited = 0
    for seed in range(seeds or SEEDS):
        world = World(seed)
        try:
            for _ in range(60):
                world.step()
            world.heal()
            world.directory.index.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        credited += world.credited
        world.directory.close()
        assert world.directory.index.blocks == 0
        world.directory.index.check()
    assert credited > 30 * (seeds or SEEDS), "hardly any copy of the pool ever counted"
