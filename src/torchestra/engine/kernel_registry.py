"""List the kernels, and the sources of the object file."""

from __future__ import annotations

from torchestra.engine.entries import collectives, lists, messages, persistent
from torchestra.engine.kernels import blocks, checksum, copies, doorbell, move, prefix, reduce, shared_words
from torchestra.engine.native.declarations import Intrinsic, KernelSource
from torchestra.engine.native.kernel import declared
from torchestra.engine.native.target import Target
from torchestra.engine.p2p import endpoint_kernels, immediate, kernels
from torchestra.engine.recorder import message_records, spans

# Importing them declares their kernels, and those that they call.
_MODULES = (
    blocks,
    checksum,
    collectives,
    copies,
    doorbell,
    endpoint_kernels,
    immediate,
    kernels,
    lists,
    message_records,
    spans,
    messages,
    move,
    persistent,
    prefix,
    reduce,
    shared_words,
)


def kernels_of_engine() -> list[KernelSource | Intrinsic]:
    """Return what Python can call: intrinsic operations, and kernels not private to a module."""
    return [each for each in declared() if isinstance(each, Intrinsic) or not each.is_private]


def build(target: Target | None = None) -> bytes:
    """Compile all kernels, reductions and the allocator; return the object file.

    Args:
        target: the processor; default: that of this process.
    """
    from torchestra.engine.kernels.allocator_code import write_allocator
    from torchestra.engine.kernels.reduction_code import write_reductions
    from torchestra.engine.native.compiler import Program

    target = target or Target.host()
    program = Program(target.machine)
    for each in kernels_of_engine():
        program.add(each)
    write_reductions(program.module, target)
    write_allocator(program)
    return target.compile(str(program.module))
