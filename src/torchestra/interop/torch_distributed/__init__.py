"""Torchestra as a backend of torch.distributed: ``init_process_group("torchestra")``.

Importing this registers the backend, unless torch has done so by itself (``torch.backends`` entry points are
loaded by ``import torch``). Then PyTorch's own DistributedDataParallel, FSDP, DTensor, checkpoints and
functional collectives run on torchestra's engine, as does whatever else is written for torch.distributed.
See docs/interop.md.
"""

from __future__ import annotations

from torchestra.interop.registration import BACKEND, register_backend
from torchestra.interop.torch_distributed.adoption import adopt, use
from torchestra.interop.torch_distributed.functions import serve_functions
from torchestra.interop.torch_distributed.group import TorchestraGroup, create_group
from torchestra.interop.torch_distributed.inner import inner_group, monitored_barrier
from torchestra.interop.torch_distributed.works import TorchestraWork

__all__ = [
    "BACKEND",
    "TorchestraGroup",
    "TorchestraWork",
    "adopt",
    "inner_group",
    "monitored_barrier",
    "register",
    "use",
]


def register() -> None:
    """Make ``"torchestra"`` known to torch.distributed as a backend, as importing this module does.

    It serves tensors of the CPU, and those of CUDA where torch has that (through pinned memory). What other
    backends are the default for stays with them.
    """
    register_backend(create_group)
    serve_functions()


register()
