"""Sample chats for the comparison of tokens: each shows one thing that routers and engines render differently."""

from __future__ import annotations

from typing import Any

_USER = {"role": "user", "content": "Hello, what's the weather in Paris? 你好 🙂"}
_SYSTEM = {"role": "system", "content": "You are terse."}
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city, e.g. <Zürich> & more",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["C", "F"]}},
            "required": ["city"],
        },
    },
}
_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Paris", "unit": "C"}'},
        }
    ],
}

CHATS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [_USER]},
    "system": {"messages": [_SYSTEM, _USER]},
    "turns": {
        "messages": [_SYSTEM, _USER, {"role": "assistant", "content": "Sunny.\n"}, {"role": "user", "content": " And?"}]
    },
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "what's up?"}]}
        ]
    },
    "unicode": {
        "messages": [{"role": "user", "content": "Ünïcödé — “quotes” ﬁ\u00a0nbsp 日本語 👩‍👩‍👧 e\u0301 \t  x"}]
    },
    "tools": {"messages": [_SYSTEM, _USER], "tools": [_TOOL]},
    "tool_result": {
        "messages": [_USER, _CALL, {"role": "tool", "tool_call_id": "call_1", "content": "21 °C"}],
        "tools": [_TOOL],
    },
    "kwargs": {"messages": [_SYSTEM, _USER], "chat_template_kwargs": {"enable_thinking": False}},
}
"""Name -> fields of a chat body. Both the render endpoint and /tokenize take all of these."""

TEXT = {"prompt": "Once upon a time, there was a 日本語 text.\n\n  It ended."}
"""A completion: special tokens in front, no template."""
