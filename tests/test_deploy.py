"""Dashboard and alerts of deploy/ speak of metrics and labels that there are. promtool runs them in tests/real."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.metrics import Metrics
from extproc.observe import add_families, add_reload, add_transport
from kvindex.transport import EventTransport
from tests.extproc.pool_model import engine, make_pool

ROOT = Path(__file__).parent.parent
DASHBOARD = json.loads((ROOT / "deploy/grafana/kvcar.json").read_text("utf-8"))
RULES = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text("utf-8"))["groups"][0]["rules"]
TARGET = {"job", "instance", "le"}
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
OTHERS = {"up": set(), "ALERTS": {"alertname", "alertstate"}}


def known() -> dict[str, set[str]]:
    """Series name -> its labels, of everything that kvcar can show."""
    pool = make_pool(engine("engine-a"))
    metrics = Metrics("1")
    add_families(metrics, [pool])
    add_transport(metrics, EventTransport())
    add_reload(metrics, lambda: None)
    found: dict[str, set[str]] = {name: set(labels) for name, labels in OTHERS.items()}
    labels = {family.name: set(family.labels) for family in metrics._reader.families}
    labels |= {one._name: set(one._labelnames) for one in vars(metrics).values() if hasattr(one, "_labelnames")}
    for family in metrics.registry.collect():
        for suffix in SUFFIXES.get(family.type, ("",)):
            found[family.name + suffix] = labels.get(family.name, {"version"})
    return found


def expressions(node: Any) -> Iterator[str]:
    """Every PromQL text of the dashboard."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("expr", "definition") and isinstance(value, str):
                yield value
            else:
                yield from expressions(value)
    elif isinstance(node, list):
        for item in node:
            yield from expressions(item)


TESTED = yaml.safe_load((ROOT / "deploy/prometheus/alerts_test.yaml").read_text("utf-8"))["tests"]
TEXTS = {
    "dashboard": list(expressions(DASHBOARD)),
    "alerts": [rule["expr"] for rule in RULES],
    "tests of alerts": [series["series"] for test in TESTED for series in test["input_series"]],
}


@pytest.mark.parametrize("where", TEXTS)
def test_names_and_labels(where: str) -> None:
    series = known()
    assert len(TEXTS[where]) > 10
    for text in TEXTS[where]:
        names = re.findall(r"\b(?:kvcar|process|python)_\w+", re.sub(r'"[^"]*"', '""', text))
        assert names or text.startswith("up{"), text
        for name in names:
            assert name in series, f"{where}: {name} is no metric of kvcar: {text}"
        for name, selector in re.findall(r"(\w+)\{([^}]*)\}", text):
            given = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", re.sub(r'"[^"]*"', '""', selector)))
            assert given <= series[name] | TARGET, (
                f"{where}: {name} has no label {given - series[name] - TARGET}: {text}"
            )


def test_a_wrong_name_would_be_found() -> None:
    assert "kvcar_requests" not in known()
    assert "kvcar_requests_total" in known()
    assert known()["kvcar_stream_synchronized"] == {"pool", "engine", "dp_rank"}


def test_every_alert_says_what_it_means_and_what_to_do() -> None:
    page = (ROOT / "docs/on-call.md").read_text("utf-8")
    for rule in RULES:
        assert set(rule["annotations"]) == {"summary", "impact", "action"}, rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert f"`{rule['alert']}`" in page, f"docs/on-call.md says nothing of {rule['alert']}"


def test_panels() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        assert panel["type"] == "row" or panel["targets"], panel["title"]
