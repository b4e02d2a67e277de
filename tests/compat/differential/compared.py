"""Calls made on torch.distributed and on torchestra.compat, and how their outcomes are compared."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

from torch import distributed

import worlds
from torchestra import compat
from torchestra.store import Store

SIDES = (distributed, compat)
Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]
_RANKS = 2


class Outcome(NamedTuple):
    """How a call ended: with a value, or with an exception of classes of these names."""

    value: Any
    errors: tuple[str, ...] = ()


def outcome(function: Callable[..., Any], *arguments: Any) -> Outcome:
    """Make a call."""
    try:
        return Outcome(function(*arguments))
    except Exception as error:
        names = [kind.__name__ for kind in type(error).__mro__]
        return Outcome(None, tuple(names[: names.index("Exception")]))


def differs(theirs: Any, ours: Any) -> bool:
    """Return whether a program could tell: values differ, or what catches torch's error misses ours."""
    if isinstance(theirs, Outcome) and isinstance(ours, Outcome):
        if theirs.errors or ours.errors:
            return not (theirs.errors and ours.errors and set(theirs.errors) <= set(ours.errors))
        return differs(theirs.value, ours.value)
    if type(theirs) is not type(ours):
        return True
    if isinstance(theirs, (list, tuple)):
        return len(theirs) != len(ours) or any(map(differs, theirs, ours))
    return bool(theirs != ours)


def assert_same(what: object, theirs: Outcome, ours: Outcome) -> None:
    """Fail where a program could tell torch from torchestra."""
    assert not differs(theirs, ours), f"{what}\n torch:      {theirs}\n torchestra: {ours}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what torch's C++ writes about errors out of the test's output."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def _on_both(_: Store, rank: int, size: int, program: list[Call]) -> list[tuple[Call, Outcome, Outcome]]:
    """On a rank: run a program in a group of torch and in one of torchestra."""
    outcomes = []
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's barrier has one, for GPUs
        for number, side in enumerate(SIDES):
            path = os.path.join(os.environ["WORLD_DIRECTORY"], f"side{number}")
            side.init_process_group(
                "gloo",
                init_method=f"file://{path}",
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=worlds.OP_SECONDS),
            )
            outcomes.append([outcome(function, side, rank, *arguments) for function, arguments in program])
            worlds.leave_note(f"{rank} has done {number}")
            for peer in range(size):  # who leaves ends an operation of Gloo in which another still is
                worlds.await_note(f"{peer} has done {number}")
            side.destroy_process_group()
    return list(zip(program, *outcomes, strict=True))


def compare_calls(program: list[Call]) -> None:
    """Make the same calls on two ranks, in a group of torch and in one of torchestra, with the same outcomes.

    Both groups live in the same two processes. A call is a function at the top level of a module, which gets
    the side, the rank and the arguments.
    """
    ended = worlds.outcomes("processes", _RANKS, _on_both, program, init=False)
    if any("connectFullMesh" in str(each.error) for each in ended):
        # Gloo's ranks sometimes miss each other on a busy machine; then there is nothing to compare with.
        ended = worlds.outcomes("processes", _RANKS, _on_both, program, init=False)
    found = worlds.results(ended)
    told = [
        f"rank {rank}: {call[0].__name__}{call[1]}\n torch:      {theirs}\n torchestra: {ours}"
        for rank, each in enumerate(found)
        for call, theirs, ours in each
        if differs(theirs, ours)
    ]
    assert not told, "\n".join(told)
