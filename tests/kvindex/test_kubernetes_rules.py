"""What pods and EndpointSlices mean: tables."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from kvindex.discovery.kubernetes_rules import Labels, Rules, Skip, merge, pod_instances, slice_instances
from kvindex.discovery.template import Template
from kvindex.fleet import Instance, InstanceState

ACTIVE, DRAINING = InstanceState.ACTIVE, InstanceState.DRAINING
Object = dict[str, Any]


def pod(name: str = "qwen-0", *, ip: str | None = "10.1.0.5", **labels: str) -> Object:
    """A ready pod of one engine, as the API server answers it, with AIBrix's labels."""
    return {
        "metadata": {
            "name": name,
            "namespace": "llm",
            "uid": f"uid-{name}",
            "labels": {"model.aibrix.ai/name": "qwen3-8b", "model.aibrix.ai/port": "8000", **labels},
        },
        "spec": {
            "containers": [
                {
                    "name": "vllm",
                    "ports": [
                        {"name": "http", "containerPort": 8000},
                        {"name": "kv-events", "containerPort": 5557},
                        {"name": "kv-replay", "containerPort": 5558},
                    ],
                }
            ]
        },
        "status": {
            "phase": "Running",
            **({"podIP": ip, "podIPs": [{"ip": ip}]} if ip else {}),
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [
                {
                    "name": "vllm",
                    "restartCount": 0,
                    "containerID": "containerd://aa",
                    "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
                }
            ],
        },
    }


def changed(item: Object, *path: Any, to: Any) -> Object:
    """A copy with the value at the path replaced."""
    item = deepcopy(item)
    place = item
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = to
    return item


SIDECAR = {"name": "istio-proxy", "ports": [{"name": "http-envoy-prom", "containerPort": 15090}]}
SIDECAR_STATUS = {"name": "istio-proxy", "restartCount": 3, "containerID": "containerd://ff", "state": {"running": {}}}


def with_sidecar(item: Object) -> Object:
    item = deepcopy(item)
    item["spec"]["containers"].insert(0, SIDECAR)
    item["status"]["containerStatuses"].insert(0, SIDECAR_STATUS)
    return item


LABEL = ("metadata", "labels")
STATUS = ("status", "containerStatuses", 0)
DUAL = changed(pod(), "status", "podIPs", to=[{"ip": "10.1.0.5"}, {"ip": "fd00::5"}])
QWEN = Rules(template=Template(pool="qwen", model="Qwen/Qwen3-8B", dialect="vllm"))


def rules(**changes: Any) -> Rules:
    return Rules(template=QWEN.template, **changes)


def endpoints(instance: Instance) -> list[str]:
    return [f"{one.events} {one.replay}" for one in instance.events]


STREAM = "tcp://10.1.0.5:5557 tcp://10.1.0.5:5558"

