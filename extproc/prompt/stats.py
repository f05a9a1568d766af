"""What the prompt side counts: plain ints, written by the event loop, read by anybody."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Stats:
    prompts: int = 0  # requests turned into tokens
    short_prompts: int = 0  # of these, shorter than one block: scored with no hit
    known_pieces: int = 0  # found in the segment cache
    shared_pieces: int = 0  # waited for while another request had them encoded
    new_pieces: int = 0  # encoded
    encoded_bytes: int = 0  # of text
    late: int = 0  # encodings that came after the request's time budget
    failed: int = 0  # texts that the tokenizer could not encode, panics included
    verified: int = 0  # prompts whose pieces were compared with a whole encode
    mismatches: int = 0  # of these, different: incremental tokenization is off from then on
    cache_bytes: int = 0
    chain_bytes: int = 0
