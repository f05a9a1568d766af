"""A tokenizer from a directory or hub id, and encoding with it off the event loop.

`transformers` builds the tokenizer, so that the object is the engine's; encoding then uses its Rust backend directly,
by `encode_batch_fast` only: it releases the GIL, `encode` holds it for the whole text. Configured once (no truncation,
no padding), never after.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

# Models whose chats the engine (vLLM 0.32) renders by code of its own, never by a Jinja template.
NATIVE_MODEL_TYPES = frozenset(("gpt_oss",))
NATIVE_ARCHITECTURES = frozenset(
    ("DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration", "DeepseekV41ForCausalLM",
     "InklingForCausalLM", "InklingForConditionalGeneration", "KimiK3ForConditionalGeneration")
)  # fmt: skip
NATIVE_FILE = "tekken.json"  # Mistral's own tokenizer: the engine prefers it to the Hugging Face one


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded, or a text that it cannot encode. Carries no text of a request.

    bad_text  the text itself is at fault (lone surrogates): the engine refuses it too
    """

    def __init__(self, message: str, *, bad_text: bool = False) -> None:
        super().__init__(message)
        self.bad_text = bad_text


@dataclass(frozen=True)
class Loaded:
    """What a model directory says about its prompts."""

    encode: Callable[[Sequence[str], bool], list[bytes]]  # (texts, add_special_tokens) -> packed ids
    config: dict[str, Any]  # tokenizer.json as in use, as far as `settings` gives it
    special_texts: dict[str, Any]  # template variables bos_token, eos_token, ...
    tokenizer_template: str | dict[str, str] | None
    processor_template: str | None
    native_renderer: str | None  # why a Jinja template does not decide, or None
    vocabulary: int
    texts: Callable[[Sequence[int]], list[str]] | None = None  # each id's own text, for people to read


def load(source: str, *, revision: str | None = None, allow_download: bool = False) -> Loaded:
    """Blocking: 1 to 6 s (the import of transformers, a vocabulary of 10 to 30 MB).

    source          a directory, or a hub id found in the local hub cache (downloaded only if allowed)
    Raises TokenizerError with the reason.
    """
    # The library's own thread pool serves one big batch before anything else; our threads take turns instead.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    path = Path(source).expanduser()
    if source[:1] in ("", ".", "/", "~") and not path.is_dir():
        raise TokenizerError(f"tokenizer {source!r} is no directory")
    # Code that comes with a model is never run.
    options = {"local_files_only": not allow_download, "trust_remote_code": False, "revision": revision}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path) if path.is_dir() else source, **options)
        backend = tokenizer.backend_tokenizer
    except AttributeError:
        raise TokenizerError(f"tokenizer {source!r} has no fast backend (tokenizer.json)") from None
    except BaseException as error:
        reraise_exit(error)
        if isinstance(error, OSError) and not allow_download and not path.is_dir():
            # transformers' own text is about the network, which was never asked
            raise TokenizerError(
                f"tokenizer {source!r} is no directory and not in the local hub cache: give the model's directory, "
                "or set tokenizer_allow_download: true"
            ) from None
        raise TokenizerError(f"tokenizer {source!r} cannot be loaded: {type(error).__name__}: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False
    files = _Files(source, path, options)
    return Loaded(
        encode=_encoder(backend),
        config=settings(backend),
        special_texts=dict(tokenizer.special_tokens_map),
        tokenizer_template=tokenizer.chat_template,
        processor_template=_processor_template(files),
        native_renderer=_native_renderer(files),
        vocabulary=backend.get_vocab_size(with_added_tokens=True),
        texts=_texts(backend),
    )


def settings(backend: Any) -> dict[str, Any]:
    """What a backend's tokenizer.json says besides its vocabulary (writing all of it would take seconds)."""
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {
        "added_tokens": [
            {"content": token.content, **{flag: getattr(token, flag) for flag in flags}}
            for token in backend.get_added_tokens_decoder().values()
        ],
        "normalizer": _state(backend.normalizer),
        "post_processor": _state(backend.post_processor),
        "truncation": backend.truncation,
        "padding": backend.padding,
        "model": {"dropout": getattr(backend.model, "dropout", None)},
    }


def _state(component: Any) -> dict[str, Any] | None:
    if component is None:
        return None
    try:
        state = json.loads(component.__getstate__())
    except Exception:  # a component written in Python: of no known kind
        return {"type": "unknown"}
    return state if isinstance(state, dict) else {"type": "unknown"}


def _encoder(backend: Any) -> Callable[[Sequence[str], bool], list[bytes]]:
    swap = sys.byteorder != "little"

    def encode(texts: Sequence[str], add_special_tokens: bool) -> list[bytes]:
        try:
            encodings = backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
            packed = []
            for encoding in encodings:
                ids = array("I", encoding.ids)
                if swap:  # pragma: no cover
                    ids.byteswap()
                packed.append(ids.tobytes())
            return packed
        except BaseException as error:
            # The backend's panics are no Exception. Their message may quote the text: only the kind is kept.
            reraise_exit(error)
            bad_text = isinstance(error, (UnicodeError, TypeError))
            raise TokenizerError(type(error).__name__, bad_text=bad_text) from None

    return encode


def _texts(backend: Any) -> Callable[[Sequence[int]], list[str]]:
    def text(one: int) -> str:
        piece: str | None = backend.id_to_token(one)
        if piece is None:
            return ""
        # SentencePiece's mark is a space, which decoding one token alone would drop
        return piece.replace("\u2581", " ") if "\u2581" in piece else backend.decode([one], skip_special_tokens=False)

    return lambda ids: [text(one) for one in ids]


def reraise_exit(error: BaseException) -> None:
    """Lets what ends the process or a task through, where everything else is caught."""
    if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)) or type(error).__name__ == "CancelledError":
        raise error


class _Files:
    """JSON files beside the tokenizer, from its directory or the hub cache."""

    def __init__(self, source: str, path: Path, options: Mapping[str, Any]) -> None:
        self._source, self._path, self._options = source, path, options

    def find(self, name: str) -> Path | None:
        if self._path.is_dir():
            found = self._path / name
            return found if found.is_file() else None
        from transformers.utils import cached_file

        try:
            cached = cached_file(
                self._source,
                name,
                local_files_only=self._options["local_files_only"],
                revision=self._options["revision"],
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
                _raise_exceptions_for_gated_repo=False,
            )
        except (OSError, ValueError):
            return None
        return Path(cached) if cached else None

    def json(self, name: str) -> dict[str, Any]:
        found = self.find(name)
        try:
            value = json.loads(found.read_bytes()) if found else {}
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}


def _processor_template(files: _Files) -> str | None:
    """Template of a multimodal processor: the engine takes it before the tokenizer's when a request has no tools."""
    for name in ("processor_config.json", "chat_template.json"):
        template = files.json(name).get("chat_template")
        if isinstance(template, str):
            return template
    return None


def _native_renderer(files: _Files) -> str | None:
    if files.find(NATIVE_FILE):
        return NATIVE_FILE
    config = files.json("config.json")
    if config.get("model_type") in NATIVE_MODEL_TYPES:
        return str(config["model_type"])
    names = config.get("architectures")
    native = [name for name in names if name in NATIVE_ARCHITECTURES] if isinstance(names, list) else []
    return str(native[0]) if native else None


def thread_pool(threads: int) -> ThreadPoolExecutor:
    """Threads that encode; one pool may serve every tokenizer of the process."""
    return ThreadPoolExecutor(max_workers=threads, thread_name_prefix="kvcar-tokens")
