"""vLLM 0.9 to 0.32: arrays up to 0.23, maps from 0.24."""

from __future__ import annotations

from kvindex.dialects.base import Decoder


class Vllm(Decoder):
    name = "vllm"
