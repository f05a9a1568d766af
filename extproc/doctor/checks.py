"""Every check, in the order of the report."""

from __future__ import annotations

from extproc.doctor import engines, envoy_choice, envoy_filter, envoy_upstream, events, kvcar, live, tokens
from extproc.doctor.check import Check

ALL: tuple[Check, ...] = (
    *engines.CHECKS,
    *tokens.CHECKS,
    *events.CHECKS,
    *kvcar.CHECKS,
    *envoy_filter.CHECKS,
    *envoy_choice.CHECKS,
    *envoy_upstream.CHECKS,
    *live.CHECKS,
)
