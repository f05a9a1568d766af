"""/v1/responses as the chat it renders to, where the body alone says so (vLLM's rules, read in its source and checked
against its render endpoint). Pure; raises Refused only.

History that only the engine holds (previous_response_id, conversation, prompt templates, references to items) cannot be
known here. Built-in tools (search, code) are not written into the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from extproc import normalize
from extproc.reasons import Reason, Refused, bad
from extproc.requests import ChatRequest, Request, common, forwarded_ids, template_kwargs, thinking, without_unset

HELD_BY_ENGINE = ("previous_response_id", "conversation", "prompt")
UNFINISHED = ("in_progress", "incomplete")
Message = dict[str, Any]


def read_responses(fields: Mapping[str, Any]) -> Request:
    for key in HELD_BY_ENGINE:
        if fields.get(key) is not None:
            raise Refused(Reason.HISTORY, key)
    instructions, given = fields.get("instructions"), fields.get("input")
    if instructions is not None and not isinstance(instructions, str):
        raise bad("instructions must be a string")
    messages: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    elif isinstance(given, list):
        for item in given:
            _add(item, messages)
    else:
        raise bad("input must be text or a list of items")
    forwarded = forwarded_ids({**fields, "messages": messages})
    if forwarded is not None:
        return forwarded
    reasoning = fields.get("reasoning")
    if reasoning is not None and not isinstance(reasoning, dict):
        raise bad("reasoning must be an object")
    kwargs = template_kwargs(fields)
    continued = _is_unfinished(given)
    output = fields.get("max_output_tokens")
    return ChatRequest(
        messages=messages,
        tools=_tools(fields.get("tools")),
        tool_choice_none=fields.get("tool_choice") == "none",
        add_generation_prompt=not continued,
        continue_final_message=continued,
        add_special_tokens=True,  # the engine's default, which this endpoint does not change
        variables=without_unset(kwargs),
        overrides=thinking((reasoning or {}).get("effort"), kwargs),
        **{
            **common({"cache_salt": fields.get("cache_salt")}),
            "truncate": None if fields.get("truncation", "disabled") == "disabled" else -1,
            "max_output": output if type(output) is int else 0,
        },
    )


def _is_unfinished(given: object) -> bool:
    """True if the last item is an answer to go on with."""
    last = given[-1] if isinstance(given, list) and given else None
    if not isinstance(last, dict) or last.get("type", "message") not in ("message", "reasoning"):
        return False
    return last.get("status") in UNFINISHED


def _add(item: object, messages: list[Message]) -> None:
    """One item as a message of its own, or into the assistant message before it."""
    if not isinstance(item, dict):
        raise bad("an input item must be an object")
    kind = item.get("type")
    if kind in ("function_call", "custom_tool_call"):
        _add_call(_call(item), messages)
    elif kind == "reasoning":
        _add_part("reasoning", _reasoning(item), messages)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
    elif kind == "item_reference":
        raise Refused(Reason.HISTORY, "item_reference")
    elif not isinstance(item.get("role"), str):
        raise bad("unknown kind of input item")
    else:
        text = _answer(item) if item["role"] == "assistant" else None
        if text is None:
            messages.append({key: item[key] for key in ("role", "content", "name") if key in item})
        else:
            _add_part("content", text, messages)


def _add_part(key: str, value: str, messages: list[Message]) -> None:
    previous = messages[-1] if messages else {}
    if previous.get("role") == "assistant" and previous.get(key) is None:
        previous[key] = value
    else:
        messages.append({"role": "assistant", key: value})


def _add_call(call: Message, messages: list[Message]) -> None:
    previous = messages[-1] if messages else {}
    if previous.get("role") == "assistant":
        previous.setdefault("tool_calls", []).append(call)
    else:
        messages.append({"role": "assistant", "tool_calls": [call]})


def _call(item: Mapping[str, Any]) -> Message:
    call_id, name = item.get("call_id"), item.get("name")
    if not isinstance(call_id, str) or not isinstance(name, str):
        raise bad("a tool call needs call_id and name")
    if item["type"] == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
    else:
        given = item.get("arguments")
        if not isinstance(given, str):
            raise bad("arguments of a function call must be a string")
        arguments = given
        if item.get("namespace"):
            name = f"{item['namespace']}__{name}"
    return {"id": call_id, "function": {"name": name, "arguments": arguments}, "type": "function"}


def _reasoning(item: Mapping[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise bad("encrypted reasoning")
    for parts in (item.get("content"), item.get("summary")):
        if isinstance(parts, list) and parts:
            text = parts[0].get("text") if isinstance(parts[0], dict) else None
            if not isinstance(text, str):
                raise bad("text of reasoning must be a string")
            return text
    return ""


def _answer(item: Mapping[str, Any]) -> str | None:
    """The text of an assistant item: the engine takes the first part only. None if it has none."""
    content = item.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        if item.get("type") == "message" and content == []:
            raise bad("an assistant message without parts")
        return None
    text = content[0].get("text") if isinstance(content[0], dict) else None
    if text is not None and not isinstance(text, str):
        raise bad("text of a part must be a string")
    if text is None and item.get("type") == "message":
        raise bad("an assistant message whose first part has no text")
    return text


def _tools(given: object) -> list[Message] | None:
    """Function tools in the chat form, built-in tools left out (the list may be empty); None if none are given."""
    if given is None or given == []:
        return None
    if not isinstance(given, list):
        raise bad("tools must be a list")
    functions = [{"type": "function", "function": tool} for item in given for tool in _functions(item)]
    return normalize.tools(functions) if functions else []


def _functions(item: object) -> Iterable[Message]:
    if not isinstance(item, dict):
        raise bad("a tool must be an object")
    kind = item.get("type")
    if kind == "function":
        yield item
    elif kind == "namespace":
        inner = item.get("tools")
        for tool in inner if isinstance(inner, list) else ():
            if isinstance(tool, dict) and tool.get("type") == "function":
                yield {**tool, "name": f"{item.get('name')}__{tool.get('name')}"}
    elif kind == "custom":
        yield {"name": item.get("name"), "description": item.get("description"), "parameters": CUSTOM_PARAMETERS}


# A free-form tool is shown to the model as a function of one string.
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}
