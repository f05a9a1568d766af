"""The three calls of etcd that discovery needs, over etcd's own JSON gateway: authenticate, range, watch.

The gateway is part of every etcd 3.4 and later (`--enable-grpc-gateway`, on by default) and needs no more than an HTTP
client. Its JSON: bytes are base64, 64-bit numbers are text, what is zero or empty is left out.
"""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp

from kvindex.errors import ConfigurationError

UNAUTHENTICATED = 16
MAX_MESSAGE = 64 << 20
"""Bytes of one watch message (etcd puts at most 1,000 events into one)."""


class EtcdError(Exception):
    """etcd refused. `code` is the gRPC status."""

    def __init__(self, text: str, code: int = 2) -> None:
        super().__init__(text)
        self.code = code


class Compacted(Exception):
    """What a watch asked for is no longer there (compacted, or another cluster): list again."""


@dataclass(frozen=True, slots=True)
class EtcdOptions:
    """endpoints  http://host:port or https://host:port; the first that works is used
    ca, cert, key  PEM files: whom to trust (None = the system's), and the client's own certificate
    timeout        seconds for a call, and for connecting
    check_every    seconds between questions whether the watched member still has a quorum: a watch alone would hang
    """

    endpoints: tuple[str, ...]
    username: str = ""
    password: str = ""
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    timeout: float = 5.0
    check_every: float = 5.0

    def tls(self) -> ssl.SSLContext | None:
        """None = no endpoint is https. Raises ConfigurationError that names the file."""
        if not any(endpoint.startswith("https://") for endpoint in self.endpoints):
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(f"ca {self.ca!r}: {error}") from None
        if self.cert is not None:
            try:
                context.load_cert_chain(self.cert, self.key)
            except (OSError, ssl.SSLError) as error:
                raise ConfigurationError(f"cert {self.cert!r}, key {self.key!r}: {error}") from None
        return context


class Pair(NamedTuple):
    key: bytes
    value: bytes


class Listing(NamedTuple):
    """All pairs of a range, oldest change first, true at `revision` of the cluster with this id."""

    pairs: list[Pair]
    revision: int
    cluster: str


class Change(NamedTuple):
    """One change; `value` None = deleted, `previous` the value before, None where unknown."""

    key: bytes
    value: bytes | None
    previous: bytes | None


class Changes(NamedTuple):
    """What a watch brought; the next one goes on at `next_revision`."""

    changes: list[Change]
    next_revision: int


class EtcdClient:
    """One endpoint. Every call raises EtcdError, aiohttp.ClientError, TimeoutError or ValueError (no JSON)."""

    def __init__(self, session: aiohttp.ClientSession, endpoint: str, options: EtcdOptions) -> None:
        self._session = session
        self._url = endpoint.rstrip("/") + "/v3/"
        self._options = options
        self._tls: ssl.SSLContext | bool = options.tls() or True
        self._token: str | None = None

    async def authenticate(self) -> None:
        """A token for the following calls; nothing to do without a user name."""
        options = self._options
        if options.username:
            self._token = None
            answer = await self._call("auth/authenticate", {"name": options.username, "password": options.password})
            self._token = str(answer["token"])

    async def list(self, start: bytes, end: bytes, *, limit: int = 0) -> Listing:
        """Keys from `start` to before `end`. A linearizable read: it fails where there is no quorum."""
        body = {"key": _text(start), "range_end": _text(end), "sort_target": "MOD", "sort_order": "ASCEND"}
        if limit:
            body["limit"] = str(limit)
        answer = await self._call("kv/range", body)
        header = answer["header"]
        pairs = [Pair(_bytes(one["key"]), _bytes(one.get("value", ""))) for one in answer.get("kvs", ())]
        return Listing(pairs, int(header["revision"]), header["cluster_id"])

    async def watch(self, start: bytes, end: bytes, revision: int, cluster: str) -> AsyncGenerator[Changes, None]:
        """Every change from `revision` on, until the connection breaks; first comes an empty one: the watch is up.

        Raises Compacted.
        """
        body = {
            "create_request": {
                "key": _text(start),
                "range_end": _text(end),
                "start_revision": str(revision),
                "prev_kv": True,
                "progress_notify": True,
            }
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._options.timeout)
        async with self._session.post(
            self._url + "watch", json=body, headers=self._headers(), timeout=timeout, ssl=self._tls
        ) as response:
            if response.status != 200:
                raise _error(response.status, await response.read())
            async for message in _messages(response.content):
                for change in _watched(message, revision, cluster):
                    revision = change.next_revision
                    yield change

    async def _call(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            return await self._post(path, body)
        except EtcdError as error:
            if error.code != UNAUTHENTICATED or self._token is None:
                raise
        await self.authenticate()  # the token has expired
        return await self._post(path, body)

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        timeout = aiohttp.ClientTimeout(total=self._options.timeout)
        async with self._session.post(
            self._url + path, json=body, headers=self._headers(), timeout=timeout, ssl=self._tls
        ) as response:
            content = await response.read()
            if response.status != 200:
                raise _error(response.status, content)
            return json.loads(content)

    def _headers(self) -> dict[str, str]:
        return {} if self._token is None else {"Authorization": self._token}


def _watched(message: Any, revision: int, cluster: str) -> list[Changes]:
    """What one message of a watch says. Raises Compacted, EtcdError."""
    if "error" in message:
        error = message["error"]
        raise EtcdError(str(error.get("message", error)), int(error.get("grpc_code", error.get("code", 2))))
    result = message["result"]
    header = result["header"]
    if int(result.get("compact_revision", 0)):
        raise Compacted(f"revision {revision} is compacted, the oldest is {result['compact_revision']}")
    if result.get("canceled"):
        raise EtcdError(f"watch cancelled: {result.get('cancel_reason', 'no reason given')}")
    if header["cluster_id"] != cluster or int(header["revision"]) < revision - 1:
        raise Compacted("the cluster is another one, or was restored, or this member is behind")
    if result.get("created"):
        return [Changes([], revision)]
    events = result.get("events", ())
    if not events:  # progress: everything up to this revision has been sent
        return [Changes([], int(header["revision"]) + 1)]
    return [Changes([_change(event) for event in events], int(events[-1]["kv"]["mod_revision"]) + 1)]


def _change(event: Any) -> Change:
    previous = event.get("prev_kv")
    return Change(
        _bytes(event["kv"]["key"]),
        None if event.get("type") == "DELETE" else _bytes(event["kv"].get("value", "")),
        None if previous is None else _bytes(previous.get("value", "")),
    )


async def _messages(content: aiohttp.StreamReader) -> AsyncIterator[Any]:
    """One JSON value a line, of any length up to MAX_MESSAGE."""
    rest = bytearray()
    async for chunk in content.iter_any():
        rest += chunk
        *lines, tail = rest.split(b"\n")
        for line in lines:
            if line.strip():
                yield json.loads(line)
        rest = tail
        if len(rest) > MAX_MESSAGE:
            raise EtcdError(f"a watch message is over {MAX_MESSAGE} bytes")


def _error(status: int, content: bytes) -> EtcdError:
    try:
        found = json.loads(content)
        return EtcdError(str(found.get("message") or found.get("error")), int(found.get("code", 2)))
    except (ValueError, AttributeError):
        return EtcdError(f"HTTP {status}: {content[:200].decode('utf-8', 'replace')}")


def _text(key: bytes) -> str:
    return base64.b64encode(key).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
