"""Membership agreement within a host: ranks in ``shrink()``, over registers in their arena.

The product's are agreement.py, arena_registers.py and shrinking.py, with the kernels of shared_words.py.
Models stand for what gives the new arena to others (its descriptors are searched by themselves,
:mod:`verification.protocols.passing`), for what the system knows of processes, and for clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from torchestra.engine import layout as at
from torchestra.errors import CollectiveTimeoutError, RankExcludedError
from verification.memory import Known
from verification.protocols.product import Mutation, copies
from verification.protocols.replay import SLEEP, perform, resumed, turn
from verification.protocols.words import BASE, SHARED_WORDS, ModelArena
from verification.protocols.world import Model, ProtocolWorld, Rules
from verification.violations import NeverEnds, Violation, WrongResult

MODULES = ("membership.agreement", "membership.arena_registers", "membership.shrinking")
_WORDS = {at.CANDIDATE: "CANDIDATE", at.READY: "READY", at.EXCLUDED: "EXCLUDED"}
IN, EXCLUDED, LATE, INTERRUPTED = "is in", "is excluded", "gave up", "was interrupted"


_MOST_OFFERS = 10
_MOST_OVERLOOKED = 2
"""How many looks of a rank at its own host may miss a death. The product's miss those of the last
milliseconds (liveness.py), for which the model has no clock; a rank that never learned of one could propose
it for ever."""


class SplitBrain(Violation):
    """Two groups come out of one, or a rank is in a group whose others do not know it."""


class ModelDeadline:
    """A limit of time: whether it has passed is chosen by the search, unless it is none at all."""

    def __init__(self, timeout_s: float = float("inf")) -> None:
        self.timeout_s = timeout_s

    def expired(self) -> bool:
        """Return whether no time is left."""
        if self.timeout_s in (0.0, float("inf")):
            return self.timeout_s == 0.0
        return bool(perform("looks whether it is late"))

    def remaining(self) -> float:
        """Return the seconds left; nothing depends on how many."""
        return self.timeout_s


class ModelTransfer(SimpleNamespace):
    """The new arena, as one of its ranks holds it, named by the key under which it was offered."""

    def __init__(self, key: bytes) -> None:
        super().__init__(key=key, arena=key, store=None, threads=None)

    def abandon(self) -> None:
        """Release it."""


class ModelOffer:
    """The proposer's side of giving the new arena to the others."""

    def __init__(self, key: bytes) -> None:
        self.key, self.transfer = key, ModelTransfer(key)

    def serve(self, timeout_s: float = 0.0) -> None:
        """Give it to those that have asked."""
        perform("serves", self.key)

    def close(self) -> None:
        """Stop that."""
        perform("serves no more", self.key)


class ModelRequest:
    """The side of a rank that asks."""

    def __init__(self, key: bytes, rank: int) -> None:
        self.key, self._rank = key, rank

    def answer(self) -> ModelTransfer | None:
        """Return the transfer, if it was given."""
        return ModelTransfer(self.key) if perform("asks for", self.key, self._rank) else None

    def sleep(self, seconds: float) -> None:
        """Sleep a moment: what comes after it is as if it had slept."""

    def close(self) -> None:
        """Stop asking."""


class ModelNewContext:
    """A rank in the new group."""

    def __init__(self, arena: bytes, rank: int, *more: object) -> None:
        self.key, self.rank = arena, rank

    def announce(self) -> None:
        """Be there."""
        perform("enters", self.key, self.rank)

    def leave(self) -> None:
        """Be there no more."""
        perform("leaves", self.key, self.rank)

    def meet_peers(self, *ranks: object) -> None:
        """Know the others."""


class ModelContext:
    """A rank in the old group."""

    name = "old"
    peers = program = None

    def __init__(self, rank: int, size: int, registers: Any) -> None:
        self.rank, self.size, self.registers = rank, size, registers
        self.shrinking = SimpleNamespace(holder=None, take=self._take)

    def _take(self, claim: object) -> bool:
        self.shrinking.holder = claim
        return True

    def gone(self) -> tuple[int, ...]:
        """Return the ranks that this one knows to be gone."""
        return tuple(perform("looks who is gone"))

    def describe(self, rank: int) -> str:
        """Name a rank."""
        return f"rank {rank}"

    def host_report(self, late: Sequence[int]) -> SimpleNamespace:
        """Tell nothing about where ranks are."""
        return SimpleNamespace(lines="")


