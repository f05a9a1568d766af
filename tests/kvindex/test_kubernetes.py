"""The Kubernetes source against a double of the API server, by way of the real client library."""

from __future__ import annotations

import json
import os
import random
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from kvindex.discovery.kubernetes import KubernetesSource
from kvindex.discovery.kubernetes_rules import Rules
from kvindex.discovery.template import Template
from kvindex.errors import ConfigurationError
from kvindex.fleet import ChangeKind, InstanceState
from tests.kvindex.discovery_peer import Running, running
from tests.kvindex.kube_api import KubeApi, failure, kubeconfig, send, serving, status
from tests.kvindex.test_kubernetes_rules import STATUS, changed, endpoint, piece, pod

ROOT = Path(__file__).parent.parent.parent
TLS = ROOT / "tests" / "extproc" / "tls"
SELECTOR = "model.aibrix.ai/name=qwen3-8b"


@pytest.fixture
async def api() -> AsyncIterator[KubeApi]:
    async with serving(KubeApi()) as one:
        yield one


@pytest.fixture
def config(api: KubeApi, tmp_path: Path) -> str:
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig(api.url))
    return str(path)


def source(config: str | None, **options: Any) -> KubernetesSource:
    defaults: dict[str, Any] = {"selector": SELECTOR, "backoff": (0.01, 0.05)}
    return KubernetesSource(Rules(template=Template(pool="qwen")), kubeconfig=config, **{**defaults, **options})


def write(path: str, text: str) -> None:
    Path(path).write_text(text, "utf-8")


def lists(api: KubeApi) -> int:
    return sum("watch" not in query for _, query in api.requests)


async def test_list_then_watch(api: KubeApi, config: str) -> None:
    api.put("pods", pod("a", ip="10.1.0.1"))
    api.put("pods", pod("other", ip="10.1.0.9", **{"model.aibrix.ai/name": "llama"}))
    async with running(source(config)) as it:
        await it.until(lambda: it.feed.is_ready)
        assert it.addresses == {"llm/a": "10.1.0.1:8000"}
        api.put("pods", pod("b", ip="10.1.0.2"))
        await it.until(lambda: len(it.instances) == 2)
        api.put("pods", changed(pod("a", ip="10.1.0.1"), "metadata", "deletionTimestamp", to="2026-01-01T00:00:00Z"))
        await it.until(lambda: it.instances["llm/a"].state is InstanceState.DRAINING)
        api.delete("pods", "llm", "a")
        await it.until(lambda: list(it.instances) == ["llm/b"])
        api.put("pods", changed(pod("b", ip="10.1.0.2"), *STATUS, "containerID", to="containerd://bb"))
        await it.until(lambda: it.changes[-1].kind is ChangeKind.REPLACED)
        # relabelled: it does not match any more, which a watch shows as deleted
        api.put("pods", pod("b", ip="10.1.0.2", **{"model.aibrix.ai/name": "llama"}))
        await it.until(lambda: not it.instances)
    assert lists(api) == 1
    assert not any(it.feed.problems)
    path, query = api.requests[-1]
    assert path == "/api/v1/namespaces/llm/pods"
    assert query["labelSelector"] == SELECTOR
    assert query["allowWatchBookmarks"] == "True"


async def test_lists_come_in_pages(api: KubeApi, config: str) -> None:
    for number in range(5):
        api.put("pods", pod(f"p{number}", ip=f"10.1.0.{number}"))
    async with running(source(config, page=2)) as it:
        await it.until(lambda: it.feed.is_ready)
        assert len(it.instances) == 5
    assert lists(api) == 3


async def test_watch_resumes_where_it_was(api: KubeApi, config: str) -> None:
    api.put("pods", pod("a", ip="10.1.0.1"))
    async with running(source(config)) as it:
        await it.until(lambda: bool(api.watching))
        for rest in (b"", b'{"type":"ADDED","object":{"kind":'):  # between events, and in the middle of one
            api.cut(rest=rest)
            await it.until(lambda: not api.watching)
            api.delete("pods", "llm", "a")
            await it.until(lambda: not it.instances)
            api.put("pods", pod("a", ip="10.1.0.1"))
            await it.until(lambda: bool(it.instances))
        await it.until(lambda: it.feed.error is None)
    assert lists(api) == 1


