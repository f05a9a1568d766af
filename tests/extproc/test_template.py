"""Chat templates: content format, selection, sandbox, and what reaches them."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from extproc.openai import Body, Endpoint
from extproc.prompt import Options, Prompt, Prompter, deadline, template
from extproc.prompt.prompter import read_template
from extproc.prompt.template import BadTemplate, ChatTemplate, RenderError, Templates
from extproc.reasons import Reason, Unscored
from tests.tokenizers import SMALL, prompt_of

U = [{"role": "user", "content": "hi"}]
LOOP = "{% for message in messages %}"
PARTS = "{% for p in m.content %}{% endfor %}"
FORMATS = [
    # what, template, list format
    ("prints content", LOOP + "{{ message.content }}{% endfor %}", False),
    ("loops over message.content", LOOP + "{% for p in message.content %}{% endfor %}{% endfor %}", True),
    ("by index", LOOP + "{% for p in message['content'] %}{% endfor %}{% endfor %}", True),
    ("other loop variable", "{% for m in messages %}{% for p in m.content %}{% endfor %}{% endfor %}", True),
    ("filtered", LOOP + "{% for p in message.content | list %}{% endfor %}{% endfor %}", True),
    ("sliced messages", "{% for m in messages[1:] %}{% for p in m.content %}{% endfor %}{% endfor %}", True),
    ("assigned messages", "{% set l = messages[1:] %}{% for m in l %}" + PARTS + "{% endfor %}", True),
    ("assigned twice", "{% set a = messages %}{% set b = a | list %}{% for m in b %}" + PARTS + "{% endfor %}", True),
    ("loop over a variable named content", LOOP + "{% for p in content %}{% endfor %}{% endfor %}", True),
    ("loop over tool calls", LOOP + "{% for c in message.tool_calls %}{% endfor %}{% endfor %}", False),
    ("content of something else", LOOP + "{% for p in other.content %}{% endfor %}{% endfor %}", False),
    ("content in a macro", "{% macro r(content) %}{% for p in content %}{% endfor %}{% endmacro %}", False),
    (
        "macro that gets message content",
        "{% macro r(x) %}{% for p in x %}{% endfor %}{% endmacro %}" + LOOP + "{{ r(message.content) }}{% endfor %}",
        True,
    ),
    (
        "macro by keyword",
        "{% macro r(x) %}{% for p in x %}{% endfor %}{% endmacro %}" + LOOP + "{{ r(x=message.content) }}{% endfor %}",
        True,
    ),
    (
        "macro that gets it in another parameter",
        "{% macro r(x, y) %}{% for p in y %}{% endfor %}{% endmacro %}" + LOOP + "{{ r(message.content) }}{% endfor %}",
        False,
    ),
    # where messages go into anything but a plain variable, the engine gives up looking
    ("unpacked messages", "{% for a, b in messages %}{% for p in content %}{% endfor %}{% endfor %}", False),
    ("namespace", "{% set n = namespace() %}{% set n.m = messages %}{% for p in content %}{% endfor %}", False),
]


@pytest.mark.parametrize(("what", "source", "list_format"), FORMATS, ids=[row[0] for row in FORMATS])
def test_content_format(what: str, source: str, list_format: bool) -> None:
    assert ChatTemplate(source).list_format is list_format


DEVELOPER = [("{{ 'developer' }}", True), ('{{ "developer" }}', True), ("developer", False), ("", False)]


@pytest.mark.parametrize(("source", "knows"), DEVELOPER)
def test_developer_role(source: str, knows: bool) -> None:
    assert ChatTemplate(source).knows_developer is knows


def render(source: str, **more: Any) -> str:
    return ChatTemplate(source).render(U, tools=more.pop("tools", None), variables=more.pop("variables", {}), **more)


RENDERED = [
    # what, template, arguments, text
    ("tojson escapes nothing", "{{ tools | tojson }}", {"tools": [{"b": "<é&>", "a": 1}]}, '[{"b": "<é&>", "a": 1}]'),
    ("blocks are trimmed", "{% if true %}\n  x\n  {% endif %}\ny", {}, "  x\ny"),
    ("loop controls", "{% for n in [1, 2, 3] %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}", {}, "1"),
    ("generation tag", "{% generation %}a{% endgeneration %}", {}, "a"),
    ("a variable", "{{ x }}", {"variables": {"x": 1}}, "1"),
    ("reserved names lose", "{{ messages | length }}", {"variables": {"messages": []}}, "1"),
    ("no tools are none", "{{ tools is none }}", {}, "True"),
]


@pytest.mark.parametrize(("what", "source", "arguments", "text"), RENDERED, ids=[row[0] for row in RENDERED])
def test_render(what: str, source: str, arguments: dict[str, Any], text: str) -> None:
    assert render(source, **arguments) == text


ESCAPES = [
    "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages[0].__class__.__mro__.x }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{% set n = namespace(f=''.format) %}{{ n.f.__self__.__class__.x }}",
    "{% set f = '{0.__class__}'.format_map %}{{ f({'0': 1}) }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ raise_exception('my-secret') }}",
    "{{ 1 / 0 }}",
    "{{ undefined_name.x }}",
    "{% for n in range(10000000000) %}{% endfor %}",
]


ACCESS = """{% set n = namespace(a=1, d={'k': 2}) %}{% set n.b = 'x' %}{{ n.a }}{{ n.b }}{{ n.d.k }}{{ n.missing }}
{% for m in messages %}{{ m.role }}{{ m['role'] }}{{ m.missing is defined }}{{ m.get('role') }}{{ m.items() | list }}
{{ m.content.upper() }}{{ m.content.startswith('h') }}{{ '%s' | format(m.content) }}{{ '{} {}'.format(m.content, 1) }}
{{ loop.index0 }}{{ loop.last }}{{ loop.missing }}{{ m.keys is defined }}{{ m.copy is defined }}{{ m.x.y is defined }}
{{ m.content.__class__ is defined }}{{ m.content.missing is defined }}{{ m.missing == m.other }}{% endfor %}
{% macro f(t) %}{{ t.role }}{{ t.missing }}{{ t.items is defined }}{% endmacro %}{{ f(messages[0]) }}{{ f('role') }}
{% set m = messages[1] %}{{ m.role }}{% set m = 'text' %}{{ m.role is defined }}{{ m.upper() }}{{ nobody is defined }}
{% for m in messages if m.x.y %}{{ m.x.y }}{{ loop.previtem is defined }}{% endfor %}{{ messages.role is defined }}"""


def test_shortened_access_gives_what_the_sandbox_gives() -> None:
    first = {"role": "user", "content": "hi", "items": "shadowed", "x": {"y": 1}}
    messages = [first, {"role": "a", "content": "é", "x": {}}]
    expected = chat_template_utils._compile_jinja_template(ACCESS).render(messages=messages)
    template = ChatTemplate(ACCESS)
    for _ in range(2):
        assert template.render(messages, tools=None, variables={}) == expected


@pytest.mark.parametrize("source", ESCAPES)
def test_templates_are_caged_and_fail_without_a_word_of_the_request(source: str) -> None:
    with pytest.raises(RenderError) as error:
        render(source)
    assert "secret" not in str(error.value)
    assert error.value.__cause__ is None


ENDLESS = {
    "silent loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that write": "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
}
HUGE = {
    "a constant": "{{ 'a' * 10000000000 }}",
    "the other way round": "{{ 10000000000 * 'a' }}",
    "a list": "{{ [1] * messages | length * 10000000000 }}",
    "a power": "{{ 10 ** 10000000000 }}",
    "numbers": "{% set n = namespace(a=7) %}{% for i in range(99) %}{% set n.a = n.a * n.a %}{% endfor %}{{ n.a }}",
}


@pytest.mark.parametrize("what", ENDLESS)
@pytest.mark.parametrize("thread", [False, True])
def test_a_template_that_does_not_end_is_ended(what: str, thread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chats are rendered in the event loop's thread, large ones beside it."""
    with monkeypatch.context() as short:
        short.setattr(template, "RENDER_SECONDS", 0.02)
        short.setattr(deadline, "TICK", 0.02)
        with ThreadPoolExecutor(1) as executor, pytest.raises(RenderError, match="TooSlow"):
            executor.submit(render, ENDLESS[what]).result() if thread else render(ENDLESS[what])
    assert render("{{ messages[0].content }}") == "hi"


