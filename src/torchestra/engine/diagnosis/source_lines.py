"""Questions about the source of a program: which loops and ``with`` blocks a line is in.

The source is read as a traceback would read it (linecache). Where there is none, or it does not parse,
nothing is known. The program is never run.
"""

from __future__ import annotations

import ast
import linecache
import threading
from dataclasses import dataclass, field
from functools import lru_cache

_MAX_CHARACTERS = 1 << 20

Position = tuple[int, int, int, int]
"""First line, last line, first column, last column, as from ``code.co_positions()``."""


def loops_at(file: str, line: int) -> tuple[tuple[int, int], ...]:
    """Return the loops of its function that a line is in, as their first and last lines, innermost first."""
    source = _source(file)
    found = (each for each in source.loops if each[0] <= line <= each[1] and source.are_of_one(each[0], line))
    return tuple(sorted(found, reverse=True))


def acquired_at(file: str, line: int, position: Position | None) -> list[ast.expr]:
    """Return the expressions whose value a line may enter as a context, or call ``acquire`` of.

    Args:
        position: of the instruction that the thread is in, where it is known: then only those there.
    """
    source = _source(file)
    acquisitions = [each for *_, each in source.contexts]
    acquisitions += [each for _, method, each in source.calls if method == "acquire"]
    found = [each for each in acquisitions if each.lineno <= line <= (each.end_lineno or each.lineno)]
    if position is None:
        return found
    return [each for each in found if _covers(each, position)]


def held_at(file: str, line: int, position: Position | None = None) -> list[ast.expr]:
    """Return the expressions whose value a function holds as a context, or has acquired, at a line.

    What is acquired by a call counts as held until a later line of the function calls ``release`` of it.

    Args:
        position: of the instruction that the thread is in, where it is known: it does not yet hold what it
            enters there, and holds what was acquired before on the same line.
    """
    source = _source(file)
    held = [
        expression
        for begins, first, last, expression in source.contexts
        if first <= line <= last
        and source.are_of_one(begins, line)
        and (position is None or not _covers(expression, position))
    ]
    calls: dict[str, tuple[str, ast.expr]] = {}  # by expression: the last call before the line
    for number, method, lock in source.calls:
        if (number < line or _is_before(lock, line, position)) and source.are_of_one(number, line):
            calls[ast.unparse(lock)] = method, lock
    return held + [lock for method, lock in calls.values() if method == "acquire"]


def _is_before(expression: ast.expr, line: int, position: Position | None) -> bool:
    """Return whether an expression is on a line, before an instruction there."""
    if position is None or expression.end_lineno != line:
        return False
    return (line, expression.end_col_offset or 0) <= (position[0], position[2])


def _covers(expression: ast.expr, position: Position) -> bool:
    """Return whether an instruction is that of an expression, or of the call of its method."""
    first, last, column, end = position
    starts = (first, column) <= (expression.lineno, expression.col_offset)
    return starts and (expression.end_lineno or 0, expression.end_col_offset or 0) <= (last, end)


@dataclass
class _Source:
    """What is of interest in a source file, by line.

    Attributes:
        functions: first and last lines.
        loops: first and last lines.
        contexts: of ``with`` statements: the line, first and last of the body, what is entered.
        calls: of ``acquire`` and ``release``, in order: the line, which of the two, of which expression.
    """

    functions: list[tuple[int, int]] = field(default_factory=list)
    loops: list[tuple[int, int]] = field(default_factory=list)
    contexts: list[tuple[int, int, int, ast.expr]] = field(default_factory=list)
    calls: list[tuple[int, str, ast.expr]] = field(default_factory=list)

    def are_of_one(self, line: int, other: int) -> bool:
        """Return whether two lines are of the same function, or of none."""
        return self._function_of(line) == self._function_of(other)

    def _function_of(self, line: int) -> tuple[int, int] | None:
        return max((each for each in self.functions if each[0] <= line <= each[1]), default=None)


def _source(file: str) -> _Source:
    return _read("".join(linecache.getlines(file)))


# Before Python 3.12 two threads that parse at once may disturb each other: SystemError, "AST constructor
# recursion depth mismatch".
_parsing = threading.Lock()


@lru_cache(maxsize=64)
def _read(text: str) -> _Source:
    found = _Source()
    try:
        with _parsing:
            tree = ast.parse(text if len(text) <= _MAX_CHARACTERS else "")
    except (SyntaxError, ValueError, RecursionError):
        return found
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.functions.append((node.lineno, node.end_lineno or node.lineno))
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
            found.loops.append((node.lineno, node.body[-1].end_lineno or node.lineno))
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            body = node.body[0].lineno, node.body[-1].end_lineno or node.lineno
            found.contexts += [(node.lineno, *body, item.context_expr) for item in node.items]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("acquire", "release")
        ):
            found.calls.append((node.lineno, node.func.attr, node.func.value))
    found.calls.sort(key=lambda call: call[0])
    return found
