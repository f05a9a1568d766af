"""A worker that starts again takes over what the others know, as replicas do, over their sockets."""

from __future__ import annotations

from collections.abc import Sequence

import aiohttp

from extproc.admin.server import REMOTE_HEADER
from extproc.config import ReplicasConfig
from extproc.replicas import TOKEN_HEADER, Replicas
from extproc.workers.place import Place, admin_socket


class Siblings(Replicas):
    """The other workers first, then the replicas that are configured.

    token   `admin.token`, which the workers' guards ask for
    peers   the configured replicas, None = there are none
    """

    def __init__(self, place: Place, *, token: str | None, peers: ReplicasConfig | None) -> None:
        if peers is None:
            super().__init__(())
        else:
            super().__init__(peers.peers, token=peers.token, timeout=peers.timeout_ms / 1000)
        headers = {REMOTE_HEADER: "127.0.0.1", **({TOKEN_HEADER: token} if token else {})}
        self._workers = {
            f"http://worker-{number}": aiohttp.ClientSession(
                headers=headers, connector=aiohttp.UnixConnector(str(admin_socket(place.directory, number)))
            )
            for number in place.others
        }

    async def close(self) -> None:
        for session in self._workers.values():
            await session.close()
        await super().close()

    def session_of(self, address: str) -> aiohttp.ClientSession:
        return self._workers.get(address) or super().session_of(address)

    async def _addresses(self) -> Sequence[tuple[str, str]]:
        return [*((address, "localhost") for address in self._workers), *await super()._addresses()]
