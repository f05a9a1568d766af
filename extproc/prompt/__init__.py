"""From a chat to the engine's very token ids, and to content keys. See README.md of extproc."""

from extproc.prompt.prompter import Options, Prompt, Prompter
from extproc.prompt.stats import Stats

__all__ = ["Options", "Prompt", "Prompter", "Stats"]
