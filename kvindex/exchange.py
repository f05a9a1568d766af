"""A directory's side of handing views from replica to replica. Each call goes to the driver's thread, returns at once.

giver   give() -> bytes                                          (a peer asks)
taker   begin() -> ... the bytes of a giver ... -> take()        (we ask a peer)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from kvindex.directory import Directory, Stream
from kvindex.events import BlocksMapped
from kvindex.sync import StreamSync
from kvindex.transfer import Header, pack

T = TypeVar("T")


class Refused(Exception):
    """It cannot be done now; the message says why."""


def give(directory: Directory, instance: str, dp_rank: int) -> Future[bytes]:
    """What a stream holds now, with its watermark. The future raises Refused.

    About 3 us a block in the driver's thread, paced; no stream of the process is read meanwhile.
    """

    def work(stream: Stream, sync: StreamSync) -> bytes:
        found, view, size = sync.content(), stream.view, directory.block_size
        if found is None or view is None or size is None:
            raise Refused("the stream is not synchronized here")
        sequence, complete, recent = found
        header = Header(
            instance, dp_rank, stream.instance.incarnation, size, directory.seed, sequence, complete, recent
        )
        return pack(header, view.dump())

    return _do(directory, instance, dp_rank, work)


def begin(directory: Directory, instance: str, dp_rank: int) -> Future[None]:
    """To be done before a peer is asked. The future raises Refused."""

    def work(_stream: Stream, sync: StreamSync) -> None:
        reason = sync.begin_adoption()
        if reason is not None:
            raise Refused(reason)

    return _do(directory, instance, dp_rank, work)


def take(
    directory: Directory, instance: str, dp_rank: int, header: Header, events: Sequence[BlocksMapped]
) -> Future[int]:
    """Takes over what a peer gave, unpacked (by `transfer.unpack`, which is not paced: not in the driver's thread). The
    future holds the number of blocks now known, or raises Refused."""

    def work(stream: Stream, sync: StreamSync) -> int:
        view, index = stream.view, directory.index
        if view is None:
            raise Refused("the stream was closed meanwhile")
        if (header.instance, header.dp_rank, header.incarnation) != (instance, dp_rank, stream.instance.incarnation):
            raise Refused("it is of another process: " + " ".join(map(str, header[:3])))
        if header.seed != directory.seed or index.block_size not in (None, header.block_size):
            raise Refused(
                f"its block size and seed are {header.block_size} and {header.seed}, "
                f"ours {index.block_size} and {directory.seed}"
            )
        known = sum(len(event.hashes) for event in events)
        if known <= view.known and not header.complete:
            raise Refused("it knows no more than we do")
        if index.block_size is None:
            index.block_size = header.block_size  # the same process told the peer
        reason = sync.adopt(header, events, time.monotonic())
        if reason is not None:
            raise Refused(reason)
        return known

    return _do(directory, instance, dp_rank, work)


def _do(directory: Directory, instance: str, dp_rank: int, work: Callable[[Stream, StreamSync], T]) -> Future[T]:
    done: Future[T] = Future()

    def act() -> None:
        if not done.set_running_or_notify_cancel():
            return  # nobody waits any more
        stream = directory.stream(instance, dp_rank)
        sync = stream.sync if stream is not None else None
        try:
            if stream is None or not isinstance(sync, StreamSync):
                raise Refused("this stream is not followed here")
            done.set_result(work(stream, sync))
        except Exception as error:
            done.set_exception(error)

    directory.post(act)
    return done
