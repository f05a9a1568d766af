"""Our own requests in flight, per instance (or rank): a load source that needs no report, and what token-based scorers
read. Lives in memory only, so a restart of kvcar starts from 0.

    decision                +1 request, + prompt tokens, + uncached tokens     `InFlight.charge`
    another served host     all of it moves there                              `Charge.moved`
    first response byte     prefill is done: tokens of prefill released        `Charge.first_byte`
    end, for any reason     the rest released                                  `Charge.close`

Each step counts once, whatever the order of calls. An instance that is removed or restarts takes its counters along:
later releases reach the old object.

Prefill rate: uncached tokens of finished prefills over the time in which any of ours was waiting, forgetting old ones.
For a request that met an empty queue that is its uncached tokens over its time to first byte; behind others only the
time since the last first byte counts. `busy_since` tells how far the oldest waiting request must be by now.

Other workers of this kvcar (extproc/workers/) tell what they have in flight: it is added to the same numbers, so that
scorers need not know, and kept beside them, so that what we show as ours stays ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, Protocol

from extproc.loads.base import combine
from extproc.scorers.base import Load

_IDLE = Load(0.0, 0.0)


class Totals(NamedTuple):
    """Our own requests at an instance, all its ranks together."""

    requests: int
    waiting_requests: int
    uncached_tokens: float


class Shared(NamedTuple):
    """What one process has in flight at one candidate, as it tells the others.

    entered  when the unfinished requests came, oldest first; the latest ones only (monotonic clock of the machine)
    """

    requests: int = 0
    waiting_requests: int = 0
    prompt_tokens: int = 0
    waiting_prompt_tokens: int = 0
    waiting_squares: int = 0
    uncached_tokens: float = 0.0
    entered: tuple[float, ...] = ()


NOTHING = Shared()


class Addressed(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def incarnation(self) -> object: ...


@dataclass(slots=True, eq=False)
class Counters:
    """One candidate's part. Never below 0.

    name             the candidate's: the instance's, or "instance/rank"
    waiting_squares  squares of the waiting requests' prompt tokens
    waiting, open    charges without a first byte, and all, oldest first; `open` with the time they came
    busy_since       when the oldest waiting one became the oldest, None = nothing waits
    measured_since   when the queue began to be busy, or the last first byte came
    head_tokens      uncached tokens of the oldest waiting request
    load             what the instance looks like as a load source
    rate             learnt prefill rate in tokens per second, None = nothing learnt; from the two sums behind it
    others           the part of other workers, in all the numbers before `waiting` and in `load`
    """

    instance: str
    name: str
    requests: int = 0
    waiting_requests: int = 0
    prompt_tokens: int = 0
    waiting_prompt_tokens: int = 0
    waiting_squares: int = 0
    uncached_tokens: float = 0.0
    waiting: dict[Charge, None] = field(default_factory=dict)
    open: dict[Charge, float] = field(default_factory=dict)
    busy_since: float | None = None
    measured_since: float = 0.0
    head_tokens: float = 0.0
    rate: float | None = None
    load: Load = _IDLE
    rate_tokens: float = 0.0
    rate_seconds: float = 0.0
    others: dict[int, Shared] = field(default_factory=dict)

    def own(self, latest: int = 0) -> Shared:
        """Without the others' part; with the `latest` times. O(workers + latest)."""
        others = self.others.values()
        waiting = self.waiting_requests - sum(one.waiting_requests for one in others)
        return Shared(
            self.requests - sum(one.requests for one in others),
            waiting,
            self.prompt_tokens - sum(one.prompt_tokens for one in others),
            self.waiting_prompt_tokens - sum(one.waiting_prompt_tokens for one in others),
            self.waiting_squares - sum(one.waiting_squares for one in others),
            max(0.0, self.uncached_tokens - sum(one.uncached_tokens for one in others)) if waiting else 0.0,
            tuple(islice(reversed(self.open.values()), latest))[::-1],
        )

    def take(self, worker: int, told: Shared) -> None:
        """Another worker's part is this from now on."""
        before = self.others.pop(worker, NOTHING)
        self.requests += told.requests - before.requests
        self.waiting_requests += told.waiting_requests - before.waiting_requests
        self.prompt_tokens += told.prompt_tokens - before.prompt_tokens
        self.waiting_prompt_tokens += told.waiting_prompt_tokens - before.waiting_prompt_tokens
        self.waiting_squares += told.waiting_squares - before.waiting_squares
        uncached = self.uncached_tokens + told.uncached_tokens - before.uncached_tokens
        self.uncached_tokens = uncached if self.waiting_requests else 0.0
        self.load = Load(self.waiting_requests, self.requests - self.waiting_requests)
        if told.requests:
            self.others[worker] = told


