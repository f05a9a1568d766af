"""Dialects as tables: what stands on the wire, what comes out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from kvindex.dialects import DIALECTS, DialectOptions, wire
from kvindex.dialects.fields import MEDIA, counted_kind, tier_of
from kvindex.dialects.pushed import Push, PushDecoder, PushedEvent
from kvindex.dialects.usual import UsualForm
from kvindex.errors import DecodeError
from kvindex.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Event, Pooled, Skipped, Tier
from kvindex.hashing import content_keys, extras_bytes, pack_tokens, root_bytes
from kvindex.index import PrefixIndex
from kvindex.rolling import HASHED, stand_in
from kvindex.sync import Action, Recovery, StartReplay, StreamSync
from kvindex.walk import Walk
from tests.kvindex.casework import DATA

D, H, S = Tier.DEVICE, Tier.HOST, Tier.DISK
ALL = (D, H, S)
T8 = [1, 2, 3, 4, 5, 6, 7, 8]
P8 = pack_tokens(T8)
ENGINES = ["vllm", "sglang", "xllm", "auto", "mooncake"]


def decode(*events: Any, dialect: str = "auto", **options: Any) -> list[Event]:
    made = DIALECTS[dialect](DialectOptions(**options))
    found = made.decode(msgpack.packb([1.5, list(events), 0])).events
    objects = made.objects()
    return list(found if objects is None else objects.resolve(found))


def one(event: Any, dialect: str = "auto", **options: Any) -> Event:
    (found,) = decode(event, dialect=dialect, **options)
    return found


def stored(**changes: Any) -> dict[str, Any]:
    """A map as vLLM 0.32 sends it; a value of ... leaves the key out."""
    event = {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": None,
        "token_ids": T8,
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **changes,
    }
    return {key: value for key, value in event.items() if value is not ...}


def lost(event: Event) -> bool:
    assert isinstance(event, Skipped), event
    assert event.reason == "malformed"
    assert event.lost
    assert event.detail
    return True


# -- the two forms

PLAIN = BlockStored([11, 12], None, P8, 4)
ARRAYS = [
    # every length that vLLM 0.9.2 to 0.23 and SGLang send, and longer ones
    (["BlockStored", [11, 12], None, T8, 4], PLAIN),
    (["BlockStored", [11, 12], None, T8, 4, None], PLAIN),
    (["BlockStored", [11, 12], 10, T8, 4, None], PLAIN._replace(parent=10)),
    (["BlockStored", [11, 12], None, T8, 4, 3], PLAIN._replace(root=root_bytes(None, 3))),
    (["BlockStored", [11, 12], None, T8, 4, None, "GPU"], PLAIN),
    (["BlockStored", [11, 12], None, T8, 4, None, None], PLAIN),
    (["BlockStored", [11, 12], None, T8, 4, None, "CPU"], PLAIN._replace(tier=H)),
    (["BlockStored", [11, 12], None, T8, 4, 3, "GPU", "ada"], PLAIN._replace(root=root_bytes("ada"))),
    (["BlockStored", [11, 12], None, T8, 4, 3, "GPU", None], PLAIN._replace(root=root_bytes(None, 3))),
    (["BlockStored", [11, 12], None, T8, 4, None, "GPU", None, [None, None]], PLAIN),
    (
        ["BlockStored", [11, 12], None, T8, 4, None, "GPU", None, [["s"], None]],
        PLAIN._replace(extras=(extras_bytes(["s"]), b"")),
    ),
    (["BlockStored", [11, 12], None, T8, 4, None, "GPU", None, None, 2], PLAIN._replace(group=2)),
    (
        ["BlockStored", [11, 12], None, T8, 4, None, "GPU", None, None, 2, "full_attention", None],
        PLAIN._replace(group=2),
    ),
    (["BlockStored", [11, 12], None, T8, 4, None, "GPU", None, None, 0, None, None, "new", {"field": 1}], PLAIN),
    (["BlockStored", [11], None, [], 0, None, "CPU"], BlockStored([11], None, b"", 0, H)),
    (["BlockRemoved", [11, 12]], BlockRemoved([11, 12])),
    (["BlockRemoved", [11, 12], "CPU"], BlockRemoved([11, 12], H)),
    (["BlockRemoved", [11, 12], None, 3], BlockRemoved([11, 12], D, 3)),
    (["BlockRemoved", [], "GPU", 0, "more"], BlockRemoved([])),
    (["AllBlocksCleared"], AllBlocksCleared((D,))),
    (["AllBlocksCleared", "more"], AllBlocksCleared((D,))),
]
MAPS = [
    (stored(), PLAIN),
    (stored(parent_block_hash=10), PLAIN._replace(parent=10)),
    (stored(medium=...), PLAIN),
    (stored(medium="STORAGE", locality="LOCAL"), PLAIN._replace(tier=S)),
    (stored(extra_keys=[None, None], group_idx=1, kv_cache_spec_kind="full_attention"), PLAIN._replace(group=1)),
    (stored(session_id="s", locality="REMOTE", ownership="kvcr", what=[1, {"ever": None}]), PLAIN),
    (stored(ownership="REUSED"), PLAIN._replace(adds_copy=False)),
    (stored(ownership="reused"), PLAIN._replace(adds_copy=False)),
    (stored(origin="Reused"), PLAIN._replace(adds_copy=False)),
    (stored(origin="COMPUTED", ownership=5), PLAIN),
    (stored(token_ids=[], block_size=0, medium="CPU"), BlockStored([11, 12], None, b"", 0, H)),
    (
        stored(token_ids=..., block_size=..., lora_id=..., lora_name=..., medium="cpu"),
        BlockStored([11, 12], None, b"", 0, H),
    ),
    (stored(token_ids=None), BlockStored([11, 12], None, b"", 0)),
    (stored(block_size=...), PLAIN),
    ({"type": "BlockStored", "block_hashes": [11], "token_ids": T8[:4]}, BlockStored([11], None, P8[:16], 4)),
    ({"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU"}, BlockRemoved([11])),
    ({"type": "BlockRemoved", "block_hashes": [11], "medium": "OBJ", "group_idx": 4}, BlockRemoved([11], S, 4)),
    ({"type": "AllBlocksCleared"}, AllBlocksCleared((D,))),
    ({"type": "AllBlocksCleared", "medium": "GPU"}, AllBlocksCleared((D,))),
]


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "auto"])
@pytest.mark.parametrize(("raw", "expected"), ARRAYS + MAPS, ids=repr)
def test_events(raw: Any, expected: Event, dialect: str) -> None:
    assert one(raw, dialect) == expected


@pytest.mark.parametrize(("raw", "expected"), ARRAYS + MAPS, ids=repr)
def test_usual_messages_mean_what_the_general_way_finds(
    raw: Any, expected: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert UsualForm().decode(msgpack.packb([1.0, [raw], 0])) is not None
    monkeypatch.setattr(UsualForm, "decode", lambda form, payload: None)
    assert one(raw, "vllm") == expected


@pytest.mark.parametrize(
    "batch",
    [
        [1.0, [ARRAYS[0][0], MAPS[0][0]]],
        [1.0, [stored(backend_id="b")], 0],
        [1.0, [stored(event_type=None)], 0],
        [1.0, [stored(block_hashes=[True])], 0],
        [1.0, [stored(token_ids=[True] * 8)], 0],
        [1.0, [["Other"]], 0],
        [1.0, [ARRAYS[0][0]], 0, 0],
        {"events": []},
    ],
    ids=repr,
)
def test_what_is_no_usual_message(batch: Any) -> None:
    assert UsualForm().decode(msgpack.packb(batch)) is None


def test_forms_mix_in_one_batch() -> None:
    raw = [ARRAYS[1][0], MAPS[0][0], ARRAYS[-2][0], MAPS[-1][0]]
    assert decode(*raw) == [PLAIN, PLAIN, AllBlocksCleared(), AllBlocksCleared()]


@pytest.mark.parametrize(
    ("dialect", "walk", "caps", "recovery", "first", "clears"),
    [
        ("vllm", Walk.CASCADE, True, "history", 0, (D,)),
        ("sglang", Walk.CASCADE, True, "history", 0, (D,)),
        ("auto", Walk.CASCADE, True, "history", 0, (D,)),
        ("xllm", Walk.INTERLEAVED, False, "snapshot", 0, ALL),
        ("mooncake", Walk.CASCADE, True, "none", 1, ALL),
    ],
)
def test_what_differs(
    dialect: str, walk: Walk, caps: bool, recovery: str, first: int, clears: tuple[Tier, ...]
) -> None:
    made = DIALECTS[dialect](DialectOptions())
    assert made.name == dialect
    assert (made.walk, made.caps_last_token, made.default_recovery) == (walk, caps, recovery)
    assert made.first_sequence == first
    assert one({"type": "AllBlocksCleared"}, dialect) == AllBlocksCleared(clears)


# -- hashes

GOOD_HASHES = [[0], [-9], [2**64 - 9], [-(2**63)], [2**64 - 1], [b""], [b"\x01" * 32], [1, b"\x01", -1]]
BAD_HASHES = [None, 5, "x", {}, [1.0], [True], [1, False], [None], ["1"], [[1]], [{}], [1, 2, 3.5]]


@pytest.mark.parametrize("hashes", GOOD_HASHES, ids=repr)
def test_good_hashes(hashes: list[Any]) -> None:
    tokens = T8[:4] * len(hashes)
    event = one(stored(block_hashes=hashes, token_ids=tokens, parent_block_hash=hashes[0]))
    assert isinstance(event, BlockStored)
    assert [(type(value), value) for value in event.hashes] == [(type(value), value) for value in hashes]
    assert event.parent == hashes[0]
    assert one(["BlockRemoved", hashes]) == BlockRemoved(hashes)


@pytest.mark.parametrize("hashes", BAD_HASHES, ids=repr)
def test_bad_hashes(hashes: Any) -> None:
    assert lost(one(stored(block_hashes=hashes)))
    assert lost(one(["BlockStored", hashes, None, T8, 4]))
    assert lost(one({"type": "BlockRemoved", "block_hashes": hashes}))
    assert lost(one(["BlockRemoved", hashes]))


@pytest.mark.parametrize("parent", [1.5, True, "1", [1], {}], ids=repr)
def test_bad_parent(parent: Any) -> None:
    assert lost(one(stored(parent_block_hash=parent)))


# -- media (D7)


@pytest.mark.parametrize(("word", "tier"), [*MEDIA.items(), ("cpu_tier1", H), ("CPU_TIER2", H), ("cpu_tier", H)])
def test_media(word: str | None, tier: Tier) -> None:
    for spelled in {word, word and word.upper(), word and word.capitalize()}:
        assert tier_of(spelled) is tier
        assert one(stored(medium=spelled)) == PLAIN._replace(tier=tier)
        assert one(["BlockRemoved", [11], spelled]) == BlockRemoved([11], tier)


@pytest.mark.parametrize("word", ["", "tape", "gpu ", "cpux", "x" * 1000])
def test_unknown_medium_is_skipped(word: str) -> None:
    found = decode(stored(), stored(medium=word), ["BlockRemoved", [1], word], stored(medium="CPU"))
    assert [found[0], found[3]] == [PLAIN, PLAIN._replace(tier=H)]
    for skipped in found[1:3]:
        assert isinstance(skipped, Skipped)
        assert (skipped.reason, skipped.lost) == ("medium", False)
        assert len(skipped.detail) < 100


@pytest.mark.parametrize("medium", [1, True, b"GPU", ["GPU"], {}], ids=repr)
def test_medium_that_is_no_word(medium: Any) -> None:
    assert lost(one(stored(medium=medium)))


def test_default_medium_of_a_port() -> None:
    """YuanRong publishes one medium a port and may leave the word out (8)."""
    for dialect in ("vllm", "mooncake"):
        assert one(stored(medium=...), dialect, default_medium="cpu") == PLAIN._replace(tier=H)
        assert one(stored(medium="npu"), dialect, default_medium="cpu") == PLAIN
        assert one(["BlockRemoved", [1]], dialect, default_medium="disk") == BlockRemoved([1], S)


# -- attention groups (D8)

COUNTED = ["full_attention", "mla_attention", "sink_full_attention", "FullAttention", "MLAAttention", "fullAttention",
           "FullAttentionSpec", "full_attention_spec", "SinkFullAttention"]  # fmt: skip
SKIPPED = ["sliding_window", "sliding_window_mla", "SlidingWindow", "SlidingWindowSpec", "chunked_local_attention",
           "mamba", "MambaSpec", "encoder_only_attention", "cross_attention", "brand_new", ""]  # fmt: skip


@pytest.mark.parametrize("kind", COUNTED)
def test_counted_kinds(kind: str) -> None:
    assert counted_kind(kind)
    assert one(stored(kv_cache_spec_kind=kind, group_idx=1)) == PLAIN._replace(group=1)


@pytest.mark.parametrize("kind", SKIPPED)
def test_skipped_kinds(kind: str) -> None:
    assert not counted_kind(kind)
    array = ["BlockStored", [11], None, T8, 4, None, "GPU", None, None, 1, kind, 64]
    for raw in (stored(kv_cache_spec_kind=kind, group_idx=1), stored(block_hashes=[], kv_cache_spec_kind=kind), array):
        event = one(raw)
        assert isinstance(event, Skipped)
        assert (event.reason, event.lost) == ("attention_kind", False)


def test_kind_comes_before_the_count() -> None:
    """A sliding group names all tokens and only the hashes that survive: that is not a wrong count."""
    event = one(stored(block_hashes=[12], kv_cache_spec_kind="sliding_window"))
    assert isinstance(event, Skipped)
    assert event.reason == "attention_kind"


def test_kind_is_learnt_per_group() -> None:
    """Placeholder and removed events name the group only."""
    made = DIALECTS["vllm"](DialectOptions())

    def tell(*events: Any) -> list[Any]:
        return [
            event.reason if isinstance(event, Skipped) else type(event)
            for event in made.decode(msgpack.packb([1.5, list(events), 0])).events
        ]

    placeholder = [stored(token_ids=[], block_size=0, medium="CPU", group_idx=group) for group in (0, 1, 2)]
    gone = [{"type": "BlockRemoved", "block_hashes": [11], "medium": "GPU", "group_idx": group} for group in (0, 1, 2)]
    assert tell(*placeholder) == [BlockStored] * 3
    assert tell(
        stored(group_idx=0, kv_cache_spec_kind="sliding_window"),
        stored(group_idx=1, kv_cache_spec_kind="full_attention"),
    ) == ["attention_kind", BlockStored]
    assert tell(*placeholder, *gone) == [
        "attention_kind", BlockStored, BlockStored, "attention_kind", BlockRemoved, BlockRemoved,
    ]  # fmt: skip
    assert tell(stored(group_idx=0, kv_cache_spec_kind="full_attention"), placeholder[0]) == [BlockStored] * 2
    assert tell(stored(group_idx=1, kv_cache_spec_kind="mamba"), placeholder[1]) == ["attention_kind"] * 2
    made.reset()
    assert tell(*placeholder) == [BlockStored] * 3


@pytest.mark.parametrize("dialect", ["vllm", "mooncake"])
def test_a_kind_that_comes_late(dialect: str) -> None:
    """What was counted of a group before its kind was told is void when the kind does not count; told once."""
    made = DIALECTS[dialect](DialectOptions())

    def tell(*events: Any) -> list[Event]:
        return list(made.decode(msgpack.packb([1.0, list(events), 0])).events)

    placeholder = stored(token_ids=[], block_size=0, medium="CPU", group_idx=1)
    windows = stored(group_idx=1, kv_cache_spec_kind="sliding_window")
    full = stored(group_idx=2, kv_cache_spec_kind="full_attention")
    assert tell(placeholder, {**placeholder, "group_idx": 2}, full)[2] == PLAIN._replace(group=2)
    (late,) = tell(windows)
    assert isinstance(late, Skipped)
    assert (late.reason, late.lost, late.tainted) == ("attention_kind", True, True)
    for event in tell(windows, placeholder):
        assert isinstance(event, Skipped)
        assert (event.reason, event.lost) == ("attention_kind", False)
    made.reset()
    (event,) = tell(windows)
    assert isinstance(event, Skipped)
    assert not event.lost, "a new engine"


def test_number_of_groups_is_bounded() -> None:
    events = decode(*(stored(group_idx=group, kv_cache_spec_kind="mamba") for group in range(1000)))
    assert all(isinstance(event, Skipped) and not event.lost for event in events)


@pytest.mark.parametrize("changes", [{"group_idx": -1}, {"group_idx": True}, {"group_idx": "0"}, {"group_idx": 2**40},
                                     {"kv_cache_spec_kind": 1}, {"kv_cache_spec_kind": ["x"]}], ids=repr)  # fmt: skip
def test_bad_groups(changes: dict[str, Any]) -> None:
    assert lost(one(stored(**changes)))


# -- tokens and sizes (D9, D10)


@pytest.mark.parametrize("tokens", [[0, 1, 255, 256], [2**32 - 1, 2**31, 0, 1], [65536, 16777216, 7, 9]])
def test_tokens(tokens: list[int]) -> None:
    assert one(stored(block_hashes=[1], token_ids=tokens)) == BlockStored([1], None, pack_tokens(tokens), 4)


def test_pairs_of_tokens() -> None:
    """EAGLE: overlapping pairs, one a token."""
    pairs = [[number, number + 1] for number in T8]
    assert one(stored(token_ids=pairs)) == PLAIN


BAD_TOKENS = [
    "abcd", {"a": 1}, b"\1\0\0\0", 7, 1.5, [1, 2, 3, -1, 5, 6, 7, 8], [2**32, *T8[1:]], [True, *T8[1:]],
    [False, *T8[1:]], [1.0, *T8[1:]], [None, *T8[1:]], ["1", *T8[1:]], [[1, 2], *T8[1:]], [[1, 2]] * 7 + [5],
    [[1, 2]] * 7 + [[5]], [[1, 2]] * 7 + [[5, 6, 7]], [[True, 2]] * 8, [[1, False]] * 8, [[2**32, 1]] * 8,
    [[[1, 2], 3]] * 8, [[1.5, 2]] * 8,
]  # fmt: skip


@pytest.mark.parametrize("tokens", BAD_TOKENS, ids=repr)
def test_bad_tokens(tokens: Any) -> None:
    assert lost(one(stored(token_ids=tokens)))
    assert lost(one(["BlockStored", [11, 12], None, tokens, 4]))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"block_size": 0}, "block_size"),
        ({"block_hashes": [1]}, "token_count"),
        ({"block_hashes": [1, 2, 3]}, "token_count"),
        ({"block_hashes": []}, "token_count"),
        ({"block_size": 8}, "token_count"),
        ({"block_size": 2**40}, "token_count"),
        ({"block_hashes": [1, 2, 3], "block_size": ...}, "token_count"),
        ({"block_hashes": [], "block_size": ...}, "token_count"),
    ],
)
def test_sizes_that_do_not_fit(changes: dict[str, Any], reason: str) -> None:
    event = one(stored(**changes))
    assert isinstance(event, Skipped)
    assert (event.reason, event.lost) == (reason, False)


@pytest.mark.parametrize("size", [-4, True, 4.0, "4", [4]], ids=repr)
def test_bad_block_size(size: Any) -> None:
    assert lost(one(stored(block_size=size)))


def test_a_size_of_its_own_is_the_indexs_matter() -> None:
    assert one(stored(block_hashes=[1], block_size=8)) == BlockStored([1], None, P8, 8)


# -- adapters, salts, images

SALT, IMAGE = extras_bytes(["salt"]), extras_bytes([["img", 3]])
EXTRAS = [
    ({"extra_keys": [["salt"], None]}, b"", (SALT, b"")),
    ({"extra_keys": [["salt"], []]}, b"", (SALT, b"")),
    ({"extra_keys": [[["img", 3]], [["img", 3], "salt"]]}, b"", (IMAGE, extras_bytes([["img", 3], "salt"]))),
    ({"extra_keys": [["ada"], ["ada"]], "lora_name": "ada"}, root_bytes("ada"), None),
    ({"extra_keys": [["ada", "salt"], ["ada"]], "lora_name": "ada"}, root_bytes("ada"), (SALT, b"")),
    ({"extra_keys": [["ada", "ada"], ["ada"]], "lora_name": "ada"}, root_bytes("ada"), (extras_bytes(["ada"]), b"")),
    ({"extra_keys": [["ada"], ["ada"]]}, b"", (extras_bytes(["ada"]), extras_bytes(["ada"]))),
    ({"lora_name": "ada", "lora_id": 7}, root_bytes("ada"), None),
    ({"lora_id": 7}, root_bytes(None, 7), None),
    ({"lora_id": 0, "lora_name": ""}, b"", None),
    ({"lora_id": "uid"}, root_bytes("uid"), None),
    (
        {"extra_keys": [[b"digest", 1.5, None, {"k": 1}], None]},
        b"",
        (extras_bytes([b"digest", 1.5, None, {"k": 1}]), b""),
    ),
    ({"cache_salt": "salt"}, b"", (SALT, b"")),
    ({"cache_salt": "salt", "parent_block_hash": 10}, b"", None),
    ({"cache_salt": None}, b"", None),
]


@pytest.mark.parametrize(("changes", "root", "extras"), EXTRAS, ids=repr)
def test_extras(changes: dict[str, Any], root: bytes, extras: tuple[bytes, ...] | None) -> None:
    event = one(stored(**changes))
    assert isinstance(event, BlockStored)
    assert (event.root, event.extras) == (root, extras)


BAD_EXTRAS = [
    {"extra_keys": "salt"}, {"extra_keys": [["salt"]]}, {"extra_keys": [["salt"], None, None]},
    {"extra_keys": ["salt", None]}, {"extra_keys": [5, None]}, {"extra_keys": {"a": 1}}, {"lora_name": 5},
    {"lora_name": ["ada"]}, {"lora_id": 1.5}, {"lora_id": [1]}, {"lora_id": True}, {"cache_salt": 5},
    {"extra_keys": [[msgpack.Timestamp(5)], None]},
]  # fmt: skip


@pytest.mark.parametrize("changes", BAD_EXTRAS, ids=repr)
def test_bad_extras(changes: dict[str, Any]) -> None:
    assert lost(one(stored(**changes)))


def test_deeply_nested_extras_are_no_recursion_error() -> None:
    deep: Any = "x"
    for _ in range(400):
        deep = [deep]
    event = one(stored(extra_keys=[[deep], None]))
    assert isinstance(event, BlockStored) or lost(event)


def test_sglang_metadata() -> None:
    """A map where vLLM has the adapter's name, on salted or session-tagged blocks only (sglang #30827, #37482)."""
    plain = ["BlockStored", [11, 12], None, T8, 4, None, "GPU"]
    child = ["BlockStored", [13], 12, T8[:4], 4, None, "GPU"]
    salt, session = {"cache_salt": "salt"}, {"session_id": "s"}
    found = decode(plain, [*plain, salt], [*child, salt], [*plain, session], dialect="sglang")
    assert found[0] == found[3] == PLAIN
    assert found[1] == PLAIN._replace(extras=(SALT, b""))
    assert found[2] == BlockStored([13], 12, P8[:16], 4)  # inherits it through its parent
    assert lost(one([*plain, {"cache_salt": 5}]))
    assert one(stored(extra_keys=[None, None], cache_salt="salt"), "sglang") == PLAIN._replace(extras=(SALT, b""))


