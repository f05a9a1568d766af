"""Instances listed in a file that somebody else writes: read again whenever its content is another.

The content is compared, once an interval, and no inode watched: the file may be replaced by rename, rewritten in place,
be a Kubernetes ConfigMap (a link to a directory that is exchanged) or lie on a network file system, and the notices of
the kernel miss one or the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from kvindex.discovery.base import Notify
from kvindex.errors import ConfigurationError
from kvindex.fleet import Instance, check_instances

Parser = Callable[[str], Sequence[Instance]]
"""From the text of the file. Raises ValueError or ConfigurationError that says what is wrong."""

MAX_BYTES = 8 << 20
PIECE = 64 << 10


class FileSource:
    """The instances of one file. A file that is missing, unreadable or wrong changes nothing and is told.

    An empty list is a list: it takes all instances out. An empty file is not: it is somebody in the middle of writing.
    """

    def __init__(self, path: str | Path, parse: Parser, *, interval: float = 1.0, max_bytes: int = MAX_BYTES) -> None:
        self.path = Path(path)
        self._parse = parse
        self._interval = interval
        self._max_bytes = max_bytes
        self._seen: bytes | None = None

    async def run(self, notify: Notify) -> None:
        self._seen = None
        while True:
            try:
                content = await asyncio.to_thread(self._read)
            except (OSError, ValueError) as error:
                self._seen = None
                reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
                notify.problem(f"{self.path}: cannot be read: {reason}; the instances read before stay")
            else:
                if content != self._seen:
                    self._seen = content
                    await self._tell(content, notify)
            await asyncio.sleep(self._interval)

    def _read(self) -> bytes:
        # In pieces: read(max_bytes) takes that much memory first and gives back all but the content, so that malloc
        # places the next one behind it, and the next, through an arena of 64 MiB.
        content = bytearray()
        with self.path.open("rb") as file:
            while piece := file.read(PIECE):
                content += piece
                if len(content) > self._max_bytes:
                    raise ValueError(f"it has more than {self._max_bytes} bytes")
        return bytes(content)

    def _instances(self, content: bytes) -> list[Instance]:
        """Blocking: YAML of some hundred instances takes a second."""
        if not content.strip():
            raise ConfigurationError("it is empty")
        instances = list(self._parse(content.decode("utf-8")))
        check_instances(instances)
        return instances

    async def _tell(self, content: bytes, notify: Notify) -> None:
        try:
            instances = await asyncio.to_thread(self._instances, content)
        except UnicodeDecodeError:
            notify.problem(f"{self.path}: not UTF-8 text; the instances read before stay")
        except (ConfigurationError, ValueError) as error:
            notify.problem(f"{self.path}: {error}; the instances read before stay")
        else:
            notify.replace(instances)
            notify.problem(None)
            notify.ready()
