"""Start-up check of the cutting rule on the tokenizer as it is: pieces and whole encode must give the same ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from extproc.prompt.segments import Cutter
from kvindex.hashing import pack_tokens

# Neighbours of a delimiter that tokenizers treat specially: white space, letters, digits, marks, other scripts.
NEIGHBOURS = (
    "", "a", " a", "a ", "\n", "\n\n", "  ", "\t x", "user\n", "Hello, what's up?", "12345", "é", "e\u0301", "你好",
    "שלום", "🙂👩‍👩‍👧", "_", "'s", "▁", "Ġ", "<", "|>", "\u00a0x", "\u200b", "{}[]\"", "\r\nline",
)  # fmt: skip

Encode = Callable[[Sequence[str], bool], list[bytes]]


def probe_texts(delimiters: Sequence[str]) -> list[str]:
    """Texts that set every neighbour before and after delimiters, ending and beginning with one too."""
    texts = []
    for index, word in enumerate(delimiters):
        other = delimiters[(index + 1) % len(delimiters)]
        for shift in range(3):
            around = NEIGHBOURS[shift:] + NEIGHBOURS[:shift]
            texts.append("".join(f"{left}{word if place % 3 else other}" for place, left in enumerate(around)))
        texts.append(word + word + "x" + word)
    return texts


def pieces_agree(encode: Encode, delimiters: Sequence[str], around: tuple[Sequence[int], Sequence[int]] | None) -> bool:
    """True if all probe texts agree. Blocking, some 10 to 50 ms. Raises nothing: failing to encode is no agreement."""
    cutter = Cutter(delimiters, min_piece=1)
    texts = probe_texts(delimiters)
    pieces = [cutter.cut(text) for text in texts]
    flat = [piece for cut in pieces for piece in cut]
    try:
        whole = encode(texts, False)
        special = encode(texts, True)
        parts = iter(encode(flat, False))
    except ValueError:
        return False
    joined = [b"".join(next(parts) for _ in cut) for cut in pieces]
    if whole != joined:
        return False
    if around is None:
        return True
    before, after = map(pack_tokens, around)
    return special == [before + ids + after for ids in joined]