# -- errors (D11)


@pytest.mark.parametrize("tag", ["EvictionPolicyChanged", "blockstored", "BlockStored ", "", "store", "x" * 500])
def test_unknown_tag_is_skipped(tag: str) -> None:
    for raw in ([tag], {"type": tag}):
        found = decode(stored(), raw, stored())
        assert found[0] == found[2] == PLAIN
        assert isinstance(found[1], Skipped)
        assert (found[1].reason, found[1].lost) == ("unknown_tag", False)
        assert len(found[1].detail) < 100


NO_EVENTS = [None, 5, 1.5, True, "BlockStored", b"x", [], [[]], [5, 6], [None], {}, {"type": None}, {"type": 5},
             {"type": ["BlockStored"]}, {"block_hashes": [1]}, ["BlockStored"], ["BlockStored", [1]], ["BlockRemoved"],
             ["BlockStored", [1], None, T8[:4]], {"type": "BlockStored"}, {"type": "BlockRemoved"},
             {"type": "BlockStored", "token_ids": T8}]  # fmt: skip


@pytest.mark.parametrize("raw", NO_EVENTS, ids=repr)
@pytest.mark.parametrize("dialect", ENGINES)
def test_malformed_events_are_lost_alone(raw: Any, dialect: str) -> None:
    found = decode(stored(), raw, stored(), dialect=dialect)
    assert found[0] == found[2] == PLAIN
    assert lost(found[1])


