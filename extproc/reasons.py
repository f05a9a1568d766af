"""Why a request passes unscored: a closed set, one counter label each.

Every unscored request has exactly one reason. Details name fields and limits, never text of the request.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    NO_BODY = "no_body"  # the headers ended the request
    PATH = "path"  # the path is none that carries a prompt
    METHOD = "method"  # not POST
    ENCODING = "encoding"  # content-encoding other than identity
    TOO_LARGE = "too_large"  # body over the limit
    BAD_JSON = "bad_json"  # body is no JSON
    BAD_REQUEST = "bad_request"  # wrong types, or what the engine answers with 400
    MODEL = "model"  # neither a served name nor an adapter of any pool
    NO_TOKENIZER = "no_tokenizer"  # tokenizer failed to load
    NO_TEMPLATE = "no_template"  # chat without a chat template
    RENDERER = "renderer"  # the engine renders this model's chats without a Jinja template
    TEMPLATE = "template"  # the request brings its own template or reserved template variables
    TEMPLATE_ERROR = "template_error"  # the template refused the conversation
    MULTIMODAL = "multimodal"  # images, audio, video, and too little text before them to compare
    EMBEDS = "embeds"  # prompt embeddings
    BATCH = "batch"  # several prompts in one request
    HISTORY = "history"  # the engine adds turns or tools that only it holds
    TIMEOUT = "timeout"  # over the time budget of tokenization
    INTERNAL = "internal"  # our fault
    NO_CANDIDATE = "no_candidate"  # no instance with a valid load report or role


@dataclass(frozen=True, slots=True)
class Unscored:
    """A request that passes without a decision: why, and a hint for the debug log that holds no request text."""

    reason: Reason
    detail: str = ""


class Refused(Exception):
    """Raised by the pure parsers where a request cannot be scored; their entry points turn it into Unscored."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(reason)
        self.unscored = Unscored(reason, detail)


def bad(detail: str) -> Refused:
    return Refused(Reason.BAD_REQUEST, detail)
