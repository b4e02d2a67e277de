"""Predictions: how long operations and training steps take on a machine, and how much of it is waiting."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from torchestra.engine.kernels.selection import Choices
from torchestra.errors import InvalidArgumentError
from torchestra.performance.calibration import HostCalibration, StepCalibration, StepTimes
from torchestra.performance.machine import Machine
from torchestra.performance.recording import Recorder
from torchestra.performance.schedule import (
    AwaitSignal,
    Begin,
    Compute,
    Event,
    EventStream,
    Schedule,
    Signal,
    shifted,
)
from torchestra.performance.simulation import Run, run
from torchestra.performance.workload import Operation, Pause, Step, Workload


@dataclass(frozen=True)
class Prediction:
    """What a workload takes.

    Attributes:
        seconds: until the last rank has finished.
        waiting_s: of the program of a rank, on average: for other ranks, for messages, and for its own
            communication that backward did not hide.
        messages, nbytes: what one host sends to others, on average of those that were recorded.
        run: the times of the recorded ranks.
    """

    seconds: float
    waiting_s: float
    messages: float
    nbytes: float
    run: Run

    @property
    def waiting_share(self) -> float:
        """Return the part of the time that a rank waits, 0 to 1."""
        return self.waiting_s / self.seconds if self.seconds else 0.0


def predict(workload: Workload, machine: Machine, choices: Choices | None = None) -> Prediction:
    """Predict what a workload takes on a machine.

    Args:
        choices: the thresholds between algorithms within a host; default: those that a group would use.

    Raises:
        InvalidArgumentError: it cannot be recorded on so many hosts.
    """
    schedule = schedule_of(workload, machine, choices)
    outcome = run(schedule, machine)
    hosts = len(schedule.recorded_hosts)
    programs = [stream for stream in outcome.streams if stream.name == "program"]
    waiting_s = sum(sum(stream.waited_s.values()) for stream in programs) / len(programs)
    return Prediction(outcome.seconds, waiting_s, outcome.messages / hosts, outcome.nbytes / hosts, outcome)


def steady_state_seconds(operation: Operation, machine: Machine, calls: int = 12) -> float:
    """Return the seconds of one of many calls that follow each other."""
    return steady_state(operation, machine, calls)(machine)


def steady_state(operation: Operation, machine: Machine, calls: int = 12) -> Callable[[Machine], float]:
    """Return :func:`steady_state_seconds` as a function of machines with as many hosts and ranks."""
    schedule = schedule_of([operation] * calls, machine)
    first = replace(schedule, streams=[_first_call(stream) for stream in schedule.streams])

    def seconds(other: Machine) -> float:
        return (run(schedule, other).seconds - run(first, other).seconds) / (calls - 1)

    return seconds


def _first_call(stream: EventStream) -> EventStream:
    """Return a stream without what follows its first operation."""
    begins = [number for number, event in enumerate(stream.events) if isinstance(event, Begin)]
    return replace(stream, events=stream.events[: begins[1]])


def step_of(calibration: StepCalibration, machine: Machine) -> Step:
    """Return a calibrated training step, with the times for as many ranks as compute at once."""
    ranks = machine.ranks if machine.shares_cores else machine.ranks_per_host
    times = calibration.at(ranks)
    step = Step(
        times.forward_s,
        times.backward_s,
        times.optimizer_s,
        calibration.bucket_bytes,
        times.ready_s,
        calibration.dtype,
        overlaps=_overlaps(machine),
    )
    return _as_a_whole(step, times, machine.host) if times.whole_s else step


def _overlaps(machine: Machine) -> bool:
    """Return whether reductions run while backward goes on (nn/parallel/reducer.py)."""
    return machine.hosts > 1 or machine.ranks_per_host < machine.host.cores


def _as_a_whole(step: Step, times: StepTimes, host: HostCalibration) -> Step:
    """Return a step whose buckets cost what the whole one took longer than is predicted of its parts.

    If it took less, its compute is shorter.
    """
    on_one_host = Machine(1, times.ranks, host)

    def seconds(changed: Step) -> float:
        return predict(replace(changed, overlaps=_overlaps(on_one_host)), on_one_host).seconds

    parts_s = seconds(step)
    longer_s = times.whole_s - parts_s
    if longer_s >= 0:
        cost_s = max(longer_s, 1e-6) / len(step.bucket_bytes)
        more_s = seconds(replace(step, bucket_cost_s=cost_s)) - parts_s
        return replace(step, bucket_cost_s=cost_s * longer_s / more_s)
    shorter_s = parts_s - seconds(_shortened(step, _TENTH))
    return _shortened(step, min(1 - _TENTH, _TENTH * -longer_s / shorter_s))


_TENTH = 0.1


def _shortened(step: Step, share: float) -> Step:
    """Return the step with so much less of its compute."""
    left = 1 - share
    return replace(
        step,
        forward_s=left * step.forward_s,
        backward_s=left * step.backward_s,
        optimizer_s=left * step.optimizer_s,
        ready_s=tuple(left * each for each in step.ready_s),
    )


def predict_step(calibration: StepCalibration, machine: Machine) -> Prediction:
    """Predict a calibrated training step."""
    return predict(step_of(calibration, machine), machine)


def schedule_of(workload: Workload, machine: Machine, choices: Choices | None = None) -> Schedule:
    """Record what the ranks do for a workload; arguments as of :func:`predict`."""
    operations = (
        [Operation("all_reduce", nbytes, workload.dtype, "AVG") for nbytes in workload.bucket_bytes]
        if isinstance(workload, Step)
        else [each for each in workload if isinstance(each, Operation)]
    )
    if not isinstance(workload, Step) and not workload:
        raise InvalidArgumentError("the workload has no operation")
    roots = {each.root // machine.ranks_per_host for each in operations if each.row.root}
    recorder = Recorder(
        machine.hosts,
        machine.ranks_per_host,
        machine.apart | roots,
        choices,
        single_copy=bool(machine.host.peer_read),
    )
    writer = _Writer(recorder)
    if isinstance(workload, Step):
        for number in range(workload.repeats):
            _write_step(writer, workload, operations, number)
    else:
        for each in workload:
            if isinstance(each, Operation):
                writer.operation(each, "program")
            else:
                writer.pause(each)
    return Schedule(
        machine.hosts, machine.ranks_per_host, list(writer.streams.values()), recorder.stands_for_others
    )


class _Writer:
    """Puts recorded operations one after the other."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.ends = [
            (host, local_rank) for host in recorder.recorded for local_rank in range(recorder.ranks_per_host)
        ]
        self.streams: dict[tuple[int, int, str], EventStream] = {}
        self._flags: defaultdict[int, int] = defaultdict(int)
        self._tags: defaultdict[tuple[int, int], int] = defaultdict(int)

    def add(self, name: str, events: Callable[[int], Sequence[Event]]) -> None:
        """Add events to a stream of every recorded rank, by rank."""
        for host, local_rank in self.ends:
            rank = host * self._recorder.ranks_per_host + local_rank
            self._stream(host, local_rank, name).events.extend(events(rank))

    def operation(self, operation: Operation, name: str) -> None:
        recording = self._recorder.record(operation)
        for (host, local_rank), events in recording.events.items():
            moved: Iterable[Event] = shifted(events, self._flags[host], self._tags[host, local_rank])
            stream = self._stream(host, local_rank, name)
            stream.events.append(Begin(operation.name, operation.nbytes))
            stream.events.extend(moved)
        for host, flags in recording.flags.items():
            self._flags[host] += flags
        for end, tags in recording.tags.items():
            self._tags[end] += tags

    def pause(self, pause: Pause) -> None:
        self.add("program", lambda rank: [Compute(pause.seconds[rank % len(pause.seconds)])])

    def _stream(self, host: int, local_rank: int, name: str) -> EventStream:
        key = host, local_rank, name
        if key not in self.streams:
            self.streams[key] = EventStream(host, local_rank, name)
        return self.streams[key]


