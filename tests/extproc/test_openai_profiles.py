"""What the templates of SGLang and xLLM see where it differs from vLLM (read in their sources)."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import pytest

from extproc.prompt import Options, Prompt, Prompter
from extproc.prompt import tokenizer as tokenizers
from extproc.prompt.prompter import templates_of
from extproc.reasons import Reason
from tests.tokenizers import SMALL, prompt_of

SHOW = "{% for m in messages %}[{{ m | tojson }}]{% endfor %}{{ tools | tojson }}{{ '>' if add_generation_prompt }}"


@lru_cache
def loaded() -> tokenizers.Loaded:
    return tokenizers.load(str(SMALL))


async def shown(engine: Any, body: dict[str, Any], template: str = SHOW, path: str = "/v1/chat/completions") -> Any:
    options = Options(tokenizer="", models=("m",), chat_template=template, timeout=30.0, engine=engine)
    subject = Prompter(options, loaded(), templates_of(options, loaded()))
    prompt = await prompt_of(subject, path, json.dumps(body).encode())
    return prompt if not isinstance(prompt, Prompt) else prompt.text


def part(text: Any, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": text}


def says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
PARSED = {**CALL, "function": {"name": "f", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}, "strict": True}}
MESSAGES = [
    # engine, what, messages, as the template sees them
    ("sglang", "parts joined by a space", [says("user", [part("a"), part(""), part("b")])], [says("user", "a  b")]),
    ("sglang", "other parts ignored", [says("user", [part("a"), part("b", "output_text")])], [says("user", "a")]),
    ("sglang", "nulls dropped", [says("user", None, name=None, x=1)], [says("user", "")]),
    ("sglang", "developer kept", [says("developer", "a")], [says("developer", "a")]),
    ("sglang", "an answer at the end is shown as the user's", [says("user", "a"), says("assistant", "b")],
     [says("user", "a"), says("user", "b")]),
    ("sglang", "arguments as object", [says("assistant", "", tool_calls=[CALL]), says("tool", "r")],
     [says("assistant", "", tool_calls=[PARSED]), says("tool", "r")]),
    ("sglang", "reasoning as given", [says("assistant", "", reasoning_content="r"), says("user", "u")],
     [says("assistant", "", reasoning_content="r"), says("user", "u")]),
    ("xllm", "parts joined by a line end", [says("user", [part("a"), part("b")])], [says("user", "a\nb")]),
    ("xllm", "developer kept, names dropped", [says("developer", "a"), says("user", "b", name="n")],
     [says("developer", "a"), says("user", "b")]),
    ("xllm", "reasoning_content alone", [says("assistant", "a", reasoning="r")],
     [says("assistant", "a", reasoning_content="r")]),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "what", "messages", "seen"), MESSAGES, ids=[f"{r[0]}: {r[1]}" for r in MESSAGES])
async def test_messages(engine: str, what: str, messages: list[Any], seen: list[Any]) -> None:
    text = await shown(engine, {"messages": messages}, "{{ messages | tojson }}")
    normalised = json.loads(text)
    assert [dict(sorted(item.items())) for item in normalised] == [dict(sorted(item.items())) for item in seen]


async def test_sglang_continues_behind_the_rendered_text() -> None:
    body = {"messages": [says("user", "a"), says("assistant", "b ")], "continue_final_message": True}
    assert await shown("sglang", body, "{% for m in messages %}{{ m.content }}{% endfor %}|") == "a|b "


async def test_generation_prompt_is_always_on() -> None:
    body = {"messages": [says("user", "a")], "add_generation_prompt": False}
    for engine, mark in (("vllm", ""), ("sglang", ">"), ("xllm", ">")):
        assert await shown(engine, body, "{{ '>' if add_generation_prompt }}x") == mark + "x"


async def test_tools() -> None:
    body = {"messages": [says("user", "a")], "tools": [TOOL]}
    show = "{{ tools | tojson }}"
    assert await shown("sglang", body, show) == json.dumps(
        [{"type": "function", "function": {"description": "d", "name": "f", "parameters": {}, "strict": True}}]
    )
    assert await shown("sglang", {**body, "tool_choice": "none"}, show) == "null"
    assert await shown("xllm", body, show) == json.dumps(
        [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
    )


async def test_sglang_tries_bare_functions_where_a_template_refuses_the_wrapped_ones() -> None:
    body = {"messages": [says("user", "a")], "tools": [TOOL]}
    template = "{% if tools[0].function is defined %}{{ raise_exception('no') }}{% endif %}{{ tools[0].name }}"
    assert await shown("sglang", body, template) == "f"
    assert (await shown("vllm", body, template)).reason == Reason.TEMPLATE_ERROR


FORMATS = [
    ("{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}", True),
    ("{% for x in messages %}{% for p in x.content %}{% endfor %}{% endfor %}", False),
    ("{# has an image #}", True),
    ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
]


@pytest.mark.parametrize(("template", "listed"), FORMATS)
async def test_sglang_content_format(template: str, listed: bool) -> None:
    body = {"messages": [says("user", [part("a")])]}
    text = await shown("sglang", body, template + "{{ messages[0].content is string }}")
    assert text.endswith(str(not listed))


async def test_sglang_variables() -> None:
    show = "{{ reasoning_effort }}{{ enable_thinking }}"
    body = {"messages": [says("user", "a")], "reasoning_effort": "low"}
    assert await shown("sglang", body, show) == "low"
    assert await shown("sglang", {**body, "chat_template_kwargs": {"reasoning_effort": "high"}}, show) == "high"


NO_OBJECT = {**CALL, "function": {"name": "f", "arguments": "x"}}
REFUSED = [
    ("sglang", {"messages": [says("assistant", "", tool_calls=[NO_OBJECT])]}),
    ("sglang", {"messages": [{"content": "a"}]}),
    ("sglang", {"messages": [says("user", 1)]}),
]


@pytest.mark.parametrize(("engine", "body"), REFUSED)
async def test_refused(engine: str, body: dict[str, Any]) -> None:
    assert (await shown(engine, body)).reason == Reason.BAD_REQUEST


@pytest.mark.parametrize("engine", ["sglang", "xllm"])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/responses", {"input": "a"}), ("/v1/messages", {"messages": [says("user", "a")]})]
)
async def test_endpoints_whose_conversion_is_not_known(engine: str, path: str, body: dict[str, Any]) -> None:
    assert (await shown(engine, body, path=path)).reason == Reason.RENDERER


async def test_media_are_refused_alike() -> None:
    body = {"messages": [says("user", [{"type": "image_url", "image_url": {"url": "x"}}])]}
    for engine in ("vllm", "sglang", "xllm"):
        assert (await shown(engine, body)).reason == Reason.MULTIMODAL
