"""The modules of torch.distributed whose own code serves renamed programs, on groups of torchestra.

FSDP, DTensor, checkpoints and pipelining are torch's. They use torch.distributed's default group; so, where a
program imports one of them, torchestra's default group becomes that too (``interop.adopt``). They use torch's
meshes.
"""

from __future__ import annotations

from torchestra.interop.switch import turn_on
from torchestra.interop.torch_distributed.adoption import adopt
from torchestra.world.registry import current_world

__all__ = ["need_world", "world_was_made"]

_needed = False


def need_world() -> None:
    """Make torchestra's default group torch.distributed's too: the present one, and any made later.

    A program's imports of such modules call this.
    """
    global _needed
    _needed = True
    turn_on(telling=False)  # so that torch's code makes its groups of "gloo" on torchestra as well
    if current_world().default is not None:
        adopt()


def world_was_made() -> None:
    """Adopt the default group that the program has made, if its modules need that."""
    if _needed:
        adopt()
