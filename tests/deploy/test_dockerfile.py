"""The Dockerfile, read instead of built: what it copies exists and is not ignored, what it runs runs."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import subprocess
import sys
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import yaml
from click.testing import CliRunner

from extproc.cli import main
from extproc.config import parse
from tests.real.harness import free_port

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions() -> list[tuple[str, str]]:
    """(name, arguments), continuation lines joined, comments gone."""
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / "Dockerfile").read_text()).replace("\\\n", " ")
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def of(name: str) -> list[str]:
    return [rest for found, rest in instructions() if found == name]


def ignored(path: str) -> bool:
    """By .dockerignore: the last matching line decides."""
    result = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#") and fnmatch.fnmatch(path, line.removeprefix("!")):
            result = not line.startswith("!")
    return result


def test_two_slim_stages_and_a_user_without_rights() -> None:
    images = of("FROM")
    assert [image.split(" ")[0] for image in images] == ["python:3.12-slim"] * 2
    version = tuple(map(int, re.findall(r"\d+", images[0])))
    assert version >= tuple(map(int, re.findall(r"\d+", PROJECT["requires-python"])))
    names = [name for name, _ in instructions()]
    assert names.index("USER") > max(index for index, name in enumerate(names) if name in ("RUN", "COPY"))
    deployment = yaml.safe_load((ROOT / "deploy/kubernetes/base/deployment.yaml").read_text())
    context = deployment["spec"]["template"]["spec"]["securityContext"]
    assert of("USER") == [f"{context['runAsUser']}:{context['runAsGroup']}"]


def test_what_it_copies_exists_and_is_sent() -> None:
    copied = [source for rest in of("COPY") if "--from" not in rest for source in rest.split()[:-1]]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert not ignored(source), f".dockerignore keeps {source} out"
    for other in ("tests", ".git", ".venv", "examples", "kvcar.yaml"):
        assert ignored(other)
    # Everything that setup needs: the packages, and the files that pyproject.toml names.
    assert {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml", "kvindex", "extproc"} <= set(copied)


def test_extras_exist() -> None:
    (extras,) = re.findall(r"'\.\[([a-z,]+)\]'", " ".join(of("RUN")))
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_entry_point_runs() -> None:
    (entry,), command = json.loads(of("ENTRYPOINT")[0]), json.loads(of("CMD")[0])
    assert entry == "kvcar"
    assert entry in PROJECT["scripts"]
    done = subprocess.run([str(Path(sys.executable).parent / "kvcar"), "--version"], check=False, capture_output=True)
    assert done.returncode == 0
    missing = CliRunner().invoke(main, command)
    assert "/etc/kvcar/kvcar.yaml" in missing.output, "the command line is understood; the file is not there"
    assert "No such option" not in missing.output


def test_ports_and_folders_are_those_of_the_manifests() -> None:
    config = parse((ROOT / "deploy/kubernetes/base/kvcar.yaml").read_text())
    ports = [address.rpartition(":")[2] for address in (config.listen.address, config.admin.address)]
    assert of("EXPOSE") == [" ".join(ports)]
    environment = dict(pair.split("=", 1) for pair in shlex.split(of("ENV")[0]))
    deployment = (ROOT / "deploy/kubernetes/base/deployment.yaml").read_text()
    assert f"{{name: HF_HOME, value: {environment['HF_HOME']}}}" in deployment
    assert f"install -d -o 65532 -g 65532 {environment['HF_HOME']}" in " ".join(of("RUN"))


class Healthy(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/healthz" else 404)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


def test_health_check_tells_health() -> None:
    (check,) = of("HEALTHCHECK")
    command = json.loads(check[check.index("CMD") + 3 :])
    server = HTTPServer(("127.0.0.1", 0), Healthy)
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def run(port: int) -> int:
        code = command[-1].replace(":9003/", f":{port}/")
        assert code != command[-1]
        return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, timeout=20).returncode

    assert command[:2] == ["python", "-c"]
    assert run(server.server_port) == 0
    Healthy.status = 503
    assert run(server.server_port) == 1
    server.shutdown()
    server.server_close()
    assert run(free_port()) == 1
