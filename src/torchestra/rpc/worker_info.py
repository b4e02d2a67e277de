"""Who a worker is: :class:`WorkerInfo`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchestra.errors import InvalidArgumentError

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
        if name == "":
            raise InvalidArgumentError("Worker name must be non-empty")
        if not isinstance(name, str) or not _CHARACTERS.fullmatch(name):
            raise InvalidArgumentError(f"Worker name must match ^[A-Za-z0-9-_:]*$, got {name!r}")
        if len(name) >= _LONGEST:
            raise InvalidArgumentError(
                f"Worker name must be shorter than {_LONGEST} characters, got {len(name)}: {name!r}"
            )

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"
