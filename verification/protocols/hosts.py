"""Membership agreement among hosts: ranks in ``shrink()`` or ``grow()`` over a store, and joiners.

The product's are agreement.py, store_registers.py, multihost/shrinking.py, admission.py, growing.py and
joiner.py. Models stand for the store's server (each request is one step), for how a group of several hosts
meets (all whom it names must come, and none give it up), and for who knows what of whose life.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torchestra.engine.membership.admission import JoinRequest
from torchestra.errors import CollectiveTimeoutError, GroupAbortedError
from torchestra.store import PrefixStore
from torchestra.store.process import ProcessIdentity
from verification.memory import Known
from verification.protocols import agreement as arena
from verification.protocols import store as stores
from verification.protocols.agreement import EXCLUDED, IN, INTERRUPTED, LATE, ModelDeadline, SplitBrain
from verification.protocols.product import Mutation, copies
from verification.protocols.replay import SLEEP, Raised, perform, resumed, turn
from verification.protocols.store import ModelStore
from verification.protocols.world import Model, ProtocolWorld, Rules
from verification.violations import WrongResult

MODULES = (
    "membership.agreement", "membership.admission", "membership.growing", "membership.joiner",
    "multihost.store_registers", "membership.shrinking", "multihost.shrinking",
)  # fmt: skip
_REGISTERS = tuple(
    f"shrinking/{key}" for key in ("came", "gone", "excluded", "entered/", "round/", "verdict/")
)
_MADE = ("admission/waiting", "admission/offers")
GENERATION = 1


@dataclass(frozen=True)
class Meeting:
    """A rank in the group of some ranks that meets over a part of the store."""

    name: str
    rank: int
    size: int

    def close(self) -> None:
        """Leave it."""
        perform("leaves the group", self.name, self.rank)


class ModelEntry:
    """Stands for EntryThread: the thread of a rank that enters a group."""

    def __init__(self, enter: Any, error_delay_s: float, cancel: Any = None) -> None:
        self._enter = enter
        self.meeting: Meeting = enter()
        self.entered: Meeting | None = None
        perform("comes to meet", self.meeting.name, self.meeting.rank)

    @classmethod
    def kept(cls, entry: ModelEntry | None) -> Any:
        """Return what there is to keep of it."""
        if entry is None:
            return None
        meeting = entry.meeting
        return (meeting.name, meeting.rank, meeting.size, entry.entered is not None)

    @classmethod
    def restored(cls, kept: Any) -> ModelEntry | None:
        """Return it as it was."""
        if kept is None:
            return None
        entry = cls.__new__(cls)
        entry.meeting = Meeting(*kept[:3])
        entry.entered = entry.meeting if kept[3] else None
        return entry

    def has_ended(self) -> bool:
        """Return whether the rank is on its way no more."""
        return self.entered is not None

    def has_entered(self) -> bool:
        """Return whether all have come."""
        if self.entered is None and perform("meets", self.meeting.name, self.meeting.size):
            self.entered = self.meeting
        return self.entered is not None

    def wait(self, seconds: float) -> None:
        """Sleep a moment."""

    def abandon(self) -> None:
        """Leave the group, or have those that wait for this rank give up."""
        perform("gives up", self.meeting.name, self.meeting.rank)


def _come(world: ProtocolWorld, rank: int, choice: Any, name: str, place: int) -> None:
    if (name, place, rank) in world.facts["met"]:
        raise SplitBrain(f"rank {rank} enters a group twice")
    world.facts["met"] |= {(name, place, rank)}


def _meet(world: ProtocolWorld, rank: int, choice: Any, name: str, size: int) -> Any:
    if len({place for met, place, _ in world.facts["met"] if met == name}) == size:
        return True
    if name in world.facts["given up"]:
        return Raised(GroupAbortedError, "a rank gave the meeting up")
    return False


def _give_up(world: ProtocolWorld, rank: int, choice: Any, name: str, place: int) -> None:
    world.facts["given up"] |= {name}


def _who_waits(world: ProtocolWorld, rank: int, choice: Any) -> tuple[str, ...]:
    """Return the lines of those that wait and are not known to be dead."""
    lines = dict(world.facts["store"]).get("admission/waiting", b"").decode().splitlines()
    known = arena._who_is_gone(world, rank, choice)
    return tuple(line for line in lines if int(line[1]) not in known)


class ModelDetector:
    """Stands for JoinerDetector: who waits, and which of them live."""

    def waiting(self, max_age_s: float = 0.0) -> list[JoinRequest]:
        """Return those that wait and live."""
        return [JoinRequest.decode(line) for line in perform("looks who waits")]

    def lost(self, requests: dict[str, Any]) -> bool:
        """Return whether one of some is gone."""
        waiting = {request.number for request in self.waiting()}
        return not waiting.issuperset(requests)


class _Resumption:
    @staticmethod
    def kept(agreement: Any, entry: Any) -> tuple[Any, ...]:
        registers = agreement._registers
        plain = getattr(entry, "_plain", entry)
        growing: Any = None
        if plain is not entry:
            offer = None if entry._offer is None else entry._offer.key
            own = None if entry._own is None else entry._own.key
            growing = (offer, ModelEntry.kept(entry._entry), tuple(sorted(entry._joiners)), own)
        return (
            agreement._epoch,
            agreement._ready,
            None if agreement._proposed is None else agreement._proposed.timeout_s,
            registers._epoch,
            frozenset(registers._reported),
            frozenset(registers._accused),
            ModelEntry.kept(plain._entry),
            plain._failures,
            growing,
        )

    @staticmethod
    def restore(agreement: Any, entry: Any, kept: tuple[Any, ...]) -> None:
        registers = agreement._registers
        plain = getattr(entry, "_plain", entry)
        agreement._epoch, agreement._ready, proposed, registers._epoch = kept[:4]
        agreement._proposed = None if proposed is None else ModelDeadline(proposed)
        registers._reported, registers._accused = set(kept[4]), set(kept[5])
        plain._entry, plain._failures = ModelEntry.restored(kept[6]), kept[7]
        if kept[8] is not None:
            key, meeting, joiners, own = kept[8]
            # An offer is written once, so it is read again without an operation.
            entry._offer = None if key is None else _offer_of(entry, key)
            entry._own = None if own is None else _offer_of(entry, own)
            entry._entry = ModelEntry.restored(meeting)
            entry._joiners = dict.fromkeys(joiners)


def _offer_of(entry: Any, key: bytes) -> Any:
    text = perform("reads again", f"admission/offer/{key.hex()}")
    return entry._growth.admission.offer.__globals__["Offer"].decode(text)


@dataclass(frozen=True)
class HostAgreement:
    """Ranks on as many hosts that call ``shrink()``, or ``grow()`` while others wait to be let in.

    Attributes:
        name: for reports.
        size: how many ranks the group has.
        joiners: how many others ask to be let in.
        rules: for other events.
        exclude: by rank, whom it excludes.
        attempts: how often a rank calls it that was interrupted or late.
        has_limit: whether the calls have a time-out.
        dead: the ranks that are dead from the beginning.
        reads_apart: whether the store reads values that are asked for together one by one.
    """

    name: str
    size: int
    rules: Rules = field(default_factory=Rules)
    joiners: int = 0
    exclude: tuple[tuple[int, ...], ...] = ()
    attempts: int = 1
    has_limit: bool = False
    dead: tuple[int, ...] = ()
    reads_apart: bool = False

    def make(self, mutation: Mutation | None = None) -> Any:
        """Return the function that makes the first state."""
        made = copies(MODULES, _REPLACED, mutation)
        made["multihost.shrinking"].__dict__["MembershipAgreement"] = arena.resumable(
            made["membership.agreement"], _Resumption
        )
        programs = [lambda rank=rank: self._member(made, rank) for rank in range(self.size)]
        programs += [lambda rank=self.size + each: _join(made, rank) for each in range(self.joiners)]
        size = self.size + self.joiners
        model = Model(
            programs,
            SERVICES,
            self.check,
            {"store": stores.EMPTY, "known": (frozenset(self.dead),) * size, "offers": (0,) * size,
             "met": frozenset(), "given up": frozenset(), "members": tuple(range(self.size))},
            self.rules,
            CHOICES,
            stores.AT_ONCE | {"reads again"},
        )  # fmt: skip

        def first(known: Known) -> ProtocolWorld:
            world = ProtocolWorld(model, known)
            world.crashed = frozenset(self.dead)
            return world

        return first

    def name_of(self, address: int) -> str:
        """Return the name of a word, of which this has none."""
        return hex(address)

    def _member(self, made: Any, rank: int) -> Any:
        shrinking = made["multihost.shrinking"]
        store = ModelStore(self.reads_apart, _REGISTERS)
        timeout_s = 1.0 if self.has_limit else float("inf")
        growth = None
        if self.joiners:
            admission = made["membership.admission"]
            growing = made["membership.growing"]
            terms = admission.Terms("new", GENERATION, "", 1.0, "native", None, tuple(range(self.size)))
            view = admission.Admission(PrefixStore("admission", ModelStore(made=_MADE)), 1.0)
            growth = growing.Growth(terms, view, ModelDetector(), _enter_offer, _cancel)
        hierarchy = _hierarchy(rank, self.size, store)
        exclude = self.exclude[rank] if self.exclude else ()

        def shrink() -> Any:
            new = shrinking.shrink_hosts(hierarchy, exclude, timeout_s, _enter, _cancel, growth)
            offer = getattr(new, "offer", None)
            return (IN, new.entered.name, new.survivors) if offer is None else _is_in(new)

        return arena.attempt(shrink, self.attempts)

    def check(self, world: ProtocolWorld) -> None:
        """Refuse two groups, and groups that are not what their ranks believe."""
        groups = {result[1:] for result in world.results if result is not None and result[0] == IN}
        if len(groups) > 1:
            raise SplitBrain(f"ranks are in different groups: {sorted(groups, key=str)}")
        for name, ranks in groups:
            came = {who for met, _, who in world.facts["met"] if met == name}
            for rank in ranks:
                if self.exclude and set(self.exclude[rank]) & set(ranks):
                    raise SplitBrain(f"rank {rank} is in a group with a rank that it has excluded")
            for rank, result in enumerate(world.results):
                is_in = result is not None and result[0] == IN
                if is_in and rank not in ranks:
                    raise SplitBrain(f"rank {rank} is in the group of {ranks}")
                if rank in ranks and rank not in came:
                    raise SplitBrain(f"the group of {ranks} was made, but rank {rank} has not entered it")
        if world.has_ended():
            self._check_end(world)

    def _check_end(self, world: ProtocolWorld) -> None:
        rules = self.rules
        excluded = {rank for ranks in self.exclude for rank in ranks}
        for rank, result in enumerate(world.results):
            if rank in world.crashed or result is None:
                continue
            if result[0] not in (IN, EXCLUDED, LATE, INTERRUPTED):
                raise WrongResult(f"rank {rank} ended with {result[0]}: {result[1]}")
            if rules.interrupts or rules.time_outs or rules.suspicions:
                continue
            if rank >= self.size and result[0] == LATE:
                continue  # it came too late, or the members have died
            if result[0] != IN and rank not in excluded:
                raise WrongResult(f"rank {rank} {' '.join(map(str, result))}")


def _join(made: Any, rank: int) -> Any:
    """Ask to be let in, as rank ``rank``."""
    joiner_module, admission = made["membership.joiner"], made["membership.admission"]
    view = admission.Admission(PrefixStore("admission", ModelStore(made=_MADE)), 1.0)
    request = admission.JoinRequest(f"j{rank}", None, "native", "", ProcessIdentity("host", rank, 0, ""))
    joiner = joiner_module.Joiner(view, request, _Patience(), _enter_offer, _cancel)
    if (kept := resumed()) is not None:
        followed, key, meeting = kept
        joiner._followed = None if followed is None else admission.Invitation(*followed)
        if key is not None:
            text = perform("reads again", f"admission/offer/{key.hex()}")
            joiner._offer = admission.Offer.decode(text)
        joiner._entry = ModelEntry.restored(meeting)
        view.ask = lambda request: perform(SLEEP)
    product_step = joiner._step
    steps = 0

    def step() -> Any:
        nonlocal steps
        steps += 1
        if steps > 1:
            offer = None if joiner._offer is None else joiner._offer.key
            followed = None if joiner._followed is None else tuple(joiner._followed)
            turn((followed, offer, ModelEntry.kept(joiner._entry)))
        return product_step()

    joiner._step = step
    try:
        grown = joiner.run()
    except CollectiveTimeoutError:
        return (LATE,)
    return _is_in(grown)


def _is_in(grown: Any) -> tuple[Any, ...]:
    """Return the outcome of a rank in a group with joiners: the ranks of all that are in it."""
    joined = tuple(int(number[1:]) for number in grown.offer.joiners)
    return (IN, grown.entered.name, (*(rank for rank in grown.offer.previous if rank >= 0), *joined))


class _Patience:
    """A joiner's deadline: it has passed once all members have ended, and none has let it in."""

    timeout_s = 1.0

    def expired(self) -> bool:
        """Return whether no time is left."""
        return bool(perform("looks whether there is hope"))

    def remaining(self) -> float:
        """Return the seconds left; nothing depends on how many."""
        return self.timeout_s


