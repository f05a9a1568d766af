"""Facts read from pages and streams that no emulated engine brings about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from extproc.admin.server import AdminServer, tls_context
from extproc.config import parse as parse_config
from extproc.doctor import DoctorOptions, engine_page
from extproc.doctor.context import Context
from extproc.doctor.events import Stream, anchored, decoded, replay
from extproc.doctor.listen import Heard, StreamFacts
from extproc.doctor.ports import Port
from kvindex.directory import StreamReport
from kvindex.fleet import Instance, StreamEndpoint
from kvindex.index import TierBlocks
from kvindex.link import LinkStatus
from kvindex.sync import StreamStatus

PAGE = """
# HELP vllm:cache_config_info Information
vllm:cache_config_info{block_size="32",hash_block_size="16",enable_prefix_caching="False",engine="0"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 10.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 5e3
vllm:lora_requests_info{running_lora_adapters="a, b",waiting_lora_adapters=""} 1.0
vllm:engine_sleep_state{engine="1",sleep_state="discard_all"} 1.0
vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1.0
vllm:broken{engine="0"} x
other_metric 3
"""


def test_a_page() -> None:
    page = engine_page.parse(PAGE)
    assert (page.kind, page.block_sizes(), page.prefix_caching, page.sleeping) == ("vllm", (16, 32), False, True)
    assert page.ranks == {0, 1}
    assert page.prompt_tokens == {0: 10.0, 1: 5000.0}
    assert page.adapters == {"a", "b"}
    assert engine_page.parse("nothing of ours") == engine_page.EnginePage()


def stream(status: StreamStatus, **endpoint: Any) -> Stream:
    instance = {"name": "e", "address": "127.0.0.1:1"}
    config = parse_config(
        yaml.safe_dump({"pools": [{"name": "p", "models": ["m"], "tokenizer": "/m", "instances": [instance]}]})
    )
    followed = StreamEndpoint(0, "tcp://127.0.0.1:2", **endpoint)
    one = Instance("e", "127.0.0.1:1", events=(followed,))
    report = StreamReport("e", 0, "", followed.events, followed.replay, "auto", "live", status=status,
                          link=LinkStatus(connected=True))  # fmt: skip
    facts = StreamFacts(one, followed, Port("open"), Port("open"), report, Heard())
    return Stream(Context(config, DoctorOptions()), config.pools[0], facts, None, None)


@pytest.mark.parametrize(
    ("judge", "status", "found"),
    [
        (decoded, {}, []),
        (decoded, {"skipped": {"attention_kind": 4}}, []),
        (decoded, {"skipped": {"unknown_tag": 4}}, ["WARNING events.skipped"]),
        (decoded, {"skipped": {"block_size": 4}}, ["ERROR events.block_size"]),
        (anchored, {"known": 100}, []),
        (anchored, {"known": 100, "unanchored": 50}, ["NOTE events.unanchored"]),
        (anchored, {"known": 100, "unanchored": 51}, ["WARNING events.unanchored"]),
        (replay, {"replays": 1, "synchronized": True, "complete": True}, []),
        (replay, {"replays": 1, "synchronized": True}, ["NOTE events.incomplete"]),
        (replay, {"replays": 2, "replay_failures": 1}, []),
        (replay, {"replays": 2, "replay_failures": 2}, ["WARNING events.replay_silent"]),
    ],
)
async def test_streams(judge: Any, status: dict[str, Any], found: list[str]) -> None:
    one = stream(StreamStatus(blocks=TierBlocks(1, 0, 0), **status), replay="tcp://127.0.0.1:3")
    assert [f"{item.severity.name} {item.id}" async for item in judge(one)] == found


async def test_an_admin_port_with_tls_is_asked_by_https() -> None:
    """With the certificate that the configuration names, whoever signed it."""

    async def page(request: web.Request) -> web.Response:
        return web.json_response({"token": request.headers["X-Internal-Token"]})

    app = web.Application()
    app.router.add_get("/status", page)
    tls = Path(__file__).parents[1] / "extproc" / "tls"
    files = {"cert": str(tls / "server.pem"), "key": str(tls / "server.key")}
    server = AdminServer(app, "127.0.0.1", 0, tls=tls_context(files["cert"], files["key"], None))
    admin = {"address": f"127.0.0.1:{await server.start()}", "tls": files, "token": "a-long-secret"}
    pool = {"name": "p", "models": ["m"], "tokenizer": "/m"}
    context = Context(parse_config(yaml.safe_dump({"admin": admin, "pools": [pool]})), DoctorOptions())
    try:
        answer = await context.kvcar("/status")
        assert answer.json() == {"token": "a-long-secret"}, answer
    finally:
        await context.close()
        await server.stop()