@pytest.mark.parametrize("what", HUGE)
@pytest.mark.parametrize("continued", [False, True])
def test_large_products_are_not_computed(what: str, continued: bool) -> None:
    with pytest.raises(RenderError, match="OverflowError"):
        render(HUGE[what] + "{{ messages[0].content }}", continue_final_message=continued)


@pytest.mark.parametrize(
    ("source", "text"),
    [("{{ '-' * 3 }}", "---"), ("{{ 2 * 3.5 }}", "7.0"), ("{{ 2 ** 10 }}{{ 2 ** -1 }}", "10240.5"),
     ("{{ [1] * 2 }}", "[1, 1]"), ("{{ 3 * true }}", "3"), ("{{ 'a' * -1 }}", "")],
)  # fmt: skip
def test_products_of_real_templates(source: str, text: str) -> None:
    assert render(source) == text


def test_long_templates_and_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadTemplate, match="1048577 letters: at most 1048576"):
        ChatTemplate("x" * (1 + (1 << 20)))
    monkeypatch.setattr(template, "MAX_TEXT", 3)
    assert render("abc") == "abc"
    with pytest.raises(RenderError, match="more than 3 letters"):
        render("abcd")


class Swallowing:
    """Eats some exceptions of any kind, as destructors and callbacks of the collector do."""

    def __init__(self, times: int) -> None:
        self.times = times

    def __call__(self) -> None:
        late = time.monotonic() + 5.0  # a deadline that is lost fails the test, it does not hang it
        for _ in range(self.times):
            with suppress(BaseException):
                while time.monotonic() < late:
                    pass
        while time.monotonic() < late:
            pass


