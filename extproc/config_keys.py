"""What was meant by a key or a value that is not known: what `kvcar check` suggests."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel

MOST_PLACES = 2
"""A key that more places know is in none of them likelier than misspelt."""
MISSPELT = 0.85
"""difflib's ratio from which a key here is what was meant, rather than its own name elsewhere: model, models."""


def explained(kind: type[BaseModel], place: Sequence[str | int]) -> str | None:
    """What to say after "unknown key": the place the key belongs to, or the key that was meant. None for neither.

    `place`  pydantic's `loc` of the unknown key
    """
    key = str(place[-1])
    nodes, here = {kind}, ""
    for part in place[:-1]:
        fields = [node.model_fields[str(part)] for node in nodes if part in node.model_fields]
        if fields:  # other parts (positions, members of a union) stay where they are
            nodes = {model for field in fields for model in _models(field.annotation)} or nodes
            here = _below(here, str(part), fields[0].annotation)
    siblings = [known for node in nodes for known in _keys(node)]
    homes = dict.fromkeys(_homes(kind, key, ""))
    if here in homes:
        return " for an entry of this type;"
    if spelt := closest(key, siblings, cutoff=MISSPELT):
        return f", did you mean '{spelt}'?"
    if 0 < len(homes) <= MOST_PLACES:
        return f" here, it belongs {' or '.join(f'under {path}' if path else 'at the top level' for path in homes)};"
    near = closest(key, siblings)
    return f", did you mean '{near}'?" if near else None


def closest(word: object, words: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The one of `words` that is most like `word`; None if none is like it."""
    return next(iter(difflib.get_close_matches(str(word).lower(), sorted(words), n=1, cutoff=cutoff)), None)


def quoted(text: str) -> list[str]:
    """What stands in single quotes: the choices of pydantic's message."""
    return re.findall(r"'([^']*)'", text)


def _homes(node: type[BaseModel], key: str, path: str) -> Iterator[str]:
    """Paths of the mappings below `node` that know the key, lists as [*]."""
    for name, field in node.model_fields.items():
        if key == (field.alias or name):
            yield path
        for model in _models(field.annotation):
            yield from _homes(model, key, _below(path, name, field.annotation))


def _below(path: str, name: str, annotation: Any) -> str:
    return f"{path}{'.' if path else ''}{name}{'[*]' if get_origin(annotation) is tuple else ''}"


def _keys(node: type[BaseModel]) -> Iterator[str]:
    return (field.alias or name for name, field in node.model_fields.items())


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Models named anywhere in an annotation: `tuple[Pool, ...]`, `Sessions | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)
