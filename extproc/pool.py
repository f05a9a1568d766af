"""One pool at run time: instances that serve a model, what they hold, how busy they are, how a prompt is routed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from extproc.loads.base import LoadSource
from extproc.loads.inflight import InFlight
from extproc.openai import Body
from extproc.prompt.prompter import Prompt, Prompter
from extproc.reasons import Unscored
from extproc.router import Decision, Router
from extproc.scorers.base import Request
from kvindex.directory import Directory, Match
from kvindex.fleet import Fleet, FleetChange, Instance

log = logging.getLogger(__name__)


class Pool:
    """Everything of one pool but its tokenization time and counting, which the decider does.

    models    served names, aliases and adapters that choose this pool
    loads     None = the own in-flight counts
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
        loads: LoadSource | None = None,
    ) -> None:
        self.name = name
        self.models = tuple(models)
        self.prompter = prompter
        self.directory = directory
        self.router = router
        self.scorer_name = scorer_name
        self.inflight = InFlight()
        self.loads: LoadSource = loads if loads is not None else self.inflight
        self._fleet = fleet
        self.by_name: Mapping[str, Instance] = {}
        self.instances: tuple[Instance, ...] = ()
        self.by_address: Mapping[str, str] = {}
        fleet.listen(self._changed)
        self._refresh()

    def _changed(self, change: FleetChange) -> None:
        """Only a change of this pool's instances makes new tuples: the router plans anew for each."""
        if any(side is not None and side.pool == self.name for side in (change.before, change.after)):
            self._refresh()

    def _refresh(self) -> None:
        mine = {name: one for name, one in self._fleet.snapshot().items() if one.pool == self.name}
        self.inflight.update(mine.values())
        self.by_address = {one.address: one.name for one in mine.values()}
        self.by_name = mine
        self.instances = tuple(mine.values())

    @property
    def tokenizer_loaded(self) -> bool:
        """False: every request but those given as token ids passes unscored."""
        return self.prompter.loaded

    async def tokens(self, body: Body) -> Prompt | Unscored:
        """The prompt as the engine will see it, or why it cannot be known. Never raises."""
        return await self.prompter.prompt_of(body)

    def match(self, prompt: Prompt) -> Match | None:
        """Who holds the prompt's prefix; None when nobody's cache will be read, or no block size is known yet.

        No I/O, no lock.
        """
        directory = self.directory
        limit = directory.key_limit(prompt.count)
        size = directory.block_size
        if not limit or size is None or not prompt.reads_cache:
            return None
        return directory.match(self.prompter.keys(prompt, size, directory.seed, limit))

    def route(self, prompt: Prompt, match: Match | None, now: float, *, only: frozenset[str] | None = None) -> Decision:
        """The decision, not yet charged to anybody."""
        request = Request(prompt.count, self.directory.block_size or 0)
        return self.router.route(request, self.instances, match, self.loads, self.inflight, now, only=only)
