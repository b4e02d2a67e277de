"""Training on uneven inputs: ranks that have run out of them shadow the collectives of those that have not.

In every step each rank of the group tells the others its state in one small all_reduce: it has an input
(:meth:`Join.notify_join_context`, called by the first joinable before the collectives of its step), or it has
none left (at the end of the ``with`` block, once for each step of the others). All ranks run the same
all_reduce, so all know which ranks have joined; the joined ones then run their main hooks to match the
collectives that the others are about to call. When all have joined, all run the post hooks. (The all_reduce
is of int16, which no training program reduces, so that it is not taken for training data.)

The all_reduce adds up a vector with one element per rank, in which each rank sets its own state; so errors
can name ranks. A rank whose block ends with an exception sets a third state, and does not wait for the
result: peers that are about to begin a step, or have joined, learn of it at once; peers in the middle of a
step get a mismatch of collectives. No rank waits for one that does not come.
"""

from __future__ import annotations

import contextlib
import warnings
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch

from torchestra.collectives.functions import all_reduce
from torchestra.communicator.work import Work
from torchestra.errors import (
    DistBackendError,
    DistError,
    InvalidArgumentError,
    InvalidArgumentTypeError,
    JoinInterruptedError,
    UnevenInputsError,
)
from torchestra.process_group import ProcessGroup
from torchestra.world.init import default_group, member_group

__all__ = ["Join", "JoinHook", "Joinable"]

# An active rank's state is odd: 1, plus twice its note.
_JOINED, _ACTIVE, _FAILED = range(3)

SKEW_THRESHOLD = 1000
"""A rank warns when it has shadowed more steps than this."""


class JoinHook:
    """Shadows a :class:`Joinable` on a joined rank. Override the methods that are needed."""

    def main_hook(self) -> None:
        """Shadow the collectives of one step; called once for each step that other ranks still make."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Finish on every rank, once all have joined.

        Args:
            is_last_joiner: whether this rank was among those that had the most inputs.
        """


class Joinable(ABC):
    """An object that calls collectives in every step, and has a hook with which a joined rank shadows them.

    Its constructor must call ``Joinable.__init__``, and it must call :meth:`Join.notify_join_context` before
    the collectives of each step.
    """

    _join_config: JoinConfig

    @abstractmethod
    def __init__(self) -> None:
        super().__init__()
        self._join_config = DISABLED

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for one :class:`Join`, which passes its ``kwargs`` to all joinables."""
        ...

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """Return the device of tensors for the join context's own collectives."""
        ...

    @property
    @abstractmethod
    def join_process_group(self) -> Any:
        """Return the group whose ranks join, the same for all joinables; None for the default group."""
        ...


class JoinConfig(NamedTuple):
    """The join context that a joinable is in.

    Attributes:
        enable: whether the joinable is in a context that is not disabled.
        throw_on_early_termination: the context's argument.
        is_first_joinable: whether the joinable is the one that announces steps.
    """

    enable: bool
    throw_on_early_termination: bool
    is_first_joinable: bool
    context: Join | None = None


DISABLED = JoinConfig(enable=False, throw_on_early_termination=False, is_first_joinable=False)
"""The configuration of a joinable outside any context."""


