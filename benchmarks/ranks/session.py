"""A rank's protocol with the driver: one JSON object per line over a socket.

Between two commands a rank is blocked in a read of that socket, so that a peer which waits for its
turn costs the peer that is being measured nothing.

=================================================  ==============================================
the driver says                                    the rank answers
=================================================  ==============================================
(nothing; the rank begins)                         ``rank``, ``world``, ``description``
``do: prepare``, slot, operation, size, memory     nothing but that it is done
``do: time``, slot, batch, batches, warmup, dirty  ``means``: nanoseconds per operation, per batch
``do: check``, slot                                ``right``: whether the result was what it must be
``do: release``, slot                              nothing but that it is done
``do: quit``                                       nothing; the rank leaves
=================================================  ==============================================

Where something is raised the answer is ``error``. When the driver is gone, the rank leaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import traceback
from functools import partial
from typing import Any

from .member import Member, Prepared
from .shapes import Pattern, pieces
from .timing import timed, timed_dirtied

__all__ = ["SOCKET_VARIABLE", "main"]

SOCKET_VARIABLE = "TORCHESTRA_BENCH_SOCKET"
"""The environment variable with the name of the driver's socket (without the 0 byte that is before it)."""

_UNTOUCHED = -1.0
_BARRIER_FROM_BYTES = 256 << 10
_LEAVE_SECONDS = 10


class _Slot:
    """One prepared operation, and what its result must be."""

    def __init__(self, prepared: Prepared, operation: str, size: int) -> None:
        self.prepared = prepared
        self.operation = operation
        self.size = size


class _Session:
    def __init__(self, member: Member) -> None:
        self._member = member
        self._slots: dict[str, _Slot] = {}
        self._pattern = Pattern(member.world)

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        do, slot = command["do"], command["slot"]
        if do == "prepare":
            operation, size = command["operation"], command["size"]
            prepared = self._member.prepare(operation, size, command["memory"], slot)
            self._slots[slot] = _Slot(prepared, operation, size)
            return {}
        if do == "time":
            return {"means": self._time(self._slots[slot], command)}
        if do == "check":
            return {"right": self._check(self._slots[slot])}
        assert do == "release", do
        self._slots.pop(slot, None)
        return {}

    def _time(self, slot: _Slot, command: dict[str, Any]) -> list[float]:
        prepared, given = slot.prepared, slot.prepared.given
        self._member.barrier()
        timed(prepared.calls, command["batch"], command["warmup"])
        if command.get("dirty") and given is not None and given.size:
            # Where ranks share cores some write while others would wait; that is no part of the operation.
            barrier = self._member.barrier if given.nbytes >= _BARRIER_FROM_BYTES else None
            write = partial(given.fill, 1.0)
            means = timed_dirtied(prepared.calls, write, barrier, command["batch"], command["batches"])
        else:
            means = timed(prepared.calls, command["batch"], command["batches"])
        return [round(mean / prepared.transfers, 2) for mean in means]

    def _check(self, slot: _Slot) -> bool:
        member, prepared = self._member, slot.prepared
        if prepared.result is not None:
            prepared.result.fill(_UNTOUCHED)
        if prepared.given is not None:
            self._pattern.fill(prepared.given, member.rank)
        member.barrier()
        for call in prepared.calls:
            call()
        if prepared.result is None:
            return True
        expected = pieces(slot.operation, member.rank, member.world, slot.size)
        return self._pattern.holds(prepared.result, expected)


def _member(kind: str) -> Member:
    if kind == "mpi":
        from .mpi_member import MpiMember

        return MpiMember()
    if kind == "memory":
        from .memory_member import MemoryMember

        return MemoryMember()
    if kind not in ("gloo", "torchestra"):
        raise ValueError(f"there is no kind of rank called {kind!r}")
    import torch

    from .torch_member import TorchMember

    if kind == "gloo":
        import torch.distributed

        return TorchMember(torch.distributed, f"torch {torch.__version__}", "gloo")
    import torchestra

    version = getattr(torchestra, "__version__", "")
    return TorchMember(
        torchestra, f"torchestra {version}, torch {torch.__version__}".replace(" ,", ","), None
    )


def main(kind: str) -> None:
    """Join the peer ``kind``, then do what the driver says until it says quit."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect("\0" + os.environ[SOCKET_VARIABLE])
    lines = connection.makefile("r", encoding="utf-8")

    def tell(message: dict[str, Any]) -> None:
        connection.sendall(json.dumps(message).encode() + b"\n")

    try:
        member = _member(kind)
        session = _Session(member)
    except BaseException as error:
        tell({"error": f"{type(error).__name__}: {error}"})
        raise
    tell({"rank": member.rank, "world": member.world, "description": member.description})
    for line in lines:
        command = json.loads(line)
        if command["do"] == "quit":
            break
        try:
            reply = session.answer(command)
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        with contextlib.suppress(BrokenPipeError):
            tell(reply)
    # Leaving takes all ranks; if the driver is gone, nobody but the alarm ends those that wait in vain.
    signal.alarm(_LEAVE_SECONDS)
    member.close()
