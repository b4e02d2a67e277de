"""A rank of a notebook: runs one cell after another in the same namespace, until the notebook is gone."""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import linecache
import os
import signal
import socket
import sys
import traceback
import types
from dataclasses import dataclass
from typing import Any, Union

from torchestra.errors import GroupAbortedError
from torchestra.interop import rank_world
from torchestra.launcher.channel import receive, send
from torchestra.system.readable import is_readable
from torchestra.system.user_frames import end_in_users_code


@dataclass(frozen=True)
class ReadyForCells:
    """A rank is ready for cells. ``token`` proves that the notebook started it."""

    rank: int
    token: str


@dataclass(frozen=True)
class Cell:
    """Python source to run; ``number`` is the cell's number in tracebacks."""

    number: int
    source: str


@dataclass(frozen=True)
class CellEnd:
    """A cell has ended on a rank.

    Attributes:
        summary: the exception in one line, empty if there was none.
        traceback: the exception's traceback.
        consequence: whether the exception says that another rank is gone, so that rank is the cause.
        sequence: how many operations the default group has run; None without a default group.
    """

    summary: str = ""
    traceback: str = ""
    consequence: bool = False
    sequence: int | None = None


@dataclass(frozen=True)
class Leave:
    """Leave all groups, so that ranks that wait for this one get an error. The rank does not answer."""


@dataclass(frozen=True)
class Join:
    """Leave all groups, and make a default group, meeting in a directory. The rank answers with CellEnd."""

    directory: str


@dataclass(frozen=True)
class Interrupt:
    """End the order before this one, also if it has not begun. A SIGINT follows, for one that has."""


Order = Union[Cell, Leave, Join]


@dataclass(frozen=True)
class World:
    """The world that the ranks are in.

    Attributes:
        name: the library whose default group they join (see :mod:`torchestra.interop.world_names`).
        size: how many ranks there are.
        timeout_s: how long operations of the default group may wait, in seconds.
    """

    name: str
    size: int
    timeout_s: float


def serve_cells(path: str, token: str, world: World) -> None:
    """Run a rank: connect to the notebook's socket at ``path``, and carry out its orders."""
    notebook = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    notebook.connect(path)
    rank_world.prepare_process(world.name)
    runner = _Runner(world, int(os.environ["RANK"]), notebook)
    send(notebook, ReadyForCells(runner.rank, token))
    while (message := receive(notebook)) is not None:
        order: Order | Interrupt = message.content
        if isinstance(order, Interrupt):  # of an order that has ended
            continue
        if isinstance(order, Leave):
            rank_world.leave(world.name)
            continue
        end = runner.join(order.directory) if isinstance(order, Join) else runner.run(order)
        sys.stdout.flush()
        sys.stderr.flush()
        send(notebook, end)
    rank_world.leave(world.name)


class _Runner:
    """Runs the cells of one rank. A SIGINT interrupts only a running cell."""

    def __init__(self, world: World, rank: int, notebook: socket.socket) -> None:
        self.rank = rank
        self._world = world
        self._notebook = notebook
        self._interruptible = False
        main = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = sys.modules["builtins"]
        sys.modules["__main__"] = main
        self._namespace: dict[str, Any] = main.__dict__
        signal.signal(signal.SIGINT, self._on_interrupt)
        faulthandler.enable()

    def _on_interrupt(self, signum: int, frame: object) -> None:
        if self._interruptible:
            raise KeyboardInterrupt

    def _interrupted_before(self) -> bool:
        """Return whether the notebook has interrupted this order already, when a SIGINT had no effect."""
        if not is_readable(self._notebook, 0.0):
            return False
        message = receive(self._notebook)  # until this order's answer, nothing else is sent
        return message is not None and isinstance(message.content, Interrupt)

    def join(self, directory: str) -> CellEnd:
        """Leave all groups and make a new default group."""
        with contextlib.suppress(Exception):
            rank_world.leave(self._world.name)
        return self._attempt(self._join, directory)

    def run(self, cell: Cell) -> CellEnd:
        """Run a cell; print the value of its last expression, as a notebook does."""
        name = f"cell {cell.number} of the ranks"
        lines = cell.source.splitlines(keepends=True)
        linecache.cache[name] = (len(cell.source), None, lines, name)
        return self._attempt(self._execute, cell.source, name)

    def _join(self, directory: str) -> None:
        world = self._world
        rank_world.join_as_process(world.name, self.rank, world.size, world.timeout_s, directory)

    def _execute(self, source: str, name: str) -> None:
        tree = ast.parse(source, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), self._namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), self._namespace)
            if value is not None:
                self._namespace["_"] = value
                print(repr(value))

    def _attempt(self, function: Any, *arguments: Any) -> CellEnd:
        try:
            self._interruptible = True
            try:
                if self._interrupted_before():
                    raise KeyboardInterrupt
                function(*arguments)
            finally:
                self._interruptible = False
        except BaseException as error:
            return self._failure(error)
        return CellEnd(sequence=rank_world.sequence_number(self._world.name))

    def _failure(self, error: BaseException) -> CellEnd:
        end_in_users_code(error)
        # Without the frames of this file, which are the outermost.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace))
        summary = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()[0]
        released = isinstance(error, GroupAbortedError)
        return CellEnd(summary, text, released, rank_world.sequence_number(self._world.name))
