"""HTTP for checks: answers are values, failures included. Nothing raises, nothing is longer than its bound."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson


@dataclass(frozen=True, slots=True)
class Answer:
    """
    status   0 when nobody answered; then `error` says why
    at       wall clock when the answer came, to compare with its Date header
    """

    url: str
    status: int = 0
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    error: str = ""
    at: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status == 200

    def json(self) -> Any:
        """The parsed body, None when it is none."""
        try:
            return orjson.loads(self.body)
        except ValueError:
            return None

    def __str__(self) -> str:
        """For evidence: what was asked and what came."""
        if not self.status:
            return f"{self.url}: {self.error}"
        text = self.body[:120].decode("utf-8", "replace").replace("\n", " ")
        return f"{self.url}: HTTP {self.status}" + (f" {text}" if self.status != 200 and text else "")


class Http:
    """One client for all checks of one examination."""

    def __init__(self, *, timeout: float, max_answer: int) -> None:
        self._timeout = timeout
        self._max_answer = max_answer
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(32)

    async def get(
        self, url: str, *, headers: Mapping[str, str] | None = None, trust: ssl.SSLContext | None = None
    ) -> Answer:
        return await self.ask("GET", url, headers=headers, trust=trust)

    async def post(self, url: str, body: Any, *, headers: Mapping[str, str] | None = None) -> Answer:
        given = {"content-type": "application/json", **(headers or {})}
        return await self.ask("POST", url, data=orjson.dumps(body), headers=given)

    async def ask(
        self,
        method: str,
        url: str,
        *,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        trust: ssl.SSLContext | None = None,
    ) -> Answer:
        """Never raises, within `timeout` seconds. Redirects are not followed. `trust` None = the system's."""
        if self._session is None:
            self._session = aiohttp.ClientSession(trust_env=False)
        limit = aiohttp.ClientTimeout(total=self._timeout)
        body = bytearray()
        async with self._slots:
            try:
                async with self._session.request(
                    method, url, data=data, headers=headers, timeout=limit, allow_redirects=False, ssl=trust or True
                ) as response:
                    async for chunk in response.content.iter_any():
                        body += chunk
                        if len(body) > self._max_answer:
                            return Answer(url, error=f"the answer is over {self._max_answer} bytes")
                    lower = {name.lower(): value for name, value in response.headers.items()}
                    return Answer(url, response.status, bytes(body), lower, at=time.time())
            except TimeoutError:
                return Answer(url, error=f"no answer within {self._timeout:g} s")
            except aiohttp.ClientConnectorError as error:
                return Answer(url, error=error.os_error.strerror or type(error.os_error).__name__)
            except (aiohttp.ClientError, OSError, ValueError) as error:
                return Answer(url, error=f"{type(error).__name__}: {error}"[:200])

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
