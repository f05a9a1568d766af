"""Late turns of long chats as ready bodies, and what engines that served the turns before hold of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from examples.local.stack import TOKENIZER
from extproc.openai import Body, parse_body
from extproc.prompt import Options, Prompt, Prompter
from extproc.prompt.prompter import templates_of
from extproc.prompt.tokenizer import load

MODEL, BLOCK = "demo", 16
PATH = "/v1/chat/completions"
WORDS = (
    "the train leaves from platform seven and the ticket costs less when it is bought early so please check the hours "
    "of the office before you travel and ask for a seat near the window if there is one left on that day "
).split()
TURNS = 40  # messages at the start
TOKENS_PER_WORD = 1.6  # of the demo's tokenizer


class Chats:
    """`count` conversations of about `tokens` tokens in 20 turns; every call of `turn` adds about 60 tokens to each.

    tokens[c]   token ids of conversation c as it is at the start
    """

    def __init__(self, count: int, tokens: int, seed: int = 7) -> None:
        self._rng = random.Random(seed)
        words = int(tokens / TOKENS_PER_WORD / 40)
        self.messages: list[list[dict[str, str]]] = []
        for number in range(count):
            system = f"You are assistant {number}. {self._text(words)}"
            chat = [{"role": "system", "content": system}]
            for turn in range(TURNS - 1):
                chat.append({"role": "assistant" if turn % 2 else "user", "content": self._text(words)})
            self.messages.append(chat)
        self.tokens = asyncio.run(self._encode())

    def _text(self, words: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=words))

    async def _encode(self) -> list[list[int]]:
        options = Options(tokenizer=str(TOKENIZER), models=(MODEL,), timeout=60.0, verify_every=0)
        loaded = load(str(TOKENIZER))
        prompter = Prompter(options, loaded, templates_of(options, loaded))
        out = []
        for body in self.bodies():
            parsed = parse_body(PATH, {}, body)
            assert isinstance(parsed, Body)
            prompt = await prompter.prompt_of(parsed)
            assert isinstance(prompt, Prompt), prompt
            out.append(list(prompt.ids))
        return out

    def bodies(self) -> list[bytes]:
        """The conversations as they are now."""
        return [orjson.dumps({"model": MODEL, "messages": chat, "max_tokens": 1}) for chat in self.messages]

    def begin_again(self) -> None:
        """Back to the turns of the start; those that follow will be others than before."""
        for chat in self.messages:
            del chat[TURNS:]

    def turn(self) -> list[bytes]:
        """The next turn of every conversation."""
        for chat in self.messages:
            chat.append({"role": "assistant", "content": self._text(20)})
            chat.append({"role": "user", "content": self._text(20)})
        return self.bodies()

    def stream(self) -> Iterator[bytes]:
        """Turns without end, one conversation after another."""
        while True:
            yield from self.turn()


def stored(ids: Sequence[int], rng: random.Random) -> list[Any]:
    """vLLM's event of an engine that has computed this prompt."""
    blocks = len(ids) // BLOCK
    hashes = [rng.getrandbits(63) for _ in range(blocks)]
    return ["BlockStored", hashes, None, list(ids[: blocks * BLOCK]), BLOCK, None, "GPU", None, None, 0,
            "full_attention", None]  # fmt: skip
