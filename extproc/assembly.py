"""From a configuration to pools, and from a changed one to changed pools that keep what is not concerned.

pools[*] of the file --make()--> Pool = tokenizer + directory + router + loads + what is believed beside events
                                        each part is taken over from the pool before when its options are equal
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extproc.config import Config, ConfigError, place, profile_of
from extproc.config import Pool as PoolConfig
from extproc.config_types import is_path, short
from extproc.discovery_config import HttpDiscovery
from extproc.instances import instance_of
from extproc.liveness import Liveness
from extproc.loads.base import LoadSource
from extproc.loads.heartbeat import Heartbeats
from extproc.loads.prometheus import PrometheusPoller
from extproc.overrides import Overrides
from extproc.pool import Pool
from extproc.prompt.prompter import Options as PrompterOptions
from extproc.prompt.prompter import Prompter
from extproc.prompt.remote import RemoteTokenizer
from extproc.router import Router
from extproc.scorers import build as build_scorer
from extproc.scorers import with_sessions
from extproc.shedding import Shedding
from extproc.speculative import Approximate, Speculation
from kvindex.directory import Directory
from kvindex.errors import ConfigurationError
from kvindex.fleet import Fleet, Instance, check_instances
from kvindex.sync import SyncLimits
from kvindex.transport import EventTransport

if TYPE_CHECKING:
    from extproc.tracing import Tracing

log = logging.getLogger(__name__)


def instances_of(config: Config, name: str = "config") -> list[Instance]:
    """Every configured instance, checked alone and against the others. Raises ConfigError that names file and place.

    `name`  of the file, as for `check_files`
    """
    found: list[Instance] = []
    at: tuple[str | int, ...] = ()
    try:
        for index, pool in enumerate(config.pools):
            mine = []
            for number, given in enumerate(pool.instances):
                at = ("pools", index, "instances", number)
                mine.append(instance_of(pool.facts, given))
            at = ("pools", index, "instances")
            check_instances(mine)
            found += mine
        at = ("pools",)
        check_instances(found)
    except ConfigurationError as error:
        raise ConfigError(f"{place(name, *at)}: {error}") from None
    return found


def prompter_options(pool: PoolConfig, config: Config) -> PrompterOptions:
    """What a pool's prompter is built from."""
    limits = config.limits
    return PrompterOptions(
        tokenizer=pool.tokenizer,
        allow_download=pool.tokenizer_allow_download,
        chat_template=pool.chat_template,
        chat_template_kwargs={name: _lists(value) for name, value in pool.chat_template_kwargs.items()},
        content_format=pool.content_format,
        exclude_tools_when_tool_choice_none=pool.exclude_tools_when_tool_choice_none,
        trust_request_chat_template=pool.trust_request_chat_template,
        renderer=pool.renderer,
        revision=pool.tokenizer_revision,
        incremental=pool.incremental,
        verify_every=pool.verify_every,
        max_model_len=pool.max_model_len,
        models=pool.models,
        adapters=pool.adapters,
        engine=pool.engine,
        timeout=limits.tokenize_timeout_ms / 1000,
        threads=limits.tokenizer_threads,
        segment_bytes=limits.token_cache_bytes * 2 // 3,
        chain_bytes=limits.token_cache_bytes // 3,
    )


def _lists(value: Any) -> Any:
    """Lists as the engine's template gets them; in a configuration, which cannot change, they are tuples."""
    if isinstance(value, tuple):
        return [_lists(item) for item in value]
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return value


def tracing_of(config: Config) -> Tracing | None:
    """Imports OpenTelemetry only where it is asked for. Raises ConfigError with the remedy where it is missing."""
    return _tracing_type()(config.tracing) if config.tracing is not None else None


def _tracing_type(where: str = "tracing") -> type[Tracing]:
    try:
        from extproc.tracing import Tracing
    except ImportError as error:
        raise ConfigError(f"{where}: needs OpenTelemetry, pip install 'kvcar[otel]' ({error})") from None
    return Tracing


def _is_tokenizer(path: Path) -> bool:
    path = path.expanduser()
    return (path / "tokenizer.json").is_file() or path.is_file()


