"""The notebook's side of its ranks: start them, send them cells, show their output, report how a cell ended.

Everything happens in the thread that runs the cell, in the event loop of the ranks' job. When a rank raises
in a cell and others do not end theirs soon after, they usually wait for it in an operation of a group. Then
the rank leaves its groups, which gives the others an error that names it, and before the next cell all ranks
make a new default group.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TextIO, cast

from torchestra.errors import DistError
from torchestra.launcher.api import started
from torchestra.launcher.channel import receive, send
from torchestra.launcher.failure_report import ranks_phrase
from torchestra.launcher.job import Job
from torchestra.launcher.output import OutputSink
from torchestra.launcher.root_cause import FailedRank, describe_exit
from torchestra.notebook.cells import (
    Cell,
    CellEnd,
    Interrupt,
    Join,
    Leave,
    Order,
    ReadyForCells,
    World,
    serve_cells,
)
from torchestra.system.temporary_folder import temporary_folder

_RELEASE_S = 1.0
"""How long ranks may take to end a cell in which another has failed, before that rank leaves its groups."""
_INTERRUPT_S = 5.0
_START_S = 120.0
_STEP_S = 0.2


class CellFailedError(DistError):
    """A cell failed on a rank, or a rank has died; the message says which and how."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython prints for this error: the ranks' tracebacks, without the notebook's own."""
        return str(self).splitlines()


class CellInterrupted(KeyboardInterrupt):
    """A cell was interrupted on its ranks, which keep running."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython prints for this error."""
        return ["KeyboardInterrupt: the cell was interrupted on the ranks, which keep their variables"]


class _CurrentStream(io.TextIOBase):
    """Writes to the ``sys.stdout`` or ``sys.stderr`` of the moment: that of the running cell."""

    def __init__(self, name: str) -> None:
        self._name = name

    def write(self, text: str) -> int:
        count: int = getattr(sys, self._name).write(text)
        return count

    def flush(self) -> None:
        getattr(sys, self._name).flush()

    def isatty(self) -> bool:
        terminal: bool = getattr(sys, self._name).isatty()
        return terminal


def _current(name: str) -> TextIO:
    return cast("TextIO", _CurrentStream(name))


@contextlib.contextmanager
def _interrupts_counted() -> Iterator[list[int]]:
    """Collect SIGINTs in a list; a KeyboardInterrupt in a callback could lose a rank's answer."""
    interrupts: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # which no SIGINT interrupts
        yield interrupts
        return
    before = signal.signal(signal.SIGINT, lambda signum, frame: interrupts.append(signum))
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


