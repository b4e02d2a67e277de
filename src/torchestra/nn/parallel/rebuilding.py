"""Replaces a wrapper's group in everything that refers to it, for ``rebuild()``.

When a step fails, some ranks may have ended it and others not, so their states may differ: the number of
steps that a hook has counted, what it keeps for the next step, the buckets that were agreed on. Rebuilding a
wrapper sends nothing; so all of these are reset to their values at construction, which are the same on all
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch

from torchestra.process_group import ProcessGroup


@runtime_checkable
class Resettable(Protocol):
    """A communication hook's state that keeps something from step to step."""

    def on_rebuild(self) -> None:
        """Forget everything that may differ between ranks. Called by rebuild(), with the groups replaced."""


def _replacement(held: Any, former: ProcessGroup, group: ProcessGroup) -> Any:
    """Return the replacement: ``group`` for ``former``, and for a shrunk group its successor."""
    if held is former:
        return group
    while isinstance(held, ProcessGroup) and held.successor is not None:
        held = held.successor
    return held


def follow(state: Any, former: ProcessGroup, group: ProcessGroup) -> Any:
    """Replace ``former`` by ``group`` in the state of a hook; return the state.

    The state may be a group, or hold groups in its attributes or, if it is a list, tuple or dict, in its
    items. It stays the same object unless it is a group or a tuple. If it is :class:`Resettable`, its
    ``on_rebuild()`` is called.
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
    if isinstance(state, Resettable):
        state.on_rebuild()
    return state


def _attributes(state: object) -> Iterator[str]:
    yield from tuple(getattr(state, "__dict__", ()))
    for kind in type(state).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else tuple(slots)


def follow_in_modules(module: torch.nn.Module, former: ProcessGroup, group: ProcessGroup) -> None:
    """Replace the group of SyncBatchNorms in a module, where it is ``former`` or a shrunk group."""
    for each in module.modules():
        if isinstance(each, torch.nn.SyncBatchNorm):
            each.process_group = _replacement(each.process_group, former, group)