def check_files(config: Config, name: str = "config") -> None:
    """Files that the configuration names exist. Raises ConfigError that names the place, the path and the remedy.

    `name`  of the file it was read from: it is read again for the line of a mistake
    """
    if config.tracing is not None:
        _tracing_type(place(name, "tracing"))
    for section, tls in (("listen", config.listen.tls), ("admin", config.admin.tls)):
        for key, path in tls or ():
            if path is not None and not is_path(path):
                raise ConfigError(f"{place(name, section, 'tls', key)}: {short(path)} is no readable file")
    for index, pool in enumerate(config.pools):
        there = is_path(pool.tokenizer, lambda path: path.expanduser().exists())
        looks_local = pool.tokenizer.startswith(("/", "./", "../", "~")) or there
        if looks_local and not is_path(pool.tokenizer, _is_tokenizer):
            what = "has no tokenizer.json" if there else "does not exist"
            where = place(name, "pools", index, "tokenizer")
            raise ConfigError(f"{where}: {short(pool.tokenizer)} {what}; give the model's directory or a hub id")
        if pool.endpoints_file and not is_path(pool.endpoints_file.path, lambda path: path.parent.is_dir()):
            folder = str(Path(pool.endpoints_file.path).parent)
            where = place(name, "pools", index, "endpoints_file", "path")
            raise ConfigError(f"{where}: the folder {short(folder)} does not exist: make it first")
        if pool.chat_template and not is_path(pool.chat_template):
            where = place(name, "pools", index, "chat_template")
            raise ConfigError(f"{where}: {short(pool.chat_template)} is no readable file: put the template in one")
        for number, source in enumerate(pool.discovery):
            try:
                source.check(pool.facts)
                for key, value in source.bounds().items():
                    if getattr(pool, key, "auto") not in ("auto", value):
                        raise ConfigurationError(
                            f"it says {key} {value}, the pool {getattr(pool, key)}: write one value"
                        )
            except ConfigurationError as error:
                raise ConfigError(f"{place(name, 'pools', index, 'discovery', number)}: {error}") from None


def doubts(config: Config, name: str = "config") -> list[str]:
    """What is no mistake but worth a word before the start: a line each, with its place as `check_files` has it."""
    return [
        f"{place(name, 'pools', index, 'discovery', number, 'path')}: {doubt}"
        for index, pool in enumerate(config.pools)
        for number, source in enumerate(pool.discovery)
        if (doubt := source.doubt())
    ]


def bounds_of(pool: PoolConfig) -> dict[str, int]:
    """Keys of `events`, block_size and hash_seed that the pool's sources bring along; the later source wins."""
    return {key: value for source in pool.discovery for key, value in source.bounds().items()}


def same_bounds(one: PoolConfig, other: PoolConfig) -> bool:
    return bounds_of(one) == bounds_of(other)


def bounded(limits: SyncLimits, bounds: Mapping[str, int]) -> SyncLimits:
    """`limits` with those of `bounds` in their place."""
    changes: dict[str, Any] = {
        key.removesuffix("_ms"): value / 1000 if key.endswith("_ms") else value
        for key, value in bounds.items()
        if hasattr(limits, key.removesuffix("_ms"))
    }
    return replace(limits, **changes)


@dataclass(slots=True)
class Built:
    """A pool with what it was made of."""

    given: PoolConfig
    pool: Pool


def with_names(built: Built) -> Built:
    """The same; its index remembers hashes where engines register: POST /query_by_hash belongs to the same API."""
    if any(isinstance(one, HttpDiscovery) for one in built.given.discovery):
        built.pool.directory.index.keep_names()
    return built


