"""The OpenAI side without HTTP: bodies into jobs, tokens into answers, errors in vLLM's form.

`Api.parse` turns a body into a `Job` (prompt ids and everything that counts), or raises `ApiError`. `Choice` collects
the tokens of one sequence; the functions below it give the JSON of answers and stream chunks.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .chat import BadRequest, check_ids, render
from .text import TextModel

FINGERPRINT = "vllm-emulator"


class ApiError(Exception):
    """An answer that is no 200."""

    def __init__(self, status: int, message: str, *, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass
class Job:
    """One HTTP request, understood.

    prompts     token ids, one list per prompt of the body
    lora        (id, name) of the adapter that the model name stands for
    """

    chat: bool
    identity: str
    model: str
    prompts: list[list[int]]
    n: int = 1
    max_tokens: int = 16
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    ignore_eos: bool = False
    salt: str | None = None
    lora: tuple[int, str] | None = None
    session: str | None = None
    read_cache: bool = True
    report_full: bool = False
    rank: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True)
class Api:
    """What the server knows about its model.

    loras   adapter name -> number, in load order from 1
    """

    text: TextModel
    model: str
    max_model_len: int
    ranks: int = 1
    loras: Mapping[str, int] = field(default_factory=dict)
    default_max_tokens: int = 16

    def parse(self, raw: bytes, headers: Mapping[str, str], *, chat: bool) -> Job:
        """Raises ApiError."""
        body = parse_json(raw)
        try:
            return self._job(body, headers, chat=chat)
        except BadRequest as error:
            raise ApiError(400, str(error), param=error.param) from error

    def tokenize(self, raw: bytes) -> dict[str, Any]:
        """POST /tokenize. Raises ApiError."""
        body = parse_json(raw)
        self._adapter(body)
        try:
            if "messages" in body:
                prompt = self._chat_text(body)
            else:
                prompt = _typed(body, "prompt", str, None)
                if prompt is None:
                    raise BadRequest("either messages or prompt is required", "prompt")
            ids = self._encode(prompt, body, "messages" not in body)
        except BadRequest as error:
            raise ApiError(400, str(error), param=error.param) from error
        names = [self.text.token(number) for number in ids] if body.get("return_token_strs") else None
        return {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids, "token_strs": names}

    def models(self) -> dict[str, Any]:
        """GET /v1/models."""

        def card(name: str, parent: str | None) -> dict[str, Any]:
            return {
                "id": name,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "vllm",
                "root": name,
                "parent": parent,
                "max_model_len": self.max_model_len,
                "permission": [],
            }

        return {"object": "list", "data": [card(self.model, None), *(card(name, self.model) for name in self.loras)]}

    # -- parts --------------------------------------------------------------------------------------------------

    def _job(self, body: dict[str, Any], headers: Mapping[str, str], *, chat: bool) -> Job:
        lora = self._adapter(body)
        prompts = [self._cut(ids, body) for ids in self._prompts(body, chat=chat)]
        limit = self._max_tokens(body, chat=chat)
        for ids in prompts:
            if not ids:
                raise BadRequest("The decoder prompt cannot be empty", "prompt")
            self._check_length(len(ids), limit)
        salt = _typed(body, "cache_salt", str, None)
        if salt is not None and not 1 <= len(salt) <= 1024:
            raise BadRequest("cache_salt must be a text of 1 to 1024 characters", "cache_salt")
        if salt is not None:
            _encodable(salt, "cache_salt")
        options = _typed(body, "stream_options", dict, {})
        logprobs = body.get("prompt_logprobs")
        if logprobs is None and body.get("echo"):
            logprobs = body.get("top_logprobs", 0) if chat else body.get("logprobs")
        identity = headers.get("X-Request-Id") or uuid.uuid4().hex[:16]
        return Job(
            chat=chat,
            identity=("chatcmpl-" if chat else "cmpl-") + identity,
            model=body.get("model") or self.model,
            prompts=prompts,
            n=_count(body, "n", 1),
            max_tokens=min(limit or self.default_max_tokens, self.max_model_len - max(map(len, prompts))),
            stream=bool(body.get("stream", False)),
            include_usage=bool(options.get("include_usage")),
            continuous_usage=bool(options.get("continuous_usage_stats")),
            return_token_ids=bool(body.get("return_token_ids")),
            ignore_eos=bool(body.get("ignore_eos")),
            salt=salt,
            lora=lora,
            session=_typed(body, "session_id", str, None) or headers.get("X-Session-ID"),
            read_cache=logprobs is None,
            report_full=_typed(body, "vllm_xargs", dict, {}).get("kv_cache_report_mode") == "full",
            rank=self._rank(headers),
        )

    def _adapter(self, body: dict[str, Any]) -> tuple[int, str] | None:
        model = body.get("model")
        if model is None or model == self.model:
            return None
        if isinstance(model, str) and model in self.loras:
            return self.loras[model], model
        raise ApiError(404, f"The model `{model}` does not exist.", kind="NotFoundError", param="model")

    def _rank(self, headers: Mapping[str, str]) -> int | None:
        value = headers.get("X-data-parallel-rank")
        if value is None:
            return None
        if not value.isdecimal() or int(value) >= self.ranks:
            raise BadRequest(f"data_parallel_rank {value} is out of range [0, {self.ranks})", "data_parallel_rank")
        return int(value)

    def _chat_text(self, body: dict[str, Any]) -> str:
        return render(body, template=self.text.template, specials=self.text.specials)

    def _encode(self, text: str, body: dict[str, Any], default: bool) -> list[int]:
        add = _typed(body, "add_special_tokens", bool, default)
        _encodable(text, "prompt")
        return self.text.encode(text, add_special_tokens=add)

    def _prompts(self, body: dict[str, Any], *, chat: bool) -> list[list[int]]:
        given = _typed(body, "kv_transfer_params", dict, {}).get("prompt_token_ids")
        if isinstance(given, list) and given and not body.get("echo"):
            return [check_ids(given, self.text.vocabulary)]
        if chat:
            return [self._encode(self._chat_text(body), body, False)]
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            prompt = [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise BadRequest("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        if all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
            return [check_ids(prompt, self.text.vocabulary)]
        result = []
        for item in prompt:
            if isinstance(item, str):
                result.append(self._encode(item, body, True))
            elif isinstance(item, list):
                result.append(check_ids(item, self.text.vocabulary))
            else:
                raise BadRequest("prompt must be text, token ids, or a list of either", "prompt")
        return result

    def _cut(self, ids: list[int], body: dict[str, Any]) -> list[int]:
        keep = _typed(body, "truncate_prompt_tokens", int, None)
        if keep is None:
            return ids
        if keep < -1 or keep > self.max_model_len:
            raise BadRequest("truncate_prompt_tokens must be -1 or 0 to max_model_len", "truncate_prompt_tokens")
        if keep == -1:
            keep = self.max_model_len - 1
        if len(ids) <= keep:
            return ids
        return ids[:keep] if body.get("truncation_side") == "right" else ids[len(ids) - keep :]

    def _max_tokens(self, body: dict[str, Any], *, chat: bool) -> int | None:
        for key in ("max_completion_tokens", "max_tokens") if chat else ("max_tokens",):
            value: int | None = _typed(body, key, int, None)
            if value is not None:
                if value < 1:
                    raise BadRequest(f"{key} must be at least 1, got {value}.", key)
                return value
        return None

    def _check_length(self, prompt: int, limit: int | None) -> None:
        longest = self.max_model_len
        opening = f"This model's maximum context length is {longest} tokens. However, "
        if prompt >= longest:
            raise BadRequest(
                f"{opening}your prompt contains {prompt} input tokens, which exceeds this limit even without any "
                "output tokens. Please reduce the length of the input prompt. "
                f"(parameter=input_tokens, value={prompt})",
                "input_tokens",
            )
        if limit is not None and prompt + limit > longest:
            raise BadRequest(
                f"{opening}you requested {limit} output tokens and your prompt contains {prompt} input tokens, for a "
                f"total of {prompt + limit} tokens. Please reduce the length of the input prompt or the number of "
                f"requested output tokens. (parameter=max_tokens, value={limit})",
                "max_tokens",
            )


def parse_json(raw: bytes) -> dict[str, Any]:
    """The body as an object. Raises ApiError."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ApiError(
            400, f"[{{'type': 'json_invalid', 'msg': 'JSON decode error: {error}'}}]", kind="Bad Request"
        ) from error
    if not isinstance(body, dict):
        raise ApiError(400, "[{'type': 'dict_type', 'msg': 'Input should be a valid dictionary'}]", kind="Bad Request")
    return body


