"""An OpenAI-compatible body becomes a request that a tokenizer can answer. Pure: bytes in, dataclasses out.

    parse_body(path, headers, body) -> Body           which endpoint, which model: cheap, before a pool is chosen
    read(body) -> ChatRequest | TextRequest | IdsRequest     what the prompt is made of: after the pool is known

Both answer Unscored instead of raising. The body is never changed and never serialised again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson

from extproc import normalize
from extproc.reasons import Reason, Refused, Unscored, bad

DEFAULT_MAX_BODY = 32 << 20
MAX_SALT = 1024


class Endpoint(StrEnum):
    CHAT = "chat"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    MESSAGES = "messages"
    EMBEDDINGS = "embeddings"
    TOKENIZE = "tokenize"
    GENERATE = "generate"


PATHS: dict[str, Endpoint] = {
    "/v1/chat/completions": Endpoint.CHAT,
    "/v1/completions": Endpoint.COMPLETIONS,
    "/v1/responses": Endpoint.RESPONSES,
    "/v1/messages": Endpoint.MESSAGES,
    "/v1/embeddings": Endpoint.EMBEDDINGS,
    "/tokenize": Endpoint.TOKENIZE,
    "/v1/tokenize": Endpoint.TOKENIZE,
    "/generate": Endpoint.GENERATE,
    "/inference/v1/generate": Endpoint.GENERATE,
}


@dataclass(frozen=True)
class Routes:
    """Which paths carry prompts.

    bases     prefixes taken off before the table is asked ("/openai" serves /openai/v1/chat/completions too)
    rewrites  whole paths that mean another one ("/llm/chat" -> "/v1/chat/completions")
    """

    bases: tuple[str, ...] = ()
    rewrites: Mapping[str, str] = field(default_factory=dict)

    def endpoint(self, path: str) -> Endpoint | None:
        path = path.partition("?")[0].partition("#")[0]
        path = self.rewrites.get(path, path)
        found = PATHS.get(path)
        if found is None:
            for base in self.bases:
                base = base.rstrip("/")
                if path.startswith(base + "/"):
                    rest = path[len(base) :]
                    found = PATHS.get(self.rewrites.get(rest, rest))
                    if found is not None:
                        break
        return found


DEFAULT_ROUTES = Routes()


@dataclass(frozen=True, slots=True)
class Body:
    """A parsed body: read-only from here on."""

    endpoint: Endpoint
    model: str | None  # None = not given: the engine serves its base model
    fields: dict[str, Any] = field(repr=False)
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Common:
    salt: str | None = None
    truncate: int | None = None  # None = no cut, -1 = to the model's length, n = keep n ids
    side: str | None = None  # "left", "right"; None = the tokenizer's own, which is left in the engines
    max_output: int = 0
    reads_cache: bool = True  # False: the engine does not read its prefix cache for this request


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest(_Common):
    text: str = field(repr=False)
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class IdsRequest(_Common):
    ids: list[int] = field(repr=False)


Request = ChatRequest | TextRequest | IdsRequest


def parse_body(
    path: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    method: str = "POST",
    routes: Routes = DEFAULT_ROUTES,
    max_bytes: int = DEFAULT_MAX_BODY,
) -> Body | Unscored:
    """The endpoint, the model name and the parsed fields. Never raises. `headers` with lower-case names."""
    endpoint = routes.endpoint(path)
    if endpoint is None:
        return Unscored(Reason.PATH)
    if method.upper() != "POST":
        return Unscored(Reason.METHOD)
    if headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        return Unscored(Reason.ENCODING)
    if not body:
        return Unscored(Reason.NO_BODY)
    if len(body) > max_bytes:
        return Unscored(Reason.TOO_LARGE, f"{len(body)} bytes, limit {max_bytes}")
    try:
        fields = _load(body)
    except (ValueError, RecursionError, MemoryError):
        return Unscored(Reason.BAD_JSON)
    if not isinstance(fields, dict):
        return Unscored(Reason.BAD_REQUEST, "body is no object")
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        return Unscored(Reason.BAD_REQUEST, "model must be a string")
    return Body(endpoint, model or None, fields, len(body))


def _load(body: bytes) -> Any:
    """JSON as the engine's parser reads it (NaN, lone surrogates, integers of any size), by a faster parser where both
    agree."""
    try:
        fields = orjson.loads(body)
    except ValueError:
        return json.loads(body)
    if isinstance(fields, dict):
        for key in ("tools", "documents", "chat_template_kwargs", "messages"):
            value = fields.get(key)
            if key == "messages" and isinstance(value, list):
                value = [item for item in value if isinstance(item, dict) and "tool_calls" in item]
            if value and normalize.holds_huge_number(value):
                return json.loads(body)
    return fields


def read(body: Body) -> Request | Unscored:
    """What the prompt of a parsed body is made of. Never raises."""
    try:
        return READERS[body.endpoint](body.fields)
    except Refused as refused:
        return refused.unscored


def read_chat(fields: Mapping[str, Any]) -> Request:
    """/v1/chat/completions."""
    forwarded = _forwarded_ids(fields)
    if forwarded is not None:
        return forwarded
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad("messages must be a non-empty list")
    generation = _flag(fields, "add_generation_prompt", True)
    continued = _flag(fields, "continue_final_message", False)
    if continued and generation:
        raise bad("continue_final_message needs add_generation_prompt false")
    template = fields.get("chat_template")
    if template is not None and not isinstance(template, str):
        raise bad("chat_template must be a string")
    given = fields.get("chat_template_kwargs")
    if given is not None and not isinstance(given, dict):
        raise bad("chat_template_kwargs must be an object")
    overrides: dict[str, Any] = {}
    documents = fields.get("documents")
    if documents is not None:
        if not isinstance(documents, list) or not all(isinstance(item, dict) for item in documents):
            raise bad("documents must be a list of objects")
        overrides["documents"] = documents
    effort = fields.get("reasoning_effort")
    if effort is not None:
        if not isinstance(effort, str):
            raise bad("reasoning_effort must be a string")
        overrides["reasoning_effort"] = effort
        if "enable_thinking" not in (given or {}):
            overrides["enable_thinking"] = effort != "none"
    return ChatRequest(
        messages=messages,
        tools=normalize.tools(fields.get("tools")),
        tool_choice_none=fields.get("tool_choice") == "none",
        add_generation_prompt=generation,
        continue_final_message=continued,
        add_special_tokens=_flag(fields, "add_special_tokens", False),
        chat_template=template or None,
        variables=without_unset(given or {}),
        overrides=overrides,
        **_common(fields, echo=fields.get("echo") is True),
    )


def read_completion(fields: Mapping[str, Any]) -> Request:
    """/v1/completions."""
    if fields.get("prompt_embeds") is not None:
        raise Refused(Reason.EMBEDS, "prompt_embeds")
    if fields.get("suffix") is not None:
        raise bad("suffix")
    # echo asks for logprobs of the prompt only together with logprobs
    echo = fields.get("echo") is True and fields.get("logprobs") is not None
    return prompt_request(fields, fields.get("prompt"), _common(fields, echo=echo))


def prompt_request(fields: Mapping[str, Any], prompt: object, common: dict[str, Any]) -> Request:
    """A prompt given as text, ids, or a list of one of either."""
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        raise Refused(Reason.BATCH, f"{len(prompt)} prompts")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if not prompt:
        raise bad("prompt is empty")
    if isinstance(prompt, str):
        return TextRequest(text=prompt, add_special_tokens=_flag(fields, "add_special_tokens", True), **common)
    if isinstance(prompt, list) and normalize.is_token_ids(prompt):
        return IdsRequest(ids=prompt, **common)
    raise bad("prompt must be text or token ids")


def _forwarded_ids(fields: Mapping[str, Any]) -> IdsRequest | None:
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


def without_unset(values: Mapping[str, Any]) -> dict[str, Any]:
    """Template variables that count as given: the engine drops null and "auto" when it merges."""
    return {key: value for key, value in values.items() if value is not None and value != "auto"}


def _common(fields: Mapping[str, Any], *, echo: bool = False) -> dict[str, Any]:
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


def _flag(fields: Mapping[str, Any], key: str, default: bool) -> bool:
    value = fields.get(key, default)
    if not isinstance(value, bool):
        raise bad(f"{key} must be true or false")
    return value


def _unhandled(fields: Mapping[str, Any]) -> Request:
    raise Refused(Reason.PATH, "endpoint not scored")


READERS = dict.fromkeys(Endpoint, _unhandled)
READERS |= {Endpoint.CHAT: read_chat, Endpoint.COMPLETIONS: read_completion}
