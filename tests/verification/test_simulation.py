"""Simulated worlds: runs that have found defects, the checker's own check, and the replay of a seed."""

from __future__ import annotations

import gc
from unittest import mock

import pytest

from torchestra.engine.kernels import shared_words
from verification.simulation import __main__ as command
from verification.simulation import (
    autograd_mutations,
    groups,
    growing,
    launching,
    launching_mutations,
    message_mutations,
    messages,
    odd,
    odd_mutations,
    rpc,
    subjects,
)
from verification.simulation.faults import Fault
from verification.simulation.groups import GroupsWorld
from verification.simulation.growing import GrowingWorld
from verification.simulation.launching import LaunchingWorld
from verification.simulation.messages import MessagesWorld
from verification.simulation.mutations import MUTATIONS
from verification.simulation.rpc import RpcWorld
from verification.simulation.subjects import SUBJECTS, worlds

_REPLAYED = (
    (GroupsWorld, groups.plan(3)),
    (MessagesWorld, messages.plan(1)),
    (RpcWorld, rpc.plan(42)),
    (LaunchingWorld, launching.plan(4)),
    (odd.world, odd.plan(14)),
)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_protocol_is_found_out(name: str) -> None:
    """Some are defects that there were: so these runs also see that they are mended."""
    mutation = MUTATIONS[name]
    with worlds():
        mutation.world(mutation.plan).go()
        gc.collect()
        assert mutation.is_found()


_WITH_AIMED_RUNS = (
    launching_mutations.MUTATIONS
    | odd_mutations.MUTATIONS
    | autograd_mutations.MUTATIONS
    | message_mutations.MUTATIONS
)


@pytest.mark.parametrize("name", _WITH_AIMED_RUNS)
def test_what_is_broken_is_found_out_by_aimed_runs(name: str) -> None:
    """The last three of launchers, and those of all others, are defects that there were."""
    mutation = _WITH_AIMED_RUNS[name]
    with worlds():
        assert mutation.failure(0) == ""
        assert mutation.is_found()


def test_ranks_of_a_host_that_agree_let_simulated_time_pass() -> None:
    """A futex would stop all threads of the simulation, and the only clock that could end that wait."""
    with worlds(), mock.patch.object(shared_words, "sleep_while_for") as sleep_while_for:
        world = GrowingWorld(growing.plan(43))
        world.go()
        assert not sleep_while_for.called
        gc.collect()


def test_a_seed_is_one_run() -> None:
    """A failing seed can be replayed, and the log of what happened is of that run."""
    with worlds():
        for world, plan in _REPLAYED:
            runs = []
            for _ in range(2):
                each = world(plan)
                each.go()
                runs.append((each.run.digest, each.run.now, [*each.run.events]))
                gc.collect()
            assert plan.faults
            assert runs[0] == runs[1]


def test_a_failing_run_is_told_with_the_fewest_faults_that_suffice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command prints what was promised, what went wrong, and how to run that again."""
    mutation = MUTATIONS["commit what is not ready"]
    clock = [Fault(0.5 + number, "clock", 0, 0, 1, 0.0) for number in range(3)]
    plan = mutation.plan.with_faults(sorted([*mutation.plan.faults, *clock]))
    with mock.patch.object(mutation.owner, mutation.method, mutation.replacement):
        failure = subjects._check_worlds(lambda _: plan, mutation.world, [7])
    assert failure is not None
    assert "'crash'" in failure.plan
    assert "'clock'" not in failure.plan
    command._show("groups", failure, "--subject groups --first 7 --seeds 1")
    told = capsys.readouterr().err
    assert "seed 7 FAILED" in told
    assert "again: python -m verification.simulation --subject groups --first 7 --seeds 1" in told


def test_a_large_group_goes_on_without_a_rank_that_dies(capsys: pytest.CaptureFixture[str]) -> None:
    """On many machines each pings a few others, and of a machine that shrinks only one rank."""
    assert command.main(["--ranks", "24"]) == 0
    assert capsys.readouterr().out.startswith("24 ranks on 3 machines: ")


def test_every_subject_runs_a_seed() -> None:
    for name in SUBJECTS:
        assert subjects.check(name, [1]) is None


def test_what_a_simulation_replaces_is_as_before_after_it() -> None:
    from torchestra.transport import event_loop, listener

    real = event_loop.time, event_loop.zmq, event_loop.Listener
    with worlds():
        assert event_loop.Listener is not listener.Listener
    assert (event_loop.time, event_loop.zmq, event_loop.Listener) == real
