"""deploy/kubernetes, rendered by kubectl: every name, port and number agrees with what it points at."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from extproc.cli import main
from extproc.config import parse
from extproc.envoy_config import DESTINATION, ROUTING_HEADERS, EnvoyOptions, Part, as_dict
from extproc.server import LIVENESS, READINESS
from tests.extproc.test_envoy_config import validate

FOLDER = Path(__file__).parents[2] / "deploy/kubernetes"
FORMS = ("base", "overlays/envoy-gateway", "overlays/istio", "overlays/inferencepool")
BASE = {
    "ConfigMap", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "Role", "RoleBinding", "Service",
    "ServiceAccount", "ServiceMonitor",
}  # fmt: skip
ADDED = {
    "base": {"Namespace"},
    "overlays/envoy-gateway": {
        "Namespace", "Backend", "BackendTrafficPolicy", "ClientTrafficPolicy", "EnvoyExtensionPolicy",
    },
    "overlays/istio": {"Namespace", "EnvoyFilter", "VirtualService"},
    "overlays/inferencepool": {"InferencePool"},
}  # fmt: skip
GATEWAYS = {"overlays/envoy-gateway": "envoy-gateway-system", "overlays/istio": "istio-ingress"}
# Kinds of other projects whose schemas tests/data/crds has.
CRDS = Path(__file__).parents[1] / "data/crds"
# No registry has the schemas of these; what matters of them is compared below.
FOREIGN = {"Backend", "BackendTrafficPolicy", "ClientTrafficPolicy", "EnvoyExtensionPolicy", "InferencePool"}


@cache
def kubectl() -> str:
    """The binary, from Debian's package where this machine lets us install it."""
    if shutil.which("kubectl") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        for command in (["update", "-q"], ["install", "-q", "-y", "--no-install-recommends", "kubernetes-client"]):
            subprocess.run(["apt-get", *command], check=False, capture_output=True, timeout=100)
    return shutil.which("kubectl") or pytest.skip("no kubectl: install Debian's kubernetes-client")