@pytest.mark.parametrize("by_status", [False, True])
async def test_forgotten_version_is_listed_again(api: KubeApi, config: str, by_status: bool) -> None:
    api.gone_by_status = by_status
    for name, ip in (("a", "10.1.0.1"), ("b", "10.1.0.2")):
        api.put("pods", pod(name, ip=ip))
    async with running(source(config)) as it:
        await it.until(lambda: bool(api.watching))
        before = len(it.changes)
        api.delete("pods", "llm", "a")
        await it.until(lambda: len(it.instances) == 1)
        api.broken = lambda _: status(500, "etcd has no leader")  # until it is gone, nobody may watch
        api.cut()
        await it.until(lambda: it.feed.error is not None)
        assert list(it.instances) == ["llm/b"]
        api.put("pods", pod("c", ip="10.1.0.3"))
        api.put("pods", pod("d", ip="10.1.0.4"))
        api.delete("pods", "llm", "b")
        api.compact()
        api.broken = lambda _: None
        await it.until(lambda: list(it.instances) == ["llm/c", "llm/d"])
        left, joined = ChangeKind.LEFT, ChangeKind.JOINED
        assert [change.kind for change in it.changes[before:]] == [left, left, joined, joined]
        await it.until(lambda: it.feed.error is None and bool(api.watching))
        api.delete("pods", "llm", "d")
        await it.until(lambda: list(it.instances) == ["llm/c"])
    assert lists(api) == 2


async def test_bookmarks_save_the_list(api: KubeApi, config: str) -> None:
    """A version that only a bookmark told is the one to go on from, when all before it are forgotten."""
    async with running(source(config)) as it:
        await it.until(lambda: bool(api.watching))
        api.compact()
        api.bookmark()
        version = str(api.version)
        await it.until(lambda: all(not watch.bookmarks for watch in api.watching))
        api.cut()
        await it.until(lambda: api.requests[-1][1].get("resourceVersion") == version)
        await it.until(lambda: bool(api.watching))
    assert lists(api) == 1


async def test_version_gone_again_and_again_is_told(api: KubeApi, config: str) -> None:
    async with running(source(config)) as it:
        await it.until(lambda: it.feed.is_ready)
        api.broken = lambda request: status(410, "too old", reason="Expired") if "watch" in request.query else None
        api.cut()
        await it.until(lambda: "too old" in (it.feed.error or ""))
        api.broken = lambda _: None
        await it.until(lambda: it.feed.error is None)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda: status(401, "Unauthorized"), "credentials are refused"),
        (lambda: status(403, "pods is forbidden"), "deploy/kubernetes/base/rbac.yaml"),
        (lambda: status(404, "could not find the requested resource"), "no such resource"),
        (lambda: status(429, "slow down", headers={"Retry-After": "1"}), "429 slow down"),
        (lambda: status(500, "etcdserver: no leader"), "500 etcdserver: no leader"),
        (lambda: web.Response(text="<html>sign in</html>", status=502), "502 <html>sign in"),
        (lambda: web.Response(text="<html>sign in</html>"), "no JSON"),
        (lambda: web.json_response({"kind": "Status"}), "KeyError"),
    ],
    ids=["401", "403", "404", "429", "500", "proxy", "html", "schema"],
)
async def test_refusals_are_told_and_change_nothing(api: KubeApi, config: str, answer: Any, words: str) -> None:
    api.put("pods", pod("a", ip="10.1.0.1"))
    api.broken = lambda _: answer()
    async with running(source(config)) as it:
        await it.until(lambda: words in (it.feed.error or ""))
        assert "own namespace" in (it.feed.error or "")
        assert not it.feed.is_ready
        api.broken = lambda _: None
        await it.until(lambda: it.feed.is_ready and it.feed.error is None)
        # the list stays good, the watch is refused; then the API comes back
        api.broken = lambda _: answer()
        api.cut()
        await it.until(lambda: words in (it.feed.error or "") or words == "KeyError")
        assert list(it.instances) == ["llm/a"]
        api.broken = lambda _: None
        api.put("pods", pod("b", ip="10.1.0.2"))
        await it.until(lambda: len(it.instances) == 2 and it.feed.error is None)