class Resumption:
    """What the rank of an attempt keeps from one look at the registers to the next."""

    @staticmethod
    def kept(agreement: Any, entry: Any) -> tuple[Any, ...]:
        """Return it."""
        return (
            agreement._epoch,
            agreement._ready,
            None if agreement._proposed is None else agreement._proposed.timeout_s,
            None if entry._offer is None else entry._offer.key,
            None if entry._request is None else (entry._request.key, entry._request._rank),
            None if entry._transfer is None else entry._transfer.key,
            None if entry._new is None else (entry._new.key, entry._new.rank),
        )

    @staticmethod
    def restore(agreement: Any, entry: Any, kept: tuple[Any, ...]) -> None:
        """Give it back."""
        agreement._epoch, agreement._ready, proposed, offer, request, transfer, is_in = kept
        agreement._proposed = None if proposed is None else ModelDeadline(proposed)
        entry._offer = None if offer is None else ModelOffer(offer)
        entry._request = None if request is None else ModelRequest(*request)
        entry._transfer = None if transfer is None else ModelTransfer(transfer)
        entry._new = None if is_in is None else ModelNewContext(*is_in)


def resumable(agreement_module: ModuleType, resumption: type[Any]) -> type[Any]:
    """Return the product's class of an attempt, which goes on where its rank looked last."""

    class Resumable(agreement_module.MembershipAgreement):  # type: ignore[name-defined, misc]
        def run(self, exclude: Sequence[int]) -> Any:
            attempt, kept = resumed()
            entry, registers = self._epoch_entry, self._registers
            if kept is not None:
                resumption.restore(self, entry, kept)
                registers.exclude, registers.announce = lambda ranks: perform(SLEEP), lambda grows: None
            product_wait = entry.wait

            def wait(seconds: float) -> None:
                product_wait(seconds)
                turn((attempt, resumption.kept(self, entry)))

            entry.wait = wait
            return super().run(exclude)

    return Resumable


def attempt(shrink: Callable[[], Any], attempts: int) -> Any:
    """Return what became of a rank that calls ``shrink``, again if that was late or interrupted."""
    if resumed() is None:
        turn((1, None))
    number = resumed()[0]
    try:
        return shrink()
    except RankExcludedError as error:
        return (EXCLUDED, error.survivors)
    except (KeyboardInterrupt, CollectiveTimeoutError) as error:
        if number < attempts:
            turn((number + 1, None))
        return (LATE if isinstance(error, CollectiveTimeoutError) else INTERRUPTED,)


