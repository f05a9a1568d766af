"""SGLang: vLLM's arrays with signed hashes, pairs as tokens under EAGLE, and a metadata map after the medium.

Newer versions send maps with vLLM's keys and `cache_salt`. Its scheduler matches at most all tokens but the last, as
vLLM does (`adjust_max_prefix_ids`).
"""

from __future__ import annotations

from kvindex.dialects.base import Decoder


class Sglang(Decoder):
    name = "sglang"