@pytest.mark.parametrize("times", [0, 1, 5])
def test_a_deadline_ends_what_swallows_its_exception(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "TICK", 0.005)
    with pytest.raises(deadline.TooSlow):
        deadline.within(0.0, Swallowing(times))
    assert deadline._running == {}


def test_one_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two would clear each other's `raising`, and the exception could hit what comes after the work."""
    started: list[int] = []
    end, together = threading.Event(), threading.Barrier(8)

    def look() -> None:
        started.append(1)
        end.wait(10)

    def first() -> None:
        together.wait()
        deadline.within(5.0, lambda: None)

    monkeypatch.setattr(deadline, "_look", look)
    monkeypatch.setattr(deadline, "_watchdog", None)
    threads = [threading.Thread(target=first) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    watchdog = deadline._watchdog
    end.set()
    assert watchdog is not None
    watchdog.join()
    assert started == [1]


def test_a_deadline_never_reaches_what_comes_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "TICK", 0.001)
    ended = finished = turn = 0
    while turn < 300 or (turn < 30_000 and not (ended and finished)):  # who comes first is the machine's choice
        turn += 1
        try:
            deadline.within(0.001 * (turn % 3), lambda: sum(range(20_000)))
            finished += 1
        except deadline.TooSlow:
            ended += 1
        sum(range(2_000))  # what comes after
    assert ended
    assert finished
    with pytest.raises(ZeroDivisionError):
        deadline.within(5.0, lambda: 1 / 0)
    assert deadline._running == {}


CONTINUED = [
    ("{% for m in messages %}<{{ m.content }}>{% endfor %}", "Sunny, with", "<Sunny, with"),
    ("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}", "Sunny, ", "<Sunny,"),
]


@pytest.mark.parametrize(("source", "content", "text"), CONTINUED)
def test_continue_final_message(source: str, content: str, text: str) -> None:
    template = ChatTemplate(source)
    messages = [{"role": "assistant", "content": content}]
    rendered = template.render(
        messages, tools=None, variables={}, add_generation_prompt=False, continue_final_message=True
    )
    assert rendered == text