@dataclass(frozen=True)
class ArenaAgreement:
    """Ranks that call ``shrink()``.

    Attributes:
        name: for reports.
        size: how many ranks.
        rules: for other events.
        exclude: by rank, whom it excludes.
        attempts: how often a rank calls it that was interrupted or late.
        has_limit: whether the calls have a time-out.
        dead: the ranks that are dead from the beginning.
    """

    name: str
    size: int
    rules: Rules = field(default_factory=Rules)
    exclude: tuple[tuple[int, ...], ...] = ()
    attempts: int = 1
    has_limit: bool = False
    dead: tuple[int, ...] = ()

    def make(self, mutation: Mutation | None = None) -> Any:
        """Return the function that makes the first state."""
        made = copies(MODULES, _REPLACED, mutation)
        agreement, registers, shrinking = (made[name] for name in MODULES)
        shrinking.__dict__["MembershipAgreement"] = resumable(agreement, Resumption)
        arena = ModelArena(self.size)
        timeout_s = 1.0 if self.has_limit else float("inf")

        def program(rank: int) -> Any:
            exclude = self.exclude[rank] if self.exclude else ()

            def shrink() -> Any:
                context = ModelContext(rank, self.size, registers.ArenaRegisters(arena, rank))
                new = shrinking.shrink(context, "new", exclude, timeout_s)
                return (IN, new.context.key, new.survivors)

            return attempt(shrink, self.attempts)

        model = Model(
            [lambda rank=rank: program(rank) for rank in range(self.size)],  # type: ignore[misc]
            SERVICES,
            self.check,
            {"offers": (0,) * self.size, "open": frozenset(), "asked": frozenset(), "given": frozenset(),
             "in": frozenset(), "known": (frozenset(self.dead),) * self.size,
             "overlooked": (0,) * self.size, "decided": None},
            self.rules,
            CHOICES,
        )  # fmt: skip
        decision = BASE + arena.layout.agreement

        def first(known: Known) -> ProtocolWorld:
            world = ProtocolWorld(model, known)
            world.crashed = frozenset(self.dead)
            world.facts["decision"] = decision
            world.facts["registers"] = registers.ArenaRegisters(arena, 0)
            return world

        return first

    def name_of(self, address: int) -> str:
        """Return the name of a word."""
        return name_of_word(address, self.size)

    def check(self, world: ProtocolWorld) -> None:
        """Refuse two groups, and groups that are not what their ranks believe."""
        word = world.memory.newest(world.facts["decision"])
        facts = world.facts
        groups = {result[1:] for result in world.results if result is not None and result[0] == IN}
        if word & 3 == 2 and facts["decided"] is None:
            facts["decided"] = word
            self._check_commit(world, word)
        elif facts["decided"] not in (None, word):
            raise SplitBrain("what was committed is not final")
        if len(groups) > 1:
            raise SplitBrain(f"ranks are in different groups: {sorted(groups)}")
        for _, survivors in groups:
            for rank, result in enumerate(world.results):
                if result is not None and result[0] == IN and rank not in survivors:
                    raise SplitBrain(f"rank {rank} is in the group of {survivors}")
            for rank in survivors:
                if self.exclude and set(self.exclude[rank]) & set(survivors):
                    raise SplitBrain(f"rank {rank} is in a group with a rank that it has excluded")
        if world.has_ended():
            self._check_end(world)

    def _check_commit(self, world: ProtocolWorld, word: int) -> None:
        """Refuse the commit of an epoch before all whom it names have entered its group."""
        newest = world.memory.newest
        proposer, epoch = (word >> 2) & ((1 << 24) - 1), (word >> 26) + 1
        start = BASE + world.facts["registers"]._proposal_at(proposer, epoch)
        key = newest(start).to_bytes(32, "little")
        bits = np.unpackbits(np.array([newest(start + at.PROPOSAL_RANKS)], dtype=np.int64).view(np.uint8))
        for place, rank in enumerate(np.flatnonzero(bits).tolist()):
            if rank not in world.crashed and (key, place) not in world.facts["in"]:
                raise SplitBrain(f"a group was made, but rank {rank}, which is named, is not in it")

    def _check_end(self, world: ProtocolWorld) -> None:
        outcomes = {rank: result for rank, result in enumerate(world.results) if rank not in world.crashed}
        excluded = {rank for ranks in self.exclude for rank in ranks}
        rules = self.rules
        for result in list(outcomes.values()) if not rules.interrupts else ():
            for rank in result[2] if result[0] == IN else ():
                if rank in outcomes and outcomes[rank][0] != IN:
                    raise WrongResult(f"rank {rank}, which is in the group, {outcomes[rank][0]}")
        if rules.interrupts or rules.time_outs or rules.suspicions:
            return
        for rank, result in outcomes.items():
            if result[0] != IN and rank not in excluded:
                raise WrongResult(f"rank {rank} {' '.join(map(str, result))}")


def name_of_word(address: int, size: int) -> str:
    """Return the name of a word of the registers in the arena of so many ranks."""
    layout = ModelArena(size).layout
    offset = address - BASE - layout.agreement
    if offset == 0:
        return "DECISION"
    rank, word = divmod(offset - at.LINE, layout.agreement_bytes)
    if word < at.PROPOSALS:
        return f"{_WORDS[word]} of {rank}"
    number, word = divmod(word - at.PROPOSALS, layout.proposal_bytes)
    return f"{'KEY' if word < at.PROPOSAL_RANKS else 'SURVIVORS'} {number} of {rank}"


def _is_late(world: ProtocolWorld, rank: int, choice: Any) -> bool:
    world.time_outs += bool(choice)
    return bool(choice)


