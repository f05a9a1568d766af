"""One pool at run time: instances that serve a model, what they hold, how busy they are, how a prompt is routed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from extproc.decision import Decision, Hits, instance_of
from extproc.loads.base import LoadSource
from extproc.loads.inflight import InFlight
from extproc.messages import Immediate
from extproc.openai import Body
from extproc.overrides import Overrides
from extproc.prompt.prompter import Prompt, Prompter
from extproc.reasons import Unscored
from extproc.router import Router
from extproc.scorers.base import Request
from extproc.shedding import Shedding
from extproc.speculative import Approximate, Speculation
from kvindex.directory import Directory, Match
from kvindex.fleet import Fleet, FleetChange, Instance

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client may say about routing: a scorer's name, a session key, a priority; and the gateway's subset."""

    scorer: str | None = None
    session: str | None = None
    priority: int = 0
    only: frozenset[str] | None = None


NOTHING_ASKED = Ask()


class Pool:
    """Everything of one pool but its tokenization time and counting, which the decider does.

    models    served names, aliases and adapters that choose this pool
    routers   by scorer name; the first is the pool's own, the others are those that a request may ask for
    loads     None = the own in-flight counts
    beside    what counts as cached beside (Speculation) or instead of (Approximate) the directory, None = nothing
    shedding  None = no request is ever refused
    overrides  what an operator wants of instances beside what discovery says, None = nothing
    """

    def __init__(
        self,
        name: str,
        models: Sequence[str],
        *,
        prompter: Prompter,
        directory: Directory,
        fleet: Fleet,
        router: Router,
        scorer_name: str,
        routers: Mapping[str, Router] = MappingProxyType({}),
        loads: LoadSource | None = None,
        beside: Speculation | Approximate | None = None,
        shedding: Shedding | None = None,
        overrides: Overrides | None = None,
    ) -> None:
        self.name = name
        self.models = tuple(models)
        self.prompter = prompter
        self.directory = directory
        self.router = router
        self.scorer_name = scorer_name
        self.routers = {scorer_name: router, **routers}
        self.inflight = InFlight()
        self.loads: LoadSource = loads if loads is not None else self.inflight
        self.beside = beside
        self.shedding = shedding
        self._fleet = fleet
        self._overrides = overrides or Overrides()
        self.by_name: Mapping[str, Instance] = {}
        self.instances: tuple[Instance, ...] = ()
        fleet.listen(self._changed)
        self._overrides.listen(self._overridden)
        self._refresh()

    def _changed(self, change: FleetChange) -> None:
        """Only a change of this pool's instances makes new tuples: the router plans anew for each."""
        if any(side is not None and side.pool == self.name for side in (change.before, change.after)):
            self._refresh()

    def _overridden(self, name: str) -> None:
        if name in self.by_name:
            self._refresh()

    def _refresh(self) -> None:
        over = self._overrides.over
        mine = {name: over(one) for name, one in self._fleet.snapshot().items() if one.pool == self.name}
        self.inflight.update(mine.values())
        if isinstance(self.beside, Approximate):
            self.beside.retain(mine.values())
        self.by_name = mine
        self.instances = tuple(mine.values())

    @property
    def tokenizer_loaded(self) -> bool:
        """False: every request but those given as token ids passes unscored."""
        return self.prompter.loaded

    @property
    def speculative_blocks(self) -> int:
        """Blocks that count by our own word and not by the engines'; never part of a stream's numbers."""
        beside = self.beside
        return sum(beside.blocks().values()) if isinstance(beside, Approximate) else len(beside or ())

    async def tokens(self, body: Body) -> Prompt | Unscored:
        """The prompt as the engine will see it, or why it cannot be known. Never raises."""
        return await self.prompter.prompt_of(body)

    def keys(self, prompt: Prompt) -> list[bytes]:
        """Content keys of the blocks that the engine may reuse; [] when nobody's cache will be read, or no block size
        is known yet. No I/O, no lock."""
        directory = self.directory
        limit = directory.key_limit(prompt.count)
        size = directory.block_size
        if not limit or size is None or not prompt.reads_cache:
            return []
        return self.prompter.keys(prompt, size, directory.seed, limit)

    def match(self, prompt: Prompt) -> Match | None:
        """Who holds the prompt's prefix by the engines' own word; None when nothing can match."""
        keys = self.keys(prompt)
        return self.directory.match(keys) if keys else None

    def refuse(self, now: float, priority: int) -> Immediate | None:
        """The 429 to answer with, None = serve the request."""
        if self.shedding is None:
            return None
        return self.shedding.refuse((self.loads.get(one.name, now) for one in self.instances), priority)

    def hits(self, keys: list[bytes], now: float) -> Hits | None:
        """Who holds these blocks, by the engines' word and by our own; None when nothing can match."""
        match: Hits | None = self.directory.match(keys) if keys else None
        return match if self.beside is None else self.beside.over(match, keys, now)

    def route(
        self, prompt: Prompt, keys: list[bytes], hits: Hits | None, now: float, ask: Ask = NOTHING_ASKED
    ) -> Decision:
        """The decision, not yet charged to anybody. A scorer that is not allowed is taken for none."""
        request = Request(prompt.count, self.directory.block_size or 0, session=ask.session, now=now)
        router = self.routers.get(ask.scorer, self.router) if ask.scorer else self.router
        decision = router.route(request, self.instances, hits, self.loads, self.inflight, now, only=ask.only)
        chosen = decision.chosen
        if self.beside is not None and chosen is not None:
            self.beside.add(self.by_name[instance_of(chosen)], chosen.rank, keys, now)
        return decision
