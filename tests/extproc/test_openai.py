"""Bodies to requests: every reason, every field, and whatever bytes a client may send."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from extproc.openai import Body, ChatRequest, IdsRequest, Routes, TextRequest, parse_body, read
from extproc.prompt import Options, Prompter
from extproc.reasons import Reason, Unscored
from tests.tokenizers import SMALL, prompt_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
U = [{"role": "user", "content": "hi"}]


def parsed(path: str, body: Any) -> Body:
    result = parse_body(path, {}, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert isinstance(result, Body), result
    return result


def reason(path: str, body: Any) -> Reason | None:
    result = parse_body(path, {}, body if isinstance(body, bytes) else json.dumps(body).encode())
    outcome = read(result) if isinstance(result, Body) else result
    return outcome.reason if isinstance(outcome, Unscored) else None


PARSE = [
    # what, path, headers, body, keyword arguments, reason
    ("unknown path", "/v1/audio/speech", {}, b"{}", {}, Reason.PATH),
    ("root", "/", {}, b"{}", {}, Reason.PATH),
    ("not POST", CHAT, {}, b"{}", {"method": "GET"}, Reason.METHOD),
    ("gzip", CHAT, {"content-encoding": "gzip"}, b"\x1f\x8b\x08\x00", {}, Reason.ENCODING),
    ("identity", CHAT, {"content-encoding": "Identity"}, b"{}", {}, None),
    ("no body", CHAT, {}, b"", {}, Reason.NO_BODY),
    ("at the limit", CHAT, {}, b"{}  ", {"max_bytes": 4}, None),
    ("over the limit", CHAT, {}, b"{}   ", {"max_bytes": 4}, Reason.TOO_LARGE),
    ("cut off", CHAT, {}, b'{"messages": [', {}, Reason.BAD_JSON),
    ("not UTF-8", CHAT, {}, b'{"model": "\xff"}', {}, Reason.BAD_JSON),
    ("nested beyond recursion", CHAT, {}, b'{"a":' + b"[" * 200_000, {}, Reason.BAD_JSON),
    ("a list", CHAT, {}, b"[1]", {}, Reason.BAD_REQUEST),
    ("a string", CHAT, {}, b'"x"', {}, Reason.BAD_REQUEST),
    ("null", CHAT, {}, b"null", {}, Reason.BAD_REQUEST),
    ("model is a number", CHAT, {}, b'{"model": 1}', {}, Reason.BAD_REQUEST),
    ("query string", CHAT + "?api-version=1", {}, b"{}", {}, None),
    ("NaN", CHAT, {}, b'{"temperature": NaN}', {}, None),
    ("lone surrogate", CHAT, {}, b'{"user": "\\ud800"}', {}, None),
    ("integer of a thousand digits", CHAT, {}, b'{"seed": ' + b"9" * 1000 + b"}", {}, None),
]


@pytest.mark.parametrize(("what", "path", "headers", "body", "more", "expected"), PARSE, ids=[row[0] for row in PARSE])
def test_parse_body(
    what: str, path: str, headers: dict[str, str], body: bytes, more: dict[str, Any], expected: Reason | None
) -> None:
    result = parse_body(path, headers, body, **more)
    assert (result.reason if isinstance(result, Unscored) else None) == expected


MODELS = [({"model": "m"}, "m"), ({}, None), ({"model": None}, None), ({"model": ""}, None)]


@pytest.mark.parametrize(("fields", "model"), MODELS)
def test_model(fields: dict[str, Any], model: str | None) -> None:
    assert parsed(CHAT, fields).model == model


def test_duplicate_keys_last_wins() -> None:
    assert parsed(CHAT, b'{"model": "a", "model": "b"}').model == "b"


ROUTES = [
    ("/v1/chat/completions", True),
    ("/openai/v1/chat/completions?x=1", True),
    ("/openai/deep/v1/completions", True),
    ("/openaiv1/completions", False),
    ("/other/v1/completions", False),
    ("/llm", True),
    ("/openai/llm", True),
    ("/v1/chat/completions/", False),
]


@pytest.mark.parametrize(("path", "known"), ROUTES)
def test_base_paths_and_rewrites(path: str, known: bool) -> None:
    routes = Routes(bases=("/openai/", "/openai/deep"), rewrites={"/llm": CHAT})
    assert (routes.endpoint(path) is not None) == known


CHAT_REASONS = [
    ("no messages", {}, Reason.BAD_REQUEST),
    ("messages empty", {"messages": []}, Reason.BAD_REQUEST),
    ("messages a string", {"messages": "hi"}, Reason.BAD_REQUEST),
    ("messages null", {"messages": None}, Reason.BAD_REQUEST),
    ("tools empty", {"messages": U, "tools": []}, Reason.BAD_REQUEST),
    ("tools null", {"messages": U, "tools": None}, None),
    ("tool without function", {"messages": U, "tools": [{"type": "function"}]}, Reason.BAD_REQUEST),
    ("tool of another type", {"messages": U, "tools": [{"type": "w", "function": {"name": "f"}}]}, Reason.BAD_REQUEST),
    ("tool without name", {"messages": U, "tools": [{"function": {}}]}, Reason.BAD_REQUEST),
    ("tool parameters", {"messages": U, "tools": [{"function": {"name": "f", "parameters": 1}}]}, Reason.BAD_REQUEST),
    ("continue", {"messages": U, "continue_final_message": True, "add_generation_prompt": False}, None),
    ("add_generation_prompt null", {"messages": U, "add_generation_prompt": None}, Reason.BAD_REQUEST),
    ("kwargs a list", {"messages": U, "chat_template_kwargs": []}, Reason.BAD_REQUEST),
    ("documents of strings", {"messages": U, "documents": ["x"]}, Reason.BAD_REQUEST),
    ("reasoning_effort a number", {"messages": U, "reasoning_effort": 1}, Reason.BAD_REQUEST),
    ("truncate a string", {"messages": U, "truncate_prompt_tokens": "5"}, Reason.BAD_REQUEST),
    ("truncate true", {"messages": U, "truncate_prompt_tokens": True}, Reason.BAD_REQUEST),
    ("truncate -2", {"messages": U, "truncate_prompt_tokens": -2}, Reason.BAD_REQUEST),
    ("side", {"messages": U, "truncation_side": "middle"}, Reason.BAD_REQUEST),
    ("salt empty", {"messages": U, "cache_salt": ""}, Reason.BAD_REQUEST),
    ("salt a number", {"messages": U, "cache_salt": 1}, Reason.BAD_REQUEST),
    ("salt too long", {"messages": U, "cache_salt": "s" * 1025}, Reason.BAD_REQUEST),
    ("salt", {"messages": U, "cache_salt": "s" * 1024}, None),
    ("unknown field", {"messages": U, "frobnicate": {"a": [1]}}, None),
]


@pytest.mark.parametrize(("what", "body", "expected"), CHAT_REASONS, ids=[row[0] for row in CHAT_REASONS])
def test_chat_reasons(what: str, body: dict[str, Any], expected: Reason | None) -> None:
    assert reason(CHAT, body) == expected


PROMPTS = [
    ("text", {"prompt": "a"}, "a"),
    ("ids", {"prompt": [1, 2]}, [1, 2]),
    ("one text in a list", {"prompt": ["a"]}, "a"),
    ("one list of ids", {"prompt": [[1, 2]]}, [1, 2]),
    ("one id", {"prompt": [7]}, [7]),
    ("several texts", {"prompt": ["a", "b"]}, Reason.BATCH),
    ("several lists", {"prompt": [[1], [2]]}, Reason.BATCH),
    ("empty text", {"prompt": ""}, Reason.BAD_REQUEST),
    ("empty list", {"prompt": []}, Reason.BAD_REQUEST),
    ("a list with an empty text", {"prompt": [""]}, Reason.BAD_REQUEST),
    ("null", {"prompt": None}, Reason.BAD_REQUEST),
    ("absent", {}, Reason.BAD_REQUEST),
    ("negative id", {"prompt": [1, -1]}, Reason.BAD_REQUEST),
    ("bool among ids", {"prompt": [1, True]}, Reason.BAD_REQUEST),
    ("float among ids", {"prompt": [1, 2.0]}, Reason.BAD_REQUEST),
    ("id over 32 bits", {"prompt": [1 << 32]}, Reason.BAD_REQUEST),
    ("object", {"prompt": {"a": 1}}, Reason.BAD_REQUEST),
    ("embeds", {"prompt_embeds": "AAAA"}, Reason.EMBEDS),
    ("suffix", {"prompt": "a", "suffix": "b"}, Reason.BAD_REQUEST),
]


@pytest.mark.parametrize(("what", "body", "expected"), PROMPTS, ids=[row[0] for row in PROMPTS])
def test_completion_prompts(what: str, body: dict[str, Any], expected: Any) -> None:
    request = read(parsed(COMPLETIONS, body))
    if isinstance(request, TextRequest):
        assert request.text == expected
        assert request.add_special_tokens, "on by default for completions"
    elif isinstance(request, IdsRequest):
        assert request.ids == expected
    else:
        assert isinstance(request, Unscored)
        assert request.reason == expected


IMAGE = {"type": "image_url", "image_url": {"url": "data:,x"}}
FORWARDED = [
    ({"kv_transfer_params": {"prompt_token_ids": [1, 2]}}, [1, 2]),
    ({"kv_transfer_params": {"prompt_token_ids": [1, 2]}, "echo": True}, None),
    ({"kv_transfer_params": {"prompt_token_ids": None}}, None),
    ({"kv_transfer_params": {"prompt_token_ids": []}}, Reason.BAD_REQUEST),
    ({"kv_transfer_params": {"prompt_token_ids": [True]}}, Reason.BAD_REQUEST),
    ({"kv_transfer_params": {"prompt_token_ids": [1]}, "messages": [{"role": "user", "content": [IMAGE]}]}, None),
    ({"kv_transfer_params": "x"}, None),
]


@pytest.mark.parametrize(("fields", "expected"), FORWARDED)
def test_ids_forwarded_by_the_prefill_side(fields: dict[str, Any], expected: Any) -> None:
    request = read(parsed(CHAT, {"messages": U, "cache_salt": "s", **fields}))
    if isinstance(request, IdsRequest):
        assert request.ids == expected
        assert request.salt == "s"
    elif isinstance(request, Unscored):
        assert request.reason == expected
    else:
        assert expected is None


VARIABLES = [
    ({}, {}, {}),
    ({"chat_template_kwargs": {"a": 1, "b": None, "c": "auto", "d": False}}, {"a": 1, "d": False}, {}),
    ({"reasoning_effort": "high"}, {}, {"reasoning_effort": "high", "enable_thinking": True}),
    ({"reasoning_effort": "none"}, {}, {"reasoning_effort": "none", "enable_thinking": False}),
    (
        {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
        {"enable_thinking": True},
        {"reasoning_effort": "none"},
    ),
    ({"documents": [{"text": "x"}]}, {}, {"documents": [{"text": "x"}]}),
]


@pytest.mark.parametrize(("fields", "variables", "overrides"), VARIABLES)
def test_template_variables(fields: dict[str, Any], variables: dict[str, Any], overrides: dict[str, Any]) -> None:
    request = read(parsed(CHAT, {"messages": U, **fields}))
    assert isinstance(request, ChatRequest)
    assert (request.variables, request.overrides) == (variables, overrides)


READS_CACHE = [
    (CHAT, {}, True),
    (CHAT, {"echo": True}, False),
    (CHAT, {"prompt_logprobs": 0}, False),
    (COMPLETIONS, {"echo": True}, True),
    (COMPLETIONS, {"echo": True, "logprobs": 1}, False),
    (COMPLETIONS, {"prompt_logprobs": 1}, False),
]


@pytest.mark.parametrize(("path", "fields", "expected"), READS_CACHE)
def test_requests_for_which_the_engine_does_not_read_its_cache(
    path: str, fields: dict[str, Any], expected: bool
) -> None:
    request = read(parsed(path, {"messages": U, "prompt": "a", **fields}))
    assert not isinstance(request, Unscored)
    assert request.reads_cache is expected


HUGE = [
    b'{"messages": [{"role": "user"}], "tools": [{"function": {"name": "f", "parameters": {"max": %d}}}]}',
    b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [%d]}}}]}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": %d}}',
    b'{"messages": [{"role": "developer", "content": "x", "tools": [{"function": {"parameters": {"max": %d}}}]}]}',
    b'{"messages": [{"role": "tool", "content": "x", "tool_call_id": %d}]}',
]


@pytest.mark.parametrize("body", HUGE)
def test_integers_beyond_64_bits_stay_integers_where_a_template_prints_them(body: bytes) -> None:
    number = 12345678901234567890123
    assert json.dumps(number) in json.dumps(parsed(CHAT, body % number).fields)


def test_no_request_text_in_reprs() -> None:
    secret = "my-secret-text"
    body = {
        "messages": [{"role": "user", "content": secret}], "tools": [{"function": {"name": secret}}], "user": secret,
        "chat_template": secret, "chat_template_kwargs": {"x": secret}, "documents": [{"text": secret}],
    }  # fmt: skip
    assert secret not in repr(parsed(CHAT, body)) + repr(read(parsed(CHAT, body)))
    assert secret not in repr(read(parsed(COMPLETIONS, {"prompt": secret})))


def mutate(rng: random.Random, value: Any) -> Any:
    junk: list[Any] = [["x"], {"x": []}]
    junk += [None, True, -1, 1.5, "x", [], {}, [None], {"type": "text"}, {"role": 1}, "\ud800", 1 << 70]
    if rng.random() < 0.15:
        return rng.choice(junk)
    if isinstance(value, dict):
        return {key: mutate(rng, item) for key, item in value.items() if rng.random() > 0.05}
    if isinstance(value, list):
        return [mutate(rng, item) for item in value]
    return value


def test_mutated_bodies_never_raise() -> None:
    rng = random.Random(7)
    base = {
        "model": "m", "prompt": "a", "cache_salt": "s", "truncate_prompt_tokens": 5, "reasoning_effort": "low",
        "messages": [*U, {"role": "assistant", "content": [{"type": "text", "text": "a"}],
                          "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}],
        "chat_template_kwargs": {"a": 1}, "documents": [{"text": "x"}], "kv_transfer_params": {"a": 1}, "input": "x",
    }  # fmt: skip
    outcomes = set()
    for _ in range(1500):
        body = mutate(rng, base)
        for path in (CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize", "/generate"):
            result = parse_body(path, {}, json.dumps(body).encode())
            outcomes.add(type(read(result) if isinstance(result, Body) else result))
    assert {ChatRequest, TextRequest, Unscored} <= outcomes


X = "put here what cannot be a key"
ANTHROPIC = "/v1/messages"
UNHASHABLE = [["x"], {"x": 1}, [], {}, [["x"]]]
KEYS = [
    # what a client names and we look up: tools, types, roles, fields of a choice
    (ANTHROPIC, {"messages": [{"role": "system", "content": [{"type": "tool_addition", "tool": {"name": X}}]}, *U]}),
    (ANTHROPIC, {"messages": [{"role": "system", "content": [{"type": "tool_removal", "tool": {"name": X}}]}, *U]}),
    (ANTHROPIC, {"messages": [{"role": "system", "content": [
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {"name": X, "input_schema": {}}}}
    ]}, *U]}),
    (ANTHROPIC, {"messages": [{"role": "system", "content": [
        {"type": "tool_removal", "tool": {"type": "tool_definition", "definition": {"name": X, "input_schema": {}}}}
    ]}, *U]}),
    (ANTHROPIC, {"tools": [{"name": X, "input_schema": {}}], "messages": [
        {"role": "system", "content": [{"type": "tool_addition", "tool": {"name": "x"}}]}, *U
    ]}),
    (ANTHROPIC, {"messages": [{"role": "system", "content": [{"type": X, "tool": {"name": "x"}}]}, *U]}),
    (ANTHROPIC, {"messages": [{"role": "system", "content": [{"type": "tool_addition", "tool": {"type": X}}]}, *U]}),
    (ANTHROPIC, {"messages": [{"role": X, "content": "a"}]}),
    (ANTHROPIC, {"messages": [{"role": "user", "content": [{"type": X}]}]}),
    (ANTHROPIC, {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": X}]}]}]}),
    (ANTHROPIC, {"messages": U, "tool_choice": {"type": X}}),
    (ANTHROPIC, {"messages": U, "thinking": {"type": X}}),
    (ANTHROPIC, {"messages": U, "output_config": {"effort": X}}),
    (CHAT, {"messages": [{"role": X, "content": "a"}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": X, "text": "a"}]}]}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"type": X, "function": {"name": "f"}}]}]}),
    (CHAT, {"messages": U, "tools": [{"type": X, "function": {"name": "f"}}]}),
    (CHAT, {"messages": U, "tools": [{"type": "function", "function": {"name": X}}]}),
    (CHAT, {"messages": U, "tool_choice": X}),
    (CHAT, {"messages": U, "reasoning_effort": X}),
    (CHAT, {"messages": U, "truncation_side": X}),
    (CHAT, {"messages": U, "cache_salt": X}),
    (CHAT, {"messages": U, "chat_template_kwargs": {"a": X}}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": X}]}], "kv_transfer_params": {"prompt_token_ids": [1]}}),
    ("/v1/embeddings", {"input": "a", "padding": X}),
    ("/v1/responses", {"input": [{"type": X, "role": "user", "content": "a"}]}),
    ("/v1/responses", {"input": [{"role": X, "content": "a"}]}),
    ("/v1/responses", {"input": [{"role": "assistant", "content": "a", "status": X}]}),
    ("/v1/responses", {"input": "a", "truncation": X}),
    ("/v1/responses", {"input": "a", "tools": [{"type": X, "name": "f"}]}),
    ("/v1/responses", {"input": [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": X}
    ]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields"), KEYS, ids=str)
def test_values_that_cannot_be_keys_never_raise(path: str, fields: dict[str, Any]) -> None:
    text = json.dumps({"model": "m", "max_tokens": 1, **fields})
    assert json.dumps(X) in text
    for value in UNHASHABLE:
        result = parse_body(path, {}, text.replace(json.dumps(X), json.dumps(value)).encode())
        assert isinstance(result, Body)
        read(result)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "xllm"])
async def test_values_that_cannot_be_keys_are_no_fault_of_ours(engine: Any) -> None:
    """The same through rendering, with a template that makes keys of what it is given."""
    template = "{% for m in messages %}{{ {m.role: m.content} }}{% endfor %}{{ tools | tojson }}"
    options = Options(tokenizer=str(SMALL), models=("m",), engine=engine, timeout=60.0, chat_template=template)
    subject = Prompter.load(options)
    for path, fields in KEYS:
        text = json.dumps({"model": "m", "max_tokens": 1, **fields})
        for value in UNHASHABLE:
            found = await prompt_of(subject, path, text.replace(json.dumps(X), json.dumps(value)).encode())
            assert not (isinstance(found, Unscored) and found.reason == Reason.INTERNAL), (path, fields, value)


def test_random_bytes_never_raise() -> None:
    rng = random.Random(8)
    good = json.dumps({"model": "m", "messages": U, "tools": None, "n": 1.5e3}).encode()
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        result = parse_body(CHAT, {}, bytes(data))
        if isinstance(result, Body):
            read(result)
