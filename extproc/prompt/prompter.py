"""One pool's way from a parsed body to tokens and content keys.

    prompter = Prompter.load(Options(tokenizer="models/qwen3", models=("qwen3",)))      blocking, at start
    body = parse_body(path, headers, data)                                              which model?
    prompt = await prompter.prompt_of(body)                                             Prompt or Unscored, never raises
    keys = prompter.keys(prompt, block_size=16)

Owned by one event loop. No text of a request is logged or kept after its tokens, except in the bounded caches.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from extproc import normalize, openai
from extproc.openai import Body, ChatRequest, IdsRequest, Request
from extproc.profiles import PROFILES
from extproc.prompt import segments as rule
from extproc.prompt import tokenizer as tokenizers
from extproc.prompt.chain import ChainCache
from extproc.prompt.encoder import Encoder, EncodeTimeout, Pieces, Segment
from extproc.prompt.probe import pieces_agree
from extproc.prompt.remote import RemoteError
from extproc.prompt.stats import Stats
from extproc.prompt.template import (
    CALL_PARAMETERS,
    RESERVED,
    BadTemplate,
    ChatTemplate,
    RenderError,
    Templates,
    request_template,
    wants_system_first,
)
from extproc.prompt.tokenizer import Loaded, TokenizerError, reraise_exit
from extproc.reasons import Reason, Refused, Unscored, bad
from extproc.requests import thinking
from kvindex.hashing import DEFAULT_SEED, content_keys, extras_bytes, pack_tokens, root_bytes

log = logging.getLogger(__name__)

MEDIA_MARK = f"kvcar-media-{os.urandom(12).hex()}"  # nobody outside can write it into a text
MIN_BEFORE_MEDIA = 16  # tokens
REMOTE_FOR = (Reason.NO_TOKENIZER, Reason.NO_TEMPLATE, Reason.RENDERER)
ONLY_VLLM = (openai.Endpoint.RESPONSES, openai.Endpoint.MESSAGES)
EFFORTS = ("low", "medium", "high", "xhigh", "max")
LARGE_BODY = 262_144  # bytes from which on rendering and cutting leave the event loop, too


@dataclass(frozen=True, kw_only=True)
class Options:
    tokenizer: str  # directory, or hub id
    models: tuple[str, ...]  # served names and aliases; the first is the base model's own
    adapters: Mapping[str, str] | Sequence[str] = ()  # request name -> adapter name (or names that are both)
    revision: str | None = None
    allow_download: bool = False
    chat_template: str | None = None  # file, name of one of the tokenizer's templates, or Jinja text
    content_format: Literal["auto", "string", "openai"] = "auto"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    exclude_tools_when_tool_choice_none: bool = False
    trust_request_chat_template: bool = False
    renderer: Literal["auto", "jinja", "native"] = "auto"
    engine: Literal["vllm", "sglang", "xllm"] = "vllm"
    max_model_len: int | None = None
    timeout: float = 0.1  # seconds for all of a request's tokenization
    threads: int = 2  # only without an executor of the caller's
    segment_bytes: int = 128 << 20
    chain_bytes: int = 64 << 20
    incremental: bool = True
    verify_every: int = 512


class Remote(Protocol):
    """See remote.RemoteTokenizer."""

    asked: int
    failed: int
    known: int

    async def ids(self, body: Body, budget: float) -> bytes: ...

    def use(self, urls: Sequence[str]) -> None:
        """The engines to ask from now on."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)  # not frozen: three times cheaper to make
class Prompt:
    tokens: bytes = field(repr=False)  # packed u32, little endian
    count: int
    model: str
    adapter: str | None = None
    salt: str | None = field(default=None, repr=False)
    text: str | None = field(default=None, repr=False)  # None: given as ids
    pieces: tuple[Segment, ...] | None = field(default=None, repr=False)  # whose tokens are `tokens`, if cut so
    truncated: bool = False
    partial: bool = False  # media follow: `tokens` end before them, `count` is an estimate of all text
    reads_cache: bool = True  # False: the engine will not read its prefix cache for this request

    @property
    def ids(self) -> list[int]:
        return memoryview(self.tokens).cast("I").tolist()


