"""The steps, within the host and between hosts, of the operations of a group on several hosts.

Every operation begins by checking that all ranks of all hosts have called the same (:meth:`Hierarchy.agree`):
within the host by the fingerprints of the arena, between hosts by a *header* that the ranks with local rank 0
send each other. Headers of different operations fit each other, since there is room for the longest, and a
small tensor goes along in them, so that a small operation is one trip. Only then do lengths depend on what
was called, with one exception: so that the link need not wait for the answer, each end of a rail may send the
others something *eagerly*, of any length up to a bound. If the hosts have called different operations, the
ends that have sent nothing eagerly send a byte, and the receivers drop what has come.

Waits between hosts check for the same as those within a host (rank_context.py): an abort, a rank of this host
that died, another host or a rank there that is gone (failure_detector.py), the deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from torchestra.engine import operations
from torchestra.engine.failure.hang_report import late_elsewhere
from torchestra.engine.failure.mismatches import mismatch_text
from torchestra.engine.hosts import Hosts
from torchestra.engine.local import LocalEngine, LocalPlan
from torchestra.engine.multihost.bridge import Bridge, BridgeError, Pending
from torchestra.engine.multihost.failure_detector import FailureDetector
from torchestra.engine.multihost.grid import grid_of
from torchestra.engine.operations import ALL_GATHER, BARRIER, BROADCAST, Collective, Kind
from torchestra.engine.recorder import recorder
from torchestra.engine.recorder.callsites import call_site
from torchestra.errors import CollectiveMismatchError, CollectiveTimeoutError
from torchestra.system.deadline import Deadline, RunningClock

EAGER_CHUNKS = 2
"""How often an end sends each other end something before it is known that all ranks have called the same."""

_EAGER_BYTES = 1 << 19
"""How much there is room for each time, for all other ends together."""

_INLINE_BYTES, _MIN_INLINE_BYTES = 1 << 16, 1 << 12
"""What goes along with headers: at most so much to a host from all others, or else the less from each."""

_HEADER_WORDS = 4
_HEADER_BYTES = 8 * _HEADER_WORDS
_TEXT_BYTES = 768
EXPLANATION_BOUNDS = 1.5
"""For how many heartbeat bounds the way to another host has failed before it is told without the reason."""

_POLL_SECONDS = 0.05
_EXPLANATION_SECONDS = 0.01

_SUSPICION_SECONDS, _LONGEST_INTERVAL_S = 1.0, 0.1
"""For how long what a rank elsewhere has sent before it went may be on its way; how much a look counts."""


class _Suspects:
    """Ranks that seem to be gone, while one wait lasts. They may have done their part before they went.

    Attributes:
        here: a rank of this host; for what it has done, it takes a second look.
    """

    def __init__(self) -> None:
        self.here: int | None = None
        self._clock = RunningClock(_LONGEST_INTERVAL_S)
        self._since: dict[int, float] = {}  # by rank on another host: since when, by that clock

    def expired(self, gone: Iterable[int]) -> frozenset[int]:
        """Return which of some ranks have been gone for so long that nothing more will come from them."""
        now = self._clock.elapsed()
        self._since = {rank: self._since.get(rank, now) for rank in gone}
        return frozenset(rank for rank, since in self._since.items() if now - since >= _SUSPICION_SECONDS)


@dataclass
class Call:
    """One call of an operation, on one rank.

    Attributes:
        meta, count: its fingerprint (operations.py).
        site: the line of the program that called, where it is not on this thread's stack.
        lengths: those of which the fingerprint only has the hash, for messages.
    """

    meta: int
    count: int
    timeout_s: float
    site: str | None
    lengths: str = ""
    deadline: Deadline = field(init=False)

    def __post_init__(self) -> None:
        self.deadline = Deadline(self.timeout_s)

    def __str__(self) -> str:
        return operations.describe(self.meta, self.count)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as a tensor. (Not every dtype can be viewed as another.)"""
    start = tensor.storage_offset() * tensor.element_size()
    memory = torch.empty(0, dtype=torch.uint8)
    memory.set_(tensor.untyped_storage(), start, (tensor.nbytes,))  # type: ignore[call-overload]
    return memory


