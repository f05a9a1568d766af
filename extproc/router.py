"""From candidates, hits and loads to a decision. No I/O, no clock; used from one thread.

    instances --role, state, subset---> candidates --load, hits, own counters--> scorer --costs--> order --> Decision

Equal costs (within 1e-9) rotate: of the tied, the one goes first that was least recently picked among ties, those never
picked in name order, over the whole life of the router and while the tied set changes. Picks by cost do not count, else
they would shift the turns. Candidates are handed to the scorer in that order, so a scorer that cuts a list (load_gated)
rotates too.

Nothing to choose from is an answer (`reason`), never an exception; so is a scorer that raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite

from extproc.decision import (
    PROFILES,
    Decision,
    Hits,
    InstanceLike,
    LoadSource,
    OwnRequests,
    Profile,
    Side,
    instance_of,
)
from extproc.scorers.base import Candidate, Cost, Request, Role, Scorer, Weights, hit_tokens

log = logging.getLogger(__name__)

TIE = 1e-9
DEFAULT_WEIGHTS: Weights = (1.0, 0.5, 0.0)
NO_BLOCKS = (0, 0, 0)
SCHEDULABLE = frozenset({"active", "lease_lost", "probation"})


@dataclass(slots=True)
class _Slot:
    """A candidate-to-be: an instance, or one of its ranks. `key` is the instance's name."""

    name: str
    key: str
    instance: InstanceLike
    address: str
    rank: int | None


@dataclass(slots=True)
class _Plan:
    """Slots of one set of instances by what they may do, each list least recently picked first.

    alone   names of those that prefill and decode (role DEFAULT)
    """

    source: object
    prefill: list[_Slot] = field(default_factory=list)
    decode: list[_Slot] = field(default_factory=list)
    alone: set[str] = field(default_factory=set)
    excluded: dict[str, str] = field(default_factory=dict)