@pytest.mark.parametrize(
    "line",
    [b"<html>\n", b'{"type":"ADDED"}\n', b'{"type":"ADDED","object":{"metadata":{}}}\n', b"[]\n", b"{}\n"],
)
async def test_nonsense_in_a_watch(api: KubeApi, config: str, line: bytes) -> None:
    async def nonsense(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(line)
        return response

    api.put("pods", pod("a", ip="10.1.0.1"))
    usual = api.answer

    async def answer(request: web.Request) -> web.StreamResponse:
        return await (nonsense(request) if nonsensical and "watch" in request.query else usual(request))

    nonsensical = True
    api.answer = answer  # type: ignore[method-assign]
    async with serving(api):
        write(config, kubeconfig(api.url))
        async with running(source(config)) as it:
            await it.until(lambda: any(it.feed.problems))
            assert list(it.instances) == ["llm/a"]
            nonsensical = False
            api.put("pods", pod("b", ip="10.1.0.2"))
            await it.until(lambda: len(it.instances) == 2 and it.feed.error is None)


async def test_error_event_in_a_watch_is_told(api: KubeApi, config: str) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return await usual(request)
        response = web.StreamResponse()
        await response.prepare(request)
        await send(response, "ERROR", failure(500, "unable to decode an event from the watch stream"))
        return response

    usual = api.answer
    api.answer = answer  # type: ignore[method-assign]
    async with serving(api):
        write(config, kubeconfig(api.url))
        async with running(source(config)) as it:
            await it.until(lambda: "unable to decode" in (it.feed.error or ""))


async def test_silent_watch_is_started_again(api: KubeApi, config: str) -> None:
    """A connection that a firewall has forgotten says nothing any more, and never ends."""
    async with running(source(config, quiet=0.05)) as it:
        await it.until(lambda: sum("watch" in query for _, query in api.requests) >= 3)
        api.put("pods", pod("a", ip="10.1.0.1"))
        await it.until(lambda: bool(it.instances))
    assert lists(api) == 1
    assert not any(it.feed.problems)


async def test_slow_server(api: KubeApi, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvindex.discovery.kubernetes.LIST_TIMEOUT", 0.1)
    api.put("pods", pod("a", ip="10.1.0.1"))
    api.hang.clear()
    async with running(source(config)) as it:
        await it.until(lambda: "no answer in time" in (it.feed.error or ""))
        monkeypatch.undo()
        api.hang.set()
        await it.until(lambda: it.feed.is_ready and it.feed.error is None)


async def test_server_that_is_not_there_yet(tmp_path: Path) -> None:
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig("http://127.0.0.1:1"))
    async with running(source(str(path))) as it:
        await it.until(lambda: "127.0.0.1" in (it.feed.error or ""))


async def test_each_namespace_for_itself(api: KubeApi, config: str) -> None:
    api.forbidden = {"two"}
    for namespace, ip in (("one", "10.1.0.1"), ("two", "10.1.0.2")):
        api.put("pods", changed(pod("a", ip=ip), "metadata", "namespace", to=namespace))
    async with running(source(config, namespaces=["one", "two"])) as it:
        await it.until(lambda: bool(it.instances) and it.feed.error is not None)
        assert list(it.instances) == ["one/a"]
        assert "'two'" in (it.feed.error or "")
        assert not it.feed.is_ready, "the picture is not whole"
        api.forbidden = set()
        await it.until(lambda: it.feed.is_ready and it.feed.error is None)
        assert sorted(it.instances) == ["one/a", "two/a"]


async def test_all_namespaces(api: KubeApi, config: str) -> None:
    for namespace, ip in (("one", "10.1.0.1"), ("two", "10.1.0.2")):
        api.put("pods", changed(pod("a", ip=ip), "metadata", "namespace", to=namespace))
    async with running(source(config, namespaces=["*"])) as it:
        await it.until(lambda: sorted(it.instances) == ["one/a", "two/a"])
    assert api.requests[0][0] == "/api/v1/pods"


async def test_pods_that_somebody_has_to_mend_are_told(api: KubeApi, config: str) -> None:
    for number in range(5):
        api.put("pods", pod(f"p{number}", ip=f"10.1.0.{number}", **{"role-name": "worker"}))
    api.put("pods", changed(pod("q", ip=None), "status", "phase", to="Pending"))  # none yet: nothing to tell
    async with running(source(config)) as it:
        await it.until(lambda: it.feed.is_ready)
        assert "llm/p0: label role-name: role 'worker'" in (it.feed.error or "")
        assert (it.feed.error or "").endswith("and 2 more")
        for number in range(5):
            api.put("pods", pod(f"p{number}", ip=f"10.1.0.{number}"))
        await it.until(lambda: it.feed.error is None)


async def test_endpoint_slices_of_a_service(api: KubeApi, config: str) -> None:
    api.put("endpointslices", piece(endpoint("10.1.0.1", "a"), endpoint("10.1.0.2", "b", ready=False), name="x"))
    api.put("endpointslices", piece(endpoint("10.1.0.3", "c"), name="y"))
    foreign = changed(piece(endpoint("10.1.0.9", "z"), name="z"), "metadata", "labels", to={})
    api.put("endpointslices", foreign)
    async with running(source(config, service="engines")) as it:
        await it.until(lambda: it.feed.is_ready)
        assert sorted(it.instances) == ["llm/a", "llm/b", "llm/c"]
        assert it.instances["llm/b"].state is InstanceState.DRAINING
        api.put("endpointslices", piece(endpoint("10.1.0.2", "b"), name="x"))
        await it.until(lambda: sorted(it.instances) == ["llm/b", "llm/c"])
        assert it.instances["llm/b"].state is InstanceState.ACTIVE
        api.delete("endpointslices", "llm", "y")
        await it.until(lambda: sorted(it.instances) == ["llm/b"])
    assert api.requests[0][0] == "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"


# -- credentials


async def test_new_credentials_after_a_refusal(api: KubeApi, config: str) -> None:
    api.put("pods", pod("a", ip="10.1.0.1"))
    api.tokens = {"secret"}
    async with running(source(config)) as it:
        await it.until(lambda: bool(api.watching))
        api.tokens = {"renewed"}
        api.cut()
        await it.until(lambda: "credentials are refused" in (it.feed.error or ""))
        write(config, kubeconfig(api.url, token="renewed"))
        await it.until(lambda: it.feed.error is None)
        assert list(it.instances) == ["llm/a"]
    assert "secret" not in json.dumps(it.feed.problems)


async def test_exec_plugin(api: KubeApi, config: str) -> None:
    api.put("pods", pod("a", ip="10.1.0.1"))
    api.tokens = {"from-plugin"}
    credential = {
        "kind": "ExecCredential",
        "apiVersion": "client.authentication.k8s.io/v1",
        "status": {"token": "from-plugin"},
    }
    text = json.loads(kubeconfig(api.url))
    text["users"][0]["user"] = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": sys.executable,
            "args": ["-c", f"print({json.dumps(json.dumps(credential))})"],
        }
    }
    write(config, json.dumps(text))
    async with running(source(config)) as it:
        await it.until(lambda: list(it.instances) == ["llm/a"])


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "[",
        "{}",
        kubeconfig("http://x").replace('"cluster": "c"', '"cluster": "d"'),
        kubeconfig("http://127.0.0.1:1"),
    ],
)
async def test_kubeconfig_that_is_no_use(api: KubeApi, config: str, text: str | None) -> None:
    api.put("pods", pod("a", ip="10.1.0.1"))
    good = kubeconfig(api.url)
    (os.unlink(config) if text is None else write(config, text))
    async with running(source(config)) as it:
        await it.until(lambda: it.feed.error is not None)
        write(config, good)
        await it.until(lambda: it.feed.is_ready and it.feed.error is None)


