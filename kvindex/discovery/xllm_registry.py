"""xLLM's instance registry: what its etcd keys mean, and what is known of each instance. Sans-IO.

    <namespace>XLLM:{DEFAULT,PREFILL,DECODE,MIX}:<ip:port>  ->  {"name", "rpc_address", "type", "incarnation_id", ...}

    put / deleted / listed --> Registry --> assignment()  instances with their event ports, and who is left out
    due(now) -> names to ask for /health --> answered / silent

An instance whose key is gone is not gone: etcd may have lost the lease while the engine serves on. So it is asked, and
as long as it answers it stays (the states and times are those of the xLLM service):

    ACTIVE      its key is there
    LEASE_LOST  key deleted, but it answers (2 tries): streams kept, routable. Asked once a second
    SUSPECT     it did not answer (LEASE_LOST: for 3 s): streams dropped, not routable. An answer brings LEASE_LOST back
    gone        15 s SUSPECT, or another incarnation was registered under its name

xLLM takes heartbeats for answers of a LEASE_LOST instance; they go to the xLLM service and not to us, so we ask.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kvindex.discovery.port_offset import EVENT_PORT_OFFSET, REPLAY_PORT_OFFSET, Assignment, assign_offsets
from kvindex.endpoints import check_address
from kvindex.errors import ConfigurationError
from kvindex.fleet import MAX_DP_SIZE, Instance, InstanceState

log = logging.getLogger(__name__)

ROLE_OF_TYPE = ("default", "prefill", "decode", "mix")
"""By the number in the JSON field `type`."""
ROLE_KEYS = tuple(f"XLLM:{role.upper()}:" for role in ROLE_OF_TYPE)
REGISTERED = "registered "
"""Begins the incarnation of a process that names none: made of the time of its registration, unknown to itself."""
BACKEND = "xllm"
"""Engines of another `backend_type` are routed to, but publish no events by the port rule."""


@dataclass(frozen=True, slots=True)
class PortRule:
    """Where an instance's events are; `topic` is compared whole."""

    event_offset: int = EVENT_PORT_OFFSET
    replay_offset: int = REPLAY_PORT_OFFSET
    topic: str = ""


@dataclass(frozen=True, slots=True)
class LeaseRule:
    """What follows when a key is gone. Times in seconds.

    tries     questions without an answer until SUSPECT, `retry` apart
    interval  between questions after that; silence = without an answer, until a LEASE_LOST instance is SUSPECT
    forget    SUSPECT until it is taken out
    """

    tries: int = 2
    retry: float = 0.1
    interval: float = 1.0
    silence: float = 3.0
    forget: float = 15.0


class Registration(NamedTuple):
    """One value of the registry. `instance` has no event endpoints yet."""

    instance: Instance
    backend: str


def namespace_prefix(namespace: str) -> str:
    """As xLLM has it: "" -> "", "foo" -> "/foo/", "/a/b/" -> "/a/b/"."""
    inner = namespace.strip("/")
    return f"/{inner}/" if inner else ""


def key_range(namespace: str) -> tuple[bytes, bytes]:
    """First key and the one after the last of all four roles. XLLM:LOADMETRICS: lies between and is ignored;
    XLLM:CACHE: (old KV metadata, large) and XLLM:SERVICE: lie outside."""
    prefix = namespace_prefix(namespace) + "XLLM:"
    return (prefix + "D").encode(), (prefix + "Q").encode()


