"""The small public types that the whole package uses: reduce operations and time-outs."""

from __future__ import annotations

import numbers
from datetime import timedelta
from typing import Any, ClassVar, Union

from torchestra.errors import InvalidArgumentError, InvalidArgumentTypeError, shown

DEFAULT_TIMEOUT = timedelta(minutes=30)
"""How long an operation of a group may wait for the other ranks unless the caller gives a time-out."""

Timeout = Union[timedelta, float, int]
"""A :class:`datetime.timedelta`, or a number of seconds."""


LONGEST_TIMEOUT = 1e9
"""The longest accepted time-out in seconds, about 31 years: every clock and system call can represent it."""


def timeout_seconds(timeout: Timeout, name: str = "", parameter: str = "timeout") -> float:
    """Return the duration in seconds.

    Args:
        timeout: the duration.
        name, parameter: the function and its parameter, for error messages.

    Raises:
        InvalidArgumentTypeError: the duration is neither a timedelta nor a number.
        InvalidArgumentError: it is negative, NaN, or above :data:`LONGEST_TIMEOUT`.
    """
    seconds: float
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    elif isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        raise InvalidArgumentTypeError(
            f"{_told(name, parameter)}Expected {parameter} argument to be of type datetime.timedelta, or a"
            f" number of seconds, got {shown(timeout)}"
        )
    else:
        seconds = timeout
    if 0 <= seconds <= LONGEST_TIMEOUT:
        return float(seconds)
    if seconds > LONGEST_TIMEOUT:
        raise InvalidArgumentError(
            f"{_told(name, parameter)}{parameter} must be at most {LONGEST_TIMEOUT:g} seconds, got"
            f" {shown(timeout)}"
        )
    raise InvalidArgumentError(
        f"{_told(name, parameter)}{parameter} must not be negative, got {shown(timeout)}"
    )


def _told(name: str, parameter: str) -> str:
    return f"{name}: " if name else ""


class ReduceOp:
    """An operation that combines the values of the ranks, element by element.

    ``SUM``, ``AVG`` (the sum divided by the number of ranks), ``PRODUCT``, ``MIN``, ``MAX``, and for
    integers and bool the bitwise ``BAND``, ``BOR``, ``BXOR``. :meth:`premul_sum` makes a sum in which
    this rank's values are first multiplied by a factor (torch's PREMUL_SUM).

    The operations are values: they compare, hash and pickle by name (and factor). ``ReduceOp(op)`` is a copy.
    """

    __slots__ = ("code", "factor", "name")

    SUM: ClassVar[ReduceOp]
    AVG: ClassVar[ReduceOp]
    PRODUCT: ClassVar[ReduceOp]
    MIN: ClassVar[ReduceOp]
    MAX: ClassVar[ReduceOp]
    BAND: ClassVar[ReduceOp]
    BOR: ClassVar[ReduceOp]
    BXOR: ClassVar[ReduceOp]
    PREMUL_SUM: ClassVar[ReduceOp]
    RedOpType: ClassVar[type[ReduceOp]]
    """torch's name for the type of ``ReduceOp.SUM``; here that is ReduceOp itself."""

    name: str
    code: int
    factor: float | None

    _NAMES: ClassVar[tuple[str, ...]] = (
        "SUM",
        "AVG",
        "PRODUCT",
        "MIN",
        "MAX",
        "BAND",
        "BOR",
        "BXOR",
        "PREMUL_SUM",
    )

    def __init__(self, name: str | ReduceOp, factor: float | None = None) -> None:
        if isinstance(name, ReduceOp):
            factor = name.factor
            name = name.name
        if not isinstance(name, str) or name not in self._NAMES:
            raise InvalidArgumentError(
                f"ReduceOp: `name`: unknown reduce operation {shown(name)}; known are"
                f" {', '.join(self._NAMES)}"
            )
        if factor is not None and (isinstance(factor, bool) or not isinstance(factor, numbers.Real)):
            raise InvalidArgumentTypeError(f"ReduceOp: `factor` must be a number, got {shown(factor)}")
        self.name = name
        self.code = self._NAMES.index(name)
        self.factor = factor

    @classmethod
    def premul_sum(cls, factor: float) -> ReduceOp:
        """Return a sum in which this rank's values are multiplied by ``factor`` before they are added."""
        if isinstance(factor, bool) or not isinstance(factor, numbers.Real):
            raise InvalidArgumentTypeError(
                f"ReduceOp.premul_sum: `factor` must be a number, got {shown(factor)}"
            )
        return cls("PREMUL_SUM", float(factor))

    def __call__(self, factor: float) -> ReduceOp:
        """Return ``premul_sum(factor)`` for ``ReduceOp.PREMUL_SUM``; other operations take no factor."""
        if self.name != "PREMUL_SUM":
            raise InvalidArgumentTypeError(f"{self!r} takes no factor, got {shown(factor)}; PREMUL_SUM does")
        return ReduceOp.premul_sum(factor)

    @property
    def op(self) -> ReduceOp:
        """Return the operation without its factor."""
        return ReduceOp(self.name)

    @property
    def value(self) -> int:
        """Return torch's number for the operation, from 0 (SUM) to 8 (PREMUL_SUM)."""
        return self.code

    def __index__(self) -> int:
        return self.code

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ReduceOp):
            return NotImplemented
        return self.code == other.code and self.factor == other.factor

    def __hash__(self) -> int:
        return hash((self.code, self.factor))

    def __repr__(self) -> str:
        return f"ReduceOp.{self.name}" if self.factor is None else f"ReduceOp.premul_sum({self.factor})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ReduceOp, (self.name, self.factor)


for _name in ReduceOp._NAMES:
    setattr(ReduceOp, _name, ReduceOp(_name))
ReduceOp.RedOpType = ReduceOp
