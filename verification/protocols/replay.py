"""Run Python code up to its next operation, given the results of those before.

The code is the product's. What it calls to reach others (a shared word, the store, a lock, a clock) is
replaced by a call of :func:`perform`. That returns the result, if the search has chosen one already, and
otherwise ends the run: the operation is then what the rank does next. So the state of a rank is the list of
results that it has got (a :class:`Point`), and its code is run again from the beginning, or from where it
last said by :func:`turn` what it keeps, to find out what it does with one more. The code must be
deterministic otherwise; so this is done once for each point, however many states of the world have it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from verification.execution import Stop

SLEEP = "sleeps"
"""The operation of whoever waits a moment and looks again: others may go on, which is no pre-emption."""


class Stopped(BaseException):
    """The code has come to an operation whose result is not known yet."""


class Raised(NamedTuple):
    """The result of an operation that raises an error."""

    error: type[BaseException]
    text: str = ""


class Point:
    """A point that a rank's code can come to.

    Args:
        points: all points of the model, by rank and what was kept, those at which runs begin.
        rank: whose code it is.
        kept: what it has kept at its last :func:`turn`; None at the beginning.
        results: of its operations since.

    Attributes:
        number: what distinguishes this point from all others.
        stop: the operation that it does next.
        turned: the point at which it goes on, where this one is a turn.
        ended: whether the code has ended here, by ``outcome``.
    """

    def __init__(self, points: Points, rank: int, kept: Any, results: tuple[Any, ...]) -> None:
        points.count += 1
        self.points, self.number = points, points.count
        self.rank, self.kept, self.results = rank, kept, results
        self.stop: Stop | None = None
        self.turned: Point | None = None
        self.ended = False
        self.outcome: Any = None
        self._after: dict[Any, Point] = {}

    def after(self, result: Any) -> Point:
        """Return the point at which the code is with the result of its next operation."""
        found = self._after.get(result)
        if found is None:
            found = self._after[result] = Point(self.points, self.rank, self.kept, (*self.results, result))
        return found


class Points:
    """The points at which the ranks of a model are."""

    def __init__(self) -> None:
        self.count = 0
        self._first: dict[Any, Point] = {}

    def first(self, rank: int, kept: Any) -> Point:
        """Return the point at which a rank begins, with what it has kept."""
        found = self._first.get((rank, kept))
        if found is None:
            found = self._first[rank, kept] = Point(self, rank, kept, ())
        return found


class Run:
    """A rank's code under way.

    Args:
        point: to which it is known what the code does.
        at_once: performs an operation at once that others cannot tell from a later one; it returns whether it
            did, and the result.

    Attributes:
        point: to which it has come.
        error: by which an operation that is done at once has ended the run.
    """

    def __init__(self, point: Point, at_once: Callable[[str, tuple[Any, ...]], tuple[bool, Any]]) -> None:
        self.point = point
        self.kept = point.kept
        self.error: Exception | None = None
        self._position = 0
        self._at_once = at_once
        self._is_over = False

    def perform(self, kind: str, words: tuple[Any, ...]) -> Any:
        if self._is_over:
            raise Stopped
        point = self.point
        if self._position == len(point.results):
            try:
                done, result = self._at_once(kind, words)
            except Exception as error:  # not for the code that runs, which could hide it
                self._is_over, self.error = True, error
                raise Stopped from error
            point.stop = Stop(kind, words, _line())
            if not done:
                self._is_over = True
                raise Stopped
            point = self.point = point.after(result)
        result = point.results[self._position]
        self._position += 1
        if isinstance(result, Raised):
            raise result.error(result.text)
        return result

    def turn(self, kept: Any) -> NoReturn:
        if not self._is_over:
            self._is_over = True
            self.point.turned = self.point.points.first(self.point.rank, kept)
        raise Stopped

    def is_over(self) -> bool:
        """Return whether it has come to an operation, or a turn."""
        return self._is_over


class _Current:
    run: Run


current = _Current()


def perform(kind: str, *words: Any) -> Any:
    """Do an operation of the rank whose code runs; its words must be hashable."""
    return current.run.perform(kind, words)


def turn(kept: Any) -> NoReturn:
    """Go on as a run does that begins with ``kept``, which has all that the rank's state depends on."""
    current.run.turn(kept)


def resumed() -> Any:
    """Return what the rank kept when it last turned; None if this run is from the beginning."""
    return current.run.kept


def _line() -> str:
    """Return the product's line that does the present operation."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/src/torchestra/" in path:
            module = path.rpartition("/")[2].removesuffix(".py")
            return f"{module}.{frame.f_code.co_name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "the model"
