"""A job of thousands of ranks takes no more to predict than its largest host: the others do the same."""

from __future__ import annotations

from machines import machine

from torchestra.performance.prediction import schedule_of
from torchestra.performance.simulation import run
from torchestra.performance.workload import Step

MB = 1 << 20
STEP = Step(0.04, 0.08, 0.01, (MB, 7 * MB), (0.02, 0.08))


def test_a_training_step_on_a_thousand_hosts_is_that_of_one_which_stands_for_all() -> None:
    seconds, events = {}, {}
    for hosts in (100, 1000):
        on = machine(hosts, 2, 10e9)
        schedule = schedule_of(STEP, on)
        assert schedule.recorded_hosts == [0]
        seconds[hosts] = run(schedule, on).seconds
        events[hosts] = sum(len(stream.events) for stream in schedule.streams)
    assert 0.13 < seconds[100] < seconds[1000] < 0.26
    assert events[1000] < 1.5 * events[100]
