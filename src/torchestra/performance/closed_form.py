"""Estimates by LogGP in closed form: at once, for operations whose schedules are regular.

They add up the bytes that a rank copies and reduces, the messages that its host sends, and the latencies that
nothing hides (Alexandrov and others 1995). The simulation knows more: who waits for whom, and what
overlaps. They exist for all_reduce and barrier, on machines where nothing is slower than the rest and every
thread has a core, and for training steps that consist of them.
"""

from __future__ import annotations

from torchestra.engine.memory.arena import layout_for
from torchestra.engine.multihost.chunking import chunk_ends
from torchestra.engine.multihost.grid import grid_of
from torchestra.engine.tuned_thresholds import choices_for_group
from torchestra.performance.costs import Costs
from torchestra.performance.machine import Machine
from torchestra.performance.schedule import Begin
from torchestra.performance.workload import Operation, Pause, Step, Workload

_CHUNK_BYTES = 1 << 20
"""Of each rail: as multihost/reduction.py cuts tensors."""


def estimate(workload: Workload, machine: Machine) -> float | None:
    """Return the seconds that a workload takes, or None where there is no closed form."""
    threads = machine.ranks_per_host * (2 if machine.hosts > 1 else 1)
    if machine.stragglers or machine.slow_links or threads > machine.host.cores or machine.shares_cores:
        return None
    if isinstance(workload, Step):
        return _step(workload, machine)
    times = [_one(each, machine) for each in workload]
    return None if None in times else sum(time for time in times if time is not None)


def _one(each: Operation | Pause, machine: Machine) -> float | None:
    if isinstance(each, Pause):
        return max(each.seconds)
    if each.name not in ("all_reduce", "barrier"):
        return None
    nbytes = 0 if each.name == "barrier" else each.nbytes
    factor = Costs(machine).factor_of(Begin(each.name, each.nbytes))
    if machine.hosts == 1:
        return factor * _on_one_host(each.name, nbytes, machine)
    return factor * _over_hosts(nbytes, machine)


def _step(step: Step, machine: Machine) -> float:
    """Return the time of a step: a bucket is reduced when it is ready and the one before it is done."""
    reductions = [_one(Operation("all_reduce", nbytes), machine) or 0.0 for nbytes in step.bucket_bytes]
    overheads_s = step.bucket_cost_s * len(reductions)
    if not step.overlaps:
        return step.forward_s + step.backward_s + overheads_s + sum(reductions) + step.optimizer_s
    done = 0.0
    for ready_s, seconds in zip(step.ready_s, reductions, strict=True):
        done = max(done, ready_s) + seconds
    return step.forward_s + max(step.backward_s + overheads_s, done) + step.optimizer_s


def _call(name: str, machine: Machine) -> float:
    return machine.host.per_op_s.get(f"call.{name}", machine.host.call_s)


def _on_one_host(name: str, nbytes: int, machine: Machine) -> float:
    """Each rank copies its tensor into a buffer, and reduces out of all; or it does both with a part."""
    host, ranks = machine.host, machine.ranks_per_host
    once = _call(name, machine) + (host.flag_s if ranks > 1 else 0.0)
    if nbytes == 0:
        return once
    choices = choices_for_group(ranks, layout_for(ranks).slot_bytes)
    new, near = (host.copy_bytes_per_s(each, ranks) for each in (nbytes, 0))
    if nbytes <= choices.direct:
        return once + nbytes / new + ranks * nbytes / host.reduce_bytes_per_s(0, ranks)
    others = (ranks - 1) / ranks * nbytes
    reduced_s = nbytes / host.reduce_bytes_per_s(nbytes, ranks)
    moved_s = others / new + nbytes / ranks / near + others / host.fetch_bytes_per_s(0, ranks)
    return once + reduced_s + moved_s + (1 + nbytes // choices.chunk) * host.flag_s


def _over_hosts(nbytes: int, machine: Machine) -> float:
    """First a message of each host to each other, then the bytes at the speed of the slowest part."""
    assert machine.link is not None
    host, hosts, others = machine.host, machine.hosts, machine.hosts - 1
    grid = grid_of(hosts)
    trips = [others] if grid is None else [grid.columns - 1, grid.rows - 1]
    small, exchange_s = machine.link.of(32), host.per_op_s.get("bridge_begin", 0.0)
    steps = 2 * (host.per_op_s.get("local_step", 0.0) + host.flag_s)
    begin = host.call_s + host.per_op_s.get("multihost_call", 0.0) + steps
    gap_s = small.gap_s + 32 * small.gap_per_byte_s
    once = begin
    for peers in trips:
        # The transport thread sends to all, and then takes what has come.
        once += exchange_s
        arrives_s = small.send_overhead_s + gap_s + small.latency_s
        once += max(arrives_s, peers * small.send_overhead_s) + peers * max(small.receive_overhead_s, gap_s)
    if nbytes == 0:
        return once
    sent = nbytes if hosts == 2 else 2 * nbytes * others / hosts
    link = machine.link.of(1 << 20)
    ranks = machine.ranks_per_host
    overhead = link.send_overhead_per_byte_s + link.receive_overhead_per_byte_s
    chunks = len(chunk_ends(nbytes, _CHUNK_BYTES * ranks))
    piece = machine.link.of(nbytes // ranks // chunks // (trips[0] + 1))
    ways = 1 if hosts == 2 else 2
    sending_s = chunks * sum(trips) * ways * (piece.send_overhead_s + piece.receive_overhead_s)
    sending_s += chunks * len(trips) * ways * exchange_s + sent / ranks * overhead
    moved_s = nbytes / host.copy_bytes_per_s(nbytes, ranks)
    reduced_s = 2 * nbytes / host.reduce_bytes_per_s(nbytes, ranks)
    busiest_s = max(sent * link.gap_per_byte_s, sending_s, moved_s + reduced_s)
    return once + 2 * len(trips) * link.latency_s + busiest_s