class Charge:
    """One request's part of one instance's counters. Every method may be called late, twice or never but `close`."""

    __slots__ = ("_counters", "_owner", "_prefill_only", "_rank", "prompt", "uncached", "waiting")

    def __init__(
        self,
        owner: InFlight,
        counters: Counters,
        rank: int | None,
        prompt: int,
        uncached: float,
        now: float,
        prefill_only: bool,
    ):
        self._owner = owner
        self._counters: Counters | None = None
        self._rank = rank
        self._prefill_only = prefill_only
        self.prompt = prompt
        self.uncached = uncached
        self.waiting = True
        self._enter(counters, now)

    @property
    def instance(self) -> str | None:
        """Where the request counts now, None = nowhere (closed, or served by a host we do not know)."""
        return self._counters.instance if self._counters is not None else None

    def moved(self, address: str, now: float = 0.0) -> None:
        """Another host served it than was chosen: everything moves there (to nowhere if nobody has that address)."""
        counters = self._counters
        if counters is None:
            return
        name = self._owner.by_address.get(address)
        if name == counters.instance:
            return
        self._leave(counters, now)
        if name is not None:
            self._enter(self._owner.counters_of(name, self._rank), now)

    def first_byte(self, now: float | None = None, *, learn: bool = True) -> None:
        """The first byte of the response body came: the prefill is done.

        With `now` the prefill rate is learnt from it, unless `learn` is off (an error answer needed no prefill).
        """
        counters = self._counters
        if counters is None or not self.waiting:
            return
        if now is not None and learn and counters.busy_since is not None:
            self._owner.learn(counters, self.uncached, now - counters.measured_since)
            counters.measured_since = now
        if self._prefill_only:
            self._leave(counters, now)
        else:
            self._release_prefill(counters, now)
        self.waiting = False

    def close(self, now: float | None = None) -> None:
        """The exchange is over, for whatever reason."""
        if self._counters is not None:
            self._leave(self._counters, now)

    def _enter(self, counters: Counters, now: float) -> None:
        counters.requests += 1
        counters.prompt_tokens += self.prompt
        if self.waiting:
            counters.waiting_requests += 1
            counters.waiting_prompt_tokens += self.prompt
            counters.waiting_squares += self.prompt * self.prompt
            counters.uncached_tokens += self.uncached
            if not counters.waiting:
                counters.busy_since = counters.measured_since = now
                counters.head_tokens = self.uncached
            counters.waiting[self] = None
        counters.open[self] = now
        counters.load = Load(counters.waiting_requests, counters.requests - counters.waiting_requests)
        self._counters = counters
        if self._owner.watch is not None:
            self._owner.watch(counters)

    def _leave(self, counters: Counters, now: float | None) -> None:
        if self.waiting:
            self._release_prefill(counters, now)
        counters.requests -= 1
        counters.prompt_tokens -= self.prompt
        del counters.open[self]
        counters.load = Load(counters.waiting_requests, counters.requests - counters.waiting_requests)
        self._counters = None
        if self._owner.watch is not None:
            self._owner.watch(counters)

    def _release_prefill(self, counters: Counters, now: float | None) -> None:
        waiting = counters.waiting
        head = next(iter(waiting)) is self
        del waiting[self]
        if not waiting:
            counters.busy_since, counters.head_tokens = None, 0.0
        elif head:
            counters.head_tokens = next(iter(waiting)).uncached
            if now is not None:
                counters.busy_since = now
        counters.waiting_requests -= 1
        counters.waiting_prompt_tokens -= self.prompt
        counters.waiting_squares -= self.prompt * self.prompt
        counters.load = Load(counters.waiting_requests, counters.requests - counters.waiting_requests)
        # Float sums drift; an empty queue is exactly 0.
        counters.uncached_tokens = counters.uncached_tokens - self.uncached if counters.waiting_requests else 0.0
        if self._owner.watch is not None:
            self._owner.watch(counters)