class Router:
    """Chooses among instances with one scorer. Remembers who was picked when, nothing else.

    max_endpoints    length of the fallback list
    dp               "min": an instance is as good as its worst rank; "target": every rank is a candidate
    rank_header      names the rank with dp "target"
    profile          how P/D pairs are told, a name of PROFILES or a Profile
    decode_scorer    scorer of decode candidates, default the same
    split_threshold  P/D: split only if at least this many tokens are uncached on the chosen decode instance; 0 = always
    split_min_tokens P/D: split only prompts of at least this length
    own_delta        add requests sent since a load report was taken to its waiting
    remembered       how many picked names the rotation remembers beyond the present ones

    Raises ValueError for a bad option.
    """

    def __init__(
        self,
        scorer: Scorer,
        *,
        max_endpoints: int = 3,
        dp: str = "min",
        rank_header: str = "x-data-parallel-rank",
        profile: str | Profile = "llm-d",
        decode_scorer: Scorer | None = None,
        split_threshold: int = 0,
        split_min_tokens: int = 0,
        own_delta: bool = False,
        remembered: int = 10_000,
    ):
        if max_endpoints < 1:
            raise ValueError(f"max_endpoints: {max_endpoints!r} is not allowed, expected at least 1")
        if dp not in ("min", "target"):
            raise ValueError(f"dp: {dp!r} is not allowed, expected min or target")
        if isinstance(profile, str) and profile not in PROFILES:
            raise ValueError(f"profile: {profile!r} is not known, expected one of {', '.join(PROFILES)}")
        self.scorer = scorer
        self.decode_scorer = decode_scorer or scorer
        self.max_endpoints = max_endpoints
        self.dp = dp
        self.rank_header = rank_header
        self.profile = PROFILES[profile] if isinstance(profile, str) else profile
        self.split_threshold = split_threshold
        self.split_min_tokens = split_min_tokens
        self.own_delta = own_delta
        self.weights: Weights = getattr(scorer, "weights", DEFAULT_WEIGHTS)
        self._remembered = remembered
        self._picked: dict[tuple[Role, str], int] = {}
        self._turn = 0
        self._plan = _Plan(None)

    def route(
        self,
        request: Request,
        instances: Iterable[InstanceLike],
        hits: Hits | None,
        loads: LoadSource,
        inflight: OwnRequests,
        now: float,
        *,
        only: Collection[str] | None = None,
    ) -> Decision:
        """One decision. `hits` None: the directory is off, all hits 0.

        only  addresses that may be chosen (Envoy's subset hint), None = all

        Passing the same tuple of instances again saves the work on it. O(candidates log candidates).
        """
        plan = self._plan
        if plan.source is not instances or not isinstance(instances, tuple):
            plan = self._plan = self._make_plan(instances)
        if request.now != now:
            request = replace(request, now=now)
        decision = Decision(request)
        main = decision.main
        main.excluded.update(plan.excluded)
        maker = _Maker(self, request, hits, loads, inflight, only)
        first = maker.candidates(plan.prefill, main.excluded)
        decision.best_available_hit = maker.best_hit
        if len(plan.alone) == len(plan.prefill):
            main.excluded.update((slot.name, "role") for slot in plan.decode)
            self._score(self.scorer, request, first, main, decision)
            if main.ordered:
                self._settle(decision, request, main.ordered, plan)
        else:
            second = decision.second = Side()
            partners = maker.candidates(plan.decode, second.excluded)
            self._route_pair(decision, first, partners, second, plan)
        if decision.chosen is None and decision.reason is None:
            decision.reason = "no_candidate"
            decision.detail = decision.detail or main.why_empty()
        return decision

    def _route_pair(
        self, decision: Decision, first: list[Candidate], partners: list[Candidate], second: Side, plan: _Plan
    ) -> None:
        """A pool with prefill instances: alone on a DEFAULT one, or a pair, or (no split) on the decode one alone."""
        main = decision.main
        prefill, decode = replace(decision.request, role=Role.PREFILL), replace(decision.request, role=Role.DECODE)
        together = getattr(self.scorer, "pair", None)
        if together is not None:
            self._score_together(together, first, partners, decision, second)
        else:
            self._score(self.scorer, prefill, first, main, decision)
            self._score(self.decode_scorer, decode, partners, second, decision)
        best, partner = main.first, second.first
        if best is None or decision.reason is not None:
            return
        if best.name in plan.alone:
            self._settle(decision, prefill, [c for c in main.ordered if c.name in plan.alone], plan)
            return
        if partner is None:
            decision.detail = f"a prefill instance was best, but no decode instance can be had ({second.why_empty()})"
            return
        weights: Weights = getattr(self.decode_scorer, "weights", DEFAULT_WEIGHTS)
        missing = decode.tokens - hit_tokens(partner, decode.tokens, weights)
        if decode.tokens < self.split_min_tokens or missing < self.split_threshold:
            decision.detail = "not split: the decode instance serves alone"
            decision.main, decision.second = second, main
            self._settle(decision, decode, second.ordered, plan)
            return
        profile = self.profile
        decision.decode = partner
        to_decode = profile.destination is Role.DECODE
        listed = second.ordered if to_decode else [c for c in main.ordered if c.name not in plan.alone]
        self._settle(decision, prefill, listed, plan, chosen=best)
        self._remember(decode, partner, plan, second)
        for header, side in ((profile.prefill_header, best), (profile.decode_header, partner)):
            if header is not None:
                decision.headers += ((header, side.address if profile.value == "address" else instance_of(side)),)

    def _settle(
        self,
        decision: Decision,
        request: Request,
        ordered: Sequence[Candidate],
        plan: _Plan,
        *,
        chosen: Candidate | None = None,
    ) -> None:
        """Writes destinations, rank and hits, and remembers the pick."""
        target = ordered[0]
        chosen = decision.chosen = chosen or target
        decision.destinations = tuple(dict.fromkeys(c.address for c in ordered))[: self.max_endpoints]
        decision.hit_tokens = min(request.tokens, chosen.device + chosen.host + chosen.disk)
        decision.speculative_tokens = chosen.speculative
        decision.uncached_tokens = request.tokens - hit_tokens(chosen, request.tokens, self.weights)
        if target.rank is not None:
            decision.rank = target.rank
            decision.headers = ((self.rank_header, str(target.rank)),)
        self._remember(request, chosen, plan, decision.main)

    def _score(
        self, scorer: Scorer, request: Request, candidates: list[Candidate], side: Side, decision: Decision
    ) -> None:
        """Fills a side; a scorer that raises or answers nonsense makes the decision a `scorer_error`."""
        if candidates:
            try:
                self._arrange(candidates, scorer.costs(request, candidates), side)
            except Exception as error:  # a plugin's fault must not become the request's
                self._failed(scorer, error, decision)

    def _score_together(
        self,
        together: Callable[..., tuple[list[Cost | None], list[Cost | None]]],
        prefill: list[Candidate],
        decode: list[Candidate],
        decision: Decision,
        second: Side,
    ) -> None:
        try:
            first_costs, second_costs = together(decision.request, prefill, decode)
            self._arrange([*prefill, *decode], first_costs, decision.main)
            self._arrange(decode, second_costs, second)
        except Exception as error:
            self._failed(self.scorer, error, decision)

    def _arrange(self, candidates: Sequence[Candidate], costs: Sequence[Cost | None], side: Side) -> None:
        """The lab overrides this with another rule for ties."""
        arrange(candidates, costs, side)

    def _failed(self, scorer: Scorer, error: Exception, decision: Decision) -> None:
        log.exception("scorer %s failed", type(scorer).__name__)
        decision.reason = "scorer_error"
        decision.detail = f"{type(scorer).__name__}: {type(error).__name__}: {error}"

    def _remember(self, request: Request, candidate: Candidate, plan: _Plan, side: Side) -> None:
        """Moves a candidate that was picked among equals to the end of the rotation, and tells the scorer."""
        decode = request.role is Role.DECODE
        if side.tied > 1:
            self._turn += 1
            key = (Role.DECODE if decode else Role.PREFILL, candidate.name)
            self._picked.pop(key, None)
            self._picked[key] = self._turn
            if len(self._picked) > self._remembered + len(plan.prefill) + len(plan.decode):
                del self._picked[next(iter(self._picked))]
            slots = plan.decode if decode else plan.prefill
            for i, slot in enumerate(slots):
                if slot.name == candidate.name:
                    slots.append(slots.pop(i))
                    break
        scorer = self.decode_scorer if decode else self.scorer
        tell = getattr(scorer, "picked", None)
        if tell is not None:
            try:
                tell(request, candidate)
            except Exception:
                log.exception("scorer %s failed on a pick", type(scorer).__name__)

    def _make_plan(self, instances: Iterable[InstanceLike]) -> _Plan:
        plan = _Plan(instances)
        for instance in instances:
            name = instance.name
            if str(instance.state).lower() not in SCHEDULABLE:
                plan.excluded[name] = "state"
                continue
            if not instance.address:
                plan.excluded[name] = "address"
                continue
            role = str(instance.current_role).lower()
            slots = [_Slot(name, name, instance, instance.address, None)]
            if self.dp == "target" and instance.dp_size > 1:
                ranks = range(instance.dp_size)
                slots = [_Slot(f"{name}/{rank}", name, instance, instance.address, rank) for rank in ranks]
            (plan.decode if role == "decode" else plan.prefill).extend(slots)
            if role == "default":
                plan.alone.update(slot.name for slot in slots)
        picked = self._picked
        plan.prefill.sort(key=lambda slot: (picked.get((Role.PREFILL, slot.name), 0), slot.name))
        plan.decode.sort(key=lambda slot: (picked.get((Role.DECODE, slot.name), 0), slot.name))
        return plan


