"""The identity of a worker: :class:`WorkerInfo`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchestra.arguments.annotations import check_integer
from torchestra.errors import InvalidArgumentError, shown

_CHARACTERS = re.compile(r"[\w:-]*", re.ASCII)
_LONGEST = 128


@dataclass(frozen=True)
class WorkerInfo:
    """A worker.

    Attributes:
        name: as given to ``init_rpc``: letters, digits, underscore, colon and dash, shorter than 128.
        id: its rank.

    Raises:
        InvalidArgumentError: no worker can have that name.
    """

    name: str
    id: int

    def __post_init__(self) -> None:
        name = self.name
        if isinstance(name, str) and not name:
            raise InvalidArgumentError(f"WorkerInfo: `name`: Worker name must be non-empty, got {name!r}")
        if not isinstance(name, str) or not _CHARACTERS.fullmatch(name):
            raise InvalidArgumentError(
                f"WorkerInfo: `name`: Worker name must match ^[A-Za-z0-9-_:]*$, got {shown(name)}"
            )
        if len(name) >= _LONGEST:
            raise InvalidArgumentError(
                f"WorkerInfo: `name`: Worker name must be shorter than {_LONGEST} characters, got"
                f" {len(name)}: {shown(name)}"
            )
        object.__setattr__(self, "id", check_integer(self.id, "id", "WorkerInfo"))

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"