def test_details_hold_no_token_ids() -> None:
    secret = list(range(700_000, 700_008))
    for raw in (
        stored(token_ids=[*secret[:7], -5]),
        stored(token_ids=secret, block_hashes=[1]),
        stored(token_ids=secret, block_size=0),
        stored(medium=secret),
        stored(group_idx=secret),
        ["BlockStored", secret, secret, secret, secret],
    ):
        event = one(raw)
        assert isinstance(event, Skipped)
        assert "7000" not in event.detail


# -- envelopes

BATCHES: list[tuple[Any, int | None, float | None]] = [
    ([1.5, []], None, 1.5),
    ([1.5, [], None], None, 1.5),
    ([1.5, [], 3], 3, 1.5),
    ([1764000000123, [], 0], 0, 1764000000.123),
    ([1764000000, [], 0], 0, 1764000000.0),
    ([float("nan"), [], 0], 0, None),
    ([float("inf"), [], 0], 0, None),
    (["yesterday", [], 0], 0, None),
    ([None, []], None, None),
    ({"events": []}, None, None),
    ({"ts": 1.5, "events": [], "data_parallel_rank": 2}, 2, 1.5),
    ({"timestamp_ms": 1764000000123, "dp_rank": 1, "events": []}, 1, 1764000000.123),
    ({"events": [], "more": {"a": [1]}}, None, None),
]
NO_BATCHES = [
    None, 5, "x", b"x", [], [1.5], [1.5, [], 0, 0], [1.5, None, 0], [1.5, {}, 0], [1.5, "x"], [1.5, 5], [1.5, [], 1.5],
    [1.5, [], "0"], [1.5, [], True], [1.5, [], -1], [1.5, [], [0]], {}, {"ts": 1.5}, {"events": None}, {"events": 5},
    {"events": [], "dp_rank": "x"},
]  # fmt: skip


