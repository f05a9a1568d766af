"""Incremental ids equal whole-encode ids: real tokenizer families, random multilingual chats that grow by turns, with
tools, and with the text of special tokens inside what users write."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from extproc.openai import Body, ChatRequest, parse_body, read
from extproc.prompt import Prompt, Prompter
from extproc.prompt.probe import pieces_agree
from extproc.prompt.segments import Cutter, added_around, delimiters
from extproc.reasons import Refused
from tests.tokenizers import FAMILIES, loaded, prompt_of, prompter

TEXT = (
    "Hello, what's the weather in Paris? 你好，今天天气怎么样？ שלום עולם مرحبا بالعالم "
    "こんにちは世界 안녕하세요 Привет мир Γειά σου "
    "नमस्ते सारे संसार สวัสดีชาวโลก 🙂 👩‍👩‍👧 🇫🇷 e\u0301 ﬁ Å naïve coöperate 1234567890 3.14159 0x1F don't we'll I'D "
    "def f(x): return {'a': [1, 2]} <div class=\"x\">&amp;</div> https://example.org/?q=1&r=2 |> <| |im_start|> < s > "
    "\u200b \ufeff \u00a0 \u3000 ▁ Ġ Ċ _ __ '''"
)
WORDS = TEXT.split(" ")
# its engine renders chats by code, so the package has no template
TEMPLATES = {
    "gptoss": "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{{ m.tool_calls | tojson if m.tool_calls }}"
    "<|end|>{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}<|start|>assistant"
}
SPACES = [" ", "  ", "\n", "\n\n", "\t", " \n ", "", "\r\n", "\u00a0"]


def words(rng: random.Random, special: list[str]) -> str:
    parts = []
    for _ in range(rng.randint(0, 25)):
        parts.append(rng.choice(special) if special and rng.random() < 0.08 else rng.choice(WORDS))
        parts.append(rng.choice(SPACES))
    return "".join(parts)


def chat(rng: random.Random, special: list[str], *, tools: bool) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.6:
        messages.append({"role": "system", "content": words(rng, special)})
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": words(rng, special)})
        if tools and rng.random() < 0.3:
            arguments = json.dumps({"q": words(rng, special)})
            call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": "c", "content": words(rng, special)})
        messages.append({"role": "assistant", "content": words(rng, special)})
    messages.append({"role": "user", "content": words(rng, special)})
    body: dict[str, Any] = {"messages": messages}
    if tools:
        schema = {"type": "object", "properties": {words(rng, []): {"type": "string"}}}
        body["tools"] = [{"type": "function", "function": {"name": "f", "description": "é", "parameters": schema}}]
    return body


def rendered(subject: Prompter, body: dict[str, Any]) -> str | None:
    parsed = parse_body("/v1/chat/completions", {}, json.dumps(body).encode())
    assert isinstance(parsed, Body)
    request = read(parsed)
    assert isinstance(request, ChatRequest)
    try:
        return subject.render(request)
    except Refused:  # a template without tools
        return None


@pytest.mark.parametrize("family", FAMILIES)
def test_incremental_ids_are_the_whole_encodes(family: str) -> None:
    rng = random.Random(sum(map(ord, family)))
    tokenizer = loaded(family)
    subject = prompter(family, chat_template=TEMPLATES.get(family))
    assert subject.incremental
    safe = list(delimiters(tokenizer.config))
    special = rng.sample(safe, min(len(safe), 12)) + list(subject.delimiters)
    special += ["<|im_end|>", "<eos>", "</s>", "<|eot_id|>", "<|channel|>"]
    texts = []
    for _ in range(15):
        text = rendered(subject, chat(rng, special, tools=True)) or rendered(subject, chat(rng, special, tools=False))
        texts.append(text or words(rng, special))
        texts.append(words(rng, special))
    whole = tokenizer.encode(texts, False)
    for cutter in (
        Cutter(subject.delimiters),
        Cutter(subject.delimiters, min_piece=1),
        Cutter(safe[:100], min_piece=1),
        Cutter(rng.sample(safe, min(len(safe), 5)), min_piece=20),
    ):
        pieces = [cutter.cut(text) for text in texts]
        parts = iter(tokenizer.encode([piece for cut in pieces for piece in cut], False))
        for text, cut, ids in zip(texts, pieces, whole, strict=True):
            assert b"".join(next(parts) for _ in cut) == ids, (cutter.delimiters[:9], text)
    around = added_around(tokenizer.config)
    assert around is not None
    assert pieces_agree(tokenizer.encode, safe[:24], around)


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_growing_chat_through_the_prompter(family: str) -> None:
    """Turn by turn, each a prefix of the next, caches warm: the ids of the whole text, and mostly known pieces."""
    rng = random.Random(4)
    tokenizer = loaded(family)
    subject = prompter(family, chat_template=TEMPLATES.get(family))
    messages: list[dict[str, Any]] = []
    for turn in range(8):
        messages.append({"role": "user", "content": f"{turn} {words(rng, list(subject.delimiters))}"})
        body = json.dumps({"messages": messages}).encode()
        prompt = await prompt_of(subject, "/v1/chat/completions", body)
        assert isinstance(prompt, Prompt)
        assert prompt.text is not None
        assert [prompt.tokens] == tokenizer.encode([prompt.text], False)
        messages.append({"role": "assistant", "content": words(rng, [])})
    stats = subject.stats
    assert stats.known_pieces > stats.new_pieces / 2
    assert stats.mismatches == 0
