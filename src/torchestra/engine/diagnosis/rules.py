"""The rules that find out from facts why ranks wait: pure functions, the most certain ones first.

The ranks that wait, and whom each waits for, make a graph (wait_graph.py). If it has a circle, that is the
cause. Else whoever all wait for in the end, and that waits for nobody, is the *culprit*, and the rules ask
what keeps it. A rule answers only if the facts decide; a *likely* answer rests on what usually is the
reason for what was seen. If no rule answers, the cause is unknown, and the diagnosis says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torchestra.engine.diagnosis.facts import LockWait, PastMessage, Process, RankFacts, UserFrame
from torchestra.engine.diagnosis.wait_graph import WaitGraph
from torchestra.engine.p2p.tags import ARRIVED, PASSED
from torchestra.errors import named_globally

_MAX_DISK = 0.5
_MANY_FAULTS = 20.0
_MUCH_THROTTLED = 0.5
_BUSY = 0.5


@dataclass(frozen=True)
class Diagnosis:
    """Why the ranks of a group wait.

    Attributes:
        kind: one of :data:`KINDS`.
        ranks: whose fault it is, in the group's numbering.
        text: what was found, with the lines of the program.
        certain: the facts leave no other explanation.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str
    certain: bool = True

    def __str__(self) -> str:
        return f"diagnosis{'' if self.certain else ' (likely)'}: {self.kind}: {self.text}"


class Case:
    """The facts about a group, and what follows from them for all rules.

    Args:
        facts: of all ranks that something is known of.
        waiting: the rank that has given up waiting.

    Attributes:
        culprits: the ranks that others wait for and that wait for nobody.
    """

    def __init__(self, facts: Sequence[RankFacts], waiting: int) -> None:
        self.facts = {each.rank: each for each in facts}
        self._global_ranks = {
            each.rank: each.rank if each.global_rank < 0 else each.global_rank for each in facts
        }
        self.waiting = self.facts.get(waiting)
        self.graph = WaitGraph(facts)
        self.culprits = [self.facts[rank] for rank in self.graph.culprits(waiting)]

    def first(self, wanted: Callable[[RankFacts], bool]) -> RankFacts | None:
        """Return the first culprit of a kind."""
        return next((each for each in self.culprits if wanted(each)), None)

    def stuck(self, wanted: Callable[[RankFacts], bool]) -> RankFacts | None:
        """Return the first culprit of a kind, or if there is no culprit, the first rank of that kind:
        ranks that stand still in the middle of an operation wait for each other, as the record has it.
        """
        return next((each for each in self.culprits or self.facts.values() if wanted(each)), None)

    def awaited_of(self, culprit: RankFacts) -> str:
        """Return what ranks wait for a culprit to do, in words: ``called operation 7, barrier()``."""
        running = [each.running for each in self.facts.values() if each.running is not None]
        if running:
            newest = max(running, key=lambda call: call.number)
            return f"called operation {newest.number}, {newest.text}"
        messages = [
            (each, each.message)
            for each in self.facts.values()
            if each.message is not None and each.message.peer in (culprit.rank, None)
        ]
        if not messages:
            return "called an operation"
        waiter, message = messages[0]
        if message.tag in (ARRIVED, PASSED):
            return "called monitored_barrier()"
        does = "received" if message.kind == "send" else "sent"
        return f"{does} what {waiter} waits for in {message.text} {waiter.site}"

    def named(self, ranks: Sequence[int]) -> str:
        """Return ranks as messages name them, with their global numbers if these are others."""
        return named_globally(ranks, {rank: self._global_ranks.get(rank, rank) for rank in ranks})

    def waiters(self) -> Iterator[RankFacts]:
        """Yield the ranks that wait in a collective of the group."""
        return (each for each in self.facts.values() if each.running is not None)


def _silent_host(case: Case) -> Diagnosis | None:
    silent = [each for each in case.facts.values() if each.presence == "silent"]
    if not silent:
        return None
    names = case.named(_ranks(silent))
    seen = f"; {silent[0]} was {silent[0].last_seen}" if silent[0].last_seen else ""
    waits = f"; {case.waiting} waits {case.waiting.site}" if case.waiting is not None else ""
    hosts = ", ".join(dict.fromkeys(each.host for each in silent))
    text = f"host {hosts} with {names} does not answer: it is down, or the network to it is{seen}{waits}"
    return Diagnosis("killed host", _ranks(silent), text, certain=False)


def _dead(case: Case) -> Diagnosis | None:
    dead = [each for each in case.facts.values() if each.presence == "dead"]
    if not dead:
        return None
    each = dead[0]
    seen = f"; it was {each.last_seen}" if each.last_seen else ""
    return Diagnosis("killed process", _ranks(dead), f"{each} has died ({each.end_reason}){seen}")


