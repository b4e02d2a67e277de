"""As ``torch.distributed.remote_device``."""

from __future__ import annotations

import torch

from torchestra.nn.remote_device import RemoteDevice

__all__ = ["_remote_device"]


class _remote_device:
    """A device of a worker: ``"<worker>/<device>"``, ``"rank:<rank>/<device>"`` or ``"<device>"``.

    Raises:
        ValueError: the text has another form.
    """

    def __init__(self, remote_device: str | torch.device) -> None:
        self._parsed = RemoteDevice.parse(remote_device)

    def worker_name(self) -> str | None:
        """Return the worker's name; None if it is not given by name."""
        return self._parsed.worker

    def rank(self) -> int | None:
        """Return the worker's rank; None if it is not given by rank."""
        return self._parsed.rank

    def device(self) -> torch.device:
        """Return the device there."""
        return self._parsed.device

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _remote_device) and self._parsed == other._parsed

    def __hash__(self) -> int:
        return hash(self._parsed)

    def __repr__(self) -> str:
        if self._parsed.worker is not None:
            return f"{self._parsed.worker}/{self._parsed.device}"
        if self._parsed.rank is not None:
            return f"rank:{self._parsed.rank}/{self._parsed.device}"
        return str(self._parsed.device)
