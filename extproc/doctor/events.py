"""Checks of the KV event streams, from the port up to the blocks: each stream is judged by every row of JUDGES."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from extproc.config import Pool
from extproc.doctor.check import Check, Found, Skip
from extproc.doctor.context import Context
from extproc.doctor.engines import CLOCK_LIMIT, clock_finding
from extproc.doctor.finding import Finding, error, note, warning
from extproc.doctor.listen import StreamFacts
from extproc.doctor.live import probe
from extproc.doctor.ports import publisher_connects
from kvindex.states import State

UNANCHORED = 0.5
"""Share of blocks without a known parent from which on it is no late join that heals by itself."""
KV_EVENTS = """--kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:PORT",...}'"""


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream of one pool, and what is known of its engine's work. `busy`: it prefilled prompts while we listened
    (with --live certainly); `worked`: it has prefilled prompts ever. None = not known."""

    context: Context
    pool: Pool
    facts: StreamFacts
    busy: bool | None
    worked: bool | None

    @property
    def where(self) -> str:
        return f"instance {self.facts.name} of pool {self.pool.name}"


async def streams(context: Context) -> list[Stream]:
    """Every stream to be followed, after its time of listening (and after the probes, with --live). Raises Skip."""
    found: list[Stream] = []
    for pool in context.pools:
        found += await context.once(("streams", pool.name), lambda pool=pool: _streams(context, pool))  # type: ignore[misc]
    if not found:
        raise Skip("no instance has an events endpoint")
    return found


async def _streams(context: Context, pool: Pool) -> list[Stream]:
    instances = await context.instances(pool)
    before = {one.name: await context.page(pool, one) for one in instances}
    listener = await context.listener(pool)
    probed = await probe(context, pool) if context.options.live else ()
    answered = {one.instance.name for one in probed if one.ok}
    found = []
    for facts in listener.facts():
        rank, page = facts.endpoint.dp_rank, before.get(facts.instance.name)
        # a store publishes what is moved there: that its engine computes prompts says nothing of it
        own = not facts.endpoint.medium
        tokens = page.prompt_tokens.get(rank) if page and own else None
        later = None
        if tokens is not None and facts.report.sequence is None and not facts.heard.messages:
            fresh = await context.fresh_page(pool, facts.instance)
            later = fresh.prompt_tokens.get(rank) if fresh else None
        # probes name rank 0
        asked = own and facts.instance.name in answered and rank == 0
        grew = None if tokens is None or later is None else later > tokens
        found.append(Stream(context, pool, facts, asked or grew, asked or (None if tokens is None else tokens > 0)))
    return found


Judge = Callable[[Stream], AsyncIterator[Finding]]


async def ports(one: Stream) -> AsyncIterator[Finding]:
    """Is there a publisher at all?"""
    facts, endpoint = one.facts, one.facts.endpoint
    report, port = facts.report, facts.port
    if report.state in ("skipped", "missing", "fault"):
        yield error(
            "events.not_followed",
            one.where,
            "kvcar does not follow this stream, so the instance never has a hit",
            cause=report.error or report.state,
            remedy="every rank of every instance needs an endpoint of its own; limits are events.max_streams",
        )
    elif endpoint.pushed:
        return  # over HTTP, to the running kvcar alone: kvcar.streams
    elif endpoint.bind:
        if report.link.error:
            yield note(
                "events.bound",
                one.where,
                f"{endpoint.events} could not be bound for a look: {report.link.error}",
                cause="a running kvcar listens there",
                remedy="see kvcar.streams for what the running kvcar receives",
            )
        elif not report.link.connections:
            yield error(
                "events.nobody_connects",
                one.where,
                f"no engine connects to {endpoint.events}",
                cause="with bind: true engines connect to us; their endpoint must be this machine's address, without *",
                remedy="correct the engine's endpoint, or set bind: false and let the engine bind",
            )
    elif port.state == "refused":
        yield await _refused(one)
    elif port.state == "unreachable":
        yield error(
            "events.unreachable",
            one.where,
            f"{endpoint.events} cannot be reached",
            cause="wrong host, or a firewall or network policy between here and there",
            evidence=(port.detail,),
            remedy="correct `events`, or open the port; a pod needs the containerPort reachable from kvcar",
        )
    elif port.state == "not_zmq":
        yield error(
            "events.not_zmq",
            one.where,
            f"what listens at {endpoint.events} is no event publisher",
            cause="another service's port, such as the engine's HTTP port",
            evidence=(port.detail,),
            remedy="give the port of the engine's --kv-events-config",
        )
    elif not report.link.connected:
        yield error(
            "events.handshake",
            one.where,
            f"{endpoint.events} speaks ZMQ, but is no publisher",
            cause="the replay port, or another ZMQ socket; or CURVE security",
            evidence=(report.link.error or f"{report.link.connect_retries} failed handshakes",),
            remedy="`events` is the PUB port, `replay` the ROUTER port: are they swapped?",
        )


async def _refused(one: Stream) -> Finding:
    endpoint = one.facts.endpoint
    if await publisher_connects(endpoint.events, 1.0):
        return error(
            "events.connects",
            one.where,
            f"the engine connects to {endpoint.events} instead of listening there: kvcar never receives an event",
            cause="vLLM binds its endpoint only when it holds a `*` (or `::`); otherwise it connects",
            evidence=("nobody listened there; when doctor did for a second, a publisher connected",),
            remedy="write the engine's endpoint as tcp://*:PORT, or set bind: true here",
        )
    rank = endpoint.dp_rank
    behind = (
        f"rank {rank} publishes at the port of rank 0 plus {rank}: is the engine's --data-parallel-size smaller? "
        if rank
        else ""
    )
    return error(
        "events.refused",
        one.where,
        f"nobody listens at {endpoint.events}, so this instance never has a hit",
        cause=f"{behind}KV events are off, use another port, are bound to another address, or the engine's endpoint "
        "lacks the `*` and it connects instead of binding",
        evidence=(one.facts.port.detail,),
        remedy=f"start the engine with {KV_EVENTS}",
    )


async def replay(one: Stream) -> AsyncIterator[Finding]:
    """Can a restarted kvcar learn what the engine holds?"""
    facts, port = one.facts, one.facts.replay_port
    name = facts.endpoint.replay
    if facts.endpoint.replay is None and facts.endpoint.medium:
        return
    if facts.endpoint.replay is None:
        yield note(
            "events.no_replay",
            one.where,
            "no replay endpoint: after a start or a gap kvcar knows only what the engine announces from then on",
            cause="vLLM's replay_endpoint is off unless it is given",
            remedy='add "replay_endpoint":"tcp://*:PORT" to the engine, and `replay` here',
        )
        return
    assert port is not None
    if port.state in ("refused", "unreachable", "not_zmq"):
        yield warning(
            "events.replay_port",
            one.where,
            f"{name} gives no replay: after a start or a gap older blocks stay unknown",
            cause="wrong port or host, or the engine has no replay_endpoint",
            evidence=(port.detail,),
            remedy='add "replay_endpoint":"tcp://*:PORT" to the engine; rank r uses port + r',
        )
    elif (status := facts.report.status) is not None and facts.usable:
        if status.replay_failures > 1 and not status.complete:
            yield warning(
                "events.replay_silent",
                one.where,
                f"{name} is there, but replays fail",
                cause="another service's port, an engine that is stuck, or a reply that lacks messages",
                evidence=(f"{status.replay_failures} of {status.replays} attempts failed", status.error or ""),
                remedy="`replay` must be the ROUTER port of this rank",
            )
        elif status.synchronized and not status.complete and status.replays:
            yield note(
                "events.incomplete",
                one.where,
                "the replay no longer holds the first messages: older blocks stay unknown until they are stored anew",
                cause="the engine keeps the last buffer_steps batches (10,000 by default)",
                remedy='a larger "buffer_steps" in --kv-events-config',
            )


async def arrive(one: Stream) -> AsyncIterator[Finding]:
    """Does anything come, of the right topic and rank?"""
    facts, endpoint, heard = one.facts, one.facts.endpoint, one.facts.heard
    report = facts.report
    if not report.link.connected:
        return
    others = {topic: count for topic, count in heard.topics.items() if endpoint.topic not in (None, topic)}
    if others and endpoint.topic not in heard.topics:
        names = ", ".join(map(repr, others))
        yield error(
            "events.topic",
            one.where,
            f"events come with topic {names}, configured is {endpoint.topic!r}: they are ignored",
            cause="`topic` must be the engine's own, to the letter; subscriptions match by prefix, topics do not",
            evidence=tuple(f"{count} messages of topic {topic!r}" for topic, count in list(others.items())[:3]),
            remedy=f"topic: {next(iter(others))!r}",
        )
    elif wrong := heard.ranks - {endpoint.dp_rank}:
        yield error(
            "events.rank",
            one.where,
            f"{endpoint.events} brings events of data-parallel rank {sorted(wrong)[0]}, not {endpoint.dp_rank}",
            cause="rank r publishes at the configured port + r; `events` is not the port of rank 0",
            evidence=(f"data_parallel_rank in the messages: {sorted(heard.ranks)}",),
            remedy="give the endpoint of rank 0 in `events` and `replay`",
        )
    elif report.sequence is None and not heard.messages:
        if one.busy or (one.worked and facts.report.status is not None and _replayed_nothing(facts)):
            yield error(
                "events.silent",
                one.where,
                "the engine computes prompts, but publishes no events",
                cause="enable_kv_cache_events or prefix caching is off, or another engine's publisher is at this port",
                evidence=(f"connected to {endpoint.events}; no message, while the engine computed prompts",),
                remedy=f"start the engine with {KV_EVENTS}",
            )
        else:
            yield note(
                "events.idle",
                one.where,
                "connected, and nothing came: the engine had nothing to do",
                cause=f"idle engines publish nothing; doctor listened for {one.context.options.listen:g} s",
                remedy="run it again under traffic, or with --live",
            )


def _replayed_nothing(facts: StreamFacts) -> bool:
    """A replay was answered (none is under way any more), and was empty."""
    status = facts.report.status
    done = status is not None and status.state not in (State.FETCH, State.BACKOFF, State.OFFLINE)
    return status is not None and done and bool(status.replays) and not status.replay_failures


async def decoded(one: Stream) -> AsyncIterator[Finding]:
    """Do messages mean what the dialect says?"""
    status, heard, endpoint = one.facts.report.status, one.facts.heard, one.facts.endpoint
    if status is None:
        return
    wrong_rank = heard.ranks - {endpoint.dp_rank}  # said by `arrive`
    if heard.broken or (status.damaged and status.error and not wrong_rank):
        yield error(
            "events.undecodable",
            one.where,
            f"messages cannot be read as dialect {endpoint.dialect}: the stream never keeps what it learns",
            cause="pools[*].dialect is another engine's, or what publishes here is none",
            evidence=(heard.error or status.error or "", f"{status.damaged} messages lost"),
            remedy="dialect: auto (vLLM, SGLang, Mooncake), or xllm",
        )
    unknown = {reason: n for reason, n in status.skipped.items() if reason not in ("attention_kind", "block_size")}
    if unknown:
        yield warning(
            "events.skipped",
            one.where,
            f"{sum(unknown.values())} events are not taken over",
            cause="a newer message form, or a medium or kind of block that kvcar does not know",
            evidence=(", ".join(f"{reason}: {count}" for reason, count in unknown.items()), status.error or ""),
            remedy="see kvindex/README.md for what is indexed; an unknown tag is worth a report",
        )
    if status.skipped.get("block_size"):
        yield error(
            "events.block_size",
            one.where,
            "events have another block size than the pool: none of these blocks is indexed",
            cause="pools[*].block_size is not the engine's, or engines of one pool differ",
            evidence=(status.error or f"{status.skipped['block_size']} events skipped",),
            remedy="block_size: auto, and one --block-size for all engines of the pool",
        )


async def anchored(one: Stream) -> AsyncIterator[Finding]:
    """Do blocks hang together from the first token on?"""
    status = one.facts.report.status
    if status is None or not status.unanchored:
        return
    share = status.unanchored / max(1, status.known)
    make = warning if share > UNANCHORED else note
    yield make(
        "events.unanchored",
        one.where,
        f"{status.unanchored} of {status.known} blocks have a parent that kvcar does not know: they cannot be hit",
        cause="kvcar joined late and the replay does not reach back, or events of the parents were lost",
        evidence=(f"blocks {status.blocks._asdict()}, gaps {status.gaps}, missed messages {status.missed}",),
        remedy="configure replay with a large buffer_steps; else it heals as prompts are computed anew",
    )


async def in_play(one: Stream) -> AsyncIterator[Finding]:
    """What belongs to a block besides its tokens."""
    heard = one.facts.heard
    if heard.salted:
        yield note(
            "events.salted",
            one.where,
            f"{heard.salted} blocks carry a cache salt or media: they match only requests with the same",
            cause="requests with cache_salt, images, audio or video are under way",
            remedy="nothing: salted requests are scored, requests with media up to the first of them",
        )
    if heard.adapters and not one.pool.adapters:
        yield warning(
            "events.adapters",
            one.where,
            f"{heard.adapters} blocks belong to LoRA adapters, and the pool has none configured",
            cause="requests for adapters pass unscored (model)",
            remedy="list them in pools[*].adapters",
        )


async def clock(one: Stream) -> AsyncIterator[Finding]:
    lag = one.facts.heard.lag
    if lag is not None and abs(lag) > CLOCK_LIMIT:
        yield clock_finding(one.where, lag, f"the newest event came {lag:.1f} s after its own timestamp")


JUDGES: tuple[tuple[str, str, Judge], ...] = (
    ("events.ports", "publishers listen", ports),
    ("events.arrive", "events arrive", arrive),
    ("events.decoded", "events are understood", decoded),
    ("events.replay", "replay works", replay),
    ("events.anchored", "blocks hang together", anchored),
    ("events.in_play", "adapters, salt and media", in_play),
    ("events.clock", "event times and our clock", clock),
)
ANYWAY = (ports, replay)
"""The others have nothing to say where no publisher listens: libzmq takes any bytes for a message."""


def _check(judge: Judge) -> Callable[[Context], object]:
    async def run(context: Context) -> Found:
        every = await streams(context)
        judged = [one for one in every if one.facts.usable or judge in ANYWAY]
        if not judged:
            raise Skip("no publisher listens")
        found = [finding for one in judged for finding in [item async for item in judge(one)]]
        part = "" if len(judged) == len(every) else f"{len(judged)} of "
        return Found(tuple(found), f"{part}{len(every)} streams")

    return run


async def configured(context: Context) -> Found:
    """Instances without an events endpoint."""
    found = []
    for pool in context.pools:
        silent = [one.name for one in await context.instances(pool) if one.followed and not one.events]
        if silent and pool.approximate is None:
            found.append(
                warning(
                    "events.none",
                    f"pool {pool.name}",
                    f"no events endpoint: {', '.join(silent[:8])} are routed by load alone, their hits are 0",
                    cause="pools[*].instances[*].events is not set",
                    remedy="set `events` (and `replay`), or `approximate` for engines that cannot publish",
                )
            )
    return Found(tuple(found))


CHECKS = (
    Check("events.configured", "KV events", "every instance has an events endpoint", (), configured),
    *(Check(id, "KV events", title, ("events",), _check(judge)) for id, title, judge in JUDGES),  # type: ignore[arg-type]
)
