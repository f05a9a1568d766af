"""Responses, Anthropic messages, embeddings, tokenize, generate: what each body becomes, and why some pass unscored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.openai import Body, ChatRequest, IdsRequest, Request, TextRequest, parse_body, read
from extproc.prompt import Options, Prompt, Prompter
from extproc.prompt.template import ChatTemplate, wants_system_first
from extproc.reasons import Reason, Unscored
from tests.tokenizers import SMALL, prompt_of, prompter


def outcome(path: str, body: dict[str, Any]) -> Request | Reason:
    parsed = parse_body(path, {}, json.dumps(body).encode())
    assert isinstance(parsed, Body)
    result = read(parsed)
    return result.reason if isinstance(result, Unscored) else result


def chat(path: str, body: dict[str, Any]) -> ChatRequest:
    result = outcome(path, body)
    assert isinstance(result, ChatRequest), result
    return result


def out(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
CALLED = {"id": "c", "function": {"name": "f", "arguments": "{}"}, "type": "function"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]}
INPUTS = [
    # what, input, messages
    ("text", "hi", [{"role": "user", "content": "hi"}]),
    ("a message", [{"role": "user", "content": "hi", "id": "x"}], [{"role": "user", "content": "hi"}]),
    ("an answer: its first part", [{**out("a"), "content": [*out("a")["content"], *out("b")["content"]]}],
     [{"role": "assistant", "content": "a"}]),
    ("an answer as text", [{"role": "assistant", "content": "a"}], [{"role": "assistant", "content": "a"}]),
    ("two answers stay two", [out("a"), out("b")], [{"role": "assistant", "content": t} for t in "ab"]),
    ("reasoning and answer are one", [THOUGHT, out("a")], [{"role": "assistant", "reasoning": "r", "content": "a"}]),
    ("reasoning, answer, call are one", [THOUGHT, out("a"), CALL],
     [{"role": "assistant", "reasoning": "r", "content": "a", "tool_calls": [CALLED]}]),
    ("calls are gathered", [CALL, CALL], [{"role": "assistant", "tool_calls": [CALLED, CALLED]}]),
    ("a summary for want of content", [{"type": "reasoning", "summary": [{"text": "s"}]}],
     [{"role": "assistant", "reasoning": "s"}]),
    ("a result", [{"type": "function_call_output", "call_id": "c", "output": "o"}],
     [{"role": "tool", "content": "o", "tool_call_id": "c"}]),
    ("a call of a free-form tool", [{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "é"}],
     [{"role": "assistant", "tool_calls": [{**CALLED, "function": {"name": "f", "arguments": '{"input": "é"}'}}]}]),
    ("a call in a namespace", [{**CALL, "namespace": "n"}],
     [{"role": "assistant", "tool_calls": [{**CALLED, "function": {"name": "n__f", "arguments": "{}"}}]}]),
]  # fmt: skip


@pytest.mark.parametrize(("what", "given", "messages"), INPUTS, ids=[row[0] for row in INPUTS])
def test_responses_input(what: str, given: Any, messages: list[dict[str, Any]]) -> None:
    assert chat("/v1/responses", {"input": given}).messages == messages
    system = {"role": "system", "content": "s"}
    assert chat("/v1/responses", {"input": given, "instructions": "s"}).messages == [system, *messages]


RESPONSES = [
    ("previous response", {"input": "a", "previous_response_id": "r"}, Reason.HISTORY),
    ("conversation", {"input": "a", "conversation": "c"}, Reason.HISTORY),
    ("prompt template", {"input": "a", "prompt": {"id": "p"}}, Reason.HISTORY),
    ("reference to an item", {"input": [{"type": "item_reference", "id": "i"}]}, Reason.HISTORY),
    ("no input", {}, Reason.BAD_REQUEST),
    ("item no object", {"input": ["a"]}, Reason.BAD_REQUEST),
    ("unknown item", {"input": [{"type": "mcp_list_tools"}]}, Reason.BAD_REQUEST),
    ("call without id", {"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, Reason.BAD_REQUEST),
    ("encrypted reasoning", {"input": [{"type": "reasoning", "encrypted_content": "x"}]}, Reason.BAD_REQUEST),
    ("answer without parts", {"input": [{**out(""), "content": []}]}, Reason.BAD_REQUEST),
    ("reasoning no object", {"input": "a", "reasoning": "high"}, Reason.BAD_REQUEST),
    ("salt", {"input": "a", "cache_salt": 1}, Reason.BAD_REQUEST),
]


@pytest.mark.parametrize(("what", "body", "reason"), RESPONSES, ids=[row[0] for row in RESPONSES])
def test_responses_that_pass_unscored(what: str, body: dict[str, Any], reason: Reason) -> None:
    assert outcome("/v1/responses", body) == reason


def test_responses_options() -> None:
    request = chat("/v1/responses", {"input": "a"})
    assert request.add_special_tokens, "the engine's default, here also for chats"
    assert (request.truncate, request.tools, request.add_generation_prompt) == (None, None, True)
    body = {"input": "a", "truncation": "auto", "max_output_tokens": 7, "reasoning": {"effort": "none"}}
    request = chat("/v1/responses", {**body, "cache_salt": "s"})
    assert (request.truncate, request.max_output, request.salt) == (-1, 7, "s")
    assert request.overrides == {"reasoning_effort": "none", "enable_thinking": False}
    request = chat("/v1/responses", {"input": [{**out("a"), "status": "incomplete"}]})
    assert request.continue_final_message
    assert not request.add_generation_prompt


def test_responses_tools() -> None:
    tools = [
        {"type": "function", "name": "f", "parameters": {"a": 1}, "strict": True},
        {"type": "web_search"},
        {"type": "custom", "name": "c", "description": "d"},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "g"}, {"type": "custom"}]},
    ]
    shown = chat("/v1/responses", {"input": "a", "tools": tools}).tools
    assert shown is not None
    assert [tool["function"]["name"] for tool in shown] == ["f", "c", "n__g"]
    assert shown[0]["function"] == {"name": "f", "description": None, "parameters": {"a": 1}, "strict": True}
    assert chat("/v1/responses", {"input": "a", "tools": tools[1:2]}).tools == []
    assert chat("/v1/responses", {"input": "a", "tools": []}).tools is None


def result(content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t", "content": content}


DROP = "x-anthropic-billing-header: cch=1"
USE = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}
USED = {"id": "t", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TOOL = {"role": "tool", "tool_call_id": "t"}
IMAGE = {"type": "image_url", "image_url": {}}
ANTHROPIC = [
    # what, system, message, messages
    ("text", None, {"role": "user", "content": "a"}, [{"role": "user", "content": "a"}]),
    ("one block", None, {"role": "user", "content": [{"type": "text", "text": "a"}]},
     [{"role": "user", "content": "a"}]),
    ("two blocks", None, {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]},
     [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]),
    ("system text", "s", {"role": "user", "content": "a"},
     [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]),
    ("system blocks, billing line left out", [{"type": "text", "text": t} for t in (DROP, "s", "t")],
     {"role": "user", "content": "a"}, [{"role": "system", "content": "st"}, {"role": "user", "content": "a"}]),
    ("system inline, nothing but the billing line", None, {"role": "system", "content": DROP}, Reason.BAD_REQUEST),
    ("a result stands before what the user says", None,
     {"role": "user", "content": [result("r"), {"type": "text", "text": "a"}]},
     [{**TOOL, "content": "r"}, {"role": "user", "content": "a"}]),
    ("only a result", None, {"role": "user", "content": [result([{"type": "text", "text": t} for t in "ab"])]},
     [{**TOOL, "content": "a\nb"}]),
    ("empty result", None, {"role": "user", "content": [result(None)]}, [{**TOOL, "content": ""}]),
    ("tool reference", None, {"role": "user", "content": [result([{"type": "tool_reference", "tool_name": "f"}])]},
     [{**TOOL, "content": ""}, {**TOOL, "content": [{"type": "tool_reference", "name": "f"}]}]),
    ("use of a tool", None, {"role": "assistant", "content": [USE]}, [{"role": "assistant", "tool_calls": [USED]}]),
    ("thinking", None, {"role": "assistant", "content": [{"type": "thinking", "thinking": t} for t in "ab"]},
     [{"role": "assistant", "reasoning": "ab"}]),
    ("redacted thinking", None, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
     [{"role": "assistant"}]),
    ("image", None, {"role": "user", "content": [{"type": "image", "source": {}}]},
     [{"role": "user", "content": [IMAGE]}]),
    ("image in a result", None, {"role": "user", "content": [result([{"type": "image"}])]},
     [{**TOOL, "content": ""}, {"role": "user", "content": [IMAGE]}]),
    ("unknown block", None, {"role": "user", "content": [{"type": "document"}]}, Reason.BAD_REQUEST),
    ("unknown role", None, {"role": "tool", "content": "a"}, Reason.BAD_REQUEST),
    ("content null", None, {"role": "user", "content": None}, Reason.BAD_REQUEST),
]  # fmt: skip


@pytest.mark.parametrize(("what", "system", "message", "expected"), ANTHROPIC, ids=[row[0] for row in ANTHROPIC])
def test_anthropic_messages(what: str, system: Any, message: dict[str, Any], expected: Any) -> None:
    found = outcome("/v1/messages", {"system": system, "messages": [message], "max_tokens": 1})
    assert (found.messages if isinstance(found, ChatRequest) else found) == expected


def tools_of(body: dict[str, Any]) -> list[str] | None:
    request = chat("/v1/messages", {"messages": [{"role": "user", "content": "a"}], **body})
    return None if request.tools is None else [tool["function"]["name"] for tool in request.tools]


def change(kind: str, tool: dict[str, Any]) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": kind, "tool": tool}]}


def test_anthropic_tools() -> None:
    declared = [{"name": "f", "input_schema": {"properties": {}}}, {"name": "g", "input_schema": {"type": "x"}}]
    request = chat("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "tools": declared})
    assert request.tools is not None
    assert [tool["function"]["parameters"] for tool in request.tools] == [
        {"properties": {}, "type": "object"}, {"type": "x"},
    ]  # fmt: skip
    user = {"role": "user", "content": "a"}
    removal = change("tool_removal", {"type": "tool_reference", "name": "f"})
    addition = change("tool_addition", {"type": "tool_reference", "name": "f"})
    new = change("tool_addition", {"type": "tool_definition", "definition": {"name": "h", "input_schema": {}}})
    assert tools_of({}) is None
    assert tools_of({"tools": []}) == []
    assert tools_of({"tools": declared, "messages": [user, removal]}) == ["g"]
    assert tools_of({"tools": declared, "messages": [user, removal, addition]}) == ["f", "g"]
    assert tools_of({"tools": declared, "messages": [user, new]}) == ["f", "g", "h"]
    assert outcome("/v1/messages", {"messages": [user, removal]}) == Reason.BAD_REQUEST
    assert outcome("/v1/messages", {"messages": [user], "tools": [{"name": "f"}]}) == Reason.BAD_REQUEST


GUARD = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
FIRST = [
    ("{% for m in messages %}{{ m.role }}{% endfor %}", False),
    ("{% for m in messages %}" + GUARD + "{% endfor %}", True),
    ("{{ strftime_now('%Y') }}", True),
    ("{% generation %}{% endgeneration %}", True),
]


@pytest.mark.parametrize(("source", "first"), FIRST)
def test_templates_that_want_system_messages_first(source: str, first: bool) -> None:
    assert wants_system_first(source) is first


async def rendered(body: dict[str, Any], template: str) -> str | None:
    subject = Prompter.load(Options(tokenizer=str(SMALL), models=("m",), timeout=30.0, chat_template=template))
    prompt = await prompt_of(subject, "/v1/messages", json.dumps({"max_tokens": 1, **body}).encode())
    return prompt.text if isinstance(prompt, Prompt) else prompt.reason


async def test_anthropic_inline_system_messages() -> None:
    shown = "{% for m in messages %}[{{ m.role[0] }}{{ m.content }}]{% endfor %}"
    strict = shown + "{% for m in messages[1:] %}{% if m.role == 'system' %}{{ nope() }}{% endif %}{% endfor %}"
    messages = [{"role": role, "content": role[-1]} for role in ("user", "system", "user", "system")]
    assert await rendered({"messages": messages, "system": "S"}, shown) == "[sS][ur][sm][ur][sm]"
    assert await rendered({"messages": messages, "system": "S"}, strict) == "[sSmm][ur][ur]"


EFFORT = [
    ("{{ reasoning_effort }}{{ enable_thinking }}", "noneFalse"),
    ("{{ 1 if enable_thinking else 0 }}", "0"),
    ("{% if reasoning_effort == 'none' %}{{ raise_exception('') }}{% endif %}{{ reasoning_effort }}", "low"),
    ("{{ 'max' if reasoning_effort not in ('low', 'high') else reasoning_effort }}", "low"),
]


@pytest.mark.parametrize(("template", "text"), EFFORT)
async def test_anthropic_thinking_disabled(template: str, text: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "thinking": {"type": "disabled"}}
    assert await rendered({**body, "output_config": {"effort": "high"}}, template) == text


async def test_what_a_template_makes_of_anthropic_is_tried_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Prompter.load(Options(tokenizer=str(SMALL), models=("m",), timeout=30.0, chat_template=EFFORT[0][0]))
    rendered: list[str] = []
    render = ChatTemplate.render

    def counted(template: ChatTemplate, *args: Any, **options: Any) -> str:
        rendered.append(render(template, *args, **options))
        return rendered[-1]

    def compiled(source: str) -> bool:
        raise AssertionError("tried by a request")

    monkeypatch.setattr(ChatTemplate, "render", counted)
    monkeypatch.setattr("extproc.prompt.prompter.wants_system_first", compiled)
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    body = json.dumps({"messages": messages, "thinking": {"type": "disabled"}, "max_tokens": 1}).encode()
    prompt = await prompt_of(subject, "/v1/messages", body)
    assert isinstance(prompt, Prompt)
    assert rendered == [prompt.text]


EMBEDDINGS = [
    ("text", {"input": "a"}, "a"),
    ("ids", {"input": [1, 2]}, [1, 2]),
    ("one in a list", {"input": ["a"]}, "a"),
    ("several", {"input": ["a", "b"]}, Reason.BATCH),
    ("several chats", {"messages": [[{"role": "user"}], [{"role": "user"}]]}, Reason.BATCH),
    ("nothing", {}, Reason.BAD_REQUEST),
    ("padding", {"input": "a", "padding": "max_length"}, Reason.BAD_REQUEST),
    ("messages", {"messages": [{"role": "user", "content": "a"}]}, "chat"),
    ("a chat as input", {"input": [{"role": "user", "content": "a"}]}, "chat"),
]


@pytest.mark.parametrize(("what", "body", "expected"), EMBEDDINGS, ids=[row[0] for row in EMBEDDINGS])
def test_embeddings(what: str, body: dict[str, Any], expected: Any) -> None:
    found = outcome("/v1/embeddings", body)
    if isinstance(found, ChatRequest):
        assert expected == "chat"
        assert not found.add_generation_prompt
        assert not found.add_special_tokens
        return
    if isinstance(found, TextRequest):
        assert found.own_side == "right"
        assert found.text == expected
    else:
        assert (found.ids if isinstance(found, IdsRequest) else found) == expected


async def test_pooling_models_keep_the_beginning() -> None:
    subject = Prompter.load(Options(tokenizer=str(SMALL), models=("m",), timeout=30.0))
    for body, ids in (
        ({"input": [1, 2, 3], "truncate_prompt_tokens": 2}, [1, 2]),
        ({"input": "abc", "truncate_prompt_tokens": 2}, [256, 64]),
        ({"input": "abc", "truncate_prompt_tokens": 2, "truncation_side": "left"}, [65, 66]),
    ):
        prompt = await prompt_of(subject, "/v1/embeddings", json.dumps(body).encode())
        assert isinstance(prompt, Prompt)
        assert prompt.ids == ids


OTHERS = [
    ("/tokenize", {"prompt": "a"}, "a"),
    ("/tokenize", {"messages": [{"role": "user", "content": "a"}]}, "chat"),
    ("/generate", {"input_ids": [1, 2]}, [1, 2]),
    ("/generate", {"text": "a"}, "a"),
    ("/generate", {"text": ["a", "b"]}, Reason.BATCH),
    ("/generate", {"text": "a", "image_data": "x"}, Reason.MULTIMODAL),
    ("/generate", {"input_embeds": [[0.1]]}, Reason.EMBEDS),
    ("/inference/v1/generate", {"token_ids": [1]}, [1]),
    ("/inference/v1/generate", {"token_ids": [1], "features": {"a": 1}}, Reason.MULTIMODAL),
    ("/generate", {}, Reason.BAD_REQUEST),
    ("/v1/messages/count_tokens", {}, Reason.PATH),
    ("/v1/chat/completions/batch", {}, Reason.PATH),
    ("/v1/rerank", {}, Reason.PATH),
]


@pytest.mark.parametrize(("path", "body", "expected"), OTHERS)
def test_other_endpoints(path: str, body: dict[str, Any], expected: Any) -> None:
    parsed = parse_body(path, {}, json.dumps(body).encode())
    found = read(parsed) if isinstance(parsed, Body) else parsed
    if isinstance(found, Unscored):
        assert found.reason == expected
    elif isinstance(found, ChatRequest):
        assert expected == "chat"
    else:
        assert (found.text if isinstance(found, TextRequest) else found.ids) == expected
        assert found.reads_cache == (path != "/tokenize")


def test_ids_forwarded_by_the_prefill_side_on_other_chat_endpoints() -> None:
    more = {"kv_transfer_params": {"prompt_token_ids": [5, 6]}}
    for path, body in (
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        found = outcome(path, {**body, **more})
        assert isinstance(found, IdsRequest)
        assert found.ids == [5, 6]


async def test_a_responses_chat_has_the_bos_twice_as_in_the_engine() -> None:
    prompt = await prompt_of(prompter("llama3_1"), "/v1/responses", b'{"input": "hi"}')
    assert isinstance(prompt, Prompt)
    assert prompt.ids == [128000, 128000, 128006, 882, 128007, 271, 6151, 128009, 128006, 78191, 128007, 271]