@pytest.fixture(params=[wire.EAGER_BYTES, 0], ids=["whole", "event by event"])
def eager(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(wire, "EAGER_BYTES", request.param)
    return int(request.param)


@pytest.mark.parametrize(("batch", "rank", "timestamp"), BATCHES, ids=repr)
def test_envelopes(batch: Any, rank: int | None, timestamp: float | None, eager: int) -> None:
    found = DIALECTS["auto"](DialectOptions()).decode(msgpack.packb(batch))
    assert (list(found.events), found.dp_rank, found.timestamp) == ([], rank, timestamp)


@pytest.mark.parametrize("batch", NO_BATCHES, ids=repr)
def test_no_envelopes(batch: Any, eager: int) -> None:
    with pytest.raises(DecodeError):
        DIALECTS["auto"](DialectOptions()).decode(msgpack.packb(batch))


GOOD = msgpack.packb([1.5, [stored()], 0])
NO_MESSAGES = [
    b"", b"\xc1", GOOD[:-1], GOOD + b"\0", GOOD[:40], b"\xdd\x7f\xff\xff\xff", b"\xdf\x7f\xff\xff\xff",
    b"\x93\xcb" + b"\0" * 8 + b"\xdd\x7f\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xffabc",
    msgpack.packb([1.5, [{1: 2}], 0]), msgpack.packb({1: []}), b"\x93\xc0\x91\xa1\xff\x00",
    b"\x82\xa6events\x90\xa1\xff\x01",
    b"\x92" * 2000, b"\x81" * 2000, b"\x93\xc0\x90", b"\x93\xc0\x91", b"\x92\xc0",
]  # fmt: skip


@pytest.mark.parametrize("payload", NO_MESSAGES, ids=lambda payload: payload[:24].hex())
@pytest.mark.parametrize("dialect", ENGINES)
def test_no_messages(payload: bytes, dialect: str, eager: int) -> None:
    with pytest.raises(DecodeError):
        list(DIALECTS[dialect](DialectOptions()).decode(payload).events)


def test_large_message_is_read_event_by_event() -> None:
    """Same events, in a lazy form; only what is asked for is decoded; the walk before it is paced."""
    events = [stored(block_hashes=[number, number + 1]) for number in range(0, 3000, 2)]
    payload = msgpack.packb([1.5, events, 4])
    assert len(payload) > wire.EAGER_BYTES
    rests: list[int] = []
    made = DIALECTS["vllm"](DialectOptions(pace=lambda: rests.append(1)))
    batch = made.decode(payload)
    assert not isinstance(batch.events, list)
    assert (batch.dp_rank, batch.timestamp) == (4, 1.5)
    walked = len(rests)
    assert walked >= 1500 // 64
    found = list(batch.events)
    assert found == [PLAIN._replace(hashes=[number, number + 1]) for number in range(0, 3000, 2)]
    assert len(rests) >= 2 * walked - 2


@pytest.mark.parametrize("tail", [b"\0", b"\xc0\xc0"])
def test_large_message_with_a_tail(tail: bytes) -> None:
    payload = msgpack.packb([1.5, [stored()] * 1500, 0])
    made = DIALECTS["vllm"](DialectOptions())
    for bad in (payload + tail, payload[:-1], payload[:-5000]):
        with pytest.raises(DecodeError):
            made.decode(bad)


def test_large_map_batch() -> None:
    many = {"junk": ["x" * 50] * 100, "events": [stored()] * 1500, "dp_rank": 2, "ts": 1.5}
    batch = DIALECTS["auto"](DialectOptions()).decode(msgpack.packb(many))
    assert (batch.dp_rank, batch.timestamp) == (2, 1.5)
    assert list(batch.events) == [PLAIN] * 1500


def test_announced_events_are_bounded_by_the_bytes() -> None:
    payload = b"\x93\xc0\xdd" + (60_000).to_bytes(4, "big") + b"\x90" * 60_000 + b"\xc0" + b"\x00" * 10_000
    with pytest.raises(DecodeError, match="announces"):
        DIALECTS["vllm"](DialectOptions()).decode(payload)


# -- replies (11)

SEQ, END = (7).to_bytes(8, "big"), b"\xff" * 8
REPLIES = [
    ([b"", SEQ, b"p"], (7, b"p")),
    ([b"", b"kv", SEQ, b"p"], (7, b"p")),
    ([b"", b"", SEQ, b"p"], (7, b"p")),
    ([SEQ, b"p"], (7, b"p")),
    ([b"", SEQ, b""], (7, b"")),
    ([b"", END, b""], None),
    ([b"", b"", END, b""], None),
    ([b"", b"kv", END, b""], None),
    ([b"", END, b"p"], None),
    ([b"", b""], None),
    ([b""], None),
    ([], None),
]


@pytest.mark.parametrize(("frames", "expected"), REPLIES, ids=repr)
@pytest.mark.parametrize("dialect", ENGINES)
def test_replies(frames: list[bytes], expected: Any, dialect: str) -> None:
    assert DIALECTS[dialect](DialectOptions()).split_reply(frames) == expected


@pytest.mark.parametrize(
    "frames", [[b"p"], [b"", b"p"], [b"", SEQ[:7], b"p"], [b"", SEQ + b"x", b"p"], [SEQ] * 5], ids=repr
)
def test_no_replies(frames: list[bytes]) -> None:
    with pytest.raises(DecodeError):
        DIALECTS["auto"](DialectOptions()).split_reply(frames)


# -- RFC 1527, Mooncake, Memcache, YuanRong (7, 8)


def rfc(kind: str, **more: Any) -> dict[str, Any]:
    return {
        "event_id": 1, "timestamp": None, "event_type": kind, "model_name": None, "block_size": None,
        "additional_salt": None, "lora_name": None, "tenant_id": "default", "backend_id": "10.0.0.1", "medium": "cpu",
        "dp_rank": None, **more,
    }  # fmt: skip


def copied(*hashes: Any, tier: Tier = H, adds: bool = True) -> BlockStored:
    return BlockStored(list(hashes), None, b"", 0, tier, adds_copy=adds)


NOT_SEEN = Skipped("unknown_object", "removed object was not announced")

RFC = [
    (rfc("stored", seq_hashes=[5], token_ids=None, parent_hash=None), copied(5)),
    (rfc("stored", seq_hashes=[5], medium="disk"), copied(5, tier=S)),
    (rfc("stored", seq_hashes=[5], medium=None), copied(5, tier=D)),
    (rfc("stored", seq_hashes=["0x1f", "31", "1f", "FF"]), copied(31, 31, 31, 255)),
    (rfc("stored", block_hashes=[5]), copied(5)),
    (rfc("stored", seq_hashes=[5], type="BlockStored"), copied(5)),
    (
        rfc("stored", seq_hashes=[5, 6], parent_hash=4, token_ids=T8, block_size=4, medium="gpu", lora_name="ada"),
        BlockStored([5, 6], 4, P8, 4, root=root_bytes("ada")),
    ),
    (rfc("stored", seq_hashes=[5], parent_hash="0x4", token_ids=T8[:4]), BlockStored([5], 4, P8[:16], 4, H)),
    (rfc("removed", seq_hashes=[5]), BlockRemoved([5], H)),
    (rfc("removed", seq_hashes=["5"], group_id=2), BlockRemoved([5], H, 2)),
    (rfc("cleared", medium=None), AllBlocksCleared(ALL)),
    (rfc("stored", seq_hashes="0x1f"), copied(31)),
    # early forms have `type` alone (8)
    ({"type": "stored", "block_hashes": [5], "medium": "cpu"}, copied(5)),
    ({"type": "removed", "block_hashes": [5], "medium": "cpu"}, BlockRemoved([5], H)),
    ({"type": "cleared"}, AllBlocksCleared(ALL)),
    ({"type": "BlockRemoved", "block_hashes": ["0x1f"], "backend_id": None, "medium": "cpu"}, BlockRemoved([31], H)),
    ({"type": "BlockStored", "block_hashes": ["1f"], "backend_id": "a", "medium": "disk"}, copied(31, tier=S)),
    # blocks from the middle of a prompt, of an unknown parent, are no first blocks (D6)
    (rfc("stored", seq_hashes=[5], token_ids=T8[:4], base_block_idx=3), copied(5)),
    (rfc("stored", seq_hashes=[5], token_ids=T8[:4], base_block_idx=0), BlockStored([5], None, P8[:16], 4, H)),
    (
        rfc("stored", seq_hashes=[5], parent_hash=4, token_ids=T8[:4], base_block_idx=3),
        BlockStored([5], 4, P8[:16], 4, H),
    ),
    (
        rfc("stored", seq_hashes=[5, 6], token_ids=T8, additional_salt="salt"),
        BlockStored([5, 6], None, P8, 4, H, extras=(SALT, b"")),
    ),
]
NO_RFC = [
    rfc("stored"),
    rfc("stored", seq_hashes=5),
    rfc("stored", seq_hashes=[1.5]),
    rfc("stored", seq_hashes=["what"]),
    rfc("stored", seq_hashes=["0x" + "f" * 6000]),
    rfc("stored", seq_hashes=[5], token_ids=T8[:4], additional_salt=7),
    {"type": "removed"},
    {"type": "stored", "block_hashes": 5},
    rfc("stored", seq_hashes=[5], type="BlockRemoved"),
    rfc("removed"),
    rfc("stored", seq_hashes=[5], parent_hash=1.5, token_ids=T8[:4]),
    {"seq_hashes": [5], "medium": "cpu"},
    {"event_type": None, "seq_hashes": [5]},
    {"event_type": 7, "seq_hashes": [5]},
]


@pytest.mark.parametrize("dialect", ["mooncake", "auto"])
@pytest.mark.parametrize(("raw", "expected"), RFC, ids=repr)
def test_rfc1527(raw: dict[str, Any], expected: Event, dialect: str) -> None:
    assert one(raw, dialect) == expected


@pytest.mark.parametrize("raw", NO_RFC, ids=repr)
def test_no_rfc1527(raw: dict[str, Any]) -> None:
    """A type is never guessed, "cleared" least of all."""
    assert lost(one(raw, "mooncake"))


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (rfc("moved", seq_hashes=[5]), "unknown_tag"),
        (rfc("stored", seq_hashes=[]), "no_hash"),
        (rfc("stored", seq_hashes=[5], medium="tape"), "medium"),
        (rfc("removed", seq_hashes=[5], object_key="never seen"), "unknown_object"),
    ],
)
def test_rfc1527_skipped(raw: dict[str, Any], reason: str) -> None:
    event = one(raw, "mooncake")
    assert isinstance(event, Skipped)
    assert (event.reason, event.lost) == (reason, False)


