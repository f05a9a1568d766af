"""`kvcar serve --workers N`: one kvcar of N processes (docs/workers.md).

    Envoy --ext_proc--> worker 0 (port p)  worker 1 (p+1)  ...    each a whole kvcar: directory, tokenizer, router
                          ^ ^               ^ ^
                          | +-- share.py ---|-+                   datagrams: what each has in flight
                          |                 |
    operator --admin--> front.py: asks all, merges what they say  in the parent, which supervisor.py keeps them with

Every worker follows the engines by itself. One process that decodes events for the others was measured and is not worth
it (docs/workers.md).
"""
