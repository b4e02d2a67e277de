"""The workers that one of them knows, by number, name and rank."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from torchestra.arguments.annotations import refuse_type
from torchestra.errors import RpcError, RpcTimeoutError, shown
from torchestra.rpc.worker_info import WorkerInfo
from torchestra.system.deadline import Deadline

_KNOWN_SECONDS = 30.0
_PAUSE_SECONDS = 0.001


class Workers(list[WorkerInfo]):
    """All that have ever been workers of a group, by number.

    Workers are numbered by their ranks; where they join and leave, in the order in which they have joined,
    and no number is used twice.

    Attributes:
        numbers: of those that are workers now, by name.
    """

    def __init__(self, infos: Iterable[WorkerInfo]) -> None:
        super().__init__(infos)
        self.numbers = {info.name: number for number, info in enumerate(self)}

    def admit(self, info: WorkerInfo) -> None:
        """Enter a worker that has joined; it has the next number."""
        self.append(info)
        self.numbers[info.name] = len(self) - 1

    def mark_gone(self, number: int) -> None:
        """Strike out one that is no member any more: its name and rank stand for nobody, or another."""
        name = self[number].name
        if self.numbers.get(name) == number:
            del self.numbers[name]

    def current(self) -> list[int]:
        """Return the numbers of those that are workers now."""
        return sorted(self.numbers.copy().values())

    def number_of(self, to: Any) -> int | None:
        """Return the number of the worker that a name, a rank or a WorkerInfo means, if there is one."""
        if isinstance(to, (str, WorkerInfo)):
            return self.numbers.get(to if isinstance(to, str) else to.name)
        if not isinstance(to, int) or isinstance(to, bool):
            refuse_type("Cannot get WorkerInfo", "to", "a name, rank or WorkerInfo", to)
        if 0 <= to < len(self) and self[to].id == to == self.numbers.get(self[to].name):
            return to
        return next((each for each in self.current() if self[each].id == to), None)

    def nobody(self, to: Any) -> RpcError:
        """Return the error where no worker is meant by this."""
        there = ", ".join(f"{self[number].name!r} (rank {self[number].id})" for number in self.current())
        return RpcError(f"could not find destination worker {shown(to)}: the workers are {there}")

    def former_number_of(self, to: Any) -> int | None:
        """Return the number of the last worker that was meant by this, of those that are gone."""
        for number in range(len(self) - 1, -1, -1):
            if to in (self[number], self[number].name, self[number].id):
                return number
        return None

    def known(self, number: int) -> WorkerInfo:
        """Return the worker with a number that another worker has told; wait until it is known here.

        Raises:
            RpcTimeoutError: it did not become known in time.
        """
        if number >= len(self):
            deadline = Deadline(_KNOWN_SECONDS)
            while number >= len(self):
                if deadline.expired():
                    raise RpcTimeoutError(
                        f"another worker has named worker number {number}, but the store has not confirmed"
                        f" within {_KNOWN_SECONDS:g} s that it has joined"
                    )
                time.sleep(_PAUSE_SECONDS)
        return self[number]
