"""Encoding off the event loop: once for all who ask, within budgets and bounds, and never at the cost of others."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from extproc.prompt import Options, Prompter
from extproc.prompt.encoder import JOB_BYTES, LARGE_BYTES, SEGMENT_BYTES, Encoder, EncodeTimeout, Pieces, SegmentCache
from extproc.prompt.segments import Cutter
from extproc.prompt.tokenizer import TokenizerError, _encoder, load, thread_pool
from kvindex.hashing import pack_tokens
from tests.tokenizers import SMALL

D = "<|d|>"
WAIT = 20.0  # deadline of conditions that come true at once


def fake_ids(text: str, special: bool = False) -> bytes:
    return pack_tokens([*([1] if special else []), *map(ord, text), *([2] if special else [])])


class Fake:
    """Encodes characters as their code points; counts calls; texts with "H" wait for the gate."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.gate = threading.Event()
        self.wrong = False
        self.held = 0
        self.threads: list[int] = []

    @property
    def texts(self) -> list[str]:
        return [text for call in self.calls for text in call]

    def __call__(self, texts: Sequence[str], special: bool) -> list[bytes]:
        self.calls.append(list(texts))
        self.threads.append(threading.get_ident())
        if any("H" in text for text in texts):
            self.held += 1
            assert self.gate.wait(WAIT)
        if any("B" in text for text in texts):
            raise TokenizerError("UnicodeEncodeError", bad_text=True)
        if any("P" in text for text in texts):
            raise Panic("text of the request")
        if self.wrong:
            return [fake_ids(text[::-1], special) for text in texts]
        return [fake_ids(text, special) for text in texts]


class Panic(BaseException):
    """As the Rust library raises it: no Exception."""


@pytest.fixture
def fake() -> Iterator[Fake]:
    subject = Fake()
    yield subject
    subject.gate.set()


Make = Callable[..., Encoder]
os.environ["RUST_BACKTRACE"] = "0"


DEFAULTS = {"verify_every": 0, "inline_bytes": 0}


@pytest.fixture
def make(fake: Fake) -> Iterator[Make]:
    with ThreadPoolExecutor(2) as executor:
        yield lambda **options: Encoder(
            fake, executor, **{**DEFAULTS, "cutter": Cutter([D], min_piece=1), "around": ([1], [2]), **options}
        )
        fake.gate.set()


async def tokens(encoder: Encoder, text: str, special: bool = False, budget: float | None = WAIT) -> bytes:
    segments = await encoder.segments(encoder.cut(text, special), add_special_tokens=special, budget=budget)
    encoder.watch(text, segments, special)
    return b"".join(segment.tokens for segment in segments)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT):
        while not condition():  # noqa: ASYNC110 - any condition, not one that has an event
            await asyncio.sleep(0.001)


