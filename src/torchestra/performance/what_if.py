"""Questions about a workload: what a fault costs, and which bucket size and thresholds to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchestra.engine.kernels.selection import Choices
from torchestra.engine.memory.arena import layout_for
from torchestra.engine.multihost.heartbeat_bound import heartbeat_bound
from torchestra.nn.parallel.buckets import FIRST_BUCKET_BYTES
from torchestra.performance.machine import Machine
from torchestra.performance.prediction import Prediction, predict
from torchestra.performance.workload import Step, Workload, shown_bytes

_STRAGGLER, _SLOW_LINK = 1.5, 0.5
_BUCKETS = tuple(1 << power for power in range(20, 29))


@dataclass(frozen=True)
class Answer:
    """One line of an answer.

    Attributes:
        case: what is different.
        seconds: that the workload takes then.
        waiting_share: the part of it that a rank waits, 0 to 1; None where it is not predicted.
        best: it is the fastest of several.
    """

    case: str
    seconds: float
    waiting_share: float | None
    best: bool = False


def fault_costs(workload: Workload, machine: Machine, normal: Prediction) -> list[Answer]:
    """Return what the workload takes with one slow rank, one slow link, and one dead host."""
    last_host, last_rank = machine.hosts - 1, machine.ranks - 1
    answers = [_answer("as it is", normal)]
    if machine.ranks > 1:
        slower = replace(machine, stragglers={**machine.stragglers, last_rank: _STRAGGLER})
        case = f"rank {last_rank} computes {_STRAGGLER:g} times as long"
        answers.append(_answer(case, predict(workload, slower)))
    if machine.hosts > 1:
        full, slow = (predict(workload, _with_link(machine, last_host, share)) for share in (1.0, _SLOW_LINK))
        seconds = normal.seconds + slow.seconds - full.seconds
        answers.append(Answer(f"the link of host {last_host} at half speed", seconds, slow.waiting_share))
        answers.append(
            Answer(
                f"host {last_host} dies: TORCHESTRA_HEARTBEAT until that is known, then all again",
                heartbeat_bound() + predict(workload, _without_a_host(machine)).seconds,
                None,
            )
        )
    return answers


def _with_link(machine: Machine, host: int, share: float) -> Machine:
    """Return the machine with a host whose link has a share of its speed.

    Such a host is recorded by itself, and messages that come at the same time then take another order, which
    changes the time by up to 0.1 %. So half the speed is compared with a share of 1.
    """
    share *= machine.slow_links.get(host, 1.0)
    return replace(machine, slow_links={**machine.slow_links, host: share})


def _without_a_host(machine: Machine) -> Machine:
    """Return what is left if the last host is gone."""
    hosts = machine.hosts - 1
    return replace(
        machine,
        hosts=hosts,
        stragglers={
            rank: each for rank, each in machine.stragglers.items() if rank < hosts * machine.ranks_per_host
        },
        slow_links={host: each for host, each in machine.slow_links.items() if host < hosts},
    )


def bucket_sweep(step: Step, machine: Machine) -> list[Answer]:
    """Return the step's time by the largest size of a bucket, ``bucket_cap_mb``; the first bucket is 1 MB."""
    total = sum(step.bucket_bytes)
    sizes = [each for each in _BUCKETS if each < 2 * total] or [_BUCKETS[0]]
    predictions = [predict(rebucketed(step, size), machine) for size in sizes]
    return _ranked(
        [_answer(f"bucket_cap_mb={size >> 20}", each) for size, each in zip(sizes, predictions, strict=True)]
    )


def rebucketed(step: Step, cap_bytes: int) -> Step:
    """Return the step with other buckets. Between two of the known times gradients get ready evenly."""
    total = sum(step.bucket_bytes)
    ends, end = [], min(FIRST_BUCKET_BYTES, cap_bytes)
    while end < total:
        ends.append(end)
        end += cap_bytes
    ends.append(total)
    starts = [0, *ends[:-1]]
    return replace(
        step,
        bucket_bytes=tuple(end - start for start, end in zip(starts, ends, strict=True)),
        ready_s=tuple(_ready_at(step, end) for end in ends),
    )


def _ready_at(step: Step, nbytes: int) -> float:
    """Return when the first ``nbytes`` of gradients are ready."""
    done, before = 0, 0.0
    for size, ready_s in zip(step.bucket_bytes, step.ready_s, strict=True):
        if done + size >= nbytes:
            return before + (ready_s - before) * (nbytes - done) / size
        done, before = done + size, ready_s
    return before


def threshold_sweep(workload: Workload, machine: Machine) -> list[Answer]:
    """Return the workload's time by the thresholds between the algorithms within a host (selection.py)."""
    buffer_bytes = (layout := layout_for(machine.ranks_per_host)).slot_bytes
    assert layout.chunk_buffer_bytes == buffer_bytes
    usual = Choices.for_group(machine.ranks_per_host, buffer_bytes)
    cases = {f"usual: direct up to {shown_bytes(usual.direct)}, chunks of {shown_bytes(usual.chunk)}": usual}
    for direct in (0, 64 << 10, buffer_bytes):
        for chunk in (64 << 10, 256 << 10, buffer_bytes):
            name = f"direct up to {shown_bytes(direct)}, chunks of {shown_bytes(chunk)}"
            cases[name] = replace(usual, direct=direct, chunk=min(chunk, buffer_bytes))
    return _ranked([_answer(name, predict(workload, machine, choices)) for name, choices in cases.items()])


def _answer(case: str, prediction: Prediction) -> Answer:
    return Answer(case, prediction.seconds, prediction.waiting_share)


def _ranked(answers: Sequence[Answer]) -> list[Answer]:
    fastest = min(answers, key=lambda answer: answer.seconds)
    return [replace(answer, best=answer is fastest) for answer in answers]
