"""Bodies made to do harm: nested without end, numbers without end, names of templates, many of anything. A reason,
never an error of ours, and nothing that takes time out of proportion to its size."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from extproc.openai import parse_body
from extproc.prompt.prompter import Prompt
from extproc.reasons import Reason, Unscored
from tests.extproc.pool_model import prompter

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def lists(depth: int) -> str:
    return "[" * depth + "1" + "]" * depth


def objects(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def chat(more: str, content: str = '"x"') -> str:
    return f'{{"messages": [{{"role": "user", "content": {content}}}]{more}}}'


def called(depth: int) -> str:
    function = f'{{"name": "f", "arguments": {json.dumps(objects(depth))}}}'
    call = f'{{"role": "assistant", "tool_calls": [{{"id": "1", "type": "function", "function": {function}}}]}}'
    return f'{{"messages": [{{"role": "user", "content": "x"}}, {call}]}}'


PLACES: dict[str, Callable[[int], str]] = {
    "messages": lambda depth: f'{{"messages": {lists(depth)}}}',
    "content": lambda depth: chat("", lists(depth)),
    "tools": lambda depth: chat(
        f', "tools": [{{"type": "function", "function": {{"name": "f", "parameters": {objects(depth)}}}}}]'
    ),
    "template variables": lambda depth: chat(f', "chat_template_kwargs": {objects(depth)}'),
    "arguments": called,
    "cache_salt": lambda depth: chat(f', "cache_salt": {lists(depth)}'),
    "a field nobody reads": lambda depth: chat(f', "x": {lists(depth)}'),
    "what only the slower parser reads": lambda depth: chat(f', "x": {lists(depth)}', r'"\ud800"'),
    "prompt": lambda depth: f'{{"prompt": {lists(depth)}}}',
}


async def outcome(body: bytes, path: str = CHAT) -> Prompt | Unscored:
    parsed = parse_body(path, {}, body)
    return parsed if isinstance(parsed, Unscored) else await prompter(("qwen3-8b",)).prompt_of(parsed)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("depth", [50, 250, 900, 980, 1_000, 1_100, 200_000])
async def test_nested(place: str, depth: int) -> None:
    """About where each parser's own limit is, and far beyond it."""
    found = await outcome(PLACES[place](depth).encode(), COMPLETIONS if place == "prompt" else CHAT)
    if isinstance(found, Unscored):
        assert found.reason in (Reason.BAD_JSON, Reason.BAD_REQUEST, Reason.TEMPLATE_ERROR)
    else:
        assert depth < 1_100 or place == "arguments"


@pytest.mark.parametrize("opened", ["{}", "[]", '{"":[]}', "[[]]"])
async def test_more_objects_than_any_prompt_has(opened: str) -> None:
    """They would take a hundred times the memory of the body, and seconds."""
    count = 500_001 // (opened.count("{") + opened.count("["))
    found = await outcome(f'{{"messages": [{f"{opened}," * count}{{}}]}}'.encode())
    assert isinstance(found, Unscored)
    assert (found.reason, found.detail) == (Reason.TOO_LARGE, "more than 500000 braces and brackets")


async def test_more_numbers_than_any_prompt_has() -> None:
    """Each takes 40 bytes until it is packed: ten such bodies at once took more than a pod has."""
    found = await outcome(b'{"prompt": [1' + b",1" * 4_000_001 + b"]}", COMPLETIONS)
    assert isinstance(found, Unscored)
    assert (found.reason, found.detail) == (Reason.TOO_LARGE, "more than 4000000 commas")


@pytest.mark.parametrize(
    "body",
    [
        chat(', "x": ' + "9" * 1_000_000),
        chat(', "temperature": 1e' + "9" * 1_000),
        chat(', "chat_template": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"'),
        chat(', "chat_template_kwargs": {"messages": [], "chat_template": "x"}'),
        chat(', "tools": [' + "{}," * 100_000 + "{}]"),
        chat("", json.dumps("<|im_start|>" * 100_000)),
        chat("," + ",".join(f'"k{number}": 1' for number in range(100_000))),
        '{"messages": [' + "{}," * 100_000 + "{}]}",
    ],
    ids=["digits", "exponent", "template", "reserved names", "tools", "control tokens", "fields", "messages"],
)
async def test_many(body: str) -> None:
    found = await outcome(body.encode())
    if isinstance(found, Unscored):
        assert found.reason is not Reason.INTERNAL
        assert len(str(found.detail)) < 300
