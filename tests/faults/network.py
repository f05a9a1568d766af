"""Two network namespaces with a cable between them that can be cut without either side being told.

    with two_networks() as (near, cable): near(function) runs it on the near side, as does what it starts
                                          cable.far(function) on the far side
                                          cable.cut(), cable.mend(), on the near side: packets vanish both ways

Namespaces belong to threads and to what those start, and vanish with them: nothing on the host changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import pytest

NEAR, FAR = "10.77.0.1", "10.77.0.2"
CLONE_NEWNET = 0x40000000
T = TypeVar("T")


def ip(words: str) -> str:
    return subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True).stdout


class Side:
    """A thread in a network namespace of its own. Raises OSError where that is not allowed."""

    def __init__(self) -> None:
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        begun: Future[int] = Future()
        threading.Thread(target=self._run, args=(begun,), daemon=True).start()
        self.thread_id = begun.result(10)

    def __call__(self, function: Callable[[], T]) -> T:
        done: Future[T] = Future()

        def work() -> None:
            try:
                done.set_result(function())
            except BaseException as error:  # the caller's to raise, pytest's outcomes too
                done.set_exception(error)

        self._work.put(work)
        return done.result()

    def end(self) -> None:
        self._work.put(None)

    def _run(self, begun: Future[int]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET):
            begun.set_exception(OSError(ctypes.get_errno(), "unshare"))
            return
        begun.set_result(threading.get_native_id())
        while (work := self._work.get()) is not None:
            work()


class Cable:
    def __init__(self, near: Side, far: Side) -> None:
        self.near, self.far = near, far
        near(lambda: ip(f"link add kv0 type veth peer name kv1 netns {far.thread_id}"))
        for side, device, address in ((near, "kv0", NEAR), (far, "kv1", FAR)):
            side(partial(ip, "link set lo up"))
            side(partial(ip, f"addr add {address}/30 dev {device}"))
            side(partial(ip, f"link set {device} up"))

    def cut(self) -> None:
        """To be called on the near side. Frames go to a neighbour that is not there: no error, no reset, no answer."""
        ip(f"neigh replace {FAR} lladdr 02:00:00:00:00:fe nud permanent dev kv0")
        self.far(lambda: ip(f"neigh replace {NEAR} lladdr 02:00:00:00:00:fd nud permanent dev kv1"))

    def mend(self) -> None:
        """Likewise."""
        ip(f"neigh del {FAR} dev kv0")
        self.far(lambda: ip(f"neigh del {NEAR} dev kv1"))


@contextlib.contextmanager
def two_networks() -> Iterator[tuple[Side, Cable]]:
    """Skips the test where network namespaces cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("iproute2 (ip) is not installed")
    sides: list[Side] = []
    try:
        try:
            sides = [Side(), Side()]
            cable = Cable(*sides)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here (needs root): {error}")
        yield sides[0], cable
    finally:
        for side in sides:
            side.end()