class Join:
    """A context in which ranks may have different numbers of inputs. Must be entered by all ranks::

        with Join([model, optimizer]):
            for samples, targets in my_share_of_the_data:  # However many there are.
                optimizer.zero_grad()
                loss_function(model(samples), targets).backward()
                optimizer.step()

    A rank that reaches the end of the block shadows the others' steps until all have reached it.

    Args:
        joinables: the objects that communicate in each step; their hooks run in this order. The first
            announces the steps, so it must take part in every step, before the others.
        enable: False makes the context do nothing, for inputs that are known to be even.
        throw_on_early_termination: raise an error on all ranks as soon as one runs out of inputs, instead of
            shadowing. The group stays usable.
        **kwargs: passed to every joinable's :meth:`Joinable.join_hook`.

    Attributes:
        joinables: the joinables.
        active: the ranks that make the current step, in the numbering of the joinables' group.
        note: their note on the step (see :meth:`notify_join_context`).

    Raises:
        InvalidArgumentError: there is no joinable, one has not called ``Joinable.__init__``, or their groups
            differ.
        UnevenInputsError: on every rank, if ``throw_on_early_termination`` and a rank has run out of inputs.
        JoinInterruptedError: on the other ranks, when an exception has ended the block on one. Ranks in the
            middle of a step get a CollectiveMismatchError instead. The group stays usable.
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        if len(joinables) == 0:
            raise InvalidArgumentError("The join context manager requires at least one joinable")
        self.joinables = tuple(joinables)
        self._group = _the_group(self.joinables)
        self._rank = self._group.rank()
        self._device = self.joinables[0].join_device
        self._join_hooks = [joinable.join_hook(**kwargs) for joinable in self.joinables]
        self._enable = enable
        self._throw = throw_on_early_termination
        # The memory of the tensor that is reduced: so few numbers are faster to access in an array.
        self._states = array("h", bytes(2 * self._group.size()))
        self._none_yet = array("h", self._states)
        self._tensor = torch.frombuffer(self._states, dtype=torch.int16)
        self._works: dict[int, Work] = {}
        self._shadowing = False
        # Whether every rank knows that the context is over, so that none needs to be informed.
        self._over = False
        self.active: tuple[int, ...] = ()
        self.note = 0

    def __enter__(self) -> None:
        self._over = self._shadowing = False
        for index, joinable in enumerate(self.joinables):
            joinable._join_config = JoinConfig(self._enable, self._throw, index == 0, self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if not self._enable:
                return
            if error is not None:
                self._leave(error)
                return
            self._shadowing = True
            try:
                is_last_joiner = self._shadow()
            except Exception as failure:
                self._leave(failure)
                raise
            for hook in self._join_hooks:
                hook.post_hook(is_last_joiner)
        finally:
            for joinable in self.joinables:
                joinable._join_config = DISABLED

    @staticmethod
    def notify_join_context(joinable: Joinable, note: int = 0) -> Work | None:
        """Announce that this rank makes another step. A joinable calls it before its collectives.

        Does nothing outside a join context, for joinables other than its first, and on a rank that has
        joined, so that a hook may run the joinable's own code.

        Args:
            note: a number for the joined ranks about the step; up to 1000, the same on all active ranks.

        Returns:
            A completed work, whose ``result()[0]`` holds the number of ranks that make the step (one
            element), or None if it did nothing.

        Raises:
            InvalidArgumentError: the joinable's constructor has not called ``Joinable.__init__``.
            UnevenInputsError, JoinInterruptedError: see :class:`Join`.
        """
        config = _config_of(joinable)
        if not config.is_first_joinable or not config.enable:
            return None
        context = config.context
        return None if context is None or context._shadowing else context._announce_step(note)

    def _announce_step(self, note: int) -> Work:
        states = self._exchange(_ACTIVE + 2 * note)
        active = len(self.active)
        if self._throw and active < len(states):
            self._over = True
            joined = [rank for rank, state in enumerate(states) if state == _JOINED]
            raise UnevenInputsError(
                "Detected at least one rank that exhausted inputs. Throwing across all ranks."
                f" ({_named(joined)} of group {self._group.group_name!r}; this is rank {self._rank})"
            )
        work = self._works.get(active)
        if work is None:
            work = self._works[active] = Work(f"notify_join_context of group {self._group.group_name!r}")
            work.finish([torch.tensor([active], device=self._device)])
        return work

    def _shadow(self) -> bool:
        """Run the main hooks until all ranks have joined; return whether this one joined last."""
        steps = 0
        while self._exchange(_JOINED) and (active := len(self.active)):
            if self._throw:
                self._over = True
                raise UnevenInputsError(
                    f"Rank {self._rank} exhausted all inputs. ({active} of {self._group.size()} ranks of"
                    f" group {self._group.group_name!r} still had some)"
                )
            for hook in self._join_hooks:
                hook.main_hook()
            steps += 1
            if steps == SKEW_THRESHOLD + 1:
                warnings.warn(
                    f"Detected uneven input skew of greater than {SKEW_THRESHOLD}. This means that rank"
                    f" {self._rank} has at least {SKEW_THRESHOLD} fewer inputs than other currently-active"
                    " ranks. This level of skew could lead to performance degradation during training.",
                    stacklevel=3,
                )
        self._over = True
        return steps == 0

    def _exchange(self, mine: int) -> list[int]:
        """Tell all others this rank's state; return the states by rank."""
        self._states[:] = self._none_yet
        self._states[self._rank] = mine
        all_reduce(self._tensor, group=self._group)
        states = self._states.tolist()
        if _FAILED in states:
            self._over = True
            failed = [rank for rank, state in enumerate(states) if state == _FAILED]
            raise JoinInterruptedError(
                f"an exception has ended the join context on {_named(failed)} of group"
                f" {self._group.group_name!r}, so rank {self._rank} leaves it too; see what it says there"
            )
        self.active = tuple(rank for rank, state in enumerate(states) if state % 2 == _ACTIVE)
        self.note = max(states) // 2
        return states

    def _leave(self, error: BaseException) -> None:
        """Tell the others that they need not wait for this rank, without waiting for them.

        Do nothing when they know: when the error is of an operation of the group, which fails on all ranks;
        nor when this rank is being interrupted, and is about to leave the group altogether.
        """
        if self._over or not isinstance(error, Exception) or _is_known_to_all(error):
            return
        self._over = True
        last = torch.zeros(self._group.size(), dtype=self._tensor.dtype)
        last[self._rank] = _FAILED
        with contextlib.suppress(DistError):
            all_reduce(last, group=self._group, async_op=True)


def _config_of(joinable: Joinable) -> JoinConfig:
    config: JoinConfig | None = getattr(joinable, "_join_config", None)
    if config is None:
        if not isinstance(joinable, Joinable):
            raise InvalidArgumentTypeError(f"Join: expected a Joinable, got {type(joinable).__name__}")
        raise InvalidArgumentError(
            f"Check that the {type(joinable)} constructor calls the ``Joinable`` constructor"
        )
    return config


def _the_group(joinables: Sequence[Joinable]) -> ProcessGroup:
    """Return the group of the joinables, which must be the same for all."""
    for joinable in joinables:
        _config_of(joinable)
    groups = [joinable.join_process_group or default_group() for joinable in joinables]
    if any(group is not groups[0] for group in groups):
        raise InvalidArgumentError(
            "Using join context manager with multiple process groups: the joinables have"
            f" {', '.join(map(repr, groups))}"
        )
    return member_group(groups[0], "Join")


def _is_known_to_all(error: BaseException) -> bool:
    """Return whether this error or one of its causes is an error of the group, which all ranks raise."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, DistBackendError):
            return True
        cause = cause.__cause__
    return False


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
