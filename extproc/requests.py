"""Requests as the tokenizer sees them, and the fields that all endpoints read alike. Pure; raises Refused only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from extproc import normalize
from extproc.reasons import Reason, Refused, bad

MAX_SALT = 1024


@dataclass(slots=True, kw_only=True)  # none of these is frozen, which costs three times as much to make
class _Common:
    salt: str | None = None
    truncate: int | None = None  # None = no cut, -1 = to the model's length, n = keep n ids
    side: str | None = None  # "left", "right"; None = the tokenizer's own
    own_side: str = "left"  # which one that is: engines set it left, for pooling models right
    max_output: int = 0
    reads_cache: bool = True  # False: the engine does not read its prefix cache for this request


@dataclass(slots=True, kw_only=True)
class ChatRequest(_Common):
    messages: list[Any] = field(repr=False)
    tools: list[dict[str, Any]] | None = field(default=None, repr=False)
    tool_choice_none: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = field(default=None, repr=False)
    variables: dict[str, Any] = field(default_factory=dict, repr=False)  # chat_template_kwargs, nulls dropped
    overrides: dict[str, Any] = field(default_factory=dict, repr=False)  # body fields that beat them
    # Anthropic's API, where the answer is the template's:
    merge_system: bool = False  # all system messages go into one, if the template wants system messages first
    thinking_disabled: bool = False  # reasoning_effort none, or low if the template does not know none


@dataclass(slots=True, kw_only=True)
class TextRequest(_Common):
    text: str = field(repr=False)
    add_special_tokens: bool = True


@dataclass(slots=True, kw_only=True)
class IdsRequest(_Common):
    ids: list[int] = field(repr=False)


Request = ChatRequest | TextRequest | IdsRequest


def without_unset(values: Mapping[str, Any]) -> dict[str, Any]:
    """Template variables that count as given: the engine drops null and "auto" when it merges."""
    return {key: value for key, value in values.items() if value is not None and value != "auto"}


def common(fields: Mapping[str, Any], *, echo: bool = False) -> dict[str, Any]:
    """Fields of every request class."""
    truncate = fields.get("truncate_prompt_tokens")
    if truncate is not None and (type(truncate) is not int or truncate < -1):
        raise bad("truncate_prompt_tokens must be an int of at least -1")
    side = fields.get("truncation_side")
    if side not in (None, "left", "right"):
        raise bad("truncation_side must be left or right")
    output = fields.get("max_completion_tokens")
    if output is None:
        output = fields.get("max_tokens")
    return {
        "salt": _salt(fields),
        "truncate": truncate,
        "side": side,
        "max_output": output if type(output) is int else 0,
        "reads_cache": fields.get("prompt_logprobs") is None and not echo,
    }


def _salt(fields: Mapping[str, Any]) -> str | None:
    salt = fields.get("cache_salt")
    if salt is None:
        return None
    if not isinstance(salt, str) or not 0 < len(salt) <= MAX_SALT:
        raise bad(f"cache_salt must be text of 1 to {MAX_SALT} characters")
    return salt


def flag(fields: Mapping[str, Any], key: str, default: bool) -> bool:
    value = fields.get(key, default)
    if not isinstance(value, bool):
        raise bad(f"{key} must be true or false")
    return value


def thinking(effort: object, given: Mapping[str, Any]) -> dict[str, Any]:
    """Template variables of a reasoning effort: itself, and whether to think unless the request says so itself."""
    if effort is None:
        return {}
    if not isinstance(effort, str):
        raise bad("reasoning effort must be a string")
    values: dict[str, Any] = {"reasoning_effort": effort}
    if "enable_thinking" not in given:
        values["enable_thinking"] = effort != "none"
    return values


def template_kwargs(fields: Mapping[str, Any]) -> dict[str, Any]:
    given = fields.get("chat_template_kwargs")
    if given is not None and not isinstance(given, dict):
        raise bad("chat_template_kwargs must be an object")
    return given or {}


def prompt_request(fields: Mapping[str, Any], prompt: object, common: dict[str, Any]) -> Request:
    """A prompt given as text, ids, or a list of one of either."""
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        raise Refused(Reason.BATCH, f"{len(prompt)} prompts")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if not prompt:
        raise bad("prompt is empty")
    if isinstance(prompt, str):
        return TextRequest(text=prompt, add_special_tokens=flag(fields, "add_special_tokens", True), **common)
    if isinstance(prompt, list) and normalize.is_token_ids(prompt):
        return IdsRequest(ids=prompt, **common)
    raise bad("prompt must be text or token ids")


def forwarded_ids(fields: Mapping[str, Any]) -> IdsRequest | None:
    """Ids that the prefill side forwards in kv_transfer_params: the engine takes them and ignores the messages."""
    transfer = fields.get("kv_transfer_params")
    ids = transfer.get("prompt_token_ids") if isinstance(transfer, dict) else None
    if ids is None or fields.get("echo") is True or _has_media(fields.get("messages")):
        return None
    if not isinstance(ids, list) or not ids or not normalize.is_token_ids(ids):
        raise bad("kv_transfer_params.prompt_token_ids must be a non-empty list of ids")
    return IdsRequest(ids=ids, salt=_salt(fields))


def _has_media(messages: object) -> bool:
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict):
                kind = part.get("type", "text")
                if not normalize.MEDIA_KEYS.isdisjoint(part) or not isinstance(kind, str):
                    return True
                if kind not in normalize.TEXT_KEY and kind != "tool_reference":
                    return True
    return False
