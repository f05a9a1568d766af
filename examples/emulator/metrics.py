"""GET /metrics: vLLM's names and labels, for the metrics that routers read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .engine import Engine


def _quoted(value: object) -> str:
    text = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"'


def _sample(name: str, labels: Mapping[str, object], value: float) -> str:
    inner = ",".join(f"{key}={_quoted(labels[key])}" for key in sorted(labels))
    return f"{name}{{{inner}}} {float(value)}"


def _gauges(engine: Engine) -> dict[str, float]:
    loading = sum(bool(request.loading) for request in engine.waiting)
    return {
        "vllm:num_requests_running": len(engine.running),
        "vllm:num_requests_waiting": len(engine.waiting),
        "vllm:num_requests_waiting_by_reason|capacity": len(engine.waiting) - loading,
        "vllm:num_requests_waiting_by_reason|deferred": loading,
        "vllm:kv_cache_usage_perc": engine.pool.usage,
    }


def _counters(engine: Engine) -> dict[str, float]:
    counters = engine.counters
    return {
        "vllm:prefix_cache_queries_total": counters.prefix_cache_queries,
        "vllm:prefix_cache_hits_total": counters.prefix_cache_hits,
        "vllm:external_prefix_cache_queries_total": counters.external_prefix_cache_queries,
        "vllm:external_prefix_cache_hits_total": counters.external_prefix_cache_hits,
        "vllm:num_preemptions_total": counters.preemptions,
        "vllm:prompt_tokens_total": counters.prompt_tokens,
        "vllm:generation_tokens_total": counters.generation_tokens,
    }


HELP = {
    "vllm:num_requests_running": "Number of requests in model execution batches.",
    "vllm:num_requests_waiting": "Number of requests waiting to be processed.",
    "vllm:num_requests_waiting_by_reason": "Number of waiting requests by reason.",
    "vllm:kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
    "vllm:prefix_cache_queries_total": "Prefix cache queries, in terms of number of queried tokens.",
    "vllm:prefix_cache_hits_total": "Prefix cache hits, in terms of number of cached tokens.",
    "vllm:external_prefix_cache_queries_total": "Queries of the cache behind the device, in tokens.",
    "vllm:external_prefix_cache_hits_total": "Hits of the cache behind the device, in tokens.",
    "vllm:num_preemptions_total": "Cumulative number of preemption from the engine.",
    "vllm:prompt_tokens_total": "Number of prefill tokens processed.",
    "vllm:generation_tokens_total": "Number of generation tokens processed.",
}


def render_metrics(engines: Sequence[Engine], model: str) -> str:
    """The whole page, Prometheus text format."""
    return "\n".join(_lines(engines, model)) + "\n"


def _lines(engines: Sequence[Engine], model: str) -> Iterator[str]:
    for kind, values in (("gauge", _gauges), ("counter", _counters)):
        rows = [values(engine) for engine in engines]
        seen = ""
        for key in rows[0]:
            name, _, reason = key.partition("|")
            if name != seen:
                seen = name
                yield f"# HELP {name} {HELP[name]}"
                yield f"# TYPE {name} {kind}"
            for rank, row in enumerate(rows):
                labels = {"engine": rank, "model_name": model, **({"reason": reason} if reason else {})}
                yield _sample(name, labels, row[key])
    yield "# HELP vllm:request_success_total Count of successfully processed requests."
    yield "# TYPE vllm:request_success_total counter"
    for rank, engine in enumerate(engines):
        for reason, count in engine.counters.finished.items():
            labels = {"engine": rank, "model_name": model, "finished_reason": reason}
            yield _sample("vllm:request_success_total", labels, count)
    yield "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig"
    yield "# TYPE vllm:cache_config_info gauge"
    for rank, engine in enumerate(engines):
        config = engine.config
        labels = {
            "block_size": config.block_size,
            "enable_prefix_caching": config.prefix_caching,
            "engine": rank,
            "num_cpu_blocks": config.host_blocks or None,
            "num_gpu_blocks": config.blocks,
            "prefix_caching_hash_algo": "sha256_cbor",
        }
        yield _sample("vllm:cache_config_info", labels, 1.0)