class _Maker:
    """Makes candidates out of slots for one request."""

    def __init__(
        self,
        router: Router,
        request: Request,
        hits: Hits | None,
        loads: LoadSource,
        own: OwnRequests,
        only: Collection[str] | None,
    ):
        self.request, self.loads, self.own = request, loads, own
        self.hits = hits if request.tokens >= request.block_size > 0 and hits else None
        self.pending = getattr(self.hits, "speculative", None)
        self.own_delta, self.weights = router.own_delta, router.weights
        self.only = only
        self.best_hit = 0

    def candidates(self, slots: Sequence[_Slot], excluded: dict[str, str]) -> list[Candidate]:
        """Candidates of the slots that are not excluded, in their order; hits never above the prompt's tokens."""
        size, tokens, now = self.request.block_size, self.request.tokens, self.request.now
        load_of, find = self.loads.get, self.own.find
        only = self.only
        out = []
        for slot in slots:
            name = slot.name
            if only is not None and slot.address not in only:
                excluded[name] = "excluded"
                continue
            device = host = disk = 0
            if self.hits is not None:
                device, host, disk = self.blocks(self.hits.hits(slot.instance), slot)
                if device or host or disk:
                    device = min(tokens, device * size)
                    if host or disk:
                        host = min(tokens - device, host * size)
                        disk = min(tokens - device - host, disk * size)
                    if device + host + disk > self.best_hit:
                        self.best_hit = device + host + disk
            load = load_of(slot.key, now, slot.rank)
            if load is not None and not (0.0 <= load.waiting < inf and 0.0 <= load.usage < inf):
                load = None  # a source's fault; the built-in ones refuse such reports themselves
            if self.own_delta and load is not None and load.at is not None:
                load = load._replace(waiting=load.waiting + self.own.sent_since(name, load.at))
            own = find(name)
            if own is None:
                candidate = Candidate(name, slot.address, slot.rank, device, host, disk, load)
            else:
                since = own.busy_since
                candidate = Candidate(
                    name,
                    slot.address,
                    slot.rank,
                    device,
                    host,
                    disk,
                    load,
                    own.requests,
                    own.waiting_requests,
                    own.prompt_tokens,
                    own.waiting_prompt_tokens,
                    own.uncached_tokens,
                    own.rate,
                    own.waiting_squares,
                    own.head_tokens,
                    0.0 if since is None else now - since,
                )
            if device and self.pending is not None:
                pending = self.pending(slot.instance)
                rank = slot.rank
                blocks = min(pending, default=0) if rank is None else pending[rank] if rank < len(pending) else 0
                candidate.speculative = min(device, blocks * size)
            out.append(candidate)
        return out

    def blocks(self, of_ranks: Sequence[Sequence[int]], slot: _Slot) -> Sequence[int]:
        """Blocks by tier of the slot's rank; for a whole instance those of its rank of lowest weighted hit: the
        engine's own balancer decides which of its ranks gets the request."""
        count = len(of_ranks)
        if slot.rank is not None:
            return of_ranks[slot.rank] if slot.rank < count else NO_BLOCKS
        if count < slot.instance.dp_size:
            return NO_BLOCKS
        if count == 1:
            return of_ranks[0]
        device, host, disk = self.weights
        return min(of_ranks, key=lambda b: (b[0] * device + b[1] * host + b[2] * disk, sum(b)))


