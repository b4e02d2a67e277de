"""The magics ``%%ranks``, ``%ranks_top`` and ``%ranks_stop``."""

from __future__ import annotations

import argparse
import atexit
import shlex
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from torchestra.interop.world_names import TORCH, TORCHESTRA
from torchestra.notebook.cells import World
from torchestra.notebook.live_view import LiveView, TextOutput, ViewOutput, WidgetOutput
from torchestra.notebook.session import RankSession

_TIMEOUT_S = 300.0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(f"%%ranks: {message}\n{self.format_usage()}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("%%ranks", add_help=False)
    parser.add_argument("size", nargs="?", type=int, metavar="N")
    parser.add_argument("--on", metavar="RANKS")
    parser.add_argument("--world", choices=(TORCHESTRA, TORCH))
    parser.add_argument("--timeout", type=float, metavar="SECONDS")
    parser.add_argument("--no-init", action="store_true")
    return parser


@magics_class
class RanksMagics(Magics):
    """Cells that run on ranks."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._session: RankSession | None = None
        self._view: LiveView | None = None
        self._told_of_text = False
        atexit.register(self.close)

    @cell_magic
    def ranks(self, line: str, cell: str) -> None:
        """Run the cell on ranks, which are processes that keep their variables from cell to cell.

        ``%%ranks 4`` starts four if there are none; ``%%ranks`` uses the existing ranks. Their output appears
        at once, by rank; so does the value of the cell's last expression. The ranks are in a default group
        when their first cell begins.

        ``--on 0,2``: run on these ranks only. ``--world torch``: in torch.distributed's default group, on
        torchestra's engine, instead of torchestra's. ``--timeout 20``: seconds that operations may wait, 300
        by default. ``--no-init``: make no group; cells call init_process_group themselves.

        An interrupt interrupts the cell on all ranks. All ranks stay usable after an exception on one.
        """
        try:
            asked = _parser().parse_args(shlex.split(line))
        except ValueError as error:
            raise UsageError(f"%%ranks: {error}") from None
        session = self._session_for(asked)
        try:
            session.run(cell, None if asked.on is None else _ranks_in(asked.on, session))
        finally:
            if session.closed:
                self._session = None

    @line_magic
    def ranks_stop(self, line: str = "") -> None:
        """End the ranks; the next ``%%ranks N`` starts new ones."""
        self.stop()

    @line_magic
    def ranks_top(self, line: str = "") -> None:
        """Show below this cell what this notebook's ranks do, anew every second: those of the job that it
        started last, by ``%%ranks`` or :func:`torchestra.launch`.

        Called again, it shows them below the new cell only; ``%ranks_top off`` ends the view, which stays as
        it is. Without ipywidgets it is text, and has no pages of single ranks.
        """
        if line.strip() not in ("", "off"):
            raise UsageError(f"%ranks_top: takes no argument but off, got {line.strip()!r}")
        if not hasattr(self.shell, "kernel"):
            raise UsageError("%ranks_top: this is no notebook; run `torchestra top` in another terminal")
        self._close_view()
        if line.strip() != "off":
            self._view = LiveView(self._output())

    def stop(self) -> None:
        """End the ranks, if there are any."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def close(self) -> None:
        """End the ranks, and the view of ``%ranks_top``."""
        self._close_view()
        self.stop()

    def _close_view(self) -> None:
        view, self._view = self._view, None
        if view is not None:
            view.close()

    def _output(self) -> ViewOutput:
        try:
            return WidgetOutput()
        except ImportError:
            if not self._told_of_text:
                self._told_of_text = True
                print(
                    "torchestra: ipywidgets is not installed, so ranks are shown as text;"
                    " pip install 'torchestra[notebook]' for pages of each rank"
                )
            return TextOutput()

    def _session_for(self, asked: argparse.Namespace) -> RankSession:
        session = self._session
        if session is None:
            if asked.size is None or asked.size < 1:
                raise UsageError("%%ranks: there are no ranks yet; say how many, as in %%ranks 4")
            world = World(asked.world or TORCHESTRA, asked.size, asked.timeout or _TIMEOUT_S)
            self._session = session = RankSession(world, joins=not asked.no_init)
            return session
        world, joins = session.world, session.joins
        differing = (
            (asked.size not in (None, world.size) and f"there are {world.size} ranks")
            or (asked.world not in (None, world.name) and f"the ranks are in the world {world.name!r}")
            or (asked.timeout not in (None, world.timeout_s) and f"their time-out is {world.timeout_s:g} s")
            or (asked.no_init and joins and "the ranks are in a default group")
        )
        if differing:
            raise UsageError(f"%%ranks: {differing}; end them with %ranks_stop first to start others")
        return session


def _ranks_in(text: str, session: RankSession) -> list[int]:
    try:
        ranks = sorted({int(each) for each in text.split(",")})
    except ValueError:
        raise UsageError(f"%%ranks: --on takes ranks as in --on 0,2, got {text!r}") from None
    if not set(ranks) <= set(session.alive):
        raise UsageError(f"%%ranks: --on {text}: the ranks are {', '.join(map(str, session.alive))}")
    return ranks
