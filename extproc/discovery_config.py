"""`pools[*].discovery`: where a pool's instances come from, beside those written down. One class a source.

Each class checks its keys and makes its source with `source(facts)`, which imports what it needs only then: a client
library of a registry that nobody uses is never loaded.
"""

from __future__ import annotations

import ipaddress
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, PrivateAttr, model_validator

from extproc.config_types import EngineAddress, HttpUrl, Node, RequestPath, is_path, short
from extproc.instances import PoolFacts
from kvindex.discovery.base import Source
from kvindex.discovery.template import Template
from kvindex.errors import ConfigurationError
from kvindex.fleet import Instance

log = logging.getLogger(__name__)


class DiscoveryNode(Node):
    """Keys that every source has."""

    def source(self, facts: PoolFacts) -> Source:
        """The source that these options describe, not yet running."""
        raise NotImplementedError

    def check(self, facts: PoolFacts) -> None:
        """Files that the options name can be used. Raises ConfigurationError that names file and remedy."""

    @property
    def by_hand(self) -> bool:
        """Whether the operator writes what it finds, so that its instances may be anywhere (kvindex/networks.py)."""
        return False

    def bounds(self) -> Mapping[str, int]:
        """Keys of `events`, block_size and hash_seed that the source sets for its pool."""
        return {}

    def doubt(self) -> str | None:
        """What is wrong with its `path` today and may come right by itself."""
        return None


class HttpDiscovery(DiscoveryNode):
    """Instances that register themselves at the admin port (`POST /register`, as kv-conductor has it)."""

    type: Literal["http"]
    expire_after_ms: int | None = Field(None, ge=1000)

    def source(self, facts: PoolFacts) -> Source:
        from kvindex.discovery.registered import Registered

        expire_after = None if self.expire_after_ms is None else self.expire_after_ms / 1000
        return Registered(facts.name, dialect=facts.dialect, recovery=facts.recovery, expire_after=expire_after)


class EtcdAccess(Node):
    """An etcd 3.4 or later, and where in it xLLM's engines register."""

    endpoints: tuple[HttpUrl, ...] = Field(min_length=1)
    namespace: str = ""
    username: str = ""
    password: str = ""
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    health_path: RequestPath = "/health"

    def check(self, facts: PoolFacts) -> None:
        self.follow(facts)

    def follow(self, facts: PoolFacts, ports: Any = None) -> Source:
        """Raises ConfigurationError for TLS files that cannot be read. `ports`: a PortRule, None = xLLM's own."""
        from kvindex.discovery.etcd import EtcdSource
        from kvindex.discovery.etcd_client import EtcdOptions
        from kvindex.discovery.xllm_registry import Registry

        options = EtcdOptions(self.endpoints, self.username, self.password, self.ca, self.cert, self.key)
        registry = Registry(
            pool=facts.name,
            model=facts.model,
            namespace=self.namespace,
            ports=ports,
            dialect=_xllm(facts),
            recovery=facts.recovery,
        )
        return EtcdSource(options, registry, namespace=self.namespace, health_path=self.health_path)


class EtcdDiscovery(EtcdAccess, DiscoveryNode):
    """Engines that register as xLLM's do; their event ports by xLLM's rule."""

    type: Literal["etcd"]
    event_port_offset: int = Field(10_000, ge=1, le=65535)
    replay_port_offset: int = Field(30_000, ge=1, le=65535)
    topic: str = "xllm-kv"

    def source(self, facts: PoolFacts) -> Source:
        from kvindex.discovery.xllm_registry import PortRule

        return self.follow(facts, PortRule(self.event_port_offset, self.replay_port_offset, self.topic))