BAD = {
    "no target": "{% for %}",
    "no end": "{{ x",
    "unknown": "{% unknown %}",
    "digits": "{{ " + "9" * 5000 + " }}",
    "loops in loops": "{% for a in x %}" * 25 + "{% endfor %}" * 25,
    "conditions in conditions": "{% if a %}" * 120 + "{% endif %}" * 120,
    "parentheses": "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
}


@pytest.mark.parametrize("source", BAD.values(), ids=BAD)
def test_bad_template(source: str) -> None:
    with pytest.raises(BadTemplate):
        ChatTemplate(source)


SELECTION = [
    # given, processor, tokenizer, with tools, without
    (None, None, "T", "T", "T"),
    ("G", "P", "T", "G", "G"),
    (None, "P", "T", "T", "P"),
    (None, None, {"default": "D", "tool_use": "U"}, "U", "D"),
    (None, None, {"default": "D"}, "D", "D"),
    (None, None, {"rag": "R"}, None, None),
    ("rag", None, {"default": "D", "rag": "R"}, "R", "R"),
    (None, "P", None, None, "P"),
    (None, None, None, None, None),
]


@pytest.mark.parametrize(("given", "processor", "tokenizer", "with_tools", "without"), SELECTION)
def test_selection(given: Any, processor: Any, tokenizer: Any, with_tools: Any, without: Any) -> None:
    templates = Templates(given=given, processor=processor, tokenizer=tokenizer)

    def chosen(tools: bool) -> str | None:
        template = templates.select(tools=tools)
        return template.source if template else None

    assert (chosen(True), chosen(False)) == (with_tools, without)


