"""`kvcar envoy-config`: what was measured to work, accepted by the real Envoy, obeying its options."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from betterproto2 import Casing
from click.testing import CliRunner
from envoy_data_plane.envoy.config.bootstrap.v3 import Bootstrap

from extproc.cli import main
from extproc.config import load, parse
from extproc.envoy_config import (
    DESTINATION,
    BodyMode,
    ClientTls,
    EnvoyOptions,
    Http,
    Part,
    Routing,
    as_dict,
    options_for,
    render,
)
from extproc.envoy_config.yaml_form import COMMENTS, PLACES, dump
from extproc.session import DESTINATION_KEY
from tests.real.harness import envoy_binary

ROOT = Path(__file__).parents[2]
TLS = Path(__file__).parent / "tls"
REFERENCES = ROOT / "tests/data/envoy"
ENGINES = ("127.0.0.1:8001", "127.0.0.1:8002", "127.0.0.1:8003")

VARIANTS: dict[str, dict[str, Any]] = {
    "recommended": {"engines": ENGINES},
    "engines file": {"engines_file": "./eds/engines.yaml"},
    "full duplex": {"engines": ENGINES, "body_mode": BodyMode.FULL_DUPLEX},
    "fail closed, no admin, no log": {"engines": ENGINES, "fail_open": False, "admin": None, "access_log": None},
    "two kvcar, by name": {"engines": ("engine:8000",), "ext_proc": ("kvcar-0.kvcar:9002", "kvcar-1.kvcar:9002")},
    "ipv6": {"engines": ("[::1]:8000",), "ext_proc": ("[::1]:9002",), "listen": "[::]:10000"},
    "original dst": {"engines": ENGINES, "routing": Routing.ORIGINAL_DST},
    "original dst, file, http2": {
        "engines_file": "./eds/engines.yaml",
        "routing": Routing.ORIGINAL_DST,
        "engine_protocol": Http.HTTP2,
    },
    "original dst, full duplex": {
        "engines": ENGINES,
        "routing": Routing.ORIGINAL_DST,
        "body_mode": BodyMode.FULL_DUPLEX,
    },
    "stateful session": {"engines": ENGINES, "routing": Routing.STATEFUL_SESSION},
    "tls": {"engines": ENGINES, "ext_proc_tls": ClientTls(ca=f"{TLS}/ca.pem")},
    "mutual tls, by name": {
        "engines": ENGINES,
        "ext_proc": ("kvcar-0.kvcar:9002", "kvcar-1.kvcar:9002"),
        "ext_proc_tls": ClientTls(
            ca=f"{TLS}/ca.pem", cert=f"{TLS}/client.pem", key=f"{TLS}/client.key", name="kvcar.example"
        ),
    },
    "http2": {"engines": ENGINES, "engine_protocol": Http.HTTP2},
    "own headers": {"engines": ENGINES, "destination_header": "x-engine", "written_headers": ("x.rank",)},
    "prefixes": {"engines": ENGINES, "path_prefixes": ("/openai", "/some-gateway/llm/"), "observe_usage": True},
}


def typed(data: dict[str, Any]) -> dict[str, Any]:
    """The same configuration after a round trip through the proto messages: order, defaults and spelling evened out."""
    result: dict[str, Any] = Bootstrap.from_dict(data).to_dict(casing=Casing.SNAKE)
    return result


def validate(text: str, folder: Path) -> None:
    path = folder / "envoy.yaml"
    path.write_text(text)
    command = [str(envoy_binary()), "--mode", "validate", "-c", str(path), "--log-level", "warn"]
    done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr[-2000:]
    # Deprecated or unknown fields are warnings, not errors: none may appear.
    assert "[warning]" not in done.stderr, done.stderr


def enabled_by_routes(data: dict[str, Any]) -> dict[str, Any]:
    """The measured files switch the filter off on all other routes; ours switches it on where it belongs."""
    network = data["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    network["http_filters"][0]["disabled"] = True
    scored, others = network["route_config"]["virtual_hosts"][0]["routes"]
    scored["typed_per_filter_config"] = others.pop("typed_per_filter_config")
    setting = scored["typed_per_filter_config"]["envoy.filters.http.ext_proc"]
    del setting["disabled"]
    setting["overrides"] = {}
    return data


# The measured files of tests/data/envoy; `request` variants differ from them in nothing else.
SAME_AS = {
    "recommended": "override_host.yaml",
    "engines file": "override_host_eds_file.yaml",
    "full duplex": "full_duplex.yaml",
}


@pytest.mark.parametrize("variant", SAME_AS)
def test_equals_the_configuration_that_was_measured(variant: str) -> None:
    text = (REFERENCES / SAME_AS[variant]).read_text()
    assert "/v1/(chat/)?completions" in text
    # More paths carry prompts by now; the rest is as measured.
    paths = "/v1/(chat/completions|completions|responses|messages|embeddings)|(/generate|/inference/v1/generate)"
    measured = typed(enabled_by_routes(yaml.safe_load(text.replace("/v1/(chat/)?completions", paths))))
    ours = typed(as_dict(EnvoyOptions(**VARIANTS[variant])))
    # Not in the measured files: by Envoy's defaults a second try waits up to 1 s, and three may run.
    network = ours["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    del network["http_filters"][0]["typed_config"]["grpc_service"]["retry_policy"]["retry_back_off"]
    kvcar = ours["static_resources"]["clusters"][-1]
    del kvcar["circuit_breakers"]["thresholds"][0]["max_retries"]
    # Nor this: a kvcar that was started again was not asked for up to a second.
    assert kvcar["common_lb_config"].pop("update_merge_window") == "0s"
    if variant == "full duplex":
        # Not applied in this mode; harmless, and there when the mode falls back.
        filters = ours["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        assert filters["http_filters"][0]["typed_config"].pop("max_message_timeout") == "10s"
    assert ours == measured


@pytest.mark.parametrize("variant", VARIANTS)
def test_envoy_accepts(variant: str, tmp_path: Path) -> None:
    (tmp_path / "eds").mkdir()
    (tmp_path / "eds/engines.yaml").write_text("resources: []\n")
    text = render(EnvoyOptions(**VARIANTS[variant]))
    assert yaml.safe_load(text) == as_dict(EnvoyOptions(**VARIANTS[variant]))
    validate(text, tmp_path)


def test_fragments_merge_into_an_existing_envoy(tmp_path: Path) -> None:
    """A plain proxy with its own routes and filters becomes a routed one when each list goes where its comment says."""
    text = render(EnvoyOptions(engines=ENGINES), Part.FRAGMENT)
    pieces = yaml.safe_load(text)
    existing = yaml.safe_load((Path(__file__).parent / "existing_envoy.yaml").read_text())
    manager = existing["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    existing["static_resources"]["clusters"] += pieces["clusters"]
    manager["early_header_mutation_extensions"] = pieces["early_header_mutation_extensions"]
    manager["access_log"] = pieces["access_log"]
    manager["http_filters"][-1:-1] = pieces["http_filters"]
    manager["route_config"]["virtual_hosts"][0]["routes"][:0] = pieces["routes"]
    validate(yaml.safe_dump(existing), tmp_path)
    # Each fragment alone is the same text as in the whole.
    for part in (Part.CLUSTERS, Part.LISTENER, Part.FILTER, Part.ROUTES):
        alone = as_dict(EnvoyOptions(engines=ENGINES), part)
        assert alone == {key: pieces[key] for key in alone}
    assert all(place in text for place in ("static_resources.clusters", "before envoy.filters.http.router"))
    whole = as_dict(EnvoyOptions(engines=ENGINES))["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]
    assert pieces["access_log"] == whole["typed_config"]["access_log"]
    assert "access_log" not in as_dict(EnvoyOptions(engines=ENGINES, access_log=None), Part.FRAGMENT)


def test_local_yaml_is_current() -> None:
    printed = CliRunner().invoke(main, ["envoy-config", "-c", str(ROOT / "examples/local/kvcar.yaml")])
    assert printed.exit_code == 0, printed.output
    assert printed.stdout == (ROOT / "envoy/local.yaml").read_text()


def test_local_readme_starts_what_the_configuration_names() -> None:
    """The commands to run by hand use the very ports of kvcar.yaml and local.yaml."""
    readme = (ROOT / "examples/local/README.md").read_text()
    config = load(ROOT / "examples/local/kvcar.yaml")
    for instance in config.pools[0].instances:
        port, events, replay = (
            str(one).rpartition(":")[2] for one in (instance.address, instance.events, instance.replay)
        )
        line = f"--name {instance.name} --port {port} --events-port {events} --replay-port {replay}"
        assert f"python -m examples.emulator {line}\n" in readme
    options = options_for(config)
    for address in (options.listen, options.admin, config.admin.address):
        assert f"localhost:{str(address).rpartition(':')[2]}/" in readme


def test_options_follow_the_kvcar_configuration() -> None:
    config = parse("""
