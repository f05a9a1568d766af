"""The import rule of the house: logic does no I/O, and every layer imports only what stands below it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Libraries with I/O or clocks, and the only files that may import them.
CONFINED = {
    "zmq": ["kvindex/transport.py", "kvindex/capture.py", "examples/", "extproc/doctor"],
    "grpc": ["extproc/server.py"],
    "grpc_health": ["extproc/server.py"],
    "google.protobuf": ["extproc/wire.py"],
    "aiohttp": [
        "extproc/replicas.py",
        "extproc/admin/",
        "extproc/loads/",
        "kvindex/discovery/",
        "extproc/prompt/remote.py",
        "extproc/doctor",
        "extproc/cli.py",
        "extproc/recorder.py",
        "extproc/commands/",
        "extproc/dashboard/",
        "extproc/workers/",
        "examples/",
    ],
    "opentelemetry": ["extproc/tracing.py"],
    "uvloop": ["extproc/app.py", "extproc/cli.py"],
    "prometheus_client": ["extproc/metrics.py", "extproc/loads/", "extproc/admin/", "extproc/workers/families.py"],
    "envoy_data_plane": ["extproc/envoy_config", "extproc/gateway"],
    "transformers": ["extproc/prompt/", "examples/"],
    "msgpack": [
        "kvindex/transfer.py",
        "kvindex/dialects/",
        "extproc/admin/",
        "kvindex/capture.py",
        "kvindex/discovery/",
        "examples/",
    ],
    "click": ["extproc/cli", "extproc/commands/"],
    "rich": ["extproc/cli", "extproc/commands/", "extproc/simulate", "examples/"],
}

# Cores that must stay free of sockets, threads and clocks.
PURE = [
    "kvindex/events.py",
    "kvindex/errors.py",
    "kvindex/hashing.py",
    "kvindex/index.py",
    "kvindex/pools.py",
    "kvindex/pushes.py",
    "kvindex/sync.py",
    "kvindex/machine.py",
    "kvindex/feed.py",
    "kvindex/states.py",
    "kvindex/dialects/",
    "kvindex/fleet.py",
    "kvindex/networks.py",
    "extproc/session.py",
    "extproc/session_rules.py",
    "extproc/messages.py",
    "extproc/usage.py",
    "extproc/openai.py",
    "extproc/router.py",
    "extproc/scorers/",
]
IMPURE = {"socket", "threading", "asyncio", "time", "selectors", "subprocess", "http", "urllib", "ssl", "concurrent"}

# package-internal order of kvindex, lowest first: a module imports only lower ones
KVINDEX_ORDER = [
    {"errors", "events", "hashing", "endpoints", "pacer", "walk", "durations"},
    {"rows", "rolling", "shards", "unanchored", "content", "proof", "transfer", "dialects", "fleet"},
    {"index", "states", "networks"},
    {"feed", "match", "pools", "adoption"},
    {"machine", "pushes"},
    {"sync"},
    {"directory", "exchange", "retrace", "capture", "link", "options"},
    {"transport"},
    {"client", "discovery"},
    {"recorder"},
]


def sources() -> list[Path]:
    return sorted(path for top in ("kvindex", "extproc", "examples") for path in (ROOT / top).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module named in an import statement of the file, type-checking ones left out."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def under(name: str, prefixes: list[str]) -> bool:
    return any(name.startswith(prefix) for prefix in prefixes)


def named(modules: set[str], library: str) -> bool:
    return any(module == library or module.startswith(library + ".") for module in modules)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    modules = imports(path)
    if name.startswith("kvindex/"):
        assert not named(modules, "extproc"), "kvindex is usable alone: it imports nothing of extproc"
    if not name.startswith("examples/"):
        assert not named(modules, "examples"), "packages do not import the examples"
        assert not named(modules, "tests"), "packages do not import the tests"
    for library, allowed in CONFINED.items():
        assert not named(modules, library) or under(name, allowed), f"only {allowed} may import {library}"
    if under(name, PURE):
        assert not {module.split(".")[0] for module in modules} & IMPURE, "logic does no I/O and reads no clock"


def test_kvindex_imports_point_down() -> None:
    level = {name: height for height, names in enumerate(KVINDEX_ORDER) for name in names}
    for path in sorted((ROOT / "kvindex").rglob("*.py")):
        parts = path.relative_to(ROOT / "kvindex").with_suffix("").parts
        if parts[0] == "__init__":
            continue
        assert parts[0] in level, f"say in KVINDEX_ORDER where kvindex/{parts[0]} stands"
        for module in imports(path):
            below = module.split(".")
            if below[0] == "kvindex" and len(below) > 1 and below[1] in level:
                assert level[below[1]] <= level[parts[0]], f"{path.name} imports {module}, which stands above it"


def test_the_rule_catches_a_violation(tmp_path: Path) -> None:
    """A test that cannot fail proves nothing."""
    bad = tmp_path / "bad.py"
    bad.write_text("import time\nfrom google.protobuf import message\n")
    assert named(imports(bad), "google.protobuf")
    assert named(imports(bad), "time")