def parse(value: bytes, *, pool: str = "", model: str = "") -> Registration:
    """One instance's JSON. Raises ConfigurationError that names the field; unknown fields are ignored.

    Without incarnation_id the time of registration tells processes apart; without both it is "": a reconnect has to
    show a restart. `current_type` (1 or 2) is the role a MIX instance acts in, where somebody says so.
    """
    try:
        fields = json.loads(value)
    except (ValueError, RecursionError):
        raise ConfigurationError("the value is no JSON") from None
    if not isinstance(fields, dict):
        raise ConfigurationError("the value is no JSON object")
    name = _text(fields, "name", required=True)
    address = str(check_address(name, what="name", literal=True))
    role = ROLE_OF_TYPE[_number(fields, "type", len(ROLE_OF_TYPE) - 1, required=True)]
    _text(fields, "rpc_address", required=True)
    registered = _number(fields, "register_ts_ms", 2**64 - 1)
    acting = ""
    if role == "mix" and fields.get("current_type") in (1, 2):
        acting = ROLE_OF_TYPE[fields["current_type"]]
    instance = Instance(
        name=name,
        address=address,
        pool=pool,
        role=role,
        dp_size=max(1, _number(fields, "dp_size", MAX_DP_SIZE)),
        incarnation=_text(fields, "incarnation_id") or (f"{REGISTERED}{registered}" if registered else ""),
        model=model,
        acting=acting,
    )
    instance.check()
    return Registration(instance, _text(fields, "backend_type") or BACKEND)


def _text(fields: Mapping[str, Any], key: str, *, required: bool = False) -> str:
    value = fields.get(key, "")
    if not isinstance(value, str) or (required and not value):
        raise ConfigurationError(f"{key} is {value!r}, not a text" if key in fields else f"{key} is missing")
    return value


