"""Ranks with different numbers of inputs: shadowing, early termination, hooks, errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchestra as dist
from torchestra.algorithms.join import SKEW_THRESHOLD, Join, Joinable, JoinHook
from torchestra.errors import CollectiveMismatchError, JoinInterruptedError, UnevenInputsError
from worlds import KINDS, outcomes, run

SIZE = 4
MIN_INPUTS = 3  # Rank r has MIN_INPUTS + r inputs where they are uneven.


class Summing(Joinable):
    """Adds up ones over the ranks; what joined ranks do for it is recorded."""

    def __init__(self, group: Any = None, name: str = "", log: list[str] | None = None) -> None:
        super().__init__()
        self.group = group
        self.name = name
        self.log = [] if log is None else log
        self.told: list[bool] = []
        self.shadowed = 0
        self.active: list[int] = []
        self.after = 0

    def __call__(self, times: int = 1) -> int:
        work = Join.notify_join_context(self)
        if work is not None:
            work.wait()
            self.active.append(int(work.result()[0]))
        total = 0
        for _ in range(times):
            ones = torch.ones(1)
            dist.all_reduce(ones, group=self.group)
            total += int(ones.item())
        return total

    def join_hook(self, **options: Any) -> JoinHook:
        return SummingHook(self, options.get("times", 1), options.get("post", False))

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self.group


class SummingHook(JoinHook):
    def __init__(self, owner: Summing, times: int, post: bool) -> None:
        self.owner = owner
        self.times = times
        self.post = post

    def main_hook(self) -> None:
        self.owner.log.append(f"main {self.owner.name}")
        self.owner.shadowed += 1
        for _ in range(self.times):
            dist.all_reduce(torch.zeros(1), group=self.owner.group)

    def post_hook(self, is_last_joiner: bool) -> None:
        self.owner.log.append(f"post {self.owner.name}")
        self.owner.told.append(is_last_joiner)
        if self.post:
            mark = torch.tensor([dist.get_rank() if is_last_joiner else -1])
            dist.all_reduce(mark, dist.ReduceOp.MAX)
            tensor = torch.tensor([42 if dist.get_rank() == int(mark) else 0])
            dist.broadcast(tensor, src=int(mark))
            self.owner.after = int(tensor)


def expected_total(rank: int, size: int) -> int:
    """The ones that rank ``rank`` adds up: at step s take part the ranks that have more than s inputs."""
    counts = [MIN_INPUTS + other for other in range(size)]
    return sum(sum(count > step for count in counts) for step in range(counts[rank]))


def train(joinables: int, uneven: bool, times: int, **options: Any) -> tuple[int, list[Summing]]:
    all_of_them = [Summing() for _ in range(joinables)]
    inputs = MIN_INPUTS + (dist.get_rank() if uneven else 0)
    total = 0
    with Join(all_of_them, times=times, **options):
        for _ in range(inputs):
            for joinable in all_of_them:
                total += joinable(times)
    return total, all_of_them


def uneven(joinables: int, times: int, post: bool) -> tuple[int, list[Any]]:
    total, all_of_them = train(joinables, True, times, post=post)
    return total, [(each.shadowed, each.told, each.after) for each in all_of_them]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("joinables", "times", "post"),
    [(1, 1, False), (1, 0, True), (1, 1, True), (3, 1, True), (1, 2, False)],
    ids=["main hooks", "post hooks", "both hooks", "several joinables", "options reach the hooks"],
)
def test_joined_ranks_shadow_those_that_have_inputs(
    kind: str, joinables: int, times: int, post: bool
) -> None:
    for rank, (total, hooks) in enumerate(run(kind, SIZE, uneven, joinables, times, post)):
        assert total == expected_total(rank, SIZE) * joinables * times
        last = SIZE - 1
        assert hooks == [(last - rank, [rank == last], 42 if post else 0)] * joinables


def even(joinables: int) -> tuple[int, bool]:
    total, all_of_them = train(joinables, False, 1, enable=False, post=True)
    return total, any(each.told or each.active for each in all_of_them)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("joinables", [1, 3])
def test_a_disabled_context_does_nothing(kind: str, joinables: int) -> None:
    assert run(kind, SIZE, even, joinables) == [(SIZE * MIN_INPUTS * joinables, False)] * SIZE


def throwing(joinables: int) -> int:
    with pytest.raises(UnevenInputsError) as caught:
        train(joinables, True, 1, throw_on_early_termination=True)
    if dist.get_rank() == 0:
        assert str(caught.value).startswith("Rank 0 exhausted all inputs. (3 of 4 ranks")
    else:
        text = "Detected at least one rank that exhausted inputs. Throwing across all ranks. (rank 0 of"
        assert str(caught.value).startswith(text)
    after = torch.ones(1)
    dist.all_reduce(after)
    return int(after)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("joinables", [1, 3])
def test_early_termination_raises_on_all_ranks_and_the_group_stays_usable(kind: str, joinables: int) -> None:
    assert run(kind, SIZE, throwing, joinables) == [SIZE] * SIZE


def test_early_termination_says_nothing_where_inputs_are_even() -> None:
    def body() -> int:
        return train(2, False, 1, throw_on_early_termination=True)[0]

    assert run("threads", 3, body) == [3 * MIN_INPUTS * 2] * 3


@settings(max_examples=25, deadline=None)
@given(counts=st.lists(st.integers(0, 6), min_size=1, max_size=4))
def test_any_numbers_of_inputs(counts: list[int]) -> None:
    """Who is told to be last, who is active when, and what is added up, against a count on paper."""

    def body() -> tuple[list[int], list[int], list[bool], int]:
        joinable = Summing()
        with Join([joinable]):
            totals = [joinable() for _ in range(counts[dist.get_rank()])]
        return totals, joinable.active, joinable.told, joinable.shadowed

    for rank, (totals, active, told, shadowed) in enumerate(run("threads", len(counts), body)):
        assert totals == active == [sum(count > step for count in counts) for step in range(counts[rank])]
        assert told == [counts[rank] == max(counts)]
        assert shadowed == max(counts) - counts[rank]


def test_hooks_run_in_the_order_of_the_joinables() -> None:
    def body() -> list[str]:
        log: list[str] = []
        joinables = [Summing(name=name, log=log) for name in "ab"]
        with Join(joinables):
            for _ in range(2 * dist.get_rank()):
                for joinable in joinables:
                    joinable()
        return log

    joined_early, joined_last = run("threads", 2, body)
    assert joined_early == ["main a", "main b", "main a", "main b", "post a", "post b"]
    assert joined_last == ["post a", "post b"]


def test_one_all_reduce_per_step_and_one_more_at_the_end() -> None:
    def body(throw: bool) -> int:
        communicator = dist.group.WORLD.communicator
        calls = []
        general = communicator.all_reduce
        communicator.all_reduce = lambda *args, **kwargs: calls.append(args) or general(*args, **kwargs)
        train(3, False, 0, throw_on_early_termination=throw)
        return len(calls)

    for throw in (False, True):
        assert run("threads", 2, body, throw) == [MIN_INPUTS + 1] * 2


def test_only_in_the_context_is_anything_announced() -> None:
    def body() -> tuple[list[int], int]:
        joinable = Summing()
        joinable()
        for _ in range(2):
            with Join([joinable]):
                for _ in range(dist.get_rank() + 1):
                    joinable()
        joinable()
        return joinable.active, joinable.shadowed

    assert run("threads", 2, body) == [([2, 2], 2), ([2, 1, 2, 1], 0)]


class Repeating(Summing):
    """Its hook does what it does itself, announcement included."""

    def join_hook(self, **options: Any) -> JoinHook:
        return RepeatingHook(self)


class RepeatingHook(JoinHook):
    def __init__(self, owner: Repeating) -> None:
        self.owner = owner

    def main_hook(self) -> None:
        self.owner()


def test_a_joined_rank_announces_no_steps() -> None:
    def body() -> list[int]:
        joinable = Repeating()
        with Join([joinable]):
            for _ in range(2 * dist.get_rank() + 1):
                joinable()
        return joinable.active

    assert run("threads", 2, body) == [[2], [2, 1, 1]]


def test_a_group_of_some_ranks_joins_by_itself() -> None:
    def body() -> tuple[int, int] | None:
        group = dist.new_group([1, 2])
        if dist.get_rank() == 0:
            with pytest.raises(dist.InvalidArgumentError, match="this rank is <no member"):
                Join([Summing(group)])
            return None
        joinable = Summing(group)
        with Join([joinable]):
            total = sum(joinable() for _ in range(dist.get_rank()))
        return total, joinable.shadowed

    assert run("threads", 3, body) == [None, (2, 1), (3, 0)]


def test_a_great_skew_is_told_once_and_by_those_who_wait() -> None:
    waiting = run("processes", 2, skewed)
    assert waiting[1] == []
    ((text, file),) = waiting[0]
    assert text.startswith("Detected uneven input skew of greater than 1000. This means that rank 0 has")
    assert file == __file__


def skewed() -> list[tuple[str, str]]:
    joinable = Summing()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with Join([joinable], times=0):
            for _ in range(dist.get_rank() * (SKEW_THRESHOLD + 5)):
                joinable(0)
    return [(str(each.message), each.filename) for each in caught]


# -- exceptions in the block


class Mishap(Exception):
    pass


def failing_between_steps() -> str:
    joinable = Summing()
    try:
        with Join([joinable]):
            for step in range(MIN_INPUTS + dist.get_rank()):
                if dist.get_rank() == 1 and step == MIN_INPUTS:
                    raise Mishap
                joinable()
    except (Mishap, JoinInterruptedError) as error:
        text = f"{type(error).__name__}: {error}"
    after = torch.ones(1)
    dist.all_reduce(after)
    assert after.item() == dist.get_world_size()
    return text


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_on_one_rank_ends_the_context_on_all(kind: str) -> None:
    """Rank 0 has joined by then, and rank 2 is about to make a step. The group stays usable."""
    joined, failed, active = run(kind, 3, failing_between_steps)
    assert failed == "Mishap: "
    for text in (joined, active):
        assert text.startswith("JoinInterruptedError: an exception has ended the join context on rank 1 of")


def test_an_exception_in_the_midst_of_a_step_is_a_mismatch_for_the_others() -> None:
    def body() -> tuple[type[Exception], float]:
        joinable = Summing()
        try:
            with Join([joinable]):
                joinable()
                if dist.get_rank() == 1:
                    Join.notify_join_context(joinable)
                    raise Mishap
                joinable()
        except (Mishap, CollectiveMismatchError) as error:
            kind = type(error)
        after = torch.ones(1)
        dist.all_reduce(after)
        return kind, after.item()

    assert run("threads", 2, body) == [(CollectiveMismatchError, 2), (Mishap, 2)]


def fail_together() -> None:
    joinable = Summing()
    with Join([joinable]):
        joinable()
        raise Mishap


def test_an_exception_on_all_ranks_is_what_all_get() -> None:
    def body() -> float:
        with pytest.raises(Mishap):
            fail_together()
        after = torch.ones(1)
        dist.all_reduce(after)
        return after.item()

    assert run("threads", 3, body) == [3] * 3


def test_an_exception_in_a_main_hook_ends_the_context_on_all() -> None:
    class Broken(Summing):
        def join_hook(self, **options: Any) -> JoinHook:
            return BrokenHook()

    class BrokenHook(JoinHook):
        def main_hook(self) -> None:
            raise Mishap

    def body() -> None:
        joinable = Broken()
        with Join([joinable]):
            for _ in range(dist.get_rank() + 1):
                joinable(0)
                joinable(0)

    first, second = outcomes("threads", 2, body)
    assert isinstance(first.error, Mishap)
    assert isinstance(second.error, JoinInterruptedError)


def test_an_exception_in_a_disabled_context_sends_nothing() -> None:
    def body() -> float:
        if dist.get_rank() == 1:
            with pytest.raises(Mishap), Join([Summing()], enable=False):
                raise Mishap
        after = torch.ones(1)
        dist.all_reduce(after)
        return after.item()

    assert run("threads", 2, body) == [2, 2]


# -- what is refused


class Forgetful(Summing):
    def __init__(self) -> None:
        self.group = None


def refusals() -> list[tuple[Callable[[], Any], str]]:
    other = dist.new_group()
    return [
        (lambda: Join([]), "The join context manager requires at least one joinable"),
        (
            lambda: Join([Summing(), Summing(other)]),
            "Using join context manager with multiple process groups",
        ),
        (
            lambda: Join([Forgetful()]),
            "Check that the .*Forgetful.* constructor calls the ``Joinable`` constructor",
        ),
        (
            lambda: Join.notify_join_context(Forgetful()),
            "constructor calls the ``Joinable`` constructor",
        ),
        (lambda: Join([torch.nn.Linear(1, 1)]), "expected a Joinable, got Linear"),  # type: ignore[list-item]
    ]


def test_what_is_refused() -> None:
    def body() -> None:
        for call, text in refusals():
            with pytest.raises(ValueError, match=text):
                call()

    run("threads", 2, body)


def test_joinables_are_abstract_and_hooks_do_nothing_unless_told_to() -> None:
    with pytest.raises(TypeError, match="abstract"):
        Joinable()  # type: ignore[abstract]
    JoinHook().main_hook()
    JoinHook().post_hook(True)
