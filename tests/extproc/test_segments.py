"""The cutting rule: tables, then random tokenizer configurations, where every relaxation of the rule must be caught."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from extproc.prompt.segments import Cutter, added_around, choose, delimiters

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RUST_BACKTRACE"] = "0"


def token(content: str, **flags: Any) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": content, **plain, **flags}


def config(*added: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"added_tokens": list(added), "normalizer": None, "model": {"dropout": None}, **fields}


NFC = {"type": "NFC"}
EMPTY = {"type": "Sequence", "normalizers": []}
RULE = [
    # what, tokenizer.json, safe
    ("a plain special token", config(token("<s>")), ["<s>"]),
    ("lstrip", config(token("<s>", lstrip=True)), []),
    ("rstrip", config(token("<s>", rstrip=True)), []),
    ("single_word itself", config(token("<s>", single_word=True)), []),
    ("normalized under a normalizer", config(token("<s>", normalized=True), normalizer=NFC), []),
    ("normalized, normalizer null", config(token("<s>", normalized=True)), ["<s>"]),
    ("normalized, normalizer empty sequence", config(token("<s>", normalized=True), normalizer=EMPTY), ["<s>"]),
    ("not normalized under a normalizer", config(token("<s>"), normalizer=NFC), ["<s>"]),
    ("leading space", config(token(" <s>")), []),
    ("trailing line end", config(token("<s>\n")), []),
    ("contains another", config(token("<<s>>"), token("<s>")), []),
    ("end of one begins the other", config(token("<a|"), token("|b>")), []),
    ("overlaps itself", config(token("aba")), []),
    ("repeats itself without overlap", config(token("ab")), ["ab"]),
    ("shares only the beginning", config(token("<a>"), token("<b>")), ["<a>", "<b>"]),
    ("same content twice", config(token("<s>"), token("<s>", lstrip=True)), []),
    ("single_word neighbour, ASCII ends", config(token("<s>"), token("x", single_word=True)), ["<s>"]),
    ("single_word neighbour, word end", config(token("<s"), token("x", single_word=True)), []),
    ("single_word neighbour, underscore", config(token("_s>"), token("x", single_word=True)), []),
    ("single_word neighbour, other script", config(token("｜s｜"), token("x", single_word=True)), []),
    ("truncation", config(token("<s>"), truncation={"max_length": 5}), []),
    ("padding", config(token("<s>"), padding={"pad_id": 0}), []),
    ("random merges", config(token("<s>"), model={"dropout": 0.1}), []),
    ("no added tokens", {}, []),
]


@pytest.mark.parametrize(("what", "tokenizer", "safe"), RULE, ids=[row[0] for row in RULE])
def test_rule(what: str, tokenizer: dict[str, Any], safe: list[str]) -> None:
    assert list(delimiters(tokenizer)) == safe


def test_choose_takes_what_the_templates_write_else_any_up_to_the_limit() -> None:
    many = config(*(token(f"<{n:02}>") for n in range(50)))
    assert choose(many, ["x<07>y", "<40>"]) == ["<07>", "<40>"]
    assert choose(many, ["nothing"], limit=3) == ["<00>", "<01>", "<02>"]
    assert choose(config(token("<a>", lstrip=True), token("<b>")), ["<a>"]) == ["<b>"]


CUTS = [
    ("", [""]),
    ("plain", ["plain"]),
    ("<s>a<e>b", ["<s>a", "<e>b"]),
    ("x<s><s>", ["x", "<s>", "<s>"]),
    ("<s>", ["<s>"]),
    ("a<s", ["a<s"]),
]


@pytest.mark.parametrize(("text", "pieces"), CUTS)
def test_cut(text: str, pieces: list[str]) -> None:
    assert Cutter(["<s>", "<e>"], min_piece=1).cut(text) == pieces


def test_cut_with_one_delimiter_and_regex_characters() -> None:
    assert Cutter(["<|x|>"], min_piece=1).cut("a<|x|>b<x>") == ["a", "<|x|>b<x>"]
    assert Cutter(["<|", "<|a(|"], min_piece=1).cut("p<|a(|q") == ["p", "<|a(|q"]


def test_near_delimiters_are_passed_over_and_cuts_depend_only_on_what_stands_before() -> None:
    cutter = Cutter(["<s>"], min_piece=10)
    text = "<s>" * 1000 + "x" * 30 + "<s>tail"
    pieces = cutter.cut(text)
    assert "".join(pieces) == text
    assert len(pieces) <= len(text) // 10 + 1
    for end in range(0, len(text), 97):
        part = cutter.cut(text[:end])
        assert part[:-1] == pieces[: len(part) - 1]


AROUND = [
    (None, ((), ())),
    ({"type": "ByteLevel"}, ((), ())),
    ({"type": "BertProcessing", "sep": ["x", 1], "cls": ["y", 2]}, None),
    ({"type": "Sequence", "processors": [{"type": "ByteLevel"}, {"type": "RobertaProcessing"}]}, None),
]


@pytest.mark.parametrize(("processor", "expected"), AROUND)
def test_ids_that_a_post_processor_adds(processor: dict[str, Any] | None, expected: object) -> None:
    assert added_around({"post_processor": processor}) == expected


@pytest.mark.parametrize("template", ["$A", "<a> $A", "<a> <b> $A <a>", "$A <b>"])
@pytest.mark.parametrize("nested", [False, True])
def test_ids_that_a_template_adds_equal_the_tokenizers(template: str, nested: bool) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<a>", "<b>"])
    ids = [(name, tokenizer.token_to_id(name)) for name in ("<a>", "<b>")]
    processor: Any = processors.TemplateProcessing(single=template, pair="$A $B", special_tokens=ids)
    if nested:
        processor = processors.Sequence([processors.ByteLevel(), processor])
    tokenizer.post_processor = processor
    around = added_around(json.loads(tokenizer.to_str()))
    assert around is not None
    plain = tokenizer.encode_batch_fast(["xy"], add_special_tokens=False)[0].ids
    assert tokenizer.encode_batch_fast(["xy"], add_special_tokens=True)[0].ids == [*around[0], *plain, *around[1]]


# -- random configurations ---------------------------------------------------------------------------------------------

CHARACTERS = ["a", "b", "A", "é", "1", "_", " ", "\n", "<", ">", "|", "ﬁ", "▁"]
WORDS = ["<s>", "<e>", "<|a|>", "|a", "ab", "a", " a", "b_", "<s", "s>", "é<", "<A>", "<a>", ">", "aba", "\n\n"]


def byte_level(merges: int = 0) -> Tokenizer:
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pairs = [("a", "b"), ("Ġ", "a"), ("ab", "a"), ("a", "a"), ("<", "s"), ("Ċ", "Ċ"), (">", "a"), ("Ġ", "Ġ")][:merges]
    for pair in pairs:
        vocabulary["".join(pair)] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def random_tokenizer(rng: random.Random) -> Tokenizer:
    tokenizer = byte_level(rng.randrange(9))
    kind = rng.randrange(5)
    if kind == 0:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    elif kind == 1:
        alphabet = {c: n for n, c in enumerate([*CHARACTERS, "▁a", "ab", "▁▁", "a▁", "x"])}
        merges = [("▁", "a"), ("a", "b"), ("▁", "▁"), ("a", "▁")]
        tokenizer = Tokenizer(models.BPE(alphabet, merges, unk_token="x"))
        scheme = rng.choice(["first", "always", "never"])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    elif kind == 2:
        words = {word: n for n, word in enumerate([*CHARACTERS, "ab", "<s", "x"])}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="x"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    elif kind == 3:
        scores = [("x", 0.0), *((c, -2.0) for c in CHARACTERS), ("ab", -1.0), ("▁a", -1.5), ("<s", -1.0)]
        tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=False))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=rng.choice(["first", "always"]))
    normalizer = rng.choice(
        [None, None, normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip(), normalizers.Prepend("▁"),
         normalizers.Sequence([]), normalizers.Replace(" ", "▁")]
    )  # fmt: skip
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    for word in rng.sample(WORDS, rng.randint(1, 5)):
        flags = {name: rng.random() < 0.2 for name in ("single_word", "lstrip", "rstrip", "normalized")}
        tokenizer.add_tokens([AddedToken(word, special=rng.random() < 0.5, **flags)])
    return tokenizer


def random_text(rng: random.Random, words: list[str]) -> str:
    return "".join(rng.choice(words if rng.random() < 0.5 else CHARACTERS) for _ in range(rng.randint(0, 14)))


Ids = list[int] | None  # None: the tokenizer panicked, as some combinations of added tokens make it do


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[Ids]:
    try:
        return [item.ids for item in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        return [None] if len(texts) == 1 else [encode(tokenizer, [text])[0] for text in texts]


def cases(seed: int, count: int) -> Iterator[tuple[Tokenizer, dict[str, Any], list[str]]]:
    rng = random.Random(seed)
    for _ in range(count):
        tokenizer = random_tokenizer(rng)
        settings = json.loads(tokenizer.to_str())
        words = [item["content"] for item in settings["added_tokens"]]
        yield tokenizer, settings, [random_text(rng, words) for _ in range(25)]


def mismatches(tokenizer: Tokenizer, chosen: list[str], texts: list[str]) -> int:
    cutter = Cutter(chosen, min_piece=1)
    pieces = [cutter.cut(text) for text in texts]
    parts = iter(encode(tokenizer, [piece for cut in pieces for piece in cut]))
    joined = [join([next(parts) for _ in cut]) for cut in pieces]
    # where the whole text panics, the engine has no ids either
    return sum(whole not in (None, part) for whole, part in zip(encode(tokenizer, texts), joined, strict=True))


def join(parts: list[Ids]) -> Ids:
    return None if None in parts else [number for part in parts if part for number in part]


def test_random_configurations_never_differ() -> None:
    cut = 0
    for tokenizer, settings, texts in cases(seed=1, count=300):
        chosen = list(delimiters(settings))
        if chosen:
            cut += 1
            assert mismatches(tokenizer, chosen, texts) == 0, (chosen, settings["added_tokens"], settings["normalizer"])
    assert cut > 75, "the sample must test something"


def relaxed(settings: dict[str, Any], what: str) -> dict[str, Any]:
    """The configuration as a rule without one of its conditions would read it."""
    added = settings["added_tokens"]
    if what == "normalizer":
        return {**settings, "normalizer": None}
    if what == "overlap":
        return {**settings, "added_tokens": added[:1]}
    return {**settings, "added_tokens": [{**item, what: False} for item in added]}


# rstrip is not among them: a delimiter that eats the white space behind it does so in its own piece, too. The rule is
# stricter there than it must be.
@pytest.mark.parametrize("what", ["lstrip", "single_word", "normalizer", "overlap"])
def test_a_rule_without_one_condition_is_caught(what: str) -> None:
    found = 0
    for tokenizer, settings, texts in cases(seed=2, count=150):
        proper, loose = set(delimiters(settings)), list(delimiters(relaxed(settings, what)))
        extra = [word for word in loose if word not in proper]
        if extra:
            found += mismatches(tokenizer, extra, texts)
    assert found > 0


def test_ignoring_single_word_neighbours_is_caught() -> None:
    found = 0
    for tokenizer, settings, texts in cases(seed=4, count=200):
        alone = {item["content"] for item in settings["added_tokens"] if item["single_word"]}
        proper = set(delimiters(settings))
        extra = [word for word in delimiters(relaxed(settings, "single_word")) if word not in proper | alone]
        if extra:
            found += mismatches(tokenizer, extra, texts)
    assert found > 0


def test_pieces_without_their_leading_delimiter_are_caught() -> None:
    found = 0
    for tokenizer, settings, texts in cases(seed=3, count=100):
        chosen = list(delimiters(settings))
        ids = {item["content"]: item["id"] for item in settings["added_tokens"]}
        for text in texts if chosen else ():
            parts: list[Ids] = []
            for piece in Cutter(chosen, min_piece=1).cut(text):
                word = next((item for item in chosen if piece.startswith(item)), "")
                parts += [[ids[word]] if word else [], *encode(tokenizer, [piece[len(word) :]])]
            found += encode(tokenizer, [text])[0] not in (None, join(parts))
    assert found > 0
