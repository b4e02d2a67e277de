"""Torchestra as a backend of torch.distributed: ``init_process_group("torchestra")``.

Importing this registers the backend, unless torch has done so by itself (``torch.backends`` entry points are
loaded by ``import torch``). Then PyTorch's own DistributedDataParallel, FSDP, DTensor, checkpoints and
functional collectives run on torchestra's engine, as do other libraries written for torch.distributed.
See docs/interop.md.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from torchestra.interop.registration import BACKEND, register_backend
from torchestra.interop.torch_distributed.adoption import adopt, use
from torchestra.interop.torch_distributed.functions import serve_functions
from torchestra.interop.torch_distributed.group import TorchestraGroup, create_group
from torchestra.interop.torch_distributed.inner import inner_group, monitored_barrier
from torchestra.interop.torch_distributed.plain_calls import serve_plain_calls
from torchestra.interop.torch_distributed.traced_messages import serve_batches
from torchestra.interop.torch_distributed.works import TorchestraWork

__all__ = [
    "BACKEND",
    "TorchestraGroup",
    "TorchestraWork",
    "adopt",
    "debug_handlers",
    "inner_group",
    "monitored_barrier",
    "register",
    "use",
]


def register() -> None:
    """Register ``"torchestra"`` as a backend of torch.distributed, as importing this module does.

    It serves CPU tensors, and CUDA tensors where torch has CUDA (through pinned memory). The default backends
    of all devices stay unchanged.
    """
    register_backend(create_group)
    serve_functions()
    serve_plain_calls()
    serve_batches()


def debug_handlers() -> list[Any]:
    """Return the pages of torch's debug server, and one more: torchestra's operations on this host.

    They are for ``torch.distributed.debug.start_debug_server(handlers=...)``, on every rank; rank 0's are
    shown. The page reads the flight records of rank 0's host from outside, also while the ranks hang.

    Raises:
        ImportError: what torch's own pages need is not installed: Jinja2 and tabulate. Or torch's debug
            server takes no pages (torch 2.10).
    """
    from torch.distributed.debug import start_debug_server

    if "handlers" not in inspect.signature(start_debug_server).parameters:
        raise ImportError(
            f"the debug server of torch {torch.__version__} takes no pages of others: take a newer torch, or"
            " read the records from outside with `torchestra report`"
        )
    from torchestra.interop.torch_distributed import debug_page

    return debug_page.pages()


register()