@cache
def rendered(form: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [kubectl(), "kustomize", str(FOLDER / form)], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "kustomize warns of what will stop working"
    return list(yaml.safe_load_all(done.stdout))


def one(form: str, kind: str, name: str | None = None) -> dict[str, Any]:
    found = [item for item in rendered(form) if item["kind"] == kind and name in (None, item["metadata"]["name"])]
    assert len(found) == 1, f"{form}: {len(found)} of kind {kind}"
    return found[0]


def container(form: str) -> dict[str, Any]:
    (found,) = one(form, "Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(found)


def config_text(form: str) -> str:
    return str(one(form, "ConfigMap")["data"]["kvcar.yaml"])


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@pytest.mark.parametrize("form", FORMS)
def test_kinds_and_schemas(form: str) -> None:
    """Strict: unknown fields are errors, as with `kubectl apply --validate`."""
    kinds = [item["kind"] for item in rendered(form)]
    assert sorted(kinds) == sorted(BASE | ADDED[form])
    for item in rendered(form):
        if (CRDS / f"{item['kind']}.json").exists():
            accepted(item)
        elif item["kind"] not in FOREIGN:
            kubernetes_validate.validate(item, kubernetes_validate.latest_version(), strict=True)


def accepted(item: dict[str, Any]) -> None:
    """Types, words, required and unknown keys. Raises jsonschema.ValidationError."""
    jsonschema.validate(item, json.loads((CRDS / f"{item['kind']}.json").read_text("utf-8")))


@pytest.mark.parametrize(
    ("form", "kind", "change"),
    [
        ("base", "ServiceMonitor", {"endpoint": []}),
        ("base", "ServiceMonitor", {"endpoints": [{"port": ["admin"]}]}),
        ("overlays/istio", "VirtualService", {"hosts": "*"}),
        ("overlays/istio", "EnvoyFilter", {"configPatches": [{"applyTo": "CLUSTERS"}]}),
    ],
)
def test_schemas_refuse_what_a_cluster_would(form: str, kind: str, change: dict[str, Any]) -> None:
    item = copy.deepcopy(one(form, kind))
    accepted(item)
    item["spec"].update(change)
    with pytest.raises(jsonschema.ValidationError):
        accepted(item)


@pytest.mark.parametrize("form", FORMS)
def test_kvcar_accepts_the_configuration(form: str, tmp_path: Path) -> None:
    path = tmp_path / "kvcar.yaml"
    path.write_text(config_text(form))
    done = CliRunner().invoke(main, ["check", "-c", str(path)])
    assert done.exit_code == 0, done.output
    # The overlay's configuration is the base's and one key more.
    own, base = yaml.safe_load(config_text(form)), yaml.safe_load(config_text("base"))
    assert own["listen"].pop("endpoint_picker", False) is (form == "overlays/inferencepool")
    assert own == base


@pytest.mark.parametrize("form", FORMS)
def test_ports(form: str) -> None:
    config = parse(config_text(form))
    ports = {item["name"]: item["containerPort"] for item in container(form)["ports"]}
    assert ports == {"grpc": port_of(config.listen.address), "admin": port_of(config.admin.address)}
    service = one(form, "Service")["spec"]
    assert {item["name"]: (item["port"], item["targetPort"]) for item in service["ports"]} == {
        name: (port, name) for name, port in ports.items()
    }
    policy = one(form, "NetworkPolicy")["spec"]
    assert [[item["port"] for item in rule["ports"]] for rule in policy["ingress"]] == [["grpc"], ["admin"]]
    assert {item["port"] for item in one(form, "ServiceMonitor")["spec"]["endpoints"]} <= set(ports)


@pytest.mark.parametrize("form", FORMS)
def test_selectors_and_references(form: str) -> None:
    deployment = one(form, "Deployment")
    pod = deployment["spec"]["template"]
    labels = pod["metadata"]["labels"].items()
    namespace = deployment["metadata"]["namespace"]
    for kind, path in {
        "Deployment": ("selector", "matchLabels"),
        "Service": ("selector",),
        "PodDisruptionBudget": ("selector", "matchLabels"),
        "NetworkPolicy": ("podSelector", "matchLabels"),
    }.items():
        item = one(form, kind)
        selector: Any = item["spec"]
        for key in path:
            selector = selector[key]
        assert selector.items() <= labels, kind
        assert item["metadata"]["namespace"] == namespace, kind
    monitor = one(form, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    assert monitor.items() <= one(form, "Service")["metadata"]["labels"].items()
    volumes = {item["name"]: item for item in pod["spec"]["volumes"]}
    assert volumes["config"]["configMap"]["name"] == one(form, "ConfigMap")["metadata"]["name"]
    mounts = {item["name"]: item["mountPath"] for item in container(form)["volumeMounts"]}
    assert set(mounts) == set(volumes)
    assert f"{mounts['config']}/kvcar.yaml" in container(form)["args"]
    assert {item["name"]: item["value"] for item in container(form)["env"]} == {"HF_HOME": mounts["cache"]}
    account = one(form, "ServiceAccount")["metadata"]
    assert (account["name"], account["namespace"]) == (pod["spec"]["serviceAccountName"], namespace)
    (subject,) = one(form, "RoleBinding")["subjects"]
    assert (subject["name"], subject["namespace"]) == (account["name"], namespace)


@pytest.mark.parametrize("form", FORMS)
def test_engines_are_where_kvcar_may_look_and_connect(form: str) -> None:
    (pool,) = parse(config_text(form)).pools
    (source,) = pool.discovery
    assert source.namespaces == (one(form, "Role")["metadata"]["namespace"],)  # type: ignore[union-attr]
    (allowed, *_) = one(form, "NetworkPolicy")["spec"]["egress"]
    (peer,) = allowed["to"]
    assert tuple(peer["namespaceSelector"]["matchLabels"].values()) == source.namespaces  # type: ignore[union-attr]


@pytest.mark.parametrize("form", FORMS)
def test_life_and_rights_of_a_pod(form: str) -> None:
    config = parse(config_text(form))
    spec = one(form, "Deployment")["spec"]["template"]["spec"]
    drain = config.listen.drain_wait_ms + config.listen.drain_grace_ms
    assert spec["terminationGracePeriodSeconds"] * 1000 > drain
    probes = {name: container(form)[f"{name}Probe"]["grpc"] for name in ("startup", "liveness", "readiness")}
    assert {probe["port"] for probe in probes.values()} == {port_of(config.listen.address)}
    assert probes["startup"]["service"] == probes["liveness"]["service"] == LIVENESS
    assert probes["readiness"]["service"] in READINESS
    assert config.listen.tls is None, "the kubelet's gRPC probes know no TLS"
    rights = container(form)["securityContext"]
    assert rights == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["securityContext"]["runAsNonRoot"] is True


@pytest.mark.parametrize("form", GATEWAYS)
def test_only_the_gateway_may_ask(form: str) -> None:
    (rule, _) = one(form, "NetworkPolicy")["spec"]["ingress"]
    (peer,) = rule["from"]
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": GATEWAYS[form]}


def test_envoy_gateway() -> None:
    form = "overlays/envoy-gateway"
    config, service = parse(config_text(form)), one(form, "Service")["metadata"]
    client = one(form, "ClientTrafficPolicy")["spec"]
    assert client["headers"]["earlyRequestHeaders"]["remove"] == list(ROUTING_HEADERS)
    assert client["connection"]["bufferLimit"] == f"{config.limits.max_body_bytes >> 20}Mi"
    (endpoint,) = one(form, "Backend")["spec"]["endpoints"]
    assert endpoint["fqdn"] == {
        "hostname": f"{service['name']}.{service['namespace']}.svc.cluster.local",
        "port": port_of(config.listen.address),
    }
    (processor,) = one(form, "EnvoyExtensionPolicy")["spec"]["extProc"]
    (backend,) = processor["backendRefs"]
    assert (backend["name"], backend["port"]) == (one(form, "Backend")["metadata"]["name"], endpoint["fqdn"]["port"])
    assert float(processor["messageTimeout"].removesuffix("s")) * 1000 > config.limits.decide_timeout_ms
    override = one(form, "BackendTrafficPolicy")["spec"]["loadBalancer"]["endpointOverride"]
    assert override == {"extractFrom": [{"header": DESTINATION}]}
    attached = [one(form, kind)["spec"]["targetRefs"] for kind in ("EnvoyExtensionPolicy", "BackendTrafficPolicy")]
    assert attached[0] == attached[1]


def test_inference_pool() -> None:
    form = "overlays/inferencepool"
    (pool,) = parse(config_text(form)).pools
    (source,) = pool.discovery
    item, service = one(form, "InferencePool"), one(form, "Service")
    selector = ",".join(f"{key}={value}" for key, value in item["spec"]["selector"]["matchLabels"].items())
    assert selector == source.selector  # type: ignore[union-attr]
    assert item["spec"]["targetPorts"] == [{"number": source.port}]  # type: ignore[union-attr]
    picker = item["spec"]["endpointPickerRef"]
    assert picker["name"] == service["metadata"]["name"]
    assert picker["port"]["number"] in [port["port"] for port in service["spec"]["ports"]]
    assert item["metadata"]["namespace"] == service["metadata"]["namespace"], "the reference has no namespace"


# ---------------------------------------------------------------- Istio: the pieces, in somebody else's Envoy


def patches() -> dict[str, dict[str, Any]]:
    """What each patch of the EnvoyFilter puts in, by what it applies to and how."""
    items = one("overlays/istio", "EnvoyFilter")["spec"]["configPatches"]
    found = {f"{item['applyTo']} {item['patch']['operation']}": item["patch"]["value"] for item in items}
    assert len(found) == len(items)
    return found


def pieces() -> dict[str, Any]:
    options = EnvoyOptions(engines=("10.0.0.1:8000",), ext_proc=("kvcar.kvcar.svc.cluster.local:9002",))
    return as_dict(options, Part.FRAGMENT)


def test_istio_gets_what_envoy_config_prints() -> None:
    ours, theirs = pieces(), patches()
    engines, ext_proc = ours["clusters"]
    scored = ours["routes"][0]
    assert theirs["CLUSTER ADD"] == ext_proc
    assert theirs["HTTP_FILTER INSERT_BEFORE"] == ours["http_filters"][0]
    manager = theirs["NETWORK_FILTER MERGE"]["typed_config"]
    assert manager["early_header_mutation_extensions"] == ours["early_header_mutation_extensions"]
    assert manager["access_log"] == ours["access_log"]
    merged = theirs["CLUSTER MERGE"]
    assert merged.pop("ignore_health_on_host_removal") is True
    assert merged.items() <= engines.items()
    assert merged["load_balancing_policy"]
    route = theirs["HTTP_ROUTE MERGE"]
    assert route["typed_per_filter_config"] == scored["typed_per_filter_config"]
    assert route["request_body_buffer_limit"] == scored["request_body_buffer_limit"]
    assert route["route"]["retry_policy"] == scored["route"]["retry_policy"]
    prompts, _ = one("overlays/istio", "VirtualService")["spec"]["http"]
    assert prompts["match"] == [{"uri": {"regex": scored["match"]["safe_regex"]["regex"]}}]
    (matched,) = [
        item["match"]["routeConfiguration"]["vhost"]["route"]["name"]
        for item in one("overlays/istio", "EnvoyFilter")["spec"]["configPatches"]
        if item["applyTo"] == "HTTP_ROUTE"
    ]
    assert matched == prompts["name"]


def test_envoy_accepts_istios_patches(tmp_path: Path) -> None:
    """Put together as Istio would: clusters of its kind, its own filter before ours, named routes."""
    theirs = patches()
    existing = yaml.safe_load((Path(__file__).parents[1] / "extproc/existing_envoy.yaml").read_text())
    static = existing["static_resources"]
    manager = static["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    cluster = {"name": "outbound|8000||qwen3-8b.llm.svc.cluster.local", "type": "STATIC", "lb_policy": "LEAST_REQUEST"}
    static["clusters"] = [{**cluster, **theirs["CLUSTER MERGE"]}, theirs["CLUSTER ADD"]]
    manager |= theirs["NETWORK_FILTER MERGE"]["typed_config"]
    manager["http_filters"][-1:-1] = [theirs["HTTP_FILTER INSERT_BEFORE"]]
    patch = theirs["HTTP_ROUTE MERGE"]
    route = {"name": "kvcar", "match": {"prefix": "/"}, **patch}
    route["route"] = {"cluster": cluster["name"], "timeout": "0s", **patch["route"]}
    manager["route_config"]["virtual_hosts"][0]["routes"] = [route]
    validate(yaml.safe_dump(existing), tmp_path)
