"""Chat messages and tools as the engine's template sees them (vLLM's rules, measured; reference: extproc/README.md).

Pure. Each message becomes a new dict with only the keys that the engine keeps. Nothing is stripped, escaped or
normalised in the text itself: other bytes are other tokens. Raises Refused only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from extproc.reasons import Reason, Refused, bad

Message = dict[str, Any]

TEXT_KEY = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
MEDIA_KEYS = frozenset(
    ("image_url", "input_image", "image_embeds", "image_pil", "audio_url", "input_audio", "audio_embeds", "video_url",
     "video_embeds", "prompt_embeds")
)  # fmt: skip
# Keys of a part that the engine knows; a list-format template sees the others (cache_control and the like).
KNOWN_PART_KEYS = MEDIA_KEYS | frozenset(
    ("closed", "data", "file", "name", "prompt_cache_breakpoint", "refusal", "text", "thinking", "type", "uuid")
)
BILLING_HEADER = "x-anthropic-billing-header"  # its value changes with every request; the engine drops the line


def conversation(messages: object, *, list_format: bool, knows_developer: bool) -> list[Message]:
    """The messages as the template gets them.

    list_format      the template loops over content parts; otherwise content is one string
    knows_developer  the template has a developer role of its own
    Raises Refused. O(size of the messages).
    """
    if not isinstance(messages, list) or not messages:
        raise bad("messages must be a non-empty list")
    result = [
        # Nearly all messages of a long chat: nothing of the rules below applies to them.
        {"role": role, "content": content}
        if type(message) is dict
        and len(message) == 2
        and not list_format
        and type(content := message.get("content")) is str
        and ((role := message.get("role")) == "user" or role == "assistant")
        else _message(message, list_format)
        for message in messages
    ]
    if not knows_developer and any(message["role"] == "developer" for message in result):
        result = _one_system_first([_as_system(message) for message in result])
    return result


def _message(message: object, list_format: bool) -> Message:
    if not isinstance(message, dict):
        raise bad("a message must be an object")
    role = message.get("role")
    if not isinstance(role, str):
        raise bad("role must be a string")
    content = message.get("content")
    if role == "system":
        content = _without_billing_header(content)
    result: Message = {"role": role, "content": _content(content, list_format)}
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls is not None:
            calls = tool_calls(calls)
            if calls:
                result["tool_calls"] = calls
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            result["reasoning"] = result["reasoning_content"] = reasoning
    elif role == "tool":
        if "tool_call_id" in message:
            result["tool_call_id"] = message["tool_call_id"]
        parts = result["content"]
        if isinstance(parts, list) and all(part["type"] == "text" for part in parts):
            result["content"] = "\n".join(part["text"] or "" for part in parts)
    for key in ("name", "task"):
        if isinstance(message.get(key), str):
            result[key] = message[key]
    if role == "developer":
        result["tools"] = message.get("tools")
    return result


def _content(content: object, list_format: bool) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if list_format else content
    if content is None:
        return [] if list_format else ""
    if not isinstance(content, list):
        raise bad("content must be a string or a list of parts")
    if list_format:
        return [part for part in map(_listed_part, content) if part is not None]
    # The engine's join skips empty parts: ["", "a"] is "a".
    return "\n".join(text for text in map(_part_text, content) if text)


def _part_text(part: object) -> str | None:
    """The text of a part, None where the engine skips it."""
    if isinstance(part, str):
        return part
    kind, part = _part_kind(part)
    text = part.get("name") if kind == "tool_reference" else part.get(TEXT_KEY[kind])
    if text is not None and not isinstance(text, str):
        raise bad("text of a part must be a string")
    return text


def _listed_part(part: object) -> dict[str, Any] | None:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    text = _part_text(part)
    kind, part = _part_kind(part)
    if kind == "tool_reference":
        return {"type": "tool_reference", "name": text}
    if text is None and kind in ("text", "refusal"):
        return None
    extra = {key: value for key, value in part.items() if key not in KNOWN_PART_KEYS}
    return {"type": "text", "text": text, **extra}


def _part_kind(part: object) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(part, dict):
        raise bad("a content part must be an object")
    refuse_media(part)
    kind = part.get("type")
    if kind is None and "tool_reference" in part:
        return "tool_reference", part
    if not isinstance(kind, str):
        raise bad("type of a part must be a string")
    if kind not in TEXT_KEY and kind != "tool_reference":
        raise bad("unknown type of a content part")
    if part.get("uuid") is not None:
        raise bad("uuid on a part without media")
    return kind, part


def refuse_media(part: Mapping[str, Any]) -> None:
    """Raises Refused if the part holds media or is of such a type."""
    kind = part.get("type")
    if not MEDIA_KEYS.isdisjoint(part) or (isinstance(kind, str) and kind in MEDIA_KEYS):
        raise Refused(Reason.MULTIMODAL, "media part")


def with_marks(messages: Sequence[Any], mark: str) -> list[Any]:
    """The messages with `mark` as the whole content of those that hold media. Others are the same objects."""
    return [{**message, "content": mark} if _holds_media(message) else message for message in messages]


def _holds_media(message: object) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    try:
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict):
                refuse_media(part)
    except Refused:
        return True
    return False


def _without_billing_header(content: object) -> object:
    if isinstance(content, str):
        content = [content] if content.startswith(BILLING_HEADER) else content
    if not isinstance(content, list):
        return content
    kept: list[object] = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if _is_text_part(part) else None
        if not (isinstance(text, str) and text.startswith(BILLING_HEADER)):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append(rest if isinstance(part, str) else {**part, "text": rest})
    return kept


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


def tool_calls(calls: object, *, strict: bool = False) -> list[Message]:
    """Tool calls with their arguments as objects. strict: arguments that are none are refused."""
    if not isinstance(calls, list):
        raise bad("tool_calls must be a list")
    result = []
    for call in calls:
        if not isinstance(call, dict):
            raise bad("a tool call must be an object")
        function = call.get("function")
        if call.get("type", "function") != "function" or not isinstance(function, dict):
            raise bad("only tool calls of type function")
        arguments = _arguments(function.get("arguments"), strict)
        result.append({**call, "function": {**function, "arguments": arguments}})
    return result


def _arguments(arguments: object, strict: bool) -> dict[str, Any]:
    """Arguments as an object; whatever is none becomes {} so that the conversation can go on."""
    if isinstance(arguments, str) and arguments:
        # The engine's own parser: big numbers, NaN and duplicate keys must come out the same.
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
        except RecursionError:
            raise bad("tool call arguments nested too deeply") from None
    if isinstance(arguments, dict):
        return arguments
    if strict:
        raise bad("tool call arguments must be an object")
    return {}


def _as_system(message: Message) -> Message:
    if message["role"] != "developer":
        return message
    return {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}


def _one_system_first(messages: list[Message]) -> list[Message]:
    """All system messages as one at position 0, unless the only one is there already."""
    places = [index for index, message in enumerate(messages) if message["role"] == "system"]
    if places == [0]:
        return messages
    texts = (_flat(messages[index]["content"]) for index in places)
    merged: Message = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in messages if message["role"] != "system")]


def _flat(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] or "" for part in content if "text" in part)


def tools(value: object) -> list[dict[str, Any]] | None:
    """`tools` rebuilt in the engine's key order, unknown keys dropped; None if absent. Raises Refused."""
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise bad("tools must be a non-empty list or absent")
    return [_tool(item) for item in value]


