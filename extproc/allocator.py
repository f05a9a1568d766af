"""Keeps freed memory in the process: a request body comes and goes in megabytes, several times a second.

glibc gives the top of the heap back as soon as a little more than the largest recent block is free, and asks for it
again with the next body: page faults that cost more than all else of a 1 MiB request (tests/bench/bench_extproc.py).
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc refuses more


def keep_freed_memory(size: int) -> bool:
    """Lets malloc keep up to `size` freed bytes at the top of each heap, for the whole process. False where it cannot.

    Blocks of up to 32 MiB then come from the heap. Does nothing outside glibc.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    size = min(size, (1 << 31) - 1)
    return bool(
        libc.mallopt(_M_TRIM_THRESHOLD, size) and libc.mallopt(_M_MMAP_THRESHOLD, min(size, _LARGEST_MMAP_THRESHOLD))
    )