class Prompter:
    def __init__(
        self,
        options: Options,
        loaded: Loaded | None,
        templates: Templates | None,
        *,
        executor: Executor | None = None,
        remote: Remote | None = None,
    ) -> None:
        """
        loaded  None: only prompts given as ids can be scored
        remote  asked for the ids of what cannot be rendered or encoded here
        """
        self.options = options
        self.stats = Stats()
        self.chain = ChainCache(options.chain_bytes)
        adapters = options.adapters
        self._adapters = dict(adapters) if isinstance(adapters, Mapping) else {name: name for name in adapters}
        self._models = frozenset(options.models)
        self._templates = templates
        self._loaded = loaded
        self._native = options.renderer == "native" or (
            options.renderer == "auto" and loaded is not None and loaded.native_renderer is not None
        )
        self._profile = PROFILES[options.engine]
        self.remote = remote
        self._executor = executor or tokenizers.thread_pool(options.threads)
        self._encoder = self._make_encoder(loaded, options) if loaded else None
        # What a template makes of Anthropic's API: tried here, not by the first request.
        self._system_first = _wants_system_first(self.templates)
        self._disabled_effort = self._find_disabled_effort()

    @classmethod
    def load(
        cls,
        options: Options,
        *,
        executor: Executor | None = None,
        strict: bool = True,
        remote: Remote | None = None,
    ) -> Prompter:
        """Blocking, 1 to 6 s.

        strict  raise TokenizerError or BadTemplate; otherwise log, and pass the requests concerned unscored
        """
        try:
            loaded: Loaded | None = tokenizers.load(
                options.tokenizer,
                revision=options.revision,
                allow_download=options.allow_download,
            )
        except TokenizerError as error:
            if strict:
                raise
            log.error("%s", error)
            loaded = None
        try:
            templates = templates_of(options, loaded) if loaded else None
        except BadTemplate as error:
            if strict:
                raise
            log.error("%s", error)
            templates = None
        return cls(options, loaded, templates, executor=executor, remote=remote)

    def _make_encoder(self, loaded: Loaded, options: Options) -> Encoder:
        around = rule.added_around(loaded.config)
        cutter = rule.Cutter(())
        if options.incremental:
            hints = [template.source for template in self._templates.all] if self._templates else []
            hints += [str(loaded.special_texts.get(name, "")) for name in ("bos_token", "eos_token")]
            cutter = rule.Cutter(rule.choose(loaded.config, hints))
            if cutter and not pieces_agree(loaded.encode, cutter.delimiters, around):
                log.error("incremental tokenization is off: the start-up probe found different ids")
                self.stats.mismatches += 1
                cutter, around = rule.Cutter(()), None
            elif not cutter:
                log.info("incremental tokenization is off: no added token of the tokenizer is a safe place to cut")
        return Encoder(
            loaded.encode,
            self._executor,
            threads=options.threads,
            cutter=cutter,
            around=around,
            max_bytes=options.segment_bytes,
            verify_every=options.verify_every,
            stats=self.stats,
        )

    def end(self) -> None:
        """No more requests: what waits for a thread, abandoned by its request, is not begun. Not waited for."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    # -- requests ------------------------------------------------------------------------------------------------------

    async def prompt_of(self, body: Body) -> Prompt | Unscored:
        """The tokens the engine computes for a body. Never raises (but CancelledError)."""
        try:
            result: Prompt | Unscored = await self._prompt_of(body)
        except Refused as refused:
            result = refused.unscored
        except EncodeTimeout:
            result = Unscored(Reason.TIMEOUT, f"budget {self.options.timeout} s")
        except TimeoutError:
            result = Unscored(Reason.TIMEOUT, f"budget {self.options.timeout} s")
        except TokenizerError as error:
            result = Unscored(Reason.BAD_REQUEST if error.bad_text else Reason.INTERNAL, str(error))
        except BaseException as error:
            reraise_exit(error)
            # The traceback of a failure of ours may quote the request: only its place is logged.
            log.error("prompt failed: %s", _place(error))
            result = Unscored(Reason.INTERNAL, type(error).__name__)
        if isinstance(result, Unscored):
            log.debug("unscored: %s %s", result.reason, result.detail)
        else:
            self.stats.prompts += 1
        return result

    async def _prompt_of(self, body: Body) -> Prompt:
        model, adapter = self._model(body.model)
        try:
            return await self._local(body, model, adapter)
        except Refused as refused:
            if self.remote is None or refused.unscored.reason not in REMOTE_FOR:
                raise
            request = openai.read(body)
            if isinstance(request, Unscored):
                raise
            try:
                tokens = await self.remote.ids(body, self.options.timeout)
            except RemoteError as error:
                if error.refused:
                    raise bad("refused by the engine's tokenizer") from None
                raise Refused(refused.unscored.reason, str(error)) from None
            whole = replace(request, truncate=None)  # the engine has cut already
            return self._cut(whole, tokens, None, None, model, adapter)

    async def _local(self, body: Body, model: str, adapter: str | None) -> Prompt:
        budget = self.options.timeout
        # a client's own template may take its second: not everybody's
        own_template = self.options.trust_request_chat_template and body.fields.get("chat_template")
        if body.size < LARGE_BODY and not own_template:
            request, text, pieces, behind = self._prepare(body)
        else:
            loop = asyncio.get_running_loop()
            end = loop.time() + budget
            async with asyncio.timeout(budget):
                request, text, pieces, behind = await loop.run_in_executor(self._executor, self._prepare, body)
            budget = max(0.0, end - loop.time())
        if isinstance(request, IdsRequest):
            return self._cut(request, pack_tokens(request.ids), None, None, model, adapter)
        encoder = self._encoder
        if encoder is None or text is None or pieces is None:
            raise Refused(Reason.NO_TOKENIZER)
        special = request.add_special_tokens
        segments = await encoder.segments(pieces, add_special_tokens=special, budget=budget)
        if behind is not None:
            tokens = b"".join(segment.tokens for segment in segments)
            if len(tokens) < 4 * MIN_BEFORE_MEDIA:
                raise Refused(Reason.MULTIMODAL, "too little text before the first media")
            found = self._cut(request, tokens, None, tuple(segments), model, adapter)
            return replace(found, count=found.count + behind, partial=True)
        encoder.watch(text, segments, special)
        tokens = segments[0].tokens if len(segments) == 1 else b"".join(segment.tokens for segment in segments)
        return self._cut(request, tokens, text, tuple(segments), model, adapter)

    def _model(self, name: str | None) -> tuple[str, str | None]:
        if name is None or name in self._models:
            return name or self.options.models[0], None
        adapter = self._adapters.get(name)
        if adapter is None:
            raise Refused(Reason.MODEL)
        return name, adapter

    @property
    def loaded(self) -> bool:
        """Whether the tokenizer could be loaded."""
        return self._loaded is not None

    def _prepare(self, body: Body) -> tuple[Request, str | None, Pieces | None, int | None]:
        """The request, and unless it gives ids, its text and the text's pieces; where media end the pieces, about how
        many tokens of text stand behind. Callable from a thread."""
        if not self._profile.every_endpoint and body.endpoint in ONLY_VLLM:
            raise Refused(Reason.RENDERER, "how this engine renders the endpoint is not known")
        request = openai.read(body)
        if isinstance(request, Unscored):
            raise Refused(request.reason, request.detail)
        if isinstance(request, IdsRequest):
            if self._loaded and not normalize.is_token_ids(request.ids, self._loaded.vocabulary):
                raise bad("token id outside the vocabulary")
            return request, None, None, None
        if self._encoder is None:
            raise Refused(Reason.NO_TOKENIZER)
        if isinstance(request, ChatRequest):
            if not self._profile.special_tokens:
                request = replace(request, add_special_tokens=False, truncate=None)
            try:
                text = self.render(request)
            except Refused as refused:
                if refused.unscored.reason is not Reason.MULTIMODAL:
                    raise
                return self._before_media(request, refused)
        else:
            text = request.text
        return request, text, self._encoder.cut(text, request.add_special_tokens), None

    def _before_media(self, request: ChatRequest, refused: Refused) -> tuple[Request, str, Pieces, int]:
        """The text up to the first message that holds media: blocks of it are comparable, those behind are not."""
        if self._encoder is None or request.truncate is not None or request.add_special_tokens:
            raise refused
        text = self.render(replace(request, messages=normalize.with_marks(request.messages, MEDIA_MARK)))
        pieces = self._encoder.cut_before(text, MEDIA_MARK)
        if pieces is None:
            raise refused
        return request, text, pieces, (len(text) - len(pieces.data)) // 4

    def render(self, request: ChatRequest) -> str:
        """The text of a chat. Raises Refused."""
        options = self.options
        if self._native:
            raise Refused(Reason.RENDERER)
        no_tools = options.exclude_tools_when_tool_choice_none
        template = self._template(request, request.tools is not None and not (no_tools and request.tool_choice_none))
        if request.merge_system and self._system_first:
            request = replace(request, messages=_one_system(request.messages))
        if request.thinking_disabled:
            effort = thinking(self._disabled_effort, request.variables)
            request = replace(request, overrides=effort | request.overrides, thinking_disabled=False)
        variables = self._variables(request, template)
        documents = variables.pop("documents", None)
        profile = self._profile
        automatic = options.content_format == "auto"
        list_format = profile.list_format(template) if automatic else options.content_format == "openai"
        given = profile.rendering(request, template, list_format=list_format, no_tools=no_tools)

        def rendered(tools: list[dict[str, Any]] | None) -> str:
            text = template.render(
                given.messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=given.add_generation_prompt,
                continue_final_message=given.continue_final_message,
                variables=variables,
            )
            return text + given.suffix

        try:
            try:
                return rendered(given.tools)
            except RenderError:
                if given.other_tools is None:
                    raise
                return rendered(given.other_tools)
        except RenderError as error:
            raise Refused(Reason.TEMPLATE_ERROR, str(error)) from None

    def _find_disabled_effort(self) -> str:
        """The reasoning effort that stands for "thinking disabled": low where the template refuses or ignores none."""

        def hello(effort: str) -> str | None:
            overrides = thinking(effort, {})
            try:
                return self.render(ChatRequest(messages=[{"role": "user", "content": "Hi"}], overrides=overrides))
            except Refused:
                return None

        without = hello("none")
        ignored = without is None or any(hello(effort) == without for effort in EFFORTS)
        return "low" if ignored else "none"

    def _template(self, request: ChatRequest, tools: bool) -> ChatTemplate:
        if request.chat_template is not None:
            if not self.options.trust_request_chat_template:
                raise Refused(Reason.TEMPLATE, "chat_template")
            try:
                return request_template(request.chat_template)
            except BadTemplate as error:
                raise Refused(Reason.TEMPLATE_ERROR, str(error)) from None
        found = self._templates.select(tools=tools) if self._templates else None
        if found is None:
            raise Refused(Reason.NO_TEMPLATE)
        return found

    def _variables(self, request: ChatRequest, template: ChatTemplate) -> dict[str, Any]:
        """Template variables by the engine's precedence: body fields, chat_template_kwargs, the engine's defaults."""
        given = request.variables
        special = self._loaded.special_texts if self._loaded else {}
        for name in given:
            if name in RESERVED or name in special:
                raise Refused(Reason.TEMPLATE, "reserved name in chat_template_kwargs")
        values = self._profile.variables(request, self.options.chat_template_kwargs)
        usable = template.variables | {"documents"}
        chosen = {name: value for name, value in values.items() if name in usable and name not in CALL_PARAMETERS}
        documents = chosen.get("documents")
        if documents is not None and not (
            isinstance(documents, list) and all(isinstance(item, dict) for item in documents)
        ):
            raise Refused(Reason.TEMPLATE_ERROR, "documents")
        return {**special, **chosen}

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _cut(
        self,
        request: Request,
        tokens: bytes,
        text: str | None,
        pieces: tuple[Segment, ...] | None,
        model: str,
        adapter: str | None,
    ) -> Prompt:
        count = len(tokens) // 4
        keep = self._kept(request, count)
        if keep is not None:
            side = request.side or request.own_side
            around = None
            if request.side is None and not isinstance(request, IdsRequest) and request.add_special_tokens:
                around = rule.added_around(self._loaded.config) if self._loaded else None
            tokens = _shortened(tokens, keep, side, around or ((), ()))
        return Prompt(
            tokens=tokens,
            count=len(tokens) // 4,
            model=model,
            adapter=adapter,
            salt=request.salt,
            text=text,
            pieces=pieces if keep is None else None,
            truncated=keep is not None,
            reads_cache=request.reads_cache,
        )

    def _kept(self, request: Request, count: int) -> int | None:
        """How many ids truncation leaves, None for all."""
        keep, longest = request.truncate, self.options.max_model_len
        if keep is None:
            return None
        if keep < 0:
            if longest is None:
                return None
            keep = longest if request.max_output == 0 else longest - 1
        elif longest is not None and keep > longest:
            raise bad("truncate_prompt_tokens over the model's length")
        if keep == 0:
            raise bad("truncated to nothing")
        return keep if keep < count else None

    def keys(self, prompt: Prompt, block_size: int, seed: int = DEFAULT_SEED, limit: int | None = None) -> list[bytes]:
        """Content keys of the prompt's whole blocks. Never raises for a Prompt of this prompter."""
        root = root_bytes(prompt.adapter)
        salted = extras_bytes([prompt.salt]) if prompt.salt is not None else b""
        if prompt.count < block_size:
            self.stats.short_prompts += 1
            return []
        if prompt.pieces is None:
            return content_keys(prompt.tokens, block_size, root=root, extras=[salted], seed=seed, limit=limit)
        return self.chain.keys(prompt.pieces, block_size, seed=seed, root=root, first_extras=salted, limit=limit)

    # -- for status, `kvcar tokens` and benchmarks ---------------------------------------------------------------------

    def token_texts(self, ids: Sequence[int]) -> list[str] | None:
        """The text of each token by itself, for people to read (a part of a character is U+FFFD); None without a
        tokenizer. About 2 us a token."""
        loaded = self._loaded
        return loaded.texts(ids) if loaded is not None and loaded.texts is not None else None

    @property
    def incremental(self) -> bool:
        return self._encoder is not None and self._encoder.incremental

    @property
    def delimiters(self) -> tuple[str, ...]:
        return self._encoder.delimiters if self._encoder else ()

    @property
    def templates(self) -> list[ChatTemplate]:
        return self._templates.all if self._templates else []

    def refresh_stats(self) -> Stats:
        """The counters with the sizes of the caches as of now."""
        stats = self.stats
        if self._encoder is not None:
            stats.cache_bytes = self._encoder.cache.bytes
        stats.chain_bytes = self.chain.bytes
        return stats


