"""Torchestra as a backend of torch.distributed: ``init_process_group("torchestra")``.

Importing this registers the backend, unless torch has done so by itself (``torch.backends`` entry points are
loaded by ``import torch``). Then PyTorch's own DistributedDataParallel, FSDP, DTensor, checkpoints and
functional collectives run on torchestra's engine, as do other libraries written for torch.distributed.
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
    """Register ``"torchestra"`` as a backend of torch.distributed, as importing this module does.

    It serves CPU tensors, and CUDA tensors where torch has CUDA (through pinned memory). The default backends
    of all devices stay unchanged.
    """
    register_backend(create_group)
    serve_functions()


register()
