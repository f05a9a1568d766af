"""Configuration errors name the file, the line, the path, the value and what is allowed; good files parse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from pydantic import BaseModel

from extproc import assembly, config
from extproc.cli import main
from extproc.discovery_config import DiscoveryConfig

GOOD = """
pools:
- name: a
  models: [m]
  tokenizer: some/model
  instances:
  - {name: e0, address: "10.0.0.1:8000", events: "tcp://10.0.0.1:5557"}
"""


def pool(extra: str) -> str:
    return GOOD + "".join(f"  {line}\n" for line in extra.splitlines())


BAD = [
    # text, words that the error has to contain
    ("", ["c.yaml", "must be a mapping", "the file is empty"]),
    ("pools: [", ["c.yaml:1", "not valid YAML"]),
    ("a: 1\na: 2\npools: []", ["c.yaml:2", "'a' is given twice"]),
    ("a: &a [*a]\npools: *a", ["alias"]),
    (
        "a: &a [1,1,1,1,1,1,1,1,1]\n"
        + "".join(f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in pairwise("abcdefgh")),
        ["more than 1,000,000 values", "aliases"],
    ),
    (pool("chat_template_kwargs: {day: 2026-01-02}"), ["chat_template_kwargs", "holds what JSON cannot", "in quotes"]),
    (pool("chat_template_kwargs: {x: [.nan]}"), ["chat_template_kwargs", "holds what JSON cannot"]),
    ("{a: 1}: 2", ["c.yaml:1", "plain word"]),
    ("? [a]\n: b", ["c.yaml:1", "plain word"]),
    ("limits: {max_body_bytes: " + "9" * 5000 + "}", ["not valid YAML", "digits"]),
    (GOOD.replace("[m]", '["m\\ud800"]'), ["surrogate"]),
    ('admin: {token: "s3cret"}\n' + GOOD, ["admin.token", "8"]),
    ('admin: {address: "0.0.0.0:9003"}\n' + GOOD, ["reachable from outside", "set admin.token"]),
    (GOOD + "  networks: [10.0.0.1/8]\n", ["pools[0].networks[0]", "10.0.0.1/8", "is no network", "10.0.0.0/8"]),
    (pool("load: {path: metrics}"), ["pools[0].load.path", "'/'"]),
    (GOOD.replace("events:", "metrics: x, events:"), ["pools[0].instances[0].metrics", "URL"]),
    ('listen: {address: "127.0.0.1:9003"}\n' + GOOD, ["listen.address", "admin.address", "9003"]),
    ("limits: {decide_timeout_ms: 100}\n" + GOOD, ["tokenize_timeout_ms", "decide_timeout_ms"]),
    (GOOD.replace("tcp://10.0.0.1:5557", "10.0.0.1:5557"), ["c.yaml:7", "pools[0].instances[0]", "10.0.0.1:5557"]),
    (GOOD.replace("tcp://10.0.0.1:5557", "tcp://*:5557"), ["pools[0].instances[0]", "tcp://*:5557"]),
    ("pools: []", ["c.yaml:1", "pools", "at least 1"]),
    ("{}", ["pools", "required"]),
    (GOOD + "listne: {}\n", ["c.yaml", "listne", "unknown key", "example-config"]),
    (pool("block_sise: 16"), ["pools[0].block_sise", "unknown key, did you mean 'block_size'?", "c.yaml:8"]),
    (GOOD.replace("models:", "model:"), ["pools[0].model", "did you mean 'models'?"]),
    (GOOD.replace("events:", "evnts:"), ["pools[0].instances[0].evnts", "did you mean 'events'?"]),
    (pool("sessions: {heder: x}"), ["pools[0].sessions.heder", "did you mean 'header'?"]),
    (pool("discovery: [{type: file, pth: /x}]"), ["pools[0].discovery[0].pth", "did you mean 'path'?"]),
    (pool("discovery: [{type: fil, path: /x}]"), ["type 'fil' is not known", "; did you mean 'file'?"]),
    (pool("discovery: [{path: /x}]"), ["pools[0].discovery[0]", "the key 'type' is required"]),
    (pool("zzz: 1"), ["pools[0].zzz: unknown key; `kvcar"]),
    ("shedding: {}\n" + GOOD, ["c.yaml:1: shedding: unknown key here, it belongs under pools[*]; `kvcar"]),
    ("scorer: car\n" + GOOD, ["scorer: unknown key here, it belongs under headers or under pools[*];"]),
    (
        "replay: x\n" + GOOD,
        ["unknown key here, it belongs under pools[*].instances[*] or under pools[*].publishers[*];"],
    ),
    (pool("observe_usage: true"), ["pools[0].observe_usage: unknown key here, it belongs under listen;"]),
    (pool("limits: {}"), ["pools[0].limits: unknown key here, it belongs at the top level;"]),
    (pool("discovery: [{type: file, path: /x, selector: a}]"), ["selector: unknown key for an entry of this type;"]),
    ("log: {level: verbose}\n" + GOOD, ["log.level: must be 'debug', 'info'"]),
    ("log: {level: INFO}\n" + GOOD, ["log.level: must be 'debug', 'info'", "(got 'INFO'); did you mean 'info'?"]),
    (pool("engine: vlm"), ["pools[0].engine", "(got 'vlm'); did you mean 'vllm'?"]),
    (
        "listen: {address: 9002}\n" + GOOD,
        ['listen.address: must be ip:port in quotes, such as "127.0.0.1:9002"', "9002)"],
    ),
    ('listen: {address: "localhost:9002"}\n' + GOOD, ["listen.address: ", "IP address (names are not looked up; 127"]),
    ('admin: {address: ":9003"}\n' + GOOD, ["admin.address: ", "names are not looked up"]),
    (pool("block_size: 0"), ["pools[0].block_size", "c.yaml:8", "(got 0)"]),
    (pool("block_size: '16'"), ["pools[0].block_size", "'16'"]),
    (pool("block_size: huge"), ["pools[0].block_size", "'auto'", "'huge'"]),
    (pool("dialect: vlm"), ["pools[0].dialect", "'vllm'", "'vlm'"]),
    (pool("scorer: carr"), ["pools[0].scorer: 'carr' is not known, did you mean 'car'?", "round_robin"]),
    (
        pool("scorer: {name: car, lambda: 9}"),
        ["pools[0].scorer: car: lambda: 9 is not allowed, expected a number from 0"],
    ),
    (pool("decode_scorer: TTFT"), ["pools[0].decode_scorer: 'TTFT' is not known, did you mean 'ttft'?"]),
    (
        pool("allowed_scorers: [car, best]"),
        ["c.yaml:3: pools[0]: allowed_scorers: 'best' is not known, expected one of"],
    ),
    (pool("scorer: {name: car, lambda: 2}"), ["pools[0].scorer", "lambda", "2"]),
    (pool("scorer: {name: car, lamda: 0.2}"), ["pools[0].scorer", "lamda"]),
    (pool("recovery: snapshot"), ["pools[0]", "needs a replay endpoint", "'e0'"]),
    (pool("models: [x]"), ["'models' is given twice"]),
    (
        GOOD.replace("10.0.0.1:8000", "engine-a:8000"),
        ["pools[0].instances[0].address", "IP address (Envoy compares", "'engine-a:8000'"],
    ),
    (GOOD.replace("10.0.0.1:8000", "10.0.0.1"), ["pools[0].instances[0].address", "ip:port"]),
    (GOOD.replace("10.0.0.1:8000", "10.0.0.1:99999"), ["pools[0].instances[0].address", "65535"]),
    (GOOD.replace("10.0.0.1:8000", "10.0.0.1:0"), ["pools[0].instances[0].address", "a port of 1 to 65535"]),
    ("listen: {address: '1.2.3.4:x'}\n" + GOOD, ["listen.address", "a port of 0 to 65535"]),
    (GOOD.replace("10.0.0.1:8000", "0.0.0.0:8000"), ["pools[0].instances[0].address", "wildcard"]),
    (GOOD.replace("10.0.0.1:8000", "::1:8000"), ["brackets"]),
    (GOOD.replace("[m]", "m"), ["pools[0].models", "must be a list", "'m'"]),
    (GOOD.replace("[m]", "[m, m]"), ["'m' is given twice"]),
    (GOOD + '  - {name: e0, address: "10.0.0.2:8000"}\n', ["'e0' is given twice"]),
    (GOOD + '  - {name: e1, address: "10.0.0.1:8000"}\n', ["'10.0.0.1:8000' is given twice"]),
    (GOOD + "- {name: a, models: [n], tokenizer: t}\n", ["'a' is given twice"]),
    (
        GOOD + "  endpoints_file: {path: /x}\n- {name: b, models: [n], tokenizer: t, endpoints_file: {path: /x}}\n",
        ["endpoints_file.path '/x' is given twice"],
    ),
    (GOOD + "- {name: b, models: [m], tokenizer: t}\n", ["'m' is given twice"]),
    ('admin: {address: "0.0.0.0:9003"}\n' + GOOD, ["admin.address", "token"]),
    ("headers: {destination: X-Up}\n" + GOOD, ["headers.destination", "lower-case"]),
    ("limits: {decide_timeout_ms: true}\n" + GOOD, ["limits.decide_timeout_ms", "True"]),
]


@pytest.mark.parametrize(("text", "words"), BAD, ids=range(len(BAD)))
def test_bad(text: str, words: list[str]) -> None:
    with pytest.raises(config.ConfigError) as caught:
        config.parse(text, "c.yaml")
    message = str(caught.value)
    assert "c.yaml" in message
    for word in words:
        assert word in message, message
    assert "validation error" not in message, "pydantic's own wording is not for users"
    assert "s3cret" not in message


def test_every_mistake_is_told_at_once() -> None:
    with pytest.raises(config.ConfigError) as caught:
        config.parse(pool("block_size: 0\ndp: max"), "c.yaml")
    assert len(str(caught.value).splitlines()) == 2


def test_a_misspelt_key_is_told_before_what_it_leaves_missing() -> None:
    with pytest.raises(config.ConfigError) as caught:
        config.parse(GOOD.replace("tokenizer:", "tokeniser:"), "c.yaml")
    first, second = str(caught.value).splitlines()
    assert "pools[0].tokeniser: unknown key, did you mean 'tokenizer'?" in first
    assert "pools[0].tokenizer" in second
    assert "required" in second


def test_good() -> None:
    parsed = config.parse(GOOD)
    assert parsed.pools[0].scorer.name == "car"
    assert parsed.pools[0].instances[0].address == "10.0.0.1:8000"
    with pytest.raises(Exception, match="frozen"):
        parsed.pools[0].name = "other"  # type: ignore[misc]


def test_ipv6() -> None:
    parsed = config.parse(GOOD.replace("10.0.0.1:8000", "[2001:db8::1]:8000"))
    assert parsed.pools[0].instances[0].address == "[2001:db8::1]:8000"


def keys_of(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """Every key of the tree as a path, lists as []."""
    for name, field in model.model_fields.items():
        yield path + name
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                is_list = str(field.annotation).startswith("tuple")
                yield from keys_of(part, f"{path}{name}{'[].' if is_list else '.'}")


def uncommented(text: str) -> str:
    """The example with its commented-out keys switched on."""
    lines = []
    for line in text.splitlines():
        bare = line.lstrip()
        key = bare.removeprefix("# ")
        if bare.startswith("# ") and ":" in key and " " not in key.removeprefix("- ").split(":")[0]:
            line = line[: len(line) - len(bare)] + key
        elif bare.startswith("#   "):
            line = line[: len(line) - len(bare)] + bare[2:]
        lines.append(line)
    return "\n".join(lines)


def present(tree: Any, path: str) -> bool:
    for part in path.split("."):
        name = part.removesuffix("[]")
        if not isinstance(tree, dict) or name not in tree:
            return False
        tree = tree[name][0] if part.endswith("[]") else tree[name]
    return True


def test_the_example_shows_every_key_with_its_default() -> None:
    text = files("extproc").joinpath("example.yaml").read_text("utf-8")
    parsed = config.parse(text)
    tree = yaml.safe_load(uncommented(text))
    missing = [path for path in keys_of(config.Config) if not present(tree, path)]
    assert not missing
    for part in ("listen", "admin", "log", "paths", "headers", "limits", "events"):
        assert getattr(parsed, part) == getattr(config.parse(GOOD), part), (
            f"{part}: the example does not show the defaults"
        )
    shown, default = parsed.pools[0], config.parse(GOOD).pools[0]
    for name in config.Pool.model_fields:
        if name not in {"name", "models", "tokenizer", "instances", "scorer"}:
            assert getattr(shown, name) == getattr(default, name), name


def variants(union: Any) -> Iterator[type[BaseModel]]:
    for part in getattr(union, "__args__", (union,)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            yield part
        else:
            yield from variants(part)


def test_the_example_shows_every_key_of_every_source_of_instances() -> None:
    tree = yaml.safe_load(uncommented(files("extproc").joinpath("example.yaml").read_text("utf-8")))
    shown = {entry["type"]: entry for entry in tree["pools"][0]["discovery"]}
    found = list(variants(DiscoveryConfig))
    assert shown.keys() == {variant.model_fields["type"].annotation.__args__[0] for variant in found}  # type: ignore[union-attr]
    for variant in found:
        name = variant.model_fields["type"].annotation.__args__[0]  # type: ignore[union-attr]
        assert [key for key in keys_of(variant) if not present(shown[name], key)] == [], name


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("discovery: [{type: file, path: /nowhere/e.yaml}]", "  discovery file /nowhere/e.yaml\n"),
        ("discovery: [{type: http}]", "  discovery http\n"),
    ],
)
def test_check_shows_where_instances_come_from(tmp_path: Path, more: str, said: str) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    path = tmp_path / "c.yaml"
    path.write_text(f"pools:\n- name: p\n  models: [m]\n  tokenizer: {tmp_path}\n  {more}\n")
    done = CliRunner().invoke(main, ["check", "-c", str(path)])
    assert done.exit_code == 0, done.output
    assert said + "  no static instances" in done.output


def test_check_warns_of_a_file_of_instances_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    path, instances = tmp_path / "c.yaml", tmp_path / "engines.yaml"
    path.write_text(
        f"pools:\n- name: p\n  models: [m]\n  tokenizer: {tmp_path}\n"
        f"  discovery:\n  - type: file\n    path: {instances}\n"
    )
    said = f"{path}:7: pools[0].discovery[0].path: '{instances}' is no readable file so far"
    done = CliRunner().invoke(main, ["check", "-c", str(path)])
    assert (done.exit_code, f"valid\nwarning: {said}" in done.output) == (0, True), done.output
    told = json.loads(CliRunner().invoke(main, ["check", "-c", str(path), "--json"]).output)
    assert told["warnings"][0].startswith(said)
    instances.write_text("instances: []")
    assert "warning" not in CliRunner().invoke(main, ["check", "-c", str(path)]).output


LATER = [
    # more of the pool, what check says after the file's name: what is found once the file has parsed
    ("  tokenizer: /nowhere", ":4: pools[0].tokenizer: '/nowhere' does not exist; give the model's directory"),
    ("  tokenizer: {}\n  chat_template: /nowhere", ":5: pools[0].chat_template: '/nowhere' is no readable file"),
    ("  tokenizer: {}\n  endpoints_file:\n    path: /nowhere/e", ":6: pools[0].endpoints_file.path: the folder '/no"),
    (
        "  tokenizer: {}\n  discovery:\n  - {type: xllm-file, path: /nowhere}",
        ":6: pools[0].discovery[0]: /nowhere: cannot",
    ),
    ("  tokenizer: {}\nadmin:\n  tls:\n    cert: /nowhere\n    key: k", ":7: admin.tls.cert: '/nowhere' is no"),
    (
        '  tokenizer: {}\n  instances:\n  - {name: b, address: "10.0.0.1:8000", events: "tcp://10.0.0.1:5557"}\n'
        '  - {name: c, address: "10.0.0.2:8000", events: "tcp://10.0.0.1:5557"}',
        ":6: pools[0].instances: instances 'b' and 'c' both have 'tcp://10.0.0.1:5557': no two engines have one, give",
    ),
    (
        '  tokenizer: {}\n  instances: [{name: b, address: "10.0.0.1:8000", events: "tcp://10.0.0.1:5557"}]\n'
        "- name: q\n  models: [n]\n  tokenizer: {}\n"
        '  instances: [{name: c, address: "10.0.0.2:8000", events: "tcp://10.0.0.1:5557"}]',
        ":2: pools: instances 'b' and 'c' both have",
    ),
    (
        "  tokenizer: {}\n  instances:\n"
        '  - {name: b, address: "10.0.0.1:8000", events: "tcp://10.0.0.1:65000", dp_size: 999}',
        ":6: pools[0].instances[0]: ",
    ),
]


@pytest.mark.parametrize("command", ["check", "serve"])
@pytest.mark.parametrize(("more", "said"), LATER, ids=range(len(LATER)))
def test_what_is_found_out_later_has_its_line_too(tmp_path: Path, more: str, said: str, command: str) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    path = tmp_path / "c.yaml"
    path.write_text(
        "pools:\n- name: p\n  models: [m]\n" + more.replace("tokenizer: {}", f"tokenizer: {tmp_path}") + "\n"
    )
    done = CliRunner().invoke(main, [command, "-c", str(path)])
    assert done.exit_code == 2
    assert f"kvcar: {path}{said}" in done.output


def test_values_for_templates_are_those_of_a_request() -> None:
    """Tuples would render as (...), and have no list's methods."""
    given = config.parse(pool("chat_template_kwargs: {stops: [a, b], deep: {x: [[1], {y: []}]}}"), "c.yaml")
    told = assembly.prompter_options(given.pools[0], given).chat_template_kwargs
    assert told == {"stops": ["a", "b"], "deep": {"x": [[1], {"y": []}]}}


