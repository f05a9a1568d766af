"""From what the Kubernetes API says of pods and EndpointSlices to instances. Pure: dictionaries in, instances out.

    pod, EndpointSlice --pod_instances, slice_instances--> {name: Instance | Skip} --merge--> instances, problems

States

    Ready, not terminating                           ACTIVE
    terminating (deletionTimestamp, or its endpoint) DRAINING: finishes what it has, gets nothing new
    not Ready (starting, or its probe fails)         DRAINING: its events are followed, so that nothing is missed
    engine container does not run, phase over, gone  no instance

Identity: the pod's UID and the ID of the engine's container, which changes with every restart of the engine and not
with one of a sidecar. An EndpointSlice knows the pod's UID alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from kvindex.discovery.template import Template
from kvindex.errors import ConfigurationError
from kvindex.fleet import ROLES, Instance, InstanceState

Object = Mapping[str, Any]
"""One object of the API as decoded JSON."""

ANNOTATION_DEFAULT_CONTAINER = "kubectl.kubernetes.io/default-container"
LABEL_SERVICE = "kubernetes.io/service-name"

GROUP_INDEX_LABELS = (
    "stormservice.orchestration.aibrix.ai/pod-group-index",
    "leaderworkerset.sigs.k8s.io/worker-index",
)
"""An engine that spans several pods: only the one with index 0 has the HTTP server."""

KNOWN_ROLES = {**{role: role for role in ROLES}, "both": "default", "prefill-decode": "default"}
"""Values of a role label: ours, and llm-d's words for "serves alone"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Labels (or annotations of that name) that speak for one pod; None = there is no such label. AIBrix's names.

    A port is a number or the name of a container port. `events` with any value but "true" switches KV events off;
    without it they are as configured.
    """

    model: str | None = "model.aibrix.ai/name"
    port: str | None = "model.aibrix.ai/port"
    metrics_port: str | None = "model.aibrix.ai/metric-port"
    events: str | None = "model.aibrix.ai/kv-events-enabled"
    role: str | None = "role-name"
    event_port: str | None = None
    replay_port: str | None = None
    dp_size: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How objects become instances.

    template    what all have in common; its ports are those of `port`, `event_port`, `replay_port`, `metrics_port`
                once these are resolved: numbers, or names of container or EndpointSlice ports
    roles       further values of the role label -> role
    container   the engine's container; None = the one that declares `port`, else kubectl's default, else the first
    ip_family   which address of a dual-stack pod; "any" = the primary one
    """

    template: Template = field(default_factory=Template)
    port: int | str = 8000
    event_port: int | str | None = 5557
    replay_port: int | str | None = 5558
    metrics_port: int | str | None = None
    labels: Labels = field(default_factory=Labels)
    roles: Mapping[str, str] = field(default_factory=dict)
    container: str | None = None
    ip_family: Literal["any", "ipv4", "ipv6"] = "any"


class Skip(NamedTuple):
    """Why an object is no instance. `wrong`: somebody has to change something; else it is none yet or not meant."""

    reason: str
    wrong: bool = False


Found = Mapping[str, Instance | Skip]


def pod_instances(pod: Object, rules: Rules) -> Found:
    """The one instance of a pod, named namespace/pod, or why it is none."""
    meta = pod.get("metadata") or {}
    return {f"{meta.get('namespace', '')}/{meta.get('name', '')}": pod_instance(pod, rules)}


def pod_instance(pod: Object, rules: Rules) -> Instance | Skip:
    """Never raises for an object that follows the API's schema."""
    meta, spec, status = pod.get("metadata") or {}, pod.get("spec") or {}, pod.get("status") or {}
    labels = {**(meta.get("annotations") or {}), **(meta.get("labels") or {})}
    for key in GROUP_INDEX_LABELS:
        if labels.get(key, "0") != "0":
            return Skip(f"is pod {labels[key]} of its group, the first one serves")
    phase = status.get("phase", "Unknown")
    if phase != "Running":
        return Skip(f"its phase is {phase}")
    containers = spec.get("containers") or []
    try:
        ports = {port["name"]: port["containerPort"] for one in containers for port in _ports(one) if port.get("name")}
        template = _template(labels, ports, rules)
        container = _engine(containers, labels, template.port, rules)
    except ConfigurationError as error:
        return Skip(str(error), wrong=True)
    address = _address(status, rules.ip_family)
    if address is None:
        has_other = bool(status.get("podIP"))
        return Skip(f"has no {rules.ip_family} address" if has_other else "has no IP yet", wrong=has_other)
    running = _status(status.get("containerStatuses") or [], container)
    if "running" not in (running.get("state") or {}):
        waiting = (running.get("state") or {}).get("waiting") or {}
        return Skip(f"container {container!r} does not run{': ' + waiting['reason'] if waiting.get('reason') else ''}")
    ready = any(one.get("type") == "Ready" and one.get("status") == "True" for one in status.get("conditions") or [])
    process = running.get("containerID") or f"restart {running.get('restartCount', 0)}"
    return _instance(
        template,
        f"{meta.get('namespace', '')}/{meta.get('name', '')}",
        address,
        incarnation=f"{meta.get('uid', '')}/{process}",
        active=ready and not meta.get("deletionTimestamp"),
    )


