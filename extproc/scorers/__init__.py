"""Scorers by name. `build("car", **{"lambda": 0.7})`; a dotted path `package.module:Class` loads one from outside."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from . import session
from .base import (
    Candidate,
    Cost,
    Load,
    Parameter,
    Request,
    Role,
    Scorer,
    Weights,
    check_parameters,
    hit_tokens,
)
from .car import Car
from .least_request import LeastRequest
from .least_waiting import LeastWaiting
from .load_gated import LoadGated
from .prefix_match import PrefixMatch
from .round_robin import RoundRobin
from .slo_aware import SloAware
from .ttft import Ttft
from .unified import Unified

SCORERS: dict[str, Any] = {
    "car": Car,
    "ttft": Ttft,
    "unified": Unified,
    "load_gated": LoadGated,
    "prefix_match": PrefixMatch,
    "slo_aware": SloAware,
    "least_request": LeastRequest,
    "least_waiting": LeastWaiting,
    "round_robin": RoundRobin,
}
"""Classes with `PARAMETERS`, a table of `Parameter`, which the constructor takes as keywords."""


def build(name: str, **parameters: object) -> Scorer:
    """A scorer by its name or dotted path.

    Raises ValueError that names the scorer, the parameter, the value and what is allowed.
    """
    if ":" in name:
        return _load(name, parameters)
    made = SCORERS.get(name)
    if made is None:
        near = "".join(
            f", did you mean {one!r}? There are" for one in difflib.get_close_matches(name.lower(), SCORERS, n=1)
        )
        raise ValueError(
            f"scorer: {name!r} is not known{near or ', expected one of'} {', '.join(SCORERS)} or package.module:Class"
        )
    scorer: Scorer = made(**check_parameters(f"scorer {name}", made.PARAMETERS, parameters))
    return scorer


def with_sessions(scorer: Scorer, **parameters: object) -> session.SessionAffinity:
    """The scorer with session affinity around it (`session.PARAMETERS`). Raises ValueError as `build`."""
    return session.SessionAffinity(scorer, **check_parameters("session affinity", session.PARAMETERS, parameters))


def _load(path: str, parameters: Mapping[str, object]) -> Scorer:
    module, _, attribute = path.partition(":")
    try:
        made: Callable[..., Scorer] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"scorer: {path!r} cannot be loaded: {error}") from error
    table = getattr(made, "PARAMETERS", None)
    given = dict(parameters) if table is None else check_parameters(f"scorer {path}", table, parameters)
    try:
        scorer = made(**given)
    except TypeError as error:
        raise ValueError(f"scorer {path}: {error}") from error
    if not callable(getattr(scorer, "costs", None)):
        raise ValueError(f"scorer: {path!r} has no method costs(request, candidates)")
    return scorer


__all__ = [
    "SCORERS",
    "Candidate",
    "Cost",
    "Load",
    "Parameter",
    "Request",
    "Role",
    "Scorer",
    "Weights",
    "build",
    "check_parameters",
    "hit_tokens",
    "with_sessions",
]