def test_mooncake_objects() -> None:
    """Stored again is a refresh; removed follows the object, though two of them share the hash."""
    made = DIALECTS["mooncake"](DialectOptions())
    objects = made.objects()
    assert objects is not None

    def tell(*events: Any) -> list[Event]:
        return list(objects.resolve(made.decode(msgpack.packb([1764000000000, list(events), 9])).events))

    def put(key: str, value: int, **more: Any) -> dict[str, Any]:
        return rfc("stored", seq_hashes=[value], object_key=key, **more)

    def drop(key: str, value: int, **more: Any) -> dict[str, Any]:
        return rfc("removed", seq_hashes=[value], object_key=key, **more)

    assert tell(put("a@0", 5), put("a@1", 5), put("a@0", 5)) == [copied(5), copied(5), copied(5, adds=False)]
    assert tell(drop("a@0", 5), drop("a@1", 5)) == [BlockRemoved([5], H)] * 2
    assert [type(event) for event in tell(drop("a@0", 5))] == [Skipped]
    assert tell(put("a@0", 5)) == [copied(5)]
    assert tell(put("a@0", 5, medium="disk")) == [copied(5, tier=S)]
    assert tell(put("b", 6, backend_id="10.0.0.2"), put("b", 7, tenant_id="t")) == [copied(6), copied(7)]
    assert tell(rfc("cleared", medium=None)) == [BlockRemoved([5], H), BlockRemoved([5], S)]
    assert tell(rfc("cleared", medium=None)) == []
    assert tell(rfc("cleared", medium=None, backend_id="10.0.0.2")) == [BlockRemoved([6], H)]
    made.reset()
    assert tell(put("b", 7, tenant_id="t")) == [copied(7, adds=False)], "what was learnt, not what the view holds"
    objects.clear()
    assert tell(put("a@0", 5), put("b", 7, tenant_id="t")) == [copied(5), copied(7)]


