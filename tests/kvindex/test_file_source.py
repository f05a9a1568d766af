"""The file source: rename, rewriting, links exchanged as Kubernetes does it, and files that are no use."""

from __future__ import annotations

import os
import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvindex.discovery.file import FileSource
from kvindex.errors import ConfigurationError
from kvindex.fleet import Instance
from tests.kvindex.discovery_peer import Running, running


def parse(text: str) -> Sequence[Instance]:
    """`name address` in each line, [] for none."""
    if text.strip() == "[]":
        return []
    lines = [line.split() for line in text.splitlines()]
    if any(len(line) != 2 for line in lines):
        raise ConfigurationError("a line has a name and an address")
    return [Instance(name, address) for name, address in lines]


def source(path: Path, **options: Any) -> FileSource:
    return FileSource(path, parse, **{"interval": 0.01, **options})


def replaced(path: Path, text: str) -> None:
    """Atomically, as tools should."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.rename(new, path)


def rewritten(path: Path, text: str) -> None:
    path.write_text(text)


def exchanged(path: Path, text: str) -> None:
    """As kubelet does with a ConfigMap: the file is a link into ..data, which is a link to a directory."""
    directory = path.parent / f"..{len(list(path.parent.iterdir()))}"
    directory.mkdir()
    (directory / path.name).write_text(text)
    link = path.parent / "..new"
    link.symlink_to(directory.name)
    os.rename(link, path.parent / "..data")
    if not path.is_symlink():
        path.unlink(missing_ok=True)
        path.symlink_to(Path("..data") / path.name)


A = "a 10.0.0.1:8000"
B = "b 10.0.0.2:8000"


async def names(it: Running, *expected: str) -> None:
    await it.until(lambda: list(it.instances) == list(expected))


@pytest.mark.parametrize("change", [replaced, rewritten, exchanged])
async def test_changes_are_seen(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "engines"
    change(path, A)
    async with running(source(path)) as it:
        await it.until(lambda: it.feed.is_ready)
        await names(it, "a")
        change(path, f"{A}\n{B}")
        await names(it, "a", "b")
        change(path, B)
        await names(it, "b")
        change(path, "[]")
        await names(it)
    assert not any(it.feed.problems)


BAD: list[tuple[str, bytes | None, str]] = [
    ("gone", None, "No such file"),
    ("empty, as in the middle of writing", b"", "it is empty"),
    ("wrong", b"a", "a name and an address"),
    ("no text", b"\xff\xfe", "not UTF-8"),
    ("a name twice", f"{A}\n{A}".encode(), "listed twice"),
    ("an address twice", f"{A}\nb 10.0.0.1:8000".encode(), "both have '10.0.0.1:8000'"),
    ("an instance that cannot be", b"a 10.0.0.1", "no port"),
    ("too large", b" " * 101, "more than 100 bytes"),
]


@pytest.mark.parametrize(("content", "words"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
async def test_bad_file_keeps_the_last_good_one(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "engines"

    def put(data: bytes | None) -> None:
        path.unlink(missing_ok=True) if data is None else path.write_bytes(data)

    put(content)
    async with running(source(path, max_bytes=100)) as it:
        await it.until(lambda: words in (it.feed.error or ""))
        assert not it.feed.is_ready
        put(A.encode())
        await it.until(lambda: it.feed.is_ready and it.feed.error is None)
        put(content)
        await it.until(lambda: words in (it.feed.error or ""))
        assert str(path) in (it.feed.error or "")
        assert list(it.instances) == ["a"]
        put(A.encode())  # the very content as before the mistake
        await it.until(lambda: it.feed.error is None)
    assert len(it.changes) == 1


async def test_directory_and_forbidden_file(tmp_path: Path) -> None:
    async with running(source(tmp_path)) as it:
        await it.until(lambda: "Is a directory" in (it.feed.error or ""))


async def test_parsed_once_for_each_content(tmp_path: Path) -> None:
    parsed: list[str] = []

    def counting(text: str) -> Sequence[Instance]:
        parsed.append(text)
        return parse(text)

    path = tmp_path / "engines"
    path.write_text(A)
    async with running(FileSource(path, counting, interval=0.001)) as it:
        await it.until(lambda: it.feed.is_ready)
        replaced(path, A)  # a new file with the same content
        replaced(path, B)
        await names(it, "b")
    assert parsed == [A, B]


async def test_parsed_beside_the_event_loop(tmp_path: Path) -> None:
    """YAML is slow: requests go on meanwhile."""
    threads = []

    def slow(text: str) -> Sequence[Instance]:
        threads.append(threading.current_thread())
        return parse(text)

    path = tmp_path / "engines"
    path.write_text(A)
    async with running(FileSource(path, slow, interval=0.01)) as it:
        await names(it, "a")
    assert threading.main_thread() not in threads
    assert threads


async def test_reading_takes_memory_for_the_content_and_not_for_the_limit(tmp_path: Path) -> None:
    """A read of the limit and back, once an interval, made the memory of an idle kvcar grow by megabytes an hour."""
    path = tmp_path / "engines"
    path.write_text(A)
    tracemalloc.start()
    try:
        async with running(source(path)) as seen:
            await seen.until(lambda: "a" in seen.instances)
            path.write_text(B)
            await seen.until(lambda: "b" in seen.instances)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20, peak