JINJA = "{% for message in messages %}{{ message.content }}{% endfor %}" * 10
PEM = "-----BEGIN CERTIFICATE-----\n" + "QUJD\n" * 100


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pools": {"chat_template": JINJA}}, ["pools[0].chat_template", "put the template in one"]),
        ({"pools": {"tokenizer": "./" + "x" * 300}}, ["pools[0].tokenizer", "does not exist"]),
        ({"pools": {"tokenizer": "~nobody-of-that-name/x"}}, ["pools[0].tokenizer", "does not exist"]),
        ({"pools": {"endpoints_file": {"path": f"/{PEM}/x"}}}, ["pools[0].endpoints_file.path", "make it first"]),
        ({"listen": {"tls": {"cert": "~/c.pem", "key": "k"}}}, ["listen.tls.cert", "'~/c.pem' is no readable file"]),
        ({"listen": {"tls": {"cert": PEM, "key": "k"}}}, ["listen.tls.cert", "is no readable file"]),
        (
            {"pools": {"discovery": [{"type": "file", "path": "/" + "x" * 300}]}},
            ["pools[0].discovery[0].path", "so far"],
        ),
    ],
)
def test_text_where_a_path_belongs(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    one = {"name": "a", "models": ["m"], "tokenizer": str(tmp_path), **changes.pop("pools", {})}
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({**changes, "pools": [one]}))
    done = CliRunner().invoke(main, ["check", "-c", str(path)])
    assert done.exit_code == (0 if "so far" in words else 2), done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    for word in words:
        assert word in done.output, done.output
    assert len(done.output) < 1500
