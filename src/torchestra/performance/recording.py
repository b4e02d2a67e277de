"""Record schedules: run the product's algorithms on ranks that move no bytes, and write down what they do.

Within a host the kernels run from their sources (:mod:`torchestra.performance.recorded_kernels`) over a real
arena. Between hosts engine/multihost runs over a bridge that notes messages. So there is no second
description of an algorithm that could differ from the first.

Up to :data:`MAX_RECORDED_RANKS` ranks all hosts are recorded. Of more, one host is recorded and stands for
all others but those that the caller names, as that of a root: without a root all hosts do the same. From a
host that is not recorded comes what a recorded host itself sends there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from torchestra.engine import layout as at
from torchestra.engine.hosts import Hosts
from torchestra.engine.kernels.selection import Choices, SpinPolicy
from torchestra.engine.local import LocalEngine
from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.memory.arena import Arena, layout_for
from torchestra.engine.multihost.engine import HostsPlan, MultiHostEngine
from torchestra.engine.multihost.grid import grid_of
from torchestra.engine.multihost.hierarchy import Hierarchy
from torchestra.engine.multihost.reduction import Reducer
from torchestra.errors import InvalidArgumentError
from torchestra.performance.rank_log import RankLog, ThreadObserver, current_log, set_current_log
from torchestra.performance.recorded_kernels import recorded_kernels
from torchestra.performance.recording_bridge import Mailboxes, RecordingBridge
from torchestra.performance.schedule import Event, shifted
from torchestra.performance.torch_copies import TorchCopies
from torchestra.performance.turns import run_in_turns
from torchestra.performance.workload import Operation, tensors_of
from torchestra.types import ReduceOp

__all__ = ["MAX_RANKS", "MAX_RANKS_PER_HOST", "MAX_RECORDED_RANKS", "Recorder", "Recording"]

MAX_RECORDED_RANKS = 64
"""The largest job of which every rank is recorded."""

MAX_RANKS, MAX_RANKS_PER_HOST = 1 << 20, 256
_TIMEOUT_S = 3600.0
_NEED_ALL_HOSTS = frozenset({"gather", "scatter", "all_to_all", "all_to_all_single"})
"""Their ranks tell each other lengths that differ by pair, so nobody can stand for others in many hosts."""


@dataclass(frozen=True)
class Recording:
    """One operation, as the recorded ranks ran it.

    Attributes:
        events: by host and local rank. Flags and tags begin at 0.
        flags: by host, by how much the flags grow; tags: by host and local rank, how many were used.
    """

    events: dict[tuple[int, int], list[Event]]
    flags: dict[int, int]
    tags: dict[tuple[int, int], int]


class _RecordingReducer(Reducer):
    """A reducer that writes its arithmetic down instead of doing it."""

    def _combine(self, target: torch.Tensor, sources: Sequence[torch.Tensor]) -> None:
        current_log().reduce(target.data_ptr(), [each.data_ptr() for each in sources], target.numel())

    def _divide(self, tensor: torch.Tensor) -> None:
        if self._divides:
            current_log().reduce(tensor.data_ptr(), [tensor.data_ptr()], tensor.numel())


class _RecordingEngine(MultiHostEngine):
    """The engine over several hosts, with such reducers."""

    def reducer(self, plan: HostsPlan) -> Reducer:
        assert plan.op is not None
        return _RecordingReducer(self.hierarchy, plan.dtype, plan.op)

    def combine(self, target: torch.Tensor, sources: Sequence[torch.Tensor], op: ReduceOp) -> None:
        current_log().reduce(target.data_ptr(), [each.data_ptr() for each in sources], target.numel())


class Recorder:
    """The recorded ranks of a job, which run operations one after the other.

    Args:
        hosts, ranks_per_host: of the job.
        apart: hosts to be recorded by themselves: that of the root, and those that differ in speed.
        choices: the thresholds between algorithms; default: those that a group of so many ranks would use.
        single_copy: ranks of a host may read long pieces where they lie, as processes do that are able to and
            faster so (kernels/single_copy.py); otherwise all goes through buffers.

    Attributes:
        recorded: the hosts that are recorded.
        stands_for_others: see :class:`torchestra.performance.schedule.Schedule`.

    Raises:
        InvalidArgumentError: there are no ranks, or too many, or no such host.
    """

    def __init__(
        self,
        hosts: int,
        ranks_per_host: int,
        apart: Iterable[int] = (),
        choices: Choices | None = None,
        *,
        single_copy: bool = False,
    ) -> None:
        _check_size(hosts, ranks_per_host, apart)
        self.hosts, self.ranks_per_host = hosts, ranks_per_host
        normal = _normal_hosts(hosts, apart)
        all_recorded = hosts * ranks_per_host <= MAX_RECORDED_RANKS or len(normal) <= 1
        self.stands_for_others = None if all_recorded else normal[0]
        self.recorded = list(range(hosts)) if all_recorded else sorted({*apart, normal[0]})
        self._mailboxes = Mailboxes(frozenset(self.recorded))
        self._kernels = recorded_kernels(ThreadObserver())
        self._choices = choices
        self._reader = at.BY_SYSTEM_CALL if single_copy and ranks_per_host > 1 else at.REFUSED
        self._table = _table(hosts, ranks_per_host)
        self._bridges: dict[tuple[int, int], RecordingBridge] = {}
        self._contexts: dict[int, RankContext] = {}
        self._engines: dict[tuple[int, int], LocalEngine | _RecordingEngine] = {}
        for host in self.recorded:
            self._add_host(host)
        self._known: dict[Operation, Recording] = {}
        self.record(Operation("barrier", 0))  # the first operation of an arena waits for nobody

    def _add_host(self, host: int) -> None:
        arena, descriptor = Arena.create(layout_for(self.ranks_per_host), "recorded")
        os.close(descriptor)  # the arena has its own
        for local_rank in range(self.ranks_per_host):
            context = RankContext(arena, local_rank, "recorded", SpinPolicy(0, 0))
            local = LocalEngine(context)
            context.store_word(at.READER, self._reader)
            local.choices = self._choices or local.choices
            for name, kernel in self._kernels.items():
                setattr(local.kernels, name, kernel if self._table is None else _as_step(kernel))
            self._contexts[host] = context
            self._engines[host, local_rank] = local
            if self._table is not None:
                self._engines[host, local_rank] = self._over_hosts(local, host, local_rank)

    def _over_hosts(self, local: LocalEngine, host: int, local_rank: int) -> _RecordingEngine:
        assert self._table is not None
        # As in multihost/joining.py: the ranks of a host must find a mismatch at once.
        local.choices = replace(local.choices, eager=-1)
        bridge = RecordingBridge(host, self.hosts, local_rank, self._mailboxes)
        self._bridges[host, local_rank] = bridge
        rank = host * self.ranks_per_host + local_rank
        detector: Any = SimpleNamespace(
            begun=None, dead=frozenset(), left=frozenset(), bound=_TIMEOUT_S, interval=_TIMEOUT_S
        )
        hierarchy = Hierarchy(local, self._table, rank, bridge, detector, "recorded")
        messages: Any = SimpleNamespace(bridge_kind=bridge.kind)
        return _RecordingEngine(hierarchy, messages)

    def record(self, operation: Operation) -> Recording:
        """Run an operation on the recorded ranks, or return what an equal one did before.

        Ranks of one host may be some operations apart (kernels/waiting.py), so there each call is recorded.

        Raises:
            InvalidArgumentError: it cannot be recorded on so many hosts.
        """
        if operation in self._known and self._table is not None:
            return self._known[operation]
        self._refuse_too_large(operation)
        before = {host: context.load_word(at.SEQUENCE) for host, context in self._contexts.items()}
        tags_before = {end: bridge.tags for end, bridge in self._bridges.items()}
        logs: dict[tuple[int, int], RankLog] = {}
        tasks = [partial(self._run, operation, end, logs) for end in self._engines]
        run_in_turns(tasks)
        after = {host: context.load_word(at.SEQUENCE) for host, context in self._contexts.items()}
        tags = {end: self._bridges[end].tags - tags_before[end] for end in self._bridges}
        events = {
            end: shifted(log.events, -(before[end[0]] << at.STEP_BITS), -tags_before.get(end, 0))
            for end, log in logs.items()
        }
        flags = {host: (after[host] - before[host]) << at.STEP_BITS for host in after}
        recording = self._known[operation] = Recording(events, flags, tags)
        return recording

    def _refuse_too_large(self, operation: Operation) -> None:
        if self.stands_for_others is not None and operation.name in _NEED_ALL_HOSTS:
            raise InvalidArgumentError(
                f"{operation.name} is simulated on up to {MAX_RECORDED_RANKS} ranks on several hosts, got"
                f" {self.hosts} hosts x {self.ranks_per_host} ranks"
            )
        if operation.row.root and operation.root // self.ranks_per_host not in self.recorded:
            raise InvalidArgumentError(
                f"{operation.name}: the host of the root, {operation.root}, is not recorded by itself"
            )

    def _run(self, operation: Operation, end: tuple[int, int], logs: dict[tuple[int, int], RankLog]) -> None:
        """Run an operation on one rank, on a thread of its own."""
        host, local_rank = end
        rank, ranks = host * self.ranks_per_host + local_rank, self.hosts * self.ranks_per_host
        engine, row = self._engines[end], operation.row
        inputs, outputs = tensors_of(operation, rank, ranks)
        dtype: torch.dtype = getattr(torch, operation.dtype)
        used = {tensor.data_ptr(): tensor.nbytes for tensor in (*inputs, *outputs)}
        log = logs[end] = RankLog(dtype.itemsize, used, operation.nbytes)
        set_current_log(log)
        log.overhead(f"call.{row.name}")
        if self._table is not None:
            log.overhead("multihost_call")
        if row.input is None:
            engine.barrier(_TIMEOUT_S)
        else:
            op = ReduceOp(operation.op) if row.reduces else None
            plan: Any = engine.plan(row, dtype, op, operation.root if row.root else None)
            if self._table is None:
                engine.collective(plan, inputs, outputs, _TIMEOUT_S, "")
            else:
                with TorchCopies():
                    engine.collective(plan, inputs, outputs, _TIMEOUT_S, "")
        log.end()


def _as_step(kernel: Callable[..., int]) -> Callable[..., int]:
    """Return a kernel that is called for a step of an operation over several hosts."""

    def step(*arguments: int) -> int:
        current_log().overhead("local_step")
        return kernel(*arguments)

    return step


def _table(hosts: int, ranks_per_host: int) -> Hosts | None:
    if hosts == 1:
        return None
    members = [
        range(first, first + ranks_per_host) for first in range(0, hosts * ranks_per_host, ranks_per_host)
    ]
    return Hosts(members, [str(host) for host in range(hosts)])


def _normal_hosts(hosts: int, apart: Iterable[int]) -> list[int]:
    """Return the hosts that are like each other, beginning with the one that is to stand for the others.

    Of pieces that differ by an element the first hosts have the longer ones. A root on host 0 sends to the
    last host last. A host that is slow delays first those of its row in a grid, and by them all others, so
    one of its row has to stand for these.
    """
    special = sorted(set(apart))
    normal = [host for host in range(hosts) if host not in special]
    grid = grid_of(hosts)
    if special and special[-1] > 0 and grid is not None:
        row = frozenset(grid.row(special[-1]))
        normal.sort(key=lambda host: host not in row)
    elif special:
        normal.reverse()
    return normal


def _check_size(hosts: int, ranks_per_host: int, apart: Iterable[int]) -> None:
    if hosts < 1 or not 1 <= ranks_per_host <= MAX_RANKS_PER_HOST or hosts * ranks_per_host > MAX_RANKS:
        raise InvalidArgumentError(
            f"a job must have at least 1 host, 1 to {MAX_RANKS_PER_HOST} ranks on each, and at most"
            f" {MAX_RANKS} ranks, got {hosts} hosts x {ranks_per_host} ranks"
        )
    if wrong := [host for host in apart if not 0 <= host < hosts]:
        raise InvalidArgumentError(f"there is no host {wrong[0]}: hosts are 0 to {hosts - 1}")
