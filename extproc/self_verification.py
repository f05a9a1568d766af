"""Does what is predicted come true? Each observed answer is compared with its prediction, over a sliding window.

    answer -> Verdict -> window of the last 200 -> share of differing answers -> unknown, ok or drift

Two differences are no fault: between decision and prefill another request at the same engine computed the prefix (the
engine reuses more) or evicted it (less), or did so just before and its events were still on their way. Answers to
requests that were decided while another one waited at the engine, or within `LAG` of another one there that lacked the
same block first, are therefore `excused`: compared for prompt tokens alone, whether their hits differ or not, so that
the share stays a fair one. What is left differs rarely when all is well, while a wrong template, a stream that misses
events or a cache that is off makes nearly every answer differ: the thresholds lie between, with distance to both. The
window holds judged answers only, so that a busy engine, where most are excused, is judged all the same, later.
Sans-IO; owned by the event loop.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict, deque
from enum import StrEnum
from typing import Any

from extproc.decision import Decision

log = logging.getLogger(__name__)

WINDOW = 200
ENOUGH = 20
"""Answers judged before anything is said."""
RAISE, CLEAR = 0.2, 0.1
"""Drift begins at the first share of differing answers and ends below the second, so that it does not flap."""
LAG = 0.1
"""Seconds that an engine's events may take to arrive and to be applied: milliseconds, on a busy machine some ten."""
REMEMBERED = 4096
"""First missing blocks whose last sight is kept."""
LOG_EVERY = 600.0
"""Seconds between two log lines of a pool, whatever happens in between."""


NOT_OBSERVED = "listen.observe_usage is off"
TOO_FEW = "too few answers so far"
"""Why a state is unknown."""


class Verdict(StrEnum):
    EQUAL = "equal"
    OVER = "over"  # the engine reused less than predicted
    UNDER = "under"  # the engine reused more
    TOKENS = "prompt_token_mismatch"  # the engine counts other prompt tokens
    EXCUSED = "excused"


DIFFERENT = (Verdict.TOKENS, Verdict.OVER, Verdict.UNDER)
CAUSES: dict[Verdict, tuple[str, str]] = {
    Verdict.TOKENS: (
        "the engines count other prompt tokens than kvcar: tokenizer or chat template differ",
        "make tokenizer, chat_template, chat_template_kwargs and content_format the engines'; "
        "`kvcar doctor` shows the first token that differs",
    ),
    Verdict.OVER: (
        "engines reuse less than their events announce: evictions whose events were lost, prefix caching switched off, "
        "or prompts of equal length with other tokens",
        "`kvcar doctor --live` tells which; resync the streams if events were lost",
    ),
    Verdict.UNDER: (
        "engines reuse more than kvcar knows of: events are missing, a stream is incomplete or not synchronized, or "
        "prompts of equal length have other tokens",
        "look at /streams; `kvcar doctor --live` compares events, tokens and hits",
    ),
}


def judge(
    predicted: int, cached: int, tokens: int, counted: int | None, *, block: int, contended: bool, at_least: bool
) -> Verdict:
    """One answer.

    predicted, cached   reused prompt tokens, by kvcar and by the engine; they are equal when less than a block apart
    tokens, counted     prompt tokens, by kvcar and by the engine (None = not told)
    contended           others were at work at the engine when this one was decided
    at_least            the prediction is a lower bound (the least of several ranks)
    """
    if counted is not None and counted != tokens:
        return Verdict.TOKENS
    if contended:
        return Verdict.EXCUSED
    if abs(predicted - cached) < max(1, block) or (at_least and cached > predicted):
        return Verdict.EQUAL
    return Verdict.OVER if cached < predicted else Verdict.UNDER


def comparable(decision: Decision, *, partial: bool) -> bool:
    """Whether the engine's counts say anything about this prediction: not for pairs, media (counts are estimates) and
    hits that no event has confirmed."""
    return decision.chosen is not None and decision.decode is None and not partial and not decision.speculative_tokens


