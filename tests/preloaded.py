"""What forked.py's server imports before it forks: all that `kvcar serve` and the emulator import."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # as every kvcar of the tests has it; the hub's library reads it once

import transformers.models.auto.tokenization_auto
from transformers.utils import chat_template_utils

import examples.emulator.server
import examples.emulator.text
import extproc.app
import extproc.assembly
import extproc.cli

__all__ = ["chat_template_utils", "examples", "extproc", "transformers"]
