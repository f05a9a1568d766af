"""Dialects: wire bytes -> events, one file an engine family. A new one is a file and a line in DIALECTS."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvindex.dialects.auto import Auto
from kvindex.dialects.base import Decoder, Dialect, DialectOptions
from kvindex.dialects.mooncake import Mooncake
from kvindex.dialects.sglang import Sglang
from kvindex.dialects.vllm import Vllm
from kvindex.dialects.xllm import Xllm

DIALECTS: Mapping[str, Callable[[DialectOptions], Dialect]] = MappingProxyType(
    {
        "auto": Auto,
        "vllm": Vllm,
        "sglang": Sglang,
        "xllm": Xllm,
        "mooncake": Mooncake,
    }
)
"""Name in the configuration -> factory; one dialect object a stream."""

__all__ = ["DIALECTS", "Decoder", "Dialect", "DialectOptions"]