TEXTS = ["", "a", D, f"a{D}b", f"{D}a{D}a{D}b", f"{D}{D}"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("around", [([1], [2]), ([1, 1], []), None])
async def test_ids_are_those_of_the_whole_text(make: Make, text: str, special: bool, around: Any) -> None:
    expected = fake_ids(text, special)
    if around == ([1, 1], []):
        expected = pack_tokens([1, 1] if special else []) + fake_ids(text)
    encoder = make(around=around)
    assert await tokens(encoder, text, special) == expected
    assert await tokens(encoder, text, special) == expected


async def test_known_pieces_are_not_encoded_again(make: Make, fake: Fake) -> None:
    encoder = make()
    await tokens(encoder, f"{D}a{D}b")
    await tokens(encoder, f"{D}a{D}b{D}c")
    await tokens(encoder, f"{D}b")
    assert fake.texts == [f"{D}a", f"{D}b", f"{D}c"]
    assert (encoder.stats.new_pieces, encoder.stats.known_pieces) == (3, 3)


async def test_a_prompt_that_arrives_many_times_at_once_is_encoded_once(make: Make, fake: Fake) -> None:
    encoder = make()
    text = f"{D}H{D}x"
    calls = [asyncio.create_task(tokens(encoder, text)) for _ in range(20)]
    calls.append(asyncio.create_task(tokens(encoder, f"{D}x{D}y")))
    await until(lambda: fake.held == 1)
    fake.gate.set()
    results = await asyncio.gather(*calls)
    assert results == [fake_ids(text)] * 20 + [fake_ids(f"{D}x{D}y")]
    assert sorted(fake.texts) == sorted([f"{D}H", f"{D}x", f"{D}y"])
    assert encoder.stats.shared_pieces == 19 * 2 + 1


async def test_over_budget_then_late_result_serves_the_next(make: Make, fake: Fake) -> None:
    encoder = make()
    with pytest.raises(EncodeTimeout):
        await tokens(encoder, f"{D}H", budget=0.0)
    assert encoder.stats.late == 1
    fake.gate.set()
    await until(lambda: len(encoder.cache) == 1)
    assert await tokens(encoder, f"{D}H", budget=0.0) == fake_ids(f"{D}H")
    assert len(fake.calls) == 1


async def test_a_cancelled_request_does_not_cancel_those_who_share_its_pieces(make: Make, fake: Fake) -> None:
    encoder = make()
    first = asyncio.create_task(tokens(encoder, f"{D}H"))
    await until(lambda: fake.held == 1)
    second = asyncio.create_task(tokens(encoder, f"{D}H{D}x"))
    await asyncio.sleep(0)
    first.cancel()
    fake.gate.set()
    assert await second == fake_ids(f"{D}H{D}x")
    assert first.cancelled()


@pytest.mark.parametrize(("mark", "bad_text"), [("B", True), ("P", False)])
async def test_a_text_that_cannot_be_encoded_spoils_no_other(make: Make, mark: str, bad_text: bool) -> None:
    encoder = make()
    with pytest.raises(TokenizerError) as error:
        await tokens(encoder, f"{D}good{D}{mark}{D}fine")
    assert error.value.bad_text is bad_text
    assert "request" not in str(error.value)
    assert [encoder.cache.get(encoder.cut(f"{D}{word}").keys[0]) is None for word in ("good", "fine")] == [False] * 2
    assert await tokens(encoder, f"{D}good{D}fine") == fake_ids(f"{D}good{D}fine")
    assert not encoder._pending
    assert encoder._pending_bytes == 0


async def test_the_librarys_panic_is_survived(caplog: pytest.LogCaptureFixture) -> None:
    alphabet = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # both claim the white space between them
    left, right = AddedToken("b_", rstrip=True, normalized=False), AddedToken("\n\n", lstrip=True, normalized=False)
    tokenizer.add_tokens([left, right])
    encode = _encoder(tokenizer)
    with pytest.raises(TokenizerError, match="PanicException"):
        encode(["secretb_\n\n\n\n"], False)
    with ThreadPoolExecutor(1) as executor:
        encoder = Encoder(encode, executor)
        with pytest.raises(TokenizerError):
            await tokens(encoder, "secretb_\n\n\n\n")
        assert await tokens(encoder, "ab") == encode(["ab"], False)[0]
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("text", "inline"),
    [
        (f"{D}a{D}b{D}new{D}a", True),
        (f"{D}new{D}a{D}new", True),  # the same new piece twice
        (f"{D}a{D}" + "x" * 20, True),  # 21 bytes with its delimiter
        (f"{D}a{D}" + "x" * 21, False),
        (f"{D}a{D}B", True),  # cannot be encoded
    ],
)
async def test_a_little_new_text_needs_no_thread(make: Make, fake: Fake, text: str, inline: bool) -> None:
    encoder = make(inline_bytes=20 + len(D.encode()))
    await tokens(encoder, f"{D}a{D}b")
    here, before = threading.get_ident(), len(fake.calls)
    fake.threads.clear()
    if "B" in text:
        with pytest.raises(TokenizerError):
            await tokens(encoder, text)
        assert encoder.stats.failed == 1
    else:
        assert await tokens(encoder, text) == fake_ids(text)
        assert await tokens(encoder, text) == fake_ids(text)
        assert len(fake.calls) == before + 1
    assert {thread == here for thread in fake.threads} == {inline}
    encoder.cache.check()


