"""Text to ids and back, and the made-up answers of the emulated model.

The tokenizer is read with the `tokenizers` library alone, because importing transformers costs 1.5 s of CPU a process.
That is the same tokenizer only where transformers takes tokenizer.json as it is; for every other tokenizer class the
emulator falls back to `AutoTokenizer`, as vLLM does.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TAKEN_AS_IS = frozenset({"PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend"})
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TextModel:
    """A model's tokenizer and chat template.

    template   Jinja text, None = no chat
    specials   special tokens by name, as the template sees them
    """

    backend: Any
    template: str | None
    specials: dict[str, str]
    eos: int | None
    vocabulary: int

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids. Raises ValueError for text that has no UTF-8 form (lone surrogates)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError("the text cannot be encoded as UTF-8") from error
        (encoded,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated tokens, special tokens left out."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=True)
        return text

    def token(self, number: int) -> str:
        return str(self.backend.id_to_token(number))


def load(directory: Path) -> TextModel:
    """Read tokenizer.json, tokenizer_config.json and the chat template. Raises OSError or ValueError if it cannot."""
    config: dict[str, Any] = {}
    if (path := directory / "tokenizer_config.json").exists():
        config = json.loads(path.read_text(encoding="utf-8"))
    specials = {name: _content(config[name]) for name in SPECIAL_NAMES if config.get(name)}
    if str(config.get("tokenizer_class", "")).removesuffix("Fast") in {
        name.removesuffix("Fast") for name in TAKEN_AS_IS
    }:
        from tokenizers import Tokenizer

        backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    else:
        from transformers import AutoTokenizer

        backend = AutoTokenizer.from_pretrained(str(directory)).backend_tokenizer
    template = config.get("chat_template")
    if (path := directory / "chat_template.jinja").exists():
        template = path.read_text(encoding="utf-8")
    if isinstance(template, list):
        template = next((row["template"] for row in template if row.get("name") == "default"), None)
    eos = specials.get("eos_token")
    return TextModel(
        backend=backend,
        template=template,
        specials=specials,
        eos=backend.token_to_id(eos) if eos else None,
        vocabulary=backend.get_vocab_size(),
    )


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


WORDS = """
the of and to in is that it was for on are as with they at this from or have by one not but what all were when there
can use each which how if will up other about out many then them these so some would make like into time has look
two more write go see number way could people than first water been call who now find long down day did get come
made may part over new sound take only little work know place year live back give most very after thing our just
name good sentence great
"""


class Answers:
    """Deterministic answers: the same prompt and seed give the same tokens, on every instance.

    An answer is English-like text cut into the tokenizer's own ids, so that it is tokenized the same way again when a
    client sends it back in the next turn. It ends by itself after 24 to 96 tokens (with the end-of-sequence token),
    unless `endless`.
    """

    def __init__(self, text: TextModel, seed: int) -> None:
        self._text = text
        self._seed = seed
        self._words = WORDS.split()

    def start(self, prompt: Sequence[int], *, index: int = 0, endless: bool = False) -> Iterator[int]:
        """The answer to a prompt, token by token; never runs dry. `index` tells the n choices of a request apart."""
        digest = hashlib.sha256(struct.pack(f"<{len(prompt) + 2}q", self._seed, index, *prompt)).digest()
        rng = random.Random(digest)
        left = rng.randint(24, 96)
        capital = True
        prefix = ""
        while True:
            words = [rng.choice(self._words) for _ in range(rng.randint(5, 12))]
            if capital:
                words[0] = words[0].capitalize()
            line = prefix + " ".join(words) + "."
            prefix = " "
            for token in self._text.encode(line, add_special_tokens=False):
                if not endless and self._text.eos is not None:
                    if left == 0:
                        yield self._text.eos
                    left -= 1
                yield token