def _stopped(case: Case) -> Diagnosis | None:
    each = case.stuck(lambda facts: facts.system is not None and facts.system.stopped)
    if each is None:
        return None
    text = f"{each} is stopped, by SIGSTOP, Ctrl-Z or a debugger, {each.site}"
    return Diagnosis("stopped process", (each.rank,), text)


def _crossed_groups(case: Case) -> Diagnosis | None:
    circle = case.graph.circle({"group", "other group"})
    if circle is None or all(wait.kind == "group" for wait in circle):
        return None
    told = [f"{case.facts[wait.rank]} is in {wait.what} {case.facts[wait.rank].site}" for wait in circle]
    text = "; ".join(dict.fromkeys(told))
    return Diagnosis("wrong order of groups", tuple(sorted({wait.rank for wait in circle})), text)


def _differing_tags(case: Case) -> Diagnosis | None:
    """Ranks wait in a circle, and one of them for a message that the other has sent with another tag."""
    for wait in case.graph.circle({"recv", "send", "group", "other group"}) or ():
        waiter, other = case.facts[wait.rank], case.facts[wait.other]
        sent = _not_received(other, waiter) if wait.kind == "recv" else None
        if sent is None or waiter.message is None or waiter.message.peer is None:
            continue
        text = (
            f"{waiter} waits in {waiter.message.text} {waiter.site}, and has not received what {other} sent"
            f" it with another tag, {sent.text}; {other} is {other.site}"
        )
        return Diagnosis("mismatch", tuple(sorted((waiter.rank, other.rank))), text, certain=False)
    return None


def _not_received(sender: RankFacts, receiver: RankFacts) -> PastMessage | None:
    """Return the last message that a rank has sent another, if that has received none of its tag since."""
    to = [each for each in sender.messages if (each.kind, each.peer) == ("send", receiver.rank)]
    if not to or receiver.message is None or to[-1].tag == receiver.message.tag:
        return None
    received = any(
        (each.kind, each.peer, each.tag) == ("recv", sender.rank, to[-1].tag)
        and each.ended is not None
        and each.ended <= to[-1].began
        for each in receiver.messages
    )
    return None if received else to[-1]


def _swapped_messages(case: Case) -> Diagnosis | None:
    circle = case.graph.circle({"recv", "send"})
    if circle is None:
        return None
    told = [f"{case.facts[wait.rank]} waits in {wait.what} {case.facts[wait.rank].site}" for wait in circle]
    text = f"{'; '.join(told)}: each waits for the other before it does what the other waits for"
    return Diagnosis("swapped send and recv", tuple(sorted({wait.rank for wait in circle})), text)


def _crossed_calls(case: Case) -> Diagnosis | None:
    circle = case.graph.circle({"recv", "send", "group", "other group"})
    if circle is None:
        return None
    circle.sort(key=lambda wait: wait.kind not in ("recv", "send"))  # what the others do not call comes first
    told = [f"{case.facts[wait.rank]} is in {wait.what} {case.facts[wait.rank].site}" for wait in circle]
    ranks = sorted({wait.rank for wait in circle if wait.kind in ("recv", "send")})
    if not ranks:
        return None  # in one operation, which is no mismatch
    return Diagnosis("mismatch", tuple(ranks), "; ".join(dict.fromkeys(told)))


def _deadlock(case: Case) -> Diagnosis | None:
    each = case.first(lambda facts: _lock(facts) is not None)
    lock = _lock(each) if each is not None else None
    if each is None or lock is None:
        return None
    if not lock.lock:
        what = f"waits for lock `{lock.holder_lock}`, which" if lock.holder_lock else "waits for what"
        text = (
            f"{each} waits for the end of thread {lock.holder!r} at {lock.site}; that is at"
            f" {lock.holder_site or 'an unknown line'}, and {what} the former holds"
        )
        return Diagnosis("deadlock on a Python lock", (each.rank,), text)
    text = f"{each} waits for lock `{lock.lock}` at {lock.site}"
    if lock.holder:
        text += f"; thread {lock.holder!r} holds it, at {lock.holder_site or 'an unknown line'}"
    if lock.closed:
        own = (
            "and waits for one that the former holds" if lock.holder_site != lock.site else "and waits for it"
        )
        return Diagnosis("deadlock on a Python lock", (each.rank,), f"{text}, {own}")
    if lock.holder_inside:
        text += f", in {lock.holder_inside}()"
        return Diagnosis("deadlock on a Python lock", (each.rank,), text, certain=False)
    return Diagnosis("waits for a Python lock", (each.rank,), text, certain=bool(lock.holder))


def _lock(facts: RankFacts) -> LockWait | None:
    return facts.program.lock if facts.program is not None else None


