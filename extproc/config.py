"""The configuration file: one frozen tree, parsed and checked once at start.

Unknown keys, wrong types, impossible values and values that contradict each other are errors that name the file, the
line, the path of the key, the value and what is allowed. Every key has a default, a unit and a line in
extproc/example.yaml, printed by `kvcar example-config` (a test compares).
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from extproc.config_keys import closest, explained, quoted
from extproc.config_types import (
    MAX_VALUES,
    Address,
    HeaderName,
    HttpUrl,
    JsonMapping,
    NetworkText,
    Node,
    RequestPath,
    immutable,
)
from extproc.config_types import ConfigError as ConfigError
from extproc.decision import PROFILES, Profile
from extproc.discovery_config import DiscoveryConfig
from extproc.instances import InstanceConfig as InstanceConfig
from extproc.instances import PoolFacts
from extproc.publishers import PublisherConfig
from extproc.scorers import build as build_scorer
from kvindex.networks import is_local

Tree = TypeVar("Tree", bound=BaseModel)

DEFAULT_PREFILL_HEADER = "x-prefiller-host-port"


def _block_size(value: Any) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65_536:
        return value
    raise ValueError("must be a number of tokens from 1 to 65536, or 'auto'")


def _scorer(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _check_scorer(name: str, **parameters: Any) -> None:
    """Raises ValueError that does not say once more that it is about a scorer: the path of the key does."""
    try:
        build_scorer(name, **parameters)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("scorer: ").removeprefix("scorer ")) from None


class Tls(Node):
    """PEM files of a listening port. With `client_ca` every client must show a certificate it signed."""

    cert: str
    key: str
    client_ca: str | None = None


class Listen(Node):
    """The ext_proc gRPC port."""

    address: Address = "127.0.0.1:9002"
    tls: Tls | None = None
    drain_wait_ms: int = Field(2500, ge=0, le=600_000)
    drain_grace_ms: int = Field(30_000, ge=0, le=3_600_000)
    observe_usage: bool = False
    endpoint_picker: bool = False
    workers: int = Field(1, ge=1, le=64)


class Admin(Node):
    """The HTTP port for health, metrics and queries."""

    address: Address = "127.0.0.1:9003"
    token: str | None = Field(None, min_length=8)
    allow_unauthenticated: bool = False
    tls: Tls | None = None
    conductor_form: Literal["motor", "mooncake"] = "motor"
    aibrix_metrics: bool = False

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        return is_local(self.address.rpartition(":")[0].strip("[]"))


class Startup(Node):
    """Health says NOT_SERVING until the fleet is known and connected streams are synchronized."""

    wait_ms: int = Field(5000, ge=0, le=600_000)


class Reload(Node):
    """Following changes of this file; SIGHUP works in any case."""

    watch: bool = True
    interval_ms: int = Field(1000, ge=50, le=600_000)


class ReplicasConfig(Node):
    """Other kvcar of the same fleet, asked for views that the engines cannot give."""

    peers: tuple[HttpUrl, ...] = Field(min_length=1)
    token: str | None = None
    interval_ms: int = Field(2000, ge=50, le=3_600_000)
    timeout_ms: int = Field(10_000, ge=10, le=600_000)


class LivenessConfig(Node):
    """Instances that do not answer get no requests for a while."""

    failures: int = Field(2, ge=1, le=1000)
    scrape_failures: int = Field(3, ge=1, le=1000)
    out_ms: int = Field(5000, ge=100, le=3_600_000)
    max_out_ms: int = Field(60_000, ge=100, le=3_600_000)


class Log(Node):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class Paths(Node):
    """Where requests with prompts arrive, beside the usual paths."""

    bases: tuple[RequestPath, ...] = ()
    rewrites: dict[RequestPath, RequestPath] = Field(default_factory=dict)


class TraceConfig(Node):
    """A log of decisions that `kvcar simulate` replays; holds hashes of prefixes, no text."""

    path: str
    max_bytes: int = Field(1 << 30, ge=1024)


def _header_value(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    if not text or text != text.strip() or not (text.isascii() and text.isprintable()):
        raise ValueError("the value of a header must be printable ASCII without blanks around it")
    return value


class TracingConfig(Node):
    """OpenTelemetry spans of decisions, sent by OTLP; needs kvcar[otel]."""

    endpoint: HttpUrl
    protocol: Literal["http", "grpc"] = "http"
    sample_ratio: float = Field(1.0, ge=0, le=1)
    headers: dict[HeaderName, Annotated[SecretStr, AfterValidator(_header_value)]] = Field(default_factory=dict)
    service_name: str = Field("kvcar", min_length=1)


class Headers(Node):
    """Names of the headers kvcar sets; a client's own destination, rank and prefill are always removed."""

    destination: HeaderName = "x-gateway-destination-endpoint"
    rank: HeaderName = "x-data-parallel-rank"
    prefill: HeaderName = DEFAULT_PREFILL_HEADER
    scorer: HeaderName = "x-kvcar-scorer"
    priority: HeaderName = "x-kvcar-priority"
    explain: bool = False
    stateful_session: HeaderName | None = None