class InFlight:
    """All counters. Used from one thread (the event loop).

    rate_memory  how many requests the learnt prefill rate remembers (it forgets exponentially)
    rate_floor   requests with fewer uncached tokens teach nothing: their time is overhead
    """

    def __init__(self, *, rate_memory: float = 20.0, rate_floor: int = 64):
        self._keep = 1.0 - 1.0 / max(1.0, rate_memory)
        self._floor = rate_floor
        self._counters: dict[str, Counters] = {}
        self._by_instance: dict[str, list[Counters]] = {}
        self.find: Callable[[str], Counters | None] = self._counters.get
        """The counters of a candidate by its name ("name" or "name/rank"), None = never charged."""
        self.watch: Callable[[Counters], None] | None = None
        """Called with the counters that a request of ours has changed; must be quick."""
        self._incarnations: dict[str, object] = {}
        self.by_address: Mapping[str, str] = {}

    def charge(
        self,
        instance: str,
        prompt_tokens: int,
        uncached_tokens: float,
        now: float = 0.0,
        *,
        rank: int | None = None,
        prefill_only: bool = False,
    ) -> Charge:
        """Counts one decision. `rank`: count at that rank; `prefill_only`: a P/D prefill, over with the first byte."""
        prompt, uncached = max(0, prompt_tokens), max(0.0, uncached_tokens)
        return Charge(self, self.counters_of(instance, rank), rank, prompt, uncached, now, prefill_only)

    def counters_of(self, instance: str, rank: int | None = None) -> Counters:
        """The counters to write to, made when missing."""
        key = instance if rank is None else f"{instance}/{rank}"
        counters = self._counters.get(key)
        if counters is None:
            counters = self._counters[key] = Counters(instance, key)
            self._by_instance.setdefault(instance, []).append(counters)
        return counters

    def candidates(self) -> Iterable[Counters]:
        """Everything that was ever charged and is still known."""
        return self._counters.values()

    def take(self, worker: int, candidate: str, told: Shared) -> Counters | None:
        """Another worker's requests at a candidate; None when it is nothing to us: an instance that we do not know."""
        counters = self._counters.get(candidate)
        if counters is None:
            name, _, rank = candidate.rpartition("/")
            if candidate in self._incarnations:
                counters = self.counters_of(candidate)
            elif name in self._incarnations and rank.isdecimal():
                counters = self.counters_of(name, int(rank))
            else:
                return None
        counters.take(worker, told)
        return counters

    def of_instance(self, instance: str) -> Totals:
        """What all candidates of an instance (itself, or its ranks) have of ours together. O(ranks)."""
        parts = [one.own() if one.others else one for one in self._by_instance.get(instance, ())]
        return Totals(
            sum(one.requests for one in parts),
            sum(one.waiting_requests for one in parts),
            sum(one.uncached_tokens for one in parts),
        )

    def get(self, name: str, now: float, rank: int | None = None) -> Load:
        """As a load source: waiting = without a first byte, running = the others. Always fresh."""
        if rank is not None:
            counters = self._counters.get(f"{name}/{rank}")
            return counters.load if counters is not None else _IDLE
        parts = self._by_instance.get(name)
        if not parts:
            return _IDLE
        return parts[0].load if len(parts) == 1 else combine(one.load for one in parts)

    def sent_since(self, candidate: str, at: float) -> int:
        """Unfinished requests that went to a candidate at or after `at`. O(answer)."""
        counters = self._counters.get(candidate)
        count = 0
        for entered in reversed(counters.open.values()) if counters else ():
            if entered < at:
                break
            count += 1
        for other in counters.others.values() if counters else ():
            count += sum(entered >= at for entered in other.entered)
        return count

    def update(self, instances: Iterable[Addressed]) -> None:
        """The instances as discovery has them now: who is gone or has a new incarnation loses its counters."""
        known = {instance.name: instance for instance in instances}
        self.by_address = {instance.address: instance.name for instance in known.values()}
        for key, counters in list(self._counters.items()):
            name = counters.instance
            was = self._incarnations.get(name)
            if name not in known or (name in self._incarnations and known[name].incarnation != was):
                del self._counters[key]
                self._by_instance.pop(name, None)
        self._incarnations = {name: instance.incarnation for name, instance in known.items()}

    def learn(self, counters: Counters, uncached: float, seconds: float) -> None:
        """Takes one observed prefill into the candidate's rate, weighted by its tokens."""
        if uncached >= self._floor and seconds >= 0:
            counters.rate_tokens = counters.rate_tokens * self._keep + uncached
            counters.rate_seconds = counters.rate_seconds * self._keep + seconds
            if counters.rate_seconds > 0:
                counters.rate = counters.rate_tokens / counters.rate_seconds

    def total(self) -> int:
        """Requests in flight over all instances that are still known."""
        return sum(len(counters.open) for counters in self._counters.values())
