"""`kvcar tokens` scores what the server scores: with the pool's own tokenizer, or its engines'."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner

from extproc.commands.tokens import tokens
from tests.tokenizers import SMALL

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}


def run(folder: Path, body: dict[str, Any], **pool: Any) -> tuple[int, dict[str, Any]]:
    config = {
        "limits": {"tokenize_timeout_ms": 60_000, "decide_timeout_ms": 60_000},
        "pools": [{"name": "p", "models": ["m"], "block_size": 4, **pool}],
    }
    file = folder / "kvcar.yaml"
    file.write_text(json.dumps(config))
    done = CliRunner().invoke(tokens, ["-c", str(file), "--json", "-"], input=json.dumps(body))
    return done.exit_code, json.loads(done.stdout)


def instances(address: str) -> list[dict[str, str]]:
    return [{"name": "a", "address": address, "events": "tcp://127.0.0.1:5557"}]


def test_own_tokenizer(tmp_path: Path) -> None:
    body = {"model": "m", "prompt": list(range(9))}
    code, out = run(tmp_path, body, tokenizer=str(SMALL), instances=instances("127.0.0.1:8000"))
    assert (code, out["reason"], out["ids"]) == (0, None, list(range(9)))
    assert len(out["blocks"]) == 2


async def test_the_engines_tokenizer(tmp_path: Path) -> None:
    async def render(_: web.Request) -> web.Response:
        return web.json_response({"token_ids": [1, 2, 3, 4, 5]})

    engine = web.Application()
    engine.router.add_post("/v1/chat/completions/render", render)
    runner = web.AppRunner(engine)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    pool = {"tokenizer": "nobody/has-this-model", "instances": instances(f"127.0.0.1:{runner.addresses[0][1]}")}
    try:
        code, out = await asyncio.to_thread(run, tmp_path, CHAT, **pool)
        assert (code, out["reason"]) == (1, "no_tokenizer")
        code, out = await asyncio.to_thread(run, tmp_path, CHAT, **pool, remote_tokenizer={"api": "render"})
        assert (code, out["reason"], out["ids"]) == (0, None, [1, 2, 3, 4, 5])
        assert len(out["blocks"]) == 1
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("data", "code", "said"),
    [
        ("not json", 2, "the request is no JSON (Expecting value: line 1 column 1"),
        ("[" * 100_000 + "]" * 100_000, 2, "the request is nested too deeply"),
        (json.dumps({**CHAT, "model": "other"}), 1, "no pool serves the model 'other'; there are: m"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, data: str, code: int, said: str) -> None:
    file = tmp_path / "kvcar.yaml"
    file.write_text(json.dumps({"pools": [{"name": "p", "models": ["m"], "tokenizer": str(SMALL)}]}))
    done = CliRunner().invoke(tokens, ["-c", str(file), "-"], input=data)
    assert (done.exit_code, said in done.output) == (code, True), done.output
