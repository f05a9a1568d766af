"""Instances from the Kubernetes API: pods of a label selector, or the EndpointSlices of a Service. List, then watch.

    list (in pages) --> all objects at a resourceVersion --> watch from there: ADDED, MODIFIED, DELETED, BOOKMARK
      ^                                                     |  end, lost connection, silence: watch again from
      `-- 410 Gone: that version is forgotten --------------'  the last version that was seen

What an object means is decided in kubernetes_rules.py. Here are the protocol and its failures, which never take an
instance away: what was found stays until the API says something else, and `problem` says what is wrong.

The client library (kubernetes_asyncio, extra `kubernetes`) brings credentials, their renewal and TLS. Its own Watch
class is not used: it reconnects without a pause and builds an object for each field of each event.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from kvindex.discovery.base import Notify
from kvindex.discovery.kubernetes_rules import (
    LABEL_SERVICE,
    Found,
    Object,
    Rules,
    merge,
    pod_instances,
    slice_instances,
)
from kvindex.errors import ConfigurationError
from kvindex.fleet import Instance

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
ALL_NAMESPACES = "*"
CONNECT_TIMEOUT = LIST_TIMEOUT = 15.0
WATCH_SECONDS = 300
SHOWN = 3


class ApiError(Exception):
    """An answer of the API that is not the one asked for."""

    def __init__(self, status: int, message: str, retry_after: float = 0.0) -> None:
        super().__init__(f"{status} {message}".strip())
        self.status, self.retry_after = status, retry_after


class KubernetesSource:
    """Pods that `selector` selects or, with `service`, the endpoints of that Service; in each of `namespaces`.

    namespaces   () = kvcar's own in the cluster, else the kubeconfig context's; ("*",) = all
    kubeconfig   None = the service account's credentials in a cluster, else $KUBECONFIG or ~/.kube/config
    quiet        seconds without a word after which a watch is started again (the API sends bookmarks each minute)
    backoff      first and longest pause in seconds after a failure, doubled each time, less up to a half by chance
    page         objects of one answer of a list

    Raises ConfigurationError when the client library is not installed or nothing says what to select.
    """

    def __init__(
        self,
        rules: Rules,
        *,
        selector: str = "",
        service: str | None = None,
        namespaces: Sequence[str] = (),
        kubeconfig: str | None = None,
        context: str | None = None,
        quiet: float = 90.0,
        backoff: tuple[float, float] = (1.0, 30.0),
        page: int = 100,
    ) -> None:
        if importlib.util.find_spec("kubernetes_asyncio") is None:
            raise ConfigurationError(
                "discovery with kubernetes needs its client library: pip install 'kvcar[kubernetes]'"
            )
        if not selector and not service:
            raise ConfigurationError("discovery with kubernetes needs a label selector or the name of a service")
        self.rules = rules
        self.kind = "endpointslices" if service else "pods"
        self.selector = f"{LABEL_SERVICE}={service}" if service else selector
        self.namespaces = tuple(namespaces)
        self.kubeconfig = None if kubeconfig is None else str(Path(kubeconfig).expanduser())
        self.context = context
        self.quiet, self.backoff, self.page = quiet, backoff, page

    def convert(self, item: Object) -> Found:
        return slice_instances(item, self.rules) if self.kind == "endpointslices" else pod_instances(item, self.rules)

    async def run(self, notify: Notify) -> None:
        wanted = self.namespaces or ("",)
        board = _Board(notify, wanted)
        async with asyncio.TaskGroup() as group:
            for namespace in wanted:
                group.create_task(_Watcher(self, namespace, board).run())

    async def connect(self) -> tuple[Any, str]:
        """An API client and the namespace that its credentials stand for. Raises whatever is wrong with these."""
        from kubernetes_asyncio import client, config

        configuration = client.Configuration()
        namespace = ""
        if self.kubeconfig is None and self.context is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=configuration)
            namespace = _own_namespace()
        else:
            loader = await config.load_kube_config(self.kubeconfig, self.context, client_configuration=configuration)
            namespace = ((loader.current_context or {}).get("context") or {}).get("namespace") or ""
        return client.ApiClient(configuration), namespace or "default"


class _Board:
    """What all namespaces show together."""

    def __init__(self, notify: Notify, namespaces: Sequence[str]) -> None:
        self._notify = notify
        self._waiting = set(namespaces)
        self._objects: dict[str, Mapping[str, Found]] = {}
        self._errors: dict[str, str] = {}
        self._wrong: list[str] = []
        self._told: dict[str, Instance] = {}
        self._whole = False

    def show(self, namespace: str, objects: Mapping[str, Found]) -> None:
        """The objects of one namespace are these. O(all objects)."""
        self._objects[namespace] = objects
        self._waiting.discard(namespace)
        instances, skips = merge(one for part in self._objects.values() for one in part.values())
        self._wrong = [f"{name}: {skip.reason}" for name, skip in skips.items() if skip.wrong]
        told, self._told = self._told, {one.name: one for one in instances}
        if self._whole:
            # Differences only: to check and offer each of some hundred pods for every change of one takes too long.
            for name in sorted(told.keys() - self._told.keys()):
                self._notify.remove(name)
        if self._whole or self._waiting:  # while waiting, others of ours may be where nobody has answered yet
            for one in instances:
                if told.get(one.name) != one:
                    self._notify.upsert(one)
        else:
            self._whole = True
            self._notify.replace(instances)
            self._notify.ready()
        self._tell()

    def error(self, namespace: str, text: str | None) -> None:
        if text is None:
            self._errors.pop(namespace, None)
        else:
            self._errors[namespace] = text
        self._tell()

    def _tell(self) -> None:
        texts = [*self._errors.values(), *self._wrong]
        more = [f"and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
        self._notify.problem("; ".join(texts[:SHOWN] + more) or None)


class _Watcher:
    """List and watch of one namespace, for as long as it takes."""

    def __init__(self, source: KubernetesSource, namespace: str, board: _Board) -> None:
        self._source, self._namespace, self._board = source, namespace, board
        self._client: Any = None
        self._call: Callable[..., Any] = _not_connected
        self._objects: dict[str, Found] = {}
        self._version: str | None = None
        self._failures = 0

    async def run(self) -> None:
        first, longest = self._source.backoff
        try:
            while True:
                pause = 0.0
                try:
                    await self._follow()
                    self._failures = 0
                except Exception as error:
                    # Whatever client, plugin or API come up with: told, and tried again.
                    pause = await self._failed(error)
                delay = min(longest, first * 2 ** min(self._failures, 16)) * random.uniform(0.5, 1.0)
                await asyncio.sleep(max(delay, min(pause, longest)))
        finally:
            await self._close()

    async def _failed(self, error: Exception) -> float:
        """Returns how long the API wants to be left alone."""
        self._failures += 1
        status = error.status if isinstance(error, ApiError) else 0
        if status == 410:  # the usual end of an old version, unless it comes again and again
            self._version = None
            if self._failures < 3:
                return 0.0
        if status == 401 or (self._failures > 1 and not isinstance(error, ApiError)):
            await self._close()  # credentials and address are read again
        self._board.error(self._namespace, f"{self._where()}: {_explain(error)}")
        return error.retry_after if isinstance(error, ApiError) else 0.0

    async def _follow(self) -> None:
        """Up to the end of one watch."""
        if self._client is None:
            await self._connect()
        if self._version is None:
            await self._list()
        await self._watch()

    async def _connect(self) -> None:
        from kubernetes_asyncio import client

        self._client, own = await self._source.connect()
        api = client.CoreV1Api(self._client)
        everywhere, one = api.list_pod_for_all_namespaces, api.list_namespaced_pod
        if self._source.kind == "endpointslices":
            slices = client.DiscoveryV1Api(self._client)
            everywhere, one = slices.list_endpoint_slice_for_all_namespaces, slices.list_namespaced_endpoint_slice
        namespace = self._namespace or own

        def call(**options: Any) -> Any:
            return everywhere(**options) if namespace == ALL_NAMESPACES else one(namespace, **options)

        self._call = call

    async def _close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _get(self, read_timeout: float, **options: Any) -> Any:
        """The answer, its body not yet read. Raises ApiError for any status but 200."""
        response = await self._call(
            label_selector=self._source.selector,
            _preload_content=False,
            _request_timeout=(CONNECT_TIMEOUT, read_timeout),
            **options,
        )
        if response.status != 200:
            async with response:
                text = await response.text()
            raise ApiError(response.status, _message(text), _seconds(response.headers.get("Retry-After")))
        return response

    async def _list(self) -> None:
        objects: dict[str, Found] = {}
        more: dict[str, Any] = {}
        while True:
            async with await self._get(LIST_TIMEOUT, limit=self._source.page, **more) as response:
                body = orjson.loads(await response.read())
            for item in body["items"]:
                objects[_key(item)] = self._source.convert(item)
                await asyncio.sleep(0)  # lets requests in between
            if not body["metadata"].get("continue"):
                break
            more = {"_continue": body["metadata"]["continue"]}
        self._version = body["metadata"]["resourceVersion"]
        self._objects = objects
        self._board.show(self._namespace, objects)

    async def _watch(self) -> None:
        async with await self._get(
            self._source.quiet,
            watch=True,
            resource_version=self._version,
            allow_watch_bookmarks=True,
            timeout_seconds=WATCH_SECONDS,
        ) as response:
            self._board.error(self._namespace, None)
            while True:
                try:
                    line = await response.content.readline()
                except TimeoutError:
                    return
                if not line:
                    return
                self._apply(orjson.loads(line))
                self._failures = 0

    def _apply(self, event: Mapping[str, Any]) -> None:
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            raise ApiError(item.get("code") or 0, item.get("message") or item.get("reason") or "")
        if kind == "DELETED":
            self._objects.pop(_key(item), None)
        elif kind != "BOOKMARK":
            self._objects[_key(item)] = self._source.convert(item)
        self._version = item["metadata"]["resourceVersion"]
        if kind != "BOOKMARK":
            self._board.show(self._namespace, self._objects)

    def _where(self) -> str:
        namespace = {"": "the own namespace", ALL_NAMESPACES: "all namespaces"}.get(
            self._namespace, f"namespace {self._namespace!r}"
        )
        return f"{self._source.kind} of {namespace}"


def _own_namespace() -> str:
    return NAMESPACE_FILE.read_text("utf-8").strip() if NAMESPACE_FILE.is_file() else ""


async def _not_connected(**_: Any) -> Any:
    raise RuntimeError("no client")


def _key(item: Object) -> str:
    return f"{item['metadata'].get('namespace', '')}/{item['metadata']['name']}"


REMEDIES = {
    401: "the credentials are refused: check the service account's token or the kubeconfig's user",
    403: "not allowed to list and watch: apply deploy/kubernetes/base/rbac.yaml in that namespace",
    404: "no such resource: is this the API server of a cluster of version 1.21 or later?",
}


def _explain(error: Exception) -> str:
    if isinstance(error, ApiError) and error.status in REMEDIES:
        return f"{REMEDIES[error.status]} ({error})"
    if isinstance(error, orjson.JSONDecodeError):
        return "an answer that is no JSON"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return f"{type(error).__name__}: {error}" if not isinstance(error, ApiError) else str(error)


def _message(text: str) -> str:
    """The message of a Status object; of anything else, such as a proxy's page, its beginning."""
    try:
        return str(orjson.loads(text)["message"])[:300]
    except (ValueError, KeyError, TypeError):
        return text.strip()[:100]


def _seconds(header: str | None) -> float:
    return float(header) if header is not None and header.isdecimal() else 0.0
