"""A model directory that brings Python code: it is not imported, whether its tokenizer can be loaded without or not."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from extproc.prompt.tokenizer import TokenizerError, load
from tests.tokenizers import SMALL

EVIL = """
from pathlib import Path
(Path(__file__).parent / "was-run").touch()
Path({mark!r}).touch()
class Evil: ...
"""


def plant(folder: Path, mark: Path) -> None:
    """Code at every place where Hugging Face's files may name some."""
    for name in ("tokenization_evil", "configuration_evil", "processing_evil", "modeling_evil"):
        (folder / f"{name}.py").write_text(EVIL.format(mark=str(mark)))
    at = {
        "tokenizer_config.json": {"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]},
        "config.json": {"AutoConfig": "configuration_evil.Evil", "AutoModel": "modeling_evil.Evil",
                        "AutoTokenizer": "tokenization_evil.Evil"},
        "processor_config.json": {"AutoProcessor": "processing_evil.Evil"},
    }  # fmt: skip
    for name, auto_map in at.items():
        path = folder / name
        given = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**given, "auto_map": auto_map}))


@pytest.mark.parametrize("changes", [{}, {"tokenizer_class": "Evil"}, {"tokenizer_class": "EvilTokenizerFast"}])
@pytest.mark.parametrize("model_type", ["qwen3", "evil", None])
def test_code_of_a_model_is_never_run(changes: dict[str, str], model_type: str | None, tmp_path: Path) -> None:
    folder, mark = tmp_path / "model", tmp_path / "was-run"
    shutil.copytree(SMALL, folder)
    plant(folder, mark)
    for name, more in (("tokenizer_config.json", changes), ("config.json", {"model_type": model_type})):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **{k: v for k, v in more.items() if v}}))
    with suppress(TokenizerError):
        assert load(str(folder)).vocabulary > 0
    assert not mark.exists()
    assert not (folder / "was-run").exists()
    assert not [name for name in sys.modules if "evil" in name]
