"""Messages that ``torch.compile`` has traced (``TORCHDYNAMO_ENABLE_P2P_COMPILATION=1``), between CPUs.

The operator for a batch of them asks the group's C++ backend to coalesce, and a group of torchestra has none.
Here a batch is one operator a message instead, which serves groups of all backends: none coalesces messages
between CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_OPERATORS = torch.ops._c10d_functional
_NAME = "batch_p2p_ops"

# Torch keeps the implementation for as long as this lives.
_library = torch.library.Library("_c10d_functional", "IMPL")


def serve_batches() -> None:
    """Have batches of traced messages served, where this torch has the operator."""
    operator = getattr(_OPERATORS, _NAME, None)
    if operator is not None and not operator.default.has_kernel_for_dispatch_key(torch._C.DispatchKey.CPU):
        _library.impl(_NAME, _begin_batch, "CPU")


def _begin_batch(
    op_list: Sequence[str],
    peer_list: Sequence[int],
    tag_list: Sequence[int],
    tensors: Sequence[torch.Tensor],
    group_name: str,
) -> list[torch.Tensor]:
    """Begin all messages; what is returned for each is to be waited for by ``wait_tensor``."""
    begin = {"isend": _OPERATORS.isend, "irecv": _OPERATORS.irecv}
    messages = zip(op_list, tensors, peer_list, tag_list, strict=True)
    return [begin[op](tensor, peer, tag, group_name) for op, tensor, peer, tag in messages]