def test_read_template(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{{ x }}", encoding="utf-8")
    assert read_template(str(path)) == "{{ x }}"
    assert read_template("{{ y }}") == "{{ y }}"
    with pytest.raises(BadTemplate, match="No such file"):
        read_template(str(tmp_path / "missing.jinja"))


# -- what reaches the template, through a whole prompter ---------------------------------------------------------------

SHOW = (
    "{{ x }}|{{ enable_thinking }}|{{ reasoning_effort }}|{{ documents | length if documents }}|"
    "{{ add_generation_prompt }}|{{ tools | length if tools }}|{{ bos_token }}|{{ max_length }}"
)


async def shown(fields: dict[str, Any], **options: Any) -> str | Reason:
    prompter = Prompter.load(
        Options(tokenizer=str(SMALL), models=("m",), **{"chat_template": SHOW, "timeout": 30.0, **options})
    )
    body = json.dumps({"messages": U, **fields}).encode()
    result = await prompt_of(prompter, "/v1/chat/completions", body)
    return result.reason if isinstance(result, Unscored) else str(result.text)


TOOL = {"type": "function", "function": {"name": "f"}}
REACHES = [
    # what, body, options, text or reason
    ("nothing", {}, {}, "||||True||<s>|"),
    ("kwargs", {"chat_template_kwargs": {"x": 1}}, {}, "1||||True||<s>|"),
    ("the engine's defaults", {}, {"chat_template_kwargs": {"x": 2}}, "2||||True||<s>|"),
    ("kwargs beat defaults", {"chat_template_kwargs": {"x": 1}}, {"chat_template_kwargs": {"x": 2}}, "1||||True||<s>|"),
    ("null does not", {"chat_template_kwargs": {"x": None}}, {"chat_template_kwargs": {"x": 2}}, "2||||True||<s>|"),
    ("effort switches thinking", {"reasoning_effort": "low"}, {}, "|True|low||True||<s>|"),
    ("unless kwargs do", {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, {},
     "|False|low||True||<s>|"),
    ("effort beats kwargs", {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, {},
     "|True|low||True||<s>|"),
    ("documents", {"documents": [{}]}, {}, "|||1|True||<s>|"),
    ("documents by kwargs", {"chat_template_kwargs": {"documents": [{}, {}]}}, {}, "|||2|True||<s>|"),
    ("body documents beat them", {"documents": [{}], "chat_template_kwargs": {"documents": []}}, {}, "|||1|True||<s>|"),
    ("no generation prompt", {"add_generation_prompt": False}, {}, "||||False||<s>|"),
    ("not by kwargs", {"chat_template_kwargs": {"add_generation_prompt": False}}, {}, "||||True||<s>|"),
    ("call parameters do not", {"chat_template_kwargs": {"max_length": 5, "tokenize": True}}, {}, "||||True||<s>|"),
    ("unknown names have no effect", {"chat_template_kwargs": {"whatever": 5}}, {}, "||||True||<s>|"),
    ("tools", {"tools": [TOOL]}, {}, "||||True|1|<s>|"),
    ("tool_choice none keeps tools", {"tools": [TOOL], "tool_choice": "none"}, {}, "||||True|1|<s>|"),
    ("unless the engine excludes them", {"tools": [TOOL], "tool_choice": "none"},
     {"exclude_tools_when_tool_choice_none": True}, "||||True||<s>|"),
    ("kwargs chat_template", {"chat_template_kwargs": {"chat_template": "x"}}, {}, Reason.TEMPLATE),
    ("kwargs messages", {"chat_template_kwargs": {"messages": []}}, {}, Reason.TEMPLATE),
    ("kwargs conversation", {"chat_template_kwargs": {"conversation": []}}, {}, Reason.TEMPLATE),
    ("kwargs tools", {"chat_template_kwargs": {"tools": []}}, {}, Reason.TEMPLATE),
    ("kwargs bos_token", {"chat_template_kwargs": {"bos_token": "x"}}, {}, Reason.TEMPLATE),
    ("kwargs tools null", {"chat_template_kwargs": {"tools": None}}, {}, "||||True||<s>|"),
    ("request template", {"chat_template": "{{ 1 + 1 }}"}, {}, Reason.TEMPLATE),
    ("request template, trusted", {"chat_template": "{{ 1 + 1 }}"}, {"trust_request_chat_template": True}, "2"),
    ("bad request template, trusted", {"chat_template": "{% if"}, {"trust_request_chat_template": True},
     Reason.TEMPLATE_ERROR),
    ("continue and open a turn", {"continue_final_message": True}, {}, Reason.BAD_REQUEST),
    ("native renderer", {}, {"renderer": "native"}, Reason.RENDERER),
    ("template raises", {}, {"chat_template": "{{ raise_exception('no') }}"}, Reason.TEMPLATE_ERROR),
]  # fmt: skip


@pytest.mark.parametrize(("what", "fields", "options", "expected"), REACHES, ids=[row[0] for row in REACHES])
async def test_what_reaches_the_template(
    what: str, fields: dict[str, Any], options: dict[str, Any], expected: str | Reason
) -> None:
    assert await shown(fields, **options) == expected


@pytest.mark.parametrize("own", [True, False])
async def test_a_clients_own_template_takes_no_time_of_others(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take its second; the event loop, which everybody waits for, renders templates of the model's only."""
    where: list[str] = []
    prompter = Prompter.load(Options(tokenizer=str(SMALL), models=("m",), trust_request_chat_template=True))
    prepare = prompter._prepare
    monkeypatch.setattr(
        prompter, "_prepare", lambda body: where.append(threading.current_thread().name) or prepare(body)
    )
    fields = {"messages": U, **({"chat_template": "{{ 1 + 1 }}"} if own else {})}
    await prompter.prompt_of(Body(Endpoint.CHAT, "m", fields))
    assert [name.startswith("kvcar-tokens") for name in where] == [own]


async def test_content_format_override() -> None:
    source = "{% for m in messages %}{{ m.content is string }}{% endfor %}"
    assert await shown({}, chat_template=source) == "True"
    assert await shown({}, chat_template=source, content_format="openai") == "False"
    looped = "{% for m in messages %}{{ m.content is string }}{% for p in m.content %}{% endfor %}{% endfor %}"
    assert await shown({}, chat_template=looped) == "False"
    assert await shown({}, chat_template=looped, content_format="string") == "True"


def test_prompt_hides_its_text() -> None:
    assert "hi" not in repr(Prompt(tokens=b"hi", count=1, model="m", text="hi", salt="hi"))