def _hierarchy(rank: int, size: int, store: ModelStore) -> Any:
    """Return what stands for a rank's view of the group: it is alone on its host."""
    context = arena.ModelContext(rank, 1, None)
    context.gone = lambda: ()  # type: ignore[method-assign]
    context.to_group_ranks = lambda ranks: ()  # type: ignore[attr-defined]
    detector = SimpleNamespace(
        store=store,
        bound=1.0,
        gone=lambda *_: set(perform("looks who is gone")),
        ask_where_they_are=lambda: (),
    )
    hosts = SimpleNamespace(size=size, describe=lambda each: f"rank {each}", among=len)
    return SimpleNamespace(rank=rank, hosts=hosts, context=context, name="old", detector=detector)


def _enter(store: Any, rank: int, hosts: int, timeout_s: float) -> Meeting:
    return Meeting(store.full_key(""), rank, hosts)


def _enter_offer(store: Any, rank: int, offer: Any, timeout_s: float) -> Meeting:
    return Meeting(store.full_key(""), rank, offer.size)


def _cancel(*words: object) -> None:
    """Have others give up; giving a meeting up does so by itself here."""


def _read_again(world: ProtocolWorld, rank: int, choice: Any, key: str) -> bytes:
    return bytes(dict(world.facts["store"]).get(key, b""))


