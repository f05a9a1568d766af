"""Who is registered: bodies, conflicts, ranks that come and go; the registry against a model of itself."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from extproc.registry import (
    Context,
    Registration,
    Registry,
    Rejected,
    Removed,
    Worker,
    instance_of,
    parse_registration,
    publisher_of,
    services_page,
    workers_page,
)
from kvindex.fleet import PUSHED, StreamEndpoint

CONTEXT = Context("m")


def given(name: str = "e1", rank: int = 0, port: int = 5557, **more: Any) -> Registration:
    model = more.pop("model", "m")
    tenant = more.pop("tenant", "default")
    more.setdefault("endpoint", f"tcp://10.0.0.{name[-1]}:{port + rank}")
    return Registration(Worker(Context(model, tenant), name), model, rank, **more)


BODY = {"instance_id": "e1", "modelname": "m", "type": "vLLM", "block_size": 128, "dp_rank": 0}
LONG = "x" * 1001


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {"endpoint": "", "block_size": 128}),
        ({"endpoint": "tcp://10.0.0.1:1", "replay_endpoint": "tcp://10.0.0.1:2"},
         {"endpoint": "tcp://10.0.0.1:1", "replay": "tcp://10.0.0.1:2"}),
        ({"medium_endpoints": {"npu": "tcp://10.0.0.1:1", "cpu": "tcp://10.0.0.1:2", "disk": ""}},
         {"media": {"npu": "tcp://10.0.0.1:1", "cpu": "tcp://10.0.0.1:2"}}),
        ({"medium_endpoints": {"XPU": "tcp://10.0.0.1:1"}}, {"media": {"npu": "tcp://10.0.0.1:1"}}),
        ({"dp_rank": None, "block_size": None, "endpoint": None, "tenant_id": None, "lora_name": None},
         {"dp_rank": 0, "block_size": None}),
        ({"type": "sglang", "store_backend": "Memcache", "additionalsalt": "s", "node_id": "n", "lora_name": "l"},
         {"kind": "sglang", "store_backend": "Memcache", "salt": "s", "node_id": "n", "lora_name": "l"}),
        ({"type": "Mooncake", "endpoint": "tcp://10.0.0.9:1"}, {"kind": "Mooncake"}),
        ({"address": "10.0.0.1:8000", "role": "prefill", "dp_size": 2, "topic": "kv"},
         {"address": "10.0.0.1:8000", "role": "prefill", "dp_size": 2, "topic": "kv"}),
        ({"unheard_of": 1}, {}),
        ({"instance_id": None}, "instance_id is missing"),
        ({"modelname": ""}, "modelname is missing"),
        ({"modelname": 5}, "modelname must be a text"),
        ({"instance_id": LONG}, "at most 1000"),
        ({"type": "TGI"}, "write vLLM, SGLang"),
        ({"dp_rank": -1}, "dp_rank"),
        ({"dp_rank": True}, "dp_rank"),
        ({"dp_rank": "0"}, "dp_rank"),
        ({"block_size": 0}, "block_size"),
        ({"dp_rank": 2, "dp_size": 2}, "not below dp_size"),
        ({"endpoint": "10.0.0.1:1"}, "has no transport"),
        ({"endpoint": "tcp://*:5557"}, "write the engine's host"),
        ({"replay_endpoint": "tcp://10.0.0.1:2"}, "replay"),
        ({"endpoint": "tcp://10.0.0.1:1", "replay_endpoint": "tcp://10.0.0.1:1"}, "two sockets"),
        ({"medium_endpoints": {"tape": "tcp://10.0.0.1:1"}}, "'tape' is none of"),
        ({"medium_endpoints": {"cpu": 5}}, "object of texts"),
        ({"medium_endpoints": []}, "object of texts"),
        ({"medium_endpoints": {"cpu": "tcp://*:1"}}, "write the engine's host"),
        ({"address": "10.0.0.1"}, "has no port"),
        ({"address": "engine-1.llm:8000"}, "Envoy needs an IP address here"),
        ({"role": "leader"}, "'leader' is none of"),
        ({"type": "Mooncake"}, "cannot be pushed"),
    ],
    ids=str,
)  # fmt: skip
def test_bodies(change: dict[str, Any], expected: Any) -> None:
    if isinstance(expected, dict):
        found = parse_registration({**BODY, **change}, "motor")
        assert {key: getattr(found, key) for key in expected} == expected
        return
    for form, status in (("motor", 422), ("mooncake", 400)):
        with pytest.raises(Rejected, match=expected) as caught:
            parse_registration({**BODY, **change}, form)
        assert caught.value.status == status


@pytest.mark.parametrize("body", [None, 5, [], "x"])
def test_no_object(body: object) -> None:
    with pytest.raises(Rejected, match="must be an object"):
        parse_registration(body, "motor")


TWO = {"dp_size": 2}


@pytest.mark.parametrize(
    ("before", "then", "motor", "mooncake"),
    [
        # True: something changed. False: taken as a repetition. Words: refused.
        ([given()], given(), False, False),
        ([given()], given(rank=1), True, True),
        ([given()], given(port=6000), True, "unregister it first"),
        ([given()], given(replay="tcp://10.0.0.1:9"), True, "unregister it first"),
        ([given(block_size=16)], given(block_size=32), True, "unregister it first"),
        ([given(address="10.0.0.1:80")], given(address="10.0.0.1:81"), True, "unregister it first"),
        ([given(), given(rank=1)], given(address="10.0.0.1:80"), "which all ranks share", "unregister it first"),
        ([given(**TWO), given(rank=1, **TWO)], given(rank=1, dp_size=3), "which all ranks share",
         "unregister it first"),
        ([given()], given(rank=1, block_size=16), "which all ranks share", "which all ranks share"),
        ([given()], given(rank=1, kind="Mooncake"), "which all ranks share", "which all ranks share"),
        ([given(block_size=16)], given("e2", block_size=32), "has blocks of 16", "has blocks of 16"),
        ([given(block_size=16)], given("e2"), True, True),
        ([given()], given("e2", endpoint=given().endpoint), "registered by e1 rank 0", "registered by e1 rank 0"),
        ([given(replay="tcp://h:1")], given("e2", endpoint="tcp://h:1"), "registered by e1", "registered by e1"),
        ([given()], given(rank=1, endpoint=given().endpoint), "registered by e1 rank 0", "registered by e1 rank 0"),
        ([given(endpoint="")], given("e2", endpoint=""), True, True),
        ([given()], given(model="n", tenant="t"), True, True),  # another index: nothing in common
    ],
    ids=range(17),
)  # fmt: skip
def test_again_and_conflicts(before: list[Registration], then: Registration, motor: Any, mooncake: Any) -> None:
    for form, expected, status in (("motor", motor, 409), ("mooncake", mooncake, 400)):
        registry = Registry(form=form)
        for one in before:
            registry.register(one, 0.0)
        if isinstance(expected, bool):
            assert registry.register(then, 1.0) is expected
            assert registry.ranks(then.worker)[then.dp_rank] == then
            continue
        with pytest.raises(Rejected, match=expected) as caught:
            registry.register(then, 1.0)
        assert (caught.value.status, caught.value.reason) == (status, "invalid_registration")
        assert list(registry) == before


def test_full() -> None:
    registry = Registry(max_ranks=1)
    registry.register(given(), 0.0)
    with pytest.raises(Rejected, match="the bound") as caught:
        registry.register(given("e2"), 0.0)
    assert caught.value.status == 503
    registry.register(given(), 0.0)


@pytest.mark.parametrize(
    ("asked", "gone"),
    [
        ({"dp_rank": 1}, ["e1|default|1"]),
        ({}, ["e1|default|0", "e1|default|1", "e1|default|0"]),
        ({"model": "m"}, ["e1|default|0", "e1|default|1"]),
        ({"tenant": "t"}, ["e1|t|0"]),
        ({"dp_rank": 2}, None),
        ({"model": "x"}, None),
        ({"tenant": "x"}, None),
    ],
    ids=str,
)
def test_unregister(asked: dict[str, Any], gone: list[str] | None) -> None:
    registry = Registry()
    for one in (given(), given(rank=1), given(model="n"), given(tenant="t")):
        registry.register(one, 0.0)
    if gone is None:
        with pytest.raises(Rejected, match="is not registered") as caught:
            registry.unregister("e1", **asked)
        assert caught.value.status == 404
        assert len(registry) == 4
        return
    assert [str(one) for one in registry.unregister("e1", **asked)] == gone
    assert len(registry) == 4 - len(gone)


def test_expiry() -> None:
    registry = Registry()
    registry.register(given(), 0.0)
    registry.register(given(rank=1), 5.0)
    registry.register(given("e2", model="n"), 0.0)

    def after(context: Context) -> float | None:
        return 10.0 if context.model == "m" else None

    assert registry.expire(10.0, after) == []
    assert registry.expire(10.1, after) == [Removed(given().worker, 0)]
    registry.register(given(rank=1), 15.0)
    assert registry.expire(25.0, after) == []
    assert len(registry.expire(1e9, after)) == 1
    assert [one.worker.instance_id for one in registry] == ["e2"]


def test_instances() -> None:
    """An instance becomes complete as its ranks come; what it says wins over the ranks seen."""
    zero, two = given(rank=0, replay="tcp://10.0.0.1:9000"), given(rank=2, kind="SGLang", topic="kv")
    found = instance_of({0: zero, 2: two}, pool="p")
    assert (found.name, found.address, found.pool, found.dp_size, found.incarnation) == ("e1", "", "p", 3, "")
    assert found.events == (
        StreamEndpoint(0, "tcp://10.0.0.1:5557", "tcp://10.0.0.1:9000", None, "auto"),
        StreamEndpoint(2, "tcp://10.0.0.1:5559", None, "kv", "sglang"),
    )
    assert instance_of({0: replace(zero, dp_size=8)}, pool="p").dp_size == 8
    by_pool = instance_of({0: zero}, pool="p", dialect="xllm", recovery="snapshot").events[0]
    assert (by_pool.dialect, by_pool.recovery) == ("xllm", "snapshot")
    assert [one.events for one in instance_of({0: given(endpoint="")}, pool="p").events] == [PUSHED]


def test_media() -> None:
    """A store beside the engine has streams of its own; a port that serves two media is followed once."""
    media = {"npu": "tcp://h:1", "cpu": "tcp://h:2", "disk": "tcp://h:3"}
    for change, expected in (
        ({}, [("tcp://h:1", ""), ("tcp://h:2", "cpu"), ("tcp://h:3", "disk")]),
        ({"disk": "tcp://h:2"}, [("tcp://h:1", ""), ("tcp://h:2", "cpu")]),
        ({"cpu": "tcp://h:1", "disk": "tcp://h:1"}, [("tcp://h:1", "")]),
    ):
        one = given(endpoint="", media={**media, **change})
        assert [(stream.events, stream.medium) for stream in instance_of({0: one}, pool="p").events] == expected
    assert publisher_of(given("pool", kind="Mooncake", endpoint="tcp://h:1")).endpoint.dialect == "mooncake"
    assert publisher_of(given("pool", rank=1, kind="Mooncake", endpoint="tcp://h:1")).name == "pool/1"


def test_pages() -> None:
    registry = Registry()
    media = {"npu": "tcp://10.0.0.1:1", "cpu": "tcp://10.0.0.1:2"}
    for one in (given(endpoint="", media=media, block_size=128), given("e2", model="n", lora_name="l")):
        registry.register(one, 0.0)
    first = {"instance_id": "e1", "model_name": "m", "tenant_id": "default", "block_size": 128,
             "endpoints": {"0": media}}  # fmt: skip
    second = {"instance_id": "e2", "model_name": "n", "tenant_id": "default", "block_size": None,
              "endpoints": {"0": "tcp://10.0.0.2:5557"}}  # fmt: skip
    assert workers_page(registry) == [first, second]
    assert workers_page(registry, model="n") == [second]
    assert workers_page(registry, model="n", tenant="t") == []
    told = services_page(registry)
    assert [(one["InstanceID"], one["DPRank"], one["Endpoint"]) for one in told] == [
        ("e1", 0, "tcp://10.0.0.1:1"), ("e2", 0, "tcp://10.0.0.2:5557")
    ]  # fmt: skip
    assert told[1]["LoraName"] == "l"


@pytest.mark.parametrize("form", ["motor", "mooncake"])
def test_random_sequences(form: str) -> None:
    """Whatever is asked in whatever order: the registry is the plain dict of what was taken, and says so everywhere."""
    rng = random.Random(f"{form} 5")
    for _ in range(60):
        registry = Registry(form=form)
        model: dict[tuple[Worker, int], Registration] = {}
        seen: dict[tuple[Worker, int], float] = {}
        for now in range(60):
            one = given(
                f"e{rng.randint(1, 3)}",
                rng.randrange(3),
                rng.choice([5557, 5557, 5558, 7000]),
                model=rng.choice("mn"),
                block_size=rng.choice([None, 16, 16, 32]),
                dp_size=rng.choice([None, None, 4]),
            )
            key = (one.worker, one.dp_rank)
            what = rng.random()
            if what < 0.6:
                try:
                    changed = registry.register(one, float(now))
                except Rejected:
                    assert model.get(key) != one
                else:
                    assert changed is (model.get(key) != one)
                    assert form == "motor" or model.get(key) in (None, one)
                    model[key], seen[key] = one, float(now)
            elif what < 0.9:
                rank, name = rng.choice([None, one.dp_rank]), rng.choice([None, one.model])
                mine = {
                    (worker, number)
                    for worker, number in model
                    if worker.instance_id == one.worker.instance_id
                    if name in (None, worker.context.model) and rank in (None, number)
                }
                try:
                    gone = registry.unregister(one.worker.instance_id, dp_rank=rank, model=name)
                except Rejected:
                    gone = []
                assert set(map(tuple, gone)) == mine
                for old in mine:
                    del model[old], seen[old]
            else:
                late = {old for old, at in seen.items() if now - at > 20}
                assert set(map(tuple, registry.expire(float(now), lambda _: 20.0))) == late
                for old in late:
                    del model[old], seen[old]
            check(registry, model)


def check(registry: Registry, model: dict[tuple[Worker, int], Registration]) -> None:
    assert {(one.worker, one.dp_rank): one for one in registry} == model
    assert len(registry) == len(model)
    page = [
        (one["instance_id"], one["model_name"], int(rank))
        for one in workers_page(registry)
        for rank in one["endpoints"]
    ]
    assert sorted(page) == sorted((worker.instance_id, worker.context.model, rank) for worker, rank in model)
    for context in {worker.context for worker, _ in model}:
        used: list[str] = []
        for worker in registry.workers(context):
            ranks = registry.ranks(worker)
            assert len({one.shared for one in ranks.values()}) == 1
            instance = instance_of(ranks, pool="p")
            assert instance.dp_size == max([*ranks, 3 if next(iter(ranks.values())).dp_size else 0]) + 1
            used += [stream.events for stream in instance.events]
        assert len(used) == len(set(used)), "one endpoint, two streams"
        sizes = {one.block_size for (worker, _), one in model.items() if worker.context == context}
        assert len(sizes - {None}) <= 1
