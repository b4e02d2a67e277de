"""Torchestra: distributed PyTorch in plain Python. ``import torchestra as dist``.

The public names stand in ``__init__.pyi``. Each is loaded when it is first used: the command line needs no
torch.
"""

import lazy_loader

from torchestra.system.missing_names import with_advice
from torchestra.system.module_aliases import AliasFinder
from torchestra.system.quick_import import without_collection

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__getattr__ = with_advice(__name__, __file__, without_collection(_load))

AliasFinder({"torchestra.options": {"torchestra.arguments.options": "*"}}).install()  # as it was called

__version__ = "0.1.0"