class Limits(Node):
    max_body_bytes: int = Field(33_554_432, ge=1024, le=1 << 31)
    decide_timeout_ms: int = Field(1000, ge=10, le=60_000)
    tokenize_timeout_ms: int = Field(500, ge=1, le=60_000)
    tokenizer_threads: int = Field(2, ge=1, le=64)
    token_cache_bytes: int = Field(256 << 20, ge=0)


class Events(Node):
    """Bounds and pacing of the KV event streams, for all pools together where not said otherwise."""

    max_streams: int = Field(128, ge=1, le=4096)
    max_blocks_per_stream: int = Field(262_144, ge=1)
    max_unanchored_blocks: int = Field(65_536, ge=0)
    max_message_bytes: int = Field(8 << 20, ge=1024)
    max_buffered_bytes: int = Field(16 << 20, ge=1024)
    max_replays: int = Field(4, ge=1, le=64)
    replay_timeout_ms: int | None = Field(None, ge=10, le=600_000)
    resync_interval_ms: int = Field(30_000, ge=100)
    replay_attempts: int = Field(3, ge=1, le=100)
    backoff_initial_ms: int = Field(1000, ge=1)
    backoff_max_ms: int = Field(30_000, ge=1)
    reconnect_initial_ms: int = Field(100, ge=1)
    reconnect_max_ms: int = Field(5000, ge=1)


class LoadConfig(Node):
    """Where the load that scorers see comes from."""

    source: Literal["inflight", "prometheus", "heartbeat"] = "inflight"
    interval_ms: int = Field(500, ge=50, le=60_000)
    stale_after_ms: int | None = Field(None, ge=100, le=600_000)
    path: RequestPath = "/metrics"
    own_delta: bool = False


class RemoteTokenizerConfig(Node):
    """Ask the pool's own engines for tokens where nothing can be loaded here: network calls on the request path."""

    api: Literal["render", "tokenize"] = "render"


class Pairs(Node):
    """Prefill/decode pairs, for pools with prefill instances."""

    profile: Literal["llm-d", "xllm", "plain"] = "llm-d"
    prefill_header: HeaderName | None = None
    decode_header: HeaderName | None = None
    split_threshold: int = Field(0, ge=0)
    split_min_tokens: int = Field(0, ge=0)


class Sessions(Node):
    """Requests of one session key stay together."""

    header: HeaderName = "x-session-id"
    mode: Literal["prefer", "pin", "hash"] = "prefer"
    slack: float = Field(0.05, ge=0, le=1)
    ttl_ms: int = Field(300_000, ge=1)
    max_sessions: int = Field(100_000, ge=1)


class SpeculationConfig(Node):
    """A routed prompt counts as cached until events say so."""

    ttl_ms: int = Field(2000, ge=1)
    max_blocks: int = Field(200_000, ge=1)


class ApproximateConfig(Node):
    """Instead of events: what was sent to each engine, in an LRU of its size."""

    ttl_ms: int = Field(120_000, ge=1)
    capacity_blocks: int = Field(31_250, ge=1)


