"""An OpenAI-compatible body becomes a request that a tokenizer can answer. Pure: bytes in, dataclasses out.

    parse_body(path, headers, body) -> Body           which endpoint, which model: cheap, before a pool is chosen
    read(body) -> ChatRequest | TextRequest | IdsRequest     what the prompt is made of: after the pool is known

Both answer Unscored instead of raising. The body is never changed and never serialised again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import orjson

from extproc import normalize
from extproc.anthropic import read_messages
from extproc.reasons import Reason, Refused, Unscored, bad
from extproc.requests import (
    ChatRequest,
    IdsRequest,
    Request,
    TextRequest,
    common,
    flag,
    forwarded_ids,
    prompt_request,
    template_kwargs,
    thinking,
    without_unset,
)
from extproc.responses import read_responses

__all__ = [
    "Body", "ChatRequest", "Endpoint", "IdsRequest", "Request", "Routes", "TextRequest", "parse_body", "read",
]  # fmt: skip

DEFAULT_MAX_BODY = 32 << 20


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


MAX_OPENED = 500_000
"""Objects and lists of a body, those in its texts included: ten million of them take seconds and a gigabyte to read."""


MAX_COMMAS = 4_000_000
"""Numbers of a body, about: no prompt has so many tokens, and each takes 40 bytes until it is packed."""


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
    if len(body) > MAX_OPENED and body.count(b"{") + body.count(b"[") > MAX_OPENED:
        return Unscored(Reason.TOO_LARGE, f"more than {MAX_OPENED} braces and brackets")
    if len(body) > MAX_COMMAS and body.count(b",") > MAX_COMMAS:
        return Unscored(Reason.TOO_LARGE, f"more than {MAX_COMMAS} commas")
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
                value = [
                    item
                    for item in value
                    if isinstance(item, dict) and (len(item) > 2 or not isinstance(item.get("content"), str))
                ]
            if value and normalize.holds_huge_number(value):
                return json.loads(body)
    return fields


def read(body: Body) -> Request | Unscored:
    """What the prompt of a parsed body is made of. Never raises."""
    try:
        return READERS[body.endpoint](body.fields)
    except Refused as refused:
        return refused.unscored


def read_chat(fields: Mapping[str, Any], *, generation: bool = True) -> Request:
    """/v1/chat/completions. `generation`: default of add_generation_prompt."""
    forwarded = forwarded_ids(fields)
    if forwarded is not None:
        return forwarded
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad("messages must be a non-empty list")
    generation = flag(fields, "add_generation_prompt", generation)
    continued = flag(fields, "continue_final_message", False)
    template = fields.get("chat_template")
    if template is not None and not isinstance(template, str):
        raise bad("chat_template must be a string")
    given = template_kwargs(fields)
    overrides = thinking(fields.get("reasoning_effort"), given)
    documents = fields.get("documents")
    if documents is not None:
        if not isinstance(documents, list) or not all(isinstance(item, dict) for item in documents):
            raise bad("documents must be a list of objects")
        overrides["documents"] = documents
    return ChatRequest(
        messages=messages,
        tools=normalize.tools(fields.get("tools")),
        tool_choice_none=fields.get("tool_choice") == "none",
        add_generation_prompt=generation,
        continue_final_message=continued,
        add_special_tokens=flag(fields, "add_special_tokens", False),
        chat_template=template or None,
        variables=without_unset(given),
        overrides=overrides,
        **common(fields, echo=fields.get("echo") is True),
    )


def read_completion(fields: Mapping[str, Any]) -> Request:
    """/v1/completions."""
    if fields.get("prompt_embeds") is not None:
        raise Refused(Reason.EMBEDS, "prompt_embeds")
    if fields.get("suffix") is not None:
        raise bad("suffix")
    # echo asks for logprobs of the prompt only together with logprobs
    echo = fields.get("echo") is True and fields.get("logprobs") is not None
    return prompt_request(fields, fields.get("prompt"), common(fields, echo=echo))


def read_embedding(fields: Mapping[str, Any]) -> Request:
    """/v1/embeddings: `input` as text, ids or a chat, or `messages`."""
    if fields.get("padding") not in (None, "do_not_pad"):
        raise bad("padding")
    prompt, messages = fields.get("input"), fields.get("messages")
    if messages is None and isinstance(prompt, list) and prompt and all(map(_is_message, prompt)):
        messages = prompt
    if messages is None:
        return replace(prompt_request(fields, prompt, common(fields)), own_side="right", max_output=0)
    if isinstance(messages, list) and messages and all(isinstance(item, list) for item in messages):
        raise Refused(Reason.BATCH, f"{len(messages)} chats")
    chat = {key: value for key, value in fields.items() if key in _CHAT_OPTIONS}
    return replace(read_chat({**chat, "messages": messages}, generation=False), own_side="right", max_output=0)


_CHAT_OPTIONS = (
    "add_generation_prompt", "continue_final_message", "add_special_tokens", "chat_template", "chat_template_kwargs",
    "truncate_prompt_tokens", "truncation_side", "cache_salt",
)  # fmt: skip


def _is_message(item: object) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str)


def read_tokenize(fields: Mapping[str, Any]) -> Request:
    """/tokenize: a chat or a text; no engine looks into its cache for it."""
    request = read_chat(fields) if "messages" in fields else read_completion(fields)
    return replace(request, reads_cache=False)


def read_generate(fields: Mapping[str, Any]) -> Request:
    """/generate and /inference/v1/generate: ids or text, under the engines' several names."""
    if any(fields.get(key) for key in ("features", "content_parts", "image_data", "audio_data", "video_data")):
        raise Refused(Reason.MULTIMODAL, "media")
    if fields.get("input_embeds") is not None:
        raise Refused(Reason.EMBEDS, "input_embeds")
    for key in ("token_ids", "input_ids", "text", "prompt"):
        if fields.get(key) is not None:
            return prompt_request(fields, fields[key], common(fields))
    raise bad("neither ids nor text")


READERS: dict[Endpoint, Callable[[Mapping[str, Any]], Request]] = {
    Endpoint.CHAT: read_chat,
    Endpoint.COMPLETIONS: read_completion,
    Endpoint.RESPONSES: read_responses,
    Endpoint.MESSAGES: read_messages,
    Endpoint.EMBEDDINGS: read_embedding,
    Endpoint.TOKENIZE: read_tokenize,
    Endpoint.GENERATE: read_generate,
}