class Assembly:
    """Makes pools. One event loop; `make` may run in a thread of its own, because it loads a tokenizer (seconds)."""

    def __init__(
        self, config: Config, fleet: Fleet, transport: EventTransport, limits: SyncLimits, overrides: Overrides
    ):
        self._config = config
        self._fleet = fleet
        self._transport = transport
        self._limits = limits
        self._overrides = overrides

    def make(self, given: PoolConfig, before: Built | None = None) -> Built:
        """The pool that `given` describes, not yet live (`Pool.attach`). Parts of `before` whose options are equal are
        the same objects. Raises ConfigError or ConfigurationError."""
        was, old = (before.given, before.pool) if before else (None, None)

        def kept(*names: str) -> bool:
            return was is not None and all(getattr(was, name) == getattr(given, name) for name in names)

        options = prompter_options(given, self._config)
        if was is not None and old is not None and kept("remote_tokenizer"):
            same_prompter = prompter_options(was, self._config) == options
        else:
            same_prompter = False
        built = Built(
            given,
            Pool(
                given.name,
                (*given.models, *given.adapters),
                prompter=old.prompter if old and same_prompter else self._prompter(given, options),
                directory=old.directory
                if old and was and kept("block_size", "hash_seed") and same_bounds(was, given)
                else self._directory(given),
                fleet=self._fleet,
                router=self._router(given, given.scorer.name, given.scorer.parameters),
                scorer_name=given.scorer.name,
                routers={
                    name: self._router(given, name, {}) for name in given.allowed_scorers if name != given.scorer.name
                },
                loads=old.source if old and kept("load") else _loads(given),
                load_path=given.load.path,
                beside=old.beside if old and kept("speculation", "approximate") else _beside(given),
                shedding=_shedding(given),
                inflight=old.inflight if old else None,
                liveness=old.liveness if old and kept("liveness") else _liveness(given),
                overrides=self._overrides,
                session_header=given.sessions.header if given.sessions else None,
                publishers=tuple(one.publisher for one in given.publishers),
            ),
        )
        return with_names(built)

    def _prompter(self, given: PoolConfig, options: PrompterOptions) -> Prompter:
        # A tokenizer that does not load is logged with what it costs; the pool's requests then pass unscored.
        remote = RemoteTokenizer((), api=given.remote_tokenizer.api) if given.remote_tokenizer else None
        prompter = Prompter.load(options, strict=False, remote=remote)
        if not prompter.loaded and remote is None:
            log.error(
                "pool %s: without a tokenizer every request passes unscored, but for those given as token ids",
                given.name,
            )
        return prompter

    def _directory(self, given: PoolConfig) -> Directory:
        events, bounds = self._config.events, bounds_of(given)
        return Directory(
            self._transport,
            pool=given.name,
            block_size=bounds.get("block_size") if given.block_size == "auto" else given.block_size,
            seed=given.hash_seed,
            max_streams=bounds.get("max_streams", events.max_streams),
            max_blocks=bounds.get("max_blocks_per_stream", events.max_blocks_per_stream),
            max_unanchored=events.max_unanchored_blocks,
            limits=bounded(self._limits, bounds),
        )

    def _router(self, given: PoolConfig, scorer_name: str, parameters: dict[str, Any]) -> Router:
        """One scorer's router; sessions go around the scorer where they are on."""
        scorer = build_scorer(scorer_name, **parameters)
        if given.sessions:
            sessions = given.sessions
            scorer = with_sessions(
                scorer,
                mode=sessions.mode,
                session_slack=sessions.slack,
                session_ttl=sessions.ttl_ms / 1000,
                max_sessions=sessions.max_sessions,
            )
        decode = given.decode_scorer
        headers = self._config.headers
        return Router(
            scorer,
            max_endpoints=given.max_endpoints,
            dp=given.dp,
            rank_header=headers.rank,
            profile=profile_of(given, headers),
            decode_scorer=build_scorer(decode.name, **decode.parameters) if decode else None,
            split_threshold=given.pairs.split_threshold,
            split_min_tokens=given.pairs.split_min_tokens,
            own_delta=given.load.own_delta,
        )


def _loads(given: PoolConfig) -> LoadSource | None:
    stale = given.load.stale_after_ms
    stale_after = None if stale is None else stale / 1000
    if given.load.source == "prometheus":
        return PrometheusPoller(interval=given.load.interval_ms / 1000, stale_after=stale_after, clock=time.monotonic)
    if given.load.source == "heartbeat":
        return Heartbeats() if stale_after is None else Heartbeats(stale_after=stale_after)
    return None


def _beside(given: PoolConfig) -> Speculation | Approximate | None:
    if given.speculation:
        return Speculation(ttl=given.speculation.ttl_ms / 1000, max_blocks=given.speculation.max_blocks)
    if given.approximate:
        return Approximate(ttl=given.approximate.ttl_ms / 1000, capacity=given.approximate.capacity_blocks)
    return None


def _shedding(given: PoolConfig) -> Shedding | None:
    shed = given.shedding
    if shed is None:
        return None
    return Shedding(shed.queue_threshold, shed.usage_threshold, shed.spare_priority, shed.retry_after_s)


def _liveness(given: PoolConfig) -> Liveness | None:
    one = given.liveness
    if one is None:
        return None
    return Liveness(
        failures=one.failures,
        scrape_failures=one.scrape_failures,
        out_seconds=one.out_ms / 1000,
        max_out_seconds=one.max_out_ms / 1000,
    )
