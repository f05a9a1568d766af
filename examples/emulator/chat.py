"""From OpenAI chat messages to prompt text, as vLLM does it: messages are rebuilt, then the template is rendered.

Written for the emulator alone, from the rules measured on vLLM 0.32, so that it can stand against the router's own code
as an independent peer. Everything that a text model's engine would refuse raises `BadRequest`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]

TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
    "tool_reference": "name",
}
NOT_FROM_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "continue_final_message",
        "documents",
        "tokenize",
        "return_dict",
        "return_tensors",
        "padding",
        "truncation",
        "max_length",
        "tokenizer_kwargs",
    }
)
REFUSED_KWARGS = frozenset({"chat_template", "messages", "conversation", "tools"})
CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
BILLING = "x-anthropic-billing-header"


class BadRequest(Exception):
    """The engine answers 400; `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


# -- templates ------------------------------------------------------------------------------------------------------


class Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own attribute

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=1)
def environment() -> ImmutableSandboxedEnvironment:
    """A Jinja environment set up as transformers sets up its own."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
    return env


@lru_cache(maxsize=8)
def compiled(template: str) -> tuple[jinja2.Template, frozenset[str]]:
    """The template and the names of the variables that it reads."""
    env = environment()
    return env.from_string(template), frozenset(jinja2.meta.find_undeclared_variables(env.parse(template)))


@lru_cache(maxsize=8)
def wants_parts(template: str) -> bool:
    """True when the template loops over a message's content itself ("list" format), False for plain strings."""
    try:
        tree = environment().parse(template)
    except jinja2.TemplateSyntaxError:
        return False
    for loop in tree.find_all(jinja2.nodes.For):
        source = loop.iter
        while isinstance(source, jinja2.nodes.Filter) and source.node is not None:
            source = source.node
        if isinstance(source, jinja2.nodes.Getattr) and source.attr == "content":
            return True
        if isinstance(source, jinja2.nodes.Getitem) and getattr(source.arg, "value", None) == "content":
            return True
        if isinstance(source, jinja2.nodes.Name) and source.name == "content":
            return True
    return False


# -- messages -------------------------------------------------------------------------------------------------------


def _part_text(part: Any) -> str | None:
    """Text of one content part; None = nothing."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise BadRequest("content parts must be objects or strings", "messages")
    kind = part.get("type")
    field = TEXT_PARTS.get(str(kind))
    if field is None:
        raise BadRequest(f"content part of type {kind!r} is not supported by this model", "messages")
    text = part.get(field)
    if text is not None and not isinstance(text, str):
        raise BadRequest(f"{field} of a content part must be text", "messages")
    return text


def _content(content: Any, role: str, *, parts: bool) -> Any:
    if content is None:
        return [] if parts else ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if parts and role != "tool" else content
    if not isinstance(content, list):
        raise BadRequest("content must be text or a list of parts", "messages")
    rows = []
    for part in content:
        text = _part_text(part)
        if text is None:
            continue
        if role == "system" and text.startswith(BILLING):
            text = text.partition("\n")[2]
            if not text:
                continue
        extra = (
            {key: value for key, value in part.items() if key not in ("type", "text")} if isinstance(part, dict) else {}
        )
        rows.append({"type": "text", "text": text, **(extra if parts else {})})
    if parts and role != "tool":
        return rows
    return "\n".join(row["text"] for row in rows if row["text"])  # vLLM's renderers/chat_utils.py: `if parse_res`


def _tool_calls(calls: Any) -> list[Message] | None:
    """Tool calls with their arguments as objects; None when there are none."""
    if not isinstance(calls, list):
        raise BadRequest("tool_calls must be a list", "messages")
    result = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise BadRequest("tool_calls must be of type function", "messages")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                arguments = {}
        if not isinstance(arguments, dict):
            arguments = {}
        result.append({**call, "function": {**function, "arguments": arguments}})
    return result or None


def _message(message: Any, *, parts: bool, developer: bool) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest("each message must be an object with a role", "messages")
    role = message["role"]
    if role == "developer" and not developer:
        role = "system"
    result: Message = {"role": role, "content": _content(message.get("content"), role, parts=parts)}
    if role == "assistant":
        if message.get("tool_calls") is not None and (calls := _tool_calls(message["tool_calls"])):
            result["tool_calls"] = calls
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            result["reasoning"] = result["reasoning_content"] = result["thinking"] = reasoning
    elif role == "tool" and message.get("tool_call_id") is not None:
        result["tool_call_id"] = message["tool_call_id"]
    elif role == "developer" and message.get("tools") is not None:
        result["tools"] = message["tools"]
    for key in ("name", "task"):
        if isinstance(message.get(key), str):
            result[key] = message[key]
    return result


def _text_of(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(row["text"] for row in content)


def normalise(messages: Any, *, template: str, parts: bool) -> list[Message]:
    """The messages as the template sees them. Raises BadRequest."""
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message", "messages")
    developer = '"developer"' in template or "'developer'" in template
    rebuilt = [_message(message, parts=parts, developer=developer) for message in messages]
    was_developer = any(isinstance(m, dict) and m.get("role") == "developer" for m in messages)
    if developer or not was_developer:
        return rebuilt
    systems = [i for i, message in enumerate(rebuilt) if message["role"] == "system"]
    if systems == [0]:
        return rebuilt
    texts = [text for i in systems if (text := _text_of(rebuilt[i]["content"]))]
    merged: Any = "\n\n".join(texts)
    if parts:
        merged = [{"type": "text", "text": merged}]
    return [{"role": "system", "content": merged}, *(m for m in rebuilt if m["role"] != "system")]


def normalise_tools(tools: Any) -> list[Message] | None:
    """The tools as the template sees them: known keys in a fixed order. Raises BadRequest."""
    if tools is None:
        return None
    if not isinstance(tools, list) or not tools:
        raise BadRequest(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.", "tools"
        )
    result = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest("each tool needs a function with a name", "tools")
        inner = {key: function.get(key) for key in ("name", "description", "parameters")}
        for key in ("strict", "defer_loading"):
            if function.get(key) is not None:
                inner[key] = function[key]
        outer: Message = {"type": "function", "function": inner}
        if tool.get("defer_loading") is not None:
            outer["defer_loading"] = tool["defer_loading"]
        result.append(outer)
    return result


# -- rendering ------------------------------------------------------------------------------------------------------


def render(body: dict[str, Any], *, template: str | None, specials: dict[str, str], parts: bool | None = None) -> str:
    """Prompt text of a chat body (chat completions or /tokenize). Raises BadRequest.

    parts   content format of the messages: None = as the template wants it
    """
    if template is None:
        raise BadRequest("the tokenizer has no chat template", "messages")
    given = body.get("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise BadRequest("chat_template_kwargs must be an object", "chat_template_kwargs")
    if body.get("chat_template") is not None or REFUSED_KWARGS & given.keys():
        raise BadRequest("Chat template is passed with request, but --trust-request-chat-template is not set.")
    messages = normalise(
        body.get("messages"), template=template, parts=wants_parts(template) if parts is None else parts
    )
    tools = normalise_tools(body.get("tools"))
    add_prompt = body.get("add_generation_prompt", True) is not False
    resume = bool(body.get("continue_final_message", False))
    if add_prompt and resume:
        raise BadRequest("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    kwargs = {key: value for key, value in given.items() if key not in NOT_FROM_KWARGS}
    effort = body.get("reasoning_effort")
    if effort is not None:
        kwargs["reasoning_effort"] = effort
        kwargs.setdefault("enable_thinking", effort != "none")
    program, names = compiled(template)
    if resume:
        _mark(messages[-1])
    try:
        text = program.render(
            **specials,
            **{key: value for key, value in kwargs.items() if key in names and key not in specials},
            messages=messages,
            tools=tools,
            documents=body.get("documents"),
            add_generation_prompt=add_prompt,
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise BadRequest(f"the chat template failed: {error}", "messages") from error
    return _cut(text) if resume else text


def _mark(message: Message) -> None:
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + CONTINUE_MARK
    elif content:
        content[-1]["text"] += CONTINUE_MARK
    else:
        raise BadRequest("the final message has no content to continue", "messages")


def _cut(text: str) -> str:
    place = text.rfind(CONTINUE_MARK.strip())
    if place < 0:
        raise BadRequest("the final message does not appear in the rendered chat", "messages")
    if text[place : place + len(CONTINUE_MARK)] == CONTINUE_MARK:
        return text[:place]
    return text[:place].rstrip()


def check_ids(values: Iterable[Any], vocabulary: int) -> list[int]:
    """Token ids from a body. Raises BadRequest for anything that is no id of the vocabulary."""
    ids = list(values)
    for value in ids:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocabulary:
            raise BadRequest(f"token id {value!r} is out of the vocabulary", "prompt")
    return ids
