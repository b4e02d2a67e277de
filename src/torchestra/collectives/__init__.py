"""The operations on the default group or a given one: tensors, objects, and several as one."""

from __future__ import annotations

from torchestra.collectives import functions, persistent, shared_tensors, sharing
from torchestra.collectives.functions import *  # noqa: F403
from torchestra.collectives.persistent import *  # noqa: F403
from torchestra.collectives.shared_tensors import *  # noqa: F403
from torchestra.collectives.sharing import *  # noqa: F403

__all__: list[str] = []
__all__ += functions.__all__
__all__ += persistent.__all__
__all__ += shared_tensors.__all__
__all__ += sharing.__all__
