"""Alias of :mod:`torchestra.nn.parallel.comm_hooks`, under torch's name for it.

Each module is the same object, not a copy, so pickles made under either name can be read. (The modules are
imported by name: ``nn`` imports ``algorithms``, not the reverse.)
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