def arrange(candidates: Sequence[Candidate], costs: Sequence[Cost | None], side: Side) -> None:
    """Orders candidates by cost into a side; equal costs keep the given order. No cost, or one that is no number: out.

    Raises ValueError when there are not as many costs as candidates.
    """
    known: list[Cost] = []
    rated: list[Candidate] = []
    parts = 0
    for candidate, cost in zip(candidates, costs, strict=True):
        if cost and (isfinite(cost[0]) if len(cost) == 1 else all(map(isfinite, cost))):
            known.append(cost)
            rated.append(candidate)
            parts = max(parts, len(cost))
        else:
            no_load = cost is None and candidate.load is None
            side.excluded[candidate.name] = "no_load" if no_load else "no_cost"
    if rated:
        order, side.tied = _sorted(known, list(range(len(rated))), 0, parts)
        side.ordered = [rated[i] for i in order]
        side.costs = [known[i] for i in order]


def _sorted(costs: Sequence[Cost], indices: list[int], part: int, parts: int) -> tuple[list[int], int]:
    """Indices by cost from `part` on, and how many tie with the first. Within TIE of a group's least is equal."""
    if part == parts or len(indices) == 1:
        indices.sort()
        return indices, len(indices)
    pairs = sorted([(costs[i][part] if part < len(costs[i]) else 0.0, i) for i in indices])
    last = part + 1 == parts
    out: list[int] = []
    tied = start = 0
    while start < len(pairs):
        limit = pairs[start][0] + TIE
        end = start + 1
        while end < len(pairs) and pairs[end][0] <= limit:
            end += 1
        if end == start + 1:
            out.append(pairs[start][1])
            tied = tied or 1
        elif last:
            out += sorted([i for _, i in pairs[start:end]])
            tied = tied or end - start
        else:
            group, size = _sorted(costs, [i for _, i in pairs[start:end]], part + 1, parts)
            tied = tied or size
            out += group
        start = end
    return out, tied
