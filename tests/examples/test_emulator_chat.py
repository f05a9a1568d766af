"""The emulator's own prompt building: messages as vLLM rebuilds them, templates as transformers renders them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from examples.emulator.__main__ import TOKENIZER
from examples.emulator.chat import BadRequest, normalise, normalise_tools, render, wants_parts
from examples.emulator.text import Answers, TextModel, load
from examples.local.make_tokenizer import make

CASES = Path(__file__).parents[1] / "data" / "cases" / "tokenize"
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
KNOWS_DEVELOPER = PLAIN + "{% if messages[0].role == 'developer' %}{% endif %}"


@pytest.fixture(scope="module")
def demo() -> TextModel:
    return load(TOKENIZER)


def user(content: Any, **extra: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **extra}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def assistant(**extra: Any) -> dict[str, Any]:
    return {"role": "assistant", **extra}


# rule, messages of the body, messages that the template sees
NORMALISED = [
    ("null content", [user(None)], [user("")]),
    ("absent content", [{"role": "user"}], [user("")]),
    ("text stays as it is", [user("  a\r\n ")], [user("  a\r\n ")]),
    ("text parts are joined by a newline", [user([{"type": "text", "text": "a"}, "b"])], [user("a\nb")]),
    ("an empty part adds no line", [user([{"type": "text", "text": "a"}, {"type": "text", "text": ""}])], [user("a")]),
    (
        "input_text, refusal",
        [user([{"type": "input_text", "text": "a"}, {"type": "refusal", "refusal": "b"}])],
        [user("a\nb")],
    ),
    ("null text is skipped", [user([{"type": "text", "text": None}, {"type": "text", "text": "b"}])], [user("b")]),
    ("other keys are dropped", [user("a", weight=1, name="bob")], [user("a", name="bob")]),
    (
        "unknown roles are the template's business",
        [{"role": "wizard", "content": "a"}],
        [{"role": "wizard", "content": "a"}],
    ),
    (
        "developer becomes system",
        [{"role": "developer", "content": "d"}, user("a")],
        [{"role": "system", "content": "d"}, user("a")],
    ),
    (
        "system and developer messages are merged to the front",
        [
            user("a"),
            {"role": "developer", "content": "d"},
            {"role": "system", "content": ""},
            {"role": "system", "content": "s"},
        ],
        [{"role": "system", "content": "d\n\ns"}, user("a")],
    ),
    (
        "system messages alone are not merged",
        [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}],
        [{"role": "system", "content": "a"}, {"role": "system", "content": "b"}],
    ),
    (
        "a billing line is dropped",
        [{"role": "system", "content": [{"type": "text", "text": "x-anthropic-billing-header: a\nrest"}]}],
        [{"role": "system", "content": "rest"}],
    ),
    (
        "arguments text becomes an object",
        [assistant(content=None, tool_calls=[call('{"b": 1, "a": 2}')])],
        [assistant(content="", tool_calls=[call({"b": 1, "a": 2})])],
    ),
    ("empty arguments", [assistant(tool_calls=[call("")])], [assistant(content="", tool_calls=[call({})])]),
    (
        "arguments that are no object",
        [assistant(tool_calls=[call("[1]")])],
        [assistant(content="", tool_calls=[call({})])],
    ),
    ("arguments that are no JSON", [assistant(tool_calls=[call("{")])], [assistant(content="", tool_calls=[call({})])]),
    ("no tool calls", [assistant(content="a", tool_calls=[])], [assistant(content="a")]),
    (
        "reasoning under all names",
        [assistant(content="a", reasoning_content="r")],
        [assistant(content="a", reasoning="r", reasoning_content="r", thinking="r")],
    ),
    (
        "reasoning wins",
        [assistant(content="a", reasoning="r", reasoning_content="x")],
        [assistant(content="a", reasoning="r", reasoning_content="r", thinking="r")],
    ),
    (
        "tool results",
        [
            {
                "role": "tool",
                "tool_call_id": "c1",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            }
        ],
        [{"role": "tool", "tool_call_id": "c1", "content": "a\nb"}],
    ),
]


@pytest.mark.parametrize(("rule", "given", "seen"), NORMALISED, ids=[row[0] for row in NORMALISED])
def test_messages(rule: str, given: list[Any], seen: list[Any]) -> None:
    assert normalise(given, template=PLAIN, parts=False) == seen


def test_developer_stays_where_the_template_knows_it() -> None:
    messages = [{"role": "developer", "content": "d"}, user("a")]
    assert normalise(messages, template=KNOWS_DEVELOPER, parts=False) == messages


def test_parts_stay_parts_for_templates_that_loop_over_them() -> None:
    template = "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}"
    assert wants_parts(template)
    assert not wants_parts(PLAIN)
    assert not wants_parts("{% for")
    given = [user([{"type": "text", "text": "a", "cache_control": 1}, "b"]), user("c"), user(None)]
    text = {"type": "text"}
    assert normalise(given, template=template, parts=True) == [
        user([{**text, "text": "a", "cache_control": 1}, {**text, "text": "b"}]),
        user([{**text, "text": "c"}]),
        user([]),
    ]


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        ["hi"],
        [{"content": "a"}],
        [user(7)],
        [user([{"type": "image_url", "image_url": {"url": "x"}}])],
        [user([{"type": "nonsense"}])],
        [user([7])],
        [assistant(tool_calls=["x"])],
        [assistant(tool_calls=[{"type": "custom", "function": {"name": "f"}}])],
    ],
)
def test_what_the_engine_refuses(messages: Any) -> None:
    with pytest.raises(BadRequest):
        normalise(messages, template=PLAIN, parts=False)


def test_tools_are_rebuilt_in_a_fixed_order() -> None:
    parameters = {"type": "object", "properties": {"b": {}, "a": {}}}
    given = [
        {"extra": 1, "function": {"parameters": parameters, "name": "f", "strict": True, "x": 2}, "type": "function"}
    ]
    (tool,) = normalise_tools(given) or []
    function = {"name": "f", "description": None, "parameters": parameters, "strict": True}
    assert json.dumps(tool) == json.dumps({"type": "function", "function": function})
    assert normalise_tools(None) is None
    for bad in ([], {}, [{}], [{"function": {"name": 1}}]):
        with pytest.raises(BadRequest):
            normalise_tools(bad)


REFUSED_BODIES: list[dict[str, Any]] = [
    {"chat_template": "{{ 1 }}"},
    {"chat_template_kwargs": {"chat_template": "x"}},
    {"chat_template_kwargs": {"tools": []}},
    {"chat_template_kwargs": 3},
    {"continue_final_message": True},
    {"tools": []},
]


@pytest.mark.parametrize("extra", REFUSED_BODIES, ids=str)
def test_refused_bodies(demo: TextModel, extra: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        render({"messages": [user("a")], **extra}, template=demo.template, specials=demo.specials)


def test_the_shared_cases() -> None:
    model = load(CASES)
    for case in json.loads((CASES / "cases.json").read_text())["cases"]:
        body = case["body"]
        if "messages" in body:
            text = render(body, template=model.template, specials=model.specials)
            ids = model.encode(text, add_special_tokens=False)
        elif isinstance(body["prompt"], str):
            ids = model.encode(body["prompt"], add_special_tokens=body.get("add_special_tokens", True))
        else:
            ids = body["prompt"]
        assert ids == case["expect_ids"], case["id"]


TOOL = {"type": "function", "function": {"name": "f", "description": "<ü>", "parameters": {"b": 1, "a": [1.5, None]}}}

RENDERED: list[dict[str, Any]] = [
    {"messages": [user("hi")]},
    {"messages": [{"role": "system", "content": "s"}, user("hi <|im_end|> ü 🙂")]},
    {"messages": [user("a"), assistant(content="b"), user("c")], "add_generation_prompt": False},
    {"messages": [user("a"), assistant(content="b ")], "add_generation_prompt": False, "continue_final_message": True},
    {"messages": [user("a")], "tools": [TOOL]},
    {"messages": [{"role": "system", "content": "s"}, user("a")], "tools": [TOOL, TOOL]},
    {
        "messages": [
            user("a"),
            assistant(content="", tool_calls=[call({"x": "é", "y": [1]}), call({})]),
            {"role": "tool", "content": "r1"},
            {"role": "tool", "content": "r2"},
            assistant(content="done"),
            user("b"),
        ]
    },
    {"messages": [user("a")], "chat_template_kwargs": {"enable_thinking": False, "unknown": 1, "padding": True}},
    {"messages": [user("a")], "chat_template_kwargs": {"enable_thinking": True}},
]


def test_the_demo_tokenizer_equals_transformers(demo: TextModel) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(TOKENIZER)
    for body in RENDERED:
        kwargs = {k: v for k, v in body.get("chat_template_kwargs", {}).items() if k == "enable_thinking"}
        expected = reference.apply_chat_template(
            body["messages"],
            tools=body.get("tools"),
            tokenize=False,
            add_generation_prompt=body.get("add_generation_prompt", True),
            continue_final_message=body.get("continue_final_message", False),
            **kwargs,
        )
        text = render(body, template=demo.template, specials=demo.specials)
        assert text == expected
        assert demo.encode(text, add_special_tokens=False) == reference(text, add_special_tokens=False)["input_ids"]
        assert demo.encode(text, add_special_tokens=True) == reference(text)["input_ids"]
    assert (demo.eos, demo.vocabulary) == (reference.eos_token_id, len(reference))


def test_shipped_tokenizer_is_what_the_script_makes() -> None:
    files = make()
    assert {path.name for path in TOKENIZER.iterdir()} == set(files)
    for name, text in files.items():
        assert (TOKENIZER / name).read_text(encoding="utf-8") == text, f"run examples.local.make_tokenizer: {name}"
    assert sum(len(text.encode()) for text in files.values()) < 400_000


def test_text_survives_the_tokenizer(demo: TextModel) -> None:
    for text in ("Hello world", "  two\n\n spaces\t1234", "naïve 你好 🙂", "don't x=1;\r\n"):
        assert demo.decode(demo.encode(text, add_special_tokens=False)) == text
    with pytest.raises(ValueError, match="UTF-8"):
        demo.encode("\ud800", add_special_tokens=False)


def test_answers_are_the_prompts_own(demo: TextModel) -> None:
    def take(prompt: list[int], seed: int = 0, count: int = 20, **options: Any) -> list[int]:
        return list(itertools.islice(Answers(demo, seed).start(prompt, **options), count))

    assert take([1, 2]) == take([1, 2])
    different = {tuple(take(*args)) for args in (([1, 2],), ([1, 3],), ([1, 2], 1))} | {tuple(take([1, 2], index=1))}
    assert len(different) == 4
    whole = take([1, 2], count=200)
    assert demo.eos in whole
    end = whole.index(demo.eos)
    assert 24 <= end <= 96
    assert demo.eos not in take([1, 2], count=200, endless=True)
    text = demo.decode(whole[:20])
    assert demo.encode(text, add_special_tokens=False) == whole[:20], "the next turn tokenizes it the same way"
