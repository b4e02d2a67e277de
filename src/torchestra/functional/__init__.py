"""Collectives that can be traced, compiled and differentiated.

    import torchestra.functional as funcol

    total = funcol.all_reduce(tensor, "sum", group)     # at once; ``tensor`` does not change
    y = x @ w                                           # meanwhile
    z = y + total                                       # waits

They are operators of torch (``torch.ops.torchestra.*``), so that ``make_fx``, ``torch.compile`` and
``torch.export`` see them.
"""

from __future__ import annotations

from torchestra.functional import collectives
from torchestra.functional import messages as messages
from torchestra.functional.asynchronous import AsyncCollectiveTensor
from torchestra.functional.collectives import *  # noqa: F403
from torchestra.functional.groups import Group, expand_group, find_or_make_group

__all__ = ["AsyncCollectiveTensor", "Group", "expand_group", "find_or_make_group"]
__all__ += collectives.__all__
