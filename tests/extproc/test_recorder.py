"""Reading answers: whatever an engine sends, what it says of the prompt is found, and nothing raises."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.recorder import Answer, block_size

USAGE = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
ROWS: list[tuple[str, Any, Any, Any, list[int]]] = [
    # name, body, usage, prompt, output
    ("chat", {"usage": USAGE, "prompt_token_ids": [1, 2], "choices": [{"token_ids": [5]}]}, USAGE, [1, 2], [5]),
    ("completion", {"usage": USAGE, "choices": [{"prompt_token_ids": [1], "token_ids": [5]}]}, USAGE, [1], [5]),
    ("two choices", {"choices": [{"index": 0, "token_ids": [5]}, {"index": 1, "token_ids": [6]}]}, None, None, [5]),
    ("an engine without ids", {"usage": USAGE, "choices": [{"message": {}}]}, USAGE, None, []),
    ("nulls", {"usage": None, "prompt_token_ids": None, "choices": None}, None, None, []),
    ("other shapes", {"usage": 3, "prompt_token_ids": {}, "choices": [1, {"token_ids": "x"}]}, None, None, []),
    ("a list", [1], None, None, []),
    ("error", {"error": {"message": "no"}}, None, None, []),
]  # fmt: skip


@pytest.mark.parametrize(("_name", "body", "usage", "prompt", "output"), ROWS, ids=[row[0] for row in ROWS])
def test_bodies(_name: str, body: Any, usage: Any, prompt: Any, output: list[int]) -> None:
    answer = Answer(streamed=False)
    answer.read(json.dumps(body).encode())
    assert (answer.usage, answer.prompt, answer.output) == (usage, prompt, output)


EVENTS = [
    {"prompt_token_ids": [1, 2, 3], "choices": [{"index": 0, "delta": {}}]},
    {"choices": [{"index": 0, "token_ids": [7]}]},
    {"choices": [{"index": 1, "token_ids": [9]}]},
    {"choices": [{"index": 0, "token_ids": [8]}], "usage": None},
    {"choices": [], "usage": USAGE},
]


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"], ids=["lf", "crlf"])
def test_streams_in_parts_of_any_size(size: int, end: bytes) -> None:
    data = b"".join(b"data: " + json.dumps(event).encode() + end for event in EVENTS) + b": ping" + end
    answer = Answer(streamed=True)
    for start in range(0, len(data), size):
        answer.feed(data[start : start + size])
    assert not answer.done
    answer.feed(b"data: [DONE]" + end)
    assert answer.done
    assert (answer.usage, answer.prompt, answer.output) == (USAGE, [1, 2, 3], [7, 8])


@given(st.lists(st.binary(max_size=40) | st.sampled_from([b"data: {}\n", b"data: [1]\n", b"data: [DONE]\n"])))
def test_no_stream_raises(parts: list[bytes]) -> None:
    answer = Answer(streamed=True)
    for part in parts:
        answer.feed(part)
    assert answer.usage is None


def test_block_size_of_a_metrics_page() -> None:
    assert block_size('# x\nvllm:cache_config_info{engine="0",block_size="32",hash_block_size="16"} 1.0\n') == 32
    assert block_size('vllm:cache_config_info{hash_block_size="16",block_size="None"} 1.0\n') is None
    assert block_size('sglang:cache_config_info{page_size="64",num_pages="9"} 1\n') == 64
    assert block_size("") is None
