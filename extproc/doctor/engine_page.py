"""The few facts that a check wants of an engine's /metrics page."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)", re.MULTILINE)
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')
_KINDS = {"vllm:": "vllm", "sglang:": "sglang", "trtllm_": "trtllm"}


@dataclass(frozen=True, slots=True)
class EnginePage:
    """
    kind           "vllm", "sglang", "trtllm", "" = none of these
    cache          labels of cache_config_info of the first rank
    ranks          data-parallel ranks that have series
    prompt_tokens  prefilled so far, by rank (0 where the page tells none)
    adapters       names in lora_requests_info
    sleeping       ranks that sleep
    """

    kind: str = ""
    cache: Mapping[str, str] = field(default_factory=dict)
    ranks: frozenset[int] = frozenset()
    prompt_tokens: Mapping[int, float] = field(default_factory=dict)
    adapters: frozenset[str] = frozenset()
    sleeping: bool = False

    def block_sizes(self) -> tuple[int, ...]:
        """Tokens a block as the engine has it: of its hashes first, which is what events are about."""
        names = ("hash_block_size", "block_size", "page_size")
        return tuple(int(value) for name in names if (value := self.cache.get(name, "")).isdigit())

    @property
    def prefix_caching(self) -> bool | None:
        """None when the page does not tell."""
        return {"true": True, "false": False}.get(self.cache.get("enable_prefix_caching", "").lower())


def parse(page: str) -> EnginePage:
    """Never raises; what is not there stays empty. O(page)."""
    kind, sleeping = "", False
    cache: dict[str, str] = {}
    ranks: set[int] = set()
    adapters: set[str] = set()
    tokens: dict[int, float] = {}
    for name, text, value in _SAMPLE.findall(page):
        prefix = next((prefix for prefix in _KINDS if name.startswith(prefix)), None)
        if prefix is None:
            continue
        kind = kind or _KINDS[prefix]
        labels: dict[str, str] = dict(_LABEL.findall(text))
        rank = labels.get("engine", labels.get("dp_rank", ""))
        if rank.isdigit():
            ranks.add(int(rank))
        number = _number(value)
        if name.endswith(":cache_config_info"):
            cache = cache or labels
        elif name.endswith(":prompt_tokens_total") and number is not None:
            key = int(rank) if rank.isdigit() else 0
            tokens[key] = tokens.get(key, 0.0) + number
        elif name == "vllm:lora_requests_info":
            for label in ("running_lora_adapters", "waiting_lora_adapters"):
                adapters.update(one.strip() for one in labels.get(label, "").split(",") if one.strip())
        elif name == "vllm:engine_sleep_state" and labels.get("sleep_state") != "awake" and number:
            sleeping = True
    return EnginePage(kind, cache, frozenset(ranks), tokens, frozenset(adapters), sleeping)


def samples(page: str, names: Collection[str]) -> list[tuple[str, dict[str, str], float]]:
    """(name, labels, value) of every sample with one of these names on a metrics page."""
    return [
        (name, dict(_LABEL.findall(labels)), number)
        for name, labels, value in _SAMPLE.findall(page)
        if name in names and (number := _number(value)) is not None
    ]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
