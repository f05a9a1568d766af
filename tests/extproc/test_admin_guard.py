"""Who may ask what of the admin port, and what is masked: tables."""

from __future__ import annotations

from typing import Any

import pytest

from extproc.admin.guard import action_objection, cross_site, foreign_name, is_loopback, objection
from extproc.admin.masking import is_secret, masked

HERE = {"Host": "127.0.0.1:9003"}


@pytest.mark.parametrize(
    ("method", "headers", "answer"),
    [
        ("POST", {}, False),  # curl
        ("POST", {"Sec-Fetch-Site": "same-origin", "Origin": "http://127.0.0.1:9003"}, False),  # the dashboard
        ("POST", {"Sec-Fetch-Site": "none"}, False),  # typed in
        ("POST", {"Sec-Fetch-Site": "cross-site"}, True),
        ("POST", {"Sec-Fetch-Site": "same-site"}, True),  # another port of this host is another origin
        ("POST", {"Origin": "http://127.0.0.1:9003"}, False),  # a browser without Sec-Fetch-Site
        ("POST", {"Origin": "http://127.0.0.1:8000"}, True),
        ("POST", {"Origin": "https://evil.example"}, True),
        ("POST", {"Origin": "null"}, True),  # a sandboxed frame
        ("DELETE", {"Origin": "https://evil.example"}, True),
        ("GET", {"Sec-Fetch-Site": "cross-site"}, False),  # changes nothing, and cannot be read without CORS
    ],
)
def test_cross_site(method: str, headers: dict[str, str], answer: bool) -> None:
    assert cross_site(method, {**HERE, **headers}) is answer


@pytest.mark.parametrize(
    ("host", "answer"),
    [("127.0.0.1:9003", False), ("127.0.0.1", False), ("[::1]:9003", False), ("[::1]", False), ("10.0.0.7:9003", False),
     ("localhost:9003", False), ("kvcar.localhost", False), ("evil.example:9003", True), ("localhost.evil", True),
     ("127.0.0.1.evil.example", True), ("", True), ("[evil]:1", True)],
)  # fmt: skip
def test_foreign_name(host: str, answer: bool) -> None:
    assert foreign_name(host) is answer


@pytest.mark.parametrize(
    ("remote", "answer"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True), ("10.0.0.1", False),
     ("::ffff:10.0.0.1", False), ("fe80::1%eth0", False), (None, False), ("", False), ("unix", False)],
)  # fmt: skip
def test_loopback(remote: str | None, answer: bool) -> None:
    assert is_loopback(remote) is answer


@pytest.mark.parametrize(
    ("headers", "remote", "token", "open_to_all", "status"),
    [
        ({}, "127.0.0.1", None, False, None),
        ({"Host": "evil.example"}, "127.0.0.1", None, False, 403),  # DNS rebinding
        ({"Host": "evil.example"}, "127.0.0.1", None, True, None),  # health and metrics: by whatever name
        ({"Host": "kvcar.svc"}, "10.0.0.1", None, False, None),  # allow_unauthenticated in a cluster
        ({}, "10.0.0.1", b"secret-1", False, 401),
        ({"X-Internal-Token": "secret-1"}, "10.0.0.1", b"secret-1", False, None),
        ({"X-Internal-Token": "secret-1", "Host": "kvcar.svc"}, "127.0.0.1", b"secret-1", False, None),
        ({"Authorization": "Bearer secret-1"}, "10.0.0.1", b"secret-1", False, None),
        ({"X-Internal-Token": "secret-1", "Origin": "https://evil.example"}, "10.0.0.1", b"secret-1", False, 403),
    ],
)
def test_objection(headers: dict[str, str], remote: str, token: bytes | None, open_to_all: bool, status: Any) -> None:
    refused = objection("POST", {**HERE, **headers}, remote, expected=token, open_to_all=open_to_all)
    assert (refused[0] if refused else None) == status


@pytest.mark.parametrize(
    ("content_type", "remote", "with_token", "status"),
    [
        ("application/json", "127.0.0.1", False, None),
        ("application/json", "10.0.0.1", False, 403),
        ("application/json", "10.0.0.1", True, None),
        ("text/plain", "127.0.0.1", True, 415),  # what a page may send without asking
        ("application/x-www-form-urlencoded", "127.0.0.1", False, 415),
    ],
)
def test_action_objection(content_type: str, remote: str, with_token: bool, status: int | None) -> None:
    refused = action_objection(content_type, remote, with_token=with_token)
    assert (refused[0] if refused else None) == status


@pytest.mark.parametrize(
    ("key", "answer"),
    [("token", True), ("admin_token", True), ("password", True), ("etcd-password", True), ("api_key", True),
     ("apiKey", True), ("Authorization", True), ("client_secret", True), ("access_key", True), ("private_key", True),
     ("tokenizer", False), ("tokenizer_revision", False), ("token_file", False), ("key", False),
     ("prefill_header", False),
     ("max_tokens", False), ("models", False)],
)  # fmt: skip
def test_secret_keys(key: str, answer: bool) -> None:
    assert is_secret(key) is answer


def test_masked() -> None:
    assert masked({
        "admin": {"token": "x", "address": "127.0.0.1:1"},
        "limits": {"token_cache_bytes": 5},
        "pools": [{"discovery": [{"password": "p", "endpoints": ("http://user:pw@etcd:2379/a@b",)}], "secret": None}],
        "credentials": {"user": "u", "list": ["v"]},
    }) == {
        "admin": {"token": "***", "address": "127.0.0.1:1"},
        "limits": {"token_cache_bytes": 5},
        "pools": [{"discovery": [{"password": "***", "endpoints": ["http://***@etcd:2379/a@b"]}], "secret": None}],
        "credentials": {"user": "***", "list": ["***"]},
    }  # fmt: skip