# what it is, pod, rules -> what has to be so of the instance
PODS: list[tuple[str, Object, Rules, dict[str, Any]]] = [
    (
        "all there",
        pod(),
        QWEN,
        {
            "name": "llm/qwen-0",
            "address": "10.1.0.5:8000",
            "pool": "qwen",
            "model": "qwen3-8b",
            "role": "default",
            "dp_size": 1,
            "incarnation": "uid-qwen-0/containerd://aa",
            "state": ACTIVE,
            "events": [STREAM],
            "metrics": "",
        },
    ),
    (
        "IPv6",
        pod(ip="fd00::5"),
        QWEN,
        {"address": "[fd00::5]:8000", "events": ["tcp://[fd00::5]:5557 tcp://[fd00::5]:5558"]},
    ),
    ("dual stack: the primary address", DUAL, QWEN, {"address": "10.1.0.5:8000"}),
    ("dual stack: IPv6 asked for", DUAL, rules(ip_family="ipv6"), {"address": "[fd00::5]:8000"}),
    (
        "host network: its address is the node's",
        changed(
            changed(pod(ip="192.168.7.7"), "spec", "hostNetwork", to=True),
            "metadata",
            "labels",
            "model.aibrix.ai/port",
            to="8011",
        ),
        QWEN,
        {"address": "192.168.7.7:8011"},
    ),
    (
        "terminating",
        changed(pod(), "metadata", "deletionTimestamp", to="2026-01-01T00:00:00Z"),
        QWEN,
        {"state": DRAINING},
    ),
    (
        "not ready",
        changed(pod(), "status", "conditions", 0, "status", to="False"),
        QWEN,
        {"state": DRAINING, "events": [STREAM]},
    ),
    ("no conditions yet", changed(pod(), "status", "conditions", to=None), QWEN, {"state": DRAINING}),
    (
        "restarted engine",
        changed(pod(), *STATUS, "containerID", to="containerd://bb"),
        QWEN,
        {"incarnation": "uid-qwen-0/containerd://bb"},
    ),
    ("no container ID", changed(pod(), *STATUS, "containerID", to=""), QWEN, {"incarnation": "uid-qwen-0/restart 0"}),
    (
        "a sidecar first: the container with the port",
        with_sidecar(pod()),
        QWEN,
        {"incarnation": "uid-qwen-0/containerd://aa"},
    ),
    (
        "no declared port: kubectl's default container",
        changed(
            changed(with_sidecar(pod()), "spec", "containers", 1, "ports", to=None),
            "metadata",
            "annotations",
            to={"kubectl.kubernetes.io/default-container": "vllm"},
        ),
        QWEN,
        {"incarnation": "uid-qwen-0/containerd://aa"},
    ),
    (
        "the configured container",
        with_sidecar(pod()),
        rules(container="istio-proxy"),
        {"incarnation": "uid-qwen-0/containerd://ff"},
    ),
    ("port by label", pod(**{"model.aibrix.ai/port": "9000"}), QWEN, {"address": "10.1.0.5:9000"}),
    (
        "port of the rules without a label",
        changed(pod(), *LABEL, to={}),
        rules(port=8080),
        {"address": "10.1.0.5:8080", "model": "Qwen/Qwen3-8B"},
    ),
    (
        "named ports",
        changed(pod(), *LABEL, to=None),
        rules(port="http", event_port="kv-events", replay_port="kv-replay"),
        {"address": "10.1.0.5:8000", "events": [STREAM]},
    ),
    ("named port by label", pod(**{"model.aibrix.ai/port": "http"}), QWEN, {"address": "10.1.0.5:8000"}),
    (
        "annotations speak where labels do not",
        changed(
            changed(pod(), *LABEL, to={"model.aibrix.ai/port": "8000"}),
            "metadata",
            "annotations",
            to={"model.aibrix.ai/name": "Qwen/Qwen3-32B", "model.aibrix.ai/port": "1"},
        ),
        QWEN,
        {"model": "Qwen/Qwen3-32B", "address": "10.1.0.5:8000"},
    ),
    ("metrics port", pod(**{"model.aibrix.ai/metric-port": "9100"}), QWEN, {"metrics": "http://10.1.0.5:9100/metrics"}),
    ("metrics at the same port", pod(**{"model.aibrix.ai/metric-port": "8000"}), QWEN, {"metrics": ""}),
    ("prefill", pod(**{"role-name": "prefill"}), QWEN, {"role": "prefill"}),
    ("llm-d's both", pod(**{"llm-d.ai/role": "both"}), rules(labels=Labels(role="llm-d.ai/role")), {"role": "default"}),
    ("a role by name", pod(**{"role-name": "P"}), rules(roles={"P": "prefill"}), {"role": "prefill"}),
    ("no role label configured", pod(**{"role-name": "worker"}), rules(labels=Labels(role=None)), {"role": "default"}),
    ("events switched on", pod(**{"model.aibrix.ai/kv-events-enabled": "true"}), QWEN, {"events": [STREAM]}),
    ("events switched off", pod(**{"model.aibrix.ai/kv-events-enabled": "false"}), QWEN, {"events": []}),
    ("no event port", pod(), rules(event_port=None), {"events": []}),
    ("no replay", pod(), rules(replay_port=None), {"events": ["tcp://10.1.0.5:5557 None"]}),
    (
        "ranks by label",
        pod(dp="2", events="6000", replay="6100"),
        rules(labels=Labels(dp_size="dp", event_port="events", replay_port="replay")),
        {
            "dp_size": 2,
            "events": ["tcp://10.1.0.5:6000 tcp://10.1.0.5:6100", "tcp://10.1.0.5:6001 tcp://10.1.0.5:6101"],
        },
    ),
    ("first of its group", pod(**{"leaderworkerset.sigs.k8s.io/worker-index": "0"}), QWEN, {"state": ACTIVE}),
]

