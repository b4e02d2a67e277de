"""Predictions follow from the numbers of a calibration in ways that can be computed by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import HOST, link_of, machine

from torchestra.errors import DistError, InvalidArgumentError
from torchestra.performance import recording
from torchestra.performance.calibration import OperationFactor, StepCalibration, StepTimes
from torchestra.performance.closed_form import estimate
from torchestra.performance.machine import Machine
from torchestra.performance.prediction import predict, predict_step, schedule_of, steady_state_seconds
from torchestra.performance.schedule import AwaitFlag, Compute, EventStream, Receive, Schedule, Send, SetFlag
from torchestra.performance.simulation import run
from torchestra.performance.what_if import bucket_sweep, fault_costs, rebucketed, threshold_sweep
from torchestra.performance.workload import Operation, Pause, Step, parse_bytes

MB = 1 << 20
STEP = Step(0.04, 0.08, 0.01, (MB, 7 * MB), (0.02, 0.08))


def seconds(streams: list[EventStream], on: Machine) -> float:
    return run(Schedule(on.hosts, on.ranks_per_host, streams), on).seconds


def test_a_flag_takes_its_time_from_rank_to_rank() -> None:
    streams = [
        EventStream(0, 0, events=[Compute(1e-6), SetFlag(5)]),
        EventStream(0, 1, events=[AwaitFlag(0, 4)]),
    ]
    assert seconds(streams, machine(1, 2)) == pytest.approx(1e-6 + HOST.flag_s)


def test_a_rank_that_has_waited_for_long_has_to_be_woken() -> None:
    streams = [
        EventStream(0, 0, events=[Compute(1.0), SetFlag(1)]),
        EventStream(0, 1, events=[AwaitFlag(0, 1)]),
    ]
    assert seconds(streams, machine(1, 2)) == pytest.approx(1.0 + HOST.wakeup_s, abs=1e-9)


def test_a_message_takes_the_terms_of_its_link() -> None:
    """o + (g + kG) + L + o: LogGP."""
    on = machine(2, 1)
    streams = [
        EventStream(0, 0, events=[Send((1,), 125_000, 0)]),
        EventStream(1, 0, events=[Receive((0,), 125_000, 0)]),
    ]
    assert seconds(streams, on) == pytest.approx(1e-5 + 1e-6 + 1e-3 + 1e-4 + 1e-5)


def test_messages_of_one_host_share_its_link() -> None:
    on = machine(2, 4)
    streams = [EventStream(0, rank, events=[Send((1,), 125_000, 0)]) for rank in range(4)]
    streams += [EventStream(1, rank, events=[Receive((0,), 125_000, 0)]) for rank in range(4)]
    assert seconds(streams, on) == pytest.approx(4 * 1e-3, rel=0.1)


def test_a_link_that_waits_for_one_rank_sends_for_another() -> None:
    """What takes its time is each rank's own processor, 10 µs a message; the link takes one for it."""
    on, others = machine(9, 4, 1e12), tuple(range(1, 9))
    streams = [EventStream(0, rank, events=[Send(others, 8, 0)]) for rank in range(4)]
    streams += [EventStream(host, rank, events=[Receive((0,), 8, 0)]) for host in others for rank in range(4)]
    assert seconds(streams, on) == pytest.approx(8e-5 + 1e-4 + 1e-5, rel=0.05)


def test_ranks_take_turns_where_there_are_fewer_cores() -> None:
    few = replace(machine(1, 4), host=replace(HOST, cores=2))
    streams = [EventStream(0, rank, events=[Compute(0.01)]) for rank in range(4)]
    assert seconds(streams, few) == pytest.approx(0.02, rel=0.02)
    assert seconds(streams, machine(1, 4)) == pytest.approx(0.01)


def test_hosts_that_are_one_machine_share_its_cores() -> None:
    shared = Machine(2, 1, replace(HOST, cores=1), link_of(shares_cores=True))
    streams = [EventStream(host, 0, events=[Compute(0.01)]) for host in range(2)]
    assert seconds(streams, shared) == pytest.approx(0.02, rel=0.02)


def test_a_schedule_that_waits_for_ever_is_an_error() -> None:
    with pytest.raises(DistError, match="1 streams wait, the first is rank 1 of host 0 in AwaitFlag"):
        seconds([EventStream(0, 1, events=[AwaitFlag(0, 1)])], machine(1, 2))