class SheddingConfig(Node):
    """429 while every engine is saturated."""

    queue_threshold: float = Field(5.0, gt=0)
    usage_threshold: float = Field(0.8, gt=0, le=1)
    spare_priority: int | None = None
    retry_after_s: int = Field(1, ge=1)


class EndpointsFileConfig(Node):
    """Keeps the file that Envoy watches for the engines' addresses (EDS) in step with the pool."""

    path: str = Field(min_length=1)
    cluster: str = Field("engines", min_length=1)


class ScorerConfig(BaseModel):
    """`name` and the scorer's own parameters, which the scorer checks."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @model_validator(mode="after")
    def _known(self) -> ScorerConfig:
        _check_scorer(self.name, **(self.model_extra or {}))
        return self

    @property
    def parameters(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class Pool(Node):
    """Instances that serve the same model, and how requests for it are tokenized and routed."""

    name: str = Field(min_length=1, max_length=100)
    models: tuple[str, ...] = Field(min_length=1)
    adapters: tuple[str, ...] = ()
    tokenizer: str
    tokenizer_allow_download: bool = False
    tokenizer_revision: str | None = None
    remote_tokenizer: RemoteTokenizerConfig | None = None
    incremental: bool = True
    verify_every: int = Field(512, ge=0)
    chat_template: str | None = None
    chat_template_kwargs: JsonMapping = Field(default_factory=dict)
    content_format: Literal["auto", "string", "openai"] = "auto"
    exclude_tools_when_tool_choice_none: bool = False
    trust_request_chat_template: bool = False
    renderer: Literal["auto", "jinja", "native"] = "auto"
    max_model_len: int | None = Field(None, ge=1)
    engine: Literal["vllm", "sglang", "xllm"] = "vllm"
    block_size: Annotated[int | Literal["auto"], PlainValidator(_block_size)] = "auto"
    hash_seed: int = Field(1024, ge=0, lt=1 << 64)
    dialect: Literal["auto", "vllm", "sglang", "xllm", "mooncake"] = "auto"
    recovery: Literal["auto", "none", "history", "snapshot"] = "auto"
    dp: Literal["min", "target"] = "min"
    scorer: Annotated[ScorerConfig, BeforeValidator(_scorer)] = Field(default_factory=lambda: ScorerConfig(name="car"))
    decode_scorer: Annotated[ScorerConfig | None, BeforeValidator(_scorer)] = None
    allowed_scorers: tuple[str, ...] = ()
    load: LoadConfig = LoadConfig()
    pairs: Pairs = Pairs()
    sessions: Sessions | None = None
    speculation: SpeculationConfig | None = None
    approximate: ApproximateConfig | None = None
    shedding: SheddingConfig | None = None
    liveness: LivenessConfig | None = LivenessConfig()
    max_endpoints: int = Field(3, ge=1, le=64)
    instances: tuple[InstanceConfig, ...] = ()
    publishers: tuple[PublisherConfig, ...] = ()
    discovery: tuple[DiscoveryConfig, ...] = ()
    networks: tuple[NetworkText, ...] = ()
    endpoints_file: EndpointsFileConfig | None = None

    @property
    def facts(self) -> PoolFacts:
        """What every instance of the pool has in common."""
        recovery = None if self.recovery == "auto" else self.recovery
        return PoolFacts(self.name, self.models[0], self.dialect, recovery)

    @model_validator(mode="after")
    def _consistent(self) -> Pool:
        _unique((item.name for item in self.instances), "instances", "name")
        _unique((item.address for item in self.instances), "instances", "address")
        _unique((item.name for item in self.publishers), "publishers", "name")
        _unique((item.events for item in self.publishers), "publishers", "events endpoint")
        for publisher in self.publishers:
            unknown = set(publisher.members) - {item.name for item in self.instances}
            if unknown and not self.discovery:
                raise ValueError(f"publisher {publisher.name!r}: no instance has the name {', '.join(sorted(unknown))}")
        _unique(self.models + self.adapters, "models and adapters", "model name")
        for item in self.instances:
            if self.recovery in ("history", "snapshot") and item.events and not item.replay:
                raise ValueError(f"recovery {self.recovery} needs a replay endpoint, instance {item.name!r} has none")
        if self.approximate and self.speculation:
            raise ValueError("approximate and speculation exclude each other: approximate mode reads no events")
        if self.approximate and self.block_size == "auto":
            raise ValueError("approximate mode needs a block_size: there are no events to learn it from")
        for name in self.allowed_scorers:
            try:
                _check_scorer(name)
            except ValueError as error:
                raise ValueError(f"allowed_scorers: {error}") from None
        return self


class Config(Node):
    """The whole file."""

    listen: Listen = Listen()
    admin: Admin = Admin()
    log: Log = Log()
    startup: Startup = Startup()
    reload: Reload = Reload()
    replicas: ReplicasConfig | None = None
    trace: TraceConfig | None = None
    tracing: TracingConfig | None = None
    paths: Paths = Paths()
    headers: Headers = Headers()
    limits: Limits = Limits()
    events: Events = Events()
    pools: tuple[Pool, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        _unique((pool.name for pool in self.pools), "pools", "name")
        _unique((name for pool in self.pools for name in pool.models + pool.adapters), "pools", "model name")
        _unique((item.name for pool in self.pools for item in pool.instances), "pools", "instance name")
        _unique(
            (pool.endpoints_file.path for pool in self.pools if pool.endpoints_file), "pools", "endpoints_file.path"
        )
        if self.listen.address == self.admin.address and not self.listen.address.endswith(":0"):
            raise ValueError(
                f"listen.address and admin.address are both {self.listen.address}: each needs its own port"
            )
        if self.limits.tokenize_timeout_ms > self.limits.decide_timeout_ms:
            raise ValueError("limits.tokenize_timeout_ms is above limits.decide_timeout_ms, of which it is a part")
        if not (self.admin.is_local or self.admin.token or self.admin.allow_unauthenticated):
            raise ValueError(
                f"admin.address {self.admin.address} is reachable from outside: set admin.token, "
                "or admin.allow_unauthenticated: true if the network protects it"
            )
        return self


def pair_headers(config: Config) -> tuple[str, ...]:
    """Headers that tell prefill/decode pairs to the engines of this configuration."""
    pools = (pool for pool in config.pools if pool.discovery or any(one.role != "default" for one in pool.instances))
    profiles = [profile_of(pool, config.headers) for pool in pools]
    return tuple(name for one in profiles for name in (one.prefill_header, one.decode_header) if name)


def profile_of(pool: Pool, headers: Headers) -> Profile:
    """How the pool's prefill/decode pairs are told, with the configured header names."""
    profile = PROFILES[pool.pairs.profile]
    prefill = headers.prefill if profile.prefill_header == DEFAULT_PREFILL_HEADER else profile.prefill_header
    return replace(
        profile,
        prefill_header=pool.pairs.prefill_header or prefill,
        decode_header=pool.pairs.decode_header or profile.decode_header,
    )