OBJECT = {"object_key": "o"}
OBJECTS: list[tuple[str, list[Any], list[Event]]] = [
    (
        "all its hashes",
        [rfc("stored", seq_hashes=[7, 8], **OBJECT), rfc("removed", seq_hashes=[7], **OBJECT)],
        [BlockRemoved([7, 8], H)],
    ),
    (
        "no medium",
        [rfc("stored", seq_hashes=[7], **OBJECT), rfc("removed", seq_hashes=[7], medium=None, **OBJECT)],
        [BlockRemoved([7], H)],
    ),
    (
        "no medium, two tiers",
        [
            rfc("stored", seq_hashes=[7], **OBJECT),
            rfc("stored", seq_hashes=[7], medium="disk", **OBJECT),
            rfc("removed", seq_hashes=[], medium=None, **OBJECT),
        ],
        [BlockRemoved([7], H), BlockRemoved([7], S)],
    ),
    ("no hashes", [rfc("stored", seq_hashes=[7], **OBJECT), rfc("removed", **OBJECT)], [BlockRemoved([7], H)]),
    (
        "its group",
        [rfc("stored", seq_hashes=[7], group_id=2, **OBJECT), rfc("removed", seq_hashes=[7], **OBJECT)],
        [BlockRemoved([7], H, 2)],
    ),
    (
        "another medium",
        [rfc("stored", seq_hashes=[7], **OBJECT), rfc("removed", seq_hashes=[7], medium="disk", **OBJECT)],
        [NOT_SEEN],
    ),
    ("unknown, no hashes", [rfc("removed", **OBJECT)], [NOT_SEEN._replace(lost=True)]),
    ("unknown, an empty list", [rfc("removed", seq_hashes=[], **OBJECT)], [NOT_SEEN]),
    (
        "stored without a key",
        [rfc("stored", seq_hashes=[7]), rfc("removed", seq_hashes=[7], **OBJECT)],
        [BlockRemoved([7], H)],
    ),
    (
        "stored without a key, removed without hashes",
        [rfc("stored", seq_hashes=[7]), rfc("removed", seq_hashes=[], **OBJECT)],
        [NOT_SEEN._replace(lost=True)],
    ),
    (
        "other blocks",
        [
            rfc("stored", seq_hashes=[7], **OBJECT),
            rfc("stored", seq_hashes=[9], **OBJECT),
            rfc("removed", seq_hashes=[], **OBJECT),
        ],
        [BlockRemoved([7], H), copied(9), BlockRemoved([9], H)],
    ),
    (
        "cleared, groups",
        [rfc("stored", seq_hashes=[7, 8], group_id=2, **OBJECT), rfc("cleared", medium=None)],
        [BlockRemoved([7, 8], H, 2)],
    ),
    (
        "cleared, and blocks without a key",
        [rfc("stored", seq_hashes=[7], **OBJECT), rfc("stored", seq_hashes=[8]), rfc("cleared", medium=None)],
        [copied(8), AllBlocksCleared(ALL)],
    ),
    (
        "an engine's clear empties the device tier",
        [
            rfc("stored", seq_hashes=[7], medium="gpu", **OBJECT),
            ["AllBlocksCleared"],
            rfc("stored", seq_hashes=[7], medium="gpu", **OBJECT),
        ],
        [AllBlocksCleared((D,)), copied(7, tier=D)],
    ),
]