def _tool(item: object) -> dict[str, Any]:
    function = item.get("function") if isinstance(item, dict) else None
    if not isinstance(item, dict) or not isinstance(function, dict):
        raise bad("a tool must be an object with a function")
    if item.get("type", "function") != "function" or not isinstance(function.get("name"), str):
        raise bad("a tool must be of type function and have a name")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise bad("parameters of a tool must be an object")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise bad("description of a tool must be a string")
    rebuilt: dict[str, Any] = {"name": function["name"], "description": description, "parameters": parameters}
    if function.get("strict") is not None:
        rebuilt["strict"] = function["strict"]
    outer, inner = item.get("defer_loading"), function.get("defer_loading")
    if inner is None:
        inner = outer
    if inner is not None:
        rebuilt["defer_loading"] = inner
    tool: dict[str, Any] = {"type": "function", "function": rebuilt}
    if outer is not None:
        tool["defer_loading"] = outer
    return tool


def holds_huge_number(value: object) -> bool:
    """True if a float of the tree may have been an integer beyond 64 bits: the fast JSON parser reads those as floats,
    the engine's parser as integers, and a template prints them differently. O(nodes)."""
    stack: list[Any] = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
        elif isinstance(item, float) and not -9.2e18 < item < 9.2e18:
            return True
    return False


def is_token_ids(value: Iterable[object], limit: int | None = None) -> bool:
    """Non-negative ints (no bools), below `limit` if given."""
    top = limit if limit is not None else 1 << 32
    return all(type(item) is int and 0 <= item < top for item in value)
