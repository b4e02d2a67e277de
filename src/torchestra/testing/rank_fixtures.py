"""Fixtures made on a rank that is a thread.

pytest keeps one value per fixture and test, so each thread rank makes its own: with the same functions, from
the same definitions, in the same order, torn down in reverse.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchestra.testing.marker import is_per_rank


class RankFixtures:
    """The fixtures of one test on one rank. A context manager that tears them down at exit.

    Args:
        rank: the rank that the fixtures belong to.
        instance: this rank's own instance of the test's class, or None.
    """

    def __init__(self, item: pytest.Function, rank: int, instance: object | None) -> None:
        self.item = item
        self.rank = rank
        self.instance = instance
        self.finalizers = contextlib.ExitStack()
        self._values: dict[tuple[str, int], Any] = {}

    def __enter__(self) -> RankFixtures:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.finalizers.__exit__(*exc_info)

    def arguments(self) -> dict[str, Any]:
        """Make all fixtures that the test uses; return those that it takes as arguments."""
        info = self.item._fixtureinfo
        for name in info.initialnames:
            self.value(name)
        return {name: self.value(name) for name in info.argnames}

    def value(self, name: str, below: int = 0) -> Any:
        """Return the value of a fixture.

        Args:
            below: how many definitions of the same name to skip, the innermost first: a fixture that asks for
                its own name means the one that it overrides.
        """
        params = self._params()
        if name in params and name not in self.item._fixtureinfo.name2fixturedefs:
            return params[name]
        definitions = self.item._fixtureinfo.name2fixturedefs.get(name, ())
        if len(definitions) <= below:
            raise LookupError(
                f"fixture {name!r} is not known to {self.item.nodeid} when it is collected, and on a rank"
                " that is a thread no others can be asked for"
            )
        definition = definitions[-1 - below]
        if name == "tmp_path":
            return self._own_directory()
        if not is_per_rank(definition):
            return self.item.funcargs[name]
        key = (name, below)
        if key not in self._values:
            self._values[key] = self._make(definition, name, below)
        return self._values[key]

    def _make(self, definition: pytest.FixtureDef[Any], name: str, below: int) -> Any:
        request = RankRequest(self, name, below)
        arguments: dict[str, Any] = {}
        for argument in definition.argnames:
            if argument == "request":
                arguments[argument] = request
            else:
                arguments[argument] = self.value(argument, below + 1 if argument == name else 0)
        function: Callable[..., Any] = definition.func
        if self.instance is not None:
            owner = getattr(function, "__self__", None)
            if owner is not None and isinstance(self.instance, type(owner)):
                function = getattr(function, "__func__").__get__(self.instance)  # noqa: B009
            elif _is_method(function, type(self.instance)):
                function = function.__get__(self.instance)
        if inspect.isgeneratorfunction(function):
            generator = function(**arguments)
            try:
                value = next(generator)
            except StopIteration:
                raise ValueError(f"{name} did not yield a value") from None
            self.finalizers.callback(_finish, generator, name)
            return value
        return function(**arguments)

    def _params(self) -> dict[str, Any]:
        callspec = getattr(self.item, "callspec", None)
        return {} if callspec is None else callspec.params

    def _own_directory(self) -> Any:
        own = Path(str(self.item.funcargs["tmp_path"])) / f"rank{self.rank}"
        own.mkdir(exist_ok=True)
        return own


class RankRequest:
    """The ``request`` of a fixture on a rank that is a thread."""

    def __init__(self, fixtures: RankFixtures, name: str, below: int) -> None:
        item = fixtures.item
        self._fixtures = fixtures
        self._below = below
        self.fixturename = name
        self.scope = "function"
        self.rank = fixtures.rank
        self.node = item
        self.config = item.config
        self.session = item.session
        self.keywords = item.keywords
        self.path = item.path
        self.function = item.function
        self.module = item.module
        self.cls = item.cls
        self.instance = fixtures.instance
        self.fixturenames = item.fixturenames

    @property
    def param(self) -> Any:
        """Return the fixture's parameter.

        Raises:
            AttributeError: the fixture has no parameter.
        """
        params = self._fixtures._params()
        if self.fixturename not in params:
            raise AttributeError(f"fixture {self.fixturename!r} has no parameter")
        return params[self.fixturename]

    def getfixturevalue(self, argname: str) -> Any:
        """Return the value of another fixture that is visible to the test."""
        below = self._below + 1 if argname == self.fixturename else 0
        return self._fixtures.value(argname, below)

    def addfinalizer(self, finalizer: Callable[[], object]) -> None:
        """Register a function to call when the fixtures of this rank are torn down."""
        self._fixtures.finalizers.callback(finalizer)

    def applymarker(self, marker: str | pytest.MarkDecorator) -> None:
        """Mark the test."""
        self.node.add_marker(marker)


def _is_method(function: Callable[..., Any], owner: type) -> bool:
    attribute = inspect.getattr_static(owner, getattr(function, "__name__", ""), None)
    unwrapped = getattr(attribute, "_get_wrapped_function", lambda: attribute)
    return attribute is not None and unwrapped() is function


def _finish(generator: Any, name: str) -> None:
    try:
        next(generator)
    except StopIteration:
        return
    raise ValueError(f"fixture function has more than one 'yield': {name}")
