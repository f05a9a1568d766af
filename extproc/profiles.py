"""Where engines differ in how a chat becomes what the template gets. One class an engine, one line in PROFILES.

vLLM's rules are measured (see README.md). SGLang's and xLLM's are read in their sources, not measured: the parity check
tells whether they hold for a model. Pure; raises Refused only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from extproc import normalize
from extproc.normalize import Message
from extproc.reasons import bad
from extproc.requests import ChatRequest


class Template(Protocol):
    """What a profile may ask a template."""

    @property
    def source(self) -> str: ...
    @property
    def list_format(self) -> bool: ...
    @property
    def loops_over(self) -> frozenset[str]: ...
    @property
    def knows_developer(self) -> bool: ...


@dataclass(slots=True)
class Rendering:
    """Arguments of a template."""

    messages: list[Message] = field(repr=False)
    tools: list[dict[str, Any]] | None = field(repr=False)
    add_generation_prompt: bool
    continue_final_message: bool
    suffix: str = field(default="", repr=False)  # text behind what the template renders
    other_tools: list[dict[str, Any]] | None = field(default=None, repr=False)  # tried if the template fails


class Profile:
    """vLLM."""

    every_endpoint = True  # False: only chats and completions are known
    special_tokens = True  # False: add_special_tokens and truncation are no fields of a chat

    def list_format(self, template: Template) -> bool:
        return template.list_format

    def variables(self, request: ChatRequest, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Strongest last in the source, first in effect: body fields, chat_template_kwargs, the engine's defaults."""
        return {**defaults, **request.variables, **request.overrides}

    def rendering(self, request: ChatRequest, template: Template, *, list_format: bool, no_tools: bool) -> Rendering:
        """no_tools: the engine leaves tools out when tool_choice is none."""
        if request.continue_final_message and request.add_generation_prompt:
            raise bad("continue_final_message needs add_generation_prompt false")
        return Rendering(
            messages=normalize.conversation(
                request.messages, list_format=list_format, knows_developer=template.knows_developer
            ),
            tools=None if no_tools and request.tool_choice_none else request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )


class SGLang(Profile):
    """SGLang: parts joined by a space, other parts than text ignored, the generation prompt always on, an answer at the
    end either continued behind the rendered text or shown as the user's, no tools with tool_choice none."""

    every_endpoint = False
    special_tokens = False
    MEDIA = ("image", "audio", "video", "vision")
    TEXTS = ("text", "input_text")
    NAMES = frozenset(("message", "msg", "m"))
    KEYS = ("role", "content", "name", "tool_call_id", "tool_calls", "reasoning_content")

    def list_format(self, template: Template) -> bool:
        return any(word in template.source for word in self.MEDIA) or not self.NAMES.isdisjoint(template.loops_over)

    def variables(self, request: ChatRequest, defaults: Mapping[str, Any]) -> dict[str, Any]:
        effort = {key: value for key, value in request.overrides.items() if key == "reasoning_effort"}
        return {**defaults, **effort, **request.variables}

    def rendering(self, request: ChatRequest, template: Template, *, list_format: bool, no_tools: bool) -> Rendering:
        messages = [self._message(message, list_format) for message in request.messages]
        suffix = ""
        last = messages[-1]
        if last["role"] == "assistant" and isinstance(last["content"], str):
            if request.continue_final_message:
                suffix = last["content"]
                messages.pop()
            else:
                messages[-1] = {"role": "user", "content": last["content"]}
        tools = None if request.tool_choice_none or not request.tools else [self._tool(tool) for tool in request.tools]
        bare = [tool["function"] for tool in tools] if tools else None
        return Rendering(messages, tools, True, False, suffix, bare)

    def _message(self, given: object, list_format: bool) -> Message:
        if not isinstance(given, dict) or not isinstance(given.get("role"), str):
            raise bad("a message must be an object with a role")
        message = {key: given[key] for key in self.KEYS if given.get(key) is not None}
        content = message.get("content", "")
        if isinstance(content, list):
            parts = [{"type": "text", "text": text} for part in content if (text := self._text(part)) is not None]
            content = parts if list_format else " ".join(part["text"] for part in parts)
            if message["role"] == "tool" and list_format and len(parts) == len(message["content"]):
                content = " ".join(part["text"] for part in parts)
        elif not isinstance(content, str):
            raise bad("content must be a string or a list of parts")
        message["content"] = content
        if message["role"] == "assistant" and "tool_calls" in message:
            message["tool_calls"] = normalize.tool_calls(message["tool_calls"], strict=True)
        return message

    def _text(self, part: object) -> str | None:
        if not isinstance(part, dict):
            raise bad("a content part must be an object")
        normalize.refuse_media(part)
        text = part.get("text") if part.get("type") in self.TEXTS else None
        if text is not None and not isinstance(text, str):
            raise bad("text of a part must be a string")
        return text

    @staticmethod
    def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
        function = tool["function"]
        shown = {key: function[key] for key in ("description", "name", "parameters")}
        return {"type": "function", "function": {**shown, "strict": bool(function.get("strict"))}}


class XLLM(Profile):
    """xLLM: text parts joined by a line end, no developer role, no names, tools without strict, the generation prompt
    always on. It renders with a C++ implementation of Jinja and passes tools through maps: what a template prints of a
    tool may differ in the order of keys."""

    every_endpoint = False
    special_tokens = False

    def list_format(self, template: Template) -> bool:
        return False

    def rendering(self, request: ChatRequest, template: Template, *, list_format: bool, no_tools: bool) -> Rendering:
        messages = normalize.conversation(request.messages, list_format=list_format, knows_developer=True)
        for message in messages:
            for key in ("name", "task", "reasoning", "tools"):
                message.pop(key, None)
        return Rendering(messages, _without_strict(request.tools), True, False)


def _without_strict(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    keys = ("name", "description", "parameters")
    if tools is None:
        return None
    return [{"type": "function", "function": {key: tool["function"][key] for key in keys}} for tool in tools]


PROFILES: dict[str, Profile] = {"vllm": Profile(), "sglang": SGLang(), "xllm": XLLM()}
