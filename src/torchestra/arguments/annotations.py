"""Refuse arguments that a public function's annotations do not allow, before the function begins.

:func:`checked` decorates functions whose calls may take a microsecond more; the collectives and messages on
tensors, which may not, check theirs in the general way of their communicator (checks.py).

A parameter takes the types in its annotation. Integers may be NumPy's, and arrive as ints; lists may be
tuples, and lists of numbers arrays or sets; 0 and 1 are accepted as booleans, but booleans not as numbers.
Durations are checked for their range, too (:func:`timeout_seconds`). The function itself has to check all
other conditions.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import numbers
import operator
import sys
import types
import typing
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar, Union

from torchestra.errors import InvalidArgumentTypeError, shown
from torchestra.types import timeout_seconds

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Class = TypeVar("_Class", bound=type)
_UNIONS = (Union, types.UnionType)
_LISTS = (list, tuple, collections.abc.Sequence)


def refuse_type(name: str, parameter: str, expected: str, value: object) -> NoReturn:
    """Raise InvalidArgumentTypeError: a function was given a value that its parameter does not take."""
    raise InvalidArgumentTypeError(f"{name}: `{parameter}` must be {expected}, got {shown(value)}")


def check_integer(value: object, parameter: str, name: str) -> int:
    """Return an integer (:func:`is_integer`), as an int."""
    if type(value) is int:
        return value
    if not is_integer(value):
        refuse_type(name, parameter, "an int", value)
    return operator.index(typing.cast(int, value))


def check_flag(value: object, parameter: str, name: str) -> bool:
    """Return a boolean; 0 and 1 are taken as well."""
    if not _is_flag(value):
        refuse_type(name, parameter, "a bool", value)
    return bool(value)


def is_integer(value: object) -> bool:
    """Return whether a value is an integer, NumPy's and those in tensors of one element included; not a
    boolean.
    """
    if type(value) is int:
        return True
    if isinstance(value, numbers.Integral):
        return not isinstance(value, bool)
    if not _is_array(value) or str(getattr(value, "dtype", "")) == "torch.bool":
        return False
    try:
        operator.index(typing.cast(int, value))
    except Exception:  # whatever a foreign __index__ raises
        return False
    return True


def _is_flag(value: object) -> bool:
    if isinstance(value, bool):
        return True
    if isinstance(value, int):
        return value in (0, 1)
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool_", "bool")


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return True
    if is_integer(value):
        return True
    return (
        type(value).__module__ == "numpy" and hasattr(value, "__float__") and getattr(value, "ndim", 1) == 0
    )


class _Rule:
    """Describe the values that one parameter takes.

    Attributes:
        exact: classes whose values are accepted without further checks.
        expected: the same in words.
    """

    def __init__(self, hint: Any) -> None:
        if isinstance(hint, TypeVar) and isinstance(hint.__bound__, type):
            hint = hint.__bound__
        branches = typing.get_args(hint) if typing.get_origin(hint) in _UNIONS else (hint,)
        self.anything = any(branch in (Any, object) or isinstance(branch, TypeVar) for branch in branches)
        self.is_duration = timedelta in branches and float in branches
        self.optional = type(None) in branches
        self.branches = [branch for branch in branches if branch is not type(None)]
        self._accepting = [(_acceptor(branch), branch) for branch in self.branches]
        exact = {
            branch for branch in branches if isinstance(branch, type) and branch not in (timedelta, float)
        }
        self.exact = frozenset(exact - {int} if self.is_duration else exact)
        self.of_tensors = "Tensor" in str(hint)
        self.expected = " or ".join(dict.fromkeys([*map(_words, self.branches), *(["None"] * self.optional)]))

    def taken(self, value: object, parameter: str, name: str) -> Any:
        """Return the value in the form for the function; raise InvalidArgumentError if it is not accepted."""
        if self.anything or (value is None and self.optional):
            return value
        if self.is_duration and not any(
            accepts(value) for accepts, branch in self._accepting if branch not in (timedelta, float, int)
        ):
            timeout_seconds(value, name, parameter)  # type: ignore[arg-type]
            return value
        for accepts, branch in self._accepting:
            if accepts(value):
                return _converted(branch, value)
        if self.of_tensors:  # in torch's words
            raise InvalidArgumentTypeError(
                f"{name}: Invalid function argument. Expected parameter `{parameter}` of type {self.expected}"
                f" but got {shown(value)} instead."
            )
        refuse_type(name, parameter, self.expected, value)


@functools.cache
def _acceptor(hint: Any) -> Callable[[object], bool]:
    """Return what tells whether a value fits an annotation, which is not a union at its top level."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in (Any, object) or isinstance(hint, TypeVar):
        return lambda value: True
    if hint is None or hint is type(None):
        return lambda value: value is None
    if origin in _UNIONS:
        branches = [_acceptor(each) for each in arguments]
        return lambda value: any(accepts(value) for accepts in branches)
    if origin is Literal:
        return lambda value: any(type(each) is type(value) and each == value for each in arguments)
    if origin is collections.abc.Callable:
        return callable
    if origin in _LISTS:
        return functools.partial(_accepts_list, origin, arguments, [_acceptor(each) for each in arguments])
    if origin in (dict, collections.abc.Mapping):
        accepts_key, accepts_value = map(_acceptor, arguments)
        return lambda value: (
            isinstance(value, collections.abc.Mapping)
            and all(accepts_key(key) and accepts_value(each) for key, each in value.items())
        )
    return _SIMPLE.get(hint) or (lambda value: isinstance(value, origin or hint))


