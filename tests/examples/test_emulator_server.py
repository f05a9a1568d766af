"""The emulated engine over HTTP, in this process: answers, usage, streaming, errors, metrics, ranks, switches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgpack
import pytest
import zmq
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families

from examples.emulator.__main__ import TOKENIZER, configure
from examples.emulator.server import Server
from examples.emulator.text import TextModel, load

DEADLINE = 10.0
SYSTEM = (
    "You are a helpful assistant who answers in one line and names the section of the book that it took it from. " * 3
)
QUICK = ("--prefill-overhead-ms", "0.1", "--prefill-rate", "1e6", "--decode-rate", "20000", "--blocks", "256")


@pytest.fixture(scope="module")
def text() -> TextModel:
    return load(TOKENIZER)


class Client:
    def __init__(self, server: Server, ready: dict[str, Any], session: aiohttp.ClientSession) -> None:
        self.server = server
        self.ready = ready
        self.session = session

    async def post(self, path: str, body: Any, *, status: int = 200, **headers: str) -> Any:
        data = body if isinstance(body, bytes) else json.dumps(body)
        names = {key.replace("_", "-"): value for key, value in headers.items()}
        async with self.session.post(self.ready["url"] + path, data=data, headers=names) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json()

    async def get(self, path: str, *, status: int = 200) -> str:
        async with self.session.get(self.ready["url"] + path) as answer:
            assert answer.status == status
            return await answer.text()

    async def chat(self, *texts: str, status: int = 200, headers: dict[str, str] | None = None, **fields: Any) -> Any:
        """A chat of system, user, assistant, user, ... texts."""
        roles = ["system", *(["user", "assistant"] * len(texts))]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        body = {"model": "demo", "messages": messages, "max_tokens": 4, **fields}
        return await self.post("/v1/chat/completions", body, status=status, **(headers or {}))

    async def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Decoded events of a streamed answer; it must end with [DONE]."""
        async with self.session.post(self.ready["url"] + path, json={**body, "stream": True}) as answer:
            assert answer.status == 200
            assert answer.content_type == "text/event-stream"
            raw = (await answer.read()).decode()
        events = raw.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    async def metric(self, name: str, **labels: str) -> float:
        for family in text_string_to_metric_families(await self.get("/metrics")):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return float(sample.value)
        raise KeyError(name)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not condition():  # noqa: ASYNC110 - the server under test has no event for it
                await asyncio.sleep(0.002)


@asynccontextmanager
async def running(text: TextModel, *flags: str) -> AsyncIterator[Client]:
    config, _ = configure([*QUICK, *flags])
    server = Server(config, text)
    ready = await server.start()
    try:
        timeout = aiohttp.ClientTimeout(total=DEADLINE)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            yield Client(server, ready, session)
    finally:
        await server.stop()


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_usage_turn_by_turn(text: TextModel) -> None:
    async with running(text) as client:
        first = await client.chat(SYSTEM, "What is the capital of France?", max_tokens=20, return_token_ids=True)
        prompt, answer = first["prompt_token_ids"], first["choices"][0]["token_ids"]
        assert first["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": 20,
            "total_tokens": len(prompt) + 20,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert first["choices"][0]["finish_reason"] == "length"
        assert first["choices"][0]["message"]["content"] == text.decode(answer)

        again = await client.chat(SYSTEM, "What is the capital of France?", max_tokens=20, return_token_ids=True)
        assert cached(again) == (len(prompt) - 1) // 16 * 16
        assert again["choices"] == first["choices"], "the answer is the prompt's own"

        reply = first["choices"][0]["message"]["content"]
        second = await client.chat(
            SYSTEM, "What is the capital of France?", reply, "And of Spain?", return_token_ids=True
        )
        assert second["prompt_token_ids"][: len(prompt) + 20] == prompt + answer
        assert cached(second) == (len(prompt) + 19) // 16 * 16, "19 of the 20 generated tokens were computed"

        other = await client.chat(SYSTEM, "Who wrote it?", return_token_ids=True)
        shared = next(i for i, (a, b) in enumerate(zip(prompt, other["prompt_token_ids"], strict=False)) if a != b)
        assert cached(other) == shared // 16 * 16


async def test_a_stream_gives_the_same_answer(text: TextModel) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": 200}
    async with running(text) as client:
        plain = await client.post("/v1/chat/completions", {**body, "return_token_ids": True})
        options = {"stream_options": {"include_usage": True}, "return_token_ids": True}
        events = await client.stream("/v1/chat/completions", {**body, **options})
        bare = await client.stream("/v1/chat/completions", body)
    assert plain["choices"][0]["finish_reason"] == "stop"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[0]["prompt_token_ids"] == plain["prompt_token_ids"]
    rows = [event["choices"][0] for event in events[1:-1]]
    assert "".join(row["delta"]["content"] for row in rows) == plain["choices"][0]["message"]["content"]
    assert [token for row in rows for token in row["token_ids"]] == plain["choices"][0]["token_ids"]
    assert [row["finish_reason"] for row in rows] == [None] * (len(rows) - 1) + ["stop"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"] == len(rows)
    assert not any("usage" in event for event in bare)
    assert len({event["id"] for event in events}) == 1


async def test_completions(text: TextModel) -> None:
    async with running(text) as client:
        ids = list(range(100, 140))
        body = {"model": "demo", "prompt": ids, "max_tokens": 3, "return_token_ids": True}
        first = await client.post("/v1/completions", body)
        (choice,) = first["choices"]
        assert choice["prompt_token_ids"] == ids
        assert choice["text"] == text.decode(choice["token_ids"])
        assert cached(await client.post("/v1/completions", body)) == 32

        events = await client.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}})
        assert events[0]["choices"][0]["prompt_token_ids"] == ids
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == choice["text"]
        assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}

        words = await client.post("/v1/completions", {"prompt": "Hello world", "return_token_ids": True})
        assert words["choices"][0]["prompt_token_ids"] == text.encode("Hello world", add_special_tokens=True)
        assert words["usage"]["completion_tokens"] == 16, "the default"

        both = await client.post("/v1/completions", {"prompt": [ids, ids[:20]], "n": 2, "max_tokens": 2})
        assert [row["index"] for row in both["choices"]] == [0, 1, 2, 3]
        assert both["usage"]["prompt_tokens"] == 60
        assert both["usage"]["completion_tokens"] == 8

        for keep, side, expected in ((10, "left", ids[-10:]), (10, "right", ids[:10]), (-1, "left", ids)):
            cut = {"truncate_prompt_tokens": keep, "truncation_side": side}
            answer = await client.post("/v1/completions", {**body, **cut})
            assert answer["choices"][0]["prompt_token_ids"] == expected


