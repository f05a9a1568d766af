"""Chat templates: which one renders a request, and rendering it.

Templates come from the model directory or the operator and run only in the sandboxed environment of transformers (its
tojson, loop controls, generation tag, block trimming), compiled once and kept. `transformers` is imported on the first
compilation, not with this module.

Limits: RENDER_SECONDS for compiling and for rendering, MAX_SOURCE and MAX_TEXT letters, and those of sandbox.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import meta, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from extproc.prompt.content_format import loops_over, wants_list
from extproc.prompt.deadline import TooSlow, within
from extproc.prompt.sandbox import bound_products, new_environment, renderer_of

# Parameters of apply_chat_template: names that never reach a template of the engine as its variables.
CALL_PARAMETERS = frozenset(
    ("tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask", "padding", "truncation", "max_length",
     "tokenizer_kwargs", "sanitize_control_tokens", "add_generation_prompt", "continue_final_message")
)  # fmt: skip
# Names that would replace the conversation, the tools or the template itself.
RESERVED = frozenset(("chat_template", "messages", "conversation", "tools"))

MAX_SOURCE = 1 << 20
MAX_TEXT = 256 << 20
RENDER_SECONDS = 1.0  # real templates take milliseconds


class BadTemplate(ValueError):
    """A template that does not compile."""


class RenderError(ValueError):
    """The template refused the conversation, or failed on it. Carries no text of the request."""


class ChatTemplate:
    """One compiled template. Rendering is thread-safe and holds the GIL for its whole time."""

    def __init__(self, source: str) -> None:
        """Raises BadTemplate. Some 10 ms, and the import of transformers the first time."""
        if len(source) > MAX_SOURCE:
            raise BadTemplate(f"chat template of {len(source)} letters: at most {MAX_SOURCE} are taken")
        environment = new_environment()
        _shorten_access(environment)
        self.source = source
        try:
            self._compiled = within(RENDER_SECONDS, lambda: environment.from_string(source))
            self._compiled.globals = dict(self._compiled.globals)  # copied for each rendering: not from a ChainMap
            self._render_all = renderer_of(self._compiled)
            tree = environment.parse(source)
            self.variables: frozenset[str] = frozenset(meta.find_undeclared_variables(tree))
            self.list_format = wants_list(tree)
            self.loops_over = loops_over(tree)
        except (Exception, TooSlow) as error:  # Python's compiler has limits of its own: SyntaxError, ValueError
            raise BadTemplate(f"chat template does not compile: {type(error).__name__}") from error
        self.knows_developer = '"developer"' in source or "'developer'" in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt's text. `variables` hold the special tokens' texts and whatever else the template may read.

        Raises RenderError, also for what takes longer than RENDER_SECONDS or gives more than MAX_TEXT.
        """
        values = dict(variables)
        for name in ("messages", "tools", "documents", "add_generation_prompt"):
            values.pop(name, None)

        def work() -> str:
            if continue_final_message:
                rendered, _ = self._render_all(
                    conversations=[list(messages)],
                    tools=tools,
                    documents=documents,
                    chat_template=self.source,
                    continue_final_message=True,
                    add_generation_prompt=add_generation_prompt,
                    **values,
                )
                return str(rendered[0])
            return str(
                self._compiled.render(
                    messages=messages,
                    tools=tools,
                    documents=documents,
                    add_generation_prompt=add_generation_prompt,
                    **values,
                )
            )

        try:
            text = within(RENDER_SECONDS, work)
        except (Exception, TooSlow) as error:
            raise RenderError(type(error).__name__) from None
        if len(text) > MAX_TEXT:
            raise RenderError(f"more than {MAX_TEXT} letters")
        return text