class XllmFileDiscovery(DiscoveryNode):
    """The xLLM service's JSON file: static streams, or the port rule for what is registered in `etcd`. Its limits are
    the pool's. Read with the configuration; of static streams alone, whenever it changes."""

    type: Literal["xllm-file"]
    path: str
    addresses: dict[str, EngineAddress] = Field(default_factory=dict)
    etcd: EtcdAccess | None = None
    _content: bytes | None = PrivateAttr(None)

    def model_post_init(self, context: Any, /) -> None:
        """What was read is a part of the options: a changed file makes them other options."""
        try:
            self._content = Path(self.path).read_bytes()
        except OSError:
            pass  # `check` says it, with the place

    def _parse(self, text: str | bytes, facts: PoolFacts | None = None) -> Any:
        from kvindex.discovery.xllm_file import parse

        facts = facts or PoolFacts("", "")
        return parse(
            text,
            pool=facts.name,
            model=facts.model,
            dialect=_xllm(facts),
            recovery=facts.recovery,
            addresses=self.addresses,
        )

    def _read(self, facts: PoolFacts | None = None) -> Any:
        if self._content is None:
            raise ConfigurationError(f"{self.path}: cannot be read: give the path of the xLLM service's JSON file")
        try:
            found = self._parse(self._content, facts)
        except ConfigurationError as error:
            raise ConfigurationError(f"{self.path}: {error}") from None
        if found.ports is not None and self.etcd is None:
            raise ConfigurationError(f"{self.path} has `discovery`: say under `etcd` where the engines register")
        return found

    @property
    def by_hand(self) -> bool:
        return self.etcd is None

    def check(self, facts: PoolFacts) -> None:
        self._read(facts)
        if self.etcd is not None:
            self.etcd.check(facts)

    def bounds(self) -> Mapping[str, int]:
        found = self._read()
        return {**found.limits, "block_size": found.block_size, "hash_seed": found.hash_seed}

    def source(self, facts: PoolFacts) -> Source:
        from kvindex.discovery.file import FileSource

        found = self._read(facts)
        if found.ignored:
            log.warning("%s: keys that mean nothing here: %s", self.path, ", ".join(found.ignored))
        if found.ports is not None and self.etcd is not None:
            return self.etcd.follow(facts, found.ports)
        return FileSource(self.path, lambda text: self._static(text, facts))

    def _static(self, text: str, facts: PoolFacts) -> Sequence[Instance]:
        found = self._parse(text, facts)
        if found.ports is not None:
            raise ConfigurationError("it has `discovery` now: reload the configuration (SIGHUP)")
        instances: Sequence[Instance] = found.instances
        return instances


def _xllm(facts: PoolFacts) -> str:
    return "xllm" if facts.dialect == "auto" else facts.dialect


def _port(value: Any) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65535:
        return value
    if isinstance(value, str) and re.fullmatch(r"[a-z0-9-]{1,63}", value) and re.search("[a-z]", value):
        return value
    raise ValueError("must be a port of 1 to 65535, or the name of a port")


Port = Annotated[int, Field(ge=1, le=65535)]
NamedPort = Annotated[int | str, PlainValidator(_port)]
Role = Literal["default", "prefill", "decode", "mix"]


class HostsDiscovery(DiscoveryNode):
    """Keys of the sources that find hosts: what all their instances have in common."""

    role: Role = "default"
    dp_size: int = Field(1, ge=1, le=1024)
    topic: str = ""

    def template(self, facts: PoolFacts, **ports: Any) -> Template:
        return Template(
            pool=facts.name,
            model=facts.model,
            role=self.role,
            dp_size=self.dp_size,
            topic=self.topic,
            dialect=facts.dialect,
            recovery=facts.recovery,
            **ports,
        )

    def check(self, facts: PoolFacts) -> None:
        self.source(facts)


class KubernetesLabels(Node):
    """Labels or annotations with which a pod speaks for itself; null = there is no such label."""

    model: str | None = "model.aibrix.ai/name"
    port: str | None = "model.aibrix.ai/port"
    metrics_port: str | None = "model.aibrix.ai/metric-port"
    events: str | None = "model.aibrix.ai/kv-events-enabled"
    role: str | None = "role-name"
    event_port: str | None = None
    replay_port: str | None = None
    dp_size: str | None = None