def _typed(body: dict[str, Any], key: str, kind: type, default: Any) -> Any:
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadRequest(f"{key} must be of type {kind.__name__}", key)
    return value


def _count(body: dict[str, Any], key: str, default: int) -> int:
    value: int = _typed(body, key, int, default)
    if not 1 <= value <= 64:
        raise BadRequest(f"{key} must be between 1 and 64, got {value}.", key)
    return value


def _encodable(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest("the text cannot be encoded as UTF-8", param) from error


# -- answers ---------------------------------------------------------------------------------------------------------


class Choice:
    """Tokens of one sequence as they come in, and their text."""

    def __init__(self, text: TextModel, eos: int | None) -> None:
        self.ids: list[int] = []
        self.finish: str | None = None
        self.text = ""
        self._model = text
        self._eos = eos

    def feed(self, token: int, finish: str | None) -> str:
        """Take one token; returns the text that it completes ("" while a character is still incomplete)."""
        self.ids.append(token)
        self.finish = finish
        text = self._model.decode([number for number in self.ids if number != self._eos])
        if text.endswith("�") and not finish:
            return ""
        delta = text[len(self.text) :]
        self.text = text
        return delta


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def full_answer(job: Job, choices: list[Choice], counted: dict[str, Any]) -> dict[str, Any]:
    """Body of a non-streaming answer."""
    rows = []
    for index, choice in enumerate(choices):
        row: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": choice.finish, "stop_reason": None}
        if job.chat:
            row["message"] = {"role": "assistant", "content": choice.text, "refusal": None, "tool_calls": []}
        else:
            row["text"] = choice.text
            row["prompt_token_ids"] = job.prompts[index // job.n] if job.return_token_ids else None
        row["token_ids"] = choice.ids if job.return_token_ids else None
        rows.append(row)
    answer: dict[str, Any] = {
        "id": job.identity,
        "object": "chat.completion" if job.chat else "text_completion",
        "created": job.created,
        "model": job.model,
        "choices": rows,
        "system_fingerprint": FINGERPRINT,
        "usage": counted,
        "kv_transfer_params": None,
    }
    if job.chat:
        answer["prompt_token_ids"] = job.prompts[0] if job.return_token_ids else None
    return answer


def chunk(job: Job, rows: list[dict[str, Any]], *, counted: dict[str, Any] | None = None, first: bool = False) -> bytes:
    """One server-sent event of a streamed answer."""
    body: dict[str, Any] = {
        "id": job.identity,
        "object": "chat.completion.chunk" if job.chat else "text_completion",
        "created": job.created,
        "model": job.model,
        "choices": rows,
    }
    if job.chat and first and job.return_token_ids:
        body["prompt_token_ids"] = job.prompts[0]
    if counted is not None:
        body["usage"] = counted
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def role_row(index: int) -> dict[str, Any]:
    """First row of a streamed chat choice."""
    delta = {"role": "assistant", "content": ""}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def delta_row(job: Job, index: int, text: str, token: int, finish: str | None, *, first: bool) -> dict[str, Any]:
    """Row of one streamed token."""
    row: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    if job.chat:
        row["delta"] = {"content": text}
    else:
        row["text"] = text
        row["prompt_token_ids"] = job.prompts[index // job.n] if job.return_token_ids and first else None
    row["token_ids"] = [token] if job.return_token_ids else None
    return row