def wants_system_first(source: str) -> bool:
    """True if the template refuses a system message behind others. Tried as the engine tries it: in a bare sandbox,
    where whatever else it refuses or lacks counts as a refusal, too."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    messages = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    bound_products(environment)
    try:
        within(
            RENDER_SECONDS,
            lambda: environment.from_string(source).render(messages=messages, add_generation_prompt=False),
        )
    except (Exception, TooSlow):
        return True
    return False


PLAIN_TYPES = frozenset((str, int, float, bool, list, dict, type(None)))
FORMATTERS = ("format", "format_map")  # bound methods that the sandbox wraps
DICT_ATTRIBUTES = frozenset(dir(dict))


class _ItemsFirst(CodeGenerator):
    """Compiles `name.key` to the item itself where `name` is a plain dict that has it: no call for most of what a chat
    template reads. Anything else asks the environment."""

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:
        if not isinstance(node.node, nodes.Name) or node.attr in DICT_ATTRIBUTES:
            super().visit_Getattr(node, frame)
            return
        owner, name = frame.symbols.ref(node.node.name), repr(node.attr)
        self.write(f"({owner}[{name}] if type({owner}) is dict and {name} in {owner} else ")
        super().visit_Getattr(node, frame)
        self.write(")")


def _shorten_access(environment: Any) -> None:
    """Makes the sandbox's attribute access, most of what rendering a chat costs, shorter where its answer is known:

    `message.role` on a plain dict is the item at once, or undefined (the sandbox asks for an attribute first, fails,
    and takes the item); names that dict has as attributes go the sandbox's way. And whether a name is safe depends on
    the type of its owner alone: the sandbox is asked once for each type and name.
    """
    sandboxed, is_safe = environment.getattr, environment.is_safe_attribute
    safe: dict[tuple[type, str], bool] = {}
    absent: dict[str, Any] = {}  # what a dict lacks is undefined by its name alone

    def read(owner: Any, name: str) -> Any:
        kind = type(owner)
        if kind is dict and name not in DICT_ATTRIBUTES:
            if name in owner:
                return owner[name]
            found = absent.get(name)
            if found is None:
                found = environment.undefined(obj={}, name=name)
                if len(absent) < 1000:
                    absent[name] = found
            return found
        known = safe.get((kind, name))
        if known is None and len(safe) < 1000:
            known = safe[kind, name] = bool(is_safe(owner, name, None)) and name not in FORMATTERS
        if known:
            try:
                value = getattr(owner, name)
            except AttributeError:
                return sandboxed(owner, name)
            if kind is str or type(value) in PLAIN_TYPES:
                return value
        return sandboxed(owner, name)

    environment.getattr = read
    environment.code_generator_class = _ItemsFirst


@lru_cache(maxsize=16)
def request_template(source: str) -> ChatTemplate:
    """A template that a request brought, where the operator trusts those. Raises BadTemplate."""
    return ChatTemplate(source)


class Templates:
    """The templates of one model and the engine's order among them: the operator's, the processor's (only for requests
    without tools), the tokenizer's (of several named ones "tool_use" with tools, else "default")."""

    def __init__(
        self,
        *,
        given: str | None = None,
        processor: str | None = None,
        tokenizer: str | Mapping[str, str] | None = None,
    ) -> None:
        """Raises BadTemplate for a template that would be used and does not compile."""
        named = tokenizer if isinstance(tokenizer, Mapping) else {}
        if given is not None and given in named:
            given = named[given]
        if given is not None:
            self._plain: ChatTemplate | None = ChatTemplate(given)
            self._with_tools: ChatTemplate | None = self._plain
            return
        default = named.get("default") if named else tokenizer
        with_tools = named.get("tool_use", default) if named else default
        plain = processor if processor is not None else default
        self._plain = ChatTemplate(plain) if isinstance(plain, str) else None
        if with_tools == plain:
            self._with_tools = self._plain
        else:
            self._with_tools = ChatTemplate(with_tools) if isinstance(with_tools, str) else None

    def select(self, *, tools: bool) -> ChatTemplate | None:
        return self._with_tools if tools else self._plain

    @property
    def all(self) -> list[ChatTemplate]:
        return [item for item in dict.fromkeys((self._plain, self._with_tools)) if item is not None]