class KubernetesDiscovery(HostsDiscovery):
    """Pods of a label selector or, with `service`, the EndpointSlices of a Service."""

    type: Literal["kubernetes"]
    selector: str | None = Field(None, min_length=1)
    service: str | None = Field(None, min_length=1)
    namespaces: tuple[str, ...] = ()
    kubeconfig: str | None = None
    context: str | None = None
    port: NamedPort = 8000
    event_port: NamedPort | None = 5557
    replay_port: NamedPort | None = 5558
    metrics_port: NamedPort | None = None
    container: str | None = None
    ip_family: Literal["any", "ipv4", "ipv6"] = "any"
    labels: KubernetesLabels = KubernetesLabels()
    roles: dict[str, Role] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_way(self) -> KubernetesDiscovery:
        if self.selector and self.service:
            raise ValueError("selector and service exclude each other: pods, or the endpoints of a Service")
        if "*" in self.namespaces and len(self.namespaces) > 1:
            raise ValueError('namespaces: "*" stands for all, and alone')
        return self

    def source(self, facts: PoolFacts) -> Source:
        from kvindex.discovery.kubernetes import KubernetesSource
        from kvindex.discovery.kubernetes_rules import Labels, Rules

        rules = Rules(
            template=self.template(facts),
            port=self.port,
            event_port=self.event_port,
            replay_port=self.replay_port,
            metrics_port=self.metrics_port,
            labels=Labels(**self.labels.model_dump()),
            roles=self.roles,
            container=self.container,
            ip_family=self.ip_family,
        )
        return KubernetesSource(
            rules,
            selector="" if self.service else self._selector(facts.model),
            service=self.service,
            namespaces=self.namespaces,
            kubeconfig=self.kubeconfig,
            context=self.context,
        )

    def _selector(self, model: str) -> str:
        """The configured one, else the pods whose model label is the pool's first model."""
        if self.selector:
            return self.selector
        if self.labels.model is None or not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", model):
            raise ConfigurationError(f"no pods can be selected by {model!r} as the value of a label: write `selector`")
        return f"{self.labels.model}={model}"


class DnsDiscovery(HostsDiscovery):
    """The addresses of a name, such as a headless Service, or its SRV records."""

    type: Literal["dns"]
    name: str = Field(min_length=1, max_length=255)
    record: Literal["a", "aaaa", "srv"] = "a"
    nameservers: tuple[str, ...] = ()
    nameserver_port: Port = 53
    min_interval_ms: int = Field(1000, ge=10, le=3_600_000)
    max_interval_ms: int = Field(60_000, ge=10, le=3_600_000)
    timeout_ms: int = Field(5000, ge=10, le=60_000)
    port: Port = 8000
    event_port: Port | None = 5557
    replay_port: Port | None = 5558
    metrics_port: Port | None = None

    @model_validator(mode="after")
    def _consistent(self) -> DnsDiscovery:
        for address in self.nameservers:
            ipaddress.ip_address(address)
        if self.min_interval_ms > self.max_interval_ms:
            raise ValueError("min_interval_ms is above max_interval_ms")
        return self

    def source(self, facts: PoolFacts) -> Source:
        from kvindex.discovery.dns import DnsSource

        template = self.template(
            facts,
            port=self.port,
            event_port=self.event_port,
            replay_port=self.replay_port,
            metrics_port=self.metrics_port,
        )
        return DnsSource(
            self.name,
            template,
            record=self.record,
            nameservers=self.nameservers,
            nameserver_port=self.nameserver_port,
            intervals=(self.min_interval_ms / 1000, self.max_interval_ms / 1000),
            timeout=self.timeout_ms / 1000,
        )


class FileDiscovery(DiscoveryNode):
    """A YAML or JSON file with `instances` as they are written in the configuration, read whenever it changes."""

    type: Literal["file"]
    path: str = Field(min_length=1)
    interval_ms: int = Field(1000, ge=10, le=3_600_000)

    @property
    def by_hand(self) -> bool:
        return True

    def doubt(self) -> str | None:
        if is_path(self.path):
            return None
        return f"{short(self.path)} is no readable file so far: no instance comes from it until it is"

    def source(self, facts: PoolFacts) -> Source:
        from extproc.instances_file import parse_instances
        from kvindex.discovery.file import FileSource

        return FileSource(self.path, lambda text: parse_instances(text, facts), interval=self.interval_ms / 1000)


DiscoveryConfig = Annotated[
    HttpDiscovery | EtcdDiscovery | XllmFileDiscovery | KubernetesDiscovery | DnsDiscovery | FileDiscovery,
    Field(discriminator="type"),
]
