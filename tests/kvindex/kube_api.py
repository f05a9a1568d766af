"""A double of the Kubernetes API server: list and watch of pods and EndpointSlices over HTTP, as the real one does it.

Resource versions count changes. A watch sends what happened after its version, as chunks, one JSON object a line; an
object that begins or ceases to match the label selector is ADDED or DELETED there. Versions up to `oldest` are
forgotten: a watch from there gets an ERROR event with code 410 (or, with `gone_by_status`, an answer of status 410).
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ssl import SSLContext
from typing import Any

from aiohttp import web

Object = dict[str, Any]
API = {"pods": ("v1", "Pod"), "endpointslices": ("discovery.k8s.io/v1", "EndpointSlice")}


def matches(labels: dict[str, str], selector: str) -> bool:
    """`a=b`, `a!=b`, `a in (b,c)`, `a`, joined by commas."""
    for term in re.findall(r"[^,(]+(?:\([^)]*\))?", selector):
        if inside := re.fullmatch(r"\s*(\S+) in \(([^)]*)\)\s*", term):
            fits = labels.get(inside[1]) in [one.strip() for one in inside[2].split(",")]
        elif "!=" in term:
            key, _, value = term.partition("!=")
            fits = labels.get(key.strip()) != value.strip()
        elif "=" in term:
            key, _, value = term.partition("=")
            fits = labels.get(key.strip()) == value.strip("= ")
        else:
            fits = term.strip() in labels
        if not fits:
            return False
    return True


class KubeApi:
    """`url` once served. `requests` holds (path, query) of each request that came."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.version = 100
        self.oldest = 0
        self.gone_by_status = False
        self.tokens: set[str] | None = None
        self.forbidden: set[str] = set()
        self.broken: Callable[[web.Request], web.StreamResponse | None] = lambda _: None
        self.hang = asyncio.Event()
        self.hang.set()
        self.watching: set[_Watch] = set()
        self._objects: dict[tuple[str, str, str], Object] = {}
        self._pages: dict[str, list[Object]] = {}
        self._log: list[tuple[int, str, Object | None, Object | None]] = []

    def put(self, kind: str, item: Object) -> None:
        item = copy.deepcopy(item)
        key = (kind, item["metadata"]["namespace"], item["metadata"]["name"])
        self._change(kind, key, item)

    def delete(self, kind: str, namespace: str, name: str) -> None:
        self._change(kind, (kind, namespace, name), None)

    def _change(self, kind: str, key: tuple[str, str, str], after: Object | None) -> None:
        self.version += 1
        before = self._objects.pop(key, None)
        if after is not None:
            after["metadata"]["resourceVersion"] = str(self.version)
            self._objects[key] = after
        self._log.append((self.version, kind, before, after))
        for watch in self.watching:
            watch.wake.set()

    def compact(self) -> None:
        """Forget all versions up to now; a change of something that nobody watches moves the version on."""
        self.oldest = self.version
        self._change("other", ("other", "", ""), None)

    def bookmark(self) -> None:
        """A bookmark for all that watch."""
        for watch in self.watching:
            watch.bookmarks += 1
            watch.wake.set()

    def cut(self, *, rest: bytes = b"") -> None:
        """Drops the connections of all that watch, after `rest` of an event."""
        for watch in self.watching:
            watch.cut = rest
            watch.wake.set()

    # -- HTTP

    async def answer(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        self.requests.append((request.path, query))
        await self.hang.wait()
        broken = self.broken(request)
        if broken is not None:
            return broken
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.tokens is not None and token not in self.tokens:
            return status(401, "Unauthorized")
        kind, namespace = request.match_info["kind"], request.match_info.get("namespace", "")
        if namespace in self.forbidden:
            return status(403, f'{kind} is forbidden: User "sa" cannot list resource in the namespace "{namespace}"')
        if kind not in API:
            return status(404, "the server could not find the requested resource")
        selector = query.get("labelSelector", "")

        def visible(item: Object | None) -> bool:
            if item is None or (namespace and item["metadata"]["namespace"] != namespace):
                return False
            return matches(item["metadata"].get("labels") or {}, selector)

        if query.get("watch") in ("true", "True", "1"):
            return await self._watch(request, kind, visible)
        return self._list(kind, query, visible)

    def _list(self, kind: str, query: dict[str, str], visible: Callable[[Object | None], bool]) -> web.Response:
        token = query.get("continue")
        if token:
            version, items = token.split("/")[0], self._pages.pop(token, None)
            if items is None or int(version) <= self.oldest:
                return status(410, "The provided continue parameter is too old", reason="Expired")
        else:
            version = str(self.version)
            items = [item for key, item in sorted(self._objects.items()) if key[0] == kind and visible(item)]
        limit = int(query.get("limit") or 0) or len(items)
        page, rest = items[:limit], items[limit:]
        meta: dict[str, Any] = {"resourceVersion": version}
        if rest:
            meta["continue"] = f"{version}/{len(self.requests)}"
            self._pages[meta["continue"]] = rest
        group, name = API[kind]
        return web.json_response({"apiVersion": group, "kind": f"{name}List", "metadata": meta, "items": page})

    async def _watch(
        self, request: web.Request, kind: str, visible: Callable[[Object | None], bool]
    ) -> web.StreamResponse:
        query = request.query
        seen = int(query.get("resourceVersion") or self.version)
        if seen <= self.oldest and self.gone_by_status:
            return status(410, "too old resource version", reason="Expired")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        if seen <= self.oldest:
            await send(response, "ERROR", failure(410, f"too old resource version: {seen} ({self.oldest})", "Expired"))
            return response
        watch = _Watch()
        self.watching.add(watch)
        try:
            async with asyncio.timeout(float(query.get("timeoutSeconds") or 3600)):
                while True:
                    for version, what, before, after in [entry for entry in self._log if entry[0] > seen]:
                        seen = version
                        if what == kind and (change := _change(visible(before), visible(after))):
                            item = copy.deepcopy(after if visible(after) else before)
                            assert item is not None
                            item["metadata"]["resourceVersion"] = str(version)
                            await send(response, change, item)
                    while watch.bookmarks and query.get("allowWatchBookmarks") in ("true", "True", "1"):
                        watch.bookmarks -= 1
                        group, name = API[kind]
                        seen = self.version
                        mark = {"kind": name, "apiVersion": group, "metadata": {"resourceVersion": str(self.version)}}
                        await send(response, "BOOKMARK", mark)
                    if watch.cut is not None:
                        await response.write(watch.cut) if watch.cut else None
                        if request.transport is not None:
                            request.transport.close()
                        return response
                    watch.wake.clear()
                    await watch.wake.wait()
        except TimeoutError:
            pass
        finally:
            self.watching.discard(watch)
        return response


class _Watch:
    def __init__(self) -> None:
        self.wake = asyncio.Event()
        self.bookmarks = 0
        self.cut: bytes | None = None


def _change(before: bool, after: bool) -> str:
    return {(False, True): "ADDED", (True, True): "MODIFIED", (True, False): "DELETED"}.get((before, after), "")


async def send(response: web.StreamResponse, kind: str, item: Object) -> None:
    await response.write(json.dumps({"type": kind, "object": item}).encode() + b"\n")


def failure(code: int, message: str, reason: str = "") -> Object:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


def status(code: int, message: str, *, reason: str = "", headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response(failure(code, message, reason), status=code, headers=headers)


@asynccontextmanager
async def serving(api: KubeApi, ssl: SSLContext | None = None) -> AsyncIterator[KubeApi]:
    app = web.Application()
    for base in ("/api/v1", "/apis/discovery.k8s.io/v1"):
        app.router.add_get(base + "/namespaces/{namespace}/{kind}", api.answer)
        app.router.add_get(base + "/{kind}", api.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=ssl)
    await site.start()
    port = runner.addresses[0][1]
    api.url = f"{'https' if ssl else 'http'}://127.0.0.1:{port}"
    try:
        yield api
    finally:
        await runner.cleanup()


def kubeconfig(url: str, *, token: str = "secret", namespace: str = "llm") -> str:
    """The text of a kubeconfig file (JSON is YAML)."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
        }
    )
