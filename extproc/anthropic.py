"""/v1/messages (Anthropic) as the chat completion the engine turns it into (vLLM's rules, read in its source and
checked against its render endpoint). Pure; raises Refused only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from extproc import normalize
from extproc.normalize import BILLING_HEADER
from extproc.reasons import bad
from extproc.requests import ChatRequest, Request, common, forwarded_ids, template_kwargs, thinking, without_unset

Message = dict[str, Any]
IMAGE: Message = {"type": "image_url", "image_url": {}}  # what an image is never matters: it ends what is comparable
IGNORED = ("redacted_thinking", "tool_reference")
CHANGES = ("tool_addition", "tool_removal")


def read_messages(fields: Mapping[str, Any]) -> Request:
    given = fields.get("messages")
    if not isinstance(given, list) or not given:
        raise bad("messages must be a non-empty list")
    messages: list[Message] = []
    system = _system_text(fields.get("system"))
    if system:
        messages.append({"role": "system", "content": system})
    for message in given:
        _add(message, messages)
    if not messages:
        raise bad("no message has content")
    forwarded = forwarded_ids({**fields, "messages": messages})
    if forwarded is not None:
        return forwarded
    kwargs = template_kwargs(fields)
    config = fields.get("output_config")
    effort = config.get("effort") if isinstance(config, dict) else None
    mode = fields.get("thinking")
    disabled = isinstance(mode, dict) and mode.get("type") == "disabled"
    choice = fields.get("tool_choice")
    tools = _tools(fields.get("tools"), given)
    return ChatRequest(
        messages=messages,
        tools=tools,
        tool_choice_none=isinstance(choice, dict) and choice.get("type") == "none",
        variables=without_unset(kwargs),
        overrides={} if disabled else thinking(effort, kwargs),
        merge_system=True,
        thinking_disabled=disabled,
        **common({key: fields.get(key) for key in ("cache_salt", "max_tokens")}),
    )


def _system_text(content: object) -> str:
    """Texts joined with nothing between; the client's own attribution line, new in every request, left out."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad("system must be text or a list of blocks")
    return "".join(text for text in map(_block_text, content) if not text.startswith(BILLING_HEADER))


def _block_text(block: object) -> str:
    if not isinstance(block, dict):
        raise bad("a block must be an object")
    text = block.get("text") if block.get("type") == "text" else None
    if text is not None and not isinstance(text, str):
        raise bad("text of a block must be a string")
    return text or ""


def _add(message: object, messages: list[Message]) -> None:
    if not isinstance(message, dict):
        raise bad("a message must be an object")
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad("unknown role")
    if not isinstance(content, (str, list)):
        raise bad("content must be text or a list of blocks")
    if role == "system":
        if isinstance(content, str) and content.startswith(BILLING_HEADER):
            return
        text = _system_text(content)
        if text:
            messages.append({"role": "system", "content": text})
    elif isinstance(content, str):
        messages.append({"role": role, "content": content})
    else:
        made = _from_blocks(role, content, messages)
        if role != "user" or "content" in made:
            messages.append(made)


def _from_blocks(role: str, blocks: list[Any], messages: list[Message]) -> Message:
    """The message of a list of blocks; results of tools become messages of their own before it."""
    made: Message = {"role": role}
    parts: list[Message] = []
    calls: list[Message] = []
    thoughts: list[str] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            text = _block_text(block)
            if text:
                parts.append({"type": "text", "text": text})
        elif kind == "thinking":
            thought = block.get("thinking")
            if isinstance(thought, str):
                thoughts.append(thought)
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind == "tool_result":
            if role == "user":
                messages.extend(_tool_results(block))
            else:
                content = block.get("content")
                parts.append({"type": "text", "text": f"Tool result: {content if content else ''}"})
        elif kind == "image":
            parts.append(IMAGE)
        elif kind not in IGNORED:
            raise bad("unknown type of a block")
    if thoughts:
        made["reasoning"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    if parts:
        made["content"] = parts[0]["text"] if len(parts) == 1 and parts[0] is not IMAGE else parts
    return made


def _call(block: Mapping[str, Any]) -> Message:
    arguments = block.get("input")
    if arguments is not None and not isinstance(arguments, dict):
        raise bad("input of a tool use must be an object")
    function = {"name": block.get("name") or "", "arguments": arguments or {}}
    return {"id": block.get("id") or "", "type": "function", "function": function}


def _tool_results(block: Mapping[str, Any]) -> Iterable[Message]:
    content = block.get("content")
    call = {"role": "tool", "tool_call_id": block.get("tool_use_id") or ""}
    texts: list[str] = []
    references: list[Message] = []
    images: list[Message] = []
    if isinstance(content, str):
        texts.append(content)
    for item in content if isinstance(content, list) else ():
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "text":
            text = item.get("text", "")
            if not isinstance(text, str):
                raise bad("text of a tool result must be a string")
            texts.append(text)
        elif kind == "image":
            images.append(IMAGE)
        elif kind == "tool_reference" and (item.get("tool_name") or item.get("name")):
            references.append({"type": "tool_reference", "name": item.get("tool_name") or item.get("name")})
    yield {**call, "content": "\n".join(texts)}
    if images:
        yield {"role": "user", "content": images}
    if references:
        yield {**call, "content": references}


def _tools(given: object, messages: list[Any]) -> list[Message] | None:
    """Tools in the chat form, with what the messages add and remove; None if absent."""
    if given is not None and not isinstance(given, list):
        raise bad("tools must be a list")
    changes = [
        block
        for message in messages
        if isinstance(message.get("content"), list)
        for block in message["content"]
        if isinstance(block, dict) and block.get("type") in CHANGES
    ]
    tools: Iterable[Any] | None = given
    if changes:
        tools = _changed(given or [], changes)
    if tools is None:
        return None
    functions = [{"function": _function(tool)} for tool in tools]
    return normalize.tools(functions) if functions else []


def _changed(given: list[Any], changes: list[Any]) -> Iterable[Any]:
    tools = {_name(tool): tool for tool in given if isinstance(tool, dict)}
    removed: set[str] = set()
    for block in changes:
        change = block.get("tool")
        if not isinstance(change, dict):
            raise bad("a change of tools needs a tool")
        if change.get("type") == "tool_definition":
            definition = change.get("definition")
            if not isinstance(definition, dict):
                raise bad("a tool definition must be an object")
            name = _name(definition)
            tools[name] = definition
        elif (name := _name(change)) not in tools:
            raise bad("a change of a tool that is not declared")
        elif block["type"] == "tool_addition":
            tools[name] = {**tools[name], "defer_loading": None}
        if block["type"] == "tool_removal":
            removed.add(name)
        else:
            removed.discard(name)
    return [tool for name, tool in tools.items() if name not in removed]


def _name(tool: Mapping[str, Any]) -> str:
    name = tool.get("name")
    if not isinstance(name, str):
        raise bad("name of a tool must be a string")
    return name


def _function(tool: object) -> Message:
    schema = tool.get("input_schema") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or not isinstance(schema, dict):
        raise bad("a tool must be an object with an input_schema")
    parameters = schema if "type" in schema else {**schema, "type": "object"}
    rest = {key: tool.get(key) for key in ("name", "description", "strict", "defer_loading")}
    return {**rest, "parameters": parameters}
