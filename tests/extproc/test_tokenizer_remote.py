"""Ids from an engine: asked once, kept, within the budget, and never asked of one that fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from extproc.metrics import Metrics
from extproc.observe import add_families
from extproc.openai import Body, parse_body
from extproc.prompt import Options, Prompt, Prompter
from extproc.prompt.remote import ENTRY_BYTES, RemoteError, RemoteTokenizer
from extproc.reasons import Reason, Unscored
from tests.extproc.pool_model import make_pool
from tests.tokenizers import prompt_of

CHAT = "/v1/chat/completions"
U = [{"role": "user", "content": "hi"}]


def body(fields: dict[str, Any], path: str = CHAT) -> Body:
    parsed = parse_body(path, {}, json.dumps(fields).encode())
    assert isinstance(parsed, Body)
    return parsed


class Engine:
    """Answers as told; counts."""

    def __init__(self, *answers: tuple[int, Any] | Exception) -> None:
        self.answers = list(answers) or [(200, {"token_ids": [1, 2]})]
        self.asked: list[tuple[str, Any]] = []
        self.gate: asyncio.Event | None = None
        self.three_asked = asyncio.Event()

    async def __call__(self, url: str, data: bytes, timeout: float) -> tuple[int, bytes]:  # noqa: ASYNC109
        self.asked.append((url, json.loads(data)))
        if len(self.asked) == 3:
            self.three_asked.set()
        if self.gate is not None:
            await self.gate.wait()
        answer = self.answers[min(len(self.asked), len(self.answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer[0], json.dumps(answer[1]).encode()


def remote(engine: Engine, urls: tuple[str, ...] = ("http://a/",), **options: Any) -> RemoteTokenizer:
    return RemoteTokenizer(urls, post=engine, **options)


QUESTIONS = [
    ("render", CHAT, {"messages": U, "stream": True}, "http://a/v1/chat/completions/render", {"messages": U}),
    ("render", "/v1/completions", {"prompt": "a"}, "http://a/v1/completions/render", {"prompt": "a"}),
    ("render", "/v1/responses", {"input": "a"}, "http://a/v1/responses/render", {"input": "a"}),
    ("render", "/generate", {"text": "a"}, None, None),
    ("tokenize", CHAT, {"messages": U, "n": 1}, "http://a/tokenize", {"messages": U}),
    ("tokenize", "/v1/completions", {"prompt": "a"}, "http://a/tokenize", {"prompt": "a"}),
    ("tokenize", CHAT, {"messages": U, "reasoning_effort": "low"}, None, None),
    ("tokenize", CHAT, {"messages": U, "truncate_prompt_tokens": 5}, None, None),
    ("tokenize", "/v1/responses", {"input": "a"}, None, None),
]


@pytest.mark.parametrize(("api", "path", "fields", "url", "question"), QUESTIONS)
async def test_questions(api: Any, path: str, fields: dict[str, Any], url: str | None, question: Any) -> None:
    engine = Engine()
    subject = remote(engine, api=api)
    if url is None:
        with pytest.raises(RemoteError):
            await subject.ids(body(fields, path), 5.0)
        assert not engine.asked
    else:
        assert await subject.ids(body(fields, path), 5.0) == b"\1\0\0\0\2\0\0\0"
        assert engine.asked == [(url, question)]


# whose fault: the request's (refused), the engine's (it rests), nobody's (a request that has no one prompt of text)
REFUSED, FAILED, NEITHER = "refused", "failed", "neither"
ANSWERS = [
    ((200, {"token_ids": [7]}), [7]),
    ((200, {"tokens": [7], "count": 1}), [7]),
    ((200, [{"token_ids": [7]}]), [7]),
    ((200, [{"token_ids": [7]}, {"token_ids": [8]}]), NEITHER),
    ((200, []), NEITHER),
    ((200, {"token_ids": []}), NEITHER),
    ((200, {"token_ids": [7], "features": {"mm_hashes": {"image": ["a"]}}}), NEITHER),
    ((200, {"token_ids": [-1]}), FAILED),
    ((200, {"token_ids": ["x"]}), FAILED),
    ((200, {}), FAILED),
    ((200, "text"), FAILED),
    ((307, {}), FAILED),
    ((400, {"error": {}}), REFUSED),
    ((422, {}), REFUSED),
    ((401, {}), FAILED),
    ((403, {}), FAILED),
    ((404, {}), FAILED),
    ((408, {}), FAILED),
    ((503, {}), FAILED),
    (OSError("refused"), FAILED),
    (TimeoutError(), FAILED),
    (RemoteError("answer over 3 bytes"), NEITHER),
]


@pytest.mark.parametrize(("answer", "expected"), ANSWERS)
async def test_answers(answer: Any, expected: list[int] | str) -> None:
    engine = Engine(answer, (200, {"token_ids": [8]}))
    subject = remote(engine, clock=lambda: 0.0)
    if isinstance(expected, list):
        assert memoryview(await subject.ids(body({"messages": U}), 5.0)).cast("I").tolist() == expected
        return
    with pytest.raises(RemoteError) as error:
        await subject.ids(body({"messages": U}), 5.0)
    assert error.value.refused is (expected == REFUSED)
    assert subject.failed == (expected == FAILED)
    if expected == FAILED:
        with pytest.raises(RemoteError, match="rests"):
            await subject.ids(body({"messages": U}), 5.0)
    else:
        assert await subject.ids(body({"messages": U}), 5.0) == b"\x08\0\0\0", "the engine is still asked"


@pytest.mark.parametrize("status", [401, 403])
async def test_an_engine_that_wants_a_key_is_logged_once_with_the_remedy(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    engine = Engine((status, {}))
    engine.gate = asyncio.Event()
    subject = remote(engine, clock=lambda: now[0])
    asked = [asyncio.create_task(subject.ids(body({"messages": U, "user": name}), 20.0)) for name in "abc"]
    await asyncio.wait_for(engine.three_asked.wait(), 20.0)
    engine.gate.set()
    await asyncio.gather(*asked, return_exceptions=True)
    for now[0], logged in ((0.0, 1), (59.0, 1), (60.0, 2)):
        with pytest.raises(RemoteError) as error:
            await subject.ids(body({"messages": U}), 5.0)
        assert not error.value.refused
        assert [f"HTTP {status}" in text and "without" in text for text in caplog.messages] == [True] * logged


async def test_asked_once_for_many_and_kept() -> None:
    engine = Engine()
    engine.gate = asyncio.Event()
    subject = remote(engine)
    calls = [asyncio.create_task(subject.ids(body({"messages": U}), 20.0)) for _ in range(9)]
    await asyncio.sleep(0)
    engine.gate.set()
    assert len(set(await asyncio.gather(*calls))) == 1
    await subject.ids(body({"messages": U}), 20.0)
    assert (len(engine.asked), subject.known) == (1, 1)
    await subject.ids(body({"messages": U, "add_generation_prompt": False}), 20.0)
    assert len(engine.asked) == 2


async def test_bounded() -> None:
    engine = Engine()
    subject = remote(engine, max_bytes=2 * (ENTRY_BYTES + 8))
    for name in ("a", "b", "c", "a"):
        await subject.ids(body({"messages": U, "user": name}), 5.0)
    assert len(engine.asked) == 4
    assert subject.bytes == subject.max_bytes


async def test_too_slow_then_kept_for_the_next() -> None:
    engine = Engine()
    engine.gate = asyncio.Event()
    subject = remote(engine)
    with pytest.raises(RemoteError, match="too slow"):
        await subject.ids(body({"messages": U}), 0.001)
    engine.gate.set()
    assert await subject.ids(body({"messages": U}), 20.0)
    assert len(engine.asked) == 1


async def test_an_engine_that_fails_rests() -> None:
    now = [0.0]
    clock: Callable[[], float] = lambda: now[0]  # noqa: E731
    engine = Engine((503, {}))
    subject = remote(engine, urls=("http://a", "http://b"), rest=5.0, clock=clock)
    for _ in range(6):
        with pytest.raises(RemoteError):
            await subject.ids(body({"messages": U}), 5.0)
    assert sorted(url[:8] for url, _ in engine.asked) == ["http://a", "http://b"], "each once, then none"
    now[0] = 5.1
    with pytest.raises(RemoteError):
        await subject.ids(body({"messages": U}), 5.0)
    assert len(engine.asked) == 3


async def test_prompter_asks_where_it_cannot_tell_itself() -> None:
    engine = Engine((200, {"token_ids": [5, 6, 7]}), (400, {}), (503, {}))
    options = Options(tokenizer="", models=("m",), adapters=("ada",))
    subject = Prompter(options, None, None, remote=remote(engine))

    async def outcome(fields: dict[str, Any]) -> Any:
        found = await prompt_of(subject, CHAT, json.dumps({"messages": U, **fields}).encode())
        return found.reason if isinstance(found, Unscored) else found

    prompt = await outcome({"model": "ada", "cache_salt": "s", "truncate_prompt_tokens": 2})
    assert isinstance(prompt, Prompt)
    assert (prompt.ids, prompt.adapter, prompt.salt) == ([5, 6, 7], "ada", "s")
    assert len(subject.keys(prompt, 1)) == 3
    assert await outcome({"user": "x"}) == Reason.BAD_REQUEST
    assert await outcome({"user": "y"}) == Reason.NO_TOKENIZER
    assert await outcome({"user": "z"}) == Reason.NO_TOKENIZER
    assert await outcome({"messages": []}) == Reason.BAD_REQUEST
    assert len(engine.asked) == 3
    ids = await prompt_of(subject, "/v1/completions", b'{"prompt": [1, 2]}')
    assert isinstance(ids, Prompt)
    assert len(engine.asked) == 3, "ids are known without asking"


async def test_metrics_of_pools_that_ask_engines() -> None:
    engine = Engine((200, {"token_ids": [5]}), (503, {}))
    asking, plain = make_pool(name="asking"), make_pool(name="plain")
    asking.prompter = Prompter(Options(tokenizer="", models=("m",)), None, None, remote=remote(engine))
    metrics = Metrics("test")
    add_families(metrics, [asking, plain])
    for name in ("a", "a", "b"):
        await prompt_of(asking.prompter, CHAT, json.dumps({"messages": U, "user": name}).encode())
    lines = metrics.render()[0].decode().splitlines()
    shown = sorted(line for line in lines if line.startswith("kvcar_remote_tokenizer_"))
    expected = {"asked": 2.0, "failed": 1.0, "known": 1.0}
    assert shown == [f'kvcar_remote_tokenizer_{name}_total{{pool="asking"}} {n}' for name, n in expected.items()]


async def test_over_http() -> None:
    async def render(request: web.Request) -> web.Response:
        fields = await request.json()
        if fields.get("user") == "elsewhere":
            raise web.HTTPTemporaryRedirect("/elsewhere")
        return web.json_response({"token_ids": [len(fields["messages"])] * fields.get("n", 1)})

    reached: list[str] = []

    async def elsewhere(request: web.Request) -> web.Response:
        reached.append(request.path)
        return web.json_response({"token_ids": [1]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions/render", render)
    app.router.add_post("/elsewhere", elsewhere)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    subject = RemoteTokenizer([f"http://127.0.0.1:{port}"], max_answer=100)
    try:
        with pytest.raises(RemoteError, match="over 100 bytes"):
            await subject.ids(body({"messages": U, "n": 50}), 20.0)
        assert await subject.ids(body({"messages": U}), 20.0) == b"\1\0\0\0", "the engine is not at fault"
        away = RemoteTokenizer([f"http://127.0.0.1:{port}"])
        with pytest.raises(RemoteError, match="HTTP 307"):
            await away.ids(body({"messages": U, "user": "elsewhere"}), 20.0)
        await away.close()
        assert not reached
        with pytest.raises(RemoteError):
            await subject.ids(body({"prompt": "a"}, "/v1/completions"), 20.0)
    finally:
        await subject.close()
        await runner.cleanup()
    gone = RemoteTokenizer([f"http://127.0.0.1:{port}"])
    with pytest.raises(RemoteError):
        await gone.ids(body({"messages": U}), 20.0)
    await gone.close()
