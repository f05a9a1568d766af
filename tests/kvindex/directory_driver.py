"""The transport's place under a directory, without a thread."""

from __future__ import annotations

from collections.abc import Callable

from kvindex.directory import Stream


class Driver:
    """Opens streams at once, as the transport does in its thread."""

    def pace(self) -> None: ...

    def follow(self, stream: Stream) -> None:
        stream.open().connected(0.0)

    def unfollow(self, stream: Stream) -> None:
        stream.close()

    def resync(self, stream: Stream) -> None: ...
    def rebuild(self, stream: Stream) -> None: ...

    def post(self, work: Callable[[], None]) -> None:
        work()
