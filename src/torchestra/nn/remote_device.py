"""Devices of other workers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchestra.errors import InvalidArgumentError, InvalidArgumentTypeError


@dataclass(frozen=True)
class RemoteDevice:
    """A device of a worker.

    Attributes:
        worker: the worker's name; None if it is given by its rank, or is this one.
        rank: its rank; None if it is given by its name, or is this one.
        device: the device there.
    """

    worker: str | None
    rank: int | None
    device: torch.device

    @classmethod
    def parse(cls, text: str | torch.device) -> RemoteDevice:
        """Parse ``"<worker>/<device>"``, ``"rank:<rank>/<device>"`` or ``"<device>"``.

        Without a device: the worker's CPU.

        Raises:
            InvalidArgumentError: it has none of these forms.
            RuntimeError: torch knows no such device.
        """
        if isinstance(text, torch.device):
            return cls(None, None, text)
        if not isinstance(text, str):
            raise InvalidArgumentTypeError(f"Invalid type for remote_device: {type(text)}")
        where, slash, device = text.partition("/")
        if not slash:
            try:
                return cls(None, None, torch.device(where))
            except RuntimeError:
                device = "cpu"
        prefix, colon, rank = where.partition(":")
        ranked = bool(colon) and prefix == "rank" and rank.isdigit()
        if not where or "/" in device or (colon and not ranked):
            raise InvalidArgumentError(
                f"Could not parse remote_device: {text}. The valid format is '<workername>/<device>' or"
                " 'rank:<rank>/<device>' or '<device>'"
            )
        device_there = torch.device(device)
        return cls(None, int(rank), device_there) if ranked else cls(where, None, device_there)

    def __str__(self) -> str:
        where = self.worker if self.rank is None else f"rank:{self.rank}"
        return str(self.device) if where is None else f"{where}/{self.device}"