_SIMPLE: dict[object, Callable[[object], bool]] = {bool: _is_flag, int: is_integer, float: _is_number}


def _accepts_list(
    origin: type,
    arguments: tuple[Any, ...],
    acceptors: list[Callable[[object], bool]],
    value: object,
) -> bool:
    if type(value) is not list and isinstance(
        value, (str, bytes, bytearray, memoryview, collections.abc.Mapping)
    ):
        return False
    if origin is list and arguments[0] is Any:  # to be filled
        return isinstance(value, list)
    if origin is tuple and arguments[1:] != (...,) and len(arguments) > 1:
        return (
            isinstance(value, tuple)
            and len(value) == len(arguments)
            and all(accepts(each) for accepts, each in zip(acceptors, value, strict=True))
        )
    if not isinstance(value, collections.abc.Sequence) and not (
        arguments[0] in (int, float) and (isinstance(value, collections.abc.Set) or _is_array(value))
    ):
        return False
    if isinstance(value, range):
        return acceptors[0](0)
    if arguments[0] is int and isinstance(value, (list, tuple)) and set(map(type, value)) == {int}:
        return True  # ranks of a large group; what follows takes a hundred times as long
    try:
        return all(map(acceptors[0], typing.cast(Iterable[object], value)))
    except TypeError:  # an array of no dimensions
        return False


def _is_array(value: object) -> bool:
    return hasattr(value, "tolist") and hasattr(value, "dtype") and hasattr(value, "shape")


def _converted(hint: Any, value: Any) -> Any:
    if hint is int:
        return operator.index(value)
    if hint is bool:
        return bool(value)
    if typing.get_origin(hint) in _LISTS and _is_array(value):
        return value.tolist()
    return value


def _words(hint: Any) -> str:
    """Return the words for an annotation in messages."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in _UNIONS:
        return " or ".join(map(_words, arguments))
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin is collections.abc.Callable:
        return "callable"
    if origin in _LISTS:
        return f"a list of {_plural(arguments[0])}"
    if origin in (dict, collections.abc.Mapping):
        return f"a dict of {_plural(arguments[0])} to {_plural(arguments[1])}"
    named: str = getattr(hint, "__name__", str(hint))
    if hint is type(None):
        return "None"
    return f"{'an' if named[0] in 'aeiouAEIO' else 'a'} {named}"


def _plural(hint: Any) -> str:
    if hint in (Any, object):
        return "anything"
    if typing.get_origin(hint) in _UNIONS:
        return " or ".join(map(_plural, typing.get_args(hint)))
    if typing.get_origin(hint) is not None:
        return f"lists of {_plural(typing.get_args(hint)[0])}"
    if hint is type(None):
        return "None"
    return f"{getattr(hint, '__name__', hint)}s"


class _Checker:
    """Check the arguments of one function; made from its annotations when it is first called."""

    def __init__(self, function: Callable[..., Any], but: frozenset[str]) -> None:
        self.name = function.__qualname__.removesuffix(".__init__")
        module = vars(sys.modules[function.__module__])
        parameters = inspect.signature(function).parameters.values()
        self.rules: dict[str, _Rule] = {}
        self.positional: list[tuple[str, _Rule]] = []
        self.rest: tuple[str, _Rule] | None = None
        for each in parameters:
            hint = Any if each.annotation is each.empty or each.name in but else each.annotation
            rule = _Rule(eval(hint, module) if isinstance(hint, str) else hint)
            if each.kind is each.VAR_POSITIONAL:
                self.rest = each.name, rule
            elif each.kind is not each.VAR_KEYWORD:
                self.rules[each.name] = rule
                if each.kind is not each.KEYWORD_ONLY:
                    self.positional.append((each.name, rule))

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Check a call's arguments; return the positional ones in the form for the function."""
        changed: list[Any] | None = None
        for index, value in enumerate(args):
            if index < len(self.positional):
                parameter, rule = self.positional[index]
            elif self.rest is not None:
                parameter, rule = self.rest
            else:
                break  # too many: the call itself says so
            if rule.anything or value.__class__ in rule.exact:
                continue
            taken = rule.taken(value, parameter, self.name)
            if taken is not value:
                changed = changed or list(args)
                changed[index] = taken
        for parameter, value in kwargs.items():
            named = self.rules.get(parameter)
            if named is not None and not named.anything and value.__class__ not in named.exact:
                kwargs[parameter] = named.taken(value, parameter, self.name)
        return args if changed is None else tuple(changed)


_preparations: list[Callable[[], _Checker]] = []
"""What reads the annotations of each checked function."""


def checked(function: Callable[_P, _R], but: Iterable[str] = ()) -> Callable[_P, _R]:
    """Have a function refuse arguments that its annotations do not allow, with InvalidArgumentTypeError.

    Args:
        function: the function.
        but: parameters that it checks itself.
    """
    checker: _Checker | None = None

    def prepare() -> _Checker:
        nonlocal checker
        checker = _Checker(function, frozenset(but))
        return checker

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return function(*(checker or prepare()).check(args, kwargs), **kwargs)

    _preparations.append(prepare)
    return call


def prepare_checks() -> None:
    """Read the annotations of all checked functions now, and not when each is first called."""
    for prepare in _preparations:
        prepare()


def checked_methods(owner: _Class) -> _Class:
    """Apply :func:`checked` to the constructor and all public methods that a class defines itself."""
    for name, value in list(vars(owner).items()):
        if inspect.isfunction(value) and (name == "__init__" or not name.startswith("_")):
            setattr(owner, name, checked(value))
    return owner