def _swallowed(case: Case) -> Diagnosis | None:
    others = {each.program.exception for each in case.waiters() if each.program is not None}
    for each in case.culprits:
        program = each.program
        if program is None:
            continue
        if program.exception and program.exception not in others:
            text = f"{each} goes on after {program.exception}; it is {each.site}"
            return Diagnosis("exception swallowed", (each.rank,), text)
        call = each.call
        failed = call.text if call is not None and call.state == "failed" else each.failed_message
        if failed:
            text = f"{each} goes on after its {failed} failed; it is {each.site}"
            return Diagnosis("exception swallowed", (each.rank,), text)
    return None


def _uneven_data(case: Case) -> Diagnosis | None:
    awaited = {waiter.running.text for waiter in case.waiters() if waiter.running is not None}
    for each in case.culprits:
        if each.call is None or awaited.isdisjoint(each.call.before):
            continue  # it has never called what the others wait in
        for waiter in case.waiters():
            loop = _left_loop(each, waiter)
            if loop is None:
                continue
            where = "has destroyed the group" if each.presence == "left" else each.whereabouts
            text = (
                f"{each} has left the loop at {loop.file}:{loop.loops[0][0]}, in which {waiter} still calls"
                f" {awaited.pop()}; it {where}"
            )
            return Diagnosis("uneven data", (each.rank,), text, certain=False)
    return None


def _left_loop(culprit: RankFacts, waiter: RankFacts) -> UserFrame | None:
    """Return the line of a waiting rank that is in a loop which a culprit has left."""
    inner: UserFrame | None = None
    for frame in waiter.frames:
        if frame.loops:
            inner = inner or frame
        same = next((each for each in culprit.frames if _function(each) == _function(frame)), None)
        if same is None:
            continue
        if inner is None or same.line == frame.line:
            return None  # both are within the same call
        if frame.loops:
            outermost = frame.loops[-1]
            return frame if same.line > outermost[1] else None
        return inner if same.line > frame.line else None
    ended = culprit.presence == "left" or (culprit.program is not None and not culprit.frames)
    return inner if ended else None


def _function(frame: UserFrame) -> tuple[str, str, int]:
    return frame.file, frame.function, frame.first_line


def _swapping(case: Case) -> Diagnosis | None:
    for each in case.culprits:
        system = each.system
        if system is None:
            continue
        if system.major_faults >= _MANY_FAULTS:
            of = f"{system.swapped_bytes >> 20} MiB of it are in swap"
            if not system.swapped_bytes:
                of = "none of it is in swap: these are of mapped files, or of programs for want of memory"
            pages = f"{system.major_faults:.0f} pages per second"
            text = f"{each} waits for its memory to be read from disk, {pages}; it is {each.site}; {of}"
            return Diagnosis("swap", (each.rank,), text, certain=bool(system.swapped_bytes))
        if system.throttled >= _MUCH_THROTTLED:
            text = (
                f"{each} may not use the processor for {system.throttled:.0%} of the time (the limit of its"
                f" control group); it is {each.site}"
            )
            return Diagnosis("throttled", (each.rank,), text)
    return None


def _slow_disk(case: Case) -> Diagnosis | None:
    for each in case.culprits:
        system = each.system
        if system is None:
            continue
        # What others do holds it up only if it does not run itself.
        others = max(system.loader_disk, system.thread_disk) if system.ready < _BUSY else 0.0
        share = max(system.disk, others)
        if share >= _MAX_DISK:
            other = "child process" if system.loader_disk >= _MAX_DISK else "thread"
            who = f"{each} waits" if system.disk >= _MAX_DISK else f"{each} has a {other} that waits"
            text = f"{who} for a disk, {share:.0%} of the time; it is {each.site}"
            return Diagnosis("slow disk", (each.rank,), text, certain=False)
    return None


def _holds_gil(case: Case) -> Diagnosis | None:
    each = case.stuck(
        lambda facts: (
            facts.presence == "present"
            and facts.program is None
            and facts.system is not None
            and facts.system.reporter_sleeps
        )
    )
    if each is None or each.system is None:
        return None
    whose = "another thread than its program's" if each.system.in_futex else "a call that does not release it"
    does = f"computes with {each.system.cpu:.1f} cores" if each.system.cpu >= _BUSY else "waits"
    if each.system.ready >= _BUSY > each.system.cpu:
        does = "computes"
    text = f"{each} does not answer, as {whose} holds the interpreter's lock, and {does}; it is {each.site}"
    if each.other_stacks:
        text += f"; other threads are at {', '.join(map(str, each.other_stacks))}"
    return Diagnosis("GIL held", (each.rank,), text, certain=bool(each.stack))