def _number(fields: Mapping[str, Any], key: str, most: int, *, required: bool = False) -> int:
    value = fields.get(key, 0)
    if required and key not in fields:
        raise ConfigurationError(f"{key} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ConfigurationError(f"{key} is {value!r}, not in 0..{most}")
    return value


@dataclass(slots=True)
class _Known:
    """A registered instance. `lost`: its key is gone; the times are those of the caller's clock."""

    key: bytes
    given: Registration
    state: InstanceState = InstanceState.ACTIVE
    lost: bool = False
    asking: bool = False
    ask_at: float = 0.0
    unanswered: int = 0
    heard_at: float = 0.0
    suspect_at: float = 0.0


class Question(NamedTuple):
    """Does this process still answer at its address?"""

    name: str
    address: str
    incarnation: str


class Registry:
    """All instances of one namespace. `now` is any clock that does not go back, in seconds.

    refused   key -> why its value is of no use; what was known under the key before stays
    version   grows with every change of what `assignment` and `refused` say
    """

    def __init__(
        self,
        *,
        pool: str = "",
        model: str = "",
        namespace: str = "",
        ports: PortRule | None = None,
        leases: LeaseRule | None = None,
        dialect: str = "xllm",
        recovery: str | None = None,
    ) -> None:
        self.refused: dict[str, str] = {}
        self.version = 0
        self._pool, self._model = pool, model
        self._ports = ports or PortRule()
        self._leases = leases or LeaseRule()
        self._dialect, self._recovery = dialect, recovery
        self._prefixes = tuple((namespace_prefix(namespace) + key).encode() for key in ROLE_KEYS)
        self._known: dict[str, _Known] = {}
        self._excluded: Mapping[str, str] = {}

    # -- what etcd says

    def put(self, key: bytes, value: bytes) -> None:
        """The key has this value now."""
        if not key.startswith(self._prefixes):
            return
        shown = key.decode("utf-8", "replace")
        try:
            given = parse(value, pool=self._pool, model=self._model)
        except ConfigurationError as error:
            if self.refused.get(shown) != str(error):
                log.error("registration %s is refused: %s", shown, error)
                self.version += 1
            self.refused[shown] = str(error)
            return
        name = given.instance.name
        before = self._known.get(name)
        if before is not None and (before.key, before.given, before.lost) == (key, given, False):
            if self.refused.pop(shown, None) is not None:
                self.version += 1
            return
        self.version += 1
        self.refused.pop(shown, None)
        for other in [other for other, one in self._known.items() if one.key == key and other != name]:
            del self._known[other]
        self._known[name] = _Known(key, given)

    def deleted(self, key: bytes, previous: bytes | None, now: float) -> None:
        """The key is gone; `previous` is the value it had, where known. Of an older process it is no news."""
        if self.refused.pop(key.decode("utf-8", "replace"), None) is not None:
            self.version += 1
        known = next((one for one in self._known.values() if one.key == key), None)
        if known is None or known.lost:
            return  # also: it is registered under another role by now
        if previous:
            try:
                if parse(previous).instance.incarnation != known.given.instance.incarnation:
                    return
            except ConfigurationError:
                pass
        self.version += 1
        known.lost = True
        known.ask_at = known.heard_at = now
        known.unanswered = 0

    def listed(self, pairs: Iterable[tuple[bytes, bytes]], now: float) -> None:
        """These are all keys, the one written last at the end."""
        pairs = list(pairs)
        keys = {key for key, _ in pairs}
        for shown in [shown for shown in self.refused if shown.encode() not in keys]:
            del self.refused[shown]
            self.version += 1
        for one in list(self._known.values()):
            if one.key not in keys:
                self.deleted(one.key, None, now)
        for key, value in pairs:
            self.put(key, value)

    # -- what the instances say

    def due(self, now: float) -> list[Question]:
        """Whom to ask now; each question wants `answered` or `silent`."""
        asked = []
        for name, one in list(self._known.items()):
            if one.state is InstanceState.SUSPECT and now - one.suspect_at >= self._leases.forget:
                log.info("instance %s is gone", name)
                self.version += 1
                del self._known[name]
            elif one.lost and not one.asking and now >= one.ask_at:
                one.asking = True
                asked.append(Question(name, one.given.instance.address, one.given.instance.incarnation))
        return asked

    def forget_questions(self) -> None:
        """Whoever asked has ended: what is open will not be answered."""
        for one in self._known.values():
            one.asking = False

    def next_due(self) -> float | None:
        """When `due` has something to do; None = not before something else happens."""
        times = [one.ask_at for one in self._known.values() if one.lost and not one.asking]
        times += [
            one.suspect_at + self._leases.forget for one in self._known.values() if one.state is InstanceState.SUSPECT
        ]
        return min(times, default=None)

    def answered(self, question: Question, now: float) -> None:
        one = self._asked(question)
        if one is not None:
            one.unanswered, one.heard_at, one.ask_at = 0, now, now + self._leases.interval
            self._turn(question.name, one, InstanceState.LEASE_LOST)

    def silent(self, question: Question, now: float) -> None:
        one = self._asked(question)
        if one is None:
            return
        rule = self._leases
        one.unanswered += 1
        one.ask_at = now + (rule.retry if one.unanswered < rule.tries else rule.interval)
        first = one.state is InstanceState.ACTIVE and one.unanswered >= rule.tries
        if first or (one.state is InstanceState.LEASE_LOST and now - one.heard_at >= rule.silence):
            one.suspect_at = now
            self._turn(question.name, one, InstanceState.SUSPECT)

    def _asked(self, question: Question) -> _Known | None:
        """The instance, unless it is registered again, or another process, by now."""
        one = self._known.get(question.name)
        if one is None or not one.asking or one.given.instance.incarnation != question.incarnation:
            return None
        one.asking = False
        return one

    def _turn(self, name: str, one: _Known, state: InstanceState) -> None:
        if one.state is not state:
            log.warning("instance %s has no registration any more and is %s", name, state.value)
            one.state = state
            self.version += 1

    # -- what follows

    def assignment(self) -> Assignment:
        """Every instance with its state and its event endpoints; a port over 65535 or a clash leaves those concerned
        out (logged once). Those without events of their own (decode, another backend, SUSPECT) take part in no clash.
        """
        events: list[Instance] = []
        silent: list[Instance] = []
        for one in self._known.values():
            instance = replace(one.given.instance, state=one.state)
            follows = one.given.backend == BACKEND and instance.role != "decode"
            (events if follows and one.state is not InstanceState.SUSPECT else silent).append(instance)
        rule = self._ports
        assigned = assign_offsets(
            events,
            event_offset=rule.event_offset,
            replay_offset=rule.replay_offset,
            topic=rule.topic,
            dialect=self._dialect,
            recovery=self._recovery,
            logged=self._excluded,
        )
        self._excluded = assigned.excluded
        return Assignment((*assigned.instances, *silent), assigned.excluded)
