"""Real peers for tests: Envoy, kvcar and engine emulators on free ports, every one a context manager."""

from __future__ import annotations

from examples.local.processes import envoy_binary

__all__ = ["envoy_binary"]
