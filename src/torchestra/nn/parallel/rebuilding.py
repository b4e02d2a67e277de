"""Replaces a wrapper's group by another in everything that refers to it, for ``rebuild()``.

When a step fails, some ranks may have ended it and others not, so what they remember may differ: how many
steps a hook has counted, what it carries over to the next, which buckets were agreed on. Nothing is sent when
a wrapper is rebuilt; so all of that begins anew, as at construction, where it is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch

from torchestra.process_group import ProcessGroup


@runtime_checkable
class StartsAnew(Protocol):
    """A state of a communication hook that remembers something from step to step."""

    def on_rebuild(self) -> None:
        """Forget what may differ between the ranks; its groups have been replaced. Called by rebuild()."""


def _replacement(held: Any, former: ProcessGroup, group: ProcessGroup) -> Any:
    """Return the replacement: ``group`` for ``former``, and for a shrunk group what it became."""
    if held is former:
        return group
    while isinstance(held, ProcessGroup) and held.successor is not None:
        held = held.successor
    return held


def follow(state: Any, former: ProcessGroup, group: ProcessGroup) -> Any:
    """Replace ``former`` by ``group`` in the state of a hook; return the state.

    The state may be a group, or hold groups in its attributes or, if it is a list, tuple or dict, in its
    items. It stays the same object unless it is a group or a tuple. If it is :class:`StartsAnew`, it does.
    """
    if isinstance(state, ProcessGroup):
        return _replacement(state, former, group)
    if type(state) is tuple:
        return tuple(_replacement(each, former, group) for each in state)
    if isinstance(state, list):
        state[:] = [_replacement(each, former, group) for each in state]
    elif isinstance(state, dict):
        state.update({key: _replacement(each, former, group) for key, each in state.items()})
    else:
        for name in _attributes(state):
            held = getattr(state, name, None)
            if (now := _replacement(held, former, group)) is not held:
                setattr(state, name, now)
    if isinstance(state, StartsAnew):
        state.on_rebuild()
    return state


def _attributes(state: object) -> Iterator[str]:
    yield from tuple(getattr(state, "__dict__", ()))
    for kind in type(state).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else tuple(slots)


def follow_in_modules(module: torch.nn.Module, former: ProcessGroup, group: ProcessGroup) -> None:
    """Let the SyncBatchNorms in a module that normalize over ``former``, or a shrunk group, follow it."""
    for each in module.modules():
        if isinstance(each, torch.nn.SyncBatchNorm):
            each.process_group = _replacement(each.process_group, former, group)
