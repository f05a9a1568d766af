"""Exact incremental tokenization: cut a text so that the pieces, encoded alone, give the ids of the whole.

The text is cut before occurrences of a delimiter, each piece keeps its leading delimiter, and the concatenated ids
equal the whole encode exactly if the delimiter d satisfies the rule below (`delimiters`). A chat that grows by a turn
then encodes only the new turn. Pure: the encoding itself is somebody else's.

The rule, for an added token d of the tokenizer:
  1. lstrip, rstrip and single_word are false: finding d depends on d alone
  2. d is not normalized, or the normalizer is the identity: d is found in the text as it stands
  3. d has no white space at its ends: no neighbour with lstrip or rstrip can eat into it
  4. d and no other added token overlap (neither contains the other, no end of one begins the other), nor d and itself:
     every occurrence in the text is found as d
  5. if any added token is single_word, d begins and ends with an ASCII character that is no word character: the end of
     a piece and d look alike to such a neighbour
  6. the tokenizer neither truncates nor pads, and its model drops no merges at random
A piece without its leading delimiter would be wrong: a tokenizer may treat the start of its input specially (Metaspace
with prepend scheme "first").
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, pairwise
from typing import Any

MAX_DELIMITERS = 32
MIN_PIECE = 96  # bytes; shorter pieces cost more to look up than to encode with their neighbour

Config = Mapping[str, Any]


def delimiters(tokenizer: Config, hints: Iterable[str] | None = None) -> Iterator[str]:
    """The added tokens of a tokenizer.json that satisfy the rule, in its order there.

    hints  texts: only tokens that occur in one of them
    O(characters of the added tokens), 50 ms for 6,000 of them.
    """
    model = tokenizer.get("model") or {}
    if tokenizer.get("truncation") or tokenizer.get("padding") or model.get("dropout"):
        return
    added: list[Config] = list(tokenizer.get("added_tokens") or ())
    contents = [str(token["content"]) for token in added]
    identity = _is_identity(tokenizer.get("normalizer"))
    single_word = any(token.get("single_word") for token in added)
    overlaps = _Overlaps(contents)
    hint = None if hints is None else "\0".join(hints)
    for token, text in zip(added, contents, strict=True):
        if hint is not None and text not in hint:
            continue
        if _found_alone(token, text, identity=identity, single_word=single_word) and text not in overlaps:
            yield text


def choose(tokenizer: Config, hints: Iterable[str], limit: int = MAX_DELIMITERS) -> list[str]:
    """Delimiters worth cutting at: those that the templates write (`hints`), else any, at most `limit`."""
    return list(islice(delimiters(tokenizer, hints), limit)) or list(islice(delimiters(tokenizer), limit))


def _is_identity(normalizer: Config | None) -> bool:
    return normalizer is None or (normalizer.get("type") == "Sequence" and not normalizer.get("normalizers"))


def _found_alone(token: Config, text: str, *, identity: bool, single_word: bool) -> bool:
    if not text or text != text.strip() or token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
        return False
    if token.get("normalized") and not identity:
        return False
    return not single_word or (_separates(text[0]) and _separates(text[-1]))


def _separates(character: str) -> bool:
    return character.isascii() and not (character.isalnum() or character == "_") and character.isprintable()


class _Overlaps:
    """Whether a token overlaps any token of a list, itself included. O(all characters) once, then O(len^2) a token."""

    def __init__(self, contents: list[str]) -> None:
        self._all = "\0".join(contents)
        self._known = frozenset(contents) - {""}
        self._begins = {text[:size] for text in contents for size in range(1, len(text))}
        self._ends = {text[start:] for text in contents for start in range(1, len(text))}

    def __contains__(self, text: str) -> bool:
        inside_another = self._all.count(text) > 1  # or is listed twice, maybe with other flags
        if inside_another:
            return True
        for start in range(1, len(text)):
            if text[start:] in self._begins or text[:start] in self._ends:
                return True
        parts = (text[start:end] for start in range(len(text)) for end in range(start + 1, len(text) + 1))
        return any(part in self._known and part != text for part in parts)


class Cutter:
    """Cuts texts before delimiters. Stateless after construction."""

    def __init__(self, chosen: Iterable[str], *, min_piece: int = MIN_PIECE) -> None:
        self.delimiters = tuple(chosen)
        self._min = max(1, min_piece)
        words = [word.encode() for word in self.delimiters]
        self._find = re.compile(_pattern(words)).finditer if words else None

    def __bool__(self) -> bool:
        return self._find is not None

    def bounds(self, data: bytes) -> list[int]:
        """Places where pieces of a text (UTF-8) begin, and its end: [0, ..., len(data)].

        Where the last cut is near, an occurrence is passed over, which keeps the count of pieces below
        len(data) / min_piece + 1 whatever a client sends. The cuts of a text depend only on what stands before them: a
        longer text with the same beginning has the same ones. UTF-8 of a delimiter never begins inside a character.
        O(len(data)).
        """
        found = [0]
        if self._find is not None:
            nearest = least = self._min
            for match in self._find(data):
                place = match.start()
                if place >= nearest:
                    found.append(place)
                    nearest = place + least
        found.append(len(data))
        return found

    def last(self, data: bytes) -> int:
        """Where the last delimiter of a text begins, 0 if nowhere."""
        place = 0
        for match in self._find(data) if self._find is not None else ():
            place = match.start()
        return place

    def cut(self, text: str) -> list[str]:
        """The pieces themselves. Raises UnicodeEncodeError for lone surrogates."""
        data = text.encode()
        places = self.bounds(data)
        return [data[start:end].decode() for start, end in pairwise(places)]


def _pattern(words: list[bytes]) -> bytes:
    """Alternation with the common beginning in front: the regex engine searches a literal prefix much faster."""
    prefix = words[0]
    while not all(word.startswith(prefix) for word in words):
        prefix = prefix[:-1]
    rests = sorted((word[len(prefix) :] for word in words), key=len, reverse=True)
    return re.escape(prefix) + b"(?:" + b"|".join(map(re.escape, rests)) + b")"


def added_around(tokenizer: Config) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Ids that the post-processor puts before and after every text when special tokens are asked for.

    None if it is of a kind that does not just add ids; then such requests are encoded whole.
    """
    processor = tokenizer.get("post_processor")
    if processor is None:
        return (), ()
    kind = processor.get("type")
    if kind == "ByteLevel":  # trims offsets, adds nothing
        return (), ()
    if kind == "Sequence":
        before: tuple[int, ...] = ()
        after: tuple[int, ...] = ()
        for part in processor.get("processors") or ():
            around = added_around({"post_processor": part})
            if around is None:
                return None
            before, after = around[0] + before, after + around[1]
        return before, after
    if kind == "TemplateProcessing":
        tokens: Mapping[str, Config] = processor.get("special_tokens") or {}
        sides: tuple[list[int], list[int]] = ([], [])
        seen = 0
        for item in processor.get("single") or ():
            if "Sequence" in item:
                seen += 1
            else:
                sides[bool(seen)].extend(tokens[item["SpecialToken"]["id"]]["ids"])
        return (tuple(sides[0]), tuple(sides[1])) if seen == 1 else None
    return None