def _name_offer(world: ProtocolWorld, rank: int, choice: Any) -> bytes:
    counts = world.facts["offers"]
    world.facts["offers"] = (*counts[:rank], counts[rank] + 1, *counts[rank + 1 :])
    return bytes([0x80 + rank, counts[rank] + 1])


def _hope(world: ProtocolWorld, rank: int, choice: Any) -> bool:
    members = len(world.facts["members"])
    ended = all(world.results[each] is not None or each in world.crashed for each in range(members))
    return ended and not any(
        result is not None and result[0] == IN and rank in result[2] for result in world.results[:members]
    )


def _known_joiners(world: ProtocolWorld, rank: int) -> Iterable[Any]:
    yield 0
    if world.facts["known"][rank] != world.crashed:
        yield 1


SERVICES: dict[str, Any] = {
    **stores.SERVICES,
    "looks who is gone": arena._who_is_gone,
    "looks whether it is late": arena._is_late,
    "looks who waits": _who_waits,
    "comes to meet": _come,
    "meets": _meet,
    "gives up": _give_up,
    "leaves the group": _give_up,
    "reads again": _read_again,
    "names an offer": _name_offer,
    "looks whether there is hope": _hope,
}
CHOICES: dict[str, Any] = {**arena.CHOICES, **stores.CHOICES, "looks who waits": _known_joiners}


def _tidy(task: Callable[[], object]) -> None:
    """Do at once what a thread does later."""
    task()


_TIME = SimpleNamespace(sleep=lambda seconds: None, monotonic=lambda: 0.0)
_REPLACED: dict[str, dict[str, Any]] = {
    "membership.agreement": {"Deadline": ModelDeadline},
    "membership.admission": {"offer_key": lambda: perform("names an offer")},
    "membership.growing": {"EntryThread": ModelEntry, "tidy_later": _tidy},
    "membership.joiner": {
        "EntryThread": ModelEntry,
        "Deadline": lambda *s: ModelDeadline(),
        "time": _TIME,
        "tidy_later": _tidy,
    },
    "multihost.shrinking": {"EntryThread": ModelEntry, "Deadline": ModelDeadline, "time": _TIME},
}
