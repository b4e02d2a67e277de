"""The rename: what a program's text becomes so that it runs on torchestra. Nothing else is changed.

The tests' own helpers (fixtures, names of workers) are renamed along with the tests, into a package of the
name :data:`PACKAGE`.
"""

from __future__ import annotations

import re

PACKAGE = "renamed"

_INTERNAL = r"\btorch\.testing\._internal"
_RULES = [
    (rf"{_INTERNAL}\.common_distributed\b", "torchestra.compat.testing"),
    (rf"{_INTERNAL}\.distributed\.(?:multi_threaded_pg|fake_pg)\b", "torchestra.compat.testing"),
    (rf"{_INTERNAL}\.(distributed|dist_utils)\b", rf"{PACKAGE}.\1"),
    (r"\btorch\._C\._distributed_c10d\b", "torchestra.compat.distributed_c10d"),
    (r"\btorch\._C\._distributed_autograd\b", "torchestra.compat.autograd"),
    (r"\btorch\._C\._distributed_rpc\b", "torchestra.compat.rpc"),
    (r"\btorch\.distributed\b", "torchestra.compat"),
    (
        r"\bfrom torch\.autograd\.profiler_legacy import profile\b",
        "from torchestra.compat.profiler_legacy import profile",
    ),
    (r"\btorch\.futures\.(collect_all|wait_all)\b", r"torchestra.compat.futures.\1"),
    (r"\btorch\.nn\.parallel\.distributed\b", "torchestra.nn.parallel.distributed"),
    (
        r"\bfrom torch\.nn\.parallel import DistributedDataParallel\b",
        "from torchestra.nn.parallel import DistributedDataParallel",
    ),
    (
        r"(?<![\w.])(?:torch\.)?nn\.parallel\.DistributedDataParallel\b",
        "torchestra.nn.parallel.DistributedDataParallel",
    ),
    (r"(?<![\w.])(?:torch\.)?nn\.SyncBatchNorm\b", "torchestra.nn.SyncBatchNorm"),
]
"""Regular expressions and replacements, in this order."""

_BESIDE = r"(?m)^import torch$"


def renamed(text: str) -> str:
    """A module's text after the rename. Beside ``import torch`` it imports what it has come to name."""
    for pattern, replacement in _RULES:
        text = re.sub(pattern, replacement, text)
    roots = [
        name
        for name in ("torchestra.compat", "torchestra.compat.futures", "torchestra.nn.parallel", PACKAGE)
        if f"{name}." in text
    ]
    imports = "\n".join(f"import {name}" for name in roots)
    return re.sub(_BESIDE, f"import torch\n{imports}", text, count=1)
