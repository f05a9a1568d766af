"""A route and its description in one place: what is served and what /openapi.json says come from the same object."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Schema = Mapping[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Endpoint(web.AbstractRouteDef):
    """One method of one path.

    summary    one line; for the index and the description
    answers    JSON schema by status; those of every path (401, 403, 405, 413) are added by `document`
    query      query parameters: name -> schema, with `description`
    body       JSON schema of the request's body, None = none is read
    open       answers without a token
    action     changes something: guarded accordingly, and logged by its handler
    media      content type of the answer of status 200
    """

    method: str
    path: str
    handler: Handler
    summary: str
    answers: Mapping[int, Schema]
    query: Mapping[str, Schema] = field(default_factory=dict)
    body: Schema | None = None
    open: bool = False
    action: bool = False
    media: str = "application/json"

    def register(self, router: web.UrlDispatcher) -> list[web.AbstractRoute]:
        if self.method == "GET":
            return [router.add_get(self.path, self.handler)]
        return [router.add_route(self.method, self.path, self.handler)]


def document(endpoints: Iterable[Endpoint], components: Schema, *, version: str, token: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 description. `components`: schemas by name, which the endpoints refer to."""
    paths: dict[str, dict[str, Any]] = {}
    for one in endpoints:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, token)
    security = {"token": {"type": "apiKey", "in": "header", "name": "X-Internal-Token"}, "bearer": _BEARER}
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvcar admin port", "version": version},
        "paths": paths,
        "components": {"schemas": dict(components), **({"securitySchemes": security} if token else {})},
    }


def reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def listing(name: str) -> Schema:
    return {"type": "array", "items": reference(name)}


def record(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object with these properties; others may be there, too."""
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


def any_of(*types: str) -> Schema:
    return {"type": list(types)}


_BEARER = {"type": "http", "scheme": "bearer"}
_EVERYWHERE: Sequence[tuple[int, str]] = ((401, "no or a wrong token"), (403, "not from here"))
_MEANING = {
    200: "done", 201: "registered", 400: "a mistake in the request", 404: "not known", 409: "contradicts what is known",
    413: "the body is too large", 415: "a body of this type is not taken", 422: "a body of the wrong shape",
    500: "some of it failed", 503: "not ready",
}  # fmt: skip


def _operation(one: Endpoint, token: bool) -> dict[str, Any]:
    answers = {str(status): _answer(_MEANING[status], schema, one.media if status == 200 else "application/json")
               for status, schema in one.answers.items()}  # fmt: skip
    refusals = [pair for pair in _EVERYWHERE if pair[0] != 401 or (token and not one.open)]
    if one.body is not None:
        refusals += [(413, _MEANING[413]), (415, _MEANING[415])]
    for status, text in refusals:
        answers.setdefault(str(status), _answer(text, reference("Error"), "application/json"))
    found: dict[str, Any] = {"summary": one.summary, "operationId": _name(one), "responses": answers}
    if one.query:
        found["parameters"] = [
            {
                "name": name,
                "in": "query",
                "description": schema["description"],
                "schema": {key: value for key, value in schema.items() if key != "description"},
            }
            for name, schema in one.query.items()
        ]
    if one.body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": one.body}}}
    if token and not one.open:
        found["security"] = [{"token": []}, {"bearer": []}]
    return found


def _answer(text: str, schema: Schema, media: str) -> dict[str, Any]:
    return {"description": text, "content": {media: {"schema": schema}}}


def _name(one: Endpoint) -> str:
    return "-".join((one.method.lower(), *one.path.strip("/").split("/"))).rstrip("-")