def _offer(world: ProtocolWorld, rank: int, choice: Any) -> bytes:
    counts = world.facts["offers"]
    number = counts[rank] + 1
    if number > _MOST_OFFERS:
        raise NeverEnds(f"rank {rank} proposes again and again")
    world.facts["offers"] = _with(counts, rank, number)
    key = bytes([rank + 1, number]).ljust(32, b"\0")
    world.facts["open"] |= {key}
    return key


def _serve(world: ProtocolWorld, rank: int, choice: Any, key: bytes) -> None:
    asked = {each for each in world.facts["asked"] if each[0] == key}
    world.facts["given"] |= asked
    world.facts["asked"] -= asked


def _close(world: ProtocolWorld, rank: int, choice: Any, key: bytes) -> None:
    world.facts["open"] -= {key}


def _ask(world: ProtocolWorld, rank: int, choice: Any, key: bytes, place: int) -> bool:
    if (key, place) in world.facts["given"]:
        return True
    if key in world.facts["open"]:
        world.facts["asked"] |= {(key, place)}
    return False


def _enter(world: ProtocolWorld, rank: int, choice: Any, key: bytes, place: int) -> None:
    if (key, place) in world.facts["in"]:
        raise SplitBrain(f"rank {rank} enters a group twice")
    world.facts["in"] |= {(key, place)}


def _leave(world: ProtocolWorld, rank: int, choice: Any, key: bytes, place: int) -> None:
    world.facts["in"] -= {(key, place)}


def _who_is_gone(world: ProtocolWorld, rank: int, choice: Any) -> tuple[int, ...]:
    if isinstance(choice, tuple):  # a wrong belief, which does not last
        world.suspicions += 1
        return tuple(sorted({*world.facts["known"][rank], *choice}))
    facts = world.facts
    if choice:
        facts["known"] = _with(facts["known"], rank, world.crashed)
    elif "overlooked" in facts and facts["known"][rank] != world.crashed:
        facts["overlooked"] = _with(facts["overlooked"], rank, facts["overlooked"][rank] + 1)
    return tuple(sorted(facts["known"][rank]))


def _with(values: tuple[Any, ...], rank: int, value: Any) -> tuple[Any, ...]:
    return (*values[:rank], value, *values[rank + 1 :])


def _beliefs(world: ProtocolWorld, rank: int) -> Iterable[Any]:
    """A rank learns of a death now or later; and may take one that lives for dead."""
    learns = world.facts["known"][rank] != world.crashed
    if not learns or "overlooked" not in world.facts or world.facts["overlooked"][rank] < _MOST_OVERLOOKED:
        yield 0
    if learns:
        yield 1
    if world.suspicions < world.model.rules.suspicions:
        for other in range(len(world.stops)):
            if other != rank and other not in world.crashed:
                yield (other,)


def _lateness(world: ProtocolWorld, rank: int) -> Iterable[Any]:
    yield 0
    if world.time_outs < world.model.rules.time_outs:
        yield 1


def make_offer(size: int, name: str, *, threads: bool) -> ModelOffer:
    """Stand for arena_transfer.make_offer."""
    return ModelOffer(perform("makes an arena"))


def make_request(key: bytes, rank: int, size: int, name: str, *, threads: bool) -> ModelRequest:
    """Stand for arena_transfer.make_request."""
    return ModelRequest(key, rank)


SERVICES: dict[str, Any] = {
    "makes an arena": _offer,
    "serves": _serve,
    "serves no more": _close,
    "asks for": _ask,
    "enters": _enter,
    "leaves": _leave,
    "looks who is gone": _who_is_gone,
    "looks whether it is late": _is_late,
}
CHOICES: dict[str, Any] = {"looks who is gone": _beliefs, "looks whether it is late": _lateness}
_REPLACED: dict[str, dict[str, Any]] = {
    "membership.agreement": {"Deadline": ModelDeadline},
    "membership.arena_registers": {"shared_words": SHARED_WORDS},
    "membership.shrinking": {
        "make_offer": make_offer,
        "make_request": make_request,
        "RankContext": ModelNewContext,
        "Deadline": ModelDeadline,
        "spin_policy": lambda size: None,
    },
}
