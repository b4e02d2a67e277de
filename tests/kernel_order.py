"""Running the ranks of a world in any order: one kernel at a time, each until it would have to wait.

A kernel goes on without looking at the others until it meets a wait that is not over; so whatever can happen
between ranks, short of two copies at the very same moment, is one of the orders in which their kernels can be
called when no wait blocks. :class:`KernelScheduler` calls them in an order that a seed decides, the same each
time. A protocol that relies on luck, say on a reader being faster than a writer, fails in some of these.
"""

from __future__ import annotations

import random
import threading
from types import FunctionType, ModuleType
from typing import Any

from torchestra.engine import layout as at
from torchestra.engine import local
from torchestra.engine.local import LocalEngine
from torchestra.engine.membership.rank_context import RankContext
from torchestra.engine.native.atomics import kernel
from torchestra.engine.native.kernel import Kernel, NativeKernel, entry_point

# The attributes of an engine's kernels, and what they hold.
KERNELS: dict[str, Any] = {
    name: kernel for name, kernel in local.KERNELS.items() if name != "all_reduce_iovec"
}

_LIMIT_S = 60.0


class Deadlock(Exception):
    """All ranks wait, and none for anything that will come."""


class KernelScheduler:
    """Who may call a kernel. Every rank calls :meth:`attach` once, and :meth:`leave` at its end."""

    def __init__(self, size: int, seed: int) -> None:
        self.calls = 0
        self._size = size
        self._random = random.Random(seed)
        self._changed = threading.Condition()
        self._playing = set(range(size))
        self._ready: set[int] = set()
        self._turn: int | None = None
        self._in_vain: set[int] = set()  # who has waited since anybody has got any further
        self._progress: list[int] = []
        self._failed = False

    def attach(self, engine: LocalEngine, kernels: dict[str, Kernel] | None = None) -> None:
        """Have the engine call its kernels (or these instead) when it is its turn, and never wait in one."""
        context = engine.context
        context.store_word(at.SPINS, 0)
        context.store_word(at.YIELDS, 0)
        context.sleep_times.set(0.0)
        for name in KERNELS:
            kernel = (kernels or {}).get(name) or getattr(engine.kernels, name)
            setattr(engine.kernels, name, self._in_turn(context, kernel))

    def leave(self, rank: int) -> None:
        """The rank calls no more kernels."""
        with self._changed:
            self._playing.discard(rank)
            self._pick()

    def _in_turn(self, context: RankContext, kernel: Kernel) -> Kernel:
        rank, arena = context.rank, context.arena

        def call(*arguments: int) -> int:
            while True:
                with self._changed:
                    self._ready.add(rank)
                    self._pick()
                    if not self._changed.wait_for(lambda: self._turn == rank or self._failed, _LIMIT_S):
                        raise Deadlock(f"rank {rank} was not given its turn")
                    if self._failed:
                        raise Deadlock("all ranks wait in vain")
                    self._ready.discard(rank)
                    self.calls += 1
                code = kernel(*arguments)
                with self._changed:
                    self._turn = None
                    now = [arena.progress(peer) for peer in range(self._size)]
                    if now != self._progress or code != at.PENDING:
                        self._in_vain.clear()
                    self._progress = now
                    if code == at.PENDING:
                        self._in_vain.add(rank)
                        self._failed = self._in_vain >= self._playing
                        self._changed.notify_all()
                if code != at.PENDING:
                    return code

        return call

    def _pick(self) -> None:
        """When every rank that plays is ready: the next one. One that has waited in vain goes last."""
        if self._turn is None and self._playing and self._ready >= self._playing:
            self._turn = self._random.choice(sorted(self._playing - self._in_vain) or sorted(self._playing))
        self._changed.notify_all()


def rebuilt(module: ModuleType, name: str, **replaced: Any) -> Kernel:
    """A kernel compiled anew with other functions in place of some that it is made of."""
    scope = {**vars(module), **replaced}
    for own, value in vars(module).items():
        if (
            isinstance(value, NativeKernel)
            and value.function.__module__ == module.__name__
            and own not in replaced
        ):
            scope[own] = kernel(FunctionType(value.function.__code__, scope, own))
    return entry_point(scope[name])
