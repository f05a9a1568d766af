"""Transformers' sandbox for chat templates, with bounds on what it leaves open.

The sandbox allows no attributes of Python's own, no changes to what it is given, and ranges of 100,000. Added here: `*`
and `**` give at most MAX_PRODUCT items or bits, because one long call into C is what no deadline ends. Memory is not
bounded: a template can still double a text until there is none left.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NoReturn

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_PRODUCT = 1 << 20


def new_environment() -> ImmutableSandboxedEnvironment:
    """Transformers' own, but not the one that it keeps for everybody."""
    from transformers.utils import chat_template_utils

    compiled = chat_template_utils._compile_jinja_template
    environment: ImmutableSandboxedEnvironment = getattr(compiled, "__wrapped__", compiled)("").environment
    bound_products(environment)
    return environment


def renderer_of(compiled: Template) -> Callable[..., Any]:
    """Transformers' rendering of a chat whose last message is to be continued, with this template in place of one that
    it would compile in an environment without our bounds."""
    from transformers.utils import chat_template_utils

    whole = chat_template_utils.render_jinja_template
    found: Callable[..., Any] = FunctionType(
        whole.__code__,
        {**whole.__globals__, "_compile_jinja_template": lambda _source: compiled},
        argdefs=whole.__defaults__,
    )
    return found


def bound_products(environment: ImmutableSandboxedEnvironment) -> None:
    """Jinja computes what is constant when it compiles; operators that are intercepted are left for rendering."""
    environment.intercepted_binops = frozenset(("*", "**"))
    environment.binop_table = {**environment.binop_table, "*": _times, "**": _power}


def _times(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int):
        size = left.bit_length() + right.bit_length()
    else:
        size = next((len(a) * b for a, b in ((left, right), (right, left)) if isinstance(b, int) and _long(a)), 0)
    return left * right if size <= MAX_PRODUCT else _refuse()


def _long(value: Any) -> bool:
    return hasattr(value, "__len__")


def _power(left: Any, right: Any) -> Any:
    whole = isinstance(left, int) and isinstance(right, int)
    return left**right if not whole or left.bit_length() * right <= MAX_PRODUCT else _refuse()


def _refuse() -> NoReturn:
    raise OverflowError("too large a product")
