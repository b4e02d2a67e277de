"""The calls that programs of simulated RPC workers make."""

from __future__ import annotations


class DeliberateError(Exception):
    """Raised by a function that is called to fail."""


class Call:
    """A call that a program makes.

    Attributes:
        by, to: the ranks of the caller and of the worker called.
        what: the function's name.
        may_time_out: its time-out is short.
        executed, ended: how often.
    """

    executed = ended = 0

    def __init__(self, by: int, to: int, what: str, may_time_out: bool) -> None:
        self.by, self.to, self.what, self.may_time_out = by, to, what, may_time_out

    def __str__(self) -> str:
        return f"the call of {self.what} on rank {self.to} from rank {self.by}"