def slice_instances(piece: Object, rules: Rules) -> Found:
    """The endpoints of one EndpointSlice (discovery.k8s.io/v1), named namespace/pod, or namespace/service/address.

    A condition that is absent counts as met, as the API has it.
    """
    meta = piece.get("metadata") or {}
    namespace, labels = meta.get("namespace", ""), meta.get("labels") or {}
    service = labels.get(LABEL_SERVICE, meta.get("name", ""))
    family = str(piece.get("addressType", "")).lower()
    if family not in ("ipv4", "ipv6"):
        reason = f"its addresses are of type {piece.get('addressType')}: Envoy needs IP addresses"
        return {f"{namespace}/{service}": Skip(reason, True)}
    if rules.ip_family not in ("any", family):
        return {}
    ports = {port["name"]: port["port"] for port in piece.get("ports") or [] if port.get("name") and port.get("port")}
    try:
        template = _template({**(meta.get("annotations") or {}), **labels}, ports, rules)
    except ConfigurationError as error:
        return {f"{namespace}/{service}": Skip(str(error), True)}
    found: dict[str, Instance | Skip] = {}
    for endpoint in piece.get("endpoints") or []:
        address = (endpoint.get("addresses") or [""])[0]  # consumers look at the first one only, says the API
        target, conditions = endpoint.get("targetRef") or {}, endpoint.get("conditions") or {}
        is_pod = target.get("kind") == "Pod" and target.get("name")
        last = target["name"] if is_pod else f"{service}/{address}"
        name = f"{target.get('namespace') or namespace}/{last}"
        found[name] = _instance(
            template,
            name,
            address,
            incarnation=target.get("uid") or "",
            active=conditions.get("ready") is not False and not conditions.get("terminating"),
        )
    return found


def merge(found: Iterable[Found]) -> tuple[list[Instance], dict[str, Skip]]:
    """All instances by name, and those skipped. O(instances).

    The same endpoint in two slices: an instance beats a reason, an active one a draining one, IPv4 beats IPv6. An
    address that an active instance has is no longer that of a draining one: the cluster hands addresses on before the
    old pod's object is gone.
    """
    best: dict[str, Instance | Skip] = {}
    for part in found:
        for name, one in part.items():
            if name not in best or _rank(one) > _rank(best[name]):
                best[name] = one
    instances = {name: one for name, one in sorted(best.items()) if isinstance(one, Instance)}
    taken = {one.address for one in instances.values() if one.state is InstanceState.ACTIVE}
    kept = [one for one in instances.values() if one.state is InstanceState.ACTIVE or one.address not in taken]
    return kept, {name: one for name, one in sorted(best.items()) if isinstance(one, Skip)}


def _rank(one: Instance | Skip) -> tuple[bool, bool, bool]:
    if isinstance(one, Skip):
        return False, one.wrong, False
    return True, one.state is InstanceState.ACTIVE, not one.address.startswith("[")


def _instance(template: Template, name: str, address: str, *, incarnation: str, active: bool) -> Instance | Skip:
    state = InstanceState.ACTIVE if active else InstanceState.DRAINING
    try:
        return template.instance(name, address, incarnation=incarnation, state=state)
    except ConfigurationError as error:
        return Skip(str(error).removeprefix(f"instance {name!r}: "), True)


def _template(labels: Mapping[str, str], ports: Mapping[str, int], rules: Rules) -> Template:
    """The rules' template with what the labels say instead. Raises ConfigurationError."""
    names, template = rules.labels, rules.template

    def value(key: str | None, default: int | str | None) -> int | str | None:
        return default if key is None else labels.get(key, default)

    def port(key: str | None, default: int | str | None) -> int | None:
        given = value(key, default)
        where = f"label {key}" if key is not None and key in labels else "port"
        if isinstance(given, str) and not given.isdecimal():
            if given not in ports:
                known = ", ".join(sorted(ports)) or "none"
                raise ConfigurationError(f"{where}: no port is named {given!r}; named ports: {known}")
            return ports[given]
        return None if given is None else int(given)

    role = str(value(names.role, template.role))
    known = {**KNOWN_ROLES, **rules.roles}
    if role not in known:
        raise ConfigurationError(f"label {names.role}: role {role!r} is unknown: say in `roles` what it stands for")
    ranks = value(names.dp_size, template.dp_size)
    if not str(ranks).isdecimal():
        raise ConfigurationError(f"label {names.dp_size}: {ranks!r} is no number of data-parallel ranks")
    follow = value(names.events, "true") == "true"
    http_port = port(names.port, rules.port)
    assert http_port is not None  # the rules have one
    return replace(
        template,
        model=str(value(names.model, template.model)),
        role=known[role],
        dp_size=int(ranks or 0),
        port=http_port,
        event_port=port(names.event_port, rules.event_port) if follow else None,
        replay_port=port(names.replay_port, rules.replay_port) if follow else None,
        metrics_port=port(names.metrics_port, rules.metrics_port),
    )


def _engine(containers: list[Object], labels: Mapping[str, str], port: int, rules: Rules) -> str:
    """Name of the engine's container. Raises ConfigurationError when the configured one is not there."""
    names = [str(one.get("name")) for one in containers]
    if rules.container is not None:
        if rules.container not in names:
            raise ConfigurationError(f"has no container {rules.container!r}; it has {', '.join(names) or 'none'}")
        return rules.container
    declares = [one["name"] for one in containers if any(it.get("containerPort") == port for it in _ports(one))]
    default = [name for name in names if name == labels.get(ANNOTATION_DEFAULT_CONTAINER)]
    return str((declares + default + names + [""])[0])


def _ports(container: Object) -> list[Object]:
    return container.get("ports") or []


def _status(statuses: list[Object], container: str) -> Object:
    return next((one for one in statuses if one.get("name") == container), {})


def _address(status: Object, family: str) -> str | None:
    primary = status.get("podIP")
    addresses = [primary, *(one.get("ip") for one in status.get("podIPs") or [])]
    for address in addresses:
        if address and (family == "any" or (":" in address) == (family == "ipv6")):
            return str(address)
    return None