# what it is, pod, rules -> words of the reason, whether somebody has to act
SKIPPED: list[tuple[str, Object, Rules, str, bool]] = [
    ("no IP", pod(ip=None), QWEN, "no IP yet", False),
    ("no such family", pod(), rules(ip_family="ipv6"), "has no ipv6 address", True),
    ("pending", changed(pod(), "status", "phase", to="Pending"), QWEN, "Pending", False),
    ("over", changed(pod(), "status", "phase", to="Succeeded"), QWEN, "Succeeded", False),
    ("failed", changed(pod(), "status", "phase", to="Failed"), QWEN, "Failed", False),
    ("no status at all", changed(pod(), "status", to=None), QWEN, "Unknown", False),
    (
        "crashing",
        changed(pod(), *STATUS, "state", to={"waiting": {"reason": "CrashLoopBackOff"}}),
        QWEN,
        "'vllm' does not run: CrashLoopBackOff",
        False,
    ),
    ("terminated", changed(pod(), *STATUS, "state", to={"terminated": {"exitCode": 1}}), QWEN, "does not run", False),
    ("no container status", changed(pod(), "status", "containerStatuses", to=None), QWEN, "does not run", False),
    ("second of its group", pod(**{"leaderworkerset.sigs.k8s.io/worker-index": "1"}), QWEN, "group", False),
    (
        "no such port name",
        pod(**{"model.aibrix.ai/port": "web"}),
        QWEN,
        "label model.aibrix.ai/port: no port is named 'web'; named ports: http,",
        True,
    ),
    ("port 0", pod(**{"model.aibrix.ai/port": "0"}), QWEN, "port '0'", True),
    ("port over 65535", pod(**{"model.aibrix.ai/port": "70000"}), QWEN, "70000", True),
    ("unknown role", pod(**{"role-name": "worker"}), QWEN, "role 'worker'", True),
    ("no such container", pod(), rules(container="sglang"), "no container 'sglang'; it has vllm", True),
    ("ranks that are no number", pod(dp="two"), rules(labels=Labels(dp_size="dp")), "'two'", True),
    ("no ranks", pod(dp="0"), rules(labels=Labels(dp_size="dp")), "dp_size 0", True),
    ("ranks whose ports overlap", pod(dp="2"), rules(labels=Labels(dp_size="dp")), "used twice", True),
]


@pytest.mark.parametrize(("given", "by", "expected"), [row[1:] for row in PODS], ids=[row[0] for row in PODS])
def test_pod(given: Object, by: Rules, expected: dict[str, Any]) -> None:
    (name, found), *others = pod_instances(given, by).items()
    assert name == "llm/qwen-0"
    assert not others
    assert isinstance(found, Instance), found
    shown = {key: endpoints(found) if key == "events" else getattr(found, key) for key in expected}
    assert shown == expected


@pytest.mark.parametrize(
    ("given", "by", "words", "wrong"), [row[1:] for row in SKIPPED], ids=[row[0] for row in SKIPPED]
)
def test_pod_that_is_no_instance(given: Object, by: Rules, words: str, wrong: bool) -> None:
    found = pod_instances(given, by)["llm/qwen-0"]
    assert isinstance(found, Skip)
    assert words in found.reason
    assert found.wrong is wrong


def piece(*entries: Object, family: str = "IPv4", name: str = "engines-x1", **labels: str) -> Object:
    return {
        "metadata": {
            "name": name,
            "namespace": "llm",
            "labels": {"kubernetes.io/service-name": "engines", **labels},
        },
        "addressType": family,
        "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}],
        "endpoints": list(entries),
    }


def endpoint(address: str, target: str | None = "a", **conditions: Any) -> Object:
    return {
        "addresses": [address],
        "conditions": conditions,
        **(
            {"targetRef": {"kind": "Pod", "namespace": "llm", "name": target, "uid": f"uid-{target}"}} if target else {}
        ),
    }


READY = {"ready": True, "serving": True, "terminating": False}