@pytest.mark.parametrize(("name", "events", "expected"), OBJECTS, ids=[row[0] for row in OBJECTS])
def test_objects(name: str, events: list[Any], expected: list[Event]) -> None:
    """What the events after the first one come to."""
    assert decode(*events, dialect="auto")[-len(expected) :] == expected


@pytest.mark.parametrize("recovery", list(Recovery))
@pytest.mark.parametrize("dialect", ["mooncake", "auto"])
def test_objects_are_dropped_with_the_content(dialect: str, recovery: Recovery) -> None:
    """After each way to lose the content, an object that is announced again is no refresh."""
    index = PrefixIndex(block_size=4)
    made = DIALECTS[dialect](DialectOptions(max_objects=1))
    view = index.open(walk=made.walk)
    sync = StreamSync(view=view, dialect=made, recovery=recovery, dp_rank=0, topic=b"")
    put = msgpack.packb([1, [rfc("stored", seq_hashes=[7], token_ids=T8[:4], block_size=4, **OBJECT)], 0])
    other = msgpack.packb([1, [rfc("stored", seq_hashes=[8], token_ids=T8[4:], block_size=4, object_key="p")], 0])
    now = 0.0

    def answer(actions: list[Action], sequence: int, body: bytes, now: float) -> None:
        for action in actions:
            if isinstance(action, StartReplay):
                sync.attempt_started(action.attempt, now)
                sync.reply(action.attempt, [b"", sequence.to_bytes(8, "big"), body], now)
                sync.reply(action.attempt, [b"", b"\xff" * 8, b""], now)

    answer(sync.connected(now), 3, put, now)
    for sequence, body, key in ((3, put, T8[:4]), (20, other, T8[4:]), (40, put, T8[:4]), (2, other, T8[4:])):
        now += 10
        answer(sync.live([b"", sequence.to_bytes(8, "big"), body], now), sequence, body, now)
        assert sync.status.synchronized, sync.status
        assert index.find(content_keys(pack_tokens(key), 4))
        for gone in ("lost", "reconnect", "resync"):
            sequence += 1
            if gone == "lost":
                answer(sync.live([b""], now), sequence, body, now)
            elif gone == "resync":
                answer(sync.resync(now), sequence, body, now)
            else:
                answer(sync.disconnected(now) + sync.reconnected(now), sequence, body, now)
            answer(sync.live([b"", sequence.to_bytes(8, "big"), body], now), sequence, body, now)
            assert sync.status.synchronized, sync.status
            assert index.find(content_keys(pack_tokens(key), 4))
        index.check()


def test_mooncake_objects_are_bounded() -> None:
    made = DIALECTS["mooncake"](DialectOptions(max_objects=2))
    events = [rfc("stored", seq_hashes=[number], object_key=str(number)) for number in range(3)]
    objects = made.objects()
    assert objects is not None
    found = list(objects.resolve(made.decode(msgpack.packb([1, events, 0])).events))
    assert found[:2] == [copied(0), copied(1)]
    assert isinstance(found[2], Skipped)
    assert (found[2].reason, found[2].lost) == ("capacity", True)


@pytest.mark.parametrize(
    "batch",
    [
        [1764000000000, [rfc("stored", seq_hashes=[5])], 7],
        {"timestamp_ms": 1764000000000, "dp_rank": 7, "events": [rfc("stored", seq_hashes=[5])]},
        {"events": [rfc("stored", seq_hashes=[5])]},
        rfc("stored", seq_hashes=[5]),
    ],
    ids=["array", "early map", "memcache", "bare map"],
)
def test_pool_envelopes(batch: Any, eager: int) -> None:
    """The rank of a pool's batch is a number of its own configuration, no engine rank."""
    found = DIALECTS["mooncake"](DialectOptions()).decode(msgpack.packb(batch))
    assert (list(found.events), found.dp_rank) == ([copied(5)], None)


# -- what 22 versions of vLLM's own encoder sent


def capture() -> list[dict[str, Any]]:
    path = DATA / "captures" / "dialects_0.9.2_to_0.31.0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


VERSIONS = [record["vllm"] for record in capture() if record["kind"] == "version"]
H1, H2, H3 = 0x1111111111111111, 0xF222222222222222, 0x3333
T4 = pack_tokens([1, 2, 3, 4])


