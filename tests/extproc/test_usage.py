"""usage.py: token counts from the end of a response, whatever its cut, in bounded memory."""

from __future__ import annotations

import json
import random

import pytest

from extproc.usage import Usage, UsageReader

USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}


def sse(*events: object) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def answer(**more: object) -> bytes:
    return json.dumps({"id": "x", "choices": [{"message": {"content": "hi"}}], **more}).encode()


ROWS: list[tuple[str, bytes, Usage | None]] = [
    ("json", answer(usage=USAGE), Usage(4, 7)),
    ("json, keys behind usage", answer(usage=USAGE, prompt_logprobs=None), Usage(4, 7)),
    ("sse, last chunk", sse({"choices": [1], "usage": None}, {"choices": [], "usage": USAGE}), Usage(4, 7)),
    ("sse, usage in every chunk: the last counts", sse({"usage": {"prompt_tokens": 1}}, {"usage": USAGE}), Usage(4, 7)),
    ("sse, null after the last", sse({"usage": USAGE}, {"usage": None}), Usage(4, 7)),
    ("no details", answer(usage={"prompt_tokens": 7, "prompt_tokens_details": None}), Usage(None, 7)),
    ("cached 0", answer(usage={"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 0}}), Usage(0, 7)),
    (
        "wrong types",
        answer(usage={"prompt_tokens": True, "prompt_tokens_details": {"cached_tokens": "4"}}),
        Usage(None, None),
    ),
    ("spaces", b'{"usage" : {"prompt_tokens": 3}}', Usage(None, 3)),
    ("no usage", answer(), None),
    ("usage in generated text only", answer(text='say "usage": {"prompt_tokens": 9}'), None),
    ("usage in generated text after usage", answer(usage=USAGE, text='"usage": {"prompt_tokens": 9}'), Usage(4, 7)),
    ("cut off inside", answer(usage=USAGE)[:-20], None),
    ("empty", b"", None),
    ("not text", b'\xff\xfe"usage": {"prompt_tokens": 3}', Usage(None, 3)),
    ("nested deep", b'"usage":' + b"[" * 3000, None),
]


@pytest.mark.parametrize(("body", "expected"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
@pytest.mark.parametrize("cut", [1, 7, 1 << 20])
def test_rows(body: bytes, expected: Usage | None, cut: int) -> None:
    reader = UsageReader()
    for start in range(0, len(body), cut):
        reader.feed(body[start : start + cut])
    assert reader.usage() == expected


def test_memory_is_bounded_and_the_tail_is_kept() -> None:
    reader = UsageReader(limit=512)
    generator = random.Random(3)
    for _ in range(500):
        reader.feed(b"x" * generator.randrange(0, 700))
        assert len(reader._tail) <= 1024
    for byte in sse({"usage": USAGE}):
        reader.feed(bytes([byte]))
    assert reader.usage() == Usage(4, 7)


def test_many_null_usages_cost_little() -> None:
    """Bounded tries: a body full of the key is given up, not searched through."""
    reader = UsageReader()
    reader.feed(b'{"usage":null}' * 4000)
    assert reader.usage() is None