SLICES: list[tuple[str, Object, Rules, list[tuple[str, str, str, InstanceState]]]] = [
    ("ready", piece(endpoint("10.1.0.1", **READY)), QWEN, [("llm/a", "10.1.0.1:8000", "uid-a", ACTIVE)]),
    (
        "conditions unknown count as met",
        piece(endpoint("10.1.0.1")),
        QWEN,
        [("llm/a", "10.1.0.1:8000", "uid-a", ACTIVE)],
    ),
    (
        "terminating and serving",
        piece(endpoint("10.1.0.1", ready=False, serving=True, terminating=True)),
        QWEN,
        [("llm/a", "10.1.0.1:8000", "uid-a", DRAINING)],
    ),
    (
        "published although terminating",
        piece(endpoint("10.1.0.1", ready=True, serving=True, terminating=True)),
        QWEN,
        [("llm/a", "10.1.0.1:8000", "uid-a", DRAINING)],
    ),
    ("not ready", piece(endpoint("10.1.0.1", ready=False)), QWEN, [("llm/a", "10.1.0.1:8000", "uid-a", DRAINING)]),
    (
        "no pod behind it",
        piece(endpoint("10.9.0.1", None)),
        QWEN,
        [("llm/engines/10.9.0.1", "10.9.0.1:8000", "", ACTIVE)],
    ),
    ("IPv6", piece(endpoint("fd00::1"), family="IPv6"), QWEN, [("llm/a", "[fd00::1]:8000", "uid-a", ACTIVE)]),
    ("the other family", piece(endpoint("fd00::1"), family="IPv6"), rules(ip_family="ipv4"), []),
    ("named port", piece(endpoint("10.1.0.1")), rules(port="http"), [("llm/a", "10.1.0.1:8000", "uid-a", ACTIVE)]),
    ("no endpoints", changed(piece(), "endpoints", to=None), QWEN, []),
]


@pytest.mark.parametrize(("given", "by", "expected"), [row[1:] for row in SLICES], ids=[row[0] for row in SLICES])
def test_slice(given: Object, by: Rules, expected: list[tuple[str, str, str, InstanceState]]) -> None:
    instances, skips = merge([slice_instances(given, by)])
    assert [(one.name, one.address, one.incarnation, one.state) for one in instances] == expected
    assert not skips


@pytest.mark.parametrize(
    ("given", "by", "words"),
    [
        (piece(endpoint("a.example"), family="FQDN"), QWEN, "FQDN"),
        (piece(endpoint("10.1.0.1")), rules(port="web"), "no port is named 'web'; named ports: http"),
        (piece(endpoint("10.1.0.1"), **{"role-name": "x"}), QWEN, "role 'x'"),
    ],
)
def test_slice_that_is_no_use(given: Object, by: Rules, words: str) -> None:
    instances, skips = merge([slice_instances(given, by)])
    assert not instances
    assert [words in skip.reason and skip.wrong for skip in skips.values()] == [True]


def test_labels_of_a_slice_are_the_services() -> None:
    instances, _ = merge([slice_instances(piece(endpoint("10.1.0.1"), **{"role-name": "decode"}), QWEN)])
    assert [one.role for one in instances] == ["decode"]


@pytest.mark.parametrize("turned", [False, True])
def test_one_endpoint_in_two_slices(turned: bool) -> None:
    """While the controller moves it from one to the other, and for dual-stack services."""
    pairs = [
        (piece(endpoint("10.1.0.1", ready=False)), piece(endpoint("10.1.0.1"), name="y"), "10.1.0.1:8000", ACTIVE),
        (piece(endpoint("10.1.0.1")), piece(endpoint("fd00::1"), family="IPv6", name="y"), "10.1.0.1:8000", ACTIVE),
    ]
    for one, other, address, state in pairs:
        order = [other, one] if turned else [one, other]
        instances, _ = merge(slice_instances(part, QWEN) for part in order)
        assert [(found.address, found.state) for found in instances] == [(address, state)]


def test_an_address_handed_on_belongs_to_the_active_pod() -> None:
    """Else both would claim the same event endpoints, and neither be followed."""
    old = changed(pod("old"), "metadata", "deletionTimestamp", to="2026-01-01T00:00:00Z")
    found = [pod_instances(old, QWEN), pod_instances(pod("new"), QWEN), pod_instances(pod("x", ip="10.1.0.6"), QWEN)]
    assert [one.name for one in merge(found)[0]] == ["llm/new", "llm/x"]
    assert [one.name for one in merge(found[:1])[0]] == ["llm/old"]
