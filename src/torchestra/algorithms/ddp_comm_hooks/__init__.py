"""Alias of :mod:`torchestra.nn.parallel.comm_hooks`, by the place that torch has for it.

Each module is the one there, not a copy of it, so pickles made under either name can be read. (The modules
are found by name: this package is below ``nn``, and imports nothing of it.)
"""

import importlib
import sys

_HOME = "torchestra.nn.parallel.comm_hooks"
_MODULES = (
    "ddp_zero_hook",
    "debugging_hooks",
    "default_hooks",
    "optimizer_overlap_hooks",
    "post_localSGD_hook",
    "powerSGD_hook",
    "quantization_hooks",
)

for _name in _MODULES:
    sys.modules[f"{__name__}.{_name}"] = importlib.import_module(f"{_HOME}.{_name}")
sys.modules[__name__] = importlib.import_module(_HOME)
