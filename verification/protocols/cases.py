"""The cases of protocols in Python, and ways to break these, each of which a case must find."""

from __future__ import annotations

from verification.protocols.agreement import ArenaAgreement
from verification.protocols.hosts import HostAgreement
from verification.protocols.passing import Passing
from verification.protocols.product import Mutation
from verification.protocols.progress import Progress
from verification.protocols.registers import RegisterReads
from verification.protocols.world import Rules

PROTOCOLS: list[ArenaAgreement | HostAgreement | Passing | Progress | RegisterReads] = [
    RegisterReads("registers", epochs=3, reads=2),
    ArenaAgreement("shrink", 2),
    ArenaAgreement("shrink, a rank crashes", 2, Rules(crashes=1)),
    ArenaAgreement("shrink, one is excluded", 2, exclude=((1,), ())),
    ArenaAgreement("shrink, each excludes the other", 2, exclude=((1,), (0,))),
    ArenaAgreement("shrink, an interrupt", 2, Rules(interrupts=1, preemptions=1, stale=1), attempts=2),
    ArenaAgreement("shrink, two interrupts of one rank", 2,
                   Rules(interrupts=2, interruptible=(0,), preemptions=1, stale=1), attempts=3),
    ArenaAgreement("shrink, too late", 2, Rules(time_outs=1, preemptions=1, stale=1), attempts=2,
                   has_limit=True),
    ArenaAgreement("shrink, a wrong belief", 2, Rules(suspicions=1, preemptions=2, stale=2)),
    ArenaAgreement("shrink of three, one is dead", 3, Rules(preemptions=1, stale=1), dead=(1,)),
    ArenaAgreement("shrink of three, a rank crashes", 3, Rules(crashes=1, preemptions=0, stale=1)),
    HostAgreement("shrink of hosts", 2),
    HostAgreement("shrink of hosts, a rank crashes", 2, Rules(crashes=1)),
    HostAgreement("shrink of hosts, a wrong belief", 2, Rules(suspicions=1)),
    HostAgreement("shrink of hosts, one is excluded", 2, exclude=((1,), ())),
    HostAgreement("shrink of hosts, an interrupt", 2, Rules(interrupts=1, preemptions=2), attempts=2),
    HostAgreement("shrink of hosts, too late", 2, Rules(time_outs=1, preemptions=2), attempts=2,
                  has_limit=True),
    HostAgreement("shrink of hosts, values read one by one", 2, Rules(suspicions=1, preemptions=2),
                  reads_apart=True),
    HostAgreement("shrink of three hosts, a rank crashes", 3, Rules(crashes=1, preemptions=1)),
    HostAgreement("grow", 1, joiners=1),
    Passing("descriptors", (1, 2), rules=Rules(preemptions=3)),
    Passing("descriptors, a process crashes", (1,), rules=Rules(crashes=1)),
    Passing("descriptors, a rank crashes", (1, 2), rules=Rules(crashes=1, mortal=(1, 2), preemptions=2)),
    Passing("descriptors, two claim one rank", (1, 1)),
    Passing("descriptors, a stranger and little room", (1,), strangers=1, room=0),
    Progress("queue", ("swc",)),
    Progress("queue, nobody waits", ("ssc",)),
    Progress("queue, a thread that does not help", ("stc",)),
    Progress("queue, two operations", ("sswwc",), Rules(preemptions=3)),
    Progress("queue, an interrupt", ("swc",), Rules(interrupts=1, interruptible=(0,), preemptions=1)),
    Progress("queue, an interrupt of two operations", ("sswwc",),
             Rules(interrupts=1, interruptible=(0,), preemptions=0)),
    Progress("queue of two threads", ("swc", "sw"), Rules(preemptions=2)),
    HostAgreement("grow, a rank crashes", 1, Rules(crashes=1), joiners=1),
    HostAgreement("grow, an interrupt", 1, Rules(interrupts=1, interruptible=(0,), preemptions=2), joiners=1,
                  attempts=2),
    HostAgreement("grow by two", 1, Rules(preemptions=1), joiners=2),
    HostAgreement("grow of two", 2, Rules(preemptions=1), joiners=1),
    HostAgreement("grow of two, a rank crashes", 2, Rules(crashes=1, preemptions=1), joiners=1),
]  # fmt: skip

_AGREEMENT, _ARENA, _STORE = "membership.agreement", "membership.arena_registers", "multihost.store_registers"
_PASSING = "memory.fd_passing"
_PROGRESS, _WORK = "progress", "torchestra.communicator.work"
_SHRINKING, _GROWING, _ADMISSION = "membership.shrinking", "membership.growing", "membership.admission"