@pytest.mark.parametrize("dialect", ["vllm", "auto"])
@pytest.mark.parametrize("version", VERSIONS)
def test_versions_of_vllm(version: str, dialect: str) -> None:
    records = [record for record in capture() if record.get("vllm") == version]
    facts = records[0]
    made = DIALECTS[dialect](DialectOptions())
    has: Callable[[str], bool] = facts["stored_fields"].__contains__
    lora = root_bytes("ada") if has("lora_name") else root_bytes(None, 1)
    expected: dict[str, list[Event]] = {
        "root + child in one batch": [
            BlockStored([H1, H2], None, P8, 4),
            BlockStored([H3], H2, pack_tokens([9, 10, 11, 12]), 4),
        ],
        "bytes hashes": [BlockStored([b"\1" * 32, b"\2" * 32], None, P8, 4), BlockRemoved([b"\1" * 32])],
        "cpu placeholder": [copied(H1), BlockRemoved([H1], H)],
        "salted": [BlockStored([H1], None, T4, 4, extras=(extras_bytes(["tenant-a"]),) if has("extra_keys") else None)],
        "lora": [BlockStored([H1], None, T4, 4, root=lora)],
        "removed": [BlockRemoved([H3])],
        "cleared": [AllBlocksCleared()],
    }
    seen = []
    payloads = {}
    for record in records[1:]:
        frames = [bytes.fromhex(part) for part in record["frames"]]
        if record["kind"] == "live":
            batch = made.decode(frames[2])
            assert list(batch.events) == expected[record["note"]], record["note"]
            assert (batch.dp_rank, batch.timestamp) == (facts["dp_rank"], 1700000000.25)
            seen.append(record["note"])
            payloads[int.from_bytes(frames[1], "big")] = frames[2]
        else:
            reply = made.split_reply(frames)
            assert reply is None or payloads[reply[0]] == reply[1]
    assert len(seen) == (5 if version == "0.9.2" else 7)
    replies = [record for record in records if record["kind"] == "replay"]
    assert not replies or made.split_reply([bytes.fromhex(part) for part in replies[-1]["frames"]]) is None
    assert replies or version == "0.31.0"


def test_all_versions_are_there() -> None:
    assert len(VERSIONS) == 22


def test_a_batch_is_the_same_batch() -> None:
    """`Batch` of a small message is whole: nothing is decoded later."""
    batch = DIALECTS["vllm"](DialectOptions()).decode(GOOD)
    assert batch == Batch([PLAIN], 0, 1.5)


# -- pushed over HTTP (9)


def push(*events: Any, **more: Any) -> Push:
    return PushDecoder().decode({"instance_id": "i", "events": list(events), **more})


def by_hash(hashes: list[int], parent: int | None, *local: int) -> BlockStored:
    """Blocks of 4 tokens, of which the hash alone is known."""
    return BlockStored(hashes, parent, stand_in(local, 4), 4, root=HASHED)


PUSHED = [
    (
        {"event_id": 1, "dp_rank": 0, "data": {"type": "stored", "parent_hash": None, "blocks": [
            {"block_hash": 100, "tokens_hash": 123}]}},
        PushedEvent(0, 1, by_hash([100], None, 123), (123,)),
    ),
    (
        {"event_id": 2, "dp_rank": 3, "data": {"type": "stored", "parent_hash": 100, "blocks": [
            {"block_hash": 101, "tokens_hash": 5}, {"block_hash": 102, "tokens_hash": 6}]}},
        PushedEvent(3, 2, by_hash([101, 102], 100, 5, 6), (5, 6), 100),
    ),
    ({"event_id": 2, "type": "removed", "block_hashes": [100]}, PushedEvent(0, 2, BlockRemoved([100]))),
    ({"data": {"type": "cleared"}}, PushedEvent(0, None, Pooled(("", "default")))),
    (
        {"event_id": 3, "event_type": "stored", "seq_hashes": [7], "medium": "cpu", "backend_id": "10.0.0.1"},
        PushedEvent(0, 3, copied(7)),
    ),
    (
        {"event_id": 3, "event_type": "stored", "seq_hashes": [7, 8], "parent_hash": 6, "token_ids": T8},
        PushedEvent(0, 3, BlockStored([7, 8], 6, P8, 4)),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "expected"), PUSHED, ids=repr)
def test_pushed(raw: dict[str, Any], expected: PushedEvent) -> None:
    assert push(raw, block_size=4).events == [expected]


@pytest.mark.parametrize("size", [2**20, 2**31, 2**70])
def test_pushed_blocks_of_any_size_cost_no_memory(size: int) -> None:
    blocks = [{"block_hash": number, "tokens_hash": number} for number in range(20)]
    found = push({"type": "stored", "blocks": blocks}, {"type": "removed", "block_hashes": [1]}, block_size=size).events
    assert lost(found[0].event)
    assert found[1].event == BlockRemoved([1])


def test_pushed_envelope() -> None:
    found = push(shutdown=True, model_name="m", tenant_id="t")
    assert found == Push("i", "m", "t", 128, [], True)


NOT_PUSHED = [5, None, "x", [], {}, {"event_id": 1}, {"event_id": 1, "block_hashes": [1]}, {"data": 5}, {"data": {}},
              {"type": 5, "block_hashes": [1]}, {"event_id": "x", "type": "removed", "block_hashes": [1]},
              {"dp_rank": -1, "type": "removed", "block_hashes": [1]}, {"type": "stored"}, {"type": "removed"},
              {"data": {"type": "stored", "blocks": 5}}, {"data": {"type": "stored", "blocks": [5]}},
              {"data": {"type": "stored", "blocks": [{}]}}, {"type": "removed", "block_hashes": [1.5]},
              {"data": {"type": "stored", "blocks": [{"block_hash": 1, "tokens_hash": -1}]}}]  # fmt: skip


@pytest.mark.parametrize("raw", NOT_PUSHED, ids=repr)
def test_not_pushed(raw: Any) -> None:
    """Its own error; what is beside it counts. No type is guessed."""
    found = push({"type": "removed", "block_hashes": [9]}, raw, {"type": "removed", "block_hashes": [9]}).events
    assert [one.event for one in (found[0], found[2])] == [BlockRemoved([9])] * 2
    assert lost(found[1].event)
    said = (raw.get("data") or raw) if isinstance(raw, dict) else {}
    assert found[1].takes_away is (isinstance(said, dict) and said.get("type") == "removed" and "event_id" not in raw
                                   and raw.get("dp_rank") != -1)  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [None, 5, [], {}, {"instance_id": ""}, {"instance_id": 5}, {"instance_id": "i", "events": {}},
     {"instance_id": "i", "block_size": 0}, {"instance_id": "i", "block_size": True},
     {"instance_id": "i", "shutdown": 1}, {"instance_id": "i", "tenant_id": 5}],
    ids=repr,
)  # fmt: skip
def test_no_push(body: Any) -> None:
    with pytest.raises(DecodeError):
        PushDecoder().decode(body)
