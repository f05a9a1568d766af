"""What a client sends and kvcar must not see, or must not believe, through a real Envoy. Routing headers in every way
of attaching: test_envoy_surfaces.py."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from extproc.envoy_config import BodyMode
from extproc.envoy_config.filters import CREDENTIALS
from extproc.messages import HttpRequest, Outcome
from tests.real.harness import EchoUpstream, echo_upstream
from tests.real.test_envoy_surfaces import CHAT, ROUTING_HEADERS, check_no_steering, running, steering

pytestmark = pytest.mark.real
SECRET = "an-unmistakable-secret"
MODES = [BodyMode.BUFFERED, BodyMode.FULL_DUPLEX]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[EchoUpstream]]:
    """Three engines, and one that is none."""
    with ExitStack() as stack:
        yield [stack.enter_context(echo_upstream()) for _ in range(4)]


@pytest.mark.parametrize("mode", MODES)
async def test_credentials_pass_kvcar_by(mode: BodyMode, servers: list[EchoUpstream], tmp_path: Path) -> None:
    engines = servers[:3]
    async with running(engines, tmp_path, body_mode=mode) as surface:
        seen: list[HttpRequest] = []
        decide = surface.decider.decide

        async def look(request: HttpRequest) -> Outcome:
            seen.append(request)
            return await decide(request)

        surface.decider.decide = look  # type: ignore[method-assign]
        surface.decider.choice = (engines[0].address,)
        await surface.post({**dict.fromkeys(CREDENTIALS, SECRET), "x-mine": "1"})
        (request,) = seen
        assert request.headers["x-mine"] == "1"
        assert SECRET not in repr(request)
        arrived = engines[0].requests[-1]["headers"]
        assert [arrived.get(name) for name in CREDENTIALS] == [SECRET] * len(CREDENTIALS)
        assert SECRET not in repr(await asyncio.to_thread(surface.envoy.access_log))


@pytest.mark.parametrize("mode", MODES)
async def test_an_endpoint_picker_is_not_steered(mode: BodyMode, servers: list[EchoUpstream], tmp_path: Path) -> None:
    """As an InferencePool has it: no choice is an error, and no header of a client makes one."""
    *engines, outsider = servers
    options: dict[str, Any] = {"endpoint_picker": True, "body_mode": mode}
    async with running(engines, tmp_path, **options) as surface:
        for turn in range(3):
            surface.decider.choice = (engines[turn].address,)
            served, _ = await surface.post(steering(engines[turn - 1].address))
            assert served == engines[turn].address
            arrived = engines[turn].requests[-1]["headers"]
            assert {arrived[name] for name in ROUTING_HEADERS if name in arrived} == {engines[turn].address}
        surface.decider.choice = ()
        for named in (*engines, outsider):
            hints = {
                "x-gateway-destination-endpoint-subset": named.address,
                "test-epp-endpoint-selection": named.address,
            }
            async with surface.http.post(CHAT, headers={**steering(named.address), **hints}) as answer:
                assert answer.status == 503
        assert outsider.requests == []
        await surface.server.stop(0)
        await asyncio.to_thread(surface.envoy.wait_healthy, "extproc", 0)
        await check_no_steering(surface, engines, outsider)