# path, body, status, part of the message, param
ERRORS: list[tuple[str, Any, int, str, str | None]] = [
    ("/v1/chat/completions", b"{", 400, "JSON decode error", None),
    ("/v1/chat/completions", b"\xff\xfe", 400, "JSON decode error", None),
    ("/v1/chat/completions", b"[" * 100_000, 400, "JSON decode error", None),
    ("/v1/chat/completions", b"[]", 400, "dictionary", None),
    ("/v1/chat/completions", {}, 400, "messages", "messages"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages", "messages"),
    ("/v1/chat/completions", {"model": "gpt", "messages": []}, 404, "`gpt` does not exist", "model"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, 400, "UTF-8", "prompt"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "max_tokens": 0},
        400,
        "at least 1",
        "max_tokens",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "cache_salt": ""},
        400,
        "cache_salt",
        "cache_salt",
    ),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": "2"}, 400, "type int", "n"),
    ("/v1/completions", {"prompt": ""}, 400, "empty", "prompt"),
    ("/v1/completions", {"prompt": []}, 400, "non-empty", "prompt"),
    ("/v1/completions", {"prompt": [True]}, 400, "list of either", "prompt"),
    ("/v1/completions", {"prompt": [[1, -1]]}, 400, "out of the vocabulary", "prompt"),
    ("/v1/completions", {"prompt": [999_999]}, 400, "out of the vocabulary", "prompt"),
    ("/v1/completions", {"prompt": [1] * 5000}, 400, "maximum context length is 4080 tokens", "input_tokens"),
    ("/v1/completions", {"prompt": [1] * 80, "max_tokens": 4001}, 400, "4001 output tokens", "max_tokens"),
    ("/tokenize", {}, 400, "required", "prompt"),
    ("/tokenize", {"model": "gpt", "prompt": "a"}, 404, "gpt", "model"),
    ("/emulator/control", {"explode": 1}, 400, "unknown key", None),
    ("/emulator/control", b"nonsense", 400, "Expecting value", None),
    ("/emulator/lookup", {"token_ids": "x"}, 400, "token_ids", "token_ids"),
]


async def test_errors_have_the_form_of_vllm(text: TextModel) -> None:
    async with running(text) as client:
        for path, body, status, message, param in ERRORS:
            answer = await client.post(path, body, status=status)
            assert set(answer["error"]) == {"message", "type", "param", "code"}, path
            assert message in answer["error"]["message"]
            assert (answer["error"]["code"], answer["error"]["param"]) == (status, param)
        assert cached(await client.chat(SYSTEM, "hi")) == 0, "and it goes on working"