class SelfVerification:
    """Of one pool. `add` costs about a microsecond; memory is the window."""

    def __init__(self, pool: str, *, window: int = WINDOW, enough: int = ENOUGH) -> None:
        self.pool = pool
        self.drifting = False
        self.excused = 0
        """Answers excused since the start."""
        self._enough = enough
        self._window: deque[tuple[Verdict, float]] = deque(maxlen=window)
        self._counted: deque[bool] = deque(maxlen=window)  # of all answers: did the prompt tokens differ?
        self._sum = 0.0
        self._counts: Counter[Verdict] = Counter()
        self._logged: float | None = None
        self._missing: OrderedDict[tuple[str, bytes], float] = OrderedDict()

    def active(self, instance: str, missing: bytes | None, now: float) -> None:
        """The engine has got, begun or ended an answer to a prompt whose first block without a hit is `missing`."""
        if missing is not None:
            self._missing[instance, missing] = now
            self._missing.move_to_end((instance, missing))
            if len(self._missing) > REMEMBERED:
                self._missing.popitem(last=False)

    def contended(self, instance: str, missing: bytes | None, waiting: int, now: float) -> bool:
        """Whether hits of a request decided now say nothing; `waiting`: others without a first byte there."""
        if waiting > 0:
            return True
        return missing is not None and now - self._missing.get((instance, missing), -math.inf) < LAG

    def add(self, verdict: Verdict, share: float, now: float) -> None:
        """The next answer; `share` = (predicted - cached) / prompt tokens. Logs when drift begins or ends."""
        counts = self._counts
        self._counted.append(verdict is Verdict.TOKENS)
        if verdict is Verdict.EXCUSED:
            self.excused += 1
        else:
            window = self._window
            if len(window) == window.maxlen:
                gone, before = window[0]
                counts[gone] -= 1
                self._sum -= before
            window.append((verdict, share))
            counts[verdict] += 1
            self._sum += share
        ratio = self.ratio
        if not self.drifting and ratio >= RAISE:
            self.drifting = True
            if self._logged is None or now - self._logged >= LOG_EVERY:
                self._logged = now
                cause, remedy = CAUSES[self.main]
                log.warning(
                    "pool %s: %.0f %% of the observed answers differ from the prediction: %s. %s",
                    self.pool, 100 * ratio, cause, remedy,
                )  # fmt: skip
        elif self.drifting and ratio < CLEAR and self.samples >= self._enough:
            self.drifting = False
            log.info("pool %s: predictions hold again", self.pool)

    @property
    def samples(self) -> int:
        """Answers in the window: those that were judged."""
        return len(self._window)

    @property
    def ratio(self) -> float:
        """Share of answers with other prompt tokens (of all), or with other hits (of those judged): the larger one.
        0 while there are too few."""
        counts, all_ = self._counts, len(self._counted)
        hits, judged = counts[Verdict.OVER] + counts[Verdict.UNDER], self.samples - counts[Verdict.TOKENS]
        return max(
            sum(self._counted) / all_ if all_ >= self._enough else 0.0,
            hits / judged if judged >= self._enough else 0.0,
        )

    @property
    def difference(self) -> float:
        """Mean of (predicted - cached) / prompt tokens over the judged answers: above 0 = engines reuse less."""
        return self._sum / self.samples if self.samples else 0.0

    @property
    def main(self) -> Verdict:
        """What most of the differing answers have; other tokens explain the other two."""
        return max(DIFFERENT, key=lambda one: self._counts[one])

    @property
    def state(self) -> str:
        if self.drifting:
            return "drift"
        return "ok" if self.samples >= self._enough else "unknown"

    def as_dict(self, *, observed: bool = True) -> dict[str, Any]:
        """For /status; docs/doctor.md explains the fields. `observed`: listen.observe_usage is on."""
        counts = self._counts
        state = self.state
        cause, remedy = CAUSES[self.main] if state == "drift" else ("", "")
        return {
            "state": state,
            "reason": (TOO_FEW if observed else NOT_OBSERVED) if state == "unknown" else "",
            "samples": self.samples,
            **{str(one): counts[one] for one in (Verdict.EQUAL, *DIFFERENT)},
            str(Verdict.EXCUSED): self.excused,
            "difference": round(self.difference, 4),
            "likely_cause": cause,
            "remedy": remedy,
        }
