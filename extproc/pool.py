"""One pool at run time: instances that serve a model, what they hold, how busy they are, how a prompt is routed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from extproc.decision import Decision, Hits, instance_of
from extproc.liveness import Liveness
from extproc.loads.base import LoadSource
from extproc.loads.inflight import InFlight
from extproc.loads.prometheus import PrometheusPoller, Target
from extproc.messages import Immediate
from extproc.openai import Body
from extproc.overrides import CHOSEN, Overrides
from extproc.prompt.prompter import Prompt, Prompter
from extproc.reasons import Unscored
from extproc.router import Router
from extproc.scorers.base import Request
from extproc.self_verification import SelfVerification
from extproc.shedding import Shedding
from extproc.speculative import Approximate, Speculation
from kvindex.directory import Directory, Match
from kvindex.fleet import Fleet, FleetChange, Instance, InstanceState, PoolPublisher

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client may say about routing: a scorer's name, a session key, a priority; and the gateway's subset."""

    scorer: str | None = None
    session: str | None = None
    priority: int = 0
    only: frozenset[str] | None = None


NOTHING_ASKED = Ask()


def _nothing() -> None:
    return None


class Pool:
    """Everything of one pool but its tokenization time and counting, which the decider does.

    models     served names, aliases and adapters that choose this pool
    routers    by scorer name; the first is the pool's own, the others are those that a request may ask for
    loads      None = the own in-flight counts
    load_path  of the metrics pages, where an instance does not name its own
    beside     what counts as cached beside (Speculation) or instead of (Approximate) the directory, None = nothing
    shedding   None = no request is ever refused
    liveness   None = an instance that does not answer stays a candidate
    overrides  instances that the operator drains
    session_header  the header that carries a session key, None = sessions are off

    It looks at the fleet from `attach` to `close`, both in the event loop. `instances` are the fleet's as we see them:
    drained or not answering ones have that state.
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
        load_path: str = "/metrics",
        beside: Speculation | Approximate | None = None,
        shedding: Shedding | None = None,
        inflight: InFlight | None = None,
        liveness: Liveness | None = None,
        overrides: Overrides | None = None,
        session_header: str | None = None,
        publishers: tuple[PoolPublisher, ...] = (),
    ) -> None:
        self.name = name
        self.models = tuple(models)
        self.prompter = prompter
        self.directory = directory
        self.router = router
        self.scorer_name = scorer_name
        self.routers = {scorer_name: router, **routers}
        self.inflight = inflight or InFlight()
        self.source = loads
        self.loads: LoadSource = loads if loads is not None else self.inflight
        self.beside = beside
        self.shedding = shedding
        self.liveness = liveness
        self.self_verification = SelfVerification(name)
        self.session_header = session_header
        self._publishers = publishers
        self._load_path = load_path
        self._overrides = overrides or Overrides()
        self._fleet = fleet
        self._known: Mapping[str, Instance] = {}
        self._stops: tuple[Callable[[], object], ...] = ()
        self._stop_directory: Callable[[], object] = _nothing
        self._helpless: frozenset[str] = frozenset()
        self.answering: dict[str, bool] = {}
        """Of each role with instances that may be chosen: is one of them neither out nor on trial?"""
        self._after: Pool | None = None
        self.by_name: Mapping[str, Instance] = {}
        self.instances: tuple[Instance, ...] = ()
        self.on_instances: Callable[[tuple[Instance, ...]], None] | None = None
        """Called with the new instances whenever one of them has changed; must be quick."""

    def check(self) -> None:
        """Raises ConfigurationError where `attach` would: a publisher that somebody has registered as well."""
        self.directory.check_publishers(self._publishers, source="configuration")

    def attach(self, before: Pool | None = None) -> None:
        """Follows the fleet from now on, in place of `before`, with which it may share parts."""
        if before is not None:
            before._stop()
            before._after = self
        if before is not None and before.directory is self.directory:
            self._stop_directory = before._stop_directory
        else:
            self._stop_directory = self.directory.attach(self._fleet)
        self.directory.set_publishers(self._publishers, source="configuration")
        if isinstance(self.source, PrometheusPoller):
            self.source.on_poll = self._polled
        self._refresh()
        self._stops = (
            self._fleet.listen(self._changed, present=False),
            self._overrides.listen(lambda _name: self._select(time.monotonic())),
        )

    async def close(self, after: Pool | None = None) -> None:
        """Ends what `after`, the pool in its place, does not use."""
        self._stop()
        if after is None or after.directory is not self.directory:
            self._stop_directory()
            self.directory.close()
        if isinstance(self.source, PrometheusPoller) and (after is None or after.source is not self.source):
            self.source.on_poll = None
            await self.source.close()
        remote = self.prompter.remote
        if remote is not None and (after is None or after.prompter is not self.prompter):
            await remote.close()

    def _stop(self) -> None:
        for stop in self._stops:
            stop()
        self._stops = ()
        self.on_instances = None

    def _changed(self, change: FleetChange) -> None:
        """Only a change of this pool's instances makes new tuples: the router plans anew for each."""
        if any(side is not None and side.pool == self.name for side in (change.before, change.after)):
            self._refresh()

    def _refresh(self) -> None:
        mine = self._known = {name: one for name, one in self._fleet.snapshot().items() if one.pool == self.name}
        self.inflight.update(mine.values())
        if isinstance(self.beside, Approximate):
            self.beside.retain(mine.values())
        if self.liveness is not None:
            self.liveness.retain(mine.values())
        if isinstance(self.source, PrometheusPoller):
            self.source.update(
                Target(name, one.metrics or f"http://{one.address}{self._load_path}")
                for name, one in mine.items()
                if one.metrics or one.address
            )
        if self.prompter.remote is not None:
            self.prompter.remote.use([f"http://{one.address}" for one in mine.values() if one.address])
        self._select(time.monotonic())

    def _select(self, now: float) -> None:
        """Lays the operator's wishes and our own experience over what discovery says. O(instances).

        Where a role would have nobody left, experience does not count: the gateway may know better, and a try costs
        nothing more than the certain failure.
        """
        out = self.liveness.out(now) if self.liveness is not None else {}
        wished = {name: self._overrides.over(one) for name, one in self._known.items()}
        chosen = [one for one in wished.values() if one.state in CHOSEN]
        alive = {one.current_role for one in chosen if one.name not in out}
        helpless = frozenset(one.current_role for one in chosen) - alive
        if helpless - self._helpless:
            log.warning(
                "pool %s: no instance of role %s answers; all of them stay candidates",
                self.name, ", ".join(sorted(helpless)),
            )  # fmt: skip
        self._helpless = helpless
        trial = self.liveness.half_open(now) if self.liveness is not None else frozenset()
        self.answering = dict.fromkeys((one.current_role for one in chosen), False)
        self.answering |= {one.current_role: True for one in chosen if one.name not in out and one.name not in trial}
        self.by_name = {}
        for name, one in wished.items():
            seen = one
            if one.state in CHOSEN and name in out and one.current_role not in helpless:
                seen = replace(one, state=InstanceState.UNREACHABLE)
            elif one.state in CHOSEN and (name in trial or name in out):
                seen = replace(one, state=InstanceState.PROBATION)
            self.by_name[name] = seen
        self.instances = tuple(self.by_name.values())
        if self.on_instances is not None:
            self.on_instances(self.instances)

    # -- what answers and what does not

    def answered(self, address: str) -> None:
        """A request was answered from there. One that was under way when another pool took this one's place counts for
        that one: only its candidates matter now."""
        if self._after is not None:
            self._after.answered(address)
            return
        name, now = self.inflight.by_address.get(address), time.monotonic()
        if self.liveness is not None and name is not None and self.liveness.answered(name, now):
            log.info("instance %s answers again", name)
            self._select(now)

    def failed(self, address: str, now: float, reason: str) -> None:
        """The gateway could not have a request served there."""
        if self._after is not None:
            self._after.failed(address, now, reason)
            return
        name = self.inflight.by_address.get(address)
        if self.liveness is None or name is None or not self.liveness.failed(name, now, reason):
            return
        log.warning(
            "instance %s gets no requests for %.0f s, then one may try it: %s",
            name, self.liveness.seconds_out(name, now), reason,
        )  # fmt: skip
        if self.beside is not None:
            self.beside.clear(name)
        self._select(now)

    def _polled(self, name: str, now: float, error: str) -> None:
        if self.liveness is not None and self.liveness.polled(name, now, error):
            if error:
                seconds = self.liveness.seconds_out(name, now)
                log.warning("instance %s gets no requests for %.0f s: its metrics: %s", name, seconds, error)
            else:
                log.info("instance %s answers again", name)
            self._select(now)

    @property
    def unreachable(self) -> Mapping[str, str]:
        """Instances that get no requests because they did not answer, and what happened."""
        return self.liveness.out(time.monotonic()) if self.liveness is not None else {}

    @property
    def tokenizer_loaded(self) -> bool:
        """Here. False without a remote tokenizer: every request but those given as token ids passes unscored."""
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
        liveness = self.liveness
        if liveness is not None and liveness.next_change is not None and now >= liveness.next_change:
            self._select(now)
        request = Request(prompt.count, self.directory.block_size or 0, session=ask.session, now=now)
        router = self.routers.get(ask.scorer, self.router) if ask.scorer else self.router
        decision = router.route(request, self.instances, hits, self.loads, self.inflight, now, only=ask.only)
        chosen = decision.chosen
        if chosen is not None:
            if self.beside is not None:
                self.beside.add(self.by_name[instance_of(chosen)], chosen.rank, keys, now)
            if liveness is not None and liveness.next_change is not None:
                for one in (chosen, decision.decode):
                    if one is not None and liveness.picked(instance_of(one), now):
                        self._select(now)
        return decision