PROTOCOL_MUTATIONS: list[Mutation] = [
    # The agreement.
    Mutation(_AGREEMENT, "missing = set(range(registers.size)) - out - candidates",
             "missing: set[int] = set()", "shrink"),
    Mutation(_AGREEMENT, "elif lost := out.intersection(ballot.survivors):", "elif lost := set[int]():",
             "shrink, a rank crashes"),
    Mutation(_AGREEMENT, "            candidates -= out\n", "", "shrink, a rank crashes"),
    Mutation(_AGREEMENT, "            if not late:\n", "            if True:\n", "shrink"),
    Mutation(_AGREEMENT, "if entered and not self._ready:", "if not self._ready:", "shrink"),
    Mutation(_AGREEMENT, "            self._epoch_entry.leave()\n            self._epoch, self._ready",
             "            self._epoch, self._ready", "shrink, an interrupt"),
    Mutation(_AGREEMENT, "self._epoch, self._ready, self._proposed = ballot.epoch, False, None",
             "self._epoch, self._proposed = ballot.epoch, None", "shrink, an interrupt"),
    Mutation(_AGREEMENT, "            self._refuse_if_excluded(ballot)\n            return ballot",
             "            return ballot", "shrink, a wrong belief"),
    Mutation(_AGREEMENT, "            self._refuse_if_left(ballot)\n", "            pass\n",
             "shrink, an interrupt"),
    Mutation(_AGREEMENT, "if proposed and not self._registers.void(ballot):", "if False:",
             "shrink, too late"),
    # Registers in the arena.
    Mutation(_ARENA, "return previous == ballot.word", "return True", "shrink, a wrong belief"),
    Mutation(_ARENA, "return self._exchange(ballot, State.OPEN, ballot.epoch + 1, 0)",
             "return self._exchange(ballot, State.OPEN, ballot.epoch, 0)", "shrink, an interrupt"),
    Mutation(_ARENA, "if ready[rank] != ballot.epoch}", "if not ready[rank]}", "shrink, an interrupt"),
    Mutation(_ARENA, "if shared_words.compare_exchange(self._decision, word, word) == word:",
             "if shared_words.load_acquire(self._decision) == word:", "registers"),
    Mutation(_ARENA, "if (read := self._read) is not None and read.word == word:",
             "if (read := self._read) is not None:", "registers"),
    # Entering the new arena.
    # Registers in the store.
    Mutation(_STORE, "return set(ballot.survivors) - self._entered", "return set()", "shrink of hosts"),
    # Descriptors.
    Mutation(_PASSING, "            self._taken.add(peer.rank)\n", "", "descriptors, two claim one rank"),
    Mutation(_PASSING, 'if not _is_proof(answer, self._key, "rank", peer.rank, peer.nonces):', "if False:",
             "descriptors, a stranger and little room"),
    Mutation(_PASSING, "            self.close()  # the server had too many",
             "            raise  # the server had too many", "descriptors, a stranger and little room"),
    Mutation("memory.bounded_listener", "        if self._listener in came:\n            self._accept()\n",
             "        if self._listener in came[1:]:\n            self._accept()\n", "descriptors"),
    # The queue of operations.
    Mutation(_PROGRESS, "                    doorbell.ring(self._address)\n                else:",
             "                    pass\n                else:", "queue, nobody waits"),
    Mutation(_PROGRESS, "            with self._turn:\n                self._run_tasks()",
             "            self._run_tasks()", "queue"),
    Mutation(_PROGRESS, "if self._turn.acquire(blocking=False):", "if True:", "queue"),
    Mutation(_PROGRESS, "self._words[doorbell.BEGUN // 8] = self._words[doorbell.SUBMITTED // 8]", "pass",
             "queue"),
    Mutation(_PROGRESS, "            doorbell.close(self._address)\n", "            pass\n", "queue"),
    Mutation(_PROGRESS, "if self._tasks and self._tasks[0][0] == number:\n                self.pending",
             "if True:\n                self.pending", "queue, an interrupt"),
    Mutation(_PROGRESS, "                self._turn.release()\n", "                pass\n", "queue"),
    Mutation(_WORK, "            self._ended = True\n            for sleeper in self._sleepers:",
             "            for sleeper in self._sleepers:", "queue"),
    Mutation(_WORK, "                    sleeper.release()\n", "                    pass\n",
             "queue, a thread that does not help"),
    Mutation(_STORE, "verdict, proposal, came, gone, excluded, entered = self._store.multi_get(self._keys())",
             "entered, excluded, gone, came, proposal, verdict = self._store.multi_get(self._keys()[::-1])",
             "shrink of hosts, values read one by one"),
    # Joiners.
    Mutation(_GROWING, "            admission.invite(offer, ballot.epoch)\n", "            pass\n", "grow"),
    Mutation(_GROWING, "        if self._growth.detector.lost(self._joiners):\n            return None\n", "",
             "grow, a rank crashes"),
    Mutation(_GROWING, "                admission.write_verdict(ballot.key, COMMITTED)\n",
             "                pass\n", "grow"),
    Mutation("membership.joiner", "if verdict == COMMITTED and entry.has_entered():",
             "if entry.has_entered():", "grow, an interrupt"),
    Mutation(_ADMISSION, "newest = found if newest is None else max(newest, found)",
             "newest = newest or found", "grow, an interrupt"),
]  # fmt: skip

PROTOCOL_REDUNDANT: list[Mutation] = [
    # Any rank may propose, as one proposal of an epoch is taken; that the lowest does spares the others an
    # arena that they would make for nothing.
    Mutation(_AGREEMENT, "if not missing and survivors[0] == self._rank:", "if not missing:",
             "shrink, a rank crashes"),
    # Whoever reads a proposal compares the word afterwards, so it would see that another was written over it.
    # With two places a rank that reads need not begin anew because of the next epoch.
    Mutation(_ARENA, "(epoch & 1) * self._proposal_bytes", "0",
             "shrink, two interrupts of one rank"),
    # Whoever ends a work says so before it looks for sleepers, and a sleeper looks once more when it is on
    # the list. The lock is for the list.
    Mutation(_WORK, "        with self._lock:\n            self._sleepers.append(sleeper)\n",
             "        self._sleepers.append(sleeper)\n", "queue, a thread that does not help"),
]  # fmt: skip
"""Changes that break nothing, and why the product does not have them. They must pass."""
