"""What listens on a port: nothing, ZMQ, or something else. And who connects to one that should be listened on."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from kvindex.endpoints import parse_host_port
from kvindex.errors import ConfigurationError

GREETING = b"\xff"
"""First byte of every ZMTP 3 peer, sent without being asked (RFC 23)."""


@dataclass(frozen=True, slots=True)
class Port:
    """state: open, refused, unreachable (time-out, no route, unknown name), not_zmq, unknown (no TCP endpoint)."""

    state: str
    detail: str = ""


async def look(endpoint: str, limit: float) -> Port:
    """Connects, reads one byte, hangs up. Within about `limit` seconds."""
    host_port = tcp(endpoint)
    if host_port is None:
        return Port("unknown")
    try:
        async with asyncio.timeout(limit):
            reader, writer = await asyncio.open_connection(*host_port)
    except ConnectionRefusedError:
        return Port("refused", "connection refused")
    except TimeoutError:
        return Port("unreachable", f"no answer within {limit:g} s")
    except OSError as error:
        return Port("unreachable", error.strerror or str(error))
    try:
        async with asyncio.timeout(limit):
            first = await reader.read(1)
    except (TimeoutError, OSError):
        first = b""
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    return Port("open") if first == GREETING else Port("not_zmq", "it connects, but does not speak ZMQ")


def tcp(endpoint: str) -> tuple[str, int] | None:
    """(host, port) of a tcp:// endpoint, None for others."""
    if not endpoint.startswith("tcp://"):
        return None
    try:
        found = parse_host_port(endpoint.removeprefix("tcp://"))
    except ConfigurationError:
        return None
    return found.host, found.port


async def publisher_connects(endpoint: str, limit: float) -> bool:
    """Whether a PUB socket connects to this endpoint when somebody binds it: the engine connects instead of binding.

    Only possible where the address is one of this machine's; False elsewhere. Binds for at most `limit` seconds. Our
    own subscribers also connect there, but two SUB sockets never shake hands.
    """
    context = zmq.asyncio.Context()
    sub: Any = context.socket(zmq.SUB)
    monitor: Any = None
    try:
        sub.bind(endpoint)
        monitor = sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        sub.subscribe(b"")
        async with asyncio.timeout(limit):
            await monitor.recv_multipart()
        return True
    except (TimeoutError, zmq.ZMQError):
        return False
    finally:
        if monitor is not None:
            sub.disable_monitor()
            monitor.close(0)
        sub.close(0)
        context.term()
