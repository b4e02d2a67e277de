"""Windows in the form of torch.distributed, which has them since 2.14."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from torchestra.collectives.windows import Window
from torchestra.communicator.work import Work
from torchestra.errors import DistError
from torchestra.interop.torch_distributed.errors import as_torch_error
from torchestra.interop.torch_distributed.works import TorchestraWork
from torchestra.process_group import ProcessGroup

_TORCHS: Any = getattr(c10d, "Window", None)
_UNSET = timedelta(milliseconds=-1)


class TorchestraWindow:
    """A ``torch.distributed.Window``; see :class:`torchestra.collectives.windows.Window`.

    Works are returned with and without ``async_op``: without, they are done.
    """

    def __init__(self, group: ProcessGroup, tensor: torch.Tensor | None = None) -> None:
        self._window: Window = _as_torch(Window, tensor, group)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class that ``isinstance`` also accepts."""
        return TorchestraWindow if _TORCHS is None else _TORCHS

    def tensor_register(self, tensor: torch.Tensor, owning: bool = True) -> None:
        """See :meth:`Window.tensor_register`."""
        _as_torch(self._window.tensor_register, tensor, owning)

    def tensor_deregister(self) -> None:
        """See :meth:`Window.tensor_deregister`."""
        _as_torch(self._window.tensor_deregister)

    def put(
        self,
        tensor: torch.Tensor,
        dst_rank: int,
        target_offset_nelems: int,
        async_op: bool,
        opts: Any = None,
    ) -> Any:
        """See :meth:`Window.put`."""
        work = _as_torch(self._window.put, tensor, dst_rank, target_offset_nelems, True)
        return _waited(work, async_op, opts)

    def map_remote_tensor(self, rank: int) -> torch.Tensor:
        """See :meth:`Window.map_remote_tensor`."""
        mapped: torch.Tensor = _as_torch(self._window.map_remote_tensor, rank)
        return mapped

    def signal(self, peer_rank: int, async_op: bool, opts: Any = None) -> Any:
        """See :meth:`Window.signal`."""
        return _waited(_as_torch(self._window.signal, peer_rank, True), async_op, opts)

    def wait_signal(self, peer_rank: int, async_op: bool, opts: Any = None) -> Any:
        """See :meth:`Window.wait_signal`."""
        return _waited(_as_torch(self._window.wait_signal, peer_rank, True), async_op, opts)

    def get_attr(self, peer_rank: int) -> Any:
        """Return the memory model: what is put is in the rank's own memory, not in a copy of it."""
        _as_torch(self._window.check_peer, peer_rank, "get_attr")
        return c10d.WindowAttr()  # type: ignore[attr-defined]


def _as_torch(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; its errors become torch's."""
    try:
        return function(*arguments)
    except DistError as error:
        raise as_torch_error(error) from error.__cause__


def _waited(work: Work, async_op: bool, opts: Any) -> TorchestraWork:
    made = TorchestraWork(work)
    if not async_op:
        given = getattr(opts, "timeout", _UNSET)
        made.wait(None if given == _UNSET else given)
    return made
