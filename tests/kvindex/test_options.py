"""Transport options and AIBrix's environment variables."""

from __future__ import annotations

import pytest

from kvindex.errors import ConfigurationError
from kvindex.options import TransportOptions, from_environment, parse_duration
from kvindex.sync import SyncLimits


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("100ms", 0.1),
        ("5s", 5.0),
        ("1m30s", 90.0),
        ("1.5s", 1.5),
        ("250us", 0.00025),
        ("2h", 7200.0),
        (" 3 ", 3.0),
        ("0.5", 0.5),
        ("", None),
        ("0s", None),
        ("-1s", None),
        ("5 s", None),
        ("5x", None),
        ("1m30", None),
        ("abc", None),
        ("1ss", None),
    ],
)
def test_duration(text: str, seconds: float | None) -> None:
    if seconds is None:
        with pytest.raises(ConfigurationError, match="SOME_VARIABLE"):
            parse_duration(text, what="SOME_VARIABLE")
    else:
        assert parse_duration(text) == pytest.approx(seconds)


def test_environment_of_aibrix() -> None:
    environ = {
        "AIBRIX_ZMQ_POLL_TIMEOUT": "50ms",
        "AIBRIX_ZMQ_REPLAY_TIMEOUT": "7s",
        "AIBRIX_ZMQ_RECONNECT_INTERVAL": "2s",
    }
    options, limits = from_environment(TransportOptions(), SyncLimits(), environ)
    assert (options.poll_timeout, options.reconnect_initial, options.reconnect_max) == (0.05, 2.0, 30.0)
    assert limits.replay_timeout == 7.0
    long, _ = from_environment(TransportOptions(), SyncLimits(), {"AIBRIX_ZMQ_RECONNECT_INTERVAL": "1m"})
    assert (long.reconnect_initial, long.reconnect_max) == (60.0, 60.0)
    given = TransportOptions(), SyncLimits()
    assert from_environment(*given, {"AIBRIX_ZMQ_POLL_TIMEOUT": ""}) == given
    with pytest.raises(ConfigurationError, match="AIBRIX_ZMQ_POLL_TIMEOUT 'soon'"):
        from_environment(*given, {"AIBRIX_ZMQ_POLL_TIMEOUT": "soon"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_replays": 0},
        {"receive_hwm": 0},
        {"reconnect_initial": 0.0},
        {"reconnect_initial": 5.0, "reconnect_max": 1.0},
        {"poll_timeout": 0.0},
        {"work_budget": 0.0},
        {"rest": -0.001},
        {"patience": -0.001},
    ],
)
def test_impossible_options(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        TransportOptions(**wrong)  # type: ignore[arg-type]