listen: {address: "0.0.0.0:7000"}
headers: {destination: x-engine, rank: x-rank}
limits: {max_body_bytes: 4096, decide_timeout_ms: 3000}
pools:
- {name: a, models: [a], tokenizer: t, instances: [{name: a0, address: "10.0.0.1:8000"}]}
- name: b
  models: [b]
  tokenizer: t
  instances: [{name: b0, address: "10.0.0.2:8000"}, {name: b1, address: "[::2]:1"}]
""")
    options = options_for(config, pool="b", listen="127.0.0.1:1")
    assert options.engines == ("10.0.0.2:8000", "[::2]:1")
    assert (options.ext_proc, options.listen) == (("127.0.0.1:7000",), "127.0.0.1:1")
    assert (options.max_body_bytes, options.message_timeout) == (4096, 6.0)
    text = render(options)
    for header in ("x-engine", "x-rank", DESTINATION):
        assert f"{{remove: {header}}}" in text
    assert r"x-kvcar-.*|x\-engine|x\-rank|content-type" in text
    with pytest.raises(ValueError, match="name one of a, b"):
        options_for(config)
    with pytest.raises(ValueError, match="'c' is not configured"):
        options_for(config, pool="c")
    assert options_for(config, pool="a", engines_file="eds.yaml").engines == ()


POOL = (
    "pools: [{{name: a, models: [a], tokenizer: t, max_endpoints: {}, instances: [{{name: b, address: '1.1.1.1:1'}}]}}]"
)
TLS_CONFIG = "listen: {{tls: {{cert: s.pem, key: s.key{}}}}}\n"
ONE, THREE = POOL.format(1), POOL.format(3)
CA = ClientTls(ca="ca.pem")

# Two configurations that would not understand each other, and what says so.
DISAGREE: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "a list to ORIGINAL_DST": (THREE, {"routing": Routing.ORIGINAL_DST}, "max_endpoints: 1 in kvcar's pool 'a'"),
    "one to ORIGINAL_DST": (ONE, {"routing": Routing.ORIGINAL_DST}, None),
    "a header nobody sets": (ONE, {"routing": Routing.STATEFUL_SESSION}, "headers: {stateful_session: x-kvcar-host}"),
    "a header that is set": (
        f"headers: {{stateful_session: x-mine}}\n{ONE}",
        {"routing": Routing.STATEFUL_SESSION},
        None,
    ),
    "TLS there, none here": (TLS_CONFIG.format("") + THREE, {}, "--ext-proc-ca"),
    "TLS on both sides": (TLS_CONFIG.format("") + THREE, {"ext_proc_tls": CA}, None),
    "mutual there, no certificate here": (
        TLS_CONFIG.format(", client_ca: c.pem") + THREE,
        {"ext_proc_tls": CA},
        "--ext-proc-cert",
    ),
    "TLS in front of kvcar": (THREE, {"ext_proc_tls": CA}, None),
}


@pytest.mark.parametrize("case", DISAGREE)
def test_the_two_configurations_agree(case: str) -> None:
    text, overrides, message = DISAGREE[case]
    if message is None:
        options = options_for(parse(text), **overrides)
        assert options.routing is not Routing.STATEFUL_SESSION or options.session_header == "x-mine"
        return
    with pytest.raises(ValueError) as caught:
        options_for(parse(text), **overrides)
    assert message in str(caught.value)


def test_all_disagreements_are_named_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        options_for(parse(TLS_CONFIG.format(", client_ca: c.pem") + THREE), routing=Routing.STATEFUL_SESSION)
    wanted = ("max_endpoints: 1", "stateful_session: x-kvcar-host", "--ext-proc-ca", "--ext-proc-cert")
    assert all(text in line for text, line in zip(wanted, str(caught.value).splitlines(), strict=True))


def test_command_line_of_tls(tmp_path: Path) -> None:
    path = tmp_path / "kvcar.yaml"
    path.write_text(TLS_CONFIG.format(", client_ca: c.pem") + THREE)
    base = ["envoy-config", "-c", str(path)]
    files = ["--ext-proc-ca", "ca.pem", "--ext-proc-cert", "own.pem", "--ext-proc-key", "own.key"]
    done = CliRunner().invoke(main, [*base, *files, "--ext-proc-name", "kvcar.example"])
    assert done.exit_code == 0, done.output
    for part in ("filename: ca.pem", "filename: own.pem", "filename: own.key", "sni: kvcar.example"):
        assert part in done.stdout
    assert "warning" not in done.stderr
    path.write_text(THREE)
    done = CliRunner().invoke(main, [*base, *files])
    assert (done.exit_code, "listen.tls is not set" in done.stderr, "warning" in done.stdout) == (0, True, False)
    path.write_text(TLS_CONFIG.format(", client_ca: c.pem") + THREE)
    for arguments, message in (
        (files[2:], "--ext-proc-ca is missing"),
        (files[:4], "a client certificate needs its key"),
    ):
        done = CliRunner().invoke(main, [*base, *arguments])
        assert done.exit_code == 2
        assert message in done.output


def test_envoy_reads_the_metadata_that_the_session_writes() -> None:
    """Also with a renamed header: then only the header has the other name."""
    options = EnvoyOptions(engines=ENGINES, destination_header="x-engine")
    cluster = as_dict(options, Part.CLUSTERS)["clusters"][0]
    policy = cluster["load_balancing_policy"]["policies"][0]["typed_extension_config"]["typed_config"]
    (source,) = policy["override_host_sources"]
    assert source["metadata"] == {"key": "envoy.lb", "path": [{"key": DESTINATION_KEY}]}


BAD = {
    "both": ({"engines": ENGINES, "engines_file": "x"}, "engines: give addresses or a file, not both"),
    "no kvcar": ({"engines": ENGINES, "ext_proc": ()}, "ext_proc: at least one"),
    "no port": ({"engines": ("10.0.0.1",)}, "engines: '10.0.0.1' is not host:port"),
    "bare ipv6": ({"engines": ("::1:8000",)}, "engines: '::1:8000' is not host:port"),
    "port too large": ({"engines": ENGINES, "listen": "0.0.0.0:70000"}, "listen: '0.0.0.0:70000'"),
    "yaml in an address": ({"engines": ("a}: {b:1",)}, "engines: "),
    "header with a blank": ({"engines": ENGINES, "stripped_headers": ("X Rank",)}, "stripped_headers: 'X Rank'"),
    "regex in a header": ({"engines": ENGINES, "destination_header": "x|.*"}, "destination_header: "),
    "zero body": ({"engines": ENGINES, "max_body_bytes": 0}, "max_body_bytes: 0 must be above 0"),
    "timeouts crossed": ({"engines": ENGINES, "message_timeout": 20.0}, "max_message_timeout: 10.0 is below"),
    "health path": ({"engines": ENGINES, "engine_health_path": "health"}, "engine_health_path: 'health'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_name_themselves(case: str) -> None:
    options, message = BAD[case]
    with pytest.raises(ValueError) as caught:
        EnvoyOptions(**options)  # type: ignore[arg-type]
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("part", Part)
def test_only_the_clusters_need_engines(part: Part) -> None:
    options = EnvoyOptions()
    if part in (Part.BOOTSTRAP, Part.FRAGMENT, Part.CLUSTERS):
        with pytest.raises(ValueError, match="engines: the pool has no instances with an address"):
            render(options, part)
    else:
        assert render(options, part) == render(EnvoyOptions(engines=ENGINES), part)


def test_every_comment_is_used() -> None:
    """A comment whose key was renamed would vanish without a word."""
    texts = [render(EnvoyOptions(**options)) for options in VARIANTS.values()]
    texts += [render(EnvoyOptions(**VARIANTS[name]), Part.FRAGMENT) for name in ("recommended", "engines file")]
    for comment in (*COMMENTS.values(), *PLACES.values()):
        assert any(comment.split("\n")[0] in text for text in texts), comment


YAML_ROWS: dict[str, Any] = {
    "empty containers": {"a": {}, "b": [], "c": [{}], "d": [[]]},
    "odd scalars": {"a": None, "b": True, "c": "true", "d": "1", "e": 1.5, "f": "", "g": "x: y", "h": "# no", "i": "é"},
    "odd keys": {"@type": 1, "a b": 2, "true": 3, "": 4},
    "lines": {"a": "one\ntwo\n", "b": ["x\n", "- y"]},
    "deep": {"a": {"b": [{"c": [{"d": "e" * 100}, {"f": ["g" * 90, "h" * 90]}]}]}},
    "lists in lists": {"a": [[1, 2], [3, [4, "x" * 100]]]},
}


@pytest.mark.parametrize("row", YAML_ROWS)
def test_dump_loads_back(row: str) -> None:
    data = YAML_ROWS[row]
    comments = {("a",): "why", ("c",): "two\nlines", ("d",): "x" * 100, ("b=True",): "only when true"}
    for given in ({}, comments):
        assert yaml.safe_load(dump(data, given)) == data


def test_comments_stand_by_their_key() -> None:
    text = dump({"a": {"x": 1, "y": 2}, "b": [{"x": "z" * 70, "y": 1}]}, {("a", "x"): "one", ("b", "x"): "w" * 60})
    assert text == ("a:\n  x: 1  # one\n  y: 2\nb:\n# " + "w" * 60 + "\n- x: " + "z" * 70 + "\n  y: 1\n")
