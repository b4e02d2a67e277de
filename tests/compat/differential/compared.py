"""Calls made on torch.distributed and on torchestra.compat, and how their outcomes are compared."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import distributed

from torchestra import compat

SIDES = (distributed, compat)


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