async def test_in_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service account's files, TLS checked by the cluster's CA, the token read again once it is a minute old."""
    token, namespace = tmp_path / "token", tmp_path / "namespace"
    token.write_text("mounted")
    namespace.write_text("engines\n")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(TLS / "server.pem", TLS / "server.key")
    api = KubeApi()
    api.tokens = {"mounted"}
    api.put("pods", changed(pod("a", ip="10.1.0.1"), "metadata", "namespace", to="engines"))
    async with serving(api, context):
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", api.url.rpartition(":")[2])
        base = "kubernetes_asyncio.config.incluster_config."
        monkeypatch.setattr(base + "SERVICE_TOKEN_FILENAME", str(token))
        monkeypatch.setattr(base + "SERVICE_CERT_FILENAME", str(TLS / "ca.pem"))
        monkeypatch.setattr("kvindex.discovery.kubernetes.NAMESPACE_FILE", namespace)
        async with running(source(None)) as it:
            await it.until(lambda: list(it.instances) == ["engines/a"])
            await it.until(lambda: bool(api.watching))
            token.write_text("rotated")
            api.tokens = {"rotated"}
            api.cut()
            await it.until(lambda: bool(api.watching) and it.feed.error is None)


def test_manifest_allows_what_is_asked_for() -> None:
    parts = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "base" / "rbac.yaml").read_text("utf-8")))
    account, role, binding = parts
    allowed = {
        (group, kind, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for kind in rule["resources"]
        for verb in rule["verbs"]
    }
    kinds = [("", "pods"), ("discovery.k8s.io", "endpointslices")]
    assert allowed == {(*kind, verb) for kind in kinds for verb in ("get", "list", "watch")}
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["metadata"]["namespace"] == role["metadata"]["namespace"]
    assert binding["subjects"][0] == {"kind": "ServiceAccount", **account["metadata"]}


def test_needs_something_to_select() -> None:
    with pytest.raises(ConfigurationError, match="label selector or the name of a service"):
        KubernetesSource(Rules())


def test_needs_the_client_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'kvcar\[kubernetes\]'"):
        KubernetesSource(Rules(), selector="a=b")


async def test_random_churn_with_faults(api: KubeApi, config: str, seeds: int) -> None:
    """Whatever happens to connections and versions: in the end the fleet is what the API server has."""
    for seed in range(max(1, seeds // 100)):
        chance = random.Random(seed)
        present: dict[str, str] = {}
        async with running(source(config, page=3)) as it:
            for _ in range(120):
                name = f"p{chance.randrange(8)}"
                match chance.choice(["put", "put", "restart", "delete", "cut", "compact", "mark", "see"]):
                    case "put" | "restart":
                        present[name] = f"containerd://{chance.randrange(1000)}"
                        item = pod(name, ip=f"10.1.0.{name[1:]}")
                        api.put("pods", changed(item, *STATUS, "containerID", to=present[name]))
                    case "delete" if name in present:
                        del present[name]
                        api.delete("pods", "llm", name)
                    case "cut":
                        api.cut(rest=chance.choice([b"", b'{"type":']))
                    case "compact":
                        api.compact()
                    case "mark":
                        api.bookmark()
                    case "see":
                        await it.until(lambda: bool(api.watching))

            def equal(present: dict[str, str] = present, it: Running = it) -> bool:
                expected = {f"llm/{name}": f"uid-{name}/{process}" for name, process in present.items()}
                return {name: one.incarnation for name, one in it.instances.items()} == expected

            await it.until(equal)
            await it.until(lambda: it.feed.error is None)
        for name in present:
            api.delete("pods", "llm", name)
