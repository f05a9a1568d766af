"""Writes the JSON schemas beside this file, from models made of the projects' CRDs:

    pip install cloudcoil-models-istio cloudcoil-models-prometheus-operator && python tests/data/crds/make.py

Importing those models costs 8 s, so tests read what is written here. Unknown keys are errors, descriptions left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cloudcoil.models.istio.networking.v1 import VirtualService
from cloudcoil.models.istio.networking.v1alpha3 import EnvoyFilter
from cloudcoil.models.prometheus_operator.v1 import ServiceMonitor


def strict(node: Any) -> Any:
    if isinstance(node, list):
        return [strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    found = {key: strict(value) for key, value in node.items() if key not in ("description", "title", "default")}
    if isinstance(node.get("properties"), dict):
        found["properties"] = {key: strict(value) for key, value in node["properties"].items()}
        found.setdefault("additionalProperties", False)
    return found


for model in (EnvoyFilter, ServiceMonitor, VirtualService):
    schema = strict(model.model_json_schema(by_alias=True))
    path = Path(__file__).parent / f"{model.__name__}.json"
    path.write_text(json.dumps(schema, separators=(",", ":"), sort_keys=True) + "\n", encoding="utf-8")
