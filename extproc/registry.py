"""Instances that register themselves, as the conductors of MindIE Motor and Mooncake have it. Pure.

    register {instance_id, dp_rank, endpoints ...} --+
    unregister                                       +--> Registry --> workers, services, one Instance a worker
    time without a repetition                      --+

A worker is (context, instance_id) and has ranks, each registered on its own. Its dp_size is what the registrations say,
else its highest rank + 1; a rank in between that has not come yet counts as one that holds nothing.

What a registration does, by what is known:

    nothing of that rank                  taken
    the very same                         taken for a sign of life; nothing restarts
    other facts of that rank              form motor: replaces them. Form mooncake: refused, unregister first
    facts that all ranks share differ     (block size, address, role, dp_size) refused while another rank is registered
    an endpoint that another rank has     refused: events are never mixed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvindex.discovery.port_offset import CPU, DISK, MEDIA, NPU
from kvindex.endpoints import check_address
from kvindex.errors import ConfigurationError
from kvindex.fleet import PUSHED, Instance, PoolPublisher, StreamEndpoint

TENANT = "default"
MOTOR, MOONCAKE = "motor", "mooncake"
DIALECT_OF = {"vllm": "auto", "sglang": "sglang", "xllm": "xllm"}
"""`type` of a registration, in lower case -> dialect. Type vLLM says little: its plugins send other events."""
POOL_TYPE = "mooncake"
"""`type` of what is no engine but a store that several share."""


class Context(NamedTuple):
    """What has an index of its own. model: a served name; of what `kvcar serve` has registered, its pool's name."""

    model: str
    tenant: str = TENANT


class Worker(NamedTuple):
    context: Context
    instance_id: str


