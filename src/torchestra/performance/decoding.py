"""Dataclasses as JSON, and back with checks that name the field."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from torchestra.errors import InvalidArgumentError


def encode(value: Any) -> Any:
    """Return what ``json`` can write: dataclasses and mappings as objects, tuples as lists."""
    if is_dataclass(value):
        return {each.name: encode(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {key: encode(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [encode(each) for each in value]
    return value


def decode(kind: Any, value: Any, where: str = "") -> Any:
    """Return a value of a type, from what ``json`` has read.

    Args:
        kind: a dataclass, ``tuple[T, ...]``, ``Mapping[str, T]``, ``T | None``, int, float, bool or str.
        where: the name of the field, for errors.

    Raises:
        InvalidArgumentError: a key is unknown or missing, or a value is not of its type; a dataclass may
            refuse more.
    """
    if is_dataclass(kind):
        return _decode_record(kind, value, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        (inner,) = (each for each in arguments if each is not type(None))
        return None if value is None else decode(inner, value, where)
    if origin is tuple:
        _expect(isinstance(value, list), "a list", value, where)
        return tuple(decode(arguments[0], each, f"{where}[{at}]") for at, each in enumerate(value))
    if origin is Mapping:
        _expect(isinstance(value, dict), "an object", value, where)
        return {key: decode(arguments[1], each, f"{where}.{key}") for key, each in value.items()}
    if kind is float:
        _expect(type(value) in (int, float), "a number", value, where)
        return float(value)
    _expect(
        type(value) is kind, {int: "a whole number", str: "a text"}.get(kind, kind.__name__), value, where
    )
    return value


def _decode_record(kind: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), "an object", value, where)
    hints = get_type_hints(kind)
    if unknown := sorted(set(value) - set(hints)):
        known = ", ".join(hints)
        raise InvalidArgumentError(f"unknown field {_name(where, unknown[0])}; known there are {known}")
    found = {}
    for each in fields(kind):
        name = _name(where, each.name)
        if each.name in value:
            found[each.name] = decode(hints[each.name], value[each.name], name)
        elif each.default is MISSING and each.default_factory is MISSING:
            raise InvalidArgumentError(f"the field {name} is missing")
    try:
        return kind(**found)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{where or 'the top'}: {error}") from error


def _expect(holds: bool, what: str, value: Any, where: str) -> None:
    if not holds:
        raise InvalidArgumentError(f"{where or 'the top'} must be {what}, got {value!r:.60}")


def _name(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