@pytest.mark.parametrize(("hosts", "ranks"), [(1, 2), (1, 4), (2, 1), (2, 3), (3, 2), (100, 1)])
@pytest.mark.parametrize("operation", ["barrier", "all_reduce:16MB"])
def test_the_closed_form_agrees_with_the_simulation(hosts: int, ranks: int, operation: str) -> None:
    workload, on = [Operation.parse(operation)], machine(hosts, ranks)
    assert predict(workload, on).seconds == pytest.approx(estimate(workload, on), rel=0.25)


def test_the_closed_form_of_a_step_agrees_too() -> None:
    on = machine(4, 2)
    assert predict(STEP, on).seconds == pytest.approx(estimate(STEP, on), rel=0.1)


def test_the_closed_form_knows_what_it_does_not_know() -> None:
    assert estimate([Operation("broadcast", MB)], machine(2, 2)) is None
    assert estimate([Operation("barrier", 0)], machine(2, 2, slow_links={0: 0.5})) is None


def test_one_host_for_many_predicts_what_all_hosts_do(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = Operation("all_reduce", MB)
    all_of_them = predict([operation], machine(24, 1)).seconds
    monkeypatch.setattr(recording, "MAX_RECORDED_RANKS", 23)
    few_of_them = predict([operation], machine(24, 1)).seconds
    assert few_of_them == pytest.approx(all_of_them, rel=0.02)


def test_a_call_among_many_takes_less_than_one_alone() -> None:
    operation, on = Operation("all_reduce", 8 * MB), machine(2, 2)
    assert 0 < steady_state_seconds(operation, on) <= predict([operation], on).seconds


def test_backward_hides_communication() -> None:
    fast, slow = (predict(STEP, machine(4, 2, bits_per_s)) for bits_per_s in (100e9, 1e9))
    assert fast.seconds == pytest.approx(0.13, rel=0.1)
    assert fast.waiting_share < 0.1
    assert slow.seconds > 0.13 + 7 * MB * 8 / 1e9
    assert slow.waiting_share > 0.3


def test_pauses_are_of_the_rank_that_made_them() -> None:
    workload = [Operation("barrier", 0), Pause((0.0, 0.5)), Operation("barrier", 0)]
    prediction = predict(workload, machine(1, 2))
    assert prediction.seconds == pytest.approx(0.5, rel=0.01)
    assert prediction.waiting_s == pytest.approx(0.25, rel=0.01)  # rank 0 waits, rank 1 does not


def test_faults_cost_what_is_slow() -> None:
    on = machine(3, 2)
    normal = predict(STEP, on)
    as_it_is, straggler, link, dead = fault_costs(STEP, on, normal)
    assert as_it_is.seconds == normal.seconds
    assert straggler.seconds == pytest.approx(normal.seconds + 0.5 * 0.13, rel=0.1)
    assert normal.seconds < link.seconds < 2 * normal.seconds
    assert dead.seconds > 10.0  # the heartbeat bound


@pytest.mark.parametrize("hosts", [16, 67, 72, 100])
def test_a_fault_never_saves_time(hosts: int) -> None:
    """Also where hosts do all the same, and one stands for the rest until one has a slow link."""
    workload, on = [Operation("all_reduce", 1 << 12)], machine(hosts, 2, 1e11)
    normal = predict(workload, on)
    assert all(each.seconds >= normal.seconds for each in fault_costs(workload, on, normal))


def test_a_slow_host_among_many_slows_all() -> None:
    on, slow = machine(100, 1), machine(100, 1, slow_links={5: 0.25})
    workload = [Operation("all_reduce", 8 * MB)]
    ratio = predict(workload, slow).seconds / predict(workload, on).seconds
    assert 2 < ratio < 5


@pytest.mark.parametrize("apart", [3, 5, 143])
def test_a_host_that_is_recorded_by_itself_does_what_the_others_do(apart: int) -> None:
    """Its messages come between those of the host that stands for the rest, and not after them."""
    workload = [Operation("all_reduce", 8 * MB)]
    as_fast = machine(144, 1, slow_links={apart: 1.0})
    assert predict(workload, as_fast).seconds == pytest.approx(
        predict(workload, machine(144, 1)).seconds, rel=_SAME_TIME
    )


_SAME_TIME = 1e-3
"""By as much the order in which messages that come at the same time are taken changes a prediction."""


@given(
    hosts=st.sampled_from((2, 5, 9, 16, 67, 72, 100)),
    ranks=st.integers(1, 3),
    power=st.integers(2, 24),
    bits_per_s=st.sampled_from((1e8, 1e10, 1e11)),
    apart=st.integers(0, 99),
)
@settings(max_examples=15)
def test_a_slower_link_is_never_predicted_to_be_faster(
    hosts: int, ranks: int, power: int, bits_per_s: float, apart: int
) -> None:
    """With all hosts recorded, and with one that stands for the others, in a grid and without."""
    on, workload = machine(hosts, ranks, bits_per_s), [Operation("all_reduce", 1 << power)]
    times = [predict(workload, on).seconds]
    schedule = schedule_of(workload, replace(on, slow_links={apart % hosts: 0.5}))
    times += [
        run(schedule, replace(on, slow_links={apart % hosts: share})).seconds for share in (0.8, 0.4, 0.1)
    ]
    for faster, slower in itertools.pairwise(times):
        assert slower >= faster * (1 - _SAME_TIME)


def test_other_buckets_hold_the_same_gradients() -> None:
    for cap in (MB, 3 * MB, 100 * MB):
        step = rebucketed(STEP, cap)
        assert sum(step.bucket_bytes) == 8 * MB
        assert max(step.bucket_bytes[1:], default=0) <= cap
        assert step.ready_s[-1] == STEP.ready_s[-1]
    assert rebucketed(STEP, 100 * MB).ready_s[0] == pytest.approx(0.02)


def test_sweeps_have_one_fastest() -> None:
    for answers in (
        bucket_sweep(STEP, machine(2, 1)),
        threshold_sweep([Operation("all_reduce", MB)], machine(1, 2)),
    ):
        assert len(answers) > 3
        (best,) = [answer for answer in answers if answer.best]
        assert best.seconds == min(answer.seconds for answer in answers)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hosts": 0}, "hosts must be at least 1"),
        ({"link": None}, "2 hosts need a link"),
        ({"stragglers": {4: 2.0}}, "rank from 0 to 3"),
        ({"stragglers": {0: 0.0}}, "factor above 0"),
        ({"slow_links": {0: 2.0}}, "host from 0 to 1"),
    ],
)
def test_impossible_machines_are_refused(changes: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        replace(machine(2, 2), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "nbytes"), [("4", 4), ("64KB", 65536), ("1.5mb", 3 << 19), ("2G", 2 << 30)])
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "nan", "4TB", "4KMB"])
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="a size is"):
        parse_bytes(text)