class Rejected(ValueError):
    """A request that is not taken. status: of the HTTP answer; reason: a word for programs."""

    def __init__(self, message: str, status: int, reason: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Registration:
    """One rank of one worker.

    model          `modelname` as given
    kind           `type` as given
    block_size     tokens a block, None = not said
    endpoint       of the events; media: medium (npu, cpu, disk) -> endpoint, where they are told apart
    store_backend  Mooncake, Memcache or YuanRong; a pool's own, or the one an engine uses
    lora_name, salt, node_id   kept and shown; the events themselves say which adapter and salt a block belongs to
    address, role, dp_size, topic   not in the conductors' API: what routing needs, and an exact ZMQ topic
    """

    worker: Worker
    model: str
    dp_rank: int = 0
    kind: str = "vLLM"
    block_size: int | None = None
    endpoint: str = ""
    media: Mapping[str, str] = field(default_factory=dict)
    replay: str = ""
    store_backend: str = ""
    lora_name: str = ""
    salt: str = ""
    node_id: str = ""
    address: str = ""
    role: str = "default"
    dp_size: int | None = None
    topic: str | None = None

    @property
    def is_pool(self) -> bool:
        return self.kind.lower() == POOL_TYPE

    @property
    def shared(self) -> tuple[object, ...]:
        """What all ranks of a worker have in common."""
        return (self.is_pool, self.block_size, self.address, self.role, self.dp_size)

    @property
    def events(self) -> str:
        """Where the events of the engine itself come from."""
        return self.media.get(NPU, "") or self.endpoint or PUSHED

    @property
    def endpoints(self) -> frozenset[str]:
        return frozenset(one for one in (self.endpoint, self.replay, *self.media.values()) if one)


class Removed(NamedTuple):
    worker: Worker
    dp_rank: int

    def __str__(self) -> str:
        """As Mooncake's answer has it."""
        return f"{self.worker.instance_id}|{self.worker.context.tenant}|{self.dp_rank}"


class Registry:
    """Who is registered.

    form       "motor" or "mooncake": what becomes of a registration that differs from the one before
    max_ranks  bound over all workers
    """

    def __init__(self, *, form: str = MOTOR, max_ranks: int = 4096) -> None:
        self.form = form
        self.max_ranks = max_ranks
        self._ranks: dict[Worker, dict[int, Registration]] = {}
        self._seen: dict[tuple[Worker, int], float] = {}

    def __len__(self) -> int:
        """Registered ranks."""
        return len(self._seen)

    def __iter__(self) -> Iterator[Registration]:
        """By model, tenant, id and rank."""
        for worker in sorted(self._ranks):
            yield from (self._ranks[worker][rank] for rank in sorted(self._ranks[worker]))

    def ranks(self, worker: Worker) -> Mapping[int, Registration]:
        """The worker's registrations by rank; {} = not known."""
        return self._ranks.get(worker, {})

    def workers(self, context: Context | None = None) -> list[Worker]:
        return [worker for worker in sorted(self._ranks) if context in (None, worker.context)]

    def block_size(self, context: Context) -> int | None:
        """What the first registration of this context said."""
        for worker in self.workers(context):
            for given in self._ranks[worker].values():
                if given.block_size is not None:
                    return given.block_size
        return None

    def register(self, given: Registration, now: float) -> bool:
        """True when something changed. Raises Rejected and then changes nothing. O(registered ranks)."""
        known = self._ranks.get(given.worker, {})
        before = known.get(given.dp_rank)
        if before != given:
            self._check(given, known, before)
            self._ranks.setdefault(given.worker, {})[given.dp_rank] = given
        self._seen[given.worker, given.dp_rank] = now
        return before != given

    def unregister(
        self, instance_id: str, *, dp_rank: int | None = None, tenant: str = TENANT, model: str | None = None
    ) -> list[Removed]:
        """What went: one rank or, with None, all of them; in every model, or in one. Raises Rejected (404)."""
        found = [
            Removed(worker, rank)
            for worker, ranks in sorted(self._ranks.items())
            if worker.instance_id == instance_id and worker.context.tenant == tenant
            if model in (None, worker.context.model)
            for rank in sorted(ranks)
            if dp_rank in (None, rank)
        ]
        if not found:
            rank_text = "" if dp_rank is None else f" dp_rank={dp_rank}"
            raise Rejected(
                f"instance_id={instance_id} tenant={tenant}{rank_text} is not registered", 404, "not_registered"
            )
        self._drop(found)
        return found

    def expire(self, now: float, after: Callable[[Context], float | None]) -> list[Removed]:
        """Drops what was not repeated in time; `after`: seconds by context, None = never."""
        late = [
            Removed(*key)
            for key, seen in self._seen.items()
            if (limit := after(key[0].context)) is not None and now - seen > limit
        ]
        self._drop(late)
        return late

    def _drop(self, gone: list[Removed]) -> None:
        for worker, rank in gone:
            del self._seen[worker, rank]
            ranks = self._ranks[worker]
            del ranks[rank]
            if not ranks:
                del self._ranks[worker]

    def _check(self, given: Registration, known: Mapping[int, Registration], before: Registration | None) -> None:
        worker = given.worker
        if before is None and len(self._seen) >= self.max_ranks:
            raise Rejected(f"{len(self._seen)} ranks are registered, which is the bound", 503, "full")
        if before is not None and self.form == MOONCAKE:
            raise self.conflict(
                f"{worker.instance_id} rank {given.dp_rank} is registered with other values: unregister it first"
            )
        others = [one for rank, one in known.items() if rank != given.dp_rank]
        if others and others[0].shared != given.shared:
            raise self.conflict(
                f"{worker.instance_id}: rank {others[0].dp_rank} is registered with another type, block_size, address,"
                " role or dp_size, which all ranks share: unregister the instance first"
            )
        size = self.block_size(worker.context)
        only = before is not None and len(self.workers(worker.context)) == 1 and not others
        if size is not None and given.block_size not in (None, size) and not only:
            raise self.conflict(
                f"model {given.model} has blocks of {size} tokens, this registration of {given.block_size}"
            )
        for other in self.workers(worker.context):
            for one in self._ranks[other].values():
                taken = one.endpoints & given.endpoints
                if taken and one is not before:
                    raise self.conflict(
                        f"endpoint {sorted(taken)[0]} is registered by {other.instance_id} rank {one.dp_rank}:"
                        " unregister that first"
                    )

    def conflict(self, message: str) -> Rejected:
        return Rejected(message, 400 if self.form == MOONCAKE else 409, "invalid_registration")


def instance_of(
    ranks: Mapping[int, Registration], *, pool: str, dialect: str = "auto", recovery: str | None = None
) -> Instance:
    """A worker's ranks as discovery announces an instance.

    dialect   "auto" = by the registered type. Raises ConfigurationError that names instance, value and remedy.
    """
    one = next(iter(ranks.values()))
    worker = one.worker
    instance = Instance(
        worker.instance_id,
        one.address,
        pool=pool,
        role=one.role,
        dp_size=one.dp_size or max(ranks) + 1,
        events=tuple(
            stream for rank in sorted(ranks) for stream in _streams(ranks[rank], dialect=dialect, recovery=recovery)
        ),
        model=one.model,
    )
    instance.check()
    return instance


def _streams(given: Registration, *, dialect: str, recovery: str | None) -> Iterator[StreamEndpoint]:
    """The engine's own stream of one rank, and those of a store beside it that publishes per rank and medium."""
    rank, spoken = given.dp_rank, DIALECT_OF[given.kind.lower()] if dialect == "auto" else dialect
    if given.events == PUSHED:
        yield StreamEndpoint(rank, PUSHED, dialect=spoken)
    else:
        yield StreamEndpoint(rank, given.events, given.replay or None, given.topic, spoken, recovery)
    subscribed = {given.events}
    for medium in (CPU, DISK):
        endpoint = given.media.get(medium)
        if endpoint and endpoint not in subscribed:  # one port may serve several media: its events say which
            subscribed.add(endpoint)
            yield StreamEndpoint(rank, endpoint, None, given.topic, medium=medium)


def publisher_of(given: Registration) -> PoolPublisher:
    """A registered store that all workers of its context share. Raises ConfigurationError."""
    stream = StreamEndpoint(0, given.events, given.replay or None, given.topic, "mooncake", medium=CPU)
    name = f"{given.worker.instance_id}/{given.dp_rank}" if given.dp_rank else given.worker.instance_id
    publisher = PoolPublisher(name, stream)
    publisher.check()
    return publisher


def workers_page(registry: Registry, *, model: str | None = None, tenant: str | None = None) -> list[dict[str, Any]]:
    """`workers` of `GET /workers`."""
    page = []
    for worker in registry.workers():
        ranks = registry.ranks(worker)
        one = next(iter(ranks.values()))
        if model not in (None, one.model) or tenant not in (None, worker.context.tenant):
            continue
        page.append(
            {
                "instance_id": worker.instance_id,
                "model_name": one.model,
                "tenant_id": worker.context.tenant,
                "block_size": one.block_size,
                "endpoints": {
                    str(rank): dict(ranks[rank].media) if ranks[rank].media else ranks[rank].endpoint
                    for rank in sorted(ranks)
                },
            }
        )
    return page


def services_page(registry: Registry) -> list[dict[str, Any]]:
    """`services` of `GET /services`: one entry a rank."""
    return [
        {
            "InstanceID": one.worker.instance_id,
            "DPRank": one.dp_rank,
            "Endpoint": one.endpoint or one.media.get(NPU, ""),
            "MediumEndpoints": dict(one.media),
            "ReplayEndpoint": one.replay,
            "Type": one.kind,
            "ModelName": one.model,
            "LoraName": one.lora_name,
            "TenantID": one.worker.context.tenant,
            "BlockSize": one.block_size,
            "AdditionalSalt": one.salt,
            "StoreBackend": one.store_backend,
        }
        for one in registry
    ]


class Shape:
    """Reads the fields of one body and says what is wrong with them, in the words and status of the form."""

    def __init__(self, fields: object, form: str) -> None:
        self.status = 400 if form == MOONCAKE else 422
        if not isinstance(fields, dict):
            raise self.wrong("the body must be an object")
        self.fields: Mapping[str, Any] = fields

    def wrong(self, message: str) -> Rejected:
        return Rejected(message, self.status, "invalid_body")

    def text(self, key: str, *, required: bool = False) -> str:
        value = self.fields.get(key)
        if value is None:
            value = ""
        if not isinstance(value, str) or len(value) > 1000:
            raise self.wrong(f"{key} must be a text of at most 1000 letters")
        if not value and required:
            raise self.wrong(f"{key} is missing")
        return value

    def number(self, key: str, low: int, high: int) -> int | None:
        value = self.fields.get(key)
        if value is not None and (value.__class__ is not int or not low <= value <= high):
            raise self.wrong(f"{key} must be a whole number from {low} to {high}")
        return value


def parse_registration(fields: object, form: str) -> Registration:
    """A body of `POST /register`. Raises Rejected that names the field. Unknown fields are ignored."""
    shape = Shape(fields, form)
    kind = shape.text("type") or "vLLM"
    if kind.lower() not in DIALECT_OF and kind.lower() != POOL_TYPE:
        raise shape.wrong(f"type {kind!r} is not known: write vLLM, SGLang, xLLM or Mooncake")
    model = shape.text("modelname", required=True)
    given = Registration(
        Worker(Context(model, shape.text("tenant_id") or TENANT), shape.text("instance_id", required=True)),
        model,
        shape.number("dp_rank", 0, 4095) or 0,
        kind,
        shape.number("block_size", 1, 65_536),
        shape.text("endpoint"),
        _media(shape),
        shape.text("replay_endpoint"),
        shape.text("store_backend"),
        shape.text("lora_name"),
        shape.text("additionalsalt"),
        shape.text("node_id"),
        shape.text("address"),
        shape.text("role") or "default",
        shape.number("dp_size", 1, 4096),
        shape.text("topic") if shape.fields.get("topic") is not None else None,
    )
    if given.replay and given.events == PUSHED:
        raise shape.wrong("replay_endpoint needs endpoint, or medium_endpoints.npu")
    if given.dp_size is not None and given.dp_rank >= given.dp_size:
        raise shape.wrong(f"dp_rank {given.dp_rank} is not below dp_size {given.dp_size}")
    try:
        if given.address:  # a host name would never be matched, and Envoy refuses a whole endpoints file for it
            check_address(given.address, literal=True)
        if given.is_pool:
            publisher_of(given)
        else:
            instance_of({given.dp_rank: given}, pool="")
    except ConfigurationError as error:
        raise shape.wrong(str(error)) from None
    return given


def _media(shape: Shape) -> dict[str, str]:
    given = shape.fields.get("medium_endpoints")
    if given is None:
        return {}
    if not isinstance(given, dict) or not all(isinstance(one, str) for one in (*given, *given.values())):
        raise shape.wrong("medium_endpoints must be an object of texts")
    found: dict[str, str] = {}
    for word, endpoint in given.items():
        medium = MEDIA.get(word.lower())
        if medium is None:
            raise shape.wrong(f"medium_endpoints: {word!r} is none of {', '.join(sorted(MEDIA))}")
        if endpoint:
            found[medium] = endpoint
    return found
