"""Token ids against those that real vLLM engines used: the captured requests, and the small tokenizer's cases."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from extproc.prompt import Options, Prompt, Prompter
from extproc.reasons import Reason, Unscored
from kvindex.hashing import content_keys, extras_bytes, root_bytes
from tests.tokenizers import SMALL, prompt_of, prompter

DATA = Path(__file__).parent.parent / "data"
CAPTURES = [("qwen3", "qwen3"), ("llama", "llama3_1"), ("gemma3", "gemma3")]
# The captured engine trusted request templates and had a context of 1024 tokens.
ENGINE: dict[str, Any] = {"trust_request_chat_template": True, "max_model_len": 1024}
REFUSED = (Reason.BAD_REQUEST, Reason.TEMPLATE_ERROR)


def rows(name: str, kind: str = "tokens") -> list[dict[str, Any]]:
    lines = (DATA / "captures" / f"{kind}_{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "meta" not in row]


@pytest.mark.parametrize(("name", "family"), CAPTURES)
async def test_ids_are_the_engines(name: str, family: str) -> None:
    subject = prompter(family, **ENGINE)
    assert subject.incremental
    answered = refused = 0
    for row in rows(name):
        path = "/v1/chat/completions" if "messages" in row["body"] else "/v1/completions"
        for _ in range(2):  # the second time from the caches
            result = await prompt_of(subject, path, json.dumps(row["body"]).encode())
            if row["http"] != 200:
                assert isinstance(result, Unscored), row["case"]
                assert result.reason in REFUSED, row["case"]
                refused += 1
                continue
            assert isinstance(result, Prompt), (row["case"], result)
            assert result.ids == row["engine_ids"], row["case"]
            if row.get("prompt_text") is not None:
                assert result.text == row["prompt_text"], row["case"]
            if row.get("n") is not None:
                assert result.count == row["n"], row["case"]
            answered += 1
    assert answered == 2 * sum(row["http"] == 200 for row in rows(name)) > 90
    assert refused == 2 * sum(row["http"] != 200 for row in rows(name)) > 0


@pytest.mark.parametrize(("name", "family"), CAPTURES)
async def test_ids_are_those_of_the_engines_render_endpoints(name: str, family: str) -> None:
    """Random bodies of /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages."""
    subject = prompter(family, **ENGINE)
    answered: dict[str, int] = {}
    for row in rows(name, "render"):
        result = await prompt_of(subject, row["path"], json.dumps(row["body"]).encode())
        if row["http"] == 200:
            assert isinstance(result, Prompt), (row["case"], result)
            assert result.ids == row["engine_ids"], row["case"]
            answered[row["path"]] = answered.get(row["path"], 0) + 1
        elif isinstance(result, Unscored):
            assert result.reason in REFUSED, row["case"]
    assert len(answered) == 4
    assert min(answered.values()) >= 9


@lru_cache
def small(**options: Any) -> Prompter:
    return Prompter.load(Options(tokenizer=str(SMALL), **{"models": ("m",), "timeout": 30.0, **options}))


CASES = json.loads((SMALL / "cases.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES["cases"], ids=lambda case: case["id"])
async def test_cases(case: dict[str, Any]) -> None:
    result = await prompt_of(small(), case["path"], json.dumps(case["body"]).encode())
    assert isinstance(result, Prompt)
    assert result.ids == case["expect_ids"]


NEGATIVE = {"T22": Reason.BAD_REQUEST, "T24": Reason.MULTIMODAL, "T26": Reason.MODEL, "T28": Reason.BAD_REQUEST}


@pytest.mark.parametrize("case", [case for case in CASES["negative"] if case["id"] in NEGATIVE], ids=lambda c: c["id"])
async def test_negative_cases(case: dict[str, Any]) -> None:
    result = await prompt_of(small(), case.get("path", "/v1/chat/completions"), json.dumps(case["body"]).encode())
    assert isinstance(result, Unscored)
    assert result.reason == NEGATIVE[case["id"]]


# The small tokenizer has one token a byte (`a` is 64, `b` 65) and puts 256 before a text with special tokens.
COMPLETIONS = [
    ("text", {"prompt": "ab"}, [256, 64, 65]),
    ("text without special tokens", {"prompt": "ab", "add_special_tokens": False}, [64, 65]),
    ("ids", {"prompt": [1, 2, 3]}, [1, 2, 3]),
    ("keep the last", {"prompt": [1, 2, 3], "truncate_prompt_tokens": 2}, [2, 3]),
    ("keep the first", {"prompt": [1, 2, 3], "truncate_prompt_tokens": 2, "truncation_side": "right"}, [1, 2]),
    ("longer than the prompt", {"prompt": [1, 2, 3], "truncate_prompt_tokens": 5}, [1, 2, 3]),
    ("-1, short", {"prompt": [1, 2, 3], "truncate_prompt_tokens": -1}, [1, 2, 3]),
    ("-1, long", {"prompt": [1] * 9, "truncate_prompt_tokens": -1, "max_tokens": 3}, [1] * 7),
    ("-1, long, no output", {"prompt": [1] * 9, "truncate_prompt_tokens": -1}, [1] * 8),
    ("over the model's length", {"prompt": [1], "truncate_prompt_tokens": 9}, Reason.BAD_REQUEST),
    ("0", {"prompt": [1], "truncate_prompt_tokens": 0}, Reason.BAD_REQUEST),
    ("too long, not truncated", {"prompt": [1] * 9}, [1] * 9),
    ("outside the vocabulary", {"prompt": [263]}, Reason.BAD_REQUEST),
    ("lone surrogate", {"prompt": "\ud800"}, Reason.BAD_REQUEST),
]


@pytest.mark.parametrize(("what", "body", "expected"), COMPLETIONS, ids=[row[0] for row in COMPLETIONS])
async def test_completions(what: str, body: dict[str, Any], expected: list[int] | Reason) -> None:
    result = await prompt_of(small(max_model_len=8), "/v1/completions", json.dumps(body).encode())
    assert (result.reason if isinstance(result, Unscored) else result.ids) == expected


async def test_the_tokenizers_own_cut_keeps_its_bos() -> None:
    """Without truncation_side the engine lets the tokenizer cut: special ids stay (transformers 5.19, Llama 3.1)."""
    subject = prompter("llama3_1")
    body = {"prompt": "Hello world how are you", "truncate_prompt_tokens": 3}
    expected = [("left", [1268, 527, 499]), ("right", [128000, 9906, 1917]), (None, [128000, 527, 499])]
    for side, ids in expected:
        result = await prompt_of(subject, "/v1/completions", json.dumps({**body, "truncation_side": side}).encode())
        assert isinstance(result, Prompt)
        assert result.ids == ids


MODELS = [
    ({"model": "m"}, "m", None),
    ({"model": "alias"}, "alias", None),
    ({}, "m", None),
    ({"model": "ada"}, "ada", "ada"),
    ({"model": "request-name"}, "request-name", "lora-name"),
]


@pytest.mark.parametrize(("fields", "model", "adapter"), MODELS)
@pytest.mark.parametrize("salt", [None, "s"])
async def test_models_adapters_salts_and_keys(
    fields: dict[str, Any], model: str, adapter: str | None, salt: str | None
) -> None:
    subject = Prompter.load(
        Options(
            tokenizer=str(SMALL),
            models=("m", "alias"),
            adapters={"ada": "ada", "request-name": "lora-name"},
            timeout=30.0,
        )
    )
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "abcdefghijkl"}], **fields}
    if salt:
        body["cache_salt"] = salt
    for path, more in (("/v1/chat/completions", {}), ("/v1/completions", {"prompt": list(range(20))})):
        prompt = await prompt_of(subject, path, json.dumps({**body, **more}).encode())
        assert isinstance(prompt, Prompt)
        assert (prompt.model, prompt.adapter, prompt.salt) == (model, adapter, salt)
        extras = [extras_bytes([salt])] if salt else None
        expected = content_keys(prompt.tokens, 4, root=root_bytes(adapter), extras=extras)
        assert subject.keys(prompt, 4) == expected != []
        assert subject.keys(prompt, 4, limit=1) == expected[:1]
        assert subject.keys(prompt, 4, seed=7) == content_keys(
            prompt.tokens, 4, root=root_bytes(adapter), extras=extras, seed=7
        )


async def test_special_tokens_of_chat_and_completion_are_kept_apart() -> None:
    """The same text with and without BOS, in both orders: a cache must not mix them up."""
    subject = prompter("llama3_1")
    for text in ("Hello world", "a <|eot_id|> b " * 20):
        seen = []
        for special in (True, False, True, False):
            body = {"prompt": text, "add_special_tokens": special}
            result = await prompt_of(subject, "/v1/completions", json.dumps(body).encode())
            assert isinstance(result, Prompt)
            seen.append(result.ids)
        assert seen[0] == seen[2] == [128000, *seen[1]]
        assert seen[1] == seen[3]


async def test_short_prompts_are_scored_and_counted() -> None:
    subject = Prompter.load(Options(tokenizer=str(SMALL), models=("m",), timeout=30))
    prompt = await prompt_of(subject, "/v1/completions", b'{"prompt": [1, 2, 3]}')
    assert isinstance(prompt, Prompt)
    assert subject.keys(prompt, 4) == []
    assert subject.stats.short_prompts == 1


async def test_without_a_tokenizer_ids_are_still_scored() -> None:
    subject = Prompter.load(Options(tokenizer="./no/such/place", models=("m",)), strict=False)
    assert isinstance(await prompt_of(subject, "/v1/completions", b'{"prompt": [1, 2, 3]}'), Prompt)
    result = await prompt_of(subject, "/v1/completions", b'{"prompt": "a"}')
    assert isinstance(result, Unscored)
    assert result.reason == Reason.NO_TOKENIZER