class RankSession:
    """Ranks that run cells.

    Args:
        world: which world the ranks are in, and how many they are.
        joins: whether the ranks make a default group by themselves.

    Attributes:
        closed: whether the ranks have been ended.

    Raises:
        CellFailedError: the ranks could not be started.
    """

    def __init__(self, world: World, joins: bool = True) -> None:
        self.world = world
        self.joins = joins
        self.closed = False
        self._cells = 0
        self._connections: dict[int, socket.socket] = {}
        self._ends: dict[int, CellEnd] = {}
        self._awaited: set[int] = set()
        self._dead: dict[int, str] = {}
        self._left: set[int] = set()  # ranks that were told to leave their groups
        self._token = secrets.token_hex(16)
        self._resources = contextlib.ExitStack()
        self._directory = self._resources.enter_context(temporary_folder("torchestra-ranks-"))
        try:
            self._listener = self._resources.enter_context(
                socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            )
            self._start()
            if joins:
                self._join()
        except BaseException:
            self.close()
            raise

    # -- what the notebook calls

    @property
    def alive(self) -> list[int]:
        """Return the ranks that have not died."""
        return [rank for rank in range(self.world.size) if rank not in self._dead]

    def run(self, source: str, ranks: Sequence[int] | None = None) -> None:
        """Run a cell on ranks, by default on all.

        Raises:
            CellFailedError: the cell failed on a rank; the ranks stay usable.
            CellInterrupted: the cell was interrupted on all of them.
        """
        self._refuse_the_dead()
        if self._left and not self._dead:  # without one of them there is no such group
            self._join()
        self._cells += 1
        dead_before = len(self._dead)
        self._order(Cell(self._cells, source), self.alive if ranks is None else ranks)
        self._raise_failures(dead_before)

    def close(self) -> None:
        """End the ranks; a second call does nothing."""
        self.closed = True
        for connection in self._connections.values():
            with contextlib.suppress(KeyError):  # of a rank that has died
                self._job.loop.unwatch(connection)
            connection.close()
        self._connections.clear()
        self._resources.close()

    # -- starting

    def _start(self) -> None:
        path = os.path.join(self._directory, "socket")
        self._listener.bind(path)
        self._listener.listen(self.world.size)
        self._listener.setblocking(False)
        sinks = OutputSink(_current("stdout")), OutputSink(_current("stderr"))
        call = (path, self._token, self.world)
        job = self._resources.enter_context(started(serve_cells, self.world.size, call, {}, sinks))
        self._job: Job = job
        job.when_survived = self._note_death
        job.loop.watch(self._listener, self._accept)
        deadline = time.monotonic() + _START_S
        while len(self._connections) + len(self._dead) < self.world.size:
            if time.monotonic() > deadline or job.stopping:
                raise CellFailedError(f"the ranks did not start within {_START_S:g} s")
            job.step(time.monotonic() + _STEP_S)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        message = receive(connection)
        hello = None if message is None else message.content
        if not isinstance(hello, ReadyForCells) or not secrets.compare_digest(hello.token, self._token):
            connection.close()
            return
        self._connections[hello.rank] = connection
        self._job.loop.watch(connection, partial(self._receive, hello.rank))

    def _join(self) -> None:
        """Make all ranks form their default group, a new one if they had one."""
        again = bool(self._left)
        directory = tempfile.mkdtemp(dir=self._directory)
        self._left.clear()
        dead_before = len(self._dead)
        self._order(Join(directory), self.alive)
        self._raise_failures(dead_before)
        if again:
            print("torchestra: the ranks have a new default group; other groups are gone")

    # -- a cell

    def _order(self, order: Order, ranks: Sequence[int]) -> None:
        """Send an order to ranks, and drive the job until each has answered or died."""
        with _interrupts_counted() as interrupts:
            self._ends = {}
            self._awaited = set(ranks)
            for rank in ranks:
                self._send(rank, order)
            self._await_ends(interrupts)
            self._job.show_all()
        if interrupts:
            self._left.update(ranks if self.joins else ())
            raise CellInterrupted

    def _await_ends(self, interrupts: list[int]) -> None:
        failed_since: float | None = None
        interrupted_at: float | None = None
        while self._awaited:
            self._job.step(time.monotonic() + _STEP_S)
            now = time.monotonic()
            if failed_since is None and any(end.summary for end in self._ends.values()):
                failed_since = now
            if failed_since is not None and now > failed_since + _RELEASE_S:
                self._release()
            if interrupts and interrupted_at is None:
                interrupted_at = now
                self._interrupt()
            late = interrupted_at is not None and now > interrupted_at + _INTERRUPT_S
            if late or len(interrupts) > 1:
                self._give_up()

    def _interrupt(self) -> None:
        """Interrupt the cell on all ranks, also on those that have not begun it."""
        for rank in self._awaited:
            self._send(rank, Interrupt())
        self._job.signal(signal.SIGINT, final=False)

    def _send(self, rank: int, order: Order | Interrupt) -> None:
        with contextlib.suppress(OSError):  # the rank has died, which is reported separately
            send(self._connections[rank], order)

    def _receive(self, rank: int) -> None:
        message = receive(self._connections[rank])
        if message is None:
            self._job.loop.unwatch(self._connections[rank])
            return
        self._ends[rank] = message.content
        self._awaited.discard(rank)

    def _note_death(self, failed: FailedRank) -> None:
        self._dead[failed.rank] = describe_exit(failed.exit_code)
        self._awaited.discard(failed.rank)

    def _release(self) -> None:
        """Make the ranks that have ended the cell leave their groups, because the others wait for them."""
        for rank in self._ends.keys() - self._left:
            self._left.add(rank)
            self._send(rank, Leave())

    def _give_up(self) -> None:
        """End the ranks, because some do not return from an interrupt."""
        late = sorted(self._awaited)
        self.close()
        raise CellFailedError(
            f"{ranks_phrase(late)} did not come back from the interrupt, and all ranks have been ended;"
            " the next %%ranks N starts new ones"
        )

    # -- how it ended

    def _refuse_the_dead(self) -> None:
        if self._dead and not self.alive:
            self.close()
            raise CellFailedError(f"{self._deaths()}; %%ranks {self.world.size} starts new ranks")

    def _deaths(self) -> str:
        size = self.world.size
        return "; ".join(f"rank {rank} of {size} has died: {how}" for rank, how in self._dead.items())

    def _raise_failures(self, dead_before: int) -> None:
        """Raise an error if a rank failed or died in the cell; its text has the causes last."""
        failed = {rank: end for rank, end in sorted(self._ends.items()) if end.summary}
        numbers = {end.sequence for end in self._ends.values()}
        if failed and len(numbers) > 1 and self.joins:
            self._left.update(self._ends)  # some ranks have called operations that others have not
        ranks_by_text: dict[str, list[int]] = {}
        for rank, end in sorted(failed.items(), key=lambda item: not item[1].consequence):
            text = f"was released: {end.summary}" if end.consequence else end.traceback
            ranks_by_text.setdefault(text, []).append(rank)
        lines = [
            f"[{ranks_phrase(ranks)}] {line}"
            for text, ranks in ranks_by_text.items()
            for line in text.splitlines()
        ]
        if self._dead:
            lines.append(
                f"torchestra: {self._deaths()}; the others keep their variables, %ranks_stop ends them"
            )
        if failed or len(self._dead) > dead_before:
            raise CellFailedError("\n".join(lines))
        for line in lines:
            print(line, file=sys.stderr)