def _wants_system_first(templates: Sequence[ChatTemplate]) -> bool:
    """Whether Anthropic's inline system messages are merged into the first one."""
    return not templates or any(wants_system_first(template.source) for template in templates)


def _one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    texts = [message["content"] for message in messages if message["role"] == "system"]
    rest = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "".join(texts)}, *rest] if texts else rest


def _shortened(tokens: bytes, keep: int, side: str, around: tuple[Sequence[int], Sequence[int]]) -> bytes:
    """`keep` ids of the given side.

    around  ids that stay whatever the side: where a request names no side the engine lets the tokenizer cut, which
            shortens the text between its special ids
    """
    before, after = (4 * len(ids) for ids in around)
    end = len(tokens) - after
    inside = max(0, 4 * keep - before - after)
    middle = tokens[before : before + inside] if side == "right" else tokens[max(before, end - inside) : end]
    return (tokens[:before] + middle + tokens[end:])[: 4 * keep]


def templates_of(options: Options, loaded: Loaded) -> Templates:
    """Raises BadTemplate."""
    given = options.chat_template
    if given is not None and not (isinstance(loaded.tokenizer_template, dict) and given in loaded.tokenizer_template):
        given = read_template(given)
    return Templates(given=given, processor=loaded.processor_template, tokenizer=loaded.tokenizer_template)


def read_template(source: str) -> str:
    """A template given as a file, or as Jinja text (recognised by a brace or a line end). Raises BadTemplate."""
    if any(mark in source for mark in "{}\n"):
        return source
    try:
        return Path(source).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise BadTemplate(f"chat template {source}: {reason}") from None


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace is not None else "?"
    return f"{type(error).__name__} at {where}"
