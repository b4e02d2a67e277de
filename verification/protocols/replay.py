"""Run Python code up to its next operation, given the results of those before.

The code is the product's. What it calls to reach others (a shared word, the store, a lock, a clock) is
replaced by a call of :func:`perform`. That returns the result, if the search has chosen one already, and
otherwise ends the run: the operation is then what the rank does next. So the state of a rank is the list of
results that it has got, and its code is run again from the beginning, or from where it last said by
:func:`turn` what it keeps, to find out what it does with one more. The code must be deterministic otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from verification.world import Stop

SLEEP = "sleeps"
"""The operation of whoever waits a moment and looks again: others may go on, which is no pre-emption."""


class Stopped(BaseException):
    """The code has come to an operation whose result is not known yet."""


class Raised(NamedTuple):
    """The result of an operation that raises an error."""

    error: type[BaseException]
    text: str = ""


class Run:
    """A rank's code under way.

    Args:
        kept: what it has kept at its last :func:`turn`; None at the beginning.
        results: of its operations since, which this may add to.
        at_once: performs an operation at once that others cannot tell from a later one; it returns whether it
            did, and the result.

    Attributes:
        stop: the operation that it has come to.
        turned: whether it ended at a turn, and ``kept`` is new.
    """

    def __init__(
        self, kept: Any, results: list[Any], at_once: Callable[[str, tuple[Any, ...]], tuple[bool, Any]]
    ) -> None:
        self.kept, self.results = kept, results
        self.stop: Stop | None = None
        self.turned = False
        self._position = 0
        self._at_once = at_once

    def perform(self, kind: str, words: tuple[Any, ...]) -> Any:
        if self.stop is not None or self.turned:
            raise Stopped
        if self._position == len(self.results):
            done, result = self._at_once(kind, words)
            if not done:
                self.stop = Stop(kind, words, _line())
                raise Stopped
            self.results.append(result)
        result = self.results[self._position]
        self._position += 1
        if isinstance(result, Raised):
            raise result.error(result.text)
        return result

    def turn(self, kept: Any) -> NoReturn:
        if self.stop is None:
            self.turned, self.kept = True, kept
        raise Stopped


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