def _write_step(writer: _Writer, step: Step, buckets: Sequence[Operation], number: int) -> None:
    """Write a training step: backward on the program's stream, reductions concurrently or after it."""
    signals = 2 * len(buckets) * number
    program: list[Event] = [Compute(step.forward_s)]
    before = 0.0
    for index, ready_s in enumerate(step.ready_s):
        program += [Compute(max(0.0, min(ready_s, step.backward_s) - before)), Compute(step.bucket_cost_s)]
        program.append(Signal(signals + 2 * index))
        before = max(before, min(ready_s, step.backward_s))
    program.append(Compute(max(0.0, step.backward_s - before)))
    writer.add("program", lambda rank: program)
    stream = "communication" if step.overlaps else "program"
    for index, bucket in enumerate(buckets):
        if step.overlaps:
            writer.add(stream, lambda rank, index=index: [AwaitSignal(signals + 2 * index)])  # type: ignore[misc]
        writer.operation(bucket, stream)
        if step.overlaps:
            writer.add(stream, lambda rank, index=index: [Signal(signals + 2 * index + 1)])  # type: ignore[misc]
    if step.overlaps:
        ends: list[Event] = [AwaitSignal(signals + 2 * index + 1) for index in range(len(buckets))]
        writer.add("program", lambda rank: ends)
    writer.add("program", lambda rank: [Compute(step.optimizer_s)])
