"""A group does not care which of the two engines it has."""

from __future__ import annotations

import inspect

from torchestra.engine.local import LocalEngine
from torchestra.engine.multihost.engine import MultiHostEngine

# Of memory that all ranks share, and of the waits for it.
ONLY_IN_ONE_HOST = {"agree", "choices", "waiter"}
# Of kernels: what groups that call one themselves (fast_path.py) need, and what keeps forked children out.
ONLY_WITH_KERNELS = {"finish_all_reduce", "leave_halfway", "forget"}


def offered(engine: type) -> set[str]:
    return {name for name in vars(engine) if not name.startswith("_")}


def test_both_engines_offer_the_same() -> None:
    assert offered(LocalEngine) - ONLY_IN_ONE_HOST - ONLY_WITH_KERNELS == offered(MultiHostEngine)


def test_their_methods_take_the_same() -> None:
    for name in offered(MultiHostEngine):
        ours, theirs = (inspect.signature(getattr(each, name)) for each in (MultiHostEngine, LocalEngine))
        assert list(ours.parameters) == list(theirs.parameters), name
