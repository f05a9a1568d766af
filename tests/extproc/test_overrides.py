"""What an operator wants, over what discovery says."""

from __future__ import annotations

import pytest

from extproc.overrides import Overrides
from kvindex.fleet import InstanceState
from tests.extproc.pool_model import engine


@pytest.mark.parametrize(
    ("said", "drained", "seen"),
    [
        ("active", True, "draining"),
        ("lease_lost", True, "draining"),
        ("draining", True, "draining"),
        ("suspect", True, "suspect"),
        *((str(state), False, str(state)) for state in InstanceState),
    ],
)
def test_state_seen(said: str, drained: bool, seen: str) -> None:
    overrides = Overrides()
    if drained:
        overrides.drain("engine-a")
    given = engine("engine-a", state=InstanceState(said))
    found = overrides.over(given)
    assert str(found.state) == seen
    assert (found is given) == (said == seen), "nothing is copied without need"
    assert found.incarnation == given.incarnation
    assert overrides.over(engine("engine-b")).state is InstanceState.ACTIVE


def test_listeners_hear_changes_only() -> None:
    overrides, heard = Overrides(), []
    stop = overrides.listen(heard.append)
    answers = [overrides.drain("a"), overrides.drain("a"), overrides.undrain("b"), overrides.undrain("a")]
    assert (answers, heard) == ([True, False, False, True], ["a", "a"])
    stop()
    overrides.drain("a")
    assert (heard, overrides.drained) == (["a", "a"], frozenset({"a"}))
