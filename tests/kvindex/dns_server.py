"""A DNS server for tests: a zone in memory, over UDP and TCP on one free port of the loopback."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset


class DnsServer:
    """`zone`: (name, type) -> (TTL, records as text). A name that has no records of any type is NXDOMAIN."""

    def __init__(self) -> None:
        self.port = 0
        self.zone: dict[tuple[str, str], tuple[int, list[str]]] = {}
        self.rcode = dns.rcode.NOERROR
        self.silent = False
        self.truncate = False
        self.glue = False
        self.questions: list[tuple[str, str]] = []

    def answer(self, wire: bytes, *, udp: bool) -> bytes | None:
        query = dns.message.from_wire(wire)
        question = query.question[0]
        name, kind = question.name.to_text(omit_final_dot=True).lower(), dns.rdatatype.to_text(question.rdtype)
        self.questions.append((name, kind))
        if self.silent:
            return None
        response = dns.message.make_response(query)
        response.flags |= dns.flags.AA | dns.flags.RA
        if self.rcode != dns.rcode.NOERROR:
            response.set_rcode(self.rcode)
        elif udp and self.truncate:
            response.flags |= dns.flags.TC
        elif records := self._records(name, kind):
            response.answer.append(records)
            for record in records if kind == "SRV" and self.glue else ():
                target = record.target.to_text(omit_final_dot=True)
                response.additional.extend(one for of in ("A", "AAAA") if (one := self._records(target, of)))
        elif not any(known == name for known, _ in self.zone):
            response.set_rcode(dns.rcode.NXDOMAIN)
        return response.to_wire()

    def _records(self, name: str, kind: str) -> dns.rrset.RRset | None:
        ttl, texts = self.zone.get((name, kind), (0, []))
        return dns.rrset.from_text(name + ".", ttl, "IN", kind, *texts) if texts else None


class _Udp(asyncio.DatagramProtocol):
    def __init__(self, server: DnsServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        answer = self._server.answer(data, udp=True)
        if answer is not None:
            self._transport.sendto(answer, addr)


@asynccontextmanager
async def dns_server() -> AsyncIterator[DnsServer]:
    server = DnsServer()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (length,) = struct.unpack("!H", await reader.readexactly(2))
        answer = server.answer(await reader.readexactly(length), udp=False)
        if answer is not None:
            writer.write(struct.pack("!H", len(answer)) + answer)
            await writer.drain()
        writer.close()

    while True:  # a port that is free for both
        tcp = await asyncio.start_server(serve, "127.0.0.1", 0)
        server.port = tcp.sockets[0].getsockname()[1]
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            udp.bind(("127.0.0.1", server.port))
            break
        except OSError:
            udp.close()
            tcp.close()
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: _Udp(server), sock=udp)
    try:
        yield server
    finally:
        transport.close()
        tcp.close()
