"""``breakpoint``: one rank in Python's debugger, while the others wait for it."""

from __future__ import annotations

import os
import pdb  # noqa: T100
import sys
from collections import Counter
from typing import Any

from torchestra.arguments.annotations import checked
from torchestra.collectives.functions import barrier
from torchestra.types import Timeout
from torchestra.world.init import default_group
from torchestra.world.registry import current_world

_passed: Counter[tuple[int, str, int]] = Counter()


@checked
def breakpoint(rank: int = 0, skip: int = 0, timeout_s: Timeout | None = 3600) -> None:  # noqa: A001
    """Stop one rank in Python's debugger (pdb); the others wait until it goes on. All ranks must call this.

    The debugger reads the rank's standard input, which ``torchestra run`` gives to rank 0; other ranks read
    the terminal. It stops within this function: ``up`` leads to the program, ``c`` goes on.

    Args:
        rank: the global rank to stop.
        skip: pass by the first so many calls on the same line.
        timeout_s: the time-out that all groups of this rank have from now on, so that nobody's operation ends
            meanwhile; None leaves them.

    Raises:
        InvalidArgumentError: there is no such rank.
    """
    group = default_group()
    group.to_group_rank(rank, "rank", "breakpoint")
    caller = _caller()
    site = (group.rank(), caller.f_code.co_filename, caller.f_lineno)
    _passed[site] += 1
    if _passed[site] <= skip:
        return
    if timeout_s is not None:
        for each in current_world().groups.values():
            each.set_timeout(timeout_s)
    if group.rank() == rank:
        _stop(rank)
    barrier()


def _caller() -> Any:
    """Return the frame that has called :func:`breakpoint`, below the checks of arguments."""
    frame: Any = sys._getframe(1)
    package = os.path.dirname(os.path.dirname(__file__))
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame = frame.f_back
    return frame


def _stop(rank: int) -> None:
    terminal = _input()
    debugger = pdb.Pdb(stdin=terminal, stdout=sys.stdout, nosigint=True)
    debugger.message(
        f"torchestra.breakpoint: rank {rank} has stopped; `up` leads to the program, `c` goes on"
    )
    debugger.set_trace()


def _input() -> Any:
    """Return this rank's standard input, or the terminal if it has none."""
    try:
        if os.path.samestat(os.fstat(sys.stdin.fileno()), os.stat(os.devnull)):
            return open("/dev/tty")
    except (OSError, ValueError):  # no file, or no terminal
        pass
    return sys.stdin
