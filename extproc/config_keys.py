"""The key that was meant by one that is misspelt: what `kvcar check` suggests."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel


def meant(kind: type[BaseModel], place: Sequence[str | int]) -> str | None:
    """The key of `kind` most like the last part of `place`, pydantic's `loc` of an unknown key; None if none is."""
    nodes = {kind}
    for part in place[:-1]:
        # parts that name no field (positions, members of a union) stay where they are
        below = {
            model for node in nodes if part in node.model_fields for model in _models(_annotation(node, str(part)))
        }
        nodes = below or nodes
    keys = {field.alias or name for node in nodes for name, field in node.model_fields.items()}
    return next(iter(difflib.get_close_matches(str(place[-1]), sorted(keys), n=1)), None)


def _annotation(node: type[BaseModel], name: str) -> Any:
    return node.model_fields[name].annotation


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Models named anywhere in an annotation: `tuple[Pool, ...]`, `Sessions | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)
