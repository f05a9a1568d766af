"""The endpoints file: content, whole replacement, and a folder that cannot be written for a while."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

from extproc.endpoints_file import EndpointsFile, render
from kvindex.fleet import Instance, InstanceState


def one(name: str, address: str, state: InstanceState = InstanceState.ACTIVE) -> Instance:
    return Instance(name, address, pool="p", state=state)


def hosts(text: str) -> list[tuple[str, int, str]]:
    (resource,) = json.loads(text)["resources"]
    rows = resource["endpoints"][0]["lb_endpoints"]
    sockets = [row["endpoint"]["address"]["socket_address"] for row in rows]
    return [(at["address"], at["port_value"], row["health_status"]) for at, row in zip(sockets, rows, strict=True)]


def test_content() -> None:
    found = render(
        "engines",
        [
            one("c", "10.0.0.3:80", InstanceState.DRAINING),
            one("b", "[2001:db8::1]:8000", InstanceState.LEASE_LOST),
            one("a", "10.0.0.1:80"),
            one("d", "10.0.0.4:80", InstanceState.UNREACHABLE),
            one("e", "10.0.0.5:80", InstanceState.SUSPECT),
            one("f", ""),
            one("g", "10.0.0.7:80", InstanceState.PROBATION),
        ],
    )
    assert hosts(found) == [
        ("10.0.0.1", 80, "HEALTHY"),
        ("2001:db8::1", 8000, "HEALTHY"),
        ("10.0.0.3", 80, "DRAINING"),
        ("10.0.0.4", 80, "UNHEALTHY"),
        ("10.0.0.7", 80, "UNHEALTHY"),
    ]
    assert json.loads(render("mine", []))["resources"][0]["cluster_name"] == "mine"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - the file tells nobody
            await asyncio.sleep(0.002)


async def test_changes_are_written_and_the_last_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    file = EndpointsFile(path, "engines")
    task = asyncio.create_task(file.run())
    try:
        for number in range(1, 50):
            file.show([one("a", f"10.0.0.{number}:80")])
        await until(path.exists)
        await until(lambda: hosts(path.read_text("utf-8")) == [("10.0.0.49", 80, "HEALTHY")])
        assert os.listdir(tmp_path) == ["engines.yaml"], "nothing is left beside it"
    finally:
        task.cancel()


async def test_a_write_that_fails_is_tried_again(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    file = EndpointsFile(folder / "engines.yaml", "engines", first_pause=0.01)
    task = asyncio.create_task(file.run())
    try:
        file.show([one("a", "10.0.0.1:80")])
        await until(lambda: file.error is not None)
        assert "No such file" in (file.error or "")
        folder.mkdir()
        await until(file.path.exists)
        await until(lambda: file.error is None)
        assert hosts(file.path.read_text("utf-8")) == [("10.0.0.1", 80, "HEALTHY")]
    finally:
        task.cancel()
