"""Routers side by side in front of the same engines: CPU, requests/s/core and added latency of late turns.

    python -m tests.bench.bench_peers [--tokens 4096 ...] [--rounds N]

The engines answer at once with a static reply (static_engines.py), so only the router counts; they have published the
turns before, so kvcar and vllm-router's kv_aware find the prefix. Envoy alone and Envoy with a no-op ext_proc server
are the floors; sglang-router and vllm-router run their own policies, and log nothing per request (kvcar neither).
All see the same requests in alternating rounds. What kv_aware costs the engines is not counted: it has them
tokenize each prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from examples.local.processes import (
    EnvoyProcess,
    KvcarProcess,
    NotReady,
    Process,
    free_port,
    http_get,
    wait_for,
)
from examples.local.stack import TOKENIZER
from extproc.envoy_config import EXT_PROC_FILTER, EnvoyOptions, as_dict
from tests.bench.bench_extproc import ROOT, Server
from tests.bench.chats import BLOCK, MODEL, PATH, Chats, stored
from tests.bench.load_http import closed, paced
from tests.bench.rows import Row, log, row, told
from tests.real.publisher import Publisher

ENGINES = 3
KVCAR, NOOP, ENVOY = "Envoy + kvcar", "Envoy + no-op ext_proc", "Envoy"
CPU = "CPU a request"


@dataclass
class Side:
    """One way through: where requests go, whose CPU counts (Envoy's first, where there is one), what was seen."""

    name: str
    url: str
    pids: tuple[int, ...]
    cpu: list[list[float]] = field(default_factory=list)  # us a request of each process, by round
    closed: list[list[float]] = field(default_factory=list)  # seconds, by round
    paced: list[list[float]] = field(default_factory=list)

    def used(self) -> list[float]:
        return [Server.cpu_of(pid) for pid in self.pids]

    @property
    def cpu_us(self) -> float:
        return statistics.median(sum(one) for one in self.cpu)

    @property
    def server_us(self) -> float:
        """Of an ext_proc server; 0 without one."""
        return statistics.median(sum(one[1:]) for one in self.cpu)


@contextlib.contextmanager
def engines(chats: Chats, folder: Path) -> Iterator[tuple[list[str], list[Publisher]]]:
    """(addresses, publishers that have the conversations in their history)."""
    tokens = folder / "tokens.json"
    tokens.write_text(json.dumps(dict(enumerate(chats.tokens))))
    command = [sys.executable, "-m", "tests.bench.static_engines", str(ENGINES), MODEL, str(TOKENIZER), str(tokens)]
    with contextlib.ExitStack() as stack:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        stack.callback(process.communicate)
        stack.callback(process.terminate)
        publishers = [stack.enter_context(Publisher()) for _ in range(ENGINES)]
        assert process.stdout is not None
        yield [f"127.0.0.1:{int(port)}" for port in process.stdout.readline().split()], publishers


def publish(chats: Chats, publishers: list[Publisher], kvcars: Sequence[KvcarProcess], *, listening: int) -> None:
    """The conversations, once each publisher has so many subscribers; until all kvcars have applied them."""
    served(publishers, lambda: all(one.subscribers >= listening for one in publishers), "subscribers")
    rng = random.Random(5)
    for number, ids in enumerate(chats.tokens):
        publishers[number % ENGINES].publish(stored(ids, rng))
    for one in kvcars:
        served(publishers, lambda one=one: caught_up(one, publishers), "kvcar's view of the engines")


def served(publishers: Sequence[Publisher], condition: Callable[[], bool], what: str) -> None:
    """Until the condition holds; the publishers answer meanwhile."""

    def holds() -> bool:
        for one in publishers:
            one.serve()
        return condition()

    wait_for(holds, what, timeout=60.0)


def caught_up(kvcar: KvcarProcess, publishers: Sequence[Publisher]) -> bool:
    """By the worker that is furthest behind."""
    sequences = {row["instance"]: row["sequence"] for row in kvcar.get("/streams")["streams"]}
    return all(sequences[f"engine-{number}"] == one.sequence - 1 for number, one in enumerate(publishers))


def envoy(folder: Path, name: str, addresses: list[str], ext_proc: Sequence[str], *, checks: bool) -> EnvoyProcess:
    """Envoy as `kvcar envoy-config` sets it up, without ext_proc servers none; `checks` = they answer them."""
    options = EnvoyOptions(
        engines=tuple(addresses),
        ext_proc=tuple(ext_proc) or ("127.0.0.1:1",),
        listen="127.0.0.1:0",
        admin="127.0.0.1:0",
        access_log=None,
    )
    config = as_dict(options)
    for cluster in config["static_resources"]["clusters"]:
        if cluster["name"] == "extproc" and not checks:
            del cluster["health_checks"]
    if not ext_proc:
        manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        manager["http_filters"] = [one for one in manager["http_filters"] if one["name"] != EXT_PROC_FILTER]
        for host in manager["route_config"]["virtual_hosts"]:
            for route in host["routes"]:
                route.get("typed_per_filter_config", {}).pop(EXT_PROC_FILTER, None)
    process = EnvoyProcess(options, folder, name=name)
    process.config_path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return process


def kvcar(folder: Path, addresses: list[str], publishers: list[Publisher], workers: int = 1) -> KvcarProcess:
    instances = [
        {"name": f"engine-{number}", "address": address, "events": one.endpoint, "replay": one.replay}
        for number, (address, one) in enumerate(zip(addresses, publishers, strict=True))
    ]
    pool = {
        "name": MODEL, "models": [MODEL], "tokenizer": str(TOKENIZER), "block_size": BLOCK, "dialect": "vllm",
        "scorer": "car", "instances": instances,
    }  # fmt: skip
    listen = {"address": "127.0.0.1:0", "drain_wait_ms": 0, "workers": workers}
    config = {"listen": listen, "admin": {"address": "127.0.0.1:0"}, "pools": [pool]}
    return KvcarProcess(config, folder, name=f"kvcar-{workers}")


class Router(Process):
    """A peer's router from PyPI, with one of its own policies."""

    def __init__(self, folder: Path, package: str, policy: str, addresses: list[str], *more: str) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        command = [
            str(Path(sys.executable).with_name(package)), *(("launch",) if package == "sglang-router" else ()),
            "--host", "127.0.0.1", "--port", self.address.rpartition(":")[2], "--policy", policy,
            "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()),
            "--worker-urls", *(f"http://{address}" for address in addresses), *more,
        ]  # fmt: skip
        super().__init__(f"{package}-{policy}", command, folder)

    def wait_ready(self) -> None:
        self._wait_for(lambda: http_get(f"http://{self.address}/health")[0] == 200, "/health")


def routers(folder: Path, addresses: list[str], publishers: list[Publisher]) -> Iterator[tuple[str, Router]]:
    """The peers that are installed, by the name they are reported under."""
    if importlib.util.find_spec("sglang_router"):
        quiet = ("--log-level", "warn")
        yield "sglang-router, cache_aware", Router(folder, "sglang-router", "cache_aware", addresses, *quiet)
    if importlib.util.find_spec("vllm_router"):
        quiet = ("--log-level", "warning")
        yield "vllm-router, cache_aware", Router(folder, "vllm-router", "cache_aware", addresses, *quiet)
        events = ["--kv-event-model", MODEL, "--kv-event-block-size", str(BLOCK)]
        for address, one in zip(addresses, publishers, strict=True):
            events += ["--kv-event-source", f"http://{address}={one.endpoint}"]
            events += ["--kv-event-replay-source", f"http://{address}={one.replay}"]
        yield "vllm-router, kv_aware", Router(folder, "vllm-router", "kv_aware", addresses, *quiet, *events)


@contextlib.contextmanager
def sides(chats: Chats, folder: Path) -> Iterator[tuple[list[Side], KvcarProcess]]:
    with contextlib.ExitStack() as stack:
        addresses, publishers = stack.enter_context(engines(chats, folder))
        ours = stack.enter_context(kvcar(folder, addresses, publishers))
        ours.wait_ready()
        noop = stack.enter_context(Server("no-op", "tests.bench.noop_extproc"))
        found = [Side("no router", f"http://{addresses[0]}{PATH}", ())]
        ways: list[tuple[str, list[str], tuple[int, ...]]] = [
            (ENVOY, [], ()), (NOOP, [f"127.0.0.1:{noop.port}"], (noop.pid,)), (KVCAR, [ours.ext_proc], (ours.pid,)),
        ]  # fmt: skip
        for number, (name, ext_proc, pids) in enumerate(ways):
            way = stack.enter_context(envoy(folder, f"envoy-{number}", addresses, ext_proc, checks=name == KVCAR))
            way.wait_ready()
            way.wait_healthy("engines", ENGINES)
            found.append(Side(name, f"http://{way.address}{PATH}", (way.pid, *pids)))
        way.wait_healthy("extproc", 1)
        for name, router in routers(folder, addresses, publishers):
            stack.enter_context(router)
            try:
                router.wait_ready()
            except NotReady as error:
                print(f"{name} does not run here: {error}", file=sys.stderr)
                continue
            found.append(Side(name, f"http://{router.address}{PATH}", (router.pid,)))
        publish(chats, publishers, [ours], listening=1 + any(side.name.endswith("kv_aware") for side in found))
        yield found, ours


def measure(
    tokens: int, *, count: int, rate: float, rounds: int, each: int, slow: int
) -> tuple[list[Side], Mapping[str, float]]:
    """Rounds of `each` requests closed and `slow` requests paced at `rate`/s, all sides in turn."""
    log.info("peers: %d conversations of %d tokens, and everything that routes them", count, tokens)
    chats = Chats(count, tokens)
    first, turns = chats.bodies(), chats.stream()
    with tempfile.TemporaryDirectory() as name, sides(chats, Path(name)) as (found, ours):
        for side in found:
            closed(side.url, first)
        warm = list(islice(turns, count))
        for side in found:
            closed(side.url, warm)
        for turn in range(rounds):
            log.info("peers: %d tokens, %s, round %d of %d", tokens, f"{len(found)} ways", turn + 1, rounds)
            fast, later = list(islice(turns, each)), list(islice(turns, slow))
            for side in found[turn % len(found) :] + found[: turn % len(found)]:
                before = side.used()
                side.closed.append(closed(side.url, fast))
                side.cpu.append([(now - then) / each * 1e6 for now, then in zip(side.used(), before, strict=True)])
                side.paced.append(paced(side.url, later, rate))
        metrics = ours.metrics()
    return found, metrics


def at(rounds: list[list[float]], part: float) -> float:
    """ms: the median over rounds up to the median, over all requests beyond."""
    if part <= 0.5:
        return 1e3 * statistics.median(statistics.median(one) for one in rounds)
    ordered = sorted(value for one in rounds for value in one)
    return 1e3 * ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def rows_of(found: list[Side], metrics: Mapping[str, float], size: str) -> list[Row]:
    """What is added to the latency counts from the way without any router."""
    hits = sum(value for key, value in metrics.items() if key.startswith("kvcar_hit_tokens_total") and "chosen" in key)
    assert hits > 0, "the requests found no cache: these would not be late turns"
    direct, ours = found[0], next(side for side in found if side.name == KVCAR)
    others = [side for side in found[1:] if side is not ours]
    rows = []
    for side in others:
        rows.append(row(f"{CPU}, {size}", ours.cpu_us, "us", side.name, side.cpu_us))
        if side.server_us:
            rows.append(row(f"{CPU}, without Envoy's, {size}", ours.server_us, "us", side.name, side.server_us))
    for load, kind in (("closed", "4 at a time"), ("paced", "paced")):
        for part, label in ((0.5, "p50"), (0.99, "p99")):
            base = at(getattr(direct, load), part)
            mine = at(getattr(ours, load), part) - base
            for side in others:
                theirs = at(getattr(side, load), part) - base
                rows.append(row(f"added {label}, {kind}, {size}", mine, "ms", side.name, theirs))
    return rows


SIZES = {
    4096: {"count": 48, "rate": 50.0, "rounds": 4, "each": 96, "slow": 72},
    32768: {"count": 12, "rate": 15.0, "rounds": 4, "each": 24, "slow": 24},
}


def run(sizes: Mapping[int, Mapping[str, Any]] = SIZES) -> list[Row]:
    rows: list[Row] = []
    for tokens, given in sizes.items():
        rows += rows_of(*measure(tokens, **given), f"{tokens // 1024}k-token late turn")
    cpu = {one["name"]: one["ours"] for one in rows if one["name"].startswith(f"{CPU}, without Envoy's")}
    if len(cpu) > 1:
        (short, less), *_, (long, more) = cpu.items()
        rows.append(row(f"growth with tokens: {long}", more, "us", short, less))
    return rows


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--tokens", type=int, nargs="*", default=list(SIZES), choices=list(SIZES))
    arguments.add_argument("--rounds", type=int, default=5)
    given = arguments.parse_args()
    for one in run({tokens: {**SIZES[tokens], "rounds": given.rounds} for tokens in given.tokens}):
        print(told(one), flush=True)


if __name__ == "__main__":
    main()
