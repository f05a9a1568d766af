"""What to do: a table for streams, a table for requests that passed unscored. Pure.

A stream's rule is the first whose pattern is found in "state: error"; docs/unscored.md has the second table too (a test
compares).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from extproc.reasons import Reason


class Remedy(NamedTuple):
    """key: stable, for the page and its tests; title: what it means; remedy: what to do."""

    key: str
    pattern: str
    title: str
    remedy: str


STREAMS: tuple[Remedy, ...] = (
    Remedy(
        "claimed", "is also claimed by",
        "Two instances name the same events endpoint, so neither is followed: their blocks must not be mixed.",
        "Give each instance its own events and replay endpoint; several data-parallel ranks of one engine are one "
        "instance with dp_size.",
    ),
    Remedy(
        "max_streams", "max_streams",
        "More streams than events.max_streams: this instance is not followed and counts as holding nothing.",
        "Raise events.max_streams; memory grows with the blocks of each stream.",
    ),
    Remedy(
        "rank", "^missing",
        "A rank of this instance has no events endpoint, so the instance is as good as nothing (its worst rank).",
        "Compare dp_size with the engine's data-parallel size; the engine publishes rank r on the base port + r.",
    ),
    Remedy(
        "topic", "messages with topic",
        "Events arrive under another topic than the configured one and are ignored.",
        "Set the instance's topic to the engine's (kv-events-config topic), or to \"\" for all.",
    ),
    Remedy(
        "block_size", "block_size|are not indexed",
        "The engine's blocks have another size than the pool's: they cannot be compared and are not counted.",
        "Set the pool's block_size to the engine's --block-size, or to auto; all engines of a pool need the same.",
    ),
    Remedy(
        "wrong_rank", "of data-parallel rank",
        "Events of another data-parallel rank arrive at this endpoint.",
        "Ports are shifted: compare the base port of events with the engine's, and dp_size with its ranks.",
    ),
    Remedy(
        "connect", "cannot connect|onnection .*lost|refused|^offline",
        "No connection to the engine's event publisher. Requests still go there, without cache hits.",
        "Is the engine up? Is the port open from here? The engine has to bind: endpoint tcp://*:5557 with the star, "
        "a host name makes it connect instead.",
    ),
    Remedy(
        "capacity", "over the bound",
        "The engine holds more blocks than the bound: the view was dropped and is built again.",
        "Raise events.max_blocks_per_stream (max_unanchored_blocks if that is named) to the engine's num_gpu_blocks "
        "plus its host blocks.",
    ),
    Remedy(
        "buffer", "max_buffered_bytes",
        "More events came during a replay than may be kept, so the replay was given up.",
        "Raise events.max_buffered_bytes, or let the engine keep fewer replay steps.",
    ),
    Remedy(
        "fetch", "waiting for the engine's answer|^fetch: $",
        "The engine is being asked for what it holds.",
        "Nothing: this takes seconds at most.",
    ),
    Remedy(
        "replay", "no end marker|going on without replay|^backoff|resync failed|it has a hole|it ends at|replay ",
        "The replay failed: what the engine held before is unknown until it is stored again.",
        "Check the replay endpoint and its port (5558 by default); a slow engine needs a longer "
        "events.replay_timeout_ms. Hits return by themselves as prompts are seen again.",
    ),
    Remedy(
        "restarted", "restarted",
        "The engine was restarted: its cache is empty and the view was built anew.",
        "Nothing, if that was intended. Look at the engine's log if it was not.",
    ),
    Remedy(
        "gap", "gap:",
        "Messages were lost on the way; the view is repaired from the replay, or starts again without one.",
        "One now and then is normal. If they repeat: raise the engine's hwm and buffer_steps, look at the network, and "
        "configure a replay endpoint.",
    ),
    Remedy(
        "parent", "never announced",
        "Blocks follow a parent that was never announced: what came before kvcar connected is not known.",
        "Configure the replay endpoint, or reset the engine's prefix cache once.",
    ),
    Remedy(
        "damaged", "^[a-z]+: (message|events?) |event:",
        "A message could not be understood, so the view no longer equals the engine's cache and is built again.",
        "Compare the pool's dialect with the engine and its version. `kvcar record` keeps the messages for a report.",
    ),
    Remedy(
        "fault", "^fault|internal error",
        "A fault of kvcar's own: the stream is being rebuilt.",
        "It heals itself. Please report the traceback in kvcar's log.",
    ),
    Remedy(
        "empty", "no event received yet|^empty|^waiting",
        "Connected or about to be, but the engine has published nothing yet, so its cache counts as empty.",
        "Normal until its first request. If requests have been served: enable_kv_cache_events must be true, publisher "
        "zmq, prefix caching on, and the topic equal.",
    ),
    Remedy(
        "incomplete", "^live: incomplete",
        "Blocks stored before kvcar connected are not known: hits may be under-estimated, never over-estimated.",
        "It heals as prompts return. With a replay endpoint the whole content is known at once.",
    ),
    Remedy(
        "other", "",
        "Needs attention.",
        "See kvcar's log; resync the stream if it does not recover.",
    ),
)  # fmt: skip
_COMPILED = tuple((re.compile(row.pattern), row) for row in STREAMS)


def remedy_of(stream: Mapping[str, Any]) -> Remedy | None:
    """The rule that fits a stream as `/streams` has it, None for one that has nothing wrong."""
    error = stream["error"]
    if error is None and stream["synchronized"]:
        if stream["complete"]:
            return None
        error = "incomplete"
    text = f"{stream['state']}: {error or ''}"
    return next(row for pattern, row in _COMPILED if pattern.search(text))


UNSCORED: dict[str, str] = {
    Reason.NO_BODY: "nothing",
    Reason.PATH: "nothing; disable ext_proc on such routes to save the round trip",
    Reason.METHOD: "nothing",
    Reason.ENCODING: "let clients send plain bodies",
    Reason.TOO_LARGE: "raise the limit of bytes, together with Envoy's request_body_buffer_limit",
    Reason.BAD_JSON: "the engine answers 400",
    Reason.BAD_REQUEST: "the engine answers 400",
    Reason.MODEL: "add the name or alias",
    Reason.NO_TOKENIZER: "see the error logged at start",
    Reason.NO_TEMPLATE: "set chat_template",
    Reason.RENDERER: "completions are scored all the same",
    Reason.TEMPLATE: "nothing: such templates are not run here, unless trust_request_chat_template says so",
    Reason.TEMPLATE_ERROR: "the engine answers 400",
    Reason.MULTIMODAL: "only text before the first media is comparable without the engine's own processor",
    Reason.EMBEDS: "nothing",
    Reason.BATCH: "send them one by one to profit from caches",
    Reason.HISTORY: "nothing",
    Reason.TIMEOUT: "raise limits.tokenize_timeout_ms, look at the CPU",
    Reason.INTERNAL: "please report it",
    Reason.NO_CANDIDATE: "/status says why for each instance",
}
"""By reason, as docs/unscored.md has it."""
