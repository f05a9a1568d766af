"""xLLM: maps with the names of vLLM, a clear that empties every tier, the whole content as answer to a replay."""

from __future__ import annotations

from kvindex.dialects.base import Decoder
from kvindex.events import Tier
from kvindex.walk import Walk


class Xllm(Decoder):
    name = "xllm"
    walk = Walk.INTERLEAVED
    caps_last_token = False
    default_recovery = "snapshot"
    clears = (Tier.DEVICE, Tier.HOST, Tier.DISK)
