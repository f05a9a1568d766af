"""Random traces of an engine and a bad network (engine_model.py), for each kind of recovery.

Safety, after every single input: a synchronized view credits nothing the engine lacked at the last applied message, a
complete one credits exactly what it had, and one that is not synchronized credits nothing. Liveness: once the network
is perfect a bounded number of attempts suffices. `--seeds N` runs N seeds of each kind instead of 100.
"""

from __future__ import annotations

import random

import pytest

from kvindex.dialects import wire
from kvindex.sync import Recovery
from tests.kvindex.engine_model import Faults, World

SEEDS = 100


def faults(dice: random.Random) -> Faults:
    """Every fault alone now and then, or a bit of all."""
    names = list(Faults.__dataclass_fields__)
    if dice.random() < 0.4:
        return Faults(**{dice.choice(names): dice.choice((0.1, 0.3))})
    return Faults(**{name: dice.choice((0.0, 0.0, 0.02, 0.1)) for name in names})


@pytest.mark.parametrize("recovery", list(Recovery))
def test_traces(recovery: Recovery, seeds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[int] = []
    complete = synchronized = 0
    for seed in range(seeds or SEEDS):
        dice = random.Random(f"{recovery}{seed}")
        with monkeypatch.context() as patch:
            if seed % 3 == 0:  # read every message the way large ones are read
                patch.setattr(wire, "EAGER_BYTES", 0)
            world = World(seed, recovery)
            world.faults = faults(dice)
            try:
                for _ in range(70):
                    world.step()
                    synchronized += world.sync.synchronized
                needed = world.heal()
                if not world.small:
                    attempts.append(needed)
                world.index.check()
            except AssertionError as error:
                raise AssertionError(f"{recovery}, seed {seed}: {error}") from error
            complete += world.sync.complete
            world.do(world.sync.retire())
            world.view.close()
            world.index.check()
    runs = seeds or SEEDS
    assert synchronized > 10 * runs, "the traces are so bad that hardly anything is shown"
    assert max(attempts) <= 3
    if recovery is Recovery.SNAPSHOT:
        assert complete == runs
    if recovery is Recovery.NONE:
        assert not any(attempts)