async def test_side_endpoints(text: TextModel) -> None:
    async with running(text, "--lora", "ada", "--lora", "adb") as client:
        await client.get("/health")
        cards = json.loads(await client.get("/v1/models"))["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [("demo", None), ("ada", "demo"), ("adb", "demo")]
        assert json.loads(await client.get("/version")) == {"version": "0.32.0"}
        assert json.loads(await client.get("/load")) == {"server_load": 0}

        answer = await client.chat(SYSTEM, "hi", return_token_ids=True)
        body = {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hi"}]}
        tokenized = await client.post("/tokenize", {**body, "return_token_strs": True})
        assert tokenized["tokens"] == answer["prompt_token_ids"]
        assert tokenized["count"] == len(tokenized["token_strs"]) == answer["usage"]["prompt_tokens"]
        assert tokenized["max_model_len"] == 4080
        rendered = await client.post("/v1/chat/completions/render", body)
        assert rendered["token_ids"] == answer["prompt_token_ids"]
        plain = await client.post("/tokenize", {"prompt": "Hello"})
        assert plain["tokens"] == text.encode("Hello", add_special_tokens=True)


async def test_salt_adapters_and_skipped_reads(text: TextModel) -> None:
    async with running(text, "--lora", "ada") as client:
        await client.chat(SYSTEM, "hi")
        full = cached(await client.chat(SYSTEM, "hi"))
        assert full > 0
        assert cached(await client.chat(SYSTEM, "hi", cache_salt="s")) == 0
        assert cached(await client.chat(SYSTEM, "hi", cache_salt="s")) == full
        assert cached(await client.chat(SYSTEM, "hi", cache_salt="t")) == 0
        answer = await client.chat(SYSTEM, "hi", model="ada")
        assert (answer["model"], cached(answer)) == ("ada", 0)
        assert cached(await client.chat(SYSTEM, "hi", model="ada")) == full
        assert cached(await client.chat(SYSTEM, "hi", prompt_logprobs=1)) == 0
        extra = [block["extra"] for block in json.loads(await client.get("/emulator/state"))["ranks"][0]["gpu"]]
        assert {tuple(keys) for keys in extra} == {(), ("s",), ("t",), ("ada",)}


async def test_metrics(text: TextModel) -> None:
    async with running(text, "--block-size", "32") as client:
        total = 0
        for _ in range(2):
            total += (await client.chat(SYSTEM, "hi"))["usage"]["prompt_tokens"]
        base = {"engine": "0", "model_name": "demo"}
        hits = (total // 2 - 1) // 32 * 32
        for name, value in {
            "vllm:prompt_tokens_total": total,
            "vllm:generation_tokens_total": 8,
            "vllm:prefix_cache_queries_total": total,
            "vllm:prefix_cache_hits_total": hits,
            "vllm:num_requests_running": 0,
            "vllm:num_requests_waiting": 0,
            "vllm:kv_cache_usage_perc": 0,
        }.items():
            assert await client.metric(name, **base) == value, name
        info = {"block_size": "32", "num_gpu_blocks": "256", "enable_prefix_caching": "True", "engine": "0"}
        assert await client.metric("vllm:cache_config_info", **info) == 1
        assert await client.metric("vllm:request_success_total", finished_reason="length", **base) == 2


async def test_load_gauges_while_requests_run_and_wait(text: TextModel) -> None:
    async with running(text, "--max-seqs", "1", "--decode-rate", "20") as client:
        engine = client.server.ranks[0].engine
        tasks = [asyncio.create_task(client.chat("s", f"hi {n}", max_tokens=200, ignore_eos=True)) for n in range(3)]
        await client.until(lambda: len(engine.running) == 1 and len(engine.waiting) == 2)
        assert await client.metric("vllm:num_requests_running") == 1
        assert await client.metric("vllm:num_requests_waiting") == 2
        assert await client.metric("vllm:kv_cache_usage_perc") > 0
        for task in tasks:
            task.cancel()
        await client.until(lambda: not engine.running and not engine.waiting)
        assert await client.metric("vllm:kv_cache_usage_perc") == 0
        assert await client.metric("vllm:request_success_total", finished_reason="abort") == 3


async def test_reset(text: TextModel) -> None:
    async with running(text) as client:
        await client.chat(SYSTEM, "hi")
        assert await client.post("/reset_prefix_cache", {}) == {"success": True}
        assert cached(await client.chat(SYSTEM, "hi")) == 0


async def test_ranks(text: TextModel) -> None:
    async with running(text, "--dp", "2") as client:
        ports = client.ready["events_ports"]
        assert ports[1] == ports[0] + 1
        assert client.ready["replay_ports"][1] == client.ready["replay_ports"][0] + 1
        for rank, expected in (("0", 0), ("1", 0), ("1", 1), ("0", 1)):
            answer = await client.chat(SYSTEM, "hi", headers={"X-data-parallel-rank": rank})
            assert (cached(answer) > 0) == bool(expected)
        await client.chat(SYSTEM, "hi", headers={"X-data-parallel-rank": "2"}, status=400)
        for number in range(4):
            await client.chat("balanced", f"request {number}")
        served = json.loads(await client.get("/emulator/requests"))["requests"]
        assert [row["rank"] for row in served] == [0, 1, 1, 0, 0, 1, 0, 1]
        assert await client.metric("vllm:prompt_tokens_total", engine="1") > 0


async def test_events_are_out_before_the_answer_and_tell_the_truth(text: TextModel) -> None:
    context = zmq.asyncio.Context()
    async with running(text, "--wire", "vllm-0.23", "--host-blocks", "64", "--topic", "kv") as client:
        sub = context.socket(zmq.SUB)
        sub.setsockopt(zmq.LINGER, 0)
        sub.setsockopt(zmq.SUBSCRIBE, b"kv")
        sub.connect(client.ready["events_endpoint"])
        try:
            async with asyncio.timeout(DEADLINE):
                while not await sub.poll(20):
                    client.server.ranks[0].publisher.publish([])
            answer = await client.chat(SYSTEM, "hi", max_tokens=1, return_token_ids=True)
            prompt = answer["prompt_token_ids"]
            blocks = len(prompt) // 16
            stored: dict[str, list[Any]] = {"GPU": [], "CPU": []}
            async with asyncio.timeout(DEADLINE):
                while len(stored["CPU"]) < blocks:
                    payload = msgpack.unpackb((await sub.recv_multipart())[2])
                    for event in payload[1]:
                        stored[event[6]].append(event)
            (gpu,) = stored["GPU"]
            assert gpu[3] == prompt[: 16 * blocks]
            state = json.loads(await client.get("/emulator/state"))["ranks"][0]
            assert [block["hash"] for block in state["gpu"]] == gpu[1]
            assert [token for block in state["gpu"] for token in block["tokens"]] == gpu[3]
            assert [block["parent"] for block in state["gpu"]] == [None, *gpu[1][:-1]]
            assert {block["hash"] for block in state["host"]} == {event[1][0] for event in stored["CPU"]}
            assert (state["gpu_blocks"], state["host_blocks"]) == (blocks, blocks)
            (found,) = (await client.post("/emulator/lookup", {"token_ids": prompt}))["ranks"]
            assert found == {"rank": 0, "gpu_blocks": (len(prompt) - 1) // 16, "host_blocks": 0}
            salted = {"token_ids": prompt, "cache_salt": "s"}
            assert (await client.post("/emulator/lookup", salted))["ranks"][0]["gpu_blocks"] == 0
            brief = json.loads(await client.get("/emulator/state?blocks=0"))["ranks"][0]
            assert "gpu" not in brief
        finally:
            sub.close()
    context.term()


async def test_request_switches(text: TextModel) -> None:
    async with running(text, "--fault", "fail_requests=1", "--fault", "not_ready") as client:
        await client.get("/health", status=503)
        await client.chat("s", "hi", status=500)
        await client.chat("s", "hi")
        faults = await client.post("/emulator/control", {"not_ready": False, "hang": True})
        assert (faults["hang"], faults["fail_requests"]) == (True, 0)
        await client.get("/health")
        hung = asyncio.create_task(client.chat("s", "hello"))
        await client.until(lambda: len(client.server.ranks[0].engine.waiting) == 1)
        assert not (await asyncio.wait([hung], timeout=0.05))[0]
        await client.post("/emulator/control", {"hang": False})
        assert (await hung)["usage"]["completion_tokens"] == 4


async def test_restart_loses_cache_numbers_and_running_requests(text: TextModel) -> None:
    async with running(text, "--decode-rate", "20") as client:
        await client.chat(SYSTEM, "hi", max_tokens=1)
        rank = client.server.ranks[0]
        assert rank.publisher.sequence == 1
        task = asyncio.create_task(client.chat(SYSTEM, "go on", max_tokens=200, ignore_eos=True))
        await client.until(lambda: bool(rank.engine.running))
        await client.post("/emulator/control", {"restart": True})
        with pytest.raises(aiohttp.ClientError):
            await task
        assert (rank.publisher.sequence, rank.publisher.buffered) == (0, [])
        assert cached(await client.chat(SYSTEM, "hi", max_tokens=1)) == 0
        assert rank.publisher.buffered == [0]


async def test_a_client_that_leaves_frees_its_blocks(text: TextModel) -> None:
    async with running(text, "--decode-rate", "50") as client:
        engine = client.server.ranks[0].engine
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 500, "ignore_eos": True, "stream": True}
        async with client.session.post(client.ready["url"] + "/v1/chat/completions", json=body) as answer:
            await answer.content.readline()
            assert len(engine.running) == 1
            answer.close()
        await client.until(lambda: not engine.running)
        assert engine.pool.usage == 0
        assert engine.counters.finished["abort"] == 1
