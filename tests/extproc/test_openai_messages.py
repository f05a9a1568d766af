"""What a template sees of messages and tools: the engine's rules, one row each."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.normalize import conversation, tools
from extproc.reasons import Reason, Refused

DROP = "x-anthropic-billing-header: cch=1"


def text(value: Any, **extra: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **extra}


CONTENT = [
    # what, content, as one string, as a list
    ("text", "a b ", "a b ", [text("a b ")]),
    ("empty text", "", "", [text("")]),
    ("null", None, "", []),
    ("no parts", [], "", []),
    ("one part", [text("a")], "a", [text("a")]),
    ("parts are joined by one line end", [text("Hello, "), text("what's up?")], "Hello, \nwhat's up?", None),
    ("an empty part is skipped by the join", [text(""), text("a")], "a", [text(""), text("a")]),
    ("a part of bare text", ["a", text("b")], "a\nb", [text("a"), text("b")]),
    ("input_text", [{"type": "input_text", "text": "a"}], "a", [text("a")]),
    ("output_text", [{"type": "output_text", "text": "a"}], "a", [text("a")]),
    ("refusal", [{"type": "refusal", "refusal": "no"}], "no", [text("no")]),
    ("thinking", [{"type": "thinking", "thinking": "hm"}], "hm", [text("hm")]),
    ("text null", [text(None), text("a")], "a", [text("a")]),
    ("unknown keys of a part", [text("a", cache_control={"x": 1})], "a", [text("a", cache_control={"x": 1})]),
    ("known keys of a part", [text("a", refusal=None, file="f")], "a", [text("a")]),
    ("tool reference", [{"type": "tool_reference", "name": "f"}], "f", [{"type": "tool_reference", "name": "f"}]),
]


@pytest.mark.parametrize(("what", "content", "string", "listed"), CONTENT, ids=[row[0] for row in CONTENT])
def test_content(what: str, content: Any, string: str, listed: Any) -> None:
    message = {"role": "user", "content": content}
    assert conversation([message], list_format=False, knows_developer=True)[0]["content"] == string
    if listed is not None:
        assert conversation([message], list_format=True, knows_developer=True)[0]["content"] == listed


def test_content_absent() -> None:
    assert conversation([{"role": "user"}], list_format=False, knows_developer=True)[0]["content"] == ""
    assert conversation([{"role": "user"}], list_format=True, knows_developer=True)[0]["content"] == []


def call(**function: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", **function}}


ARGUMENTS = [
    ('{"b": 1, "a": [2]}', {"b": 1, "a": [2]}),
    ("", {}),
    (None, {}),
    ("no json", {}),
    ("[1]", {}),
    ("42", {}),
    ("null", {}),
    ({"x": 1}, {"x": 1}),
    (7, {}),
    ('{"n": 123456789012345678901234567890}', {"n": 123456789012345678901234567890}),
]


@pytest.mark.parametrize(("given", "seen"), ARGUMENTS)
def test_tool_call_arguments_are_an_object(given: Any, seen: dict[str, Any]) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call(arguments=given)]}
    result = conversation([message], list_format=False, knows_developer=True)[0]
    assert result["tool_calls"] == [call(arguments=seen)]
    assert list(result["tool_calls"][0]) == ["id", "type", "function"]


MESSAGES = [
    # what, message, as the template sees it (string format)
    ("other keys dropped", {"role": "user", "content": "a", "x": 1}, {"role": "user", "content": "a"}),
    ("name kept", {"role": "user", "content": "a", "name": "bob"}, {"role": "user", "content": "a", "name": "bob"}),
    ("name of another type", {"role": "user", "content": "a", "name": 1}, {"role": "user", "content": "a"}),
    ("task kept", {"role": "user", "content": "a", "task": "t"}, {"role": "user", "content": "a", "task": "t"}),
    ("unknown role kept", {"role": "critic", "content": "a"}, {"role": "critic", "content": "a"}),
    ("tool_calls []", {"role": "assistant", "content": "a", "tool_calls": []}, {"role": "assistant", "content": "a"}),
    ("tool_calls null", {"role": "assistant", "content": "", "tool_calls": None}, {"role": "assistant", "content": ""}),
    ("tool_calls of a user", {"role": "user", "content": "a", "tool_calls": [1]}, {"role": "user", "content": "a"}),
    (
        "reasoning_content moves",
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
        {"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "r"},
    ),
    (
        "reasoning wins",
        {"role": "assistant", "content": "a", "reasoning_content": "r", "reasoning": "q"},
        {"role": "assistant", "content": "a", "reasoning": "q", "reasoning_content": "q"},
    ),
    ("reasoning of a user", {"role": "user", "content": "a", "reasoning": "q"}, {"role": "user", "content": "a"}),
    (
        "tool result",
        {"role": "tool", "tool_call_id": "c", "content": [text("a"), text("b")]},
        {"role": "tool", "tool_call_id": "c", "content": "a\nb"},
    ),
    (
        "developer keeps its tools",
        {"role": "developer", "content": "a", "tools": [1]},
        {"role": "developer", "content": "a", "tools": [1]},
    ),
    ("no tools", {"role": "developer", "content": ""}, {"role": "developer", "content": "", "tools": None}),
    ("billing header line", {"role": "system", "content": f"{DROP}\nTerse."}, {"role": "system", "content": "Terse."}),
    ("nothing but the header", {"role": "system", "content": DROP}, {"role": "system", "content": ""}),
    ("header in a part", {"role": "system", "content": [text(DROP), text("a")]}, {"role": "system", "content": "a"}),
    ("header of a user", {"role": "user", "content": DROP}, {"role": "user", "content": DROP}),
    ("header not at the start", {"role": "system", "content": " " + DROP}, {"role": "system", "content": " " + DROP}),
]


@pytest.mark.parametrize(("what", "message", "seen"), MESSAGES, ids=[row[0] for row in MESSAGES])
def test_messages(what: str, message: dict[str, Any], seen: dict[str, Any]) -> None:
    assert conversation([message], list_format=False, knows_developer=True) == [seen]


def test_a_tool_result_of_text_parts_is_one_string_in_list_format_too() -> None:
    parts = [text("a"), text("b")]
    seen = conversation([{"role": "tool", "content": parts}], list_format=True, knows_developer=True)
    assert seen[0]["content"] == "a\nb"
    parts.append({"type": "tool_reference", "name": "f"})
    seen = conversation([{"role": "tool", "content": parts}], list_format=True, knows_developer=True)
    assert seen[0]["content"] == parts


def short(messages: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(message["role"], message["content"]) for message in messages]


S, D, U = (lambda t, role=role: {"role": role, "content": t} for role in ("system", "developer", "user"))
DEVELOPER = [
    ("alone and first", [D("a"), U("u")], [("system", "a"), ("user", "u")]),
    ("not first", [U("u"), D("a")], [("system", "a"), ("user", "u")]),
    ("after a system message", [S("a"), D("b"), U("u")], [("system", "a\n\nb"), ("user", "u")]),
    ("empty ones are left out", [S(""), U("u"), D("b"), D("")], [("system", "b"), ("user", "u")]),
    ("all empty", [D(""), D("")], [("system", "")]),
    ("no developer: nothing is merged", [S("a"), S("b"), U("u")], [("system", "a"), ("system", "b"), ("user", "u")]),
]


@pytest.mark.parametrize(("what", "messages", "seen"), DEVELOPER, ids=[row[0] for row in DEVELOPER])
def test_developer_where_the_template_does_not_know_it(what: str, messages: Any, seen: list[tuple[str, Any]]) -> None:
    assert short(conversation(messages, list_format=False, knows_developer=False)) == seen


def test_developer_parts_are_merged_as_text_in_list_format() -> None:
    messages = [S([text("a"), text("b")]), D("c")]
    assert short(conversation(messages, list_format=True, knows_developer=False)) == [("system", "a\nb\n\nc")]


def test_developer_keeps_no_tools_as_system() -> None:
    seen = conversation([{"role": "developer", "content": "a", "tools": [1]}], list_format=False, knows_developer=False)
    assert seen == [{"role": "system", "content": "a"}]


REFUSED = [
    ("message is no object", ["x"], Reason.BAD_REQUEST),
    ("no role", [{"content": "a"}], Reason.BAD_REQUEST),
    ("role is no string", [{"role": 1}], Reason.BAD_REQUEST),
    ("content a number", [U(1)], Reason.BAD_REQUEST),
    ("content an object", [U({"type": "text"})], Reason.BAD_REQUEST),
    ("part is no object", [U([1])], Reason.BAD_REQUEST),
    ("part without type", [U([{"text": "a"}])], Reason.BAD_REQUEST),
    ("unknown part type", [U([{"type": "hologram"}])], Reason.BAD_REQUEST),
    ("text a number", [U([text(1)])], Reason.BAD_REQUEST),
    ("uuid without media", [U([text("a", uuid="u")])], Reason.BAD_REQUEST),
    ("tool_calls an object", [{"role": "assistant", "tool_calls": {}}], Reason.BAD_REQUEST),
    ("tool call no object", [{"role": "assistant", "tool_calls": [1]}], Reason.BAD_REQUEST),
    ("tool call of another type", [{"role": "assistant", "tool_calls": [{**call(), "type": "x"}]}], Reason.BAD_REQUEST),
    ("arguments too deep", [{"role": "assistant", "tool_calls": [call(arguments="[" * 100_000)]}], Reason.BAD_REQUEST),
    ("image_url", [U([text("a"), {"type": "image_url", "image_url": {"url": "data:,"}}])], Reason.MULTIMODAL),
    ("input_audio", [U([{"type": "input_audio", "input_audio": {}}])], Reason.MULTIMODAL),
    ("media without type", [U([{"video_url": "x"}])], Reason.MULTIMODAL),
    ("media in a text part", [U([text("a", image_url="x")])], Reason.MULTIMODAL),
    ("prompt_embeds", [U([{"type": "prompt_embeds", "data": "x"}])], Reason.MULTIMODAL),
]


@pytest.mark.parametrize(("what", "messages", "reason"), REFUSED, ids=[row[0] for row in REFUSED])
@pytest.mark.parametrize("list_format", [False, True])
def test_refused(what: str, messages: Any, reason: Reason, list_format: bool) -> None:
    with pytest.raises(Refused) as refused:
        conversation(messages, list_format=list_format, knows_developer=False)
    assert refused.value.unscored.reason == reason


P = {"type": "object", "properties": {"b": {"enum": ["<", "é"]}, "a": {}}}
BARE = {"name": "f", "description": None, "parameters": None}
TOOLS = [
    ("name only", {"function": {"name": "f"}}, BARE, {}),
    (
        "key order rebuilt, order inside parameters kept",
        {"function": {"parameters": P, "name": "f", "description": "d"}, "type": "function"},
        {"name": "f", "description": "d", "parameters": P},
        {},
    ),
    ("unknown keys", {"x": 1, "function": {"name": "f", "y": 2}}, BARE, {}),
    (
        "strict",
        {"function": {"name": "f", "strict": True}},
        {**BARE, "strict": True},
        {},
    ),
    ("strict null", {"function": {"name": "f", "strict": None}}, BARE, {}),
    (
        "defer_loading outside goes inside too",
        {"defer_loading": False, "function": {"name": "f"}},
        {**BARE, "defer_loading": False},
        {"defer_loading": False},
    ),
    (
        "defer_loading inside stays inside",
        {"function": {"name": "f", "defer_loading": True}},
        {**BARE, "defer_loading": True},
        {},
    ),
]


@pytest.mark.parametrize(("what", "given", "function", "outer"), TOOLS, ids=[row[0] for row in TOOLS])
def test_tools(what: str, given: dict[str, Any], function: dict[str, Any], outer: dict[str, Any]) -> None:
    rebuilt = tools([given])
    assert rebuilt is not None
    assert repr(rebuilt) == repr([{"type": "function", "function": function, **outer}]), "key order counts"


def test_the_body_is_left_as_it_was() -> None:
    message = {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [call(arguments="{}")]}
    before = repr(message)
    conversation([message], list_format=True, knows_developer=False)
    assert repr(message) == before