def large(mark: str, pieces: int = 6) -> str:
    size = max(JOB_BYTES, LARGE_BYTES // pieces + 1)
    return "".join(f"{D}{mark}{n}" + "x" * size for n in range(pieces))


async def test_a_large_prompt_leaves_threads_to_others(make: Make, fake: Fake) -> None:
    encoder = make()
    slow = asyncio.create_task(tokens(encoder, large("H")))
    await until(lambda: fake.held == 1)
    for n in range(10):
        assert await tokens(encoder, f"{D}short{n}") == fake_ids(f"{D}short{n}")
    assert fake.held == 1, "the other thread is for the others"
    fake.gate.set()
    assert await slow == fake_ids(large("H"))


async def test_large_prompts_take_turns(make: Make, fake: Fake) -> None:
    encoder = make()
    first = asyncio.create_task(tokens(encoder, large("H")))
    await until(lambda: fake.held == 1)
    second = asyncio.create_task(tokens(encoder, large("z")))
    await until(lambda: len(encoder._large) == 2)
    fake.gate.set()
    await asyncio.gather(first, second)
    order = "".join(call[0][len(D)] for call in fake.calls)
    assert order == "HHzHzHzHzHzz"


async def test_a_full_queue_turns_prompts_away(make: Make, fake: Fake) -> None:
    encoder = make(max_pending_bytes=100)
    waiting = asyncio.create_task(tokens(encoder, D + "H" * 90))
    await until(lambda: fake.held == 1)
    with pytest.raises(EncodeTimeout):
        await tokens(encoder, D + "x" * 20)
    fake.gate.set()
    await waiting
    assert await tokens(encoder, D + "x" * 200) == fake_ids(D + "x" * 200), "alone, any size goes"


@pytest.mark.parametrize("max_bytes", [0, SEGMENT_BYTES, 5000])
async def test_any_bound_of_the_cache_gives_the_same_ids(make: Make, max_bytes: int) -> None:
    rng = random.Random(3)
    encoder = make(max_bytes=max_bytes)

    async def one() -> None:
        text = "".join(D + rng.choice("abcdé") * rng.randrange(1, 200) for _ in range(rng.randrange(1, 8)))
        assert await tokens(encoder, text) == fake_ids(text)
        encoder.cache.check()

    for _ in range(20):
        await asyncio.gather(*(one() for _ in range(5)))
    assert not encoder._pending


def test_segment_cache_replaces_and_counts() -> None:
    cache = SegmentCache(2 * SEGMENT_BYTES + 50)
    first = cache.put(b"a", b"1234")
    second = cache.put(b"a", b"5678")
    assert first.serial != second.serial
    assert cache.get(b"a") is second
    cache.check()
    cache.put(b"b", b"xxxx")
    assert cache.get(b"a") is second
    cache.put(b"c", b"yyyy")
    cache.check()
    assert cache.get(b"b") is None, "the least recently used one went"


def test_the_same_text_with_special_tokens_has_another_name() -> None:
    assert Pieces(b"a", [0, 1]).keys != Pieces(b"a", [0, 1], special=True).keys


async def test_lone_surrogates_are_the_requests_fault(make: Make, fake: Fake) -> None:
    with pytest.raises(TokenizerError) as error:
        make().cut("\ud800")
    assert error.value.bad_text
    assert not fake.calls


async def test_one_prompt_of_so_many_is_verified(make: Make) -> None:
    encoder = make(verify_every=3)
    for n in range(9):
        await tokens(encoder, f"{D}a{D}{n}")
    await until(lambda: encoder.stats.verified == 3)
    assert encoder.stats.mismatches == 0
    assert encoder.incremental


async def test_a_difference_switches_cutting_off(make: Make, fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    encoder = make(verify_every=1)
    await tokens(encoder, "warm")  # one piece: nothing to compare
    fake.wrong = True
    await tokens(encoder, f"{D}my-secret{D}x")
    await until(lambda: encoder.stats.verified == 1)
    assert encoder.stats.mismatches == 1
    assert not encoder.incremental
    assert len(encoder.cache) == 0
    assert "incremental tokenization is off" in caplog.text
    assert "secret" not in caplog.text
    fake.wrong = False
    assert await tokens(encoder, f"{D}a{D}b") == fake_ids(f"{D}a{D}b")
    assert fake.texts[-1] == f"{D}a{D}b", "whole from now on"


async def test_verification_waits_for_large_prompts(make: Make, fake: Fake) -> None:
    encoder = make(verify_every=1)
    slow = asyncio.create_task(tokens(encoder, large("H")))
    await until(lambda: fake.held == 1)
    await tokens(encoder, f"{D}a{D}b")
    assert f"{D}a{D}b" not in fake.texts
    fake.gate.set()
    await slow
    await tokens(encoder, f"{D}a{D}b")
    await until(lambda: encoder.stats.verified >= 1)


async def test_nothing_is_logged_of_a_text(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    encoder = make()
    for text in (f"{D}B-secret", f"{D}P-secret", f"{D}secret"):
        try:
            await tokens(encoder, text)
        except TokenizerError:
            pass
    assert "secret" not in caplog.text


def test_a_hub_id_that_is_not_cached_names_the_remedy() -> None:
    with pytest.raises(TokenizerError, match=r"'kvcar-tests/none'.*hub cache.*tokenizer_allow_download: true"):
        load("kvcar-tests/none")


def test_what_nobody_waits_for_is_not_begun_at_the_end() -> None:
    """Python joins its threads when it exits: a queue of abandoned texts would have to be encoded first."""
    executor = thread_pool(1)
    prompter = Prompter.load(Options(tokenizer=str(SMALL), models=("m",)), executor=executor)
    begun, go = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        go.wait(10)

    running = executor.submit(first)
    waiting = executor.submit(lambda: None)
    assert begun.wait(10)
    prompter.end()
    assert waiting.cancelled()
    assert not running.done()
    go.set()
    running.result(10)