def load(path: Path) -> Config:
    """The checked configuration of a YAML file. Raises ConfigError with every mistake found, one line each."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    return parse(text, str(path))


def parse(text: str, name: str = "<config>") -> Config:
    """As `load`, from text; `name` is how messages call the file."""
    return parse_as(Config, text, name, needs="pools")


def parse_as(kind: type[Tree], text: str, name: str, *, needs: str) -> Tree:
    """The checked tree of any kind from YAML text; `needs` is its required key. Raises ConfigError as `load` does."""
    try:
        node = yaml.compose(text, Loader=_StrictLoader)
        tree = yaml.load(text, Loader=_StrictLoader)  # a SafeLoader subclass
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        raise ConfigError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    except RecursionError:
        raise ConfigError(f"{name}: not valid YAML: nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits, an impossible date
        raise ConfigError(f"{name}: not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        holds = "is empty" if tree is None else f"holds {_short(tree)}"
        raise ConfigError(f"{name}: must be a mapping with at least the key '{needs}'; the file {holds}")
    try:
        plain = immutable(tree, itertools.count(1))
    except OverflowError:
        raise ConfigError(f"{name}: has more than {MAX_VALUES:,} values, aliases (*name) counted each time") from None
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply, or an alias (*name) inside what it stands for") from None
    except UnicodeEncodeError:
        raise ConfigError(
            f"{name}: a text holds half a surrogate pair (\\ud800 to \\udfff), which is no character"
        ) from None
    try:
        return kind.model_validate(plain)
    except ValidationError as error:
        # pydantic counts items with errors as missing: that a list is too short then is no mistake of its own
        found = [item for item in error.errors() if not (item["type"] == "too_short" and item["input"])]
        found.sort(key=lambda item: item["type"] == "missing")  # a key that is misspelt is missing too: the cause first
        raise ConfigError("\n".join(_line(kind, name, node, item) for item in found)) from None


def _unique(values: Iterable[Hashable], where: str, what: str) -> None:
    seen: set[Hashable] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{where}: {what} {value!r} is given twice")
        seen.add(value)


_UNION_TAGS = {"int", "constrained-int", "literal['auto']", "function-after", "str"}


def _line(kind: type[BaseModel], name: str, root: yaml.Node | None, error: ErrorDetails) -> str:
    """'file:line: path: what is wrong (got value)' for one pydantic error."""
    path, line = _found(root, error["loc"])
    message = _MESSAGES.get(error["type"], error["msg"]).removeprefix("Value error, ")
    message = message.format(**error.get("ctx", {})) if error["type"] in _MESSAGES else message
    message = message.replace("Input should be", "must be", 1)
    if error["type"] == "extra_forbidden" and (more := explained(kind, error["loc"])):
        message = message.replace("key;", f"key{more}", 1)
    near = _near(error)
    got = (
        ""
        if error["type"] in ("missing", "extra_forbidden") or isinstance(error["input"], dict)
        else (f" (got {_short(error['input'])})")
    )
    if (
        isinstance(error["input"], BaseModel)
        or path.endswith("token")
        or path.startswith("tracing.headers")
        or "@" in str(error["input"])
    ):
        got = ""
    return f"{name}{line}: {path + ': ' if path else ''}{message}{got}" + (f"; did you mean '{near}'?" if near else "")


def place(name: str, *parts: str | int) -> str:
    """'file:line: path' of a key of the file `name`, as the errors of `load` begin; for what is found out later.

    Reads the file again; without the line where it cannot be read.
    """
    try:
        root = yaml.compose(Path(name).read_text("utf-8"), Loader=_StrictLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        root = None
    path, line = _found(root, parts)
    return f"{name}{line}: {path}"


def _found(root: yaml.Node | None, parts: Sequence[str | int]) -> tuple[str, str]:
    """(path, ':line') of a place in the tree; the line of what is around it where it is not written down."""
    path, node = "", root
    for part in parts:
        below = _child(node, part)
        if below is None and isinstance(part, str) and (part in _UNION_TAGS or "[" in part or _is_type(node, part)):
            continue  # the tag of a union member is no key of the file
        path += f"[{part}]" if isinstance(part, int) else (f".{part}" if path else str(part))
        node = below if below is not None else node
    return path, f":{node.start_mark.line + 1}" if node is not None else ""


def _near(error: ErrorDetails) -> str | None:
    """What was meant by a value that is none of a closed list."""
    given = error.get("ctx", {})
    if error["type"] == "literal_error":
        return closest(error["input"], quoted(given["expected"]))
    if error["type"] == "union_tag_invalid":
        return closest(given["tag"], quoted(given["expected_tags"]))
    return None


_MESSAGES = {
    "missing": "this key is required",
    "extra_forbidden": "unknown key; `kvcar example-config` prints every key",
    "tuple_type": "must be a list",
    "too_short": "must hold at least 1 entry",
    "union_tag_invalid": "type '{tag}' is not known, expected one of {expected_tags}",
    "union_tag_not_found": "the key 'type' is required",
}


def _child(node: yaml.Node | None, part: str | int) -> yaml.Node | None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == str(part):
                return value  # type: ignore[no-any-return]
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part]  # type: ignore[no-any-return]
    return None


def _is_type(node: yaml.Node | None, part: str) -> bool:
    """Whether the node says `type: part`, which is how members of a union are told apart."""
    kind = _child(node, "type")
    return isinstance(kind, yaml.ScalarNode) and kind.value == part


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice: the first one would be lost without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain word", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)