def split_evenly(count: int, parts: int) -> list[int]:
    """Return the lengths of ``parts`` parts of something, that differ by one at most."""
    least, more = divmod(count, parts)
    return [least + (part < more) for part in range(parts)]


class _HeaderExchange(NamedTuple):
    """The first exchange of an operation between hosts: what comes, by host, and its pending transfer."""

    received: torch.Tensor
    pending: Pending


class Hierarchy:
    """One rank's part in the operations of the group. One operation runs at a time.

    Args:
        local: the engine of the ranks of this host.
        bridge: the rank's end of a rail; None for a rank beyond the last rail.
        detector: tells which other hosts and ranks live.

    Attributes:
        sent_off: the number of operations of which this host has begun to send what it can before it hears
            from others.
        grid: how many hosts exchange with few others each; None of fewer hosts.
        inline_bytes: how much goes along with a header; nothing in a grid, where no host gets all headers.
        eager_bytes: how much an end sends another eagerly, at most.
    """

    def __init__(
        self,
        local: LocalEngine,
        hosts: Hosts,
        rank: int,
        bridge: Bridge | None,
        detector: FailureDetector,
        name: str,
    ) -> None:
        self.local = local
        self.context = local.context
        self.hosts = hosts
        self.rank = rank
        self.host = hosts.host_at(rank)
        self.here = hosts.on(self.host)
        self.local_rank = self.here.index(rank)
        self.bridge = bridge
        self.detector = detector
        self.name = name
        self.sequence = 0
        self.sent_off = 0
        self.grid = grid_of(len(hosts))
        fits = max(_MIN_INLINE_BYTES, _INLINE_BYTES // (len(hosts) - 1))
        self.inline_bytes = fits if self.grid is None else 0
        # A leader is connected to other leaders. Mostly it waits for the same hosts as the other ranks here.
        self._patience_s = detector.interval if self.local_rank == 0 else detector.bound
        self.eager_bytes = _EAGER_BYTES // (len(hosts) - 1)
        detector.begun = lambda: self.sequence
        self._plans: dict[tuple[str, int, int, int, int], LocalPlan] = {}

    # -- within the host

    def plan(
        self, row: Collective, call: Call, unit: int = 1, function: int = 0, root: int = -1
    ) -> LocalPlan:
        """Return a plan for a step of an operation: another collective, with the operation's fingerprint."""
        key = (row.name, call.meta, unit, function, root)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = LocalPlan(self.context.address, call.meta, unit, function, root, row)
        return plan

    def share_from(self, local_rank: int, tensor: torch.Tensor, call: Call) -> None:
        """Replace every rank's tensor, on this host, by that of the rank with this local rank."""
        plan, memory = self.plan(BROADCAST, call, root=local_rank), [bytes_of(tensor)]
        self.local.collective(plan, memory, memory, call.timeout_s, call.site)

    def share(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, call: Call) -> None:
        """Put the tensor of every rank of this host into an output of its own; sizes may differ."""
        targets = [bytes_of(output) for output in outputs]
        plan = self.plan(ALL_GATHER, call)
        self.local.collective(plan, [bytes_of(tensor)], targets, call.timeout_s, call.site)

    # -- between hosts

    def wait(self, pending: Pending, call: Call) -> None:
        """Wait for the end of an operation of the bridge.

        The rank's record says meanwhile that it waits for other hosts: ranks of this host whose time is over
        then do not take this one for late.

        Raises:
            GroupAbortedError, RankFailedError, CollectiveTimeoutError: as from :meth:`RankContext.check`.
        """
        suspects = _Suspects()
        since = recorder.begin_wait(self.context.address, -1)
        try:
            while not pending.wait(_POLL_SECONDS):
                self._check_local(call, suspects)
                if call.deadline.elapsed() > self._patience_s:
                    self.detector.watch(pending.awaited())
                if gone := suspects.expired(self._gone_remote_ranks()):
                    self._give_up_on(gone, call)
            return
        except BridgeError as error:
            failure = error
            failure.__traceback__ = None  # this frame, which refers to the error, and to tensors
        finally:
            recorder.end_wait_elsewhere(self.context.address, since)
        # Not in the handler: the error that a rank died does not chain the bridge's.
        self._explain(failure, call)

    def _check_local(self, call: Call, suspects: _Suspects) -> None:
        """Raise if waiting any longer is in vain, whichever ranks on other hosts are gone."""
        suspects.here = self.context.check(str(call), self.local_rank, None, suspects.here)
        if call.deadline.expired():
            self._time_out(call, call.deadline.elapsed())

    def _gone_remote_ranks(self) -> frozenset[int]:
        return frozenset(self.detector.dead | self.detector.left)

    def _give_up_on(self, gone: frozenset[int], call: Call) -> None:
        detector = self.detector
        seen = f"{self.hosts.describe(self.rank)} saw it in {call}"
        explain = self._report_all if self.context.explains_loss else None
        if died := tuple(sorted(gone & detector.dead)):
            who = ", ".join(f"{self.hosts.describe(rank)} died" for rank in died)
            self.context.abort(f"{who}; {seen}", died, explain)
        else:
            who = ", ".join(map(self.hosts.describe, sorted(gone)))
            self.context.abort(
                f"{who} destroyed the group; {seen}: do all ranks call the same operations?", explain=explain
            )
        raise self.context.aborted()

    def _report_all(self) -> str:
        return self.context.report(range(self.context.size), None, self.detector.ask_where_they_are())

    def _time_out(self, call: Call, waited: float) -> None:
        """End an operation for which other hosts have not come."""
        elsewhere = self.detector.ask_where_they_are()
        names, missing = late_elsewhere(elsewhere)
        report = self.context.report(range(self.context.size), call.site, elsewhere)
        late = ", ".join(names) or "other hosts"
        message = (
            f"{call} of group {self.name!r} timed out after {waited:.1f} s on"
            f" {self.hosts.describe(self.rank)}: {late} had not arrived (the timeout is"
            f" {call.timeout_s:g} s)."
        )
        self.context.abort(message, explain=lambda: report)
        others = (rank for rank in range(self.hosts.size) if rank not in self.here)
        raise CollectiveTimeoutError(message + report, missing or tuple(others))

    def _explain(self, error: BridgeError, call: Call) -> None:
        """Find out why the bridge has failed, and raise that; other ranks tell within the heartbeat bound."""
        bound_s = EXPLANATION_BOUNDS * self.detector.bound
        suspects = _Suspects()
        for _ in Deadline(bound_s).polls(_EXPLANATION_SECONDS):
            self._check_local(call, suspects)
            if gone := self._gone_remote_ranks():
                self._give_up_on(gone, call)
        self.context.abort(
            f"the connection of {self.hosts.describe(self.rank)} to other hosts failed in {call}: {error}"
        )
        raise self.context.aborted() from error

    # -- all ranks of all hosts

    def agree(self, call: Call, meanwhile: Callable[[], Sequence[Pending]] | None = None) -> None:
        """Make sure that all ranks have called the same operation.

        Args:
            meanwhile: called while the hosts tell each other, if the ranks of this one agree. It must not
                change the tensors of the call. It may begin :data:`EAGER_CHUNKS` exchanges on the rail, and
                returns them; in each every end sends every other something, at most ``eager_bytes``, and has
                room for as much.

        Raises:
            CollectiveMismatchError: they have not; on all ranks. The group stays usable.
        """
        differs = not self.agree_here(call)
        headers = self.send_header(call, differs)
        eager = meanwhile() if meanwhile is not None and not differs else ()
        _, differs = self.compare_headers(headers, call)
        self.share_verdict(call, differs, eager)

    def share_verdict(self, call: Call, differs: bool, eager: Sequence[Pending] = ()) -> None:
        """Tell all ranks of this host, from local rank 0, whether all ranks of all hosts called the same.

        Raises:
            CollectiveMismatchError: they did not.
        """
        verdict = torch.tensor([int(differs)])
        self.share_from(0, verdict, _neutral_call(call))
        if verdict.item():
            self._drop_eager(eager, call)
            self.raise_mismatch(call)

    def share_verdict_and_result(self, call: Call, differs: bool, result: torch.Tensor) -> torch.Tensor:
        """Do :meth:`share_verdict`, and return the bytes of local rank 0; the others pass as many.

        Only where the ranks of this host have called the same.
        """
        message = torch.empty(1 + result.numel(), dtype=torch.uint8)
        if self.local_rank == 0:
            message[0], message[1:] = int(differs), result
        self.share_from(0, message, _neutral_call(call))
        if message[0]:
            self._drop_eager((), call)
            self.raise_mismatch(call)
        return message[1:]

    def refuse(self, call: Call) -> None:
        """Tell all ranks that those of this host have called different operations.

        Raises:
            CollectiveMismatchError: always.
        """
        self.compare_headers(self.send_header(call, differs=True), call)
        self.share_verdict(call, differs=True)

    def _drop_eager(self, eager: Sequence[Pending], call: Call) -> None:
        """After a mismatch, receive what other ends have sent eagerly, and send them what they wait for."""
        if self.bridge is None:
            return
        sent = [int(end != self.host) for end in range(len(self.hosts))]
        buffer_lengths = [self.eager_bytes * each for each in sent]
        for _ in range(EAGER_CHUNKS - len(eager)):
            dropped, sent_bytes = (
                torch.empty(sum(lengths), dtype=torch.uint8) for lengths in (buffer_lengths, sent)
            )
            eager = [*eager, self.bridge.exchange(dropped, buffer_lengths, sent_bytes, sent, call.timeout_s)]
        for pending in eager:
            self.wait(pending, call)

    def agree_here(self, call: Call) -> bool:
        """Return whether all ranks of this host have called the same."""
        try:
            self.local.agree(self.plan(BARRIER, call), call.count, call.timeout_s, call.site)
        except CollectiveMismatchError:
            return False
        return True

    def reduce_here(self, tensor: torch.Tensor, plan: LocalPlan, call: Call) -> bool:
        """Reduce the tensors of this host into local rank 0's; False if its ranks called different ones."""
        try:
            self.local.collective(plan, [tensor], [tensor], call.timeout_s, call.site)
        except CollectiveMismatchError:
            return False
        return True

    def send_header(
        self, call: Call, differs: bool, inline: torch.Tensor | None = None
    ) -> _HeaderExchange | None:
        """On local rank 0, begin to tell the other hosts what was called here; on others, return None.

        Args:
            differs: whether the ranks of this host have called different operations.
            inline: bytes that go along, at most ``inline_bytes``.
        """
        if self.local_rank != 0:
            return None
        assert self.bridge is not None
        message = self._header(call, differs)
        if self.grid is not None:
            return self._send_header_among(self.grid.row(self.host), message, call)
        if inline is not None:
            message = torch.cat([message, inline])
        received = torch.empty((len(self.hosts), _HEADER_BYTES + self.inline_bytes), dtype=torch.uint8)
        return _HeaderExchange(received, self.bridge.tell(received.view(-1), message, call.timeout_s))

    def _header(self, call: Call, differs: bool) -> torch.Tensor:
        head = np.array([self.sequence, call.meta, call.count, int(differs)], dtype=np.int64)
        return torch.from_numpy(head.view(np.uint8))

    def _send_header_among(self, hosts: Sequence[int], message: torch.Tensor, call: Call) -> _HeaderExchange:
        """Begin to tell some hosts, which tell each other, what was called here."""
        assert self.bridge is not None
        received = torch.empty((len(hosts), message.numel()), dtype=torch.uint8)
        messages = [message] * len(hosts)
        return _HeaderExchange(
            received, self.bridge.exchange_among(hosts, list(received), messages, call.timeout_s)
        )

    def compare_headers(self, headers: _HeaderExchange | None, call: Call) -> tuple[torch.Tensor, bool]:
        """At local rank 0, return what came with the hosts' headers, and whether any of them differs.

        In a grid the headers of a row are compared first. Then the hosts of each column tell each other
        what their rows have called, and whether that differed: all of them know of all rows.
        """
        self.sent_off += 1
        if headers is None:
            return _NOTHING, False
        received, differs = self._await_headers(headers, call)
        if self.grid is not None:
            column = self._send_header_among(self.grid.column(self.host), self._header(call, differs), call)
            received, differs = self._await_headers(column, call)
        return received, differs

    def _await_headers(self, headers: _HeaderExchange, call: Call) -> tuple[torch.Tensor, bool]:
        """Wait for headers; return what came with them, and whether any of them differs."""
        self.wait(headers.pending, call)
        heads = headers.received[:, :_HEADER_BYTES].contiguous().view(torch.int64)
        same = bool((heads == heads[0]).all()) and not bool(heads[:, 3].any())
        return headers.received[:, _HEADER_BYTES:], not same

    def raise_mismatch(self, call: Call) -> None:
        """Tell all ranks what each has called, and raise CollectiveMismatchError."""
        neutral = _neutral_call(call)
        text = f"{call}{call.lengths} at {call.site or call_site()}".encode()[:_TEXT_BYTES]
        mine = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        own = torch.empty((len(self.here), _TEXT_BYTES), dtype=torch.uint8)
        self.share(list(own), mine, neutral)
        blocks = self.spread(
            own.view(-1), [len(ranks) * _TEXT_BYTES for ranks in self.hosts.members], neutral
        )
        calls: dict[int, str] = {}
        for ranks, block in zip(self.hosts.members, blocks, strict=True):
            for rank, row in zip(ranks, block.view(-1, _TEXT_BYTES), strict=True):
                calls[rank] = row.numpy().tobytes().rstrip(b"\0").decode(errors="replace")
        by_rank = {rank: calls[rank] for rank in sorted(calls)}
        told = mismatch_text(
            self.name, self.sequence, by_rank, self.context.global_ranks, self.hosts.describe
        )
        raise CollectiveMismatchError(f"{told}\nNothing was sent; the group stays usable.")

    def spread(self, own: torch.Tensor, lengths: Sequence[int], call: Call) -> list[torch.Tensor]:
        """Return the blocks of all hosts, on all their ranks. Each rail moves a part of each block.

        Args:
            own: the block of this host, the same on all its ranks.
            lengths: by host, the bytes of its block, the same on all ranks.
        """
        rails = self.hosts.rails
        cuts = [split_evenly(length, rails) for length in lengths]
        longest = [max(cut[rail] for cut in cuts) for rail in range(rails)]
        hosts = len(self.hosts)
        carried = [torch.empty(hosts * length, dtype=torch.uint8) for length in longest]
        carried += [_NOTHING] * (len(self.here) - rails)
        received = _NOTHING
        if self.bridge is not None:
            part = own.split(cuts[self.host])[self.local_rank]
            padded = torch.zeros(longest[self.local_rank], dtype=torch.uint8)
            padded[: part.numel()] = part
            received = torch.empty(hosts * padded.numel(), dtype=torch.uint8)
            if padded.numel():
                self.wait(self.bridge.all_gather(received, padded, call.timeout_s), call)
        self.share(carried, received, call)
        rows = torch.cat([part.view(hosts, -1) for part in carried[:rails] if part.numel()], dim=1)
        blocks = [
            row
            if cut == longest
            else torch.cat([part[:count] for part, count in zip(row.split(longest), cut, strict=True)])
            for row, cut in zip(rows, cuts, strict=True)
        ]
        blocks[self.host] = own
        return blocks


def _neutral_call(call: Call) -> Call:
    """Return a call with a fingerprint that is the same on all ranks, whatever they have called."""
    return Call(operations.pack(Kind.barrier), 0, call.timeout_s, call.site)


_NOTHING = torch.empty(0, dtype=torch.uint8)