@pytest.mark.parametrize(("hosts", "ranks", "cores"), [(1, 2, 64), (1, 6, 2), (2, 2, 64), (2, 2, 2)])
def test_an_operation_takes_as_many_times_longer_as_its_factor_says(
    hosts: int, ranks: int, cores: int
) -> None:
    """Flags, turns and messages too, so that what was measured is predicted; compute does not."""
    factor = OperationFactor("all_reduce", ranks, 64 << 10, 1.5)
    link = link_of(shares_cores=True) if hosts > 1 else None
    parts = Machine(hosts, ranks, replace(HOST, cores=cores), link)
    known = replace(
        parts,
        host=replace(parts.host, operations=(factor,)),
        link=None if link is None else replace(link, operations=(factor,)),
    )
    operation, other = Operation("all_reduce", 64 << 10), Operation("broadcast", 64 << 10)
    measured_s = 1.5 * steady_state_seconds(operation, parts)
    assert steady_state_seconds(operation, known) == pytest.approx(measured_s, rel=1e-6)
    assert steady_state_seconds(other, known) == steady_state_seconds(other, parts)
    pause = [Operation("all_reduce", 64 << 10), Pause((1.0,))]
    assert predict(pause, known).seconds < 1.1 * ranks


@pytest.mark.parametrize("whole_s", [0.5, 0.2, 0.1])
@pytest.mark.parametrize("cores", [64, 2])
def test_a_step_that_was_timed_as_a_whole_is_predicted_so(whole_s: float, cores: int) -> None:
    """With other ranks and buckets, too, its buckets cost more or its compute less."""
    host = replace(HOST, cores=cores)
    times = StepTimes(4, 0.04, 0.08, 0.01, (0.02, 0.08), whole_s * (1 if cores == 64 else 2))
    step = StepCalibration("a model", (MB, 7 * MB), "float32", (times,))
    assert predict_step(step, Machine(1, 4, host)).seconds == pytest.approx(times.whole_s, rel=0.01)
    parts = replace(step, times=(replace(times, whole_s=0.0),))
    longer = (
        predict_step(step, Machine(1, 4, host)).seconds > predict_step(parts, Machine(1, 4, host)).seconds
    )
    more = (
        predict_step(step, Machine(4, 4, host, link_of())),
        predict_step(parts, Machine(4, 4, host, link_of())),
    )
    assert (more[0].seconds > more[1].seconds) == longer
