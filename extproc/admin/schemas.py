"""The shapes of the admin port's answers, for /openapi.json. Objects may hold more than is listed here."""

from __future__ import annotations

from collections.abc import Mapping

from extproc.admin.endpoint import Schema, any_of, listing, record, reference
from kvindex.fleet import InstanceState

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
WHOLE: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
TEXTS: Schema = {"type": "array", "items": TEXT}
TEXT_OR_NULL = any_of("string", "null")
NUMBER_OR_NULL = any_of("number", "null")
OBJECT_OR_NULL = any_of("object", "null")

INSTANCE_STATES = [str(state) for state in InstanceState]

COMPONENTS: Mapping[str, Schema] = {
    "Error": record({"error": TEXT}, {"detail": TEXT}),
    "Ready": record({"ready": FLAG, "pools": OBJECT}),
    "Instance": record(
        {"name": TEXT, "address": TEXT, "role": TEXT, "state": {"enum": INSTANCE_STATES}, "in_flight": COUNT},
        {"load": OBJECT_OR_NULL},
    ),
    "Stream": record(
        {
            "instance": TEXT,
            "dp_rank": COUNT,
            "endpoint": TEXT,
            "replay": TEXT_OR_NULL,
            "dialect": TEXT,
            "state": TEXT,
            "connected": FLAG,
            "synchronized": FLAG,
            "complete": FLAG,
            "sequence": any_of("integer", "null"),
            "error": TEXT_OR_NULL,
            "event_age_seconds": NUMBER_OR_NULL,
            "blocks": OBJECT_OR_NULL,
        }
    ),
    "Status": record(
        {
            "version": TEXT,
            "uptime_seconds": NUMBER,
            "serving": FLAG,
            "pools": {
                "type": "array",
                "items": record(
                    {"name": TEXT, "models": TEXTS, "instances": listing("Instance"), "streams": listing("Stream")}
                ),
            },
        }
    ),
    "Scorer": record({"name": TEXT, "parameters": OBJECT}),
    "Pool": record(
        {
            "name": TEXT,
            "models": TEXTS,
            "adapters": TEXTS,
            "scorer": reference("Scorer"),
            "decode_scorer": {"oneOf": [reference("Scorer"), {"type": "null"}]},
            "allowed_scorers": TEXTS,
            "block_size": any_of("integer", "null"),
            "hash_seed": COUNT,
            "engine": TEXT,
            "tokenizer": record({"source": TEXT, "loaded": FLAG, "incremental": FLAG, "mismatches": COUNT}),
            "load": record({"source": TEXT}),
            "limits": OBJECT,
            "instances": listing("Instance"),
        }
    ),
    "Decision": record(
        {
            "at": NUMBER,
            "request_id": TEXT,
            "trace_id": TEXT_OR_NULL,
            "path": TEXT,
            "pool": TEXT,
            "model": TEXT,
            "reason": TEXT_OR_NULL,
            "decision": OBJECT_OR_NULL,
        }
    ),
    "Match": record(
        {
            "instance_name": TEXT,
            "dp_rank": COUNT,
            "synchronized": FLAG,
            "sequence": any_of("integer", "null"),
            "device_hit_tokens": COUNT,
            "host_only_hit_tokens": COUNT,
            "reusable_prefix_tokens": COUNT,
            "device_blocks": COUNT,
            "host_blocks": COUNT,
            "error": TEXT,
        }
    ),
}