def _stalled(case: Case) -> Diagnosis | None:
    """No rank is missing: all are within the operation, or have gone through their part of it."""
    call = case.waiting.running if case.waiting is not None else None
    if call is None or len(case.facts) == 1 or any(each.began < call.number for each in case.facts.values()):
        return None
    parts: dict[str, list[int]] = {}
    for each in case.facts.values():
        parts.setdefault(_part(case, each, call.number), []).append(each.rank)
    told = "; ".join(f"{case.named(ranks)}: {part}" for part, ranks in parts.items())
    text = f"all ranks have called operation {call.number}, {call.text}, and it does not end: {told}"
    return Diagnosis("stalled operation", (), text, certain=False)


def _part(case: Case, facts: RankFacts, number: int) -> str:
    """Return how far a rank is in an operation that it has called."""
    call = facts.running
    if call is None or call.number > number:
        return f"through with it, {facts.site}"
    if call.waits_for is not None:
        return f"in it, waits for {case.named((call.waits_for,))}"
    return f"in it, waits for {'ranks of other hosts, or none' if facts.host else 'none'}"


def _missing(case: Case) -> Diagnosis | None:
    each = case.first(lambda facts: facts.presence in ("present", "left", "absent") and _is_known(facts))
    if each is None:
        return None
    if each.presence != "present":
        how = "has destroyed the group" if each.presence == "left" else "has not come to the group"
        waits = f"; {case.waiting} waits {case.waiting.site}" if case.waiting is not None else ""
        return Diagnosis(
            "missing rank", (each.rank,), f"{each} {how}, and not {case.awaited_of(each)}{waits}"
        )
    if each.program is not None and not each.program.frames:
        location = each.program.location
        return Diagnosis(
            "missing rank", (each.rank,), f"{each} has not {case.awaited_of(each)}: it {location}"
        )
    does = f", and {_does(each.system)} ({each.system.cpu:.0%} of a core)" if each.system is not None else ""
    others = len(case.culprits) - 1
    more = f" (and {others} more)" if others else ""
    text = f"{each}{more} has not {case.awaited_of(each)}: it is {each.site}{_waits_elsewhere(each) or does}"
    return Diagnosis("missing rank", _ranks(case.culprits), text)


def _does(system: Process) -> str:
    if system.cpu >= _BUSY:
        return "computes"
    return "computes, as far as it gets a core" if system.ready >= _BUSY else "sleeps"


def _waits_elsewhere(facts: RankFacts) -> str:
    """Return in which other group a rank waits for ranks that are not in this one."""
    program = facts.program
    group = program.groups[0] if program is not None and program.inside and program.groups else None
    if group is None:
        return ""
    return f", in {group.call} of group {group.group!r}, for ranks that are not in this group"


def _is_known(facts: RankFacts) -> bool:
    return facts.presence != "present" or facts.program is not None


def _unknown(case: Case) -> Diagnosis | None:
    if not case.culprits:
        waits = f"{case.waiting} waits {case.waiting.site}" if case.waiting is not None else "nobody waits"
        return Diagnosis("unknown", (), f"no rank is missing, and {waits}", certain=False)
    each = case.culprits[0]
    text = f"{each} has not {case.awaited_of(each)}, and does not say why; it was {each.site}"
    return Diagnosis("unknown", _ranks(case.culprits), text, certain=False)


Rule = Callable[[Case], "Diagnosis | None"]

RULES: tuple[tuple[Rule, tuple[str, ...]], ...] = (
    (_dead, ("killed process",)),
    (_silent_host, ("killed host",)),
    (_stopped, ("stopped process",)),
    (_crossed_groups, ("wrong order of groups",)),
    (_differing_tags, ("mismatch",)),
    (_swapped_messages, ("swapped send and recv",)),
    (_crossed_calls, ("mismatch",)),
    (_deadlock, ("deadlock on a Python lock", "waits for a Python lock")),
    (_swallowed, ("exception swallowed",)),
    (_uneven_data, ("uneven data",)),
    (_swapping, ("swap", "throttled")),
    (_slow_disk, ("slow disk",)),
    (_holds_gil, ("GIL held",)),
    (_stalled, ("stalled operation",)),
    (_missing, ("missing rank",)),
    (_unknown, ("unknown",)),
)
"""The rules, in the order in which they are tried, and what each may find."""

KINDS = tuple(kind for _, kinds in RULES for kind in kinds)
"""Everything that a diagnosis may say."""


def diagnose(facts: Sequence[RankFacts], waiting: int) -> Diagnosis:
    """Return why the ranks of a group wait.

    Args:
        facts: of all ranks that something is known of.
        waiting: the rank that has given up waiting.
    """
    case = Case(facts, waiting)
    return next(found for rule, _ in RULES if (found := rule(case)) is not None)


def _ranks(facts: Iterable[RankFacts]) -> tuple[int, ...]:
    return tuple(each.rank for each in facts)
