"""Media end the comparable prefix: what stands before them keeps its keys, nothing behind them has any."""

from __future__ import annotations

import json
from typing import Any

import pytest

from extproc.prompt import Prompt, Prompter
from extproc.reasons import Reason, Unscored
from tests.tokenizers import prompt_of, prompter

SYSTEM = {"role": "system", "content": "You describe pictures. " * 20}
FIRST = {"role": "user", "content": "What can you see on pictures? " * 5}
ANSWER = {"role": "assistant", "content": "Whatever is on them. " * 5}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
PICTURE = {"role": "user", "content": [{"type": "text", "text": "And here?"}, IMAGE]}


async def outcome(subject: Prompter, body: dict[str, Any], path: str = "/v1/chat/completions") -> Prompt | Reason:
    found = await prompt_of(subject, path, json.dumps(body).encode())
    return found.reason if isinstance(found, Unscored) else found


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "llama3_1"])
async def test_the_prefix_has_the_keys_of_the_same_chat_without_media(family: str) -> None:
    subject = prompter(family)
    plain = await outcome(subject, {"messages": [SYSTEM, FIRST, ANSWER, {"role": "user", "content": "And here?"}]})
    media = await outcome(subject, {"messages": [SYSTEM, FIRST, ANSWER, PICTURE]})
    assert isinstance(plain, Prompt)
    assert isinstance(media, Prompt)
    assert media.partial
    assert not plain.partial
    assert plain.tokens.startswith(media.tokens)
    assert len(media.tokens) > 4 * 100
    assert media.count > len(media.tokens) // 4
    keys = subject.keys(media, 16)
    assert keys == subject.keys(plain, 16)[: len(keys)]
    assert len(keys) == len(media.tokens) // 64


async def test_what_stands_behind_media_does_not_count() -> None:
    subject = prompter("qwen3")
    first = await outcome(subject, {"messages": [SYSTEM, FIRST, ANSWER, PICTURE]})
    more = await outcome(subject, {"messages": [SYSTEM, FIRST, ANSWER, PICTURE, ANSWER, FIRST, ANSWER, PICTURE]})
    assert isinstance(first, Prompt)
    assert isinstance(more, Prompt)
    assert first.tokens == more.tokens
    assert more.count > first.count


UNSCORED = [
    ("media in the first message", {"messages": [PICTURE]}),
    ("hardly any text before", {"messages": [{"role": "system", "content": "Hi"}, PICTURE]}),
    ("truncated", {"messages": [SYSTEM, PICTURE], "truncate_prompt_tokens": 50}),
    ("with special tokens", {"messages": [SYSTEM, PICTURE], "add_special_tokens": True}),
]


@pytest.mark.parametrize(("what", "body"), UNSCORED, ids=[row[0] for row in UNSCORED])
async def test_unscored(what: str, body: dict[str, Any]) -> None:
    assert await outcome(prompter("qwen3"), body) == Reason.MULTIMODAL


async def test_without_cutting_there_is_no_prefix() -> None:
    subject = prompter("qwen3", incremental=False)
    assert await outcome(subject, {"messages": [SYSTEM, PICTURE]}) == Reason.MULTIMODAL


async def test_other_endpoints() -> None:
    subject = prompter("qwen3")
    chat = await outcome(subject, {"messages": [SYSTEM, FIRST, ANSWER, PICTURE]})
    assert isinstance(chat, Prompt)
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    messages = [FIRST, ANSWER, {"role": "user", "content": [block]}]
    body = {"system": SYSTEM["content"], "messages": messages, "max_tokens": 1}
    anthropic = await outcome(subject, body, "/v1/messages")
    assert isinstance(anthropic, Prompt)
    assert anthropic.tokens == chat.tokens
