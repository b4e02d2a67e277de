"""Distributed autograd: gradients through calls to other workers.

    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", model, args=(inputs,)).sum()
        autograd.backward(context_id, [loss])
        gradients = autograd.get_gradients(context_id)  # of this worker's parameters

The names are those of torch.distributed.autograd. See docs/autograd.md.
"""

from torchestra.autograd.api import backward, context, debug_info, get_gradients, is_available
from torchestra.autograd.contexts import Context as DistAutogradContext

__all__ = ["DistAutogradContext", "backward", "context", "debug_info", "get_gradients", "is_available"]
