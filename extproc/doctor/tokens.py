"""Checks that kvcar computes the very tokens the engines compute: sample chats against their render or /tokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from extproc.config import Pool
from extproc.doctor.check import Check, Found, Skip
from extproc.doctor.context import Context
from extproc.doctor.engines import of
from extproc.doctor.finding import Finding, error, note, warning
from extproc.doctor.http import Answer
from extproc.doctor.samples import CHATS, TEXT
from extproc.openai import Body, Endpoint
from extproc.reasons import Unscored
from kvindex.fleet import Instance

if TYPE_CHECKING:
    from extproc.prompt.prompter import Prompter

EVERY = 4
"""Engines asked about every sample; the others about one that shows most, since they should be equal."""
MOST = "tool_result"
AROUND = 6  # tokens shown on each side of a difference
RENDER = {"chat": "/v1/chat/completions/render", "text": "/v1/completions/render"}


@dataclass(frozen=True, slots=True)
class Compared:
    """One sample at one engine. `ours` and `theirs`: token ids, or why there are none."""

    sample: str
    by: str
    ours: list[int] | str
    theirs: list[int] | str

    @property
    def equal(self) -> bool:
        """Two refusals are equal: a template that refuses tools does so on both sides."""
        return self.ours == self.theirs or (isinstance(self.ours, str) and isinstance(self.theirs, str))


async def loads(context: Context) -> Found:
    found: list[Finding] = []
    for pool in context.pools:
        prompter = await context.prompter(pool)
        if isinstance(prompter, str):
            remote = pool.remote_tokenizer is not None
            make = note if remote else error
            found.append(
                make(
                    "tokens.load",
                    f"pool {pool.name}",
                    "tokenizer or template cannot be loaded here"
                    + (": the engines are asked, over the network" if remote else ": its requests pass unscored"),
                    cause="pools[*].tokenizer or chat_template names something else than what the engine loads",
                    evidence=(prompter[:400],),
                    remedy="give the directory that the engine was started with",
                )
            )
        elif not prompter.templates:
            found.append(
                warning(
                    "tokens.no_template",
                    f"pool {pool.name}",
                    "there is no chat template: chats pass unscored (no_template)",
                    cause="the tokenizer's directory holds none",
                    remedy="copy the model's chat_template.jinja there, or set pools[*].chat_template",
                )
            )
    return Found(tuple(found), ", ".join(pool.tokenizer for pool in context.pools))


async def compare(context: Context) -> Found:
    found: list[Finding] = []
    samples = by = 0
    for pool in context.pools:
        prompter = await context.prompter(pool)
        if isinstance(prompter, str):
            continue
        instances = await context.answering(pool)
        reported: set[str] = set()
        for index, one in enumerate(instances):
            chosen = CHATS if index < EVERY else {MOST: CHATS[MOST]}
            rows = await _of_engine(context, pool, one, prompter, chosen)
            asked = [row for row in rows if row is not None]
            samples += len(asked)
            by += bool(asked)
            bad = [row for row in asked if not row.equal]
            if not asked and "no_api" not in reported:
                reported.add("no_api")
                found.append(_no_api(pool, one))
            if bad and (key := " ".join(row.sample for row in bad)) not in reported:
                reported.add(key)
                found.append(_differ(pool, one, bad, len(asked), prompter))
    if not samples and not found:
        raise Skip("no tokenizer could be loaded")
    return Found(tuple(found), f"{samples} samples equal, by {by} engines")


async def _of_engine(
    context: Context, pool: Pool, one: Instance, prompter: Prompter, chosen: Mapping[str, dict[str, Any]]
) -> list[Compared | None]:
    """Per sample what both sides make of it; None where the engine cannot be asked."""

    async def chat(name: str, fields: dict[str, Any]) -> Compared | None:
        body = {"model": pool.models[0], **fields}
        return await _one(context, one, prompter, name, Endpoint.CHAT, body)

    tasks = [chat(name, fields) for name, fields in chosen.items()]
    if len(chosen) > 1:
        tasks.append(_one(context, one, prompter, "text", Endpoint.COMPLETIONS, {"model": pool.models[0], **TEXT}))
    return await asyncio.gather(*tasks)


async def _one(
    context: Context, one: Instance, prompter: Prompter, sample: str, endpoint: Endpoint, body: dict[str, Any]
) -> Compared | None:
    by, theirs = await ids_of(context, one, body, "text" if endpoint is Endpoint.COMPLETIONS else "chat")
    if theirs is None:
        return None
    prompt = await prompter.prompt_of(Body(endpoint, body["model"], body))
    ours = f"{prompt.reason} {prompt.detail}".strip() if isinstance(prompt, Unscored) else prompt.ids
    return Compared(sample, by, ours, theirs)


async def ids_of(
    context: Context, one: Instance, body: dict[str, Any], kind: str
) -> tuple[str, list[int] | str | None]:
    """(path asked, the engine's ids | why it refuses | None = it has no such API)."""
    base = f"http://{one.address}"
    for path in (RENDER[kind], "/tokenize"):
        answer = await context.http.post(base + path, body, headers=context.client_headers())
        if answer.ok and (ids := _ids(answer)) is not None:
            return path, ids
        if answer.status in (400, 422):
            return path, f"HTTP {answer.status}"
    return "", None


def _ids(answer: Answer) -> list[int] | None:
    told = answer.json()
    if isinstance(told, list):
        told = told[0] if len(told) == 1 else None
    ids = told.get("token_ids", told.get("tokens")) if isinstance(told, dict) else None
    return ids if isinstance(ids, list) and all(isinstance(one, int) for one in ids) else None


def _no_api(pool: Pool, one: Instance) -> Finding:
    return note(
        "tokens.no_api",
        of(pool, one),
        "tokens could not be compared: the engine has neither a render endpoint nor /tokenize",
        cause="another engine than vLLM, or a proxy that hides these paths",
        remedy="use --live: it compares prompt_tokens of answers",
    )


def _differ(pool: Pool, one: Instance, bad: Sequence[Compared], asked: int, prompter: Prompter) -> Finding:
    """One finding for all samples that differ, with the first difference of the shortest."""
    decode = decoder(pool)
    shown = min(bad, key=lambda row: len(row.ours) if isinstance(row.ours, list) else 0)
    names = ", ".join(row.sample for row in bad)
    return error(
        "tokens.differ",
        of(pool, one),
        f"{len(bad)} of {asked} sample prompts have other tokens here than in the engine: blocks behind the first "
        "difference never match",
        cause=_cause(bad, decode),
        evidence=(f"samples that differ: {names}", *difference(shown, decode)),
        remedy="make pools[*].tokenizer, chat_template, chat_template_kwargs and content_format those of the engine "
        "(--tokenizer, --chat-template, --default-chat-template-kwargs, --chat-template-content-format)",
    )


def difference(row: Compared, decode: Callable[[Sequence[int]], str] | None) -> tuple[str, ...]:
    """The first token that differs, with what stands around it on both sides."""
    ours, theirs = row.ours, row.theirs
    if isinstance(ours, str) or isinstance(theirs, str):
        return (
            f"{row.sample}: here {ours if isinstance(ours, str) else f'{len(ours)} tokens'}; "
            f"engine ({row.by}) {theirs if isinstance(theirs, str) else f'{len(theirs)} tokens'}",
        )
    at = first_difference(ours, theirs)

    def around(ids: list[int]) -> str:
        part = ids[max(0, at - AROUND) : at + AROUND]
        return f"token {at} is {ids[at] if at < len(ids) else 'the end'}" + (f", in {decode(part)!r}" if decode else "")

    return (
        f"{row.sample}: {len(ours)} tokens here, {len(theirs)} in the engine ({row.by}), equal up to token {at}",
        f"here:   {around(ours)}",
        f"engine: {around(theirs)}",
    )


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _cause(bad: Sequence[Compared], decode: Callable[[Sequence[int]], str] | None) -> str:
    """Template or tokenizer: the same text cut differently is the tokenizer's, another text the template's."""
    both = [(row.ours, row.theirs) for row in bad if isinstance(row.ours, list) and isinstance(row.theirs, list)]
    if not both:
        return "one side refuses the prompt: the chat templates differ"
    if any(ours[1:] == theirs or ours == theirs[1:] for ours, theirs in both):
        return "a begin-of-text token more on one side: the template writes it, or add_special_tokens differs"
    if decode is not None and all(decode(ours) == decode(theirs) for ours, theirs in both):
        return "the same text is cut into other tokens: the tokenizers differ"
    if all(row.sample == "text" for row in bad):
        return "a plain text has other tokens: the tokenizers differ"
    if {row.sample for row in bad} <= {"tools", "tool_result"}:
        return "only prompts with tools differ: another chat template, or the engine formats tools differently"
    return "the rendered text differs: the chat templates, or their default variables, differ"


def decoder(pool: Pool) -> Callable[[Sequence[int]], str] | None:
    """Tokens as text, special ones too; None when there is no tokenizer.json at hand."""
    from tokenizers import Tokenizer

    path = Path(pool.tokenizer).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        loaded = Tokenizer.from_file(str(path))
    except Exception:  # the library raises bare Exception
        return None
    return lambda ids: str(loaded.decode(list(ids), skip_special_tokens=False))


CHECKS = (
    Check("tokens.load", "Tokens", "tokenizer and template load", (), loads),
    Check("tokens.equal", "Tokens", "prompts have the engines' own tokens", ("engines", "tokens"), compare),
)
